"""Texts and figures in runs of wandb and trackio, which take objects of their own for these."""

from html import escape
from importlib import import_module
from inspect import ismodule
from io import BytesIO
from typing import Any

from hookcb.core.randomness import random_kept


def png_of(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG file."""
    with BytesIO() as file, random_kept():
        figure.savefig(file, format="png")
        return file.getvalue()


def image_of(figure: Any) -> Any:
    """A figure of matplotlib as an image of Pillow, which comes with matplotlib."""
    return import_module("PIL.Image").open(BytesIO(png_of(figure)))


class Media:
    """Logs texts and figures to a run of another library, or to the module itself."""

    def __init__(self, run: Any, library: str) -> None:
        self.run, self.library = run, import_module(library)

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text as Markdown."""
        self.run.log({name: self.library.Markdown(f"```\n{text}\n```")}, step=step)

    def log_figure(self, name: str, figure: Any, /, step: int) -> None:
        """Logs a figure as an image."""
        self.run.log({name: self.library.Image(image_of(figure))}, step=step)


class WandbMedia(Media):
    """Logs the first line of a text to the summary of the run too."""

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Logs a text as HTML."""
        self.run.log({name: self.library.Html(f"<pre>{escape(text)}</pre>")}, step=step)
        run = self.run if hasattr(self.run, "summary") else self.library.run
        run.summary[name] = text.partition("\n")[0]


FOREIGN = {"wandb": WandbMedia, "trackio": Media}


def with_media(logger: Any) -> Any:
    """The logger, or what logs texts and figures to it, if it is a run of another library."""
    module = logger.__name__ if ismodule(logger) else type(logger).__module__
    library = module.partition(".")[0]
    return FOREIGN[library](logger, library) if library in FOREIGN else logger
