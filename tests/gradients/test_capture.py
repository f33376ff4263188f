"""What GradientHealth records of each parameter and step, against plain loops in float64."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from hookcb import GradientClip, GradientHealth
from hookcb.gradients.flow import gradient_flow
from tests.gradients.support import (
    COLUMNS,
    INF,
    NAN,
    STEP_STATS,
    assert_matches,
    at,
    batches,
    by_hand,
    close,
    expected,
    learner,
    mlp,
    norm_of,
    ratio,
    seeded,
    wide,
)
from tests.support import in_turn

SIZES = {"small": 7, "large": 3000}


def cnn():
    def make():
        head = nn.Conv2d(5, 3, 2), nn.Flatten(), nn.Linear(27, 1)
        return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), *head)

    return seeded(make)


def images(n=4):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 2, 4, 4, generator=g), torch.randn(5, 1, generator=g)) for _ in range(n)]


OPTIMIZERS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=0.1, nesterov=True),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("make", "data"), [(mlp, batches), (cnn, images)], ids=["mlp", "cnn"])
def test_every_number_is_that_of_a_plain_loop(make, data, name):
    steps = by_hand(make(), data(), OPTIMIZERS[name], lr=0.01, n_epoch=2)
    health = GradientHealth()
    learner(make(), data(), health, opt=OPTIMIZERS[name], lr=0.01, n_epoch=2)
    assert health.names == [name for name, _ in make().named_parameters()]
    assert list(health.stats[0][0]) == list(health.columns) == COLUMNS
    assert list(health.step_stats[0]) == STEP_STATS
    assert_matches(health, steps)
    assert health.skipped == 0


CLIPS = {
    "norm": (lambda params: nn.utils.clip_grad_norm_(params, 0.01), lambda: GradientClip(0.01)),
    "value": (lambda params: nn.utils.clip_grad_value_(params, 0.02), lambda: GradientClip(value=0.02)),
    "wide": (lambda params: nn.utils.clip_grad_norm_(params, 1e6), lambda: GradientClip(1e6)),
}


@pytest.mark.parametrize("name", CLIPS)
def test_norms_are_known_before_and_after_clipping(name):
    clip, make = CLIPS[name]
    health = GradientHealth()
    learner(mlp(), None, health, make())
    steps = by_hand(mlp(), batches(), clip=clip)
    assert_matches(health, steps)
    coefs = health.step_series("clip_coef")
    assert all(c == 1 for c in coefs) if name == "wide" else all(0 < c < 0.5 for c in coefs)


def assigned(cb):
    for p in cb.model.parameters():
        p.grad = p.grad * 0.5


def of_a_small_version(cb):  # a new tensor that was written to as often as the one it replaces
    for p in cb.model.parameters():
        new, n = torch.zeros_like(p.grad), p.grad._version
        new.copy_(p.grad * 0.5)
        for _ in range(n - new._version):
            new.mul_(1.0)
        p.grad = new


@pytest.mark.parametrize("halve", [assigned, of_a_small_version])
@pytest.mark.parametrize("hidden", [5, 700])
def test_gradients_changed_in_any_way_are_seen_as_the_optimizer_gets_them(halve, hidden):
    health = GradientHealth()
    learner(mlp(hidden=hidden), None, health, at("before_step", halve, order=10))
    assert len(health.stats) == 4
    for record in health.stats:
        for stats in record:
            assert close(stats["clipped_norm"], stats["norm"] / 2)
    assert all(close(c, 0.5) for c in health.step_series("clip_coef"))


@pytest.mark.parametrize(
    "shape", [(4_000_000,), (1000, 4000), (4_000_000, 2)], ids=["vector", "matrix", "rows"]
)
def test_norms_of_millions_of_elements_keep_six_digits_also_as_clipped(shape):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    health = GradientHealth()
    model, halves = Puts([grad], torch.ones(shape)), at("before_step", assigned, order=10, name="halves")
    learner(model, [torch.ones(2, 2)], at("after_backward", put), health, halves, lr=0.0, loss=lambda p: p)
    stats, norm = health.stats[0]["weight"], grad.double().norm().item()
    assert stats["norm"] == pytest.approx(norm, rel=1e-6)
    assert stats["clipped_norm"] == pytest.approx(norm / 2, rel=1e-6)


def test_what_has_clipped_earlier_is_what_is_read_as_before():
    health = GradientHealth()
    early = at("before_step", lambda cb: nn.utils.clip_grad_norm_(cb.model.parameters(), 0.01), order=-10)
    learner(mlp(), None, health, early)
    assert all(close(x, 0.01) for x in health.step_series("total_norm"))


# ---- gradients of any kind


class Puts(nn.Module):
    """A layer whose weight gets just the gradient that is told for the step."""

    def __init__(self, grads, weight=None):
        super().__init__()
        shape = grads[0].shape
        self.weight = nn.Parameter(torch.linspace(1, 2, grads[0].numel()).reshape(shape))
        if weight is not None:
            self.weight = nn.Parameter(weight)
        self.other = nn.Parameter(torch.ones(3, 2))
        self.grads, self.n = grads, 0

    def forward(self, x):
        self.n += 1
        return x.sum() * self.weight.sum() * 0 + (self.other * x.sum()).sum()


def put(cb):
    model = cb.model
    model.weight.grad = model.grads[(model.n - 1) % len(model.grads)].clone()


def recorded(grads, *cbs, lr=0.0, **options):
    """The statistics of a parameter that gets these gradients, one a step."""
    health = GradientHealth(**options)
    data = [torch.ones(2, 2)] * len(grads)
    learner(Puts(grads), data, at("after_backward", put), health, *cbs, lr=lr, loss=lambda p: p)
    assert len(health.stats) == len(grads)
    return health


@in_turn("n, factor", itertools.product(SIZES.values(), [1e-30, 1e-22, 1e-10, 1.0, 1e15, 1e25, 1e30]))
def test_no_square_overflows_or_vanishes(n, factor):
    grad = torch.linspace(-1, 1, n).reshape(-1, 1) * factor
    true = norm_of(wide(grad))
    for detail_every in (1, 2):
        stats = recorded([grad, grad], detail_every=detail_every).stats[1]["weight"]
        assert math.isclose(stats["norm"], true, rel_tol=1e-4)
        assert math.isclose(stats["rms"], true / math.sqrt(n), rel_tol=1e-4)
        assert detail_every > 1 or math.isclose(stats["abs_max"], factor, rel_tol=1e-6)
        assert stats["nonfinite"] == 0


@pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF, NAN], [NAN, NAN, INF]])
def test_elements_that_are_not_finite_are_counted_and_the_largest_other_is_told(n, bad):
    grad = torch.linspace(-4, 3, n).reshape(-1, 1)
    grad[2 : 2 + len(bad), 0] = torch.tensor(bad)
    clean = torch.linspace(-4, 3, n).reshape(-1, 1)
    health = recorded([clean, grad, clean])
    for k in (0, 2):
        assert health.stats[k]["weight"]["nonfinite"] == 0
        assert math.isfinite(health.step_series("total_norm")[k])
    stats = health.stats[1]["weight"]
    assert stats["nonfinite"] == len(bad)
    assert not math.isfinite(stats["norm"])
    assert not math.isfinite(stats["rms"])
    assert close(stats["abs_max"], 4.0)
    assert not math.isfinite(health.step_series("total_norm")[1])
    assert health.stats[1]["other"]["nonfinite"] == 0


@pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)
def test_of_a_gradient_without_a_finite_element_all_are_counted(n):
    stats = recorded([torch.full((n, 1), NAN)]).stats[0]["weight"]
    assert stats["nonfinite"] == n
    assert not stats["abs_max"] > 0


ROWS = {"matrix": (8, 3), "large": (900, 7), "kernel": (6, 3, 2, 2), "one row": (1, 5), "vector": (7,)}


@in_turn(
    "shape, dtype",
    itertools.product(ROWS.values(), [torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_rows_that_are_all_zero_are_told_as_a_share(shape, dtype):
    grad = torch.full(shape, 1e-6, dtype=dtype)
    grad[: shape[0] // 2] = 0
    grad[-1].flatten()[1:] = 0  # a row with one element that is not
    want = shape[0] // 2 / shape[0] if len(shape) > 1 else NAN
    health = GradientHealth()
    model = Puts([grad], torch.ones(shape, dtype=dtype))
    learner(model, [torch.ones(2, 2)], at("after_backward", put), health, lr=0.0, loss=lambda p: p.float())
    stats = health.stats[0]["weight"]
    assert close(stats["zero_rows"], want)
    assert close(stats["norm"], norm_of(wide(grad)), rel=1e-3)


def test_a_row_of_gradients_too_small_for_their_squares_is_no_row_of_zeros():
    assert recorded([torch.full((2000, 2), 1e-30)]).stats[0]["weight"]["zero_rows"] == 0


def test_gradients_of_odd_strides_count_each_element_as_often_as_it_is_there():
    grads = [torch.ones(()).expand(4, 6), torch.arange(24.0).reshape(6, 4).t(), torch.arange(48.0)[::2]]
    for grad in grads:
        stats = recorded([grad.reshape(4, 6)]).stats[0]["weight"]
        assert close(stats["norm"], norm_of(grad))
    model = nn.Linear(6, 4, bias=False)
    model.weight.grad = grads[0]
    assert gradient_flow(model)[0].mean == gradient_flow(model)[0].max == 1.0


# ---- weights


def test_of_a_large_parameter_updates_are_those_of_a_sample_and_all_else_is_exact():
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 1)))
    data = batches(3, bs=16, d=64)
    steps = by_hand(copy.deepcopy(model), data)
    health, seldom = GradientHealth(detail_every=1), GradientHealth(detail_every=2, name="seldom")
    learner(model, data, health, seldom)
    assert_matches(health, steps, skip=("update_ratio", "drift"))
    assert_matches(seldom, steps, skip=("update_ratio", "drift", "abs_max"))
    for k, step in enumerate(steps):
        stats, want = health.stats[k]["0.weight"], expected(step, "0.weight")
        assert close(stats["update_ratio"], want["update_ratio"], rel=0.25)
        assert close(stats["drift"], want["drift"], rel=0.25)


@pytest.mark.parametrize("shape", [(64, 64), (128, 32, 3, 3), (3, 1024), (512, 17), (40, 30)])
def test_the_sample_of_updates_has_a_share_of_each_index_of_the_last_dimension(shape):
    """Only one index moves at a time; a stride with a common divisor would miss most of them."""
    grads = [torch.zeros(shape) for _ in range(8)]
    for k, grad in enumerate(grads):
        grad.select(-1, (k * 37) % shape[-1])[...] = 1.0
    health = recorded(grads, lr=0.1)
    assert all(x > 0 for x in health.series("weight", "update_ratio"))


@pytest.mark.parametrize("n", [1025, 1500, 2047, 2048, 2500, 3000, 4096, 5000, 7168, 10_000, 70_000])
def test_the_sample_of_updates_has_a_share_of_each_eighth_of_a_parameter(n):
    grads = [torch.zeros(n) for _ in range(8)]
    for k, grad in enumerate(grads):
        grad[k * n // 8 : (k + 1) * n // 8] = 1.0
    seen = [x > 0 for x in recorded(grads, lr=0.1).series("weight", "update_ratio")]
    assert all(seen), f"eighths seen: {seen}"


def test_a_small_spread_around_a_large_mean_is_right():
    weight = 1000 + torch.linspace(-1, 1, 40).reshape(8, 5)
    health = GradientHealth()
    learner(Puts([torch.zeros(8, 5)], weight), [torch.ones(2, 2)], health, lr=0.0, loss=lambda p: p)
    stats = health.stats[0]["weight"]
    assert close(stats["weight_mean"], 1000.0)
    assert close(stats["weight_std"], weight.double().std().item(), rel=1e-3)
    assert stats["update_ratio"] == stats["drift"] == 0


def test_updates_of_weights_that_were_zero_are_infinite_and_of_weights_at_rest_zero():
    health = GradientHealth()
    model = Puts([torch.ones(3, 2)], torch.zeros(3, 2))
    learner(model, [torch.ones(2, 2)] * 2, at("after_backward", put), health, loss=lambda p: p)
    first, second = (record["weight"] for record in health.stats)
    assert first["update_ratio"] == first["drift"] == INF
    assert close(second["update_ratio"], 1.0)


def test_tiny_updates_are_not_lost():
    model = mlp()
    before = {name: p.detach().double() for name, p in copy.deepcopy(model).named_parameters()}
    health = GradientHealth()
    learner(model, batches(1), health, lr=1e-6)
    for name, p in model.named_parameters():
        want = ratio(p.detach().double(), before[name])
        assert close(health.stats[0][name]["update_ratio"], want, rel=1e-3, abs_tol=1e-12)


class Centered(nn.Module):
    """A layer whose running mean has the graph of the batch, which it drops at the next forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("running_mean", torch.zeros(3))

    def forward(self, x):
        x = self.fc(x)
        self.running_mean.detach_().mul_(0.9).add_(x.mean(0))
        return x - self.running_mean


def test_of_a_running_mean_with_a_graph_only_numbers_are_kept():
    health, seen = GradientHealth(), []
    note = at("after_batch", lambda cb: seen.append(cb.model.running_mean.detach().clone()), name="note")
    learner(Centered(), batches(), health, note, loss=lambda p, y: p.square().mean() + 0 * y.sum())
    assert len(seen) == len(health.buffer_stats) > 2
    for x, record in zip(seen, health.buffer_stats, strict=True):
        assert close(record["running_mean"]["min"], x.min().item())


def test_running_means_and_variances_have_their_extremes_in_each_record():
    seen, model = [], cnn()

    def note(cb):
        seen.append([(float(b.min()), float(b.max())) for b in (model[1].running_mean, model[1].running_var)])

    health = GradientHealth()
    learner(model, images(), health, at("after_step", note), n_epoch=2)
    assert len(health.buffer_stats) == 8
    for k, pairs in enumerate(seen):
        for name, (low, high) in zip(("1.running_mean", "1.running_var"), pairs, strict=True):
            assert close(health.buffer_stats[k][name]["min"], low)
            assert close(health.buffer_stats[k][name]["max"], high)
    assert "1.num_batches_tracked" not in health.buffer_stats[0]
