"""Measures which lines of hookcb a process executes, by test, in each process that `record` starts."""

import atexit
import os
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coverage import Coverage

RECORD = "HOOKCB_MUTANTS_RECORD"  # folder to record to
CURRENT = "HOOKCB_MUTANTS_CURRENT"  # file with the test or shared fixture that runs now

measured: "list[Coverage]" = []  # those of a parent are kept, or a child would close its files


def begin() -> None:
    """Start measuring in a process; the test is the one that its pytest runs."""
    from coverage import Coverage

    for inherited in measured[-1:]:
        inherited._auto_save = False
        inherited.stop()
    folder = os.environ[RECORD]
    cov = Coverage(f"{folder}/lines", data_suffix=True, source=["hookcb"], config_file=f"{folder}/coveragerc")
    cov._warn_no_data = cov._warn_unimported_source = cov._warn_preimported_source = False
    measured.append(cov)
    cov.start()
    current = Path(os.environ.get(CURRENT, os.devnull))
    if current.is_file():
        cov.switch_context(current.read_text())


def end() -> None:
    measured[-1].stop()
    measured[-1].save()


def install() -> None:
    begin()
    atexit.register(end)
    os.register_at_fork(after_in_child=begin)
    # forked processes of multiprocessing end without atexit, and forget what their parent registered
    util.register_after_fork(begin, lambda _: util.Finalize(None, end, exitpriority=100))
