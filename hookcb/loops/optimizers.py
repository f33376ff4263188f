"""The optimizers whose steps a watch follows."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.hooks.optimizer_steps import params_of


def unwrapped(opt: Any) -> Any:
    """The optimizer inside a wrapper, such as Accelerate's, whose step is called in the end."""
    while isinstance(inner := getattr(opt, "optimizer", None), Optimizer):
        opt = inner
    return opt


class WatchedOptimizers:
    """The optimizers that train a model: those that are given, else all found to have its parameters.

    Attributes:
        are_complete: whether no other optimizer is expected.
    """

    def __init__(self, given: list[Optimizer]) -> None:
        self._are_given = self.are_complete = bool(given)
        self._known: WeakSet[Optimizer] = WeakSet(given)
        # for those that were not given: their number of groups, and whether they have parameters of the model
        self._asked: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def include(self, opt: Optimizer, model: nn.Module) -> bool:
        """Whether an optimizer is one of them, known already or not."""
        return opt in self._known or (not self._are_given and self.has_params(opt, model))

    def has_params(self, opt: Optimizer, model: nn.Module) -> bool:
        """Whether an optimizer has parameters of the model; called in any thread, so it adds none."""
        n_groups, has_params = self._asked.get(opt, (-1, False))
        if n_groups != len(opt.param_groups):
            has_params = not _trainable_ids(model).isdisjoint(params_of(opt))
            self._asked[opt] = len(opt.param_groups), has_params
        return has_params

    def add(self, opt: Optimizer, model: nn.Module) -> None:
        """Adds an optimizer; does nothing if it is known."""
        if opt not in self._known:
            self._known.add(opt)
            self.are_complete = _trainable_ids(model) <= set().union(*map(params_of, self._known))

    def train(self, param: Tensor) -> bool:
        """Whether one of them has a parameter."""
        return any(p is param for opt in self._known for group in opt.param_groups for p in group["params"])


def _trainable_ids(model: nn.Module) -> set[int]:
    return {id(p) for p in model.parameters() if p.requires_grad}
