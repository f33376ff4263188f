"""Motion: compares parameters at the end of a training with their beginning."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hookcb.core.precision import at_least_float32
from hookcb.core.shards import is_shard
from hookcb.diagnosis.probes.model import ALIKE, MIN_UNITS, is_of_torch, share_alike
from hookcb.diagnosis.run import Observation
from hookcb.gradients.stats import is_readable, sketch_copy
from hookcb.hooks.modules import named_modules
from hookcb.hooks.params import find_params

MIN_BATCHES = 20


class Motion:
    """Copies some elements of each parameter at the beginning, and finds matrices that begin constant.

    A constant matrix may be intended to scale element by element: it is a fault only if all rows, or all
    columns, are still equal after some steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._begins: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.begin(model)
        custom = {
            f"{prefix}.{name}" if prefix else name
            for prefix, m in named_modules(model).items()
            if not is_of_torch(m) or isinstance(m, nn.RNNBase)
            for name, _ in m.named_parameters(recurse=False)
        }
        begun = ((name, p) for name, (p, _) in self._begins.items() if name in custom)
        self._constant = [(name, p) for name, p in begun if _is_constant(p)]

    def begin(self, model: nn.Module) -> None:
        """Copies elements of the parameters of which there is no copy yet, as that of a new layer."""
        for name, p, _ in find_params(model):
            is_known = name in self._begins and self._begins[name][0] is p
            is_there = is_readable(p) and not isinstance(p, nn.parameter.UninitializedParameter)
            if is_there and p.numel() and not is_known:
                self._begins[name] = p, sketch_copy(p)

    def moved(self) -> dict[str, bool]:
        """Whether any copied element has changed, by name of the parameter."""
        return {name: not torch.equal(sketch_copy(p), begin) for name, (p, begin) in self._begins.items()}

    def observe_no_backward(self, n_steps: int) -> Iterator[Observation]:
        """Steps of an optimizer, before which the model was called, without any backward."""
        if n_steps >= MIN_BATCHES and self._is_still(self.moved()):
            yield Observation(
                "param.not_stepped",
                step=0,
                value=0.0,
                text=f"No backward was seen to reach the model before any of {n_steps} optimizer steps, and "
                "all weights are bit-identical.",
                causes=(
                    "loss.backward() is missing, or is in a branch that is never taken",
                    "the loss does not depend on the model, as after a .detach()",
                ),
                next_steps=("Call loss.backward() before optimizer.step()",),
            )

    def _is_still(self, moved: dict[str, bool]) -> bool:
        """Whether parameters are trained, and none of them has moved."""
        trained = [name for name, (p, _) in self._begins.items() if p.requires_grad]
        return bool(trained) and not any(moved[name] for name in trained)

    def observations(self, n_steps: int, n_backward: int, n_given: int = 0) -> Iterator[Observation]:
        """An optimizer without steps, and constant matrices with rows that stay equal.

        Args:
            n_steps: number of steps.
            n_backward: number of backwards.
            n_given: number of those of losses of other models, to which it gives features or targets.
        """
        moved = self.moved()
        is_still = self._is_still(moved)
        if is_still and n_backward >= MIN_BATCHES and n_steps == 0 and 2 * n_given > n_backward:
            yield Observation(
                "param.not_stepped",
                step=0,
                value=0.0,
                text=f"In {n_backward} batches the backward of another model's loss gave gradients to all "
                "weights, which no optimizer has: nothing uses them.",
                causes=("a network that gives targets or features, and is not frozen",),
                next_steps=(
                    "Freeze it with requires_grad_(False), or call it under torch.no_grad() if it only gives "
                    "targets",
                ),
                severity="info",
            )
        elif is_still and n_backward >= MIN_BATCHES and n_steps == 0:
            yield Observation(
                "param.not_stepped",
                step=0,
                value=0.0,
                text=f"In {n_backward} batches with a backward pass no optimizer of the model has made a "
                "step, and all weights are bit-identical.",
                causes=(
                    "the optimizer step is missing, or is in a branch that is never taken",
                    "the optimizer was created with the parameters of another model",
                ),
                next_steps=(
                    "Call optimizer.step() after loss.backward(), with an optimizer of model.parameters()",
                ),
            )
        for name, p in self._constant:
            rows = p.detach().flatten(1)
            if moved[name] and max(share_alike(rows), share_alike(rows.T)) >= ALIKE:
                yield Observation(
                    "init.symmetric",
                    name.rpartition(".")[0],
                    name,
                    value=1.0,
                    text=f"Parameter {name} began as a constant, and after {n_steps} steps all its units "
                    "still have the same weights: they act as a single unit.",
                    causes=("weights were initialized to a constant",),
                    next_steps=("Initialize weights at random; use constants for biases",),
                )


def _is_constant(p: Tensor) -> bool:
    if is_shard(p) or p.ndim != 2 or min(p.shape) < MIN_UNITS or not p.is_floating_point() or p.is_meta:
        return False
    low, high = torch.aminmax(at_least_float32(p.detach()))  # float8 supports no comparison
    return bool(low == high) and bool(high != 0)
