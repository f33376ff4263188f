"""Collects evidence from the probes of Diagnose."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hookcb.core.optim import is_adaptive
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.probes.batch import observe_inputs
from hookcb.diagnosis.probes.samples import BatchHash, has_epochs, observe_order
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.probes.tokens import observe_tokens
from hookcb.diagnosis.run import Observation, Run, Series

Add = Callable[[Probes, Run], object]


def add_probed(probes: Probes, evidence: Run) -> None:
    """Adds to a run what the probes have recorded so far; see `gather` for what callbacks have.

    What a probe that has failed has recorded before is part of it, if it can be read.
    """
    evidence.sources |= probes.sources
    evidence.world = probes.world
    steps, loss = evidence.measured(Steps), evidence.measured(Loss)
    evidence.loss_kind, evidence.loss_kinds, evidence.guess = loss.kind, loss.kinds, loss.guess
    evidence.is_loss_of_others, evidence.n_in_loss = loss.is_of_others, loss.n_operations
    evidence.constant, evidence.perfect, evidence.noise = loss.constant, loss.perfect, loss.noise
    evidence.n_targets, evidence.penalty = loss.n_targets, loss.penalty
    evidence.is_by_hand = steps.is_by_hand
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


def _add_inputs(probes: Probes, evidence: Run) -> None:
    steps, rows = _inputs(probes)
    evidence.input_std = Series.of(steps, [row[0] for row in rows])
    evidence.input_rms = Series.of(steps, [row[1] for row in rows])
    seen = {observation.code for observation in probes.observations}
    found = observe_inputs(steps, rows, probes.has_origin)
    evidence.observations += [x for x in found if x.code not in seen]
    if any(row[-1] > 0 for row in rows):
        evidence.observed.add("samples that differ")


def _inputs(probes: Probes) -> tuple[list[int], list[list[float]]]:
    """Steps of the inspected batches, and numbers of their inputs."""
    return [info.step for info in probes.inputs.infos], probes.inputs.series("x").tolist()


def _add_motion(probes: Probes, evidence: Run) -> None:
    """Adds which parameters have moved."""
    for name, moved in probes.motion.moved().items():
        if name in evidence.params:
            evidence.params[name].has_moved = moved


def _add_params(probes: Probes, evidence: Run) -> None:
    """Adds which parameters had a gradient, and which optimizers have stepped."""
    steps = evidence.measured(Steps)
    for name, n in probes.n_without.items():
        if name in evidence.params:
            evidence.params[name].n_without = n
    places = steps.places()
    evidence.stepped = [places[key] for key in steps.stepped]


def _add_hashes(probes: Probes, evidence: Run) -> None:
    evidence.missing["order of two epochs"] = "fewer than two epochs of four batches were trained"
    evidence.batch_hashes = list(map(list, _epochs_hashed(probes)))


def _add_random(probes: Probes, evidence: Run) -> None:
    evidence.random_states = [] if probes.random is None else probes.random.drawn()


def _add_reduced(probes: Probes, evidence: Run) -> None:
    if probes.reduced is not None:
        names = (name for name, p, _ in probes.params if p is probes.first_param)
        evidence.reduced = next(names, ""), probes.reduced.series()


def _epochs_hashed(probes: Probes) -> list[list[BatchHash]]:
    return [] if probes.hashes is None else probes.hashes.epochs()


def _set(field: str, value: Callable[[Probes], Any]) -> Add:
    """A function that sets a field of an evidence."""
    return lambda probes, evidence: setattr(evidence, field, value(probes))


PARTS: Mapping[str, Add] = {  # what adds to an evidence, by the part that it reads
    "stuck": _set("stuck", lambda probes: probes.stuck.series()),
    "sizes": _set("sizes", lambda probes: probes.sizes.series()),
    "inputs": _add_inputs,
    "columns": _set("input_columns", lambda probes: [x.sqrt().tolist() for x in probes.columns]),
    "params": _add_params,
    "motion": _add_motion,
    "hashes": _add_hashes,
    "random": _add_random,
    "reduced": _add_reduced,
}


def _late_observed(probes: Probes) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Part of `Run.observed` that depends on numbers on the device, or on enough of them, by probe."""
    graph, tokens = probes.graph, probes.tokens
    yield "graph", "graph", lambda: graph is not None and not graph.hidden_by
    yield "penalty", "penalty", lambda: graph is not None and graph.has_penalty
    yield "targets", "targets", lambda: probes.run.measured(Targets).is_known
    known = probes.run.measured(Targets).classes
    yield "targets", "labels of a classifier", lambda: known(probes.graph_of_one) is not None
    yield "tokens", "indices of embeddings", lambda: tokens.has_indices
    yield "tokens", "tokens beside targets", lambda: tokens.has_compared
    yield "tokens", "tokens that are targets", tokens.relations
    yield "tokens", "masks of the tokens", lambda: any(x.seeing for x in tokens.relations())
    yield "tokens", "padding of the tokens", lambda: any(x.padding >= 0 for x in tokens.relations())
    yield "cleared", "cleared gradients", lambda: probes.cleared.has_found
    is_one = len(probes.optimizers) == 1
    yield "stale", "time before a backward", lambda: probes.stale.has_looked and is_one
    yield "lost_updates", "weights around a step", lambda: probes.lost_updates.has_looked
    yield "hashes", "order of two epochs", lambda: has_epochs(_epochs_hashed(probes))
    yield "sequences", "order of samples and steps", lambda: probes.sequences.has_compared
    yield "outside", "graph of the output", lambda: probes.outside.is_known(probes.n_steps)


def _tell_accumulation(probes: Probes, evidence: Run) -> None:
    if not probes.is_external:
        evidence.absent["accumulation"] = "GradientAccumulation divides the loss itself"
    elif probes.added.counts == {1}:
        evidence.absent["accumulation"] = "each step has the gradients of one backward"
    elif any(map(is_adaptive, probes.optimizers.values())):
        evidence.absent["accumulation"] = "the optimizer divides by the size of gradients"
    evidence.missing["divisor of the loss"] = "it is not known by what number the loss is divided"


def _tell_outside(probes: Probes, evidence: Run) -> None:
    if probes.outside.hidden_by:
        hidden = f"{probes.outside.hidden_by} hides a part of the graph of the output"
        evidence.missing["graph of the output"] = hidden


def _tell_tokens(probes: Probes, evidence: Run) -> None:
    """Adds reasons why the tokens of a language model are not checked."""
    tokens = probes.tokens
    operations = probes.run.measured(Operations)
    if operations.has_looked and operations.failure is None and not tokens.has_embeddings:
        no_embedding = "the model has no embedding"
        evidence.absent |= {"embeddings": no_embedding, "tokens": no_embedding}
    elif not tokens.is_open and not tokens.relations():
        evidence.absent["tokens"] = "the targets of the loss are not the tokens that the model embeds"
    elif not tokens.is_open:
        unknown = "the embedding of the tokens has no padding_idx, so it is not known what is padding"
        evidence.missing["padding of the tokens"] = unknown


REASONS: Mapping[str, Add] = {  # likewise, reasons why something was not seen, unless the part has failed
    "added": _tell_accumulation,
    "outside": _tell_outside,
    "tokens": _tell_tokens,
}


def _late_observations(probes: Probes) -> Iterator[tuple[str, Callable[[], Iterable[Observation]]]]:
    """Observations that are made at the end, by part."""
    yield "norms", lambda: probes.norms.observations(probes.n_batches)
    yield "tokens", lambda: probes.tokens.observe_indices()
    tokens = probes.tokens.relations
    yield "tokens", lambda: observe_tokens(tokens(), probes.graph_of_one, probes.has_recurrent)
    yield "lost_updates", lambda: probes.lost_updates.observations()
    if len(probes.optimizers) == 1:  # several may clear each other's gradients unseen
        yield "stale", lambda: probes.stale.observations()
    yield "cleared", lambda: probes.cleared.observations()
    if probes.observed.isdisjoint(("backward", "backward beside the model")):
        yield (
            "motion",
            lambda: probes.motion.observe_no_backward(probes.n_steps - probes.run.measured(Steps).n_alone),
        )
    yield (
        "motion",
        lambda: probes.motion.observations(
            probes.n_steps, probes.n_backward, probes.run.measured(Steps).n_given
        ),
    )
    yield "outside", lambda: probes.outside.observations(probes.n_steps)
    yield "sequences", lambda: probes.sequences.observations()
    yield "targets", lambda: probes.run.measured(Targets).observe_single_class(probes.graph_of_one)
    yield "hashes", lambda: observe_order(_epochs_hashed(probes), probes.loader)
