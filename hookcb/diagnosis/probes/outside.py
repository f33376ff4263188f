"""OutsideParameters: parameters that the forward uses, and that the model does not have."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.shards import is_shard
from hookcb.core.text import join_names
from hookcb.core.torch_private import version_of
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules
from hookcb.hooks.optimizer_steps import params_of
from hookcb.hooks.params import find_params

MIN_STEPS = 20  # in which a parameter must not have changed
MIN_GRAPHS = 3  # all of whose parameters must be new
N_EACH = 4  # graphs that are all read, and later one in so many
MAX_ITEMS, MAX_DEPTH = 1_000, 3  # of lists and dicts in which a parameter is looked for
OF_MODULE = frozenset(vars(nn.Module()))
TWICE = "Trying to backward through the graph a second time"  # begin of torch's message
CONTAINER = "layers in a plain list or dict, or in an object that is not an nn.Module"
OPERATION = "an operation on an nn.Parameter before it was assigned, as in nn.Parameter(x).to(device)"


@dataclass(slots=True)
class _Outside:
    """A parameter outside the model, as it was when it was found.

    Attributes:
        name: path in the attributes of the model, "" if it is not there.
        is_computed: whether the attribute at this path was computed from it.
    """

    parameter: ReferenceType[Tensor]
    shape: tuple[int, ...]
    version: int
    address: int
    n_steps: int
    name: str = ""
    is_computed: bool = False

    def is_(self, p: Tensor | None) -> bool:
        return p is not None and self.parameter() is p

    @property
    def is_unchanged(self) -> bool:
        """Whether it is in use, and as it was."""
        p = self.parameter()
        return p is not None and version_of(p) == self.version and p.data_ptr() == self.address


class OutsideParameters:
    """Finds parameters in the graph of the output that were not the model's when its training began.

    The graph is read in the first inspected batches and in one of four later on, up to the inputs, which
    another model may have computed. Nothing is kept alive.

    Args:
        model: the model; nothing is read if its parameters are divided over ranks.

    Attributes:
        hidden_by: what hides a part of the graph, "" if nothing does.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._own: dict[int, ReferenceType[Tensor]] = {id(p): ref(p) for p in model.parameters()}
        self._is_on = not any(map(is_shard, model.parameters()))
        self._n_looks = self._n_graphs = 0
        self._found: dict[int, _Outside] = {}  # not in the model, by id
        self._latest: list[_Outside] = []
        self._joined: list[_Outside] = []  # those of the latest graph that the model had in its call
        self._n_anew, self._has_stayed = 0, False
        self._is_error_twice = False
        self.hidden_by = ""

    def follow(self, output: Any, inputs: Any, n_steps: int) -> None:
        """Reads the graph of an output.

        Args:
            output: output of the model, also nested in tuples, lists and mappings.
            inputs: its inputs, likewise.
            n_steps: number of steps so far.
        """
        self._n_looks += 1
        if not self._is_on or (self._n_looks > N_EACH and self._n_looks % N_EACH):
            return
        given = [x for _, x in parts(inputs) if isinstance(x, Tensor)]
        outputs, known, outside = graph.roots(output), set(map(id, given)), dict[int, Tensor]()
        for node in graph.walk(outputs, graph.roots(given), graph.MAX_NODES):
            if (name := graph.name(node)) in graph.HIDING and name != graph.COMPILED:
                self.hidden_by = graph.HIDING[name]
            p = graph.leaf(node)
            if isinstance(p, nn.Parameter) and not (self._is_own(p) or id(p) in known):
                outside[id(p)] = p
        self._n_graphs += bool(outputs)
        if outside and (model := self._model()) is not None:
            self._add(model, outside, n_steps)

    def _is_own(self, p: Tensor) -> bool:
        return (own := self._own.get(id(p))) is not None and own() is p

    def _add(self, model: nn.Module, outside: dict[int, Tensor], n_steps: int) -> None:
        """Adds the parameters of a graph."""
        stay = [x for x in self._latest if x.is_(outside.get(id(x.parameter())))]
        self._has_stayed |= bool(stay)
        self._n_anew += not stay
        names = {id(p): name for name, p, _ in find_params(model)}
        places = dict(_places(model, outside))
        order = {i: place for place, i in enumerate([*names, *places])}
        self._latest, self._joined = [], []
        for i, p in sorted(outside.items(), key=lambda item: order.get(item[0], len(order))):
            path, is_computed = places.get(i, ("", False))
            state = tuple(p.shape), version_of(p), p.data_ptr(), n_steps
            seen = _Outside(ref(p), *state, names.get(i, path), is_computed)
            self._latest.append(seen)
            if i in names:
                self._joined.append(seen)
            elif (known := self._found.get(i)) is None or not known.is_(p):
                self._found[i] = seen

    def has_joined(self) -> bool:
        """Whether the model has got parameters since it began, now that its latest call is over.

        Those that it had during the call only are torch.func.functional_call's, which the caller may train.
        """
        joined, self._joined = self._joined, []
        if not joined or (model := self._model()) is None:
            return False
        own = {id(p) for p in model.parameters()}
        if not all(id(x.parameter()) in own for x in joined):
            self._is_on, self.hidden_by = False, "torch.func.functional_call"
            return False
        self._own |= {id(x.parameter()): x.parameter for x in joined}
        return True

    def read_error(self, error: BaseException) -> None:
        """Notes the exception that has ended the training."""
        self._is_error_twice = isinstance(error, RuntimeError) and str(error).startswith(TWICE)

    def is_known(self, n_steps: int) -> bool:
        """Whether all such parameters would have been found, and it is known if they are trained."""
        is_open = any(x.is_unchanged and n_steps - x.n_steps < MIN_STEPS for x in self._found.values())
        return self._n_graphs > 0 and not self.hidden_by and not is_open

    def observations(self, n_steps: int) -> Iterator[Observation]:
        """Parameters that are made anew in each forward, or that no step changes."""
        if not self._is_on:
            return
        if self._n_anew >= MIN_GRAPHS and not self._has_stayed:
            yield _made_anew(self._latest)
            return
        still = [x for x in self._found.values() if x.is_unchanged]
        computed = [x for x in still if x.is_computed]
        if self._is_error_twice and computed:
            yield _computed_once(computed)
            return
        still = [x for x in still if n_steps - x.n_steps >= MIN_STEPS]
        if still:
            trained = _in_optimizers()
            self._found = {i: x for i, x in self._found.items() if id(x.parameter()) not in trained}
            still = [x for x in still if id(x.parameter()) not in trained]
        if still:
            yield _unregistered(still, n_steps)


def _in_optimizers() -> set[int]:
    """Ids of the parameters that any optimizer of this process has."""
    return {i for x in gc.get_objects() if issubclass(type(x), Optimizer) for i in params_of(x)}


def _places(model: nn.Module, wanted: dict[int, Tensor]) -> Iterator[tuple[int, tuple[str, bool]]]:
    """Paths of parameters in attributes of the model's modules, and whether these are computed from them."""
    for prefix, m in named_modules(model).items():
        for attribute, value in vars(m).items():
            if attribute not in OF_MODULE:
                path = f"{prefix}.{attribute}" if prefix else attribute
                yield from _inside(value, path, wanted, MAX_DEPTH)


def _inside(
    value: Any, path: str, wanted: dict[int, Tensor], depth: int
) -> Iterator[tuple[int, tuple[str, bool]]]:
    if isinstance(value, nn.Module):
        for name, p in value.named_parameters():
            yield id(p), (f"{path}.{name}", False)
    elif isinstance(value, Tensor):
        for leaf in [value] if value.is_leaf else graph.leaves([value.grad_fn], MAX_ITEMS):
            if id(leaf) in wanted:
                yield id(leaf), (path, leaf is not value)
    elif depth and isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in islice(pairs, MAX_ITEMS):
            yield from _inside(item, f"{path}[{key!r}]", wanted, depth - 1)


def _named(found: list[_Outside]) -> str:
    """Names of the parameters, or their shapes."""
    if all(x.name for x in found):
        return join_names([x.name for x in found], 4)
    shapes = ["×".join(map(str, x.shape)) or "()" for x in found]
    return f"of shape{'s' * (len(found) != 1)} {join_names(shapes, 4)}"


def _observation(found: list[_Outside], text: str, cause: str, next_step: str) -> Observation:
    return Observation(
        "param.unregistered",
        found[0].name.rpartition(".")[0],
        found[0].name,
        value=float(len(found)),
        text=text,
        causes=(cause,),
        next_steps=(next_step,),
    )


def _made_anew(found: list[_Outside]) -> Observation:
    n = len(found)
    return _observation(
        found,
        f"The forward makes {n} parameter{'s' * (n != 1)} anew in each call, so that training "
        f"changes nothing in {'it' if n == 1 else 'them'}: {_named(found)}.",
        "a layer or nn.Parameter that is created in forward",
        "Create it in __init__, and only use it in forward",
    )


def _computed_once(found: list[_Outside]) -> Observation:
    return _observation(
        found,
        f"Tensors of the model were computed from an nn.Parameter when it was built, and the first backward "
        f"has freed their graph: {_named(found)}.",
        OPERATION,
        "Assign the nn.Parameter itself, and compute from it in forward",
    )


def _unregistered(found: list[_Outside], n_steps: int) -> Observation:
    n, is_computed = len(found), any(x.is_computed for x in found)
    step = (
        "Assign the nn.Parameter itself, and move the model as a whole"
        if is_computed
        else "Put the layers into an nn.ModuleList or nn.ModuleDict before the optimizer is created"
    )
    return _observation(
        found,
        f"{n} parameter{'s' * (n != 1)} that the forward uses {'is' if n == 1 else 'are'} not in "
        f"model.parameters(), and no optimizer has changed {'it' if n == 1 else 'them'} in {n_steps} steps: "
        f"{_named(found)}.",
        OPERATION if is_computed else CONTAINER,
        f"{step}; what is meant to stay, freeze with requires_grad_(False)",
    )
