"""Hashes of batches and random states."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookcb.diagnosis.probes.samples import (
    N_BATCHES,
    N_ELEMENTS,
    N_EPOCHS,
    N_STATES,
    BatchHashes,
    RandomStates,
    has_epochs,
    observe_order,
)

CPU = torch.device("cpu")


def epochs_of(*epochs):
    """Hashes of epochs of batches `(inputs, targets)`."""
    hashes = BatchHashes()
    for epoch in epochs:
        for i, (x, y) in enumerate(epoch):
            hashes.add(i, x, y)
    return hashes.epochs()


def batch(seed, n=8):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, (torch.arange(n) * (seed + 1)) % 7


def of_one(x):
    (((number, _),),) = epochs_of([(x, ())])
    return number


def test_equal_batches_have_equal_hashes_and_others_have_not():
    x, _ = batch(0)
    assert of_one(x) == of_one(x.clone())
    changed = x.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    others = [changed, x.flip(0), x.T.contiguous(), -x, x.double(), (x, x), x[:-1], batch(1)[0]]
    assert len({of_one(other) for other in (x, *others)}) in (8, 9)  # a transposed one may be as long


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_all_kinds_of_numbers_have_hashes(dtype):
    assert of_one(torch.arange(2).to(dtype)) is not None


def test_what_has_no_tensors_has_no_hash():
    assert of_one(["a", "b"]) is None
    assert of_one(torch.empty(0)) is None


def test_a_large_input_is_hashed_in_part_from_its_begin_to_its_end():
    x = torch.zeros(10 * N_ELEMENTS)
    ends = [x.clone() for _ in range(2)]
    ends[0][0], ends[1][-10:] = 1.0, 1.0
    assert len({of_one(x), *map(of_one, ends)}) == 3


def test_only_the_first_batches_of_the_first_epochs_are_hashed():
    hashes = epochs_of(*[[batch(i) for i in range(N_BATCHES + 3)]] * (N_EPOCHS + 2))
    assert list(map(len, hashes)) == [N_BATCHES] * N_EPOCHS


def test_an_epoch_that_is_resumed_is_left_out():
    hashes = BatchHashes()
    for i in (5, 6, 0, 1):
        hashes.add(i, *batch(i))
    assert list(map(len, hashes.epochs())) == [2]


# ---- the order


ORDER = [batch(i) for i in range(5)]


class Around:
    """A loader that does not pass on set_epoch."""

    def __init__(self, sampler):
        self.inner = DataLoader(TensorDataset(torch.zeros(8)), sampler=sampler)


def order(*epochs, loader=None):
    return [(x.code, x.severity, x.text) for x in observe_order(epochs_of(*epochs), loader)]


def test_epochs_in_the_same_order_are_a_note():
    ((code, severity, text),) = order(ORDER, ORDER, loader=ORDER)
    assert (code, severity) == ("data.same_order", "info")
    assert "the same 5 batches in the same order, in all of the first 2 epochs." in text


def test_a_sampler_that_stays_in_its_epoch_is_no_note():
    sampler = DistributedSampler(range(8), 2, 0)
    ((_, severity, text),) = order(ORDER, ORDER, loader=Around(sampler))
    assert severity == ""
    assert "the DistributedSampler has stayed in its epoch 0" in text
    sampler.shuffle = False
    assert order(ORDER, ORDER, loader=Around(sampler))[0][1] == "info"


def test_augmented_inputs_are_known_by_their_targets():
    augmented = [(batch(i + 100)[0], y) for i, (_, y) in enumerate(ORDER)]
    assert order(ORDER, augmented)
    assert not order(ORDER, [(batch(i + 100)[0], torch.zeros(8)) for i in range(5)])


def test_other_orders_few_batches_and_the_same_batch_are_fine():
    assert not order(ORDER, ORDER[::-1])
    assert not order(ORDER, ORDER, ORDER[1:] + ORDER[:1])
    assert not order(ORDER[:3], ORDER[:3])
    assert not order(ORDER)
    assert not order([ORDER[0]] * 5, [ORDER[0]] * 5)
    assert has_epochs(epochs_of(ORDER, ORDER))
    assert not has_epochs(epochs_of(ORDER[:3], ORDER))


# ---- random states


def drawn(seed, forward, n=3):
    states = RandomStates()
    torch.manual_seed(seed)
    for _ in range(n):
        states.begin_batch(CPU)
        forward(torch.ones(2, 3))
        states.end_loss(CPU)
    return states.drawn()


def test_states_from_which_a_forward_draws_depend_on_the_seed():
    drop = nn.Dropout(0.5)
    one = drawn(0, drop)
    assert len(set(one)) == 3
    assert one == drawn(0, drop) != drawn(1, drop)


def test_a_forward_without_random_numbers_draws_none():
    assert drawn(0, nn.Linear(3, 3)) == []


def test_a_batch_without_a_loss_is_left_out_and_only_some_are_kept():
    states = RandomStates()
    states.begin_batch(CPU)
    states.begin_batch(CPU)
    torch.rand(1)
    states.end_loss(CPU)
    states.end_loss(CPU)
    assert len(states.drawn()) == 1
    assert len(drawn(0, nn.Dropout(), N_STATES + 5)) == N_STATES


def test_reading_the_state_changes_nothing():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    RandomStates().begin_batch(CPU)
    assert torch.equal(torch.rand(3), expected)
