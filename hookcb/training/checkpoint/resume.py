"""Resume: a fit that goes on where a checkpoint was written."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hookcb.core.console import warn
from hookcb.core.files import read_saved
from hookcb.core.state import TrainingState
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.checkpoint.state import FORMAT, KEYS, check_fits, checkpoints_in, restore
from hookcb.training.progress import Progress

LATEST = "latest"
RESTORED_AT = {"epoch": "epoch", "validate": "phase", "train": "batch"}  # level of the loop, by saved phase


class Resume:
    """The state in a checkpoint, of which it is known that it fits a learner.

    Args:
        file: what `Checkpoint` has written.
        state: what it holds.
        learn: the learner, with the callbacks of the fit.

    Raises:
        ValueError: where it is of another model or optimizer, or of more epochs than this fit.
    """

    def __init__(self, file: Path, state: dict[str, Any], learn: TrainingState) -> None:
        self.file, self._state, self._is_restored = file, state, False
        try:
            check_fits(self._state, learn)
        except ValueError as error:
            raise ValueError(f"{file} {error}") from None
        self.phase: str = self._state["phase"]
        self.epoch: int = self._state["epoch"]
        self.train_iter: int = self._state["train_iter"] - self._state["iter"]  # when the epoch began
        if self.epoch + (self.phase != "epoch") > learn.n_epoch:
            raise ValueError(
                f"{file} is of epoch {self.epoch}, counted from 0, and n_epoch is {learn.n_epoch}; give the "
                "number of all epochs, with those made before"
            )
        self._check_callbacks(file, learn)

    @classmethod
    def find(cls, resume: "str | Path | None", learn: TrainingState) -> Self | None:
        """Of what `Learner.fit(resume=…)` was given; None where there is nothing to go on with.

        Raises:
            FileNotFoundError: where there is none.
            ValueError: If it is truncated, damaged, foreign, or of another version of hookcb; for "latest"
                without a `Checkpoint`, or if none of its files is whole.
        """
        if resume is None:
            return None
        if not isinstance(resume, str | Path):
            raise TypeError(f"resume is {resume!r}; give a checkpoint's path, a folder of them, or 'latest'")
        if resume != LATEST:
            file = Path(resume)
            if not file.exists():
                raise FileNotFoundError(
                    f"there is no {file}; resume goes on from what a Checkpoint has written"
                )
            return cls._newest(file, learn) if file.is_dir() else cls(file, _read(file), learn)
        folders = [cb.folder for cb in learn.cbs if isinstance(cb, Checkpoint)]
        if not folders:
            raise ValueError(
                "resume is 'latest', and no Checkpoint is attached; add one, cbs=Checkpoint(folder), "
                "or give a path"
            )
        return cls._newest(folders[0], learn) if checkpoints_in(folders[0]) else None

    @classmethod
    def _newest(cls, folder: Path, learn: TrainingState) -> Self:
        """Of the newest file that can be read whole."""
        broken = []
        for file in reversed(checkpoints_in(folder)):
            try:
                state = _read(file)
            except ValueError as error:
                broken.append(str(error))
                continue
            except FileNotFoundError:  # its fit, which may be running, keeps newer ones
                continue
            if broken:
                warn(f"{'; '.join(broken)}: resuming from {file}", stacklevel=2)
            return cls(file, state, learn)
        if broken:
            raise ValueError(f"no checkpoint in {folder} is whole: {'; '.join(broken)}")
        raise FileNotFoundError(f"there is no checkpoint in {folder}")

    def remaining(self, learn: TrainingState, level: str, items: Iterable[Any]) -> Iterable[Any]:
        """What a loop has still to do of its epochs, an epoch's phases, or a phase's batches.

        The state is restored when the loop arrives where the checkpoint was written.
        """
        if self._is_restored:
            return items
        if level == "epoch":
            learn.epoch, learn.train_iter = self.epoch, self.train_iter
            self._announce(learn)
            items = range(self.epoch, learn.n_epoch)
        elif level == "phase" and self.phase == "validate":
            items = list(items)[1:]
        if level != RESTORED_AT[self.phase] or (level == "batch" and not learn.training):
            return items
        self._is_restored = True
        batches = restore(learn, self._state)
        self._state = {}  # would keep all tensors of the checkpoint alive
        return items if batches is None else batches

    def _announce(self, learn: TrainingState) -> None:
        """Shows what is resumed, as the learner's `Progress` does; warns if nothing is left to train."""
        if self.phase == "epoch" and self.epoch >= learn.n_epoch:
            warn(
                f"nothing left to train: {self.file} is of {self._place(learn.n_epoch)}; to train on, give a "
                "larger n_epoch; to begin anew, leave out resume="
            )
            return
        for cb in learn.cbs:
            if isinstance(cb, Progress):
                place = self._place(learn.n_epoch)
                cb.tell(f"resumed from {self.file}: {place}; to begin anew, leave out resume=")

    def _place(self, n_epoch: int) -> str:
        if self.phase == "epoch":
            done = f"epoch {self.epoch} of {n_epoch}"
        else:
            part = f"batch {self._state['iter']}" if self.phase == "train" else "all training"
            done = f"{part} in epoch {self.epoch + 1} of {n_epoch}"
        return ", ".join([done, f"step {self._state['train_iter']}", *self._losses()])

    def _losses(self) -> list[str]:
        row = self._state["row"]
        # callbacks may put anything there
        shown = {name: row.get(name) for name in ("train_loss", "valid_loss")}
        if losses := [f"{name} {x:.4g}" for name, x in shown.items() if isinstance(x, int | float)]:
            return losses
        recorded = [of.get("losses") for of in self._state["cbs"].values() if isinstance(of, dict)]
        return [
            f"loss {x[-1].item():.4g}" for x in recorded if isinstance(x, Tensor) and x.ndim == 1 and len(x)
        ]

    def _check_callbacks(self, file: Path, learn: TrainingState) -> None:
        attached = {cb.name for cb in learn.cbs}
        # what a Checkpoint notes for itself nothing else needs
        needed = {name for name, of in self._state["cbs"].items() if "random_of_phase" not in of}
        if missing := sorted(needed - attached):
            warn(
                f"{file} has the state of callbacks that are not attached, {', '.join(missing)}: "
                "without them the fit will not go on as it was",
                stacklevel=2,
            )


def resumed(
    resume: "str | Path | None", learn: TrainingState
) -> Callable[[str, Iterable[Any]], Iterable[Any]] | None:
    """`Resume.remaining` of what `Learner.fit(resume=…)` was given; None to begin anew. See `Resume.find`."""
    found = Resume.find(resume, learn)
    return None if found is None else partial(found.remaining, learn)


def validated_weights(state: Any) -> dict[str, Any] | None:
    """Of what a checkpoint holds the weights that its fit validated, an average by `EMA` too; else None."""
    if not isinstance(state, dict) or set(state) != KEYS:
        return None
    average: dict[str, Any] = next(
        (of["averaged"] for of in state["cbs"].values() if of.get("validated")), {}
    )
    return {name: average.get(name, x) for name, x in state["model"].items()}


def _read(file: Path) -> dict[str, Any]:
    state = read_saved(file, torch.device("cpu"))
    if isinstance(state, dict) and "format" in state and state["format"] != FORMAT:
        raise ValueError(
            f"{file} was written by another version of hookcb, in format {state['format']!r}, and this one "
            f"reads format {FORMAT}; resume with the version that wrote it"
        )
    if not isinstance(state, dict) or set(state) != KEYS:
        raise ValueError(f"{file} is no checkpoint of a fit; Checkpoint writes them, in its folder")
    return state
