"""Run of the tests of one mutant, in a copy of the repository."""

import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mutant import Place
from mutants_plugin import LOG, TESTS

MEMORY = 8 << 30  # bytes of a process; a fault may make a list grow without end
OURS = "HOOKCB_MUTANTS_OURS"  # marks the processes of a trial, some of which leave its process group
ENDS = 2.0  # seconds that a test's processes have to end by themselves
BEGINNING = 10**9  # time of the first file that is written; later ones get later seconds


@dataclass(frozen=True)
class Result:
    """End of a trial: "dead", "alive" or "time over", after so many of its tests."""

    result: str
    n_tests: int
    n_run: int
    seconds: float
    test: str = ""  # that failed, or that ran when the time was over
    not_counted: tuple[str, ...] = ()  # tests that fail without the fault


def scratch_copy(root: Path, to: Path) -> Path:
    """Copy what git keeps of a repository, as it is now, to `to/hookcb`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    for file in filter(None, listed.split("\0")):
        if (root / file).is_file():
            (to / "hookcb" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, to / "hookcb" / file)
    return to / "hookcb"


def run_pytest(
    copy: Path, args: Sequence[str], env: Mapping[str, str], limit: float | None = None
) -> int | None:
    """Run pytest in a copy; all its processes have ended then.

    Returns:
        Its exit code, or None if the time is over.
    """
    temp = copy.parent / "temp"
    temp.mkdir(exist_ok=True)
    path = os.pathsep.join([str(copy), str(Path(__file__).parent)])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temp), "OMP_NUM_THREADS": "1", **env}
    env[OURS] = str(copy)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process would compile torch
    # not the plug-in of the hookcb that is installed, which imports that of the copy
    plugins = ["-p", "mutants_plugin", "-p", "no:hookcb", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, *args]
    out = subprocess.DEVNULL if LOG in env else None
    process = subprocess.Popen(command, cwd=copy, env=env, stdout=out, stderr=out, start_new_session=True)
    if limit is not None:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process, str(copy))
        shutil.rmtree(temp, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the processes of a trial; if its pytest has ended, they have a moment to end by themselves."""
    patience = time.monotonic() + (0.0 if process.poll() is None else ENDS)
    while left := _marked(mark):
        if time.monotonic() >= patience:
            kill(left)
        time.sleep(0.05)
    process.wait()


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> set[int]:
    """Processes that have the mark in their environment, in the state in which they were started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is another user's, or has ended
            if f"{OURS}={mark}\0".encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found


class Trials:
    """Copies of a repository in which mutants are tried, one at a time in each."""

    def __init__(self, root: Path, folder: Path, n_copies: int, limit: float) -> None:
        self.limit, self.is_stopped, self._n_written = limit, False, 0
        self._copies = [scratch_copy(root, folder / str(i)) for i in range(n_copies)]
        self._free = queue.SimpleQueue[Path]()
        for copy in self._copies:
            self._free.put(copy)

    def run(self, place: Place, source: bytes, tests: Sequence[str]) -> Result:
        """Run the tests of a mutant until one fails that passes without it."""
        copy, began, not_counted = self._free.get(), time.monotonic(), list[str]()
        file = copy / "hookcb" / place.mutant.file
        try:
            while True:
                left = [test for test in tests if test not in not_counted]
                self._write(file, place.apply(source))
                code, ran, failed = self._pytest(copy, left, "-x")
                seconds = round(time.monotonic() - began, 1)
                self._write(file, source)
                if not code:
                    result, test = ("alive", "") if code == 0 else ("time over", ran[-1] if ran else "")
                    return Result(result, len(tests), len(ran), seconds, test, tuple(not_counted))
                test = next(iter(failed or ran[-1:]), "")
                # as far as that test, or as the first of a file that cannot be imported
                n = left.index(test) if test in left else [x.startswith(test) for x in left].index(True)
                control, _, known = self._pytest(copy, left[: n + 1])
                if not control:  # they pass, or the time is over
                    name = test or f"start of pytest, exit code {code}"
                    return Result("dead", len(tests), len(ran), seconds, name, tuple(not_counted))
                if not known:
                    raise RuntimeError(f"pytest ends with exit code {control} without the fault, at {test!r}")
                not_counted += known
        finally:
            self._free.put(copy)

    def stop(self) -> None:
        """End all trials that are running, which raise InterruptedError."""
        self.is_stopped = True
        kill(pid for copy in self._copies for pid in _marked(str(copy)))

    def _pytest(
        self, copy: Path, tests: Sequence[str], *args: str
    ) -> tuple[int | None, list[str], list[str]]:
        """Exit code of pytest, or None if the time is over; tests that began, and those that failed."""
        if self.is_stopped:
            raise InterruptedError
        if not tests:
            return 0, [], []
        todo, log = copy.parent / "tests.json", copy.parent / "log"
        todo.write_text(json.dumps(tests))
        log.write_text("")
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        env = {TESTS: str(todo), LOG: str(log)}
        code = run_pytest(copy, [*files, "-n0", *args], env, self.limit)
        if self.is_stopped:
            raise InterruptedError
        lines = [line.partition(" ") for line in log.read_text().splitlines()]
        began, failed = ([x for what, _, x in lines if what == kind] for kind in ("run", "failed"))
        return code, began, list(dict.fromkeys(failed))

    def _write(self, file: Path, source: bytes) -> None:
        """Write a file with a time of its own: by time and size Python knows whether to compile it again."""
        self._n_written += 1
        file.write_bytes(source)
        os.utime(file, (BEGINNING + self._n_written,) * 2)
