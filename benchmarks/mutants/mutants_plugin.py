"""Plugin of pytest for `benchmarks/mutants`: tells coverage what runs, or runs the tests of a list."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from measuring import CURRENT, RECORD

TESTS, LOG = "HOOKCB_MUTANTS_TESTS", "HOOKCB_MUTANTS_LOG"


def pytest_configure(config):
    if RECORD in os.environ:
        os.environ[CURRENT] = f"{os.environ[RECORD]}/{os.getpid()}.test"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if RECORD not in os.environ:
        return (yield)
    defs = [x for found in item._fixtureinfo.name2fixturedefs.values() for x in found]
    with open(f"{os.environ[RECORD]}/{os.getpid()}.uses", "a", encoding="utf-8") as file:
        file.writelines(json.dumps([_shared(x), item.nodeid]) + "\n" for x in defs if _shared(x))
    with _context(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Keep what a shared fixture executes apart: it counts for all its tests, not for the first alone."""
    if RECORD not in os.environ or not (name := _shared(fixturedef)):
        return (yield)
    with _context(name):
        return (yield)


def _shared(fixturedef):
    """Name of a fixture that several tests share, or nothing."""
    return f"{fixturedef.baseid}::{fixturedef.argname}" if fixturedef.scope in ("module", "class") else ""


@contextmanager
def _context(name):
    from coverage import Coverage

    file = Path(os.environ[CURRENT])
    outer = file.read_text() if file.exists() else ""
    file.write_text(name)
    Coverage.current().switch_context(name)
    try:
        yield
    finally:
        file.write_text(outer)
        Coverage.current().switch_context(outer)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the tests of the list, in its order."""
    if TESTS in os.environ:
        order = {test: i for i, test in enumerate(json.loads(Path(os.environ[TESTS]).read_text()))}
        items[:] = sorted((x for x in items if x.nodeid in order), key=lambda x: order[x.nodeid])


def pytest_runtest_logstart(nodeid):
    _log("run", nodeid)


def pytest_runtest_logreport(report):
    _log("failed", report.nodeid, report.failed)


def pytest_collectreport(report):
    _log("failed", report.nodeid, report.failed)


def _log(what, nodeid, happened=True):
    if LOG in os.environ and happened:
        with open(os.environ[LOG], "a", encoding="utf-8") as file:
            file.write(f"{what} {nodeid}\n")
