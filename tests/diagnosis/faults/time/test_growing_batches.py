"""Batches that grow, made up."""

from hookcb.diagnosis.faults.time.growing_batches import GrowingBatches
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.run import Run, Series, Skipped
from tests.diagnosis.faults.time.support import only, places


def growing(sizes, seconds):
    n = len(seconds)
    run = Run()
    run.measured(Inputs).sizes = Series(list(range(len(sizes))), [float(x) for x in sizes])
    curves = run.measured(Curves)
    curves.batches = Series(list(range(n)), list(seconds))
    curves.waits = Series(list(range(n)), [0.0] * n)
    return run


def test_batches_that_grow_are_told_only_if_they_take_longer():
    longer = [0.004 + 0.001 * i for i in range(40)]
    assert places(GrowingBatches, growing(range(10, 100, 9), longer)) == ["time.growing"]
    assert places(GrowingBatches, growing(range(10, 100, 9), [0.004] * 40)) == []
    assert places(GrowingBatches, growing([10] * 12, longer)) == []
    assert isinstance(only(GrowingBatches, growing([10] * 5, longer)), Skipped)
