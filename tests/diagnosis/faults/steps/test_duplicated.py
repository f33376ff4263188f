"""Parameters that are in the groups of an optimizer more than once."""

import torch
from torch import nn

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
