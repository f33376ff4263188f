"""Compiled gradients beside those of the same batch without torch.compile, with backends that lose some."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.faults.gradients.compiled import CompiledGradients, _differences
from hookcb.diagnosis.run import Run, Skipped
from tests.support import first, fit, skip_unless_compiled_in_place

CODE = "grad.compiled"
OUR = "gradients that torch.compile changes"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
OF_INDUCTOR = "ignore:.*is deprecated:DeprecationWarning"  # torch's own, at its import


def net(drop=0.0):
    torch.manual_seed(0)
    norm, first = nn.BatchNorm1d(8), nn.Linear(4, 8)
    return nn.Sequential(first, norm, nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 3))


class Losing(torch.autograd.Function):
    """The same numbers, and no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


def losing(graph, examples):
    """A backend that drops the gradients of all that comes before the model's output."""

    def run(*args):
        return tuple(Losing.apply(x) if isinstance(x, torch.Tensor) else x for x in graph.forward(*args))

    return run


def data(n=6):
    g = torch.Generator().manual_seed(1)
    return [(x := torch.randn(16, 4, generator=g), x[:, :3].argmax(1)) for _ in range(n)]


def trained(model, diagnose):
    learn = Learner(data(), model, F.cross_entropy, torch.optim.Adam, lr=1e-2)
    return fit(learn, 1, cbs=[diagnose]).diagnose()


def watched(model, diagnose):
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, diagnose) as w:
        for x, y in data():
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return w.diagnose()


def asked(is_wanted=True):
    return Diagnose("ignore", compare_compiled=is_wanted, show=False)


def gap(verdict):
    return next((x.reason for x in verdict.gaps if CODE in x.codes), "")


@pytest.mark.parametrize("train", first([trained, watched]))
def test_a_backend_that_drops_a_gradient_is_named(train):
    verdict = train(torch.compile(net(), backend=losing), asked())
    found = next(x for x in verdict.findings if x.code == CODE)
    assert (found.severity, found.value) == ("error", 1.0)
    assert "is zero" in found.message
    assert found.param in dict(net().named_parameters())


@pytest.mark.slow
def test_a_model_that_is_compiled_in_place_is_compared_too():
    skip_unless_compiled_in_place()
    model = net()
    model.compile(backend=losing)
    assert CODE in {x.code for x in watched(model, asked()).findings}


@pytest.mark.parametrize("train", first([trained, watched]))
def test_a_backend_that_is_right_leaves_no_trace(train):
    ends = []
    for is_wanted in (True, False):
        model = net(0.1)
        torch.manual_seed(3)
        verdict = train(torch.compile(model, backend="eager"), asked(is_wanted))
        assert CODE not in {x.code for x in verdict.findings}
        assert (OUR in verdict.ruled_out) == is_wanted
        assert ("compare_compiled=True" in gap(verdict)) != is_wanted
        ends.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


@pytest.mark.slow
def test_random_numbers_may_be_others_in_compiled_code():
    verdict = watched(torch.compile(net(0.5), backend=losing), asked())
    assert "draws random numbers" in gap(verdict)


def test_a_model_that_is_not_compiled_has_nothing_to_compare():
    verdict = watched(net(), asked())
    assert not gap(verdict)
    assert OUR not in verdict.ruled_out
    assert [type(x) for x in FAULTS[CODE]().findings(Run())] == [Skipped]


def test_a_gradient_that_is_rounding_alone_does_not_count():
    eager = [torch.ones(4), torch.full((4,), 1e-8), torch.full((2,), 2.0)]
    other = [torch.ones(4) * 1.001, torch.full((4,), -1e-8), torch.zeros(2)]
    found = _differences(other, eager, 1e-4)
    assert found == pytest.approx([1e-3, 1e-4, 1.0], rel=1e-3)


def test_the_inputs_of_the_batch_are_not_kept():
    part = CompiledGradients()
    part._xb, part._start = (torch.ones(2),), None
    part.freeze()
    assert part._xb is None


def through_inductor(graph, examples):
    """Inductor, given a graph from which the output of the first layer is cut off."""
    from torch._inductor.compile_fx import compile_fx

    linear = next(node for node in graph.graph.nodes if "linear" in str(node.target))
    with graph.graph.inserting_after(linear):
        cut = graph.graph.call_method("detach", (linear,))
    linear.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)
    graph.recompile()
    return compile_fx(graph, examples)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(32),
        nn.Dropout(0.1),
        nn.Linear(32, 3),
    )


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings(OF_INDUCTOR)
@pytest.mark.parametrize("make", [net, convolutions])
def test_inductor_is_right_and_the_training_stays_the_same(make):
    ends = []
    for is_wanted in (True, False):
        model = make()
        torch.manual_seed(3)
        verdict = watched(torch.compile(model), asked(is_wanted))
        assert CODE not in {x.code for x in verdict.findings}
        ends.append([*model.state_dict().values(), torch.get_rng_state()])
        if is_wanted and make is net:  # the other one draws random numbers
            assert OUR in verdict.ruled_out
    assert all(map(torch.equal, *ends))


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings(OF_INDUCTOR)
def test_a_gradient_that_inductor_is_not_given_is_named():
    verdict = watched(torch.compile(net(), backend=through_inductor), asked())
    found = next(x for x in verdict.findings if x.code == CODE)
    assert (found.severity, found.param) == ("error", "0.weight")
    assert "is zero" in found.message
