"""Guard: keeps the failure of a part of a diagnosis to that part."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from hookcb.diagnosis.failures import describe_failure
from hookcb.hooks.modules import ModelGoneError

T = TypeVar("T")

GONE = "the model was freed before its watch was closed, so its final state was not inspected"
OF_TOKENS = ("label.copies_input", "embed.single_index", "mask.future", "label.padding")
# sources of evidence, and codes of checks, that the parts of a diagnosis are for
COSTS: Mapping[str, tuple[str, ...]] = {
    "activations": ("activations",),
    "added": ("accum.divisor",),
    "buffers": ("replica.buffers",),
    "class_axis": ("head.axis",),
    "cleared": ("param.not_stepped",),
    "columns": ("input.scale",),
    "error": ("label.out_of_range", "label.form"),
    "events": ("batches", "batch", "steps"),
    "first_param": ("nonfinite.first", "accum.divisor", "param.not_stepped"),
    "frame": ("gradients", "optimizers"),
    "gradients": ("gradients",),
    "graph": (
        *("graph", "loss.init", "loss.unbounded", "loss.trivial", "loss.detached", "head.degenerate"),
        *("data.labels", "train.unfinished"),
    ),
    "hashes": ("data.duplicated", "data.repeated", "data.same_order"),
    "inputs": ("input.nonfinite", "input.constant", "input.scale", "act.scale"),
    "layer_times": ("time.layer", "time.other"),
    "lost_updates": ("update.lost_to_rounding",),
    "model": ("model",),
    "motion": ("param.not_stepped", "param.restored", "param.not_in_optimizer", "init.symmetric"),
    "norms": ("mode.mismatch",),
    "notes": ("batches", "loss", "time"),
    "optimizers": ("param.duplicated", "param.frozen"),
    "origin": ("nonfinite.first",),
    "output": (
        *("head.activation", "head.degenerate", "head.range", "label.range", "label.broadcast"),
        *("loss.of_values", "loss.detached"),
    ),
    "outside": ("param.unregistered",),
    "overfit": ("data.labels",),
    "params": ("param.unreachable",),
    "penalty": ("loss.penalty", "loss.trivial"),
    "random": ("random.duplicated",),
    "ranks": ("ranks",),
    "reduced": ("grad.rescaled",),
    "replicas": ("replica.diverged",),
    "scaled_labels": ("label.scaled",),
    "sequences": ("layer.batch_first",),
    "sizes": ("time.data_bound", "time.growing"),
    "stale": ("grad.stale",),
    "stuck": ("head.stuck",),
    "targets": ("loss.trivial", "label.single_class", "label.scaled", "train.unfinished"),
    "tokens": OF_TOKENS,
    "unseen": ("batches",),
    "validation": ("mode.mismatch",),
    "validations": ("loss.trivial",),
    "verdict": (),
}


class Guard:
    """Calls parts of a diagnosis; of one that fails the verdict says so, and its checks rule nothing out.

    Attributes:
        notes: a sentence about each failure.
        partial: see `Run.partial`: what the parts that have failed would have told.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.partial: dict[str, str] = {}
        self._failed: set[str] = set()

    def has_failed(self, part: str) -> bool:
        """Whether a part has failed."""
        return part in self._failed

    def call(self, part: str, function: Callable[..., T], *args: Any) -> T | None:
        """Calls a function of a part, unless that has failed; None if it fails."""
        if part in self._failed:
            return None
        try:
            return function(*args)
        except Exception as error:  # as in `always`, which would be one more call in each batch
            self.note(part, error)
            return None

    def always(self, part: str, function: Callable[..., T], *args: Any) -> T | None:
        """Calls a function also of a part that has failed, as to remove its hooks or to read what it has."""
        try:
            return function(*args)
        except Exception as error:  # the training and the verdict must go on, whatever it is
            self.note(part, error)
            return None

    def made(self, part: str, kind: Callable[..., T], *args: Any) -> T:
        """Makes a part; if that fails, what takes its place must be used in functions to `call` only."""
        made = self.call(part, kind, *args)
        return cast(T, _Failed()) if made is None else made

    def note(self, part: str, error: Exception) -> None:
        """Notes that a part has failed; only its first failure."""
        if isinstance(error, ModelGoneError):
            self.notes += [GONE] if GONE not in self.notes else []
        elif part not in self._failed:
            self._failed.add(part)
            note = describe_failure("a part of Diagnose", error)
            self.notes += [note] if note not in self.notes else []
            self.partial |= {cost: note for cost in COSTS.get(part, ()) if cost not in self.partial}


class _Failed:
    """Takes the place of a part that could not be made, and of whatever that has."""

    def __getattr__(self, name: str) -> "_Failed":
        return self
