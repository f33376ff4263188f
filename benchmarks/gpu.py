"""Figures of a CUDA GPU in one run: tests, the fused kernel, cost of callbacks, launches, memory, NCCL.

    python benchmarks/gpu.py [--seconds 540] [--rounds 5] [--out build/gpu]

Writes `gpu.json` and `gpu.txt` into the folder `--out`. Without a GPU it says so and measures nothing. If the
time is short, rows have fewer rounds; a row that could not be measured at all says why.

In each round, each contestant trains in turn, in bfloat16 with AdamW. The timed steps follow warm-up steps,
in which a compiled model is compiled; the GPU is synchronized only before the first of them and after the
last. Then torch's profiler counts, for a few more steps, launches of kernels and calls that wait for the GPU.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fused
import torch
from loop import Batches
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from workloads import ON_GPU, SMALL, Workload, loss_func

from hookcb import (
    ActivationStats,
    Callback,
    Compile,
    Diagnose,
    GradientHealth,
    Learner,
    MixedPrecision,
    ProfilerCallback,
    StepTimer,
)

ROOT = Path(__file__).parents[1]
WARM, PROFILED = 20, 10  # steps before and after those that are timed
TESTS_SECONDS = 150  # at most
LEFT_FOR_A_FIT = 60  # seconds: none begins with less time left, because a compiled one can take as long
BY_HAND, BARE = "loop by hand", "Learner without callbacks"
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
WAITS += ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")

CONTESTANTS: dict[str, Callable[[], list[Callback]]] = {
    BY_HAND: list,
    BARE: list,
    f"{BARE}, again (noise)": list,
    # without hooks on modules, so that compiled code is used again
    "GradientHealth()": lambda: [GradientHealth()],
    "StepTimer()": lambda: [StepTimer()],
    "ProfilerCallback(), one window": lambda: [ProfilerCallback(wait=WARM, warmup=1, active=3, modules=())],
    "ActivationStats()": lambda: [ActivationStats()],
    "ActivationStats(with_hist=True)": lambda: [ActivationStats(with_hist=True)],
    "both, every=10": lambda: [ActivationStats(with_hist=True, every=10), GradientHealth(every=10)],
    "Diagnose()": lambda: [Diagnose("ignore", show=False)],
}


@dataclass
class Clock:
    """Times steps, then profiles some more; `step` is called after each of them.

    Attributes:
        figures: milliseconds, launches and waits per step, and the peak of memory in MB.
    """

    steps: int
    device: torch.device

    def __post_init__(self) -> None:
        self.n, self.began, self.figures = 0, 0.0, dict[str, float]()

    @property
    def n_steps(self) -> int:
        """Number of steps to train."""
        return WARM + self.steps + PROFILED

    def step(self) -> None:
        self.n += 1
        if self.n == WARM:
            self._wait()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.began = time.perf_counter()
        elif self.n == WARM + self.steps:
            self._wait()
            self.figures["ms"] = (time.perf_counter() - self.began) / self.steps * 1e3
            if self.device.type == "cuda":
                self.figures["peak_mb"] = torch.cuda.max_memory_allocated(self.device) / 1e6
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (self.device.type == "cuda")]
            self.profiler = profile(activities=activities)
            self.profiler.start()
        elif self.n == self.n_steps:
            self.profiler.stop()
            events = self.profiler.profiler.kineto_results.events()
            self.figures |= counted(event.name() for event in events)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def counted(names: Iterable[str]) -> dict[str, float]:
    """Launches and waits per profiled step, from the names of all calls of CUDA."""
    counts = {"launches": 0, "waits": 0}
    for name in names:
        counts["launches"] += name.startswith(LAUNCHES)
        counts["waits"] += name.startswith(WAITS)
    return {what: n / PROFILED for what, n in counts.items()}


# ---- training


def by_hand(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], clock: Clock) -> None:
    """What the Learner does, without it."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()
    for x, y in data:
        with torch.autocast(clock.device.type, torch.bfloat16):
            loss = loss_func(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        clock.step()


def by_learner(
    model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], clock: Clock, cbs: Sequence[Callback]
) -> None:
    last = Callback(name="step_clock", after_batch=lambda cb: clock.step())
    last.order = 10_000
    learn = Learner(Batches(list(data)), model, loss_func, torch.optim.AdamW, lr=1e-5)
    learn.remove_cbs(learn.cbs)
    learn.add_cbs([MixedPrecision("bf16"), *cbs, last])
    learn.fit(1)


def figures_of(
    who: str, net: nn.Module, workload: Workload, device: torch.device, compiler: Compile | None
) -> dict[str, Any]:
    """Train one contestant; its figures, or the error."""
    clock = Clock(workload.steps, device)
    x, y = (part.to(device) for part in workload.batch())
    data = [(x, y)] * clock.n_steps
    try:
        if who == BY_HAND:
            with compiled_by(compiler, net):
                by_hand(net, data, clock)
        else:
            by_learner(net, data, clock, [*([compiler] if compiler else []), *CONTESTANTS[who]()])
    except Exception as error:  # out of memory, a compiler's error: the other rows are still of use
        return {"error": text_of(error)}
    finally:
        del x, y, data
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return clock.figures


@contextlib.contextmanager
def compiled_by(compiler: Compile | None, net: nn.Module) -> Iterator[None]:
    """Compile the model as a Learner's fit does, so that both run the same code."""
    if compiler is None:
        yield
        return
    Learner([], net, loss_func, torch.optim.AdamW, cbs=compiler)
    compiler.before_fit()
    try:
        yield
    finally:
        compiler.after_fit()


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


@dataclass
class Report:
    """What was measured, written after each piece, so that nothing is lost if a later one fails."""

    folder: Path
    device: torch.device
    seconds: float

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.found: dict[str, Any] = {**about(self.device), "training": [], "notes": []}

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    def write(self, **found: Any) -> None:
        self.found |= found | {"seconds": round(self.seconds - self.left(), 1)}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.found, indent=1))


def about(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "cpus": os.cpu_count()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "memory_mb": total / 1e6,
            "free_mb": free / 1e6,
        }
    return facts


def train_all(report: Report, nets: dict[str, Workload], rounds: int, compiler: dict[str, Any]) -> None:
    """Every contestant on every net, eager and compiled; the first round of all comes first."""
    rows = [
        {"net": net, "mode": mode, "contestant": who, "steps": nets[net].steps, "rounds": []}
        for mode in ("eager", "compiled")
        for net in nets
        for who in CONTESTANTS
    ]
    report.found["training"] = rows
    for turn in range(rounds):
        # compiling takes longest and eager fits least: these have the other rounds
        for mode in ("eager", "compiled") if turn == 0 else ("eager",):
            for net in nets:
                of_net = [row for row in rows if row["net"] == net and row["mode"] == mode]
                take_turn(report, of_net, nets[net], compiler if mode == "compiled" else None)
    done = min(len(row["rounds"]) for row in rows if row["mode"] == "eager")
    if done < rounds:
        report.found["notes"].append(f"time was short: {done} of {rounds} rounds of eager training")
    report.write()


def take_turn(
    report: Report, rows: list[dict[str, Any]], workload: Workload, compiler: dict[str, Any] | None
) -> None:
    """A round of all contestants on one net, which they train in turn: its compiled code is used again."""
    if report.left() < LEFT_FOR_A_FIT:
        for row in rows:
            if not row["rounds"]:
                row["error"] = "not measured: the time was up"
        return
    torch.compiler.reset()
    torch.manual_seed(0)
    model = workload.model().to(report.device)
    for row in rows:
        if "error" in row:
            continue
        if report.left() < LEFT_FOR_A_FIT:
            if not row["rounds"]:
                row["error"] = "not measured: the time was up"
            continue
        compile_ = None if compiler is None else Compile(**compiler)
        began = time.monotonic()
        found = figures_of(row["contestant"], model, workload, report.device, compile_)
        if "error" in found:
            row["error"] = found["error"]
        else:
            row["rounds"].append(found | {"fit_seconds": round(time.monotonic() - began, 2)})
        report.write()


def ratios(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], list[float]]:
    """Time by net, mode and contestant, relative to another one's of the same round, see `tables`."""
    ms = {(row["net"], row["mode"], row["contestant"]): [one["ms"] for one in row["rounds"]] for row in rows}
    found = {}
    for (net, mode, who), values in ms.items():
        base = ms[net, mode, BY_HAND if who == BARE else BARE]
        found[net, mode, who] = [a / b for a, b in zip(values, base, strict=False)]
    return found


# ---- the other parts


def run_tests(seconds: float) -> dict[str, Any]:
    """Run all tests marked `cuda`, and those of the fused kernel on the GPU."""
    files = sorted(str(p) for p in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in p.read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        options = ["-m", "cuda", "-n", "4", "-vv", f"--junitxml={path}"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=seconds, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()  # bytes, also of text
            return {"error": f"not done after {seconds:.0f} seconds", "output": output[-12_000:]}
        if not path.exists():
            return {
                "error": f"pytest ended with {done.returncode}",
                "output": done.stdout + done.stderr[-4000:],
            }
        return of_suites(path.read_text()) | {"output": done.stdout[-12_000:] if done.returncode else ""}


def of_suites(xml: str) -> dict[str, Any]:
    """Numbers of tests, and names of those that failed or were skipped, from pytest's JUnit file."""
    cases = list(ElementTree.fromstring(xml).iter("testcase"))
    names: dict[str, list[str]] = {"failure": [], "error": [], "skipped": []}
    for case in cases:
        for outcome, of_outcome in names.items():
            if case.find(outcome) is not None:
                of_outcome.append(f"{case.get('classname')}::{case.get('name')}")
    return {"n": len(cases), "failed": names["failure"] + names["error"], "skipped": names["skipped"]}


def run_fused() -> dict[str, Any]:
    """The fused kernel beside plain operations, and the threshold to choose."""
    try:
        rows = list(fused.sizes(eps=0.05, rounds=20))
    except Exception as error:  # no Triton, no C compiler
        return {"error": text_of(error)}
    return {"rows": rows, "threshold": fused.threshold(rows)}


def run_ranks(device: torch.device, workload: Workload) -> dict[str, Any]:
    """Train under DDP, with a process group of this process alone; compare the weights with those without."""
    backend = "nccl" if device.type == "cuda" else "gloo"

    def trained(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = workload.model().to(device)
        x, y = (part.to(device) for part in workload.batch())
        cbs = [ActivationStats(), GradientHealth(), StepTimer(), Diagnose("ignore", show=False)]
        learn = Learner(Batches([(x, y)] * 20), wrap(model), loss_func, torch.optim.SGD, lr=0.01, cbs=cbs)
        with learn.no_logging():
            learn.fit(1)
        if len(learn.activation_stats.stats) != 20 or len(learn.gradient_health.stats) != 20:
            raise RuntimeError("some of the 20 batches have no record")
        return [p.detach().cpu() for p in model.parameters()]

    try:
        alone = trained(lambda model: model)
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
        try:
            weights = trained(DistributedDataParallel)
            x = torch.ones(1000, device=device)
            distributed.all_reduce(x)
            is_same = all(map(torch.equal, alone, weights)) and x.sum().item() == 1000
        finally:
            distributed.destroy_process_group()
    except Exception as error:
        return {"backend": backend, "error": text_of(error)}
    return {"backend": backend, "same_weights": is_same}


# ---- showing


def tables(found: dict[str, Any]) -> Iterator[Table | str]:
    yield f"{found['device']}, torch {found['torch']}, CUDA {found.get('cuda')}, {found['cpus']} processors"
    tests = found["tests"]
    yield f"tests: {tests.get('error') or summary(tests)}"
    if rows := found["fused"].get("rows"):
        yield fused.table_of(rows, "statistics of a tensor: fused kernel and plain operations")
    yield f"fused from: {found['fused'].get('error') or found['fused']['threshold']}"
    yield f"one rank: {found['ranks']}"
    relative = ratios(found["training"])
    for net, mode in dict.fromkeys((row["net"], row["mode"]) for row in found["training"]):
        rows = [row for row in found["training"] if (row["net"], row["mode"]) == (net, mode)]
        table = Table(
            title=f"{found['device']}: {found['nets'][net]}, bf16, {mode}, {rows[0]['steps']} steps",
            caption="the Learner relative to the loop by hand, all others to the Learner without callbacks",
        )
        for column in ("", "ms a step", "ratio", "least–most", "rounds", "launches", "waits", "peak MB", ""):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for row in rows:
            table.add_row(row["contestant"], *cells(row, relative[net, mode, row["contestant"]]))
        yield table
    yield from found["notes"]
    yield f"took {found['seconds']:.0f} seconds"


def summary(tests: dict[str, Any]) -> str:
    skipped, failed = tests["skipped"], tests["failed"]
    return f"{tests['n']} collected, {len(skipped)} skipped {skipped}, {len(failed)} failed {failed}"


def cells(row: dict[str, Any], relative: list[float]) -> list[str]:
    if not row["rounds"]:
        return ["", "", "", "0", "", "", "", row["error"][:60]]
    last = row["rounds"][-1]
    ms = statistics.median(one["ms"] for one in row["rounds"])
    peak = f"{last['peak_mb']:,.0f}" if "peak_mb" in last else ""
    among = ["", ""]
    if relative:
        among = [f"{statistics.median(relative):.3f}", f"{min(relative):.3f}–{max(relative):.3f}"]
    counts = [f"{last['launches']:,.1f}", f"{last['waits']:,.1f}", peak]
    return [f"{ms:,.3f}", *among, str(len(row["rounds"])), *counts, row.get("error", "")[:60]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=540, help="how long it may take")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of eager training, at most")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder of gpu.json and gpu.txt"
    )
    parser.add_argument("--nets", nargs="+", choices=ON_GPU, default=list(ON_GPU))
    # for a test of this file: tiny nets, and nothing that a GPU is needed for
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU (torch.cuda.is_available() is False): nothing was measured")
        return 0
    on_gpu = args.device == "cuda"
    nets = {name: (ON_GPU if on_gpu else SMALL)[name] for name in args.nets}
    report = Report(args.out, torch.device(args.device), args.seconds)
    warnings.simplefilter("ignore")  # of the compiler
    report.write(nets={name: workload.title for name, workload in nets.items()})
    needs_gpu = {"error": "needs a GPU"}
    report.write(tests=run_tests(min(TESTS_SECONDS, args.seconds / 3)) if on_gpu else needs_gpu)
    report.write(fused=run_fused() if on_gpu else needs_gpu)
    report.write(ranks=run_ranks(report.device, nets[args.nets[0]]))
    train_all(report, nets, args.rounds, {} if on_gpu else {"backend": "eager"})
    text = io.StringIO()
    for console in Console(width=160), Console(file=text, width=160):
        for shown in tables(report.found):
            console.print(shown, highlight=False)
    (args.out / "gpu.txt").write_text(text.getvalue())
    return int(on_gpu and has_failed(report.found))


def has_failed(found: dict[str, Any]) -> bool:
    """Whether a test failed, or anything could not be measured."""
    parts = [found["tests"], found["fused"], found["ranks"], *found["training"]]
    return any("error" in part or part.get("failed") for part in parts) or not found["ranks"]["same_weights"]


if __name__ == "__main__":
    sys.exit(main())
