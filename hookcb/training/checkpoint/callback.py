"""Checkpoint: files, and folders of several ranks, from which a fit can be resumed bit-identically."""

import math
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.events import CancelValidException
from hookcb.core.randomness import random_state
from hookcb.training.checkpoint.folder import (
    copy_checkpoint,
    open_shared,
    remove_checkpoint,
    remove_unfinished,
)
from hookcb.training.checkpoint.folder_lock import FolderLock
from hookcb.training.checkpoint.position import Position
from hookcb.training.checkpoint.signals import StopSignals
from hookcb.training.checkpoint.state import (
    capture,
    check_whole,
    checkpoints_in,
    in_folder,
    loaders_of,
    save_state,
)
from hookcb.training.monitor import check_monitor, improves, monitored, resolve_mode


class Checkpoint(Callback):
    """Saves all that is needed to resume a fit: `learn.fit(…, cbs=Checkpoint(folder), resume="latest")`.

    A resumed fit ends with exactly the weights of one that was never interrupted: model, optimizer,
    accumulated gradients, random state, data order and the state of callbacks are restored, also within an
    epoch. A loader with a `state_dict` is restored by that.

    On several ranks a checkpoint is a folder, to which each writes its part by torch.distributed.checkpoint.
    Any number of ranks, and a plain model alone, resumes what others have written. In the middle of an epoch
    each sample that is left is still seen once; that needs a DistributedSampler. Only with as many ranks are
    random numbers the same, and do recorded losses include those of other ranks before.

    A file is written after each epoch, and when a fit is cancelled between batches; it gets its name once it
    is complete on the disk. On Ctrl-C and SIGTERM the batch in progress is finished, a file is written, and
    the fit ends with KeyboardInterrupt or SystemExit(143); a second Ctrl-C ends it at once.

    Args:
        folder: created if it is missing; used by one fit at a time. Files of the same name are replaced.
        every: number of training batches after which a file is written too; by default only after epochs.
        keep: number of files of this fit to keep, the newest ones.
        monitor: a column of the epoch's row; the file of the best epoch is kept as `best.pt`, or `best/`.
        mode: "min" or "max", which is better; by default "min" if the name contains "loss" or "error".
        save_top_k: number of files of the best epochs by `monitor` that are kept beside the newest ones.
        name: name of the callback in the learner.

    Attributes:
        best: the best value of `monitor` so far.
        n_written: number of files written in this fit; `StepTimer` uses it to find the steps with a write.

    Raises:
        ValueError, LookupError: When the fit begins, if no column is named `monitor`.
        RuntimeError, OSError: When the fit begins, if `folder` is in use, or cannot be written to; a
            RankError, on all ranks, if only some can write to it, or they do not share it.

    >>> from tempfile import mkdtemp
    >>> from hookcb import Checkpoint, synth_learner
    >>> folder = mkdtemp()
    >>> for n_epoch in (1, 3):  # the second might be in another process
    ...     learn = synth_learner()
    ...     with learn.no_logging():
    ...         learn.fit(n_epoch, cbs=Checkpoint(folder), resume="latest")
    >>> len(learn.recorder.rows), learn.checkpoint.files[-1].name
    (3, 'epoch-0003.pt')
    """

    order = orders.CHECKPOINT
    has_rank_state = True
    run_lr_find = False

    def __init__(
        self,
        folder: str | Path = "checkpoints",
        every: int | None = None,
        keep: int = 3,
        monitor: str | None = None,
        mode: str | None = None,
        *,
        save_top_k: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        check_count("keep", keep)
        check_count("every", 1 if every is None else every)
        check_count("save_top_k", save_top_k, least=0)
        if save_top_k and monitor is None:
            raise ValueError(
                f"save_top_k is {save_top_k}, but there is no monitor to compare epochs by; give one"
            )
        self.folder, self.every, self.keep, self.monitor = Path(folder).absolute(), every, keep, monitor
        self.mode, self.save_top_k = resolve_mode(monitor or "loss", mode), save_top_k
        self.best: float | None = None
        self._stop, self._lock = StopSignals(), FolderLock()

    @property
    def files(self) -> list[Path]:
        """Checkpoints in the folder, oldest first, without the best one."""
        return checkpoints_in(self.folder)

    def before_fit(self) -> None:
        self.best, self._unsaved, self.n_written = None, False, 0
        self._written: list[str] = []
        self._top: list[tuple[float, str]] = []  # value and file of the best epochs, the best one first
        self._position = Position()
        self._random: dict[str, Any] = {}
        self._command = own_command()
        check_monitor(self.learn, self.monitor or "train_loss")
        check_whole(self.learn)
        if self.learn.ranks.world > 1:
            open_shared(self.folder, self.learn.ranks, self._open)
        else:
            self._open()
        self._stop.open(self.learn)

    def before_train(self) -> None:
        self._position = Position()
        self._random = random_state(*loaders_of(self.learn))

    def after_train(self) -> None:
        self._unsaved, self._position = False, Position()
        self._random = random_state(*loaders_of(self.learn))

    def before_batch(self) -> None:
        if self.training:
            self._unsaved = False  # a fit cannot be resumed from the middle of a batch

    def after_batch(self) -> None:
        if not self.training or not self.learn.fitting:
            if self._stop.requested and not self.learn.is_nested:
                raise CancelValidException
            return
        self._unsaved = True
        if self._stop.requested or (self.every is not None and (self.train_iter + 1) % self.every == 0):
            self._write("train", f"-batch-{self.iter + 1:06d}")
        self._stop.obey()

    def after_validate(self) -> None:
        if self._stop.requested and not self.learn.is_nested:
            self._write("validate", "-trained")
            self._stop.obey()

    def after_epoch(self) -> None:
        value = monitored(self.learn, self.monitor) if self.monitor is not None else None
        if is_best := value is not None and improves(value, self.best, self.mode):
            self.best = value
        self._write("epoch", is_best=is_best, value=value)
        self._stop.obey()

    def after_cancel_fit(self) -> None:
        if self._unsaved:
            self._write("train", f"-batch-{self.iter + 1:06d}")

    def after_fit(self) -> None:
        with closing(self._lock), closing(self._stop):  # close obeys a signal
            # since the last batch, or the loader failed because its workers got the signal too
            if self._stop.requested:
                self.after_cancel_fit()

    def state_dict(self) -> dict[str, Any]:
        state = {
            "best": self.best,
            "written": self._written,
            "top": self._top,
            "random_of_phase": self._random,
            "command": self._command,
        }
        position = self._position.saved(self.learn) if self.learn.training else None
        return state | ({} if position is None else {"position": position})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = Position(*state.get("took_over", ()))
        self.best, self._written, self._random = state["best"], state["written"], state["random_of_phase"]
        self._top = [(value, file) for value, file in state.get("top", ())]

    def _open(self) -> None:
        if self._lock.open(self.folder):
            remove_unfinished(self.folder)

    def _write(self, phase: str, place: str = "", is_best: bool = False, value: float | None = None) -> None:
        suffix = "" if in_folder(self.learn) else ".pt"
        file_name = f"epoch-{self.epoch + 1:04d}{place}{suffix}"
        self._written = [*(file for file in self._written if file != file_name), file_name]
        if value is not None and not math.isnan(value):
            top = [*((x, file) for x, file in self._top if file != file_name), (value, file_name)]
            self._top = sorted(top, key=lambda pair: pair[0], reverse=self.mode == "max")[: self.save_top_k]
        ranks = self.learn.ranks
        save_state(capture(self.learn, phase, self._random), self.folder / file_name, self.learn)
        if is_best and ranks.is_main:
            copy_checkpoint(self.folder / file_name, self.folder / f"best{suffix}")
            remove_checkpoint(self.folder / ("best" if suffix else "best.pt"))  # of other ranks before
        self._unsaved, self.n_written = False, self.n_written + 1
        kept = {*self._written[-self.keep :], *(file for _, file in self._top)}
        if ranks.is_main:
            for old in self._written:
                if old not in kept:
                    remove_checkpoint(self.folder / old)
        if is_best:
            ranks.max([0])  # until it is there
        self._written = [file for file in self._written if file in kept]


def own_command() -> dict[str, Any]:
    """How this process was started, for `hookcb replay`; {} in a notebook or an interactive session.

    Returns:
        "script": absolute path, or name of the module if "is_module"; "args", a list; "folder", where it was.
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None:
        return {}
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return {}
    script = os.path.abspath(file) if spec is None else spec.name.removesuffix(".__main__")
    return {"script": script, "is_module": spec is not None, "args": sys.argv[1:], "folder": folder}
