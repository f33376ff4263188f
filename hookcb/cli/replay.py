"""`hookcb replay`: one batch of a fit again, from the checkpoint before it, beside the batch before."""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from hookcb.cli.launch import hide_own_frames, launch
from hookcb.core import orders
from hookcb.core.alone import ALONE
from hookcb.core.batch import parts
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.console import show
from hookcb.core.text import as_layer
from hookcb.diagnosis.led import Led, LedHealth, LedStats
from hookcb.diagnosis.measurements.spikes import sample_losses, worst_of
from hookcb.loggers.callback import Log
from hookcb.loops.learner import Learner
from hookcb.processes.process_group import n_processes
from hookcb.profiling.callback import ProfilerCallback
from hookcb.records.tables import MANY, WORST
from hookcb.report.callback import Report
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.checkpoint.folder import is_folder_of_ranks
from hookcb.training.checkpoint.resume import read_any
from hookcb.training.checkpoint.state import CPU, checkpoints_in, is_checkpoint
from hookcb.training.save_model import SaveModelCallback

WRITERS = Checkpoint, SaveModelCallback, Log, Report, ProfilerCallback
APART = 2.0  # ratio of two numbers from which on it stands out
SAME = 1e-5  # relative difference of two losses that are the same, as threads may add in another order
OUTPUTS = {"std": "std of the output", "abs_max": "largest output"}
PARAMS = {"rms": "RMS of the gradient", "update_ratio": "update / weights"}


class Start(NamedTuple):
    """Origin of a batch that is run again.

    Attributes:
        file: the newest checkpoint before the batch and the one before it; None for the beginning.
        command: how the script was started, see `Checkpoint`; {} if that is unknown.
        recorded: losses of all batches that the newest checkpoint knows.
    """

    file: Path | None
    command: dict[str, Any]
    recorded: Sequence[float]


class Replayed(BaseException):
    """Ends the script once its batch was run again; not an Exception, which the script may catch."""


class Replay(Callback):
    """Records a batch and the one before it, and ends the script after it.

    Args:
        step: number of the training batch, counted from 0 since the training began.

    Attributes:
        losses, inputs: of the two batches, by step: the loss, and what the inputs are.
        of_samples: mean loss of each sample of the last one, `(N,)`, on the CPU; None if unknown.
        place: which batch of which epoch it is.
        outputs, gradients: the callbacks that record for it.
    """

    order = orders.STEP_TIMER
    run_valid = False
    run_lr_find = False

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.place = step, ""
        self.losses: dict[int, float] = {}
        self.inputs: dict[int, str] = {}
        self.of_samples: Tensor | None = None
        self.outputs = LedStats(include_paramless=True, name="replayed_outputs")
        self.gradients = LedHealth(detail_every=1, name="replayed_gradients")
        self.outputs.leader = self.gradients.leader = self

    @property
    def is_wanted(self) -> bool:
        """Whether the current batch is recorded."""
        return self.learn.training and self.step - 1 <= self.learn.train_iter <= self.step

    def take_error_of(self, cb: Led, error: Exception) -> bool:
        return False

    def see_output(self, m: nn.Module, output: Any) -> None:
        """Does nothing, as the numbers of outputs are recorded."""

    see_compiled_output = see_output

    def see_compiled_operation(self, layer: str, what: str, xs: Any, numbers: Any) -> None:
        """Does nothing, likewise."""

    def after_loss(self) -> None:
        if not self.is_wanted:
            return
        now = self.learn.train_iter
        self.losses[now] = float(self.learn.loss.detach())
        tensors = [x for _, x in parts(self.learn.xb) if isinstance(x, Tensor)]
        self.inputs[now] = "; ".join(map(_about, tensors[:3]))
        if now == self.step:
            self.place = f"batch {self.learn.iter} of epoch {self.learn.epoch}"
            of_samples = sample_losses(self.learn, self.learn.yb)
            self.of_samples = None if of_samples is None else of_samples.cpu()

    def after_batch(self) -> None:
        if self.learn.training and self.learn.train_iter >= self.step:
            raise Replayed


def _about(x: Tensor) -> str:
    """Shape, range and mean of an input."""
    numbers = x.detach().float()
    return f"{tuple(x.shape)}, {numbers.min():.3g} to {numbers.max():.3g}, mean {numbers.mean():.3g}"


def find_start(folder: Path, step: int) -> Start:
    """Finds what to run a batch again from.

    Raises:
        FileNotFoundError, ValueError: If the folder has no checkpoint, or only those of several processes.
    """
    files = checkpoints_in(folder) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(
            f"there is no checkpoint in {folder}; give the folder that a Checkpoint has written to, such as "
            "that of learn.fit(…, cbs=Checkpoint(folder, every=500))"
        )
    if any(map(is_folder_of_ranks, files)) or n_processes() > 1:
        raise ValueError(
            f"{folder} was written by several processes, of which one alone cannot run the same batches again"
        )
    command, recorded = dict[str, Any](), list[float]()
    for file in reversed(files):
        state = read_any(file, CPU, ALONE)
        if not is_checkpoint(state):
            raise ValueError(f"{file} is not a checkpoint of a fit, or of a newer version of hookcb")
        of_cbs = [x for x in state["cbs"].values() if isinstance(x, dict)]
        command = command or next((x["command"] for x in of_cbs if x.get("command")), {})
        recorded = recorded or next((x["losses"].tolist() for x in of_cbs if _has_losses(x)), [])
        if state["train_iter"] < max(step, 1):
            return Start(file, command, recorded)
    return Start(None, command, recorded)


def _has_losses(state: dict[str, Any]) -> bool:
    return isinstance(losses := state.get("losses"), Tensor) and losses.ndim == 1


@contextmanager
def replaying(folder: Path, start: Start, replay: Replay) -> Iterator[None]:
    """Lets all fits write nothing, and the one with a `Checkpoint` in the folder begin where it was found."""
    fit = Learner.fit

    def fit_again(learn: Learner, n_epoch: int, lr: Any = None, cbs: Callbacks = (), **options: Any) -> None:
        with learn.added_cbs(cbs):
            is_it = folder in [cb.folder for cb in learn.cbs if isinstance(cb, Checkpoint)]
            writers = [cb for cb in learn.cbs if isinstance(cb, WRITERS)]
            more = [replay.outputs, replay.gradients, replay] if is_it else []
            options |= {"resume": start.file if is_it else None}
            with learn.removed_cbs(writers), learn.no_logging(), warnings.catch_warnings():
                for text in (".* has the state of callbacks that are not attached", "nothing left to train"):
                    warnings.filterwarnings("ignore", text)
                fit(learn, n_epoch, lr, more, **options)
        if is_it:
            raise Replayed  # past its last batch

    Learner.fit = fit_again  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Learner.fit = fit  # type: ignore[method-assign]


def replay(folder: Path, step: int, script: Sequence[str] = ()) -> int:
    """Runs the script of a fit up to a batch, from the checkpoint before it, and shows that batch.

    Args:
        folder: that of the `Checkpoint`.
        step: number of the training batch, counted from 0 since the training began.
        script: the script and its arguments; by default what has written the checkpoint.

    Returns:
        Exit code 0, as the batch was shown.

    Raises:
        FileNotFoundError, ValueError: If there is no checkpoint or no script, or it ends before that batch.
    """
    folder = folder.absolute()
    start = find_start(folder, step)
    command = start.command
    if script:
        command = {**command, "script": os.path.abspath(script[0]), "args": script[1:], "is_module": False}
    if not command:
        raise ValueError(f"{folder} does not say which script has written it; give it: --script SCRIPT ARGS")
    found, why = Replay(step), "ended"
    try:
        with chdir(command.get("folder", ".")), replaying(folder, start, found):
            launch(command["script"], [*command["args"]], command["is_module"], lambda _: None)
    except Replayed:
        if step in found.losses:
            _show(found, start, folder)
            return 0
        why = "trains for fewer steps"
    except SystemExit as ended:
        why = f"ended with exit code {ended.code}"
    except BaseException as error:
        hide_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        why = "failed"
    raise ValueError(
        f"there is no step {step:,} of a fit with a Checkpoint in {folder}: {command['script']} {why}"
    )


# ---- what it shows


def _show(found: Replay, start: Start, folder: Path) -> None:
    step, origin = found.step, "the beginning" if start.file is None else start.file.name
    loss, before = found.losses[step], found.losses.get(step - 1, math.nan)
    lines = [f"Step {step:,}, {found.place}, counted from 0, run again from {origin} in {folder.name}"]
    lines += [
        f"loss {loss:.6g}{'' if math.isnan(before) else f', {before:.6g} in the step before'}"
        + _as_recorded(start.recorded, step, loss)
    ]
    lines += [f"inputs of step {i:,}: {about}" for i, about in sorted(found.inputs.items()) if about]
    if (of_samples := found.of_samples) is not None:
        worst = ", ".join(f"{i} ({x:.3g})" for i, x in worst_of(of_samples))
        lines += [
            f"samples with the largest losses, of {len(of_samples):,} from 0: {worst}; median "
            f"{float(of_samples.nanmedian()):.3g}"
        ]
    show("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
    outputs, records = found.outputs, found.gradients.records
    show(_table("layer", outputs.names, step, OUTPUTS, outputs.steps(), outputs.series))
    show(_table("parameter", records.names, step, PARAMS, records.steps(), records.series))


def _as_recorded(recorded: Sequence[float], step: int, loss: float) -> str:
    """Whether the loss is that of the first run, if a later checkpoint knows that."""
    if step >= len(recorded):
        return ""
    if math.isclose(recorded[step], loss, rel_tol=SAME):
        return "; it is that of the first run"
    return (
        f"; the first run had {recorded[step]:.6g}, so the batch or the model differs: seed what the script "
        "draws, and let its data be as they were"
    )


def _table(
    title: str,
    names: Sequence[str],
    step: int,
    stats: Mapping[str, str],
    steps: Sequence[int],
    series: Callable[[str, str], Any],
) -> Table:
    """A table of numbers of two batches and their ratios, a row for each name; of many, those that differ."""
    has_before = step - 1 in steps
    table = Table("", title=f"{title}s at step {step:,}" + ", beside the step before" * has_before)
    for words in stats.values():
        heads = f"{words}\nstep {step - 1:,}", f"\nstep {step:,}", "\n×"
        for head in heads if has_before else [f"{words}"]:
            table.add_column(head, justify="right")
    rows = []
    for name in names:
        pairs = [_pair(dict(zip(steps, series(name, stat), strict=True)), step) for stat in stats]
        apart = max(abs(math.log(ratio)) if 0 < ratio < math.inf else 0.0 for *_, ratio in pairs)
        rows.append((apart, name, pairs))
    shown = sorted(rows, key=lambda row: -row[0])[: WORST if len(rows) > MANY else MANY]
    for row in rows:
        if row in shown:
            table.add_row(as_layer(row[1]) or "the model", *_cells(row[2], has_before))
    if len(shown) < len(rows):
        table.caption = f"the {len(shown)} of {len(rows):,} that differ most"
    return table


def _pair(by_step: Mapping[int, float], step: int) -> tuple[float, float, float]:
    before, now = by_step.get(step - 1, math.nan), by_step.get(step, math.nan)
    return before, now, now / before if before else math.nan


def _cells(pairs: Sequence[tuple[float, float, float]], has_before: bool) -> Iterator[Text]:
    for before, now, ratio in pairs:
        if has_before:
            yield Text(f"{before:.3g}")
        yield Text(f"{now:.3g}")
        if has_before:
            yield Text(f"{ratio:.2f}", style="" if 1 / APART < ratio < APART else "yellow")
