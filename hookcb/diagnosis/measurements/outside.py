"""OutsideParameters: parameters that the forward uses, and that the model did not have at the beginning."""

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
from hookcb.core.restore import OF_MODULE
from hookcb.core.torch_private import version_of
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules
from hookcb.hooks.optimizer_steps import params_of
from hookcb.hooks.params import find_params
from hookcb.processes.shards import is_shard

MIN_STEPS = 20  # in which a parameter must not have changed
MIN_GRAPHS = 3  # all of whose parameters must be new
N_EACH = 4  # graphs that are all read, and later one in so many
MAX_ITEMS, MAX_DEPTH = 1_000, 3  # of lists and dicts in which a parameter is looked for
Place = tuple[int, tuple[str, bool]]  # id of a parameter, its path, and whether the attribute is computed
TWICE = "Trying to backward through the graph a second time"  # begin of torch's message


@dataclass(slots=True)
class Outside:
    """A parameter outside the model, as it was when it was found."""

    parameter: ReferenceType[Tensor]
    shape: tuple[int, ...]
    version: int
    address: int
    n_steps: int
    name: str = ""  # path in the attributes of the model
    is_computed: bool = False  # whether the attribute at this path was computed from it

    def is_(self, p: Tensor | None) -> bool:
        return p is not None and self.parameter() is p

    @property
    def is_unchanged(self) -> bool:
        """Whether it is in use, and as it was."""
        p = self.parameter()
        return p is not None and version_of(p) == self.version and p.data_ptr() == self.address


class OutsideParameters(Measurement):
    """Finds parameters in the graph of the output that were not the model's when its training began.

    The graph is read in the first inspected batches and in one of four later on, up to the inputs, which
    another model may have computed. Nothing is kept alive, and nothing is read if the parameters of the model
    are divided over ranks.
    """

    def __init__(self) -> None:
        self.has_joined = False  # whether the model has got parameters, as seen before an inspected step
        self.hidden_by = ""  # what hides a part of the graph
        self._own: dict[int, ReferenceType[Tensor]] = {}
        self._is_on = True
        self._n_looks = self._n_graphs = 0
        self._found: dict[int, Outside] = {}  # not in the model, by id
        self._latest: list[Outside] = []
        self._joined: list[Outside] = []  # those of the latest graph that the model had in its call
        self._n_anew, self._has_stayed = 0, False
        self._is_error_twice = False

    def on_model(self, run: Run) -> None:
        self._own = {id(p): ref(p) for p in run.loop.model.parameters()}
        self._is_on = not any(map(is_shard, run.loop.model.parameters()))

    def on_prediction(self, run: Run) -> None:
        self.has_joined = False
        self._n_looks += 1
        if not self._is_on or (self._n_looks > N_EACH and self._n_looks % N_EACH):
            return
        given = [x for _, x in parts(run.loop.xb) if isinstance(x, Tensor)]
        outputs, known, outside = graph.roots(run.loop.pred), set(map(id, given)), dict[int, Tensor]()
        for node in graph.walk(outputs, graph.roots(given), graph.MAX_NODES):
            if (name := graph.name(node)) in graph.HIDING and name != graph.COMPILED:
                self.hidden_by = graph.HIDING[name]
            p = graph.leaf(node)
            if isinstance(p, nn.Parameter) and id(p) not in known:
                own = self._own.get(id(p))
                if own is None or own() is not p:
                    outside[id(p)] = p
        self._n_graphs += bool(outputs)
        if outside:
            self._add(run.loop.model, outside, run.n_steps)

    def _add(self, model: nn.Module, outside: dict[int, Tensor], n_steps: int) -> None:
        stay = [x for x in self._latest if x.is_(outside.get(id(x.parameter())))]
        self._has_stayed |= bool(stay)
        self._n_anew += not stay
        names, places = {id(p): name for name, p, _ in find_params(model)}, dict(_places(model, outside))
        order = {i: place for place, i in enumerate([*names, *places])}
        self._latest, self._joined = [], []
        for i, p in sorted(outside.items(), key=lambda item: order.get(item[0], len(order))):
            path, is_computed = places.get(i, ("", False))
            state = tuple(p.shape), version_of(p), p.data_ptr(), n_steps
            seen = Outside(ref(p), *state, names.get(i, path), is_computed)
            self._latest.append(seen)
            if i in names:
                self._joined.append(seen)
            elif (known := self._found.get(i)) is None or not known.is_(p):
                self._found[i] = seen

    def on_step(self, run: Run) -> None:
        """Adds what has joined; what was there in the call only is torch.func.functional_call's."""
        self.has_joined, joined, self._joined = False, self._joined, []
        if not joined:
            return
        own = {id(p) for p in run.loop.model.parameters()}
        if not all(id(x.parameter()) in own for x in joined):  # the caller may train these
            self._is_on, self.hidden_by = False, "torch.func.functional_call"
            return
        self._own |= {id(x.parameter()): x.parameter for x in joined}
        self.has_joined = True

    def on_error(self, run: Run, error: BaseException) -> None:
        self._is_error_twice = isinstance(error, RuntimeError) and str(error).startswith(TWICE)

    def is_known(self, n_steps: int) -> bool:
        """Whether all such parameters would have been found, and it is known if they are trained."""
        is_open = any(x.is_unchanged and n_steps - x.n_steps < MIN_STEPS for x in self._found.values())
        return self._n_graphs > 0 and not self.hidden_by and not is_open

    def made_anew(self) -> list[Outside]:
        """Parameters of the latest graph, if each graph has others than the one before."""
        is_anew = self._is_on and self._n_anew >= MIN_GRAPHS and not self._has_stayed
        return self._latest if is_anew else []

    def freed(self) -> list[Outside]:
        """Parameters from which an attribute was computed, if a second backward ended the training."""
        return [x for x in self._still() if x.is_computed] if self._is_error_twice else []

    def untrained(self, n_steps: int) -> list[Outside]:
        """Parameters that no step changes, and that no optimizer has."""
        still = [x for x in self._still() if n_steps - x.n_steps >= MIN_STEPS]
        if still:
            optimizers = [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]  # of this process
            trained = {i for opt in optimizers for i in params_of(opt)}
            self._found = {i: x for i, x in self._found.items() if id(x.parameter()) not in trained}
            still = [x for x in still if id(x.parameter()) not in trained]
        return still

    def _still(self) -> list[Outside]:
        return [x for x in self._found.values() if x.is_unchanged] if self._is_on else []

    def freeze(self) -> None:
        self._own, self._found, self._latest, self._joined = {}, {}, [], []


def _places(model: nn.Module, wanted: dict[int, Tensor]) -> Iterator[Place]:
    """Paths of parameters in attributes of the model's modules, and whether these are computed from them."""
    for prefix, m in named_modules(model).items():
        for attribute, value in vars(m).items():
            if attribute not in OF_MODULE:
                path = f"{prefix}.{attribute}" if prefix else attribute
                yield from _inside(value, path, wanted, MAX_DEPTH)


def _inside(value: Any, path: str, wanted: dict[int, Tensor], depth: int) -> Iterator[Place]:
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
