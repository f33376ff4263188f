"""PageData: what a page shows, as plain values and series, and as the text that a page holds."""

import base64
import binascii
import json
import math
import zlib
from array import array
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, cast, get_args, get_origin, get_type_hints

from hookcb.diagnosis.evidence import Series

SCHEMA = 1
MAX_POINTS = 5_000  # of a series
DAMAGED = (KeyError, TypeError, AttributeError, zlib.error, binascii.Error, json.JSONDecodeError)


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
        low, high: range of the bins, in the unit of the output.
        bins: a series for each bin, from low to high: number of elements; the first counts those below the
            range, the last those above it.
    """

    low: float
    high: float
    bins: list[Series] = field(default_factory=list)


@dataclass
class Recorded:
    """What was recorded of a layer's output or of a parameter.

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
    """Where time goes.

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
    """Where memory goes: bytes.

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


@dataclass
class PageData:
    """Content of a page.

    Attributes:
        headline: the verdict in one line, or why there is none.
        verdict: the verdict as `Verdict.to_dict` gives it, None if nothing was recorded to judge. Each
            finding has `shown_by` besides: `{"of": "run" | "layers" | "params", "name": …, "stat": …,
            "limit": number or None}`, the series that shows it, or None.
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
    config: dict[str, list[list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The data as JSON; a series is `[offset of its steps, offset of its values, length]` in `numbers`.

        `numbers` are int32 and float32, little-endian, deflated, in base64. No text can end an HTML element.
        """
        packed = _Packed()
        state = {"schema": SCHEMA, **packed.plain(self), "numbers": packed.text()}
        return json.dumps(state, ensure_ascii=False, allow_nan=False).replace("<", r"\u003c")

    @classmethod
    def from_json(cls, text: str) -> "PageData":
        """The data that `to_json` wrote.

        Raises:
            ValueError: If it is damaged, or of another version.
        """
        try:
            state = json.loads(text)
            schema = state.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"it has version {schema!r}, and this hookcb reads version {SCHEMA}")
            numbers = zlib.decompress(base64.b64decode(state.pop("numbers"), validate=True))
            data = _revived(cls, state, numbers)
        except DAMAGED as error:
            raise ValueError(f"its data are damaged: {type(error).__name__}: {error}") from error
        return cast(PageData, data)


class _Packed:
    """Numbers of several series one after another; steps that are alike are kept once."""

    def __init__(self) -> None:
        self.numbers = bytearray()
        self._steps: dict[bytes, int] = {}

    def plain(self, x: Any) -> Any:
        """`x` as values for JSON; numbers that are not finite become None."""
        if isinstance(x, Series):
            return self._add(x)
        if is_dataclass(x):
            return {own.name: self.plain(getattr(x, own.name)) for own in fields(x)}
        if isinstance(x, dict):
            return {key: self.plain(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [self.plain(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    def text(self) -> str:
        """All numbers as base64."""
        return base64.b64encode(zlib.compress(bytes(self.numbers), 9)).decode("ascii")

    def _add(self, series: Series) -> list[int]:
        every = -(-len(series.steps) // MAX_POINTS) or 1
        steps, values = array("i", series.steps[::every]).tobytes(), array("f", series.values[::every])
        if steps not in self._steps:
            self._steps[steps] = self._append(steps)
        return [self._steps[steps], self._append(values.tobytes()), len(values)]

    def _append(self, data: bytes) -> int:
        self.numbers += data
        return (len(self.numbers) - len(data)) // 4


def _revived(kind: Any, x: Any, numbers: bytes) -> Any:
    """`x` from JSON as a value of the type `kind`."""
    if kind is Series:
        return _unpacked(numbers, x)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{own.name: _revived(hints[own.name], x[own.name], numbers) for own in fields(kind)})
    if x is not None and (inner := [own for own in get_args(kind) if own is not type(None)]):
        if get_origin(kind) is dict:
            return {key: _revived(inner[1], value, numbers) for key, value in x.items()}
        if get_origin(kind) is list:
            return [_revived(inner[0], value, numbers) for value in x]
        return _revived(inner[0], x, numbers)  # `… | None`
    return math.nan if x is None and kind is float else x


def _unpacked(numbers: bytes, at: list[int]) -> Series:
    steps, values, n = at
    if min(at) < 0 or 4 * (max(steps, values) + n) > len(numbers):
        raise ValueError("its data are damaged: numbers are missing")
    own_steps, own_values = array("i"), array("f")
    own_steps.frombytes(numbers[4 * steps : 4 * (steps + n)])
    own_values.frombytes(numbers[4 * values : 4 * (values + n)])
    return Series(own_steps.tolist(), own_values.tolist())
