"""load.left_out: tensors that training changes and no state_dict has, in a training that is resumed."""

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.text import join_names
from hookcb.core.torch_private import buffers_of, unsaved_buffer_names, version_of
from hookcb.diagnosis.fault import EVERY, Fault, Site, Unknown, fault
from hookcb.diagnosis.measurements.attributes import plain_objects
from hookcb.diagnosis.measurements.loads import LoadClock
from hookcb.diagnosis.run import Absent, Run

MAX_TENSORS = 64  # that are followed
MIN_STEPS = 8  # after which a tensor that has changed in each is one that a resumed training lacks
NOT_RESUMED = Absent("no model was loaded together with the state of its optimizer")


@fault("load.left_out", Site.INPUT, needs="batches", subject="resumed", exact=True)
class LeftOut(Fault):
    """Tensors of a model that its training changes and no state_dict has, so that a resumed one loses them.

    Exact: weights were loaded into the model before its first step, and its optimizer had a state before that
    step; and in each step a program writes in place to a tensor that is neither a parameter nor a persistent
    buffer: an attribute of a module, of an object in an attribute, or a buffer with persistent=False. So it
    has begun as it was made, and not as the training before had left it. A note, as it may be scratch memory.

    Source: torch.nn.Module, "register_buffer", persistent.
    """

    headline = "The model has a state that was not loaded"
    severity = "info"
    cadence = EVERY
    uses = (LoadClock,)
    passed = "a state of the model that was not loaded"
    unless: Unknown = NOT_RESUMED

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[str, tuple[ReferenceType[Tensor], int]] = {}
        self._is_resumed: bool | None = None  # None before the first step
        self._n = 0

    def on_model(self, run: Run) -> None:
        for name, x in _unsaved(run.loop.model):
            if len(self._tensors) < MAX_TENSORS:
                self._tensors[name] = ref(x), version_of(x)

    def on_step(self, run: Run) -> None:
        opt = run.loop.opt
        if self._is_resumed is None and isinstance(opt, Optimizer):
            first = opt.param_groups[0]["params"][:1]
            self._is_resumed = any(opt.state.get(p) for p in first) and _was_loaded(run)
            self.done = not self._is_resumed

    def on_between(self, run: Run) -> None:
        if not self._is_resumed:
            return
        now = {
            name: version_of(x) for name, (ref_x, _) in self._tensors.items() if (x := ref_x()) is not None
        }
        self._tensors = {
            name: (ref_x, now[name])
            for name, (ref_x, before) in self._tensors.items()
            if now.get(name, before) != before
        }
        self._n += 1
        self.done = self._n >= MIN_STEPS

    def tell(self, run: Run) -> None:
        self.seen = []
        if not self._is_resumed:
            return
        self.unless = "" if self._n >= MIN_STEPS else f"fewer than {MIN_STEPS} steps"
        if not self.unless and self._tensors:
            names = list(self._tensors)
            self.see(
                "The model and the state of its optimizer were loaded before the first step, but "
                f"{join_names(names, 4)}, which each step changes, {'are' if len(names) > 1 else 'is'} in no "
                "state_dict(), and so began anew.",
                at=names[0].rpartition(".")[0],
                when=0,
                causes=("tensors that are no buffers, or buffers with persistent=False",),
                next_steps=("Keep them as buffers of an nn.Module: self.register_buffer(name, tensor)",),
            )


def _was_loaded(run: Run) -> bool:
    """Whether load_state_dict has filled the model before its first step."""
    clock = run.measured(LoadClock)
    return any(clock.steps(load.clock) == 0 for load in clock.loads())


def _unsaved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are in no state_dict, in attributes of modules, and of objects of the user's in these."""
    for name, m in model.named_modules():
        at = f"{name}." if name else ""
        if isinstance(m, torch.jit.ScriptModule):
            continue
        found: dict[str, Any] = {x: buffers_of(m).get(x) for x in unsaved_buffer_names(m)} | vars(m)
        for key, value in plain_objects(m):
            found |= {f"{key}.{inner}": x for inner, x in vars(value).items()}
        yield from (
            (at + key, x) for key, x in found.items() if isinstance(x, Tensor) and not x.is_inference()
        )
