"""diagnose: looks at a model, a batch and a loss before a training begins, and leaves no trace."""

from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.events import CancelStepException
from hookcb.core.restore import preserve_state
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.loops.learner import Learner

__all__ = ["Finding", "Verdict", "assert_healthy", "diagnose"]

NAME = "preflight"  # tells its Diagnose from those of trainings
PASSES = 5  # forwards and backwards without a step; fewer would leave out who never gets a gradient


class _NoStep(Callback):
    """Leaves out each step of the optimizer."""

    order = orders.NO_STEP

    def before_step(self) -> None:
        self.opt.zero_grad()
        raise CancelStepException


def diagnose(
    model: nn.Module,
    batch: Any,
    loss_func: Callable[..., Tensor] | None = None,
    opt: Optimizer | None = None,
    steps: int = 0,
    *,
    n_inp: int | None = None,
) -> Verdict:
    """Looks at a model before its training, by some forwards and backwards, and steps if you ask for them.

    Afterwards all is as it was: parameters, buffers, gradients, modes, random numbers, the optimizer.

    Args:
        model: as it is about to be trained.
        batch: one batch as your loader gives it, `(x, y)`, or a list of them, which are taken in turn.
        loss_func: called as `loss_func(pred, *yb)`; without it the model's output has a `.loss`.
        opt: the optimizer; without it what belongs to it is not looked at.
        steps: number of steps to train; more of them tell more, 30 are plenty.
        n_inp: how many items of a batch are inputs; by default all but the last.

    Returns:
        The verdict; its `coverage` says what so few batches leave out. What the model or the loss raises is
        part of it, where it tells the cause.

    Raises:
        ValueError: for steps below 0, and for steps without an optimizer.
        Exception: what the model or the loss raises, where no finding explains it.

    >>> import torch
    >>> from hookcb import diagnose
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Softmax(dim=1))
    >>> batch = torch.randn(32, 8), torch.randint(3, (32,))
    >>> verdict = diagnose(model, batch, torch.nn.functional.cross_entropy)
    >>> verdict.status, verdict.primary.code, verdict.primary.layer
    ('sick', 'head.activation', '1')
    """
    if check_count("steps", steps, least=0) and opt is None:
        raise ValueError(f"steps is {steps}, and there is no optimizer to make them; pass opt=")
    if opt is not None and not isinstance(opt, Optimizer):
        raise TypeError(f"opt is {opt!r:.80}; give a torch optimizer that is made, or None")
    given = _batches(batch)
    batches = [given[i % len(given)] for i in range(steps or PASSES)]
    learn = Learner(batches, model, loss_func, opt or torch.optim.SGD, n_inp=n_inp)
    with preserve_state(model, opt=opt):
        watching = Diagnose("ignore", budget=1.0, show=False, name=NAME)
        try:
            with learn.no_logging():
                learn.fit(1, cbs=[watching] if steps else [watching, _NoStep()])
        except Exception:
            if watching.verdict is None or watching.verdict.primary is None:
                raise
        return judge(_of_so_little(watching.evidence(), opt is not None, steps))


def _of_so_little(evidence: Evidence, has_opt: bool, steps: int) -> Evidence:
    """Without what stands in for an optimizer, its steps and a loader, of which nothing can be told."""
    missing = {"time": "the loader is not asked"}
    if not has_opt:
        missing["optimizers"] = "no optimizer was given"
    if not steps:
        missing["steps"] = "no step was made"
    evidence.missing |= missing
    evidence.sources -= missing.keys()
    return evidence


def _batches(batch: Any) -> list[Any]:
    """A list of tensors is a batch, as torch's own loader gives it; one of anything else several batches."""
    is_one = not isinstance(batch, list) or any(isinstance(x, Tensor) for x in batch)
    found = [tuple(batch) if isinstance(batch, list) else batch] if is_one else batch
    if not found or any(isinstance(x, Sized) and not isinstance(x, Tensor) and not len(x) for x in found):
        raise ValueError(f"batch is {batch!r:.80}, with nothing in it; give one as your loader does: (x, y)")
    return found


def assert_healthy(
    model: nn.Module,
    batch: Any,
    loss_func: Callable[..., Tensor] | None = None,
    opt: Optimizer | None = None,
    steps: int = 0,
    *,
    n_inp: int | None = None,
) -> None:
    """The same for a test suite: passes if the model is healthy, as far as checked.

    Raises:
        AssertionError: with the verdict, if it is not healthy, or if nothing was seen of it.
        ValueError, Exception: see `diagnose`.

    >>> import torch
    >>> from hookcb import assert_healthy
    >>> batch = torch.randn(32, 8), torch.randint(3, (32,))
    >>> assert_healthy(torch.nn.Linear(8, 3), batch, torch.nn.functional.cross_entropy)
    """
    verdict = diagnose(model, batch, loss_func, opt, steps, n_inp=n_inp)
    if not verdict:
        raise AssertionError(str(verdict))
