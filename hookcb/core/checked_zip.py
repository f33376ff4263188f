"""Detects damage to a file of `torch.save`; `torch.load` does not compare checksums."""

import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, strided

from hookcb.core.torch_private import storage_id

START, END = b"PK\x03\x04", b"PK\x05\x06"  # magic numbers of the first header, and of the record at the end
END_SIZE = 22  # bytes; a comment could follow, but torch never writes one
BLOCK = 1 << 20


def compare_storages(opened: BinaryIO, file: str | Path) -> dict[int, bool]:
    """Compares every part of a file with its CRC-32; warns if the file has no checksums.

    Returns:
        Whether each storage of a tensor is intact, by its number.

    Raises:
        ValueError: If the file is truncated, has foreign bytes at its end, was not written by `torch.save`,
            or is damaged in a part that is not a storage; the message names the file and the part.
    """
    _check_ends(opened, file)
    try:
        with zipfile.ZipFile(opened) as archive:
            parts = archive.infolist()
            if min(part.header_offset for part in parts) > 0:
                raise ValueError("there are bytes before the first part")
            damages = {part.filename.partition("/")[2]: _damage(archive, part) for part in parts}
    except Exception as error:  # zipfile raises errors of many types for a damaged table of contents
        raise ValueError(f"{file} is damaged in its table of contents: {error}") from error
    storages = {int(match[1]): name for name in damages if (match := re.fullmatch(r"data/(\d+)", name))}
    if not any(part.CRC for part in parts):  # torch.serialization.set_crc32_options(False)
        warnings.warn(f"{file} has no checksums, so damage to it cannot be detected", stacklevel=4)
        return dict.fromkeys(storages, True)
    for name, damage in damages.items():
        if damage and name not in storages.values():
            raise ValueError(f"{file} is damaged in its part {name!r}: {damage}")
    return {number: not damages[name] for number, name in storages.items()}


def _check_ends(opened: BinaryIO, file: str | Path) -> None:
    if opened.read(len(START)) != START:
        raise ValueError(f"{file} was not written by torch.save, or is damaged at its beginning")
    opened.seek(-min(END_SIZE, opened.seek(0, os.SEEK_END)), os.SEEK_END)
    end = opened.read()
    if not end.startswith(END) or not end.endswith(b"\0\0"):  # the length of a comment
        raise ValueError(f"{file} is truncated, or has bytes at its end that were not written with it")


def _damage(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> str:
    """Description of the damage to a part; empty if it is intact."""
    # torch silently reads nothing from some of these, such as a part that is marked as a folder
    if part.external_attr or part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size:
        return "it is not marked as a part written by torch.save"
    try:
        with archive.open(part) as opened:
            while opened.read(BLOCK):
                pass
    except Exception as error:  # zipfile raises errors of many types for a damaged header
        return str(error) or repr(error)
    return ""


def names_of_changed(storages: Mapping[int, bool], state: Any) -> str:
    """Names of the tensors in `state` whose storages have changed, joined by commas.

    Args:
        storages: result of `compare_storages`.
        state: result of `torch.load`.
    """
    owners: dict[int, str] = {}  # in the order in which torch numbers storages
    for path, tensor in _tensors(state, ()):
        owners.setdefault(storage_id(tensor.untyped_storage()), path)
    # else there are tensors that `_tensors` does not find, such as sparse ones
    names = list(owners.values()) if len(owners) == len(storages) else None
    changed = [number for number, is_same in storages.items() if not is_same]
    return ", ".join(names[number] if names else f"data/{number}" for number in sorted(changed))


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and value.layout == strided:
        yield ".".join(path), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, (*path, str(i)))
