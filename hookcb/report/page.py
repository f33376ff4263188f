"""Writing a page, and reading its data back."""

import base64
import hashlib
import re
import zlib
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from hookcb.core.arguments import check_page
from hookcb.core.whole import write_whole
from hookcb.report.data import PageData
from hookcb.report.text import text_of, title_of

HERE = Path(__file__).parent
STYLES = ("vendor/uPlot-1.6.32.min.css", "assets/page.css")
SHARED = (
    "assets/base.js",  # first: all of them are strict by it
    "vendor/uPlot-1.6.32.iife.min.js",
    "assets/decode.js",
    "assets/colors.js",
    "assets/stats.js",
    "assets/tables.js",
    "assets/timeline.js",
    "assets/lines.js",
    "assets/axis.js",
    "assets/marks.js",
    "assets/save.js",
    "assets/charts.js",
    "assets/run.js",
)
BOOT = ("assets/boot.js",)
# comments and indentation of scripts; a license, "/*!", stays
SPARED = re.compile(r"^[ \t]*(?://[^\n]*\n|/\*\*.*?\*/\n)?[ \t]*", re.MULTILINE | re.DOTALL)
BEGIN, END = '<script type="application/json" id="data">', "</script>"


class Document(NamedTuple):
    """A kind of page: its title, its sections, and the scripts that it has beside the shared ones."""

    title: str
    sections: str
    scripts: tuple[str, ...]


RUN = Document(
    "hookcb: a training",
    "assets/run.html",
    (
        "assets/verdict.js",
        "assets/model.js",
        "assets/layers.js",
        "assets/strips.js",
        "assets/hists.js",
        "assets/layer.js",
        "assets/depth.js",
        "assets/costs.js",
        "assets/follow.js",
        "assets/main.js",
    ),
)
COMPARISON = Document("hookcb: runs compared", "assets/compare.html", ("assets/compare.js",))


class Page:
    """A run as a page: one HTML file, which needs neither server nor network. Notebooks show it as it is.

    Attributes:
        data: what it shows.
        path: the file that it was written to, None if it was not.
    """

    def __init__(self, data: PageData) -> None:
        self.data = data
        self.path: Path | None = None

    def save(self, path: str | Path) -> Path:
        """Writes the page to a file, whose folder is created if it is missing.

        Raises:
            ValueError: If the name of the file does not end in .html.
            OSError: If the file cannot be written.
        """
        path = check_page(path)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; give the path of a file, as {path / 'run.html'}")
        self.data.title = self.data.title or path.stem
        self.path = write_whole(path, lambda file: file.write(page_of(self.data).encode()))
        return self.path

    def __repr__(self) -> str:
        where = "not written yet, see save()" if self.path is None else f"written to {self.path}"
        return f"Page({self.data.headline!r}, {where})"

    def _repr_html_(self) -> str:
        frame = "width:100%; height:80vh; border:1px solid #8884"
        return f'<iframe title="hookcb" style="{frame}" srcdoc="{escape(page_of(self.data))}"></iframe>'


def load_report(path: str | Path) -> PageData:
    """Reads the data of a page that hookcb has written.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is no such page, is damaged, or is of another version.
    """
    text = Path(path).read_bytes().decode(errors="replace")
    _, begin, rest = text.partition(BEGIN)
    data, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} is not a whole page of hookcb: it has no data; write it anew with report()")
    try:
        return PageData.from_json(data)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; write it anew with report()") from error


def page_of(data: PageData) -> str:
    """The page as text."""
    return filled(RUN._replace(title=title_of(data)), data.to_json(), text_of(data))


def filled(kind: Document, text: str, markup: Mapping[str, str], *, is_live: bool = False) -> str:
    """A document with its data, and the markup that stands in it before its scripts run.

    Only our own scripts and styles may run in it, by their hashes. One that `is_live` may ask the server that
    it comes from for more data; others connect to nothing.

    The script is deflated, in base64, without comments and indentation; that saves half of an empty page.
    """
    parts = _code(kind.scripts) | {"DATA": text}
    parts["POLICY"] += "; connect-src 'self'" if is_live else ""
    parts |= {"TITLE": escape(kind.title), "MAIN": inserted(_joined((kind.sections,)), markup)}
    return inserted(_joined(("assets/page.html",)), {**parts, **markup})


@cache
def _code(own: tuple[str, ...]) -> dict[str, str]:
    """Styles and scripts of a kind of page, and the policy that allows them; the same for each page."""
    style, script, boot = (_joined(names) for names in (STYLES, (*SHARED, *own), BOOT))
    script = SPARED.sub("", script)
    scripts = f"script-src {_hash(boot)} {_hash(script)}"
    policy = f"default-src 'none'; {scripts}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    packed = base64.b64encode(zlib.compress(script.encode(), 9)).decode("ascii")
    return {"POLICY": policy, "STYLE": style, "SCRIPT": packed, "BOOT": boot}


def inserted(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts, each at the place that has its name: "@@TITLE@@"."""
    pieces = template.split("@@")  # text, name, text, name …
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
