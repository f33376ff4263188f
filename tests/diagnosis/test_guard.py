"""Each part of a diagnosis has what it costs if it fails."""

import re
from pathlib import Path

from hookcb.diagnosis import guard, probes
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.guard import COSTS, Guard
from hookcb.diagnosis.reader import SOURCES
from hookcb.hooks.modules import ModelGoneError

ROOM = Path(guard.__file__).parent
TEXTS = [path.read_text() for path in (*ROOM.glob("*.py"), *(ROOM / "probes").glob("*.py"))]


def fails():
    raise KeyError("odd")


def test_each_part_has_its_cost_and_each_cost_is_a_check_or_a_source():
    called = r'(?:call|always|made|observe|note|read)\(\s*"(\w+)"'
    parts = {part for text in TEXTS for part in re.findall(called, text)}
    assert len(parts) > 40
    assert parts - COSTS.keys() == set()
    costs = {cost for costs in COSTS.values() for cost in costs}
    assert costs - FAULTS.keys() - SOURCES.keys() == set()


def test_each_check_of_what_a_probe_observes_is_a_cost():
    places = [path.read_text() for path in Path(probes.__file__).parent.glob("*.py")]
    codes = {code for text in places for code in re.findall(r'Observation\(\s*"([\w.]+)"', text)}
    assert len(codes) > 30
    costs = {cost for costs in COSTS.values() for cost in costs}
    assert [code for code in codes if not costs & {code, *FAULTS[code].needs}] == []


def test_a_part_that_has_failed_is_told_once_and_not_called_again():
    own = Guard()
    assert own.call("class_axis", fails) is None
    assert own.call("class_axis", lambda: 1) is None
    assert own.always("class_axis", lambda: 1) == 1
    assert own.call("stale", lambda: 1) == 1
    own.always("class_axis", fails)
    (note,) = own.notes
    assert "was ended by KeyError('odd'), which was raised in fails, test_guard" in note
    assert own.partial == {"head.axis": note}


def test_a_part_that_cannot_be_made_is_used_in_calls_only():
    own = Guard()
    made = own.made("class_axis", fails)
    assert own.call("class_axis", made.read_gradients, 3) is None
    assert own.call("class_axis", lambda: made.n_examples < 3) is None
    assert len(own.notes) == 1


def test_a_model_that_is_gone_is_no_failure():
    def gone():
        raise ModelGoneError("gone")

    own = Guard()
    for _ in range(2):
        own.call("motion", gone)
    assert own.notes == [guard.GONE]
    assert own.call("motion", lambda: 1) == 1


def test_an_error_that_cannot_be_shown_is_told_by_its_class():
    class Odd(Exception):
        def __repr__(self):
            raise ValueError

    def raises():
        raise Odd

    own = Guard()
    own.call("motion", raises)
    assert "was ended by Odd, which" in own.notes[0]
