"""load.not_resumed: trainings that are resumed without the state of their optimizer or scheduler."""

from collections.abc import Iterator
from typing import Any

from hookcb.diagnosis.fault import Fault, Site, Unknown, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import File, LoadClock, Loads, Saves
from hookcb.diagnosis.measurements.state_dicts import numbers
from hookcb.diagnosis.run import Absent, Run

UNHEARD = "files that were read before the training were not heard; hookcb diagnose script.py hears them"
NOTHING = Absent("no weights of the model were loaded from a file with the state of a training")
MAX_STEPS = 64  # within which a training that resumes has loaded its files
PROGRESS = ("last_epoch", "_step_count", "verbose")  # numbers of a scheduler that are not its settings


@fault(
    "load.not_resumed",
    Site.OPTIMIZER,
    needs="batches",
    leads_to="loss.spike loss.diverging update.* train.unfinished",
    subject="resumed trainings",
    exact=True,
)
class NotResumed(Fault):
    """A training that goes on from a file, but without the state of the optimizer or scheduler in it.

    Exact: the weights come from a file of `torch.load` that has the state of an optimizer with the same
    settings, the script also writes that file or loads the scheduler in it, and at the first step afterwards
    the optimizer is fresh and `load_state_dict` of an optimizer was not called. Or the optimizer was loaded,
    the file has a scheduler with the same settings after its beginning, and the one in use is at its
    beginning. Other files may be read for their weights alone, as for fine-tuning. After 64 steps, loads are
    looked at in inspected batches only.

    Source: the PyTorch tutorial "Saving and Loading Models": to resume, "it is important to also save the
    optimizer's state_dict".
    """

    headline = "The training resumes without part of its state"
    severity = "warning"
    cadence = MAX_STEPS
    uses = (LoadClock,)
    passed = "a training that is resumed without a part of its state"
    unless: Unknown = UNHEARD

    def __init__(self) -> None:
        super().__init__()
        self._n_loads = 0
        self._fresh: list[tuple[int, File, str]] = []  # step, file, and class of an optimizer that is fresh
        self._begun: list[tuple[int, File, str, float]] = []  # likewise of a scheduler, and where it was
        self._has_looked = False

    def on_step(self, run: Run) -> None:
        ear = heard(Loads)
        if len(ear.loads) == self._n_loads:
            return
        new, self._n_loads = ear.loads[self._n_loads :], len(ear.loads)
        own = set(map(id, run.measured(LoadClock).params().values()))
        for load in new:
            if load.file is not None and own & {id(p()) for p in load.params.values()}:
                self._look(run, ear.files[load.file], ear)

    def _look(self, run: Run, file: File, ear: Loads) -> None:
        opt, is_loaded = run.loop.opt, ear.n_optimizers > file.n_optimizers
        if opt is None or not any(file.n_states):
            return
        self._has_looked, kind = True, type(opt).__name__
        group = _without_rate(numbers(opt.param_groups[0]))
        if not is_loaded and not opt.state and any(_without_rate(x) == group for x in file.groups):
            self._fresh.append((run.n_steps, file, kind))
        if is_loaded and ear.n_schedulers == file.n_schedulers:
            for scheduler, now in _schedulers_of(opt, ear):
                was = [x["last_epoch"] for x in file.rates if _settings(x) == _settings(now)]
                if was and max(was) > 0 == now.get("last_epoch"):
                    self._begun.append((run.n_steps, file, scheduler, max(was)))

    def tell(self, run: Run) -> None:
        ear, paths = heard(Loads), {save.path for save in heard(Saves).saves}
        if run.measured(LoadClock).has_heard_start:
            self.unless = "" if self._has_looked else NOTHING
        self.seen = []
        for step, file, kind in self._fresh:
            if (file.path and file.path in paths) or ear.n_schedulers > file.n_schedulers:
                self._see(
                    f"The weights come from {_name(file)}, which also has the state of an optimizer for "
                    f"{max(file.n_states)} parameters, but {kind} began step {step} without any state: its "
                    "moments were not loaded.",
                    step,
                    "optimizer.load_state_dict(checkpoint[…]), after the model is on its device",
                )
        for step, file, kind, was in self._begun:
            self._see(
                f"The weights and the optimizer come from {_name(file)}, in which the scheduler has made "
                f"{was:.0f} steps, but {kind} begins at 0: its state was not loaded.",
                step,
                "scheduler.load_state_dict(checkpoint[…])",
            )

    def _see(self, message: str, step: int, call: str) -> None:
        cause = "a part of the checkpoint that is saved, and not loaded"
        self.see(message, when=step, value=0.0, causes=(cause,), next_steps=(f"Load it too: {call}",))


def _schedulers_of(opt: Any, ear: Loads) -> Iterator[tuple[str, dict[str, float]]]:
    for made in ear.schedulers:
        if (scheduler := made()) is not None and getattr(scheduler, "optimizer", None) is opt:
            yield type(scheduler).__name__, numbers(vars(scheduler))


def _settings(rate: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in rate.items() if name not in PROGRESS}


def _without_rate(group: dict[str, float]) -> dict[str, float]:
    """Settings of a group: its rate is that of the beginning, if a scheduler has changed it."""
    return {name: x for name, x in group.items() if name not in ("lr", "initial_lr")} | {
        "lr": group.get("initial_lr", group.get("lr", 0.0))
    }


def _name(file: File) -> str:
    return file.path.rpartition("/")[2] or "a file"
