"""Compiled models under watch, in a process for each contestant, for `gpu.py` and `host.py`.

`python benchmarks/compiled.py WHO NET DEVICE BACKEND` is such a process.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from watched import CONTESTANTS, PLAIN, STEPS, Loop, Row, figures
from workloads import ON_CPU, ON_GPU, SMALL

ROOT = Path(__file__).parents[1]
NETS = {**ON_GPU, **{f"tiny {name}": workload for name, workload in SMALL.items()}, **ON_CPU}
FIRST = 5  # steps in which a net is compiled


def compare(
    rows: dict[str, Row],
    net: str,
    device: str,
    backend: str,
    left: Callable[[], float],
    turns: int,
    clock: str = "ms",
    limit: float = 45,
) -> None:
    """Compile for each contestant named in `rows`, all at once; then train a block of each in turn.

    Args:
        rows: where the figures of each contestant go, `PLAIN` among them.
        net: key in `NETS`.
        device: for the model.
        backend: of torch.compile.
        left: seconds that are left. A contestant that needs more is killed.
        turns: blocks of each contestant that has compiled, at most.
        clock: of ratios, "ms" on the wall or "cpu ms" of the processor.
        limit: seconds in which a net has to be compiled, and to train a block.
    """
    blocks: dict[str, list[Row]] = {who: [] for who in rows}
    with contextlib.ExitStack() as stack:
        workers = {who: stack.enter_context(worker(who, net, device, backend, len(rows))) for who in rows}
        until = left() - min(limit, left())
        for who, answer in workers.items():
            rows[who] |= answer(left() - until)
        for _ in range(turns):
            for who in (who for who in rows if "error" not in rows[who] and left() > 0):
                found = workers[who](limit, ask=True)
                blocks[who] += [found] if clock in found else []
                rows[who] |= found if "error" in found else figures(blocks[who], blocks[PLAIN], clock)


@contextlib.contextmanager
def worker(who: str, net: str, device: str, backend: str, n_workers: int) -> Iterator[Callable[..., Row]]:
    """A process that compiles: answers with what that took, and then, if asked, with the time of a block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        own["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // n_workers))
        errors, pipe = Path(folder, "errors"), subprocess.PIPE
        command = [sys.executable, __file__, who, net, device, backend]
        with errors.open("w") as stderr:
            process = started(command, own, stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0)

        def answer(seconds: float, ask: bool = False) -> Row:
            if ask:
                with contextlib.suppress(BrokenPipeError):  # it has ended, as the answer says
                    process.stdin.write(b"\n")
            if select.select([process.stdout], [], [], max(0.0, seconds))[0]:
                if line := process.stdout.readline():
                    return json.loads(line)
                return {"error": f"ended: {errors.read_text()[-100:].strip()}"}
            end(process)
            return {"error": "killed: not done in time"}

        try:
            yield answer
        finally:
            end(process)
            process.stdin.close()
            process.stdout.close()


def started(command: list[str], environment: dict[str, str], **pipes: Any) -> subprocess.Popen[bytes]:
    """Start a process that finds this hookcb, and that `end` can end with all that it starts."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with those that it started, such as Inductor's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(who: str, net: str, device: str, backend: str) -> None:
    """Print a line of JSON when the net is compiled, and one for each line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    warnings.simplefilter("ignore")
    if device == "cpu":
        torch.set_num_threads(1)
    loop = Loop(NETS[net], torch.device(device))
    loop.run(FIRST)  # handles are created
    loop.net = torch.compile(loop.net, backend=backend)
    began, cpu_began = time.perf_counter(), cpu_seconds()
    with CONTESTANTS[who](loop):
        loop.run(FIRST)
        found: Row = {"s": time.perf_counter() - began, "cpu s": cpu_seconds() - cpu_began}
        counters = torch._dynamo.utils.counters
        found |= {"graphs": counters["stats"]["unique_graphs"], "breaks": counters["graph_break"].total()}
        while True:
            print(json.dumps(found), file=answers, flush=True)
            if not sys.stdin.readline():
                return
            began = cpu_seconds()
            found = {"ms": loop.run()}
            found["cpu ms"] = (cpu_seconds() - began) / STEPS * 1e3


def cpu_seconds() -> float:
    """Processor time of this process, and of compilers that it has waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in both)


if __name__ == "__main__":
    main(*sys.argv[1:])
