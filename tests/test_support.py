"""Helpers of the tests let nothing fail in silence."""

import random

import pytest
import torch

from tests.support import in_turn


def test_rows_in_turn_all_run_and_those_that_fail_are_named():
    drawn = []

    @in_turn("a, b", [(1, 2), (3, 3), pytest.param(4, 5)])
    @in_turn("c", ["same", "other"], ids=["one", "two"])
    def check(a, b, c, fixture):
        drawn.append((fixture, random.random(), torch.rand(1).item()))
        if c == "other" and a != 3:
            with pytest.raises(ZeroDivisionError):
                assert a
        assert a == b or c == "other"

    with pytest.raises(BaseExceptionGroup, match="2 of 3 fail") as caught:
        check(fixture=1)
    assert len(drawn) == 6
    assert len(set(drawn)) == 1
    first, last = caught.value.exceptions
    assert first.__notes__ == ["in row 0, with a, b: (1, 2)"]
    assert [type(error).__name__ for error in last.exceptions] == ["AssertionError", "Failed"]
    assert [error.__notes__ for error in last.exceptions] == [
        ["in row 0, with c: one"],
        ["in row 1, with c: two"],
    ]


def test_a_row_in_turn_that_is_skipped_hides_no_failure():
    @in_turn("a", [1, 2, 3])
    def check(a):
        assert a == 1
        pytest.skip("it is 1")

    @in_turn("a", [1, 2])
    def skips(a):
        if a == 2:
            pytest.skip("it is 2")

    with pytest.raises(ExceptionGroup, match="2 of 3 fail"):
        check()
    with pytest.raises(pytest.skip.Exception, match="in row 1, it is 2"):
        skips()


def test_rows_in_turn_are_some_and_all_run():
    with pytest.raises(AssertionError, match="without a row"):
        in_turn("a", [])
    with pytest.raises(AssertionError, match="all rows run"):
        in_turn("a", [pytest.param(1, marks=pytest.mark.slow)])
