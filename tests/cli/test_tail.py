"""`hookcb tail` shows what a JSONLLogger writes, once or as it is written."""

import json

import pytest

from hookcb import JSONLLogger
from hookcb.cli.main import main


@pytest.fixture
def logger(tmp_path):
    logger = JSONLLogger(tmp_path / "run.jsonl")
    for step in range(5):
        logger.log({"loss": 1 / (step + 1), "lr": 0.1}, step=step)
    logger.log_text("verdict", "HEALTHY :warning: [b]as far", step=4)
    return logger


def test_once_shows_the_last_records_as_lines(logger, capsys):
    assert main(["tail", str(logger.path), "--once", "-n", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 3  loss 0.25  lr 0.1",
        "step 4  loss 0.2  lr 0.1",
        "step 4  verdict:",
        "HEALTHY :warning: [b]as far",
    ]


def test_new_records_and_new_texts_are_shown_until_ctrl_c(logger, capsys, monkeypatch):
    half = json.dumps({"step": 7, "loss": 0.5}) + "\n"

    def write(part):
        with logger.path.open("a") as file:
            file.write(part)

    acts = iter(
        [
            lambda: logger.log({"loss": float("nan"), **{f"x{i}": 1 for i in range(20)}}, step=5),
            lambda: logger.log_text("verdict", "HEALTHY :warning: [b]as far", step=5),
            lambda: logger.log_text("verdict", "SICK", step=6),
            lambda: write(half[:9]),
            lambda: write(half[9:]),
            lambda: (logger.path.unlink(), logger.log({"loss": 9.0}, step=0)),
        ]
    )

    def wait(seconds):
        if (act := next(acts, None)) is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr("hookcb.cli.tail.sleep", wait)
    assert main(["tail", str(logger.path), "-n", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("step 5  loss nan  x0 1  x1 1")
    assert lines[2].endswith("… and 13 more")
    assert lines[3:] == ["step 6  verdict:", "SICK", "step 7  loss 0.5", "step 0  loss 9"]


def test_a_file_that_is_gone_or_of_another_kind_is_told(logger, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other.jsonl"
    other.write_text("epoch,loss\n")
    assert main(["tail", str(other), "--once"]) == 1
    assert "was not written by this logger" in capsys.readouterr().err
    monkeypatch.setattr("hookcb.cli.tail.sleep", lambda seconds: logger.path.unlink())
    assert main(["tail", str(logger.path)]) == 1
    assert "hookcb tail: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["tail", str(tmp_path / "othr.jsonl")])
    assert ended.value.code == 2
    assert f"similar: {other}" in capsys.readouterr().err


def test_a_damaged_line_is_named_by_its_number(logger, capsys):
    with logger.path.open("a") as file:
        file.write("{'loss'\n")
    assert main(["tail", str(logger.path), "--once"]) == 1
    assert f"line 7 of {logger.path} cannot be read" in capsys.readouterr().err
