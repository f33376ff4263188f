"""The pages on the architecture and on decisions are about what is there."""

import pkgutil
import re
from pathlib import Path

import pytest

import hookcb
from tests.support import in_turn
from tests.test_floors import FLOORS

ROOT = Path(__file__).parent.parent
PACKAGE = Path(hookcb.__file__).parent
PAGE = "docs/architecture.md"
DECISIONS = ROOT / "docs" / "decisions"
PARTS = ("Question", "Decision", "Why", "Evidence", "What would change it")


def read(name):
    return (ROOT / name).read_text("utf-8")


def rows(page):
    """(floor, what is in the second column, all code in the row) of the table of rooms."""
    found = re.findall(r"^\| (\d+) \| `([^`]+)` \| (.*) \|$", page, re.MULTILINE)
    return [(int(floor), room, re.findall(r"`([^`]+)`", f"`{room}` {text}")) for floor, room, text in found]


def rooms_of(package):
    """Folders of the package, and folders in these; deeper ones only sort files."""
    folders = [path.parent.relative_to(package) for path in package.rglob("__init__.py")]
    return {f"{folder.as_posix()}/" for folder in folders if 0 < len(folder.parts) < 3}


def wrong_rooms(page, package):
    """What is missing in the page, and what is named there that is not in the package."""
    told = {code for _, _, codes in rows(page) for code in codes if code.endswith("/")}
    named = told | set(re.findall(r"`([a-z_]+(?:/[a-z_]+)?/)`", page))
    there = rooms_of(package)
    missing = [f"{room} is a room; add it to the table of {PAGE}" for room in sorted(there - told)]
    not_there = [f"{room} is no room, but {PAGE} names it" for room in sorted(named - there)]
    return missing + [wrong for wrong in not_there if not wrong.startswith(("docs/", "tests/", "decisions/"))]


def test_every_room_is_in_the_page_and_no_other():
    assert wrong_rooms(read(PAGE).replace("`hookcb/`", ""), PACKAGE) == []


def test_a_room_that_is_missing_or_gone_is_told(tmp_path):
    package = tmp_path / "hookcb"
    for folder in (".", "core", "core/attic"):
        (package / folder).mkdir(exist_ok=True, parents=True)
        (package / folder / "__init__.py").touch()
    page = "| 1 | `core/` | with `core/attic/` |\n"
    assert wrong_rooms(page, package) == []
    assert "core/attic/ is a room" in wrong_rooms("| 1 | `core/` | what all need |\n", package)[0]
    assert "report/ is no room" in wrong_rooms(f"{page}| 2 | `report/` | one page |\n", package)[0]
    assert "report/ is no room" in wrong_rooms(f"{page}And then `report/` shows it.", package)[0]


def test_the_floors_are_those_that_imports_are_held_to():
    told = {}
    for floor, room, _ in rows(read(PAGE)):
        told.setdefault(floor, set()).add(room.removesuffix("/"))
    assert [told[floor] for floor in sorted(told)] == FLOORS
    assert sorted(told) == list(range(1, len(FLOORS) + 1))


def test_events_and_public_names_of_the_page_are_there():
    page = read(PAGE)
    events = set(re.findall(r"^ (?:⋮ )?((?:before|after)_\w+)", page, re.MULTILINE))
    assert events <= set(hookcb.Event)
    in_a_step = ("before_batch", "after_pred", "after_loss", "before_backward", "after_backward")
    assert events >= {*in_a_step, "before_step", "after_step", "after_batch", "after_epoch", "after_fit"}
    classes = set(re.findall(r"`([A-Z][a-z]\w+[a-z])(?:\([^`]*\))?`", page))
    assert classes - {"Loop", "Recording"} <= set(hookcb.__all__)


PAGES = [PAGE, "CONTRIBUTING.md", *(f"docs/decisions/{path.name}" for path in DECISIONS.glob("*.md"))]


def missing_paths(text):
    """Files and folders that a page names in backticks, from the root or from hookcb/, and are not there."""
    code = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|json))`", text)
    return [path for path in code if not any((root / path).exists() for root in (ROOT, PACKAGE))]


def missing_links(page, text):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    return [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


@in_turn("page", [*PAGES, "README.md"])
def test_links_lead_somewhere(page):
    assert missing_links(page, read(page)) == []


@in_turn("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    assert [path for path in missing_paths(read(page)) if path not in ("plots.py",)] == []


def missing_names(text):
    """Dotted names in backticks, or asked of help(), that cannot be had; adapters need packages of others."""
    found = set(re.findall(r'`(?:help\("?)?(hookcb(?:\.\w+)+)', text))
    missing = []
    for name in sorted(found):
        if not name.startswith("hookcb.adapters."):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(name)
    return missing


@pytest.mark.parametrize("page", ["README.md", PAGE, "CONTRIBUTING.md"])
def test_names_that_a_page_tells_are_there(page):
    assert missing_names(read(page)) == []


def test_names_that_docstrings_tell_are_there():
    assert missing_names("\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))) == []
    assert missing_names("see `hookcb.gone` and `hookcb.core.loop.Gone`") == [
        "hookcb.core.loop.Gone",
        "hookcb.gone",
    ]


def test_a_path_that_has_gone_is_told():
    text = "`core/events.py` and `core/gone.py`, `tests/nowhere/`, [a page](gone.md)"
    assert missing_paths(text) == ["core/gone.py", "tests/nowhere/"]
    assert missing_links(PAGE, text) == ["gone.md"]


def test_the_index_has_each_decision_once():
    listed = re.findall(
        r"^- \[([\w.]+)\]\(\1\): \S", (DECISIONS / "README.md").read_text("utf-8"), re.MULTILINE
    )
    there = [path.name for path in DECISIONS.glob("*.md") if path.name != "README.md"]
    assert sorted(listed) == sorted(there), "add a line for each file to docs/decisions/README.md"


@in_turn("path", sorted(DECISIONS.glob("[a-z]*.md")), ids=lambda path: path.stem)
def test_a_decision_is_short_and_says_what_would_change_it(path):
    text = path.read_text("utf-8")
    assert re.findall(r"^\*\*(.+)\.\*\* ", text, re.MULTILINE) == list(PARTS)
    assert len([line for line in text.splitlines() if line]) <= 20
