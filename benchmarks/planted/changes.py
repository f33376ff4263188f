"""Small language models in which a program changes something in mid-run: a state, a rate, a clipping."""

import copy

import torch
from case import Callbacks, Case, Run, control, fault, follow
from language import LanguageModel, adamw, character_batches
from nets import token_loss
from torch import Tensor, nn
from torch.optim import Optimizer

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
