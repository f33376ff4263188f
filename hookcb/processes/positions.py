"""Positions: where the code of each rank is, from the frames of the thread that trains."""

import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hookcb.core.text import as_layer
from hookcb.core.torch_private import CALL_NAME, RUN_BACKWARD
from hookcb.core.whose import OURS, TORCH, is_of_program, is_of_user, line_in
from hookcb.processes.groups import name_ranks

MAX_GROUPS = 4  # groups of ranks that a sentence names
MAX_CODE = 60  # characters of a line of code

# what code of torch does, by its file and the begin of its function's name; the first that is found counts
DOING = {
    "in the backward": ("autograd/graph.py", RUN_BACKWARD),
    "in the forward": ("nn/modules/module.py", CALL_NAME),
    "in the loader": ("utils/data/dataloader.py", "__next__"),
    "in the optimizer's step": ("optim/optimizer.py", "wrapper"),
}
LOADING = "in the loader"
IN_VAIN = "has waited in vain"  # how a training ends whose collective has failed
FAILED = "raised "
BY_SIGNAL = "was ended by SIGTERM"  # and one that torchrun ends, as another rank has failed
REPLICAS = TORCH + os.path.join("nn", "parallel", "distributed.py")
COLLECTIVES = TORCH + os.path.join("distributed", "distributed_c10d.py")
# what may take long while nothing is wrong, by parts of the files whose code does it
EXCUSES = {
    "it compiles": (
        "/torch/_dynamo/convert_frame.py",
        "/torch/_inductor/compile_fx.py",
        "/torch/_inductor/graph.py",
        "/torch/_inductor/codecache.py",
        "/torch/_inductor/async_compile.py",
        "/torch/_inductor/runtime/triton_heuristics.py",
        "/torch/utils/cpp_extension.py",
        "/triton/compiler/",
    ),
    "it reads or writes a checkpoint": (
        "/torch/serialization.py",
        "/torch/distributed/checkpoint/",
        "/safetensors/",
        f"{OURS}training/checkpoint/".replace(os.sep, "/"),
    ),
    "it is being debugged": ("/bdb.py", "/pdb.py", "/pydevd/", "/debugpy/"),
}
PLURAL = {"is": "are", "was": "were", "has": "have", "waits": "wait"}
VALIDATES, ASKS = "it validates", "it waits for an input"


class Call(NamedTuple):
    """A call in progress: file and name of its function."""

    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a rank in its training.

    Attributes:
        rank, host: number of the rank, and name of its machine.
        batch: number of the training batch that it began last.
        place, code: line of the innermost code of the user, "train.py:31", and what is written there; "" as
            long as the rank moves.
        call: the function of torch.distributed that is called there, "all_reduce", "" if none is.
        doing: stage of the training, "in the backward", "" if unknown.
        module: name of the module whose forward is in progress, "" if none is.
        excuse: why it may take long, "it compiles"; "" if nothing is known.
        end: how its training has ended, "raised ValueError: …"; "" if it has not.
    """

    rank: int = 0
    host: str = ""
    batch: int = 0
    place: str = ""
    code: str = ""
    call: str = ""
    doing: str = ""
    module: str = ""
    excuse: str = ""
    end: str = ""

    @property
    def waits(self) -> bool:
        """Whether it may be waiting for other ranks."""
        return bool(self.call) or self.doing == "in the backward" or self.end == IN_VAIN

    def __str__(self) -> str:
        where = f"{self.place}, `{self.code}`" if self.code else self.place
        after = "after 1 batch" if self.batch == 1 else f"after {self.batch} batches"
        doing = f"{self.doing} of batch {self.batch}" if self.doing else after
        doing += f", in {as_layer(self.module)}" if self.module else ""
        doing += f" ({self.excuse})" if self.excuse else ""
        if self.end:
            inside = f" in {self.call}" if self.call else ""
            return f"{self.end}{inside}{f' at {where}' if where else ''}, {doing}"
        if not self.place:
            return f"was last seen {doing}"
        is_in = f"waits in {self.call} at" if self.call else "waits at" if self.waits else "is at"
        return f"{is_in} {where}, {doing}"


def doing_of(calls: Iterable[Call]) -> str:
    """Stage of the training in which these calls are in progress, "" if unknown."""
    there = set(calls)
    stages = {doing: Call(TORCH + file.replace("/", os.sep), name) for doing, (file, name) in DOING.items()}
    return next((doing for doing, call in stages.items() if call in there), "")


def collective_in(calls: Iterable[Call]) -> str:
    """The function of torch.distributed that the user's code has called, from calls inside it; "" if none."""
    calls = list(calls)
    if calls and calls[0].file == REPLICAS:  # whose collectives are not in Python
        return "DistributedDataParallel"
    if calls and calls[0].file.startswith(OURS) and calls[0].file.endswith(os.sep + "exchange.py"):
        return "a collective of hookcb"
    called = [name for file, name in calls if file == COLLECTIVES and not name.startswith("_")]
    return called[-1] if called else ""


def excuse_of(calls: Sequence[Call], line: str = "") -> str:
    """Why calls in progress, the innermost first, may take long; "" if nothing is known.

    Args:
        calls: the calls.
        line: the innermost line in progress, if it uses the built-in function `input`.
    """
    files = [file.replace(os.sep, "/") for file, _ in calls]
    for excuse, parts in EXCUSES.items():
        if any(part in file for file in files for part in parts):
            return excuse
    return ASKS if "input(" in line else ""


def position_in(frames: Sequence[FrameType], names: Mapping[int, str]) -> Position:
    """Position of code in progress, whose frames are given, the innermost first.

    Args:
        frames: its frames.
        names: names of the modules of the model, by their ids.
    """
    calls = [Call(x.f_code.co_filename, x.f_code.co_name) for x in frames]
    owners = [i for i, call in enumerate(calls) if is_of_user(call.file)]
    owners = owners or [i for i, call in enumerate(calls) if is_of_program(call.file)]
    asks = frames and "input" in frames[0].f_code.co_names
    last_line = _code_at(frames[0]) if asks else ""
    if not owners:
        return Position(doing=doing_of(calls), excuse=excuse_of(calls, last_line))
    user = owners[0]
    return Position(
        place=f"{_shown(calls[user].file)}:{line_in(frames[user])}",
        code=_shortened(_code_at(frames[user])),
        call=collective_in(calls[:user]),
        doing=doing_of(calls),
        module=_module_in(frames, names),
        excuse=excuse_of(calls, last_line),
    )


def describe(positions: Iterable[Position], asked: Iterable[int]) -> str:
    """A sentence on where ranks are.

    First are those that have failed by themselves, then those that wait for nobody, then those that wait; the
    last are those that a signal has ended, as torchrun ends the others so. Fewer come before more.

    Args:
        positions: what is known.
        asked: numbers of the ranks that it is about.
    """
    alike: dict[tuple[str, ...], list[Position]] = {}
    for x in sorted(positions, key=lambda x: x.rank):
        alike.setdefault((x.end, x.place, x.call, x.doing, x.module, x.excuse), []).append(x)
    groups = sorted(alike.values(), key=lambda group: (_urgency(group[0]), len(group), group[0].rank))
    hosts = {x.host for group in groups for x in group}
    told = [_told(group, hosts) for group in groups[:MAX_GROUPS]]
    known = {x.rank for group in groups for x in group}
    if unknown := [rank for rank in asked if rank not in known]:
        told.insert(0, f"nothing is known of {name_ranks(unknown)}")
    if len(groups) > MAX_GROUPS:
        others = sum(map(len, groups[MAX_GROUPS:]))
        told.append(f"{others} other ranks are at {len(groups) - MAX_GROUPS} other places")
    return "; ".join(told)


def _urgency(x: Position) -> int:
    """Place of a rank in a sentence: 0 for what may have stopped the others."""
    return 0 if x.end.startswith(FAILED) else 3 if x.end == BY_SIGNAL else 2 if x.waits else 1


def _told(group: Sequence[Position], hosts: set[str]) -> str:
    """A sentence on ranks that are at the same place, with their machines if there are several."""
    on = sorted({x.host for x in group}) if len(hosts) > 1 else []
    machines = f" ({', '.join(on[:3])}{' …' if len(on) > 3 else ''})" if on else ""
    verb, _, rest = str(group[0]).partition(" ")
    verb = PLURAL.get(verb, verb) if len(group) > 1 else verb
    return f"{name_ranks([x.rank for x in group])}{machines} {verb} {rest}"


def _module_in(frames: Sequence[FrameType], names: Mapping[int, str]) -> str:
    """Name of the innermost module of the model whose forward is in progress."""
    file, function = DOING["in the forward"]
    call = Call(TORCH + file.replace("/", os.sep), function)
    of_calls = [x for x in frames if (x.f_code.co_filename, x.f_code.co_name) == call]
    return next((name for x in of_calls if (name := names.get(id(x.f_locals.get("self"))))), "")


def _code_at(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, line_in(frame)).strip()


def _shown(file: str) -> str:
    """A file as the user knows it: from the working directory, if it is inside."""
    try:
        return str(Path(file).relative_to(os.getcwd()))
    except (ValueError, FileNotFoundError):  # it is elsewhere, or that directory was deleted
        return file


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CODE else f"{text[: MAX_CODE - 1]}…"
