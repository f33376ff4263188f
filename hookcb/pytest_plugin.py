"""The plug-in for pytest: the fixture `healthy`, and `pytest --hookcb`, which watches what tests train.

pytest imports it wherever hookcb is installed, so it imports nothing of hookcb until one of them is used.
"""

import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hookcb.cli.config import Config
    from hookcb.cli.model_tracker import Result
    from hookcb.diagnosis.verdict import Verdict

MARKER = (
    "hookcb(is_watched, ignore=codes): with --hookcb, whether trainings of the test are watched, by default "
    "True, and which findings are left out"
)
USAGE = "write @pytest.mark.hookcb(False) or @pytest.mark.hookcb(ignore=['{}'])"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--hookcb`."""
    parser.getgroup("hookcb").addoption(
        "--hookcb",
        action="store_true",
        help="let tests that pass but train a sick model fail with the verdict",
    )


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    """Blocks the other name of this plug-in, as pytest refuses to register it twice.

    It is `hookcb` as the entry point, and `hookcb.pytest_plugin` with `-p`, or in a conftest.py.
    """
    if plugin is sys.modules[__name__]:
        manager.set_blocked("hookcb" if manager.get_name(plugin) == __name__ else __name__)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and with `--hookcb` what watches the tests.

    Raises:
        pytest.UsageError: If `[tool.hookcb]` in pyproject.toml, or HOOKCB in the environment, is invalid.
    """
    config.addinivalue_line("markers", MARKER)
    if config.getoption("--hookcb"):
        from hookcb.cli.config import find_config
        from hookcb.core.switch import is_off

        try:
            if is_off():
                return
            habits = find_config(config.rootpath)
        except (LookupError, TypeError, ValueError) as error:
            raise pytest.UsageError(error.args[0]) from error
        config.pluginmanager.register(_TestWatcher(habits), "hookcb_watcher")


@pytest.fixture(scope="session")
def healthy() -> "Callable[[Any], Verdict]":
    """Asserts that a training was healthy, or only slow: `healthy(learn)`; see `_assert_healthy`."""
    return _assert_healthy


def _assert_healthy(of: Any) -> "Verdict":
    """Returns the verdict on a training if it is healthy, or only slow; skips the test if HOOKCB=0.

    Args:
        of: a `Verdict`, or what has a method `diagnose`: a `Learner`, a `watch`, the callback of an adapter.

    Raises:
        AssertionError: If it is not healthy, or nothing of it was seen; the message is the verdict.
        TypeError: If it is something else.
    """
    __tracebackhide__ = True
    from hookcb.core.switch import OFF, is_off
    from hookcb.diagnosis.verdict import Verdict

    if is_off():
        pytest.skip(OFF)

    verdict = of.diagnose() if callable(getattr(of, "diagnose", None)) else of
    if not isinstance(verdict, Verdict):
        raise TypeError(f"healthy takes a Learner, a watch or a Verdict, got {of!r:.80}")
    if not verdict:
        raise AssertionError(str(verdict))
    return verdict


class _TestWatcher:
    """Watches what each test trains in its call, as `hookcb diagnose` watches a script.

    Args:
        habits: those of the project.
    """

    def __init__(self, habits: "Config") -> None:
        self._habits = habits

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Runs a test, and fails it if it has passed and trained a sick model."""
        is_watched, ignored = _marked(item)
        if not is_watched:
            return (yield)
        from hookcb.cli.launch import hide_own_frames
        from hookcb.cli.model_tracker import ModelTracker

        tracker = ModelTracker(ignored=ignored, config=self._habits, is_test=True)
        try:
            with tracker.watching():
                result = yield
        except BaseException as error:
            hide_own_frames(error)
            raise
        sick = [found for found in tracker.results(only_trained=True) if self._is_sick(found)]
        if sick:
            told = [f"{title}: {verdict}" for title, verdict, *_ in sick]
            code = next((verdict.primary.code for _, verdict, *_ in sick if verdict.primary), "time.*")
            hint = f"if the test trains it on purpose, {USAGE.format(code)}"
            pytest.fail("\n\n".join([*told, f"pytest --hookcb: {hint}"]), pytrace=False)
        return result

    def _is_sick(self, result: "Result") -> bool:
        """Whether there is an error, or anything but notes if the project is strict."""
        if self._habits.strict:
            return any(f.severity != "info" for f in result.verdict.findings)
        return result.verdict.status == "sick"


def _marked(item: pytest.Item) -> tuple[bool, list[str]]:
    """Whether a test is watched, as its nearest marker says, and what is ignored in it by all of them."""
    from hookcb.diagnosis.explain import check_codes

    is_watched: list[bool] = []
    ignored: list[str] = []
    for marker in item.iter_markers("hookcb"):
        patterns, wrong = marker.kwargs.get("ignore", []), USAGE.format("update.too_large")
        is_known = set(marker.kwargs) <= {"ignore"} and isinstance(patterns, list | tuple)
        is_valid = is_known and len(marker.args) < 2 and all(isinstance(x, bool) for x in marker.args)
        try:
            ignored += [check_codes(pattern) for pattern in patterns]
        except (LookupError, TypeError) as error:
            is_valid, wrong = False, error.args[0]
        if not is_valid:
            pytest.fail(f"the marker hookcb has invalid arguments: {wrong}", pytrace=False)
        is_watched += marker.args
    return next(iter(is_watched), True), ignored
