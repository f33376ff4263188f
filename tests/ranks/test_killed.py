"""A rank is killed at any time: the others end within seconds and name it, and the training resumes."""

import random
import time

import pytest

from tests.ranks.support import begin, end, launched

LOST = "the process that hosts the store through which ranks meet, usually that of rank 0, has ended"


def kill_one(folder, checkpoints, victim, delay, world):
    """Train for very long, kill a rank, or all, `delay` seconds after it began, and wait for the others."""
    processes = begin("kill_worker.py", folder, checkpoints, 10**6, world=world)
    try:
        until = time.monotonic() + 60
        while not all((folder / f"{rank}.begun").exists() for rank in range(world)):
            assert time.monotonic() < until, (folder / "0.log").read_text()[-2000:]
            time.sleep(0.02)
        time.sleep(delay)
        for process in processes if victim is None else [processes[victim]]:
            process.kill()
        killed_at = time.time()
    finally:
        ranks = end(processes, folder, timeout=25)
    return ranks, killed_at


def check_killed(folder, checkpoints, victim, delay, world=2):
    ranks, killed_at = kill_one(folder, checkpoints, victim, delay, world)
    for rank, found in enumerate(ranks):
        if rank != victim:
            said = found.get("text", "") + found["log"]
            assert found.get("error", "RankError") == "RankError", said
            assert found["exit"] in (0, 1), (found["exit"], said[-1000:])
            if found["exit"] == 0:
                assert found["ended_at"] - killed_at < 10
            names_it = f"rank {victim} did not take part" in said or f"rank {victim} raised" in said
            assert names_it or (victim == 0 and LOST in said), said[-1000:]


def check_resumed(folder, checkpoints, world=2):
    n_epoch = 1 + max((int(file.name[6:10]) for file in checkpoints.glob("epoch-*")), default=0)
    ranks = launched("kill_worker.py", folder, checkpoints, n_epoch, world=world)
    assert [found.get("n") for found in ranks] == [n_epoch * 6] * world, ranks[0]
    assert len({found["weights"] for found in ranks}) == 1


@pytest.mark.slow
def test_the_others_end_and_name_a_killed_rank_and_the_training_resumes(tmp_path):
    check_killed(tmp_path / "a", tmp_path / "checkpoints", victim=1, delay=0.3)
    check_resumed(tmp_path / "b", tmp_path / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whoever_is_killed_and_whenever(tmp_path, seed):
    chance = random.Random(seed)
    world = 4 if seed % 5 == 0 else 2
    victim, delay = chance.randrange(world), chance.uniform(0.0, 1.0)
    check_killed(tmp_path / "a", tmp_path / "checkpoints", victim, delay, world)
    check_resumed(tmp_path / "b", tmp_path / "checkpoints", world)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_checkpoint_is_whole_or_not_there_whenever_all_are_killed(tmp_path, seed):
    delay = random.Random(seed).uniform(0.0, 1.0)  # nearly all of which is spent writing
    kill_one(tmp_path / "a", tmp_path / "checkpoints", None, delay, world=2)
    check_resumed(tmp_path / "b", tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
