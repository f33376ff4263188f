"""dropout.extreme: a dropout that leaves almost nothing."""

from torch import nn

from hookcb.core.torch_private import Dropout
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

EXTREME = 0.9


@fault(
    "dropout.extreme",
    Site.MODULES,
    needs="model",
    leads_to="loss.flat loss.trivial unit.dead loss.init act.scale",
    subject="dropout",
)
class ExtremeDropout(Fault):
    """A dropout layer that drops nine in ten elements or more.

    Formula: p ≥ 0.9.

    Source: Srivastava et al., "Dropout", 2014, who drop 0.5 of the hidden units and 0.2 of the inputs.
    """

    headline = "A dropout drops nearly everything"
    severity = "warning"
    passed = "extreme dropout"

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            p = m.p if isinstance(m, Dropout) else 0.0
            p = max(p, m.dropout) if isinstance(m, nn.MultiheadAttention | nn.RNNBase) else p
            if p >= EXTREME:
                self.see(
                    f"Layer {name or type(m).__name__} drops {p:.0%} of its input during training (limit "
                    f"{EXTREME:.0%}).",
                    at=name,
                    value=p,
                    causes=("p is the share that is dropped, not the share that is kept",),
                    next_steps=("Try p=0.1 to 0.5",),
                )
