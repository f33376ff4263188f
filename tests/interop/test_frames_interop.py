"""Records as DataFrames of the real pandas and polars."""

import sys

import pytest

from hookcb import ActivationStats
from tests.support import fit, make_learner


@pytest.mark.parametrize(("package", "without"), [("pandas", ()), ("polars", ("pandas",))])
def test_a_frame_has_a_row_for_each_record(package, without, monkeypatch):
    for name in without:
        monkeypatch.setitem(sys.modules, name, None)
    learn = make_learner()
    fit(learn, 1, cbs=ActivationStats())
    frame = learn.activation_stats.to_frame()
    assert type(frame).__module__.split(".")[0] == package
    assert len(frame) == len(learn.activation_stats.stats)
    assert list(frame["0.std"]) == learn.activation_stats.series("0", "std")
    assert len(learn.recorder.to_frame()) == len(learn.recorder.losses)
