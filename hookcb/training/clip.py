"""GradientClip: limits the size of gradients."""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from hookcb.core import orders
from hookcb.core.arguments import check_number
from hookcb.core.callback import Callback
from hookcb.processes.shards import is_dtensor

T = TypeVar("T", bound=Tensor)

Norms = list[Tensor]  # norm of a step's gradients before clipping; with `value` also after it


class GradientClip(Callback):
    """Clips the gradients before each step, so that a rare large one does not throw the weights off.

    Limits the norm of all gradients together, or with `value` the absolute value of each element. Callbacks
    with an `order` below 20 see the gradients before clipping, those above see them clipped. The records stay
    on the device until they are read, or the training of the epoch ends.

    Args:
        max_norm: the largest norm; 1.0 if no `value` is given. `float("inf")` only records.
        norm_type: the p of the p-norm; `float("inf")` for the largest absolute value.
        value: the largest absolute value of each element, in place of a norm.
        name: name of the callback in the learner.

    Attributes:
        norms: norm of all gradients before clipping, at each step; with `value`, the L2 norm.
        coefs: factor that gradients were multiplied by at each step, 1.0 if nothing was clipped; with
            `value`, the share of the norm that was left.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013.

    >>> from hookcb import GradientClip, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=GradientClip(0.5))
    >>> norm, coef = learn.gradient_clip.norms[0], learn.gradient_clip.coefs[0]
    >>> norm > 0.5, round(norm * coef, 3)
    (True, 0.5)
    """

    order = orders.CLIP

    def __init__(
        self,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if max_norm is not None and value is not None:
            raise ValueError(f"max_norm is {max_norm!r} and value is {value!r}; give only one of them")
        if value is None:
            max_norm = 1.0 if max_norm is None else max_norm
        for argument, given in (("max_norm", max_norm), ("norm_type", norm_type), ("value", value)):
            if given is not None:
                _check_positive(argument, given)
        self.max_norm, self.norm_type, self.value = max_norm, norm_type, value
        self.before_fit()

    def before_fit(self) -> None:
        self._read: list[list[float]] = []  # norm and coefficient of each step
        self._waiting: list[Norms] = []
        self._last: Norms | None = None  # of a step that is still to be made

    @property
    def norms(self) -> list[float]:
        return [norm for norm, _ in self._steps()]

    @property
    def coefs(self) -> list[float]:
        return [coef for _, coef in self._steps()]

    def before_step(self) -> None:
        params = [p for p in self.model.parameters() if p.requires_grad]
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            self._last = [torch.zeros((), device="cpu")] * (1 if self.value is None else 2)
        elif self.value is None:
            self._last = [_clip_norm(params, self.max_norm or 1.0, self.norm_type)]
        else:
            before = _total_norm(grads, 2.0)
            clip_grad_value_(params, self.value)
            self._last = [before, _total_norm(grads, 2.0)]

    def after_cancel_step(self) -> None:
        self._last = None

    def after_step(self) -> None:
        if self._last is not None:
            self._waiting.append(self._last)
            self._last = None

    def after_train(self) -> None:
        self._steps()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self._steps(), dtype=torch.float64, device="cpu").reshape(-1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read, self._waiting = state["steps"].tolist(), []

    def _steps(self) -> list[list[float]]:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            norms = torch.stack([_on(waiting[-1][0].device, norm) for step in waiting for norm in step])
            before, *after = norms.reshape(len(waiting), -1).unbind(1)
            if self.max_norm is not None:
                coefs = (self.max_norm / (before + 1e-6)).clamp(max=1.0)  # the formula of clip_grad_norm_
            else:
                coefs = torch.where(before == 0, 1.0, after[0] / before)
            self._read += torch.stack([before, coefs], 1).tolist()
        return self._read

    def __getstate__(self) -> dict[str, Any]:
        self._steps()
        return super().__getstate__() | {"_last": None}


def _clip_norm(params: list[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    """Clips gradients to a norm of all together; returns the norm before, the same on all ranks."""
    if not any(is_dtensor(p) for p in params):
        return clip_grad_norm_(params, max_norm, norm_type)
    grads = [p.grad for p in params if p.grad is not None]
    norm = _total_norm(grads, norm_type)
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # the formula of clip_grad_norm_
    for grad in grads:  # torch 2.11 leaves gradients as they are of which each rank has a summand
        local: Tensor = grad.to_local() if is_dtensor(grad) else grad  # type: ignore[attr-defined]
        local.mul_(coef.to(local.device))
    return norm


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Norm of all gradients together; of DTensors that of the whole, by a reduction for each device mesh."""
    norms = [get_total_norm(alike, norm_type) for alike in _by_mesh(grads)]
    whole = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    return whole[0] if len(whole) == 1 else get_total_norm(whole, norm_type)


def _by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Tensors by their device mesh, as torch's functions accept those of one only; None without a mesh."""
    of_mesh: dict[Any, list[T]] = {}
    for x in tensors:
        of_mesh.setdefault(getattr(x, "device_mesh", None), []).append(x)
    return [*of_mesh.values()]


def _check_positive(argument: str, given: Any) -> None:
    if given != math.inf:  # only records, or is the norm of the largest absolute value
        check_number(argument, given)


def _on(device: torch.device, norm: Tensor) -> Tensor:
    """Moves a norm to `device`, as that of a step without gradients is on the CPU."""
    return norm.float().to(device)
