"""Observes linear layers that get the output of another one, as the autograd graph of the loss shows it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core import graph
from hookcb.core.text import as_layer
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules

MAX_NODES = 4096
PRODUCTS = {"Addmm": 1, "Mm": 0, "Linear": 0}  # place of the input among the inputs; the weight is next
OF_WEIGHT = ("T", "ToCopy")  # operations between a weight and its product

Link = tuple[Tensor, Tensor]  # weights of a linear layer, and of the one that gets its output


def linear_links(node: Any) -> list[Link] | None:
    """Pairs of linear layers of which the second alone gets the output of the first, and nothing else does.

    None if the graph hides a part of it, or has more than 4,096 nodes. It runs nothing and keeps no node.

    Args:
        node: `loss.grad_fn`, or None.
    """
    if (uses := nodes_of(node)) is None:
        return None
    links = []
    for now in uses:
        if (after := _weight(now)) is not None:
            given = now.next_functions[PRODUCTS[graph.name(now)]][0]
            path = list(graph.chain(given, graph.SAME_ORDER))
            before = _weight(path[-1]) if path and all(uses[at] == 1 for at in path) else None
            if before is not None and before.shape[0] == after.shape[1]:
                links.append((before, after))
    return links


def nodes_of(node: Any) -> Counter[Any] | None:
    """Nodes of the graph behind a loss, and how many others use each; None as for `linear_links`."""
    nodes = list(graph.walk([node], at_most=MAX_NODES + 1))
    if len(nodes) > MAX_NODES or any(map(graph.is_opaque, nodes)):
        return None
    return Counter([*nodes[:1], *(behind for at in nodes for behind in graph.inputs(at))])


def _weight(node: Any) -> Tensor | None:
    """Weight of the linear layer that a node belongs to, None if it belongs to none."""
    place = PRODUCTS.get(graph.name(node))
    return None if place is None else graph.leaf(graph.peel(node.next_functions[place + 1][0], OF_WEIGHT))


def observe_linear_links(links: list[Link], model: nn.Module) -> Iterator[Observation]:
    """Linear layers in a row whose composition is not of a lower rank than either of them."""
    names = {id(m.weight): name for name, m in named_modules(model).items() if type(m) is nn.Linear}
    for one, other in links:
        first, second = names.get(id(one)), names.get(id(other))
        if first and second and one.shape[0] >= min(one.shape[1], other.shape[0]):
            yield linear_stack(first, second, one.shape[1], other.shape[0])


def linear_stack(first: str, second: str, n_in: int, n_out: int) -> Observation:
    """Observation of two linear layers in a row."""
    return Observation(
        "model.linear_stack",
        first,
        text=f"Linear layers {first} and {second} follow one another without a nonlinearity, so one linear "
        f"layer {n_in}→{n_out} could compute the same.",
        causes=("a missing activation",),
        next_steps=(f"Add an activation such as nn.ReLU() after {as_layer(first)}, or remove a layer",),
    )
