"""model.linear_stack: linear layers that follow one another without a nonlinearity."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from hookcb.core import graph
from hookcb.core.text import as_layer
from hookcb.core.torch_private import Dropout
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

MAX_NODES = 4096
PRODUCTS = {"Addmm": 1, "Mm": 0, "Linear": 0}  # place of the input among the inputs; the weight is next
OF_WEIGHT = ("T", "ToCopy")  # operations between a weight and its product

Link = tuple[Tensor, Tensor]  # weights of a linear layer, and of the one that gets its output


@fault(
    "model.linear_stack",
    headline="Linear layers follow one another",
    site=Site.MODULES,
    needs=("model",),
    exact=True,
)
class LinearStack(Fault):
    """Linear layers that follow one another without a nonlinearity: a note, as one layer could compute the same.

    Exact: order of the modules of an nn.Sequential, dropout and identity left out, or a linear layer that
    alone gets the output of another, in the autograd graph of the first loss. An inner width below both ends
    is a low-rank factorization.
    """  # noqa: E501

    severity = "info"
    passed = "linear layers in a row"

    def __init__(self) -> None:
        super().__init__()
        self.is_known = False  # whether all of the graph was seen

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            if type(m) is not nn.Sequential:
                continue
            active = [(i, x) for i, x in m.named_children() if not isinstance(x, Dropout | nn.Identity)]
            for (i, a), (j, b) in pairwise(active):
                if type(a) is type(b) is nn.Linear:
                    first, second = (f"{name}.{at}" if name else at for at in (i, j))
                    self._add(first, second, a.weight, b.weight)

    def on_first_graph(self, run: Run) -> None:
        if (links := linear_links(run.loop.loss_node)) is None:
            return
        self.is_known = True
        modules = named_modules(run.loop.model).items()
        names = {id(m.weight): name for name, m in modules if type(m) is nn.Linear}
        for one, other in links:
            first, second = names.get(id(one)), names.get(id(other))
            if first and second:
                self._add(first, second, one, other)

    def _add(self, first: str, second: str, one: Tensor, other: Tensor) -> None:
        """Adds two layers by their weights, unless their composition is of a lower rank than both."""
        n_in, n_out = one.shape[1], other.shape[0]
        if one.shape[0] >= min(n_in, n_out):
            self.see(
                f"Linear layers {first} and {second} follow one another without a nonlinearity, so one "
                f"linear layer {n_in}→{n_out} could compute the same.",
                at=first,
                causes=("a missing activation",),
                next_steps=(
                    f"Add an activation such as nn.ReLU() after {as_layer(first)}, or remove a layer",
                ),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        unless = "" if self.is_known else "too little was seen of the path from layer to layer"
        yield from self.told(run, self.seen, unless)


def linear_links(node: Any) -> list[Link] | None:
    """Pairs of linear layers of which the second alone gets the output of the first, and nothing else does.

    None if the graph hides a part of it, or has more than 4,096 nodes. It runs nothing and keeps no node.

    Args:
        node: `loss.grad_fn`, or None.
    """
    if (uses := graph.uses(node, MAX_NODES)) is None:
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


def _weight(node: Any) -> Tensor | None:
    """Weight of the linear layer that a node belongs to, None if it belongs to none."""
    place = PRODUCTS.get(graph.name(node))
    return None if place is None else graph.leaf(graph.peel(node.next_functions[place + 1][0], OF_WEIGHT))
