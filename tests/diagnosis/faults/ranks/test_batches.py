"""Batches that ranks or epochs have had before, and their hashes."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookcb import Finding
from hookcb.diagnosis.faults.ranks.batches import DuplicatedBatches, RepeatedBatches, SameOrder
from hookcb.diagnosis.measurements.batch_hashes import N_BATCHES, N_EPOCHS, N_WINDOWS, BatchHashes, Window
from hookcb.diagnosis.measurements.processes import Processes, Role
from hookcb.diagnosis.measurements.replicas import N_ELEMENTS
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.ranks.support import merged
from tests.support import in_turn


def batch(seed, n=8):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, (torch.arange(n) * (seed + 1)) % 7


def hash_batch(hashes, i, x, y):
    hashes.on_batch(Run(loop=SimpleNamespace(iter=i, train_iter=0, xb=x, yb=y)))


def epochs_of(*epochs):
    """Hashes of epochs of batches `(inputs, targets)`."""
    hashes = BatchHashes()
    for epoch in epochs:
        for i, (x, y) in enumerate(epoch):
            hash_batch(hashes, i, x, y)
    return hashes


def hashed(*inputs, targets=None):
    """A run of batches with these hashes, in one epoch."""
    run, targets = Run(), range(len(inputs)) if targets is None else targets
    of_epoch = [*zip(inputs, targets, strict=True)]
    run.measured(BatchHashes).windows = [Window(0, True, 0, None, of_epoch)] if inputs else []
    return run


def results(run):
    return [next(kind().findings(run)) for kind in (DuplicatedBatches, RepeatedBatches)]


def compared(*runs):
    """Code, text and ranks of what each rank finds."""
    each = [results(run) for run in merged(*runs)]
    return [[(x.code, x.message, x.ranks) for x in of_rank if isinstance(x, Finding)] for of_rank in each]


def test_ranks_with_the_same_batches_are_named():
    one, other = compared(*(hashed(1, 2, 3, 4) for _ in range(2)))
    assert one == other
    assert one[0][1].startswith("The inputs of ranks 0, 1 are the same in each of the first 4 batches")
    ((code, text, ranks),) = compared(hashed(1, 2, 3, 4), hashed(9, 2, 3, 4), hashed(1, 2, 3, 4))[0]
    assert (code, ranks) == ("data.duplicated", (0, 2))
    assert "The inputs of ranks 0, 2 are" in text


def test_ranks_with_batches_of_their_own_are_fine():
    one, _ = merged(hashed(1, 2, 3, 4), hashed(1, 2, 3, 5))
    assert results(one) == [Passed("ranks with the same batches"), Passed("a rank whose batches repeat")]


@pytest.mark.parametrize("n", [0, 3])
def test_few_batches_are_not_compared(n):
    one, _ = merged(hashed(1, 2, 3, 4), hashed(*range(n)))
    assert results(one) == [Skipped("the batches of ranks were not compared")] * 2


def test_a_rank_alone_compares_nothing():
    alone = Skipped("too little was seen of the batches of all ranks")
    assert results(hashed(1, 2, 3, 4)) == results(Run()) == [alone] * 2


def test_only_replicas_are_compared():
    runs = [hashed(1, 2, 3, 4) for _ in range(4)]
    for rank, run in enumerate(runs):  # two replicas, each on two ranks that share its batches
        run.measured(Processes).own = Role(rank, (rank % 2, rank % 2 + 2))
    assert compared(*runs[:2]) == [[], []]
    assert {ranks for of_rank in compared(*runs) for _, _, ranks in of_rank} == {(0, 2, 1, 3)}


def test_inputs_without_tensors_are_unknown():
    assert compared(*(hashed(*[None] * 4) for _ in range(2))) == [[], []]


def test_all_ranks_find_one_whose_batches_repeat():
    one, other = compared(hashed(1, 2, 3, 4), hashed(5, 6, 5, 6, targets=(0, 1, 0, 1)))
    assert one == other
    ((code, text, ranks),) = other
    assert (code, ranks) == ("data.repeated", (1,))
    assert "2 of the first 4 batches of an epoch have come before in it, on rank 1 of 2" in text


def test_a_batch_that_all_ranks_repeat_is_meant():
    assert compared(hashed(*[1] * 4, targets=[0] * 4), hashed(*[2] * 4, targets=[0] * 4)) == [[], []]


def test_the_same_inputs_with_other_targets_do_not_repeat():
    assert compared(hashed(1, 1, 1, 1), hashed(1, 2, 3, 4)) == [[], []]


# ---- the order


ORDER = [batch(i) for i in range(5)]


class Around:
    """A loader that does not pass on set_epoch."""

    def __init__(self, sampler):
        self.inner = DataLoader(TensorDataset(torch.zeros(8)), sampler=sampler)


def order(*epochs, loader=None):
    """Severity and text of the finding, or else why there is none."""
    fault, run, hashes = SameOrder(), Run(), epochs_of(*epochs)
    run.parts, fault.is_of_ranks = {BatchHashes: hashes, SameOrder: fault}, True
    fault._loader = loader
    for part in run.parts.values():
        part.tell(run)
        part.freeze()
    (result,) = fault.findings(run)
    return (result.severity, result.message) if isinstance(result, Finding) else result


def test_epochs_in_the_same_order_are_a_note():
    severity, text = order(ORDER, ORDER, loader=ORDER)
    assert severity == "info"
    assert "the same 5 batches in the same order, in all of the first 2 epochs." in text


def test_a_sampler_that_stays_in_its_epoch_is_no_note():
    sampler = DistributedSampler(range(8), 2, 0)
    severity, text = order(ORDER, ORDER, loader=Around(sampler))
    assert severity == "warning"
    assert "the DistributedSampler has stayed in its epoch 0" in text
    sampler.shuffle = False
    assert order(ORDER, ORDER, loader=Around(sampler))[0] == "info"


FINE = Passed("epochs in the same order")
TOO_FEW = Skipped("fewer than two epochs of four batches were trained")


def test_augmented_inputs_are_known_by_their_targets():
    augmented = [(batch(i + 100)[0], y) for i, (_, y) in enumerate(ORDER)]
    assert order(ORDER, augmented)[0] == "info"
    assert order(ORDER, [(batch(i + 100)[0], torch.zeros(8)) for i in range(5)]) == FINE


def test_other_orders_few_batches_and_the_same_batch_are_fine():
    assert order(ORDER, ORDER[::-1]) == FINE
    assert order(ORDER, ORDER, ORDER[1:] + ORDER[:1]) == FINE
    assert order([ORDER[0]] * 5, [ORDER[0]] * 5) == FINE
    assert order(ORDER[:3], ORDER[:3]) == order(ORDER[:3], ORDER) == order(ORDER) == order() == TOO_FEW


# ---- hashes


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


@in_turn("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
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
    for _ in range(N_WINDOWS):
        hash_batch(hashes, 0, *batch(0))
    assert not hashes.done
    hash_batch(hashes, 0, *batch(0))
    assert hashes.done
