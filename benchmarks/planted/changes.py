"""Small language models in which a program changes something in mid-run: a state, a rate, a clipping."""

import copy

import torch
import torch.nn.functional as F
from case import Callbacks, Case, Run, control, fault, follow
from data import batched, digits, generator
from language import LanguageModel, adamw, character_batches
from nets import stack, token_loss
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

CHANGES: list[Case] = []
CHANGE_CONTROLS: list[Case] = []
AT, N_STEP = 120, 260  # step of the change, and of the end


def changed(seed: int, cbs: Callbacks, change, lr: float = 3e-3) -> Run:
    """Train, and call `change(model, opt, step)` after each step."""
    model = LanguageModel()
    opt = adamw(model, lr=lr)
    batches = character_batches(seed, N_STEP)
    return follow(
        model, token_loss, opt, batches, cbs, seed, clip=1.0, after_step=lambda step: change(model, opt, step)
    )


# ---- the state of Adam


@fault(CHANGES, "LM: Adam's state is that of a run with a summed loss", codes=["adam.state"], planted_at=AT)
def foreign_state(seed: int, cbs: Callbacks) -> Run:
    """Its gradients were 768 times as large, so that almost nothing is learned afterwards."""
    other = LanguageModel()
    opt_of_other = adamw(other, lr=3e-3)

    def summed(pred: Tensor, y: Tensor) -> Tensor:
        return token_loss(pred, y) * y.numel()

    follow(other, summed, opt_of_other, character_batches(seed + 1, 60), (), seed)

    def load(model: nn.Module, opt: Optimizer, step: int) -> None:
        if step == AT - 1:
            opt.load_state_dict(opt_of_other.state_dict())

    return changed(seed, cbs, load)


@fault(CHANGES, "LM: Adam's moments are set to zero, its count is not", codes=["adam.state"], planted_at=AT)
def moments_of_zero(seed: int, cbs: Callbacks) -> Run:
    def clear(model: nn.Module, opt: Optimizer, step: int) -> None:
        if step == AT - 1:
            for state in opt.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    return changed(seed, cbs, clear)


@control(CHANGE_CONTROLS, "LM: goes back to its own checkpoint in mid-run", target=2.7)
def back_to_checkpoint(seed: int, cbs: Callbacks) -> Run:
    """Weights and the state of the optimizer of forty steps before, as after a loss that is NaN."""
    kept: list[dict] = []

    def load(model: nn.Module, opt: Optimizer, step: int) -> None:
        if step == AT - 41:
            kept[:] = copy.deepcopy([model.state_dict(), opt.state_dict()])
        if step == AT - 1:
            model.load_state_dict(kept[0])
            opt.load_state_dict(kept[1])

    return changed(seed, cbs, load)


@control(CHANGE_CONTROLS, "LM: Adam's state is reset, with its count", target=2.7)
def reset_whole(seed: int, cbs: Callbacks) -> Run:
    """As in phases of a training, or against a loss of plasticity; a note at most."""

    def reset(model: nn.Module, opt: Optimizer, step: int) -> None:
        if step == AT - 1:
            opt.state.clear()

    return changed(seed, cbs, reset)


@control(CHANGE_CONTROLS, "LM: Adam's state is elsewhere between steps", target=2.7)
def offloaded(seed: int, cbs: Callbacks) -> Run:
    """New tensors with the same numbers after each step, as if they had been on another device."""

    def move(model: nn.Module, opt: Optimizer, step: int) -> None:
        for state in opt.state.values():
            state |= {key: x.clone() for key, x in state.items() if isinstance(x, torch.Tensor)}

    return changed(seed, cbs, move)


# ---- rates of single groups


def in_groups(model: LanguageModel, lr: float, factor: float) -> AdamW:
    """AdamW with a group for the head, at so many times the rate."""
    head = [*model.head.parameters()]
    of_head = {id(p) for p in head}
    body = [p for p in model.parameters() if id(p) not in of_head]
    return AdamW([{"params": body, "lr": lr}, {"params": head, "lr": factor * lr}], weight_decay=0.0)


def by_groups(seed: int, cbs: Callbacks, factor: float, later=None, lr: float = 2e-3) -> Run:
    """Train with a head that has its own rate, times `later(step)`."""
    model = LanguageModel(tied=False)
    opt = in_groups(model, lr, factor)
    schedule = LambdaLR(opt, [lambda step: 1.0, later or (lambda step: 1.0)])
    batches = character_batches(seed, N_STEP)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=schedule)


@fault(
    CHANGES,
    "LM: the rate of the head's group rises to 300 times as much",
    codes=["loss.spike", "loss.diverging", "update.spike"],
    planted_at=AT,
    note_suffices=True,
)
def head_speeds_up(seed: int, cbs: Callbacks) -> Run:
    return by_groups(seed, cbs, factor=1.0, later=lambda step: 300.0 if step >= AT else 1.0)


# ---- another setting, after which the loss is higher


def with_setting(seed: int, cbs: Callbacks, lr: float = 3e-3, **settings) -> Run:
    """Change settings of the optimizer's groups after the step before `AT`."""

    def change(model: nn.Module, opt: Optimizer, step: int) -> None:
        if step == AT - 1:
            for group in opt.param_groups:
                group.update(settings)

    return changed(seed, cbs, change, lr=lr)


@fault(
    CHANGES,
    "LM: Adam's beta2 is 0.1 in mid-run",
    ["loss.worse", "loss.spike"],
    planted_at=AT,
    note_suffices=True,
)
def short_second_moment(seed: int, cbs: Callbacks) -> Run:
    return with_setting(seed, cbs, lr=6e-3, betas=(0.9, 0.1))


@fault(CHANGES, "LM: the rate grows by 3 % per step in mid-run", ["loss.worse", "loss.spike"], planted_at=AT)
def creeping_rate(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    schedule = LambdaLR(opt, lambda step: 1.03 ** max(0, step - AT))
    batches = character_batches(seed, 300)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=schedule)


@fault(
    CHANGES,
    "LM: dropout is 0.9 in mid-run",
    ["loss.worse", "loss.spike", "dropout.extreme"],
    planted_at=AT,
    note_suffices=True,
)
def heavy_dropout(seed: int, cbs: Callbacks) -> Run:
    return with_dropout(seed, cbs, before=0.0, after=0.9)


def with_dropout(seed: int, cbs: Callbacks, before: float, after: float) -> Run:
    model = LanguageModel(drop=before)
    opt = adamw(model, lr=3e-3)

    def change(step: int) -> None:
        if step == AT - 1:
            for m in model.modules():
                if isinstance(m, nn.Dropout):
                    m.p = after

    batches = character_batches(seed, N_STEP)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, after_step=change)


@fault(
    CHANGES, "LM: eps is 1e-3 in mid-run", ["train.changed", "loss.worse"], planted_at=AT, note_suffices=True
)
def large_eps(seed: int, cbs: Callbacks) -> Run:
    return with_setting(seed, cbs, eps=1e-3)


@fault(CHANGES, "LM: the same batch for 60 steps in mid-run", ["input.repeated"], planted_at=AT)
def stuck_loader(seed: int, cbs: Callbacks) -> Run:
    batches = character_batches(seed, N_STEP)
    batches[AT : AT + 60] = [batches[AT]] * 60
    model = LanguageModel()
    return follow(model, token_loss, adamw(model, lr=3e-3), batches, cbs, seed, clip=1.0)


@fault(
    CHANGES,
    "digits: from an epoch on, labels are in another order than images",
    ["loss.spike", "loss.worse"],
    planted_at=AT,
    note_suffices=True,
)
def labels_in_another_order(seed: int, cbs: Callbacks) -> Run:
    x, y = digits(seed, n=640)
    batches = batched(x, y, seed=seed, n_step=AT)  # six epochs
    batches += batched(x, y[torch.randperm(len(y), generator=generator(seed))], seed=seed, n_step=AT)
    model = stack(64, 64, 10)
    return follow(model, F.cross_entropy, AdamW(model.parameters(), 2e-3), batches, cbs, seed)


@fault(
    CHANGES,
    "LM: more and more targets are drawn at random in mid-run",
    ["loss.rising"],
    planted_at=AT,
    note_suffices=True,
)
def growing_label_noise(seed: int, cbs: Callbacks) -> Run:
    """New text in each batch, so that no sample comes again, and too slowly for a spike."""
    rng, batches = generator(seed), []
    for step, (x, y) in enumerate(character_batches(seed, 2 * N_STEP)):
        drawn = y.flatten()[torch.randint(y.numel(), y.shape, generator=rng)]
        are_drawn = torch.rand(y.shape, generator=rng) < (step - AT) / 800
        batches.append((x, torch.where(are_drawn, drawn, y)))
    model = LanguageModel()
    return follow(model, token_loss, adamw(model, lr=3e-3), batches, cbs, seed, clip=1.0)


def with_factor(seed: int, cbs: Callbacks, make_opt, before: float, after: float) -> Run:
    """Train with a loss that is multiplied by a number, as by a scale that a program sets."""
    model, n = LanguageModel(), [0]
    batches = character_batches(seed, N_STEP)

    def scaled(pred: Tensor, y: Tensor) -> Tensor:
        n[0] += 1
        return token_loss(pred, y) * (after if n[0] > AT else before)

    return follow(model, scaled, make_opt(model), batches, cbs, seed)


@fault(
    CHANGES,
    "LM: a loss scale grows, and gradients are divided by the old one",
    ["loss.spike", "loss.worse"],
    planted_at=AT,
    note_suffices=True,
)
def stale_loss_scale(seed: int, cbs: Callbacks) -> Run:
    """The old scale is 1, so there is nothing to divide by."""
    return with_factor(seed, cbs, lambda model: SGD(model.parameters(), 0.1, momentum=0.9), 1.0, 16.0)


@control(CHANGE_CONTROLS, "LM: a loss scale grows 16 times, which Adam does not feel", target=2.7)
def grown_loss_scale(seed: int, cbs: Callbacks) -> Run:
    return with_factor(seed, cbs, lambda model: adamw(model, lr=3e-3), 1 / 16, 1.0)


@control(CHANGE_CONTROLS, "LM: eight steps on each batch", target=2.9)
def several_steps_on_each(seed: int, cbs: Callbacks) -> Run:
    batches = [x for x in character_batches(seed, 40) for _ in range(8)]
    model = LanguageModel()
    return follow(model, token_loss, adamw(model, lr=3e-3), batches, cbs, seed, clip=1.0)


@control(CHANGE_CONTROLS, "LM: beta2 of 0.99 and no weight decay from mid-run on", target=2.6)
def longer_second_moment(seed: int, cbs: Callbacks) -> Run:
    return with_setting(seed, cbs, betas=(0.9, 0.99), weight_decay=0.0)


@control(CHANGE_CONTROLS, "LM: the rate doubles in mid-run, and the loss goes on falling", target=2.6)
def doubled_rate(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=1.5e-3)
    schedule = LambdaLR(opt, lambda step: 2.0 if step >= AT else 1.0)
    batches = character_batches(seed, N_STEP)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=schedule)


@control(CHANGE_CONTROLS, "LM: dropout of 0.1 from mid-run on", target=2.7)
def some_dropout(seed: int, cbs: Callbacks) -> Run:
    return with_dropout(seed, cbs, before=0.0, after=0.1)


@control(CHANGE_CONTROLS, "LM: the head's group has 10 times the rate", target=2.7)
def fast_enough_head(seed: int, cbs: Callbacks) -> Run:
    return by_groups(seed, cbs, factor=10.0)


@control(CHANGE_CONTROLS, "LM: the head's group begins at a hundredth and follows", target=2.7)
def thawed_head(seed: int, cbs: Callbacks) -> Run:
    return by_groups(seed, cbs, factor=1.0, later=lambda step: 0.01 if step < 40 else 1.0)


@control(CHANGE_CONTROLS, "LM: two warm restarts, each to the full rate", target=2.8)
def warm_restarts(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model, lr=3e-3)
    schedule = CosineAnnealingWarmRestarts(opt, 80, eta_min=1e-5)
    batches = character_batches(seed, 240)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=schedule)
