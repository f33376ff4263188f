"""A search for the learning rate sees what a training by hand sees, and leaves nothing behind."""

import copy
import math
import random
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    CancelBatchException,
    DetectAnomaly,
    EarlyStopping,
    Freeze,
    GradientAccumulation,
    GradientClip,
    HookCallback,
    Learner,
    MaxTime,
    MixedPrecision,
    OneCycle,
    TerminateOnNaN,
    accuracy,
)
from hookcb.loops.lr_find import find_lr
from tests.support import (
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    unsettle,
    weights,
)
from tests.training.support import (
    DEVIL,
    OPTS,
    Unsized,
    Wide,
    all_flags,
    batches_of,
    equal,
    groups,
    momentum,
    nothing_printed,
    quiet,
    seeded,
    state_of,
    two_groups,
)


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


@in_turn(
    ("kwargs", "error"),
    [
        ({"start_lr": 1.0, "end_lr": 0.1}, ValueError),
        ({"start_lr": 1.0, "end_lr": 1.0}, ValueError),
        ({"start_lr": 0.0}, ValueError),
        ({"start_lr": -1.0}, ValueError),
        ({"start_lr": math.nan}, ValueError),
        ({"end_lr": math.inf}, ValueError),
        ({"start_lr": "1e-3"}, TypeError),
        ({"num_it": 1}, ValueError),
        ({"num_it": 2.5}, TypeError),
    ],
)
def test_arguments_that_cannot_be_are_refused(kwargs, error):
    with pytest.raises(error, match=r"must be a .* got|; give"):
        find_lr(make_learner(), **kwargs)


def test_a_loader_that_can_be_read_once_is_not_used_up():
    batches = iter(make_batches(3))
    with pytest.raises(ValueError, match="read only once"):
        find_lr(Learner(batches, make_model(), F.mse_loss))
    assert len(list(batches)) == 3


class Augmented(Dataset):
    """Draws from Python's and torch's generators for each sample."""

    def __init__(self, n=10):
        self.x, self.y = torch.randn(n, 2), torch.randn(n, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + random.random() + torch.rand(()), self.y[i]


def shuffled(kind):
    data, generator = Augmented(), torch.Generator().manual_seed(5)
    if kind == "generator of the loader":
        return DataLoader(data, 4, shuffle=True, generator=generator)
    if kind == "generator of the sampler":
        return DataLoader(data, 4, sampler=RandomSampler(data, generator=generator))
    if kind == "generator of a batch sampler":
        sampler = RandomSampler(data, generator=generator)
        return DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False))
    return DataLoader(data, 4, shuffle=True)  # from torch's own generator


LOADERS = [
    "generator of the loader",
    "generator of the sampler",
    "generator of a batch sampler",
    "torch's own",
]


def made(kind="torch's own", opt=momentum, cbs=()):
    seeded(3)
    loader = shuffled(kind)
    return quiet(loader, batches_of([3, 2]), Wide(), opt, cbs=cbs)


def recorded(learn):
    """All that training has come to, with where the random states have got to."""
    stats, names = learn.activation_stats.stats, learn.activation_stats.names
    return {
        "model": state_of(learn.model) | {"identity": None, "grads": None},
        "opt": copy.deepcopy(learn.opt.state_dict()),
        "losses": list(learn.recorder.losses),
        "lrs": list(learn.recorder.lrs),
        "rows": [{k: v for k, v in row.items() if k != "time"} for row in learn.recorder.rows],
        "stats": [[dict(stats[i][name]) for name in names] for i in range(len(stats))],
        "random": (torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.rand(3), random.random()),
    }


@in_turn("loader", LOADERS)
@in_turn("when", ["before the first fit", "between two fits"])
def test_a_fit_goes_on_to_the_bit_as_if_nothing_had_been_tried(loader, when):
    def run(tries):
        learn = made(loader, torch.optim.AdamW, cbs=ActivationStats())
        if when == "between two fits":
            learn.fit(1)
        if tries:
            learn.lr_find(num_it=11)
        learn.fit(2)
        return recorded(learn)

    tried, plain = run(True), run(False)
    for what, value in plain.items():
        assert equal(tried[what], value), what


def breaking(learn, error, nth):
    """The model raises at its call number `nth` from here on."""
    calls = [0]

    def hook(module, args):
        calls[0] += 1
        if calls[0] == nth:
            raise error

    return learn.model.register_forward_pre_hook(hook)


def everything_of(learn):
    """All that lr_find may not change, as copies that later changes cannot reach."""
    own = {k: v for k, v in vars(learn).items() if isinstance(v, int | float | str | bool | None)}
    row = {k: v for k, v in learn.row.items()}
    batch = [learn.xb, learn.yb, learn.pred, learn.loss, learn.dl]
    cbs = {cb.name: {k: copy.deepcopy(v) for k, v in vars(cb).items() if k != "learn"} for cb in learn.cbs}
    simple = {
        name: {k: v for k, v in state.items() if isinstance(v, int | float | str | list | bool | None)}
        for name, state in cbs.items()
    }
    return {
        "model": state_of(learn.model),
        "modules": [id(m) for m in learn.model.modules()],
        "gradients": [id(p.grad) for p in learn.model.parameters()],
        "opt": id(learn.opt),
        "opt state": copy.deepcopy(learn.opt.state_dict()),
        "opt groups": [(id(group), sorted(group)) for group in learn.opt.param_groups],
        "own": {k: v for k, v in own.items() if not k.startswith("_")},
        "row": row,
        "batch": [id(item) for item in batch],
        "cbs": [id(cb) for cb in learn.cbs],
        "of cbs": simple,
        "attributes": [sorted(vars(cb)) for cb in learn.cbs],
        "random": (torch.get_rng_state(), torch.tensor(random.getstate()[1])),
        "flags": all_flags(),
        "named": {k: id(v) for k, v in vars(learn).items() if isinstance(v, Callback)},
    }


@in_turn("raised", [None, *DEVIL])
@in_turn("nth", [1, 5])
def test_everything_is_there_again_also_after_an_error_of_the_model(raised, nth):
    cbs = [ActivationStats(), GradientClip(0.1), MixedPrecision(), EarlyStopping(patience=9)]
    learn = made(LOADERS[0], cbs=cbs)
    learn.fit(2)
    unsettle(learn.model)
    generator = learn.dls.train.generator
    before, state = everything_of(learn), generator.get_state()
    if raised is None:
        learn.lr_find(num_it=9, stop_div=False)
    else:
        handle = breaking(learn, error := raised("why"), nth)
        with pytest.raises(raised) as info:
            learn.lr_find(num_it=9)
        handle.remove()
        assert info.value is error
    after = everything_of(learn)
    for what, value in before.items():
        assert equal(after[what], value), what
    assert torch.equal(generator.get_state(), state)
    assert all(cb.learn is learn for cb in learn.cbs)
    assert not learn.fitting


def test_the_optimizer_made_later_is_as_new_and_takes_the_rate_set_meanwhile():
    learn = made()
    learn.lr_find(num_it=5)
    learn.lr = 0.025
    learn.fit(1)
    assert learn.opt.param_groups[0]["lr"] == 0.025
    assert set(learn.recorder.lrs) == {0.025}


@in_turn("opt", OPTS)
@in_turn("sized", [True, False])
def test_losses_are_those_of_a_loop_by_hand_at_these_rates(opt, sized):
    train, model = batches_of([4, 4, 1]), make_model()
    learn = quiet(train if sized else Unsized(train), model=make_model(), opt=opt)
    found = learn.lr_find(1e-4, 1.0, num_it=10, stop_div=False)
    assert len(found.lrs) == len(found.losses) == 10
    ratios = [b / a for a, b in zip(found.lrs, found.lrs[1:], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * 9)
    assert found.lrs[0] == pytest.approx(1e-4)
    assert 1.0 / ratios[0] * (1 - 1e-9) <= found.lrs[-1] <= 1.0 * (1 + 1e-9)
    by_hand, losses = opt(model.parameters(), lr=0.1), []
    for i, lr in enumerate(found.lrs):
        by_hand.param_groups[0]["lr"] = lr
        x, y = train[i % 3]
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        losses.append(loss.item())
    assert found.losses == losses


def test_every_group_is_tried_at_the_same_rate_and_keeps_its_own_afterwards():
    model, seen = make_model(), []

    class Look(Callback):
        def before_step(self):
            seen.append([group["lr"] for group in self.opt.param_groups])

    learn = quiet(batches_of([3, 2]), None, model, two_groups()(model), cbs=Look())
    found = learn.lr_find(num_it=6)
    assert groups(learn.opt) == groups(two_groups()(make_model()))
    assert seen == [[lr, lr] for lr in found.lrs] or seen == []  # what a copy notes elsewhere is its own


def test_it_stops_where_the_smoothed_loss_is_four_times_its_best_and_not_before():
    def small(pred, y):  # far below 1, or 3 times the best and 3 by the best were alike
        return F.mse_loss(pred, y) / 50

    learn = quiet(batches_of([4, 4, 4]), model=nn.Linear(2, 1), loss_func=small)
    found = learn.lr_find(1e-3, 1e6, num_it=100)
    assert 11 < len(found.losses) < 100
    smoothed = list(found.smoothed)  # the first ten tell nothing yet
    over = [value > 4 * min(smoothed[10 : i + 1]) for i, value in enumerate(smoothed) if i >= 10]
    assert over == [False] * (len(over) - 1) + [True]
    through = learn.lr_find(1e-3, 1e6, num_it=100, stop_div=False)
    assert len(through.losses) == 100
    assert through.losses[: len(found.losses)] == pytest.approx(found.losses, nan_ok=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [GradientAccumulation(2), MixedPrecision(torch.float16), GradientClip()],
        lambda: [EMA(), Freeze("0"), DetectAnomaly(), TerminateOnNaN()],
        lambda: [OneCycle(), MaxTime(1e-9), EarlyStopping()],
    ],
)
def test_it_goes_with_every_training_callback(make):
    class NoValid:
        def __iter__(self):
            raise AssertionError("lr_find validates nothing")

    learn = quiet(batches_of([4, 3, 1]), NoValid(), opt=momentum, cbs=make())
    before, cbs = weights(learn.model), list(learn.cbs)
    with nothing_printed():
        found = learn.lr_find(1e-5, 1e-1, num_it=12, stop_div=False)
    assert len(found.losses) == 12
    assert equal(weights(learn.model), before)
    assert list(map(id, learn.cbs)) == list(map(id, cbs))
    assert learn.scaler is None
    assert all(p.requires_grad for p in learn.model.parameters())


def test_nothing_is_printed_with_the_progress_attached():
    learn = Learner((batches_of([4, 3]), batches_of([2])), make_model(), nn.functional.mse_loss)
    with nothing_printed():
        learn.lr_find(num_it=4)
    fit(learn)


def test_a_running_fit_refuses_it_and_no_batches_are_an_error():
    ask = Callback(name="ask", before_epoch=lambda cb: cb.learn.lr_find())
    with pytest.raises(RuntimeError, match="fit"):
        quiet(batches_of([4])).fit(1, cbs=ask)
    with pytest.raises(ValueError, match="no batch"):
        quiet(Unsized([])).lr_find(num_it=3)
    data = TensorDataset(torch.randn(5, 2), torch.randn(5, 1))
    assert len(quiet(DataLoader(data, 2)).lr_find(num_it=7, stop_div=False).losses) == 7
