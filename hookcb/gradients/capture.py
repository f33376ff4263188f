"""GradientReader: captures gradients and weights around an optimizer step, without a device sync."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from hookcb.core.alone import ALONE, Ranks
from hookcb.core.precision import moved, scaled_norm
from hookcb.core.torch_private import flattened, norms_of, version_of
from hookcb.gradients.device import Capture, DeviceReader, Reduced, numbers_on, usable
from hookcb.gradients.shards import ShardReader
from hookcb.gradients.stats import Number, is_readable
from hookcb.hooks.params import Param
from hookcb.processes.shards import has_no_part, is_shard, local_part
from hookcb.records.memory import Memory

About = dict[str, tuple[int, int, str]]  # by parameter: number of elements, of dimensions, type of the module


@dataclass(slots=True)
class StepCapture:
    """Everything captured around one step.

    Attributes:
        captures: numbers of gradients and weights, one item for each device, and one for sharded parameters.
        lr: learning rate of the last parameter group; NaN if unknown.
        scale: factor of the GradScaler, 1.0 without one.
        about: sizes and kinds of the captured parameters, in the order of the model.
        without_grad: names of the parameters that require a gradient and have none.
        frozen: names of the parameters that require no gradient.
        left_out: types of the unreadable parameters or gradients, by name.
        not_optimized: names of the captured parameters that no optimizer has.
        skipped: 1.0 if the step was not made.
        record, step: index of its record and number of its batch, set when it is added to the records.
        buffers: sizes of the running statistics by name, and their concatenated values, by device.
    """

    captures: list[Capture]
    lr: Number
    scale: Number
    about: About = field(default_factory=dict)
    without_grad: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    not_optimized: list[str] = field(default_factory=list)
    skipped: Number = 0.0
    record: int = 0
    step: int = 0
    buffers: dict[torch.device, tuple[dict[str, int], Tensor]] = field(default_factory=dict)

    @property
    def n_elements(self) -> int:
        """Number of elements held until they are reduced."""
        n = sum(values.numel() for _, values in self.buffers.values())
        return n + sum(c.n_elements for c in self.captures)


class GradientReader:
    """Captures gradients and weights before and after a step.

    Args:
        params: the parameters to read.
        ranks: the ranks that merge statistics of sharded parameters; each must capture the same steps.
        memory: lends memory for the elements of a step; it may take them back once the step is reduced.

    Attributes:
        memory: the same.
        starts: tracked elements of each parameter before its first step, by name.
    """

    def __init__(self, params: Sequence[Param], ranks: Ranks = ALONE, memory: Memory | None = None) -> None:
        self.starts: dict[str, Tensor] = {}
        self._pivots: dict[str, Tensor] = {}  # of sharded parameters, the same on all ranks
        self.params: list[Param] = []
        self.memory = Memory() if memory is None else memory
        self._ranks, self._sharded, self._numels = ranks, frozenset[str](), dict[int, int]()
        self._left_out: dict[str, str] = {}
        self._key: list[tuple[int, int, bool]] = []
        self._readers: list[DeviceReader] = []
        self._about: About = {}
        self._grads: list[tuple[Param, Tensor | None, int | None]] = []  # with versions, None of shards
        self.refresh(params, {})

    def refresh(
        self, params: Sequence[Param], buffers: dict[str, Tensor], sizes: dict[int, int] | None = None
    ) -> None:
        """Replaces the parameters to read, and the buffers with running statistics.

        Args:
            params: the parameters.
            buffers: the buffers, by name.
            sizes: numbers of elements on all ranks together, by id, of parameters that do not tell it.
        """
        if any(param.name in self._sharded and not is_shard(param.p) for param in params):
            return  # gathered for a moment, as after a validation
        named = {param.name: param.p for param in params}
        for param in self.params:  # a drift is that of one and the same parameter
            if (now := named.get(param.name)) is not None and now is not param.p and not is_shard(now):
                self.starts.pop(param.name, None)
        self.params = [param for param in params if is_readable(param.p)]
        self._sharded = frozenset(param.name for param in self.params if is_shard(param.p))
        self._numels = sizes or {}
        odd = [param for param in params if not is_readable(param.p)]
        self._left_out |= {param.name: type(param.p).__name__ for param in odd}
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._sizes: dict[torch.device, dict[str, int]] = {}
        for name, whole in buffers.items():
            b = local_part(whole)
            self._buffers.setdefault(b.device, []).append(b)
            self._sizes.setdefault(b.device, {})[name] = b.numel()

    def before_step(
        self,
        grad_scale: Number = 1.0,
        lr: Number = math.nan,
        scale: Number = 1.0,
        *,
        is_detailed: bool = True,
    ) -> StepCapture:
        """Captures weights and whole gradients, which are `grad_scale` times too large.

        Without details those of large gradients are not read, unless some are not finite on a CPU.
        """
        self._grads, key = [], []
        without_grad: list[str] = []
        frozen: list[str] = []
        grads: dict[str, Tensor | None] = {}
        for param in self.params:
            name, p, _ = param
            g, is_part = p.grad, name in self._sharded
            has_grad = g is not None or has_no_part(p)
            if is_part:  # without a gradient, too, as all ranks merge those of the same parameters
                key.append((id(p), local_part(p).numel(), has_grad))
            if not has_grad:
                (without_grad if p.requires_grad else frozen).append(name)
                continue
            if g is None or is_part:
                grads[name] = g
                self._grads.append((param, g, None))
                continue
            if (x := usable(g)) is None:
                self._left_out[name] = type(g).__name__
                continue
            grads[name] = x
            self._grads.append((param, g, version_of(g)))
            key.append((id(p), p.numel(), True))
        if key != self._key:
            self._key = key
            self._arrange()
        captures = [reader.before(grads, grad_scale, is_detailed) for reader in self._readers]
        return StepCapture(captures, lr, scale, self._about, without_grad, frozen, dict(self._left_out))

    def _arrange(self) -> None:
        by_device: dict[torch.device, list[Param]] = {}
        for param in self.with_grad:
            if param.name not in self._sharded:
                by_device.setdefault(param.p.device, []).append(param)
        shared = self.memory, self.starts
        self._readers = [DeviceReader(on_device, *shared) for on_device in by_device.values()]
        if sharded := [param for param in self.params if param.name in self._sharded]:
            self._readers.append(ShardReader(sharded, *shared, self._numels, self._pivots, self._ranks))
        self._about = {
            name: (self._numels.get(id(p), p.numel()), p.ndim, kind) for name, p, kind in self.with_grad
        }

    @property
    def with_grad(self) -> list[Param]:
        """Parameters that had a gradient before this step."""
        return [param for param, *_ in self._grads]

    def at_step(self, step: StepCapture) -> None:
        """Captures gradients as the optimizer gets them, if they were changed since `before_step`."""
        is_changed = self._has_changed()
        for capture in step.captures:
            if is_changed or isinstance(capture.reader, ShardReader):  # a DTensor does not count its changes
                capture.reader.at_step(capture)

    def _has_changed(self) -> bool:
        for param, g, version in self._grads:  # not by `any`, which takes a call for each
            if version is None or g is None:
                continue
            if param.p.grad is not g or version_of(g) != version:
                return True
        return False

    def after_step(self, step: StepCapture, skipped: Number = 0.0) -> None:
        """Captures the updated weights; `skipped` is 1.0 if the step was not made.

        With sharded parameters all ranks must call it at the same step.
        """
        step.skipped = skipped
        for capture in step.captures:
            capture.skipped = skipped
            capture.reader.after(capture)
        if self._sharded and self._ranks.world > 1:
            captured = {name for capture in step.captures for name in capture.names}
            step.without_grad += [name for name in step.about if name not in captured]
        self._grads = []
        for device, buffers in self._buffers.items():
            values = flattened([b.detach() for b in buffers]).clone()
            step.buffers[device] = self._sizes[device], self.memory.keep(values)


def reduce_steps(steps: Sequence[StepCapture]) -> Iterator[tuple[list[StepCapture], list[Reduced]]]:
    """Runs of steps with the same parameters, and their statistics, device by device."""
    for _, group in groupby(steps, lambda step: [(id(c.reader), c.names) for c in step.captures]):
        run = list(group)
        of_readers = zip(*(step.captures for step in run), strict=True)
        yield run, [captures[0].reader.reduced(captures) for captures in of_readers]


def step_columns(steps: Sequence[StepCapture], by_device: Sequence[Reduced]) -> Tensor:
    """`STEP_STATS` of steps, `(R, 7)`, from the statistics of their parameters."""
    norms = [values[..., :2] for _, values in by_device if len(values)]
    device = norms[0].device if norms else torch.device("cpu")
    of_steps = [s.lr for s in steps], [s.scale for s in steps], [s.skipped for s in steps]
    lr, scale, skipped = (numbers_on(device, numbers) for numbers in of_steps)
    if norms:
        whole = torch.cat([moved(x, device) for x in norms])  # (n_params, R, 2)
        (total, clipped), mean = scaled_norm(whole, dim=0).unbind(1), whole[..., 0].mean(0)
    else:
        total, clipped = torch.zeros_like(lr), torch.where(skipped == 0, 0.0, torch.nan)
        mean = torch.full_like(lr, torch.nan)
    coef = torch.where(total == 0, torch.where(clipped == 0, 1.0, clipped), clipped / total)
    is_double = any(x.dtype is torch.float64 for x in norms)
    values = torch.stack([total, clipped, mean, lr, scale, skipped, coef], 1)
    return values.to(torch.float64 if is_double else torch.float32)


def first_nonfinite(params: Iterable[Param], ranks: Ranks = ALONE) -> tuple[str, int] | None:
    """Name of the first parameter with a NaN or infinite gradient, and the number of such elements.

    Waits for the device, once if all gradients are finite. With sharded parameters all ranks must call it.
    """
    every = [(param.name, param.p) for param in params]
    grads = {name: x for name, p in every if p.grad is not None and (x := usable(p.grad)) is not None}
    norms = norms_of(list(grads.values())) if grads else []
    on_one = [moved(norm, norms[0].device) for norm in norms]
    counts: dict[str, float] = {}
    if on_one and not bool(torch.stack(on_one).isfinite().all()):  # 0 if only squares have overflowed
        counts = {name: float(x.isfinite().logical_not_().sum()) for name, x in grads.items()}
    if sharded := [name for name, p in every if is_shard(p)]:
        of_ranks = ranks.sum([counts.get(name, 0.0) for name in sharded])
        counts |= dict(zip(sharded, of_ranks, strict=True))
    return next(((name, math.ceil(n)) for name, _ in every if (n := counts.get(name, 0.0))), None)
