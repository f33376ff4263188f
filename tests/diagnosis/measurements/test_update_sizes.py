"""UpdateSizes: how far steps move some elements of the largest parameters."""

import gc
import math
from types import SimpleNamespace
from weakref import ref

import torch
from torch import nn

from hookcb.diagnosis.measurements.update_sizes import UpdateSizes
from hookcb.diagnosis.run import Run


def after(n, far=(), model=None):
    """Sizes of updates after `n` steps of 0.1, and of 0.7 in steps of `far`."""
    model = model or nn.Sequential(nn.Linear(40, 30), nn.Linear(3, 2), nn.BatchNorm1d(2))
    sizes, run = UpdateSizes(), Run(loop=SimpleNamespace(model=model, train_iter=0))
    sizes.on_model(run)
    for step in range(n):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.7 if step in far else 0.1
        run.loop.train_iter = step
        sizes.on_between(run)
    return sizes


def test_a_large_step_is_known_until_it_is_long_ago():
    for step, ratio in [(100, 1.0), (101, 7.0), (108, 7.0), (109, 1 / 7), (133, 1.0), (140, 1.0)]:
        assert math.isclose(after(step, far=[100]).before(step), ratio, rel_tol=1e-3), step


def test_too_few_steps_and_what_cannot_be_read_are_unknown():
    assert math.isnan(after(32).before(32))
    assert not math.isnan(after(33).before(33))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert math.isnan(after(60, model=frozen).before(60))


def test_no_parameter_is_kept_alive_and_one_that_is_gone_ends_it():
    model = nn.Linear(4, 4)
    sizes, alive = after(40, model=model), ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert alive() is None
    sizes.on_between(Run(loop=SimpleNamespace(model=model, train_iter=41)))
    assert math.isnan(sizes.before(41))
