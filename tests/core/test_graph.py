"""Vocabulary of autograd graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hookcb.core import graph


def leaf(n=1, shape=(2,)):
    return torch.full(shape, float(n), requires_grad=True)


def names(nodes):
    return [graph.name(node) for node in nodes]


def test_the_name_of_a_node_is_its_operation():
    x = leaf(shape=(2, 3))
    assert graph.name(None) == ""
    assert graph.name(x.softmax(-1).grad_fn) == "Softmax"
    assert graph.name(F.cross_entropy(x, torch.tensor([0, 1])).grad_fn) == "NllLoss"
    assert graph.name(x.exp().grad_fn) == "Exp"
    assert names(graph.inputs(x.exp().grad_fn)) == ["AccumulateGrad"]


def test_roots_are_the_nodes_of_nested_tensors_with_a_graph():
    x = leaf()
    y, z = x.exp(), x.sin()
    assert graph.roots({"a": [y, x, 3], "b": (z.detach(), z)}) == [y.grad_fn, z.grad_fn]
    assert graph.roots(None) == []


def test_inputs_leave_out_what_needs_no_gradient():
    a, b = leaf(1), leaf(2)
    x, y = a.exp(), b.sin()
    assert graph.inputs((x * y).grad_fn) == [x.grad_fn, y.grad_fn]
    assert graph.inputs((3 - x).grad_fn) == graph.inputs((x * torch.ones(2)).grad_fn) == [x.grad_fn]
    assert graph.only_input((x * 2).grad_fn) is x.grad_fn
    assert graph.only_input((x * y).grad_fn) is graph.only_input(None) is None
    assert graph.inputs(None) == []


def test_peeling_skips_these_operations_only():
    x = leaf(shape=(2, 3)).exp()
    y = x.view(3, 2).t()[None].expand(4, 2, 3).double()
    assert graph.peel(y.grad_fn) is graph.peel(x.grad_fn) is graph.behind(y.grad_fn) is x.grad_fn
    assert graph.name(graph.peel(y.grad_fn, ("ToCopy",))) == "Expand"
    assert graph.peel(x.sum().grad_fn) is not x.grad_fn
    assert graph.behind(y.sum().grad_fn) is x.grad_fn
    assert graph.peel(None) is graph.behind(None) is None


def test_a_chain_ends_after_the_first_other_operation():
    x = leaf(shape=(2, 3)).exp()
    y = (x.t() + 1).neg()
    assert names(graph.chain(y.grad_fn, ("Neg", "Add"))) == ["Neg", "Add", "T"]
    assert names(graph.chain(leaf().neg().grad_fn, ("Neg", "AccumulateGrad"))) == ["Neg", "AccumulateGrad"]
    assert list(graph.chain(None, ("Neg",))) == []


def test_each_node_comes_once_and_leaves_are_behind_it():
    a, b = leaf(1), leaf(2)
    shared = a * b
    y = shared + shared.exp()
    nodes = list(graph.walk([y.grad_fn]))
    assert len(nodes) == len(set(nodes)) == 5
    assert {id(x) for x in graph.leaves([y.grad_fn])} == {id(a), id(b)}


def test_a_walk_stops_at_its_ends_and_takes_several_roots_and_none():
    a, b = leaf(1), leaf(2)
    x = a.exp()
    y, z = x * b, x.sin()
    nodes = list(graph.walk([y.grad_fn, None, z.grad_fn], [x.grad_fn, None]))
    assert "Exp" not in names(nodes)
    assert {id(graph.leaf(n)) for n in nodes} - {id(None)} == {id(b)}
    assert list(graph.walk([None])) == []


def test_a_walk_gives_a_node_that_it_does_not_go_through():
    y = leaf().exp().sin().neg()
    through = graph.walk([y.grad_fn], through=lambda at: graph.name(at) != "Sin")
    assert names(through) == ["Neg", "Sin"]


def test_a_walk_takes_one_branch_after_the_other_or_the_nearest_first():
    x = leaf()
    y = x.exp().sin() + x.neg().cos()
    assert names(graph.walk([y.grad_fn])) == ["Add", "Cos", "Neg", "AccumulateGrad", "Sin", "Exp"]
    nearest = names(graph.walk([y.grad_fn], nearest_first=True))
    assert nearest == ["Add", "Sin", "Cos", "Exp", "Neg", "AccumulateGrad"]


def test_nodes_near_a_loss_end_with_the_last_layers():
    x, w = leaf(shape=(2, 3)), leaf(shape=(3, 3))
    y = (x.exp() @ w).relu().mean()
    assert names(graph.near(y.grad_fn, 64)) == ["Mean", "Relu", "Mm"]
    assert names(graph.near(y.grad_fn, 2)) == ["Mean", "Relu"]


def test_a_limit_on_nodes_holds():
    x = leaf(1)
    y = x
    for _ in range(50):
        y = y + 1
    assert list(graph.leaves([y.grad_fn], 50)) == []
    (found,) = graph.leaves([y.grad_fn], 51)
    assert found is x


@pytest.mark.slow
def test_a_long_graph_takes_no_recursion():
    y = x = leaf(1)
    for _ in range(20_000):
        y = y + 1
    (found,) = graph.leaves([y.grad_fn])
    assert found is x


def test_it_is_known_which_side_of_a_difference_is_the_graph():
    x = leaf()
    assert graph.is_subtracted((1 - x).grad_fn)
    assert graph.is_subtracted((torch.ones(2) - x).grad_fn)
    assert not graph.is_subtracted((x - 1).grad_fn)
    assert not graph.is_subtracted((x - torch.ones(2)).grad_fn)
    assert not graph.is_subtracted((x + 1).grad_fn)
    assert not graph.is_subtracted(None)


def test_functions_of_users_and_checkpoints_hide_operations():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = leaf()
    twice, hidden = Twice.apply(x), checkpoint(torch.exp, x, use_reentrant=True)  # kept, so nodes live
    assert graph.is_opaque(twice.grad_fn)
    assert graph.is_opaque(hidden.grad_fn)
    assert graph.name(hidden.grad_fn) in graph.HIDING
    assert not graph.is_opaque(x.exp().grad_fn)
    assert not graph.is_opaque(None)


def test_a_saved_tensor_may_be_freed():
    x = leaf()
    y = x.exp()
    assert graph.read_saved(y.grad_fn, "result").equal(y)
    assert graph.read_saved(y.grad_fn, "other") is None
    y.sum().backward()
    assert graph.read_saved(y.grad_fn, "result") is graph.FREED


def test_factors_are_known_until_the_backward_frees_them():
    x, by = leaf(), torch.full((2,), 3.0)
    y = x * by
    (found,) = graph.factors(y.grad_fn)
    assert found.equal(by)
    assert [float(n) for n in graph.factors((x * 2).grad_fn)] == [2.0]
    y.sum().backward()
    assert graph.factors(y.grad_fn) is None


def test_no_operation_is_named_twice_in_a_table():
    for table in (graph.SHAPING, graph.CHOOSING, graph.SHIFTING, graph.BOUNDING, graph.LAYERS, graph.HEADS):
        assert len(set(table)) == len(table)
    assert not set(graph.SHAPING) & {*graph.CHOOSING, *graph.SCALING, *graph.SHIFTING, *graph.LAYERS}
