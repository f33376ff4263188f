"""Steps of all optimizers are seen, and a compiled step is compiled as it would be."""

import sys

import pytest
import torch
from torch import nn

from hookcb.hooks.optimizer_steps import StepHook


class Steps:
    """Notes the steps that it sees, by code that torch.compile could not trace."""

    def __init__(self):
        self.seen = []

    def see(self, opt, args, kwargs):
        self.seen.append((sys._getframe().f_back is not None, torch.compiler.is_compiling()))


def compiled_steps():
    """Weights after two compiled steps, the operations in each graph, and the number of graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        return graph

    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch.compile(lambda: opt.step(), backend=backend)
    for _ in range(2):
        net(torch.ones(3, 2)).square().mean().backward()
        step()
    return net.weight.tolist(), graphs, sum(counters["graph_break"].values())


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_a_compiled_step_has_the_same_graphs_and_no_more_breaks_and_each_is_seen(fresh_dynamo):
    weights, graphs, n_breaks = compiled_steps()
    steps = Steps()
    hooks = [StepHook(steps.see), StepHook(steps.see, after=True)]
    seen_weights, seen_graphs, seen_breaks = compiled_steps()
    for hook in hooks:
        hook.remove()
    assert (seen_weights, seen_graphs) == (weights, graphs)
    assert seen_breaks <= n_breaks
    assert steps.seen == [(True, False)] * 4
