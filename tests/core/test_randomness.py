"""Random state: set_seed makes what follows the same."""

import random

import numpy as np
import pytest
import torch

from hookcb import set_seed
from tests.support import in_turn


@pytest.fixture(autouse=True)
def as_before():
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@in_turn("seed", [0, 7, 2**40])
def test_the_same_seed_draws_the_same(seed):
    def draw():
        set_seed(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw() == draw()


def test_reproducible_is_asked_of_cudnn():
    set_seed(0)
    before = torch.backends.cudnn.deterministic
    set_seed(0, reproducible=True)
    assert (before, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (
        False,
        True,
        False,
    )
