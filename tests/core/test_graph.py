"""Walks of autograd graphs."""

import torch

from hookcb.core.graph import leaves_behind, nodes_behind


def leaf(n):
    return torch.full((2,), float(n), requires_grad=True)


def test_each_node_comes_once_and_leaves_are_behind_it():
    a, b = leaf(1), leaf(2)
    shared = a * b
    y = shared + shared.exp()
    nodes = list(nodes_behind([y.grad_fn]))
    assert len(nodes) == len(set(nodes)) == 5
    assert {id(x) for x in leaves_behind([y.grad_fn])} == {id(a), id(b)}


def test_a_walk_stops_at_its_ends_and_takes_several_roots_and_none():
    a, b = leaf(1), leaf(2)
    x = a.exp()
    y, z = x * b, x.sin()
    nodes = list(nodes_behind([y.grad_fn, None, z.grad_fn], [x.grad_fn, None]))
    assert [n.name() for n in nodes if "Exp" in n.name()] == []
    assert {id(getattr(n, "variable", None)) for n in nodes} - {id(None)} == {id(b)}
    assert list(nodes_behind([None])) == []


def test_a_limit_on_nodes_holds():
    x = leaf(1)
    y = x
    for _ in range(50):
        y = y + 1
    assert list(leaves_behind([y.grad_fn], 50)) == []
    (found,) = leaves_behind([y.grad_fn], 51)
    assert found is x


def test_a_long_graph_takes_no_recursion():
    y = x = leaf(1)
    for _ in range(20_000):
        y = y + 1
    (found,) = leaves_behind([y.grad_fn])
    assert found is x
