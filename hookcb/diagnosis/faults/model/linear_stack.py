"""model.linear_stack: linear layers that follow one another without a nonlinearity."""

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from hookcb.core import graph
from hookcb.core.text import as_layer
from hookcb.core.torch_private import Dropout
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

MAX_NODES = 4096
PRODUCTS = {"Addmm": 1, "Mm": 0, "Linear": 0}  # place of the input among the inputs; the weight is next
OF_WEIGHT = ("T", "ToCopy")  # operations between a weight and its product


@fault("model.linear_stack", Site.MODULES, needs="model", exact=True)
class LinearStack(Fault):
    """Linear layers that follow one another without a nonlinearity: a note, as one layer could compute the same.

    Exact: order of the modules of an nn.Sequential, dropout and identity left out, or a linear layer that
    alone gets the output of another, in the autograd graph of the first loss. An inner width below both ends
    is a low-rank factorization.
    """  # noqa: E501

    headline = "Linear layers follow one another"
    severity = "info"
    passed = "linear layers in a row"
    unless = "too little was seen of the path from layer to layer"

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            inside = m.named_children() if type(m) is nn.Sequential else ()
            active = [(i, x) for i, x in inside if not isinstance(x, Dropout | nn.Identity)]
            for (i, a), (j, b) in pairwise(active):
                if type(a) is type(b) is nn.Linear:
                    first, second = (f"{name}.{at}" if name else at for at in (i, j))
                    self._add(first, second, a.weight, b.weight)

    def on_first_graph(self, run: Run) -> None:
        if (links := linear_links(run.loop.loss_node)) is None:
            return
        self.unless = ""
        modules = named_modules(run.loop.model).items()
        names = {id(m.weight): name for name, m in modules if type(m) is nn.Linear}
        for one, other in links:
            if (first := names.get(id(one))) and (second := names.get(id(other))):
                self._add(first, second, one, other)

    def _add(self, first: str, second: str, one: Tensor, other: Tensor) -> None:
        n_in, n_out = one.shape[1], other.shape[0]
        if one.shape[0] >= min(n_in, n_out):  # else their composition is of a lower rank than both
            self.see(
                f"Linear layers {first} and {second} follow one another without a nonlinearity, so one "
                f"linear layer {n_in}→{n_out} could compute the same.",
                at=first,
                causes=("a missing activation",),
                next_steps=(
                    f"Add an activation such as nn.ReLU() after {as_layer(first)}, or remove a layer",
                ),
            )


def linear_links(node: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Weights of pairs of linear layers of which the second alone gets the output of the first.

    None if the graph hides a part of it, or has more than 4,096 nodes. It runs nothing and keeps no node.
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
    place = PRODUCTS.get(graph.name(node))
    return None if place is None else graph.leaf(graph.peel(node.next_functions[place + 1][0], OF_WEIGHT))
