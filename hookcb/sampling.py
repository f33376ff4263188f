"""SamplingCallback: looks at every n-th batch."""

from collections.abc import Callable
from typing import Any

from hookcb.callback import Callback


class SamplingCallback(Callback):
    """Looks at training batches 0, every, 2·every …, for what costs time in each batch it looks at.

    A validation is looked at where a subclass sets `run_valid = True`; never one in the middle of a batch, or
    outside a fit.

    Args:
        every: by default each batch.
        name, **functions: see `Callback`.

    Attributes:
        is_looking: whether this batch is looked at.
        n_batches: number of batches looked at in this fit.
        n_skipped: number of the others, cancelled ones among them.

    Raises:
        ValueError: where `every` is no whole number of batches, 1 or more.

    >>> from hookcb import SamplingCallback, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=SamplingCallback(every=4))
    >>> learn.sampling.n_batches, learn.sampling.n_skipped
    (3, 7)
    """

    run_valid = False
    is_looking = False
    n_batches = n_skipped = 0

    def __init__(
        self, every: int | None = None, *, name: str | None = None, **functions: Callable[[Any], object]
    ) -> None:
        super().__init__(name=name, **functions)
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every is {every!r}; give a whole number of batches, 1 or more, or None")
        self.every = every

    def before_fit(self) -> None:
        self.n_batches = self.n_skipped = 0

    def before_batch(self) -> None:
        if not self.is_aside:
            i = self.train_iter if self.training else self.iter
            self.is_looking = self.wants(i)

    def wants(self, i: int) -> bool:
        """Whether batch `i`, counted from 0, is looked at; called once a batch."""
        return self.every is None or i % self.every == 0

    def after_cancel_batch(self) -> None:
        self.is_looking = self.is_looking and self.is_aside

    def after_batch(self) -> None:
        if not self.is_aside:
            self.n_batches += self.is_looking
            self.n_skipped += not self.is_looking

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches, "n_skipped": self.n_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_batches, self.n_skipped = state["n_batches"], state["n_skipped"]

    @property
    def is_aside(self) -> bool:
        """Whether this is a validation in the middle of a batch, or outside a fit."""
        return not self.training and (self.learn.is_nested or not self.learn.fitting)
