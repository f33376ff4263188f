"""Collects evidence from the probes of Diagnose."""

from collections.abc import Iterator

from hookcb.core.optim import is_adaptive
from hookcb.diagnosis.evidence import Evidence, Observation, Series
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.probes.attention import MIN_BATCHES, observe_attention, observe_blind
from hookcb.diagnosis.probes.batch import observe_inputs
from hookcb.diagnosis.probes.dropout import observe_dropout_in_eval
from hookcb.diagnosis.probes.samples import BatchHash, has_epochs, observe_order
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.probes.tokens import Relation, observe_tokens
from hookcb.gradients.hand_steps import StepByHand

TOKENS = (  # in `Evidence.observed`
    "indices of embeddings",
    "tokens that are targets",
    "masks of the tokens",
    "padding of the tokens",
)


def probed_evidence(probes: Probes, frame: Frame) -> Evidence:
    """Evidence that the probes have recorded so far; see `gather` for that of callbacks."""
    evidence = Evidence(sources=set(probes.sources), params=frame.params)
    # a batch after its backward may be the last one; an external loop does not report its end
    evidence.n_batches = probes.n_batches + (probes.under_way is not None)
    evidence.n_looked = probes.n_looked + bool(probes.under_way)
    evidence.loss, evidence.lr = probes.curves.loss.series(), probes.curves.lr.series()
    places = {key: i for i, key in enumerate(probes.optimizers)}
    evidence.losses = {places[key]: curve.series() for key, curve in probes.curves.losses.items()}
    if any(p.maximizes for p in evidence.params.values()):
        evidence.missing["loss"] = "the optimizer maximizes the loss"
    elif len(evidence.loss):
        evidence.sources.add("loss")
    evidence.loss_kind = probes.graph.sure_kind if probes.graph else ""
    evidence.is_loss_of_others, evidence.n_in_loss = probes.is_loss_of_others, probes.n_in_loss
    evidence.guess = probes.guess
    evidence.penalty, evidence.stuck = probes.penalty.series(), probes.stuck.series()
    probes.guarded(_add_losses_of_targets, probes, evidence)
    evidence.waits, evidence.batches = probes.curves.wait.series(), probes.curves.length.series()
    evidence.memory, evidence.sizes = probes.curves.memory.series(), probes.sizes.series()
    _add_sources(probes, evidence)
    evidence.n_steps = probes.n_steps
    evidence.is_by_hand = any(isinstance(opt, StepByHand) for opt in probes.optimizers.values())
    if evidence.is_by_hand:
        evidence.notes.append(
            "the loop updates its weights without an optimizer, at an unknown learning rate"
        )
    probes.layers.add_to(evidence.layers, frame.about)
    evidence.layer_seconds, evidence.layer_work = probes.layer_times.seconds(), dict(probes.layer_times.work)
    evidence.hook_seconds = probes.layer_times.hook_seconds()
    evidence.backward_seconds = probes.backward_times.seconds()
    steps = [info.step for info in probes.inputs.infos]
    rows = probes.inputs.series("x").tolist()
    evidence.input_std = Series.of(steps, [row[0] for row in rows])
    evidence.input_rms = Series.of(steps, [row[1] for row in rows])
    evidence.input_columns = [squares.sqrt().tolist() for squares in probes.columns]
    _add_params(probes, evidence)
    _add_ranks(probes, evidence)
    evidence.stepped = [places[key] for key in probes.stepped]
    evidence.observed = probes.observed | _late_observed(probes, rows)
    evidence.notes += probes.notes
    evidence.observations = [*probes.observations, *_late_observations(probes, steps, rows)]
    return evidence


def _add_params(probes: Probes, evidence: Evidence) -> None:
    """Adds which parameters had a gradient, which of their units are dead, and which have moved."""
    for name, n in probes.n_without.items():
        if name in evidence.params:
            evidence.params[name].n_without = n
    for name, dead in probes.dead.dead_shares().items():
        if name in evidence.params:
            param = evidence.params[name]
            param.dead, param.never_alive, param.dead_since = dead.lately, dead.never, dead.since
            param.n_looked, param.n_examples = dead.n_looked, dead.n_examples
    for name, moved in probes.motion.moved().items():
        if name in evidence.params:
            evidence.params[name].has_moved = moved


def _add_ranks(probes: Probes, evidence: Evidence) -> None:
    """Adds what ranks compare."""
    evidence.world = probes.world
    if probes.hashes is not None and probes.random is not None and probes.reduced is not None:
        evidence.batch_hashes = list(map(list, _epochs_hashed(probes)))
        evidence.random_states = probes.random.drawn()
        names = (name for name, p, _ in probes.params if p is probes.first_param)
        evidence.reduced = next(names, ""), probes.reduced.series()
    evidence.missing["order of two epochs"] = "fewer than two epochs of four batches were trained"


def _epochs_hashed(probes: Probes) -> list[list[BatchHash]]:
    return [] if probes.hashes is None else probes.hashes.epochs()


def _add_losses_of_targets(probes: Probes, evidence: Evidence) -> None:
    if probes.graph is not None and (len(evidence.penalty) or not probes.graph.has_penalty):
        evidence.constant, evidence.perfect, evidence.noise = probes.targets.losses(probes.graph)
        evidence.n_targets = probes.targets.n_batches


def _late_observed(probes: Probes, rows: list[list[float]]) -> set[str]:
    """Part of `Evidence.observed` that depends on numbers on the device, or on enough of them."""
    seen = {
        "graph": probes.graph is not None and not probes.graph.hidden_by,
        "penalty": probes.graph is not None and probes.graph.has_penalty,
        "targets": probes.targets.is_known,
        "labels of a classifier": probes.targets.classes(probes.graph_of_one) is not None,
        "samples that differ": any(row[-1] > 0 for row in rows),
        "attention": any(len(shares) >= MIN_BATCHES for shares in probes.ops.shares.values()),
        "indices of embeddings": probes.ops.tokens.has_indices,
        "sums in the graph": probes.tables.is_known,
        "tokens beside targets": probes.ops.tokens.has_compared,
        "tokens that are targets": bool(_tokens(probes)),
        "masks of the tokens": any(x.seeing for x in _tokens(probes)),
        "padding of the tokens": any(x.padding >= 0 for x in _tokens(probes)),
        "cleared gradients": probes.cleared.has_found,
        "time before a backward": probes.stale.has_looked and len(probes.optimizers) == 1,
        "weights around a step": probes.lost_updates.has_looked,
        "order of two epochs": has_epochs(_epochs_hashed(probes)),
        "graphs of 60 losses": probes.retained.has_looked,
        "order of samples and steps": probes.layers.sequences.has_compared,
        "graph of the output": probes.outside.is_known(probes.n_steps),
    }
    return {name for name, is_there in seen.items() if is_there}


def _tokens(probes: Probes) -> list[Relation]:
    """Embedded tokens that are also the targets, once enough batches were compared."""
    return probes.ops.tokens.relations()


def _add_sources(probes: Probes, evidence: Evidence) -> None:
    """Adds the sources of evidence, and reasons for those that are missing."""
    evidence.sources |= {"memory"} if len(evidence.memory) else set()
    evidence.missing["memory"] = "memory in use is unknown on this system"
    evidence.missing["model"] = "inspecting the model failed"
    if probes.graph is not None:
        evidence.missing["graph"] = probes.graph.why_hidden
        evidence.sources |= set() if probes.graph.why_hidden else {"graph"}
    if probes.layers.n_copies:
        copies = "layers ran as copies, as nn.DataParallel makes them, which were not inspected"
        evidence.notes.append(copies)
        evidence.partial |= {"activations": copies}
    if probes.ops.is_left_out:
        compiled = "the model is compiled, which hides its attention and embeddings"
        evidence.missing |= dict.fromkeys(("attention", *TOKENS), compiled)
    elif probes.ops.has_looked and not probes.ops.shares:
        evidence.absent["attention"] = "the model has no attention operations"
        evidence.missing["masks of the tokens"] = "no attention was seen, so masks were not checked"
    if not probes.is_external:
        evidence.absent["accumulation"] = "GradientAccumulation divides the loss itself"
    elif probes.added.counts == {1}:
        evidence.absent["accumulation"] = "each step has the gradients of one backward"
    elif any(map(is_adaptive, probes.optimizers.values())):
        evidence.absent["accumulation"] = "the optimizer divides by the size of gradients"
    if probes.outside.hidden_by:
        hidden = f"{probes.outside.hidden_by} hides a part of the graph of the output"
        evidence.missing["graph of the output"] = hidden
    evidence.missing["divisor of the loss"] = "it is not known by what number the loss is divided"
    _add_tokens(probes, evidence)


def _add_tokens(probes: Probes, evidence: Evidence) -> None:
    """Adds reasons why the tokens of a language model are not checked."""
    tokens = probes.ops.tokens
    if probes.ops.has_looked and not tokens.has_embeddings:
        no_embedding = "the model has no embedding"
        evidence.absent |= {"embeddings": no_embedding, "tokens": no_embedding}
    elif not tokens.is_open and not _tokens(probes):
        evidence.absent["tokens"] = "the targets of the loss are not the tokens that the model embeds"
    elif not tokens.is_open:
        unknown = "the embedding of the tokens has no padding_idx, so it is not known what is padding"
        evidence.missing["padding of the tokens"] = unknown


def _late_observations(probes: Probes, steps: list[int], rows: list[list[float]]) -> Iterator[Observation]:
    seen = {observation.code for observation in probes.observations}
    yield from (x for x in observe_inputs(steps, rows, probes.has_origin) if x.code not in seen)
    yield from probes.norms.observations(probes.n_batches)
    yield from observe_attention(probes.ops.shares)
    yield from observe_blind(probes.ops.blind)
    yield from observe_dropout_in_eval(probes.ops.dropping)
    yield from probes.tables.observations()
    yield from probes.ops.tokens.observe_indices()
    yield from observe_tokens(_tokens(probes), probes.graph_of_one, probes.has_recurrent)
    yield from probes.lost_updates.observations()
    if len(probes.optimizers) == 1:  # several may clear each other's gradients unseen
        yield from probes.stale.observations()
    yield from probes.cleared.observations()
    yield from probes.motion.observations(probes.n_steps, probes.n_backward)
    yield from probes.outside.observations(probes.n_steps)
    yield from probes.layers.sequences.observations()
    yield from probes.retained.observations()
    yield from probes.targets.observe_single_class(probes.graph_of_one)
    yield from observe_order(_epochs_hashed(probes), probes.loader)
