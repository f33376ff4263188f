"""Hashes of weights and gradients, and the steps at which they are taken."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb.diagnosis.measurements.processes import Processes, _as_range, ddp_of
from hookcb.diagnosis.measurements.replica_hashes import (
    MAX_BYTES,
    MAX_OF_ALL,
    MIN_LOOKS,
    ReplicaHashes,
    folded,
    hashes,
    next_look,
)
from hookcb.diagnosis.run import Run
from tests.support import in_turn


def of(*xs):
    return list(folded(hashes(xs), len(xs)))


def test_equal_tensors_have_equal_hashes_and_others_have_not():
    x = torch.randn(3, 4)
    changed = x.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    others = [x.flip(0), -x, x.double(), x.bfloat16(), x[:-1], changed, x.to(torch.complex64)]
    assert len(set(of(x, *others))) == 1 + len(others)
    assert of(x, x.clone(), x.T.contiguous().T)[:2] == of(x, x)


def test_a_hash_does_not_depend_on_what_is_beside_it():
    x, y = torch.randn(5), torch.randn(2_000)
    assert of(y, x)[1] == of(x)[0] == of(None, torch.ones(3), x)[2]


def test_zeros_and_what_is_missing_or_cannot_be_read_are_0():
    sparse = torch.eye(3).to_sparse()
    assert of(torch.zeros(4), None, torch.empty(0), sparse, torch.ones(2, device="meta")) == [0] * 5


def test_of_a_large_tensor_elements_from_begin_to_end_count():
    x = torch.ones(100_000)
    first, last = x.clone(), x.clone()
    first[:200], last[-200:] = 2.0, 2.0
    assert len(set(of(x, first, last))) == 3


def test_looks_are_at_powers_of_two_and_ten():
    n, found = 0, [0]
    while n < 2_000:
        n = next_look(n)
        found.append(n)
    assert found == [0, 1, 2, 4, 8, 10, 16, 32, 64, 100, 128, 256, 512, 1_000, 1_024, 2_048]


def trained(n, world=2, accumulate=1, spoil=lambda i, model: None):
    """What is hashed in `n` steps, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = SimpleNamespace(model=model, opt=opt, rank=0, world=world, train_iter=0, is_external=True)
    run, part = Run(loop=loop), ReplicaHashes()
    run.parts[ReplicaHashes] = part
    processes = run.measured(Processes)
    for i in range(n):
        for k in range(accumulate):
            loop.train_iter = accumulate * i + k
            for one in (processes, part):
                one.on_batch(run)
            model(torch.ones(2, 3)).sum().backward()
            part.on_gradients(run)
        opt.step()
        run.n_steps += 1
        part.on_between(run)
        opt.zero_grad()
        spoil(i, model)
    part.tell(run)
    return part, model


def test_weights_are_hashed_at_looks_and_one_step_later_and_gradients_at_looks():
    part, _ = trained(12)
    assert list(part.own.looks) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    whole = [n for n, look in part.own.looks.items() if look.given]
    assert whole == [0, 1, 2, 4, 8, 10]
    assert all(len(look.weights) == 4 for look in part.own.looks.values())
    assert all(part.own.looks[n].rates == (0.1,) for n in whole)
    assert part.own.looks[0].weights != part.own.looks[1].weights
    assert part.own.looks[0].backward == part.own.looks[0].given


def test_gradients_are_those_of_all_batches_of_a_step():
    one, two = (trained(1, accumulate=k)[0].own.looks[0] for k in (1, 2))
    assert one.weights == two.weights
    assert one.backward != two.backward == two.given


def test_nothing_is_hashed_without_other_processes():
    part, _ = trained(4, world=1)
    assert part.done
    assert not part.own.looks


def test_watching_changes_nothing():
    _, model = trained(5)
    _, plain = trained(5, world=1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_of_many_parameters_fewer_looks_are_sent():
    part, _ = trained(40)
    assert len(part.state(Run()).looks) == len(part.own.looks) == 14
    part.names = ["x"] * (MAX_BYTES // (12 * MIN_LOOKS))
    assert list(part.state(Run()).looks) == [0, 1, 2, 3, 16, 17, 32, 33]


def test_of_many_parameters_on_many_ranks_one_hash_is_sent():
    (part, _), run = trained(12), Run()
    run.measured(Processes).world = MAX_OF_ALL // (12 * 4 * (MIN_LOOKS - 1))
    sent = part.state(run)
    assert list(sent.looks) == list(part.own.looks)
    assert {len(look.weights) for look in sent.looks.values()} == {1} == {len(sent.places)}
    assert len({look.weights[0] for look in sent.looks.values()}) == len(sent.looks)
    assert [len(sent.looks[n].given) for n in (2, 3)] == [1, 0]


def test_a_frozen_part_holds_no_tensor():
    part, _ = trained(4)
    part.freeze()
    assert not part._params
    assert not part._raw


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_without_a_wrapper_has_no_replicas(model):
    assert ddp_of(model) is None
    run = Run(loop=SimpleNamespace(model=model, rank=1, world=2, is_external=True))
    processes = run.measured(Processes)
    processes.on_batch(run)
    assert not processes.has_replicas
    assert processes.done
    assert processes.state(run).rank == 1


@in_turn("ranks", [[3], [0, 1, 2, 3], [1, 3, 5], [0, 1, 5]])
def test_ranks_of_a_group_are_few_bytes_if_they_are_a_range(ranks):
    found = _as_range(ranks)
    assert list(found) == ranks
    assert isinstance(found, tuple) == (ranks == [0, 1, 5])
