"""Ranks that wait for each other: where each of them is is told, and the verdict is unknown."""

import os
import re
import signal
import time

import pytest

from tests.ranks.support import begin, by_torchrun, end, shared

TIMEOUT = 6.0  # seconds of the group; the report comes after 4.8


def run(folder, case, how="command", seconds=TIMEOUT, **options):
    return end(begin("hangs_worker.py", folder, case, seconds, how), folder, **options)


def run_at_once(tmp_path_factory, name, cases):
    """What ranks wrote by case, of launches that wait for their timeout, and so at once."""

    def make(folder):
        begun = [begin("hangs_worker.py", folder / case, case, TIMEOUT, how) for case, how, _ in cases]
        each = zip(cases, begun, strict=True)
        return {case: end(processes, folder / case, only=only) for (case, _, only), processes in each}

    return shared(tmp_path_factory, name, make)


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    cases = ("in a layer", "watch", 1), ("sleeps", "learner", 1), ("sleeps early", "command", 1)
    return run_at_once(tmp_path_factory, "stuck", cases)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return run_at_once(
        tmp_path_factory, "apart", [(case, "command", None) for case in ("other collectives", "ends early")]
    )


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    cases = [(case, "command", None) for case in ("validates", "saves", "slow")]
    return run_at_once(tmp_path_factory, "long", cases)


def text_of(rank):
    """What a rank wrote, as one line."""
    return " ".join(rank["log"].split())


def told(rank):
    """The report of a rank, and the begin of its verdict."""
    text = text_of(rank)
    report = text.partition("hookcb: no training batch for ")[2].partition("Traceback")[0]
    verdict = text.partition("UNKNOWN ")[2].partition("Note:")[0].partition("Inspected:")[0]
    return report, verdict


SLEEPS = "`time.sleep(seconds) # here it hangs`"
WAITS = ".backward()`, in the backward of batch"


def test_the_rank_that_hangs_is_named_before_the_group_gives_up(tmp_path):
    first, _ = run(tmp_path / "x", "sleeps", only=1)
    report, verdict = told(first)
    assert first["exit"] == 1
    for text in report, verdict:
        assert f"rank 1 is at tests/ranks/hanging_worker.py:41, {SLEEPS}, after 3 batches; rank 0" in text
        assert f"{WAITS} 3" in text
    assert "HEALTHY" not in first["log"]


@pytest.mark.slow
def test_the_layer_is_named_in_which_a_rank_hangs(stuck):
    first, _ = stuck["in a layer"]
    report, verdict = told(first)
    for text in report, verdict:
        assert f"{SLEEPS}, in the forward of batch 2, in layer 1.0; rank 0" in text


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_learner_is_named(stuck):
    first, _ = stuck["sleeps"]
    for text in told(first):
        assert f"rank 1 is at tests/ranks/hanging_worker.py:41, {SLEEPS}" in text
    assert "HEALTHY" not in first["log"]


@pytest.mark.slow
def test_collectives_that_do_not_match_are_named(apart):
    first, second = apart["other collectives"]
    report, verdict = told(first)
    assert "rank 0 waits in broadcast at" in report
    assert "rank 1 waits in barrier at" in report
    assert "rank 0 has waited in vain in broadcast" in verdict
    assert "in barrier" in verdict
    assert (first["exit"], second["exit"]) == (1, 1)


@pytest.mark.slow
def test_a_hang_after_one_batch_is_not_healthy(stuck):
    first, _ = stuck["sleeps early"]
    _, verdict = told(first)
    assert f"{SLEEPS}, after 1 batch; rank 0 has waited in vain in DistributedDataParallel at" in verdict
    assert first["exit"] == 1


@pytest.mark.slow
def test_a_rank_that_has_ended_its_training_is_named(apart):
    first, _ = apart["ends early"]
    assert "rank 1 has ended its training, after 6 batches; rank 0 has waited in vain" in told(first)[1]
    assert first["exit"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["itself", "torchrun"])
def test_the_error_of_the_other_rank_explains_a_lost_connection(by, tmp_path):
    if by == "torchrun":  # which ends rank 0 as rank 1 fails
        first, _ = by_torchrun("hangs_worker.py", tmp_path / "x", "raises", 30, "command")
        assert re.search(r"^(\[rank1\]: )?ValueError: planted$", first["log"], re.MULTILINE)
    else:
        first, _ = run(tmp_path / "x", "raises", seconds=30)
    text = text_of(first)
    assert "UNKNOWN" in text
    assert "rank 1 raised ValueError: planted at tests/ranks/hanging_worker.py:" in text
    assert '`raise ValueError("planted")`, after 4 batches' in text
    assert first["exit"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["command", "watch"])
def test_sigterm_in_a_collective_gives_the_verdict_so_far(how, tmp_path):
    processes = begin("hangs_worker.py", tmp_path / "x", "waits for both", 60, how)
    until, log = time.monotonic() + 60, tmp_path / "x" / "1.log"
    while time.monotonic() < until and not (log.exists() and "stuck" in log.read_text()):
        time.sleep(0.2)
    time.sleep(1)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    first, second = end(processes, tmp_path / "x", 30)
    assert (first["exit"], second["exit"]) == (-signal.SIGTERM, -signal.SIGTERM)
    _, verdict = told(first)
    assert (
        f"rank 1 was ended by SIGTERM at tests/ranks/hanging_worker.py:41, {SLEEPS}, after 3 batches"
        in verdict
    )
    assert "rank 0 was ended by SIGTERM in all_reduce at" in verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", ["validates", "saves", "slow"])
def test_a_rank_that_may_take_long_is_no_hang(case, long):
    for rank in long[case]:
        assert rank["exit"] == 0
        assert "no training batch" not in rank["log"]
