"""OneCycle follows its formula and torch's own, for every length of a fit and every optimizer."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as lrs

from hookcb import Callback, OneCycle
from tests.support import fit, in_turn, make_learner, make_model, same, weights
from tests.training.support import OPTS, batches_of, quiet, rates, sgd, train_plainly, two_groups

RAGGED = [4, 4, 2]


class Moms(Callback):
    """Keeps the momentum, or the first beta, of each batch."""

    order = 1000

    def before_fit(self):
        self.moms = []

    def before_step(self):
        group = self.opt.param_groups[-1]
        self.moms.append(group["betas"][0] if "betas" in group else group["momentum"])


def by_hand(make, n_epoch, batches, opt_func=SGD):
    """Torch's own loop: the weights it comes to, and the rate of each batch."""
    model = make_model()
    opt = opt_func(model.parameters(), lr=0.1)
    scheduler, seen = make(opt), []
    for _ in range(n_epoch):
        for x, y in batches:
            seen.append(opt.param_groups[0]["lr"])
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            scheduler.step()
    return weights(model), seen


@in_turn("n", [2, 3, 4, 5, 8, 12, 100])
@in_turn("opt_func", [Adam, partial(SGD, momentum=0.5)], ids=["adam", "momentum"])
def test_one_cycle_follows_its_formula(n, opt_func):
    def cosine(start, end, share):
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

    rise = max(0.25 * n - 1, 0.0)
    learn = make_learner(n_train=n, opt_func=opt_func)
    fit(learn, cbs=[OneCycle(1.0, div=10, div_final=100, moms=(0.9, 0.8)), Moms()])
    for i, (lr, mom) in enumerate(zip(learn.recorder.lrs, learn.moms.moms, strict=True)):
        ends = [(0.1, 1.0), (0.9, 0.8)] if i <= rise else [(1.0, 0.01), (0.8, 0.9)]
        share = (i / rise if rise else 0.0) if i <= rise else (i - rise) / (n - 1 - rise)
        assert lr == pytest.approx(cosine(*ends[0], share))
        assert mom == pytest.approx(cosine(*ends[1], share))


def fastai_rates(n, lr_max, div, div_final, pct_start):
    """Batch i at the point i / n of half a cosine up and half a cosine down, as in `combined_cos`."""

    def between(start, end, pos):
        return start + (1 + math.cos(math.pi * (1 - pos))) * (end - start) / 2

    def rate(pct):
        if pct < pct_start:
            return between(lr_max / div, lr_max, pct / pct_start)
        return between(lr_max, lr_max / div_final, (pct - pct_start) / (1 - pct_start))

    return [rate(i / n) for i in range(n)]


def test_one_cycle_differs_from_that_of_fastai_as_it_says():
    n, options = 40, {"div": 25.0, "div_final": 1e5, "pct_start": 0.25}
    ours = fit(make_learner(n_train=n), cbs=OneCycle(1.0, **options)).recorder.lrs
    theirs = fastai_rates(n, 1.0, **options)
    assert list(ours).index(max(ours)) == 0.25 * n - 1
    assert theirs.index(max(theirs)) == 0.25 * n
    assert ours[0] == pytest.approx(theirs[0])
    assert ours[-1] == pytest.approx(1e-5)
    assert theirs[-1] > 1e-3
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.2


@pytest.mark.parametrize("lr_max", [None, [0.1, 0.4], slice(0.1, 0.4)])
def test_one_cycle_peaks_at_the_rate_of_each_group(lr_max):
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.4}]
    seen = []
    see = Callback(before_step=lambda cb: seen.append([g["lr"] for g in cb.opt.param_groups]), name="see")
    fit(make_learner(n_train=8, model=model, opt_func=SGD(groups, lr=1.0)), cbs=[OneCycle(lr_max), see])
    assert seen[1] == [pytest.approx(0.1), pytest.approx(0.4)]
    assert all(b == pytest.approx(4 * a) for a, b in seen)


@in_turn("opt_func", OPTS)
@in_turn("n_fit", [1, 2])
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


@in_turn("n_batches", range(1, 9))
@in_turn("pct_start", [0.01, 0.25, 0.5, 0.99])
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
