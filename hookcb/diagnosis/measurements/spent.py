"""Time of a training by phases, callbacks, and lines of the user's loop."""

from hookcb.core.clock import BETWEEN, EPOCH, VALIDATION, TimeSplit
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.clock import PREFIX, Clock
from hookcb.diagnosis.measurements.lines import LineSamples
from hookcb.diagnosis.run import Run

MIN_BATCHES = 10  # timed before lines are
OF_USER = (BETWEEN, "loss")  # phases in which code of the user runs, in a loop of theirs
MIN_SHARE, MIN_SECONDS = 0.2, 1e-3  # of a mean batch, spent in these, from which lines are worth a look
MIN_RARE, MIN_ALIKE = 0.1, 0.5  # seconds that a busy machine does not take three times; third by largest
BLOCK = 7  # batches after which that is asked again


class SpentTime(Measurement):
    """Seconds of a mean batch by what they are spent on, without the first batches and the inspected ones.

    Of each, the two batches that take longest are left out too, as a busy machine may have caused them; but
    not of validations and the time between epochs.
    """

    cadence = EVERY
    uses = (Clock,)

    def __init__(self) -> None:
        self.n, self.has_lines = 0, False  # batches that were timed; whether lines were sampled
        # phases: "data" (fetches), "forward", "loss", "backward", "optimizer", "between" (all of the user's
        # code between these), "validation", "epoch" (between epochs, and the start of a loader), "garbage
        # collection"
        self.phases, self.callbacks = dict[str, float](), dict[str, float]()
        # parts of "loss" and "between": lines of the user's loop, those that fetch batches, beyond what a
        # DataLoader takes, and those that call the model, its backward or an optimizer
        self.lines, self.fetches, self.steps = (dict[str, float]() for _ in range(3))
        self.samples: LineSamples | None = None  # of a loop that hookcb does not run
        self._n_batches, self._next_look = 0, BLOCK

    @property
    def whole(self) -> float:
        """Seconds of a mean batch."""
        return sum(self.phases.values()) + sum(self.callbacks.values())

    def on_model(self, run: Run) -> None:
        split = run.measured(Clock).split
        if run.loop.is_external and split is not None:
            self.samples = LineSamples(lambda: split.phase in OF_USER)
        self.done = self.samples is None

    def on_prediction(self, run: Run) -> None:
        """Notes which lines of a loop that hookcb does not run make a step."""
        if run.looking and self.samples is not None:
            self.samples.note_step()

    on_gradients = on_between = on_prediction

    def on_batch_end(self, run: Run) -> None:
        """Begins to sample lines if the user's code takes much time."""
        if (samples := self.samples) is None or (split := run.measured(Clock).split) is None:
            return
        self._n_batches += 1
        samples.end_batch(is_counted=not split.leaves_out)
        if not samples.is_running and self._n_batches >= self._next_look:
            self._next_look = self._n_batches + BLOCK
            seconds = sum(split.seconds[phase] for phase in OF_USER)
            least = max(MIN_SHARE * sum(split.seconds.values()), MIN_SECONDS * split.n)
            if split.n >= MIN_BATCHES and seconds > least:
                samples.start()

    def tell(self, run: Run) -> None:
        if (split := run.measured(Clock).split) is None:
            return
        if split.n:
            self.n, self.phases, self.callbacks = split.n, {}, {}
            for name in filter(None, split.seconds):
                kind = self.callbacks if name.startswith(PREFIX) else self.phases
                kind[name.removeprefix(PREFIX)] = _steady(split, name) / split.n
        if self.samples is not None:
            self._add_lines(self.samples)

    def close(self, run: Run) -> None:
        samples, self.samples = self.samples, None
        if samples is not None:
            samples.close()

    def _add_lines(self, samples: LineSamples) -> None:
        if samples.failure is not None:
            raise samples.failure
        if not self.n or not (seconds := samples.seconds()):
            return  # without a look at the source of the user
        of_user = sum(self.phases.get(phase, 0.0) for phase in OF_USER)
        fetches, steps = samples.fetches, samples.steps
        self.lines, self.steps, self.fetches, self.has_lines = {}, {}, dict.fromkeys(fetches, 0.0), True
        scale = min(1.0, of_user / (sum(seconds.values()) or 1.0))
        for name, x in seconds.items():
            if not name:  # the start of a loader
                self.phases[EPOCH] = self.phases.get(EPOCH, 0.0) + scale * x
                self.phases[BETWEEN] = max(0.0, self.phases.get(BETWEEN, 0.0) - scale * x)
            elif steps != {name}:  # else all of a step is in this line, so its time tells nothing
                kind = self.fetches if name in fetches else self.steps if name in steps else self.lines
                kind[name] = scale * x


def _steady(split: TimeSplit, name: str) -> float:
    """Seconds without the two largest, as they may be the machine's; three long ones are not."""
    third, *two = split.largest[name]
    is_rare = name in (VALIDATION, EPOCH) or third > max(MIN_RARE, MIN_ALIKE * two[-1])
    return split.seconds[name] - (0.0 if is_rare else sum(two))
