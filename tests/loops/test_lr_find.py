"""A search for the learning rate sees what a training by hand sees, and leaves nothing behind."""

import copy
import math
import random
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    HookCallback,
    Learner,
    accuracy,
    synth_learner,
)
from hookcb.loops.lr_curve import LRFind, Smoothed, longest_fall
from hookcb.loops.lr_find import find_lr
from hookcb.training.schedules.schedule import Schedule
from tests.support import changes_in, fit, make_batches, make_learner, make_model, same, unsettle, weights


class Seen(nn.Module):
    """Counts its calls in a buffer that is not saved, and replaces another at each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()), persistent=False)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.n += 1
        self.last = x.detach().mean(0)
        return x


def noisy_model():
    """Draws random numbers, and has buffers of all kinds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1), Seen())


def noisy_learner(**kwargs):
    x, y = torch.randn(24, 2), torch.randn(24, 1)
    generator = torch.Generator().manual_seed(3)
    dl = DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=generator)
    kwargs = {"opt_func": Adam, "lr": 0.01, "metrics": F.l1_loss, **kwargs}
    learn = Learner((dl, dl), noisy_model(), F.mse_loss, **kwargs)
    learn.generator = generator
    return learn


def opt_state(learn):
    groups = [{k: v for k, v in g.items() if k != "params"} for g in learn.opt.param_groups]
    ids = [[id(p) for p in g["params"]] for g in learn.opt.param_groups]
    return groups, ids, [copy.deepcopy(s) for s in learn.opt.state.values()], sorted(vars(learn.opt))


def test_it_trains_with_rates_that_grow_by_the_same_factor():
    found = find_lr(make_learner(n_train=3), 1e-4, 1e-1, num_it=7)
    assert found.lrs == pytest.approx([1e-4 * 1000 ** (i / 6) for i in range(7)])
    assert (found.lrs[0], found.lrs[-1]) == (1e-4, 1e-1)
    model = make_model()
    opt = SGD(model.parameters(), lr=1.0)
    losses = []
    for lr, (x, y) in zip(found.lrs, make_batches(3) * 3, strict=False):
        opt.param_groups[0]["lr"] = lr
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert found.losses == losses


@pytest.mark.parametrize("fitted", [False, True])
def test_nothing_is_left_of_it(fitted, capsys):
    learn = noisy_learner(cbs=[ActivationStats(), HookCallback(hook=lambda m, i, o: o.mean(), name="means")])
    if fitted:
        fit(learn)
    unsettle(learn.model)
    states = [learn.generator.get_state(), torch.get_rng_state(), random.getstate()]
    opt = opt_state(learn) if fitted else None
    records = copy.deepcopy((learn.recorder.losses, list(learn.recorder.rows)))
    capsys.readouterr()
    with changes_in(learn) as changed:
        found = find_lr(learn, end_lr=0.1, num_it=20)
    assert set(changed) <= {"versions of weights"}
    assert len(found.lrs) == 20
    assert torch.equal(states[0], learn.generator.get_state())
    assert torch.equal(states[1], torch.get_rng_state())
    assert states[2] == random.getstate()
    assert (learn.recorder.losses, list(learn.recorder.rows)) == records
    assert str(opt_state(learn)) == str(opt) if fitted else learn.opt is None
    assert capsys.readouterr() == ("", "")


def test_the_fit_after_it_is_to_the_bit_the_fit_without_it():
    def trained(search):
        torch.manual_seed(1)
        learn = fit(noisy_learner())
        if search:
            find_lr(learn)
        fit(learn, 2)
        return weights(learn.model), learn.recorder.losses

    (with_it, losses), (without, plain) = trained(True), trained(False)
    assert same(with_it, without)
    assert losses == plain


@pytest.mark.parametrize("error", [SystemError, KeyboardInterrupt])
def test_nothing_is_left_of_one_that_fails(error):
    class Fails(Callback):
        def after_backward(self):
            if self.train_iter == 7:
                raise error

    learn = fit(noisy_learner(cbs=ActivationStats()))
    learn.add_cb(Fails)
    opt = str(opt_state(learn))
    with changes_in(learn) as changed, pytest.raises(error):
        find_lr(learn)
    assert set(changed) <= {"versions of weights"}
    assert str(opt_state(learn)) == opt
    assert all(cb.learn is learn for cb in learn.cbs)


def test_attached_callbacks_take_part_as_copies_unless_they_say_no():
    class Counts(Callback):
        n = 0
        made: ClassVar = []

        def before_fit(self):
            Counts.made.append(self)

        def after_batch(self):
            self.n += 1

    class Stays(Counts):
        run_lr_find = False

    learn = make_learner(cbs=[Counts(), Stays()])
    mine = learn.counts, learn.stays
    find_lr(learn, num_it=5)
    assert (learn.counts, learn.stays) == mine
    assert (learn.counts.n, learn.stays.n) == (0, 0)
    assert [type(cb) for cb in Counts.made] == [Counts]
    assert Counts.made[0].n == 5


def test_what_a_callback_refers_to_of_the_model_is_the_model():
    learn = make_learner(cbs=HookCallback(hook=lambda m, i, o: o.mean()))
    learn.hook.modules = [learn.model[0]]
    find_lr(learn, num_it=3)
    assert learn.hook.modules[0] is learn.model[0]


def test_a_callback_that_cannot_be_copied_is_named():
    cb = Callback(name="locked")
    cb.lock = (x for x in ())
    with pytest.raises(TypeError) as error:
        find_lr(make_learner(cbs=cb))
    assert "learn.locked.run_lr_find = False" in error.value.__notes__[0]


def test_it_validates_nothing():
    log = []

    class Logs(Callback):
        def before_validate(self):
            log.append("validate")

        def after_epoch(self):
            log.append("epoch")

    find_lr(make_learner(cbs=Logs, metrics=accuracy), num_it=7)
    assert log == ["epoch", "epoch"]


def test_it_stops_where_the_smoothed_loss_is_over_four_times_its_best():
    found = find_lr(synth_learner(), end_lr=100)
    assert len(found.lrs) < 100
    smoothed = found.smoothed
    over = [value > 4 * min(smoothed[10 : i + 1]) for i, value in enumerate(smoothed) if i >= 10]
    assert over.index(True) == len(over) - 1
    whole = find_lr(synth_learner(), end_lr=100, stop_div=False)
    assert len(whole.lrs) == 100
    assert whole.losses[: len(found.losses) - 1] == found.losses[:-1]


def test_a_loss_below_zero_is_no_reason_to_stop():
    learn = make_learner(loss_func=lambda pred, y: F.mse_loss(pred, y) - 100)
    assert len(find_lr(learn, end_lr=1e-2, num_it=30).lrs) == 30


def test_it_stops_at_a_loss_that_is_not_finite():
    learn = make_learner(n_train=6)
    learn.dls.train[3][1].fill_(math.nan)
    found = find_lr(learn)
    assert len(found.losses) == 4
    assert len(find_lr(learn, stop_div=False).losses) == 100


def test_cancelled_batches_are_left_out():
    def cancel(cb):
        if cb.iter == 1:
            raise CancelBatchException

    found = find_lr(make_learner(cbs=Callback(after_pred=cancel)), 1e-4, 1e-2, num_it=6)
    assert found.lrs == pytest.approx([1e-4 * 100 ** (i / 5) for i in (0, 2, 3, 5)])


def test_a_loader_without_a_length_is_gone_through_again():
    stream = type("Stream", (), {"__iter__": lambda self: iter(make_batches(2))})()
    assert len(find_lr(Learner(stream, make_model(), F.mse_loss, SGD), end_lr=0.1).lrs) == 100


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"start_lr": 1.0, "end_lr": 0.1}, ValueError),
        ({"start_lr": 1.0, "end_lr": 1.0}, ValueError),
        ({"start_lr": 0.0}, ValueError),
        ({"end_lr": math.inf}, ValueError),
        ({"start_lr": "1e-3"}, TypeError),
        ({"num_it": 1}, ValueError),
        ({"num_it": 2.5}, TypeError),
    ],
)
def test_arguments_that_cannot_be_are_refused(kwargs, error):
    with pytest.raises(error, match="give"):
        find_lr(make_learner(), **kwargs)


def test_a_loader_that_can_be_read_once_is_not_used_up():
    batches = iter(make_batches(3))
    with pytest.raises(ValueError, match="read once"):
        find_lr(Learner(batches, make_model(), F.mse_loss))
    assert len(list(batches)) == 3


def test_it_is_refused_while_a_fit_runs():
    def search(cb):
        find_lr(cb.learn)

    learn = make_learner()
    with pytest.raises(RuntimeError, match="a fit is running"):
        fit(
            learn,
            cbs=[Callback(after_batch=search), Schedule(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1))],
        )


def test_the_smoothed_loss_is_the_corrected_exponential_average():
    losses = [3.0, 1.0, 4.0, 1.0, 5.0]
    smoothed = LRFind([1, 2, 3, 4, 5], losses).smoothed
    for i in range(5):
        past = [0.98 ** (i - j) for j in range(i + 1)]
        assert smoothed[i] == pytest.approx(
            sum(w * x for w, x in zip(past, losses, strict=False)) / sum(past)
        )
    assert Smoothed().add(7.0) == pytest.approx(7.0)


def test_the_longest_fall_is_the_longest_of_all():
    for seed in range(50):
        values = [random.Random(seed * 100 + i).randrange(8) for i in range(10)]
        best = 0
        for mask in range(1 << 10):
            picked = [values[i] for i in range(10) if mask >> i & 1]
            if all(a > b for a, b in pairwise(picked)):
                best = max(best, len(picked))
        found = longest_fall(values)
        assert len(found) == best
        assert all(i < j and values[i] > values[j] for i, j in pairwise(found))
    assert longest_fall([math.nan, math.inf, 2.0, math.nan, 1.0]) == [2, 4]


@pytest.mark.parametrize("opt_func", [SGD, Adam])
def test_the_suggestion_is_where_the_loss_falls_and_trains_well(opt_func):
    learn = synth_learner(opt_func=opt_func)
    found = find_lr(learn)
    i = found.lrs.index(found.suggestion)
    smoothed = found.smoothed
    assert 0 < i < smoothed.index(min(smoothed))
    assert smoothed[i + 1] < smoothed[i] < smoothed[i - 1]
    fit(learn, 10, lr=found.suggestion)
    assert learn.recorder.rows[-1]["valid_loss"] < 0.1 * found.losses[0]


def test_where_the_loss_falls_nowhere_nothing_is_suggested():
    found = LRFind([0.1, 0.2, 0.3], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="falls at none of 3 rates"):
        found.suggestion  # noqa: B018
    assert repr(found) == "LRFind(no suggestion, of 3 rates from 0.1 to 0.3)"
    assert repr(LRFind([], [])) == "LRFind(no suggestion, of 0 rates)"


def test_the_picture_shows_rates_losses_and_suggestion():
    pytest.importorskip("matplotlib")
    found = find_lr(synth_learner())
    fig = found.plot()
    ax = fig.axes[0]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "learning rate", "loss")
    dots, line, suggestion = ax.lines
    assert (list(dots.get_xdata()), list(line.get_ydata())) == (found.lrs, found.smoothed)
    assert suggestion.get_xdata() == [found.suggestion]
    low, high = ax.get_ylim()
    assert low < min(found.losses) < max(found.smoothed[:50]) < high
    assert found.plot(ax) is fig
    fig.savefig("/dev/null", format="png")
    LRFind([0.1, 0.2], [math.nan, math.inf]).plot()
    with pytest.raises(ValueError, match="nothing to draw"):
        LRFind([], []).plot()
