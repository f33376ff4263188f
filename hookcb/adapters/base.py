"""Attached: base of the adapters to trainers of other libraries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import distributed

from hookcb.core.arguments import hinted
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks, new_callbacks, renamed
from hookcb.diagnosis.verdict import Verdict
from hookcb.loops.reporter import LoopReporter
from hookcb.loops.watch import flat
from hookcb.report.page import Page


class Attached:
    """Callbacks in a trainer; each becomes an attribute, so that its results can be read.

    Args:
        *more: callbacks, one by one or in lists, as instances, or as classes that need no arguments.
        cbs: more callbacks, in the form that a `Learner` accepts.

    Attributes:
        cbs: the callbacks.
        followed: the training they follow, or followed last; None before the first one.

    Raises:
        TypeError, ValueError: If one is not a callback, or its name is taken.
    """

    @hinted
    def __init__(self, *more: Callbacks, cbs: Callbacks = ()) -> None:
        super().__init__()
        self.cbs = sorted(new_callbacks(flat(*more, cbs), ()), key=lambda cb: cb.order)
        self.followed: LoopReporter | None = None
        self._brought: list[str] = []  # names of callbacks that other callbacks add for one training
        for cb in self.cbs:
            if hasattr(self, cb.name) or hasattr(LoopReporter, cb.name):
                owner = type(self).__name__
                raise ValueError(f"{cb!r} would overwrite {owner}.{cb.name}; give it a name: {renamed(cb)}")
            setattr(self, cb.name, cb)

    @property
    def coverage(self) -> Any:
        """Events seen in the training, and those that were not, with the reason; None before the first."""
        return None if self.followed is None else self.followed.coverage

    @property
    def stop_requested(self) -> bool:
        """Whether a callback has requested the end of the training; the trainer is then notified."""
        return self.followed is not None and self.followed.stop_requested

    @property
    def running(self) -> Any:
        """The training that is being followed, or None."""
        return self.followed if self.followed is not None and self.followed.fitting else None

    def follow(self, make: Callable[[list[Callback]], LoopReporter]) -> None:
        """Lets the callbacks follow the loop that `make` creates for them; the one before has ended."""
        self.close()
        for cb in self.cbs:
            if "learn" in cb.__dict__ and not cb.learn.fitting:
                cb.learn.remove_cbs([cb])  # it is still attached to the training before
        self.followed = make(self.cbs)
        self._show_brought(self.followed.cbs)

    def _show_brought(self, cbs: list[Callback]) -> None:
        """Makes callbacks added by other callbacks attributes too, and removes those of the last training."""
        for name in self._brought:
            delattr(self, name)
        brought = {cb.name: cb for cb in cbs if not hasattr(self, cb.name)}
        self.__dict__.update(brought)
        self._brought = list(brought)

    def diagnose(self) -> Verdict:
        """Diagnoses the training that is followed, or was last; see `Learner.diagnose`.

        Raises:
            RuntimeError: If there was none, or nothing was recorded.
        """
        if self.followed is None:
            raise RuntimeError("nothing is recorded yet; train first, with this callback in the trainer")
        return self.followed.diagnose()

    def report(self, path: str | Path | None = None) -> Page:
        """The training that is followed, or was last, as a page; see `Learner.report`.

        Raises:
            RuntimeError: If there was none.
            OSError: If the file cannot be written.
        """
        if self.followed is None:
            raise RuntimeError("nothing is recorded yet; train first, with this callback in the trainer")
        return self.followed.report(path)

    def close(self, error: BaseException | None = None) -> None:
        """Removes all hooks; results stay readable. A second call does nothing.

        Args:
            error: the exception that ended the training, if any; open levels are then cut short.
        """
        if self.followed is not None:
            self.followed.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"followed": None}  # a loop of this process


def all_ranks() -> Any:
    """Group of all processes, in which a trainer trains whatever it does not show; None if there is one."""
    is_one = not (distributed.is_available() and distributed.is_initialized())
    return None if is_one or distributed.get_world_size() == 1 else distributed.group.WORLD


def no_package(package: str, extra: str) -> ModuleNotFoundError:
    """Error for a missing package, which says how to install it."""
    return ModuleNotFoundError(f"this adapter needs {package}: pip install 'hookcb[{extra}]'", name=package)
