"""Checkpoint: files from which a fit can go on to the bit."""

from contextlib import closing
from pathlib import Path
from typing import Any

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.events import CancelValidException
from hookcb.core.files import save_whole
from hookcb.core.randomness import random_state
from hookcb.training.checkpoint.folder_lock import FolderLock
from hookcb.training.checkpoint.signals import StopSignals
from hookcb.training.checkpoint.state import capture, checkpoints_in, loaders_of, remove_unfinished
from hookcb.training.monitor import check_monitor, improves, monitored, resolve_mode


class Checkpoint(Callback):
    """Writes all it takes to go on with a fit: `learn.fit(…, cbs=Checkpoint(folder), resume="latest")`.

    A resumed fit ends with the very weights of one that was never interrupted: model, optimizer, gradients
    that wait, random numbers, order of the data and callbacks' state are restored, also in mid-epoch. Of a
    loader with a state of its own that is what its `state_dict` gives.

    A file is written after each epoch, and when a fit is cancelled between batches; it gets its name when it
    is on the disk whole. On Ctrl-C and SIGTERM the batch in progress is finished, a file written, and then
    the fit ends with KeyboardInterrupt or SystemExit(143); a second Ctrl-C ends it at once.

    Args:
        folder: made if it is missing, and for one fit at a time. Files of the same name are replaced.
        every: also after so many training batches.
        keep: how many of the newest files of this fit stay.
        monitor: a column of the epoch's row; the best epoch's file stays as `best.pt`.
        mode: what is best, "min" or "max"; by default "min" where the name has "loss" or "error" in it.
        name: what the learner calls it.

    Attributes:
        best: the best value of `monitor` so far.
        n_written: how often this fit has written; `StepTimer` tells by it which step that was in.

    Raises:
        TypeError, ValueError: If an argument is invalid; `monitor` when the fit begins, or LookupError.
        RuntimeError, OSError: When the fit begins, if `folder` is in use, or cannot be written to.

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
    run_lr_find = False

    def __init__(
        self,
        folder: str | Path = "checkpoints",
        every: int | None = None,
        keep: int = 3,
        monitor: str | None = None,
        mode: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        check_count("keep", keep)
        check_count("every", 1 if every is None else every)
        self.folder, self.every, self.keep, self.monitor = Path(folder).absolute(), every, keep, monitor
        self.mode = resolve_mode(monitor or "loss", mode)
        self.best: float | None = None
        self._stop, self._lock = StopSignals(), FolderLock()

    @property
    def files(self) -> list[Path]:
        """The checkpoints in the folder, oldest first, without the best."""
        return checkpoints_in(self.folder)

    def before_fit(self) -> None:
        self.best, self._unsaved, self.n_written = None, False, 0
        self._written: list[str] = []
        self._random: dict[str, Any] = {}
        check_monitor(self.learn, self.monitor or "train_loss")
        if self._lock.open(self.folder):
            remove_unfinished(self.folder)
        self._stop.open(self.learn)

    def before_train(self) -> None:
        self._random = random_state(*loaders_of(self.learn))

    def after_train(self) -> None:
        self._unsaved = False
        self._random = random_state(*loaders_of(self.learn))

    def before_batch(self) -> None:
        if self.training:
            self._unsaved = False  # in the middle of a batch there is nothing to go on from

    def after_batch(self) -> None:
        if not self.training or not self.learn.fitting:
            if self._stop.asked and not self.learn.is_nested:
                raise CancelValidException
            return
        self._unsaved = True
        if self._stop.asked or (self.every is not None and (self.train_iter + 1) % self.every == 0):
            self._write("train", f"-batch-{self.iter + 1:06d}")
        self._stop.obey()

    def after_validate(self) -> None:
        if self._stop.asked and not self.learn.is_nested:
            self._write("validate", "-trained")
            self._stop.obey()

    def after_epoch(self) -> None:
        value = monitored(self.learn, self.monitor) if self.monitor is not None else None
        if is_best := value is not None and improves(value, self.best, self.mode):
            self.best = value
        self._write("epoch", is_best=is_best)
        self._stop.obey()

    def after_cancel_fit(self) -> None:
        if self._unsaved:
            self._write("train", f"-batch-{self.iter + 1:06d}")

    def after_fit(self) -> None:
        with closing(self._lock), closing(self._stop):  # which obeys a signal
            if self._stop.asked:  # since the last batch; or the loader has failed, as its workers were told
                self.after_cancel_fit()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "written": self._written, "random_of_phase": self._random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self._written, self._random = state["best"], state["written"], state["random_of_phase"]

    def _write(self, phase: str, place: str = "", is_best: bool = False) -> None:
        file_name = f"epoch-{self.epoch + 1:04d}{place}.pt"
        self._written = [*(file for file in self._written if file != file_name), file_name]
        state = capture(self.learn, phase, self._random)
        for file in (file_name, "best.pt") if is_best else (file_name,):
            save_whole(state, self.folder / file)
        self._unsaved, self.n_written = False, self.n_written + 1
        for old in self._written[: -self.keep]:
            (self.folder / old).unlink(missing_ok=True)
        self._written = self._written[-self.keep :]
