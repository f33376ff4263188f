"""Each example runs as it stands, and prints its report."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.support import forked, free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# what each prints, besides a table
REPORTS = {
    "plain_loop": ["activations in the last of 24", "gradients in the last of 24", "after_epoch: 3 times"],
    "lightning_trainer": ["activations in the last of 24", "gradients in the last of 24"],
    "hf_trainer": [
        "activations in the last of 16",
        "32×8×32",
        "after_loss: 16 times",
    ],
    "accelerate_loop": [
        "activations in the last of 48",
        "gradients in the last of 24",
        "after_epoch: 3 times",
    ],
    "gan": ["gradients in the last of 100", "activations in the last of 200", "2#1"],
    "amp_accumulation": ["activations in the last of 96", "gradients in the last of 24", "skipped 0"],
    "compiled_model": [
        "activations in the last of 24",
        "gradients in the last of 24",
        "before_step: 24 times",
    ],
    "distributed_ddp": ["valid_loss", "HEALTHY"],
    "distributed_fsdp2": ["valid_loss", "gradients in the last of 46"],
    "distributed_lightning": ["rank 0 of 2: HEALTHY", "rank 1 of 2: HEALTHY"],  # Lightning starts the other
    "distributed_accelerate": ["valid_loss", "HEALTHY"],
    "distributed_hf": ["rank 0 of 1: HEALTHY"],
}
# packages of the extra "engines", without which these cannot run, and how they are started
ENGINES = {"distributed_ray": ("ray", False), "distributed_deepspeed": ("deepspeed", True)}
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]


def test_there_is_a_report_for_each_example():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*REPORTS, *ENGINES}


OFFLINE = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
ENV = OFFLINE | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def run(name, folder, *launcher):
    """What an example prints, by a Python of its own."""
    command = [sys.executable, *launcher, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, env=os.environ | ENV, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [*folder.iterdir()]  # nothing is left behind
    return re.sub(r"\s+", " ", done.stdout)


@pytest.fixture
def quickly(tmp_path, monkeypatch):
    """Runs an example in a process, or in ranks, that have imported torch already; gives what it prints."""
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)

    def run(name, world=None):
        folder = tmp_path / "folder"
        folder.mkdir()
        monkeypatch.chdir(folder)
        ranks = forked(EXAMPLES / f"{name}.py", tmp_path, world=world)
        printed = "".join(rank["log"] for rank in ranks)
        assert [rank["exit"] for rank in ranks] == [0] * len(ranks), printed
        assert not [*folder.iterdir()]  # nothing is left behind
        return re.sub(r"\s+", " ", printed)

    return run


@pytest.mark.parametrize("name", REPORTS)
def test_an_example_runs_and_prints_its_report(name, quickly):
    printed = quickly(name)
    assert [part for part in REPORTS[name] if part not in printed] == []


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("distributed_fsdp2", ["gradients in the last of 24"]),
        ("distributed_accelerate", ["HEALTHY"]),
    ],
)
def test_an_example_of_several_processes_prints_once(name, report, quickly):
    printed = quickly(name, world=2)
    assert [part for part in ["valid_loss", *report] if printed.count(part) != 1] == []


def test_an_example_prints_once_under_torchrun(tmp_path):
    printed = run("distributed_ddp", tmp_path, *TORCHRUN, "--master-port", free_port())
    assert [part for part in ["valid_loss", "HEALTHY"] if printed.count(part) != 1] == []


@pytest.mark.parametrize("name", ["distributed_lightning", "distributed_hf"])
def test_in_other_trainers_all_processes_have_one_verdict(name, quickly):
    printed = quickly(name, world=2)
    for rank in (0, 1):
        assert printed.count(f"rank {rank} of 2: HEALTHY as far as checked") == 1
    assert printed.count("2 ranks") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_engines_have_one_verdict_for_all_ranks(name, tmp_path):
    package, by_torchrun = ENGINES[name]
    pytest.importorskip(package, reason="pip install 'hookcb[engines]'; no other tests need it")
    printed = run(name, tmp_path, *([*TORCHRUN, "--master-port", free_port()] if by_torchrun else []))
    assert printed.count("HEALTHY") == printed.count("Note: 2 ranks") == 1


@pytest.mark.parametrize("name", [*REPORTS, *ENGINES])
def test_an_example_fits_on_a_screen_or_two(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
