"""Rows: outputs that fill rows give the same records as those that are kept one by one."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hookcb import ActivationRecords, ActivationStats, Callback, CancelBatchException
from hookcb.activations.rows import MAX_BATCHES, MAX_ELEMENTS, Rows
from tests.activations.support import INF, NAN
from tests.support import covering, fit, make_learner


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def recorded(batches, usual, with_hist=True, phases=("train",)):
    """Records of batches, each a list of names and outputs; `usual` offers them to rows."""
    records = ActivationRecords(with_hist=with_hist)
    for step, batch in enumerate(batches):
        for name, x in batch:
            if not (usual and records.take_usual(name, x, "Linear")):
                records.take(name, x, "Linear")
        records.end_batch(phases[step % len(phases)], 0, step)
    records.flush()
    return records


def same(one, other):
    """Whether two records are alike, to rounding."""
    assert one.names == other.names
    assert one.outputs == other.outputs
    for phase in ("train", "valid"):
        a, b = one.store_of(phase), other.store_of(phase)
        assert a.infos == b.infos
        assert a.names == b.names
        for name in a.names:
            torch.testing.assert_close(a.series(name), b.series(name), equal_nan=True, rtol=1e-5, atol=1e-6)
    return True


ODD = {
    "alike": lambda step, k: randn(4, 3, seed=step * 7 + k),
    "shapes_by_layer": lambda step, k: randn(4, k + 1, seed=step * 7 + k),
    "last_is_smaller": lambda step, k: randn(1 if step % 10 == 9 else 4, 3, seed=step * 7 + k),
    "always_another": lambda step, k: randn(step % 5 + 1, 3, seed=step * 7 + k),
    "scalars": lambda step, k: randn(seed=step * 7 + k),
    "empty_at_times": lambda step, k: randn(0 if step % 4 == 1 else 2, 3, seed=step + k),
    "half": lambda step, k: randn(4, 3, seed=step + k).half(),
    "a_double_at_times": lambda step, k: randn(4, 3, seed=step + k).to(
        torch.float64 if step % 6 == 5 else torch.float32
    ),
    "whole_numbers": lambda step, k: torch.arange(6).reshape(2, 3) + step + k,
    "nan_and_inf": lambda step, k: torch.tensor([[NAN, INF, 1.0], [float(step), k, -INF]]),
    "transposed": lambda step, k: randn(3, 4, seed=step + k).t(),
    "offset": lambda step, k: randn(4, 50, seed=step + k) + 1e6,
    "large_beside_small": lambda step, k: randn(*((100, 100) if k == 1 else (4, 3)), seed=step + k),
    "near_the_limit": lambda step, k: randn(64, 128, seed=step + k),
}


@pytest.mark.parametrize(("name", "phases"), covering(ODD, [("train",), ("train", "train", "valid")], of=1))
def test_rows_change_no_record(name, phases):
    of = ODD[name]
    batches = [[(f"layer{k}", of(step, k)) for k in range(4)] for step in range(2 * MAX_BATCHES + 10)]
    assert same(recorded(batches, True, phases=phases), recorded(batches, False, phases=phases))


def test_layers_that_are_not_called_in_each_batch_have_nan_there():
    batches = [
        [(f"layer{k}", randn(4, 3, seed=step * 3 + k)) for k in range(3) if (step + k) % 3 or step % 2]
        for step in range(150)
    ]
    rows = recorded(batches, True)
    assert same(rows, recorded(batches, False))
    assert sum(x != x for x in rows.series("layer1", "mean")) == 25


def test_a_layer_called_twice_in_some_batches_has_numbered_calls_there():
    def of(step):
        xs = [("fc", randn(4, 3, seed=step)), ("head", randn(4, 3, seed=step + 1))]
        again = [("fc", randn(4, 3, seed=step + 2))] if step % 5 == 4 else []
        other = [("fc", randn(2, 3, seed=step + 3))] if step % 10 == 9 else []
        return [*other, *xs, *again] if step % 20 == 19 else [*xs, *again, *other]

    batches = [of(step) for step in range(100)]
    rows = recorded(batches, True)
    assert rows.names == ["fc", "head", "fc#0", "fc#1", "fc#2"]
    assert same(rows, recorded(batches, False))


def test_rows_are_filled_and_hold_no_more_than_may_wait():
    records = ActivationRecords()
    for step in range(200):
        for k in range(30):
            records.take_usual(f"{k}", randn(16, 32, seed=step), "Linear")
        assert step < 1 or not records.buffer.batch
        records.end_batch("train", 0, step)
    held = sum(block.numel() for _, block in records.buffer.rows._blocks)
    assert MAX_ELEMENTS // 2 < held <= MAX_ELEMENTS


def test_layers_that_do_not_fit_in_rows_are_recorded_all_the_same():
    batches = [[(f"{k}", randn(64, 128, seed=step + k)) for k in range(40)] for step in range(4)]
    rows = recorded(batches, True, with_hist=False)
    assert len(rows.buffer.rows._seats) == 32
    assert same(rows, recorded(batches, False, with_hist=False))


def test_an_output_is_copied_before_it_is_changed_in_place():
    records = ActivationRecords()
    x = torch.ones(4, 3)
    for step in range(5):
        records.take_usual("fc", x.fill_(float(step)), "Linear")
        x.fill_(99.0)
        records.end_batch("train", 0, step)
    assert records.series("fc", "mean") == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_cancelled_batch_leaves_nothing_in_its_row():
    def cancel(cb):
        if cb.train_iter % 3 == 1:
            raise CancelBatchException

    stats = fit(make_learner(30), cbs=[ActivationStats(), Callback(name="cancel", after_pred=cancel)])
    stats = stats.activation_stats
    assert stats.steps() == [step for step in range(30) if step % 3 != 1]
    assert all(x == x for name in stats.names for x in stats.series(name, "mean"))


def test_records_that_are_read_within_a_forward_lose_nothing():
    records = ActivationRecords()
    for step in range(10):
        records.take_usual("first", torch.full((3,), float(step)), "Linear")
        assert not step or records.series("first", "mean") == list(map(float, range(step)))
        records.take_usual("second", torch.full((3,), 10.0 + step), "Linear")
        records.end_batch("train", 0, step)
    assert records.series("first", "mean") == list(map(float, range(10)))
    assert records.series("second", "mean") == list(map(float, range(10, 20)))


def test_a_graph_is_not_kept():
    records = ActivationRecords()
    weight = torch.ones(3, requires_grad=True)
    for step in range(3):
        records.take_usual("fc", weight * 2, "Linear")
        records.end_batch("train", 0, step)
    assert not any(block.requires_grad for _, block in records.buffer.rows._blocks)


def test_rows_of_inference_mode_are_used_outside():
    records = ActivationRecords()
    for step in range(6):
        with torch.inference_mode(step < 3):
            records.take_usual("fc", torch.full((3,), float(step)), "Linear")
            records.end_batch("train", 0, step)
    assert records.series("fc", "mean") == list(map(float, range(6)))


def test_a_copy_is_empty():
    rows = Rows()
    rows.take("fc", torch.ones(3))
    for copied in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert copied.filled == {}
        assert not copied.is_full


def test_the_hooks_of_a_fit_fill_rows():
    stats = fit(make_learner(20), cbs=ActivationStats(include_paramless=True)).activation_stats
    assert stats.records.buffer.rows._seats.keys() == set(stats.names) != set()


def test_layers_of_one_shape_keep_the_order_of_the_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 1))
    stats = fit(make_learner(20, model=model), cbs=ActivationStats(on_valid=True)).activation_stats
    assert stats.names == stats.records.store_of("valid").names == ["0", "1", "2", "3"]
