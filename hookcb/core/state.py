"""TrainingState: the state of a training, as callbacks see it."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from hookcb.core.alone import ALONE, Ranks
from hookcb.core.fetches import FetchListener, follow_loaders, leave_loaders
from hookcb.core.restore import preserve_modes
from hookcb.core.threads import in_loop_thread, this_thread

PHASE = ("training", "dl", "iter", "n_iter", "row", "phase_state")  # the state of a training or validation
BATCH = ("xb", "yb", "pred", "loss")


class Ordered(Protocol):
    """Attribute by which type checkers know a callback, whose class this file cannot import."""

    @property
    def order(self) -> float: ...  # noqa: D102


C = TypeVar("C", bound=Ordered)


def whole(loader: Any) -> Any:
    """A loader itself, of which a process that trains alone has all samples."""
    return loader


def backward(loss: Tensor) -> None:
    """Runs the backward of a loss, as torch does it."""
    loss.backward()  # type: ignore[no-untyped-call]


class TrainingState:
    """State of a training: model, optimizer, batch and progress; `Loop` adds callbacks to it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._thread = this_thread()  # the thread that runs the loop
        self.opt: Any = None  # like pred, loss and dl: None until there is one
        self.xb: Any = ()
        self.yb: tuple[Any, ...] = ()
        self.pred: Any = None
        self.loss: Tensor = None  # type: ignore[assignment]  # until there is one
        self.dl: Any = None
        self.epoch = self.n_epoch = self.iter = self.train_iter = 0
        self.n_iter: int | None = None
        self.epoch_began = 0
        self._n_train: int | None = None
        self.training = False
        self.scaler: torch.amp.GradScaler | None = None  # scales the loss, and makes the step
        self.accumulating = False  # whether gradients are kept for the next batch, without a step
        # state of each callback, by id, for the phase in progress; a nested phase has its own
        self.phase_state: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        # whether a callback has requested the end of a loop hookcb does not run, or a signal has arrived
        self.stop_requested = False
        self.fit_succeeded = False  # while `after_fit` is called: whether the fit has ended without an error
        self.fit_error: BaseException | None = None  # while `after_fit` is called: what has ended the fit
        self.ended_by = ""  # who has ended the last fit early, where and why; "" if it went to its end
        self.ranks: Ranks = ALONE  # the processes that train the model together, found when a fit begins
        self.own_part: Callable[[Any], Any] = whole  # gives the part of a loader that is for this process
        self.run_backward: Callable[[Tensor], None] = backward  # of the loss, or the scaled loss
        self._depth = 0
        self.row: dict[str, float] = {}  # results of this epoch, by column; any callback may add one
        # what a loop hookcb does not run has reported of its last validation, by name
        self.reported_metrics: dict[str, float | Tensor] = {}

    honors_stop = True  # whether the fit ends if a callback asks for it; the user's own loop may not
    keeps_best: str | None = None  # who keeps the weights of the best validation, "" if nobody does

    # ---- fetches of batches

    between_batches = "other"  # name of the time from `after_batch` to `before_batch`

    def follow_fetches(self, listener: FetchListener) -> None:
        """Notifies `listener` of each fetch of a batch in this thread, until `leave_fetches`."""
        follow_loaders(listener)

    def leave_fetches(self, listener: FetchListener) -> None:
        """Undoes `follow_fetches`; a second call does nothing."""
        leave_loaders(listener)

    # ---- derived state

    @property
    def x(self) -> Any:
        """The input of the batch; all of `xb` if there are several."""
        return self.xb[0] if isinstance(self.xb, tuple) and len(self.xb) == 1 else self.xb

    @property
    def y(self) -> Any:
        """The target of the batch; all of `yb` if there are several."""
        return self.yb[0] if len(self.yb) == 1 else self.yb

    @property
    def loss_node(self) -> Any:
        """The autograd node of the loss, None if it has none; in a watch, only during `after_loss`."""
        return self.loss.grad_fn

    @property
    def pred_grad(self) -> Any:
        """In a watch, the gradient of the model's output during `after_loss`, if that found the loss."""
        return None

    @property
    def is_calling(self) -> bool:
        """Whether the model is being called now, as when a watched batch begins."""
        return False

    @property
    def in_loop_thread(self) -> bool:
        """Whether the calling code runs in the loop's thread or a backward; see `threads.in_loop_thread`."""
        return in_loop_thread(self._thread)

    @property
    def pct_train(self) -> float:
        """Share of the fit's training that is done, 0 to 1; in whole epochs if the loader has no length."""
        of_epoch = (self.train_iter - self.epoch_began) / self._n_train if self._n_train else 0.0
        return min(1.0, (self.epoch + of_epoch) / max(1, self.n_epoch))

    def set_phase(self, training: bool, dl: Any, n_iter: int | None) -> None:
        """Begins training or validation on `dl`, with `n_iter` batches, or None if unknown."""
        self.training, self.dl, self.iter, self.n_iter = training, dl, 0, n_iter
        self.phase_state = defaultdict(dict)
        if training:
            self.epoch_began, self._n_train = self.train_iter, n_iter

    @contextmanager
    def restored(self, batch: bool = True) -> Iterator[None]:
        """Restores the phase, the modes of all modules and, with `batch`, the state of the batch."""
        state = {name: getattr(self, name) for name in (PHASE + BATCH if batch else PHASE)}
        if not self._depth:
            self._thread = this_thread()
        self._depth += 1
        try:
            with preserve_modes(self.model):
                yield
        finally:
            self._depth -= 1
            self.__dict__.update(state)

    @property
    def is_nested(self) -> bool:
        """Whether this is a validation inside a fit's events, or inside those of another validation."""
        return self._depth > 1

    @property
    def fitting(self) -> bool:
        """Whether a fit is running."""
        return False

    @property
    def is_external(self) -> bool:
        """Whether hookcb does not run the loop, and so cannot call its loss function; see `LoopReporter`."""
        return not hasattr(self, "get_loss")

    if TYPE_CHECKING:  # attributes of a Loop that callbacks use through `self.learn`

        def note_signal(self, number: int) -> None: ...  # noqa: D102

        def agree_on_alarm(self, noticed: bool) -> bool: ...  # noqa: D102

        cbs: list[Any]

        def follow_phases(self, follower: Any) -> None: ...  # noqa: D102

        def leave_phases(self, follower: Any) -> None: ...  # noqa: D102

        # only a Learner has these
        dls: Any
        loss_func: Any
        opt_func: Any
        n_inp: int | None
        device: torch.device | None
        predict: Callable[[], Any]
        fit: Callable[..., None]
        coverage: Any  # only a loop hookcb does not run has these
        facts: Any
        board: Any

        def get(self, kind: type[C], name: str | None = None) -> C: ...  # noqa: D102
        def add_cbs(self, cbs: Any) -> Self: ...  # noqa: D102
        def remove_cbs(self, cbs: Any) -> Self: ...  # noqa: D102
        def build_dispatch(self) -> None: ...  # noqa: D102
        def position(self, event: str) -> list[str]: ...  # noqa: D102
        def within(self, level: str, body: Callable[[], object]) -> bool: ...  # noqa: D102
        def step(self) -> None: ...  # noqa: D102
