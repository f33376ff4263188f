"""A plain training loop, and what follows it in `gpu.py` and `host.py`."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from workloads import Workload, loss_func

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, watch

STEPS = 10  # of a block
PLAIN, NOTHING, BOTH, DIAGNOSE = "plain", "torch's hooks that do nothing", "both", "Diagnose()"
Row = dict[str, Any]  # figures by their names


class Loop:
    """A plain training loop on one batch, in bfloat16 on a GPU.

    Attributes:
        net: the model, or what torch.compile makes of it.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.net: nn.Module = workload.model()
        self.device, (self.x, self.y) = device, (part.to(device) for part in workload.batch())
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=True)

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type != "cpu"):
            loss = loss_func(self.net(self.x), self.y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def run(self, n: int = STEPS) -> float:
        """Milliseconds per step of `n` steps, with a wait for the GPU at both ends only."""
        wait(self.device)
        began = time.perf_counter()
        for _ in range(n):
            self.step()
        wait(self.device)
        return (time.perf_counter() - began) / n * 1e3

    def host(self) -> float:
        """Milliseconds until a step is issued to an idle GPU."""
        wait(self.device)
        began = time.perf_counter()
        self.step()
        return (time.perf_counter() - began) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Attach = Callable[[Loop], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def hooks_that_do_nothing(loop: Loop) -> Iterator[None]:
    leaves = [m for m in loop.net.modules() if not list(m.children())]
    handles = [m.register_forward_hook(lambda m, args, out: None) for m in leaves]
    yield
    for handle in handles:
        handle.remove()


def watched(make: Callable[[], Callback | list[Callback]]) -> Attach:
    return lambda loop: watch(loop.net, loop.opt, make())


CONTESTANTS: Mapping[str, Attach] = {
    PLAIN: contextlib.nullcontext,
    "plain again (noise)": contextlib.nullcontext,
    NOTHING: hooks_that_do_nothing,
    "ActivationStats()": watched(lambda: ActivationStats()),
    "ActivationStats(with_hist=True)": watched(lambda: ActivationStats(with_hist=True)),
    "GradientHealth()": watched(lambda: GradientHealth()),
    BOTH: watched(lambda: [ActivationStats(), GradientHealth()]),
    "both, every=10": watched(lambda: [ActivationStats(every=10), GradientHealth(every=10)]),
    DIAGNOSE: watched(lambda: Diagnose("ignore", show=False)),
}


def figures(blocks: Sequence[Row], plain: Sequence[Row], clock: str = "ms") -> Row:
    """Medians over blocks; ratios are to the plain loop of the same turn, if that was timed."""
    ratios = [a[clock] / b[clock] for a, b in zip(blocks, plain, strict=False)]
    found = {clock: 0.0}
    if ratios:
        found |= {"ratio": median(ratios), "least": min(ratios), "most": max(ratios)}
    found |= {key: median(x[key] for x in blocks if key in x) for key in blocks[0]}
    return found | {"turns": len(blocks), "blocks": list(blocks)}


def lines(name: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """A table as text, with a column for each figure that a row has."""
    keys = [key for row in rows.values() for key, x in row.items() if not isinstance(x, list | str)]
    columns = {key: max(9, len(key) + 2) for key in keys}
    yield f"{name:42}" + "".join(f"{key:>{w}}" for key, w in columns.items())
    for who, row in rows.items():
        cells = "".join(f"{shown(row[key]) if key in row else '':>{w}}" for key, w in columns.items())
        yield f"  {who:40}{cells}  {'; '.join(x for x in row.values() if isinstance(x, str))[:120]}"


def shown(x: float) -> str:
    return str(x) if isinstance(x, int) else f"{x:,.3f}" if abs(x) < 100 else f"{x:,.0f}"
