"""act.outliers: a few channels that are far larger than the others."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.precision import widened
from hookcb.core.text import as_layer
from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_rows import MAX_RECORDS, LayerRows, float_output
from hookcb.diagnosis.run import Layer, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding
from hookcb.records.store import StatStore

MAX_KURTOSIS = 20.0  # of the RMS of channels; 1 if all are alike, their number if there is only one
MIN_CHANNELS = 64  # fewer could not be above the limit by much
N_POSITIONS, N_WIDE = 64, 16  # of all samples, from which the RMS of each channel is taken; if they are wide
MAX_ELEMENTS = 16_384  # read of one output, unless it has more than 1,024 channels
NEAR = 4.0  # factor below the largest number of float16
FLOAT16 = torch.finfo(torch.float16).max
COLUMNS = ("channels", "largest")


@fault("act.outliers", Site.MODULES, needs="activations")
class OutlierChannels(Fault):
    """A few channels that are far larger than the others, as outlier features of transformers are.

    Formula: kurtosis of the RMS of the channels of a linear or normalization layer, mean(s⁴) / mean(s²)² for
    the mean squares s² of 64 channels or more over at most 64 positions; the median over five records up to
    the last one. Limit: 20; if all channels are alike it is 1, and n if one of n channels has everything.
    One channel with a share p of the sum of squares gives about p² · n. A note, as a model may train well
    with them: they cost digits once weights or activations are quantized. A warning if the layer's output is
    float16 and its largest number is above a quarter of 65,504 in a record; bfloat16 has the range of
    float32. The last layer with weights is left out, as its outputs are classes or tokens.

    Source: He et al., "Understanding and Minimising Outlier Features in Transformer Training", 2024, for the
    kurtosis of the RMS of channels; Dettmers et al., "LLM.int8()", 2022, for what they cost.
    """

    headline = "A few channels are far larger than the others"
    severity = "info"
    uses = (LayerRows,)

    def __init__(self) -> None:
        super().__init__()
        self._store: StatStore | None = StatStore(COLUMNS, MAX_RECORDS)
        self._taken: list[tuple[str, Tensor]] = []  # in the current batch: layer, and its numbers, `(1, 2)`
        self._series: dict[str, dict[str, Series]] = {}

    def on_batch(self, run: Run) -> None:
        self._taken = []

    def on_output(self, run: Run, name: str, m: nn.Module, output: Any) -> None:
        if not _has_channels(m) or (x := float_output(name, output)) is None:
            return
        if x.ndim > 1 and x.shape[-1] >= MIN_CHANNELS:
            self._taken.append((name, peaks(x)))

    def on_compiled_output(self, run: Run, name: str, m: nn.Module, output: Tensor | None) -> None:
        if output is not None:
            self.on_output(run, name, m, output)

    def on_batch_end(self, run: Run) -> None:
        if self._store is not None and self._taken:
            record = self._store.begin(0, run.step)
            for name, numbers in self._taken:
                self._store.put(name, [record], numbers)
        self._taken = []

    def tell(self, run: Run) -> None:
        if (store := self._store) is not None:
            steps = [info.step for info in store.infos]
            for name in store.names:
                columns = zip(COLUMNS, store.series(name).T.tolist(), strict=True)
                self._series[name] = {stat: Series.of(steps, values) for stat, values in columns}

    def freeze(self) -> None:
        self._store, self._taken = None, []

    def findings(self, run: Run) -> Iterator[Result]:
        head = rules.place_of_head(run)
        layers = [x for x in rules.in_order(run) if x.name in self._series and x.place < head]
        known = [(x, self._series[x.name]["channels"]) for x in layers]
        if not (known := [(x, series) for x, series in known if len(series) >= rules.LATEST]):
            yield Skipped(
                f"no linear or normalization layer with {MIN_CHANNELS} channels or more was inspected "
                f"{rules.LATEST} times"
            )
            return
        found = [(x, span) for x, own in known if (span := rules.trailing(own, lambda k: k > MAX_KURTOSIS))]
        latest = {x.name: rules.median(own.values[-rules.LATEST :]) for x, own in known}
        if not found:
            most = max(latest.values())
            yield Passed(f"outlier channels (kurtosis {most:.2g})", most, MAX_KURTOSIS)
            return
        near = [item for item in found if _is_near_overflow(item[0])]
        layer, span = max(near or found, key=lambda item: latest[item[0].name])
        yield self._outliers(layer, span, latest[layer.name], len(found), len(known), bool(near))

    def _outliers(self, layer: Layer, span: Span, value: float, n: int, of: int, is_near: bool) -> Finding:
        share = rules.median(self._series[layer.name]["largest"].values[-rules.LATEST :])
        overflow = f" It reaches {_largest(layer):,.0f}, and float16 ends at 65,504." if is_near else ""
        return self.finding(
            f"The largest channel of {as_layer(layer.name)} has {share:.0%} of the sum of squares: the "
            f"kurtosis of its channels is {value:.3g} (limit {MAX_KURTOSIS:g}); {n} of {of} layers are above "
            f"it.{overflow}",
            "warning" if is_near else "info",
            at=layer,
            when=span,
            value=value,
            limit=MAX_KURTOSIS,
            causes=("outlier features, which grow in the training of transformers",),
            next_steps=(
                *(("Use bfloat16 instead of float16",) if is_near else ()),
                "Keep these channels in higher precision if the model is quantized to 8 bits",
            ),
        )


def peaks(x: Tensor) -> Tensor:
    """Kurtosis of the RMS of channels, and the largest one's share of the squares, `(1, 2)`.

    `x` is `(..., channels)`; NaN if all is zero or any number is not finite.
    """
    rows = x.reshape(-1, x.shape[-1])
    n = min(N_POSITIONS, max(N_WIDE, MAX_ELEMENTS // rows.shape[1]))
    if rows.shape[0] > n:
        rows = rows.index_select(0, _places(rows.shape[0], n, x.device))
    squares = widened(rows).square().mean(0)  # squares of float32 have no room in float32
    total = squares.sum()
    return torch.stack([squares.square().sum() * len(squares) / total.square(), squares.max() / total])[None]


@lru_cache(maxsize=64)
def _places(n: int, k: int, device: torch.device) -> Tensor:
    """`k` of `n` positions, spread so that those in sequences of any length are at many places of them."""
    places = torch.linspace(0, n - 1, k, dtype=torch.float64, device="cpu").long()
    return places.to(device)


def _has_channels(m: nn.Module) -> bool:
    """Whether the last dimension of a module's output holds channels: of a linear or normalization layer."""
    return isinstance(m, nn.Linear | nn.LayerNorm) or type(m).__name__.endswith("RMSNorm")


def _is_near_overflow(layer: Layer) -> bool:
    """Whether a float16 output comes within a factor of four of its largest number."""
    return layer.largest == FLOAT16 and _largest(layer) > FLOAT16 / NEAR


def _largest(layer: Layer) -> float:
    return max(rules.finite(layer.series("abs_max").values), default=math.nan)
