"""What is checked and made before training starts: device, optimizer, loaders, number of epochs."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookcb.core.arguments import check_count, check_number
from hookcb.core.batch import n_batches


def check_fit(n_epoch: int, dls: Any) -> None:
    """Refuses what would train nothing, or end in the middle.

    Raises:
        TypeError: If `n_epoch` is not a whole number.
        ValueError: where it is negative, a loader has no batches, or one that can be read once is read again.
    """
    check_count("n_epoch", n_epoch, "epochs", least=0)
    for role, loader in (("training", dls.train), ("validation", getattr(dls, "valid", None))):
        if loader is not None and n_batches(loader) == 0:
            raise ValueError(
                f"the {role} loader has no batches; is it empty, or drop_last set with less than a batch?"
            )
        if n_epoch > 1 and isinstance(loader, Iterator):
            raise ValueError(
                f"the {role} loader is a {type(loader).__name__}, which can be read once, "
                f"and n_epoch is {n_epoch}; give a list, or an object whose __iter__ starts anew"
            )


def check_functions(loss_func: Any, opt_func: Any) -> None:
    """Refuses what cannot be called to make a loss or an optimizer.

    Raises:
        TypeError: naming what was given and what to give.
    """
    if isinstance(loss_func, type) and issubclass(loss_func, nn.Module):
        raise TypeError(
            f"loss_func is the class {loss_func.__name__}; give an instance, {loss_func.__name__}()"
        )
    if not callable(loss_func) and loss_func is not None:
        raise TypeError(f"loss_func is {loss_func!r:.80}; give a function (pred, *yb) -> scalar, or None")
    if not callable(opt_func) and not isinstance(opt_func, Optimizer):
        raise TypeError(f"opt_func is {opt_func!r:.80}; give an optimizer's class, such as torch.optim.SGD")


def check_lr(lr: float) -> float:
    """The learning rate, if it is one.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is negative or not finite.
    """
    return check_number("lr", lr, closed=True, hint=", such as 1e-3")


def check_loss(loss: Any) -> None:
    """Refuses a loss that cannot be trained on.

    Raises:
        TypeError: If it is not a tensor.
        ValueError: where it has not one element.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the loss is {loss!r:.80}, not a tensor; compute it from the prediction with torch functions"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, not one element; reduce it, as with loss.mean()"
        )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that can be trained, frozen ones included, so that they can thaw.

    Raises:
        ValueError: where none requires a gradient, or one has no shape yet.
    """
    params, kind = list(model.parameters()), type(model).__name__
    if any(is_lazy(p) for p in params):
        raise ValueError(
            f"{kind} has lazy parameters without a shape; call the model on a batch once, then fit"
        )
    if not any(p.requires_grad for p in params):
        raise ValueError(
            f"nothing to train: none of the {len(params)} parameters of {kind} requires a gradient"
        )
    return params


def make_opt(opt_func: Any, params: list[nn.Parameter], lr: float) -> Optimizer:
    """An optimizer over `params`.

    Raises:
        TypeError: where `opt_func` gives no optimizer.
    """
    opt = opt_func(params, lr=lr)
    if not isinstance(opt, Optimizer):
        raise TypeError(f"opt_func gave {opt!r:.80}, no torch.optim.Optimizer")
    return opt


def check_opt(opt: Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer that would train another model.

    Raises:
        ValueError: where it holds none of the parameters of `model`.
    """
    ids = {id(p) for p in model.parameters()}
    if not any(id(p) in ids for group in opt.param_groups for p in group["params"]):
        raise ValueError(
            f"the optimizer {type(opt).__name__} holds none of the parameters of {type(model).__name__}; "
            "make it from this model's parameters, or give its class as opt_func"
        )


def same_objects(ones: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    """Whether two lists hold the very same parameters in the same order."""
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))
