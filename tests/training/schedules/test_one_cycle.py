"""OneCycle and WarmupCosine follow their formulas, for every length of a fit and every optimizer."""

import itertools
import math

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from hookcb import Callback, OneCycle, WarmupCosine
from tests.support import make_model, same, weights
from tests.training.support import (
    OPTS,
    batches_of,
    quiet,
    rates,
    sgd,
    train_plainly,
    two_groups,
)

RAGGED = [4, 4, 2]


@pytest.mark.parametrize("opt_func", OPTS)
@pytest.mark.parametrize("n_fit", [1, 2])
def test_one_cycle_is_torchs_own_for_each_optimizer_and_a_second_fit_starts_anew(opt_func, n_fit):
    train, model = batches_of(RAGGED), make_model()
    opt = opt_func(model.parameters(), lr=0.1)
    plain = {"lr": 0.1}
    plain |= {k: opt.param_groups[0][k] for k in ("momentum", "betas") if k in opt.param_groups[0]}
    for _ in range(n_fit):
        opt.param_groups[0].update(plain)
        cycles = "betas" in opt.param_groups[0] or opt.param_groups[0]["momentum"] > 0
        scheduler = lrs.OneCycleLR(
            opt, 0.1, total_steps=6, pct_start=0.25, div_factor=25, final_div_factor=1e5 / 25,
            cycle_momentum=cycles, base_momentum=0.85, max_momentum=0.95,
        )  # fmt: skip
        steps = itertools.chain([scheduler.step] * 5, [lambda: None])
        train_plainly(model, train, 2, opt, lambda steps=steps: next(steps)())

    learn = quiet(train, None, make_model(), opt_func)
    for _ in range(n_fit):
        learn.fit(2, cbs=OneCycle())
        assert all(group[key] == plain[key] for group in learn.opt.param_groups for key in plain)
    assert same(weights(learn.model), weights(model))


@pytest.mark.parametrize("n_batches", range(1, 9))
@pytest.mark.parametrize("pct_start", [0.01, 0.25, 0.5, 0.99])
def test_one_cycle_runs_from_lr_max_by_div_to_lr_max_by_div_final_in_a_fit_of_any_length(
    n_batches, pct_start
):
    learn = quiet(batches_of([2] * n_batches), opt=two_groups()(model := make_model()), model=model)
    watch, seen = rates(learn)
    learn.fit(1, cbs=[OneCycle(0.4, div=10, div_final=100, pct_start=pct_start), watch])
    assert len(seen) == n_batches
    assert all(a == pytest.approx(b) for a, b in seen)  # a maximum given is that of all groups
    first, last = seen[0][0], seen[-1][0]
    if n_batches > 2 and 0 < pct_start < 1:
        assert first == pytest.approx(0.04) or pct_start * n_batches == 1
        assert last == pytest.approx(0.004)
    assert all(0.004 - 1e-9 <= a <= 0.4 + 1e-9 for a, _ in seen)


def test_one_cycle_follows_the_cosine_between_its_corners():
    n, peak = 20, 0.25 * 20 - 1

    def by_formula(i, low, high, end):
        a, b, x = (low, high, i / peak) if i <= peak else (high, end, (i - peak) / (n - 1 - peak))
        return b + (a - b) * (1 + math.cos(math.pi * x)) / 2

    betas = []
    note = Callback(name="betas", before_batch=lambda cb: betas.append(cb.opt.param_groups[0]["betas"]))
    learn = quiet(batches_of([2] * 5), opt=torch.optim.Adam, lr=0.2)
    watch, seen = rates(learn)
    learn.fit(4, cbs=[watch, note, OneCycle(moms=(0.9, 0.7))])
    assert [a for (a,) in seen] == pytest.approx([by_formula(i, 0.2 / 25, 0.2, 0.2 / 1e5) for i in range(n)])
    assert [b for b, _ in betas] == pytest.approx([by_formula(i, 0.9, 0.7, 0.9) for i in range(n)])
    assert {b for _, b in betas} == {0.999}


@pytest.mark.parametrize("opt_func", [sgd, torch.optim.RMSprop, torch.optim.Adagrad])
def test_one_cycle_leaves_an_optimizer_without_momentum_without_it(opt_func):
    learn = quiet(batches_of([2] * 3), opt=opt_func)
    seen = []
    look = Callback(
        name="look", before_batch=lambda cb: seen.append(cb.opt.param_groups[0].get("momentum", 0))
    )
    learn.fit(2, cbs=[OneCycle(), look])
    assert seen == [0] * 6


def test_moms_none_leaves_momentum_alone():
    learn = quiet(batches_of([2] * 3), opt=torch.optim.Adam)
    seen = []
    look = Callback(name="look", before_batch=lambda cb: seen.append(cb.opt.param_groups[0]["betas"]))
    learn.fit(2, cbs=[OneCycle(moms=None), look])
    assert set(seen) == {(0.9, 0.999)}


@pytest.mark.parametrize(("warmup", "n_warm"), [(0.25, 5), (7, 7), (1, 1), (0.1, 2)])
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


@pytest.mark.parametrize("warmup", [0, 0.0, 1.0, 0.001])
def test_warmup_cosine_takes_every_share_and_no_rate_is_zero_before_the_end(warmup):
    learn = quiet(batches_of([2] * 5))
    watch, seen = rates(learn)
    learn.fit(1, cbs=[WarmupCosine(warmup), watch])
    assert all(0 < a <= 0.1 + 1e-12 for (a,) in seen[:-1])
