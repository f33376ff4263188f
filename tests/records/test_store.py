"""StatStore keeps what it is given in bounded memory, evenly over the run, and gives it back."""

import itertools
import math
import pickle
import random

import pytest
import torch

from hookcb.records.store import StatStore
from tests.support import in_turn, notice_waits


def filled(keep, n, late=1):
    """A store of n records; `late` records of `fc` at a time are put in, as a reducer does."""
    store, waiting = StatStore(("a", "b"), keep), []
    for step in range(n):
        waiting.append(store.begin(step // 10, step))
        if len(waiting) == late:
            store.put("fc", waiting, torch.tensor([[float(i), -float(i)] for i in waiting]))
            waiting = []
    if waiting:
        store.put("fc", waiting, torch.tensor([[float(i), -float(i)] for i in waiting]))
    return store


@in_turn("late, keep, n", itertools.product([1, 3, 64], [2, 3, 7, 50, 1000], [1, 2, 49, 50, 51, 537]))
def test_records_that_stay_are_evenly_spread_and_the_newest_is_there(keep, n, late):
    store = filled(keep, n, late)
    records = [info.record for info in store.infos]
    assert len(records) <= keep
    assert records[-1] == n - 1
    stride = records[1] if len(records) > 2 else n
    assert records == sorted({*range(0, n, stride), n - 1})
    assert n <= keep or len(records) > keep // 2
    assert store.series("fc").tolist() == [[i, -i] for i in records]


def test_a_record_tells_its_epoch_and_step():
    assert [tuple(info) for info in filled(5, 25).infos][-1] == (24, 2, 24)


def test_a_layer_that_is_not_there_has_nan():
    store = StatStore(("a",), 10)
    for step in range(6):
        record = store.begin(0, step)
        store.put("always", [record], torch.ones(1, 1))
        if step in (2, 3):
            store.put("seldom", [record], torch.ones(1, 1))
    nan = [x != x for x in store.series("seldom").flatten().tolist()]
    assert nan == [True, True, False, False, True, True]
    assert store.row(0, "seldom").isnan().all()
    assert store.row(5, "seldom").isnan().all()
    assert store.row(5, "always").tolist() == [1]


def test_the_newest_record_leaves_nothing_to_the_next_in_its_place():
    store = StatStore(("a",), 2)
    for step in range(4):
        record = store.begin(0, step)
        if step == 2:
            store.put("seldom", [record], torch.ones(1, 1))
    assert [info.record for info in store.infos] == [0, 3]
    assert store.series("seldom").isnan().all()


def test_a_loaded_store_leaves_nothing_of_its_newest_record_to_the_next_in_its_place():
    store = StatStore(("a",), 2)
    for step in range(4):
        record = store.begin(0, step)
    store.put("seldom", [record], torch.ones(1, 1))
    loaded = StatStore.from_state(store.state())
    loaded.begin(0, 4)
    assert [info.record for info in loaded.infos] == [0, 4]
    assert loaded.series("seldom").isnan().all()


def test_a_record_that_is_no_longer_kept_says_so():
    store = filled(4, 10)
    with pytest.raises(LookupError, match="record 3 is no longer kept"):
        store.row(3, "fc")


def test_names_come_in_the_order_in_which_they_were_added():
    store = StatStore(("a",), 2)
    store.add("first")
    store.put("second", [store.begin(0, 0)], torch.ones(1, 1))
    store.add("first")
    assert store.names == ["first", "second"]
    assert store.series("first").isnan().all()


def test_the_memory_of_a_store_is_bounded():
    store = filled(100, 5_000)
    assert store._values["fc"].shape == (100, 2)
    assert len(store.infos) <= 100


@pytest.mark.parametrize(
    "copied", [lambda s: StatStore.from_state(s.state()), lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_goes_on_where_the_store_was(copied):
    store = filled(20, 50)
    copy = copied(store)
    for one in (store, copy):
        one.put("fc", [one.begin(9, 99)], torch.full((1, 2), 7.0))
    assert copy.infos == store.infos
    assert torch.equal(copy.series("fc"), store.series("fc"))


@pytest.mark.cuda
def test_what_is_on_a_gpu_arrives_without_waiting_in_between():
    store = StatStore(("a",), 5_000)
    notice_waits("error")
    try:
        for step in range(3_000):
            store.put("fc", [store.begin(0, step)], torch.full((1, 1), float(step), device="cuda"))
    finally:
        notice_waits("default")
    assert store.series("fc").flatten().tolist() == list(range(3_000))


@in_turn("seed, keep", itertools.product(range(8), [7, 1_000]))
def test_values_that_arrive_late_in_any_order_are_where_they_belong(seed, keep):
    draw = random.Random(seed)
    store, late, given = StatStore(("x",), keep), [], {}
    for step in range(draw.choice([30, 100, 300])):
        record = store.begin(0, step)
        for name in "abc"[: draw.randrange(4)]:
            late.append((name, record))
            given[name, step] = draw.random()
        draw.shuffle(late)
        while late and draw.random() < 0.6:
            k = draw.randrange(1, 5)
            name = late[-1][0]
            some = [item for item in late[-k:] if item[0] == name]
            late = [item for item in late if item not in some]
            values = torch.tensor([[given[name, r]] for _, r in some], dtype=torch.float64)
            store.put(name, [r for _, r in some], values if draw.random() < 0.5 else values.float())
    for name, record in late:
        store.put(name, [record], torch.tensor([[given[name, record]]]))
    for name in store.names:
        series = store.series(name)[:, 0].tolist()
        for info, x in zip(store.infos, series, strict=True):
            expected = given.get((name, info.step))
            assert math.isnan(x) if expected is None else x == pytest.approx(expected, rel=1e-6)


def test_values_are_written_together_and_read_at_once():
    store = StatStore(("x",), 100)
    for step in range(10):
        store.put("a", [store.begin(0, step)], torch.tensor([[float(step)]]))
        assert store.row(step, "a").tolist() == [float(step)]
    for step in range(10, 20):
        store.put("a", [store.begin(0, step)], torch.tensor([[float(step)]]))
    assert store._unwritten
    assert pickle.loads(pickle.dumps(store)).series("a").flatten().tolist() == list(map(float, range(20)))
