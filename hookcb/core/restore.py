"""Context managers that restore state after a `with` block, one for each kind of state."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookcb.core.batch import map_tensors
from hookcb.core.optim import group_settings, set_groups
from hookcb.core.randomness import random_state, set_random_state
from hookcb.core.torch_private import buffers_of, unsaved_buffer_names, version_of

SMALL = 65_536  # elements; smaller buffers are copied at each batch, larger ones only if they have changed
COUNTS = (bool, int, float, str)  # types of the counters that modules keep in plain attributes
OF_MODULE = frozenset(vars(nn.Module()))  # attributes that each module has
Place = tuple[dict[str, Tensor | None], str, Tensor]  # the buffers of a module, a name in them, the buffer


@contextmanager
def preserve_state(*modules: nn.Module, opt: Optimizer | None = None) -> Iterator[None]:
    """Lets modules be trained in a `with` block, and restores everything afterwards.

    Restores parameters, buffers, gradients, modes, counters in attributes of modules, random state, and the
    optimizer.
    """
    with ExitStack() as stack:
        if opt is not None:
            stack.enter_context(preserve_optimizer(opt))
        stack.enter_context(preserve_random())
        for m in modules:
            params = list(m.parameters())
            stack.enter_context(preserve_modes(m))
            stack.enter_context(preserve_attribute(params, "grad", None))
            stack.enter_context(preserve_values(params, only_changed=True))
            stack.enter_context(preserve_buffers(m))
            stack.enter_context(preserve_counts(m))
        yield


@contextmanager
def preserve_attribute(objects: Iterable[Any], name: str, *inside: Any) -> Iterator[None]:
    """Restores an attribute of each object; with a value `inside`, the attribute has it in the block."""
    before = [(x, getattr(x, name)) for x in objects]
    try:
        for x, _ in before:
            for value in inside:
                setattr(x, name, value)
        yield
    finally:
        for x, value in before:
            setattr(x, name, value)


def preserve_modes(model: nn.Module) -> AbstractContextManager[None]:
    """Restores which modules are in train mode, without `train()`, which some override."""
    return preserve_attribute(model.modules(), "training")


@contextmanager
def preserve_contents(*containers: Any) -> Iterator[None]:
    """Restores the contents of dicts and sets, such as the attributes of an object, `vars(x)`."""
    before = [copy.copy(container) for container in containers]
    try:
        yield
    finally:
        for container, contents in zip(containers, before, strict=True):
            container.clear()
            container.update(contents)


@contextmanager
def preserve_random(*loaders: Any) -> Iterator[None]:
    """Restores the random state, and that of `loaders`, see `random_state`."""
    state = random_state(*loaders)
    try:
        yield
    finally:
        set_random_state(state, *loaders)


@contextmanager
def preserve_values(tensors: Iterable[Tensor], only_changed: bool = False) -> Iterator[None]:
    """Restores the values of tensors; the copies are on the CPU, as an accelerator may lack the memory.

    With `only_changed`, unchanged tensors are not written to, as their memory may be read-only; then all
    tensors must be dense.
    """
    # inference tensors cannot have changed, and meta tensors have no values
    saved = [x for x in tensors if not (is_lazy(x) or x.is_inference() or x.is_meta)]
    values = [x.detach().to("cpu", copy=True) for x in saved]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in zip(saved, values, strict=True):
                if not (only_changed and same_bits(x, value.to(x.device))):
                    # through `data`, no graph counts it as a change; that of a sparse x has its own indices
                    (x.data if x.layout is torch.strided else x).copy_(value)


@contextmanager
def preserve_optimizer(opt: Optimizer) -> Iterator[None]:
    """Restores the state of an optimizer, the settings of its groups, and its attributes."""
    settings, groups = group_settings(opt), [(group, list(group["params"])) for group in opt.param_groups]
    leaves: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        leaves.append(x)
        return x

    state = {p: map_tensors(noted, values) for p, values in opt.state.items()}
    with preserve_values(leaves):
        try:
            with preserve_contents(vars(opt)):
                yield
        finally:
            opt.param_groups[:] = [group for group, _ in groups]
            for group, params in groups:
                group["params"][:] = params
            set_groups(opt, settings)
            opt.state.clear()
            opt.state.update(state)


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Has a model use copies of its buffers, as a graph may have saved the originals for its backward.

    Only a buffer that was written to nevertheless, through another reference, gets its value back.
    """
    copies = BufferCopies()
    copies.take(model)
    try:
        with copies.swapped_in(model):
            yield
    finally:
        copies.put_back()


@contextmanager
def preserve_counts(model: nn.Module) -> Iterator[None]:
    """Restores counters that modules keep in plain attributes."""
    before = [(m, {key: x for key, x in vars(m).items() if type(x) in COUNTS}) for m in model.modules()]
    try:
        yield
    finally:
        for m, counts in before:
            vars(m).update(counts)


@contextmanager
def preserve_own_attributes(model: nn.Module) -> Iterator[None]:
    """Restores the attributes that the modules of the user's classes add to those of `nn.Module`.

    Of lists, dicts, sets and deques the contents are restored too, but not those of what is in them.
    """
    before = [(vars(m), {k: x for k, x in vars(m).items() if k not in OF_MODULE}) for m in model.modules()]
    values = [x for _, own in before for x in own.values() if isinstance(x, list | dict | set | deque)]
    contents = [(x, copy.copy(x)) for x in {id(x): x for x in values}.values()]
    try:
        yield
    finally:
        for attributes, own in before:
            for name in [name for name in attributes if name not in OF_MODULE and name not in own]:
                del attributes[name]
            attributes.update(own)
        for x, content in contents:
            x.clear()
            (x.extend if isinstance(x, list | deque) else x.update)(content)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have equal elements; NaN equals NaN."""
    return bool(((x == y) | ((x != x) & (y != y))).all())


class BufferCopies:
    """Copies of the buffers of a model, to be updated at each batch.

    A buffer of more than 65,536 elements is copied again only if its version counter has changed; a change
    through `buffer.data`, which autograd does not count, is missed there.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id: the buffer, its version, the copy

    def take(self, model: nn.Module) -> None:
        """Copies the current values of the buffers of `model`."""
        holders = filter(None, map(buffers_of, model.modules()))
        self.places = [
            (buffers, name, x)
            for buffers in holders
            if isinstance(buffers, dict)  # not of a TorchScript module
            for name, x in buffers.items()
            if x is not None and not is_lazy(x)
        ]
        before, self._copies = self._copies, {}
        for _, _, x in self.places:
            if id(x) not in self._copies:
                self._copies[id(x)] = self._copy(x, before.get(id(x)))

    def _copy(self, x: Tensor, before: tuple[Tensor, int, Tensor] | None) -> tuple[Tensor, int, Tensor]:
        version = -1 if x.is_inference() else version_of(x)
        if before is not None and before[0] is x and before[1] == version >= 0 and x.numel() > SMALL:
            return before
        return x, version, x.detach().clone()

    def put_back(self) -> None:
        """Restores the values of buffers that were written to since `take`."""
        for x, version, value in self._copies.values():
            if version >= 0 and version_of(x) != version:
                x.detach().copy_(value)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Has the model use copies in a `with` block; its own buffers are not touched."""
        plain = [m for m in model.modules() if isinstance(buffers_of(m), dict)]
        registers: list[Any] = [x for m in plain for x in (buffers_of(m), unsaved_buffer_names(m))]
        # the block may change them, and it may be entered again
        fresh = {key: value.clone() for key, (_, _, value) in self._copies.items()}
        with preserve_contents(*registers):
            for buffers, name, x in self.places:
                buffers[name] = fresh[id(x)]
            yield
