"""Data of a page come back from its text, in little space, and what is not finite is never left out."""

import json
import math
import random

import pytest

from hookcb.diagnosis.run import Series
from hookcb.records.content import (
    HistogramOverTime,
    MemoryUsed,
    ModuleRow,
    RanksCompared,
    Recorded,
    SlowStep,
    TimeSpent,
)
from hookcb.report.data import PageData, envelope, thinned
from tests.support import in_turn

NAN, INF = math.nan, math.inf


def back(data):
    return PageData.from_json(data.to_json())


def test_all_parts_come_back():
    data = PageData(
        "headline",
        {"findings": [{"code": "x", "limit": None}]},
        run={"loss": Series([0, 3, 4], [1.5, -2.0, 0.25])},
        modules=[ModuleRow("a", "Linear", "Linear 2→3", 9)],
        layers={"a": Recorded("a", hist=HistogramOverTime([0.0, 1.0], [Series([1], [4.0])]))},
        time=TimeSpent(
            {"data": Series([1], [0.5])}, [SlowStep(1, 2.0, 1.0, "data")], ["slow"], {"a": [0.25]}
        ),
        memory=MemoryUsed(["kept"], {"a": [1.0]}, Series([2], [4.0])),
        ranks=RanksCompared(2, 1, ["h", "i"], [Series(), Series([1], [1.0])]),
        config={"Run": [["a", "b"]]},
    )
    assert back(data) == data


def test_values_of_layers_are_rounded_to_4_digits_and_none_becomes_infinite():
    random.seed(0)
    values = [random.gauss(0, 1) * 10 ** random.randint(-37, 37) for _ in range(400)] + [3.4e38, -3.4e38]
    own = back(PageData("x", layers={"a": Recorded("a", stats={"std": Series(list(range(402)), values)})}))
    found = own.layers["a"].stats["std"].values
    assert found == pytest.approx(values, rel=2**-14)
    assert all(map(math.isfinite, found))


def test_what_is_not_finite_stays_so():
    values = [NAN, INF, -INF, 0.0, 1e300, -1e300]
    data = PageData("x", run={"loss": Series(list(range(6)), values)})
    data.layers["a"] = Recorded("a", stats={"std": data.run["loss"]})
    own = back(data)
    for found in (own.run["loss"].values, own.layers["a"].stats["std"].values):
        assert str(found[:4]) == "[nan, inf, -inf, 0.0]"
        assert found[4:] == pytest.approx([3.4e38, -3.4e38], rel=0.01)


@in_turn("thin", [thinned, envelope])
@in_turn("n", [1, 99, 100, 101, 1000, 12_345])
def test_a_thinned_series_is_short_and_keeps_its_end_and_each_rare_value(thin, n):
    values = [1.0] * n
    for at in (0, n // 3, n - 1):
        values[at] = NAN
    short = thin(Series(list(range(n)), values), 100)
    assert len(short) <= max(n if n <= 100 else 0, 104)
    assert short.steps == sorted(set(short.steps))
    assert sum(x != x for x in short.values) == len({0, n // 3, n - 1})
    assert short.steps[-1] == n - 1


def test_an_envelope_keeps_the_spikes():
    values = [1.0] * 10_000
    values[777], values[8_001] = 50.0, -50.0
    short = envelope(Series(list(range(10_000)), values), 200)
    assert {777, 8_001} <= set(short.steps)


def test_a_hundred_layers_take_200_kB_at_most():
    random.seed(0)
    steps = list(range(0, 512 * 9, 9))
    names = ("mean", "std", "min", "max", "near_zero", "norm", "update_ratio", "weight_norm")
    data = PageData("x")
    for i in range(100):
        stats = {name: Series(steps, [random.gauss(0, 1) for _ in steps]) for name in names}
        data.layers[f"layer.{i}"] = Recorded(f"layer.{i}", stats=stats)
    text = data.to_json()
    assert len(text) < 200_100
    assert len(back(data).layers["layer.7"].stats["std"]) > 60


@in_turn("text", ["", "{}", "[]", "null", '{"schema": 1}', '{"schema": 1, "content": "", "numbers": ""}'])
def test_damaged_text_is_told(text):
    with pytest.raises(ValueError, match="damaged"):
        PageData.from_json(text)


def test_another_version_is_told():
    state = json.loads(PageData("x").to_json()) | {"schema": 2}
    with pytest.raises(ValueError, match="version 2, and this hookcb reads version 1"):
        PageData.from_json(json.dumps(state))


def test_phases_of_a_long_run_add_up_at_each_step_that_is_kept():
    random.seed(0)
    n = 5_000
    phases = {name: Series(list(range(n)), [random.random() for _ in range(n)]) for name in ("data", "rest")}
    phases["data"].values[1_234] = 50.0
    kept = back(PageData("x", time=TimeSpent(phases))).time.phases
    assert kept["data"].steps == kept["rest"].steps
    assert 1_234 in kept["data"].steps
    assert len(kept["data"]) <= 2_000
    assert kept["rest"].values == pytest.approx([phases["rest"].values[i] for i in kept["rest"].steps])


def test_values_are_rounded_to_3_digits_if_the_text_would_be_too_long(monkeypatch):
    monkeypatch.setattr("hookcb.report.data.MAX_TEXT", 100)
    random.seed(0)
    series = Series(list(range(16)), [random.gauss(0, 1) for _ in range(16)])
    own = back(PageData("x", layers={"a": Recorded("a", stats={"std": series})})).layers["a"].stats["std"]
    errors = [abs(y / x - 1) for x, y in zip(series.values, own.values, strict=True)]
    assert 2**-14 < max(errors) <= 2**-11
