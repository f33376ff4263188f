"""Gradients that are clipped while a GradScaler has them multiplied by its scale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.steps.scaled_clipping import ScaledClipping, is_clipped_while_scaled
from hookcb.diagnosis.faults.steps.small_updates import _why_small
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.support import numbers, plain_weight, small_net
from tests.diagnosis.support import only, series
from tests.support import along, first, in_turn


def recorded(norms, scales, before=1e3):
    steps = {"clipped_total_norm": norms, "scale": scales, "total_norm": [before] * len(norms)}
    return Run(steps={name: series(values) for name, values in steps.items()})


def watched(clip, opt=torch.optim.SGD, unscale=False, n=30):
    model, scaler = small_net(), torch.amp.GradScaler("cpu", growth_interval=10)
    opt = opt(model.parameters(), lr=1e-3)
    with watch(model, opt, scaler=scaler, cbs=Diagnose("ignore", show=False)) as w:
        for i in range(n):
            x = 10 * numbers(16, 4, seed=i)
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
            scaler.scale(loss).backward()
            if unscale if isinstance(unscale, bool) else i < unscale:
                scaler.unscale_(opt)
            clip(model.parameters())
            scaler.step(opt)
            scaler.update()
    return w.diagnose()


def by_norm(params):
    nn.utils.clip_grad_norm_(params, 0.5)


def by_value(params):
    nn.utils.clip_grad_value_(params, 1.0)


@pytest.mark.parametrize("clip", first([by_norm, by_value]))
def test_clipping_before_unscaling_is_told_first(clip):
    verdict = watched(clip)
    assert (verdict.primary.code, verdict.primary.severity) == ("clip.scaled", "error")
    assert verdict.primary.limit == pytest.approx(0.5 if clip is by_norm else 1.0, rel=1e-3)


@pytest.mark.parametrize(("limit", "n", "is_told"), [(0.5, 70, True), (0.5, 30, False), (32768.0, 70, False)])
def test_a_lost_call_of_unscale_in_mid_run_is_told_from_its_step_on(limit, n, is_told):
    verdict = watched(lambda params: nn.utils.clip_grad_norm_([*params], limit), unscale=20, n=n)
    found = [x for x in verdict.findings if x.code == "clip.scaled"]
    assert [(x.severity, x.step, x.last_step) for x in found] == [("error", 20, n - 1)] * is_told
    for finding in found:
        assert "In 50 steps in a row, from step 20 on, clip_grad_norm_ came before" in finding.message


@pytest.mark.slow
def test_it_is_a_warning_for_optimizers_that_divide_by_the_size_of_gradients():
    assert watched(by_norm, torch.optim.AdamW).primary.code == "clip.scaled"


@pytest.mark.parametrize(
    ("clip", "limit"), first(along([by_norm, by_value, lambda params: None], [1.0, 1e-3]))
)
def test_clipping_after_unscaling_is_not(clip, limit):
    def scaled_clip(params):
        params = list(params)
        clip(params)
        nn.utils.clip_grad_norm_(params, limit)

    assert not [x for x in watched(scaled_clip, unscale=True).findings if x.code == "clip.scaled"]


def hooked(limit, opt=torch.optim.SGD, scale=2.0**16):
    """A verdict on a training whose parameters have hooks that clamp gradients in the backward."""
    model, scaler = small_net(), torch.amp.GradScaler("cpu", init_scale=scale)
    opt = opt(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-limit, limit))
    with watch(model, opt, scaler=scaler, cbs=Diagnose("ignore", show=False)) as w:
        for i in range(40):
            x = 10 * numbers(16, 4, seed=i)
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return w.diagnose()


@pytest.mark.slow
def test_hooks_that_clamp_scaled_gradients_are_told_and_no_higher_rate_is_advised():
    verdict = hooked(0.1)
    assert (verdict.primary.code, verdict.primary.severity) == ("clip.scaled", "error")
    assert not any("Multiply" in step for x in verdict.findings for step in x.next_steps)


@pytest.mark.parametrize(
    ("a", "b", "scale", "is_clipped"),
    [
        ([3e-6] * 8, [3e-6] * 8, 1024.0, True),
        ([3e-6] * 8, [2e-6] * 8, 1024.0, False),
        ([3.0] * 8, [3.0] * 8, 1.0, False),
    ],
)
def test_a_higher_rate_is_not_advised_where_maxima_are_shared_and_scaled(a, b, scale, is_clipped):
    params = {name: plain_weight(name, abs_max=sizes) for name, sizes in (("a", a), ("b", b))}
    run = Run(steps={"scale": series([scale] * 8)}, params=params)
    assert is_clipped_while_scaled(run) is is_clipped
    assert any("Multiply" in step for step in _why_small(run, 1e-7)[1]) is not is_clipped


@pytest.mark.slow
def test_hooks_that_clamp_to_the_scaled_limit_are_right():
    assert not [x for x in hooked(0.1 * 2.0**16).findings if x.code == "clip.scaled"]


@in_turn(
    ("norms", "scales", "limit"),
    [
        ([1 / 65536] * 8, [65536.0] * 8, 1.0),
        ([2.5 / 1024] * 8, [1024.0] * 8, 2.5),
        ([0.123 / 1024] * 4 + [0.123 / 2048] * 4, [1024.0] * 4 + [2048.0] * 4, 0.123),
        ([1.0 / 65536] * 12 + [0.3 / 65536], [65536.0] * 13, 1.0),
        ([0.123 / 1024] * 8, [1024.0] * 8, 0.0),  # not a limit that somebody has written
        ([1e-3] * 8, [1024.0] * 8, 0.0),
        ([1e-3] * 8, [2.0**13] * 8, 0.0),
        ([1.0] * 8, [65536.0] * 8, 0.0),
        ([0.5 / 65536, 0.3 / 65536] * 6, [65536.0] * 12, 0.0),
        ([1 / 64] * 8, [64.0] * 8, None),  # so low a scale tells little
        ([1 / 65536] * 4, [65536.0] * 4, None),
    ],
)
def test_the_norm_times_the_scale_is_the_limit(norms, scales, limit):
    found = only(ScaledClipping, recorded(norms, scales))
    if limit:
        assert found.limit == pytest.approx(limit)
    else:
        assert isinstance(found, Skipped if limit is None else Passed)


def test_small_gradients_that_nothing_has_clipped_are_not_told():
    given = recorded([1 / 65536] * 8, [65536.0] * 8, before=1 / 65536)
    assert isinstance(only(ScaledClipping, given), Passed)
