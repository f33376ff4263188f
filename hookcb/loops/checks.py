"""Checks before training starts: loaders, epochs, loss, parameters, optimizer; and errors in a batch."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from hookcb.core.arguments import check_count
from hookcb.core.batch import array_hint, describe, is_array, n_batches, shown
from hookcb.core.events import CancelException

T = TypeVar("T")


def check_fit(n_epoch: int, dls: Any) -> None:
    """Refuses a fit that would train nothing, or end in the middle.

    Raises:
        TypeError: If `n_epoch` is not a whole number.
        ValueError: If it is negative, or a loader has no batches, or is an iterator and there are several
            epochs.
    """
    check_count("n_epoch", n_epoch, "epochs", least=0)
    for role, loader in (("training", dls.train), ("validation", getattr(dls, "valid", None))):
        if loader is not None and n_batches(loader) == 0:
            raise ValueError(
                f"the {role} loader has no batches; is it empty, or drop_last set with less than a batch?"
            )
        if n_epoch > 1 and isinstance(loader, Iterator):
            raise ValueError(
                f"the {role} loader is a {type(loader).__name__}, which can be read only once, "
                f"and n_epoch is {n_epoch}; give a list, or an object whose __iter__ starts over"
            )


def check_functions(loss_func: Any, opt_func: Any) -> None:
    """Checks that the loss and the optimizer can be made by a call.

    Raises:
        TypeError: If one cannot; the message says what is possible.
    """
    if isinstance(loss_func, type) and issubclass(loss_func, nn.Module):
        raise TypeError(
            f"loss_func is the class {loss_func.__name__}; give an instance, {loss_func.__name__}()"
        )
    if not callable(loss_func) and loss_func is not None:
        is_data = isinstance(loss_func, Tensor) or is_array(loss_func)
        hint = "; inputs and targets are one batch, (x, y)" if is_data else ""
        raise TypeError(
            f"loss_func must be a function (pred, *yb) -> scalar, or None, got {shown(loss_func)}{hint}"
        )
    if not callable(opt_func) and not isinstance(opt_func, Optimizer):
        raise TypeError(
            f"opt_func must be an optimizer class, such as torch.optim.SGD, got {shown(opt_func)}"
        )


def check_loss(loss: Any) -> None:
    """Checks that a loss is a tensor of one element.

    Raises:
        TypeError: If it is not a tensor.
        ValueError: If it does not have exactly one element.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, got {shown(loss)}; compute it with torch functions")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, not one element; reduce it, as with loss.mean()"
        )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of a model that can be trained; includes frozen ones, which may be unfrozen later.

    Raises:
        ValueError: If none requires a gradient, or one has no shape yet.
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
    """Makes an optimizer for `params`.

    Raises:
        TypeError: If `opt_func` returns something else.
    """
    opt = opt_func(params, lr=lr)
    if not isinstance(opt, Optimizer):
        raise TypeError(f"opt_func must return a torch.optim.Optimizer, got {shown(opt)}")
    return opt


def check_opt(opt: Optimizer, model: nn.Module, passes_closure: bool) -> None:
    """Checks that an optimizer trains the model.

    Raises:
        TypeError: If it needs a closure and the loop's `step` does not pass one.
        ValueError: If it has none of the parameters of `model`.
    """
    if isinstance(opt, LBFGS) and not passes_closure:
        raise TypeError(
            "LBFGS evaluates the loss several times in a step; define step(self) in a subclass of Learner "
            "that calls self.opt.step(closure), or write the loop yourself and let hookcb.watch follow it"
        )
    ids = {id(p) for p in model.parameters()}
    if not any(id(p) in ids for group in opt.param_groups for p in group["params"]):
        raise ValueError(
            f"the optimizer {type(opt).__name__} has none of the parameters of {type(model).__name__}; "
            "make it from this model's parameters, or give its class as opt_func"
        )


def same_objects(ones: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    """Whether two lists contain the same parameter objects in the same order."""
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))


def names_batch(body: Callable[[T], None]) -> Callable[[T], None]:
    """Has the errors of a Learner's method say in which batch they were raised, and what that is."""

    @wraps(body)
    def named(learn: Any) -> None:
        try:
            body(learn)
        except BaseException as error:
            if not isinstance(error, CancelException) and not hasattr(error, "__notes__"):
                where = ", ".join(learn.position("after_pred"))
                hint = array_hint((learn.xb, learn.yb))
                if isinstance(error, TypeError) and not learn.yb and isinstance(learn.xb, tuple):
                    hint += "; a batch with a target is (x, y)"
                error.add_note(f"in {where}, with xb {describe(learn.xb)} and yb {describe(learn.yb)}{hint}")
            raise

    return named
