"""The verdict on one backward: what it names, what it leaves alone, and what it cannot show."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Verdict, check_gradients
from hookcb.diagnosis.fault import FAULTS as KINDS
from tests.gradients.support import HEALTHY, OTHER_HEALTHY, at, batches, mlp, run, seeded
from tests.support import in_terminal, in_turn

NAN = math.nan


def after_backward(model, d=3, factor=1.0):
    """The model with gradients of a regression."""
    x, y = batches(1, bs=32, d=d)[0]
    (F.mse_loss(model(x), y) * factor).backward()
    return model


def sigmoids(depth=30, width=16):
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Sigmoid())]
    return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 1))


def deep():
    return nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 1))


class Part(nn.Module):
    """Of which a layer is not used, and one is frozen."""

    def __init__(self):
        super().__init__()
        self.net, self.idle, self.fixed = mlp(), nn.Linear(3, 3), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.net(x)


class Wave(nn.Module):
    def forward(self, x):
        return (20 * x).sin()


def waves():
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), Wave())]
    return nn.Sequential(nn.Linear(3, 16), Wave(), *layers, nn.Linear(16, 1))


def dead():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(net[0].bias, -100.0)
    return net


class Stop(Exception):
    """The first backward is done."""


@in_turn("name", [*HEALTHY, *OTHER_HEALTHY])
def test_the_first_backward_of_a_healthy_training_gives_no_alarm(name):
    verdicts = []

    def look(cb):
        verdicts.append(check_gradients(cb.model))
        raise Stop

    cb = at("after_backward", look, order=-100, name="looking")
    with pytest.raises(Stop):
        (OTHER_HEALTHY | {key: run(*given[:2], loss=given[2]) for key, given in HEALTHY.items()})[name](cb, 0)
    assert verdicts[0].findings == ()


@pytest.mark.parametrize("factor", [1e-7, 1e6])
def test_a_loss_in_another_unit_is_no_alarm(factor):
    """Scales are relative to the model's own: all gradients by the same factor are as healthy as before."""
    assert check_gradients(after_backward(seeded(deep), d=8, factor=factor)).findings == ()


@pytest.mark.parametrize("factor", [1.0, 1e11])
def test_the_size_of_all_gradients_is_shown_and_not_judged(factor):
    model = after_backward(seeded(deep), d=8, factor=factor)
    norm = math.hypot(*(float(p.grad.norm()) for p in model.parameters()))
    text = " ".join(check_gradients(model).coverage)
    assert f"with each other; the norm of all gradients, {norm:.2g}, is not judged" in text


FAULTS = {
    "vanishing": (sigmoids, "grad.attenuated", "error", "1.weight"),
    "exploding": (waves, "grad.exploding", "error", "0.weight"),
    "zero": (dead, "unit.dead", "error", ""),
    "unused": (Part, "param.unreachable", "warning", "idle.weight"),
}


@in_turn(("make", "code", "severity", "param"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named(make, code, severity, param):
    (finding,) = check_gradients(after_backward(seeded(make))).findings
    assert (finding.code, finding.severity, finding.param) == (code, severity, param)
    assert param in finding.message
    assert finding.next_steps


def test_all_parameters_without_a_gradient_are_named_and_frozen_ones_are_not():
    message = check_gradients(after_backward(Part())).primary.message
    assert message.startswith("Parameters idle.weight, idle.bias received no gradient in one backward;")


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_named(bad):
    model = after_backward(mlp())
    model[2].weight.grad[0, 1:3] = bad
    verdict = check_gradients(model)
    assert (verdict.status, verdict.primary.code) == ("sick", "nonfinite.first")
    assert (verdict.primary.param, verdict.primary.value) == ("2.weight", 2)


def test_a_healthy_verdict_says_what_one_backward_cannot_show():
    verdict = check_gradients(after_backward(mlp()))
    assert isinstance(verdict, Verdict)
    assert verdict.headline.startswith("HEALTHY  as far as checked: ")
    assert verdict.n_checked < verdict.n_checks / 2
    assert "one backward" in str(verdict)
    missing = {code for gap in verdict.gaps for code in gap.codes}
    assert {"loss.flat", "update.too_large", "param.not_in_optimizer", "init.zero"} <= missing <= {*KINDS}
    assert not {"grad.attenuated", "grad.exploding", "nonfinite.first", "param.unreachable"} & missing


def test_names_with_markup_are_printed_as_they_are():
    model = nn.Sequential()
    model.add_module("[red]x", nn.Linear(3, 1))
    after_backward(model, factor=NAN)
    assert "[red]x.weight" in in_terminal(check_gradients(model))


def test_a_model_without_any_gradient_and_what_is_not_a_model_are_refused_in_words():
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        check_gradients(mlp())
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got 'resnet'"):
        check_gradients("resnet")


def test_it_changes_nothing():
    model = after_backward(mlp())
    before = [(p.detach().clone(), p.grad.clone(), p.grad) for p in model.parameters()]
    check_gradients(model)
    for p, (value, grad, same) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, grad)
        assert p.grad is same
