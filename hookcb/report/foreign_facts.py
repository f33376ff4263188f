"""Facts of weights and curves in files that other programs have written."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import Tensor

from hookcb.core.text import join_names
from hookcb.diagnosis.judge import RANK
from hookcb.diagnosis.rules import CONFIDENCE, finite, series_of, slope
from hookcb.diagnosis.verdict import STYLES, Severity
from hookcb.records.series import Series
from hookcb.report.data import PageData
from hookcb.report.foreign import (
    SAFE,
    is_of_torch,
    is_ours,
    read_events,
    read_index,
    read_table,
    read_weights,
)
from hookcb.training.checkpoint.state import checkpoints_in

TABLES = (".csv", ".tsv")
EVENTS = "*tfevents*"
OF_INDEX = ".index.json"
IN_FOLDERS = (
    EVENTS,
    "results.csv",
    "metrics.csv",
    f"*.safetensors{OF_INDEX}",
    f"*.bin{OF_INDEX}",
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
)

MIN_SAME = 5  # rows of a curve that never moves
MAX_TOLD = 12  # weights or curves that are told one by one
LOSS = re.compile(r"loss|error|perplexity|(^|[^a-z])(nll|mse|mae|rmse|ppl)([^a-z]|$)", re.I)
METRIC = re.compile(r"acc|map|f1|auc|precision|recall|iou|dice|bleu|rouge|psnr|ssim|r2", re.I)
VALID = re.compile(r"(^|[/_. -])(val|valid|validation|eval|test|dev)(?=$|[/_. -])", re.I)
TRAIN = re.compile(r"(^|[/_. -])(train|training)(?=$|[/_. -])|_(epoch|step)$", re.I)
INTEGERS = "num_batches_tracked"
Told = tuple[Severity, str]


@dataclass
class FileFacts:
    """Facts of a file, as text for a terminal, and as a page.

    Attributes:
        title: the file.
        summary: what it has.
        told: severities and sentences, the worst first.
        lines: further sentences: what each curve shows.
        curves: curves, for the page.
    """

    title: str
    summary: str
    told: list[Told] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    curves: dict[str, Series] = field(default_factory=dict)

    @property
    def has_error(self) -> bool:
        """Whether it has a NaN or an infinite number where none should be."""
        return any(severity == "error" for severity, _ in self.told)

    @property
    def headline(self) -> str:
        """The worst of what was found, in one line."""
        n = len([1 for severity, _ in self.told if severity != "info"])
        if not n:
            return f"nothing wrong was found: {self.summary}"
        severity, text = self.told[0]
        return f"{severity.upper()}  {text}{f' (and {n - 1} more)' if n > 1 else ''}"

    def page(self) -> PageData:
        """The page of these."""
        data = PageData(self.headline, title=self.title, epochs=self.curves)
        data.n_batches = max((x.steps[-1] + 1 for x in self.curves.values()), default=0)
        rows = [["it has", self.summary], *([severity, text] for severity, text in self.told)]
        data.config = {"File": rows}
        return data

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble((self.title, "bold"), f": {self.summary}")
        for severity, text in self.told:
            yield Text.assemble((severity.upper().ljust(7), STYLES[severity]), " ", text)
        yield from map(Text, self.lines)
        if not any(severity != "info" for severity, _ in self.told):
            yield Text("Nothing wrong was found.")


def facts_of(path: Path) -> FileFacts | None:
    """Facts of a file or folder that another program has written; None if it is one of hookcb, or missing.

    Raises:
        ValueError: If it is damaged, has nothing to show, or is of no known kind.
        ModuleNotFoundError: If a package that reads it is not installed.
    """
    if path.suffix == ".html" or not path.exists():
        return None
    if path.is_dir():
        return _of_folder(path)
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    if path.match(EVENTS):
        return of_curves(path, read_events(path))
    if path.name.endswith(OF_INDEX):
        return of_weights(path, *read_index(path))
    if path.suffix.lower() in TABLES:
        return of_curves(path, *read_table(path))
    if path.suffix != SAFE and not is_of_torch(path):
        files = ".pt, .pth, .bin, .ckpt, .safetensors, .index.json"
        known = f"weights ({files}), a table (.csv), or events of TensorBoard"
        raise ValueError(f"{path} is of no known kind; give a page or records of hookcb, {known}")
    return None if path.suffix != SAFE and is_ours(path) else of_weights(path, [path])


def _of_folder(folder: Path) -> FileFacts | None:
    if checkpoints_in(folder) or folder in checkpoints_in(folder.parent):
        return None
    for pattern in IN_FOLDERS:
        found = sorted(x for x in folder.glob(pattern) if x.is_file() and not x.name.startswith("optimizer"))
        if not found:
            continue
        if pattern == EVENTS:
            return of_curves(folder, read_events(folder))
        if pattern.endswith(OF_INDEX) or found[0].suffix in TABLES:
            return facts_of(found[0])
        return of_weights(folder, found)
    return None


# ---- weights


@dataclass
class _Weights:
    """Counts of all tensors of a file."""

    n: int = 0
    n_elements: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    nonfinite: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    constant: list[str] = field(default_factory=list)
    means: dict[str, bool] = field(default_factory=dict)  # whether running statistics are as at the beginning
    unseen: list[str] = field(default_factory=list)  # norms that have seen no batch

    def add(self, name: str, x: Tensor, is_state: bool) -> None:
        self.n, self.n_elements = self.n + 1, self.n_elements + x.numel()
        if x.is_quantized or x.layout is not torch.strided or x.is_meta:
            return
        if name.endswith(INTEGERS) and x.numel() == 1 and x.item() == 0:
            self.unseen.append(name.rpartition(".")[0])
        if not (x.is_floating_point() or x.is_complex()) or not x.numel():
            return
        if x.element_size() < 2:  # float8, for which few functions are there
            x = x.float()
        self._count_nonfinite(name, x)
        if is_state:
            return
        self.dtypes[str(x.dtype).removeprefix("torch.")] += 1
        layer, _, own = name.rpartition(".")
        if own in ("running_mean", "running_var"):
            is_begun = bool((x == (own == "running_var")).all())
            self.means[layer] = self.means.get(layer, True) and is_begun
        elif x.ndim > 1 and x.numel() > 1 and bool((x == x.reshape(-1)[0]).all()):
            first = x.reshape(-1)[0].item()
            self.constant.append(f"{name} ({first:g})") if first else self.zeros.append(name)

    def _count_nonfinite(self, name: str, x: Tensor) -> None:
        n_nan = int(x.isnan().sum())
        n_inf = int(x.isinf().sum())
        if n_inf and not n_nan and not x.is_complex() and bool(((x == 0) | (x == -math.inf)).all()):
            return  # a mask that is added to scores
        what = [f"{n:,} {word}" for n, word in ((n_nan, "NaN"), (n_inf, "inf")) if n]
        if what:
            self.nonfinite.append(f"{name} has {' and '.join(what)} in {x.numel():,} elements")


def of_weights(path: Path, files: Sequence[Path], index: Mapping[str, str] = {}) -> FileFacts:
    """Facts of weights.

    Args:
        path: the file or folder.
        files: files with weights, which are read tensor by tensor.
        index: the name of the file that has each tensor, by an index of Hugging Face.
    """
    counts, names = _Weights(), dict[str, set[str]]()  # of tensors, by file
    for file in files:
        for name, x, is_state in read_weights(file):
            counts.add(name, x, is_state)
            names.setdefault(file.name, set()).add(name)
    of = f" in {len(names)} files" if len(names) > 1 else ""
    kinds = join_names([f"{n} {kind}" for kind, n in counts.dtypes.most_common()])
    summary = f"{counts.n:,} tensors, {counts.n_elements:,} elements{of} ({kinds})"
    return FileFacts(str(path), summary, _worst_first([*_told_of_index(index, names), *_told_of(counts)]))


def _worst_first(told: Iterable[Told]) -> list[Told]:
    return sorted(told, key=lambda own: RANK[own[0]])


def _told_of_index(index: Mapping[str, str], names: Mapping[str, set[str]]) -> Iterator[Told]:
    """Contradictions between an index of several files and their contents."""
    files = sorted(set(index.values()))
    if gone := [x for x in files if x not in names]:
        n, are = sum(file in gone for file in index.values()), "are" if len(gone) > 1 else "is"
        yield (
            "error",
            f"{len(gone)} of {len(files)} files of the index {are} missing, with "
            f"{n} of {len(index)} tensors: {_counted(gone)}.",
        )
    if lacking := [name for name, file in index.items() if file in names and name not in names[file]]:
        yield (
            "error",
            f"The index has tensors that are not in its files ({len(lacking)}): {_counted(lacking)}.",
        )
    if extra := [name for x in names.values() for name in x if index and name not in index]:
        yield (
            "warning",
            f"The files have tensors that are not in the index ({len(extra)}): {_counted(extra)}.",
        )


def _told_of(counts: _Weights) -> Iterator[Told]:
    for text in counts.nonfinite[:MAX_TOLD]:
        yield "error", f"{text}."
    if len(counts.nonfinite) > MAX_TOLD:
        yield "error", f"{len(counts.nonfinite) - MAX_TOLD} more tensors have NaN or inf."
    if counts.zeros:
        yield "warning", f"All elements are zero in {_counted(counts.zeros)}."
    if counts.constant:
        yield "warning", f"All elements are the same in {_counted(counts.constant)}."
    begun = [layer for layer, is_begun in counts.means.items() if is_begun]
    if begun:
        never = " and num_batches_tracked is 0" if set(begun) <= set(counts.unseen) else ""
        yield (
            "warning",
            f"The batch-norm statistics are as at the beginning, mean 0 and variance 1{never}, in "
            f"{_counted(begun)}: no batch was seen in training mode.",
        )
    if unseen := [layer for layer in counts.unseen if layer not in begun]:
        yield "info", f"num_batches_tracked is 0 in {_counted(unseen)}."
    if len(counts.dtypes) > 1:
        mix = join_names([f"{kind} ({n})" for kind, n in counts.dtypes.most_common()])
        yield "info", f"The tensors have several dtypes: {mix}."


def _counted(names: list[str]) -> str:
    return join_names(names, 6)


# ---- curves


def of_curves(path: Path, curves: dict[str, Series], unit: str = "step") -> FileFacts:
    """Facts of curves: numbers by name, over steps or epochs, as `unit` says."""
    n, last = max(len(x) for x in curves.values()), max(x.steps[-1] for x in curves.values())
    told = [own for name, x in curves.items() for own in _of_curve(name, x, unit)]
    for name, x in curves.items():
        if (train := _train_of(name, curves)) is not None and (
            text := _departs(name, x, train, curves[train], unit)
        ):
            told.append(("warning", text))
    lines = [line for name, x in curves.items() if (line := _shown(name, x, unit))]
    if len(lines) > MAX_TOLD:
        lines = [*lines[:MAX_TOLD], f"… and {len(lines) - MAX_TOLD} more curves"]
    summary = f"{len(curves)} curves, {n} rows, to {unit} {last}"
    return FileFacts(str(path), summary, _worst_first(told), lines, curves)


def _of_curve(name: str, x: Series, unit: str) -> Iterator[Told]:
    bad = [step for step, value in x if not math.isfinite(value)]
    is_judged = bool(LOSS.search(name) or METRIC.search(name))
    if bad:
        stays = not math.isfinite(x.values[-1])
        which = "NaN" if any(map(math.isnan, x.values)) else "infinite"
        often = f", {len(bad)} times in all" if len(bad) > 1 else ""
        when = f"from {unit} {bad[-_trail(x)]} on" if stays else f"at {unit} {bad[0]}{often}"
        severity: Severity = "error" if stays and LOSS.search(name) else "warning"
        yield severity, f"{name} is {which} {when}."
    if is_judged and len(x) >= MIN_SAME and len(set(x.values)) == 1 and not bad:
        yield "warning", f"{name} never moves: it is {x.values[0]:.4g} in all {len(x)} rows."


def _trail(x: Series) -> int:
    """Number of rows at the end that are not finite."""
    n = 0
    while n < len(x) and not math.isfinite(x.values[-1 - n]):
        n += 1
    return n


def _train_of(name: str, curves: Iterable[str]) -> str | None:
    """The curve of training that belongs to a loss of validation."""
    if not (VALID.search(name) and LOSS.search(name)):
        return None
    plain = _plain(name)
    others = [x for x in curves if x != name and not VALID.search(x) and _plain(x) == plain]
    return min(others, key=lambda x: (x.endswith("_step"), len(x)), default=None)


def _plain(name: str) -> str:
    """Name without what says that it is of training or validation."""
    return re.sub(r"[^a-z0-9]+", "", TRAIN.sub("", TRAIN.sub("", VALID.sub("", name.lower()))))


def _departs(name: str, x: Series, train: str, other: Series, unit: str) -> str:
    """A loss of validation that rises since its best while that of training falls; "" if it does not."""
    values = [(step, value) for step, value in x if math.isfinite(value)]
    if len(values) < MIN_SAME:
        return ""
    best, low = min(values, key=lambda pair: pair[1])
    since = series_of(pair for pair in values if pair[0] >= best)
    falls = series_of((step, value) for step, value in other if step >= best)
    if len(since) < MIN_SAME or len(falls) < MIN_SAME or len(finite(falls.values)) < len(falls):
        return ""
    if not (slope(since, CONFIDENCE)[0] > 0 > slope(falls, CONFIDENCE)[1]):
        return ""
    return (
        f"{name} rises since {unit} {best}, from {low:.4g} to {since.values[-1]:.4g}, while {train} falls, "
        f"to {falls.values[-1]:.4g}: the model is best at {unit} {best}."
    )


def _shown(name: str, x: Series, unit: str) -> str:
    values = [(step, value) for step, value in x if math.isfinite(value)]
    if not values or not (LOSS.search(name) or METRIC.search(name)):
        return ""
    pick = min if LOSS.search(name) else max
    step, best = pick(values, key=lambda pair: pair[1])
    return f"        {name}: from {values[0][1]:.4g} to {values[-1][1]:.4g}; best {best:.4g} at {unit} {step}"
