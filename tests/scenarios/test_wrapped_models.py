"""A model in a wrapper is followed as it would be without: nothing of ours fails, layers keep their names."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.core.support import group_of_one
from tests.scenarios.support import LAYERS, PARAMS, Net, check_command, check_watched
from tests.support import each


class Own(nn.Module):
    """A wrapper of the user's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def not_at_all(net):
    return net


def ddp(net):
    return nn.parallel.DistributedDataParallel(net)


def data_parallel(net):
    return nn.DataParallel(net)


def fsdp(net):
    from torch.distributed.fsdp import fully_shard

    for m in (net.body[0], net.head, net):
        fully_shard(m)
    return net


def compiled(net):
    return torch.compile(net, backend="eager")


def compiled_in_ddp(net):
    return ddp(compiled(net))


def own(net):
    return Own(net)


WRAPPERS = [not_at_all, ddp, data_parallel, fsdp, own, compiled]
WRAPPERS += [pytest.param(compiled_in_ddp, marks=pytest.mark.slow)]


@pytest.fixture
def names(wrap, request, monkeypatch):
    """Layers and parameters, in the process group that a wrapper needs."""
    # as in a process of its own, whatever other tests have compiled
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {})
    if wrap in (compiled, compiled_in_ddp):
        request.getfixturevalue("fresh_dynamo")
    torch.manual_seed(0)
    inside = "inner." if wrap is own else ""
    with group_of_one() if wrap in (ddp, fsdp, compiled_in_ddp) else nullcontext():
        yield {"layers": [inside + name for name in LAYERS], "params": [inside + name for name in PARAMS]}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_watched_model_is_diagnosed_in_any_wrapper(wrap, names):
    assert check_watched(wrap(Net()), **names).status == "healthy"


@pytest.mark.parametrize("wrap", each(2, reversed(WRAPPERS)))
def test_the_command_diagnoses_a_model_in_any_wrapper(wrap, names, tmp_path, capsys):
    title = "Own" if wrap is own else "Net"
    check_command(f"{__name__}:{wrap.__name__}", tmp_path, capsys, title, **names)
