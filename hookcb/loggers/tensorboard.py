"""TensorBoardLogger: numbers and histograms for TensorBoard."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookcb.core.arguments import hinted
from hookcb.loggers.base import import_extra
from hookcb.loggers.media import png_of
from hookcb.records.recording import Histogram

PROTOS = "tensorboard.compat.proto"


class TensorBoardLogger:
    """Writes numbers and histograms to a folder for TensorBoard: `tensorboard --logdir FOLDER`.

    Numbers named `activations/<layer>/<stat>` have a chart each in the tabs Time Series and Scalars. In the
    tab Custom Scalars a statistic has one chart with a line for each layer. TensorBoard takes one such layout
    of each folder, the last, so one of your own belongs into another folder.

    When `log` returns, the operating system has the record, so it survives if the process is killed. If a
    training is resumed in a folder with events, TensorBoard discards events of later steps, left by a crash.

    Args:
        folder: the folder, one for each run; created if it is missing.

    Raises:
        ModuleNotFoundError: If the package tensorboard is not installed.

    >>> from hookcb.loggers import Log, TensorBoardLogger
    >>> log = Log(TensorBoardLogger("runs/first"))  # doctest: +SKIP
    """

    @hinted
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self._writer: Any = None  # opened at the first log
        self._has_written = False  # if it has, events in the folder are its own
        self._in_layout: set[tuple[str, str]] = set()  # first and last parts of names that a chart has
        _import("torch.utils.tensorboard")

    @property
    def is_open(self) -> bool:
        """Whether a file of events is open."""
        return self._writer is not None

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Writes scalars, rounded to float32."""
        self._write([{"tag": name, "simple_value": float(x)} for name, x in values.items()], step)
        self._lay_out(values, step)

    def _lay_out(self, names: Iterable[str], step: int) -> None:
        """Writes the charts of Custom Scalars, once names have a layer between prefix and statistic."""
        ends = Counter((x[0], x[-1]) for x in (name.split("/") for name in names) if len(x) > 2)
        several = {pair for pair, n in ends.items() if n > 1}
        if several <= self._in_layout:
            return
        self._in_layout |= several
        layout: dict[str, dict[str, list[Any]]] = {}
        for prefix, stat in sorted(self._in_layout):
            pattern = f"^{re.escape(prefix)}/.*/{re.escape(stat)}$"  # matched by Python's re, see its plugin
            layout.setdefault(prefix, {})[stat] = ["Multiline", [pattern]]
        self._add(_import("torch.utils.tensorboard.summary").custom_scalars(layout), step)

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Writes histograms, for the tabs Distributions and Histograms."""
        self._write([{"tag": name, "histo": _histo(hist)} for name, hist in hists.items()], step)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Writes a text, for the tab Text, line by line as it is."""
        summary = _import("torch.utils.tensorboard.summary").text(name, f"```\n{text}\n```")
        self._add(summary, step)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Writes a figure of matplotlib, for the tab Images."""
        width, height = map(int, figure.get_size_inches() * figure.dpi)
        image = {"width": width, "height": height, "colorspace": 4, "encoded_image_string": png_of(figure)}
        self._write([{"tag": name, "image": image}], step)

    def close(self) -> None:
        """Closes the file of events; a later log opens another one in the same folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def of_rank(self, rank: int) -> "TensorBoardLogger":
        """Logger for another rank, which TensorBoard shows as a run of its own."""
        return TensorBoardLogger(self.folder / f"rank{rank}" if rank else self.folder)

    def _write(self, values: list[dict[str, Any]], step: int) -> None:
        # all in one event, as each event takes 0.1 ms
        self._add(_import(f"{PROTOS}.summary_pb2").Summary(value=values), step)

    def _add(self, summary: Any, step: int) -> None:
        if self._writer is None:
            self._open(step)
        self._writer.add_summary(summary, step)
        self._writer.flush()

    def _open(self, step: int) -> None:
        is_resumed = not self._has_written and step > 0 and any(self.folder.glob("events.out.tfevents.*"))
        self._writer = _import("torch.utils.tensorboard").FileWriter(str(self.folder))
        self._has_written = True
        if is_resumed:
            events = _import(f"{PROTOS}.event_pb2")
            self._writer.add_event(events.Event(step=step, session_log={"status": "START"}))

    def __repr__(self) -> str:
        return f"TensorBoardLogger({str(self.folder)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None}  # a copy opens its own file


def _import(module: str) -> Any:
    return import_extra(module, "tensorboard", "tensorboard")


def _histo(hist: Histogram) -> dict[str, Any]:
    """Fields of TensorBoard's histogram: buckets by their upper edge; the first one begins at `min`."""
    edges, counts = hist.edges, [hist.below, *hist.counts, hist.above]
    low, high = (edge if math.isnan(x) else x for x, edge in ((hist.min, hist.low), (hist.max, hist.high)))
    middles = [(a + b) / 2 for a, b in zip((low, *edges), (*edges, high), strict=True)]
    return {
        "min": low,
        "max": high,
        "num": sum(counts),
        "sum": sum(n * x for n, x in zip(counts, middles, strict=True)),
        "sum_squares": sum(n * x * x for n, x in zip(counts, middles, strict=True)),
        "bucket_limit": [*edges, max(high, edges[-1])],
        "bucket": counts,
    }
