"""Resume: continues a fit from a checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookcb.core.alone import ALONE, Ranks
from hookcb.core.console import warn
from hookcb.core.files import read_saved
from hookcb.core.state import TrainingState
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.checkpoint.folder import check_not_part, is_folder_of_ranks, read_folder
from hookcb.training.checkpoint.state import (
    CPU,
    READ,
    check_fits,
    checkpoints_in,
    fitted,
    has_average,
    is_checkpoint,
    restore,
)
from hookcb.training.progress import Progress

LATEST = "latest"
RESTORED_AT = {"epoch": "epoch", "validate": "phase", "train": "batch"}  # level of the loop, by saved phase


class Resume:
    """The state in a checkpoint, which was checked to fit a learner.

    Args:
        file: the file of a `Checkpoint`.
        state: the state in it.
        learn: the learner, with the callbacks of the fit.

    Raises:
        ValueError: If it is of another model or optimizer, or of more epochs than this fit.
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
                f"{file} is of epoch {self.epoch}, counted from 0, but n_epoch is {learn.n_epoch}; give the "
                "total number of epochs, including those already trained"
            )
        self._check_callbacks(file, learn)

    @classmethod
    def find(cls, resume: "str | Path | None", learn: TrainingState) -> Self | None:
        """Finds the checkpoint that `Learner.fit(resume=…)` asks for; None if there is nothing to resume.

        Raises:
            FileNotFoundError: If the file does not exist, or the folder has no checkpoint.
            ValueError: If it is truncated, damaged, another kind of file, or from another version of hookcb;
                for "latest", if no `Checkpoint` is attached, or all its files are damaged.
        """
        if resume is None:
            return None
        if not isinstance(resume, str | Path):
            raise TypeError(f"resume must be the path of a checkpoint or folder, or 'latest', got {resume!r}")
        folder = Path(resume)
        if resume == LATEST:
            folders = [cb.folder for cb in learn.cbs if isinstance(cb, Checkpoint)]
            if not folders:
                raise ValueError(
                    "resume is 'latest', but no Checkpoint is attached; add one, cbs=Checkpoint(folder), "
                    "or give a path"
                )
            folder = folders[0]
        elif not folder.exists():
            raise FileNotFoundError(
                f"there is no {folder}; give a file that a Checkpoint has written, or a folder of them"
            )
        elif not folder.is_dir() or is_folder_of_ranks(folder):
            return cls(folder, _read(folder, learn.ranks), learn)
        files = checkpoints_in(folder)
        learn.ranks.check_alike({f"checkpoints in {folder}": [file.name for file in files]})
        return cls._newest(folder, files, learn) if files or resume != LATEST else None

    @classmethod
    def _newest(cls, folder: Path, files: list[Path], learn: TrainingState) -> Self:
        """Returns the state of the newest intact file."""
        broken = []
        for file in reversed(files):
            try:
                state = _read(file, learn.ranks)
            except ValueError as error:
                broken.append(str(error))
                continue
            except FileNotFoundError:  # a running fit may remove old files
                continue
            if broken:
                warn(f"{'; '.join(broken)}: resuming from {file}", stacklevel=2)
            return cls(file, state, learn)
        if broken:
            raise ValueError(f"no checkpoint in {folder} is intact: {'; '.join(broken)}")
        raise FileNotFoundError(f"there is no checkpoint in {folder}")

    def remaining(self, learn: TrainingState, level: str, items: Iterable[Any]) -> Iterable[Any]:
        """Epochs of a fit, phases of an epoch, or batches of a phase that are still to do.

        The state is restored when the loop arrives at the point at which the checkpoint was written.
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
        batches = restore(learn, self._state, self.file)
        self._state = {}  # would keep all tensors of the checkpoint alive
        return items if batches is None else batches

    def _announce(self, learn: TrainingState) -> None:
        """Shows what is resumed, as the learner's `Progress` does; warns if nothing is left to train."""
        if self.phase == "epoch" and self.epoch >= learn.n_epoch:
            warn(
                f"nothing left to train: {self.file} is of {self._place(learn.n_epoch)}; to train longer, "
                "give a larger n_epoch; to begin anew, leave out resume="
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
        # callbacks may put other objects there
        shown = {name: row.get(name) for name in ("train_loss", "valid_loss")}
        if losses := [f"{name} {x:.4g}" for name, x in shown.items() if isinstance(x, int | float)]:
            return losses
        recorded = [x.get("losses") for x in self._state["cbs"].values() if isinstance(x, dict)]
        return [
            f"loss {x[-1].item():.4g}" for x in recorded if isinstance(x, Tensor) and x.ndim == 1 and len(x)
        ]

    def _check_callbacks(self, file: Path, learn: TrainingState) -> None:
        attached = {cb.name for cb in learn.cbs}
        # no other callback needs the state of a Checkpoint
        needed = {name for name, x in self._state["cbs"].items() if "random_of_phase" not in x}
        if missing := sorted(needed - attached):
            warn(
                f"{file} has the state of callbacks that are not attached, {', '.join(missing)}; without "
                "them, the fit does not continue as it would have",
                stacklevel=2,
            )


def read_whole_weights(path: Path) -> tuple[Path, dict[str, Any]]:
    """Reads the weights that a checkpoint's fit validated, or those of a file of `learn.save`, as they are.

    Returns:
        What was read, of a folder of checkpoints the newest one, and weights by the names in it, on the CPU.

    Raises:
        FileNotFoundError, ValueError: If there is none, or it is damaged; the message names it.
    """
    if path.is_dir() and not is_folder_of_ranks(path):
        if not (files := checkpoints_in(path)):
            raise FileNotFoundError(f"there is no checkpoint in {path}")
        path = files[-1]
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    state, nothing = read_any(path, CPU, ALONE), nn.Module()
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f"{path} is neither a checkpoint nor a file of learn.save")
    return path, validated_weights(nothing, state, path, {})


def validated_weights(model: nn.Module, state: Any, file: Path, own: dict[str, Any]) -> dict[str, Any]:
    """Weights in a checkpoint or a file of `learn.save`; if an average of `EMA` was validated, these.

    They have the names of the model's `own` tensors, as far as it has such.
    """
    weights = fitted(model, state["model"], file, "model", own)
    for name, saved in state.get("cbs", {}).items():
        if has_average(saved) and saved.get("validated"):
            average = fitted(model, saved["averaged"], file, f"cbs.{name}.averaged", own)
            weights |= {name: x for name, x in average.items() if name in weights}
    return weights


def read_any(file: Path, device: torch.device, ranks: Ranks, is_joint: bool = False) -> Any:
    """Reads a file, or a folder of several ranks without its tensors; `is_joint`: see `read_folder`.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or another kind of file; the message names it.
    """
    if not file.is_dir():
        check_not_part(file)
        return read_saved(file, device)
    if not is_folder_of_ranks(file):
        raise ValueError(f"{file} is a folder, but not a checkpoint; give one that is inside")
    return read_folder(file, ranks, is_joint)


def _read(file: Path, ranks: Ranks) -> dict[str, Any]:
    state: dict[str, Any] = read_any(file, CPU, ranks, is_joint=True)
    if isinstance(state, dict) and "format" in state and state["format"] not in READ:
        raise ValueError(
            f"{file} was written by another version of hookcb, in format {state['format']!r}, but this one "
            f"reads formats {' and '.join(map(str, READ))}; resume with the version that wrote it"
        )
    if not is_checkpoint(state):
        raise ValueError(f"{file} is not a checkpoint of a fit; give a file that a Checkpoint has written")
    return state
