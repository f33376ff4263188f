"""Hashes of batches and of random states, by which it is seen that ranks or epochs train on the same."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.core.randomness import parts_of
from hookcb.diagnosis.probes.replicas import INTEGERS, hash_bits
from hookcb.diagnosis.run import Observation

N_EPOCHS, N_BATCHES = 4, 20  # epochs, and first batches of each, that are hashed
N_ELEMENTS = 4_096  # of a tensor that are hashed
MIN_BATCHES = 4  # whose order is compared
N_STATES = 8  # inspected batches whose random states are kept


class BatchHash(NamedTuple):
    """Hashes of the inputs and of the targets of a batch; None if they have no tensors."""

    inputs: int | None
    targets: int | None


class BatchHashes:
    """Hashes the first batches of each epoch; on a GPU, it waits for nothing."""

    def __init__(self) -> None:
        self._epochs: list[list[tuple[Tensor | None, Tensor | None]]] = []
        self._is_open = False  # whether the current epoch is hashed from its beginning

    def add(self, i: int, xb: Any, yb: Any) -> None:
        """Hashes batch `i` of the epoch."""
        if i == 0:
            self._is_open = len(self._epochs) < N_EPOCHS
            if self._is_open:
                self._epochs.append([])
        if self._is_open and len(self._epochs[-1]) == i < N_BATCHES:
            self._epochs[-1].append((hash_of(xb), hash_of(yb)))

    def epochs(self) -> list[list[BatchHash]]:
        """The hashes of each epoch."""
        return [[BatchHash(_number(x), _number(y)) for x, y in epoch] for epoch in self._epochs]


class RandomStates:
    """Hashes of the random state around the forward and the loss of inspected batches.

    Reads the state of the generator that dropout uses on the device; that of a GPU is kept by the CPU.
    """

    def __init__(self) -> None:
        self._around: list[list[int]] = []

    def begin_batch(self, device: torch.device) -> None:
        """Reads the state before a forward."""
        if len(self._around) < N_STATES:
            self._around.append([_state(device)])

    def end_loss(self, device: torch.device) -> None:
        """Reads the state after the loss."""
        if self._around and len(self._around[-1]) == 1:
            self._around[-1].append(_state(device))

    def drawn(self) -> list[int]:
        """The states from which numbers were drawn."""
        pairs = [pair for pair in self._around if len(pair) == 2]
        return [before for before, after in pairs if before != after]


def observe_order(epochs: Sequence[Sequence[BatchHash]], loader: Any) -> Iterator[Observation]:
    """Observes that each epoch has the batches of the first one, in the same order."""
    if not has_epochs(epochs) or not _are_alike(epochs):
        return
    samplers = [x for x in parts_of(loader) if isinstance(x, DistributedSampler) and x.shuffle]
    stays = next((x.epoch for x in samplers), None)
    yield Observation(
        "data.same_order",
        step=0,
        value=float(len(epochs)),
        text=f"Each epoch begins with the same {min(map(len, epochs))} batches in the same order, in all of "
        f"the first {len(epochs)} epochs"
        + ("." if stays is None else f": the DistributedSampler has stayed in its epoch {stays}."),
        causes=("a loader that is not shuffled",)
        if stays is None
        else ("a loader around that of torch, which hides set_epoch from the Learner",),
        next_steps=("Shuffle the training data, unless its order is meant",)
        if stays is None
        else ("Give the loader a set_epoch(epoch) that calls that of its DistributedSampler",),
        severity="info" if stays is None else "",
    )


def has_epochs(epochs: Sequence[Sequence[BatchHash]]) -> bool:
    """Whether the order of two epochs can be compared."""
    return len(epochs) > 1 and min(map(len, epochs)) >= MIN_BATCHES


def _are_alike(epochs: Sequence[Sequence[BatchHash]]) -> bool:
    """Whether inputs, or targets if inputs are augmented, come in the same order; not if all are the same."""
    n = min(map(len, epochs))
    for numbers in zip(*([*batch] for epoch in epochs for batch in epoch[:n]), strict=True):
        orders = [numbers[i : i + n] for i in range(0, len(numbers), n)]
        if None not in numbers and len(set(orders[0])) == n and all(x == orders[0] for x in orders):
            return True
    return False


def hash_of(item: Any) -> Tensor | None:
    """Hash of all real tensors in a batch, those on the device of the first."""
    tensors = [x.detach() for _, x in parts(item) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
    total: Tensor | None = None
    for x in tensors:
        if x.element_size() in INTEGERS and (total is None or x.device == total.device):
            own = hash_bits(_sampled(x))
            total = own if total is None else total * 31 + own
    return total


def _sampled(x: Tensor) -> Tensor:
    """At most `N_ELEMENTS` elements, evenly spread."""
    x = x.reshape(-1)
    return x[:: max(1, -(-len(x) // N_ELEMENTS))]


def _number(x: Tensor | None) -> int | None:
    return None if x is None else int(x)


def _state(device: torch.device) -> int:
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes())
