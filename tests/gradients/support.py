"""What the tests of gradient readings share: plain loops in float64 as oracles, and tiny models and data."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Learner
from tests.support import fit

NAN, INF = float("nan"), float("inf")
COLUMNS = ["norm", "clipped_norm", "rms", "abs_max", "nonfinite", "zero_rows"]
COLUMNS += ["weight_norm", "weight_mean", "weight_std", "update_ratio", "drift"]
STEP_STATS = ["total_norm", "clipped_total_norm", "mean_norm", "lr", "scale", "skipped", "clip_coef"]


def seeded(make, seed=0):
    """What `make()` gives with torch's generator at `seed`; the generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def mlp(seed=0, d=3, hidden=5, act=nn.ReLU):
    return seeded(lambda: nn.Sequential(nn.Linear(d, hidden), act(), nn.Linear(hidden, 1)), seed)


def batches(n=4, bs=6, d=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(bs, d, generator=g), torch.randn(bs, 1, generator=g)) for _ in range(n)]


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr)


def learner(model, data=None, *cbs, opt=sgd, lr=0.1, loss=F.mse_loss, kind=Learner, n_epoch=1, **options):
    """A learner that was fitted in silence."""
    return fit(kind(data or batches(), model, loss, opt, lr=lr, cbs=list(cbs), **options), n_epoch)


def at(event, act, order=0, name="acting"):
    cb = Callback(name=name, **{event: act})
    cb.order = order
    return cb


# ---- the oracle


def wide(x):
    """Float64, or the magnitude of what is complex, as a copy."""
    x = x.detach()
    x = x.to_dense() if x.is_sparse else x
    return (x.abs() if x.is_complex() else x).to(torch.float64, copy=True)


def exact(x):
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64, copy=True)


def norm_of(x):
    return math.sqrt(sum(abs(v) ** 2 for v in x.flatten().tolist()))


def gradients_of(model, scale=1.0):
    params = model.named_parameters()
    return {name: wide(p.grad) / scale for name, p in params if p.grad is not None}


def weights_of(model):
    return {name: exact(p) for name, p in model.named_parameters()}


def by_hand(
    model, data, opt=sgd, lr=0.1, loss=F.mse_loss, clip=None, n_acc=1, scaler=None, autocast=None, n_epoch=1
):
    """Trains in a plain loop, and gives of each step gradients and weights before and after."""
    opt, steps, start = opt(list(model.parameters()), lr=lr), [], weights_of(model)
    model.train()
    for _ in range(n_epoch):
        for group in (data[i : i + n_acc] for i in range(0, len(data), n_acc)):
            n_samples = sum(len(x) for x, _ in group)
            for x, y in group:
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    part = loss(model(x), y) * (len(x) / n_samples)
                (part if scaler is None else scaler.scale(part)).backward()
            scale = 1.0 if scaler is None else scaler.get_scale()
            if scaler is not None:
                scaler.unscale_(opt)
            step = SimpleNamespace(start=start, grads=gradients_of(model), before=weights_of(model))
            if clip is not None:
                clip([p for p in model.parameters() if p.grad is not None])
            step.clipped = gradients_of(model)
            step.lr, step.scale = float(opt.param_groups[-1]["lr"]), scale
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()
            step.after = weights_of(model)
            step.skipped = scaler is not None and scaler.get_scale() < scale
            opt.zero_grad()
            steps.append(step)
    return steps


def zero_rows(grad):
    if grad.dim() < 2 or not len(grad):
        return NAN
    return sum(all(v == 0 for v in row.flatten().tolist()) for row in grad) / len(grad)


def ratio(after, before):
    change, size = norm_of(after - before), norm_of(before)
    return 0.0 if change == 0 else change / size if size else INF


def expected(step, name):
    """The columns of one parameter, by plain sums over Python numbers."""
    grad, clipped, after = step.grads[name], step.clipped[name], step.after[name]
    finite = [abs(v) for v in grad.flatten().tolist() if math.isfinite(v)]
    size = after.abs() if after.is_complex() else after
    values = size.flatten().tolist()
    mean = sum(values) / len(values)
    spread = sum((v - mean) ** 2 for v in values)
    return {
        "norm": norm_of(grad),
        "clipped_norm": norm_of(clipped),
        "rms": norm_of(grad) / math.sqrt(grad.numel()),
        "abs_max": max(finite, default=NAN),
        "nonfinite": float(grad.numel() - len(finite)),
        "zero_rows": zero_rows(grad),
        "weight_norm": norm_of(after),
        "weight_mean": mean,
        "weight_std": math.sqrt(spread / (len(values) - 1)) if len(values) > 1 else NAN,
        "update_ratio": ratio(after, step.before[name]),
        "drift": ratio(after, step.start[name]),
    }


def expected_step(step):
    norms = [norm_of(g) for g in step.grads.values()]
    total, clipped = math.hypot(*norms), math.hypot(*[norm_of(g) for g in step.clipped.values()])
    return {
        "total_norm": total,
        "clipped_total_norm": clipped,
        "mean_norm": sum(norms) / len(norms),
        "lr": step.lr,
        "scale": step.scale,
        "skipped": float(step.skipped),
        "clip_coef": clipped / total,
    }


def close(a, b, rel=2e-4, abs_tol=1e-8):
    return (a != a and b != b) or a == b or math.isclose(a, b, rel_tol=rel, abs_tol=abs_tol)


def differences(got, want, skip=(), rel=2e-4):
    """By name what `want` says and is not there."""
    return {k: (got[k], v) for k, v in want.items() if k not in skip and not close(got[k], v, rel)}


def assert_matches(health, steps, skip=(), rel=2e-4, names=None, skip_step=()):
    """Each number recorded is that of the plain loop."""
    assert len(health.stats) == len(health.step_stats) == len(steps)
    names = list(steps[0].grads) if names is None else names
    for k, step in enumerate(steps):
        for name in names:
            wrong = differences(health.stats[k][name], expected(step, name), skip, rel)
            assert not wrong, f"step {k}, {name}: (recorded, true) {wrong}"
        wrong = differences(health.step_stats[k], expected_step(step), skip_step, rel)
        assert not wrong, f"step {k}: (recorded, true) {wrong}"
