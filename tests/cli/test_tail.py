"""`hookcb tail` shows the last records of a JSONLLogger, and each new one."""

import pytest

from hookcb import JSONLLogger
from hookcb.cli import tail as module
from hookcb.cli.main import main


@pytest.fixture
def logger(tmp_path):
    logger = JSONLLogger(tmp_path / "run.jsonl")
    for step in range(12):
        logger.log({"loss": 1 / (step + 1), "lr": float("nan")}, step)
    return logger


def test_the_last_records_are_shown(logger, capsys):
    assert main(["tail", str(logger.path), "--once", "-n", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 10  loss 0.09091  lr nan",
        "step 11  loss 0.08333  lr nan",
    ]


def test_what_follows_is_shown_until_ctrl_c(logger, capsys, monkeypatch):
    pauses = iter(range(2))

    def write_more(seconds):
        if next(pauses) == 0:
            logger.log({"loss": 7.0}, 12)
            logger.log_text("verdict", "SICK  unit.dead", 12)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", write_more)
    assert main(["tail", str(logger.path), "-n", "1"]) == 130
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 11  ")
    assert shown[1:] == ["step 12  loss 7", "step 12", "SICK  unit.dead"]


def test_a_file_that_begins_anew_is_shown_from_its_start(logger, capsys, monkeypatch):
    pauses = iter(range(2))

    def rewrite(seconds):
        if next(pauses) == 0:
            logger.path.unlink()
            logger.log({"loss": 7.0}, 0)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", rewrite)
    main(["tail", str(logger.path), "-n", "1"])
    assert capsys.readouterr().out.splitlines()[1:] == ["step 0  loss 7"]


def test_a_file_that_cannot_be_read_is_told(tmp_path, capsys):
    (tmp_path / "other.txt").write_text("hello\n")
    assert main(["tail", str(tmp_path / "none.jsonl")]) == 1
    assert "there is no file" in capsys.readouterr().err
    assert main(["tail", str(tmp_path / "other.txt")]) == 1
    assert "hookcb tail: " in capsys.readouterr().err
