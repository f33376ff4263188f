"""Ranks with different settings of the optimizer, on made-up looks; what a program changes on some ranks."""

import math

from hookcb.diagnosis.faults.loss.worse import ChangedSettings, WorseLoss
from hookcb.diagnosis.faults.ranks.settings import UnlikeSettings
from hookcb.diagnosis.measurements.changes import LIMIT, Change
from hookcb.diagnosis.measurements.group_settings import NAMES, GroupSettings
from hookcb.diagnosis.measurements.settings import Settings
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.ranks.support import merged
from tests.diagnosis.support import only

FIRST, OTHER = 1, 2  # groups
CHANGED = Change(100, 99, "betas", (0.9, 0.99), (0.5, 0.9))


def looks(values, group=FIRST):
    """Settings of a group on a rank by number of steps made."""
    return {n: (n - 1, {group: tuple(x.get(name) for name in NAMES)}) for n, x in values.items()}


def run_with(looks, *changes):
    run = Run(n_batches=200)
    run.measured(GroupSettings).looks = looks
    run.measured(Settings).changes.extend(changes)
    run.measured(WorseLoss)
    return run


def told(*of_ranks):
    return only(UnlikeSettings, merged(*map(run_with, of_ranks))[0])


def test_the_first_step_and_all_values_of_settings_that_differ_are_told():
    same, other = {"lr": 0.1, LIMIT: 1.0}, {"lr": 0.2, LIMIT: math.inf}
    found = told(looks({1: same, 8: same, 16: same}), looks({1: same, 8: other, 16: other}))
    assert (found.code, found.severity, found.step, found.ranks) == ("replica.settings", "error", 7, (1,))
    assert "limit of clip_grad_norm_ 1.0 on rank 0, none on rank 1; lr 0.1 on rank 0, 0.2 on rank 1" in (
        found.message
    )
    assert "; at step 0 they were the same" in found.message
    many = told(*[looks({1: same})] * 2, looks({1: other}), looks({1: same}))
    assert (many.ranks, "0.1 on ranks 0, 1, 3, 0.2 on rank 2" in many.message) == ((2,), True)


def test_only_groups_of_the_same_parameter_on_the_same_ranks_are_compared():
    a, b = {1: {"lr": 0.1}}, {1: {"lr": 0.2}}
    assert isinstance(told(looks(a), looks(b, OTHER)), Skipped)  # as of ZeRO
    assert isinstance(told(looks(a), looks({2: {"lr": 0.2}})), Skipped)
    assert isinstance(told(looks(a), looks({1: {"momentum": 0.9}})), Passed)
    assert isinstance(told(looks(a), looks(a)), Passed)


def test_the_rank_and_the_step_are_those_of_a_change_that_was_seen_on_it_alone():
    before, after = {1: {"betas": CHANGED.before}}, {128: {"betas": CHANGED.after}}
    other = CHANGED._replace(step=90, last=89, name="shape", of="the inputs")
    runs = run_with(looks(before | after), other, CHANGED), run_with(looks(before | {128: before[1]}))
    for run in merged(*runs):
        found = only(UnlikeSettings, run)
        assert (found.step, found.ranks) == (100, (0,))
        assert "What changed: on rank 0, betas of the optimizer, from (0.9, 0.99)" in found.message
        assert "betas" not in only(ChangedSettings, run).message  # which says that it may be meant


def test_changes_of_each_rank_are_told_with_it_and_those_of_all_as_one():
    other = CHANGED._replace(step=120, last=119, name="eps")
    for run in merged(run_with({}, CHANGED), run_with({}, CHANGED, other)):
        found = only(ChangedSettings, run)
        assert (found.step, found.ranks) == (100, ())
        assert found.message.startswith("What changed: betas of the optimizer, ")
        assert "; on rank 1, eps of the optimizer, " in found.message
    (one, _) = merged(run_with({}), run_with({}, other))
    assert only(ChangedSettings, one).ranks == (1,)
