"""Content: what a page of a run shows, as plain values and series."""

from dataclasses import dataclass, field
from typing import Any

from hookcb.records.series import Series

MAX_RECORDS = 512  # values of a series of a layer


@dataclass
class ModuleRow:
    """A module of the model.

    Attributes:
        name: qualified name, "" for the model itself.
        type, about: its type, `Linear`, and the same with sizes, `Linear 64→64`.
        n_params: number of its own parameters' elements, without those of its children.
    """

    name: str
    type: str
    about: str = ""
    n_params: int = 0


@dataclass
class HistogramOverTime:
    """Histograms of a layer's output, one for each of `steps`.

    Attributes:
        edges: edges of the bins, in the unit of the output.
        bins: a series for each bin, from low to high: number of elements; the first counts those below the
            range, the last those above it.
    """

    edges: list[float]
    bins: list[Series] = field(default_factory=list)


@dataclass
class Recorded:
    """Records of a layer's output or of a parameter.

    Attributes:
        module: qualified name of its module.
        about: shape of the parameter, as text; "" for a layer.
        stats: series by name of the statistic.
        hist: histograms of the output, None if there are none.
    """

    module: str
    about: str = ""
    stats: dict[str, Series] = field(default_factory=dict)
    hist: HistogramOverTime | None = None


@dataclass
class SlowStep:
    """A step that took long: its number, seconds, seconds of a usual step, and what is known of it."""

    step: int
    seconds: float
    usual: float
    phase: str
    notes: str = ""


@dataclass
class TimeSpent:
    """Time by phase and by layer, in seconds.

    Attributes:
        phases: seconds of each step by phase: "data", "forward", "loss", "backward", "optimizer",
            "callbacks", "other".
        slow: the slowest steps.
        sentences: what follows from them: whether data are waited for, and how long a step takes.
        layers: seconds of a forward, and of a backward if that is known, by layer, without its children.
    """

    phases: dict[str, Series] = field(default_factory=dict)
    slow: list[SlowStep] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    layers: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class MemoryUsed:
    """Memory by layer and over steps, in bytes.

    Attributes:
        columns: what is counted: "kept" for the backward, "parameters", "gradients", "optimizer".
        layers: bytes by layer, one number for each of `columns`.
        used: bytes in use after each watched step.
        sentences: notes, growth, advice.
    """

    columns: list[str] = field(default_factory=list)
    layers: dict[str, list[float]] = field(default_factory=dict)
    used: Series = field(default_factory=Series)
    sentences: list[str] = field(default_factory=list)


@dataclass
class RanksCompared:
    """Several ranks beside one another.

    Attributes:
        world, rank: number of ranks, and the one whose numbers the rest of the page shows.
        hosts: host of each rank, if known.
        loss: loss by rank.
        phases: seconds of each comparison by phase, a series for each rank: "data", "forward".
        sentences: who is slow, what is merged over ranks and what is of this rank.
    """

    world: int = 1
    rank: int = 0
    hosts: list[str] = field(default_factory=list)
    loss: list[Series] = field(default_factory=list)
    phases: dict[str, list[Series]] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SampleLoss:
    """The loss of a sample of a batch.

    Attributes:
        step: number of the training batch.
        index: place of the sample in it.
        loss: its loss.
        usual: the median of the losses of that batch.
    """

    step: int
    index: int
    loss: float
    usual: float


@dataclass
class Content:
    """Content of a page.

    Attributes:
        headline: the verdict in one line, or why there is none.
        verdict: the verdict as `Verdict.to_dict` gives it, None if nothing was recorded to judge. Each
            finding has `shown_by` besides: `{"of": "run" | "layers" | "params", "name": …, "stat": …,
            "limit": number or None}`, the series that shows it, or None; and its `when` and `on_ranks`.
        title: name of the run: the file's, unless given.
        hookcb, written: version of hookcb, and the time of writing, ISO 8601 with its offset.
        every: seconds until the page is written again while the run goes on, None if it has ended.
        n_batches: number of training batches so far.
        run: series of the whole run by name: `loss`, `lr`, `total_norm` …
        epochs: numbers after each epoch, a series by name at the step it ended with: `train_loss`,
            `valid_loss`, `accuracy` …
        modules: all modules, parents before their children, in the order of the model.
        layers: recorded outputs by name, in the order of execution.
        params: parameters by name, in the order of the model.
        time, memory, ranks: None if nothing was recorded.
        samples: samples with the largest losses, of inspected batches; the largest first.
        config: configuration: rows of a key and a value by section, as text.
        notes: what is missing on the page, and what to do to see it.
    """

    headline: str
    verdict: dict[str, Any] | None = None
    title: str = ""
    hookcb: str = ""
    written: str = ""
    every: float | None = None
    n_batches: int = 0
    run: dict[str, Series] = field(default_factory=dict)
    epochs: dict[str, Series] = field(default_factory=dict)
    modules: list[ModuleRow] = field(default_factory=list)
    layers: dict[str, Recorded] = field(default_factory=dict)
    params: dict[str, Recorded] = field(default_factory=dict)
    time: TimeSpent | None = None
    memory: MemoryUsed | None = None
    ranks: RanksCompared | None = None
    samples: list[SampleLoss] = field(default_factory=list)
    config: dict[str, list[list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
