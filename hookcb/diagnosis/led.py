"""Callbacks that a diagnosis leads: they record for it when it looks, and a failure ends their part only."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from hookcb.activations.callback import ActivationStats
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.threads import this_thread
from hookcb.core.torch_private import edit_graphs
from hookcb.diagnosis.compiled_graphs import IN_CUDA_GRAPHS, GraphEditor, follow
from hookcb.gradients.callback import GradientHealth
from hookcb.hooks.modules import (
    contains_compiled,
    has_compiled,
    is_compiled,
    modules_in,
    named_modules,
    unwrapped,
)
from hookcb.profiling.steps.timer import StepTimer


class Leader(Protocol):
    """Methods of a diagnosis that they call."""

    @property
    def is_wanted(self) -> bool: ...
    def take_error_of(self, cb: "Led", error: Exception) -> bool: ...
    def see_output(self, m: nn.Module, output: Any) -> None: ...
    def see_compiled_output(self, m: nn.Module, output: Tensor | None) -> None: ...
    def see_compiled_operation(self, layer: str, what: str, xs: Any, numbers: Any) -> None: ...


class Led(Callback):
    """Callback that a diagnosis leads; a resumed fit records anew.

    Attributes:
        leader: the diagnosis, None once its fit is over.
        part: the source of a `Run` that it records.
        usual_name: its name on the loop.
    """

    leader: Leader | None = None
    part = usual_name = ""

    def takes_error(self, error: Exception, event: str) -> bool:
        is_refusal = event == Event.BEFORE_FIT  # what cannot be recorded is told before
        return not is_refusal and self.leader is not None and self.leader.take_error_of(self, error)

    def take_error(self, error: Exception) -> None:
        """Tells of an error in a hook."""
        if self.leader is not None:
            self.leader.take_error_of(self, error)

    def wants(self, i: int) -> bool:
        """Whether the current batch is inspected."""
        return self.leader is not None and self.leader.is_wanted

    def stop(self) -> None:
        """Does nothing more in this fit, as it has failed."""
        self.run = False

    def state_dict(self) -> dict[str, Any]:
        return {}


class LedStats(Led, ActivationStats):
    """`ActivationStats` of all layers, whose hooks show their outputs to the diagnosis too."""

    part, usual_name = "activations", "activation_stats"
    _may_shorten = True  # each way shows what it takes
    _may_rest = True  # whether the hooks are on layers only in batches that are inspected
    # called with name and output of each layer in compiled code, in a batch that need not be inspected
    peek: Callable[[str, Tensor], object] | None = None
    _end_edits: Callable[[], None] | None = None  # of graphs that are compiled in this fit

    def _let_act(self, training: bool | None) -> None:
        """Takes the hooks off between batches that are inspected, unless compiled code may contain them."""
        is_change = training is not self._acts_in
        super()._let_act(training)
        if not is_change or not self._may_rest:
            return
        if training is None:
            self._may_rest = not has_compiled()
            return self.hooks.rest() if self._may_rest and self.hooks else None
        is_first = not self.n_batches
        self._may_rest = not (contains_compiled(self.learn.model) if is_first else has_compiled())
        for hook, m in zip(self.hooks or (), self.layers.values(), strict=False):
            hook.wake(m)
        if not (self._may_rest or is_first) and any(map(is_compiled, modules_in(self.learn.model))):
            self.take_error(RuntimeError("the model was compiled in mid-training, without our hooks"))

    def looks_alike(self) -> bool:
        return True  # a diagnosis chooses batches by their numbers

    def before_fit(self) -> None:
        super().before_fit()
        for hook in self.hooks or ():
            hook.take_error = self.take_error
        if any(map(is_compiled, modules_in(self.learn.model))):
            modules = named_modules(self.learn.model)
            editor = GraphEditor(self._owner, modules, self._meets, self.take_error)
            self._end_edits = edit_graphs(editor.edit)

    def stop(self) -> None:
        super().stop()
        self._acts_in = None

    def remove(self) -> None:
        super().remove()
        if self._end_edits is not None:
            self._end_edits()
        self._end_edits, self.peek = None, None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_end_edits": None, "peek": None}

    def hook(self, m: nn.Module, *seen: Any) -> None:
        super().hook(m, *seen)
        if self.leader is not None:
            self.leader.see_output(m, seen[-1])

    def _take_usual(self, m: nn.Module, output: Any) -> bool:
        is_taken = super()._take_usual(m, output)
        if is_taken and self._acts_in is self.learn.training and self.leader is not None:
            self.leader.see_output(m, output)
        return is_taken

    def take_compiled(self, x: Tensor | None, mark: Tensor, written: Tensor, part: str, kind: str) -> bool:
        try:
            if self.peek is not None and x is not None and part in ("", "[0]"):
                self._show_to_peek(x, mark)
            acts = super().take_compiled(x, mark, written, part, kind)
            if x is None or self.leader is None or self._acts_in is not self.learn.training:
                return acts
            if part in ("", "[0]") and (acts or self._is_in_graph(x)):
                m = self.layers.get(self.layer_of(mark), unwrapped(self.learn.model))
                self.leader.see_compiled_output(m, x if acts else None)
        except Exception as error:  # must not be raised in the user's forward
            self.take_error(error)
            return False
        return acts

    def _show_to_peek(self, x: Tensor, mark: Tensor) -> None:
        is_here = self.learn.training and this_thread() == self._thread and not self._is_in_graph(x)
        if self.peek is not None and is_here and (name := self.layer_of(mark)):
            self.peek(name, x)

    def _meets(self, what: str, layer: str, numbers: tuple[float, ...]) -> None:
        if self.leader is not None:
            self.leader.see_compiled_operation(layer, what, None, numbers)

    def show_compiled(
        self, xs: Sequence[Tensor], mark: Tensor, way: tuple[int, str], what: str, numbers: Sequence[float]
    ) -> None:
        """Shows an operation in compiled code, by the layer to which a way leads from that of a mark."""
        try:
            acts = self._acts_in is self.learn.training and this_thread() == self._thread
            if acts and self.leader is not None and (anchor := self.layer_of(mark)):
                if any(map(self._is_in_graph, xs)):
                    what, xs = IN_CUDA_GRAPHS, ()
                self.leader.see_compiled_operation(follow(anchor, *way), what, xs or None, numbers)
        except Exception as error:  # likewise
            self.take_error(error)


class LedHealth(Led, GradientHealth):
    """`GradientHealth` of all parameters, with details in each record, as there are few."""

    part, usual_name = "gradients", "gradient_health"

    def before_fit(self) -> None:
        super().before_fit()
        if self._watch is not None:
            self._watch.take_error = self.take_error

    def stop(self) -> None:
        super().stop()
        if self._watch is not None:
            self._watch.close()

    @property
    def _acts(self) -> bool:
        """Whether the current step is read, or may be skipped by a scaler."""
        return self.learn.scaler is not None or self.wants(self._n_steps)

    def before_step(self) -> None:
        if self._acts:
            super().before_step()

    def after_cancel_step(self) -> None:
        if self._acts:
            super().after_cancel_step()

    def after_step(self) -> None:
        if self._acts:
            super().after_step()


class LedTimer(Led, StepTimer):
    """`StepTimer`, which compares several ranks."""

    part, usual_name = "ranks", "step_timer"
