"""Updates that are too small, on made-up numbers."""

import pytest

from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.faults.steps.small_updates import SmallUpdates
from hookcb.diagnosis.judge import explained
from hookcb.diagnosis.measurements.dead_units import Dead, DeadUnits
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import FALLS, STAYS, evidence, only, weight
from tests.support import in_turn


@pytest.mark.parametrize(("size", "severity"), [(3e-6, "warning"), (1e-8, "error")])
def test_tiny_steps_are_told(size, severity):
    found = only(SmallUpdates().findings, evidence(weight(update_ratio=[size] * 40), loss=STAYS))
    assert (found.code, found.severity, found.value) == ("update.too_small", severity, size)
    assert (found.step, found.last_step) == (0, 39)


@pytest.mark.parametrize(
    ("n_steps", "guess", "is_told"), [(60, 1.0, True), (60, 9.0, False), (9000, 1.0, False)]
)
def test_small_steps_that_have_not_moved_a_flat_loss_are_told(n_steps, guess, is_told):
    param = weight(update_ratio=[3e-5] * 40)
    found = only(SmallUpdates().findings, evidence(param, loss=[1.0] * 60, guess=guess, n_steps=n_steps))
    assert (found.limit == 1e-4) if is_told else isinstance(found, Passed)


@in_turn(
    "given",
    [
        evidence(weight(update_ratio=[1e-4] * 40)),
        evidence(weight(update_ratio=[1e-7] * 40), loss=FALLS),
        evidence(weight(update_ratio=[1e-3] * 25 + [1e-9] * 15), lr=[0.1] * 25 + [1e-7] * 15, loss=STAYS),
        evidence(
            weight("a", update_ratio=[1e-7] * 40), weight("b", update_ratio=[1e-3] * 40),
            weight("c", update_ratio=[1e-3] * 40), loss=STAYS,
        ),
    ],
)  # fmt: skip
def test_steps_that_do_their_work_or_end_a_decay_are_no_finding(given):
    assert isinstance(only(SmallUpdates().findings, given), Passed)


def test_small_steps_of_a_warm_up_say_nothing():
    given = evidence(weight(update_ratio=[1e-8] * 40), lr=[1e-6 * i for i in range(40)])
    assert isinstance(only(SmallUpdates().findings, given), Skipped)
    assert isinstance(only(SmallUpdates().findings, evidence(weight(update_ratio=[1e-8] * 4))), Skipped)


def test_small_steps_of_a_model_that_was_trained_before_are_not_judged():
    given = evidence(weight(update_ratio=[1e-6] * 40), loss=STAYS, constant=3.0)
    assert isinstance(only(SmallUpdates().findings, given), Skipped)
    assert isinstance(
        only(SmallUpdates().findings, evidence(weight(update_ratio=[1e-8] * 40), lr=0.0)), Skipped
    )


def test_they_follow_from_dead_units_that_were_seen_later():
    param = weight(update_ratio=[3e-6] * 40, norm=[1.0] * 40)
    given = evidence(param, loss=STAYS)
    given.measured(DeadUnits).of = {param.name: Dead(0.9, 0.9, 25, 8, 512, 16)}
    found = only(SmallUpdates().findings, given)
    assert (found.step, found.last_step) == (25, 39)
    linked = explained([found, only(FAULTS["unit.dead"]().findings, given)], given)
    assert [(x.code, x.consequence_of) for x in linked] == [
        ("unit.dead", ""),
        ("update.too_small", "unit.dead"),
    ]
