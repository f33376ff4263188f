"""WarmupCosine follows its formula."""

import math

import pytest
from torch.optim import Adam

from hookcb import WarmupCosine
from tests.support import fit, in_turn, make_learner, make_model
from tests.training.support import batches_of, quiet, rates, two_groups


@in_turn(("warmup", "w"), [(0.25, 3), (4, 4), (0, 0), (12, 12), (1.0, 12), (1, 1)])
def test_warmup_cosine_follows_its_formula(warmup, w):
    learn = fit(make_learner(opt_func=Adam, lr=0.2), 4, cbs=WarmupCosine(warmup, lr_min=0.01))
    rates = [0.2 * (i + 1) / w for i in range(w)]
    rates += [0.01 + 0.19 * (1 + math.cos(math.pi * (i - w) / (12 - w))) / 2 for i in range(w, 12)]
    assert learn.recorder.lrs == pytest.approx(rates)


@in_turn(("warmup", "n_warm"), [(0.25, 5), (7, 7), (1, 1), (0.1, 2)])
def test_warmup_cosine_rises_by_equal_steps_and_falls_as_a_cosine(warmup, n_warm):
    learn = quiet(batches_of([2] * 5), model=(model := make_model()), opt=two_groups()(model, lr=0.4))
    watch, seen = rates(learn)
    learn.fit(4, cbs=[WarmupCosine(warmup, lr_min=0.01), watch])
    for group, base in enumerate([0.1, 0.4]):
        got = [rate[group] for rate in seen]
        assert got[:n_warm] == pytest.approx([base * (i + 1) / n_warm for i in range(n_warm)])
        rest = range(20 - n_warm)
        down = [(1 + math.cos(math.pi * i / len(rest))) / 2 for i in rest]
        assert got[n_warm:] == pytest.approx([0.01 + (base - 0.01) * part for part in down])


@in_turn("warmup", [0, 0.0, 1.0, 0.001])
def test_warmup_cosine_takes_every_share_and_no_rate_is_zero_before_the_end(warmup):
    learn = quiet(batches_of([2] * 5))
    watch, seen = rates(learn)
    learn.fit(1, cbs=[WarmupCosine(warmup), watch])
    assert all(0 < a <= 0.1 + 1e-12 for (a,) in seen[:-1])
