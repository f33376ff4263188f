"""Reading what a page shows from a loop and its callbacks."""

from typing import Any

from hookcb.core.callback import Callback
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather
from hookcb.records.records import module_of
from hookcb.report.data import PageData, Recorded


def collect(loop: Any) -> PageData:
    """What the callbacks of a learner or a watched loop have recorded, and the verdict on it."""
    evidence = _evidence(loop)
    try:
        verdict = loop.diagnose()
    except RuntimeError as error:  # nothing is recorded
        return PageData(f"No verdict: {error}.")
    run = {"loss": evidence.loss, **evidence.steps}
    return PageData(
        verdict.headline,
        verdict.to_dict(),
        n_batches=evidence.n_batches,
        run={name: series for name, series in run.items() if len(series)},
        layers={
            name: Recorded(module_of(name), stats=layer.stats)
            for name, layer in evidence.layers.items()
            if any(map(len, layer.stats.values()))
        },
    )


def _evidence(loop: Any) -> Evidence:
    """Evidence of the loop's `Diagnose`, or else from the records of its other callbacks."""
    named = [cb for cb in vars(loop).values() if isinstance(cb, Callback)]  # also of fits that have ended
    cbs = list({id(cb): cb for cb in [*loop.cbs, *named]}.values())
    diagnose = next((cb for cb in cbs if isinstance(cb, Diagnose)), None)
    if diagnose is not None:
        return diagnose.evidence()
    return gather(cbs, Frame.of(loop.model, [] if loop.opt is None else [loop.opt]))
