"""What watching costs on a CUDA GPU: contestants in turn within one process, in at most four minutes.

    python benchmarks/gpu.py [--seconds 240] [--only costs compiled kernel tests] [--nets gpt2 resnet50 small]

Writes `gpu.json` and `gpu.txt` into the folder `--out` after each piece, and says what was not measured.

costs: one net is trained by a plain loop in bfloat16 with a fused AdamW. Contestants act on it in turn, each
for a block of steps: 3 to warm up and 10 timed, with a wait for the GPU before and after the 10 only. Each
block has new callbacks; attaching and detaching them ("on", "off", in ms) is timed on its own. A ratio is the
median over turns of a block's time divided by the plain loop's in the same turn. Host time is that of a step
issued to an idle GPU. `Diagnose` follows one training from its first step. Launches and waits are those of
steps 4 to 13; torch's profiler counts them last, as it slows down what follows.

compiled: a process for each contestant, all at once, compiles the small net from empty caches; those that are
done in time then train in turn. See `compiled.py`.

kernel: time on the GPU of what ActivationStats adds to a step with one output of 2**26 elements.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from compiled import ROOT, compare, end, started
from torch import nn
from torch.profiler import ProfilerActivity, profile
from watched import BOTH, CONTESTANTS, DIAGNOSE, PLAIN, STEPS, Attach, Loop, Row, figures, lines, wait
from workloads import ON_GPU, SMALL, Workload

from hookcb import ActivationStats, Callback, watch

WARM, TURNS = 3, 9  # steps before a block; blocks of each contestant, at most
MARKS = 20, 100, 500  # steps of `Diagnose` after which its cost so far is noted
LEAST = 10  # seconds; no part is begun with less time left
DIAGNOSED = CONTESTANTS[DIAGNOSE]
IN_TURN = {who: attach for who, attach in CONTESTANTS.items() if who not in (BOTH, DIAGNOSE)}
COMPILED = PLAIN, "ActivationStats()", "GradientHealth()", DIAGNOSE
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
WAITS = ("cudaStreamSync", "cudaDeviceSync", "cudaEventSync", "cuStreamSync", "cuCtxSync", "cuEventSync")


class Report:
    """Tables of what was measured: name of the table, of the row, of the column."""

    def __init__(self, folder: Path, device: torch.device, seconds: float) -> None:
        self.began = time.monotonic() - time.process_time()  # imports count, too
        self.folder, self.device, self.seconds = folder, device, seconds
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        cuda = f"CUDA {torch.version.cuda}, {os.cpu_count()} processors"
        self.title = f"{name}, torch {torch.__version__}, {cuda}"
        self.tables: dict[str, dict[str, Row]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the time is up."""
        return self.began + share * self.seconds - time.monotonic()

    def write(self) -> str:
        head = f"{self.title}: {self.seconds - self.left():.1f} seconds"
        found = json.dumps({"title": head, "tables": self.tables}, indent=1)
        (self.folder / "gpu.json").write_text(found)
        text = "\n".join([head, *(line for name, rows in self.tables.items() for line in lines(name, rows))])
        (self.folder / "gpu.txt").write_text(text + "\n")
        return text


# ---- costs


def costs(report: Report, nets: Mapping[str, Workload]) -> None:
    """Times of all nets, then their counts; the time is shared out among the nets."""
    found = {net: report.tables.setdefault(workload.title, {}) for net, workload in nets.items()}
    for i, net in enumerate(nets):
        end = time.monotonic() + report.left(0.5) / (len(nets) - i)
        loop = Loop(nets[net], report.device)
        loop.run(WARM)
        take_turns(loop, found[net], report, end - report.seconds / 15)
        try:
            found[net] |= first_steps(loop, end)
        except Exception as error:
            found[net][name_of(MARKS[0])] = {"error": text_of(error)}
        report.write()
        del loop
    for net in nets:
        if report.left(0.55) > 0:
            add_counts(Loop(nets[net], report.device), found[net])
            report.write()


def take_turns(loop: Loop, rows: dict[str, Row], report: Report, end: float) -> None:
    """Give each contestant blocks of steps in turn; the first turn is whole, however long it takes."""
    blocks: dict[str, list[Row]] = {who: [] for who in IN_TURN}
    took = 0.0
    while len(blocks[PLAIN]) < TURNS and (not took or time.monotonic() + took < end):
        began = time.monotonic()
        for who, attach in IN_TURN.items():
            if "error" not in rows.get(who, {}):
                try:
                    blocks[who].append(block(loop, attach, with_host=not took))
                    rows[who] = figures(blocks[who], blocks[PLAIN])
                except Exception as error:  # out of memory: the other rows are still of use
                    rows[who] = {"error": text_of(error)}
        report.write()
        took = time.monotonic() - began


def block(loop: Loop, attach: Attach, with_host: bool) -> Row:
    """Milliseconds of a step, of attaching and of detaching; the peak of memory in GB."""
    gc.collect()
    wait(loop.device)
    if loop.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with attach(loop):
        found = {"on": (time.perf_counter() - began) * 1e3}
        loop.run(WARM)
        found["ms"] = loop.run()
        if loop.device.type == "cuda":
            found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        if with_host:
            found["host ms"] = mean(loop.host() for _ in range(STEPS))
        began = time.perf_counter()
    wait(loop.device)
    return found | {"off": (time.perf_counter() - began) * 1e3}


def first_steps(loop: Loop, end: float) -> dict[str, Row]:
    """Cost of `Diagnose` up to several steps of one training, relative to blocks before and after it."""
    with DIAGNOSED(loop):
        loop.run(WARM)  # kernels are compiled
        host = mean(loop.host() for _ in range(STEPS))
    plain, ms = [loop.run() for _ in range(4)], list[float]()
    with DIAGNOSED(loop):
        while (n := len(ms) * STEPS) < MARKS[0] or (n < MARKS[-1] and time.monotonic() < end):
            ms.append(loop.run())
        began = time.perf_counter()
    off = (time.perf_counter() - began) * 1e3
    base = median(plain + [loop.run() for _ in range(4)])
    so_far = {min(mark, n): mean(ms[: mark // STEPS]) for mark in MARKS}
    rows = {name_of(n): {"ms": x, "ratio": x / base, "blocks": ms} for n, x in so_far.items()}
    rows[name_of(MARKS[0])]["host ms"], rows[name_of(n)]["off"] = host, off
    return rows


def name_of(n: int) -> str:
    return f"{DIAGNOSE}, first {n} steps"


def add_counts(loop: Loop, rows: dict[str, Row]) -> None:
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (loop.device.type == "cuda")]
    for who, attach in {**IN_TURN, name_of(MARKS[0]): DIAGNOSED}.items():
        if "error" not in rows[who]:
            with attach(loop):
                loop.run(WARM)
                with profile(activities=activities) as profiler:
                    loop.run()
            rows[who] |= counted(event.name() for event in profiler.profiler.kineto_results.events())


def counted(names: Iterable[str]) -> Row:
    """Launches of kernels and waits for the GPU per profiled step, from the names of all calls of CUDA."""
    called = list(names)
    kinds = {"launches": LAUNCHES, "waits": WAITS}
    return {kind: sum(name.startswith(begins) for name in called) / STEPS for kind, begins in kinds.items()}


# ---- the other parts


def compiled(report: Report, nets: Mapping[str, Workload]) -> None:
    """Compile the small net under each contestant, and train it in turn."""
    rows: dict[str, Row] = {who: {} for who in COMPILED}
    report.tables["compiled small net: 5 steps, later steps"] = rows
    on_gpu = report.device.type == "cuda"
    net, backend = ("small", "inductor") if on_gpu else ("tiny small", "eager")
    compare(rows, net, report.device.type, backend, lambda: report.left() - LEAST / 2, TURNS)
    report.write()


class Scale(nn.Linear):
    """A layer whose output is large and whose own work is small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def kernel(report: Report, nets: Mapping[str, Workload], n: int = 2**26) -> None:
    """GB/s at which ActivationStats reads a large output once, and its kernels of one step."""
    rows = report.tables.setdefault(f"kernels of one output of {n:,} elements", {})
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(Scale(1, 1, bias=False)).to(report.device, dtype)
        x = torch.randn(n, device=report.device).to(dtype)
        plain = kernels_of(model, x, [])
        for cb in (ActivationStats(), ActivationStats(with_hist=True)):
            found = kernels_of(model, x, cb)
            ours = {name: sum(us) - sum(plain.get(name, [])) for name, us in found.items()}
            ours = {
                name: us / STEPS for name, us in ours.items() if len(found[name]) > len(plain.get(name, []))
            }
            us = sum(ours.values())
            row = {"µs": us, "GB/s": x.nbytes / us / 1e3 if us else 0.0, "names": ", ".join(ours)}
            rows[f"{dtype}, with_hist={cb.with_hist}".removeprefix("torch.")] = row
            report.write()


def kernels_of(model: nn.Module, x: torch.Tensor, cbs: Any) -> dict[str, list[float]]:
    """Microseconds on the GPU of each kernel in a block of steps, by its name."""

    def steps() -> None:
        for _ in range(STEPS):
            model(x).view(-1)[0].backward()
        wait(x.device)

    with watch(model, None, cbs or Callback()):
        steps()
        with profile(activities=[ProfilerActivity.CUDA if x.is_cuda else ProfilerActivity.CPU]) as profiler:
            steps()
    kind = torch.autograd.DeviceType.CUDA if x.is_cuda else torch.autograd.DeviceType.CPU
    found: dict[str, list[float]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == kind:
            found.setdefault(event.name(), []).append(event.duration_ns() / 1e3)
    return found


def run_tests(report: Report, nets: Mapping[str, Workload]) -> None:
    """Run all tests marked `cuda`, without plug-ins that happen to be installed, in the time that is left."""
    files = sorted(str(p) for p in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in p.read_text())
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-m", "cuda", "-n", "8", "-vv", *files]
    log = report.folder / "tests.txt"
    with log.open("w") as output:
        # pytest-benchmark warns, and warnings are errors
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = started(command, alone, stdout=output, stderr=subprocess.STDOUT)
        try:
            state = f"ended with {process.wait(max(0.0, report.left() - 2))}"
        except subprocess.TimeoutExpired:
            state = "killed, the time was up"
        finally:
            end(process)
    report.tables["tests on the GPU"] = {state: outcomes(log.read_text())}


def outcomes(text: str) -> Row:
    """Number of tests by outcome, and names of those that failed, from what pytest-xdist prints."""
    found = re.findall(r"^\[gw\d+\] \[ *\d+%\] (\w+) (.+?) *$", text, re.MULTILINE)
    outcomes = [outcome for outcome, _ in found]
    failed = [name.rpartition("::")[2] for outcome, name in found if outcome in ("FAILED", "ERROR")]
    counts = {outcome.lower(): outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    return counts | {"names": f"failed: {', '.join(failed)}" if failed else ""}


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")


PARTS = {"costs": costs, "compiled": compiled, "kernel": kernel, "tests": run_tests}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="how long it may take")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--nets", nargs="+", choices=ON_GPU, default=list(ON_GPU))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    # for a test of this file: tiny nets, and no test that needs a GPU
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU (torch.cuda.is_available() is False): nothing was measured")
        return 0
    warnings.simplefilter("ignore")  # of the compiler
    nets = {name: (ON_GPU if args.device == "cuda" else SMALL)[name] for name in args.nets}
    device = torch.device(args.device)
    report = Report(args.out, device, args.seconds)
    gc.freeze()  # what is imported, so that a collection before a block takes less time
    for part in args.only:
        try:
            if report.left() < LEAST:
                raise TimeoutError("the time was up")
            PARTS[part](report, nets)
        except Exception as error:  # the other parts are still of use
            report.tables.setdefault(part, {})["not measured"] = {"error": text_of(error)}
    print(report.write())
    return int(
        any("failed" in row or "error" in row for rows in report.tables.values() for row in rows.values())
    )


if __name__ == "__main__":
    sys.exit(main())
