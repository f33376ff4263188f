"""Records are DataFrames, of pandas or else of polars; without both the error says what to install."""

import sys
from types import SimpleNamespace

import pytest

from hookcb import ActivationStats, GradientHealth, MemoryStats, StepTimer
from hookcb.records.frames import frame_of
from tests.support import fit, make_learner


class Frame(dict):
    """What the tests need of a DataFrame."""

    def __init__(self, values, strict=True):
        super().__init__(values)


@pytest.fixture
def only(monkeypatch):
    """Has these packages, which need not be installed, be all that can be imported for frames."""

    def have(*names):
        for name in ("pandas", "polars"):
            module = SimpleNamespace(DataFrame=type(name, (Frame,), {})) if name in names else None
            monkeypatch.setitem(sys.modules, name, module)

    return have


@pytest.fixture(scope="module")
def learn():
    learn = make_learner()
    cbs = [ActivationStats(), GradientHealth(), StepTimer(), MemoryStats(every=3)]
    return fit(learn, 2, cbs=cbs) or learn


@pytest.mark.parametrize(
    ("there", "kind"), [(["pandas", "polars"], "pandas"), (["pandas"], "pandas"), (["polars"], "polars")]
)
def test_pandas_comes_before_polars(there, kind, only):
    only(*there)
    frame = frame_of([{"a": 1}, {"a": 2, "b": 3}])
    assert type(frame).__name__ == kind
    assert frame == {"a": [1, 2], "b": [None, 3]}


def test_without_both_it_says_what_to_install(only):
    only()
    with pytest.raises(ModuleNotFoundError, match=r"pip install pandas, or read \.table\(\)"):
        frame_of([{"a": 1}])


def test_layers_and_parameters_are_columns(learn, only):
    only("pandas")
    frame = learn.activation_stats.to_frame()
    stats = learn.activation_stats
    assert list(frame)[:4] == ["record", "epoch", "step", "phase"]
    assert frame["0.std"] == stats.series("0", "std")
    assert frame["step"] == stats.steps()
    assert learn.gradient_health.to_frame()["0.weight.norm"] == learn.gradient_health.series(
        "0.weight", "norm"
    )


def test_steps_losses_and_memory_are_frames(learn, only):
    only("pandas")
    times = learn.step_timer
    assert (
        times.to_frame()["total"] == [row["total"] for row in times.table()] == [x.total for x in times.times]
    )
    assert not any(name.startswith("device_") for name in times.table()[0])
    assert learn.memory_stats.to_frame()["kept"] == [row.kept for row in learn.memory_stats.layers()]
    frame = learn.recorder.to_frame()
    assert frame["loss"] == learn.recorder.losses
    assert frame["epoch"] == [0] * learn.recorder.ends[0] + [1] * (
        len(frame["loss"]) - learn.recorder.ends[0]
    )
