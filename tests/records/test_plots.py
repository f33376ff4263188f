"""Bars of text show all values that they are given."""

import math
import sys

from hookcb.records.plots import shortened_names, sparkline
from tests.support import in_turn

NAN, INF = math.nan, math.inf


@in_turn(
    "values, expected",
    [
        ([], ""),
        ([3.0], "▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0, 3.5], "█▁▅"),
        ([-1.0, 1.0], "▁█"),
        ([5.0] * 7, "▁" * 7),
        ([0.0, NAN, 7.0], "▁ █"),
        ([0.0, INF, 7.0, -INF], "▁!█!"),
        ([NAN, NAN], "  "),
        ([INF, NAN], "! "),
        ([1e-30, 2e-30], "▁█"),
        ([1e38, 3e38], "▁█"),
    ],
)
def test_a_sparkline_scales_from_lowest_to_highest(values, expected):
    assert sparkline(values) == expected


def test_a_long_sparkline_averages_bins_of_equal_size():
    assert sparkline([0, 2, 6, 8, 7, 7], width=3) == "▁██"
    assert sparkline([0, 0, 3, 4, 7, 7], width=3) == "▁▅█"
    assert sparkline(list(range(10_000)), width=8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(999)))) == 20
    assert len(sparkline(list(range(19)))) == 19


def test_in_a_bin_infinity_counts_and_nan_does_not():
    assert sparkline([0, NAN, 7, 7, NAN, NAN, INF, NAN], width=4) == "▁█ !"


def test_a_constant_is_flat_whatever_its_bins_round_to():
    assert sparkline([0.1] * 97, width=20) == "▁" * 20
    for n in range(20, 100):
        assert sparkline([-1234.567] * n, width=7) == "▁" * 7


def test_no_value_is_left_out_of_a_sparkline():
    for n in range(1, 60):
        for spot in range(n):
            values = [0.0] * n
            values[spot] = INF
            assert sparkline(values, width=7).count("!") == 1


def test_a_sparkline_needs_no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sparkline([1.0, 2.0]) == "▁█"


def test_names_lose_what_all_have_in_common_only_if_they_are_too_long():
    names = [f"model.encoder.layers.{i}.fc" for i in range(3)]
    assert shortened_names(names, 30) == names
    assert shortened_names(names, 6) == ["0.fc", "1.fc", "2.fc"]
    long = [f"model.layers.{i}.attention.projection" for i in range(3)]
    assert shortened_names(long, 12) == ["0…", "1…", "2…"]
    assert shortened_names(["a.bias", "a.a_long_weight"], 8) == ["bias", "…_weight"]
    assert shortened_names(["a" * 9 + "b" * 9, "c" * 9 + "b" * 9], 8) == ["0: …bbbbb", "1: …bbbbb"]
    assert shortened_names(["only.one.layer"], 8) == ["layer"]
    assert shortened_names(["x" * 30], 8) == ["…xxxxxxx"]
