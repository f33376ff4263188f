"""Faults that reports named first: targets in the input, dead channels of few images, a signal that fades."""

from case import Callbacks, Case, Run, control, fault
from language import LENGTH, N_CHARACTER, LanguageModel, character_batches, future
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW, Optimizer

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
            loss = model(*batch)[-1]
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return Run(w, losses, model=model)


@fault(FACTS_LEFT_FAULTS, "LM: unshifted targets, only the loss returned", codes=["label.copies_input"])
def copied_by_loss(seed: int, cbs: Callbacks) -> Run:
    model = LossOnly()
    batches = [(x, x) for x, _ in character_batches(seed, n_step=25)]
    return train(model, AdamW(model.parameters(), lr=1e-3), batches, cbs)


@fault(FACTS_LEFT_FAULTS, "LM: a decoder gets its unshifted targets", codes=["label.copies_input"])
def decoder_sees(seed: int, cbs: Callbacks) -> Run:
    model = Decoder()
    batches = [(x[:, :20], x[:, 16:40], x[:, 16:40]) for x, _ in character_batches(seed, n_step=40)]
    return train(model, Adam(model.parameters(), lr=1e-3), batches, cbs)


@control(FACTS_LEFT_CONTROLS, "LM: only the loss returned", target=3.6)
def by_loss(seed: int, cbs: Callbacks) -> Run:
    model = LossOnly()
    return train(model, AdamW(model.parameters(), lr=3e-3), character_batches(seed, n_step=60), cbs)


@control(FACTS_LEFT_CONTROLS, "LM: an autoencoder with a causal decoder", target=3.4)
def causal_autoencoder(seed: int, cbs: Callbacks) -> Run:
    model, inputs = Decoder(), [x[:, :16] for x, _ in character_batches(seed, n_step=80)]
    batches = [(x, F.pad(x[:, :-1], (1, 0)), x) for x in inputs]
    return train(model, Adam(model.parameters(), lr=3e-3), batches, cbs)
