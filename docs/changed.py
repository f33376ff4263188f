"""Prints the tests that a change may break, by the floors of docs/architecture.md.

`python docs/changed.py [BASE]`: the change is what differs from BASE, by default origin/main, in commits, the
working tree, and files not yet added.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABOVE_LOOPS = ("contract", "scenarios", "ranks")  # tests of the package as a whole, in a loop


def floors() -> dict[str, int]:
    """Number of the floor of each room, "core" or "public.py", as the table has them."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    return {
        room: int(floor) for floor, room in re.findall(r"^\| (\d+) \| `([\w.]+)/?` \|", page, re.MULTILINE)
    }


def changed(base: str) -> list[str]:
    """Paths of files that differ from where this branch has left `base`."""
    start = git("merge-base", "HEAD", base)[0]
    return git("diff", "--name-only", start) + git("ls-files", "--others", "--exclude-standard")


def git(*words: str) -> list[str]:
    """Lines that a command of git prints."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def noticing(files: Iterable[str]) -> list[str]:
    """Folders and files of tests, relative to the root, which may notice that these files have changed.

    These are the tests of the rooms that have changed and of all rooms above, the files of tests that have
    changed, and the files in `tests/` itself, which are about the whole. A helper of tests counts as its
    folder, one of all tests as all.
    """
    of_room, found = floors(), set()
    for parts in (Path(file).parts for file in files):
        if parts[0] == "hookcb" and len(parts) > 1:
            floor = of_room.get(parts[1], 0)
            found |= {parts[1]} | {room for room, other in of_room.items() if other > floor}
            found |= set(ABOVE_LOOPS) if floor <= of_room["loops"] else set()
        elif parts[0] == "tests":
            is_test = parts[-1].startswith("test_")
            found.add("/".join(parts[1:] if is_test else parts[1:-1]))
        elif parts[0] == "benchmarks":
            found.add("benchmarks")
    of_all = [path.name for path in (ROOT / "tests").glob("test_*.py")]
    paths = sorted(
        f"tests/{name}" for name in {*found, *of_all} - {"__init__.py", "__main__.py", "public.py"}
    )
    return ["tests"] if "" in found else [path for path in paths if (ROOT / path).exists()]


if __name__ == "__main__":
    sys.stdout.write("\n".join(noticing(changed(*sys.argv[1:] or ["origin/main"]))) + "\n")
