"""The state of a training, as callbacks see it."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from hookcb.core.fetches import FetchListener, follow_loaders, leave_loaders
from hookcb.core.restore import preserve_modes
from hookcb.core.threads import in_loop_thread

PHASE = ("training", "dl", "iter", "n_iter", "row", "phase_state")  # the state of a training or validation
BATCH = ("xb", "yb", "pred", "loss")

C = TypeVar("C")


class TrainingState:
    """What is trained, on what, and how far it has come; `Loop` adds callbacks to it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._thread = threading.get_ident()  # runs the loop
        self.opt: Any = None  # like pred, loss and dl: None until there is one
        self.xb: Any = ()
        self.yb: tuple[Any, ...] = ()
        self.pred: Any = None
        self.loss: Any = None
        self.dl: Any = None
        self.epoch = self.n_epoch = self.iter = self.train_iter = 0
        self.n_iter: int | None = None
        self.epoch_began = 0
        self._n_train: int | None = None
        self.training = False
        self.scaler: torch.amp.GradScaler | None = None  # scales the loss, and makes the step in its way
        self.accumulating = False  # whether gradients wait for those of the next batch, and no step is made
        # what each callback, by id, keeps for the phase in progress; a phase inside it starts with none
        self.phase_state: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        # whether a callback has requested the end of a loop hookcb does not run, or a signal has arrived
        self.stop_requested = False
        self._depth = 0
        self.row: dict[str, float] = {}  # what this epoch came to, by column; any callback may add one

    # ---- what it waits for

    between_batches = "other"  # the phase of a step from `after_batch` to `before_batch`, as far as is known

    def follow_fetches(self, listener: FetchListener) -> None:
        """Tells `listener` of each fetch of a batch in this thread, until `leave_fetches`."""
        follow_loaders(listener)

    def leave_fetches(self, listener: FetchListener) -> None:
        """Ends what `follow_fetches` began; a second time does nothing."""
        leave_loaders(listener)

    # ---- state that follows from other state

    @property
    def x(self) -> Any:
        """The input of the batch; where there are several, all of `xb`."""
        return self.xb[0] if isinstance(self.xb, tuple) and len(self.xb) == 1 else self.xb

    @property
    def y(self) -> Any:
        """The target of the batch; where there are several, all of `yb`."""
        return self.yb[0] if len(self.yb) == 1 else self.yb

    @property
    def loss_node(self) -> Any:
        """The autograd node of the loss, None if it has none; under a watch at `after_loss` only."""
        return self.loss.grad_fn

    @property
    def is_calling(self) -> bool:
        """Whether the model is being called already when its batch begins."""
        return False

    @property
    def in_loop_thread(self) -> bool:
        """Whether the calling code runs in the loop's thread or a backward; see `threads.in_loop_thread`."""
        return in_loop_thread(self._thread)

    @property
    def pct_train(self) -> float:
        """Share of the fit's training that is done, 0..1; by whole epochs where the loader has no length."""
        of_epoch = (self.train_iter - self.epoch_began) / self._n_train if self._n_train else 0.0
        return min(1.0, (self.epoch + of_epoch) / max(1, self.n_epoch))

    def set_phase(self, training: bool, dl: Any, n_iter: int | None) -> None:
        """Begins training or validation on `dl`, which gives `n_iter` batches, None where that is unknown."""
        self.training, self.dl, self.iter, self.n_iter = training, dl, 0, n_iter
        self.phase_state = defaultdict(dict)
        if training:
            self.epoch_began, self._n_train = self.train_iter, n_iter

    @contextmanager
    def restored(self, batch: bool = True) -> Iterator[None]:
        """Puts back afterwards the phase, the modes of all modules and, with `batch`, what is of a batch."""
        state = {name: getattr(self, name) for name in (PHASE + BATCH if batch else PHASE)}
        if not self._depth:
            self._thread = threading.get_ident()
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

    if TYPE_CHECKING:  # what callbacks use of `self.learn`, which is a Loop
        cbs: list[Any]
        # of a Learner only
        dls: Any
        loss_func: Any
        opt_func: Any
        n_inp: int | None
        device: torch.device | None
        predict: Callable[[], Any]
        fit: Callable[..., None]
        coverage: Any  # of a loop hookcb does not run

        def get(self, kind: type[C], name: str | None = None) -> C: ...  # noqa: D102
        def add_cbs(self, cbs: Any) -> Self: ...  # noqa: D102
        def remove_cbs(self, cbs: Any) -> Self: ...  # noqa: D102
        def build_dispatch(self) -> None: ...  # noqa: D102
        def position(self, event: str) -> list[str]: ...  # noqa: D102
        def within(self, level: str, body: Callable[[], object]) -> bool: ...  # noqa: D102
        def step(self) -> None: ...  # noqa: D102
