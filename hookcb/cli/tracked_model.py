"""A model that a script trains, and how it is watched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.cli.ranks import own_rank
from hookcb.core.console import show_error
from hookcb.core.torch_private import plain_class
from hookcb.diagnosis.verdict import Verdict
from hookcb.hooks.modules import without_wrappers
from hookcb.loops.reporter import LoopReporter
from hookcb.loops.watcher import Watch
from hookcb.processes.process_group import n_processes
from hookcb.report.collect import collect
from hookcb.report.data import PageData
from hookcb.report.live import LivePage


def say_sick(verdict: Verdict) -> None:
    """Prints at once that a training is sick; not a warning, which the script could turn into an error."""
    if verdict.primary is not None:
        rank = f" on rank {own_rank()} of {n_processes()}" if n_processes() > 1 else ""
        show_error(f"hookcb diagnose{rank}: {verdict.primary.head}: {verdict.primary.message}")


def _contained(method: Callable[..., Any]) -> Any:
    """A method of a `ScriptWatch` that raises nothing: a bug in hookcb must not end the script."""

    @wraps(method)
    def act(self: "ScriptWatch", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.failure = self.failure or error
            self._error = self._error or error  # nothing is emitted from now on
            return None

    return act


class ScriptWatch(Watch):
    """A watch that raises nothing into the script; an error ends it, and is kept in `failure`."""

    failure: Exception | None = None

    emit = _contained(Watch.emit)
    close = _contained(Watch.close)
    # called by torch, in the forward, the backward and the step of the script
    end_backward = _contained(Watch.end_backward)
    _call_begins = _contained(Watch._call_begins)
    _call_returns = _contained(Watch._call_returns)
    _call_ends = _contained(Watch._call_ends)
    _part_begins = _contained(Watch._part_begins)
    _part_returns = _contained(Watch._part_returns)
    _step_begins = _contained(Watch._step_begins)
    _step_ends = _contained(Watch._step_ends)
    _left_goes_on = _contained(Watch._left_goes_on)
    _gradient_arrives = _contained(Watch._gradient_arrives)

    def close_failed(self) -> bool:
        """See `LoopReporter`; hooks stay on until the end, as torch may be iterating over them."""
        return self._error is not None

    @property
    def optimizers(self) -> set[int]:
        """Ids of the optimizers that have made a step of this model."""
        return {id(opt) for opt in self._optimizers}

    @property
    def by_hand(self) -> Optimizer | None:
        """The stand-in for an optimizer in a loop that moves the weights itself, once it has done so."""
        return self._by_hand

    def _make_finder(self) -> None:
        """Finds no loss: those of a script are reported by `tell`, see `Watch`."""

    def tell(self, loss: Tensor) -> None:
        """Reports the loss of the batch, also one without a graph, which `Watch` could not recognize."""
        LoopReporter.report_loss(self, loss)

    def follow(self, loss: Tensor, gives: bool) -> None:
        """Marks the beginning of the backward at this loss, which belongs to another model too.

        Args:
            loss: the loss.
            gives: whether the model has no optimizer, and gives targets or features to it.
        """
        self.facts.n_losses_of_others += 1
        self.facts.n_given += gives
        self._follow_backward(loss)


def kind_of(model: nn.Module) -> str:
    """Class of a model, without wrappers such as DistributedDataParallel."""
    return plain_class(without_wrappers(model)).__name__


@dataclass(eq=False)
class TrackedModel:
    """A model of the script, kept alive until its verdict, which inspects the weights.

    Attributes:
        kind: its class.
        name: its name in the script, "" if unknown.
        model: the model, None once it is closed.
        watch: its watch, None once it is closed.
        verdict: the verdict, once it is closed.
        is_trainable: whether a parameter requires a gradient.
        is_trained: whether its parameters were moved, by an optimizer or by hand.
        has_gradients: whether a backward reached it.
        optimizers: names of the optimizers that have its parameters.
        steppers: names of those that made a step.
        foreign: names of optimizers of another kind than torch's, None as long as none is looked for.
        makes_page: whether `page` is wanted.
        page: what a page shows, once it is closed.
        live: where it is shown while it is trained, None if nowhere.
        title: its class; with its name or a number if there are several: "critic (Net)", "Net (2)".
    """

    kind: str
    name: str
    model: nn.Module | None
    watch: ScriptWatch | None = None
    verdict: Verdict | None = None
    is_trained: bool = False
    has_gradients: bool = False
    optimizers: tuple[str, ...] = ()
    steppers: tuple[str, ...] = ()
    makes_page: bool = False
    page: PageData | None = None
    live: LivePage | None = None
    title: str = ""
    is_trainable: bool = True
    foreign: tuple[str, ...] | None = None
    _n_by_hand: int = 0

    def __post_init__(self) -> None:
        self.title = self.title or self.kind
        self.is_trainable = self.model is None or any(p.requires_grad for p in self.model.parameters())

    def new_steps_by_hand(self) -> list[Optimizer]:
        """Steps of no torch.optim.Optimizer that were seen since this was last called, as stand-ins."""
        if self.watch is None or self.watch.by_hand is None:
            return []
        before, self._n_by_hand = self._n_by_hand, self.watch.facts.n_moved_by_hand
        return [self.watch.by_hand] * (self._n_by_hand - before)

    @property
    def heading(self) -> str:
        """The title, and the optimizers that train the model, or should train it."""
        if self.is_trained:
            return f"{self.title}, trained by {', '.join(self.steppers)}" if self.steppers else self.title
        if not self.is_trainable:
            return f"{self.title}, not trained: none of its parameters requires a gradient"
        names = ", ".join(self.optimizers)
        why = f"{names} made no step" if names else "no optimizer has its parameters"
        return f"{self.title}, not trained: {why}"

    @property
    def is_part_of_result(self) -> bool:
        """Whether to show its verdict: False if it was only used, not trained, and nothing is wrong."""
        is_used_only = not (self.is_trained or self.has_gradients or self.optimizers)
        return self.verdict is not None and not (is_used_only and self.verdict.primary is None)

    @property
    def counts(self) -> bool:
        """Whether the exit code depends on its verdict; not for one that gets gradients, say, as a loss."""
        is_known = self.verdict is not None and self.verdict.status != "unknown"
        return self.is_trained or bool(self.optimizers) or is_known

    def close(self, error: BaseException | None, scoped: Callable[[Verdict], Verdict]) -> None:
        """Ends the watch, keeps the verdict, as `scoped` returns it, and lets go of the model."""
        watch, self.watch = self.watch, None
        if watch is None:
            return
        watch.close(error)
        # a watch does not follow steps of LBFGS, but they move the model
        has_moved = bool(self.steppers) or watch.seen["after_step"] > 0 or watch.facts.n_moved_by_hand > 0
        if self.model is not None and not self.is_trainable:
            self.is_trainable = any(p.requires_grad for p in self.model.parameters())
        self.is_trained = self.is_trainable and (has_moved or watch.failure is not None)
        self.has_gradients = watch.seen["before_backward"] > 0
        self.verdict = scoped(watch.diagnose())
        self.page = collect(watch, self.verdict) if self.makes_page else None
        self.model = None

    @property
    def is_by_parts(self) -> bool:
        """Whether a method of the model calls its parts, and the model itself is never called."""
        return self.watch is not None and not self.watch.facts.n_calls
