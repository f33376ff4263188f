"""norm.spectral: a spectral norm that is evaluated before it has estimated anything."""

from collections.abc import Generator
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from hookcb.core.text import as_layer
from hookcb.core.torch_private import forward_hooks
from hookcb.diagnosis.fault import Fault, Site, Unknown, fault
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.loads import Loads
from hookcb.diagnosis.run import Absent, Run
from hookcb.hooks.modules import named_modules


class SpectralNorms(Ear):
    """Whether the first use of each module with a spectral norm was an evaluation."""

    calls = ((SpectralNorm, "compute_weight", "observe"),)
    options = {"all_threads": True}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.is_early: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def observe(self, norm: Any, m: nn.Module, do_power_iteration: bool) -> Generator[None, Any, None]:
        self.is_early.setdefault(m, not do_power_iteration)
        yield


@fault("norm.spectral", Site.MODULES, needs="batches", exact=True)
class EarlySpectralNorm(Fault):
    """A model with `torch.nn.utils.spectral_norm` that is evaluated before its first training batch.

    Exact: it estimates the largest singular value by power iterations, which only a forward in train mode
    makes, and begins with random vectors; so a weight is divided by a number that may be near 0. Left out are
    weights that were loaded, with the estimate. A note, as the validations after the first batches are right.
    `nn.utils.parametrizations.spectral_norm` makes 15 iterations when it is registered.

    Source: torch.nn.utils.spectral_norm; Miyato et al., "Spectral Normalization for GANs", 2018, algorithm 1.
    """

    headline = "A spectral norm is evaluated before it is estimated"
    severity = "info"
    passed = "spectral norms that are evaluated before they are estimated"

    unless: Unknown = "the model was not seen before its training"
    hears = (Loads, SpectralNorms)

    def __init__(self) -> None:
        super().__init__()
        self._normed: dict[str, ReferenceType[nn.Module]] = {}

    def on_model(self, run: Run) -> None:
        modules = named_modules(run.loop.model)
        self._normed = {name: ref(m) for name, m in modules.items() if _is_normed(m)}
        self.unless, self.done = "", bool(run.loop.train_iter)
        if not self._normed:
            self.unless, self.done = Absent("there is no torch.nn.utils.spectral_norm"), True

    def on_batch_end(self, run: Run) -> None:
        """Reads what came before the end of the first training batch."""
        self.done = True
        is_early, loads = heard(SpectralNorms).is_early, heard(Loads)
        for name, known in self._normed.items():
            m = known()
            if m is None or not is_early.get(m) or any(map(loads.was_loaded, m.parameters(recurse=False))):
                continue
            self.see(
                f"{as_layer(name)} has a spectral norm, and was evaluated before the first batch: "
                "it divides by an estimate from random vectors, so that this validation means nothing.",
                at=name,
                when=0,
                causes=("a validation, or a sanity check, before the training",),
                next_steps=(
                    "Use torch.nn.utils.parametrizations.spectral_norm, which estimates it at once, or "
                    "leave out that validation",
                ),
            )

    def freeze(self) -> None:
        self._normed = {}


def _is_normed(m: nn.Module) -> bool:
    _, before = forward_hooks(m)
    return any(isinstance(hook, SpectralNorm) for hook in before.values())
