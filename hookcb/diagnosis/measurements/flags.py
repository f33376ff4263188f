"""Flags: which parameters are frozen, since when, and which of these were neither loaded nor trained."""

import math
from collections.abc import Iterator
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hookcb.core.torch_private import version_of
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import Loads
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.hooks.optimizer_steps import params_of
from hookcb.hooks.params import all_params, named_params
from hookcb.processes.shards import is_shard

MIN_WRITES = 6  # to a parameter, by its version: initializing one takes fewer, training it more
MIN_ELEMENTS, MIN_ROWS = 256, 8  # of a weight, to compare it with random numbers
MAX_ROWS, MAX_COLUMNS = 64, 1024  # that are read
N_SIGMAS = 5.0  # of statistics of random numbers
MAX_DISPERSION = 3.0  # of the sizes of rows and columns, relative to that of random numbers
KURTOSES = 1.8, 3.0  # of a uniform and of a normal distribution


class Flags(Measurement):
    """Reads `requires_grad` of all parameters at the beginning, in inspected steps, and at the end.

    Attributes:
        frozen: names of parameters that are frozen from the beginning to the end, and have not changed.
        random: those of them whose numbers look as torch's layers are initialized, and that were not loaded,
            as far as it is known.
        late: parameters of an optimizer that were frozen after the first step, with the batch.
        held: those of `frozen` that an optimizer has.
        zero: those of `frozen` that are zero.
        knows_loads: whether all loads since the start of the program are known.
        n_idle: number of the latest inspected steps in a row in which all parameters of an optimizer were
            frozen and without a gradient.
        idle_since: number of the batch of the first one.
        n_of_idle: number of its parameters.
    """

    cadence = 64
    uses = (Parameters, Steps)
    hears = (Loads,)

    def __init__(self) -> None:
        self.frozen: set[str] = set()
        self.random: set[str] = set()
        self.held: set[str] = set()
        self.zero: set[str] = set()
        self.late: dict[str, int] = {}
        self.knows_loads = False
        self.n_idle = self.idle_since = self.n_of_idle = 0
        self._n = 0  # parameters of the model
        self._began: dict[str, bool] = {}  # whether it was frozen
        self._params: dict[str, ReferenceType[nn.Parameter]] = {}
        self._flipped: dict[str, int] = {}
        self._idle: dict[int, tuple[int, int, int]] = {}  # by id of the optimizer
        self._is_random: dict[str, bool] = {}

    def on_model(self, run: Run) -> None:
        params = named_params(run.loop.model)
        self._params = {name: ref(p) for name, p in params.items()}
        self._began = {name: not p.requires_grad for name, p in params.items()}

    def on_step(self, run: Run) -> None:
        if run.looking and (n := len(all_params(run.loop.model))) != self._n:  # adapters may have been added
            self._n = n
            for name, p in named_params(run.loop.model).items():
                if name not in self._params:
                    self._params[name], self._began[name] = ref(p), not p.requires_grad
        if run.n_steps:
            for name, known in self._params.items():
                if (alive := known()) is None or alive.requires_grad:
                    if alive is not None and name in self._flipped:
                        del self._flipped[name]
                elif not self._began[name]:
                    self._flipped.setdefault(name, run.step)
        opt = run.loop.opt
        params = [p for group in getattr(opt, "param_groups", ()) for p in group["params"]]
        if not params or any(p.requires_grad or p.grad is not None for p in params):
            self._idle.pop(id(opt), None)
        else:
            since, n, _ = self._idle.get(id(opt), (run.step, 0, 0))
            self._idle[id(opt)] = since, n + 1, len(params)

    def _alive(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, known in self._params.items():
            if (p := known()) is not None:
                yield name, p

    def tell(self, run: Run) -> None:
        if not self._params:
            return
        if self._idle:
            self.idle_since, self.n_idle, self.n_of_idle = max(self._idle.values(), key=lambda x: x[1])
        steps, moved = run.measured(Steps), run.measured(Parameters).moved
        in_optimizer = {key for opt in steps.optimizers.values() for key in params_of(opt)}
        alive = dict(self._alive())
        self.late = {
            name: step
            for name, step in self._flipped.items()
            if name in alive and not alive[name].requires_grad and id(alive[name]) in in_optimizer
        }
        frozen = {
            name: p
            for name, p in alive.items()
            if self._began[name] and not p.requires_grad and not moved.get(name, bool(p.any()))
        }
        begins, loads = run.measured(Parameters).begins, heard(Loads)
        self.frozen, self.held = set(frozen), {name for name, p in frozen.items() if id(p) in in_optimizer}
        self.zero = {name for name, p in frozen.items() if not bool(begins.get(name, (p, p))[1].any())}
        self.knows_loads = loads.from_start
        for name, p in frozen.items():
            if name not in self._is_random:  # once, as these do not change
                is_new = not p.is_inference() and version_of(p) < MIN_WRITES and looks_random(p)
                self._is_random[name] = is_new and not _is_copy(name, p, begins)
        random = (name for name in frozen if self._is_random[name])
        self.random = {name for name in random if not loads.was_loaded(frozen[name])}

    def freeze(self) -> None:
        self._params, self._flipped, self._began = {}, {}, {}


def _is_copy(name: str, p: nn.Parameter, begins: dict[str, tuple[nn.Parameter, Tensor]]) -> bool:
    """Whether it began as another parameter did, as the weights of a target network do."""
    others = (x for other, (q, x) in begins.items() if other != name and q.shape == p.shape)
    return name in begins and any(
        x.device == begins[name][1].device and torch.equal(x, begins[name][1]) for x in others
    )


@torch.no_grad()
def looks_random(p: Tensor) -> bool:
    """Whether a weight looks like independent random numbers of a size with which layers are initialized.

    The kurtosis is that of a uniform or normal distribution, rows and columns are of the same size as far as
    chance allows, and the standard deviation is 1/sqrt(3 fan_in), sqrt(2/fan_in), sqrt(2/fan_out),
    sqrt(2/(fan_in + fan_out)), 1/sqrt(fan_in), 0.02 or 0.01.

    Source: torch.nn.init; He et al. 2015, Glorot & Bengio 2010.
    """
    if p.ndim < 2 or isinstance(p, UninitializedParameter) or is_shard(p) or not p.is_floating_point():
        return False
    fan_in, n_out = p[0].numel(), p.shape[0]
    fan_out = n_out * math.prod(p.shape[2:])
    x = p.detach().flatten(1)[:MAX_ROWS, :MAX_COLUMNS].float()
    n, (rows, columns) = x.numel(), x.shape
    if n < MIN_ELEMENTS or rows < MIN_ROWS:
        return False
    x = x - x.mean()
    std = x.square().mean().sqrt().item()
    if not 0 < std < math.inf:
        return False
    kurtosis = x.div(std).pow(4).mean().item()
    if not any(abs(kurtosis - usual) <= N_SIGMAS * math.sqrt(24 / n) for usual in KURTOSES):
        return False
    fans = (3 * fan_in, fan_in / 2, fan_out / 2, (fan_in + fan_out) / 2, fan_in)
    tolerance = N_SIGMAS * math.sqrt((kurtosis - 1) / (4 * n)) + 0.01
    if not any(abs(std / usual - 1) <= tolerance for usual in (*(k**-0.5 for k in fans), 0.02, 0.01)):
        return False
    squares, by_chance = x.square(), std**4 * (kurtosis - 1)
    across = [squares.mean(1).var().item() * columns / by_chance]
    if columns >= MIN_ROWS:
        across.append(squares.mean(0).var().item() * rows / by_chance)
    return all(dispersion <= MAX_DISPERSION for dispersion in across)
