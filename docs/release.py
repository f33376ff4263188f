"""Checks what `make release` has built: what is in it, and that the demo runs from the wheel alone."""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
NEEDED = (
    "hookcb/py.typed",
    "hookcb/__main__.py",
    "hookcb/report/assets/main.js",
    "vendor/uPlot.LICENSE",
    "licenses/LICENSE",
)
OF_SOURCE = (
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "SECURITY.md",
    "CITATION.cff",
    "tests/conftest.py",
)


def main() -> None:
    """Checks both files; exits with a sentence if something is wrong."""
    (wheel,), (source,) = (list((ROOT / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    check_wheel(wheel)
    check_source(source)
    for file in (wheel, source):
        print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, Path(folder))


def check_wheel(wheel: Path) -> None:
    """Checks that the wheel has the package and its licenses, and nothing of tests, docs or benchmarks."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    missing = [name for name in NEEDED if not any(found.endswith(name) for found in names)]
    foreign = [
        name
        for name in names
        if not name.startswith(("hookcb/", "hookcb-")) or "test_" in PurePosixPath(name).name
    ]
    vendored = [name for name in names if "/vendor/" in name]
    licensed = any("LICENSE" in name.upper() for name in vendored)
    if missing or foreign or (vendored and not licensed):
        sys.exit(f"{wheel.name}: missing {missing}, foreign {foreign}, license of vendored files: {licensed}")


def check_source(source: Path) -> None:
    """Checks that the source distribution has what building and testing need."""
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    if missing := [name for name in OF_SOURCE if name not in names]:
        sys.exit(f"{source.name}: missing {missing}")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Installs the wheel into a fresh environment, and runs the demo in an empty folder."""
    began = time.perf_counter()
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[demo]"]
    subprocess.run(install, check=True, env=env)
    installed = time.perf_counter()
    (folder / "empty").mkdir()
    command = [python, "-m", "hookcb", "demo", "--epochs", "3"]
    shown = subprocess.run(command, check=True, env=env, cwd=folder / "empty", capture_output=True, text=True)
    took = time.perf_counter() - installed
    print(f"installed in {installed - began:.0f} s; the demo took {took:.0f} s and ends with")
    print(shown.stdout.rstrip().splitlines()[-1])


if __name__ == "__main__":
    main()
