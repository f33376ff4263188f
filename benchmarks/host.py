"""What watching costs the host, where no GPU is at hand: time, launches and operations of hooks, compilation.

    python benchmarks/host.py [--only hooks compiled] [--turns 9]

hooks: a contestant follows nets of 16 and of 64 small layers, each of which has two parameters. What it adds
to a step of the plain loop, the mean of steps 21 to 60, is divided between each layer and the rest of a step:
processor time of one thread (the least of each step over blocks in turn), calls of functions in Python and C,
and operations that torch dispatches; counts are the same on a busy machine. Then the same with hooks that act
as on a GPU: launches of our kernels are counted and replaced by nothing, so what remains is the host's part
of a training on a GPU. `x of nothing` compares the time of a layer with that of a hook that does nothing.

compiled: seconds of processor time until a GPT of 4 layers has trained 5 steps, graphs and breaks; then
the processor time of a later step, in turn. See `compiled.py`.
"""

import argparse
import contextlib
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from compiled import compare
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from watched import BOTH, CONTESTANTS, DIAGNOSE, NOTHING, PLAIN, Loop, Row, lines
from workloads import Workload

DEPTHS = 16, 64  # layers
FIRST, STEPS = 20, 40  # steps of a block before those that count, and those
LAUNCHED = "hookcb.core.triton_kernel", "TritonKernel", "launch"  # what launches all kernels
HOOKED = "ActivationStats()", "ActivationStats(with_hist=True)", "GradientHealth()", BOTH, DIAGNOSE
COMPILED = PLAIN, "ActivationStats()", "GradientHealth()", BOTH, DIAGNOSE
NET = "gpt4"
SECONDS = 450  # of the compiled part, at most


def layers_of(depth: int) -> Workload:
    """Layers that take no time but the host's."""
    return Workload(
        f"{depth} × Linear(8, 8), batch 16",
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))),
        lambda: (torch.randn(16, 8), torch.randint(8, (16,))),
        STEPS,
    )


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[list[object]]:
    """Our hooks take tensors for those of a GPU; their launches go into the list, and nowhere else."""
    launches: list[object] = []
    module, kind, name = LAUNCHED
    launcher = getattr(__import__(module, fromlist=[kind]), kind)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(launcher, name, lambda self, key, *_, **__: launches.append(key)))
        for each in [m for n, m in sys.modules.items() if n.startswith("hookcb") and hasattr(m, "works_on")]:
            stack.enter_context(patch.object(each, "works_on", lambda device, dtype=None: True))
        yield launches


def has_kernels() -> bool:
    """Whether this hookcb launches its kernels in one place, where they can be counted."""
    return find_spec(LAUNCHED[0]) is not None


# ---- hooks


def hooks(turns: int) -> dict[str, Row]:
    """Rows of all contestants, and those of the same with launches replaced by nothing."""
    torch.set_num_threads(1)
    kinds = {who: (who, contextlib.nullcontext) for who in (PLAIN, NOTHING, *HOOKED)}
    if has_kernels():
        kinds |= {f"{who}, no launch": (who, as_on_a_gpu) for who in HOOKED}
    loops = {depth: Loop(layers_of(depth), torch.device("cpu")) for depth in DEPTHS}
    times: dict[tuple[str, int], list[list[float]]] = {(name, n): [] for name in kinds for n in DEPTHS}
    found: dict[str, dict[int, Row]] = {}
    rows: dict[str, Row] = {}
    for _ in range(turns):
        for name, (who, around) in kinds.items():
            for depth, loop in loops.items():
                if "error" not in rows.get(name, {}):
                    try:
                        times[name, depth].append(timed(loop, who, around))
                    except Exception as error:
                        rows[name] = {"error": f"{type(error).__name__}: {error}"[:100]}
    for name, (who, around) in kinds.items():
        if name not in rows:
            found[name] = {
                depth: counted(loop, who, around)
                | {"us": mean(map(min, zip(*times[name, depth], strict=True)))}
                for depth, loop in loops.items()
            }
            rows[name] = added(found[name], found[PLAIN])
    for row in rows.values():
        if "µs/layer" in row:
            row["x of nothing"] = row["µs/layer"] / rows[NOTHING]["µs/layer"]
    del rows[PLAIN]
    return rows


def timed(loop: Loop, who: str, around: Any) -> list[float]:
    """Microseconds of processor time of each step."""
    gc.collect()
    times = []
    with around(), CONTESTANTS[who](loop):
        loop.run(FIRST)
        for _ in range(STEPS):
            began = time.process_time()
            loop.step()
            times.append((time.process_time() - began) * 1e6)
    return times


def counted(loop: Loop, who: str, around: Any) -> Row:
    """Operations, launches and calls of functions of a step."""
    with around() as launches, CONTESTANTS[who](loop):
        loop.run(FIRST)
        before = len(launches or [])
        with Operations() as operations:
            loop.run(STEPS)
        row = {"operations": operations.n / STEPS, "launches": (len(launches or []) - before) / STEPS}
    with around(), CONTESTANTS[who](loop):
        loop.run(FIRST)
        calls = Counter[str]()
        sys.setprofile(lambda frame, event, arg: calls.update((event,)))
        loop.run(STEPS)
        sys.setprofile(None)
    return row | {"calls": (calls["call"] + calls["c_call"]) / STEPS}


def added(of_depth: dict[int, Row], plain: dict[int, Row]) -> Row:
    """What is added to the plain loop, for each layer and for the rest of a step."""
    (few, many), row = DEPTHS, Row()
    for key, unit in {"us": "µs", "calls": "calls", "operations": "ops", "launches": "launches"}.items():
        extra = {depth: x[key] - plain[depth][key] for depth, x in of_depth.items()}
        per_layer = (extra[many] - extra[few]) / (many - few)
        row |= {f"{unit}/layer": per_layer, f"{unit}/step": extra[few] - few * per_layer}
    return row


# ---- compiled


def compiled(turns: int) -> dict[str, Row]:
    rows: dict[str, Row] = {who: {} for who in COMPILED}
    until = time.monotonic() + SECONDS
    compare(
        rows, NET, "cpu", "inductor", lambda: until - time.monotonic(), turns, clock="cpu ms", limit=SECONDS
    )
    return rows


PARTS = {"hooks": hooks, "compiled": compiled}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for part in args.only:
        rows = PARTS[part](args.turns)
        print("\n".join(lines(f"{part}, torch {torch.__version__}", rows)))
    if not has_kernels():
        print("this hookcb has no kernel whose launch can be replaced by nothing: see the rows of a CPU")


if __name__ == "__main__":
    main()
