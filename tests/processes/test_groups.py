import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookcb.processes.groups import group_of, name_ranks, set_sync
from tests.core.support import group_of_one


def test_inside_of_join_ranks_are_on_their_own():
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(2, 2))
        with model.join():
            assert group_of(model) is None


@pytest.mark.parametrize(
    ("numbers", "named"),
    [([1], "rank 1"), ([0, 2], "ranks 0, 2"), (range(7), "ranks 0, 1, 2, 3 … and 3 more")],
)
def test_name_ranks(numbers, named):
    assert name_ranks(numbers) == named


def test_set_sync():
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(2, 2))
        assert set_sync(model, False)
        assert not model.require_backward_grad_sync
        assert not set_sync(model, True)
        assert model.require_backward_grad_sync
    assert not set_sync(nn.Linear(2, 2), False)
