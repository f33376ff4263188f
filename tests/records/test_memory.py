"""Promises of Memory: what is lent is not lent twice, what is back is used again, and little is kept."""

import copy
import pickle

import pytest
import torch

from hookcb import ActivationStats, Callback, CancelBatchException, GradientHealth
from hookcb.records.memory import MAX_KEPT, Memory
from tests.support import fit, make_learner


@pytest.mark.parametrize("shape", [(3,), (4, 5), (), (4096,), (300_000,)])
def test_what_is_lent_is_not_lent_twice_and_what_is_back_is_used_again(shape):
    memory = Memory()
    first = [memory.lend(torch.Size(shape)) for _ in range(200)]
    assert len({x.data_ptr() for x in first}) == 200
    for i, x in enumerate(first):
        x.fill_(i)
    assert [x.flatten()[0].item() for x in first] == list(range(200))
    memory.take_back()
    if first[0].numel() * 200 <= MAX_KEPT:
        again = [memory.lend(torch.Size(shape)) for _ in range(200)]
        assert {x.data_ptr() for x in again} == {x.data_ptr() for x in first}


def test_the_first_may_stay_lent():
    memory = Memory()
    stays = memory.keep(torch.ones(4))
    memory.keep(torch.zeros(4))
    memory.take_back(slice(1, None))
    assert memory.n_lent == 1
    others = [memory.keep(torch.full((4,), 2.0)) for _ in range(100)]
    assert stays.tolist() == [1.0] * 4
    assert all(x is not stays for x in others)


@pytest.mark.parametrize(
    "x",
    [torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta"), torch.empty(0), torch.ones(2).half()],
)
def test_what_this_memory_cannot_have_stays_where_it_is(x):
    assert Memory().keep(x) is x


def test_shapes_that_differ_each_time_do_not_pile_up():
    memory = Memory()
    for n in range(1, 2_000):
        memory.lend(torch.Size([n]))
        memory.take_back()
    assert sum(x.numel() for free in memory._free.values() for x in free) <= MAX_KEPT


def test_a_copy_is_empty():
    memory = Memory()
    memory.keep(torch.ones(3))
    for copied in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert copied.n_lent == 0
        assert not copied._free


def test_memory_of_inference_mode_can_be_used_outside():
    memory = Memory()
    with torch.inference_mode():
        memory.keep(torch.ones(3))
    memory.take_back()
    assert memory.keep(torch.zeros(3)).tolist() == [0.0] * 3


def test_cancelled_batches_give_theirs_back():
    def cancel(cb):
        lent.append(cb.learn.activation_stats.records.buffer.memory.n_lent)
        raise CancelBatchException

    lent = []
    fit(make_learner(50), cbs=[ActivationStats(), Callback(name="cancel", after_pred=cancel)])
    assert len(lent) >= 50
    assert max(lent) == lent[0] > 0


def test_records_that_are_read_in_a_forward_are_those_of_batches_that_are_not():
    def read(cb):
        cb.learn.activation_stats.records.stats  # noqa: B018  # reduces what waits

    plain = fit(make_learner(20), cbs=ActivationStats(with_hist=True))
    learn = make_learner(20)
    next(learn.model.children()).register_forward_hook(lambda *_: read(learn.recorder))
    fit(learn, cbs=[ActivationStats(with_hist=True), Callback(name="read", after_pred=read)])
    for name in plain.activation_stats.names:
        assert torch.equal(plain.activation_stats.hist(name), learn.activation_stats.hist(name))
    assert plain.activation_stats.stats == learn.activation_stats.stats


def test_gradients_that_wait_are_not_overwritten():
    often, once = (fit(make_learner(80), cbs=[GradientHealth(), *cbs]) for cbs in ([reader()], []))
    assert repr(often.gradient_health.stats) == repr(once.gradient_health.stats)


def reader():
    return Callback(name="read", after_batch=lambda cb: cb.learn.gradient_health.stats)
