"""Runs of other libraries as loggers: what each calls a number, a histogram, a text and an image."""

import math
from collections.abc import Mapping
from html import escape
from importlib import import_module
from inspect import ismodule
from io import BytesIO
from typing import Any

from hookcb.core.randomness import random_kept
from hookcb.records.recording import Histogram


def png_of(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG file."""
    with BytesIO() as file, random_kept():
        figure.savefig(file, format="png")
        return file.getvalue()


def image_of(figure: Any) -> Any:
    """A figure of matplotlib as an image of Pillow, which comes with matplotlib."""
    return import_module("PIL.Image").open(BytesIO(png_of(figure)))


def bins_of(hist: Histogram) -> tuple[list[float], list[float]]:
    """Counts and edges of all finite values: with a bin for those below the edges, and above, if any are."""
    counts, edges = list(hist.counts), list(hist.edges)
    if hist.min < edges[0]:
        counts, edges = [hist.below, *counts], [hist.min, *edges]
    if hist.max > edges[-1]:
        counts, edges = [*counts, hist.above], [*edges, hist.max]
    return counts, edges


def chart_and_line(name: str) -> tuple[str, str]:
    """Splits `activations/<layer>/rms` into `activations/rms` and the layer; any other name is both."""
    parts = name.split("/")
    return (f"{parts[0]}/{parts[-1]}", "/".join(parts[1:-1])) if len(parts) > 2 else (name, name)


class Tracker:
    """A run whose `log` takes numbers and objects of its library by name; also the module itself.

    Args:
        run: the run.
        library: name of its module.
    """

    needs = "log"  # a method of the run, by which it is known

    def __init__(self, run: Any, library: str) -> None:
        self.run, self._name = run, library

    @property
    def library(self) -> Any:
        """The module."""
        return import_module(self._name)

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Logs numbers."""
        self.run.log(dict(values), step=step)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text."""
        self.run.log({name: self.library.Text(text)}, step=step)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Logs a figure as an image."""
        self.run.log({name: self.library.Image(image_of(figure))}, step=step)

    def __repr__(self) -> str:
        return repr(self.run)


class Trackio(Tracker):
    """A run of trackio."""

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text as Markdown."""
        self.run.log({name: self.library.Markdown(f"```\n{text}\n```")}, step=step)

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Logs histograms as they are."""
        as_one = {name: self.library.Histogram(np_histogram=bins_of(hist)) for name, hist in hists.items()}
        self.run.log(as_one, step=step)


class Wandb(Trackio):
    """A run of wandb, whose summary has the first line of a text too."""

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text as HTML."""
        self.run.log({name: self.library.Html(f"<pre>{escape(text)}</pre>")}, step=step)
        run = self.run if hasattr(self.run, "summary") else self.library.run
        run.summary[name] = text.partition("\n")[0]


class Comet(Tracker):
    """An experiment of Comet, whose others have the first line of a text too."""

    needs = "log_metrics"

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Logs metrics."""
        self.run.log_metrics(dict(values), step=step)

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Logs histograms in the bins of Comet."""
        for name, hist in hists.items():
            counts, edges = bins_of(hist)
            own = self.library.Histogram()
            own.add([(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)], counts)
            self.run.log_histogram_3d(own, name=name, step=step)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text."""
        self.run.log_text(text, step=step, metadata={"name": name})
        self.run.log_other(name, text.partition("\n")[0])

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Logs a figure as an image."""
        self.run.log_image(image_of(figure), name=name, step=step)


class ClearML(Tracker):
    """A task of ClearML, or its logger; a statistic has one chart with a line for each layer."""

    needs = "report_scalar"

    def __init__(self, run: Any, library: str) -> None:
        super().__init__(run.get_logger() if hasattr(run, "get_logger") else run, library)

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Reports scalars, but those that are not finite, as ClearML has 0 for these."""
        for name, x in values.items():
            if math.isfinite(x):
                self.run.report_scalar(*chart_and_line(name), x, step)

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Reports histograms."""
        for name, hist in hists.items():
            counts, edges = bins_of(hist)
            labels = [f"{edge:.3g}" for edge in edges[:-1]]
            self.run.report_histogram(name, name, counts, step, xlabels=labels, xaxis="from")

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Reports a text, which is among those of the console."""
        self.run.report_text(f"{name}, step {step}:\n{text}", print_console=False)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Reports a figure as an image."""
        self.run.report_image(name, name, step, image=image_of(figure).convert("RGB"))


class Neptune(Tracker):
    """A run of neptune, or a namespace of it."""

    needs = "__getitem__"

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Appends to a series for each name."""
        for name, x in values.items():
            self.run[name].append(x, step=step)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Sets a string."""
        self.run[name].assign(text)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Appends an image."""
        image = self.library.types.File.as_image(image_of(figure).convert("RGB"))
        self.run[name].append(image, step=step)


class NeptuneScale(Tracker):
    """A run of neptune_scale."""

    needs = "log_metrics"

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Logs metrics."""
        self.run.log_metrics(dict(values), step=step)

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Logs histograms as they are."""
        own = {}
        for name, hist in hists.items():
            counts, edges = bins_of(hist)
            own[name] = self.library.types.Histogram(bin_edges=edges, counts=[round(n) for n in counts])
        self.run.log_histograms(own, step=step)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text."""
        self.run.log_string_series({name: text}, step=step)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Logs a figure as a file."""
        file = self.library.types.File(png_of(figure), mime_type="image/png")
        self.run.log_files({name: file}, step=step)


class Aim(Tracker):
    """A run of Aim; a statistic has one chart with a line for each layer."""

    needs = "track"

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Tracks numbers, those of a layer in its context."""
        for name, x in values.items():
            chart, line = chart_and_line(name)
            self.run.track(x, chart, step, context={"layer": line} if line != name else None)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Tracks a text."""
        self.run.track(self.library.Text(text), name, step)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Tracks a figure as an image."""
        self.run.track(self.library.Image(image_of(figure)), name, step)


TRACKERS: dict[str, type[Tracker]] = {
    "aim": Aim,
    "clearml": ClearML,
    "comet_ml": Comet,
    "neptune": Neptune,
    "neptune_scale": NeptuneScale,
    "swanlab": Tracker,
    "trackio": Trackio,
    "wandb": Wandb,
}


def tracker_of(thing: Any) -> Tracker | None:
    """The logger for a run of another library, or for the module; None if it is something else."""
    module = thing.__name__ if ismodule(thing) else type(thing).__module__
    library = module.partition(".")[0]
    if library not in TRACKERS:
        return None
    tracker = TRACKERS[library](thing, library)
    return tracker if hasattr(tracker.run, tracker.needs) else None
