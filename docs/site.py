"""Adds to the site what this folder does not have: README, changelog, scripts, API, notebooks and gallery.

A hook of mkdocs, which mkdocs.yml names. `make docs` executes the notebooks and draws the gallery first.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hookcb

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
ROOMS = {  # title of the page of each room with public names
    "loops": "Loops",
    "diagnosis": "Diagnosis",
    "report": "Pages of runs",
    "activations": "Activations",
    "gradients": "Gradients",
    "nans": "NaN and infinity",
    "profiling": "Time and memory",
    "training": "Training",
    "processes": "Several processes",
    "loggers": "Loggers",
    "hooks": "Hooks and layers",
    "core": "Callbacks, events and the loop",
    "fastai": "Names of fastai",
    "testing": "For your tests",
}
ADAPTERS = {  # members with a page, of each class: the trainer calls the rest
    f"hookcb.adapters.{trainer}.{name}": members
    for trainer in ("lightning", "transformers")
    for name, members in (
        ("HookcbCallback", "diagnose, report, close, coverage, stop_requested"),
        ("DiagnoseCallback", ""),
    )
}
# what a browser would fetch from elsewhere
REMOTE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=[\"']?(?:https?:)?//|<link\b[^>]*\shref=[\"']?(?:https?:)?//[^>]*stylesheet|@import\s+url\(\s*[\"']?https?:"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Configuration whose folders in `nav` are lists of their pages."""
    folders = {
        "api/": [name for name, _ in _api()],
        "notebooks/": [f"notebooks/{path.name}" for path in sorted((ROOT / "nbs").glob("*.ipynb"))],
        "porting/": _pages("porting"),
        "decisions/": _pages("decisions"),
    }

    def filled(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: filled(inside) for title, inside in entry.items()}
        if isinstance(entry, list):
            return [filled(inside) for inside in entry]
        return folders.get(entry, entry)

    config.nav = filled(config.nav)
    return config


@event_priority(100)  # before the plugin for notebooks looks at the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All files of the site."""
    for name, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text("utf-8")))
    files.append(File.generated(config, "examples.md", content=_scripts()))
    for target, content in _api():
        files.append(File.generated(config, target, content=content))
    for folder in ("notebooks", "gallery"):
        if not (BUILD / folder).is_dir():
            raise PluginError(f"there is no build/{folder}; make docs makes it")
        for path in sorted((BUILD / folder).glob("*")):
            name = f"{folder}/{path.name}"
            files.append(File(name, str(BUILD), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Text of a page whose links lead to pages of the site."""
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{name}", f"]({up}{target}", markdown)
    return markdown.replace("](docs/", "](") if page.file.src_uri in PAGES.values() else markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Checks that no page fetches anything from elsewhere, and that compiled files are not published."""
    if compiled := [*Path(config.site_dir).rglob("__pycache__")]:
        raise PluginError(f"{compiled[0]} is published; exclude it in mkdocs.yml")
    for path in Path(config.site_dir).rglob("*.html"):
        if found := REMOTE.search(path.read_text("utf-8")):
            raise PluginError(f"{path} fetches something from elsewhere: {found[0]}")


def _pages(folder: str) -> list[str]:
    """Pages of a folder, the one that tells of the others first."""
    names = [f"{folder}/{path.name}" for path in (ROOT / "docs" / folder).glob("*.md")]
    return sorted(names, key=lambda name: (not name.endswith(("index.md", "README.md")), name))


def _scripts() -> str:
    parts = (
        f"## {path.name}\n\n```python\n{path.read_text('utf-8').rstrip()}\n```\n"
        for path in sorted((ROOT / "examples").glob("*.py"))
    )
    return "\n".join(["# Scripts\n\nScripts to run, from the folder `examples/`.\n", *parts])


def _api() -> Iterator[tuple[str, str]]:
    """Name and text of each page of the API: the public names of a room."""
    by_room: dict[str, list[str]] = {room: [] for room in ROOMS}
    for name in hookcb.__all__:
        room = getattr(hookcb, name).__module__.split(".")[1]
        by_room["loggers" if room == "records" else room].append(name)  # which reads what loggers write
    rows = "\n".join(
        f"| [{ROOMS[room]}]({room}.md) | {', '.join(f'`{name}`' for name in names)} |"
        for room, names in by_room.items()
    )
    rows += f"\n| [Lightning and Hugging Face](adapters.md) | {', '.join(f'`{path}`' for path in ADAPTERS)} |"
    says = "All of these are imported from `hookcb`; adapters have a path."
    yield "api/index.md", f"# API\n\n{says}\n\n| | |\n|---|---|\n{rows}\n"
    for room, names in by_room.items():
        text = "\n\n".join(f"::: hookcb.{name}" for name in names)
        yield f"api/{room}.md", f"# {ROOMS[room]}\n\n{text}\n"
    text = "\n".join(
        f"::: {path}\n    options:\n      show_root_full_path: true\n"
        f"      toc_label: {path.removeprefix('hookcb.adapters.')}\n"
        f"      members: [{members}]\n      inherited_members: [{members}]\n"
        for path, members in ADAPTERS.items()
    )
    yield "api/adapters.md", f"# Lightning and Hugging Face\n\n{text}"
