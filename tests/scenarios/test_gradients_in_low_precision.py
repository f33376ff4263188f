"""What GradientHealth reads with each kind of optimizer and precision, and of accumulated gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import GradientAccumulation, GradientClip, GradientHealth, Learner, MixedPrecision
from tests.gradients.support import (
    assert_matches,
    at,
    batches,
    by_hand,
    close,
    learner,
    mlp,
    norm_of,
    ratio,
)
from tests.support import fit, in_turn

sgd, adam = torch.optim.SGD, torch.optim.Adam
FUSED = {
    "SGD": sgd,
    "fused SGD": partial(sgd, momentum=0.9, fused=True),
    "foreach SGD": partial(sgd, momentum=0.9, foreach=True),
    "single SGD": partial(sgd, foreach=False),
    "Adam": adam,
    "fused Adam": partial(adam, fused=True),
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "foreach AdamW": partial(torch.optim.AdamW, foreach=True),
    "a rate in a tensor": lambda params, lr: adam(params, lr=torch.tensor(lr)),
}


@in_turn("name", FUSED)
def test_readings_are_the_same_for_every_kind_of_optimizer(name):
    health = GradientHealth()
    learner(mlp(), None, health, GradientClip(0.3), opt=FUSED[name], lr=0.01)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.3)
    assert_matches(health, by_hand(mlp(), batches(), FUSED[name], lr=0.01, clip=clip))


# ---- precision


def overflowing(model, data):
    """Targets so large in some batches that gradients overflow in float16, but for a small scale."""
    return [(x, y * 3000 if k in (1, 4) else y) for k, (x, y) in enumerate(data)]


@in_turn("name", ["SGD", "fused SGD", "Adam", "fused Adam", "foreach AdamW"])
def test_under_a_scaler_gradients_are_unscaled_and_skipped_steps_counted(name):
    data = overflowing(mlp(), batches(7))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    steps = by_hand(mlp(), data, FUSED[name], lr=1e-3, scaler=scaler, autocast=torch.float16)
    n_skipped = sum(step.skipped for step in steps)
    assert 1 <= n_skipped < 7
    health, amp = GradientHealth(), MixedPrecision("fp16", init_scale=2.0**12, growth_interval=2)
    learner(mlp(), data, health, amp, opt=FUSED[name], lr=1e-3)
    assert health.skipped == amp.skipped == n_skipped
    assert health.step_series("skipped") == [float(step.skipped) for step in steps]
    assert health.step_series("scale") == [step.scale for step in steps]
    made = [k for k, step in enumerate(steps) if not step.skipped]
    for k, step in enumerate(steps):
        for p, grad in step.grads.items():
            stats = health.stats[k][p]
            assert stats["nonfinite"] == (~grad.isfinite()).sum()
            assert close(stats["update_ratio"], ratio(step.after[p], step.before[p]))
            assert close(stats["drift"], ratio(step.after[p], step.start[p]))
            if k in made:
                assert close(stats["norm"], norm_of(grad))
                assert close(stats["clipped_norm"], norm_of(grad))
            else:
                assert stats["update_ratio"] == 0


@pytest.mark.parametrize("name", ["SGD", "fused SGD", "fused Adam"])
def test_with_a_scaler_of_the_users_own_gradients_are_unscaled_too(name):
    """Without MixedPrecision nobody unscales them before the optimizer's step."""
    make = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**10)
    steps = by_hand(mlp(), batches(), FUSED[name], lr=0.01, scaler=make())
    health = GradientHealth()
    update = at("after_step", lambda cb: cb.learn.scaler.update(), order=50)
    learn = Learner(batches(), mlp(), F.mse_loss, FUSED[name], lr=0.01, cbs=[health, update])
    learn.scaler = make()
    fit(learn)
    assert_matches(health, steps)


@pytest.mark.parametrize("name", ["SGD", "fused Adam"])
def test_an_overflow_under_a_scaler_of_the_users_own_counts_as_skipped(name):
    data = [(x, y * (float("inf") if k == 1 else 1)) for k, (x, y) in enumerate(batches())]
    health = GradientHealth()
    update = at("after_step", lambda cb: cb.learn.scaler.update(), order=50)
    learn = Learner(data, mlp(), F.mse_loss, FUSED[name], lr=0.01, cbs=[health, update])
    learn.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    fit(learn)
    assert health.step_series("skipped") == [0, 1, 0, 0]
    assert health.skipped == 1
    assert health.series("0.weight", "update_ratio")[1] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_any_precision_are_read_in_full(dtype):
    def data():
        return [(x.to(dtype), y.to(dtype) * 100) for x, y in batches()]

    steps = by_hand(mlp(hidden=400).to(dtype), data(), lr=1e-3)
    health = GradientHealth(detail_every=1)
    learner(mlp(hidden=400).to(dtype), data(), health, lr=1e-3)
    assert_matches(health, steps, skip=("update_ratio", "drift"), rel=1e-3)
    for k, step in enumerate(steps):
        for name in ("0.bias", "2.weight", "2.bias"):
            for stat, since in (("update_ratio", step.before), ("drift", step.start)):
                true = ratio(step.after[name], since[name])
                assert close(health.stats[k][name][stat], true, rel=1e-3)


def test_squares_of_half_precision_gradients_do_not_overflow():
    model = nn.Linear(40, 40, bias=False).half()
    model.weight.grad = torch.full_like(model.weight, 3e4)
    health = GradientHealth()
    set_grad = at("after_backward", lambda cb: cb.model.weight.grad.fill_(3e4))
    learner(model, [torch.zeros(2, 40).half()], set_grad, health, lr=0.0, loss=lambda p: p.float().sum())
    assert close(health.stats[0]["weight"]["norm"], 3e4 * 40, rel=1e-3)
    assert health.stats[0]["weight"]["nonfinite"] == 0


# ---- accumulation


@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_accumulated_gradient_is_read_once_and_whole(clip):
    data = [*batches(5), batches(1, bs=3, seed=7)[0]]  # the last group is smaller
    by_norm = None if clip is None else partial(nn.utils.clip_grad_norm_, max_norm=clip)
    steps = by_hand(mlp(), data, n_acc=4, clip=by_norm)
    health = GradientHealth()
    learner(mlp(), data, health, GradientAccumulation(4), *([GradientClip(clip)] if clip else []))
    assert_matches(health, steps)


def test_accumulation_under_float16_gives_whole_unscaled_gradients():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    steps = by_hand(mlp(), batches(6), n_acc=3, scaler=scaler, autocast=torch.float16)
    health = GradientHealth()
    learner(mlp(), batches(6), health, GradientAccumulation(3), MixedPrecision("fp16", init_scale=2.0**8))
    assert_matches(health, steps, rel=5e-3)


def test_every_counts_steps_of_the_optimizer():
    steps = by_hand(mlp(), batches(12), n_acc=2)
    health = GradientHealth(every=3)
    learner(mlp(), batches(12), health, GradientAccumulation(2))
    assert len(health.stats) == 2
    for record, k in zip(health.stats, (0, 3), strict=True):
        for name, grad in steps[k].grads.items():
            assert close(record[name]["norm"], norm_of(grad))
            assert close(record[name]["update_ratio"], ratio(steps[k].after[name], steps[k].before[name]))
            assert close(record[name]["drift"], ratio(steps[k].after[name], steps[k].start[name]))
