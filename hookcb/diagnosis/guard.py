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
    "dropout": ("dropout.scores",),
    "events": ("batches", "batch", "steps"),
    "frame": ("gradients", "optimizers"),
    "gradients": ("gradients",),
    "layer_times": ("time.layer", "time.other"),
    "linear_links": ("model.linear_stack",),
    "model": ("model.linear_stack",),
    "notes": ("batches", "loss", "time"),
    "ops": (
        *("attn.collapse", "mask.blind", "wd.norms", "dropout.in_eval", "time.layer", "layer.batch_first"),
        *OF_TOKENS,
    ),
    "ranks": ("ranks",),
    "sequences": ("layer.batch_first",),
    "tables": ("embed.scale",),
    "tokens": OF_TOKENS,
    "unseen": ("batches",),
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
