"""Training for a look, and putting everything back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookcb.core.randomness import random_state, set_random_state
from hookcb.core.torch_private import buffers_of, version_of

SMALL = 65_536  # elements up to which a buffer is copied at each batch, larger ones where they have changed
COUNTS = (bool, int, float, str)  # what modules count with, in attributes that are no buffers
Place = tuple[dict[str, Tensor | None], str, Tensor]  # where a module has a buffer: among its own, as what


@contextmanager
def unchanged(model: nn.Module, opt: Optimizer | None) -> Iterator[None]:
    """Lets a model be trained in a `with` block, and puts it back as it was.

    That is parameters, buffers, gradients, modes, what modules count in attributes, random numbers, and what
    the optimizer keeps.
    """
    params = list(model.parameters())
    copies = [(x, x.detach().clone()) for x in params if not is_lazy(x)]
    buffers = BufferCopies()
    buffers.take(model)
    grads = [(p, p.grad) for p in params]
    modes = [(m, m.training) for m in model.modules()]
    numbers = random_state()
    kept = None if opt is None else _kept(opt)
    for p in params:
        p.grad = None
    try:
        with counts_kept(model), buffers.swapped_in(model):
            yield
    finally:
        for x, copy in copies:
            if not same_bits(x, copy):
                x.data.copy_(copy)  # which no graph of the user's counts as a change
        for p, grad in grads:
            p.grad = grad
        for m, mode in modes:
            m.training = mode
        set_random_state(numbers)
        if opt is not None and kept is not None:
            _put_back(opt, *kept)


def _kept(opt: Optimizer) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    state = {p: {key: _copy(x) for key, x in of.items()} for p, of in opt.state.items()}
    return state, [
        {key: _copy(x) if key != "params" else x for key, x in g.items()} for g in opt.param_groups
    ]


def _put_back(opt: Optimizer, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    opt.state.clear()
    opt.state.update(state)
    for group, before in zip(opt.param_groups, groups, strict=True):
        group.update(before)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


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

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Has the model work on copies for the length of a block; its own buffers are not touched."""
        now = [(own, dict(own)) for own in map(buffers_of, model.modules()) if isinstance(own, dict)]
        fresh = {key: copy.clone() for key, (_, _, copy) in self._copies.items()}  # a replay changes them
        try:
            for buffers, name, x in self.places:
                buffers[name] = fresh[id(x)]
            yield
        finally:
            for buffers, own in now:
                buffers.clear()
                buffers.update(own)


@contextmanager
def counts_kept(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what modules count in attributes that are no buffers."""
    kept = [(m, {key: x for key, x in vars(m).items() if type(x) in COUNTS}) for m in model.modules()]
    try:
        yield
    finally:
        for m, counts in kept:
            vars(m).update(counts)
