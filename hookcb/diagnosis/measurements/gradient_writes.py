"""GradientWrites: whether a program clears gradients before a backward, or writes to them before the step."""

from collections.abc import Mapping
from weakref import ref

from torch import Tensor

from hookcb.core.torch_private import version_of

EACH = 4  # steps


class GradientWrites:
    """Follows the gradient of one parameter, each in turn, in every fourth step, without reading it.

    A gradient that is the same tensor with as many writes as before was not written to. One that is cleared
    is gone, or was written to.

    Args:
        params: parameters by name.

    Attributes:
        are_cleared: whether the gradients of the last step that was followed were gone or written to when the
            next backward began.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = [(name, ref(p)) for name, p in params.items()]
        self.are_cleared = True
        self._after_step: tuple[int, tuple[int, int]] | None = (
            None  # number of the parameter, and its gradient
        )
        self._after_backward: tuple[int, tuple[int, int]] | None = None

    def _of(self, number: int) -> tuple[int, int] | None:
        """Identity of the gradient of a parameter, and the number of writes to it."""
        p = self._params[number][1]()
        grad = None if p is None else p.grad
        return None if grad is None or grad.is_inference() else (id(grad), version_of(grad))

    def _next(self, step: int) -> tuple[int, tuple[int, int]] | None:
        if step % EACH or not self._params:
            return None
        number = step // EACH % len(self._params)
        return None if (known := self._of(number)) is None else (number, known)

    def end_step(self, step: int) -> None:
        """Notes a gradient after a step."""
        self._after_step = self._next(step)

    def begin_backward(self) -> None:
        """Compares it with that before the first backward of the next step."""
        if self._after_step is not None:
            (number, known), self._after_step = self._after_step, None
            self.are_cleared = self._of(number) != known

    def end_backward(self, step: int) -> None:
        """Notes a gradient after a backward."""
        self._after_backward = self._next(step)

    def begin_step(self) -> tuple[str, bool] | None:
        """Name of that parameter, and whether its gradient was written to since; None in other steps."""
        if self._after_backward is None:
            return None
        (number, known), self._after_backward = self._after_backward, None
        return self._params[number][0], self._of(number) != known
