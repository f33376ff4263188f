"""BatchHashes: hashes of the first batches of epochs, and the random states from which they were drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from torch import Tensor

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.drawing import Around, Seeding, States, drawn, random_states
from hookcb.diagnosis.measurements.loading import Loading, Pass
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run

N_WINDOWS, N_EPOCHS, N_BATCHES = 16, 4, 20  # windows, epochs among these, and batches of each
N_STATES = 8  # batches of each whose random states are read
MIN_COMPARED, N_COMPARED = 4, 8  # batches that are compared between ranks
MIN_BATCHES = 4  # that are compared between windows
Hashes = Sequence[int | None]  # of the inputs and of the targets of a batch; None if they have no tensors


@dataclass
class Window:
    """Batches in a row, from the beginning of an epoch or pass, or from where the program has set a seed.

    Attributes:
        step: number of its first batch.
        is_epoch: whether an epoch begins with it.
        n_pass: number of the pass over a DataLoader that had begun last, 0 if there was none.
        of: that pass.
        hashes: of its batches.
        states: random states when the first of these batches began.
        are_drawn: by batch, from which generators numbers were drawn since the step before.
        n_optimizers: number of optimizers that had stepped by its last batch.
        workers: random states of workers around their first batches, if the pass has begun with it.
    """

    step: int
    is_epoch: bool
    n_pass: int
    of: Pass | None
    hashes: list[Hashes] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    are_drawn: list[tuple[bool, ...]] = field(default_factory=list)
    n_optimizers: int = 0
    workers: list[Around] = field(default_factory=list)


class BatchHashes(Measurement):
    """Hashes the first batches of epochs, and those after a seed; on a GPU, it waits for nothing.

    An epoch begins as the loop says, or with a pass over a DataLoader.
    """

    cadence = EVERY
    uses = (Steps, Processes)
    hears = (Loading, Seeding)

    def __init__(self) -> None:
        self._live: list[Window] = []
        self._hashes: list[list[tuple[Tensor | None, Tensor | None]]] = []
        self._is_open = False  # whether batches are added to the last window
        self._left: States = ()  # random states after the last step
        self._n_heard = self._n_passes = -1
        self.windows: list[Window] = []
        # of each rank: hashes of the inputs of its first batches, and how many of an epoch have come before
        self.inputs: list[list[int]] = []
        self.repeated: list[tuple[int, int]] = []  # and the number of batches of the longest epoch
        self.why_not_compared = "too little was seen of the batches of all ranks"

    @property
    def epochs(self) -> list[list[Hashes]]:
        """Hashes of the first batches of the first epochs."""
        return [window.hashes for window in self.windows if window.is_epoch][:N_EPOCHS]

    def on_model(self, run: Run) -> None:
        heard(Seeding).follow_numpy()

    def on_batch(self, run: Run) -> None:
        loop, loading = run.loop, heard(Loading)
        n_heard = loading.n + heard(Seeding).n
        is_new = self._n_heard not in (-1, n_heard)
        if loop.iter == 0 or is_new:
            has_begun = loop.iter == 0 or (loop.is_external and loading.n != self._n_passes)
            self._begin(Window(run.step, has_begun, loading.n, loading.last))
        self._n_heard, self._n_passes = n_heard, loading.n
        if not self._is_open:
            return
        window, hashes = self._live[-1], self._hashes[-1]
        hashes.append((hash_of(loop.xb), hash_of(loop.yb)))
        if self._reads_states():
            states = random_states()
            window.states.append(states)
            window.are_drawn.append(drawn(self._left or states, states))
        window.n_optimizers = len(run.measured(Steps).optimizers)
        self._is_open = len(hashes) < N_BATCHES

    def _begin(self, window: Window) -> None:
        self._is_open = len(self._live) < N_WINDOWS
        self.done = not self._is_open
        if self._is_open:
            self._live.append(window)
            self._hashes.append([])

    def _reads_states(self) -> bool:
        return self._is_open and len(self._live[-1].states) < N_STATES

    def on_gradients(self, run: Run) -> None:
        if self._reads_states():
            self._left = random_states()

    on_between = on_gradients

    def tell(self, run: Run) -> None:
        self.windows = [
            replace(
                window,
                of=None if window.of is None else window.of._replace(states=None),
                workers=window.of.states.read() if window.of is not None and window.of.states else [],
                hashes=[[None if x is None else int(x) for x in batch] for batch in hashes],
            )
            for window, hashes in zip(self._live, self._hashes, strict=True)
        ]

    def state(self, run: Run) -> tuple[list[int], tuple[int, int]]:
        inputs = [x for epoch in self.epochs for x, _ in epoch if x is not None]
        n_repeated = max((len(epoch) - len(set(map(tuple, epoch))) for epoch in self.epochs), default=0)
        return inputs[:N_COMPARED], (n_repeated, max(map(len, self.epochs), default=0))

    def merge(self, run: Run, of_ranks: Sequence[tuple[list[int], tuple[int, int]]], rank: int) -> None:
        n = min(len(inputs) for inputs, _ in of_ranks)
        self.inputs = [inputs[:n] for inputs, _ in of_ranks]
        self.repeated = [repeated for _, repeated in of_ranks]
        self.why_not_compared = "" if n >= MIN_COMPARED else "the batches of ranks were not compared"

    def freeze(self) -> None:
        self._live, self._hashes = [], []

    def alike(self, are_alike: Callable[[Window, Window], bool]) -> tuple[Window, Window] | None:
        """The first two windows that are alike; with a new optimizer in between, a training began anew."""
        return next(
            (
                (a, b)
                for a, b in combinations(self.windows, 2)
                if a.n_optimizers == b.n_optimizers and are_alike(a, b)
            ),
            None,
        )


def in_same_order(epochs: Sequence[Sequence[Hashes]], inputs_only: bool = False) -> bool:
    """Whether inputs, or targets if inputs are augmented, come in the same order; not if all are the same."""
    n = min(map(len, epochs))
    columns = list(zip(*(batch for epoch in epochs for batch in epoch[:n]), strict=True))
    for numbers in columns[:1] if inputs_only else columns:
        orders = [numbers[i : i + n] for i in range(0, len(numbers), n)]
        if None not in numbers and len(set(orders[0])) == n and all(x == orders[0] for x in orders):
            return n >= MIN_BATCHES
    return False
