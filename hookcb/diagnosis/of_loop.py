"""The verdict on a loop, from what its callbacks have recorded."""

from typing import Any

from hookcb.activations.callback import ActivationStats
from hookcb.core.callback import Callback
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.probes.one_batch import add_preflight
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.callback import GradientHealth


def diagnose_loop(loop: Any) -> Verdict:
    """What is wrong with the training of a loop; by its `Diagnose`, else by what other callbacks recorded.

    Of a learner without `Diagnose`, outside of a fit, one batch is looked at too; see `add_preflight`.

    Raises:
        RuntimeError: where nothing is recorded.
    """
    # those of fits that have ended are attributes still
    named = [cb for cb in vars(loop).values() if isinstance(cb, Callback)]
    cbs = [*loop.cbs, *(cb for cb in named if not any(cb is other for other in loop.cbs))]
    own = next((cb for cb in cbs if isinstance(cb, Diagnose)), None)
    if own is not None:
        return own.judge()
    records = [cb for cb in cbs if isinstance(cb, ActivationStats | GradientHealth)]
    evidence = Evidence()
    if records:
        evidence = gather(cbs, Frame.of(loop.model, [] if loop.opt is None else [loop.opt]))
    is_followed = not hasattr(loop, "get_loss")  # a loop that hookcb does not run
    if is_followed and records:
        evidence.unseen = dict(loop.coverage.missing)
    elif is_followed:
        raise RuntimeError("nothing is recorded in this loop; give watch a Diagnose(), cbs=Diagnose()")
    elif not evidence.n_batches:
        raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
    else:
        add_preflight(evidence, loop, cbs)
    return judge(evidence)
