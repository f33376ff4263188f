"""Weights written by something other than the optimizer, and steps without effect; trainings near them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from case import Callbacks, Case, Run, control, fault, fit, follow
from data import digit_batches, image_batches
from gan import apart, cloud
from nets import Cnn, Mlp, stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from hookcb import Callback, watch

FACTS_WEIGHTS_FAULTS: list[Case] = []
FACTS_WEIGHTS_CONTROLS: list[Case] = []

N_MOVED = 60  # steps of the Adam that then stops


def initialize(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            m.reset_parameters()


class Stalling(Adam):
    """Adam whose step does nothing after the first ones."""

    n_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.n_steps += 1
        return super().step(closure) if self.n_steps <= N_MOVED else None


class Summing(Adam):
    """Adam that makes every fourth step only, with the mean gradient of four."""

    n_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.n_calls += 1
        if self.n_calls % 4:
            return None
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= 4
        return super().step(closure)


# ---- faults


@fault(
    FACTS_WEIGHTS_FAULTS, "all weights initialized again at step 100", ["param.overwritten"], planted_at=99
)
def initialized_again(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)
    opt = Adam(model.parameters(), lr=2e-3)
    return follow(
        model, F.cross_entropy, opt, digit_batches(seed), cbs, seed,
        after_step=lambda i: initialize(model) if i == 99 else None,
    )  # fmt: skip


@fault(FACTS_WEIGHTS_FAULTS, "weights of another CNN loaded in mid-run", ["param.overwritten"], planted_at=70)
def loaded_again(seed: int, cbs: Callbacks) -> Run:
    model, other = Cnn(), Cnn()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load(cb: Callback) -> None:
        if cb.train_iter == 70:
            cb.learn.model.load_state_dict(other.state_dict())

    return fit(model, F.cross_entropy, opt, image_batches(seed), [*cbs, Callback(after_batch=load)], seed)


@fault(
    FACTS_WEIGHTS_FAULTS, "the first weights loaded again in mid-run", ["param.overwritten"], planted_at=80
)
def undone(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.GELU)
    kept = copy.deepcopy(model.state_dict())
    opt = AdamW(model.parameters(), lr=2e-3)
    return follow(
        model, F.cross_entropy, opt, digit_batches(seed), cbs, seed,
        after_step=lambda i: model.load_state_dict(kept) if i == 80 else None,
    )  # fmt: skip


@fault(FACTS_WEIGHTS_FAULTS, "corrupt elements in a weight", ["param.overwritten"], planted_at=40)
def corrupt(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU, depth=3)

    def corrupt_some(i: int) -> None:
        if i == 40:
            model.head.weight.data.view(-1)[::9] = 1e8

    opt = Adam(model.parameters(), lr=2e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, after_step=corrupt_some)


@fault(
    FACTS_WEIGHTS_FAULTS, "steps of an MLP without effect from step 60", ["param.not_stepped"], planted_at=60
)
def stalling(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    return follow(
        model, F.cross_entropy, Stalling(model.parameters(), lr=2e-3), digit_batches(seed), cbs, seed
    )


@fault(
    FACTS_WEIGHTS_FAULTS, "steps of a CNN without effect from step 60", ["param.not_stepped"], planted_at=60
)
def stalling_cnn(seed: int, cbs: Callbacks) -> Run:
    model = Cnn()
    return fit(model, F.cross_entropy, Stalling(model.parameters(), lr=2e-3), image_batches(seed), cbs, seed)


@fault(FACTS_WEIGHTS_FAULTS, "no step any more from step 40", ["param.not_stepped"], planted_at=39)
def left_out(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = Adam(model.parameters(), lr=2e-3)
    run = Run(watch(model, opt, *cbs), [], model=model)
    with run.loop:
        for i, (x, y) in enumerate(digit_batches(seed)):
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            opt.zero_grad()
            loss.backward()
            if i < 40:
                opt.step()
    return run


@fault(FACTS_WEIGHTS_FAULTS, "a head that two optimizers have", ["param.duplicated"], layers=["head"])
def head_of_two(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    both = Adam(model.parameters(), lr=2e-3), SGD(model.head.parameters(), lr=0.1)
    run = Run(watch(model, both, *cbs), [], model=model)
    with run.loop:
        for x, y in digit_batches(seed):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            loss.backward()
            for opt in both:
                opt.step()
    return run


# ---- controls: what is done to weights on purpose


def trained(seed: int, cbs: Callbacks, make: Callable[[nn.Module, Any], Callable[[int], object]]) -> Run:
    """Trains a small net; `make` gives what is called after each step."""
    model = Mlp(nn.ReLU)
    opt = Adam(model.parameters(), lr=3e-3)
    return follow(model, F.cross_entropy, opt, digit_batches(seed), cbs, seed, after_step=make(model, opt))


@control(FACTS_WEIGHTS_CONTROLS, "weights clipped after each step", target=1.2)
def clipped(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        return lambda i: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()]

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "averages swapped in by hand for an evaluation", target=0.8)
def swapped(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        mean = copy.deepcopy(model)

        @torch.no_grad()
        def average(i: int) -> None:
            for p, now in zip(mean.parameters(), model.parameters(), strict=True):
                p.lerp_(now, 0.1)
            if i in (50, 99):
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict(mean.state_dict())
                model.eval()
                model(torch.zeros(2, 64))
                model.train()
                model.load_state_dict(kept)

        return average

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "Lookahead written by hand", target=0.9)
def lookahead(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        slow = [p.detach().clone() for p in model.parameters()]

        @torch.no_grad()
        def synchronize(i: int) -> None:
            if i % 5 == 4:
                for p, x in zip(model.parameters(), slow, strict=True):
                    p.copy_(x.lerp_(p, 0.5))

        return synchronize

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "weights averaged with a replica every 50 steps", target=0.9)
def local_steps(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        replica = copy.deepcopy(model)
        its, batches = Adam(replica.parameters(), lr=3e-3), digit_batches(seed + 1)

        def average(i: int) -> None:
            x, y = batches[i]
            its.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            its.step()
            with torch.no_grad():
                for p, q in (
                    zip(model.parameters(), replica.parameters(), strict=True) if i % 50 == 49 else ()
                ):
                    p.lerp_(q, 0.5)
                    q.copy_(p)

        return average

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "the best weights restored with a smaller rate", target=0.8)
def restored(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        kept: dict[str, Tensor] = {}

        def restore(i: int) -> None:
            if i == 80:
                kept.update(copy.deepcopy(model.state_dict()))
            if i == 110:
                model.load_state_dict(kept)
                opt.param_groups[0]["lr"] /= 10

        return restore

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "weights pruned once", target=0.9)
def pruned(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        @torch.no_grad()
        def prune(i: int) -> None:
            for p in model.parameters() if i == 70 else ():
                p.mul_(p.abs() > p.abs().quantile(0.3))

        return prune

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "weights rounded after each step", target=0.9)
def rounded(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        return lambda i: [p.data.copy_((512 * p.data).round() / 512) for p in model.parameters()]

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "rates tried before the training", target=0.8)
def rates_tried(seed: int, cbs: Callbacks) -> Run:
    def make(model: nn.Module, opt: Any) -> Callable[[int], object]:
        kept = copy.deepcopy(model.state_dict())

        def find(i: int) -> None:
            opt.param_groups[0]["lr"] = 3e-3 if i >= 30 else 1e-5 * 1.3**i
            if i == 30:
                model.load_state_dict(kept)

        return find

    return trained(seed, cbs, make)


@control(FACTS_WEIGHTS_CONTROLS, "two folds, each with new weights and a new optimizer", target=1.0)
def folds(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    run = Run(watch(model, *cbs), [], model=model)
    with run.loop:
        for fold in range(2):
            initialize(model)
            opt = Adam(model.parameters(), lr=4e-3)
            for x, y in digit_batches(seed + fold, n_step=90):
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                run.losses.append(loss.item())
                loss.backward()
                opt.step()
    return run


@control(FACTS_WEIGHTS_CONTROLS, "sharpness-aware steps written by hand", target=0.8)
def sharpness(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(watch(model, opt, *cbs), [], model=model)
    with run.loop:
        for x, y in digit_batches(seed):
            kept = [p.detach().clone() for p in model.parameters()]
            for is_first in (True, False):
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                with torch.no_grad():
                    for p, x_kept in zip(model.parameters(), kept, strict=True):
                        p.copy_(x_kept + 0.02 * p.grad / (p.grad.norm() + 1e-6) if is_first else x_kept)
            run.losses.append(loss.item())
            opt.step()
    return run


@control(FACTS_WEIGHTS_CONTROLS, "an optimizer that adds up the gradients of four steps", target=1.2)
def summing(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    opt = Summing(model.parameters(), lr=1e-2)
    run = Run(watch(model, opt, *cbs), [], model=model)
    with run.loop:
        for i, (x, y) in enumerate(digit_batches(seed)):
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            loss.backward()
            opt.step()
            if i % 4 == 3:
                opt.zero_grad()
    return run


@control(FACTS_WEIGHTS_CONTROLS, "two optimizers that take turns on all weights", target=0.8)
def taking_turns(seed: int, cbs: Callbacks) -> Run:
    model = Mlp(nn.ReLU)
    both = Adam(model.parameters(), lr=2e-3), SGD(model.parameters(), lr=0.05)
    run = Run(watch(model, both, *cbs), [], model=model)
    with run.loop:
        for i, (x, y) in enumerate(digit_batches(seed)):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            loss.backward()
            both[i // 10 % 2].step()
    return run


@control(FACTS_WEIGHTS_CONTROLS, "a discriminator whose loss stays near that of guessing", target=1.2)
def balanced(seed: int, cbs: Callbacks) -> Run:
    generator, model = stack(4, 32, 32, 2), stack(2, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2))
    opt_g, opt_d = (Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (generator, model))
    run, rng = Run(watch(model, opt_d, *cbs), [], model=model), torch.Generator().manual_seed(seed)
    bce, labels = F.binary_cross_entropy_with_logits, torch.arange(128.0)[:, None] // 64
    with run.loop:
        for _ in range(300):
            real, fake = cloud(64, rng), generator(torch.randn(64, 4, generator=rng))
            opt_d.zero_grad()
            run.loop.report_loss(bce(model(torch.cat([fake.detach(), real])), labels)).backward()
            opt_d.step()
            opt_g.zero_grad()
            bce(model(fake), labels[64:]).backward()
            opt_g.step()
            run.losses.append(apart(fake.detach(), real))
    return run
