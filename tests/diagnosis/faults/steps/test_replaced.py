"""Parameters that change under an optimizer: new objects, another dtype or device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.cli.main import main
from tests.support import first


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)


def trained(change, make=momentum, n=120, at=60):
    """Verdict of a loop in which `change(model)` may return a new optimizer at one step."""
    model = net()
    opt = make(model)
    g = torch.Generator().manual_seed(0)
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(n):
            if i == at:
                opt = change(model) or opt
            x = torch.randn(16, 8, generator=g)
            opt.zero_grad()
            pred = model(x.to(next(model.parameters()).dtype)).float()
            F.mse_loss(pred, x.sum(1, keepdim=True)).backward()
            opt.step()
    return w.diagnose()


def found(verdict, code):
    return [(f.severity, f.param) for f in verdict.findings if f.code == code]


def new_head(model):
    model[2] = nn.Linear(32, 1)


def assigned(model):
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(("change", "param"), first([(new_head, "2.weight"), (assigned, "0.weight")]))
def test_parameters_that_the_optimizer_does_not_hold_any_more_are_found(change, param):
    verdict = trained(change)
    assert found(verdict, "param.replaced") == [("error", param)]
    assert verdict.primary.code == "param.replaced"
    assert verdict.primary.step <= 60


@pytest.mark.slow
def test_a_load_that_assigns_is_named_as_the_cause():
    assert "assign=True" in trained(assigned).primary.causes[0]
    assert "assign=True" not in trained(new_head).primary.causes[0]


@pytest.mark.slow
def test_nothing_is_said_of_new_parameters_with_a_new_optimizer():
    def change(model):
        new_head(model)
        return adam(model)

    assert found(trained(change), "param.replaced") == []


@pytest.mark.slow
def test_nothing_is_said_of_new_parameters_that_the_loop_updates_by_hand():
    def change(model):
        new_head(model)
        for p in model[2].parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "data", p.data - 0.01 * p.grad))

    assert found(trained(change), "param.replaced") == []


@pytest.mark.slow
def test_nothing_is_said_of_a_frozen_replacement():
    def change(model):
        new_head(model)
        model[2].requires_grad_(False)

    assert found(trained(change), "param.replaced") == []


@pytest.mark.slow
def test_nothing_is_said_of_a_replacement_shortly_before_the_end():
    assert found(trained(new_head, at=110), "param.replaced") == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_that_changes_between_steps_of_one_optimizer_is_found(dtype):
    verdict = trained(lambda model: model.to(dtype) and None)
    assert found(verdict, "param.converted") == [("warning", "0.weight")]
    assert verdict.primary.code == "param.converted"
    assert verdict.primary.step < 60
    assert "from float32 to" in verdict.primary.message


def test_a_more_precise_dtype_is_a_note():
    assert found(trained(lambda model: model.double() and None), "param.converted") == [("info", "0.weight")]


@pytest.mark.slow
def test_nothing_is_said_of_a_dtype_that_changes_with_a_new_optimizer_or_before_the_first_step():
    assert found(trained(lambda model: adam(model.bfloat16())), "param.converted") == []
    assert found(trained(lambda model: model.bfloat16() and None, at=0), "param.converted") == []


@pytest.mark.slow
def test_nothing_is_said_of_a_copy_or_an_evaluation_in_half_precision():
    def change(model):
        copy.deepcopy(model).half()
        model.half()
        model.float()

    assert found(trained(change), "param.converted") == []


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), 1e-2)
for i in range(80):
    if i == 40:
        {change}
    x = torch.randn(16, 8).to(model[0].weight.dtype)
    opt.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    opt.step()
"""


@pytest.fixture
def by_command(tmp_path, capsys):
    """What `hookcb diagnose` prints of a script that makes a change."""

    def by_command(change):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(change=change))
        main(["diagnose", str(script)])
        return capsys.readouterr().out

    return by_command


@pytest.mark.slow
def test_the_command_names_the_states_that_make_a_step_fail(by_command):
    out = by_command("model.half()")
    assert "SICK  Parameters change their dtype under the optimizer" in out
    assert "exp_avg" in out


@pytest.mark.slow
def test_an_error_outside_of_a_step_is_not_told(by_command):
    change = (
        "opt.state[model[0].weight]['exp_avg'] = torch.zeros(32, 8, dtype=torch.float64); raise RuntimeError"
    )
    assert "param.converted" not in by_command(change)


@pytest.mark.slow
def test_the_command_finds_parameters_that_a_load_replaces(by_command):
    change = "model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)"
    assert "SICK  The optimizer holds parameters that were replaced" in by_command(change)
