"""Collects evidence from the records of callbacks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hookcb.activations.callback import ActivationStats
from hookcb.activations.stats import LAYER_STATS
from hookcb.core.callback import Callback
from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.dispatcher import Dispatcher
from hookcb.diagnosis.faults.ranks.straggler import SlowRank
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.validations import Validation, Validations
from hookcb.diagnosis.reader import way_of
from hookcb.diagnosis.run import Absent, Layer, Run, Series, Skipped
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.outputs import OutputGradients
from hookcb.gradients.records import GradientRecords
from hookcb.gradients.stats import STEP_STATS
from hookcb.hooks.coverage import BY_CLOSURE
from hookcb.profiling.steps.timer import StepTimer
from hookcb.records.records import module_of
from hookcb.training.recorder import Recorder

OF_OTHERS = "each loss of the model is one of another model too, which another optimizer trains"


def recorded(cbs: Sequence[Callback], loop: Any) -> Run:
    """A run from what callbacks have recorded of a loop without `Diagnose`."""
    dispatcher = Dispatcher(run := Run(), (), 0.0)
    optimizers = [] if loop.opt is None else [loop.opt]
    frame = dispatcher.guarded("frame", Frame.of, loop.model, optimizers) or Frame()
    gather(cbs, frame, run, dispatcher)
    return run


def gather(cbs: Iterable[Callback], frame: Frame, evidence: Run, dispatcher: Dispatcher) -> None:
    """Adds to a run what the first callback of each kind has recorded; the dispatcher keeps failures."""
    guarded = dispatcher.guarded
    found: dict[type, Any] = {}
    for cb in cbs:
        for kind in (ActivationStats, GradientHealth, Recorder, StepTimer):
            if isinstance(cb, kind):
                found.setdefault(kind, cb)
    evidence.params, evidence.parts[Frame] = frame.params, frame
    for what, reason in frame.reasons.items():
        evidence.lack(reason, what)
    evidence.measured(Processes).lack(evidence)
    if frame.n_optimizers:
        evidence.sources.add("optimizers")
    if stats := found.get(ActivationStats):
        guarded("activations", _add_activations, evidence, stats, frame)
    if health := found.get(GradientHealth):
        guarded("gradients", lambda: _add_gradients(evidence, health.records))
    if recorder := found.get(Recorder):
        guarded("Validations", _add_validations, evidence, recorder)
        if not len(evidence.loss):
            guarded("curves", _add_losses, evidence, recorder)
    if evidence.is_by_closure:
        evidence.sources.discard("gradients")
        evidence.lack(Skipped(BY_CLOSURE), "gradients")
    guarded("ranks", _add_ranks, evidence, found.get(StepTimer))
    evidence.add_failures(dispatcher.run)


def _add_validations(evidence: Run, recorder: Recorder) -> None:
    known = evidence.measured(Validations)
    if known.found:
        return
    known.is_seen = known.is_one_scale = any("valid_loss" in row for row in recorder.rows)
    known.found = [
        Validation(end, float(row["valid_loss"]), float(row.get("train_loss", math.nan)))
        for row, end in zip(recorder.rows, recorder.ends, strict=False)
        if "valid_loss" in row
    ]


def _add_ranks(evidence: Run, timer: StepTimer | None) -> None:
    found = evidence.measured(SlowRank)
    if timer is not None and timer.records.ranks is not None:
        found.slowest = timer.records.ranks.slowest
    elif not found.is_watched:
        return evidence.lack(Absent("there are no ranks to compare"), "ranks")
    evidence.sources.add("ranks")
    return None


def note_unseen(evidence: Run, loop: Any) -> None:
    """Adds what was not seen of a loop that hookcb does not run."""
    for event, why in loop.coverage.missing.items():
        evidence.lack(Skipped(why), event)
    evidence.reader, facts = way_of(loop.way), loop.facts
    if facts.n_losses_of_others and not (facts.n_losses_found or facts.n_losses_reported):
        evidence.lack(Absent(OF_OTHERS), "loss", "graph", "targets")


def _add_source(evidence: Run, source: str, steps: Sequence[int]) -> None:
    evidence.sources.add(source)
    evidence.n_looked = max(evidence.n_looked, len(steps))
    evidence.n_batches = max(evidence.n_batches, 1 + max(steps, default=-1))


def _add_activations(evidence: Run, stats: ActivationStats, frame: Frame) -> None:
    steps, store = stats.steps(), stats.store_of("train")
    _add_source(evidence, "activations", steps)
    for path in stats.names:
        name = module_of(path)
        if name in evidence.layers and evidence.layers[name].stats.get("std"):
            continue  # the first of several outputs or calls counts
        about = frame.about.get(name, stats.outputs.get(path, ("", ()))[0])
        new = Layer(name, about.partition(" ")[0], about, len(evidence.layers))
        layer = evidence.layers.setdefault(name, new)
        for stat, values in zip(LAYER_STATS, store.series(path).T.tolist(), strict=False):
            layer.stats[stat] = Series.of(steps, values)
    if not stats.names and evidence.params:
        what = "no call of a layer was seen, as none is a submodule, or what calls the model is compiled"
        evidence.notes.insert(0, f"{what}; outputs are not inspected, gradients are")
    for place, layer in enumerate(evidence.layers.values()):
        layer.place = place
    for param in evidence.params.values():
        param.place_of_layer = _place_of(param.layer, evidence.layers)
    if stats.hooks is not None and steps:
        coverage = stats.coverage
        frame.silent = dict(coverage.silent)
        if coverage.added:
            names = join_names(map(as_layer, coverage.added), 3)
            evidence.notes.append(f"layers that came into the model later were not recorded: {names}")


def _place_of(name: str, layers: Mapping[str, Layer]) -> int | None:
    """Place of a layer, or of the first layer inside it if it has no hook and is not the model itself."""
    if name in layers:
        return layers[name].place
    inside = [layer.place for layer in layers.values() if name and layer.name.startswith(f"{name}.")]
    return min(inside, default=None)


def _add_gradients(evidence: Run, records: GradientRecords) -> None:
    steps, store, rows = records.steps(), records.store_of("train"), records.step_stats
    _add_source(evidence, "gradients", steps)
    unclipped = evidence.steps.get("clip_coef")  # if the loop clips before gradients are read
    evidence.steps = {stat: Series.of(steps, [row[stat] for row in rows]) for stat in STEP_STATS}
    if unclipped is not None:
        left, norms = dict(unclipped), evidence.steps["total_norm"]
        before = [x / coef if (coef := left.get(step, math.nan)) > 0 else x for step, x in norms]
        evidence.steps |= {"clip_coef": unclipped, "total_norm": Series(norms.steps, before)}
    if not len(evidence.lr):
        evidence.lr = evidence.steps["lr"]
    if evidence.steps["lr"].steps != steps:  # made without an optimizer; clipping was not seen
        evidence.steps["clip_coef"] = Series()
    was_made = [not row["skipped"] for row in rows]
    made_by = evidence.measured(Steps).made_by
    is_known = len(made_by) == len(steps) and len(set(made_by)) > 1
    stepped: list[int | None] = list(made_by) if is_known else [None] * len(steps)
    params = evidence.params
    for name in (name for name in records.names if name in params):
        columns = dict(zip(records.columns, store.series(name).T.tolist(), strict=False))
        columns["update_ratio"] = [
            x if made and (by is None or by == params[name].optimizer) else math.nan
            for x, made, by in zip(columns["update_ratio"], was_made, stepped, strict=True)
        ]
        params[name].stats = {stat: Series.of(steps, values) for stat, values in columns.items()}
    for name in params.keys() & set(records.without_grad):
        params[name].n_without = params[name].n_without or len(steps)
    for name in params.keys() & records.first_bad.keys():
        params[name].first_bad = records.first_bad[name][0]
    for name in params.keys() & set(records.not_optimized):
        params[name].is_optimized = False
    if records.output_stats is not None:
        _add_output_gradients(evidence, records.output_stats)
    if any(scale != 1 for _, scale in evidence.steps["scale"]):  # else the scaler has not skipped them
        evidence.measured(Steps).n_skipped = records.skipped
    elif len(evidence.steps["scale"]):
        evidence.lack(Absent("there is no GradScaler"), "scaler")
    evidence.n_steps = max(evidence.n_steps, len(steps))


def _add_output_gradients(evidence: Run, stats: OutputGradients) -> None:
    for path in stats.names:
        if (name := module_of(path)) in evidence.layers:
            series = Series.of(stats.steps(), stats.layer_series(path, "nonfinite"))
            evidence.layers[name].stats.setdefault("grad_nonfinite", series)


def _add_losses(evidence: Run, recorder: Recorder) -> None:
    losses = [float(x) if isinstance(x, torch.Tensor) else x for x in recorder.losses]
    if losses:
        evidence.sources.add("loss")
        evidence.loss = Series.of(range(len(losses)), losses)
        evidence.n_batches = max(evidence.n_batches, len(losses))
        rates = [float(x) for x in recorder.lrs]
        if len(rates) == len(losses):
            evidence.lr = Series.of(range(len(rates)), [x if math.isfinite(x) else math.nan for x in rates])
