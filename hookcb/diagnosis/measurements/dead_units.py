"""DeadUnits: units that no longer receive a gradient, in all steps at the beginning."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookcb.core.batch import n_samples
from hookcb.core.torch_private import Convolution, parameters_of
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.frame import is_of_torch, own_weight
from hookcb.diagnosis.rules import MIN_UNITS
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MIN_LOOKS, MIN_EXAMPLES = 8, 512  # without a gradient, both required for a dead unit
N_DENSE, MAX_DENSE = 64, 512  # steps at the beginning that are all inspected
MAX_PLACES = 8  # positions of a sample that count as samples, as neighbors are alike
N_TURNS = 8  # steps in which the rows of all layers with a bias are read once on a GPU
MAX_EXAMPLES = 4 * MIN_EXAMPLES  # of them, after which `N_DENSE` steps suffice


class Units(NamedTuple):
    """Weight and bias of a layer or their gradients, and whether its units are known to be rows."""

    weight: Tensor
    bias: Tensor | None
    is_row: bool


class Dead(NamedTuple):
    """Shares of a weight's units that received no gradient."""

    lately: float  # in the last `n_looked` steps measured
    never: float  # in none of them
    since: int  # the step since which half of these units have had none
    n_looked: int  # steps and examples that `lately` covers, see `MIN_LOOKS`
    n_examples: int
    n_units: int
    n_places: int = 1  # positions of an example that count as examples, see `MAX_PLACES`

    @property
    def is_enough(self) -> bool:
        """Whether enough was seen to call a unit dead."""
        return self.n_looked >= MIN_LOOKS and self.n_examples * self.n_places >= MIN_EXAMPLES


class DeadUnits(Measurement):
    """Tracks the units of linear and convolutional layers, and of custom matrices with a bias.

    A unit without any gradient was active for no sample. The gradients of all biases are read first, as that
    is cheapest; where one is zero, which it also is if the loss depends on differences only, the unit's row
    of the weight's gradient is read. On a GPU it is not known where, so rows of layers with a bias are read
    in each eighth step, and in inspected ones. Steps in which no unit has a gradient are ignored: the loss is
    then satisfied or constant. A convolution sees as many examples in an image as it has positions, a linear
    layer as many as there are tokens, of which at most 8 count.
    """

    cadence = MAX_DENSE

    def __init__(self) -> None:
        self._layers: dict[str, Units] = {}  # by name of the weight
        self._last: dict[str, Tensor] = {}  # the last look at which each unit had a gradient, 0 if none
        self._places: dict[str, int] = {}  # positions in a sample, in the inspected batch that had fewest
        self._rows: dict[str, int] = {}  # positions in all samples of this batch, by layer
        self._looks: dict[str, list[tuple[int, int, int]]] = {}  # their numbers, steps, numbers of examples
        self._n_looks = 0
        self._in_step = self._in_batch = 0  # examples in the gradients of the next step, and in the batch
        self._is_dense, self._is_cancelled = True, False
        self.n_examples = 0  # in all steps that count
        self.of: dict[str, Dead] = {}  # by name of the weight

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            if isinstance(m, nn.Linear | Convolution) and not isinstance(m, TRANSPOSED):
                path = f"{name}.weight" if name else "weight"
                if (weight := own_weight(m)) is not None:
                    self._layers[path] = Units(weight, parameters_of(m).get("bias"), True)
        self._layers |= _bare_layers(run.loop.model)

    def on_batch(self, run: Run) -> None:
        if run.looking or self._is_dense:
            n = n_samples((*run.loop.yb, run.loop.xb))
            self._in_batch = 1 if n is None else n
            self._in_step += self._in_batch

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        is_layer = isinstance(m, nn.Linear | Convolution) and not isinstance(m, TRANSPOSED)
        if torch.compiler.is_compiling() or not (is_layer and isinstance(output, Tensor)):
            return
        path = f"{name}.weight" if name else "weight"
        if (weight := own_weight(m)) is not None:
            self._rows[path] = self._rows.get(path, 0) + output.numel() // weight.shape[0]

    on_compiled_output = on_output

    def on_step(self, run: Run) -> None:
        if run.looking or self._is_dense:
            self.read_gradients(run.step, self._in_step, run.looking)

    def on_cancel(self, run: Run, level: str) -> None:
        if level == "step":
            self._is_cancelled = True  # its gradients may stay for the next step
        else:
            self._in_step -= self._in_batch
            self._in_batch = 0

    def on_between(self, run: Run) -> None:
        if self._is_dense:
            n_places = min([self._places.get(name, 1) for name in self._looks], default=1)
            n_dense = MAX_DENSE if self.n_examples * n_places < MAX_EXAMPLES else N_DENSE
            self._is_dense = run.n_steps < n_dense
        if not (self._is_cancelled and self._is_dense):
            self._in_step = 0
        self._is_cancelled = False

    def on_batch_end(self, run: Run) -> None:
        for path, n_rows in self._rows.items():
            n_places = max(1, min(n_rows // max(1, self._in_batch), MAX_PLACES))
            self._places[path] = min(n_places, self._places.get(path, MAX_PLACES))
        self._in_batch, self._rows = 0, {}

    def tell(self, run: Run) -> None:
        self.of = {name: self._shares_of(name) for name in self._looks}

    def freeze(self) -> None:
        self._layers, self._last, self._looks = {}, {}, {}

    @torch.no_grad()
    def read_gradients(self, step: int, n_examples: int, is_inspected: bool = True) -> None:
        """Notes which units have a gradient now, from `n_examples` examples."""
        of_device = defaultdict[torch.device, dict[str, Units]](dict)
        for name, (weight, bias, is_row) in self._layers.items():
            grad = weight.grad
            if grad is not None and grad.layout is torch.strided and not hasattr(grad, "full_tensor"):
                of_device[grad.device][name] = Units(grad, None if bias is None else bias.grad, is_row)
        number = self._n_looks + 1
        alive = [(units, _alive(units, 0 if is_inspected else number)) for units in of_device.values()]
        if not any(not x.is_cpu or bool(x.any()) for _, x in alive):
            return
        self._n_looks, self.n_examples = number, self.n_examples + n_examples
        for units, x in alive:
            sizes = [(weight if bias is None else bias).shape[0] for weight, bias, _ in units.values()]
            for name, n in zip(units, sizes, strict=True):
                self._looks.setdefault(name, []).append((number, step, n_examples))
                if name not in self._last:
                    self._last[name] = x.new_zeros(n, dtype=torch.long)
            last = torch.where(x, number, torch.cat([self._last[name] for name in units]))
            self._last |= zip(units, torch.split_with_sizes(last, sizes), strict=True)

    def _shares_of(self, name: str) -> Dead:
        looks, last, n_places = self._looks[name], self._last[name].tolist(), self._places.get(name, 1)
        is_many = sum(size for *_, size in looks) >= MIN_EXAMPLES
        n_needed = MIN_EXAMPLES if is_many else MIN_EXAMPLES / n_places
        n, n_examples = 0, 0
        for n, (*_, size) in enumerate(reversed(looks), start=1):
            n_examples += size
            if n >= MIN_LOOKS and n_examples >= n_needed:
                break
        dead = [x for x in last if x < looks[-n][0]]
        since = int(statistics.median(dead)) if dead else 0
        never = sum(x == 0 for x in last) / len(last)
        step = next((step for number, step, _ in looks if number > since), looks[-1][1])
        return Dead(len(dead) / len(last), never, step, n, n_examples, len(last), n_places)


def _alive(layers: dict[str, Units], number: int) -> Tensor:
    """Whether each unit of layers on one device has a gradient, by their gradients: `(n_units,)`.

    `number` tells whose turn it is to have its rows read on a GPU; 0: those of all layers are.
    """
    found = {name: units.bias for name, units in layers.items() if units.bias is not None}
    has_zero: dict[str, bool] = {}
    if found:
        by_bias = torch.cat(list(found.values())) != 0
        if by_bias.is_cpu and len(found) == len(layers) and bool(by_bias.all()):  # the usual case
            return by_bias
        sizes = [x.numel() for x in found.values()]
        found = dict(zip(found, torch.split_with_sizes(by_bias, sizes), strict=True))
        if by_bias.is_cpu:  # number of units without a gradient up to the end of each layer, read together
            ends = torch.tensor([0, *accumulate(sizes)], device="cpu")
            n_zero = pairwise(nn.functional.pad((~by_bias).cumsum(0), (1, 0))[ends].tolist())
            has_zero = {name: n > before for name, (before, n) in zip(found, n_zero, strict=True)}
    for i, (name, units) in enumerate(layers.items()):
        x = found.get(name)
        is_due = number == 0 or (number + i) % N_TURNS == 0
        if x is None or (has_zero[name] if x.is_cpu else is_due):
            found[name] = _with_rows(units, x)
    return torch.cat([found[name] for name in layers])


def _with_rows(units: Units, by_bias: Tensor | None) -> Tensor:
    """Whether each unit of a layer has a gradient in its bias or weight."""
    rows = units.weight.flatten(1)
    if by_bias is None:
        return rows.any(1)
    if units.is_row or rows.shape[0] != rows.shape[1]:
        return by_bias | rows.any(1 if rows.shape[0] == len(by_bias) else 0)
    by_row, by_column = rows.any(1), rows.any(0)
    # units of a square are its rows or columns, whichever are zero where the gradient of the bias is
    for alive in (by_row, by_column) if by_bias.is_cpu else ():
        if not bool(alive[~by_bias].any()):
            return by_bias | alive
    return by_bias | by_row | by_column


def _bare_layers(model: nn.Module) -> Iterator[tuple[str, Units]]:
    """Matrices that are parameters of custom modules, each with the first vector of its size as bias."""
    params = [
        (f"{prefix}.{name}" if prefix else name, p)
        for prefix, m in named_modules(model).items()
        if not is_of_torch(m)
        for name, p in parameters_of(m).items()
        if p is not None and not isinstance(p, nn.parameter.UninitializedParameter)
    ]
    vectors = [p for _, p in params if p.ndim == 1]
    for name, weight in params:
        is_matrix = weight.ndim == 2 and min(weight.shape) >= MIN_UNITS
        bias = next((p for p in vectors if is_matrix and len(p) in weight.shape), None)
        if bias is not None:
            vectors = [p for p in vectors if p is not bias]
            yield name, Units(weight, bias, False)
