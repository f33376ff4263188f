"""Runs of all kinds, as content of pages: small real trainings, and made-up numbers of large ones."""

import itertools
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookcb import (
    ActivationRecords,
    ActivationStats,
    Diagnose,
    GradientHealth,
    Learner,
    MemoryStats,
    StepTimer,
)
from hookcb.diagnosis.evidence import Series
from hookcb.report.collect import collect, of_records
from hookcb.report.data import (
    HistogramOverTime,
    MemoryUsed,
    ModuleRow,
    PageData,
    RanksCompared,
    Recorded,
    SlowStep,
    TimeSpent,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "--><img src=x onerror=alert(3)>",
    "' onmouseover=alert(4) \" onfocus=alert(5) autofocus x='",
    "javascript:alert(6)",
    "\u202egnp.exe\u202c \u2066rtl\u2069 \u05e9\u05dc\u05d5\u05dd",
    "x" * 300,
    "🔥🧨.👩‍👩‍👧",
    "&lt;b&gt;&amp;&#x3C;",
    "line\nbreak\ttab",
    "__proto__",
    "constructor",
    "@@DATA@@ ${7*7} {{7*7}}",
)
STATS = ("mean", "std", "near_zero", "nonfinite")


def _learner(model: nn.Module, loss_func: Callable, lr: float, n: int = 512) -> Learner:
    x = torch.randn(n, 16)
    data = TensorDataset(x, x[:, :1].sin() + x[:, 1:2])
    train = DataLoader(data, 32, shuffle=True)
    return Learner(
        (train, DataLoader(data, 128)), model, loss_func=loss_func, opt_func=torch.optim.SGD, lr=lr
    )


def _everything() -> list:
    return [
        ActivationStats(with_hist=True),
        GradientHealth(),
        StepTimer(),
        MemoryStats(),
        Diagnose(on_sick="ignore"),
    ]


def _fitted(learn: Learner, n_epochs: int = 5) -> PageData:
    with learn.no_logging():
        learn.fit(n_epochs, cbs=_everything())
    return collect(learn)


def healthy() -> PageData:
    """A run without findings, of a model with nested modules."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
        model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(16, 1))
        return _fitted(_learner(model, nn.functional.mse_loss, lr=0.05), n_epochs=8)


def sick() -> PageData:
    """A run whose gradients vanish in a tower of sigmoids."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tower = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
        model = nn.Sequential(nn.Sequential(*tower), nn.Linear(16, 1))
        return _fitted(_learner(model, nn.functional.mse_loss, lr=0.01))


def nan_ridden() -> PageData:
    """A run that a learning rate makes infinite, and then NaN."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        return _fitted(_learner(model, nn.functional.mse_loss, lr=30.0), n_epochs=2)


def empty() -> PageData:
    """A learner that was not trained."""
    return collect(Learner([], nn.Linear(2, 1), loss_func=nn.functional.mse_loss, opt_func=torch.optim.SGD))


def first_batch() -> PageData:
    """A fit that ended in its first batch, by an error."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(3, 1))
        learn = _learner(model, nn.functional.mse_loss, lr=0.1)
        try:
            _fitted(learn)
        except RuntimeError:  # shapes do not fit
            return collect(learn)
    raise AssertionError("the fit must fail")


def _walk(rng: random.Random, steps: list[int], start: float, noise: float) -> Series:
    values = itertools.accumulate((rng.gauss(0, noise) for _ in steps), initial=math.log(start))
    return Series(steps, [math.exp(x) for x in itertools.islice(values, len(steps))])


def _tree(n: int) -> list[ModuleRow]:
    """`n` layers in blocks of ten, in four stages, and their parents."""
    rows, seen = [ModuleRow("", "Net", "Net")], set()
    for i in range(n):
        stage, block = f"stage{4 * i // n}", f"stage{4 * i // n}.block{i // 10}"
        for name, kind in ((stage, "Stage"), (block, "Block")):
            if name not in seen:
                seen.add(name)
                rows.append(ModuleRow(name, kind, kind))
        kind = ("Linear", "LayerNorm", "GELU", "Conv2d")[i % 4]
        rows.append(ModuleRow(f"{block}.{kind.lower()}{i}", kind, f"{kind} 64→64", 4160))
    return rows


def made_up(n_layers: int, n_records: int, stride: int = 10) -> PageData:
    """A run with made-up numbers: `n_records` records of each of `n_layers` layers."""
    rng = random.Random(0)
    steps = list(range(0, n_records * stride, stride))
    modules = _tree(n_layers)
    leaves = [row.name for row in modules if row.n_params]
    layers = {
        name: Recorded(
            name,
            stats={
                "mean": Series(steps, [rng.gauss(0, 0.1) for _ in steps]),
                "std": _walk(rng, steps, rng.uniform(0.5, 2), 0.03),
                "near_zero": Series(steps, [rng.random() for _ in steps]),
            },
        )
        for name in leaves
    }
    params = {
        f"{name}.weight": Recorded(name, "64×64", {"norm": _walk(rng, steps, rng.uniform(0.01, 1), 0.05)})
        for name in leaves
    }
    loss = Series(steps, [2 * math.exp(-3 * i / n_records) + rng.gauss(0, 0.05) for i in range(n_records)])
    return PageData(
        "UNKNOWN numbers are made up",
        title="huge",
        written="2026-11-23T12:00:00+00:00",
        n_batches=n_records * stride,
        run={"loss": loss, "lr": Series(steps, [0.1 * (1 - i / n_records) for i in range(n_records)])},
        modules=modules,
        layers=layers,
        params=params,
        time=TimeSpent(
            phases={
                phase: Series(steps, [abs(rng.gauss(x, x / 5)) for _ in steps])
                for phase, x in (("data", 0.01), ("forward", 0.02), ("backward", 0.04), ("optimizer", 0.005))
            },
            slow=[SlowStep(steps[-1], 0.9, 0.08, "data", "a slow disk")],
            sentences=["A step takes 80 ms."],
            layers={name: [rng.random() / 100, rng.random() / 50] for name in leaves},
        ),
        memory=MemoryUsed(
            ["kept", "parameters", "gradients", "optimizer"],
            {name: [rng.random() * 1e6, 16640.0, 16640.0, 33280.0] for name in leaves},
            Series(steps, [1e9 + rng.random() * 1e6 for _ in steps]),
            ["Memory does not grow."],
        ),
    )


def huge() -> PageData:
    """500 layers of 128 records each."""
    return made_up(500, 128)


def stored(n_layers: int = 100, n_records: int = 5_000) -> PageData:
    """Noise of many records in many layers, as the stores of `ActivationStats` keep it, with histograms."""
    stats = ActivationStats(with_hist=True)
    stats.records = ActivationRecords(with_hist=True)
    store = stats.records.store_of("train")
    generator = torch.Generator().manual_seed(0)
    names = [f"blocks.{i // 10}.linear{i}" for i in range(n_layers)]
    stats.records.outputs = {name: ("Linear", (32, 64)) for name in names}
    records = [store.begin(epoch=i * 10 // n_records, step=i) for i in range(n_records)]
    for name in names:
        values = torch.randn(n_records, len(store.columns), generator=generator).exp()
        values[:, -1] = 0  # level of the bins
        store.put(name, records, values)
    data = of_records([stats])
    data.headline = "UNKNOWN numbers are made up"
    return data


def two_ranks() -> PageData:
    """A healthy run on two ranks, the second of which is slow and sees other losses."""
    data, rng = healthy(), random.Random(1)
    steps = list(range(0, 120, 2))
    data.ranks = RanksCompared(
        world=2,
        rank=0,
        hosts=["node-a", "node-b"],
        loss=[Series(steps, [1.5 * 0.97**i + rng.random() / 20 for i in steps]) for _ in range(2)],
        phases={
            "data": [
                Series(steps, [seconds + rng.random() / 1e3 for _ in steps]) for seconds in (0.002, 0.01)
            ],
            "forward": [Series(steps, [0.01 + rng.random() / 1e3 for _ in steps]) for _ in range(2)],
        },
        sentences=["Rank 1 (node-b) is slow: it waits 5 times as long for data."],
    )
    return data


def hostile() -> PageData:
    """A sick run in which each text tries to be more than text."""
    bad, steps = HOSTILE[0], [0, 5, 10]
    series = Series(steps, [1.0, math.inf, 3.0])
    names = [*HOSTILE, *(f"{own}.{own}" for own in HOSTILE[:3])]
    finding = {
        "code": bad,
        "severity": "error",
        "layer": HOSTILE[1],
        "param": "",
        "step": 5,
        "value": 1.0,
        "limit": 2.0,
        "message": f"{bad} {HOSTILE[2]}",
        "causes": list(HOSTILE),
        "next_steps": list(HOSTILE),
        "consequence_of": "",
        "kind": HOSTILE[3],
        "last_step": 10,
        "ranks": [],
        "n_ranks": 0,
        "shown_by": {"of": "layers", "name": HOSTILE[1], "stat": "std", "limit": 2.0},
    }
    verdict = {
        "status": "sick",
        "findings": [finding],
        "ruled_out": list(HOSTILE),
        "looked": list(HOSTILE),
        "gaps": [{"codes": list(HOSTILE), "reason": bad}],
        "n_checked": 1,
        "n_checks": 2,
    }
    return PageData(
        f"SICK  {bad} {HOSTILE[1]}",
        verdict,
        title=bad,
        hookcb=bad,
        written="2026-11-23T12:00:00+00:00",
        n_batches=11,
        run={"loss": series, **dict.fromkeys(HOSTILE, series)},
        epochs=dict.fromkeys(HOSTILE, Series([10], [1.0])),
        modules=[ModuleRow(name, bad, HOSTILE[2], 1) for name in ("", *names)],
        layers={
            name: Recorded(
                name,
                bad,
                {"std": series, bad: series, "__proto__": series},
                HistogramOverTime(-1.0, 1.0, [Series(steps, [1.0, 2.0, 3.0]) for _ in range(4)]),
            )
            for name in ("", *names)
        },
        params={f"{name}.{bad}": Recorded(name, bad, {"norm": series}) for name in names},
        time=TimeSpent(
            dict.fromkeys(HOSTILE, series),
            [SlowStep(5, 1.0, 0.1, bad, bad)],
            [bad],
            {name: [1.0] for name in names},
        ),
        memory=MemoryUsed([bad, HOSTILE[2]], {name: [1.0, 2.0] for name in names}, series, [bad]),
        ranks=RanksCompared(2, 0, [bad, HOSTILE[2]], [series, series], {bad: [series, series]}, [bad]),
        config={name: [[name, name]] for name in HOSTILE},
        notes=list(HOSTILE),
    )


KINDS: dict[str, Callable[[], PageData]] = {
    own.__name__: own
    for own in (healthy, sick, nan_ridden, empty, first_batch, huge, stored, two_ranks, hostile)
}


def write(kinds: Iterable[str], folder: Path) -> dict[str, Path]:
    """Writes pages of these kinds into a folder; their paths by kind."""
    from hookcb.report.page import Page

    return {kind: Page(KINDS[kind]()).save(folder / f"{kind}.html") for kind in kinds}
