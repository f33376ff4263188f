"""Steps that are never made, or that change nothing."""

import math

import pytest
import torch
from torch import nn

from hookcb import Callback, Diagnose, watch
from hookcb.diagnosis.faults.steps.not_stepped import MIN_BATCHES, NotStepped, Restored
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from tests.diagnosis.faults.support import followed, found_by, plain_weight, small_net, told, trained
from tests.diagnosis.support import STAYS, evidence, only, weight
from tests.support import along, each, first, in_turn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 3))


def after(model, n_steps, n_backward, **counts):
    """Findings after so many steps and backwards."""
    run = followed(NotStepped, model)[1]
    steps = run.measured(Steps)
    steps.n_backward = n_backward
    for name, n in counts.items():
        setattr(steps, name, n)
    return [x for x in told(run, NotStepped, n_steps=n_steps) if isinstance(x, Finding)]


def codes(*given):
    return [(x.code, x.param) for x in after(*given)]


def test_backwards_without_any_step_are_told():
    (found,) = after(net(), 0, 25)
    assert (found.code, found.layer, found.step, found.value) == ("param.not_stepped", "", 0, 0.0)
    assert "In 25 batches" in found.message


def test_nineteen_backwards_are_too_few():
    assert MIN_BATCHES == 20
    assert codes(net(), 0, 19) == []
    assert codes(net(), 0, 20) == [("param.not_stepped", "")]


def test_steps_that_are_made_or_weights_that_move_without_are_no_finding():
    model = net()
    assert codes(model, 1, 30) == []
    run = followed(NotStepped, model)[1]
    run.measured(Steps).n_backward = 30
    with torch.no_grad():
        model[0].weight += 1e-3  # by hand, as p -= lr * p.grad
    assert not [x for x in told(run, NotStepped) if isinstance(x, Finding)]


def test_a_frozen_model_has_no_step_to_make():
    assert codes(net().requires_grad_(False), 0, 30) == []


def test_a_loop_that_is_only_looked_at_has_none_either():
    assert codes(net(), 0, 0) == []


def test_steps_without_any_backward_are_told_as_that():
    model = net()
    assert after(model, 19, 0) == []
    assert after(model, 25, 0, n_alone=6) == []
    (found,) = after(model, 20, 0)
    assert (found.code, "reach the model before any of 20" in found.message) == ("param.not_stepped", True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(on_sick="ignore")) as w:
        for _ in range(24):
            model(torch.randn(2, 8)).square().mean()  # a loss whose backward is forgotten
            opt.step()
        verdict = w.diagnose()
    assert [x.code for x in verdict.findings] == ["param.not_stepped"]
    assert "loss.backward() is missing" in verdict.primary.causes[0]


def test_gradients_of_another_models_loss_need_no_step():
    """As those that reach a target network, or one that gives features."""
    assert [x.severity for x in after(net(), 0, 30, n_given=30)] == ["info"]
    assert [x.severity for x in after(net(), 0, 30, n_given=15)] == ["error"]


# ---- parameters that stay


def still(**kwargs):
    n = {"update_ratio": [0.0] * 40, "zero_rows": [0.0] * 40, "rms": [1.0] * 40, "abs_max": [4.0] * 40}
    return weight("still", **(n | kwargs))


MOVES = weight("moves", update_ratio=[1e-3] * 40)


def test_a_parameter_that_has_gradients_and_stays_is_told():
    param = still(update_ratio=[1e-3] * 10 + [0.0] * 30)
    found = only(NotStepped().findings, evidence(MOVES, param))
    assert (found.code, found.severity, found.param) == ("param.not_stepped", "error", "still.weight")
    assert (found.step, found.last_step) == (10, 39)


@in_turn(
    "param",
    [
        still(is_optimized=False),
        still(kind="Embedding"),
        still(clipped_norm=[1e-7] * 40),
        still(clipped_norm=[1e-2] * 40, resolution=2.0**-8),  # swallowed by bfloat16
        still(zero_rows=[0.5] * 40),
        still(shape=(100, 100), rms=[0.01] * 40),  # too sparse for a sample of elements
        still(update_ratio=[0.0] * 36 + [1e-3] * 4),
        still(clipped_norm=[math.nan] * 40),  # skipped
        still(update_ratio=[1e-3] * 36 + [0.0] * 4),
    ],
)
def test_parameters_that_stay_for_a_reason_are_no_finding(param):
    assert isinstance(only(NotStepped().findings, evidence(MOVES, param)), Passed)


@pytest.mark.parametrize("lr", [[0.1] * 20 + [0.0] * 20, [0.0] * 40])
def test_a_learning_rate_that_was_driven_to_zero_is_told_with_its_step(lr):
    found = only(NotStepped().findings, evidence(MOVES, lr=lr, loss=STAYS))
    assert (found.code, found.step, found.layer) == ("param.not_stepped", lr.index(0.0), "")
    assert ("scheduler" in found.next_steps[0]) == (lr[0] > 0)


@in_turn(
    ("lr", "loss"),
    [
        ([0.1 * (1 + math.cos(math.pi * i / 39)) / 2 for i in range(40)], STAYS),
        ([0.0, *(0.01 * i for i in range(39))], STAYS),
        ([0.0] * 15 + [0.1] * 25, STAYS),
        ([0.1] * 31 + [0.0] * 9, STAYS),
        ([0.1] * 188 + [0.0] * 12, STAYS),
        ([0.1] * 60 + [0.0] * 40, [1.0] * 10 + [1e-3] * 90),
    ],
)
def test_a_rate_of_zero_at_the_ends_of_a_schedule_is_no_finding(lr, loss):
    assert isinstance(only(NotStepped().findings, evidence(MOVES, lr=lr, loss=loss)), Passed)


def test_a_single_step_is_too_few_to_stay():
    assert isinstance(only(NotStepped().findings, evidence(weight(update_ratio=[0.0]))), Skipped)


# ---- cleared gradients


@pytest.mark.parametrize(("to_none", "every"), first(along([True, False], [1, 2])))
def test_gradients_that_are_cleared_before_each_step_are_named(to_none, every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(40):
            model(torch.randn(8, 4)).square().mean().backward()
            if i % every == 0:
                opt.zero_grad(set_to_none=to_none)
            opt.step()
            opt.zero_grad()
    codes = [finding.code for finding in w.diagnose().findings if finding.severity == "error"]
    assert ("param.not_stepped" in codes) == (every == 1)
    assert "param.unreachable" not in codes


def stepping(*params, n_steps=40):
    return Run(params={p.name: p for p in params}, n_steps=n_steps)


@in_turn(
    ("ratios", "has_moved", "n_steps", "kind"),
    [
        ([1e-3] * 6, True, 40, Passed),
        ([1e-3] * 6, False, 19, Skipped),
        ([1e-9] * 6, False, 40, Skipped),
        ([1e-3] * 4, False, 40, Skipped),
    ],
)
def test_weights_that_moved_or_were_barely_inspected_are_not_found(ratios, has_moved, n_steps, kind):
    param = plain_weight("body", update_ratio=ratios)
    param.has_moved = has_moved
    (found,) = found_by(Restored, stepping(param, n_steps=n_steps))
    assert isinstance(found, kind)


@pytest.mark.slow
def test_weights_that_are_put_back_after_each_step_are_found():
    kept = {}

    def keep(cb):
        kept["weight"] = cb.model[2].weight.detach().clone()

    def put(cb):
        with torch.no_grad():
            cb.model[2].weight.copy_(kept["weight"])

    verdict = trained(small_net(), [Callback(name="putter", before_fit=keep, after_batch=put)])
    (found,) = [f for f in verdict.findings if f.code == "param.restored"]
    assert (found.layer, found.param) == ("2", "2.weight")
    assert "bit-identical" in found.message
    assert "param.restored" not in [f.code for f in trained(small_net()).findings]


# ---- steps without effect, in few looks


class Stalling(torch.optim.Adam):
    """Makes only its first steps."""

    n_made, n_calls = 30, 0

    def step(self, closure=None):
        self.n_calls += 1
        return super().step(closure) if self.n_calls <= self.n_made else None


class Summing(Stalling):
    """Makes every fourth step."""

    def step(self, closure=None):
        self.n_calls += 1
        return torch.optim.Adam.step(self, closure) if self.n_calls % 4 == 0 else None


def stepped_by(opt, model, n=60, between=lambda i: None):
    with watch(model, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(n):
            opt.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            opt.step()
            between(i)
    return [f for f in w.diagnose().findings if f.code == "param.not_stepped" and f.severity != "info"]


@pytest.mark.slow
@pytest.mark.parametrize("n_made", each(2, [0, 3, 30, 45]))
def test_steps_that_stop_to_have_an_effect_are_found(n_made):
    model = net()
    opt = Stalling(model.parameters(), lr=1e-2)
    opt.n_made = n_made
    (found,) = stepped_by(opt, model)
    assert (found.severity, found.param) == ("error", "0.weight")
    assert found.step - n_made in (0, 1)
    assert "5 more parameters are" in found.message


@pytest.mark.slow
def test_an_optimizer_that_adds_up_gradients_is_no_finding():
    model = net()
    for n in (58, 59, 60, 61):
        assert stepped_by(Summing(model.parameters(), lr=1e-2), model, n=n) == []


@pytest.mark.slow
def test_a_single_step_without_effect_is_no_finding():
    model = net()
    opt = Stalling(model.parameters(), lr=1e-2)
    opt.n_made = 59
    assert stepped_by(opt, model) == []


@pytest.mark.slow
def test_rate_zero_and_frozen_weights_are_no_steps_without_effect():
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters(), "lr": 1e-2}]
    assert stepped_by(torch.optim.Adam(groups), model) == []
    model = net()

    def freeze(i):
        if i == 20:
            model[0].requires_grad_(False)

    assert stepped_by(torch.optim.Adam(model.parameters(), 1e-2), model, between=freeze) == []


@pytest.mark.slow
def test_optimizers_that_take_turns_are_no_steps_without_effect():
    model = net()
    parts = [torch.optim.Adam(model[i].parameters(), lr=1e-2) for i in (0, 3)]
    with watch(model, parts, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(80):
            model.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            parts[i // 10 % 2].step()
    assert "param.not_stepped" not in [f.code for f in w.diagnose().findings]


@pytest.mark.slow
def test_rows_of_an_embedding_that_are_not_in_a_batch_do_not_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Flatten(), nn.Linear(32, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(40):
            opt.zero_grad()
            model(torch.randint(0, 7, (16, 2))).square().mean().backward()
            opt.step()
    assert "param.not_stepped" not in [f.code for f in w.diagnose().findings]


# ---- steps that are no longer made


@pytest.mark.slow
@pytest.mark.parametrize(("n_stepped", "is_found"), [(25, True), (45, False)])
def test_a_loop_that_makes_no_step_any_more_is_found_if_it_does_so_for_most_of_the_time(n_stepped, is_found):
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(80):
            opt.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            if i < n_stepped:
                opt.step()
    found = [(f.severity, f.step) for f in w.diagnose().findings if f.code == "param.not_stepped"]
    assert found == ([("warning", n_stepped - 1)] if is_found else [])
