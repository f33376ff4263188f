"""PageData: what a page shows, as plain values and series, and as the text that a page holds."""

import base64
import binascii
import json
import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from hookcb.diagnosis.evidence import Series

SCHEMA = 1
MAX_POINTS = 5_000  # of a series
DAMAGED = (KeyError, TypeError, AttributeError, zlib.error, binascii.Error, json.JSONDecodeError)


@dataclass
class PageData:
    """Content of a page.

    Attributes:
        verdict: the verdict as `Verdict.to_dict` gives it, None if nothing was recorded to judge.
        headline: the verdict in one line, or why there is none.
        run: series of the whole run by name: `loss`, `lr`, `total_norm` …
        layers: series of each layer and statistic, in the order of execution.
        kinds: type and size of each layer.
    """

    verdict: dict[str, Any] | None
    headline: str
    run: dict[str, Series] = field(default_factory=dict)
    layers: dict[str, dict[str, Series]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The data as JSON; numbers are 4 bytes each, deflated, in base64, and no text can end an element."""
        packed = _Packed()
        state = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "headline": self.headline,
            "run": {name: packed.add(series) for name, series in self.run.items()},
            "layers": {
                name: {stat: packed.add(series) for stat, series in stats.items()}
                for name, stats in self.layers.items()
            },
            "kinds": self.kinds,
        }
        text = json.dumps(state | {"numbers": packed.text()}, ensure_ascii=False, allow_nan=False)
        return text.replace("<", r"\u003c")

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
            numbers = zlib.decompress(base64.b64decode(state["numbers"], validate=True))
            run = {name: _unpacked(numbers, at) for name, at in state["run"].items()}
            layers = {
                name: {stat: _unpacked(numbers, at) for stat, at in stats.items()}
                for name, stats in state["layers"].items()
            }
            return cls(state["verdict"], state["headline"], run, layers, state["kinds"])
        except DAMAGED as error:
            raise ValueError(f"its data are damaged: {type(error).__name__}: {error}") from error


class _Packed:
    """Numbers of several series one after another; steps that are alike are kept once."""

    def __init__(self) -> None:
        self.numbers = bytearray()
        self._steps: dict[bytes, int] = {}

    def add(self, series: Series) -> list[int]:
        """Adds a series; returns the offset of its steps and of its values, and their number."""
        every = -(-len(series.steps) // MAX_POINTS) or 1
        steps, values = array("i", series.steps[::every]).tobytes(), array("f", series.values[::every])
        if steps not in self._steps:
            self._steps[steps] = self._append(steps)
        return [self._steps[steps], self._append(values.tobytes()), len(values)]

    def text(self) -> str:
        """All numbers as base64."""
        return base64.b64encode(zlib.compress(bytes(self.numbers), 9)).decode("ascii")

    def _append(self, data: bytes) -> int:
        self.numbers += data
        return (len(self.numbers) - len(data)) // 4


def _unpacked(numbers: bytes, at: list[int]) -> Series:
    steps, values, n = at
    if min(at) < 0 or 4 * (max(steps, values) + n) > len(numbers):
        raise ValueError("its data are damaged: numbers are missing")
    own_steps, own_values = array("i"), array("f")
    own_steps.frombytes(numbers[4 * steps : 4 * (steps + n)])
    own_values.frombytes(numbers[4 * values : 4 * (values + n)])
    return Series(own_steps.tolist(), own_values.tolist())
