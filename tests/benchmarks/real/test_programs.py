"""Programs with real faults: each can be built and repaired, and is judged by its verdict."""

import math

import torch
from program import built, outcome
from programs import PROGRAMS

from hookcb.diagnosis.fault import FAULTS
from tests.support import in_turn

BY_NAME = {program.name: program for program in PROGRAMS}


def test_names_are_unique_and_codes_are_those_of_checks():
    assert len(BY_NAME) == len(PROGRAMS)
    assert frozenset().union(*(program.codes for program in PROGRAMS)) <= FAULTS.keys()


def test_each_fault_has_two_programs():
    faults = [program.fault for program in PROGRAMS]
    assert {fault for fault in faults if faults.count(fault) < 2} == set()


@in_turn("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_can_be_built_and_its_repair_takes_a_step(program):
    assert built(program, 0, is_repaired=False).model is not None
    repaired = built(program, 0, is_repaired=True)
    before = [p.detach().clone() for p in repaired.model.parameters()]
    *xb, y = next(iter(repaired.batches))
    loss = repaired.loss_func(repaired.model(*xb), y)
    loss.backward()
    repaired.opt.step()
    assert math.isfinite(loss.item())
    after = repaired.model.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_fault_is_named_and_its_repair_is_healthy():
    program = BY_NAME["progression of diabetes by a sigmoid"]
    faulty, repaired = (outcome(program, 0, is_repaired) for is_repaired in (False, True))
    assert faulty.is_first
    assert faulty.is_found_before
    assert not repaired.is_alarm
    assert faulty.is_as_meant
    assert repaired.is_as_meant


def test_an_exception_in_a_loop_under_watch_is_recorded_and_explained():
    faulty = outcome(BY_NAME["wines numbered from 1"], 0, is_repaired=False)
    assert faulty.error == "IndexError: Target 3 is out of bounds."
    assert faulty.primary == "label.out_of_range"
