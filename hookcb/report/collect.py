"""Reading what a page shows from a loop and its callbacks."""

import inspect
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hookcb.activations.callback import ActivationStats
from hookcb.core.arguments import check_page
from hookcb.core.callback import Callback
from hookcb.core.torch_private import plain_class
from hookcb.diagnosis.callback import Diagnose, recorded_in
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.frame import about
from hookcb.diagnosis.gather import recorded
from hookcb.diagnosis.led import Led
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.reader import Way, also, way_of
from hookcb.diagnosis.run import Run, Series
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.records import GradientRecords
from hookcb.gradients.stats import STEP_STATS
from hookcb.hooks.modules import device_of, named_modules
from hookcb.processes.stragglers import OWN
from hookcb.profiling.callback import ProfilerCallback
from hookcb.profiling.memory.callback import MemoryStats
from hookcb.profiling.steps.timer import StepTimer
from hookcb.profiling.steps.times import SHOWN_PHASES
from hookcb.records.records import module_of
from hookcb.report.data import (
    MAX_RECORDS,
    HistogramOverTime,
    MemoryUsed,
    ModuleRow,
    PageData,
    RanksCompared,
    Recorded,
    SlowStep,
    TimeSpent,
)
from hookcb.report.page import Page
from hookcb.training.recorder import Recorder

C = TypeVar("C", bound=Callback)
NOT_METRICS = ("epoch", "time")
SELDOM = "abs_max"  # of gradients, not in each record
NOTHING_DONE = {"clip_coef": 1.0, "scale": 1.0, "skipped": 0.0}  # these are not shown
SHOWN_BY = (ActivationStats, GradientHealth, StepTimer, MemoryStats)  # what each section of a page needs
MEMORY_COLUMNS = ("kept_self", "param_bytes", "grad_bytes", "optimizer_bytes")


def make_page(loop: Any, path: str | Path | None) -> Page:
    """A page of what was recorded in a loop, written to `path` if that is given.

    Raises:
        ValueError: If the name of the file does not end in .html.
        OSError: If the file cannot be written.
    """
    if path is not None:
        check_page(path)  # before it takes time
    page = Page(collect(loop))
    if path is not None:
        page.save(path)
    return page


def collect(loop: Any, verdict: Verdict | None = None) -> PageData:
    """Everything that the callbacks of a learner or a watched loop have recorded, and the verdict on it.

    Args:
        loop: the learner or the watch.
        verdict: its verdict, by default what `loop.diagnose()` returns.
    """
    cbs = recorded_in(loop)
    evidence = _evidence(loop, cbs)
    data = of_records(cbs, evidence)
    with suppress(RuntimeError):  # a watched model may have been freed
        data.modules = [ModuleRow(*row) for row in _modules(loop.model)]
    data.ranks = _ranks(loop, cbs, evidence)
    data.config = {title: rows for title, rows in _config(loop, cbs) if rows}
    try:
        verdict = loop.diagnose() if verdict is None else verdict  # a sick one is false
    except RuntimeError as error:  # nothing is recorded
        data.headline = f"No verdict: {error}."
    else:
        data.headline, data.verdict = verdict.headline, with_series(verdict, data)
    return data


def of_records(cbs: Sequence[Callback], evidence: Run | None = None) -> PageData:
    """A page of what callbacks have recorded, without a verdict."""
    evidence = evidence or Run()
    data = PageData("", hookcb=version("hookcb"))
    data.written = datetime.now().astimezone().isoformat(timespec="seconds")
    data.run, data.epochs = _run(cbs, evidence), _epochs(cbs)
    data.layers, data.params = _layers(cbs, evidence), _params(cbs, evidence)
    seen = [evidence.loss, *(own for name, own in data.run.items() if name != "input_rms")]
    data.n_batches = max([evidence.n_batches, *(own.steps[-1] + 1 for own in seen if len(own))])
    data.time, data.memory = _time(cbs, evidence), _memory(cbs, evidence)
    data.notes = [_how_to_record(kind, evidence.reader) for kind in SHOWN_BY if _first(cbs, kind) is None]
    if (health := _first(cbs, GradientHealth)) is not None and health.records.is_clipped:
        data.notes.append("Not recorded: gradients before clipping.")
    return data


def _evidence(loop: Any, cbs: Sequence[Callback]) -> Run:
    """Evidence of the loop's `Diagnose`, or else from the records of its other callbacks."""
    diagnose, found = _first(cbs, Diagnose), Run()
    with suppress(RuntimeError):  # nothing is recorded, or a watched model has been freed
        if diagnose is not None:
            return diagnose.evidence()
        found = recorded(cbs, loop)
    found.reader = way_of(loop.way if loop.is_external else "learner")
    return found


def _first(cbs: Iterable[Callback], kind: type[C]) -> C | None:
    return next((cb for cb in cbs if isinstance(cb, kind)), None)


def _how_to_record(kind: type[Callback], way: Way) -> str:
    what = {
        ActivationStats: "outputs of layers",
        GradientHealth: "gradients",
        StepTimer: "times of steps",
        MemoryStats: "memory",
    }
    return f"Not recorded: {what[kind]}{also('record', way).format(kind.__name__)}."


# ---- numbers


def _run(cbs: Iterable[Callback], evidence: Run) -> dict[str, Series]:
    """Series of the whole run, with what is not finite."""
    recorder, health = _first(cbs, Recorder), _first(cbs, GradientHealth)
    found = {"loss": evidence.loss, "lr": evidence.lr, "input_rms": evidence.measured(Inputs).rms}
    if recorder is not None and recorder.losses:
        steps = list(range(len(recorder.losses)))
        found |= {"loss": Series(steps, recorder.losses), "lr": Series(steps, recorder.lrs)}
    if health is not None:
        steps = health.steps()
        found |= {stat: Series(steps, health.step_series(stat)) for stat in STEP_STATS if stat not in found}
        for stat, nothing in NOTHING_DONE.items():
            if all(x == nothing for x in found[stat].values if x == x):
                del found[stat]
        if "clip_coef" not in found:
            del found["clipped_total_norm"]
        if health.records.is_clipped:
            found |= _clipped(found.pop("total_norm"), found.pop("mean_norm"), evidence)
    return {name: series for name, series in found.items() if _has_numbers(series)}


def _clipped(total: Series, mean: Series, evidence: Run) -> dict[str, Series]:
    """Norms of gradients that the loop has clipped before they were read, and those before if measured."""
    coefs = evidence.steps.get("clip_coef", Series())
    known = any(x < 1 for x in coefs.values)
    before = {"total_norm": evidence.steps["total_norm"], "clip_coef": coefs} if known else {}
    return {"clipped_total_norm": total, "clipped_mean_norm": mean, **before}


def _has_numbers(series: Series) -> bool:
    return any(x == x for x in series.values)


def _epochs(cbs: Iterable[Callback]) -> dict[str, Series]:
    """Numbers after each epoch, at the last training batch of it."""
    found: dict[str, Series] = {}
    if (recorder := _first(cbs, Recorder)) is not None:
        for end, row in zip(recorder.ends, recorder.rows, strict=False):
            for name, x in row.items():
                if name not in NOT_METRICS and isinstance(x, int | float):
                    found.setdefault(name, Series()).add(max(end - 1, 0), float(x))
    return found


def _layers(cbs: Iterable[Callback], evidence: Run) -> dict[str, Recorded]:
    """Recorded outputs, with what `Diagnose` alone measures."""
    found: dict[str, Recorded] = {}
    if (stats := _first(cbs, ActivationStats)) is not None:
        steps = stats.steps()
        for path in stats.names:
            kind, shape = stats.outputs.get(path, ("", ()))
            found[path] = Recorded(module_of(path), f"{kind} {tuple(shape)}", _series(stats, path, steps))
            if stats.records.with_hist:
                found[path].hist = _histogram(stats, path, steps)
    for name, layer in evidence.layers.items():
        own = found.setdefault(name, Recorded(name, layer.about))
        own.stats |= {stat: x for stat, x in layer.stats.items() if stat not in own.stats and _has_numbers(x)}
    return {name: own for name, own in found.items() if own.stats}


def _series(
    records: Any, path: str, steps: list[int], stats: Sequence[str] | None = None
) -> dict[str, Series]:
    """Statistics of a layer or parameter, by default all, without the records in which it was not called."""
    stats = records.columns if stats is None else stats
    values = records.store_of("train").series(path)[:, [records.columns.index(stat) for stat in stats]]
    rows = _picked(values, MAX_RECORDS)
    kept = [steps[i] for i in rows.tolist()]
    columns = zip(stats, values[rows].T.tolist(), strict=True)
    found = {stat: Series(kept, column) for stat, column in columns}
    return {stat: series for stat, series in found.items() if _has_numbers(series)}


def _gradient_series(records: GradientRecords, name: str, steps: list[int]) -> dict[str, Series]:
    """All statistics of a parameter; those that some records lack without these."""
    found = _series(records, name, steps, [stat for stat in records.columns if stat != SELDOM])
    values, rows = records.layer_series(name, SELDOM), records.detailed(name)
    rows = rows[:: -(-len(rows) // MAX_RECORDS) or 1]
    known = Series([steps[i] for i in rows], [values[i] for i in rows])
    return found | ({SELDOM: known} if _has_numbers(known) else {})


def _picked(values: Tensor, most: int) -> Tensor:
    """Places of about `most` rows, none of them all NaN: one of each stretch, if possible not finite."""
    places = values.isnan().all(1).logical_not().nonzero()[:, 0]
    stride = -(-len(places) // most)
    if stride < 2:
        return places
    known = values[:, values.isfinite().any(0)]
    is_bad = known[places].isfinite().all(1).logical_not()
    stretches = zip(torch.split(places, stride), torch.split(is_bad.int(), stride), strict=True)
    return torch.stack([own[bad.argmax()] for own, bad in stretches])


def _histogram(stats: ActivationStats, path: str, steps: list[int]) -> HistogramOverTime:
    counts, edges = stats.records.shown_hist(path)
    rows = _picked(counts, MAX_RECORDS // 4)
    kept = [steps[i] for i in rows.tolist()]
    return HistogramOverTime(edges.tolist(), [Series(kept, row) for row in counts[rows].T.tolist()])


def _params(cbs: Iterable[Callback], evidence: Run) -> dict[str, Recorded]:
    if (health := _first(cbs, GradientHealth)) is None:
        return {}
    steps, known = health.steps(), evidence.params
    return {
        name: Recorded(
            name.rpartition(".")[0],
            "×".join(map(str, known[name].shape)) if name in known else "",
            _without_copies(_gradient_series(health.records, name, steps), health.records.is_clipped),
        )
        for name in health.names
    }


def _without_copies(stats: dict[str, Series], is_clipped: bool) -> dict[str, Series]:
    """Statistics without those that follow from others, and norms that were read after clipping named so."""
    copies = {"rms"}  # the norm, divided by a constant
    if is_clipped and "norm" in stats:
        stats["clipped_norm"] = stats.pop("norm")
    elif str(stats.get("clipped_norm")) == str(stats.get("norm")):
        copies.add("clipped_norm")
    return {stat: series for stat, series in stats.items() if stat not in copies}


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, str, str, int]]:
    for name, module in named_modules(model).items():
        own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
        yield name, plain_class(module).__name__, about(module), sum(p.numel() for p in own)


# ---- time, memory, ranks


def _time(cbs: Iterable[Callback], evidence: Run) -> TimeSpent | None:
    timer, profiler = _first(cbs, StepTimer), _first(cbs, ProfilerCallback)
    found = TimeSpent(
        layers={name: [seconds] for name, seconds in evidence.measured(LayerTimes).seconds.items()}
    )
    if profiler is not None:
        with suppress(RuntimeError):  # nothing was profiled
            found.layers = {
                row.name: [row.forward_self, row.backward_self or 0.0] for row in profiler.layers()
            }
    if timer is not None and (times := timer.times):
        steps = [t.step for t in times]
        phases = {phase: Series(steps, [getattr(t, phase) for t in times]) for phase in SHOWN_PHASES}
        found.phases = {phase: series for phase, series in phases.items() if any(series.values)}
        found.slow = [
            SlowStep(x.step, x.seconds, x.seconds / x.ratio, x.phase, "; ".join(x.notes))
            for x in timer.outliers()
        ]
        found.sentences = [line for line in timer.report().lines if not line.startswith("- ")]
    elif len((curves := evidence.measured(Curves)).batches):
        waits = dict(curves.waits)
        rest = [whole - waits.get(step, 0.0) for step, whole in curves.batches]
        found.phases = {"data": curves.waits, "all else": Series(curves.batches.steps, rest)}
    return found if found.phases or found.layers else None


def _memory(cbs: Iterable[Callback], evidence: Run) -> MemoryUsed | None:
    stats = _first(cbs, MemoryStats)
    found = MemoryUsed(used=evidence.measured(Curves).memory)
    with suppress(RuntimeError):  # no batch was watched
        if stats is not None:
            found.columns = ["kept", "parameters", "gradients", "optimizer"]
            found.layers = {
                row.name: [float(getattr(row, column)) for column in MEMORY_COLUMNS] for row in stats.layers()
            }
            lines = "\n".join(stats.report().lines)  # what is indented belongs to the line above
            found.sentences = lines.replace(":\n  ", ": ").replace("\n  ", "; ").split("\n")
    return found if found.layers or len(found.used) else None


def _ranks(loop: Any, cbs: Iterable[Callback], evidence: Run) -> RanksCompared | None:
    timer = _first(cbs, StepTimer)
    times = None if timer is None else timer.records.ranks
    if loop.ranks.world == 1 and times is None:
        return None
    losses = evidence.measured(Loss).of_ranks
    if times is None:
        sentences = ["Ranks were not compared; StepTimer() compares them."]
        return RanksCompared(loop.ranks.world, loop.ranks.rank, loss=losses, sentences=sentences)
    found = RanksCompared(len(times.hosts), times.rank, list(times.hosts), losses)
    steps = [n - 1 for n, _ in times.latest]
    by_rank = zip(*(own for _, own in times.latest), strict=True)
    found.phases = {OWN: [Series(steps, list(seconds)) for seconds in by_rank]}
    found.sentences = times.lines()
    return found


# ---- configuration


def _config(loop: Any, cbs: Iterable[Callback]) -> Iterator[tuple[str, list[list[str]]]]:
    model, opt = None, loop.opt
    with suppress(RuntimeError):  # a watched model may have been freed
        model = loop.model
    yield "Run", [[key, value] for key, value in _environment(model) if value]
    if model is not None:
        params = [p for p in model.parameters() if not is_lazy(p)]
        n, trained = sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)
        yield "Model", [["type", type(model).__name__], ["parameters", f"{n:,}"], ["trained", f"{trained:,}"]]
    groups = [] if opt is None else opt.param_groups
    for i, group in enumerate(groups):
        title = type(opt).__name__ if len(groups) == 1 else f"{type(opt).__name__}, group {i}"
        size = sum(p.numel() for p in group["params"] if not is_lazy(p))
        rest = [[key, f"{x}"[:200]] for key, x in group.items() if key != "params"]
        yield title, [["parameters", f"{size:,}"], *rest]
    own = [cb for cb in cbs if not isinstance(cb, Led)]
    yield "Callbacks", [[type(cb).__name__, ", ".join(_arguments(cb))] for cb in own]


def _environment(model: torch.nn.Module | None) -> Iterator[tuple[str, str]]:
    yield "command", " ".join([sys.executable.rpartition("/")[2], *sys.argv])[:500]
    yield "git commit", _commit()
    yield "seed of torch", str(torch.initial_seed())
    yield "device", "" if model is None else _device(device_of(model))
    yield "machine", f"{platform.node()}, {platform.platform()}"
    yield "Python", platform.python_version()
    yield "torch", torch.__version__


def _device(device: torch.device) -> str:
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _commit() -> str:
    """Commit of the current folder, "" outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            timeout=2,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _arguments(cb: Callback) -> Iterator[str]:
    """Arguments that differ from their defaults, as far as the callback keeps them."""
    for name, parameter in inspect.signature(type(cb)).parameters.items():
        value = vars(cb).get(name, parameter.default)
        if name != "name" and value is not parameter.default and repr(value) != repr(parameter.default):
            yield f"{name}={value!r:.80}"


# ---- the verdict


def with_series(verdict: Verdict, data: PageData) -> dict[str, Any]:
    """The verdict as plain values; each finding with the series that shows it, its steps and its ranks."""
    state = verdict.to_dict()
    for finding, own in zip(state["findings"], verdict.findings, strict=True):
        finding.update(shown_by=_shown_by(finding, data), when=own.when, on_ranks=own.on_ranks)
    return state


def _shown_by(finding: dict[str, Any], data: PageData) -> dict[str, Any] | None:
    check = FAULTS.get(finding["code"])
    if check is None or not check.shown_by:
        return None
    of, _, stat = check.shown_by.partition(".")
    limit = finding["limit"] if check.draws_limit else None
    if of == "run":
        return {"of": of, "name": stat, "stat": "", "limit": limit} if stat in data.run else None
    for group, name, own in _places(finding, of, data):
        if shown := next((x for x in (stat, f"clipped_{stat}") if x in own.stats), None):
            return {"of": group, "name": name, "stat": shown, "limit": limit}
    return None


def _places(finding: dict[str, Any], of: str, data: PageData) -> Iterator[tuple[str, str, Recorded]]:
    """Records that a finding may be about, its own first, then those of its module, weights first."""
    layer = finding["layer"] or finding["param"].rpartition(".")[0]
    for group, records in (("params", data.params), ("layers", data.layers)):
        names = sorted(
            (name for name, own in records.items() if own.module == layer or name == finding["param"]),
            key=lambda name: (name != finding["param"], not name.endswith("weight")),
        )
        if group == of or finding["code"].startswith("nonfinite"):
            yield from ((group, name, records[name]) for name in names)
