"""Time of a training by phases, callbacks, and lines of the user's loop."""

from hookcb.core.time_split import BETWEEN, EPOCH, VALIDATION, TimeSplit
from hookcb.diagnosis.probes.lines import LineSamples
from hookcb.diagnosis.run import Spent

N_WARM_UP, MIN_BATCHES = 5, 10  # batches left out, in which memory is allocated; and timed before lines are
OF_USER = (BETWEEN, "loss")  # phases in which code of the user runs, in a loop of theirs
MIN_SHARE, MIN_SECONDS = 0.2, 1e-3  # of a mean batch, spent in these, from which lines are worth a look
MIN_RARE, MIN_ALIKE = 0.1, 0.5  # seconds that a busy machine does not take three times; third by largest
BLOCK = 7  # batches after which that is asked again
PREFIX = "callback "  # of the names of callbacks


class SpentTime:
    """Seconds of a training by what they are spent on, by line of the user's loop if much is between steps.

    Args:
        split: splits the time; names of callbacks begin with `PREFIX`.
        is_external: whether hookcb does not run the loop, so that lines of it can be slow.
    """

    def __init__(self, split: TimeSplit, is_external: bool) -> None:
        self._split = split
        self.lines = LineSamples(lambda: split.phase in OF_USER)
        self._is_external, self._n_batches, self._next_look = is_external, 0, BLOCK

    def note_step(self) -> None:
        """Notes which lines of a loop that hookcb does not run make a step."""
        if self._is_external:
            self.lines.note_step()

    def end_batch(self) -> None:
        """Ends a batch; begins to sample lines if the user's code takes much time."""
        if not self._is_external:
            return
        split, self._n_batches = self._split, self._n_batches + 1
        self.lines.end_batch(is_counted=not split.leaves_out)
        if self.lines.is_running or self._n_batches < self._next_look:
            return
        self._next_look = self._n_batches + BLOCK
        if split.n < MIN_BATCHES:
            return
        seconds = sum(split.seconds[phase] for phase in OF_USER)
        if seconds > max(MIN_SHARE * sum(split.seconds.values()), MIN_SECONDS * split.n):
            self.lines.start()

    def _steady(self, name: str) -> float:
        """Seconds without the two largest, as they may be the machine's; three long ones are not."""
        third, *two = self._split.largest[name]
        is_rare = name in (VALIDATION, EPOCH) or third > max(MIN_RARE, MIN_ALIKE * two[-1])
        return self._split.seconds[name] - (0.0 if is_rare else sum(two))

    def spent(self) -> Spent:
        """Seconds in a mean batch, without those of lines."""
        split = self._split
        if not split.n:
            return Spent()
        mean = {name: self._steady(name) / split.n for name in split.seconds if name}
        return Spent(
            split.n,
            phases={name: x for name, x in mean.items() if not name.startswith(PREFIX)},
            callbacks={name.removeprefix(PREFIX): x for name, x in mean.items() if name.startswith(PREFIX)},
        )

    def add_lines(self, spent: Spent) -> None:
        """Adds the seconds of lines.

        Raises:
            Exception: If the thread that samples them has failed.
        """
        if self.lines.failure is not None:
            raise self.lines.failure
        if not spent.n or not (seconds := self.lines.seconds()):
            return  # without a look at the source of the user
        of_user = sum(spent.phases.get(phase, 0.0) for phase in OF_USER)
        fetches, steps = self.lines.fetches, self.lines.steps
        spent.fetches, spent.has_lines = dict.fromkeys(fetches, 0.0), True
        scale = min(1.0, of_user / (sum(seconds.values()) or 1.0))
        for name, x in seconds.items():
            if not name:  # the start of a loader
                spent.phases[EPOCH] = spent.phases.get(EPOCH, 0.0) + scale * x
                spent.phases[BETWEEN] = max(0.0, spent.phases.get(BETWEEN, 0.0) - scale * x)
                continue
            if steps == {name}:  # all of a step is in this line, so its time tells nothing
                continue
            kind = spent.fetches if name in fetches else spent.steps if name in steps else spent.lines
            kind[name] = scale * x
