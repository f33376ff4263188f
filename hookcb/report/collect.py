"""Reading what a page shows from a loop and its callbacks."""

import inspect
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hookcb.activations.records import ActivationRecords
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
from hookcb.diagnosis.measurements.largest_losses import LargestLosses
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.reader import Way, also, way_of
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.records import GradientRecords
from hookcb.hooks.modules import device_of, named_modules
from hookcb.profiling.memory.readings import MemoryRecords
from hookcb.profiling.steps.readings import StepRecords
from hookcb.records.content import MemoryUsed, ModuleRow, RanksCompared, Recorded, TimeSpent
from hookcb.records.recording import Recording, recordings_of, with_numbers
from hookcb.records.series import Series
from hookcb.report.data import PageData
from hookcb.report.page import Page
from hookcb.report.source_lines import line_of
from hookcb.report.text import outline_of

SHOWN_BY: dict[type[Recording], tuple[str, str]] = {  # what each section of a page needs
    ActivationRecords: ("outputs of layers", "ActivationStats"),
    GradientRecords: ("gradients", "GradientHealth"),
    StepRecords: ("times of steps", "StepTimer"),
    MemoryRecords: ("memory", "MemoryStats"),
}


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


def outline(loop: Any) -> str:
    """A loop in a few lines of HTML, for a notebook; reads its verdict if that inspects no batch for it."""
    cbs, cause = recorded_in(loop), None
    headline = "No verdict: no Diagnose is among the callbacks; diagnose() inspects a batch for one."
    if loop.is_external or any(isinstance(cb, Diagnose) for cb in cbs):
        try:
            verdict = loop.diagnose()
        except RuntimeError as error:  # nothing is recorded, or a watched model has been freed
            headline = f"No verdict: {error}."
        else:
            headline, cause = verdict.headline, verdict.primary
    return outline_of(headline, cause, f"{loop!r}", [name for name, _ in recordings_of(cbs)])


def collect(loop: Any, verdict: Verdict | None = None) -> PageData:
    """Everything that the callbacks of a learner or a watched loop have recorded, and the verdict on it.

    Args:
        loop: the learner or the watch.
        verdict: its verdict, by default what `loop.diagnose()` returns.
    """
    cbs = recorded_in(loop)
    evidence = _evidence(loop, cbs)
    data = of_records([own for _, own in recordings_of(cbs)], evidence)
    with suppress(RuntimeError):  # a watched model may have been freed
        data.modules = [ModuleRow(*row) for row in _modules(loop.model)]
    if data.ranks is None and loop.ranks.world > 1:
        told = ["Ranks were not compared; StepTimer() compares them."]
        losses = evidence.measured(Loss).of_ranks
        data.ranks = RanksCompared(loop.ranks.world, loop.ranks.rank, loss=losses, sentences=told)
    data.config = {title: rows for title, rows in _config(loop, cbs) if rows}
    try:
        verdict = loop.diagnose() if verdict is None else verdict  # a sick one is false
    except RuntimeError as error:  # nothing is recorded
        data.headline = f"No verdict: {error}."
    else:
        data.headline, data.verdict = verdict.headline, with_series(verdict, data)
        with suppress(RuntimeError):  # a watched model may have been freed
            _quote_layers(data.verdict["findings"], loop.model)
    return data


def of_records(records: Sequence[Recording], evidence: Run | None = None) -> PageData:
    """A page of what callbacks have recorded, without a verdict."""
    evidence = evidence or Run()
    data = PageData("", hookcb=version("hookcb"))
    data.written = datetime.now().astimezone().isoformat(timespec="seconds")
    data.run = {name: Series() for name in ("loss", "lr", "input_rms")}
    for own in reversed(records):  # the first of its kind is shown
        own.show_on(data)
    _add_evidence(data, evidence)
    seen = [evidence.loss, *(own for name, own in data.run.items() if name != "input_rms")]
    data.n_batches = max([evidence.n_batches, *(own.steps[-1] + 1 for own in seen if len(own))])
    has_gradients = any({"norm", "clipped_norm"} & own.stats.keys() for own in data.params.values())
    is_there = (data.layers, has_gradients, data.time, data.memory)
    missing = [kind for kind, own in zip(SHOWN_BY, is_there, strict=True) if not own]
    data.notes = [_how_to_record(*SHOWN_BY[kind], evidence.reader) for kind in missing]
    if "clipped_mean_norm" in data.run:
        data.notes.append("Not recorded: gradients before clipping.")
    return data


def _evidence(loop: Any, cbs: Sequence[Callback]) -> Run:
    """Evidence of the loop's `Diagnose`, or else from the records of its other callbacks."""
    diagnose, found = next((cb for cb in cbs if isinstance(cb, Diagnose)), None), Run()
    with suppress(RuntimeError):  # nothing is recorded, or a watched model has been freed
        if diagnose is not None:
            return diagnose.evidence()
        found = recorded(cbs, loop)
    found.reader = way_of(loop.way if loop.is_external else "learner")
    return found


def _how_to_record(what: str, callback: str, way: Way) -> str:
    return f"Not recorded: {what}{also('record', way).format(callback)}."


def _add_evidence(data: PageData, evidence: Run) -> None:
    """Adds what `Diagnose` has measured and no other callback has recorded."""
    _add_run(data, evidence)
    _add_layers(data, evidence)
    _add_costs(data, evidence)
    if data.ranks is not None:
        data.ranks.loss = evidence.measured(Loss).of_ranks


def _add_run(data: PageData, evidence: Run) -> None:
    for name, series in (("loss", evidence.loss), ("lr", evidence.lr)):
        data.run[name] = data.run[name] if len(data.run[name]) else series
    data.run["input_rms"] = evidence.measured(Inputs).rms
    data.samples = evidence.measured(LargestLosses).found
    coefs = evidence.steps.get("clip_coef", Series())
    if "clipped_mean_norm" in data.run and any(x < 1 for x in coefs.values):  # clipped before they were read
        data.run |= {"total_norm": evidence.steps["total_norm"], "clip_coef": coefs}
    loss = data.run["loss"]  # stays also if it is NaN from the first batch on
    data.run = with_numbers(data.run) | ({"loss": loss} if len(loss) else {})


def _add_layers(data: PageData, evidence: Run) -> None:
    for name, layer in evidence.layers.items():
        own = data.layers.setdefault(name, Recorded(name, layer.about))
        own.stats |= {stat: x for stat, x in with_numbers(layer.stats).items() if stat not in own.stats}
    data.layers = {name: own for name, own in data.layers.items() if own.stats}
    for name in data.params.keys() & evidence.params.keys():
        data.params[name].about = "×".join(map(str, evidence.params[name].shape))


def _add_costs(data: PageData, evidence: Run) -> None:
    curves, time, memory = evidence.measured(Curves), data.time or TimeSpent(), data.memory or MemoryUsed()
    time.layers = time.layers or {
        name: [seconds] for name, seconds in evidence.measured(LayerTimes).seconds.items()
    }
    if not time.phases and len(curves.batches):
        waits = dict(curves.waits)
        rest = [whole - waits.get(step, 0.0) for step, whole in curves.batches]
        time.phases = {"data": curves.waits, "all else": Series(curves.batches.steps, rest)}
    memory.used = curves.memory
    data.time = time if time.phases or time.layers else None
    data.memory = memory if memory.layers or len(memory.used) else None


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, str, str, int]]:
    for name, module in named_modules(model).items():
        own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
        yield name, plain_class(module).__name__, about(module), sum(p.numel() for p in own)


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
    """Commit of the current folder when it was first asked for, "" outside of a repository."""
    try:
        return _described(Path.cwd())
    except (OSError, subprocess.SubprocessError):
        return ""


@cache  # a page that follows a run is made again and again
def _described(folder: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=2, text=True)
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
    before = data.verdict["findings"] if data.verdict else ()
    quoted = {known["layer"]: known["source"] for known in before if known["layer"] and "source" in known}
    for finding, own in zip(state["findings"], verdict.findings, strict=True):
        check = FAULTS.get(own.code)
        finding.update(shown_by=_shown_by(finding, data), when=own.when, on_ranks=own.on_ranks)
        finding["is_exact"] = check is not None and check.exact
        finding |= {"source": quoted[own.layer]} if own.layer in quoted else {}
    return state


def _quote_layers(findings: Sequence[dict[str, Any]], model: torch.nn.Module) -> None:
    """Adds the line of the source that makes the layer of each finding, where it is known."""
    for finding in findings:
        layer = finding["layer"] or finding["param"].rpartition(".")[0]
        if layer and (line := line_of(model, layer)):
            finding["source"] = line._asdict()


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
