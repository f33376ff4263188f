from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookcb.core import ranks as module
from hookcb.core.ranks import ALONE, RankError, Ranks, is_sharded, name_ranks, ranks_of, set_sync
from tests.core.support import fake_group, group_of_one


def test_a_process_alone_gets_back_what_it_gives():
    assert ALONE.sum([1, 2.5]) == [1, 2.5]
    assert ALONE.max([3]) == [3]
    assert ALONE.mean(1.5, 4) == 1.5
    assert ALONE.gather("x") == ["x"]
    assert list(ALONE.until_one_ends(range(3))) == [0, 1, 2]
    assert list(ALONE.until_all_end(range(3))) == [0, 1, 2]
    assert ALONE.missing_at("here") == []
    assert ALONE.are_all_at("here")
    assert repr(ALONE) == "Ranks(rank=0, world=1)"


def test_a_process_alone_changes_and_checks_nothing():
    x = torch.ones(2)
    ALONE.average([x])
    ALONE.check_alike({"colour": object()})
    ALONE.report_failure("raised ValueError")
    ALONE.join("learn.fit")
    ALONE.meet("learn.validate", "")
    assert torch.equal(x, torch.ones(2))
    assert ALONE.find_failure() == ""


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


def test_inside_of_join_ranks_are_on_their_own():
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(2, 2))
        with model.join():
            assert module.group_of(model) is None


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


def test_a_known_failure_ends_every_wait():
    ranks = Ranks()
    ranks.failure = "rank 1 raised ValueError"
    for use in (lambda: ranks.wait(None), ranks.check_failure, lambda: ranks.start(torch.ones(1))):
        with pytest.raises(RankError, match=r"^rank 1 raised ValueError"):
            use()


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


def test_alone_there_are_no_waits_to_follow():
    listener = object()
    ALONE.follow_waits(listener)
    ALONE.leave_waits(listener)
    assert ALONE._wait_listeners == ()


def test_what_communicates_by_itself_gets_no_group_alone_and_its_errors_stay_its_own():
    assert ALONE.run(lambda group: group) is None

    def fail(group):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        ALONE.run(fail)
    assert not isinstance(caught.value, RankError)
