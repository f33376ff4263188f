"""JSONL and CSV: what was logged is read back, however the writer ended."""

import copy
import json
import math
import pickle
import random
import resource
import struct
from contextlib import contextmanager
from itertools import pairwise

import pytest

from hookcb.loggers import CSVLogger, Histogram, JSONLLogger, read_csv, read_jsonl

KINDS = {"jsonl": (JSONLLogger, read_jsonl), "csv": (CSVLogger, read_csv)}
RECORDS = [
    (0, {"loss": 0.5, "lr": 0.1}),
    (50, {"loss": math.nan, "activations/0/mean": -0.25}),
    (50, {"epoch/time": 1e-300}),
    (100, {"loss": math.inf, 'ünïcode, with a "comma"': -math.inf}),
]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def flat(kind, path):
    """All numbers of a file as (step, name, value), the value by its bits."""
    rows = KINDS[kind][1](path)
    if kind == "jsonl":
        rows = [{"step": row["step"], "name": n, "value": x} for row in rows for n, x in row.items()]
        rows = [row for row in rows if row["name"] != "step"]
    return [(row["step"], row["name"], bits(row["value"])) for row in rows]


def numbers(records):
    return [(step, name, bits(x)) for step, values in records for name, x in values.items()]


def bits(x):
    assert type(x) is float
    return struct.pack("d", x)


def written(kind, path, records=RECORDS):
    logger = KINDS[kind][0](path)
    for step, values in records:
        logger.log(values, step=step)
    return logger


def test_every_number_comes_back_to_the_bit(kind, tmp_path):
    rng = random.Random(0)
    anything = [struct.unpack("d", rng.randbytes(8))[0] for _ in range(200)]
    values = {f"x{i}": x for i, x in enumerate([0.0, -0.0, 5e-324, 1.7976931348623157e308, *anything])}
    values = {name: x if x == x else math.nan for name, x in values.items()}  # there is one NaN in a text
    records = [*RECORDS, (2**40, values)]
    written(kind, tmp_path / "log", records)
    assert flat(kind, tmp_path / "log") == numbers(records)


def test_the_lines_are_json_for_every_reader(tmp_path):
    written("jsonl", tmp_path / "log")

    def refuse(constant):
        raise AssertionError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "log").read_text().splitlines()]
    assert rows[1] == {"step": 50, "loss": "NaN", "activations/0/mean": -0.25}
    assert [row["step"] for row in rows] == [0, 50, 50, 100]


def test_histograms_are_in_the_file_too(tmp_path):
    hist = Histogram(-1.0, 1.0, (3.0, 4.0), below=0.0, above=2.0, min=math.nan, max=math.inf)
    JSONLLogger(tmp_path / "log").log_histograms({"activations/0": hist}, step=3)
    (row,) = read_jsonl(tmp_path / "log")
    back = row["activations/0"]
    assert row["step"] == 3
    assert (back["low"], back["high"], back["counts"], back["max"]) == (-1.0, 1.0, [3.0, 4.0], math.inf)
    assert math.isnan(back["min"])


def test_a_file_cut_off_anywhere_reads_as_far_as_it_is_whole_and_goes_on(kind, tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "cut"
    written(kind, whole)
    content, seen = whole.read_bytes(), []
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        before = flat(kind, path)
        n_lines = content[:end].count(b"\n")
        assert len(KINDS[kind][1](path)) == (max(0, n_lines - 1) if kind == "csv" else n_lines)
        assert before == numbers(RECORDS)[: len(before)]
        written(kind, path, [(150, {"loss": 7.0})])
        assert flat(kind, path) == [*before, (150, "loss", bits(7.0))]
        assert path.read_bytes().startswith(content[:end][: content[:end].rfind(b"\n") + 1])
        seen.append(len(before))
    assert seen[0] == 0
    assert seen[-1] == len(numbers(RECORDS))
    assert all(a <= b for a, b in pairwise(seen))


def test_a_half_line_longer_than_a_block_is_cut_off_too(kind, tmp_path):
    written(kind, tmp_path / "log", RECORDS[:1])
    with (tmp_path / "log").open("a") as file:
        file.write("9" * 200_000)
    written(kind, tmp_path / "log", RECORDS[1:])
    assert flat(kind, tmp_path / "log") == numbers(RECORDS)


@contextmanager
def at_most(n_bytes):
    """No file may grow beyond that, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_harms_nothing_that_is_there(kind, tmp_path):
    logger = written(kind, tmp_path / "log")
    size = (tmp_path / "log").stat().st_size
    with at_most(size + 10), pytest.raises(OSError, match="too large"):
        logger.log({"a long name": 1.0}, step=200)
    assert (tmp_path / "log").stat().st_size == size + 10  # half a line
    assert flat(kind, tmp_path / "log") == numbers(RECORDS)
    logger.log({"loss": 1.0}, step=250)
    assert flat(kind, tmp_path / "log") == [*numbers(RECORDS), (250, "loss", bits(1.0))]


@pytest.mark.parametrize("content", [b"a letter", b"a letter\n", b"[1]\n", b'{"lr": 1}\n', b"step,value\n"])
def test_the_file_of_another_is_refused_and_stays_as_it_is(kind, tmp_path, content):
    logger_of, read = KINDS[kind]
    path = tmp_path / "letter"
    path.write_bytes(content)
    for use in (logger_of, read):
        with pytest.raises(ValueError, match="letter was not written by this logger, it begins with b'"):
            use(path)
    assert path.read_bytes() == content


def test_a_folder_is_refused_and_a_missing_file_is_missing(kind, tmp_path):
    logger_of, read = KINDS[kind]
    with pytest.raises(ValueError, match="is a folder; give a file"):
        logger_of(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


@pytest.mark.parametrize(
    "line", ['{"step": 1, "loss": "much"}', '{"step": 1, ', "[1]", "1", "a,b", "\udcff", "\0" * 99]
)
def test_a_line_that_cannot_be_read_is_named(kind, tmp_path, line):
    path = tmp_path / "log"
    written(kind, path)
    n = path.read_bytes().count(b"\n")
    with path.open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=f"line {n + 1} of .*log cannot be read; delete it"):
        KINDS[kind][1](path)


def test_a_block_of_zeros_inside_a_line_is_named(kind, tmp_path):
    path = tmp_path / "log"
    written(kind, path)
    content = bytearray(path.read_bytes())
    at = content.index(b"loss", content.index(b"\n"))
    content[at : at + 2] = bytes(2)
    path.write_bytes(content)
    number = content[:at].count(b"\n") + 1
    with pytest.raises(ValueError, match=f"line {number} of .*log cannot be read; delete it"):
        KINDS[kind][1](path)


def test_a_file_or_folder_that_is_taken_away_is_made_anew(kind, tmp_path):
    path = tmp_path / "runs" / "first" / "log"
    logger = written(kind, path)
    path.unlink()
    path.parent.rmdir()
    logger.log({"loss": 1.0}, step=200)
    assert flat(kind, path) == [(200, "loss", bits(1.0))]


def test_copies_go_on_with_the_same_file_wherever_they_are(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = written(kind, "log", RECORDS[:1])
    monkeypatch.chdir("/")
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert repr(copied) == repr(logger)
        copied.log({"loss": 1.0}, step=1)
    assert flat(kind, tmp_path / "log") == [*numbers(RECORDS[:1]), *[(1, "loss", bits(1.0))] * 2]


def test_names_that_would_break_the_file_are_refused(tmp_path):
    for name in ("a\nb", "a\rb", "a\0b"):
        with pytest.raises(ValueError, match="give it a name without line breaks"):
            CSVLogger(tmp_path / "log.csv").log({"x": 1.0, name: 1.0}, step=0)
    with pytest.raises(ValueError, match="a value is named 'step'"):
        JSONLLogger(tmp_path / "log.jsonl").log({"step": 1.0}, step=0)
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_logs_nothing_leaves_no_file(kind, tmp_path):
    KINDS[kind][0](tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
