"""The lists in CONTRIBUTING.md are whole: who leaves out a place of one is told which."""

import inspect
import pkgutil
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from faults import FAULTS as CASES

import hookcb
import hookcb.loggers as loggers_room
from docs.orders import reasons
from hookcb import ActivationStats, Callback, Event, GradientHealth, synth_learner
from hookcb.activations.stats import LAYER_STATS
from hookcb.core import orders
from hookcb.core.events import BATCH_EVENTS, LEVELS
from hookcb.core.loop_tree import loop_tree
from hookcb.diagnosis.fault import FAULTS
from hookcb.gradients.stats import GRAD_STATS
from hookcb.loggers.base import FILES, POSSIBLE
from hookcb.loops import ported
from hookcb.loops.names import LOGGERS

ROOT = Path(__file__).parent.parent
PACKAGE = Path(hookcb.__file__).parent
SITES = {"inputs", "labels", "model", "head", "loss", "gradients", "steps", "numbers", "time", "ranks"}
FOLDER = PACKAGE / "diagnosis" / "faults"
INTERNAL = {  # callbacks that are not for users, and whose they are
    "Led": "Diagnose",
    "LedHealth": "Diagnose",
    "LedStats": "Diagnose",
    "LedTimer": "Diagnose",
    "GatherPreds": "Learner.get_preds",
    "LRFinder": "Learner.lr_find",
    "RateCallback": "the base of schedules",
    "SteppedRate": "the base of schedules",
    "AverageCallback": "the base of EMA and SWA",
    "EndAtLimit": "hookcb diagnose --steps",
    "LookForNan": "hookcb diagnose --trace-nan",
    "ScriptReport": "hookcb diagnose --live",
    "Replay": "hookcb replay",
}
NOT_PLANTED = {  # faults without a planted case, and why
    "grad.compiled": "needs Diagnose(compare_compiled=True) and a compiler that is wrong",
    "nonfinite.contained": "needs GradientHealth(activations=True), which a case cannot ask for",
    "norm.spectral": "a note on a validation before the training, which no case has",
    "train.unfinished": "a note, which a healthy training gets too",
    "replica.diverged": "needs several processes, as the next ones; see benchmarks/planted_ranks.py",
    "replica.buffers": "likewise",
    "replica.settings": "likewise",
    "replica.alone": "likewise; see tests/ranks/replica_worker.py",
    "data.duplicated": "likewise",
    "data.repeated": "likewise",
    "random.duplicated": "likewise",
    "grad.rescaled": "likewise",
    "time.straggler": "likewise",
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
    # which need packages of others, or have hookcb's callbacks with other arguments, see tests/test_fastai.py
    others = ("hookcb.adapters.", "hookcb.__main__", "hookcb.fastai")
    modules = [m.name for m in pkgutil.walk_packages(hookcb.__path__, "hookcb.")]
    found = {}
    for module in map(import_module, (name for name in modules if not name.startswith(others))):
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
    yield from missing_of_name(name)


def missing_of_name(name):
    """Places of each public name."""
    if re.search(rf"\b{name}\b", read(ROOT / "docs/promises.md")) is None:
        yield f"docs/promises.md: no promise names {name}; add one with its test"
    if not names(read(ROOT / "CHANGELOG.md"), name):
        yield f"CHANGELOG.md: no line names {name}"


def test_a_callback_is_in_all_places():
    missing = [place for cls in callbacks().values() for place in missing_of_callback(cls)]
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
        "docs/promises.md",
        "CHANGELOG.md",
    ]


# ---- a logger


def loggers():
    """All classes in the room of loggers that log, but for the protocol."""
    modules = [import_module(m.name) for m in pkgutil.iter_modules(loggers_room.__path__, "hookcb.loggers.")]
    found = [(module, cls) for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    own = {cls for module, cls in found if cls.__module__ == module.__name__ and hasattr(cls, "log")}
    return {cls for cls in own if cls.__name__.endswith("Logger")} - {loggers_room.Logger}


def missing_of_logger(cls):
    name, (room, file) = cls.__name__, place_of(cls.__module__)
    if cls not in LOGGERS:
        yield f"hookcb/loops/names.py: {name} is not in LOGGERS, so no loop takes it in place of a Log"
    if not names(ported.LOGGERS, name):
        yield f"hookcb/loops/ported.py: {name} is not in LOGGERS"
    suffixes = {suffix for suffix, kind in FILES.items() if kind is cls}
    if not {name, *suffixes} <= set(re.findall(r"[\w.]+", POSSIBLE)):
        yield f"hookcb/loggers/base.py: POSSIBLE does not name {' and '.join([name, *suffixes])}"
    if getattr(loggers_room, name, None) is not cls or name not in loggers_room.__all__:
        yield f"hookcb/loggers/__init__.py: {name} is not imported there, or not in __all__"
    if getattr(hookcb, name, None) is not cls or name not in hookcb.__all__:
        yield f"hookcb/public.py: {name} is not imported there, or not in __all__"
    if not names(read(ROOT / "docs/guide/loops.md"), name):
        yield f"docs/guide/loops.md: {name} is not among the loggers"
    if not all(suffix in inspect.getdoc(hookcb.Log) for suffix in suffixes):
        yield f"hookcb/loggers/callback.py: the docstring of Log does not name {' and '.join(suffixes)}"
    if not any(names(text, name) for text in texts_of_tests(room, "interop")):
        yield f"tests/{room}/test_{file}.py: no test names {name}"
    yield from missing_of_name(name)


def test_a_logger_is_in_all_places():
    found = loggers()
    assert len(found) >= 4
    missing = [place for cls in found for place in missing_of_logger(cls)]
    assert not missing, "\n".join(missing)


def test_the_places_of_a_logger_that_are_left_out_are_named(monkeypatch):
    class Dummy:
        """Logs nothing."""

    Dummy.__module__ = "hookcb.loggers.dummy"
    monkeypatch.setitem(FILES, ".dummy", Dummy)
    assert [place.partition(":")[0] for place in missing_of_logger(Dummy)] == [
        "hookcb/loops/names.py",
        "hookcb/loops/ported.py",
        "hookcb/loggers/base.py",
        "hookcb/loggers/__init__.py",
        "hookcb/public.py",
        "docs/guide/loops.md",
        "hookcb/loggers/callback.py",
        "tests/loggers/test_dummy.py",
        "docs/promises.md",
        "CHANGELOG.md",
    ]


# ---- a statistic; that each has its definition in an oracle is in tests/activations and tests/gradients


STATISTICS = {"activations": (LAYER_STATS, ActivationStats), "gradients": (GRAD_STATS, GradientHealth)}


def missing_of_stat(room, stat):
    cls = STATISTICS[room][1]
    stats_js = read(PACKAGE / "report/assets/stats.js")
    called = dict(re.findall(r'^  (\w+): "(.*)",$', stats_js.partition("const GRADIENT")[0], re.MULTILINE))
    if f"`{stat}`" not in inspect.getdoc(cls):
        yield f"hookcb/{room}/callback.py: the docstring of {cls.__name__} does not say what {stat} is"
    if stat not in called or (room == "activations" and "gradient" in called[stat]):
        yield f"hookcb/report/assets/stats.js: STATS does not say what the page calls {stat} of {room}"
    if not names(read(ROOT / f"docs/guide/{room}.md"), stat):
        yield f"docs/guide/{room}.md: {stat} is not there"
    if not any(f'"{stat}"' in text for text in texts_of_tests(room)):
        yield f"tests/{room}/support.py: {stat} is not there"


def test_a_statistic_is_in_all_places():
    every = [(room, stat) for room, (stats, _) in STATISTICS.items() for stat in stats]
    missing = [place for room, stat in every for place in missing_of_stat(room, stat)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("room", STATISTICS)
def test_the_places_of_a_statistic_that_are_left_out_are_named(room):
    assert [place.partition(":")[0] for place in missing_of_stat(room, "dummy")] == [
        f"hookcb/{room}/callback.py",
        "hookcb/report/assets/stats.js",
        f"docs/guide/{room}.md",
        f"tests/{room}/support.py",
    ]


# ---- a fault


def missing_of_fault(code, planted):
    if code not in planted | NOT_PLANTED.keys():
        yield f"benchmarks/planted/: no case has the code {code}"
    if f"### `{code}`" not in read(ROOT / "docs" / "checks.md"):
        yield f"docs/checks.md: {code} is not there; run python docs/checks.py"


PLANTED = frozenset().union(*(case.codes for case in CASES))


def test_a_fault_is_in_all_places():
    missing = [place for code in FAULTS for place in missing_of_fault(code, PLANTED)]
    assert not missing, "\n".join(missing)


def test_faults_that_are_said_to_have_no_case_have_none():
    assert FAULTS.keys() >= NOT_PLANTED.keys()
    assert not NOT_PLANTED.keys() & PLANTED


def test_the_places_of_a_fault_that_are_left_out_are_named():
    missing = missing_of_fault("dummy.code", PLANTED)
    assert [place.partition(":")[0] for place in missing] == ["benchmarks/planted/", "docs/checks.md"]


def test_each_file_of_faults_has_one_or_a_family():
    files = [path for path in FOLDER.rglob("*.py") if path.name != "__init__.py"]
    sites = {path.parent.name for path in files}
    assert sites == {
        "inputs",
        "labels",
        "model",
        "head",
        "loss",
        "gradients",
        "steps",
        "numbers",
        "time",
        "ranks",
    }
    assert [str(path) for path in files if "\n@fault(" not in read(path)] == []
    modules = {kind.__module__.rpartition(".")[2] for kind in FAULTS.values()}
    assert {path.stem for path in files} == modules


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


def test_an_event_is_in_all_places(shown, fired):
    page = read(EVENTS)
    missing = [place for event in Event for place in missing_of_event(event.value, page, shown, fired)]
    assert not missing, "\n".join(missing)


def test_the_exception_of_a_level_is_public():
    for name in (level.cancel.__name__ for level in LEVELS.values()):
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
    assert len(steps) >= 15
    assert [step for step in steps if not step.startswith("`")] == []
