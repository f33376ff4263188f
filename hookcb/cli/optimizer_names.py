"""The optimizers of a script, under names that tell them apart: Adam, Adam (2)."""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hookcb.cli.ownership import params_in

METHODS = ("step", "zero_grad"), ("apply_gradients",)  # of an optimizer that is not torch's


def foreign_optimizers(model: nn.Module) -> tuple[str, ...]:
    """Optimizers of a model that are not a torch.optim.Optimizer: "Lion of package.module".

    They have step() and zero_grad(), or apply_gradients() as those of Keras, and lists of parameters.
    """
    params = params_in(model)
    kinds: dict[type, bool] = {}
    found = []
    for x in gc.get_objects():
        kind = type(x)
        if kind not in kinds:
            kinds[kind] = not issubclass(kind, type | nn.Module | Optimizer) and any(
                all(callable(getattr(kind, name, None)) for name in names) for names in METHODS
            )
        if kinds[kind] and any(id(p) in params for p in _params_in(x)):
            found.append(f"{kind.__name__} of {kind.__module__}")
    return tuple(dict.fromkeys(found))


def _params_in(x: Any) -> Iterator[Any]:
    """Parameters in the lists or groups of an optimizer."""
    own = getattr(x, "__dict__", {})
    for name in ("param_lists", "param_groups", "params"):
        for group in own.get(name) or ():
            group = group.get("params", ()) if isinstance(group, dict) else group
            yield from [group] if isinstance(group, Tensor) else group
    yield from (getattr(variable, "_value", None) for variable in own.get("_trainable_variables") or ())


class OptimizerNames:
    """Names the optimizers of a script in the order of their creation; keeps none of them alive.

    Attributes:
        names: names of all optimizers so far.
        stepped: names of those that have made a step.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.stepped: set[str] = set()
        self._name_of: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._by_param: Any = WeakIdKeyDictionary()  # names of the optimizers that have a parameter

    def note_group(self, opt: Optimizer) -> None:
        """Records the parameters of the group that was last added to an optimizer."""
        if opt not in self._name_of:
            kind = type(opt).__name__
            n = 1 + sum(name.partition(" ")[0] == kind for name in self.names)
            self._name_of[opt] = kind if n == 1 else f"{kind} ({n})"
            self.names.append(self._name_of[opt])
        for p in opt.param_groups[-1]["params"]:
            self._by_param.setdefault(p, []).append(self._name_of[opt])

    def note_step(self, opt: Optimizer) -> None:
        """Records that an optimizer has made a step."""
        if opt in self._name_of:
            self.stepped.add(self._name_of[opt])

    def name_of(self, opt: Optimizer) -> str:
        """Name of an optimizer; "" if it is none of the script's."""
        return self._name_of.get(opt, "")

    def without_trained(self) -> list[Optimizer]:
        """All optimizers, if none of their parameters requires a gradient; else none."""
        return [] if any(p.requires_grad for p in self._by_param) else list(self._name_of)

    def names_for(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the optimizers that have parameters of `model`, in the order of their creation."""
        having = {name for p in model.parameters() for name in self._by_param.get(p, ())}
        return tuple(name for name in self.names if name in having)
