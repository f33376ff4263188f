"""What tests of gradient readings share: plain loops in float64 as oracles, tiny models, and trainings."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Freeze, GradientAccumulation, GradientClip, Learner, MixedPrecision, WarmupCosine
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


OPTIONS = {
    "default": {},
    "outputs": {"activations": True},
    "seldom": {"every": 3, "keep": 2},
    "skipping": {"on_nonfinite": "skip"},
    "raising": {"on_nonfinite": "raise", "activations": True},
}


each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def spoiling(steps, name="2.weight", bad=NAN):
    def act(cb):
        if cb.train_iter in steps:
            dict(cb.model.named_parameters())[name].grad.flatten()[1] = bad

    return at("after_backward", act, order=-50, name="spoiling")


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


# ---- healthy trainings: of each kind of network, and those that only look odd

adam, momentum = torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def points(seed, n=16, d=4):
    g = generator(seed)
    xs = torch.randn(n, 24, d, generator=g)
    return [(x, (x.prod(1, keepdim=True) + x[:, :1]).sign().relu()[:, 0].long()) for x in xs]


def deep_mlp(act=nn.ReLU):
    return nn.Sequential(nn.Linear(4, 24), act(), nn.Linear(24, 24), act(), nn.Linear(24, 2))


def cnn():
    """Biases of convolutions before batch norm have gradients of nothing but rounding."""
    block = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2)]
    return nn.Sequential(*block, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 2))


def images(seed):
    g = generator(seed)
    data = []
    for _ in range(12):
        y = torch.randint(0, 2, (16,), generator=g)
        x = torch.randn(16, 1, 8, 8, generator=g)
        x[:, :, :, 4:] += y[:, None, None, None] * 0.7
        data.append((x, y))
    return data


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 16, batch_first=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.lstm(self.emb(x))[0][:, -1])


class Block(nn.Module):
    """Pre-norm attention of its own projections: the bias of the keys has a gradient of nothing."""

    def __init__(self, d=16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(12, 16), nn.Parameter(torch.zeros(6, 16))
        self.blocks = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.blocks(self.emb(x) + self.pos).mean(1))


def tokens(seed, n_tokens=12):
    g = generator(seed)
    xs = torch.randint(0, n_tokens, (12, 16, 6), generator=g)
    return [(x, ((x < n_tokens // 2).sum(1) > 2.9).long()) for x in xs]


CE = F.cross_entropy


HEALTHY = {
    "mlp": (deep_mlp, points, CE, {"Adam": 5e-3, "SGD": 0.05}),
    "cnn": (cnn, images, CE, {"Adam": 3e-3, "SGD": 0.02}),
    "lstm": (Lstm, tokens, CE, {"Adam": 1e-2, "SGD": 0.3}),
    "transformer": (Transformer, tokens, CE, {"Adam": 3e-3, "SGD": 0.05}),
}


def run(make, data, *cbs, lr=5e-3, opt=adam, loss=CE, n_epoch=5):
    def train(health, seed):
        return learner(
            seeded(make, seed),
            data(seed),
            health,
            *[cb() for cb in cbs],
            lr=lr,
            opt=opt,
            loss=loss,
            n_epoch=n_epoch,
        )

    return train


class Residual(nn.Module):
    """The last scale of each branch begins at zero, so what is before it has no gradient at first."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 16), nn.Linear(16, 2)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16))
            for _ in range(3)
        )
        for branch in self.branches:
            nn.init.zeros_(branch[-1].weight)

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = (x + branch(x)).tanh()
        return self.head(x)


class Rare(nn.Module):
    """Most rows of the embedding are never looked up."""

    def __init__(self):
        super().__init__()
        self.emb, self.fc = nn.Embedding(400, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.emb(x).mean(1))


def gru():
    class Gru(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.gru, self.fc = (
                nn.Embedding(12, 8),
                nn.GRU(8, 12, 2, batch_first=True),
                nn.Linear(12, 2),
            )

        def forward(self, x):
            return self.fc(self.gru(self.emb(x))[0][:, -1])

    return Gru()


class Encoder(nn.Module):
    """PyTorch's own encoder, post-norm, with dropout."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.emb, self.enc = nn.Embedding(12, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.enc(self.emb(x)).mean(1))


def one_batch(seed):
    return points(seed, 1) * 40


def autoencoder():
    return nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def pairs(seed):
    return [(x, x) for x, _ in points(seed)]


def small_batches(seed):
    return [(x[:2], y[:2]) for x, y in points(seed, 40)]


def cosine(a, b):
    return -F.cosine_similarity(a, b).mean()


def half(name):
    return MixedPrecision(name, **({"init_scale": 2.0**16} if name == "fp16" else {}))


def norms():
    return nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.5), nn.Linear(24, 2))


def dying(cb):
    """Cosine decay to nothing."""
    share = 1 - cb.train_iter / (cb.n_epoch * cb.n_iter)
    cb.opt.param_groups[0]["lr"] = 5e-3 * share**2


OTHER_HEALTHY = {
    "tanh and SGD": run(partial(deep_mlp, nn.Tanh), points, lr=0.1, opt=momentum),
    "two sigmoids": run(partial(deep_mlp, nn.Sigmoid), points, lr=1e-2),
    "batch norm and dropout": run(norms, points),
    "branches that begin at zero": run(Residual, points),
    "rare tokens": run(Rare, partial(tokens, n_tokens=400)),
    "rare tokens, plain SGD": run(Rare, partial(tokens, n_tokens=400), lr=0.1, opt=torch.optim.SGD),
    "a recurrent network, clipped": run(gru, tokens, lambda: GradientClip(0.5), lr=1e-2),
    "an encoder after Vaswani": run(Encoder, tokens, lr=2e-3),
    "a frozen body": run(deep_mlp, points, lambda: Freeze("0")),
    "a body that thaws": run(deep_mlp, points, lambda: Freeze("0", until=2)),
    "one batch, learnt by heart": run(deep_mlp, one_batch, lr=2e-2, n_epoch=8),
    "an autoencoder": run(autoencoder, pairs, loss=F.mse_loss),
    "two samples a batch": run(deep_mlp, small_batches, lr=1e-3),
    "a loss below zero": run(autoencoder, pairs, loss=cosine),
    "warm-up from nothing and decay to nothing": run(deep_mlp, points, lambda: WarmupCosine(0.3)),
    "a rate that ends at nothing": run(deep_mlp, points, lambda: at("before_batch", dying)),
    "accumulation": run(deep_mlp, lambda seed: points(seed, 64), lambda: GradientAccumulation(4)),
    "bfloat16": run(cnn, images, lambda: half("bf16")),
    "float16": run(deep_mlp, points, lambda: half("fp16")),
    "weight decay": run(deep_mlp, points, opt=partial(torch.optim.AdamW, weight_decay=0.1)),
    "a fused optimizer": run(deep_mlp, points, opt=partial(adam, fused=True)),
    "label smoothing": run(deep_mlp, points, loss=partial(CE, label_smoothing=0.1)),
}
