import copy
from datetime import timedelta

import pytest
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookcb.core.alone import ALONE
from hookcb.processes.exchange import RankError
from hookcb.processes.groups import is_sharded
from hookcb.processes.ranks import ranks_of
from tests.core.support import fake_group, group_of_one


def test_without_a_group_a_model_is_trained_alone():
    assert ranks_of(nn.Linear(2, 2)) is ALONE


def test_a_group_of_one_is_alone():
    with group_of_one():
        assert ranks_of(DistributedDataParallel(nn.Linear(2, 2))) is ALONE


def test_only_a_wrapped_model_has_ranks():
    with fake_group(8, rank=3):
        ranks = ranks_of(DistributedDataParallel(nn.Linear(2, 2)))
        assert (ranks.rank, ranks.world, ranks.is_main, ranks.is_sharded) == (3, 8, False, False)
        assert ranks.group is distributed.group.WORLD
        assert ranks_of(nn.Linear(2, 2)) is ALONE


def test_a_wrapped_part_of_a_model_counts():
    with fake_group(8):
        assert ranks_of(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))).world == 8


def test_sharded_parameters_are_found():
    from torch.distributed.fsdp import fully_shard

    with fake_group(4):
        model = fully_shard(nn.Linear(8, 8))
        assert is_sharded(model)
        assert ranks_of(model).is_sharded
    assert not is_sharded(nn.Linear(8, 8))


def test_ranks_that_do_not_come_are_named():
    with fake_group(3, rank=1):
        ranks = ranks_of(DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(
            RankError, match=r"^learn.fit must be called on all ranks, but ranks 0, 2 did not"
        ):
            ranks.join("learn.fit", timedelta(seconds=0.05))


def test_a_copy_is_alone():
    with fake_group(8, rank=3):
        copied = copy.deepcopy(ranks_of(DistributedDataParallel(nn.Linear(2, 2))))
    assert repr(copied) == "Ranks(rank=0, world=1)"
