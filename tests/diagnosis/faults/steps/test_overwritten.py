"""Weights that something other than the optimizer writes in the middle of a training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Diagnose, Learner, watch
from hookcb.cli.main import main
from tests.support import each, first, fit

CODE = "param.overwritten"


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 1)
    )


def batches(n):
    g = torch.Generator().manual_seed(0)
    return [(x := torch.randn(16, 8, generator=g), x.sum(1, keepdim=True)) for _ in range(n)]


def adam(model, **kwargs):
    return torch.optim.Adam(model.parameters(), 1e-2, **kwargs)


def trained(after_step, n=120, model=None, opt=None):
    """Verdict of a loop that calls `after_step(i)` after each step."""
    model = net() if model is None else model
    opt = adam(model) if opt is None else opt
    with watch(model, Diagnose(show=False, on_sick="ignore")) as w:
        for i, (x, y) in enumerate(batches(n)):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
            after_step(i)
    return w.diagnose()


def found(verdict):
    return [(f.severity, f.step, f.param) for f in verdict.findings if f.code == CODE]


def initialize(model):
    for m in model:
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()


@pytest.mark.parametrize("step", first([10, 63, 64, 100]))
def test_weights_that_are_initialized_again_are_found_with_their_step(step):
    model = net()
    verdict = trained(lambda i: initialize(model) if i == step else None, model=model)
    assert verdict.primary.code == CODE
    assert found(verdict) == [("warning", step, "0.weight")]
    assert f"Between step {step} and the next forward" in verdict.primary.message


@pytest.mark.slow
def test_one_layer_that_is_initialized_again_is_named():
    model = net()
    verdict = trained(lambda i: model[3].reset_parameters() if i == 80 else None, model=model)
    assert (verdict.primary.layer, verdict.primary.param) == ("3", "3.weight")


@pytest.mark.slow
def test_weights_of_another_model_that_are_loaded_are_found():
    model, other = net(), net()
    initialize(other)
    assert found(
        trained(lambda i: model.load_state_dict(other.state_dict()) if i == 90 else None, model=model)
    )[0] == ("warning", 90, "0.weight")


@pytest.mark.slow
def test_the_first_weights_that_are_loaded_again_undo_the_training():
    model = net()
    first = copy.deepcopy(model.state_dict())
    verdict = trained(lambda i: model.load_state_dict(first) if i == 90 else None, model=model)
    assert found(verdict) == [("warning", 90, "0.weight")]
    assert "the training up to then is lost" in verdict.primary.message


@pytest.mark.slow
def test_a_write_through_data_is_seen_in_the_first_steps_as_it_has_no_version():
    model = net()

    def write(i):
        if i == 30:
            model[3].weight.data = torch.randn(48, 64)

    assert found(trained(write, model=model)) == [("warning", 30, "3.weight")]


@pytest.mark.slow
def test_corrupt_elements_are_found_with_their_number():
    model = net()

    def write(i):
        if i == 40:
            model[3].weight.data[0, 0:6] = 1e9

    verdict = trained(write, model=model)
    (finding,) = [f for f in verdict.findings if f.code == CODE]
    assert (finding.param, finding.limit) == ("3.weight", 10.0)
    assert "not finite, or more than 10 times" in finding.message


@pytest.mark.slow
def test_a_learner_sees_what_a_callback_writes():
    def write(cb):
        if cb.train_iter == 70:
            initialize(cb.learn.model)

    learn = Learner(batches(100), net(), F.mse_loss, torch.optim.Adam, lr=1e-2)
    verdict = fit(learn, 1, cbs=[Diagnose(show=False), Callback(after_batch=write)]).diagnose()
    assert found(verdict) == [("warning", 70, "0.weight")]


def swapped(model, mean, is_by_data):
    kept = [p.data if is_by_data else p.data.clone() for p in model.parameters()]
    for p, x in zip(model.parameters(), mean, strict=True):
        if is_by_data:
            p.data = x.clone()
        else:
            p.data.copy_(x)
    model.eval()
    model(torch.zeros(2, 8))
    model.train()
    for p, x in zip(model.parameters(), kept, strict=True):
        if is_by_data:
            p.data = x
        else:
            p.data.copy_(x)


@pytest.mark.parametrize("is_by_data", first([False, True]))
def test_weights_that_are_swapped_and_have_their_values_back_are_not_told(is_by_data):
    model = net()
    mean = [p.detach() * 0.5 for p in model.parameters()]
    assert (
        found(trained(lambda i: swapped(model, mean, is_by_data) if i in (20, 90) else None, model=model))
        == []
    )


@pytest.mark.slow
def test_the_same_values_that_are_loaded_are_not_told():
    model = net()
    again = trained(lambda i: model.load_state_dict(copy.deepcopy(model.state_dict())), model=model)
    assert found(again) == []


@torch.no_grad()
def clamped(model, i):
    for p in model.parameters():
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def pruned_once(model, i):
    if i == 90:
        for p in model.parameters():
            p.mul_(p.abs() > p.abs().median())


@torch.no_grad()
def rounded(model, i):
    for p in model.parameters():
        p.copy_((64 * p).round() / 64)


@torch.no_grad()
def noisy(model, i):
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("write", each(2, [clamped, pruned_once, rounded, noisy]))
def test_what_loops_do_to_weights_on_purpose_is_a_note(write):
    model = net()
    verdict = trained(lambda i: write(model, i), model=model)
    assert [severity for severity, *_ in found(verdict)] == ["info"]


@pytest.mark.slow
def test_lookahead_and_restored_weights_are_notes():
    model = net()
    slow, best = [p.detach().clone() for p in model.parameters()], {}

    @torch.no_grad()
    def synchronize(i):
        for p, x in zip(model.parameters(), slow, strict=True) if i == 99 else ():
            p.copy_(x.lerp_(p, 0.5))

    assert [severity for severity, *_ in found(trained(synchronize, model=model))] == ["info"]
    model = net()

    def restore(i):
        if i == 70:
            best.update(copy.deepcopy(model.state_dict()))
        if i == 100:
            model.load_state_dict(best)

    assert [severity for severity, *_ in found(trained(restore, model=model))] == ["info"]


@pytest.mark.slow
def test_a_new_optimizer_afterwards_makes_it_a_new_training():
    model = net()
    with watch(model, Diagnose(show=False)) as w:
        for _ in range(2):
            initialize(model)
            opt = adam(model)
            for x, y in batches(50):
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                opt.step()
    assert [severity for severity, *_ in found(w.diagnose())] == ["info"]


@pytest.mark.slow
def test_an_optimizer_whose_state_is_loaded_too_starts_anew():
    model = net()
    opt = adam(model)
    first = copy.deepcopy((model.state_dict(), opt.state_dict()))

    def load(i):
        if i == 60:
            model.load_state_dict(first[0])
            opt.load_state_dict(first[1])

    assert [severity for severity, *_ in found(trained(load, model=model, opt=opt))] == ["info"]


class WithTarget(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = net(), net()
        initialize(self.target)

    def forward(self, x):
        with torch.no_grad():
            aim = self.target(x)
        return self.online(x) + 0.1 * aim


@pytest.mark.slow
def test_a_target_inside_the_model_gets_no_gradient_and_is_left_out():
    model = WithTarget()
    verdict = trained(
        lambda i: model.target.load_state_dict(model.online.state_dict()) if i == 80 else None, model=model
    )
    assert found(verdict) == []


@pytest.mark.slow
def test_loops_by_hand_and_lbfgs_are_not_judged():
    model = net()
    with watch(model, Diagnose(show=False)) as w, torch.enable_grad():
        for x, y in batches(40):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(1e-3 * p.grad)
    assert found(w.diagnose()) == []
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    (x, y), *_ = batches(1)

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(20):
            opt.step(closure)
    assert found(w.diagnose()) == []


@pytest.mark.slow
def test_weights_in_two_dtypes_and_of_odd_strides_are_compared():
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    model[0].float()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net[2](self.net[1](self.net[0](x)).double()).float()

    def write(i):
        if i == 80:
            model[0].reset_parameters()

    assert found(trained(write, model=Mixed())) == [("warning", 80, "net.0.weight")]


@pytest.mark.slow
def test_the_command_finds_it(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))\n"
        "opt = torch.optim.Adam(model.parameters(), 1e-2)\n"
        "for i in range(60):\n"
        "    if i == 40:\n"
        "        model[0].reset_parameters()\n"
        "    x = torch.randn(16, 8)\n"
        "    opt.zero_grad()\n"
        "    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()\n"
        "    opt.step()\n"
    )
    main(["diagnose", str(script)])
    out = capsys.readouterr().out
    assert f"SUSPECT  Weights are overwritten in mid-run: layer 0 ({CODE}; " in out
