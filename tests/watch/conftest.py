"""For all tests of watches."""

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


@pytest.fixture(autouse=True)
def nothing_is_left_on():
    """Hooks that are no model's, and modes."""
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()
