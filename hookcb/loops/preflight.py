"""diagnose: checks a model, a batch and a loss before a training begins, and leaves no trace."""

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from hookcb.core import orders
from hookcb.core.arguments import check_count, hinted
from hookcb.core.batch import is_container, shown
from hookcb.core.callback import Callback
from hookcb.core.events import CancelStepException
from hookcb.core.loop import check_model
from hookcb.core.restore import preserve_state
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.preflight import first_batch, why_not_readable
from hookcb.diagnosis.run import Absent, Run, Skipped
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.hooks.dry_run import preserve_loader
from hookcb.loops.data import check_loader
from hookcb.loops.learner import Learner
from hookcb.processes.groups import without_replicas

__all__ = ["Finding", "Verdict", "assert_healthy", "diagnose"]

NAME = "preflight"  # distinguishes its Diagnose from those of trainings
PASSES = 5  # forwards and backwards without a step; fewer would not show who never gets a gradient


class _NoStep(Callback):
    """Skips every optimizer step."""

    order = orders.NO_STEP

    def before_step(self) -> None:
        self.opt.zero_grad()
        raise CancelStepException


@hinted
def diagnose(
    model: nn.Module,
    batch: Any,
    loss_func: Callable[..., Tensor] | None = None,
    opt: Optimizer | None = None,
    steps: int = 0,
    *,
    n_inp: int | None = None,
) -> Verdict:
    """Checks a model before its training, with a few forwards and backwards, and steps on request.

    Afterwards everything is restored: parameters, buffers, gradients, modes, random state, the optimizer.

    Args:
        model: the model, ready for its training.
        batch: one batch as your loader yields it, `(x, y)`, or a list of batches to cycle through; or the
            loader, of which the first batch is used, and which stays as it is.
        loss_func: called as `loss_func(pred, *yb)`; without it, the model's output must have a `.loss`.
        opt: the optimizer; without it, nothing about the optimizer is checked.
        steps: number of steps to train; more of them reveal more, 30 are plenty.
        n_inp: number of items of a batch that are inputs; by default all but the last.

    Returns:
        The verdict; its `coverage` says what so few batches cannot show. It explains an exception of the
        model or the loss if it can.

    Raises:
        TypeError: If `batch` is something that can be read only once, such as an iterator.
        ValueError: If `steps` is below 0, or given without an optimizer.
        Exception: An exception of the model or the loss that no finding explains.

    >>> import torch
    >>> from hookcb import diagnose
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Softmax(dim=1))
    >>> batch = torch.randn(32, 8), torch.randint(3, (32,))
    >>> verdict = diagnose(model, batch, torch.nn.functional.cross_entropy)
    >>> verdict.status, verdict.primary.code, verdict.primary.layer
    ('sick', 'head.activation', '1')
    """
    if check_count("steps", steps, least=0) and opt is None:
        raise ValueError(f"steps is {steps}, but there is no optimizer to make them; pass opt=")
    if opt is not None and not isinstance(opt, Optimizer):
        raise TypeError(f"opt must be an instance of a torch optimizer, or None, got {shown(opt)}")
    check_model(model, "diagnose(model, (x, y), loss_func)")
    given = _batches(batch)
    batches = [given[i % len(given)] for i in range(steps or PASSES)]
    model = without_replicas(model)  # which needs no other rank
    learn = Learner(batches, model, loss_func, opt or torch.optim.SGD, n_inp=n_inp)
    with preserve_state(model, opt=opt):
        watching = Diagnose("ignore", budget=1.0, show=False, name=NAME)
        try:
            with learn.no_logging():
                learn.fit(1, cbs=[watching] if steps else [watching, _NoStep()])
        except Exception:
            if watching.verdict is None or watching.verdict.primary is None:
                raise
        return judge(_without_stand_ins(watching.evidence(), opt is not None, steps))


def _without_stand_ins(evidence: Run, has_opt: bool, steps: int) -> Run:
    """Drops evidence about the stand-ins for an optimizer, its steps and a loader."""
    missing = {"time": "the loader is not asked"}
    missing |= {} if has_opt else {"optimizers": "no optimizer was given"}
    missing |= {} if steps else {"steps": "no step was made"}
    for what, why in missing.items():
        evidence.sources.discard(what)
        evidence.lack(Skipped(why), what)
    evidence.lack(Absent("the training was only tried out"), "end")
    return evidence


def _batches(batch: Any) -> list[Any]:
    """List of batches; a list of tensors is one batch, in the form of torch's own loader."""
    if _is_loader(batch):
        return [_first_of(batch)]
    if isinstance(batch, tuple | list) and any(isinstance(x, DataLoader) for x in batch):
        raise TypeError(f"batch is a {type(batch).__name__} of loaders; give one of them, or a batch (x, y)")
    is_one = not isinstance(batch, list) or any(isinstance(x, Tensor) for x in batch)
    found = [tuple(batch) if isinstance(batch, list) else batch] if is_one else batch
    if not found or any(isinstance(x, Sized) and not isinstance(x, Tensor) and not len(x) for x in found):
        raise ValueError(f"batch must not be empty, got {shown(batch)}; give one as your loader does: (x, y)")
    return found


@hinted
def _is_loader(x: Any) -> bool:
    """Whether `x` yields batches; a batch is a container, or something that can be moved to a device."""
    is_batch = isinstance(x, str | bytes) or is_container(x) or hasattr(x, "shape") or hasattr(x, "to")
    return isinstance(x, Dataset) or (hasattr(x, "__iter__") and (hasattr(x, "dataset") or not is_batch))


def _first_of(loader: Any) -> Any:
    check_loader(loader, "batch")
    why = "it can be read only once" if isinstance(loader, Iterator) else why_not_readable(loader)
    if why:
        raise TypeError(f"batch is {shown(loader)}, but {why}; give one batch, such as next(iter(loader))")
    with preserve_loader(loader):
        return first_batch(loader)


def assert_healthy(
    model: nn.Module,
    batch: Any,
    loss_func: Callable[..., Tensor] | None = None,
    opt: Optimizer | None = None,
    steps: int = 0,
    *,
    n_inp: int | None = None,
) -> None:
    """Asserts that a model is healthy, for a test suite; arguments as for `diagnose`.

    Raises:
        AssertionError: If it is not healthy, or nothing of it was seen; the message is the verdict.
        ValueError, Exception: see `diagnose`.

    >>> import torch
    >>> from hookcb import assert_healthy
    >>> batch = torch.randn(32, 8), torch.randint(3, (32,))
    >>> assert_healthy(torch.nn.Linear(8, 3), batch, torch.nn.functional.cross_entropy)
    """
    verdict = diagnose(model, batch, loss_func, opt, steps, n_inp=n_inp)
    if not verdict:
        raise AssertionError(str(verdict))
