"""Moves: which numbers of layers and parameters have left their level since a step."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hookcb.core.text import as_layer
from hookcb.diagnosis.causes import N_RECENT, OF_LAYERS, OF_PARAMS, RATIO, YOUNG
from hookcb.diagnosis.rules import format_factor, median
from hookcb.diagnosis.run import Layer, Param, Run, Series

MIN_LOOKS, N_LATER = 4, 2  # looks before, and the last ones
N_SHOWN = 2


class Move(NamedTuple):
    """A number that has moved: which, by what factor in the median, where, most first, of how many places."""

    stat: str
    factor: float
    places: tuple[Layer | Param, ...]
    n: int

    @property
    def text(self) -> str:
        """A clause on it; the place that has moved most is named."""
        kind = "layer" if isinstance(self.places[0], Layer) else "parameter"
        k, name = len(self.places), as_layer(self.places[0].name)
        way = f"{format_factor(self.factor)} times" if self.factor > 1 else f"{self.factor:.2g} of"
        where = f"of {name}" if k == 1 else f"of {k} of {self.n} {kind}s, most of {name},"
        return f"the {self.stat} {where} is {way} what it was"


def moves_since(run: Run, before: int, after: int) -> list[Move]:
    """Finds what has moved most between the looks up to a step and the last ones, from another step on.

    A number has moved if the median of its last two looks differs from that of the five up to `before` by a
    factor of two, and by twice the largest change between two of these in a row, in logarithms.
    """
    layers: Sequence[Layer | Param] = [*run.layers.values()]
    params: Sequence[Layer | Param] = [*run.params.values()]
    found = [
        move
        for places, stats in ((layers, OF_LAYERS), (params, OF_PARAMS))
        for stat, words in stats.items()
        for move in _moves(places, stat, words, before, after)
    ]
    return sorted(found, key=lambda x: -abs(math.log(x.factor)) * len(x.places) / x.n)[:N_SHOWN]


def _moves(places: Sequence[Layer | Param], stat: str, words: str, before: int, after: int) -> Iterator[Move]:
    changes = [(x, at) for at in places if (x := _change(at.series(stat), before, after)) is not None]
    for is_up in (True, False):
        moved = sorted(
            ((x, at) for x, at in changes if x and (x > 0) == is_up), key=lambda pair: -abs(pair[0])
        )
        if moved:
            yield Move(
                words, math.exp(median(x for x, _ in moved)), tuple(at for _, at in moved), len(changes)
            )


def _change(series: Series, before: int, after: int) -> float | None:
    """Logarithm of the factor by which a number has moved, 0 if it has not; None if too little is known."""
    usual = [math.log(x) for step, x in series if YOUNG <= step <= before and 0 < x < math.inf][-N_RECENT:]
    later = [math.log(x) for step, x in series if step >= after and 0 < x < math.inf][-N_LATER:]
    if len(usual) < MIN_LOOKS or not later:
        return None
    change = median(later) - median(usual)
    largest = max(abs(y - x) for x, y in pairwise(usual))
    return change if abs(change) > max(math.log(RATIO), RATIO * largest) else 0.0


def text_of(moves: Sequence[Move]) -> str:
    """A sentence on what has moved, which may be cause or effect; "" without any."""
    if not moves:
        return ""
    return f" Since then, as cause or effect: {'; '.join(move.text for move in moves)}."
