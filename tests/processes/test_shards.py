"""Parts of tensors on ranks, in a group whose collectives do nothing."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookcb.processes import shards
from tests.support import in_turn


@pytest.fixture
def as_rank():
    """A function that has this process be a rank of a world."""

    def start(rank, world):
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if distributed.is_initialized():
        distributed.destroy_process_group()


def spread(x, shape, *placements):
    """A tensor of which this rank has its part, made without communication."""
    mesh = init_device_mesh("cpu", shape)
    sizes, begins = compute_local_shape_and_global_offset(x.shape, mesh, placements)
    own = x[tuple(slice(begin, begin + n) for begin, n in zip(begins, sizes, strict=True))].contiguous()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


@in_turn("rank", range(4))
@in_turn(
    "placements",
    [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(0))],
)
@in_turn("n_rows", [1, 5, 8])
def test_the_first_row_is_that_of_torch(as_rank, rank, placements, n_rows):
    as_rank(rank, 4)
    x = spread(torch.arange(n_rows * 6.0).view(n_rows, 6), (2, 2), *placements)
    (n_own, _), (first, _) = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    assert shards.local_part(x).shape[0] == n_own
    if n_own:
        assert shards.first_row(x) == first


def test_a_part_is_the_tensor_itself_and_takes_no_communication(as_rank):
    as_rank(1, 2)
    x = spread(torch.arange(6.0).view(3, 2), (2,), Shard(0))
    assert shards.local_part(x).tolist() == [[4, 5]]
    shards.local_part(x).zero_()
    assert not x.to_local().any()
    plain = nn.Parameter(torch.ones(2))
    assert shards.local_part(plain) is plain


def test_what_is_sharded_and_divided(as_rank):
    plain = nn.Parameter(torch.ones(4, 2))
    assert not any(is_it(plain) for is_it in (shards.is_dtensor, shards.is_shard, shards.is_divided))
    as_rank(0, 2)
    by_rows, by_columns, copies = (
        spread(plain.detach(), (2,), place) for place in (Shard(0), Shard(1), Replicate())
    )
    assert all(shards.is_shard(x) and shards.is_divided(x) for x in (by_rows, by_columns, copies))
    assert [shards.has_whole_rows(x) for x in (by_rows, by_columns, copies)] == [True, False, True]
    assert not shards.is_partial(by_rows)
    summands = by_rows.sum(0)
    assert isinstance(summands.placements[0], Partial)
    assert shards.is_partial(summands)
    as_rank(0, 1)
    alone = spread(plain.detach(), (1,), Shard(0))
    assert shards.is_shard(alone)
    assert not shards.is_divided(alone)


def test_gathered_parameters_are_dropped(as_rank):
    shards.drop_gathered(nn.Linear(2, 2))  # without a process group
    as_rank(0, 2)
    model = fully_shard(nn.Linear(4, 4))
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert not shards.is_dtensor(model.weight)
    shards.drop_gathered(model)
    assert shards.is_dtensor(model.weight)


def test_a_flattened_parameter_may_be_on_other_ranks_only(as_rank):
    as_rank(0, 2)
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"), sync_module_states=False
    )
    weight, bias = model.parameters()
    assert shards.is_shard(weight)
    assert shards.is_divided(weight)
    assert [shards.has_no_part(p) for p in (weight, bias)] == [False, True]


@in_turn("rank", range(4))
@in_turn(
    "placements",
    [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1)), (Replicate(), Replicate())],
)
@in_turn("n_rows", [1, 5, 8])
def test_a_whole_tensor_is_divided_as_torch_divides_it(as_rank, rank, placements, n_rows):
    as_rank(rank, 4)
    whole = torch.randn(n_rows, 6)
    like = spread(whole, (2, 2), *placements)
    ours = shards.divided_like(whole, like)
    assert (ours.placements, ours.shape, ours.stride()) == (like.placements, like.shape, like.stride())
    assert torch.equal(ours.to_local(), like.to_local())
    joined = shards.joined_like(like.to_local() + 1, like)
    assert joined.shape == like.shape
    assert torch.equal(joined.to_local(), like.to_local() + 1)


def test_gathered_keeps_what_is_plain_and_the_attributes_of_a_state(as_rank):
    as_rank(0, 1)
    x = torch.randn(3, 2)
    state = nn.Linear(2, 2).state_dict()
    copied = shards.gathered(state)
    assert copied._metadata is state._metadata
    found = shards.gathered({"a": [spread(x, (1,), Shard(0)), 5], "b": x})
    assert torch.equal(found["a"][0], x)
    assert found["a"][1] == 5
    assert found["b"] is x
