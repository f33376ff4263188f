"""Typical faults, planted into the training of the demo to show what the verdict says about them.

They are listed without torch, which takes seconds to import.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class Setup:
    """Model, data and optimizer that the demo trains.

    Attributes:
        dls: loaders of `(x, y)`, see `hookcb.cli.demo.digits`.
        model: the classifier; its last layer is the head.
        opt_func: creates the optimizer.
        lr: the highest learning rate of the cycle.
    """

    dls: Any
    model: "nn.Sequential"
    opt_func: "Callable[..., torch.optim.Optimizer]"
    lr: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        about: one-line description.
        code: code of the finding that names it.
        plant: function that changes the setup.
    """

    about: str
    code: str
    plant: Callable[[Setup], None]


def _high_rate(setup: Setup) -> None:
    setup.lr *= 1000


def _low_rate(setup: Setup) -> None:
    setup.lr *= 1e-6


def _dead_units(setup: Setup) -> None:
    from torch import nn

    first = next(m for m in setup.model if getattr(m, "bias", None) is not None)
    nn.init.constant_(first.bias, -10)  # type: ignore[arg-type]  # a layer that has a bias


def _sigmoids(setup: Setup) -> None:
    from torch import nn

    layers: dict[str, nn.Module] = {"flat": nn.Flatten()}
    for i in range(1, 11):
        layers |= {f"hidden{i}": nn.Linear(64, 64), f"act{i}": nn.Sigmoid()}
    setup.model = nn.Sequential()
    for name, layer in (layers | {"head": nn.Linear(64, 10)}).items():
        setup.model.add_module(name, layer)


def _softmax(setup: Setup) -> None:
    from torch import nn

    setup.model.add_module("softmax", nn.Softmax(dim=1))


def _kept_gradients(setup: Setup) -> None:
    make = setup.opt_func

    def forgetful(params: Iterable[Any], lr: float) -> "torch.optim.Optimizer":
        opt = make(params, lr=lr)
        opt.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return opt

    setup.opt_func = forgetful


def _head_only(setup: Setup) -> None:
    make = setup.opt_func

    def forgetful(params: Iterable[Any], lr: float) -> "torch.optim.Optimizer":
        *_, weight, bias = params
        return make([weight, bias], lr=lr)

    setup.opt_func = forgetful


def _nan(setup: Setup) -> None:
    images = setup.dls.train.dataset.tensors[0]
    images[len(images) // 2, 0, 0, 0] = float("nan")


FAULTS: Mapping[str, Fault] = {
    "lr-too-high": Fault("the learning rate is 10, not 0.01", "update.too_large", _high_rate),
    "lr-too-low": Fault("the learning rate is 1e-8, not 0.01", "update.too_small", _low_rate),
    "dead-relu": Fault("a bias of -10 before a ReLU keeps its units at zero", "unit.dead", _dead_units),
    "sigmoid-stack": Fault(
        "ten sigmoid layers in a row, through which gradients vanish", "grad.attenuated", _sigmoids
    ),
    "softmax-before-loss": Fault(
        "the model ends in a softmax, but cross_entropy applies one itself", "head.activation", _softmax
    ),
    "no-zero-grad": Fault("gradients are never zeroed, so they add up", "grad.stale", _kept_gradients),
    "not-in-optimizer": Fault("the optimizer was given only the head", "param.not_in_optimizer", _head_only),
    "nan-input": Fault("one pixel of one image is NaN", "input.nonfinite", _nan),
}


def find_fault(name: str) -> Fault:
    """Returns the fault of that name.

    Raises:
        LookupError: If no fault has that name; the message lists all names.
    """
    if name not in FAULTS:
        raise LookupError(f"unknown fault {name!r}; choose from {', '.join(FAULTS)}")
    return FAULTS[name]


def fault_lines() -> list[str]:
    """One line for each fault: its name, and what is wrong."""
    width = max(map(len, FAULTS))
    return [f"{name:{width}}  {fault.about}" for name, fault in FAULTS.items()]
