"""Parameters that are in the groups of an optimizer more than once."""

import torch
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.steps.duplicated import Duplicated
from hookcb.diagnosis.measurements.steps import Steps
from tests.diagnosis.faults.support import followed


def seen(model, opts):
    fault, run = followed(Duplicated, model)
    run.measured(Steps).optimizers = {id(opt): opt for opt in opts}
    fault.on_end(run)
    return fault.seen


def test_a_parameter_in_two_groups_is_seen_and_in_two_optimizers_is_not():
    model = nn.Linear(2, 2)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    assert seen(model, [one, other]) == []
    one.param_groups.append({**one.param_groups[0], "params": [model.weight]})
    (found,) = seen(model, [one, other])
    assert (found.code, found.param, found.value) == ("param.duplicated", "weight", 2.0)


def found_after(step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    both = torch.optim.Adam(model.parameters(), 1e-2), torch.optim.SGD(model[2].parameters(), 0.1)
    with watch(model, both, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(20):
            step(i, model, *both)
    return [(f.severity, f.param) for f in w.diagnose().findings if f.code == "param.duplicated"]


def backward(model):
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()


def test_two_optimizers_that_step_with_the_same_gradient_are_found():
    def step(i, model, one, other):
        backward(model)
        one.step()
        other.step()

    assert found_after(step) == [("warning", "2.weight")]


def test_optimizers_that_take_turns_or_have_a_backward_each_are_not():
    def in_turn(i, model, *both):
        backward(model)
        both[i % 2].step()

    def each(i, model, *both):
        for opt in both:
            backward(model)
            opt.step()

    assert found_after(in_turn) == found_after(each) == []
