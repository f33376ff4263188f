"""What the tests of activation statistics share: layers that put out anything, and an oracle in float64."""

import io
import math

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from hookcb import ActivationStats, Learner
from tests.hooks import support as zoo
from tests.support import fit

STATS = ("mean", "std", "min", "max", "abs_max", "near_zero", "zeros", "nonfinite", "rms", "kurtosis")
NAN, INF = float("nan"), float("inf")


class Puts(nn.Module):
    """Puts out one thing after another, whatever comes in."""

    def __init__(self, outs):
        super().__init__()
        self.outs, self.n = list(outs), 0

    def forward(self, x):
        self.n += 1
        return self.outs[(self.n - 1) % len(self.outs)]


class Around(nn.Module):
    """Calls the layer `odd`, and trains on something else."""

    def __init__(self, odd):
        super().__init__()
        self.odd, self.fc = odd, nn.Linear(2, 1)

    def forward(self, x):
        self.odd(x)
        return self.fc(x)


def watch(*outs, **kwargs):
    """The statistics of a layer that puts out `outs`, one a batch."""
    (stats,) = watch_all(outs, [kwargs])
    return stats


def watch_all(outs, several):
    """The statistics of a layer that puts out `outs`, one a batch, with each of several options."""
    cbs = [
        ActivationStats(**{"modules": "odd"} | kwargs | ({"name": f"stats_{k}"} if k else {}))
        for k, kwargs in enumerate(several)
    ]
    batches = [torch.ones(3, 2)] * len(outs)
    fit(Learner(batches, Around(Puts(outs)), torch.mean, torch.optim.SGD, lr=0.01, cbs=cbs))
    return cbs


class Tagged(nn.Module):
    """The mean of what its layer `tag` puts out is the number of the batch."""

    def __init__(self):
        super().__init__()
        self.tag, self.fc = nn.Identity(), nn.Linear(2, 1)

    def forward(self, x):
        return self.fc(self.tag(x))


def numbered(n_train=5, n_valid=0, cbs=(), model=None):
    """A learner whose training batches are full of 0, 1, …, and the validation's of 100, 101, …"""
    train = [(torch.full((4, 2), float(k)), torch.zeros(4, 1)) for k in range(n_train)]
    valid = [(torch.full((4, 2), 100.0 + k), torch.zeros(4, 1)) for k in range(n_valid)] or None
    return Learner((train, valid), model or Tagged(), F.mse_loss, torch.optim.SGD, lr=0.0, cbs=cbs)


def tags(**kwargs):
    return ActivationStats(**{"modules": "tag"} | kwargs)


def ids(records):
    """The numbers of the recorded batches of a numbered learner."""
    return [record["tag"]["mean"] for record in records]


def steps(records):
    return [record.step for record in records]


def oracle(t, eps=0.05):
    """All statistics by their definition, in float64."""
    x = t.detach().to_dense().double().reshape(-1)
    n, finite = len(x), x[x.isfinite()]
    if n == 0:
        return dict.fromkeys(STATS, NAN) | {"nonfinite": 0}
    mean = x.sum() / n
    extremes = (finite.min(), finite.max(), finite.abs().max()) if len(finite) else (NAN, NAN, NAN)
    near_zero, zeros = (is_so.double().mean().item() for is_so in (x.abs() <= eps, x == 0))
    return {
        "mean": mean.item(),
        "std": ((x - mean).square().sum() / (n - 1)).sqrt().item() if n > 1 else NAN,
        **{name: float(value) for name, value in zip(("min", "max", "abs_max"), extremes, strict=True)},
        "near_zero": near_zero if len(finite) else NAN,
        "zeros": zeros if len(finite) else NAN,
        "nonfinite": n - len(finite),
        "rms": math.nan if mean.isnan() else scaled_rms(x),
        "kurtosis": kurtosis(x - mean) if len(finite) == n and extremes[0] < extremes[1] else NAN,
    }


def scaled_rms(x):
    """Root of the mean square, for values whose squares have no room in float64."""
    size = x.abs().max()
    return (size * (x / size).square().mean().sqrt()).item() if 0 < size < math.inf else size.item()


def kurtosis(z):
    """Fourth moment of a centered tensor by the square of its second."""
    z = z / z.abs().max()
    return (z**4).mean().item() / z.square().mean().item() ** 2


def close(got, want, tol=0.0):
    return got == want or (math.isnan(got) and math.isnan(want)) or abs(got - want) <= tol


def assert_stats(got, t, eps=0.05, shares=1e-6, std=1e-3, kurtosis=1e-4):
    """`got` are the statistics of `t`; shares may be off by `shares`, std and kurtosis by a part of them."""
    want = oracle(t, eps)
    assert set(got) == set(STATS)
    size = want["abs_max"] if math.isfinite(want["abs_max"]) else 0.0
    spread = want["std"] if math.isfinite(want["std"]) else 0.0
    tol = {"min": 1e-6 * size, "max": 1e-6 * size, "abs_max": 1e-6 * size}
    tol |= {"near_zero": shares, "zeros": shares}
    tol |= {"nonfinite": 0, "mean": 1e-4 * spread + 1e-6 * size, "std": std * spread or 1e-7 * size}
    tol |= {"rms": 1e-6 * size + 1e-3 * spread}
    tol |= {
        "kurtosis": (kurtosis if shares <= 1e-6 else max(kurtosis, 0.3)) * want["kurtosis"]
    }  # of a sample, as shares
    wrong = {k: (got[k], want[k]) for k in STATS if tol[k] != INF and not close(got[k], want[k], tol[k])}
    assert not wrong
    assert {type(value) for value in got.values()} <= {int, float}


def assert_same_readings(a, b):
    """Two objects read the same in each way."""
    assert list(a.names) == list(b.names)
    for x, y in ((a.stats, b.stats), (a.valid_stats, b.valid_stats)):
        assert repr([list(record) for record in x]) == repr([list(record) for record in y])
        assert [(r.epoch, r.step, r.phase) for r in x] == [(r.epoch, r.step, r.phase) for r in y]
    assert repr(a.table()) == repr(b.table())
    assert printed(a.report()) == printed(b.report())
    assert a.left_out == b.left_out
    for layer in a.names:
        assert repr(a.layer_stats(layer)) == repr(b.layer_stats(layer))
        assert all(repr(a.series(layer, stat)) == repr(b.series(layer, stat)) for stat in STATS)


def assert_same_hists(a, b):
    for layer in a.names:
        assert torch.equal(a.hist(layer), b.hist(layer))
        assert torch.equal(a.hist_edges(layer), b.hist_edges(layer))


def printed(renderable, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calls_of(model):
    """A dict that gets, while the model runs in train mode, copies of what each of its modules puts out."""
    calls = {}

    def note(m, i, o):
        if model.training:
            copies = {path: t.detach().clone() for path, t in zoo.flat(o).items()}
            calls.setdefault(m, []).append(copies)

    for m in model.modules():
        m.register_forward_hook(note)
    return calls
