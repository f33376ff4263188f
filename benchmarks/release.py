"""Builds wheel and sdist, checks them, and runs the demo from the wheel; uploads nothing: `make release`."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
NEEDED = ("hookcb/py.typed", "hookcb/report/vendor/uPlot.LICENSE", "hookcb/report/assets/page.html")
SOURCES = ("tests", "docs", "nbs", "benchmarks", "examples", "hookcb")  # folders of the sdist


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    timed("build", [sys.executable, "-m", "build", "--outdir", DIST, ROOT])
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    timed("twine check", [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])
    wrong = [*wrong_in_wheel(names_in_wheel(wheel), own_files()), *wrong_in_sdist(names_in_sdist(sdist))]
    if wrong:
        sys.exit("\n".join(wrong))
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, Path(folder))
    for file in (wheel, sdist):
        print(f"{file.name:40} {file.stat().st_size / 1000:8.0f} kB")
    print("checked; nothing was uploaded")


def own_files() -> set[str]:
    """Files of the package, as they are named in a wheel."""
    files = (ROOT / "hookcb").rglob("*")
    return {p.relative_to(ROOT).as_posix() for p in files if p.is_file() and "__pycache__" not in p.parts}


def names_in_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as opened:
        return opened.namelist()


def names_in_sdist(path: Path) -> list[str]:
    """Names without the folder that has all of them."""
    with tarfile.open(path) as opened:
        return [name.partition("/")[2] for name in opened.getnames()]


def wrong_in_wheel(names: Iterable[str], own: set[str]) -> list[str]:
    """Files of the package that the wheel lacks, and files that do not belong into it."""
    there = {name for name in names if ".dist-info/" not in name}
    licenses = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    wrong = [f"the wheel lacks {name}" for name in sorted(own.union(NEEDED) - there)]
    wrong += [f"the wheel has {name}, which is not part of the package" for name in sorted(there - own)]
    return wrong if licenses else [*wrong, "the wheel lacks LICENSE"]


def wrong_in_sdist(names: Iterable[str]) -> list[str]:
    """Folders and files that the sdist lacks, and hidden files in it."""
    first = {name.partition("/")[0] for name in names}
    needed = {*SOURCES, "LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", "PKG-INFO"}
    hidden = [name for name in first if name.startswith(".") and name != ".gitignore"]  # hatch adds that one
    return [f"the sdist lacks {name}" for name in sorted(needed - first)] + [
        f"the sdist has {name}" for name in sorted(hidden)
    ]


def try_wheel(wheel: Path, folder: Path) -> None:
    """Installs the wheel into a fresh environment, and runs the demo in an empty folder."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    timed("install", [*install, "--constraint", ROOT / "constraints.txt", f"{wheel}[demo]"])
    empty = folder / "empty"
    empty.mkdir()
    where = "import hookcb; print(hookcb.__version__, hookcb.__file__)"
    said = timed("import", [python, "-c", where], empty, shown=False)
    version, file = said.split(maxsplit=1)
    if not Path(file.strip()).is_relative_to(folder) or f"-{version}-" not in wheel.name:
        sys.exit(f"the environment of {wheel.name} imports {said}")
    timed("hookcb --version", [python, "-m", "hookcb", "--version"], empty)
    timed("hookcb demo", [python.with_name("hookcb"), "demo"], empty)


def timed(what: str, command: list[object], folder: Path = ROOT, shown: bool = True) -> str:
    """Runs a command, prints how long it takes, and returns what it writes; exits if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    begin = time.perf_counter()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if shown:
        print(*done.stdout.splitlines()[-3:], sep="\n")
    print(f"{what:40} {time.perf_counter() - begin:8.1f} s", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{what} failed with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
