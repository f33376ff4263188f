"""`hookcb export`: the weights in a checkpoint as one plain file."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookcb.core.files import save_whole
from hookcb.core.whole import write_whole
from hookcb.training.checkpoint.names import plain_weights
from hookcb.training.checkpoint.resume import read_whole_weights

SAFE = ".safetensors"


def export(checkpoint: Path, file: Path) -> str:
    """Writes the weights in a checkpoint, or in a file of `learn.save`, as one file.

    Args:
        checkpoint: file or folder; of a folder of checkpoints, the newest one.
        file: what to write; in the format of safetensors if it is named so, else of `torch.save`.

    Returns:
        What was written, for the user.

    Raises:
        OSError, ValueError: If there is no checkpoint, it is damaged, or `file` cannot be written.
        ModuleNotFoundError: If safetensors is needed and not installed.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; give the name of the file to write")
    if file.suffix == SAFE and find_spec("safetensors") is None:
        raise ModuleNotFoundError(f"{SAFE} needs a package; pip install safetensors, or give a name in .pt")
    found, weights = read_whole_weights(checkpoint)
    weights = plain_weights(weights)
    if file.suffix == SAFE:
        _save_safe(weights, file)
    else:
        save_whole(weights, file)
    n = sum(x.numel() for x in weights.values())
    return f"{file}: {len(weights)} tensors with {n:,} elements, from {found}"


def _save_safe(weights: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save

    apart: dict[str, Any] = {
        name: x.clone(memory_format=torch.contiguous_format) for name, x in weights.items()
    }
    content = save(apart)  # it refuses tensors that share memory, as tied weights do
    write_whole(file, lambda opened: opened.write(content))
