"""Training for a look, and putting everything back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # not in its __all__
from torch.optim import Optimizer

from hookcb.core.randomness import random_state, set_random_state
from hookcb.nans.replay import BufferCopies, counts_kept


@contextmanager
def unchanged(model: nn.Module, opt: Optimizer | None) -> Iterator[None]:
    """Lets a model be trained in a `with` block, and puts it back as it was.

    That is parameters, buffers, gradients, modes, what modules count in attributes, random numbers, and what
    the optimizer keeps.
    """
    params = list(model.parameters())
    copies = [(x, x.detach().clone()) for x in params if not isinstance(x, UninitializedTensorMixin)]
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
