"""Trainers of others on two ranks: one verdict, printed by rank 0, of a fault that rank 1 alone has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.support import ROOT, forked, free_port

NEEDS = "pip install 'hookcb[engines]', which the tests with other packages do not need"
WORKER = str(Path(__file__).with_name("ranks_worker.py"))
TORCHRUN = "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"
# without a GPU `--cpu` starts one process, or asks for MPI
ACCELERATE = "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"
ACCELERATE += "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"


def launched(launcher, *args, timeout=120):
    """The exit code and what both ranks print, spaces and line ends alike."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
    }
    by = ["-m", *launcher, free_port()] if launcher else []
    command = [sys.executable, *by, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    return done.returncode, re.sub(r"\s+", " ", done.stdout), done.stderr


def assert_names_rank_1(printed):
    assert printed.count("SICK The inputs are far too large or too small on rank 1 of 2") == 1
    assert printed.count("(input.scale; ") == 1
    assert "HEALTHY" not in printed
    assert printed.count("Note: 2 ranks") == 1


def assert_healthy(printed):
    assert printed.count("HEALTHY as far as checked") == 1
    assert "SICK" not in printed
    assert printed.count("Note: 2 ranks") == 1


def assert_named_if_scaled(printed):
    scaled, healthy = printed.removeprefix("== scaled").split("== healthy")
    assert_names_rank_1(scaled)
    assert_healthy(healthy)


@pytest.mark.parametrize(
    ("engine", "launcher"),
    [
        ("transformers", TORCHRUN),
        pytest.param("transformers", ACCELERATE, marks=pytest.mark.slow),
    ],
)
def test_its_callback_names_the_rank_that_is_sick(engine, launcher):
    code, printed, errors = launched(launcher, WORKER, engine, "adapter", "scaled,healthy")
    assert code == 0, errors
    assert_named_if_scaled(printed)


def test_the_callback_of_lightning_names_the_rank_that_is_sick(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    first, second = forked(WORKER, tmp_path, "lightning", "adapter", "scaled,healthy", world=2)
    assert (first["exit"], second["exit"]) == (0, 0), first["log"] + second["log"]
    assert_named_if_scaled(" ".join(first["log"].split()))
    assert "SICK" not in second["log"]


@pytest.mark.slow
def test_ranks_with_parts_of_the_optimizer_are_judged_together():
    pytest.importorskip("deepspeed", reason=NEEDS)
    code, printed, errors = launched(TORCHRUN, WORKER, "deepspeed", "adapter", "scaled,healthy")
    assert code == 0, errors
    assert_named_if_scaled(printed)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "check"), [("scaled", assert_names_rank_1), ("healthy", assert_healthy)])
def test_ranks_that_ray_starts_are_judged_together(case, check):
    pytest.importorskip("ray", reason=NEEDS)
    code, printed, errors = launched(None, WORKER, "ray", "adapter", case, timeout=300)
    assert code == 0, errors
    check(re.sub(r"\x1b\[36m.*?\x1b\[0m ", "", printed))  # which process says it


@pytest.mark.slow
@pytest.mark.parametrize(("case", "wanted"), [("scaled", 1), ("healthy", 0)])
def test_a_script_with_a_trainer_is_diagnosed_on_all_ranks(case, wanted):
    command = "-m", "hookcb", "diagnose", WORKER, "transformers", "script", case
    code, printed, errors = launched(TORCHRUN, *command)
    assert code == wanted, errors
    (assert_names_rank_1 if wanted else assert_healthy)(printed)
