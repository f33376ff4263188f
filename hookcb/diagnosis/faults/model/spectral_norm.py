"""norm.spectral: a spectral norm that is evaluated before it has estimated anything."""

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from hookcb.core.text import as_layer
from hookcb.core.torch_private import forward_hooks
from hookcb.diagnosis.fault import Fault, Site, Unknown, fault
from hookcb.diagnosis.run import Absent, Run
from hookcb.hooks.modules import named_modules


@fault("norm.spectral", Site.MODULES, needs="batches", exact=True)
class EarlySpectralNorm(Fault):
    """A model with `torch.nn.utils.spectral_norm` that is evaluated before its first training batch.

    Exact: it estimates the largest singular value by power iterations, which only a forward in train mode
    makes, and begins with random vectors; so a weight is divided by a number that may be near 0. A note, as
    the validations after the first batches are right. `nn.utils.parametrizations.spectral_norm` makes 15
    iterations when it is registered.

    Source: torch.nn.utils.spectral_norm; Miyato et al., "Spectral Normalization for GANs", 2018, algorithm 1.
    """

    headline = "A spectral norm is evaluated before it is estimated"
    severity = "info"
    passed = "spectral norms that are evaluated before they are estimated"

    unless: Unknown = "the model was not seen before its training"

    def on_model(self, run: Run) -> None:
        self._names = [name for name, m in named_modules(run.loop.model).items() if _is_normed(m)]
        if not self._names:
            self.unless, self.done = Absent("there is no torch.nn.utils.spectral_norm"), True
        else:
            self.unless = ""

    def on_eval_batch(self, run: Run) -> None:
        modules = named_modules(run.loop.model)
        early = [name for name in self._names if name in modules and not modules[name].training]
        if early and not run.n_batches and not run.loop.train_iter:
            self.see(
                f"{as_layer(early[0])} has a spectral norm, and was evaluated before the first batch: "
                "it divides by an estimate from random vectors, so that this validation means nothing.",
                at=early[0],
                when=0,
                causes=("a validation, or a sanity check, before the training",),
                next_steps=(
                    "Use torch.nn.utils.parametrizations.spectral_norm, which estimates it at once, or "
                    "leave out that validation",
                ),
            )
        self.done = True

    def on_batch_end(self, run: Run) -> None:
        self.done = True


def _is_normed(m: nn.Module) -> bool:
    _, before = forward_hooks(m)
    return any(isinstance(hook, SpectralNorm) for hook in before.values())
