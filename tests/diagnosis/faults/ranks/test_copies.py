"""Buffers of replicas, of ranks that have told theirs."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb.diagnosis.faults.ranks.copies import MAX_CHANNELS, N_KEPT, OwnBuffers, buffers
from hookcb.diagnosis.measurements.processes import Processes, Role
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.support import in_turn


class Buffered(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, n), nn.BatchNorm1d(n)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def of_rank(change=lambda m: None, n_steps=8, model=None):
    model = model or Buffered()
    change(model)
    return {n_steps: buffers(model, 7, ()).read()}


def results(*states, roles=()):
    run, fault = Run(), OwnBuffers()
    run.measured(Processes).roles = list(roles)
    fault.merge(run, states, 0)
    return list(fault.findings(run))


def found(*states, **options):
    return [
        (x.code, x.layer or x.param, round(x.value, 2), x.severity, x.ranks)
        for x in results(*states, **options)
    ]


@in_turn(
    "change",
    [
        lambda m: None,
        lambda m: m.cache.resize_(5),
        lambda m: m.norm.num_batches_tracked.add_(1),
        lambda m: m.register_buffer("new", torch.ones(1)),  # on one rank, as a cache may be
    ],
)
def test_buffers_that_are_alike_or_not_saved_are_fine(change):
    assert results(of_rank(), of_rank(change)) == [Passed("buffers that differ")]


def test_a_buffer_that_differs_names_its_rank():
    change = of_rank(lambda m: m.scale.add_(1))
    assert found(of_rank(), change) == [("replica.buffers", "scale", 1.0, "warning", (1,))]
    assert found(change, of_rank(), of_rank())[0][-1] == (0,)


@pytest.mark.parametrize(
    ("change", "value", "severity"),
    [
        (lambda m: m.norm.running_mean.add_(0.1), 0.1, "info"),
        (lambda m: m.norm.running_mean.add_(0.6), 0.6, "warning"),
        (lambda m: m.norm.running_var.mul_(9), 1.1, "warning"),
    ],
)
def test_statistics_of_batch_norm_are_a_note_unless_they_are_far_apart(change, value, severity):
    assert found(of_rank(), of_rank(change)) == [("replica.buffers", "norm", value, severity, ())]


def test_a_single_channel_makes_no_warning():
    (result,) = results(of_rank(), of_rank(lambda m: m.norm.running_mean[:1].add_(100)))
    assert isinstance(result, Passed)


def test_only_ranks_at_the_same_step_and_of_the_same_group_are_compared():
    other = of_rank(lambda m: m.scale.add_(1), n_steps=9)
    unseen = [Skipped("too little was seen of the buffers of each replica")]
    assert results(of_rank(), other) == unseen == results() == results(of_rank())
    assert len(found(of_rank() | of_rank(n_steps=9), other)) == 1
    assert results(of_rank(), other, roles=[Role(0, (0, 2)), Role(1, (1, 3))]) == unseen


def test_of_many_channels_some_are_sent():
    (state,) = of_rank(model=Buffered(10 * MAX_CHANNELS)).values()
    assert [len(x) for x in (*state.means, *state.logs)] == [MAX_CHANNELS] * 2


def test_buffers_are_seen_at_the_ends_of_epochs_unless_rank_0_sends_them():
    fault, run = OwnBuffers(), Run(loop=SimpleNamespace(model=Buffered(), train_iter=7))
    processes = run.measured(Processes)
    processes._ddp = lambda: SimpleNamespace(broadcast_buffers=True)
    fault.on_epoch(run)
    fault.tell(run)
    assert fault.state(run) == {}
    processes._ddp = lambda: SimpleNamespace(broadcast_buffers=False, parameters_to_ignore=set())
    for run.n_steps in (3, 5, 5, 7, 9, 11):
        fault.on_epoch(run)
    fault.tell(run)
    assert list(fault.state(run)) == [5, 7, 9, 11][-N_KEPT:]


def test_no_warning_of_torch_is_caused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_rank()
