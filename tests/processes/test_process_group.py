"""Each process gets its own device."""

import pytest
import torch

from hookcb.processes.process_group import n_processes, own_device
from tests.support import in_turn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def second_of_four(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    return lambda n: monkeypatch.setattr(torch.cuda, "device_count", lambda: n)


@in_turn(
    ("n_gpus", "given", "current", "device"),
    [
        (4, None, CPU, "cuda:1"),
        (4, CUDA, CPU, "cuda:1"),
        (4, None, torch.device("cuda:0"), "cuda:1"),
        (4, CPU, CPU, "cpu"),
        (4, torch.device("cuda:3"), CPU, "cuda:3"),
        (2, None, CPU, "cpu"),
        (0, None, CPU, "cpu"),
    ],
)
def test_a_process_has_the_gpu_of_its_number(second_of_four, n_gpus, given, current, device):
    second_of_four(n_gpus)
    assert own_device(given, current) == torch.device(device)


def test_too_few_gpus_are_an_error(second_of_four):
    second_of_four(1)
    with pytest.raises(ValueError, match="has LOCAL_RANK 1, but the machine has 1 GPU; torchrun"):
        own_device(CUDA, CPU)


def test_without_torchrun_there_is_one_process():
    assert n_processes() == 1
