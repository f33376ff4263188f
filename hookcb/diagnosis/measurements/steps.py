"""Steps: the backwards and steps of a training, its optimizers, and one small gradient to follow."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.run import Run
from hookcb.gradients.hand_steps import StepByHand
from hookcb.hooks.optimizer_steps import params_of

MIN_STEPS, MAX_STEPS = 3, 64  # in which gradients may be cleared too early


class Steps(Measurement):
    """Counts backwards, and notes which optimizers have stepped."""

    cadence = EVERY

    def __init__(self) -> None:
        self.optimizers: dict[int, Optimizer] = {}  # those that have stepped, by id, in that order
        self.n_of: dict[int, int] = {}  # steps of each, likewise
        self._stepped: list[int] = []  # their ids
        self.made_by: list[int] = []  # index of the optimizer that made each inspected step
        # smallest parameter of the first layer with a gradient, which any number in a backward that is not
        # finite reaches; None before the first backward
        self.first_param: nn.Parameter | None = None
        self.n_backward = self.n_optimizers = self.n_skipped = 0  # skipped: by a GradScaler
        self.latest = 0, 0  # number of backwards before the last step, and of the batch of that step
        self.n_alone = 0  # steps before which the model was not called
        self.n_given = 0  # backwards of losses of others, to which the model gives features or targets
        self.is_beside = False  # whether a backward was seen beside the model
        self.is_by_hand = False  # whether the loop updates its weights without an optimizer

    def on_gradients(self, run: Run) -> None:
        self.n_backward += 1
        if self.first_param is None:
            self.first_param = _first_param(run.loop.model)
        if run.loop.is_external:
            if run.loop.facts.n_closures and run.loop.opt is not None:  # steps of LBFGS are no events
                self.optimizers[id(run.loop.opt)] = run.loop.opt
            self.n_given = run.loop.facts.n_given

    def on_between(self, run: Run) -> None:
        loop = run.loop
        self.latest = self.n_backward, run.step
        if loop.is_external:
            self.n_alone = loop.facts.n_steps_alone
            self.is_beside = self.is_beside or bool(loop.facts.n_beside)
        if (opt := loop.opt) is not None:
            self.optimizers[id(opt)] = opt
            self.n_of[id(opt)] = self.n_of.get(id(opt), 0) + 1
            if run.looking:
                self._stepped.append(id(opt))

    def places(self) -> dict[int, int]:
        return {key: i for i, key in enumerate(self.optimizers)}

    def tell(self, run: Run) -> None:
        self.n_optimizers, places = len(self.optimizers), self.places()
        self.made_by = [places[key] for key in self._stepped]
        self.is_by_hand = any(isinstance(opt, StepByHand) for opt in self.optimizers.values())
        if self.is_by_hand:
            run.note(
                "the loop updates its weights without a torch.optim.Optimizer, at an unknown learning rate"
            )

    def freeze(self) -> None:
        self.optimizers, self.first_param = {}, None


def _first_param(model: nn.Module) -> nn.Parameter | None:
    for m in model.modules():
        grads = [(p, p.grad) for p in m.parameters(recurse=False) if p.grad is not None]
        dense = [p for p, grad in grads if p.layout is grad.layout is torch.strided]
        if dense:
            return min(dense, key=Tensor.numel)
    return None


class ClearedGradients(Measurement):
    """Counts steps before which the gradients of the backward were cleared, so that they do nothing.

    It follows one small gradient; on a GPU, which would have to be waited for, zeros are not seen.
    """

    cadence = EVERY
    uses = (Steps,)

    def __init__(self) -> None:
        self._param: nn.Parameter | None = None  # had a gradient when the backward ended
        self.n_steps = self.n_cleared = 0
        self.n_moved = 0  # before the step of an optimizer without the parameter, which may have a copy

    def on_gradients(self, run: Run) -> None:
        param = run.measured(Steps).first_param  # as long as all steps came too late
        is_gone = self.n_cleared + self.n_moved < self.n_steps or param is None or not is_there(param.grad)
        self._param = None if is_gone else param

    def on_step(self, run: Run) -> None:
        self.n_steps += 1
        if (param := self._param) is not None and not is_there(param.grad):
            is_own = run.loop.opt is None or id(param) in params_of(run.loop.opt)
            self.n_cleared += is_own
            self.n_moved += not is_own
        self._param = None
        self.done |= self.n_steps >= MAX_STEPS

    @property
    def has_found(self) -> bool:
        return self.n_cleared >= max(MIN_STEPS, self.n_steps)

    @property
    def are_moved(self) -> bool:
        """Whether an engine takes gradients away in the backward, for an optimizer of parts of its own."""
        return self.n_moved >= max(MIN_STEPS, self.n_steps)

    def freeze(self) -> None:
        self._param = None


def is_there(grad: Tensor | None) -> bool:
    """Whether there is a gradient, which is not zero if it can be read without waiting."""
    is_readable = grad is not None and grad.is_cpu and grad.layout is torch.strided
    return bool(grad.any()) if is_readable else grad is not None  # type: ignore[union-attr]
