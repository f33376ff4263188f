"""watch: callbacks on any training loop, which stays as it is."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookcb.core.arguments import hinted
from hookcb.core.batch import shown
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks, listed
from hookcb.core.console import warn
from hookcb.core.loop import check_model
from hookcb.hooks.optimizer_steps import params_of
from hookcb.loops.optimizers import unwrapped
from hookcb.loops.watcher import Watch

Optimizers = Optimizer | Iterable[Optimizer] | None


@hinted
def watch(
    model: nn.Module,
    optimizer: "Optimizers | Callbacks" = None,
    *more: Callbacks,
    cbs: Callbacks = (),
    scaler: torch.amp.GradScaler | None = None,
) -> "Watch":
    """Lets callbacks follow a training loop as it is, until `close()` or the end of a `with` block.

    Events come from hooks on the model and on the steps of its optimizers:

    - a batch begins when the model is called in train mode with gradients on, after the last batch's backward
      or step: several calls before a backward form one batch, backwards without a step accumulate, and each
      evaluation in a step of LBFGS is a batch; until
      the model itself is called, calls of its parts count, such as `net.actor(x)`;
    - where no call is ever seen, as in a step that is compiled as a whole, a batch begins with its backward;
    - a call in eval mode is a validation batch; in the middle of a training batch it is ignored, unless the
      loop has left an earlier batch there; a call in train mode without gradients is always ignored;
    - the backward is noticed when gradients reach the model's output, or the loss in `w.report_loss(loss)`;
    - the loss is what backward is called on, the sum if there are several, before a GradScaler scales it; it
      is found when the backward begins, and need not be reported;
    - a batch ends when all optimizers have stepped, or else when the next one begins; if weights move
      without an optimizer, the step begins when the backward ends, and ends with the batch.

    The watch follows the thread in which it was created. Several watches may follow one model, each with its
    own callbacks. `w.coverage` says what was not seen or was ignored, and why. With HOOKCB=0 in the
    environment nothing is hooked, and the methods of the watch do nothing.

    Args:
        model: the model as the loop calls it, such as the one that torch.compile or
            DistributedDataParallel returned.
        optimizer: one or several; None means all that have parameters of the model.
        *more: callbacks, one by one or in lists; they become attributes, `w.activation_stats`. Their
            cancels are ignored; their errors reach the loop and end the watch. Callbacks that take part in
            the training, such as `MixedPrecision`, are refused.
        cbs: more callbacks, in the form that a `Learner` accepts.
        scaler: the loop's GradScaler, so that callbacks can unscale the loss and gradients of outputs. By
            default it is found by the losses that it scales.

    Raises:
        TypeError, ValueError, LookupError: If something cannot be watched; nothing is hooked then.

    >>> import torch
    >>> from hookcb import ActivationStats, watch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, opt, ActivationStats()) as w:
    ...     for x in torch.randn(3, 8, 2):
    ...         model(x).square().mean().backward()
    ...         opt.step()
    ...         opt.zero_grad()
    >>> len(w.activation_stats.stats), w.activation_stats.names
    (3, ['0', '2'])
    """
    _refuse_trainer(model)
    check_model(model, "watch(model, optimizer)")
    given, callbacks = listed(optimizer), flat(*more, cbs)
    if given and all(map(_is_callback, given)):
        given, callbacks = [], [*given, *callbacks]
    optimizers = _checked_optimizers(given)
    has_other_optimizer = _share_no_parameter(optimizers, model)
    if has_other_optimizer:
        warn(
            f"the given optimizer has no parameter of {type(model).__name__}, so no step will be "
            "seen; give the one that trains it, or None to find it"
        )
    w = Watch(model, optimizers, callbacks, scaler)
    w.facts.has_other_optimizer = has_other_optimizer
    return w


def flat(*given: Callbacks) -> list[Any]:
    """One list of callbacks that are given one by one, in lists, or both."""
    return [cb for cbs in given for cb in listed(cbs)]


def _is_callback(x: Any) -> bool:
    return isinstance(x, Callback) or (isinstance(x, type) and issubclass(x, Callback))


def _refuse_trainer(model: Any) -> None:
    """Refuses a trainer in place of a model, and says what a trainer takes."""
    names = [kind.__name__ for kind in type(model).__mro__]
    if "Trainer" in names and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {shown(model)}; for a Trainer use HookcbCallback(Diagnose()), "
            "of hookcb.adapters.lightning or hookcb.adapters.transformers, among its callbacks"
        )


def _share_no_parameter(optimizers: list[Optimizer], model: nn.Module) -> bool:
    """Whether the optimizers and the model share no parameter; False if either has none."""
    params = {id(p) for p in model.parameters()}
    return bool(optimizers and params) and all(params.isdisjoint(params_of(opt)) for opt in optimizers)


def _checked_optimizers(given: list[Any]) -> list[Optimizer]:
    wrong = [opt for opt in given if not isinstance(opt, Optimizer)]
    if wrong:
        is_scheduler = isinstance(wrong[0], LRScheduler)
        hint = "; give the optimizer that it schedules, scheduler.optimizer" if is_scheduler else ""
        if isinstance(wrong[0], Tensor | tuple):
            hint = "; give the optimizer itself, not model.parameters()"
        raise TypeError(
            f"optimizer must be a torch optimizer, several, or None to find them, got {shown(wrong[0])}{hint}"
        )
    return [unwrapped(opt) for opt in given]
