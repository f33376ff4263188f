"""Putting things back as they were after a `with` block: one context manager for each kind of state."""

import copy
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

SMALL = 65_536  # elements up to which a buffer is copied at each batch, larger ones where they have changed
COUNTS = (bool, int, float, str)  # what modules count with, in attributes that are no buffers
Place = tuple[dict[str, Tensor | None], str, Tensor]  # where a module has a buffer: among its own, as what


@contextmanager
def preserve_state(*modules: nn.Module, opt: Optimizer | None = None) -> Iterator[None]:
    """Lets modules be trained in a `with` block, and puts them back as they were.

    That is parameters, buffers, gradients, modes, what modules count in attributes, random numbers, and what
    the optimizer keeps.
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
    """Puts back an attribute of each object; with a value `inside` it has this in the block."""
    before = [(x, getattr(x, name)) for x in objects]
    try:
        for x, _ in before:
            for value in inside:
                setattr(x, name, value)
        yield
    finally:
        for x, own in before:
            setattr(x, name, own)


def preserve_modes(model: nn.Module) -> AbstractContextManager[None]:
    """Puts back which modules are in train mode, not by `train()`, which some override."""
    return preserve_attribute(model.modules(), "training")


@contextmanager
def preserve_contents(*containers: Any) -> Iterator[None]:
    """Puts back what is in dicts and sets, such as the attributes of an object, `vars(x)`."""
    before = [copy.copy(container) for container in containers]
    try:
        yield
    finally:
        for container, own in zip(containers, before, strict=True):
            container.clear()
            container.update(own)


@contextmanager
def preserve_random(*loaders: Any) -> Iterator[None]:
    """Has random numbers go on as if nothing was; those of `loaders` too, see `random_state`."""
    numbers = random_state(*loaders)
    try:
        yield
    finally:
        set_random_state(numbers, *loaders)


@contextmanager
def preserve_values(tensors: Iterable[Tensor], only_changed: bool = False) -> Iterator[None]:
    """Puts back the values of tensors; they wait on the CPU, as an accelerator may have no room for both.

    With `only_changed` the others are not written to, whose memory may be read-only; all have to be dense.
    """
    # those of inference mode cannot have changed, and those on meta have none
    own = [x for x in tensors if not (is_lazy(x) or x.is_inference() or x.is_meta)]
    values = [x.detach().to("cpu", copy=True) for x in own]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in zip(own, values, strict=True):
                if not (only_changed and same_bits(x, value.to(x.device))):
                    # by `data` no graph counts it as a change; a sparse one has indices of its own there
                    (x.data if x.layout is torch.strided else x).copy_(value)


@contextmanager
def preserve_optimizer(opt: Optimizer) -> Iterator[None]:
    """Puts back the state of an optimizer, what its groups are set to, and its attributes."""
    settings, groups = group_settings(opt), [(group, list(group["params"])) for group in opt.param_groups]
    leaves: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        leaves.append(x)
        return x

    state = {p: map_tensors(noted, own) for p, own in opt.state.items()}
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
    """Has a model work on copies of its buffers: a graph may have saved one itself for its backward.

    Only a buffer that was written to all the same, through another reference, gets its value back.
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
    """Puts back what modules count in attributes that are no buffers."""
    kept = [(m, {key: x for key, x in vars(m).items() if type(x) in COUNTS}) for m in model.modules()]
    try:
        yield
    finally:
        for m, counts in kept:
            vars(m).update(counts)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same, NaN among it."""
    return bool(((x == y) | ((x != x) & (y != y))).all())


class BufferCopies:
    """What the buffers of a model hold at some moment.

    Taken at each batch, a large buffer is copied only where torch says that it has changed. A change made
    past autograd, by `buffer.data`, it does not see in buffers of more than 65,536 elements.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id: the buffer, its version, the copy

    def take(self, model: nn.Module) -> None:
        """Copies what the buffers of `model` hold now."""
        holders = filter(None, map(buffers_of, model.modules()))
        self.places = [
            (buffers, name, x)
            for buffers in holders
            if isinstance(buffers, dict)  # those of TorchScript are not
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
        """Gives buffers that were written to since their values back."""
        for x, version, value in self._copies.values():
            if version >= 0 and version_of(x) != version:
                x.detach().copy_(value)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Has the model work on copies for the length of a block; its own buffers are not touched."""
        plain = [m for m in model.modules() if isinstance(buffers_of(m), dict)]
        registers: list[Any] = [x for m in plain for x in (buffers_of(m), unsaved_buffer_names(m))]
        fresh = {key: value.clone() for key, (_, _, value) in self._copies.items()}  # a replay changes them
        with preserve_contents(*registers):
            for buffers, name, x in self.places:
                buffers[name] = fresh[id(x)]
            yield
