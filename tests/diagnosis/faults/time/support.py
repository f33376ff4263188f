"""What a fault says of a made-up training."""

from hookcb.diagnosis.verdict import Finding


def only(kind, run):
    (found,) = run.measured(kind).findings(run)
    return found


def places(kind, run):
    """Places of its findings, or else their codes."""
    return [x.layer or x.code for x in run.measured(kind).findings(run) if isinstance(x, Finding)]
