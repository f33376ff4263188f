"""Curves stay short however long a training is, and memory in use is read without what is shared."""

import mmap
from itertools import pairwise
from types import SimpleNamespace

import torch

from hookcb.diagnosis.measurements import curves
from hookcb.diagnosis.measurements.curves import MAX_POINTS, Curve, Curves, bytes_in_use
from hookcb.diagnosis.run import Run


def test_a_curve_has_numbers_and_tensors_in_order():
    curve = Curve()
    for step, value in enumerate([1.0, torch.tensor(2.0), 3.0, torch.tensor([4.0], dtype=torch.float64)]):
        curve.add((step, value))
    series = curve.series()
    assert (series.steps, series.values) == ([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    curve.add((9, 5.0))  # reading it has ended nothing
    assert curve.series().values == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_of_a_long_curve_numbers_stay_that_are_spread_evenly_and_the_last():
    curve = Curve()
    for step in range(5 * MAX_POINTS):
        curve.add((step, float(step)))
    series = curve.series()
    assert series.steps == [int(value) for value in series.values]
    assert MAX_POINTS // 2 <= len(series.steps) <= MAX_POINTS
    gaps = [b - a for a, b in pairwise(series.steps)]
    assert set(gaps[:-1]) == {8}
    assert series.steps[-1] == 5 * MAX_POINTS - 1


def test_memory_in_use_is_that_of_the_process_without_what_it_shares(tmp_path, monkeypatch):
    statm = tmp_path / "statm"
    statm.write_text("900 70 30 1 0 5 0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with statm.open("rb", buffering=0) as file:
        assert bytes_in_use(file) == 40 * mmap.PAGESIZE
        statm.write_text("900 90 30 1 0 5 0")
        assert bytes_in_use(file) == 60 * mmap.PAGESIZE


def test_where_the_system_does_not_tell_memory_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "STATM", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    measured, run = Curves(), Run(n_batches=1, loop=SimpleNamespace(train_iter=0))
    for handle in (measured.on_model, measured.on_batch_end, measured.close, measured.tell):
        handle(run)
    assert len(measured.memory) == 0
    assert "memory" not in run.sources


def test_a_short_curve_says_which_numbers_it_would_keep():
    curve, asked = Curve(4), []
    for step in range(32):
        if curve.is_due():
            asked.append(step)
            curve.add((step, float(step)))
    assert curve.series().steps == [0, 8, 16, 24]
    assert asked == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24]
