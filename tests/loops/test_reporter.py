"""What adapters and loops may tell a watch: steps ahead of clipping, closures, stops that are heeded."""

import warnings

import pytest
import torch
from torch import nn

from hookcb import Callback, CancelFitException, GradientHealth, Learner, watch
from hookcb.loops.reporter import LoopReporter
from hookcb.loops.stages import FIRST, TRANSITIONS, Move, Stage
from tests.support import in_turn

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
BATCHES = list(zip(X.split(6), Y.split(6), strict=True))
loss_func = nn.functional.cross_entropy


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Noting(Callback):
    """Keeps the events of steps and batches."""

    kept = ("before_batch", "before_step", "after_step", "after_batch")

    def __init__(self):
        super().__init__(name="noting")
        self.events = []

    def handler(self, event):
        return (lambda: self.events.append(str(event))) if event in self.kept else None


def with_closure(model, opt):
    for x, y in BATCHES:

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = loss_func(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_tells_when_the_gradients_of_its_step_are_there(kind):
    model, again = net(), net()
    noting, health = Noting(), GradientHealth()
    opt = kind(model.parameters(), lr=0.1)
    with watch(model, opt, noting, health):
        with_closure(model, opt)
    assert noting.events == ["before_batch", "before_step", "after_step", "after_batch"] * len(BATCHES)
    learn = Learner(BATCHES, again, loss_func, kind(again.parameters(), lr=0.1))
    with learn.no_logging():
        learn.fit(1, cbs=GradientHealth())
    assert repr(health.table()) == repr(learn.gradient_health.table())
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_closure_that_gives_back_a_loss_gives_it_back_under_watches_inside_one_another():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.tensor(3.0)
    one, two = Noting(), Noting()
    with watch(model, opt, one), watch(model, None, two):
        assert opt.step(closure=lambda: loss) is loss
    assert one.events == two.events == ["before_batch", "before_step", "after_step", "after_batch"]


def test_a_closure_that_raises_leaves_the_watch_ready_for_the_next():
    model, noting = net(), Noting()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail():
        model(X)
        raise ZeroDivisionError

    with watch(model, opt, noting):
        with pytest.raises(ZeroDivisionError):
            opt.step(fail)
        noting.events.clear()
        with_closure(model, opt)
    assert noting.events.count("before_step") == noting.events.count("after_step") == len(BATCHES)


def test_two_optimizers_with_closures_end_their_batches():
    model, noting = net(), Noting()
    opts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    with watch(model, opts, noting):
        for x, y in BATCHES:
            for opt in opts:

                def closure(opt=opt, x=x, y=y):
                    loss = loss_func(model(x), y)
                    loss.backward()
                    return loss

                opt.step(closure)
    assert noting.events.count("before_step") == noting.events.count("after_step") == 2 * len(BATCHES)
    assert noting.events.count("before_batch") <= 2 * len(BATCHES)


def test_lbfgs_has_one_batch_an_evaluation_and_no_step_events():
    model, noting = net(), Noting()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with watch(model, opt, noting) as w:
        with_closure(model, opt)
    assert noting.events == ["before_batch", "after_batch"] * 3 * len(BATCHES)
    assert "LBFGS" in w.coverage.missing["before_step"]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_told_ahead_of_clipping_is_read_unclipped(scaled):
    model, noting, health = net(), Noting(), GradientHealth()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    with watch(model, opt, noting, health, scaler=scaler) as w:
        for i, (x, y) in enumerate(BATCHES):
            loss = loss_func(model(x), y) * (float("inf") if scaled and i == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            w.begin_step(opt)
            w.begin_step(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert noting.events == ["before_batch", "before_step", "after_step", "after_batch"] * len(BATCHES)
    assert health.skipped == scaled
    assert health.step_series("total_norm")[0] > 0.1
    clipped = [record["0.weight"]["clipped_norm"] for record in health.stats]
    assert all(norm < 0.011 for i, norm in enumerate(clipped) if not (scaled and i == 1))
    assert not any("after clipping" in note for note in w.coverage.notes)


def test_steps_told_by_hand_need_no_end_of_their_own():
    model, noting = net(), Noting()
    one, two = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    followed = LoopReporter(model, noting)
    followed.begin_batch(True, (X,))
    followed.begin_step(one)
    followed.begin_step(two)
    followed.end_batch()
    followed.end_step()
    followed.close()
    steps = ["before_step", "after_step"] * 2
    assert noting.events == ["before_batch", *steps, "after_batch"]


@pytest.mark.parametrize("heeds", [False, True])
def test_a_stop_that_is_heeded_is_shown_and_not_warned_of(heeds, monkeypatch, capsys):
    monkeypatch.setattr(LoopReporter, "honors_stop", heeds)

    def end(cb):
        raise CancelFitException("enough")

    followed = LoopReporter(net(), Callback(name="ends", before_batch=end))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        followed.begin_batch(True, (X,))
        followed.begin_batch(True, (X,))
    followed.close()
    assert followed.stop_requested
    assert followed.ended_by.startswith("fit ended by Callback('ends') at epoch 0, batch ")
    assert capsys.readouterr().out == "fit ended by Callback('ends') at epoch 0, batch 0: enough\n" * heeds
    assert [": enough; ignored" in str(warning.message) for warning in caught] == [True] * (not heeds)


OPTS = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2)]


def make(loop, move, opt=OPTS[0]):
    getattr(loop, move)(*[opt] * (move == Move.BEGIN_STEP))


# the moves that lead to a stage, from IDLE
TO_STAGE = {
    Stage.IDLE: [],
    Stage.FORWARD: [Move.BEGIN_BATCH],
    Stage.BACKWARD: [Move.BEGIN_BATCH, Move.BEGIN_BACKWARD],
    Stage.GRADIENTS: [Move.BEGIN_BATCH, Move.BEGIN_BACKWARD, Move.END_BACKWARD],
    Stage.STEP: [Move.BEGIN_BATCH, Move.BEGIN_BACKWARD, Move.END_BACKWARD, Move.BEGIN_STEP],
    Stage.BLIND_STEP: [Move.BEGIN_BATCH, Move.BEGIN_STEP],
    Stage.BACKWARD_IN_STEP: [Move.BEGIN_BATCH, Move.BEGIN_STEP, Move.BEGIN_BACKWARD],
}
# what each move, in the order of Move, emits: b a batch, g a backward, s a step; capitals are their ends
EMITTED = {
    Stage.IDLE: ["b", "", "", "bs", "", ""],
    Stage.FORWARD: ["Bb", "g", "", "s", "", "B"],
    Stage.BACKWARD: ["Bb", "", "G", "Gs", "", "B"],
    Stage.GRADIENTS: ["Bb", "", "", "s", "", "B"],
    Stage.STEP: ["SBb", "", "", "Ss", "S", "SB"],
    Stage.BLIND_STEP: ["SBb", "g", "", "Ss", "S", "SB"],
    Stage.BACKWARD_IN_STEP: ["SBb", "", "G", "SGs", "S", "SB"],
}
LETTERS = {"batch": "b", "backward": "g", "step": "s"}


@in_turn("stage", list(Stage))
@in_turn("move", list(Move))
def test_each_move_has_an_outcome_at_each_stage(stage, move):
    events = []

    def note(side, letter):
        return lambda cb: events.append(letter if side == "before" else letter.upper())

    noting = {
        f"{side}_{level}": note(side, x) for level, x in LETTERS.items() for side in ("before", "after")
    }
    loop = LoopReporter(model := net(), Callback(name="noting", **noting))
    for earlier in TO_STAGE[stage]:
        make(loop, earlier)
    assert loop.stage is stage
    events.clear()
    make(loop, move, OPTS[1])
    assert "".join(events) == EMITTED[stage][list(Move).index(move)]
    assert model is loop.model
    loop.close()
    assert loop.stage is Stage.IDLE


def test_the_table_of_transitions_has_no_contradictions_and_no_endless_repairs():
    assert not TRANSITIONS.keys() & FIRST.keys()
    for (stage, _), first in FIRST.items():
        assert (stage, first) in TRANSITIONS or (stage, first) in FIRST
    assert {transition.stage for transition in TRANSITIONS.values()} == set(Stage)


def test_the_loss_and_the_epoch_are_data():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Callback()) as w:
        assert (w.loss, w.epoch) == (None, 0)
        loss = loss_func(model(X), Y)
        w.report_loss(loss)
        assert torch.equal(w.loss, loss)
        loss.backward()
        assert torch.equal(w.loss, loss.detach())
        opt.step()
        w.end_epoch()
    assert (w.loss, w.epoch) == (None, 1)


def test_a_loss_of_several_elements_and_a_step_of_no_optimizer_are_refused():
    loop = LoopReporter(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"the loss has shape \(3,\), not one element; reduce it"):
        loop.report_loss(torch.ones(3))
    with pytest.raises(TypeError, match="opt must be the optimizer that makes the step, got 3"):
        loop.begin_step(3)
