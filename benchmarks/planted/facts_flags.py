"""Flags, modes, dtypes and schedules that contradict each other, and right trainings near them."""

import warnings
from collections.abc import Callable
from math import inf

import torch
from case import Callbacks, Case, Run, control, fault, fit, follow
from data import Batch, digit_batches, image_batches
from nets import Cnn, Encoded, Mlp, ResNet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from hookcb import Callback, watch

FACTS_FLAGS_FAULTS: list[Case] = []
FACTS_FLAGS_CONTROLS: list[Case] = []


def with_momentum(model: nn.Module, momentum: float | None) -> nn.Module:
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            m.momentum = momentum
    return model


@fault(FACTS_FLAGS_FAULTS, "batch norm with momentum 0", codes=["norm.running"], layers=["norm1", "norm2"])
def momentum_zero(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(Cnn(), 0.0)
    batches = image_batches(seed, n_step=40)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), (batches, batches[:2]), cbs, seed)


@fault(FACTS_FLAGS_FAULTS, "batch norm with momentum 0, MLP in watch", codes=["norm.running"])
def momentum_zero_in_watch(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(Mlp(nn.ReLU, norm=True), 0.0)
    opt = SGD(model.parameters(), lr=0.05)
    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=30), cbs, seed)


@fault(FACTS_FLAGS_FAULTS, "batch norm with momentum 0.001 in a short training", codes=["norm.running"])
def momentum_small(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(Mlp(nn.ReLU, norm=True), 0.001)
    batches = digit_batches(seed, n_step=120)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), (batches, batches[:2]), cbs, seed)


class Decay(Callback):
    """Multiplies the momentum of batch norms after each step, down to a minimum."""

    def __init__(self, factor: float, minimum: float) -> None:
        self.factor, self.minimum = factor, minimum

    def after_step(self) -> None:
        for m in self.model.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.momentum = max(self.minimum, (m.momentum or 0.0) * self.factor)


@fault(FACTS_FLAGS_FAULTS, "batch norm whose momentum decays per batch", codes=["norm.running"])
def momentum_decays(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(Cnn(), 0.5)
    batches, cbs = image_batches(seed, n_step=120), [*cbs, Decay(0.9, 0.0)]
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), (batches, batches[:2]), cbs, seed)


@control(FACTS_FLAGS_CONTROLS, "batch norm whose momentum decays to 0.01", target=1.0)
def momentum_decays_little(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(Mlp(nn.ReLU, norm=True), 0.5)
    batches, cbs = digit_batches(seed, n_step=160), [*cbs, Decay(0.97, 0.01)]
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=2e-3), (batches, batches[:2]), cbs, seed)


@control(FACTS_FLAGS_CONTROLS, "batch norm with momentum 0.01", target=1.0)
def momentum_low(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(Cnn(), 0.01)
    batches = image_batches(seed)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=1e-2), (batches, batches[:2]), cbs, seed)


@control(FACTS_FLAGS_CONTROLS, "batch norm with a cumulative average", target=1.5)
def momentum_none(seed: int, cbs: Callbacks) -> Run:
    model = with_momentum(ResNet(), None)
    batches = image_batches(seed, n_step=50)
    return fit(model, F.cross_entropy, Adam(model.parameters(), lr=5e-3), (batches, batches[:2]), cbs, seed)


@control(FACTS_FLAGS_CONTROLS, "batch norm frozen after warm start", target=1.0)
def frozen_norms(seed: int, cbs: Callbacks) -> Run:
    """As in detection: statistics that were learned before, which are used and not changed."""
    model = Mlp(nn.ReLU, norm=True)
    with torch.no_grad():
        for x, _ in digit_batches(seed + 1, n_step=30):
            model(x)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval().requires_grad_(False)
    opt = Adam(model.parameters(), lr=5e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=80), cbs, seed)


def scaled(
    model: nn.Module, opt: Optimizer, seed: int, cbs: Callbacks, clip: float, *, unscales: bool = False
) -> Run:
    """Mixed precision with a GradScaler, as on a GPU; gradients are clipped to a norm, if that is finite."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=30)
    with watch(model, opt, *cbs, scaler=scaler) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed, n_step=60):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            run.losses.append(w.report_loss(loss).item())
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(opt)
            scaler.update()
    return run


@fault(FACTS_FLAGS_FAULTS, "clipping before unscale_, SGD", codes=["clip.scaled"])
def clipped_scaled(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    return scaled(model, SGD(model.parameters(), lr=0.1), seed, cbs, 1.0)


def clamped(model: nn.Module, limit: float) -> nn.Module:
    """Has hooks that clamp gradients in the backward."""
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-limit, limit))
    return model


@fault(FACTS_FLAGS_FAULTS, "hooks that clamp scaled gradients, SGD", codes=["clip.scaled"])
def clamped_scaled(seed: int, cbs: Callbacks) -> Run:
    model = clamped(Mlp(nn.ReLU), 0.1)
    return scaled(model, SGD(model.parameters(), lr=0.1), seed, cbs, inf)


@fault(FACTS_FLAGS_FAULTS, "hooks that clamp scaled gradients, batch norm", codes=["clip.scaled"])
def clamped_scaled_norm(seed: int, cbs: Callbacks) -> Run:
    model = clamped(Mlp(nn.ReLU, depth=3, norm=True), 0.5)
    return scaled(model, SGD(model.parameters(), lr=0.05, momentum=0.9), seed, cbs, inf)


@control(FACTS_FLAGS_CONTROLS, "hooks that clamp to a limit times the scale", target=1.2)
def clamped_to_scale(seed: int, cbs: Callbacks) -> Run:
    model = clamped(Mlp(nn.ReLU), 0.05 * 2.0**16)
    return scaled(model, SGD(model.parameters(), lr=0.2, momentum=0.9), seed, cbs, inf)


@fault(FACTS_FLAGS_FAULTS, "clipping before unscale_, AdamW and batch norm", codes=["clip.scaled"])
def clipped_scaled_adam(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh, depth=3, norm=True)
    return scaled(model, AdamW(model.parameters(), lr=2e-3), seed, cbs, 0.5)


@control(FACTS_FLAGS_CONTROLS, "clipping after unscale_", target=1.0)
def clipped_unscaled(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    return scaled(model, SGD(model.parameters(), lr=0.3), seed, cbs, 0.5, unscales=True)


def per_epoch(schedule: LRScheduler, n_each: int) -> Callable[[int], None]:
    """Steps a scheduler after each `n_each` steps."""

    def after_step(step: int) -> None:
        if (step + 1) % n_each == 0:
            schedule.step()

    return after_step


@fault(FACTS_FLAGS_FAULTS, "one cycle stepped once per epoch", codes=["lr.schedule"])
def one_cycle_per_epoch(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    opt, batches = Adam(model.parameters(), lr=1e-3), digit_batches(seed, n_step=112)
    schedule = per_epoch(OneCycleLR(opt, 1e-2, total_steps=112), 28)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, after_step=schedule)


@fault(FACTS_FLAGS_FAULTS, "cosine over epochs stepped per batch", codes=["lr.schedule"])
def cosine_per_batch(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    opt, batches = SGD(model.parameters(), lr=0.1), image_batches(seed, n_step=100)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, schedule=CosineAnnealingLR(opt, T_max=5))


@fault(FACTS_FLAGS_FAULTS, "milestones of epochs stepped per batch", codes=["lr.schedule"])
def milestones_per_batch(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt, batches = Adam(model.parameters(), lr=1e-2), digit_batches(seed)
    schedule = MultiStepLR(opt, [10, 15, 20])
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, schedule=schedule)


@fault(FACTS_FLAGS_FAULTS, "scheduler of an earlier optimizer", codes=["lr.schedule"])
def schedule_of_earlier(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.Tanh, depth=3)
    schedule = CosineAnnealingLR(SGD(model.parameters(), lr=0.1), T_max=100)
    opt, batches = SGD(model.parameters(), lr=0.1), digit_batches(seed, n_step=100)
    with warnings.catch_warnings(action="ignore"):  # of torch, that its optimizer makes no step
        return follow(model, F.cross_entropy, opt, batches, cbs, seed, schedule=schedule)


@control(FACTS_FLAGS_CONTROLS, "one cycle that is stopped early", target=1.0)
def one_cycle_cut(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt, batches = Adam(model.parameters(), lr=1e-3), digit_batches(seed, n_step=100)
    schedule = OneCycleLR(opt, 1e-2, total_steps=400)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, schedule=schedule)


@control(FACTS_FLAGS_CONTROLS, "warmup and cosine in sequence", target=1.0)
def warmup_cosine(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt, batches = Adam(model.parameters(), lr=1e-2), digit_batches(seed, n_step=100)
    parts = [LinearLR(opt, 0.1, total_iters=10), CosineAnnealingLR(opt, 90)]
    schedule = SequentialLR(opt, parts, [10])
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, schedule=schedule)


@control(FACTS_FLAGS_CONTROLS, "milestones stepped once per epoch", target=1.0)
def milestones_per_epoch(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt, batches = Adam(model.parameters(), lr=1e-2), digit_batches(seed, n_step=112)
    schedule = per_epoch(MultiStepLR(opt, [2, 3]), 28)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, after_step=schedule)


@fault(FACTS_FLAGS_FAULTS, "random trunk frozen", codes=["param.frozen_random"], note_suffices=True)
def random_trunk(seed: int, cbs: Callbacks) -> Run:
    """Pretrained weights that were forgotten; a note, as a Learner does not hear what was loaded before."""
    model = Mlp(nn.ReLU, depth=3)
    model.blocks.requires_grad_(False)
    opt = Adam(model.head.parameters(), lr=1e-2)
    return fit(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), cbs, seed)


@fault(FACTS_FLAGS_FAULTS, "random head frozen", codes=["param.frozen_random"], note_suffices=True)
def random_head(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    model.head.requires_grad_(False)
    opt = Adam((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    return follow(model, F.cross_entropy, opt, image_batches(seed, n_step=60), cbs, seed)


@fault(
    FACTS_FLAGS_FAULTS, "optimizer of a part that was frozen late", codes=["param.frozen_late"], planted_at=20
)
def frozen_late(seed: int, cbs: Callbacks) -> Run:
    """One part is frozen for another's steps, and never unfrozen, as with a discriminator."""
    model = Mlp(nn.ReLU, depth=3)
    opts = [SGD(part.parameters(), lr=0.05) for part in (model.blocks, model.head)]
    with watch(model, opts, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(digit_batches(seed, n_step=100)):
            model.blocks.requires_grad_(step < 20)
            loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    return run


class Adapted(nn.Module):
    """A trained layer with a low-rank adapter, and a new head."""

    def __init__(self, n_out: int = 10) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.lora_A = nn.Linear(64, 4, bias=False)
        self.lora_B = nn.Linear(4, 64, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.head = nn.Linear(64, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) + self.lora_B(self.lora_A(x))).relu())


@fault(FACTS_FLAGS_FAULTS, "adapters loaded frozen", codes=["param.frozen_adapters"])
def frozen_adapters(seed: int, cbs: Callbacks) -> Run:
    model = Adapted()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    opt = Adam(model.head.parameters(), lr=1e-2)
    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), cbs, seed)


@fault(FACTS_FLAGS_FAULTS, "adapters in the optimizer and frozen", codes=["param.frozen_adapters"])
def held_adapters(seed: int, cbs: Callbacks) -> Run:
    model = Encoded(Adapted(n_out=32), nn.Sequential(nn.ReLU(), nn.Linear(32, 10)))
    model.trunk.requires_grad_(False)
    return fit(
        model, F.cross_entropy, Adam(model.parameters(), lr=1e-2), digit_batches(seed, n_step=60), cbs, seed
    )


@control(FACTS_FLAGS_CONTROLS, "low-rank adapters on a trained net", target=1.0)
def adapters(seed: int, cbs: Callbacks) -> Run:
    model = Adapted()
    opt = Adam(model.parameters(), lr=5e-3)
    follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), [], seed)
    model.body.requires_grad_(False)
    opt = Adam((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed + 1, n_step=60), cbs, seed)


@control(FACTS_FLAGS_CONTROLS, "gradual unfreezing of a trained net", target=1.0)
def unfreezing(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    opt = Adam(model.parameters(), lr=5e-3)
    follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=60), [], seed)
    model.blocks.requires_grad_(False)

    def unfreeze(step: int) -> None:
        for i, block in enumerate(model.blocks):
            block.requires_grad_(step >= 60 - 20 * i)

    batches = digit_batches(seed + 1, n_step=100)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed, after_step=unfreeze)


def in_bfloat16(
    model: nn.Module, seed: int, cbs: Callbacks, batches: list[Batch], *, is_model_in: bool = True
) -> Run:
    opt = Adam(model.parameters(), lr=5e-3)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in batches:
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_model_in):
                pred = model(x)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(pred, y)
            run.losses.append(w.report_loss(loss).item())
            loss.backward()
            opt.step()
    return run


class InFloat32(nn.Module):
    """A part that is called outside of autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


@fault(FACTS_FLAGS_FAULTS, "autocast around the loss only", codes=["amp.outside"])
def loss_in_autocast(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, norm=True)
    return in_bfloat16(model, seed, cbs, digit_batches(seed, n_step=60), is_model_in=False)


@fault(FACTS_FLAGS_FAULTS, "convolutions outside of autocast", codes=["amp.outside"])
def convolutions_outside(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    model.conv2 = InFloat32(model.conv2)
    return in_bfloat16(model, seed, cbs, image_batches(seed, n_step=60))


class InFloat64(nn.Module):
    """A part in float64, in which autocast is on or off."""

    def __init__(self, inner: nn.Module, *, is_on: bool = True) -> None:
        super().__init__()
        self.inner, self.is_on = inner.double(), is_on

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            return self.inner(x.double()).float()


@fault(FACTS_FLAGS_FAULTS, "a head in float64 within autocast", codes=["amp.outside"])
def double_head(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, norm=True)
    model.head = InFloat64(model.head)
    return in_bfloat16(model, seed, cbs, digit_batches(seed, n_step=60))


@fault(FACTS_FLAGS_FAULTS, "convolutions in float64 within autocast", codes=["amp.outside"])
def double_convolutions(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    model.conv2 = InFloat64(model.conv2)
    return in_bfloat16(model, seed, cbs, image_batches(seed, n_step=60))


@control(FACTS_FLAGS_CONTROLS, "a head in float64, with autocast switched off around it", target=1.0)
def head_in_float64(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3, norm=True)
    model.head = InFloat64(model.head, is_on=False)
    return in_bfloat16(model, seed, cbs, digit_batches(seed, n_step=80))


@control(FACTS_FLAGS_CONTROLS, "autocast with norms and a head in float32", target=1.0)
def head_in_float32(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3, norm=True)
    model.head = InFloat32(model.head)
    return in_bfloat16(model, seed, cbs, digit_batches(seed, n_step=80))


def changed_at(
    model: nn.Module, opt: Optimizer, seed: int, cbs: Callbacks, change: Callable[[], object]
) -> Run:
    """Trains with the inputs in the dtype of the weights; `change` is called after step 60."""
    data = image_batches(seed, n_step=120) if isinstance(model, Cnn) else digit_batches(seed, n_step=120)
    batches = ((x.to(model.head.weight.dtype), y) for x, y in data)
    return follow(
        model,
        lambda pred, y: F.cross_entropy(pred.float(), y),
        opt,
        batches,
        cbs,
        seed,
        after_step=lambda step: change() if step == 60 else None,
    )


@fault(FACTS_FLAGS_FAULTS, "head that is created anew in mid-run", ["param.replaced"], ["head"], 60)
def new_head(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)

    def change() -> None:
        model.head = nn.Linear(64, 10)

    return changed_at(model, Adam(model.parameters(), lr=2e-3), seed, cbs, change)


@fault(FACTS_FLAGS_FAULTS, "load in mid-run with assign=True", ["param.replaced"], planted_at=60)
def assigned(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()

    def change() -> None:
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)

    return changed_at(model, SGD(model.parameters(), lr=0.05, momentum=0.9), seed, cbs, change)


@fault(FACTS_FLAGS_FAULTS, "model in bfloat16 from mid-run on", ["param.converted"], planted_at=60)
def in_bfloat16_late(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    return changed_at(
        model, SGD(model.parameters(), lr=0.05, momentum=0.9), seed, cbs, lambda: model.bfloat16()
    )


@fault(
    FACTS_FLAGS_FAULTS, "convolutions in half precision from mid-run on", ["param.converted"], planted_at=60
)
def in_half_late(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    return changed_at(model, SGD(model.parameters(), lr=0.02), seed, cbs, lambda: model.half())


@control(FACTS_FLAGS_CONTROLS, "copy in half precision that is evaluated", target=1.0)
def evaluated_in_half(seed: int, cbs: Callbacks) -> Run:
    model, twin = Mlp(nn.ReLU), Mlp(nn.ReLU).eval()
    x = digit_batches(seed + 1, n_step=1)[0][0]

    @torch.no_grad()
    def evaluate() -> None:
        twin.load_state_dict(model.state_dict())
        twin.bfloat16()(x.bfloat16())

    return changed_at(model, Adam(model.parameters(), lr=3e-3), seed, cbs, evaluate)


def of_two(
    model: nn.Module, batches: list[Batch], cbs: Callbacks, length: int, n_each: int, every: int = 1
) -> Run:
    """Body and head with an optimizer each; that of the head steps less often, and its schedule in epochs."""
    opts = [
        Adam((p for p in model.parameters() if all(p is not q for q in model.head.parameters())), lr=3e-3)
    ]
    opts.append(Adam(model.head.parameters(), lr=3e-3))
    schedules = [CosineAnnealingLR(opts[0], len(batches)), CosineAnnealingLR(opts[1], length)]
    with watch(model, opts, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(batches):
            model.zero_grad()
            loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            opts[0].step()
            schedules[0].step()
            if step % every == 0:
                opts[1].step()
                if (step + 1) % n_each == 0 or n_each == 1:
                    schedules[1].step()
    return run


@fault(FACTS_FLAGS_FAULTS, "second optimizer's cosine over epochs stepped per batch", codes=["lr.schedule"])
def second_cosine(seed: int, cbs: Callbacks) -> Run:
    return of_two(Mlp(nn.ReLU), digit_batches(seed, n_step=100), cbs, 5, 1)


@fault(FACTS_FLAGS_FAULTS, "second optimizer's cosine over batches stepped per epoch", codes=["lr.schedule"])
def second_per_epoch(seed: int, cbs: Callbacks) -> Run:
    return of_two(Cnn(), image_batches(seed, n_step=112), cbs, 112, 28)


@control(FACTS_FLAGS_CONTROLS, "two optimizers, the second with half of the steps", target=1.0)
def second_with_half(seed: int, cbs: Callbacks) -> Run:
    return of_two(Mlp(nn.ReLU), digit_batches(seed, n_step=100), cbs, 50, 1, every=2)
