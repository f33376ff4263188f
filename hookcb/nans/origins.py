"""Origins: in which operation each NaN and infinity was made, followed from tensor to tensor."""

import linecache
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import Node

from hookcb.core.batch import parts
from hookcb.core.torch_private import RUN_BACKWARD, DispatchMode, operator_schema, running_node, storage_id
from hookcb.core.whose import is_of_program, line_in
from hookcb.nans.nonfinite import FINITE, Kinds, kinds, tensors_in

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
FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')  # a line of traceback.format_stack

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
        call: the innermost call of a module in which it ran, as told to `Origins`.
        given: kinds of numbers that it made them of, if nothing is known of their origin.
        then: the operation that made NaN of its -inf, None if there is none.
    """

    number: int
    op: str
    line: str
    made: Kinds
    how: How = "made"
    in_backward: bool = False
    call: Any = None
    given: Kinds = FINITE
    then: "Made | None" = None

    @property
    def to_blame(self) -> "Made":
        """This one, or the operation that made NaN of a mask."""
        return self if self.how == "made" or self.then is None else self.then


class Origins(DispatchMode):
    """Follows the operations of this thread while it is entered; each waits for the device.

    Lines of nodes of a backward are known if anomaly mode was on in the forward.

    Args:
        calls: running calls of modules, the innermost last.

    Attributes:
        is_on: whether it follows operations.
        failure: the first error in it, which is not raised into the program; no origin is known after it.
    """

    def __init__(self, calls: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.is_on, self._calls = True, calls
        self.failure: Exception | None = None
        self._of: dict[int, Made] = {}  # by storage
        self._n, self._process = 0, os.getpid()

    def origin(self, tensors: Iterable[Tensor]) -> Made | None:
        """The earliest origin of the NaN and infinities in these tensors; None if it is unknown."""
        if self.failure is not None:  # memory that was used again is not known to be
            return None
        found = [made for x in _values(tensors) if not kinds(x).clean and (made := self._known(x))]
        return min(found, key=lambda made: made.number, default=None)

    def _known(self, x: Tensor) -> Made | None:
        return self._of.get(storage_id(x.untyped_storage()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on or os.getpid() != self._process or self.failure is not None:
            return func(*args, **kwargs)
        space, _, name = operator_schema(func).name.partition("::")
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
                is_sent = space == "_c10d_functional" and name != "wait_tensor"
                given = given or self._sent((args, kwargs)) if is_sent else given
                self._note(name, (output, written), (args, kwargs), given, bool(written), is_sent)
        except Exception as error:
            self.failure = error
        return output

    def _given(self, item: Any) -> tuple[Kinds, Made | None] | None:
        """Kinds of numbers in the inputs of an operation and their origin; None if all are finite."""
        bad = [x for x in _values(item) if not kinds(x).clean]
        return (kinds(bad), next(filter(None, map(self._known, bad)), None)) if bad else None

    def _sent(self, item: Any) -> tuple[Kinds, Made | None] | None:
        """`_given` of a collective; of a result that is not there yet only the origin may be known."""
        origin = next(filter(None, map(self._known, _values(item))), None)
        return self._given(item) or (None if origin is None else (FINITE, origin))

    def _note(self, name: str, output: Any, item: Any, given: Any, is_known: bool, is_sent: bool) -> None:
        bad = []
        for x in _values(output):
            if given is not None if is_sent else not kinds(x).clean:  # what is sent to us is not there yet
                bad.append(x)
            elif x.numel() * x.element_size() >= x.untyped_storage().nbytes():
                self._of.pop(storage_id(x.untyped_storage()), None)
        if not bad:
            return
        self._n += 1
        made = self._made(name, kinds(bad), given if is_known or is_sent else self._given(item), item)
        for x in bad:
            self._of[storage_id(x.untyped_storage())] = made

    def _made(self, name: str, made: Kinds, given: tuple[Kinds, Made | None] | None, item: Any) -> Made:
        if given is None:
            is_given = any(isinstance(x, float) and not math.isfinite(x) for _, x in parts(item))
            return self._here(name, made, "given" if is_given else "made")
        before, origin = given
        if origin is None:  # made before, as a mask, or elsewhere
            how: How = "came" if before.bad or not made.bad else "made"
            return replace(self._here(name, made, how), given=before)
        if made.bad and not origin.made.bad and origin.then is None:
            return replace(origin, then=self._here(name, made, "made"))
        return origin

    def _here(self, name: str, made: Kinds, how: How) -> Made:
        node, line = running_node(), user_line()
        if node is None or line:  # in a hook or a function of the user, if there is a node
            call = self._calls[-1] if self._calls else None
            return Made(self._n, name, line, made, how, node is not None, call)
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


# ---- lines of the user's code


def run_forward(learn: Any) -> None:
    """The learner's forward and loss; the search for lines of the user's code ends at this frame."""
    learn.pred = learn.predict()
    learn.loss = learn.get_loss()


def user_line() -> str:
    """`file:line` of the innermost frame of the user's code inside a replay or a backward; "" if none is."""
    frame: FrameType | None = sys._getframe(1)
    while (
        frame is not None
        and frame.f_code is not run_forward.__code__
        and frame.f_code.co_name != RUN_BACKWARD
    ):
        if is_of_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line_in(frame)}"
        frame = frame.f_back
    return ""


def _is_outermost(code: CodeType) -> bool:
    return code is run_forward.__code__ or code.co_name == RUN_BACKWARD


def line_of(node: Node) -> str:
    """`file:line` of the user's code that made a node of the graph, as recorded by anomaly mode."""
    metadata: Any = node.metadata  # a property, despite its type
    for frame in reversed(metadata.get("traceback_", [])):
        found = FRAME.search(frame)
        if found is None or (found[3] == run_forward.__name__ and found[1] == __file__):
            break
        if is_of_program(found[1]):
            return f"{found[1]}:{found[2]}"
    return ""


def shown_line(line: str) -> tuple[str, str]:
    """A line for display, relative to the working directory if inside it, and its text."""
    file, _, number = line.rpartition(":")
    if not file:
        return "", ""
    path, here = Path(file), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shown}:{number}", linecache.getline(file, int(number)).strip()
