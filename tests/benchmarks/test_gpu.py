"""The script for a GPU writes every row, says what it has not measured, and claims nothing without a GPU."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield import_module("gpu")
    for name in {"gpu", "fused", "loop", "timing", "workloads"} - before:
        del sys.modules[name]


def test_without_a_gpu_it_says_so_and_writes_nothing(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu")]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def check_rows(gpu, folder):
    found = json.loads((folder / "gpu.json").read_text())
    rows = {(row["net"], row["mode"], row["contestant"]): row for row in found["training"]}
    nets = ["mlp", "gpt", "resnet50"]
    assert list(rows) == [(n, m, who) for m in ("eager", "compiled") for n in nets for who in gpu.CONTESTANTS]
    assert found["device"] == "cpu"
    assert found["ranks"] == {"backend": "gloo", "same_weights": True}
    assert found["tests"] == found["fused"] == {"error": "needs a GPU"}
    text = (folder / "gpu.txt").read_text()
    assert all(text.count(who) >= 6 for who in gpu.CONTESTANTS)
    return rows, text


def test_rows_for_which_no_time_is_left_say_so(gpu, tmp_path):
    assert gpu.main(["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)]) == 0
    rows, text = check_rows(gpu, tmp_path)
    assert {row["error"] for row in rows.values()} == {"not measured: the time was up"}
    assert not any(row["rounds"] for row in rows.values())
    assert "time was short: 0 of 5 rounds" in text


@pytest.mark.slow
def test_every_contestant_is_measured_on_every_net(gpu, monkeypatch, tmp_path, fresh_dynamo):
    monkeypatch.setattr(gpu, "WARM", 3)
    monkeypatch.setattr(gpu, "PROFILED", 2)
    assert gpu.main(["--device", "cpu", "--rounds", "1", "--out", str(tmp_path)]) == 0
    rows, text = check_rows(gpu, tmp_path)
    assert "time was short" not in text
    for row in rows.values():
        assert "error" not in row
        assert len(row["rounds"]) == 1
        assert all(one["ms"] > 0 for one in row["rounds"])


def test_an_error_of_one_contestant_is_a_row(gpu, monkeypatch):
    def broken():
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu.CONTESTANTS, "StepTimer()", broken)
    small = gpu.SMALL["gpt"]
    found = gpu.figures_of("StepTimer()", small.model(), small, torch.device("cpu"), None)
    assert found == {"error": "RuntimeError: out of memory"}


def test_launches_and_waits_are_counted_by_the_names_of_calls(gpu):
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaStreamSynchronize", "aten::add"]
    assert gpu.counted(names * 20) == {"launches": 6.0, "waits": 2.0}


def test_a_ratio_compares_times_of_the_same_round(gpu):
    ms = {gpu.BY_HAND: [1.0, 2.0], gpu.BARE: [1.5, 2.0], "StepTimer()": [3.0, 2.0]}
    rows = [
        {"net": "mlp", "mode": "eager", "contestant": who, "rounds": [{"ms": x} for x in values]}
        for who, values in ms.items()
    ]
    found = gpu.ratios(rows)
    assert found["mlp", "eager", gpu.BARE] == [1.5, 1.0]
    assert found["mlp", "eager", "StepTimer()"] == [2.0, 1.0]


def test_the_threshold_is_where_the_fused_kernel_begins_to_be_faster_for_every_dtype(gpu):
    def rows(**ratios):
        return [
            {"dtype": dtype, "n": 2**k, "quartiles": [x, x, x]}
            for dtype, values in ratios.items()
            for k, x in enumerate(values)
        ]

    assert gpu.fused.threshold(rows(float32=[2, 0.9, 0.8], bfloat16=[2, 1.1, 0.9])) == 4
    assert gpu.fused.threshold(rows(float32=[0.5, 0.9, 0.8], bfloat16=[0.9, 0.9, 0.9])) == 1
    assert gpu.fused.threshold(rows(float32=[0.5, 0.5, 1.2])) is None


def test_failed_and_skipped_tests_are_named(gpu):
    xml = """<testsuites><testsuite>
        <testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/></testcase>
        <testcase classname="b" name="three"><skipped/></testcase></testsuite></testsuites>"""
    assert gpu.of_suites(xml) == {"n": 3, "failed": ["a::two"], "skipped": ["b::three"]}


def test_the_nets_have_the_sizes_of_their_models(gpu):
    with torch.device("meta"):
        sizes = {
            n: sum(p.numel() for p in w.model().parameters()) for n, w in gpu.ON_GPU.items() if n != "mlp"
        }
    assert sizes == {"resnet50": 25_557_032, "gpt": 124_475_904}
