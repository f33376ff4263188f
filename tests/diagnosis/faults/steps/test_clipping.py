"""Clipping, on made-up numbers and in loops that clip before hookcb reads gradients."""

import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import OptState

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.steps.clipping import ConstantClipping
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from tests.diagnosis.support import FALLS, STAYS, evidence, only, series, weight
from tests.support import first, in_turn


def clipped(coef, is_adaptive=False, loss=STAYS, update=1e-6, kind="mse"):
    coef = coef if isinstance(coef, list) else [coef] * 40
    param = weight(is_adaptive=is_adaptive, update_ratio=[update] * 40)
    return evidence(param, loss=loss, loss_kind=kind, steps={"clip_coef": series(coef)})


@in_turn(
    ("given", "severity"),
    [
        (clipped(1e-3), "error"),
        (clipped(1e-3, is_adaptive=True), "warning"),
        (clipped(1e-6, loss=FALLS), "warning"),
        (clipped(1e-3, loss=()), "error"),
    ],
)
def test_clipping_each_gradient_to_almost_nothing_is_told(given, severity):
    found = only(ConstantClipping().findings, given)
    assert (found.code, found.severity) == ("clip.always", severity)
    assert ("divides by the size" in found.message) == any(p.is_adaptive for p in given.params.values())


@pytest.mark.parametrize(
    ("is_adaptive", "kind", "is_note"), [(True, "mse", True), (False, "", True), (False, "mse", False)]
)
def test_clipping_of_steps_that_stay_large_is_a_note_for_adam_or_an_objective(is_adaptive, kind, is_note):
    found = only(ConstantClipping().findings, clipped(1e-3, is_adaptive, update=1e-3, kind=kind))
    assert (found.severity == "info", "this does little harm" in found.message) == (is_note, is_note)


@in_turn(
    "given",
    [
        clipped(0.1),
        clipped(1.0),
        clipped([1e-3] * 37 + [1.0] * 3),
        clipped(1e-3, loss=FALLS),
        clipped(1 / 1024),  # a loss that is scaled by hand
    ],
)
def test_clipping_that_is_usual_is_no_finding(given):
    assert isinstance(only(ConstantClipping().findings, given), Passed)


def test_nine_records_are_too_few_for_clipping():
    assert isinstance(only(ConstantClipping().findings, clipped([1e-9] * 9)), Skipped)


# ---- loops that clip unseen


def followed(change, loss_of=F.mse_loss, lr=0.05, n=40, reports=False):
    """Evidence of a plain loop that changes its gradients before each step, and their norms."""
    torch.manual_seed(0)
    model, norms = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), []
    opt, g = torch.optim.SGD(model.parameters(), lr=lr), torch.Generator().manual_seed(0)
    with watch(model, opt, Diagnose(on_sick="ignore")) as w:
        for _ in range(n):
            x = torch.randn(8, 3, generator=g)
            loss_of(model(x), x.sum(1, keepdim=True)).backward()
            if reports:
                w.begin_step(opt)
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            change(model.parameters())
            opt.step()
            opt.zero_grad()
        found = w.diagnosis.evidence()
    return found, [norms[step] for step in found.steps["total_norm"].steps]


def clip(to):
    return lambda params: nn.utils.clip_grad_norm_(params, to)


@pytest.mark.parametrize("reports", first([False, True]))
def test_the_norms_before_clipping_are_known_in_a_loop_that_clips_unseen(reports):
    found, norms = followed(clip(1e-3), reports=reports)
    assert found.steps["total_norm"].values == pytest.approx(norms, rel=1e-3)
    assert found.steps["clip_coef"].values == pytest.approx([1e-3 / x for x in norms], rel=1e-3)
    told = only(ConstantClipping().findings, found)
    assert (told.code, told.severity) == ("clip.always", "error")
    assert f"a norm of {statistics.median(norms):.2g}" in told.next_steps[0]


@pytest.mark.parametrize("change", first([lambda params: None, clip(1e3)]))
def test_gradients_that_nothing_clips_are_not_said_to_be_clipped(change):
    found, norms = followed(change)
    assert found.steps["clip_coef"].values == pytest.approx([1.0] * len(norms))
    assert found.steps["total_norm"].values == pytest.approx(norms)
    assert only(ConstantClipping().findings, found).text == "clipping (0% of steps, median ×1)"


@pytest.mark.slow
def test_clipping_each_gradient_does_no_harm_if_steps_stay_as_large():
    """The loss falls by less than a fifth in these batches, and no gradient is cut to a hundredth."""
    found, norms = followed(clip(0.1), loss_of=lambda pred, y: 9 + F.mse_loss(pred, y))
    assert min(norms) > 0.1
    assert isinstance(only(ConstantClipping().findings, found), Passed)


@pytest.mark.slow
def test_an_objective_that_need_not_fall_is_neither_flat_nor_held_back_by_clipping():
    """As that of a policy, whose gradients are all clipped to a small part."""

    def objective(pred, y):
        return 5e3 + 1e3 * (pred * torch.randn_like(pred)).mean()

    found, _ = followed(clip(0.5), objective, n=60)
    assert max(found.steps["clip_coef"].values) < 0.01
    told = {x.code: x.severity for x in judge(found).findings}
    assert told.get("clip.always") == "info"
    assert "loss.flat" not in told


def test_the_scale_of_a_scaler_is_no_clipping_nor_is_a_gradient_of_another_batch():
    clipping, p, opt = ConstantClipping(), nn.Parameter(torch.ones(4)), object()
    run = Run(loop=SimpleNamespace(is_external=True, facts=SimpleNamespace(reports_steps=False), opt=opt))
    run.measured(Steps).first_param, run.loop.model = p, nn.Linear(1, 1)
    clipping.on_model(run)
    steps = [(3.0 / 1024, 1024.0, 0), (1.5, 1.0, 1), (3.0, 1.0, 3)]
    for step, (at_step, scale, of_batch) in enumerate(steps):
        run.loop.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        run.loop.train_iter, p.grad = step, torch.full((4,), 3.0)
        clipping.on_gradients(run)
        scaler._per_optimizer_states[id(opt)]["stage"] = OptState.UNSCALED
        run.loop.train_iter, p.grad = of_batch, torch.full((4,), at_step)
        clipping.on_step(run)
    clipping.tell(run)
    assert run.steps["clip_coef"] == Series([0, 1], [1.0, 0.5])
