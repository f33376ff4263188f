"""Files of `torch.save` that are written whole or not at all, and are read only if they are intact."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookcb.core.checked_zip import compare_storages, names_of_changed
from hookcb.core.whole import write_whole

# types beside tensors, lists, tuples and dicts that torch.load(weights_only=True) reads
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def save_whole(state: Any, file: str | Path) -> Path:
    """Writes `state` with `torch.save`, checksums included; see `write_whole`."""
    with _checksums():
        return write_whole(file, lambda opened: torch.save(state, opened))


@contextmanager
def _checksums() -> Iterator[None]:
    """Has torch write checksums, even if its option `set_crc32_options` is off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def as_plain(item: Any) -> Any:
    """Converts `item` to values that `torch.load(weights_only=True)` reads; other objects become their repr.

    Tensors are moved to the CPU; NumPy arrays become lists, mappings and dataclasses become dicts.
    """
    if isinstance(item, Tensor):
        return item.detach().cpu()
    if isinstance(item, Mapping):
        return {as_plain(key): as_plain(x) for key, x in item.items()}
    if isinstance(item, tuple | list):
        return [as_plain(x) for x in item] if isinstance(item, list) else tuple(as_plain(x) for x in item)
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: as_plain(getattr(item, field.name)) for field in fields(item)}
    if type(item).__module__ == "numpy" and hasattr(item, "tolist"):
        return item.tolist()
    return item if type(item) in PLAIN else repr(item)


def read_saved(file: str | Path, device: torch.device) -> Any:
    """Reads a file of `save_whole`, with its tensors on `device`; runs no code from the file.

    The whole file is compared with its checksums first.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is truncated, damaged, or another kind of file; the message names the file, and the
            part that is damaged.
    """
    with Path(file).open("rb") as opened:
        storages = compare_storages(opened, file)
        opened.seek(0)
        # torch warns about foreign files; the error below says enough
        with warnings.catch_warnings(action="ignore"):
            try:
                state = torch.load(opened, map_location=device, weights_only=True, mmap=False)
            except Exception as error:  # torch's unpickler may raise any error
                raise ValueError(f"{file} cannot be read; it is damaged, or not a file of weights") from error
    if not all(storages.values()):
        changed = names_of_changed(storages, state)
        raise ValueError(f"{file} is damaged: {changed} does not match its checksum; take another file")
    return state


def check_saved(state: Any, file: str | Path, keys: set[str]) -> None:
    """Checks that `state` is a dict with these keys.

    Raises:
        ValueError: If it is not; the message names the file.
    """
    if not isinstance(state, dict) or set(state) != keys:
        raise ValueError(f"{file} was not written by save; read it with torch.load")
