"""Attributes an error in hookcb's measurements to hookcb, the user's code, or the device."""

import traceback
from pathlib import Path
from typing import Any

import torch

from hookcb.core.whose import is_of_program

DEVICE_ERRORS = tuple(
    kind for name in ("OutOfMemoryError", "AcceleratorError") if (kind := getattr(torch, name, None))
)


def describe_failure(part: str, error: Exception) -> str:
    """Message for an error in a part of hookcb that only measures; asks for a report only if it is our bug.

    Args:
        part: the part that failed, "a part of Diagnose".
        error: the error as caught in that part; frames further out do not count.
    """
    frames = traceback.extract_tb(error.__traceback__)
    try:
        shown = f"{error!r:.200}"
    except Exception:  # of a class of the user
        shown = type(error).__name__
    if isinstance(error, DEVICE_ERRORS):
        return f"{part} was ended by the device: {shown}"
    user_frames = [frame for frame in frames if is_of_program(frame.filename)]
    if user_frames:
        return f"{part} was ended by {shown}, which was raised in {_place(user_frames[-1])}"
    return f"{part} failed, please report it: {shown}{f' in {_place(frames[-1])}' if frames else ''}"


def _place(frame: traceback.FrameSummary) -> str:
    line = "" if frame.lineno is None else f":{frame.lineno}"
    return f"{frame.name}, {Path(frame.filename).name}{line}"


def is_failure(error: BaseException | None) -> bool:
    """Whether an error has ended a training, and not the user, or `sys.exit(main())`."""
    is_end = isinstance(error, SystemExit) and not error.code
    return error is not None and not is_end and not isinstance(error, KeyboardInterrupt)


def note_end(run: Any, error: BaseException) -> None:
    """Notes the error that has ended a training."""
    ranks = run.loop.ranks
    if failure := ranks.find_failure():
        run.note(f"the training was ended, as {failure[:100]}")
    else:
        run.note(f"the training was ended by {type(error).__name__}: {str(error)[:80]}")
    if ranks.world > 1:
        run.note(f"only what rank {ranks.rank} has seen, as they did not end together")
