"""Statements of a file of the user, by their lines."""

import pytest

from hookcb.diagnosis.measurements.source import Source

LINES = """\
for x in read(
    batches,
):
    if x.sum() > 0:
        train(
            x,
            lr=0.1,
        )
    else:
        y = next(
            others,
        )

@decorated
def own():
    for k in range(3):
        work(k)
""".splitlines(keepends=True)


@pytest.mark.parametrize(
    ("line", "first", "text"),
    [
        (1, 1, "for x in read("),
        (2, 1, "for x in read("),
        (4, 4, "if x.sum() > 0"),
        (5, 5, "train("),
        (7, 5, "train("),
        (11, 10, "y = next("),
        (16, 16, "for k in range(3)"),
        (99, 99, ""),
    ],
)
def test_a_line_belongs_to_the_innermost_statement(line, first, text):
    assert Source(LINES).statement(line) == (first, text)


def test_loops_are_found_by_what_is_in_their_body():
    source = Source(LINES)
    assert source.loops_around(6) == [1]
    assert source.loops_around(10) == [1]
    assert source.loops_around(17) == [16]
    assert source.loops_around(1) == source.loops_around(15) == []


def test_calls_of_next_are_found_in_all_lines_of_their_statement():
    source = Source(LINES)
    assert [line for line in range(1, 18) if source.calls_next(line)] == [10, 11, 12]


def test_the_first_parameter_of_a_module_is_not_fetched():
    source = Source(["x = x.to(next(net.parameters()).device)\n", "x = next(batches())\n", "x = next(it)\n"])
    assert [source.calls_next(line) for line in (1, 2, 3)] == [False, True, True]


def test_source_that_cannot_be_read_has_its_lines():
    source = Source(["%matplotlib inline\n", "for x in batches:\n", "    step(next(x))\n"])
    assert source.statement(2) == (2, "for x in batches")
    assert source.loops_around(3) == []
    assert not source.calls_next(3)
    assert Source([]).statement(7) == (7, "")
