"""Origins: in which operation each NaN and infinity was made, followed from tensor to tensor."""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

from torch import Tensor

from hookcb.core.batch import parts
from hookcb.core.torch_private import RUN_BACKWARD, DispatchMode, operator_schema, running_node, storage_id
from hookcb.nans.nonfinite import Kinds, kinds, tensors_in
from hookcb.nans.tracer import line_of, user_line

# operations that write to a tensor without reading it
OVERWRITING = (
    "copy_",
    "fill_",
    "zero_",
    "set_",
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
)

How = Literal["made", "given", "came"]


@dataclass(frozen=True, slots=True)
class Made:
    """Operation in which NaN or infinity appeared.

    Attributes:
        number: number of the operation, in the order in which they ran.
        op: name of the operation, `log`; in a backward, of the node of the graph, `SqrtBackward0`.
        line: `file:line` of the user's code that ran it, or that made the node; "" if unknown.
        made: kinds of numbers that it made.
        how: "made" from finite numbers, "given" as an argument, such as the value of a mask, or "came" in a
            tensor that no operation has made, such as one of NumPy or of another process.
        in_backward: whether it ran in a backward.
        then: the operation that made NaN of its -inf, None if there is none.
    """

    number: int
    op: str
    line: str
    made: Kinds
    how: How = "made"
    in_backward: bool = False
    then: "Made | None" = None

    @property
    def to_blame(self) -> "Made":
        """This one, or the operation that made NaN of a mask."""
        return self if self.how == "made" or self.then is None else self.then


class Origins(DispatchMode):
    """Follows the operations of this thread while it is entered; each waits for the device.

    Lines of nodes of a backward are known if anomaly mode was on in the forward.

    Attributes:
        failure: the first error in it, which is not raised into the program.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.failure: Exception | None = None
        self._of: dict[int, Made] = {}  # by storage
        self._n, self._process = 0, os.getpid()

    def origin(self, tensors: Iterable[Tensor]) -> Made | None:
        """The earliest origin of the NaN and infinities in these tensors; None if it is unknown."""
        found = [made for x in _values(tensors) if not kinds(x).clean and (made := self._known(x))]
        return min(found, key=lambda made: made.number, default=None)

    def _known(self, x: Tensor) -> Made | None:
        return self._of.get(storage_id(x.untyped_storage()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._process or self.failure is not None:
            return func(*args, **kwargs)
        name = operator_schema(func).name.partition("::")[2]
        written, given = _written(func, args, kwargs), None
        try:
            if written:
                unread = {id(x) for x in written} if _overwrites(name, kwargs) else set()
                read = [x for _, x in parts((args, kwargs)) if id(x) not in unread]
                given = self._given(read)
        except Exception as error:
            self.failure = error
        output = func(*args, **kwargs)
        try:
            if not name.startswith(("empty", "new_empty")):
                self._note(name, (output, written), (args, kwargs), given, is_known=bool(written))
        except Exception as error:
            self.failure = error
        return output

    def _given(self, item: Any) -> tuple[Kinds, Made | None] | None:
        """Kinds of numbers in the inputs of an operation and their origin; None if all are finite."""
        bad = [x for x in _values(item) if not kinds(x).clean]
        return (kinds(bad), next(filter(None, map(self._known, bad)), None)) if bad else None

    def _note(self, name: str, output: Any, item: Any, given: Any, is_known: bool) -> None:
        values = list(_values(output))
        bad = []
        for x in values:
            if not kinds(x).clean:
                bad.append(x)
            elif x.numel() * x.element_size() >= x.untyped_storage().nbytes():
                self._of.pop(storage_id(x.untyped_storage()), None)
        if not bad:
            return
        self._n += 1
        made = self._made(name, kinds(bad), given if is_known else self._given(item), item)
        for x in bad:
            self._of[storage_id(x.untyped_storage())] = made

    def _made(self, name: str, made: Kinds, given: tuple[Kinds, Made | None] | None, item: Any) -> Made:
        if given is None:
            is_given = any(isinstance(x, float) and not math.isfinite(x) for _, x in parts(item))
            return self._here(name, made, "given" if is_given else "made")
        before, origin = given
        if origin is None:  # made before, as a mask, or elsewhere
            return self._here(name, made, "came" if before.bad or not made.bad else "made")
        if made.bad and not origin.made.bad and origin.then is None:
            return replace(origin, then=self._here(name, made, "made"))
        return origin

    def _here(self, name: str, made: Kinds, how: How) -> Made:
        node, line = running_node(), user_line(_is_engine)
        if node is None or line:  # in a hook or a function of the user, if there is a node
            return Made(self._n, name, line, made, how, node is not None)
        return Made(self._n, node.name(), line_of(node), made, how, in_backward=True)


def _values(item: Any) -> Iterator[Tensor]:
    return (x for _, x in tensors_in(list(item) if isinstance(item, Iterator) else item))


def _overwrites(name: str, kwargs: dict[str, Any]) -> bool:
    return name in OVERWRITING or name.startswith("_foreach_copy") or "out" in kwargs


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments that an operation writes to."""
    schema = operator_schema(func)
    if not schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name) if i >= len(args) else args[i])
    return [x for _, x in parts(found) if isinstance(x, Tensor)]


def _is_engine(frame: FrameType) -> bool:
    return frame.f_code.co_name == RUN_BACKWARD
