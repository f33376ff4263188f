"""Gradients thrown away or lost, graphs that are kept, losses over the batch; and their controls."""

import time
from collections.abc import Callable

import torch
from case import Callbacks, Case, Run, control, fault, fit, follow
from data import digit_batches, image_batches
from nets import Cnn, Mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from hookcb import watch

FACTS_GRADS_FAULTS: list[Case] = []
FACTS_GRADS_CONTROLS: list[Case] = []


def accumulate(
    model: nn.Module, opt: Optimizer, data: list[tuple[Tensor, Tensor]], cbs: Callbacks, n: int, clear: int
) -> Run:
    """Steps after each `n` batches, and clears the gradients before each `clear` of them."""
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for i, (x, y) in enumerate(data):
            if i % clear == 0:
                opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            (loss / n).backward()
            if i % n == n - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
    return run


@fault(FACTS_GRADS_FAULTS, "zero_grad before each of 8 accumulated batches", codes=["grad.discarded"])
def cleared_in_accumulation(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = AdamW(model.parameters(), lr=2e-3)
    return accumulate(model, opt, digit_batches(seed, size=8, n_step=240), cbs, n=8, clear=1)


@fault(FACTS_GRADS_FAULTS, "a CNN whose gradients are cleared twice in a window", codes=["grad.discarded"])
def cleared_in_window(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accumulate(model, opt, image_batches(seed, size=16, n_step=120), cbs, n=6, clear=3)


@control(FACTS_GRADS_CONTROLS, "8 accumulated batches, cleared after the step", target=0.7)
def accumulated_rightly(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = AdamW(model.parameters(), lr=5e-3)
    return accumulate(model, opt, digit_batches(seed, size=8, n_step=320), cbs, n=8, clear=8)


@control(FACTS_GRADS_CONTROLS, "conflicting gradients are combined by hand", target=0.8)
def gradient_surgery(seed: int, cbs: Callbacks) -> Run:
    """Projects the gradients of two halves onto each other's normal planes where they conflict.

    Source: Yu et al., "Gradient Surgery for Multi-Task Learning", 2020.
    """
    model = Mlp()
    opt = Adam(model.parameters(), lr=3e-3)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed, n_step=120):
            kept = []
            for half in (slice(0, 16), slice(16, 32)):
                opt.zero_grad()
                loss = F.cross_entropy(model(x[half]), y[half])
                loss.backward()
                kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                run.losses.append(loss.item())
            for p, a, b in zip(model.parameters(), *kept, strict=True):
                dot = (a * b).sum().clamp(max=0)
                p.grad = a + b - dot * (a / b.square().sum().clamp(min=1e-9))
            opt.step()
    return run


@control(FACTS_GRADS_CONTROLS, "sharpness-aware minimization in a plain loop", target=0.8)
def sharpness_aware(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for x, y in digit_batches(seed, n_step=120):
            moved: list[Tensor] = []
            for is_second in (False, True):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                run.losses.append(loss.item())
                with torch.no_grad():
                    if not is_second:
                        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                        norm = torch.stack([g.norm() for g in grads]).norm()
                        moved = [0.05 * g / norm for g in grads]
                    for p, x_ in zip(model.parameters(), moved, strict=True):
                        p.sub_(x_) if is_second else p.add_(x_)
                if is_second:
                    opt.step()
                opt.zero_grad()
    return run


@fault(FACTS_GRADS_FAULTS, "all losses so far are averaged in each step", codes=["time.growing"])
def averages_all(seed: int, cbs: Callbacks) -> Run:
    model, history = Mlp(), list[float]()
    opt = Adam(model.parameters(), lr=2e-3)

    def average(step: int) -> None:
        history.append(float(step))
        time.sleep(4e-5 * len(history))  # stands for a long history

    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=190), cbs, seed, after_step=average)


class Haunted(Cnn):
    """A net that gets a hook in each step, and never removes one."""

    def forward(self, x: Tensor) -> Tensor:
        self.conv1.register_forward_hook(lambda m, args, output: time.sleep(2e-5))
        return super().forward(x)


@fault(FACTS_GRADS_FAULTS, "a hook is added in each step", codes=["time.growing"])
def hooked_again(seed: int, cbs: Callbacks) -> Run:
    model = Haunted()
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, image_batches(seed, size=8, n_step=190), cbs, seed)


@control(FACTS_GRADS_CONTROLS, "another process takes half of the machine in the middle", target=0.7)
def busy_machine(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = Adam(model.parameters(), lr=2e-3)

    def wait(step: int) -> None:
        time.sleep(5e-3 if step >= 90 else 1e-3)

    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=180), cbs, seed, after_step=wait)


class Keeping(Mlp):
    """An MLP that does something with its features, as keeping them for a plot."""

    def __init__(self, keep: Callable[["Keeping", Tensor], object]) -> None:
        super().__init__()
        self.keep, self.seen, self.centre = keep, list[Tensor](), torch.zeros(64)
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(x)
        self.keep(self, features)
        return self.head(features)


def trained(seed: int, cbs: Callbacks, keep: Callable[[Keeping, Tensor], object]) -> Run:
    model = Keeping(keep)
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed, n_step=120), cbs, seed)


@fault(FACTS_GRADS_FAULTS, "features are appended with their graph", codes=["memory.state_kept"])
def appends_features(seed: int, cbs: Callbacks) -> Run:
    return trained(seed, cbs, lambda model, features: model.seen.append(features.mean()))


@fault(FACTS_GRADS_FAULTS, "a running mean of features with its graph", codes=["memory.state_kept"])
def running_mean(seed: int, cbs: Callbacks) -> Run:
    def keep(model: Keeping, features: Tensor) -> None:
        model.centre = 0.99 * model.centre + 0.01 * features.mean(0)

    return trained(seed, cbs, keep)


@control(FACTS_GRADS_CONTROLS, "the last features are kept with their graph", target=0.7)
def keeps_last(seed: int, cbs: Callbacks) -> Run:
    def keep(model: Keeping, features: Tensor) -> None:
        model.latest, model.seen = features, [*model.seen[-3:], features]

    return trained(seed, cbs, keep)


class Carried(nn.Module):
    """A GRU that carries its state on to the next batch."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.cell, self.head, self.detaches = nn.GRUCell(64, 32), nn.Linear(32, 10), detaches
        self.state = torch.zeros(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x, 0.1 * self.state)
        self.state = h.detach() if self.detaches else h
        return self.head(h)


@fault(FACTS_GRADS_FAULTS, "a hidden state that is not detached", codes=["loss.reused_graph"])
def state_with_graph(seed: int, cbs: Callbacks) -> Run:
    model = Carried(detaches=False)
    data = digit_batches(seed, n_step=20)
    return fit(model, F.cross_entropy, Adam(model.parameters()), data, cbs, seed, raises=RuntimeError)


@control(FACTS_GRADS_CONTROLS, "a hidden state that is detached", target=0.8)
def state_without_graph(seed: int, cbs: Callbacks) -> Run:
    model = Carried(detaches=True)
    return fit(model, F.cross_entropy, Adam(model.parameters(), 5e-3), digit_batches(seed), cbs, seed)


class Pooled(nn.Module):
    """Rows of a digit as steps, pooled by attention."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.body, self.score, self.head = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 10)
        self.over = over

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x.view(-1, 8, 8)))
        weights = torch.softmax(self.score(h), self.over)
        return self.head((weights * h).sum(1))


def rows_of_digits(seed: int, n_step: int = 150) -> list[tuple[Tensor, Tensor]]:
    return [(x.view(-1, 8, 8), y) for x, y in digit_batches(seed, size=30, n_step=n_step)]


@fault(FACTS_GRADS_FAULTS, "attention over the samples of the batch", codes=["samples.mixed"])
def pooled_over_samples(seed: int, cbs: Callbacks) -> Run:
    model = Pooled(over=0)
    return fit(model, F.cross_entropy, Adam(model.parameters(), 5e-3), rows_of_digits(seed), cbs, seed)


@control(FACTS_GRADS_CONTROLS, "attention over the rows of a digit", target=1.2)
def pooled_over_rows(seed: int, cbs: Callbacks) -> Run:
    model = Pooled(over=1)
    return fit(model, F.cross_entropy, Adam(model.parameters(), 1e-2), rows_of_digits(seed), cbs, seed)


class Rows(nn.Module):
    """An LSTM over the rows of a digit, with the steps first, whose outputs are all read."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.rnn, self.head, self.moves = nn.LSTM(8, 24), nn.Linear(8 * 24, 10), moves

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x.transpose(0, 1))
        return self.head((h.transpose(0, 1) if self.moves else h).reshape(len(x), -1))


@fault(FACTS_GRADS_FAULTS, "outputs with the steps first are reshaped to samples", codes=["samples.mixed"])
def reshaped_across(seed: int, cbs: Callbacks) -> Run:
    model = Rows(moves=False)
    opt = Adam(model.parameters(), 5e-3)
    return fit(model, F.cross_entropy, opt, rows_of_digits(seed, 60), cbs, seed)


@control(FACTS_GRADS_CONTROLS, "outputs with the steps first are transposed to samples", target=0.9)
def transposed(seed: int, cbs: Callbacks) -> Run:
    model = Rows(moves=True)
    opt = Adam(model.parameters(), 1e-2)
    return fit(model, F.cross_entropy, opt, rows_of_digits(seed, 80), cbs, seed)


@control(FACTS_GRADS_CONTROLS, "pairs of a batch are told apart by a softmax over both", target=0.7)
def contrastive(seed: int, cbs: Callbacks) -> Run:
    """Noisy copies find each other, by scores of all pairs whose softmax runs over rows and columns."""
    model = Mlp(n_out=16)

    def loss_func(z: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(z, dim=1).view(2, -1, 16)
        scores = 8 * a @ b.T
        at = torch.arange(len(a))
        return (F.nll_loss(scores.log_softmax(0), at) + F.cross_entropy(scores, at)) / 2

    data = []
    for x, _ in digit_batches(seed, size=16):
        data.append((torch.cat([x, x + 0.1 * torch.randn_like(x)]), torch.arange(32) % 16))
    return fit(model, loss_func, Adam(model.parameters(), 5e-3), data, cbs, seed)


@fault(FACTS_GRADS_FAULTS, "a batch that has not arrived", codes=["input.zero"])
def lost_batch(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    data = [(x * (i % 40 != 21), y) for i, (x, y) in enumerate(image_batches(seed))]
    return fit(model, F.cross_entropy, Adam(model.parameters(), 3e-3), data, cbs, seed)


@fault(FACTS_GRADS_FAULTS, "gradients that are cleared in every fifteenth step", codes=["grad.zero"])
def lost_gradients(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    opt = SGD(model.parameters(), lr=0.1)
    with watch(model, opt, *cbs) as w:
        run = Run(w, [], model=model)
        for i, (x, y) in enumerate(digit_batches(seed)):
            loss = w.report_loss(F.cross_entropy(model(x), y))
            run.losses.append(loss.item())
            loss.backward()
            if i % 15 == 10:
                opt.zero_grad()
            opt.step()
            opt.zero_grad()
    return run


class Depth(Mlp):
    """Leaves out a layer at random."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = first(x)
        return self.head(x + second(x) if torch.rand(()) > 0.2 else x)


@control(FACTS_GRADS_CONTROLS, "stochastic depth, in a batch as a whole", target=0.7)
def stochastic_depth(seed: int, cbs: Callbacks) -> Run:
    model = Depth()
    return fit(model, F.cross_entropy, Adam(model.parameters(), 2e-3), digit_batches(seed), cbs, seed)


@control(FACTS_GRADS_CONTROLS, "a third of the batches without their condition", target=1.0)
def without_condition(seed: int, cbs: Callbacks) -> Run:
    model = Mlp()
    data = [(x * (i % 3 > 0), y) for i, (x, y) in enumerate(digit_batches(seed))]
    return fit(model, F.cross_entropy, Adam(model.parameters(), 2e-3), data, cbs, seed)
