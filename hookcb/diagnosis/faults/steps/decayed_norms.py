"""wd.norms: weight decay of norms and embeddings in a transformer."""

from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.rules import finite
from hookcb.diagnosis.run import SPARSE_KINDS, Param, Passed, Run, Skipped

MAX_DECAY_OF_NORMS = 0.05  # sum of lr · weight decay


@fault("wd.norms", Site.OPTIMIZER, needs="optimizers steps", subject="attention")
class DecayedNorms(Fault):
    """Weight decay of norms and embeddings in a transformer: a note, as many leave them out of it.

    Formula: sum over the steps of lr · weight decay, the part by which AdamW has shrunk them, for weights of
    normalization layers and embeddings; models without attention are left out. Limit: 0.05; a shorter
    training does not change them by much.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, for the decay in each step.
    """

    headline = "Weight decay shrinks norms and embeddings"
    uses = (Curves, Operations)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        decayed = [p for p in run.params.values() if p.weight_decay > 0 and _is_norm_or_embedding(p)]
        known, places = finite(run.lr.values), join_names([p.name for p in decayed], 3)
        rate = sum(known) / max(1, len(known))
        total = max((p.weight_decay for p in decayed), default=0.0) * rate * run.n_steps
        if not run.measured(Operations).has_attention:
            yield Skipped("too little was seen of the attention")
        elif not known:
            yield Skipped("the learning rate is not known")
        elif total <= MAX_DECAY_OF_NORMS:
            yield Passed(f"weight decay of norms and embeddings ({total:.0%})", total, MAX_DECAY_OF_NORMS)
        else:
            yield self.finding(
                f"Weight decay also applies to {len(decayed)} weights of norms and embeddings ({places}); "
                f"over {run.n_steps} steps, lr · weight decay adds up to {total:.2g} (limit "
                f"{MAX_DECAY_OF_NORMS:g}).",
                value=total,
                limit=MAX_DECAY_OF_NORMS,
                causes=("all parameters in one group of the optimizer",),
                next_steps=("Give norms, biases and embeddings a group with weight_decay=0",),
            )


def _is_norm_or_embedding(param: Param) -> bool:
    return param.kind in SPARSE_KINDS or ("Norm" in param.kind and len(param.shape) == 1)
