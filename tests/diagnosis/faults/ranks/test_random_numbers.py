"""Random numbers that ranks draw."""

from types import SimpleNamespace

import torch
from torch import nn

from hookcb.diagnosis.faults.ranks.random_numbers import N_COMPARED, DuplicatedRandomNumbers
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.ranks.support import merged

RUN = Run(loop=SimpleNamespace(model=nn.Linear(2, 2)))


def drawn(seed, forward, n=3):
    states = DuplicatedRandomNumbers()
    torch.manual_seed(seed)
    for _ in range(n):
        states.on_batch(RUN)
        forward(torch.ones(2, 3))
        states.on_loss(RUN)
    return states.state(RUN)


def test_states_from_which_a_forward_draws_depend_on_the_seed():
    drop = nn.Dropout(0.5)
    one = drawn(0, drop)
    assert len(set(one)) == 3
    assert one == drawn(0, drop) != drawn(1, drop)


def test_a_forward_without_random_numbers_draws_none():
    assert drawn(0, nn.Linear(3, 3)) == []


def test_a_batch_without_a_loss_is_left_out_and_only_some_are_kept():
    states = DuplicatedRandomNumbers()
    states.on_batch(RUN)
    states.on_batch(RUN)
    torch.rand(1)
    states.on_loss(RUN)
    states.on_loss(RUN)
    assert len(states.state(RUN)) == 1
    assert len(drawn(0, nn.Dropout(), N_COMPARED + 5)) == N_COMPARED


def test_reading_the_state_changes_nothing():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    DuplicatedRandomNumbers().on_batch(RUN)
    assert torch.equal(torch.rand(3), expected)


def compared(*drawn):
    """What the first of ranks finds that have drawn from these states."""
    runs = [Run() for _ in drawn]
    for run, states in zip(runs, drawn, strict=True):
        run.measured(DuplicatedRandomNumbers)._around = [[x, 0] for x in states]
    run, *_ = merged(*runs)
    (result,) = run.measured(DuplicatedRandomNumbers).findings(run)
    return result


def test_ranks_that_draw_the_same_numbers_are_named():
    found = compared((5, 6, 7, 8), (5, 6, 7, 8))
    assert (found.code, found.severity, found.ranks) == ("random.duplicated", "info", (0, 1))
    assert found.message.startswith("Ranks 0, 1 draw the same random numbers in the forward")
    assert compared((5, 6, 7, 8), (5, 6, 7, 9)) == Passed("ranks with the same random numbers")


def test_few_states_are_not_compared():
    none = Skipped("no random numbers were drawn in the forward")
    assert compared((5, 6, 7), (5, 6, 7)) == compared((5, 6, 7, 8), ()) == none
    (alone,) = DuplicatedRandomNumbers().findings(Run())
    assert alone == Skipped("too little was seen of the random numbers of all ranks")
