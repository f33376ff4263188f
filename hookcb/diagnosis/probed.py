"""Collects evidence from the probes of Diagnose."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.probes.attention import MIN_BATCHES, observe_attention, observe_blind
from hookcb.diagnosis.probes.dropout import observe_dropout_in_eval
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.run import Observation, Run

Add = Callable[[Probes, Run], object]
TOKENS = (  # in `Run.observed`
    "indices of embeddings",
    "tokens that are targets",
    "masks of the tokens",
    "padding of the tokens",
)


def add_probed(probes: Probes, evidence: Run) -> None:
    """Adds to a run what the probes have recorded so far; see `gather` for what callbacks have.

    What a probe that has failed has recorded before is part of it, if it can be read.
    """
    evidence.sources |= probes.sources
    evidence.is_by_hand = evidence.measured(Steps).is_by_hand
    evidence.observed, evidence.observations = set(probes.observed), list(probes.observations)
    for part, add in PARTS.items():
        probes.guard.always(part, add, probes, evidence)
    for part, tell in REASONS.items():
        probes.guard.call(part, tell, probes, evidence)
    for part, key, is_there in _late_observed(probes):
        if probes.guard.call(part, is_there):
            evidence.observed.add(key)
    for part, observe in _late_observations(probes):
        evidence.observations += probes.guard.always(part, lambda observe=observe: list(observe())) or []
    evidence.notes += probes.notes


def _add_stepped(probes: Probes, evidence: Run) -> None:
    """Adds which optimizers have stepped."""
    steps = evidence.measured(Steps)
    places = steps.places()
    evidence.stepped = [places[key] for key in steps.stepped]


def _set(field: str, value: Callable[[Probes], Any]) -> Add:
    """A function that sets a field of an evidence."""
    return lambda probes, evidence: setattr(evidence, field, value(probes))


PARTS: Mapping[str, Add] = {  # what adds to an evidence, by the part that it reads
    "stepped": _add_stepped,
}


def _late_observed(probes: Probes) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Part of `Run.observed` that depends on numbers on the device, or on enough of them, by probe."""
    ops = probes.ops
    yield "ops", "attention", lambda: any(len(shares) >= MIN_BATCHES for shares in ops.shares.values())
    yield "ops", "calls in eval mode", lambda: ops.has_evaluated
    yield "tables", "sums in the graph", lambda: probes.tables.is_known


def _tell_attention(probes: Probes, evidence: Run) -> None:
    if probes.ops.is_left_out:
        compiled = "the model is compiled, which hides its attention and embeddings"
        evidence.missing |= dict.fromkeys(("attention", *TOKENS), compiled)
    elif probes.ops.has_looked and not probes.ops.shares:
        evidence.absent["attention"] = "the model has no attention operations"
        evidence.missing["masks of the tokens"] = "no attention was seen, so masks were not checked"


def _tell_tokens(probes: Probes, evidence: Run) -> None:
    has_looked = not probes.guard.has_failed("ops") and probes.ops.has_looked
    if has_looked and not evidence.measured(Tokens).has_embeddings:
        no_embedding = "the model has no embedding"
        evidence.absent |= {"embeddings": no_embedding, "tokens": no_embedding}


REASONS: Mapping[str, Add] = {  # likewise, reasons why something was not seen, unless the part has failed
    "ops": _tell_attention,
    "tokens": _tell_tokens,
}


def _late_observations(probes: Probes) -> Iterator[tuple[str, Callable[[], Iterable[Observation]]]]:
    """Observations that are made at the end, by part."""
    yield "ops", lambda: observe_attention(probes.ops.shares)
    yield "ops", lambda: observe_blind(probes.ops.blind)
    yield "ops", lambda: observe_dropout_in_eval(probes.ops.dropping, probes.ops.n_alike())
    yield "tables", lambda: probes.tables.observations()
