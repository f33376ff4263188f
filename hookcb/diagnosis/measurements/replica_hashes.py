"""ReplicaHashes: hashes of weights and gradients at a few steps, by which ranks are compared."""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookcb.core.torch_private import is_flattened, n_collectives, place_in
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.held import HeldWeights
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.replicas import INTEGERS, mix
from hookcb.diagnosis.measurements.samples import flat, spread, spread_copy
from hookcb.diagnosis.run import Run
from hookcb.gradients.stats import is_readable
from hookcb.hooks.modules import ModelGoneError
from hookcb.hooks.params import find_params
from hookcb.processes.shards import is_dtensor, is_in_memory, local_part

MAX_BYTES, MAX_OF_ALL = 1 << 18, 1 << 26  # of the hashes that a rank sends, and that all ranks send
MIN_LOOKS = 8  # if so many cannot be sent by parameter, their hashes are sent as one
SET_BY_OTHERS = -1  # place of a parameter that no other rank has to have alike
Raw = list[tuple[list[int], Tensor]]  # places of tensors, and their hashes, on a device


@dataclass(slots=True)
class Look:
    """Hashes at a step, of 32 bits for each parameter; 0 for one that is missing, or all zeros.

    Attributes:
        step: number of its batch.
        weights: of the weights before its forward.
        backward: of the gradients after its last backward.
        given: of the gradients after the optimizer's step, as clipping or scaling has left them.
        rates: learning rates of the optimizer's groups.
        n_collectives: how many this process had begun before it; None if that is unknown.
        was_synced: whether DistributedDataParallel was to average in that backward; not in `no_sync`.
    """

    step: int
    weights: "array[int]" = field(default_factory=lambda: array("I"))
    backward: "array[int]" = field(default_factory=lambda: array("I"))
    given: "array[int]" = field(default_factory=lambda: array("I"))
    rates: tuple[float, ...] = ()
    n_collectives: int | None = None
    was_synced: bool = True

    def __reduce__(self) -> tuple[Any, ...]:  # in a quarter of the bytes
        tables = (x.tobytes() for x in (self.weights, self.backward, self.given))
        return _look_of, (self.step, *tables, self.rates, self.n_collectives, self.was_synced)

    def as_one(self) -> "Look":
        """With one hash for all parameters."""
        every = (self.weights, self.backward, self.given)
        weights, backward, given = (array("I", [zlib.crc32(x)] if x else []) for x in every)
        return replace(self, weights=weights, backward=backward, given=given)


def _look_of(step: int, weights: bytes, backward: bytes, given: bytes, *about: Any) -> Look:
    return Look(step, array("I", weights), array("I", backward), array("I", given), *about)


@dataclass(slots=True)
class OfRank:
    """All looks of a rank.

    Attributes:
        structure: hash of names and shapes of the parameters; only ranks with the same are compared.
        places: by parameter, which part of it the rank has; 0 if it is whole.
        looks: by number of optimizer steps made before.
        n_steps: optimizer steps made.
        has_loss: whether it has had a loss.
        n_written: writes by other things than the optimizer that were seen in the first steps.
    """

    structure: int
    places: "array[int]"
    looks: dict[int, Look]
    n_steps: int = 0
    has_loss: bool = True
    n_written: int = 0


class ReplicaHashes(Measurement):
    """Hashes up to 1,024 elements of each parameter and of its gradient, on the device, at a few steps.

    These are the first, those before which 1, 2, 4, 8 … or 10, 100 … steps were made, and the one after each
    of these, of which only the weights are hashed; and the weights at the end, unless something else than the
    optimizer has written them. Of a shard it is the part of this rank.

    Attributes:
        names: of the parameters.
        own: what this rank has looked at.
        of_ranks: that of all ranks that have told it, in the order of `Processes.roles`.
    """

    cadence = EVERY
    uses = (Processes, HeldWeights)

    def __init__(self) -> None:
        self.names: list[str] = []
        self.own = OfRank(0, array("q"), {})
        self.of_ranks: list[OfRank] = []
        self._params: list[nn.Parameter] = []
        self._raw: dict[int, dict[str, Raw]] = {}
        self._next = self._next_whole = 0  # steps made before the next look, and before one at gradients
        self._open: int | None = None  # the look whose gradients are awaited

    def on_model(self, run: Run) -> None:
        self._list(run)

    def on_batch(self, run: Run) -> None:
        n = run.n_steps
        if n < self._next:
            return
        if run.measured(Processes).world == 1:
            self.done = True
            return
        if not run.measured(Processes).own.is_sharded:  # whose parameters may be gathered by now
            self._list(run)
        run.measured(Processes).count_replaced()
        self._look(n, run.step)
        is_whole = n >= self._next_whole
        self._next_whole = next_look(n) if is_whole else self._next_whole
        self._open, self._next = (n, n + 1) if is_whole else (None, self._next_whole)

    def on_gradients(self, run: Run) -> None:
        if self._open is not None:
            self._add_gradients(self._open, "backward")
            ddp = run.measured(Processes).ddp
            # as it was in the forward, which decides
            self.own.looks[self._open].was_synced = ddp is None or ddp.require_forward_param_sync

    def on_between(self, run: Run) -> None:
        if self._open is not None:
            self._add_gradients(self._open, "given")
            groups = [] if run.loop.opt is None else run.loop.opt.param_groups
            rates = [group.get("lr", 0.0) for group in groups]
            on_host = (x for x in rates if not isinstance(x, Tensor) or x.is_cpu)
            self.own.looks[self._open].rates = tuple(map(float, on_host))
            self._open = None

    def on_end(self, run: Run) -> None:
        if self._raw and run.n_steps not in self._raw and run.measured(HeldWeights).are_as_stepped:
            with suppress(ModelGoneError):
                self._list(run)
                self._look(run.n_steps, run.step)

    # ---- hashing

    def _list(self, run: Run) -> None:
        every = [x for x in find_params(run.loop.model) if not is_lazy(x.p)]
        self.names, self._params = [x.name for x in every], [x.p for x in every]
        shapes = [(x.name, tuple(x.p.shape)) for x in every if not is_flattened(x.p)]
        self.own.structure = zlib.crc32(repr(shapes).encode())
        ddp = run.measured(Processes).ddp
        own = None if ddp is None else {id(p) for _, p in replicated(ddp)}
        self.own.places = array("q", [_place(p) if own is None or id(p) in own else -1 for p in self._params])

    def _look(self, n: int, step: int) -> None:
        self.own.looks[n] = Look(step, n_collectives=n_collectives())
        self._raw[n] = {"weights": hashes([p.detach() for p in self._params])}

    def _add_gradients(self, n: int, kind: str) -> None:
        self._raw[n][kind] = hashes([None if p.grad is None else p.grad.detach() for p in self._params])

    # ---- the end

    def tell(self, run: Run) -> None:
        for n, raw in self._raw.items():
            for kind, found in raw.items():
                setattr(self.own.looks[n], kind, folded(found, len(self._params)))
        self.own.n_steps, self.own.has_loss = run.n_steps, len(run.loss) > 0
        self.own.n_written = len(run.measured(HeldWeights).writes)

    def state(self, run: Run) -> OfRank:
        most = min(MAX_BYTES, MAX_OF_ALL // run.measured(Processes).world)
        own, n = self.own, most // (12 * max(1, len(self.names)))
        own = replace(own, has_loss=own.has_loss or len(run.loss) > 0)
        if n < MIN_LOOKS:
            looks = {step: look.as_one() for step, look in own.looks.items()}
            return replace(own, places=array("q", [zlib.crc32(own.places)]), looks=looks)
        steps = sorted(own.looks)
        kept = steps if len(steps) <= n else [*steps[: n // 2], *steps[-(n // 2) :]]
        return replace(own, looks={step: own.looks[step] for step in kept})

    def merge(self, run: Run, of_ranks: Sequence[OfRank], rank: int) -> None:
        self.of_ranks = list(of_ranks)

    def freeze(self) -> None:
        self._params, self._raw = [], {}


def next_look(n: int) -> int:
    """The smallest power of two or ten above n."""
    return min(1 << n.bit_length(), int(10 ** len(str(n))))


def replicated(ddp: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that DistributedDataParallel keeps alike, with their names."""
    return (x for x in ddp.module.named_parameters() if x[0] not in ddp.parameters_to_ignore)


def _place(p: Tensor) -> int:
    """Number of the part of a parameter that this rank has, the same on ranks with the same part."""
    if is_flattened(p):
        return SET_BY_OTHERS
    if not is_dtensor(p):
        return 0
    place = place_in(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    number = int(zlib.crc32(repr(place).encode()))
    return 1 + number


def _can_hash(x: Tensor) -> bool:
    is_number = (x.is_floating_point() or x.is_complex()) and x.dtype.itemsize >= 2
    return is_number and x.layout is torch.strided and is_readable(x) and is_in_memory(x)


@torch.no_grad()
def hashes(xs: Sequence[Tensor | None]) -> Raw:
    """64-bit hashes of up to 1,024 elements of each tensor, 0 if all are zeros; a few operations a dtype.

    They depend on the bits of an element and on its place in the tensor.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(xs):
        if x is not None and _can_hash(x) and local_part(x).numel():
            kinds.setdefault((x.device, x.dtype), []).append(i)
    found: Raw = []
    for (device, dtype), places in kinds.items():
        own = [x for i in places if (x := xs[i]) is not None]
        sample = torch.cat([spread(flat(x)) for x in own]) if dtype.is_complex else spread_copy(own)
        sizes = tuple(local_part(x).numel() * (1 + dtype.is_complex) for x in own)
        owners, inside = _layout(sizes, device)
        bits = sample.view(INTEGERS[sample.element_size()]).long()
        mixed = mix(bits + 1, inside) * (bits != 0)
        found.append(
            (places, torch.zeros(len(own), dtype=torch.int64, device=device).index_add_(0, owners, mixed))
        )
    return found


@lru_cache(maxsize=8)
def _layout(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of the tensor that each element of a sample is of, and the number of the element in it."""
    lengths = [len(spread(torch.empty(n, device="meta"))) for n in sizes]
    counts = torch.tensor(lengths, device="cpu")
    owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    inside = torch.arange(1, len(owners) + 1, device="cpu") - (counts.cumsum(0) - counts)[owners]
    return owners.to(device, non_blocking=True), inside.to(device, non_blocking=True)


def folded(raw: Raw, n: int) -> "array[int]":
    """Hashes of 32 bits for each of n tensors, 0 for those without one."""
    found = [0] * n
    for places, own in raw:
        for i, x in zip(places, own.tolist(), strict=True):
            found[i] = (x ^ (x >> 32)) & 0xFFFFFFFF
    return array("I", found)
