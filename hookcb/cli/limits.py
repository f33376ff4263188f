"""Limit: ends a script after so many optimizer steps or minutes, as Ctrl-C would at the end of a step."""

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from hookcb.cli.ownership import modules_alive, params_in
from hookcb.cli.ranks import own_rank
from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.console import show_error
from hookcb.core.events import CancelFitException
from hookcb.gradients.hand_steps import StepByHand
from hookcb.hooks.optimizer_steps import params_of
from hookcb.loops.taps import stepping_optimizers
from hookcb.processes.agreed_stop import AgreedStop
from hookcb.processes.process_group import n_processes

MAX_WAIT = 10  # times the steps asked for, within which a larger model is to begin


class LimitReached(KeyboardInterrupt):
    """Raised into a script at its limit, where Ctrl-C would raise KeyboardInterrupt."""


class Limit:
    """Counts the steps of the optimizer with the most parameters, and ends the script.

    The script may catch what ends it, and train on. Its next step then raises SystemExit, and the one after
    that calls `give_up`. Several ranks end after the same step: each counts the same steps, and the one whose
    minutes are over first tells the others through their store.

    Args:
        steps: number of steps; None for no limit.
        minutes: minutes since the first of these steps; None for no limit.

    Attributes:
        reached: what was reached: "after 200 steps"; "" as long as nothing was.
        n_steps: number of steps that count.
        n_elsewhere: number of steps in other threads; they do not count, as nothing there ends a script.
        give_up: ends the process; called if the script catches SystemExit, too.
    """

    def __init__(self, steps: int | None = None, minutes: float | None = None) -> None:
        self.steps, self.minutes = steps, minutes
        self.reached, self.n_steps, self.n_elsewhere = "", 0, 0
        self.give_up: Callable[[], object] = lambda: None
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._size = self._began = 0.0  # parameters of the optimizer that counts, and time of its first step
        self._n_all = self._n_since = 0  # all steps, and those since the last that counts
        self._due = steps or 0  # number of steps at which to look whether a larger model is to come
        self._n_skipped: Any = 0  # by a GradScaler, unknown to the optimizer; on its device
        there = [*modules_alive(), *_optimizers_alive()] if self else []
        self._used: WeakSet[Any] = WeakSet(there)  # models, and optimizers of others
        self._stop: AgreedStop | None = None  # once ranks have to agree on the time
        self._n_raised = 0

    def __bool__(self) -> bool:
        return self.steps is not None or self.minutes is not None

    @property
    def is_over(self) -> bool:
        """Whether to end the script."""
        return bool(self.reached)

    @property
    def ended_after(self) -> int | None:
        """Number of steps after which it has ended the script, None if it has not."""
        return self.n_steps if self.is_over else None

    def note_call(self, m: nn.Module) -> None:
        """Notes that the script uses a model."""
        if self:
            self._used.add(m)

    def note_step(self, opt: Optimizer) -> bool:
        """Counts a step that has been made; whether to end the script now, by `end`."""
        if not self or os.getpid() != self._process:
            return False
        if threading.get_ident() != self._thread:
            self.n_elsewhere += 1
            return False
        if any(other is not opt for other in stepping_optimizers()):
            return False  # the step of an optimizer that wraps this one ends later
        if not self.reached:
            self._count(opt)
            self.reached = self._reached()
        return self.is_over

    def end(self) -> NoReturn:
        """Ends the script: raises LimitReached, then SystemExit, and then gives up."""
        self._n_raised += 1
        if self._n_raised == 1:
            _tell(f"the script ends now, {self.reached}, as by Ctrl-C")
            raise LimitReached(f"{self.reached}, as hookcb diagnose was asked to end the script")
        if self._n_raised == 2:
            _tell("the script has caught the KeyboardInterrupt and trains on; now SystemExit ends it")
            raise SystemExit(0)
        _tell("the script has caught SystemExit, too; it ends here, without its `finally` blocks")
        self.give_up()
        raise SystemExit(0)

    def note_of_end(self) -> str:
        """Sentence on a limit that was not reached, "" if it was."""
        if not self or self.reached:
            return ""
        asked = " and ".join(
            f"--{name} {n:g}" for name, n in [("steps", self.steps), ("minutes", self.minutes)] if n
        )
        elsewhere = f"; {self.n_elsewhere:,} in other threads do not count" if self.n_elsewhere else ""
        return f"the script ended before {asked}: its optimizers made {_steps(self.n_steps)}{elsewhere}"

    # ---- counting

    def _count(self, opt: Optimizer) -> None:
        size = _size(opt)
        self._n_all += 1
        self._n_since += 1
        if size > self._size:  # what came before was the warm-up of another model
            self._size, self._began, self.n_steps, self._n_skipped = size, time.monotonic(), 0, 0
            self._due = self.steps or 0
        if size == self._size:
            self.n_steps += 1
            self._n_since = 0
            found = getattr(opt, "found_inf", None)  # of a fused optimizer, which skips its step by itself
            if isinstance(found, Tensor):
                self._n_skipped = self._n_skipped + (found.detach() > 0)  # read at the end: no sync here

    def _reached(self) -> str:
        if self.steps is not None and self.n_steps >= self._due:
            self.n_steps -= int(self._n_skipped)
            self._n_skipped = 0
            if self.n_steps >= self._due and not self._waits(self.steps):
                return f"after {_steps(self.n_steps)}"
        if self.steps is not None and self._n_since >= MAX_WAIT * self.steps:
            self.n_steps = self._n_all  # the largest model is trained no more
            return f"after {_steps(self.n_steps)}"
        if self.minutes is not None and self._are_over(60 * self.minutes):
            unit = "minute" if self.minutes == 1 else "minutes"
            return f"after {self.minutes:g} {unit} and {_steps(self.n_steps)}"
        return ""

    def _are_over(self, seconds: float) -> bool:
        """Whether the time is over, for all ranks together."""
        is_first = self._stop is None
        if self._stop is None:
            is_shared = distributed.is_available() and distributed.is_initialized() and n_processes() > 1
            self._stop = AgreedStop(distributed.group.WORLD if is_shared else None, "script")
        self._stop.end_step()
        if time.monotonic() - self._began > seconds and not is_first:  # all ranks have made the first
            if self._stop.missing():
                return True  # ranks that are not diagnosed cannot know
            self._stop.request()
        return self._stop.is_due

    def _waits(self, steps: int) -> bool:
        """Whether a model with more parameters is there that the script has not begun to train.

        Only a process that trains alone looks for one, as several might not find the same.
        """
        if n_processes() > 1 or self._due >= MAX_WAIT * steps:
            return False
        if not _is_larger_to_come(self._size, self._used):
            return False
        if self._due == steps:
            _tell(
                f"the script goes on after {_steps(self.n_steps)}, as a model with more parameters is yet to "
                "be trained, whose steps count"
            )
        self._due += steps
        return True


class EndAtLimit(Callback):
    """Ends a fit after the batch in which the limit of the script is reached.

    Args:
        limit: the limit, which gets the steps of the fit.
    """

    order = orders.STOP
    run_valid = False
    run_lr_find = False

    def __init__(self, limit: Limit) -> None:
        super().__init__()
        self._limit = limit

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_limit": Limit()}

    def after_step(self) -> None:
        self._limit.note_step(self.opt)

    def after_batch(self) -> None:
        if self._limit.is_over:
            raise CancelFitException(f"{self._limit.reached}, by hookcb diagnose")


def _is_larger_to_come(size: float, used: WeakSet[Any]) -> bool:
    """Whether an optimizer has more parameters, or a model in train mode that nothing uses yet."""
    optimizers, models = _optimizers_alive(), modules_alive()
    if any(_size(opt) > size for opt in optimizers if opt not in used):
        return True
    taken = set().union(*map(params_in, (m for m in models if m in used)), *map(params_of, optimizers))
    return any(
        sum(p.numel() for p in m.parameters() if p.requires_grad and id(p) not in taken) > size
        for m in models
        if m.training and m not in used
    )


def _optimizers_alive() -> list[Optimizer]:
    """All optimizers of this process, without those of hookcb and those that are being made."""
    found = (x for x in gc.get_objects() if issubclass(type(x), Optimizer) and not isinstance(x, StepByHand))
    return [opt for opt in found if "param_groups" in vars(opt)]


def _size(opt: Optimizer) -> int:
    return sum(p.numel() for group in opt.param_groups for p in group["params"])


def _steps(n: int) -> str:
    return f"{n:,} step{'s' * (n != 1)}"


def _tell(text: str) -> None:
    if not own_rank():
        show_error(f"hookcb diagnose: {text}")
