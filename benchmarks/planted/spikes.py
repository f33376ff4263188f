"""Spikes of the loss in small language models, each with a cause of its own, and spikes that are harmless."""

import torch
from case import Callbacks, Case, Run, control, fault, fit, follow
from data import Batch, digit_batches, generator
from language import LENGTH, N_CHARACTER, LanguageModel, adamw, character_batches
from nets import stack, token_loss
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hookcb import GradientClip, watch

SPIKES: list[Case] = []
SPIKE_CONTROLS: list[Case] = []
AT, N_STEP = 120, 260  # step of the cause, and of the end
CODES = ["adam.state", "loss.spike", "loss.diverging", "update.too_large", "update.spike", "loss.trivial"]
SAYS: dict[str, str] = {}  # what the finding on the spike must say, by case


def spike(name: str, says: str):
    """Add a training with a spike of a known cause; it may be told as a note if it heals."""
    SAYS[name] = says
    return fault(SPIKES, name, codes=CODES, planted_at=AT, note_suffices=True)


def batches_with(seed: int, rows: int, n_step: int = N_STEP) -> list[Batch]:
    """Characters; in one batch some rows are noise."""
    batches, size = character_batches(seed, n_step), (rows, LENGTH)
    x, y = (x.clone() for x in batches[AT])
    x[:rows] = torch.randint(N_CHARACTER, size, generator=generator(seed + 1))
    y[:rows] = torch.randint(N_CHARACTER, size, generator=generator(seed + 2))
    batches[AT] = x, y
    return batches


@spike("LM: half of a batch is noise, clipped at 1", says="it is this batch alone")
def noisy_rows(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    return follow(model, token_loss, opt, batches_with(seed, 8), cbs, seed, clip=1.0)


@spike("LM: a whole batch is noise, by a Learner", says="it is this batch alone")
def noisy_batch(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    batches = batches_with(seed, 16)
    return fit(model, token_loss, adamw(model, lr=3e-3), batches, [*cbs, GradientClip(1.0)], seed)


@spike("LM: the rate rises to fifty times as much, for good", says="the learning rate had risen")
def fast_for_good(seed: int, cbs: Callbacks) -> Run:
    return _with_rate(seed, cbs, lambda step: 50.0 if step >= AT else 1.0)


@spike("LM: the rate rises to thirty times as much, for twenty steps", says="the learning rate had risen")
def fast_for_a_while(seed: int, cbs: Callbacks) -> Run:
    return _with_rate(seed, cbs, lambda step: 30.0 if AT <= step < AT + 20 else 1.0)


def _with_rate(seed: int, cbs: Callbacks, factor) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    batches = character_batches(seed, N_STEP)
    return follow(model, token_loss, opt, batches, cbs, seed, schedule=LambdaLR(opt, factor))


def _changed(opt: Optimizer, key: str, factor: float):
    def change(step: int) -> None:
        if step == AT - 1:
            for state in opt.state.values():
                state[key].mul_(factor)

    return change


@spike("LM: Adam's first moment is multiplied by 100", says="the state of the optimizer is wrong")
def wrong_momentum(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    changed = _changed(opt, "exp_avg", 100.0)
    return follow(model, token_loss, opt, character_batches(seed, N_STEP), cbs, seed, after_step=changed)


@spike("LM: Adam's second moment is lost", says="the state of the optimizer is wrong")
def lost_second_moment(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=5e-3)
    changed = _changed(opt, "exp_avg_sq", 1e-6)
    return follow(model, token_loss, opt, character_batches(seed, N_STEP), cbs, seed, after_step=changed)


def clipped_until(seed: int, cbs: Callbacks, limit: float, lr: float) -> Run:
    """Train by SGD, with clipping that ends at step 120."""
    model = LanguageModel()
    opt = SGD(model.parameters(), lr=lr, momentum=0.9)
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(character_batches(seed, N_STEP)):
            loss = w.report_loss(token_loss(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            if step < AT:
                clip_grad_norm_(model.parameters(), limit)
            opt.step()
            opt.zero_grad()
    return run


@spike("LM: clipping to 0.1 ends, at a rate for it", says="from step 120 on clip_grad_norm_ was not called")
def clipping_ends(seed: int, cbs: Callbacks) -> Run:
    return clipped_until(seed, cbs, limit=0.1, lr=0.6)


def scaled(seed: int, cbs: Callbacks, after_backward: float | None, after_step: float | None) -> Run:
    """Train with a GradScaler whose scale is set by hand in one step."""
    model = LanguageModel()
    opt = SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=50)
    torch.manual_seed(seed)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(character_batches(seed, N_STEP)):
            loss = token_loss(model(x), y)
            run.losses.append(loss.item())
            scaler.scale(loss).backward()
            if step == AT and after_backward is not None:
                scaler.update(after_backward)
            scaler.step(opt)
            scaler.update(after_step if step == AT else None)
            opt.zero_grad()
    return run


@spike(
    "LM: the loss scale is lowered between backward and step", says="the scale of the GradScaler had changed"
)
def scale_between(seed: int, cbs: Callbacks) -> Run:
    return scaled(seed, cbs, after_backward=2.0**12, after_step=None)


def of_two_shards(seed: int, scale: float) -> list[Batch]:
    """Digits, times `scale` in a second shard."""
    batches = digit_batches(seed, n_step=N_STEP)
    return [(x * scale, y) if step >= AT else (x, y) for step, (x, y) in enumerate(batches)]


@spike("digits that are divided by their scale twice from the second shard on", says="inputs of the batches")
def scaled_twice(seed: int, cbs: Callbacks) -> Run:
    """As by a dataset that scales its tensors in place."""
    model = nn.Sequential(stack(64, 64, 64), nn.ReLU(), nn.Linear(64, 10))
    batches = of_two_shards(seed, 1 / 16)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


@control(SPIKE_CONTROLS, "digits on another scale in the second shard, which a norm undoes", target=0.6)
def scaled_before_norm(seed: int, cbs: Callbacks) -> Run:
    model = nn.Sequential(nn.LayerNorm(64, eps=1e-8), stack(64, 64, 10))
    batches = of_two_shards(seed, 1 / 16)
    return follow(model, F.cross_entropy, Adam(model.parameters(), lr=3e-3), batches, cbs, seed)


class Between(LanguageModel):
    """A language model with something between its two blocks that depends on the step, in no attribute."""

    def __init__(self, change) -> None:
        super().__init__()
        self.step, self.change = [0], change

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(self.places(tokens))
        x = self.blocks[1](self.change(self.blocks[0](x), self.step[0]))
        return self.head(self.norm(x))

    def train_on(self, seed: int, cbs: Callbacks) -> Run:
        """Train, and count steps."""
        batches, opt = character_batches(seed, N_STEP), adamw(self, lr=3e-3)
        return follow(
            self, token_loss, opt, batches, cbs, seed, after_step=lambda i: self.step.__setitem__(0, i + 1)
        )


@control(SPIKE_CONTROLS, "LM: a scale between two layers that grows slowly", target=3.1)
def slow_scale(seed: int, cbs: Callbacks) -> Run:
    return Between(lambda x, step: x * 1.005**step).train_on(seed, cbs)


@control(SPIKE_CONTROLS, "LM: clipping to 10 ends, which cuts nothing", target=3.1)
def clipping_of_nothing(seed: int, cbs: Callbacks) -> Run:
    return clipped_until(seed, cbs, limit=10.0, lr=0.3)


@control(SPIKE_CONTROLS, "LM: the loss scale is lowered after a step", target=3.1)
def scale_after(seed: int, cbs: Callbacks) -> Run:
    return scaled(seed, cbs, after_backward=None, after_step=2.0**12)


@control(SPIKE_CONTROLS, "LM: one row of a batch is noise, which heals", target=2.9)
def one_noisy_row(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    return follow(model, token_loss, opt, batches_with(seed, 1), cbs, seed, clip=1.0)


@control(SPIKE_CONTROLS, "LM: a warm restart of a cosine", target=2.9)
def warm_restart(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, AT, eta_min=1e-4)
    return follow(model, token_loss, opt, character_batches(seed, 2 * AT), cbs, seed, schedule=schedule)


@control(SPIKE_CONTROLS, "LM: batches of two rows, whose losses scatter", target=3.2)
def small_batches(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    batches = [(x[:2], y[:2]) for x, y in character_batches(seed, 2 * N_STEP)]
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0)
