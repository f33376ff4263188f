"""Runs of other libraries get everything, by methods that have the parameters of the real ones.

The parameters are those that `inspect.signature` shows, as far as they are passed, of Aim 3.29.1, ClearML
2.1.12, Comet 3.58.8, Neptune 1.14, neptune_scale 0.30 and SwanLab 0.10.3. What the real ones write is read
in `tests/interop/test_trackers.py`.
"""

import math
import sys
from types import SimpleNamespace

import pytest

from hookcb import ActivationStats, Diagnose, GradientHealth, synth_learner
from hookcb.loggers import Histogram, Log, as_logger
from hookcb.loggers.media import bins_of

VALUES = {"loss": 0.5, "activations/block/0/rms": 2.0, "odd": math.inf}
HIST = Histogram(0.0, 2.0, (3.0, 1.0), below=5.0, above=2.0, min=-4.0, max=8.0)
COUNTS, EDGES = [5.0, 3.0, 1.0, 2.0], [-4.0, 0.0, 1.0, 2.0, 8.0]
VERDICT = "SICK\nwhy"


class Run:
    """A run that keeps what it gets."""

    def __init__(self):
        self.got = []

    def keep(self, *call):
        self.got.append(call)


def image(data):
    """Stands for a library's image, of one of Pillow."""
    return f"{data.mode} image"


def sent(run, monkeypatch, **library):
    """What a run gets of numbers, a histogram, a text and a figure."""
    monkeypatch.setitem(sys.modules, type(run).__module__.partition(".")[0], SimpleNamespace(**library))
    logger, figure = as_logger(run), pytest.importorskip("matplotlib.figure").Figure((1, 1))
    logger.log(VALUES, step=3)
    logger.log_histograms({"fc": HIST}, step=3)
    logger.log_text("verdict", VERDICT, step=4)
    logger.log_figure("figures/run", figure, step=4)
    assert repr(logger) == repr(run)
    return run.got


def test_comet_gets_metrics_histograms_in_its_bins_and_the_headline_of_a_text(monkeypatch):
    class Experiment(Run):
        __module__ = "comet_ml.offline"

        def log_metrics(self, dic, prefix=None, step=None, epoch=None, include_context=True):
            self.keep(dic, step)

        def log_histogram_3d(self, values, name=None, step=None, epoch=None, metadata=None, **kwargs):
            self.keep(name, values.added, step)

        def log_text(self, text, step=None, metadata=None):
            self.keep(text, step, metadata)

        def log_other(self, key, value):
            self.keep(key, value)

        def log_image(self, image_data, name=None, overwrite=False, image_format="png", *, step=None):
            self.keep(name, image(image_data), step)

    class OfComet:
        def add(self, values, counts=None, max_skip_count=None):
            self.added = (values, counts)

    assert sent(Experiment(), monkeypatch, Histogram=OfComet) == [
        (VALUES, 3),
        ("fc", ([-2.0, 0.5, 1.5, 5.0], COUNTS), 3),
        (VERDICT, 4, {"name": "verdict"}),
        ("verdict", "SICK"),
        ("figures/run", "RGB image", 4),
    ]


def test_clearml_gets_a_chart_for_each_statistic_and_no_number_that_it_would_store_as_0(monkeypatch):
    class Logger(Run):
        __module__ = "clearml.logger"

        def report_scalar(self, title, series, value, iteration):
            self.keep(title, series, value, iteration)

        def report_histogram(
            self, title, series, values, iteration=None, labels=None, xlabels=None, xaxis=None
        ):
            self.keep(title, values, xlabels, iteration)

        def report_text(self, msg, level=20, print_console=True, *args, **_):
            self.keep(msg, print_console)

        def report_image(self, title, series, iteration=None, local_path=None, image=None):
            self.keep(title, image.mode, iteration)

    logger = Logger()
    assert sent(logger, monkeypatch) == [
        ("loss", "loss", 0.5, 3),
        ("activations/rms", "block/0", 2.0, 3),
        ("fc", COUNTS, ["-4", "0", "1", "2"], 3),
        ("verdict, 4:\nSICK\nwhy", False),
        ("figures/run", "RGB", 4),
    ]
    task = type("Task", (), {"__module__": "clearml.task", "get_logger": lambda self: logger})()
    assert as_logger(task).run is logger


def test_neptune_gets_series_a_string_and_images(monkeypatch):
    class Handler(Run):
        __module__ = "neptune.handler"

        def __getitem__(self, path):
            def append(value, *, step=None, timestamp=None, wait=False):
                self.keep(path, value, step)

            def assign(value, *, wait=False):
                self.keep(path, value)

            return SimpleNamespace(append=append, assign=assign)

    got = sent(Handler(), monkeypatch, types=SimpleNamespace(File=SimpleNamespace(as_image=image)))
    assert got == [
        *((name, x, 3) for name, x in VALUES.items()),
        ("verdict", VERDICT),
        ("figures/run", "RGB image", 4),
    ]


def test_neptune_scale_gets_everything(monkeypatch):
    class Scale(Run):
        __module__ = "neptune_scale.api.run"

        def log_metrics(self, data, step, *, timestamp=None, preview=False, preview_completion=None):
            self.keep(data, step)

        def log_histograms(self, histograms, step, *, timestamp=None):
            self.keep(histograms, step)

        def log_string_series(self, data, step, *, timestamp=None):
            self.keep(data, step)

        def log_files(self, files, step, *, timestamp=None):
            self.keep(files, step)

    def file(source, mime_type=None, size=None, destination=None):
        return source[1:4], mime_type

    def histogram(bin_edges, counts=None, densities=None):
        return bin_edges, counts

    types = SimpleNamespace(File=file, Histogram=histogram)
    assert sent(Scale(), monkeypatch, types=types) == [
        (VALUES, 3),
        ({"fc": (EDGES, COUNTS)}, 3),
        ({"verdict": VERDICT}, 4),
        ({"figures/run": (b"PNG", "image/png")}, 4),
    ]


def test_aim_gets_a_layer_as_context(monkeypatch):
    class OfAim(Run):
        __module__ = "aim.sdk.run"

        def track(self, value, name=None, step=None, epoch=None, *, context=None):
            self.keep(value, name, step, context)

    assert sent(OfAim(), monkeypatch, Text=lambda text: f"text {text}", Image=image) == [
        (0.5, "loss", 3, None),
        (2.0, "activations/rms", 3, {"layer": "block/0"}),
        (math.inf, "odd", 3, None),
        (f"text {VERDICT}", "verdict", 4, None),
        ("RGB image", "figures/run", 4, None),
    ]


class SwanLabRun(Run):
    __module__ = "swanlab.sdk.internal.run"

    def log(self, data, step=None):
        self.keep(data, step)


def test_swanlab_gets_numbers_a_text_and_images(monkeypatch):
    assert sent(SwanLabRun(), monkeypatch, Text=lambda content: f"text {content}", Image=image) == [
        (VALUES, 3),
        ({"verdict": f"text {VERDICT}"}, 4),
        ({"figures/run": "RGB image"}, 4),
    ]


def test_a_fit_logs_to_a_run_of_another_library_what_it_logs_to_any(monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", SimpleNamespace(Text=str, Image=image))
    run, learn = SwanLabRun(), synth_learner()
    with learn.no_logging():
        learn.fit(1, cbs=[ActivationStats(), GradientHealth(), Log(run, every=5), Diagnose(show=False)])
    names = {name for data, _ in run.got for name in data}
    losses = {step: data["loss"] for data, step in run.got if "loss" in data}
    assert losses == {step: learn.recorder.losses[step] for step in (0, 5)}
    assert {"verdict", "figures/run", "figures/activation_stats/rms", "figures/gradient_health/norm"} <= names


def test_what_is_of_a_library_but_no_run_is_refused():
    with pytest.raises(TypeError, match=r"or an object with a method log\(values, step=…\)"):
        as_logger(type("Dataset", (), {"__module__": "clearml.datasets"})())


def test_bins_reach_to_the_extremes_that_are_outside_of_the_edges():
    assert bins_of(HIST) == (COUNTS, EDGES)
    empty = Histogram(0.0, 2.0, (0.0, 0.0), 0.0, 0.0, math.nan, math.nan)
    assert bins_of(empty) == ([0.0, 0.0], [0.0, 1.0, 2.0])


def test_of_more_bins_than_wandb_takes_neighbors_are_merged():
    counts, edges = bins_of(Histogram(0.0, 1025.0, tuple(range(1025)), 0.0, 0.0, 1.0, 1024.0))
    assert (len(counts), sum(counts)) == (342, sum(range(1025)))
    assert (counts[:2], counts[-1]) == ([0 + 1 + 2, 3 + 4 + 5], 1023 + 1024)
    assert (edges[:3], edges[-2:]) == ([0.0, 3.0, 6.0], [1023.0, 1025.0])
