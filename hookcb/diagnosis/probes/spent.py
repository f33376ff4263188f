"""Time of a training by phases, callbacks, and lines of the user's loop."""

from collections.abc import Callable
from typing import Any

from hookcb.core.time_split import BETWEEN, EPOCH, VALIDATION, TimeSplit
from hookcb.diagnosis.evidence import Spent
from hookcb.diagnosis.probes.lines import LineTimes

N_WARM_UP, MIN_BATCHES = 5, 10  # batches left out, in which memory is allocated; and timed before lines are
OF_USER = (BETWEEN, "loss")  # phases in which code of the user runs, in a loop of theirs
MIN_SHARE, MIN_SECONDS = 0.2, 1e-3  # of a mean batch, spent in these, from which lines are worth a look
MAX_GAPS = 600  # times that lines are traced, about three a batch
BLOCK = 7  # batches that are traced, and then not; a prime, as what is slow may come every tenth batch
PREFIX = "callback "  # of the names of callbacks


class SpentTime:
    """Splits the time of a training, and traces lines of the user's loop if much is spent between the steps.

    Args:
        label: returns the name of a callback after `PREFIX`, or "" for those of the diagnosis itself.
        is_external: whether hookcb does not run the loop, so that lines of it can be slow.
    """

    def __init__(self, label: Callable[[Any], str], is_external: bool) -> None:
        self.split, self.lines = TimeSplit(label, N_WARM_UP), LineTimes()
        self._is_external, self._n_batches, self._has_slow_gaps = is_external, 0, False
        self._n_traced = 0

    @property
    def is_tracing(self) -> bool:
        """Whether lines are traced in the current batch, which takes longer then."""
        return self.split.phase_begins is not None

    def end_batch(self) -> None:
        """Decides whether to trace lines until the next batch ends."""
        if not self._is_external:
            return
        split, self._n_batches = self.split, self._n_batches + 1
        self._n_traced += self.is_tracing
        if self._n_batches % BLOCK == 0 and split.n >= MIN_BATCHES:
            seconds = sum(split.seconds[phase] for phase in OF_USER)
            least = max(MIN_SHARE * sum(split.seconds.values()), MIN_SECONDS * split.n)
            self._has_slow_gaps = seconds > least and self.lines.n < MAX_GAPS
        is_due = self._has_slow_gaps and self._n_batches // BLOCK % 2 == 0
        split.phase_begins = self._phase_begins if is_due else None

    def _phase_begins(self, phase: str) -> None:
        self.lines.end()
        if phase in OF_USER:
            self.lines.begin()

    def close(self) -> None:
        """Stops listening and tracing."""
        self.split.phase_begins = None
        self.split.close()
        self.lines.end()

    def _steady(self, name: str) -> float:
        """Seconds without the two largest, which may be the machine's; a validation may be rare."""
        whole = self.split.seconds[name]
        return whole if name in (VALIDATION, EPOCH) else whole - sum(self.split.largest[name])

    def spent(self) -> Spent:
        """Seconds in a mean batch."""
        split = self.split
        if not split.n:
            return Spent()
        mean = {name: self._steady(name) / split.n for name in split.seconds if name}
        spent = Spent(
            split.n,
            phases={name: x for name, x in mean.items() if not name.startswith(PREFIX)},
            callbacks={name.removeprefix(PREFIX): x for name, x in mean.items() if name.startswith(PREFIX)},
        )
        of_user = sum(mean.get(phase, 0.0) for phase in OF_USER)
        traced = self.lines.places(of_user * self._n_traced)
        if whole := sum(traced.values()):
            scale = of_user / whole
            for name, seconds in traced.items():
                kind = spent.fetches if name in self.lines.fetches else spent.lines
                (spent.steps if name in self.lines.steps else kind)[name] = scale * seconds
        return spent
