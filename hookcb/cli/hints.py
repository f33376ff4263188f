"""Names like a misspelled one, for messages."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class NotFoundError(Exception):
    """Raised if there is no such file, module or name; its message says which there are."""


def similar(name: str, names: Iterable[str]) -> str:
    """The names that are most like `name`, to append to a message; "" if none is.

    >>> similar("demon", ["demo", "diagnose"])
    '; similar: demo'
    """
    found = get_close_matches(name, sorted(set(names)), n=3)
    return f"; similar: {', '.join(found)}" if found else ""


def similar_files(path: str) -> str:
    """The files beside `path` whose names are most like its own, to append to a message."""
    folder = Path(path).parent
    try:
        names = {file.name: str(file) for file in folder.iterdir() if file.is_file()}
    except OSError:
        return f"; there is no folder {str(folder)!r}"
    found = get_close_matches(Path(path).name, sorted(names), n=3)
    return f"; similar: {', '.join(names[name] for name in found)}" if found else ""


def no_module(name: str) -> str:
    """Message for a module that was not found from the current folder."""
    files = [*Path().glob("*.py"), *Path().glob("*/*.py")]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    first = name.partition(".")[0]
    return f"there is no module {name!r}{similar(name, names)}; run it in the folder that contains {first!r}"
