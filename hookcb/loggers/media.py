"""Figures and histograms as other libraries take them."""

from importlib import import_module
from io import BytesIO
from typing import Any

from hookcb.core.randomness import random_kept
from hookcb.records.recording import Histogram

MAX_BINS = 512  # that wandb accepts


def png_of(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG file."""
    with BytesIO() as file, random_kept():
        figure.savefig(file, format="png")
        return file.getvalue()


def image_of(figure: Any) -> Any:
    """A figure of matplotlib as an image of Pillow, which comes with matplotlib, without transparency."""
    return import_module("PIL.Image").open(BytesIO(png_of(figure))).convert("RGB")


def bins_of(hist: Histogram) -> tuple[list[float], list[float]]:
    """Counts and edges of all finite values: with a bin for those below the edges, and above, if any are.

    If there are more than 512, neighboring bins are merged, as wandb takes no more.
    """
    counts, edges = list(hist.counts), list(hist.edges)
    if hist.min < edges[0]:
        counts, edges = [hist.below, *counts], [hist.min, *edges]
    if hist.max > edges[-1]:
        counts, edges = [*counts, hist.above], [*edges, hist.max]
    n = -(-len(counts) // MAX_BINS)
    return [sum(counts[i : i + n]) for i in range(0, len(counts), n)], [*edges[:-1:n], edges[-1]]
