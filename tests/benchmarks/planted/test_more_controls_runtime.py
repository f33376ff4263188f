"""Trainings whose time goes by in their own work are healthy, by a clock that goes on as they sleep."""

import time

import pytest
from more_controls_runtime import RUNTIME_CONTROLS

from hookcb import Diagnose

SLEEPING = [case for case in RUNTIME_CONTROLS if "PPO" in case.name or "own work" in case.name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:none of 6 hooked layers:UserWarning")
@pytest.mark.parametrize("case", SLEEPING, ids=lambda case: case.name)
def test_own_work_between_steps_is_no_waiting(monkeypatch, case):
    now = [0.0]

    def clock():
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    run = case.train(0, [Diagnose(show=False)])
    assert run.loop.diagnose().status == "healthy"
    assert sum(run.losses[-10:]) / 10 < case.target
