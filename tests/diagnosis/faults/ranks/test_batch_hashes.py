"""Hashes of batches."""

import pytest
import torch

from hookcb.diagnosis.faults.ranks.batches import N_BATCHES, N_EPOCHS, BatchHashes
from hookcb.diagnosis.measurements.replicas import N_ELEMENTS
from hookcb.diagnosis.run import Run
from tests.diagnosis.faults.ranks.support import batch, epochs_of, hash_batch


def told(hashes):
    hashes.tell(Run())
    return hashes.epochs


def of_one(x):
    (((number, _),),) = told(epochs_of([(x, ())]))
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
    hashes = told(epochs_of(*[[batch(i) for i in range(N_BATCHES + 3)]] * (N_EPOCHS + 2)))
    assert list(map(len, hashes)) == [N_BATCHES] * N_EPOCHS


def test_an_epoch_that_is_resumed_is_left_out():
    hashes = BatchHashes()
    for i in (5, 6, 0, 1):
        hash_batch(hashes, i, *batch(i))
    assert list(map(len, told(hashes))) == [2]


def test_it_is_done_once_it_has_hashed_the_first_epochs():
    hashes = BatchHashes()
    for _ in range(N_EPOCHS):
        hash_batch(hashes, 0, *batch(0))
    assert not hashes.done
    hash_batch(hashes, 0, *batch(0))
    assert hashes.done
