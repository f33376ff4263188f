"""A resumed fit ends, to the bit, as one that never stopped; and refuses what it cannot go on from."""

import contextlib
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from hookcb import (
    ActivationStats,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
)
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.clip import GradientClip
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.ema import EMA
from hookcb.training.schedules.one_cycle import OneCycle
from hookcb.training.schedules.plateau import ReduceLROnPlateau
from hookcb.training.schedules.schedule import Schedule
from hookcb.training.schedules.warmup_cosine import WarmupCosine
from tests.support import EVENTS, fit
from tests.training.checkpoint.support import (
    Net,
    Stop,
    acting,
    check_resumes,
    differing,
    go_on,
    learner,
    outcome,
    raising,
    train,
)

adam, sgd = torch.optim.Adam, torch.optim.SGD
OPTIMIZERS = {
    "SGD with momentum": partial(sgd, momentum=0.9, weight_decay=0.01, nesterov=True),
    "AdamW": torch.optim.AdamW,
    "Adam with amsgrad": partial(adam, amsgrad=True),
    "fused Adam": partial(adam, fused=True),
    "Adam with its rate in a tensor": lambda params, lr: adam(params, lr=torch.tensor(lr)),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "several groups": lambda params, lr: sgd(
        [{"params": params[:2], "lr": lr / 10}, {"params": params[2:], "momentum": 0.9}], lr=lr
    ),
}


def sometimes(event, error, each=3):
    """Cancels at every third batch of the fit."""

    def act(cb):
        if cb.train_iter % each == 1:
            raise error

    cb = Callback(name="sometimes", **{event: act})
    cb.run_valid = False
    return cb


def growing(cb):
    cb.learn.loss = cb.learn.loss * (1e6 if cb.train_iter in (2, 7) else 1)


CALLBACKS = {
    "nothing else": list,
    "accumulation": lambda: [GradientAccumulation(3)],
    "an average": lambda: [EMA(0.9)],
    "bfloat16": lambda: [MixedPrecision()],
    "float16": lambda: [MixedPrecision("fp16", init_scale=2.0**10, growth_interval=3)],
    "float16 that overflows": lambda: [
        MixedPrecision("fp16", init_scale=2.0**40, growth_interval=2),
        Callback(name="growing", before_backward=growing),
    ],
    "one cycle": lambda: [OneCycle(0.1)],
    "warm-up": lambda: [WarmupCosine(3)],
    "steps per epoch": lambda: [Schedule(partial(StepLR, step_size=2, gamma=0.5), per="epoch")],
    "steps per batch": lambda: [Schedule(partial(StepLR, step_size=3, gamma=0.5))],
    "a plateau": lambda: [ReduceLROnPlateau(min_delta=10.0, factor=0.5)],
    "clipping": lambda: [GradientClip(0.5)],
    "statistics of layers": lambda: [ActivationStats(include_paramless=True, on_valid=True)],
    "statistics now and then": lambda: [ActivationStats(every=2, with_hist=True)],
    "all together": lambda: [
        MixedPrecision("fp16", init_scale=2.0**20, growth_interval=2),
        GradientAccumulation(3),
        GradientClip(0.5),
        EMA(0.9),
        OneCycle(0.1),
        EarlyStopping(patience=9),
    ],
    "batches left out": lambda: [sometimes("before_batch", CancelBatchException)],
    "batches cut short": lambda: [sometimes("before_step", CancelBatchException)],
    "steps left out": lambda: [sometimes("before_step", CancelStepException)],
    "backwards left out": lambda: [sometimes("before_backward", CancelBackwardException)],
}


# ---- from any batch and any epoch


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_fit_ends_as_an_uninterrupted_one_with(name, tmp_path):
    check_resumes(lambda: learner(opt_func=OPTIMIZERS[name]), tmp_path)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_resumed_fit_ends_as_an_uninterrupted_one_under(name, tmp_path):
    momentum = partial(sgd, momentum=0.9)
    check_resumes(lambda: learner(cbs=CALLBACKS[name](), opt_func=momentum), tmp_path, n_epoch=4)


@pytest.mark.filterwarnings("ignore:nothing left to train")
def test_a_fit_of_epochs_cut_short_is_resumed_where_it_was(tmp_path):
    def short():
        cut = sometimes("before_batch", CancelTrainException())
        return learner(cbs=cut)

    whole = outcome(train(short, 3))
    saving = Checkpoint(tmp_path, every=1, keep=100)
    train(short, 3, saving)
    for file in saving.files:
        assert differing(whole, outcome(go_on(short, 3, resume=file))) == [], file.name


def test_early_stopping_counts_its_patience_over_the_interruption(tmp_path):
    def make():
        scores = Callback(name="scores", after_epoch=lambda cb: cb.learn.row.update(score=-cb.epoch))
        return learner(cbs=[EarlyStopping("score", patience=4), scores])

    whole = outcome(train(make, 9))
    assert len(whole["rows"]) == 5
    for n_done in (1, 2, 3, 4):
        train(make, n_done, Checkpoint(tmp_path / str(n_done)))
        resumed = go_on(make, 9, Checkpoint(tmp_path / str(n_done)), resume="latest")
        assert differing(whole, outcome(resumed)) == []


def test_a_frozen_layer_and_ready_optimizer_are_resumed(tmp_path):
    def make():
        model = Net()
        model.stem.requires_grad_(False)
        return learner(model=model, opt_func=sgd([*model.head.parameters()], lr=0.1, momentum=0.9))

    check_resumes(make, tmp_path)


@pytest.mark.filterwarnings("ignore:nothing left to train")
@pytest.mark.parametrize("error", [Stop, CancelFitException])
@pytest.mark.parametrize("order", [0, 1000])
@pytest.mark.parametrize("event", [event for event in EVENTS if "cancel" not in event])
def test_a_fit_that_ends_at_any_event_is_resumed(tmp_path, event, order, error):
    with contextlib.suppress(Stop):
        train(learner, 2, Checkpoint(tmp_path, every=2), acting(event, raising(error()), k=1, order=order))
    there = any(tmp_path.glob("epoch-*.pt"))
    resumed = train(learner, 2, Checkpoint(tmp_path), resume="latest", seed=99 if there else 0)
    assert differing(outcome(train(learner, 2)), outcome(resumed)) == []


def test_a_crash_is_resumed_from_the_last_file(tmp_path):
    whole = outcome(train(learner, 3))
    for k in (1, 5, 8):
        folder = tmp_path / str(k)
        with pytest.raises(Stop):
            train(learner, 3, Checkpoint(folder, every=2), acting("after_loss", raising(Stop()), k=k * 2))
        resumed = go_on(learner, 3, Checkpoint(folder), resume="latest")
        assert differing(whole, outcome(resumed)) == []


def test_many_interruptions_are_as_none(tmp_path):
    whole = outcome(train(learner, 4))
    for k in range(6):
        stop = acting("after_batch", raising(CancelFitException()), k=2)
        stop.run_valid = False
        train(learner, 4, Checkpoint(tmp_path), stop, resume="latest", seed=k)
    resumed = go_on(learner, 4, Checkpoint(tmp_path), resume="latest")
    assert differing(whole, outcome(resumed)) == []


def test_the_same_learner_goes_on_after_it_was_stopped(tmp_path):
    whole = outcome(train(learner, 3))
    stopped = train(
        learner, 3, Checkpoint(tmp_path), acting("after_batch", raising(CancelFitException()), k=9)
    )
    fit(stopped, 3, cbs=Checkpoint(tmp_path), resume="latest")
    assert differing(whole, outcome(stopped)) == []


def test_more_epochs_can_be_added(tmp_path):
    train(learner, 2, Checkpoint(tmp_path))
    resumed = go_on(learner, 5, Checkpoint(tmp_path), resume="latest")
    assert differing(outcome(train(learner, 5)), outcome(resumed)) == []
    assert [row["epoch"] for row in resumed.recorder.rows] == [0, 1, 2, 3, 4]


def test_a_fit_that_was_done_is_done(tmp_path):
    whole = outcome(train(learner, 2, Checkpoint(tmp_path)))
    log = []
    seen = Callback(name="seen", before_batch=lambda cb: log.append(1))
    with pytest.warns(UserWarning, match="nothing left to train"):
        again = go_on(learner, 2, Checkpoint(tmp_path), seen, resume="latest")
    assert log == []
    assert differing(whole, outcome(again)) == []
