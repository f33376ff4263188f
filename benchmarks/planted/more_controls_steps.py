"""Further healthy training runs: optimizers, schedules, precision, and kinds of loops."""

import torch
from case import Callbacks, Case, Losses, Run, control, fit, follow
from data import batched, digit_batches, digits, image_batches, table
from faults_numbers import in_float16
from nets import Cnn, Encoded, Mlp, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hookcb import EMA, GradientClip, Learner, MixedPrecision, Schedule, watch

STEP_CONTROLS: list[Case] = []


@control(STEP_CONTROLS, "LBFGS and its closure", target=0.2)
def lbfgs(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed, n=256)
    model = Mlp(nn.Tanh, width=16, n_in=16, n_out=1)
    opt = LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=10)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)

        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(60):
            run.losses.append(opt.step(closure).item())
    return run


@control(STEP_CONTROLS, "clipping at 0.1 that always clips", target=1.2)
def always_clips(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = SGD(model.parameters(), lr=0.5, momentum=0.9)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, GradientClip(0.1)], seed)


@control(STEP_CONTROLS, "SGD lr 0.5 with momentum on a small net", target=0.3)
def fast_sgd(seed: int, cbs: Callbacks) -> Run:
    x, y = table(seed)
    model = Mlp(nn.Tanh, width=16, depth=1, n_in=16, n_out=1)
    y = (y > 0).float()
    opt = SGD(model.parameters(), lr=0.5, momentum=0.5)
    batches = batched(x, y, seed=seed, n_step=200)
    return fit(model, F.binary_cross_entropy_with_logits, opt, batches, cbs, seed)


@control(STEP_CONTROLS, "warm restarts", target=0.8)
def warm_restarts(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    restarts = Schedule(lambda opt: CosineAnnealingWarmRestarts(opt, 50))
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, restarts], seed)


@control(STEP_CONTROLS, "rate divided by ten twice", target=0.8)
def step_decay(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return follow(
        model, F.cross_entropy, opt, image_batches(seed), cbs, seed, schedule=StepLR(opt, step_size=40)
    )


@control(STEP_CONTROLS, "one-cycle", target=0.8)
def one_cycle(seed: int, cbs: Callbacks) -> Run:
    model, losses = Mlp(depth=3, norm=True), []
    learn = Learner(digit_batches(seed, n_step=75), model, F.cross_entropy, AdamW)
    torch.manual_seed(seed)
    with learn.no_logging():
        learn.fit_one_cycle(2, 1e-2, cbs=[*cbs, Losses(losses)])
    return Run(learn, losses, model=model)


@control(STEP_CONTROLS, "averaged weights (EMA)", target=0.8)
def ema(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.GELU)
    valid = digit_batches(seed + 50, n_step=5)
    opt = Adam(model.parameters(), lr=3e-3)
    batches = (digit_batches(seed, n_step=75), valid)
    return fit(model, F.cross_entropy, opt, batches, [*cbs, EMA(0.98)], seed, n_epoch=2)


@control(STEP_CONTROLS, "evaluation every few steps", target=0.8)
def evaluation(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    opt = Adam(model.parameters(), lr=3e-3)
    held_out = image_batches(seed + 50, size=128, n_step=1)[0][0]

    def evaluate(step: int) -> None:
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                model(held_out)
            model.train()

    return follow(model, F.cross_entropy, opt, image_batches(seed), cbs, seed, after_step=evaluate)


@control(STEP_CONTROLS, "epochs, with validation and a small last batch", target=0.8)
def epochs(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    train, valid = TensorDataset(x[:997], y[:997]), TensorDataset(x[997:], y[997:])
    loaders = (DataLoader(train, batch_size=32, shuffle=True), DataLoader(valid, batch_size=128))
    model = Mlp(norm=True, drop=0.1)
    opt = Adam(model.parameters(), lr=3e-3)
    return fit(model, F.cross_entropy, opt, loaders, cbs, seed, n_epoch=4)


@control(STEP_CONTROLS, "bfloat16 weights with AdamW 1e-3", target=1.2)
def bf16_weights(seed: int, cbs: Callbacks) -> Run:
    model = Mlp().bfloat16()
    batches = [(x.bfloat16(), y) for x, y in digit_batches(seed)]
    opt = AdamW(model.parameters(), lr=1e-3)
    return follow(model, F.cross_entropy, opt, batches, cbs, seed)


@control(STEP_CONTROLS, "autocast to bfloat16", target=0.8)
def autocast(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(depth=3)
    opt = Adam(model.parameters(), lr=2e-3)
    return fit(model, F.cross_entropy, opt, digit_batches(seed), [*cbs, MixedPrecision("bf16")], seed)


@control(STEP_CONTROLS, "float16 with a GradScaler", target=0.8)
def fp16(seed: int, cbs: Callbacks) -> Run:
    """A custom loop; the scaler finds its scale in the first steps."""
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    with watch(model, opt, *cbs, scaler=scaler) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed):
            with torch.autocast("cpu", torch.float16):
                loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return run


@control(STEP_CONTROLS, "a rate for the trained trunk, and one for the new head", target=0.8)
def two_rates(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed)
    model = Encoded(stack(64, 64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 5)))
    opt = Adam(model.parameters(), lr=5e-3)
    for xb, yb in batched(x[y < 5], y[y < 5], seed=seed, n_step=60):
        F.cross_entropy(model(xb), yb).backward()
        opt.step()
        opt.zero_grad()
    model.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 10))
    trunk = {"params": model.trunk.parameters(), "lr": 1e-4}
    opt = AdamW([trunk, {"params": model.head.parameters()}], lr=1e-2)
    return fit(model, F.cross_entropy, opt, batched(x, y, seed=seed), cbs, seed)


@control(STEP_CONTROLS, "a trunk that is frozen for the first 50 steps", target=0.9)
def unfreezing(seed: int, cbs: Callbacks) -> Run:
    model = Encoded(stack(64, 64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 10)))
    model.trunk.requires_grad_(False)
    opt = Adam(model.parameters(), lr=3e-3)

    def unfreeze(step: int) -> None:
        if step == 49:
            model.trunk.requires_grad_(True)

    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, after_step=unfreeze)


@control(STEP_CONTROLS, "RMSprop", target=0.8)
def rmsprop(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ELU)
    return fit(model, F.cross_entropy, RMSprop(model.parameters(), lr=1e-3), digit_batches(seed), cbs, seed)


@control(STEP_CONTROLS, "Adagrad", target=0.9)
def adagrad(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    return fit(model, F.cross_entropy, Adagrad(model.parameters(), lr=0.03), digit_batches(seed), cbs, seed)


@control(STEP_CONTROLS, "accumulation in a loop of one's own", target=1.2)
def own_accumulation(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = Adam(model.parameters(), lr=5e-3)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for step, (x, y) in enumerate(digit_batches(seed, size=16, n_step=240)):
            loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            (loss / 4).backward()
            if step % 4 == 3:
                opt.step()
                opt.zero_grad()
    return run


@control(STEP_CONTROLS, "zero_grad(set_to_none=False), and a gradient penalty", target=1.0)
def gradient_penalty(seed: int, cbs: Callbacks) -> Run:
    """The loss includes the squared norm of its gradient with respect to the input."""
    model = Mlp(nn.SiLU)
    opt = Adam(model.parameters(), lr=3e-3)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed):
            x = x.requires_grad_()
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            w.report_loss(loss + 10 * slope.square().sum()).backward()
            opt.step()
            opt.zero_grad(set_to_none=False)
    return run


@control(STEP_CONTROLS, "float16 weights, without a scale", target=1.0)
def in_half(seed: int, cbs: Callbacks) -> Run:
    return in_float16(Mlp(norm=True), seed, cbs, lr=0.3)
