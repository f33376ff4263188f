"""What a call is to its loop is told by one function of the moment, without a model or a loop."""

from itertools import product

from hookcb.loops.calls import Call, Habits, Now, classify
from hookcb.loops.stages import AFTER_BACKWARD, BEFORE_BACKWARD, Stage
from tests.support import in_turn

TRAINING = Now(
    trains=True,
    in_train_mode=True,
    in_backward=False,
    is_open=False,
    stage=Stage.IDLE,
    is_stepped=False,
    has_optimizer=True,
    step=None,
)
LOOKING = TRAINING._replace(trains=False, in_train_mode=False)  # in eval mode without gradients
FORWARD = {"is_open": True, "stage": Stage.FORWARD}
BACKWARD = {"is_open": True, "stage": Stage.BACKWARD, "in_backward": True}
GRADIENTS = {"is_open": True, "stage": Stage.GRADIENTS}
STEP = {"is_open": True, "stage": Stage.STEP}
LEFT = Habits(left_in={Stage.FORWARD, Stage.GRADIENTS})

TABLE = {
    "the first call": (TRAINING, Habits(), Call.TRAIN),
    "a second call before the backward": (TRAINING._replace(**FORWARD), Habits(), Call.CONTINUE),
    "a call after the backward": (TRAINING._replace(**GRADIENTS), Habits(), Call.TRAIN),
    "a call after a step without a backward": (
        TRAINING._replace(**FORWARD, is_stepped=True),
        Habits(),
        Call.TRAIN,
    ),
    "a call after one aside": (TRAINING._replace(**FORWARD), Habits(looks_aside=True), Call.TRAIN),
    "that, where both have had one backward": (
        TRAINING._replace(**FORWARD),
        Habits(looks_aside=True, spans_asides=True),
        Call.CONTINUE,
    ),
    "without gradients in train mode": (TRAINING._replace(trains=False), Habits(), Call.ASIDE),
    "that, in a batch": (TRAINING._replace(trains=False, **GRADIENTS), LEFT, Call.ASIDE),
    "a validation": (LOOKING, Habits(), Call.VALIDATE),
    "in eval mode before the backward": (LOOKING._replace(**FORWARD), Habits(), Call.ASIDE),
    "that, of a loop that leaves batches there": (LOOKING._replace(**FORWARD), LEFT, Call.VALIDATE),
    "in eval mode before the step": (LOOKING._replace(**GRADIENTS), Habits(), Call.ASIDE),
    "that, where no optimizer is known": (
        LOOKING._replace(**GRADIENTS, has_optimizer=False),
        Habits(),
        Call.VALIDATE,
    ),
    "that, of a loop that accumulates": (LOOKING._replace(**GRADIENTS), LEFT, Call.VALIDATE),
    "in eval mode after the step of one of two optimizers": (
        LOOKING._replace(**GRADIENTS, is_stepped=True),
        Habits(),
        Call.VALIDATE,
    ),
    "a checkpoint in the backward": (TRAINING._replace(**BACKWARD), Habits(), Call.RECOMPUTE),
    "a checkpoint of a model in eval mode": (LOOKING._replace(**BACKWARD), Habits(), Call.RECOMPUTE),
    "the closure of a step": (TRAINING._replace(**STEP, step="closure"), Habits(), Call.CONTINUE),
    "the closure of a step that nothing preceded": (TRAINING._replace(step="closure"), Habits(), Call.TRAIN),
    "an evaluation of LBFGS": (TRAINING._replace(**GRADIENTS, step="lbfgs"), Habits(), Call.TRAIN),
    "a second call in it": (TRAINING._replace(**FORWARD, step="lbfgs"), Habits(), Call.CONTINUE),
}


@in_turn("case", TABLE)
def test_what_a_call_is(case):
    now, habits, expected = TABLE[case]
    assert classify(now, habits) is expected


def moments():
    flags = [False, True]
    for stage, step, *others in product(Stage, [None, "closure", "lbfgs"], *[flags] * 5):
        trains, in_train_mode, in_backward, is_stepped, has_optimizer = others
        is_open = stage is not Stage.IDLE
        yield Now(trains, in_train_mode, in_backward, is_open, stage, is_stepped, has_optimizer, step)


HABITS = [
    Habits(left, looks, spans)
    for left, looks, spans in product(
        [set(), {Stage.FORWARD}, {Stage.GRADIENTS}], [False, True], [False, True]
    )
]


def test_of_every_moment_it_is_consistent():
    for now, habits in product(moments(), HABITS):
        call = classify(now, habits)
        assert (call in (Call.TRAIN, Call.CONTINUE)) <= now.trains
        assert (call in (Call.VALIDATE, Call.ASIDE)) <= (not now.trains)
        assert (call is Call.CONTINUE) <= now.is_open  # there is something to go on with
        assert (call is Call.RECOMPUTE) <= (now.in_backward and now.stage not in AFTER_BACKWARD)
        if now.is_waiting and now.trains and not now.in_backward and not habits.looks_aside:
            assert call is Call.CONTINUE
        if call is Call.ASIDE and not now.in_train_mode:
            assert now.stage in (*BEFORE_BACKWARD, Stage.GRADIENTS)
