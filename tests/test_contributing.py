"""The lists in CONTRIBUTING.md are whole: who leaves out a place of one is told which."""

import ast
import inspect
import pkgutil
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from faults import FAULTS

import hookcb
from docs.orders import reasons
from hookcb import Callback, Event, synth_learner
from hookcb.core import orders
from hookcb.core.events import BATCH_EVENTS, LEVELS
from hookcb.core.loop_tree import loop_tree
from tests.test_floors import imports

ROOT = Path(__file__).parent.parent
PACKAGE = Path(hookcb.__file__).parent
PROBES = PACKAGE / "diagnosis" / "probes"
INTERNAL = {  # callbacks that are not for users, and whose they are
    "Attached": "Diagnose",
    "AttachedHealth": "Diagnose",
    "AttachedStats": "Diagnose",
    "PhaseMarker": "StepTimer and ProfilerCallback",
    "GatherPreds": "Learner.get_preds",
    "LRFinder": "Learner.lr_find",
    "RateCallback": "the base of schedules",
    "SteppedRate": "the base of schedules",
    "EvidenceRecorder": "the base of Diagnose",
    "AttachedTimer": "Diagnose",
    "EndAtLimit": "hookcb diagnose --steps",
}
NOT_PLANTED = {  # checks without a planted fault, each tested by itself; plant one rather than add to these
    "dropout.extreme",
    "hook.silent",
    "init.zero",
    "loss.detached",
    "model.linear_stack",  # a note, as a training may do without the nonlinearity
    "nonfinite.contained",
    "param.frozen_between",  # a note, as a layer may be frozen on purpose
    "param.restored",
    "replica.diverged",  # which needs several processes, as the next ones; see benchmarks/planted_ranks.py
    "replica.buffers",
    "data.duplicated",
    "data.repeated",
    "data.same_order",
    "random.duplicated",
    "grad.rescaled",
    "time.straggler",
    "train.unfinished",  # a note, which a healthy training gets too
}


def read(path):
    return Path(path).read_text("utf-8")


def names(text, name):
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", text) is not None


@cache
def texts_of_tests(*rooms):
    paths = [path for room in rooms for path in (ROOT / "tests" / room).rglob("*.py")]
    return [read(path) for path in paths]


def place_of(module):
    """A module's room and file: "training", "ema"."""
    *room, file = module.split(".")[1:]
    return "/".join(room), file


# ---- a callback


def callbacks():
    """All classes of callbacks in the package, by name."""
    optional = ("hookcb.adapters.", "hookcb.__main__")  # which need packages of others
    modules = [m.name for m in pkgutil.walk_packages(hookcb.__path__, "hookcb.")]
    found = {}
    for module in map(import_module, (name for name in modules if not name.startswith(optional))):
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Callback) and cls.__module__ == module.__name__:
                found[cls.__name__] = cls
    return {name: cls for name, cls in found.items() if not name.startswith("_") and name not in INTERNAL}


def missing_of_callback(cls):
    name, (room, file) = cls.__name__, place_of(cls.__module__)
    own = inspect.getdoc(cls) if "__doc__" in vars(cls) else ""
    if ">>>" not in (own or ""):
        yield f"hookcb/{room}/{file}.py: the docstring of {name} has no example"
    if cls.order not in [getattr(orders, order) for order in reasons()]:
        yield f"hookcb/core/orders.py: the order of {name}, {cls.order}, has no name"
    if getattr(hookcb, name, None) is not cls or name not in hookcb.__all__:
        yield f"hookcb/public.py: {name} is not imported there, or not in __all__"
    table = (
        read(ROOT / "docs/guide/training.md").partition("<!-- orders -->")[2].partition("<!-- /orders -->")[0]
    )
    if f"`{name}`" not in table and cls not in (Callback, hookcb.SamplingCallback):
        yield f"docs/guide/training.md: {name} is not in the table of orders; run python docs/orders.py"
    if not any(names(text, name) for text in texts_of_tests(room)):
        yield f"tests/{room}/test_{file}.py: no test names {name}"
    if not names(read(ROOT / "CHANGELOG.md"), name):
        yield f"CHANGELOG.md: no line names {name}"


@pytest.mark.parametrize("cls", callbacks().values(), ids=lambda cls: cls.__name__)
def test_a_callback_is_in_all_places(cls):
    missing = list(missing_of_callback(cls))
    assert not missing, "\n".join(missing)


def test_what_is_internal_is_there_and_is_not_public():
    assert not set(INTERNAL) & set(hookcb.__all__)
    text = "\n".join(read(path) for path in PACKAGE.rglob("*.py"))
    assert [name for name in INTERNAL if f"class {name}(" not in text] == []


def test_the_places_of_a_callback_that_are_left_out_are_named():
    class Dummy(Callback):
        """Does nothing."""

        order = 7

    Dummy.__module__ = "hookcb.training.dummy"
    assert [place.partition(":")[0] for place in missing_of_callback(Dummy)] == [
        "hookcb/training/dummy.py",
        "hookcb/core/orders.py",
        "hookcb/public.py",
        "docs/guide/training.md",
        "tests/training/test_dummy.py",
        "CHANGELOG.md",
    ]


# ---- a check


def missing_of_check(code, function, planted, tests, designed):
    file = place_of(function.__module__)[1]
    if code not in planted | NOT_PLANTED:
        yield f"benchmarks/planted/: no fault has the code {code}"
    importing = [text for text in tests if f"diagnosis.checks.{file} import" in text]
    if not (any(names(x, code) for x in tests) or any(names(x, function.__name__) for x in importing)):
        yield f"tests/diagnosis/checks/test_{file}.py: no test names {code} or {function.__name__}"
    if code not in designed:
        yield f"tests/test_checks_page.py: {code} is not in DESIGNED"
    if f"### `{code}`" not in read(ROOT / "docs" / "checks.md"):
        yield f"docs/checks.md: {code} is not there; run python docs/checks.py"


PLANTED = frozenset().union(*(case.codes for case in FAULTS))
TESTS_OF_CHECKS = texts_of_tests("diagnosis", "scenarios", "loops", "cli")
DESIGNED = read(ROOT / "tests" / "test_checks_page.py").partition("DESIGNED")[2].split('"""')[1].split()


@pytest.mark.parametrize("check", FAULTS.values(), ids=lambda check: check.code)
def test_a_check_is_in_all_places(check):
    given = check.code, check.function, PLANTED, TESTS_OF_CHECKS, DESIGNED
    missing = list(missing_of_check(*given))
    assert not missing, "\n".join(missing)


def test_checks_that_are_said_to_have_no_fault_have_none():
    assert set(FAULTS) >= NOT_PLANTED
    assert not NOT_PLANTED & PLANTED


def test_every_file_of_checks_is_imported():
    paths = (PACKAGE / "diagnosis" / "checks").glob("[a-z]*.py")
    files = {path.stem for path in paths if "\n@check(" in read(path)}
    modules = {place_of(check.function.__module__)[1] for check in FAULTS.values()}
    assert files == modules, "see the imports of checks/__init__.py"


def test_the_places_of_a_check_that_are_left_out_are_named():
    def dummy(evidence):
        return iter(())

    dummy.__module__ = "hookcb.diagnosis.checks.layers"
    missing = missing_of_check("dummy.code", dummy, PLANTED, TESTS_OF_CHECKS, DESIGNED)
    assert [place.partition(":")[0] for place in missing] == [
        "benchmarks/planted/",
        "tests/diagnosis/checks/test_layers.py",
        "tests/test_checks_page.py",
        "docs/checks.md",
    ]


# ---- a probe


def reached(found, start):
    """The files that `start` imports, and what these import."""
    seen, waiting = set(), [start]
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += found[file]
    return seen


def missing_of_probe(file, tree, is_reached):
    if not is_reached:
        yield f"hookcb/diagnosis/probes/suite.py: Probes does not use {file}"
    if not (ROOT / "tests" / "diagnosis" / "probes" / f"test_{file}").exists():
        yield f"tests/diagnosis/probes/test_{file}: is not there"
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and ast.unparse(x.func) == "Observation"]
    codes = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    for code in codes:
        if code not in FAULTS:
            yield f"hookcb/diagnosis/checks/observed.py: no check passes on {code}"


@pytest.fixture(scope="module")
def used():
    """What a diagnosis uses."""
    return reached(imports(PACKAGE), "diagnosis/callback.py")


@pytest.mark.parametrize("path", sorted(PROBES.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_probe_is_in_all_places(path, used):
    is_reached = path.relative_to(PACKAGE).as_posix() in used
    missing = list(missing_of_probe(path.name, ast.parse(read(path)), is_reached))
    assert not missing, "\n".join(missing)


def test_what_checks_say_must_have_been_there_is_noted_by_the_suite():
    files = PROBES / "suite.py", PACKAGE / "diagnosis" / "probed.py", PACKAGE / "diagnosis" / "on_ranks.py"
    nodes = [x for file in files for x in ast.walk(ast.parse(read(file)))]
    noted = {x.value for x in nodes if isinstance(x, ast.Constant)}
    trees = [ast.parse(read(path)) for path in (PACKAGE / "diagnosis" / "checks").glob("*.py")]
    keywords = [x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.keyword)]
    asked = [x.value.value for x in keywords if x.arg == "requires" and isinstance(x.value, ast.Constant)]
    asked = {part for text in asked for part in text.split(" or ")}
    assert len(asked) >= 10
    assert sorted(asked - noted) == [], "add what there was to look at to Probes.observed"


def test_the_places_of_a_probe_that_are_left_out_are_named():
    tree = ast.parse('def look():\n    yield Observation("dummy.code", text="")')
    assert [place.partition(":")[0] for place in missing_of_probe("dummy.py", tree, False)] == [
        "hookcb/diagnosis/probes/suite.py",
        "tests/diagnosis/probes/test_dummy.py",
        "hookcb/diagnosis/checks/observed.py",
    ]


# ---- an event; its method, the pseudocode and what Learner emits are in tests/core/test_events.py, and
# what is emitted under `watch` is in tests/scenarios/test_watch_ends.py


EVENTS = ROOT / "docs/guide/callbacks.md"


def missing_of_event(event, page, shown, fired):
    told = "after_cancel_…" if event.startswith("after_cancel_") else event
    if f"`{told}`" not in page:
        yield f"docs/guide/callbacks.md: `{told}` is not in the table of events"
    phases = {training for training, name in fired if name == event}
    if event not in {name for _, name in shown} or not {(phase, event) for phase in phases} <= shown:
        yield f"hookcb/core/loop_tree.py: show_training_loop() does not show {event} where it fires"
    if not names(read(ROOT / "CHANGELOG.md"), event) and event not in FIRST_EVENTS:
        yield f"CHANGELOG.md: no line names {event}"


FIRST_EVENTS = frozenset(  # of the first version, which the CHANGELOG does not name one by one
    [f"{when}_{level}" for level in LEVELS for when in ("before", "after", "after_cancel")]
    + ["after_pred", "after_loss"]
)


@pytest.fixture(scope="module")
def shown():
    """(training, event) as the tree has them."""
    found = set()
    loop_tree("Loop", lambda training, event: found.add((training, event)) or [])
    return found


@pytest.fixture(scope="module")
def fired():
    """(training, event) of a batch as a fit has them; what is around batches has no phase."""
    found = set()

    def note(event):
        return lambda cb: found.add((cb.training, event))

    learn = synth_learner(cbs=Callback(name="probe", **{event: note(event) for event in BATCH_EVENTS}))
    with learn.no_logging():
        learn.fit(1)
    return found


@pytest.mark.parametrize("event", list(Event))
def test_an_event_is_in_all_places(event, shown, fired):
    missing = list(missing_of_event(event.value, read(EVENTS), shown, fired))
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("level", LEVELS)
def test_the_exception_of_a_level_is_public(level):
    name = LEVELS[level].cancel.__name__
    assert name in hookcb.__all__, f"add {name} to hookcb/public.py"


def test_the_places_of_an_event_that_are_left_out_are_named(shown, fired):
    places = ["docs/guide/callbacks.md", "hookcb/core/loop_tree.py", "CHANGELOG.md"]
    missing = missing_of_event("after_dummy", read(EVENTS), shown, fired)
    assert [place.partition(":")[0] for place in missing] == places
    in_validation_only = shown - {(True, "after_loss")}
    (missing,) = missing_of_event("after_loss", read(EVENTS), in_validation_only, fired)
    assert "does not show after_loss where it fires" in missing


# ---- the page itself


def test_the_commands_of_the_page_are_there():
    page, makefile = read(ROOT / "CONTRIBUTING.md"), read(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    told = set(re.findall(r"`make (?:\w+=\S+ )?([a-z-]+)`", page))
    assert told <= targets
    assert {"test", "test-all", "lint"} <= told


def test_every_step_of_a_list_names_its_place():
    steps = re.findall(r"^\d+\. (.*)$", read(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert len(steps) >= 20
    assert [step for step in steps if not step.startswith("`")] == []
