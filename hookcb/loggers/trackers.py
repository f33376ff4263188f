"""Runs of other libraries as loggers: how each is given numbers, texts, figures and histograms."""

import math
from collections.abc import Callable, Mapping
from html import escape
from importlib import import_module
from inspect import ismodule
from itertools import pairwise
from typing import Any, NamedTuple

from hookcb.loggers.media import bins_of, image_of, png_of
from hookcb.records.recording import Histogram

Send = Callable[[Any, Any, Mapping[str, Any], int], object]  # takes module, run, things by name, step


def chart_and_line(name: str) -> tuple[str, str]:
    """Splits `activations/<layer>/rms` into `activations/rms` and the layer; any other name is both."""
    parts = name.split("/")
    return (f"{parts[0]}/{parts[-1]}", "/".join(parts[1:-1])) if len(parts) > 2 else (name, name)


def at_once(method: str, own: Callable[[Any, Any], Any] = lambda _, x: x) -> Send:
    """Sends all in one call of a method of the run; `own` makes an object of the library of each."""
    return lambda lib, run, things, step: getattr(run, method)(
        {name: own(lib, x) for name, x in things.items()}, step=step
    )


def each(send: Callable[[Any, Any, str, Any, int], object]) -> Send:
    """Sends one after the other."""

    def send_each(lib: Any, run: Any, things: Mapping[str, Any], step: int) -> None:
        for name, x in things.items():
            send(lib, run, name, x, step)

    return send_each


def _wandb_text(wandb: Any, run: Any, name: str, text: str, step: int) -> None:
    run.log({name: wandb.Html(f"<pre>{escape(text)}</pre>")}, step=step)
    run = run if hasattr(run, "summary") else wandb.run
    run.summary[f"{name}/headline"] = text.partition("\n")[0]  # what is logged replaces `name` there


def _comet_text(comet: Any, run: Any, name: str, text: str, step: int) -> None:
    run.log_text(text, step=step, metadata={"name": name})
    run.log_other(name, text.partition("\n")[0])


def _comet_histogram(comet: Any, run: Any, name: str, hist: Histogram, step: int) -> None:
    counts, edges = bins_of(hist)
    own = comet.Histogram()
    own.add([(a + b) / 2 for a, b in pairwise(edges)], counts)  # into bins of Comet
    run.log_histogram_3d(own, name=name, step=step)


def _clearml_number(clearml: Any, run: Any, name: str, x: float, step: int) -> None:
    if math.isfinite(x):  # it stores 0 for others
        run.report_scalar(*chart_and_line(name), x, step)


def _clearml_histogram(clearml: Any, run: Any, name: str, hist: Histogram, step: int) -> None:
    counts, edges = bins_of(hist)
    run.report_histogram(name, name, counts, step, xlabels=[f"{x:.3g}" for x in edges[:-1]], xaxis="from")


def _aim_number(aim: Any, run: Any, name: str, x: float, step: int) -> None:
    chart, line = chart_and_line(name)
    run.track(x, chart, step, context=None if line == name else {"layer": line})


def _neptune_image(neptune: Any, run: Any, name: str, figure: Any, step: int) -> None:
    run[name].append(neptune.types.File.as_image(image_of(figure)), step=step)


def _scale_histogram(scale: Any, hist: Histogram) -> Any:
    counts, edges = bins_of(hist)
    return scale.types.Histogram(bin_edges=edges, counts=list(map(round, counts)))


class Library(NamedTuple):
    """Functions that send something to a run of a library.

    Args:
        known_by: a method that runs have.
        numbers, texts, figures, hists: one for each kind; by default histograms are left out.
        target: returns the object that is sent to, of the one that users have.
    """

    known_by: str
    numbers: Send
    texts: Send
    figures: Send
    hists: Send = lambda *_: None
    target: Callable[[Any], Any] = lambda run: run


NUMBERS = at_once("log")
IMAGES = at_once("log", lambda lib, x: lib.Image(image_of(x)))
HISTOGRAMS = at_once("log", lambda lib, x: lib.Histogram(np_histogram=bins_of(x)))
LIBRARIES = {
    "aim": Library(
        "track",
        each(_aim_number),
        each(lambda lib, run, name, x, step: run.track(lib.Text(x), name, step)),
        each(lambda lib, run, name, x, step: run.track(lib.Image(image_of(x)), name, step)),
    ),
    "clearml": Library(
        "report_scalar",
        each(_clearml_number),
        each(lambda _, run, name, x, step: run.report_text(f"{name}, {step}:\n{x}", print_console=False)),
        each(lambda _, run, name, x, step: run.report_image(name, name, step, image=image_of(x))),
        each(_clearml_histogram),
        target=lambda run: run.get_logger() if hasattr(run, "get_logger") else run,  # of a task
    ),
    "comet_ml": Library(
        "log_metrics",
        at_once("log_metrics"),
        each(_comet_text),
        each(lambda _, run, name, x, step: run.log_image(image_of(x), name=name, step=step)),
        each(_comet_histogram),
    ),
    "neptune": Library(
        "__getitem__",
        each(lambda _, run, name, x, step: run[name].append(x, step=step)),
        each(lambda _, run, name, x, step: run[name].assign(x)),
        each(_neptune_image),
    ),
    "neptune_scale": Library(
        "log_metrics",
        at_once("log_metrics"),
        at_once("log_string_series"),
        at_once("log_files", lambda lib, x: lib.types.File(png_of(x), mime_type="image/png")),
        at_once("log_histograms", _scale_histogram),
    ),
    "swanlab": Library("log", NUMBERS, at_once("log", lambda lib, x: lib.Text(x)), IMAGES),
    "trackio": Library(
        "log", NUMBERS, at_once("log", lambda lib, x: lib.Markdown(f"```\n{x}\n```")), IMAGES, HISTOGRAMS
    ),
    "wandb": Library("log", NUMBERS, each(_wandb_text), IMAGES, HISTOGRAMS),
}


class Tracker:
    """A logger that sends all to a run of another library.

    Args:
        run: the run, or the module, if that can be logged to.
        library: name of the module.
    """

    def __init__(self, run: Any, library: str) -> None:
        self.run, self.library = run, library

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Sends numbers."""
        self._send("numbers", values, step)

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Sends histograms, if the library has any."""
        self._send("hists", hists, step)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Sends a text."""
        self._send("texts", {name: text}, step)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Sends a figure of matplotlib as an image."""
        self._send("figures", {name: figure}, step)

    def _send(self, kind: str, things: Mapping[str, Any], step: int) -> None:
        getattr(LIBRARIES[self.library], kind)(import_module(self.library), self.run, things, step)

    def __repr__(self) -> str:
        return repr(self.run)


def tracker_of(thing: Any) -> Tracker | None:
    """A logger for a run of another library, or for the module; None if it is something else."""
    name = (thing.__name__ if ismodule(thing) else type(thing).__module__).partition(".")[0]
    if name not in LIBRARIES:
        return None
    run = LIBRARIES[name].target(thing)
    return Tracker(run, name) if hasattr(run, LIBRARIES[name].known_by) else None
