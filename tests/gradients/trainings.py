"""Healthy trainings: those of each kind of network, and those that only look odd."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Freeze, GradientAccumulation, GradientClip, MixedPrecision, WarmupCosine
from tests.gradients.support import at, learner, seeded

adam, sgd = torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def points(seed, n=16, d=4):
    g = generator(seed)
    xs = torch.randn(n, 24, d, generator=g)
    return [(x, (x.prod(1, keepdim=True) + x[:, :1]).sign().relu()[:, 0].long()) for x in xs]


def mlp(act=nn.ReLU):
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
    "mlp": (mlp, points, CE, {"Adam": 5e-3, "SGD": 0.05}),
    "cnn": (cnn, images, CE, {"Adam": 3e-3, "SGD": 0.02}),
    "lstm": (Lstm, tokens, CE, {"Adam": 1e-2, "SGD": 0.3}),
    "transformer": (Transformer, tokens, CE, {"Adam": 3e-3, "SGD": 0.05}),
}


def run(make, data, *cbs, lr=5e-3, opt=adam, loss=CE, n_epoch=5):
    def train(health, seed):
        learner(
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
    "tanh and SGD": run(partial(mlp, nn.Tanh), points, lr=0.1, opt=sgd),
    "two sigmoids": run(partial(mlp, nn.Sigmoid), points, lr=1e-2),
    "batch norm and dropout": run(norms, points),
    "branches that begin at zero": run(Residual, points),
    "rare tokens": run(Rare, partial(tokens, n_tokens=400)),
    "rare tokens, plain SGD": run(Rare, partial(tokens, n_tokens=400), lr=0.1, opt=torch.optim.SGD),
    "a recurrent network, clipped": run(gru, tokens, lambda: GradientClip(0.5), lr=1e-2),
    "an encoder after Vaswani": run(Encoder, tokens, lr=2e-3),
    "a frozen body": run(mlp, points, lambda: Freeze("0")),
    "a body that thaws": run(mlp, points, lambda: Freeze("0", until=2)),
    "one batch, learnt by heart": run(mlp, one_batch, lr=2e-2, n_epoch=8),
    "an autoencoder": run(autoencoder, pairs, loss=F.mse_loss),
    "two samples a batch": run(mlp, small_batches, lr=1e-3),
    "a loss below zero": run(autoencoder, pairs, loss=cosine),
    "warm-up from nothing and decay to nothing": run(mlp, points, lambda: WarmupCosine(0.3)),
    "a rate that ends at nothing": run(mlp, points, lambda: at("before_batch", dying)),
    "accumulation": run(mlp, lambda seed: points(seed, 64), lambda: GradientAccumulation(4)),
    "bfloat16": run(cnn, images, lambda: half("bf16")),
    "float16": run(mlp, points, lambda: half("fp16")),
    "weight decay": run(mlp, points, opt=partial(torch.optim.AdamW, weight_decay=0.1)),
    "a fused optimizer": run(mlp, points, opt=partial(adam, fused=True)),
    "label smoothing": run(mlp, points, loss=partial(CE, label_smoothing=0.1)),
}
