"""PageData: what a page shows, as the text that it holds."""

import base64
import binascii
import json
import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast, get_args, get_origin, get_type_hints

from hookcb.records.content import MAX_RECORDS, Content, HistogramOverTime, Recorded, TimeSpent
from hookcb.records.series import Series

SCHEMA = 1
MAX_POINTS = 2_000  # values of a series of the whole run
MIN_RECORDS = 16  # values of a series of a layer
MAX_NUMBERS = 150_000  # of all layers
MAX_TEXT = 185_000  # characters of all
MANTISSA = 23  # bits of a float32
LAYER_BITS = 13  # of them, of values of layers and parameters
DAMAGED = (KeyError, TypeError, AttributeError, zlib.error, binascii.Error, json.JSONDecodeError)


class PageData(Content):
    """Content of a page, as the text that a page holds."""

    def __repr__(self) -> str:
        recorded = f"{len(self.layers)} layers, {len(self.params)} parameters"
        return f"PageData({self.title!r}, {self.headline!r}, {self.n_batches:,} batches, {recorded})"

    def to_json(self) -> str:
        """The data as JSON, see `to_text`."""
        return to_text(self, sum(len(own.stats) for own in (*self.layers.values(), *self.params.values())))

    @classmethod
    def from_json(cls, text: str) -> "PageData":
        """The data that `to_json` wrote.

        Raises:
            ValueError: If it is damaged, or of another version.
        """
        try:
            state = json.loads(text)
            schema = state["schema"]
            if schema != SCHEMA:
                raise ValueError(f"it has version {schema!r}, and this hookcb reads version {SCHEMA}")
            numbers = _joined(_inflated(state["numbers"]))
            data = _revived(cls, json.loads(_inflated(state["content"])), numbers)
        except DAMAGED as error:
            raise ValueError(f"its data are damaged: {type(error).__name__}: {error}") from error
        return cast(PageData, data)


def to_text(data: Any, n_series: int = 1) -> str:
    """A dataclass or dict as JSON: `schema`, `content` and `numbers`. No text in it can end an HTML element.

    In `content` a series is `[offset of its steps, offset of its values, length]` in `numbers`: int32
    differences of steps, and float32 values, rounded to 2⁻¹⁴ of themselves for layers and parameters, or to
    2⁻¹¹ if the text would be too long, to 2⁻⁶ for counts of histograms, little-endian, the first bytes of
    all before the second ones. Both are deflated, in base64. Of long series some values are left out, but
    not what is not finite, so that both together have about 185,000 characters at most.

    Args:
        data: the dataclass or dict.
        n_series: number of series of layers and parameters.
    """
    most, bits = min(MAX_RECORDS, MAX_NUMBERS // max(1, n_series)), LAYER_BITS
    while True:
        packed = _Packed(max(most, MIN_RECORDS), bits)
        content = json.dumps(packed.plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        content, numbers = _deflated(content.encode()), _deflated(packed.planes())
        if len(content) + len(numbers) <= MAX_TEXT or bits < LAYER_BITS:
            return json.dumps({"schema": SCHEMA, "content": content, "numbers": numbers})
        if most <= MIN_RECORDS:
            bits -= 3
        most = most * 2 // 3


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _inflated(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))


class _Packed:
    """Numbers of several series one after another; steps that are alike are kept once.

    Args:
        most: number of values of a layer's series.
        bits: number of bits of their mantissa.
    """

    def __init__(self, most: int, bits: int) -> None:
        self.most, self.bits = most, bits
        self._numbers = bytearray()
        self._steps: dict[bytes, int] = {}

    def plain(self, x: Any, most: int = MAX_POINTS, bits: int = MANTISSA) -> Any:
        """`x` as values for JSON; numbers that are not finite become None, but not in series.

        Args:
            x: dataclasses, containers, series and plain values.
            most: number of values of a series.
            bits: number of bits of a value's mantissa.
        """
        if isinstance(x, Series):
            return self._add((envelope if most == MAX_POINTS else thinned)(x, most), bits)
        if isinstance(x, Recorded):
            most, bits = self.most, self.bits
        elif isinstance(x, HistogramOverTime):
            most, bits = self.most // 4, 5
        elif isinstance(x, TimeSpent):
            x = replace(x, phases=together(x.phases, most - 2))  # no longer than `most`
        if is_dataclass(x):
            return {own.name: self.plain(getattr(x, own.name), most, bits) for own in fields(x)}
        if isinstance(x, dict):
            return {key: self.plain(value, most, bits) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [self.plain(value, most, bits) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    def planes(self) -> bytes:
        """All numbers: first the first bytes of all, then the second bytes, and so on."""
        return b"".join(self._numbers[i::4] for i in range(4))

    def _add(self, series: Series, bits: int) -> list[int]:
        first = series.steps[:1]
        differences = [*first, *(b - a for a, b in pairwise(series.steps))]
        steps = array("i", differences).tobytes()
        if steps not in self._steps:
            self._steps[steps] = self._append(steps)
        return [self._steps[steps], self._append(_rounded(series.values, bits)), len(series)]

    def _append(self, data: bytes) -> int:
        self._numbers += data
        return (len(self._numbers) - len(data)) // 4


def thinned(series: Series, most: int) -> Series:
    """At most about `most` values: of each stretch the first that is not finite, else the first.

    >>> thinned(Series([0, 1, 2, 3, 4, 5], [0.0, 1.0, 2.0, math.nan, 4.0, 5.0]), 3).steps
    [0, 3, 4, 5]
    """
    n = len(series)
    if n <= most:
        return series
    stride = -(-n // most)
    bad = [i for i, x in enumerate(series.values) if not math.isfinite(x)]
    chosen = {i // stride: i for i in range(0, n, stride)} | {i // stride: i for i in reversed(bad)}
    places = sorted({*chosen.values(), n - 1})  # and the last
    return Series([series.steps[i] for i in places], [series.values[i] for i in places])


def envelope(series: Series, most: int) -> Series:
    """About `most` values: of each stretch the least, the largest, the first not finite; and the last of all.

    >>> envelope(Series([0, 1, 2, 3, 4, 5, 6, 7], [0.0, 9.0, 2.0, 1.0, 1.0, 2.0, 5.0, 1.0]), 4).values
    [0.0, 9.0, 1.0, 5.0, 1.0]
    """
    n = len(series)
    if n <= most:
        return series
    stride, places = -(-2 * n // most), {n - 1}
    for start in range(0, n, stride):
        stretch = range(start, min(start + stride, n))
        finite = [i for i in stretch if math.isfinite(series.values[i])]
        if finite:
            places |= {min(finite, key=series.values.__getitem__), max(finite, key=series.values.__getitem__)}
        if len(finite) < len(stretch):
            places.add(next(i for i in stretch if not math.isfinite(series.values[i])))
    return Series([series.steps[i] for i in sorted(places)], [series.values[i] for i in sorted(places)])


def together(phases: dict[str, Series], most: int) -> dict[str, Series]:
    """Phases at those of their common steps that `envelope` chooses for their sum, so that they add up.

    >>> phases = {"data": Series([0, 1, 2, 3], [1.0, 3.0, 2.0, 0.0]), "rest": Series([0, 1, 2, 3], [0.0] * 4)}
    >>> [own.steps for own in together(phases, 2).values()]
    [[1, 3], [1, 3]]
    """
    if len({tuple(own.steps) for own in phases.values()}) != 1:
        return phases
    sums = [sum(row) for row in zip(*(own.values for own in phases.values()), strict=True)]
    places = envelope(Series(list(range(len(sums))), sums), most).steps
    return {
        name: Series([own.steps[i] for i in places], [own.values[i] for i in places])
        for name, own in phases.items()
    }


def _rounded(values: Sequence[float], bits: int) -> bytes:
    """Values as float32 with so many bits in the mantissa; none becomes infinite by it."""
    import torch  # seconds, which reading a page does not take

    wide = torch.tensor(values, dtype=torch.float64, device="cpu")
    limit = torch.finfo(torch.float32).max
    x = wide.where(wide.isinf(), wide.clamp(-limit, limit)).float()
    drop = MANTISSA - bits
    if drop:
        rounded = (((x.view(torch.int32) + (1 << drop - 1)) >> drop) << drop).view(torch.float32)
        x = rounded.where(x.isfinite() & rounded.isfinite(), x)
    return array("f", x.tolist()).tobytes()


def _joined(planes: bytes) -> bytes:
    """Numbers of 4 bytes, from the first bytes of all, the second bytes, and so on."""
    n = len(planes) // 4
    numbers = bytearray(4 * n)
    for i in range(4):
        numbers[i::4] = planes[i * n : (i + 1) * n]
    return bytes(numbers)


def _revived(kind: Any, x: Any, numbers: bytes) -> Any:
    """`x` from JSON as a value of the type `kind`."""
    if kind is Series:
        return _unpacked(numbers, x)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        if kind is HistogramOverTime and "edges" not in x:
            x = x | {"edges": _even_edges(x["low"], x["high"], len(x["bins"]) - 1)}
        known = [own.name for own in fields(kind) if own.name in x]  # a page of an older version lacks some
        return kind(**{name: _revived(hints[name], x[name], numbers) for name in known})
    if x is not None and (inner := [own for own in get_args(kind) if own is not type(None)]):
        if get_origin(kind) is dict:
            return {key: _revived(inner[1], value, numbers) for key, value in x.items()}
        if get_origin(kind) is list:
            return [_revived(inner[0], value, numbers) for value in x]
        return _revived(inner[0], x, numbers)  # `… | None`
    return math.nan if x is None and kind is float else x


def _even_edges(low: float, high: float, n: int) -> list[float]:
    """Edges of bins of equal width, as histograms of version 0.2 have them."""
    return [low + (high - low) * i / (n - 1) for i in range(n)]


def _unpacked(numbers: bytes, at: list[int]) -> Series:
    steps, values, n = at
    if min(at) < 0 or 4 * (max(steps, values) + n) > len(numbers):
        raise ValueError("its data are damaged: numbers are missing")
    own_steps, own_values = array("i"), array("f")
    own_steps.frombytes(numbers[4 * steps : 4 * (steps + n)])
    own_values.frombytes(numbers[4 * values : 4 * (values + n)])
    return Series(list(accumulate(own_steps)), own_values.tolist())
