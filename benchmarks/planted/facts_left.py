"""Faults that reports named first: targets in the input, dead channels of few images, a signal that fades."""

import torch
from case import Callbacks, Case, Run, control, fault, fit
from data import Batch, generator
from language import LENGTH, N_CHARACTER, LanguageModel, character_batches, future
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from hookcb import watch

FACTS_LEFT_FAULTS: list[Case] = []
FACTS_LEFT_CONTROLS: list[Case] = []


# ---- targets


class LossOnly(LanguageModel):
    """A model that returns its loss, and no scores."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        scores = super().forward(tokens)
        return None, F.cross_entropy(scores.view(-1, N_CHARACTER), targets.reshape(-1), ignore_index=-1)


class Decoder(nn.Module):
    """An encoder and a causal decoder that share an embedding; it returns scores and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(N_CHARACTER, 32), nn.Embedding(LENGTH, 32)
        self.body = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, N_CHARACTER)

    def forward(self, x: Tensor, decoded: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        source, target = (self.embed(at) + self.position.weight[: at.shape[1]] for at in (x, decoded))
        scores = self.head(self.body(source, target, tgt_mask=future(target.shape[1])))
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())


def train(model: nn.Module, opt: Optimizer, batches: list[tuple[Tensor, ...]], cbs: Callbacks) -> Run:
    """Train a model that returns its loss as the last part of its output."""
    losses = []
    with watch(model, opt, cbs) as w:
        for batch in batches:
            loss = w.report_loss(model(*batch)[-1])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return Run(w, losses, model=model)


@fault(FACTS_LEFT_FAULTS, "LM: unshifted targets, only the loss returned", codes=["label.copies_input"])
def copied_by_loss(seed: int, cbs: Callbacks) -> Run:
    model = LossOnly()
    batches = [(x, x) for x, _ in character_batches(seed, n_step=10)]
    return train(model, AdamW(model.parameters(), lr=1e-3), batches, cbs)


@fault(FACTS_LEFT_FAULTS, "LM: a decoder gets its unshifted targets", codes=["label.copies_input"])
def decoder_sees(seed: int, cbs: Callbacks) -> Run:
    model = Decoder()
    batches = [(x[:, :20], x[:, 16:40], x[:, 16:40]) for x, _ in character_batches(seed, n_step=20)]
    return train(model, Adam(model.parameters(), lr=1e-3), batches, cbs)


@control(FACTS_LEFT_CONTROLS, "LM: only the loss returned", target=3.7)
def by_loss(seed: int, cbs: Callbacks) -> Run:
    model = LossOnly()
    return train(model, AdamW(model.parameters(), lr=3e-3), character_batches(seed, n_step=40), cbs)


@control(FACTS_LEFT_CONTROLS, "LM: an autoencoder with a causal decoder", target=3.5)
def causal_autoencoder(seed: int, cbs: Callbacks) -> Run:
    model, inputs = Decoder(), [x[:, :16] for x, _ in character_batches(seed, n_step=60)]
    batches = [(x, F.pad(x[:, :-1], (1, 0)), x) for x in inputs]
    return train(model, Adam(model.parameters(), lr=3e-3), batches, cbs)


class RecurrentDecoder(nn.Module):
    """A recurrent decoder of tokens; `how` says what it gets of the targets.

    Args:
        how: "beside" for their embedding beside that of the inputs, "state" for the last state of an encoder
            that reads them, "" for nothing.
        kind: the decoder's layer.
    """

    def __init__(self, how: str, kind: type[nn.RNNBase], width: int = 48) -> None:
        super().__init__()
        self.how, self.tokens = how, nn.Embedding(N_CHARACTER, width)
        self.encoder = nn.GRU(width, width, batch_first=True) if how == "state" else None
        self.layer = kind(width * (1 + (how == "beside")), width, batch_first=True)
        self.head = nn.Linear(width, N_CHARACTER)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.tokens(x)
        if self.how == "beside":
            h = torch.cat([h, self.tokens(y)], -1)
        elif self.encoder is not None:
            h = h + self.encoder(self.tokens(y))[1][-1][:, None]
        scores = self.head(self.layer(h)[0])
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())


@fault(FACTS_LEFT_FAULTS, "LM: an LSTM gets its targets beside the input", codes=["label.copies_input"])
def lstm_sees(seed: int, cbs: Callbacks) -> Run:
    model = RecurrentDecoder("beside", nn.LSTM)
    return train(model, Adam(model.parameters(), lr=3e-3), character_batches(seed, n_step=20), cbs)


@fault(FACTS_LEFT_FAULTS, "LM: a GRU with targets that are not shifted", codes=["label.copies_input"])
def gru_copies(seed: int, cbs: Callbacks) -> Run:
    model, batches = RecurrentDecoder("", nn.GRU), [(x, x) for x, _ in character_batches(seed, n_step=20)]
    return train(model, Adam(model.parameters(), lr=3e-3), batches, cbs)


@control(FACTS_LEFT_CONTROLS, "LM: a recurrent autoencoder", target=3.5)
def recurrent_autoencoder(seed: int, cbs: Callbacks) -> Run:
    model, inputs = RecurrentDecoder("state", nn.LSTM), [x[:, :16] for x, _ in character_batches(seed, 60)]
    batches = [(F.pad(x[:, :-1], (1, 0)), x) for x in inputs]
    return train(model, Adam(model.parameters(), lr=3e-3), batches, cbs)


# ---- dead channels with few images


def small_images(seed: int, n_step: int, size: int) -> list[Batch]:
    """Few images in each batch, of one of four patterns with noise."""
    g = generator(seed)
    patterns, y = torch.randn(4, 3, 12, 12, generator=g), torch.randint(4, (n_step * size,), generator=g)
    x = patterns[y] + 0.5 * torch.randn(len(y), 3, 12, 12, generator=g)
    return list(zip(x.split(size), y.split(size), strict=True))


class Channels(nn.Sequential):
    """Two convolutions and a head."""

    def __init__(self, width: int = 32, n_dead: int = 0) -> None:
        first, second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 16, 3, padding=1)
        nn.init.constant_(first.bias[:n_dead], -30.0)
        pool = nn.MaxPool2d(2)
        super().__init__(first, nn.ReLU(), pool, second, nn.ReLU(), nn.Flatten(), nn.Linear(576, 4))


@fault(FACTS_LEFT_FAULTS, "dead channels, four images a batch", codes=["unit.dead"], layers=["0"])
def dead_channels(seed: int, cbs: Callbacks) -> Run:
    model = Channels(n_dead=30)
    opt = Adam(model.parameters(), lr=1e-3)
    return fit(model, F.cross_entropy, opt, small_images(seed, 60, 4), cbs, seed)


class TokenUnits(nn.Module):
    """Units for each place of a sequence, and their mean."""

    def __init__(self, n_dead: int = 0) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(8, 48), nn.Linear(48, 4)
        nn.init.constant_(self.wide.bias[:n_dead], -30.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.wide(x)).mean(1))


def sequences(seed: int, n_step: int, size: int) -> list[Batch]:
    """Few sequences of 24 vectors in each batch."""
    g = generator(seed)
    y = torch.randint(4, (n_step * size,), generator=g)
    x = torch.randn(len(y), 24, 8, generator=g) + F.one_hot(y, 8)[:, None]
    return list(zip(x.split(size), y.split(size), strict=True))


@fault(FACTS_LEFT_FAULTS, "dead units, two sequences a batch", codes=["unit.dead"], layers=["wide"])
def dead_by_tokens(seed: int, cbs: Callbacks) -> Run:
    model = TokenUnits(n_dead=46)
    opt = Adam(model.parameters(), lr=3e-3)
    return fit(model, F.cross_entropy, opt, sequences(seed, 60, 2), cbs, seed)


@control(FACTS_LEFT_CONTROLS, "sparse channels, two images a batch", target=1.2)
def sparse_channels(seed: int, cbs: Callbacks) -> Run:
    model = Channels()
    nn.init.constant_(model[0].bias, -0.3)
    opt = Adam(model.parameters(), lr=1e-3)
    return fit(model, F.cross_entropy, opt, small_images(seed, 90, 2), cbs, seed)


@control(FACTS_LEFT_CONTROLS, "one place for each image, four images a batch", target=1.2)
def single_place(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.Conv2d(3, 32, 12), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(32, 4))
    opt = Adam(model.parameters(), lr=1e-3)
    return fit(model, F.cross_entropy, opt, small_images(seed, 60, 4), cbs, seed)


# ---- a signal that fades from layer to layer


def points(seed: int, n_step: int) -> list[Batch]:
    """Points of 16 numbers, with the largest of four as their class."""
    x = torch.randn(n_step * 64, 16, generator=generator(seed))
    return list(zip(x.split(64), x[:, :4].argmax(1).split(64), strict=True))


def deep(depth: int, is_scaled: bool = False, norm: bool = False) -> nn.Sequential:
    """Linear layers with ReLU, as torch begins them, or scaled for ReLU."""
    parts: list[nn.Module] = []
    for i in range(depth):
        parts += [nn.Linear(32 if i else 16, 32), *([nn.LayerNorm(32)] if norm else []), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Linear(32, 4))
    for m in model:
        if is_scaled and isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
    return model


@fault(FACTS_LEFT_FAULTS, "ten linear layers as torch begins them", codes=["init.shrinking"])
def deep_default(seed: int, cbs: Callbacks) -> Run:
    model = deep(10)
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.05), points(seed, 100), cbs, seed)


@fault(FACTS_LEFT_FAULTS, "eight convolutions as torch begins them", codes=["init.shrinking"])
def deep_convolutions(seed: int, cbs: Callbacks) -> Run:
    parts: list[nn.Module] = []
    for i in range(8):
        parts += [nn.Conv2d(16 if i else 3, 16, 3, stride=2 if i == 0 else 1, padding=1), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    opt = SGD(model.parameters(), lr=0.02)
    return fit(model, F.cross_entropy, opt, small_images(seed, 60, 16), cbs, seed)


@control(FACTS_LEFT_CONTROLS, "ten linear layers, scaled for ReLU", target=1.25)
def deep_scaled(seed: int, cbs: Callbacks) -> Run:
    model = deep(10, is_scaled=True)
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.05), points(seed, 100), cbs, seed)


@control(FACTS_LEFT_CONTROLS, "ten linear layers as torch begins them, normalized", target=0.9)
def deep_normalized(seed: int, cbs: Callbacks) -> Run:
    model = deep(10, norm=True)
    return fit(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), points(seed, 100), cbs, seed)


@control(FACTS_LEFT_CONTROLS, "eight linear layers as torch begins them, Adam", target=1.0)
def deep_adam(seed: int, cbs: Callbacks) -> Run:
    model = deep(8)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), points(seed, 250), cbs, seed)
