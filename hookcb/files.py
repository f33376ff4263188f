"""Files that are there whole or not at all."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch

# types beside tensors, lists, tuples and dicts that torch.load(weights_only=True) reads
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def save_whole(state: Any, file: str | Path) -> Path:
    """Writes `state` with `torch.save`; until it is on the disk whole, a file that is there stays as it is.

    Returns:
        The path written; its folder is made where it is missing.
    """
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())  # else after a power failure the name may be there and the content not
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def _sync_folder(folder: Path) -> None:
    """Has the new name on the disk too."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def read_saved(file: str | Path, device: torch.device) -> Any:
    """Reads what `save_whole` has written, its tensors to `device`; no code in it is run.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is truncated, or something else; the message names the file.
    """
    # the warnings are of a foreign file, of which the error below says enough
    with Path(file).open("rb") as opened, warnings.catch_warnings(action="ignore"):
        try:
            return torch.load(opened, map_location=device, weights_only=True)
        except Exception as error:  # torch's unpickler raises anything
            raise ValueError(f"{file} cannot be read; it is truncated, or no file of weights") from error


def load_saved(file: str | Path, device: torch.device, keys: set[str]) -> dict[str, Any]:
    """Reads a dict that `save_whole` has written, its tensors to `device`; no code in it is run.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is truncated, or has other keys; the message names the file.
    """
    state: dict[str, Any] = read_saved(file, device)
    check_saved(state, file, keys)
    return state


def check_saved(state: Any, file: str | Path, keys: set[str]) -> None:
    """Refuses what is no dict with these keys.

    Raises:
        ValueError: that names the file it is of.
    """
    if not isinstance(state, dict) or set(state) != keys:
        raise ValueError(f"{file} was not written by save; read it with torch.load")
