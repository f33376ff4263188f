"""Pages of all kinds of runs."""

import math
import random
from contextlib import suppress

import torch
from torch import nn

from hookcb import (
    ActivationRecords,
    ActivationStats,
    Diagnose,
    GradientHealth,
    GradientRecords,
    Learner,
    MemoryStats,
    StepTimer,
)
from hookcb.diagnosis.run import Series
from hookcb.records.content import (
    HistogramOverTime,
    MemoryUsed,
    ModuleRow,
    RanksCompared,
    Recorded,
    SlowStep,
    TimeSpent,
)
from hookcb.report.collect import collect, of_records
from hookcb.report.data import PageData

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&`@@DATA@@</script>"
NAMES = [
    HOSTILE,
    "--><img src=x onerror=alert(3)>",
    "' onmouseover=alert(4) \" onfocus=alert(5) autofocus x='",
    "javascript:alert(6)",
    "&lt;b&gt;&amp;&#x3C;",
    "x" * 300,
    "\u202etfel\u202c 🦊",
    "constructor",
    "__proto__",
    "a b\nc",
]


def trained(model, lr, *, n=4, scale=1.0, opt=torch.optim.SGD, with_all=True):
    """A page of a Learner's fit on 8 batches."""
    x = torch.randn(256, 16)
    batches = [(x[i : i + 32], scale * x[i : i + 32, :1]) for i in range(0, 256, 32)]
    learn = Learner((batches, batches[:2]), model, loss_func=nn.functional.mse_loss, opt_func=opt, lr=lr)
    cbs = [ActivationStats(with_hist=True), GradientHealth(), StepTimer(), MemoryStats(every=4)]
    with learn.no_logging():
        learn.fit(n, cbs=[*(cbs if with_all else []), Diagnose("ignore", show=False)])
    return collect(learn)


def deep(n=8):
    return nn.Sequential(*[m for _ in range(n) for m in (nn.Linear(16, 16), nn.Sigmoid())], nn.Linear(16, 1))


def healthy():
    model = nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.LayerNorm(32), nn.GELU()), nn.Linear(32, 1))
    return trained(model, 1e-3, n=8, opt=torch.optim.Adam)


def sick():
    return trained(deep(), 0.01)


def with_nan():
    return trained(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), 30.0, scale=10)


def without_records():
    return PageData("No verdict: nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose()).")


def only_diagnosed():
    return trained(deep(2), 0.01, with_all=False)


def large(n_layers=500, n_records=128):
    """Many layers, in blocks, with synthetic numbers."""
    rng = random.Random(0)
    steps, n = list(range(0, 10 * n_records, 10)), 10 * n_records
    data = PageData("HEALTHY  as far as checked", n_batches=n)
    data.run["loss"] = Series(list(range(n)), [rng.random() for _ in range(n)])
    data.modules.append(ModuleRow("", "Net"))
    for i in range(n_layers):
        if i % 10 == 0:
            data.modules.append(ModuleRow(f"block{i // 10}", "Block"))
        name = f"block{i // 10}.linear{i % 10}"
        data.modules.append(ModuleRow(name, "Linear", "Linear 8→8", 72))
        series = [Series(steps, [rng.lognormvariate(0, 1) for _ in steps]) for _ in range(5)]
        stats = dict(zip(("std", "mean", "zeros"), series, strict=False))
        data.layers[name] = Recorded(name, "Linear", stats)
        stats = dict(zip(("norm", "update_ratio"), series[3:], strict=True))
        data.params[f"{name}.weight"] = Recorded(name, "8×8", stats)
    return data


def stored():
    """Noise in 100 layers and 200 parameters, 5,000 records of each, as callbacks keep them."""
    stats, health = ActivationRecords(with_hist=True), GradientRecords()
    layers = [f"blocks.{i // 10}.linear{i % 10}" for i in range(100)]
    stats.outputs = {name: ("Linear", (32, 64)) for name in layers}
    params = [f"{name}.{own}" for name in layers for own in ("weight", "bias")]
    random_state = torch.Generator().manual_seed(0)
    for own, names in ((stats, layers), (health, params)):
        store = own.store_of("train")
        records = [store.begin(epoch=i // 500, step=i) for i in range(5_000)]
        for name in names:
            values = torch.randn(5_000, len(store.columns), generator=random_state).exp()
            store.put(name, records, values)
    data = of_records([stats, health])
    data.headline = "UNKNOWN  the numbers are made up"
    return data


def of_first_batch():
    """A fit that an error has ended in its first batch."""
    learn = Learner(
        ([(torch.randn(4, 16), torch.randn(4, 1))], None),
        nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(3, 1)),
        loss_func=nn.functional.mse_loss,
        opt_func=torch.optim.SGD,
    )
    with suppress(RuntimeError), learn.no_logging():  # shapes do not fit
        learn.fit(1, cbs=[ActivationStats(), Diagnose("ignore", show=False)])
    return collect(learn)


def with_hostile_names():
    """Names, messages and values that would do harm, were they more than text."""
    data = sick()
    data.headline, data.title, data.hookcb = f"SICK  {HOSTILE}", HOSTILE, HOSTILE
    data.notes = [HOSTILE]
    data.config = {name: [[name, name]] for name in NAMES}
    steps = [0, 1, 2]
    for name in NAMES:
        data.modules.append(ModuleRow(name, HOSTILE, HOSTILE, 3))
        hist = HistogramOverTime([0.0, 1.0, 2.0], [Series(steps, [1.0, 2.0, math.nan])] * 4)
        data.layers[name] = Recorded(name, HOSTILE, {"std": Series(steps, [1.0, math.inf, 2.0])}, hist)
        data.params[f"{name}.weight"] = Recorded(name, HOSTILE, {"norm": Series(steps, [1.0, 2.0, 3.0])})
    series, costs = Series(steps, [1.0, 2.0, 3.0]), {name: [1.0, 2.0] for name in NAMES}
    data.run |= dict.fromkeys(NAMES, series)
    data.epochs |= dict.fromkeys(NAMES, series)
    phases = dict.fromkeys(NAMES, series)
    data.time = TimeSpent(phases, [SlowStep(1, 9.0, 1.0, HOSTILE, HOSTILE)], [HOSTILE], costs)
    data.memory = MemoryUsed(NAMES[:2], costs, series, [HOSTILE])
    data.ranks = RanksCompared(2, 0, NAMES[:2], [series] * 2, {HOSTILE: [series] * 2}, [HOSTILE])
    data.verdict["gaps"] = [{"codes": NAMES, "reason": HOSTILE}]
    data.verdict["findings"][0] |= {"message": HOSTILE, "causes": [HOSTILE], "next_steps": [HOSTILE]}
    data.verdict["looked"] = data.verdict["ruled_out"] = [HOSTILE]
    return data


def of_two_ranks():
    data = healthy()
    steps = list(range(5, 64, 6))
    data.ranks = RanksCompared(2, 0, ["node-a", "node-b"])
    data.ranks.phases = {"own work": [Series(steps, [0.01] * 10), Series(steps, [0.01] * 5 + [0.03] * 5)]}
    loss = data.run["loss"]
    data.ranks.loss = [loss, Series(loss.steps, [2 * x for x in loss.values])]
    data.ranks.sentences = ["the others wait for rank 1 (node-b): its own work takes 30 ms a step"]
    data.time = data.time or TimeSpent()
    return data


KINDS = {
    "healthy": healthy,
    "sick": sick,
    "nan": with_nan,
    "empty": without_records,
    "diagnosed": only_diagnosed,
    "large": large,
    "stored": stored,
    "first": of_first_batch,
    "hostile": with_hostile_names,
    "ranks": of_two_ranks,
}
