"""For all tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny layers are slow on many threads."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)
