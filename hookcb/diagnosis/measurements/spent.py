"""Time of a training by phases, callbacks, and lines of the user's loop."""

from hookcb.core.time_split import BETWEEN, EPOCH, VALIDATION, TimeSplit
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.clock import PREFIX, Clock
from hookcb.diagnosis.measurements.lines import LineSamples
from hookcb.diagnosis.run import Run, Spent

MIN_BATCHES = 10  # timed before lines are
OF_USER = (BETWEEN, "loss")  # phases in which code of the user runs, in a loop of theirs
MIN_SHARE, MIN_SECONDS = 0.2, 1e-3  # of a mean batch, spent in these, from which lines are worth a look
MIN_RARE, MIN_ALIKE = 0.1, 0.5  # seconds that a busy machine does not take three times; third by largest
BLOCK = 7  # batches after which that is asked again


class SpentTime(Measurement):
    """Seconds of a training by what they are spent on, by line of the user's loop if much is between steps.

    Attributes:
        lines: samples of lines of a loop that hookcb does not run; those of a Learner are known.
    """

    cadence = EVERY
    uses = (Clock,)

    def __init__(self) -> None:
        self.lines: LineSamples | None = None
        self._split: TimeSplit | None = None
        self._n_batches, self._next_look = 0, BLOCK

    def on_model(self, run: Run) -> None:
        self._split = split = run.measured(Clock).split
        if run.loop.is_external and split is not None:
            self.lines = LineSamples(lambda: split.phase in OF_USER)

    def on_prediction(self, run: Run) -> None:
        """Notes which lines of a loop that hookcb does not run make a step."""
        if run.looking and self.lines is not None:
            self.lines.note_step()

    on_gradients = on_between = on_prediction

    def on_batch_end(self, run: Run) -> None:
        """Begins to sample lines if the user's code takes much time."""
        if (lines := self.lines) is None or (split := self._split) is None:
            return
        self._n_batches += 1
        lines.end_batch(is_counted=not split.leaves_out)
        if lines.is_running or self._n_batches < self._next_look:
            return
        self._next_look = self._n_batches + BLOCK
        if split.n < MIN_BATCHES:
            return
        seconds = sum(split.seconds[phase] for phase in OF_USER)
        if seconds > max(MIN_SHARE * sum(split.seconds.values()), MIN_SECONDS * split.n):
            lines.start()

    def tell(self, run: Run) -> None:
        if self._split is not None:
            run.spent = self._spent(self._split)
            self._add_lines(run.spent)

    def close(self, run: Run) -> None:
        self._split = None
        if self.lines is not None:
            self.lines.close()

    def freeze(self) -> None:
        self.lines = None

    def _spent(self, split: TimeSplit) -> Spent:
        """Seconds in a mean batch, without those of lines."""
        if not split.n:
            return Spent()
        mean = {name: _steady(split, name) / split.n for name in split.seconds if name}
        return Spent(
            split.n,
            phases={name: x for name, x in mean.items() if not name.startswith(PREFIX)},
            callbacks={name.removeprefix(PREFIX): x for name, x in mean.items() if name.startswith(PREFIX)},
        )

    def _add_lines(self, spent: Spent) -> None:
        if self.lines is None:
            return
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


def _steady(split: TimeSplit, name: str) -> float:
    """Seconds without the two largest, as they may be the machine's; three long ones are not."""
    third, *two = split.largest[name]
    is_rare = name in (VALIDATION, EPOCH) or third > max(MIN_RARE, MIN_ALIKE * two[-1])
    return split.seconds[name] - (0.0 if is_rare else sum(two))
