"""The tests run beside plug-ins of pytest that happen to be installed, whatever these warn of."""

from tests.support import ROOT, start

LOUD = """
import warnings

def pytest_configure(config):
    warnings.warn("told when it is set up, as by pytest-benchmark beside xdist")

def pytest_sessionstart(session):
    warnings.warn("told at the start")

def pytest_sessionfinish(session):
    warnings.warn("told at the end")

def pytest_terminal_summary(terminalreporter):
    warnings.warn("told in the summary")
"""
TESTS = """
import warnings
import pytest

def test_that_warns():
    warnings.warn("told in a test")

@pytest.mark.filterwarnings("ignore:told")
def test_that_expects_it():
    warnings.warn("told in a test")
"""


RUN = """
import sys
import pytest
sys.path.insert(0, {folder!r})
options = ["-n0", "-p", "loud", "-p", "tests.conftest", "--rootdir", {root!r}]
options += ["-c", {root!r} + "/pyproject.toml"]
sys.exit(pytest.main([*options, {folder!r} + "/test_loud.py"]))
"""


def said(folder, plugin, tests):
    """What pytest says of tests beside a plug-in."""
    (folder / "loud.py").write_text(plugin)
    (folder / "test_loud.py").write_text(tests)
    start("-c", RUN.format(folder=str(folder), root=str(ROOT)), log=folder / "log").join()
    return (folder / "log").read_text()


def test_a_warning_of_a_plug_in_ends_nothing_and_one_of_a_test_fails_it(tmp_path):
    text = said(tmp_path, LOUD, TESTS)
    assert "INTERNALERROR" not in text
    assert "1 failed, 1 passed" in text, text


def test_a_warning_of_a_file_that_is_imported_fails_it(tmp_path):
    text = said(tmp_path, "", "import warnings\nwarnings.warn('told at the import')")
    assert "UserWarning: told at the import" in text
