"""Attached: base of the adapters, callbacks that follow a training of another library's trainer."""

from collections.abc import Callable
from typing import Any, Self

from torch import nn

from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks
from hookcb.core.loop import Loop
from hookcb.diagnosis.verdict import Verdict
from hookcb.loops.external import ExternalLoop
from hookcb.loops.watch import flat


class Attached:
    """Callbacks in a trainer; they become attributes, so that their readings are at hand.

    Args:
        *more: callbacks, one by one or in lists, as instances, or as classes that need no arguments.
        cbs: callbacks too, as a `Learner` takes them.

    Attributes:
        cbs: the callbacks.
        followed: the training they follow, or followed last; None before the first.

    Raises:
        TypeError, ValueError: If one is not a callback, or its name is taken.
    """

    def __init__(self, *more: Callbacks, cbs: Callbacks = ()) -> None:
        super().__init__()
        checked = Loop(nn.Module(), flat(*more, cbs))
        self.cbs = list(checked.cbs)
        checked.remove_cbs(self.cbs)
        self.followed: ExternalLoop | None = None
        self._brought: list[str] = []  # names of callbacks that are there for one training
        for cb in self.cbs:
            if hasattr(self, cb.name):
                raise ValueError(
                    f"{cb!r} would overwrite {type(self).__name__}.{cb.name}; give it a name of its own: "
                    f"{type(cb).__name__}(…, name='my_{cb.name}')"
                )
            setattr(self, cb.name, cb)

    @property
    def coverage(self) -> Any:
        """What could be seen of the training, and what not, with the reason; None before the first."""
        return None if self.followed is None else self.followed.coverage

    @property
    def stop_requested(self) -> bool:
        """Whether a callback has asked to end the training, which the trainer is then told."""
        return self.followed is not None and self.followed.stop_requested

    @property
    def running(self) -> Any:
        """The training that is followed now, or None."""
        return self.followed if self.followed is not None and self.followed.fitting else None

    def follow(self, make: Callable[[list[Callback]], ExternalLoop]) -> None:
        """Has the callbacks follow what `make` gives of them; what they followed before has ended."""
        self.close()
        for cb in self.cbs:
            if "learn" in cb.__dict__ and not cb.learn.fitting:
                cb.learn.remove_cbs([cb])  # of the training before
        self.followed = make(self.cbs)
        self._show_brought(self.followed.cbs)

    def _show_brought(self, cbs: list[Callback]) -> None:
        """Callbacks that others have brought become attributes too; those of the training before make way."""
        for name in self._brought:
            delattr(self, name)
        brought = {cb.name: cb for cb in cbs if not hasattr(self, cb.name)}
        self.__dict__.update(brought)
        self._brought = list(brought)

    def diagnose(self) -> Verdict:
        """What is wrong with the training that is followed, or was last; see `Learner.diagnose`.

        Raises:
            RuntimeError: if there was none, or nothing was recorded.
        """
        if self.followed is None:
            raise RuntimeError("nothing is recorded yet; train first, with this callback in the trainer")
        return self.followed.diagnose()

    def close(self, error: BaseException | None = None) -> None:
        """Takes all hooks off; readings stay. A second time does nothing.

        Args:
            error: what has ended the training; then what is open is cut short.
        """
        if self.followed is not None:
            self.followed.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"followed": None}  # a loop in this process


def no_package(package: str, extra: str) -> ModuleNotFoundError:
    """The error that says how to install what an adapter needs."""
    return ModuleNotFoundError(f"this adapter needs {package}: pip install 'hookcb[{extra}]'", name=package)
