"""Gradients left over from the last step, in small trainings."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookcb.diagnosis.faults.gradients.stale as of_stale
import hookcb.diagnosis.measurements.steps as of_steps
from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.gradients.stale import MIN_STEPS, StaleGradients
from hookcb.diagnosis.measurements.steps import ClearedGradients, Steps
from tests.diagnosis.faults.support import followed
from tests.support import first, in_turn


def net(seed=0, n_out=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_out))


def batches(n):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(n)]


class Stale:
    """The fault, with the handlers called for a step of an optimizer."""

    def __init__(self, model):
        self.fault, self.run = followed(StaleGradients, model)

    def begin_backward(self):
        self.fault.on_backward(self.run)

    def end_step(self, opt):
        self.run.loop.opt = opt
        self.run.n_steps += 1
        self.fault.on_between(self.run)
        self.run.loop.opt = None

    def found(self):
        """What is found of each optimizer."""
        self.run.measured(Steps).n_optimizers = 1
        self.fault.tell(self.run)
        return self.fault.seen

    @property
    def has_looked(self):
        return not self.fault.unless


def trained(clear, n=12, every=1, opt=torch.optim.SGD, stop=None):
    """Findings if `clear(opt, model, i, when)` clears gradients; each `every`-th batch has a step."""
    model = net()
    stale, opt = Stale(model), opt(model.parameters(), lr=1e-3)
    for i, (x, y) in enumerate(batches(n)):
        clear(opt, model, i, "begin")
        loss = F.mse_loss(model(x), y)
        clear(opt, model, i, "forward")
        stale.begin_backward()
        loss.backward()
        if (i + 1) % every == 0:
            opt.step()
            stale.end_step(opt)
            clear(opt, model, i, "end")
    return stale.found()


def at(when, set_to_none=True, every=1, by_model=False):
    def clear(opt, model, i, now):
        if now == when and i % every == 0:
            (model if by_model else opt).zero_grad(set_to_none=set_to_none)

    return clear


@pytest.mark.parametrize("moves_along", first([False, True]))
def test_gradients_in_a_network_that_is_only_averaged_are_used_by_nothing(moves_along):
    """A target network that follows another one, and a loop that makes its own steps and never clears."""
    target, online, found = net(), net(1), []
    with watch(target, Diagnose(on_sick="ignore")) as w:
        for x, y in batches(12):
            F.mse_loss(target(x), y).backward()
            with torch.no_grad():
                for p, q in zip(target.parameters(), online.parameters(), strict=True):
                    p.sub_(1e-3 * p.grad) if moves_along else p.lerp_(q, 0.01)
        found = [x for x in w.diagnose().findings if x.code == "grad.stale"]
    (told,) = found
    assert told.severity == ("error" if moves_along else "info")
    assert ("zero_grad" in told.next_steps[0], "no_grad" in told.next_steps[0]) == (
        moves_along,
        not moves_along,
    )


def never(opt, model, i, now):
    """Nobody clears anything."""


# ---- gradients left over


@pytest.mark.parametrize("opt", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_that_nobody_clears_are_told(opt):
    (found,) = trained(never, n=12, opt=opt)
    assert (found.code, found.step, found.value) == ("grad.stale", 1, 11)
    assert "In 11 of 12 steps" in found.message


@in_turn("when", ["begin", "forward", "end"])
@in_turn("set_to_none", [True, False])
@in_turn("by_model", [True, False])
def test_gradients_that_are_cleared_anywhere_between_two_backwards_are_fine(when, set_to_none, by_model):
    assert trained(at(when, set_to_none, by_model=by_model)) == []


@in_turn("set_to_none", [True, False])
@in_turn("every", [2, 4])
def test_accumulation_is_no_stale_gradient(every, set_to_none):
    assert trained(at("begin", set_to_none, every), n=24, every=every) == []
    assert trained(at("end", set_to_none), n=24, every=every) == []


def test_accumulation_without_ever_clearing_is():
    (found,) = trained(never, n=24, every=4)
    assert found.value == 5


def test_gradients_that_are_cleared_now_and_then_are_no_finding():
    assert trained(at("begin", every=3)) == []


@pytest.mark.parametrize(("n", "is_told"), [(2, False), (3, True)])
def test_three_steps_are_needed(n, is_told):
    assert len(trained(never, n=n)) == is_told


def test_gradients_that_replace_those_of_the_step_before_are_not_stale():
    """Such as those of torch.autograd.grad, which adds nothing to old gradients."""
    model = net()
    params, stale, opt = list(model.parameters()), Stale(model), torch.optim.SGD(model.parameters())
    for x, y in batches(12):
        loss = F.mse_loss(model(x), y)
        stale.begin_backward()
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad
        opt.step()
        stale.end_step(opt)
    assert stale.found() == []
    assert stale.has_looked


def test_gradients_that_are_zero_by_themselves_are_not_stale():
    model = net()
    for p in model.parameters():
        nn.init.zeros_(p)
    stale, opt = Stale(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        stale.begin_backward()
        (model(torch.ones(4, 3)) * 0).sum().backward()
        opt.step()
        stale.end_step(opt)
    assert stale.found() == []


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_generator_and_a_discriminator_are_told_apart(is_clean):
    """The generator's backward leaves gradients in the discriminator, which are cleared before its own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    opts = {name: torch.optim.SGD(m.parameters(), 1e-3) for name, m in model.items()}
    stale = Stale(model)
    for (x, _), name in itertools.product(batches(8), ("d", "g")):
        if is_clean:
            opts[name].zero_grad()
        fake = model["g"](x)
        loss = -model["d"](fake).mean() if name == "g" else (model["d"](fake.detach()) - model["d"](x)).mean()
        stale.begin_backward()
        loss.backward()
        opts[name].step()
        stale.end_step(opts[name])
    assert [s.code for s in stale.found()] == [] if is_clean else ["grad.stale"] * 2


def test_other_parameters_of_an_optimizer_may_keep_their_gradients():
    model, other = net(), nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    stale, opt = Stale(model), torch.optim.SGD([other, *model.parameters()], lr=1e-3)
    for x, y in batches(6):
        model.zero_grad()
        stale.begin_backward()
        F.mse_loss(model(x), y).backward()
        opt.step()
        stale.end_step(opt)
    assert stale.found() == []


def test_sparse_gradients_are_looked_past():
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    stale, opt = Stale(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        stale.begin_backward()
        model(torch.arange(4)).sum().backward()
        opt.step()
        stale.end_step(opt)
    assert stale.found() == []


def test_gradients_are_read_no_more_once_a_step_had_fresh_ones(monkeypatch):
    n_read = Counter()
    for module, name in ((of_stale, "_largest"), (of_steps, "is_there")):
        read = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, name=name, read=read: n_read.update([name]) or read(x))
    model = net()
    cleared, run = followed(ClearedGradients, model)
    run.measured(Steps).first_param = model[0].bias
    stale, opt = Stale(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in batches(12):
        opt.zero_grad()
        stale.begin_backward()
        F.mse_loss(model(x), y).backward()
        cleared.on_gradients(run)
        cleared.on_step(run)
        opt.step()
        stale.end_step(opt)
    assert n_read == {"_largest": MIN_STEPS - 1, "is_there": 2}
    assert stale.found() == []
    assert not cleared.has_found
    assert stale.has_looked


def test_an_optimizer_that_is_gone_is_forgotten():
    model = net()
    stale = Stale(model)
    for _ in range(4):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        stale.end_step(opt)
        del opt
    stale.begin_backward()
    assert stale.found() == []
