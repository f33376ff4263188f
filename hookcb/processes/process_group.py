"""The processes that torchrun has started: their number, the device of each, and their group."""

import atexit
import os

import torch
from torch import distributed

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets


def n_processes() -> int:
    """Number of processes of the open group, or of those that torchrun has started; 1 without either."""
    if not distributed.is_available():
        return 1
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHED) else 1


def own_device(given: torch.device | None, current: torch.device) -> torch.device:
    """The device of this process: among GPUs, the one with the number of this process on its machine.

    Args:
        given: what the learner was given; with an index, it is that.
        current: the device of the model.

    Raises:
        ValueError: If the machine has fewer GPUs than processes.
    """
    n_local, n_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    device = given or current
    if given is None and device.type == "cpu" and not distributed.is_initialized() and 0 < n_local <= n_gpus:
        device = torch.device("cuda")
    if device.type != "cuda" or (given is not None and given.index is not None):
        return device
    local = int(os.environ.get("LOCAL_RANK", current.index or 0))
    if local >= n_gpus:
        raise ValueError(
            f"this process has LOCAL_RANK {local}, but the machine has {n_gpus} GPU{'s' * (n_gpus != 1)}; "
            f"torchrun --nproc_per_node {n_gpus}, or Learner(…, device='cpu')"
        )
    return torch.device("cuda", local)


def open_group(device: torch.device) -> None:
    """Opens the group of all processes unless there is one; it is closed when the process ends."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
        distributed.init_process_group(
            backends.get(device.type), device_id=device if device.type == "cuda" else None
        )
        atexit.register(_close_group)


def _close_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
