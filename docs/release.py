"""Checks what `make release` has built: what is in it, and that the wheel runs alone."""

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

EXAMPLES = ROOT / "examples"
NAMED = ("hookcb", "torch", "numpy", "lightning", "transformers")
ENVIRONMENTS = (  # name, what pip installs, and scripts
    ("constraints.txt", ["-c", "{constraints}", "{wheel}[demo]"], ["plain_loop.py"]),
    ("the newest", ["{wheel}[demo,lightning,transformers]"], ["lightning_trainer.py", "hf_trainer.py"]),
    ("the oldest torch", ["torch==2.6.0", "{wheel}[demo]"], ["plain_loop.py"]),
)


def main() -> None:
    """Checks both files; exits with a sentence if something is wrong."""
    (wheel,), (source,) = (list((ROOT / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    check_wheel(wheel)
    check_source(source)
    for file in (wheel, source):
        print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB")
    for environment in ENVIRONMENTS:
        with tempfile.TemporaryDirectory() as folder:
            try_wheel(wheel, Path(folder), *environment)


def check_wheel(wheel: Path) -> None:
    """Checks that the wheel has the package and its licenses, and nothing of tests, docs or benchmarks."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    missing = [name for name in NEEDED if not any(found.endswith(name) for found in names)]
    foreign = [
        name
        for name in names
        if not name.startswith(("hookcb/", "hookcb-")) or PurePosixPath(name).name.startswith("test_")
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


def try_wheel(wheel: Path, folder: Path, name: str, install: list[str], scripts: list[str]) -> None:
    """Installs the wheel into a fresh environment, and runs the demo and examples in an empty folder.

    Args:
        wheel: the wheel.
        folder: an empty folder.
        name: name of the environment, to print.
        install: what pip installs, with `{wheel}` for the wheel.
        scripts: files of `examples/` to run.
    """
    began = time.perf_counter()
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = [part.format(wheel=wheel, constraints=ROOT / "constraints.txt") for part in install]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *told], check=True, env=env)
    print(f"{name}: installed in {time.perf_counter() - began:.0f} s: {versions(python)}")
    (folder / "empty").mkdir()
    for program in (["-m", "hookcb", "demo", "--epochs", "3"], *([str(EXAMPLES / file)] for file in scripts)):
        began = time.perf_counter()
        ran = subprocess.run(
            [python, *program], env=env, cwd=folder / "empty", capture_output=True, text=True, check=False
        )
        command, took = " ".join(program), time.perf_counter() - began
        if ran.returncode:
            sys.exit(f"{name}: {command} failed:\n{ran.stdout[-2_000:]}{ran.stderr[-4_000:]}")
        print(f"  python {command}, {took:.0f} s, ends with: {ran.stdout.rstrip().splitlines()[-1]}")


def versions(python: str) -> str:
    """Versions of what matters in an environment."""
    command = [python, "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return ", ".join(line for line in listed if line.partition("==")[0] in NAMED)


if __name__ == "__main__":
    main()
