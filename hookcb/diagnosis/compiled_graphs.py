"""Compiled graphs: has them show their attention, and the choices of their routers, by hookcb::show.

Where a layer is compiled, its operations are not seen in Python. So before a backend compiles a graph, an
opaque operator is put beside each operation that is to be seen, as `hookcb::take` is behind each layer.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from hookcb.hooks.modules import is_leaf, named_modules, names_around, outermost_compiled

# that it writes to a tensor is why no compiler leaves it out; see hookcb::take
SCHEMA = (
    "(Tensor[] xs, Tensor mark, Tensor(a!) written, int owner, int up, str below, str what, float[] numbers)"
    " -> ()"
)
ATTENTION, CHOICE, SCORES = "attention", "choice", "scores"
MAX_ROWS = 256  # of scores that are inspected in a batch
OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
CHOICES = {"topk": (2, -1), "max": (1, None), "argmax": (1, None)}  # place of their dim, and its default
VIEWS = {"float", "to", "view", "reshape", "flatten", "contiguous"}  # methods that keep all scores
HIDDEN = {  # operations with attention in them that are not shown, by the name of their function
    "multi_head_attention_forward": "nn.MultiheadAttention",
    "flex_attention": "flex_attention",
    "softmax": "attention with a softmax of its own",
    "scaled_dot_product_attention": "attention in a graph without layers",
}
IN_CUDA_GRAPHS = "what is in CUDA graphs, as of reduce-overhead"


class Shown(NamedTuple):
    """Operation to be shown: its kind, tensors and numbers, and methods that are called on each tensor."""

    what: str
    xs: tuple[Node, ...]
    numbers: tuple[float, ...]
    methods: tuple[tuple[str, Any], ...] = ()


class GraphEditor:
    """Puts hookcb::show into graphs in which `hookcb::take` is called for an owner.

    A graph may be that of many layers alike, so an operation is named from the mark of a layer beside it: by
    the number of names to leave, and those to add.

    Args:
        owner: number of the owner in `OWNERS`, whose `show_compiled` is called.
        modules: modules by name.
        meets: called with a kind of attention that is not shown, and its layer; or with `SCORES`, "" and the
            number of rows, 0 if it is unknown, and of classes of a loss without layers, as of one compiled.
        failed: called with an error; the graph then stays as it was.
    """

    def __init__(
        self,
        owner: int,
        modules: Mapping[str, nn.Module],
        meets: Callable[[str, str, tuple[float, ...]], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self.owner, self.modules, self.meets, self.failed = owner, modules, meets, failed
        self.names = {id(m): name for name, m in modules.items()}

    def edit(self, whole: GraphModule) -> Callable[[], None] | None:
        """Edits a graph, with those inside; returns what undoes it, None if nothing was done."""
        added: list[tuple[GraphModule, list[Node]]] = []

        def undo() -> None:
            for gm, nodes in added:
                for node in reversed(nodes):
                    gm.graph.erase_node(node)
                gm.recompile()

        try:
            for gm in whole.modules():
                if isinstance(gm, GraphModule):
                    takes, nodes = self._takes_in(gm), list[Node]()
                    root = min(map(self._root_of, takes.values()), key=len, default="")
                    added.append((gm, nodes))
                    for node in list(gm.graph.nodes):
                        if (layer := self._layer_of(node, root)) is not None:
                            self._show(gm, node, layer, takes, nodes)
                    if nodes:
                        gm.recompile()
        except Exception as error:  # the model must be compiled nevertheless
            undo()
            self.failed(error)
            return None
        return undo if any(nodes for _, nodes in added) else None

    def _takes_in(self, gm: GraphModule) -> dict[str, Node]:
        """The calls of `hookcb::take` for the owner in a graph, by layer."""
        take = torch.ops.hookcb.take
        calls = [x for x in gm.graph.nodes if x.target in (take, take.default) and x.args[3] == self.owner]
        return {layer: x for x in calls if (layer := self._layer_of(x)) is not None}

    def _stack_of(self, node: Node) -> list[str]:
        """Names of the modules in which an operation is called, without that whose call is compiled."""
        # each key is the id of a module, with "@1" at its second call
        ids = [key.partition("@")[0] for key in node.meta.get("nn_module_stack") or ()]
        return [self.names[int(x)] for x in ids if x.isdigit() and int(x) in self.names]

    def _layer_of(self, node: Node, root: str | None = None) -> str | None:
        """Name of the innermost one, `root` if there is none; None if it is in another model."""
        if node.op not in ("call_function", "call_method"):
            return None
        stack = self._stack_of(node)
        return stack[-1] if stack else None if node.meta.get("nn_module_stack") else root

    def _root_of(self, take: Node) -> str:
        """Name of the module whose call is compiled, if it calls the outermost one around a layer."""
        name, _, _ = self._stack_of(take)[0].rpartition(".")
        while isinstance(self.modules.get(name), nn.ModuleList | nn.ModuleDict):
            name = name.rpartition(".")[0]
        return name

    def _show(
        self, gm: GraphModule, node: Node, layer: str, takes: Mapping[str, Node], added: list[Node]
    ) -> None:
        if (shown := shown_by(node)) is None or not takes:
            if shown is not None and shown.what == SCORES:
                self.meets(SCORES, layer, shown.numbers)
            elif (kind := HIDDEN.get(name_of(node))) and (name_of(node) != "softmax" or is_attention(node)):
                self.meets(kind, layer, ())
            return
        anchor = max(takes, key=lambda x: n_common(x, layer))
        up, below = way(anchor, layer)
        _, mark, written, *_ = takes[anchor].args
        with gm.graph.inserting_before(after(node)):
            xs = []
            for x in shown.xs:
                added.append(gm.graph.call_method("detach", (x,)))
                added[-1].meta = dict(x.meta)
                for method, arg in shown.methods:
                    added.append(gm.graph.call_method(method, (added[-1], arg)))
                xs.append(added[-1])
            args = (xs, mark, written, self.owner, up, below, shown.what, list(shown.numbers))
            added.append(gm.graph.call_function(torch.ops.hookcb.show.default, args))
            added[-1].meta = dict(takes[anchor].meta)


def name_of(node: Node) -> str:
    """Name of the function of torch or the method that a node calls; "" if it is another function."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    # by its name, as others may have replaced it since, `CallHook` included
    is_of_torch = str(getattr(target, "__module__", "")).startswith("torch")
    return str(getattr(target, "__name__", "")) if is_of_torch else ""


def after(node: Node) -> Node:
    """The node before which all results of a node are known, those taken out of a tuple included."""
    last = node
    while last.next.target is operator.getitem and last.next.args[0] is node:
        last = last.next
    return last.next


def n_common(name: str, other: str) -> int:
    """How many names two qualified names begin with together."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(name.count("."), other.count(".")) + 1)


def way(anchor: str, layer: str) -> tuple[int, str]:
    """How many names of an anchor are to be left, and what is to be added, for the name of a layer."""
    n = n_common(anchor, layer) if layer else 0
    return len(anchor.split(".")) - n, ".".join(layer.split(".")[n:])


def follow(anchor: str, up: int, below: str) -> str:
    """The name to which a `way` leads from an anchor."""
    names = anchor.split(".")
    return ".".join(filter(None, [*names[: len(names) - up], below]))


def shown_by(node: Node) -> Shown | None:
    """The operation of a node; None if it is not to be shown, or if numbers of it are unknown."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        given = dict(zip(OF_ATTENTION, node.args, strict=False)) | node.kwargs
        is_causal, scale = given.get("is_causal", False), given.get("scale")
        numbers = float(is_causal is True), math.nan if scale is None else scale
        return _checked(ATTENTION, (given["query"], given["key"], given.get("attn_mask")), numbers)
    if name == "cross_entropy":
        return _scores(node.args[0] if node.args else node.kwargs["input"])
    if name not in CHOICES or not node.args:
        return None
    x, place, default = node.args[0], *CHOICES[name]
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else default)
    indices = node if name == "argmax" else second_of(node)
    if indices is None or n_dims(x) < 2 or not isinstance(dim, int) or dim not in (-1, n_dims(x) - 1):
        return None
    k = size_of(indices, -1) if n_dims(indices) == n_dims(x) else 1
    return _checked(CHOICE, (indices,), (size_of(x, -1), k))


def _scores(x: Any) -> Shown | None:
    """Rows of the scores of a cross-entropy, `(N, C)`, in the type that they had before they were cast."""
    given, (n, n_classes) = x, [size_of(x, i) for i in range(2)] if n_dims(x) == 2 else (None, None)
    while given.op == "call_method" and given.target in VIEWS and isinstance(given.args[0], Node):
        given = given.args[0]
    dtype = getattr(given.meta.get("example_value"), "dtype", None)
    if dtype is None or not dtype.is_floating_point or type(n_classes) is not int:
        return None
    stride = max(1, -(-n // MAX_ROWS)) if type(n) is int else 1
    rows = ("__getitem__", (slice(None, None, stride),)), ("to", dtype)
    return Shown(SCORES, (x,), (n if type(n) is int else 0, n_classes), rows)


def _checked(what: str, xs: Sequence[Any], numbers: Iterable[Any]) -> Shown | None:
    known, found = tuple(numbers), tuple(x for x in xs if x is not None)
    if all(isinstance(x, Node) for x in found) and all(type(x) in (int, float) for x in known):
        return Shown(what, found, known)
    return None


def second_of(node: Node) -> Node | None:
    """The node that takes the second one of the results of a node; None if it is not used."""
    return next((x for x in node.users if x.target is operator.getitem and x.args[1] == 1), None)


def n_dims(node: Any) -> int:
    """Number of dimensions of the tensor that a node stands for; 0 if it is none."""
    return getattr(getattr(node, "meta", {}).get("example_value"), "ndim", 0)


def size_of(node: Any, dim: int) -> Any:
    """A size of that tensor, which may be symbolic; None if it has none."""
    return node.meta["example_value"].shape[dim] if n_dims(node) else None


def is_attention(node: Node) -> bool:
    """Whether the softmax of a node is one of attention: of `(…, heads, queries, keys)`, or all as many."""
    return n_dims(node) == 4 or (n_dims(node) == 3 and bool(size_of(node, 1) == size_of(node, 2)))


def uncompiled_parts(model: nn.Module) -> list[str]:
    """Names of the parts of a compiled model that are not compiled, and may do more than call layers."""
    compiled = outermost_compiled(model)
    around = {around for name in compiled for around in (name, *names_around(name), "")}
    plain = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    parts = {name: m for name, m in named_modules(model).items() if name not in around and not is_leaf(m)}
    inside = (name for name in parts if not any(x in compiled for x in (*names_around(name), "")))
    return [name for name in inside if not isinstance(parts[name], plain)]


def _call(
    xs: Sequence[Tensor],
    mark: Tensor,
    written: Tensor,
    owner: int,
    up: int,
    below: str,
    what: str,
    numbers: Any,
) -> None:
    if (found := sys.modules["hookcb.activations.operator"].OWNERS.get(owner)) is not None:
        found.show_compiled(xs, mark, (up, below), what, numbers)


def _nothing(*_: Any) -> None:
    """Done with tensors without values, as a compiler has them, and inside of torch.func.vmap."""


LIBRARY = torch.library.Library("hookcb", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types
if not hasattr(torch.ops.hookcb, "show"):  # it is there if this module is imported again, as by autoreload
    torch.library.define("hookcb::show", SCHEMA, tags=(torch.Tag.flexible_layout,))
    torch.library.impl("hookcb::show", "default", _call)
    LIBRARY.impl("show", _nothing, "FuncTorchBatched")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake("hookcb::show", _nothing)
