"""SaveModelCallback: fastai's callback that saves the model when a column of the row has improved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.training.checkpoint.folder import open_shared
from hookcb.training.ema import check_validates_weights
from hookcb.training.monitor import check_monitor, check_patience, improves, monitored, resolve_mode

FOLDER = Path("models")  # fastai's `path / model_dir`


class SaveModelCallback(Callback):
    """Saves the model at each improvement by `learn.save`, and loads the best one when the fit ends.

    It is there for code of fastai; `Checkpoint` does more: it can resume, and keeps the best of several.

    Args:
        monitor: a column of the epoch's row: `valid_loss`, `train_loss`, or the name of a metric.
        comp: `np.less` or `np.greater`, which is better; by default less if the name contains "loss" or
            "error".
        min_delta: a value must be better than the best by more than this, in the unit of `monitor`.
        fname: the file is `models/<fname>.pth`, or with a folder in `fname` that one.
        every_epoch: True saves each epoch to `<fname>_<epoch>`, n each n-th; nothing is loaded at the end.
        at_end: whether to save once, when the fit ends.
        with_opt: whether the files contain the optimizer's state.
        reset_on_fit: whether each fit forgets the best value of the one before.
        name: name of the callback in the learner, by default "save_model".

    Attributes:
        best: the best value so far; None before the first.
        last_saved_path: the last file that was written; None before the first.

    Raises:
        TypeError, ValueError: If an argument is invalid; when the fit begins, if an `EMA` is validated, as
            the value is not that of the trained weights then.
        LookupError: If no column has that name; before training, if it looks like a typo.
        RankError, OSError: Before training, if not all ranks see the folder, or nobody can write to it.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from hookcb import SaveModelCallback, synth_learner
    >>> learn = synth_learner()
    >>> with tempfile.TemporaryDirectory() as folder, learn.no_logging():
    ...     learn.fit(2, cbs=SaveModelCallback(fname=f"{folder}/best"))
    ...     [file.name for file in Path(folder).iterdir()]
    ['best.pth']
    """

    order = orders.CHECKPOINT
    run_lr_find = False

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        fname: str | Path = "model",
        every_epoch: bool | int = False,
        at_end: bool = False,
        with_opt: bool = False,
        reset_on_fit: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if comp is not None and not callable(comp):
            raise TypeError(f"comp must be a function such as np.less or np.greater, got {comp!r:.80}")
        self.monitor = monitor
        self.mode = resolve_mode(monitor, comp)
        check_patience(1, min_delta)
        self.every = check_count("every_epoch", int(every_epoch), "epochs", least=0)
        if self.every and at_end:
            raise ValueError("every_epoch and at_end exclude each other; give one of them")
        self.min_delta, self.fname, self.at_end = min_delta, fname, at_end
        self.with_opt, self.reset_on_fit = with_opt, reset_on_fit
        self.best: float | None = None
        self.last_saved_path: Path | None = None

    def file(self, suffix: str = "") -> Path:
        named = Path(f"{str(self.fname).removesuffix('.pth')}{suffix}.pth")
        return named if len(named.parts) > 1 else FOLDER / named

    def before_fit(self) -> None:
        if self.reset_on_fit:
            self.best = None
        if not (self.every or self.at_end):
            check_monitor(self.learn, self.monitor)
            check_validates_weights(self.learn, "SaveModelCallback would save")
            open_shared(self.file().parent, self.learn.ranks, lambda: None)

    def after_epoch(self) -> None:
        if self.every:
            if self.epoch % self.every == 0:
                self._save(self.file(f"_{self.epoch}"))
        elif not self.at_end:
            self._save_if_better()

    def after_fit(self) -> None:
        if not self.learn.fit_succeeded:
            return
        if self.at_end:
            self._save(self.file())
        elif self.best is not None and not self.every:
            learn: Any = self.learn
            learn.ranks.max([0.0])  # all wait until rank 0 has written the file
            learn.load(self.file(), with_opt=self.with_opt)

    def _save_if_better(self) -> None:
        value = monitored(self.learn, self.monitor)
        if value is None or not improves(value, self.best, self.mode, self.min_delta):
            return
        self.best = value
        self._save(self.file())

    def _save(self, file: Path) -> None:
        learn: Any = self.learn
        self.last_saved_path = learn.save(file, with_opt=self.with_opt)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
