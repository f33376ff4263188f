"""DeadUnits: which units have had a gradient, and when the last one was."""

import statistics
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookcb.core.torch_private import Convolution, parameters_of
from hookcb.diagnosis.probes.model import is_of_torch, own_weight
from hookcb.hooks.modules import named_modules

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LOOKS, EXAMPLES = 8, 512  # of which it takes both
FEWEST = 4  # units, and inputs of each


class Dead(NamedTuple):
    """Of one weight the share of units without a gradient.

    Attributes:
        lately: in as many of the last looks as it takes, see `LOOKS`.
        never: in any look.
        since: the step from which on half of the former had none.
        n_looked, n_examples: how often was looked, and at how many examples.
    """

    lately: float
    never: float
    since: int
    n_looked: int
    n_examples: int


class _Units(NamedTuple):
    """A weight, its bias, and whether units are surely its rows."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    is_row: bool


class DeadUnits:
    """Follows the units of linear and convolutional layers, and of matrices with a bias of one's own.

    A unit without any gradient has not been active for any sample. Its bias tells quickest; where that has
    none, which may also be as a loss of differences does not depend on it, its row of the weight is looked
    at. A look at which no unit at all has a gradient does not count: then the loss is satisfied, or constant.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, _Units] = {}  # by name of the weight
        for name, m in named_modules(model).items():
            if isinstance(m, nn.Linear | Convolution) and not isinstance(m, TRANSPOSED):
                weight = own_weight(m)
                if weight is not None:
                    self._layers[f"{name}.weight" if name else "weight"] = _Units(
                        weight, parameters_of(m).get("bias"), is_row=True
                    )
        self._layers |= _bare_layers(model)
        self._last: dict[str, Tensor] = {}  # of each unit the last look at which it had a gradient, from 1
        self._looks: dict[str, list[tuple[int, int]]] = {}  # steps and numbers of examples
        self.n_examples = 0  # of all looks that count

    def read_gradients(self, step: int, n_examples: int) -> None:
        """Gradients are whole, of so many examples."""
        found = {name: _alive(*units) for name, units in self._layers.items()}
        alive = {name: x for name, x in found.items() if x is not None}
        if all(x.is_cpu and not bool(x.any()) for x in alive.values()):
            return
        self.n_examples += n_examples
        for name, x in alive.items():
            looks = self._looks.setdefault(name, [])
            looks.append((step, n_examples))
            before = self._last.get(name, torch.zeros(len(x), dtype=torch.int32, device=x.device))
            self._last[name] = torch.where(x, len(looks), before)

    def dead_shares(self) -> dict[str, Dead]:
        """By name of the weight; waits for the device."""
        return {name: self._of(name) for name in self._looks}

    def _of(self, name: str) -> Dead:
        looks, last = self._looks[name], self._last[name].tolist()
        n, n_examples = 0, 0
        for n, (_, of) in enumerate(reversed(looks), start=1):
            n_examples += of
            if n >= LOOKS and n_examples >= EXAMPLES:
                break
        dead = [x for x in last if x <= len(looks) - n]
        since = int(statistics.median(dead)) if dead else 0
        never = sum(x == 0 for x in last) / len(last)
        step = looks[min(since, len(looks) - 1)][0]
        return Dead(len(dead) / len(last), never, step, n, n_examples)


def _alive(weight: nn.Parameter, bias: nn.Parameter | None, is_row: bool) -> Tensor | None:
    """Of each unit whether it has a gradient; None where that cannot be told."""
    grad = weight.grad
    if grad is None or grad.layout is not torch.strided or hasattr(grad, "full_tensor"):
        return None
    of_bias = None if bias is None or bias.grad is None else bias.grad.detach() != 0
    if of_bias is not None and of_bias.is_cpu and bool(of_bias.all()):
        return of_bias
    rows = grad.detach().flatten(1)
    if of_bias is None:
        return rows.any(1)
    if is_row or rows.shape[0] != rows.shape[1]:
        return of_bias | rows.any(1 if rows.shape[0] == len(of_bias) else 0)
    return of_bias | _of_square(rows, of_bias)


def _of_square(rows: Tensor, of_bias: Tensor) -> Tensor:
    """Of a square matrix, where units may be rows or columns: those that are zero wherever the bias is."""
    of_rows, of_columns = rows.any(1), rows.any(0)
    if of_bias.is_cpu:
        for alive in (of_rows, of_columns):
            if not bool(alive[~of_bias].any()):
                return alive
    return of_rows | of_columns


def _bare_layers(model: nn.Module) -> dict[str, _Units]:
    """Matrices that are parameters of modules of one's own, each with the first bias of its size."""
    own = [
        (f"{prefix}.{name}" if prefix else name, p)
        for prefix, m in named_modules(model).items()
        if not is_of_torch(m)
        for name, p in parameters_of(m).items()
        if p is not None and not isinstance(p, nn.parameter.UninitializedParameter)
    ]
    vectors = [p for _, p in own if p.ndim == 1]
    found: dict[str, _Units] = {}
    for name, weight in own:
        if weight.ndim == 2 and min(weight.shape) >= FEWEST:
            bias = next((p for p in vectors if len(p) in weight.shape), None)
            if bias is not None:
                vectors = [p for p in vectors if p is not bias]
                found[name] = _Units(weight, bias, is_row=False)
    return found
