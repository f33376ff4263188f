"""SamplingCallback: looks at every n-th batch."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from types import CodeType, MethodType
from typing import Any

from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.events import Event


class SamplingCallback(Callback):
    """Looks at training batches 0, every, 2·every … only, as looking takes time.

    Looks at validation batches too if a subclass sets `run_valid = True`, except in a validation in the
    middle of a batch, or outside a fit.

    Args:
        every: distance of the batches; by default it looks at each.
        name, **functions: see `Callback`.

    Attributes:
        is_looking: whether it looks at this batch.
        n_batches: number of batches that it looked at in this fit.
        n_skipped: number of the other batches, including cancelled ones.

    Raises:
        TypeError, ValueError: If `every` is not a whole number of batches, 1 or more.

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
    _is_due = False

    def __init__(
        self, every: int | None = None, *, name: str | None = None, **functions: Callable[[Any], object]
    ) -> None:
        super().__init__(name=name, **functions)
        if every is not None:
            check_count("every", every, "batches", hint=", or None")
        self.every = every

    def handler(self, event: str) -> Callable[[], object] | None:
        """The method or function that acts at `event`, and those that it overrides, even without `super()`.

        Else a subclass that forgets `super().before_fit()` would silently have no hooks.
        """
        kinds = type(self).__mro__[: type(self).__mro__.index(Callback)]
        functions = [vars(kind)[event] for kind in kinds if event in vars(kind)]
        if event in self.__dict__:  # given as an argument
            functions.insert(0, self.__dict__[event].__func__)
        parts = functions[:1] + [f for over, f in pairwise(functions) if not _names(over, event)]
        if len(parts) < 2:
            return super().handler(event)
        return MethodType(_one_after_the_other(tuple(parts), event == Event.AFTER_FIT), self)

    def before_fit(self) -> None:
        self.n_batches = self.n_skipped = 0

    def before_batch(self) -> None:
        learn = self.learn
        if learn.training:
            self._begin_batch(learn.train_iter)
        elif not self.outside_main_phase:
            self._begin_batch(learn.iter)

    def _begin_batch(self, i: int) -> None:
        self.is_looking = self._is_due = bool(self.wants(i))
        self.n_skipped += not self._is_due

    def wants(self, i: int) -> bool:
        """Whether to look at batch `i`, counted from 0; called once per batch."""
        return self.every is None or i % self.every == 0

    def after_cancel_batch(self) -> None:
        self.is_looking = self.is_looking and self.outside_main_phase

    def after_batch(self) -> None:
        if self._is_due and not self.outside_main_phase:
            self.n_batches += self.is_looking
            self.n_skipped += not self.is_looking  # it was cancelled

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches, "n_skipped": self.n_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_batches, self.n_skipped = state["n_batches"], state["n_skipped"]

    @property
    def outside_main_phase(self) -> bool:
        """Whether this is a validation in the middle of a batch, or outside a fit."""
        learn = self.learn
        return not learn.training and (learn.is_nested or not learn.fitting)


def _names(function: Any, attribute: str) -> bool:
    """Whether the code of `function` contains an attribute's name, as it does if it calls `super()`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    # anything but a plain function is trusted to call what it overrides
    return code is None or _in_code(code, attribute)


def _in_code(code: CodeType, name: str) -> bool:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return name in code.co_names or any(_in_code(part, name) for part in inner)


@cache  # returns the same function each time, as the loop compares handlers
def _one_after_the_other(parts: tuple[Callable[[Any], object], ...], is_end: bool) -> Callable[[Any], None]:
    """A method that calls `parts`, last first; at the end of a fit first first, even if one fails."""

    def in_turn(cb: Any) -> None:
        if not is_end:
            for part in reversed(parts):
                part(cb)
            return
        with ExitStack() as stack:
            for part in reversed(parts):
                stack.callback(part, cb)

    return in_turn
