"""Under a watch callbacks record to the bit what they record under a Learner; weights are those without."""

import copy
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import (
    ActivationStats,
    GradientAccumulation,
    GradientHealth,
    HookCallback,
    Learner,
    MemoryStats,
    MixedPrecision,
    Recorder,
    watch,
)
from tests.support import along, same, weights


class Attends(nn.Module):
    """A small transformer, with an embedding, attention and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.block(self.embed(x)).mean(1))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 9, 3),
    ),
    "transformer": Attends,
}


@cache
def batches_for(kind):
    g = torch.Generator().manual_seed(3)
    sizes = [5, 4, 5, 3]
    x = {
        "mlp": lambda n: torch.randn(n, 6, generator=g),
        "cnn": lambda n: torch.randn(n, 2, 5, 5, generator=g),
        "transformer": lambda n: torch.randint(11, (n, 4), generator=g),
    }[kind]
    return [(x(n), torch.randint(3, (n,), generator=g)) for n in sizes]


@cache
def model_for(kind):
    torch.manual_seed(1)
    return MODELS[kind]()


def readers():
    return [
        ActivationStats(include_paramless=True, with_hist=True, on_valid=True),
        ActivationStats(every=2, name="some"),
        GradientHealth(),
        GradientHealth(activations=True, every=2, name="outputs"),
        HookCallback(hook=lambda m, i, o: o.mean(), name="means"),
        MemoryStats(every=2),
        Recorder(),
    ]


def is_alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_alike, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def recorded(loop):
    """All that the readers have of a loop, as plain values."""
    names = "activation_stats", "some", "gradient_health", "outputs", "recorder"
    found = {name: getattr(loop, name).state_dict() for name in names}
    for row in found["recorder"]["rows"]:
        row.pop("time")
    for name in ("gradient_health", "outputs"):  # how the fit goes on is the recorder's, which has ended
        found[name] = found[name]["recorded"]
    found["means"] = dict(loop.means.results)
    memory = loop.memory_stats
    found["memory"] = [repr(row) for row in memory.layers()]
    found["findings"] = [str(x) for x in loop.diagnose().findings]
    found["coverage"] = [str(x) for x in (loop.activation_stats.coverage, memory.coverage)]
    return found


class Rounded:
    """A loop in bfloat16, as `MixedPrecision` has it: forward and loss."""

    cbs = staticmethod(lambda: [MixedPrecision()])
    context = staticmethod(lambda: torch.autocast("cpu", torch.bfloat16))
    n = 1


class Accumulates:
    """A loop that makes a step every other batch, as `GradientAccumulation` has it."""

    cbs = staticmethod(lambda: [GradientAccumulation(2)])
    context = staticmethod(lambda: torch.autocast("cpu", enabled=False))
    n = 2


class Usual:
    """A plain loop."""

    cbs = staticmethod(list)
    context = Accumulates.context
    n = 1


def by_learner(kind, how, cbs):
    model = copy.deepcopy(model_for(kind))
    train, valid = batches_for(kind), batches_for(kind)[:2]
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(5)
    learn = Learner((train, valid), model, F.cross_entropy, opt, cbs=[Recorder()] if not cbs else ())
    learn.remove_cbs(learn.cbs)
    learn.fit(2, cbs=[*how.cbs(), *cbs])
    return learn, model, torch.get_rng_state()


def train_by_hand(model, opt, train, valid, how, w=None):
    """A loop as people write it."""
    for _ in range(2):
        model.train()
        sizes = [len(y) for _, y in train]
        for i, (x, y) in enumerate(train):
            with how.context():
                loss = F.cross_entropy(model(x), y)
            if w is not None:
                w.report_loss(loss)
            if how.n > 1:  # batches weigh by their size, as the callback has it
                guess = how.n * sizes[i - i % how.n]
                loss = loss * (len(y) / guess) if len(y) != guess else loss
            loss.backward()
            if i % how.n == how.n - 1:
                if how.n > 1:
                    for p in model.parameters():
                        p.grad.mul_(guess / sum(sizes[i - how.n + 1 : i + 1]))
                opt.step()
                opt.zero_grad()
        model.eval()
        with torch.no_grad(), how.context():
            for x, y in valid:
                loss = F.cross_entropy(model(x), y)
                if w is not None:
                    w.report_loss(loss)
        if w is not None:
            w.end_epoch()


def by_hand(kind, how, cbs, find_opt=False):
    model = copy.deepcopy(model_for(kind))
    train, valid = batches_for(kind), batches_for(kind)[:2]
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(5)
    if cbs is None:
        train_by_hand(model, opt, train, valid, how)
        return None, model, torch.get_rng_state()
    with watch(model, None if find_opt else opt, *cbs) as w:
        train_by_hand(model, opt, train, valid, how, w)
    return w, model, torch.get_rng_state()


@pytest.mark.parametrize(("kind", "how"), along(MODELS, [Usual, Rounded, Accumulates]))
def test_records_weights_and_random_numbers_are_those_of_a_learner(kind, how):
    learn, learned, learned_state = by_learner(kind, how, readers())
    w, watched, watched_state = by_hand(kind, how, readers())
    _, plain, plain_state = by_hand(kind, how, None)
    assert same(weights(watched), weights(plain))
    assert torch.equal(watched_state, plain_state)
    assert same(weights(watched), weights(learned))
    assert torch.equal(learned_state, watched_state)
    found, expected = recorded(w), recorded(learn)
    for name in expected:
        assert is_alike(found[name], expected[name]), name
    assert len(w.activation_stats.stats) == 8
    assert len(w.activation_stats.valid_stats) == 4
    assert len(w.gradient_health.stats) == 8 // how.n
    assert len(w.recorder.rows) == 2
    assert next(iter(w.memory_stats.layers())).kept > 0


@pytest.mark.slow
def test_an_optimizer_that_is_found_gives_the_same_records():
    given, found = (by_hand("mlp", Usual, readers()[:5], find_opt)[0] for find_opt in (False, True))
    for name in ("activation_stats", "some", "gradient_health", "outputs"):
        assert is_alike(getattr(given, name).state_dict(), getattr(found, name).state_dict()), name


@pytest.mark.slow
def test_records_of_two_nested_watches_are_alike():
    model = copy.deepcopy(model_for("cnn"))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(5)
    with watch(model, opt, *readers()[:5]) as a, watch(model, opt, *readers()[:5]) as b:
        train_by_hand(model, opt, batches_for("cnn"), batches_for("cnn")[:2], Usual)
    for name in ("activation_stats", "some", "gradient_health", "outputs"):
        assert is_alike(getattr(a, name).state_dict(), getattr(b, name).state_dict()), name
    assert same(weights(model), weights(by_hand("cnn", Usual, None)[1]))


def test_records_of_a_scaled_loop_are_those_of_a_learner():
    cbs = [GradientHealth(), GradientHealth(activations=True, name="outputs")]
    model = copy.deepcopy(model_for("mlp"))
    learn = Learner(batches_for("mlp"), model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    learn.remove_cbs(learn.cbs)
    learn.fit(1, cbs=[MixedPrecision("fp16", init_scale=2.0**4, growth_interval=2), *cbs])
    again = copy.deepcopy(model_for("mlp"))
    opt = torch.optim.SGD(again.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    cbs = [GradientHealth(), GradientHealth(activations=True, name="outputs")]
    with watch(again, opt, *cbs, scaler=scaler) as w:
        for x, y in batches_for("mlp"):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(again(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert same(weights(model), weights(again))
    for name in ("gradient_health", "outputs"):
        found, expected = (getattr(loop, name).state_dict()["recorded"] for loop in (w, learn))
        assert is_alike(found, expected), name


def test_results_are_read_while_the_watch_runs():
    model = copy.deepcopy(model_for("mlp"))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    read = []
    with watch(model, opt, *readers()) as w:
        for x, y in batches_for("mlp"):
            w.report_loss(F.cross_entropy(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
            stats, grads = w.activation_stats.stats, w.gradient_health.stats
            read.append((len(stats), len(grads), len(w.recorder.losses)))
            assert stats[-1]["0"]["std"] > 0
            assert grads[-1]["0.weight"]["update_ratio"] > 0
            assert w.activation_stats.report()
            assert str(w.coverage)
    assert read == [(i, i, i) for i in range(1, 5)]


def test_a_recorder_of_losses_that_cannot_be_found_is_empty():
    model = copy.deepcopy(model_for("mlp"))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, opt, Recorder()) as w:
        for x, _ in batches_for("mlp"):
            out = model(x)
            out.backward(torch.ones_like(out))
            opt.step()
    assert w.recorder.losses == []
    assert "w.report_loss(loss)" in w.coverage.missing["after_loss"]


def test_a_recorder_that_does_not_know_the_optimizer_yet_has_no_rate():
    model = copy.deepcopy(model_for("mlp"))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    with watch(model, Recorder()) as w:
        for x, y in batches_for("mlp"):
            w.report_loss(F.cross_entropy(model(x), y)).backward()
            opt.step()
    assert math.isnan(w.recorder.lrs[0])
    assert w.recorder.lrs[1:] == [0.01] * 3
