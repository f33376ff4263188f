"""The script for a GPU writes every row, says what it has not measured, and claims nothing without a GPU."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENOUGH = "1e6"  # seconds; what this process has computed before, other tests too, counts as time spent


@pytest.fixture
def gpu(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield import_module("gpu")
    for name in {"gpu", "compiled", "watched", "workloads"} - before:
        del sys.modules[name]


def test_without_a_gpu_it_says_so_and_writes_nothing(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu")]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_parts_for_which_no_time_is_left_say_so(gpu, tmp_path, capsys):
    assert gpu.main(["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)]) == 1
    tables = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert tables == {
        part: {"not measured": {"error": "TimeoutError: the time was up"}} for part in gpu.PARTS
    }
    assert (tmp_path / "gpu.txt").read_text() == capsys.readouterr().out


def test_every_contestant_has_its_figures(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "MARKS", (10, 20))
    monkeypatch.setattr(gpu, "TURNS", 2)
    options = "--device", "cpu", "--only", "costs", "--nets", "small", "--seconds", ENOUGH
    assert gpu.main([*options, "--out", str(tmp_path)]) == 0
    (rows,) = json.loads((tmp_path / "gpu.json").read_text())["tables"].values()
    assert list(rows) == [*gpu.IN_TURN, "Diagnose(), first 10 steps", "Diagnose(), first 20 steps"]
    assert all(rows[who]["turns"] == len(rows[who]["blocks"]) == 2 for who in gpu.IN_TURN)
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert all({"host ms", "launches", "waits"} <= set(row) for row in list(rows.values())[:-1])
    assert rows["plain"]["ratio"] == 1
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(rows)


@pytest.mark.slow
def test_compiled_contestants_train_in_turn_and_the_error_of_a_process_is_its_row(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "TURNS", 2)
    monkeypatch.setattr(gpu, "COMPILED", (gpu.PLAIN, gpu.DIAGNOSE, "no such contestant"))
    options = "--device", "cpu", "--only", "compiled", "--seconds", ENOUGH
    assert gpu.main([*options, "--out", str(tmp_path)]) == 1
    (rows,) = json.loads((tmp_path / "gpu.json").read_text())["tables"].values()
    assert list(rows) == list(gpu.COMPILED)
    assert "KeyError: 'no such contestant'" in rows.pop("no such contestant")["error"]
    assert all(row["graphs"] >= 1 and row["s"] > 0 and row["turns"] == gpu.TURNS for row in rows.values())


def test_one_that_does_not_compile_in_time_is_killed_with_its_children(gpu):
    compare, rows = sys.modules["compiled"].compare, {"plain": {}}
    compare(rows, "tiny small", "cpu", "eager", lambda: 0.0, turns=2)
    assert rows == {"plain": {"error": "killed: not done in time"}}


def test_an_error_of_one_contestant_is_a_row(gpu, monkeypatch, tmp_path):
    def broken(loop):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "IN_TURN", {"plain": gpu.IN_TURN["plain"], "broken": broken})
    monkeypatch.setattr(gpu, "TURNS", 2)
    loop, rows = gpu.Loop(gpu.SMALL["small"], torch.device("cpu")), {}
    gpu.take_turns(loop, rows, gpu.Report(tmp_path, loop.device, 100), end=float("inf"))
    assert rows["broken"] == {"error": "RuntimeError: out of memory"}
    assert rows["plain"]["turns"] == 2


def test_launches_and_waits_are_counted_by_the_names_of_calls(gpu):
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaStreamSynchronize", "aten::add"]
    assert gpu.counted(names * 20) == {"launches": 6.0, "waits": 2.0}


def test_a_ratio_compares_times_of_the_same_turn(gpu):
    plain, other = ([{"ms": x} for x in ms] for ms in ((1.0, 2.0, 1.0), (3.0, 2.0, 1.5)))
    found = gpu.figures(other, plain)
    assert (found["ratio"], found["least"], found["most"], found["ms"]) == (1.5, 1.0, 3.0, 2.0)
    assert "ratio" not in gpu.figures(other, [])


def test_kernels_that_a_watch_adds_are_told_from_those_of_the_step(gpu, tmp_path):
    report = gpu.Report(tmp_path, torch.device("cpu"), 100)
    gpu.kernel(report, {}, n=4096)  # on a CPU these are operations
    (rows,) = report.tables.values()
    assert list(rows) == [f"{x}, with_hist={y}" for x in ("float32", "bfloat16") for y in (False, True)]
    names = [row["names"].split(", ") for row in rows.values()]
    assert all("aten::copy_" in of_one and "aten::mul" not in of_one for of_one in names)


def test_failed_and_skipped_tests_are_counted(gpu):
    lines = (
        "[gw0] [ 10%] PASSED a.py::one ",
        "[gw1] [100%] FAILED a.py::two[x y] ",
        "[gw1] [ 50%] SKIPPED b.py::b",
    )
    text = "\n".join(lines)
    assert gpu.outcomes(text) == {"failed": 1, "passed": 1, "skipped": 1, "names": "failed: two[x y]"}


def test_the_nets_have_the_sizes_of_their_models(gpu):
    with torch.device("meta"):
        sizes = {n: sum(p.numel() for p in w.model().parameters()) for n, w in gpu.ON_GPU.items()}
    assert sizes == {"resnet50": 25_557_032, "gpt2": 124_475_904, "small": 10_770_816}
