"""Newest: the latest records of the recorders of a fit, under stable names."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import NamedTuple

from hookcb.activations.callback import ActivationStats
from hookcb.activations.records import ActivationRecords
from hookcb.core.callback import Callback
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.records import GradientRecords, is_unread
from hookcb.gradients.stats import STEP_STATS
from hookcb.loggers.base import Histogram
from hookcb.profiling.steps.timer import StepTimer
from hookcb.records.records import LayerRecords

# first part of the names, by the name of the callback; else it is that name
PREFIXES = {"activation_stats": "activations", "gradient_health": "gradients", "step_timer": "time"}


class Reading(NamedTuple):
    """The numbers and histograms recorded at a step."""

    step: int
    values: dict[str, float]
    hists: dict[str, Histogram]


class Newest:
    """Reads the newest record of each recorder, and no record twice; created when a fit begins.

    Reading reduces what is waiting to be reduced, and on a GPU waits for the result.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # the last record read, by prefix

    def read(self, cbs: Iterable[Callback]) -> Iterator[Reading]:
        """Yields the newest record of each callback, unless it was read before."""
        for cb in cbs:
            prefix = PREFIXES.get(cb.name, cb.name)
            if isinstance(cb, ActivationStats):
                yield from self._read_layers(prefix, cb.records)
            elif isinstance(cb, GradientHealth):
                for reading in self._read_layers(prefix, cb.records):
                    steps = {f"{prefix}/step/{stat}": cb.step_series(stat)[-1] for stat in STEP_STATS}
                    values = reading.values | steps
                    yield reading._replace(values=_clipped(values) if cb.records.is_clipped else values)
                if cb.output_stats is not None:
                    yield from self._read_layers(f"{prefix}_of_outputs", cb.output_stats)
            elif isinstance(cb, StepTimer):
                yield from self._read_times(prefix, cb)

    def _read_layers(self, prefix: str, readings: LayerRecords) -> Iterator[Reading]:
        store = readings.store_of("train")
        if not store.infos or self._seen.get(prefix) == store.infos[-1].record:
            return
        record, _, step = store.infos[-1]
        self._seen[prefix] = record
        reading = Reading(step, {}, {})
        for name in store.names:
            numbers = store.row(record, name).tolist()
            if all(x != x for x in numbers):
                continue  # it was not called
            stats = dict(zip(readings.columns, numbers, strict=False))
            if isinstance(readings, GradientRecords) and readings.about[name][1] < 2:
                del stats["zero_rows"]  # a parameter with fewer than 2 dimensions has no rows
            if isinstance(readings, GradientRecords) and is_unread(stats["abs_max"], stats["nonfinite"]):
                del stats["abs_max"]
            reading.values.update({f"{prefix}/{name}/{stat}": x for stat, x in stats.items()})
            if isinstance(readings, ActivationRecords) and readings.with_hist:
                below, *counts, above = numbers[len(readings.columns) :]
                edges = tuple(readings.edges.tolist())
                hist = Histogram(
                    edges[0], edges[-1], tuple(counts), below, above, stats["min"], stats["max"], edges
                )
                reading.hists[f"{prefix}/{name}"] = hist
        yield reading

    def _read_times(self, prefix: str, timer: StepTimer) -> Iterator[Reading]:
        if not (times := timer.times) or self._seen.get(prefix) == times[-1].step:
            return
        newest = times[-1]
        self._seen[prefix] = newest.step
        seconds = {field.name: getattr(newest, field.name) for field in fields(newest)}
        named = {f"{prefix}/{name}": x for name, x in seconds.items() if isinstance(x, float)}
        yield Reading(newest.step, named, {})


def _clipped(values: dict[str, float]) -> dict[str, float]:
    """Numbers of gradients that the loop has clipped before they were read, with names that say so."""
    norms = ("norm", "total_norm", "mean_norm")
    parts = {name: name.rpartition("/") for name in values}
    return {
        f"{place}/clipped_{stat}" if stat in norms else name: values[name]
        for name, (place, _, stat) in parts.items()
        if stat not in ("clipped_norm", "clipped_total_norm")  # the same
    }
