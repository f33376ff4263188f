"""GradientClip clips as torch does in a loop by hand, and remembers what it has clipped."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hookcb import Callback, GradientClip, MixedPrecision
from tests.support import (
    CANCELS,
    covering,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    weights,
)
from tests.training.support import OPTS, batches_of, quiet, sgd

RAGGED = [4, 4, 2]


def by_hand(clip, norm_type=2.0, train=None, opt_func=sgd, n_epoch=2):
    """Weights, and norms before and after clipping, of a plain loop."""
    model, norms, after = make_model(), [], []
    opt = opt_func(model.parameters(), lr=0.1)
    for x, y in (train or make_batches(3)) * n_epoch:
        F.mse_loss(model(x), y).backward()
        norms.append(norm_of(model, norm_type))
        clip(list(model.parameters()))
        after.append(norm_of(model, norm_type))
        opt.step()
        opt.zero_grad()
    return weights(model), norms, after


def norm_of(model, norm_type=2.0):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm(norm_type).item()


@in_turn(
    ("make", "clip"),
    [
        (lambda: GradientClip(), lambda params: clip_grad_norm_(params, 1.0)),
        (lambda: GradientClip(0.2), lambda params: clip_grad_norm_(params, 0.2)),
        (lambda: GradientClip(0.1, float("inf")), lambda params: clip_grad_norm_(params, 0.1, float("inf"))),
        (lambda: GradientClip(0.1, 1), lambda params: clip_grad_norm_(params, 0.1, 1.0)),
        (lambda: GradientClip(value=0.05), lambda params: clip_grad_value_(params, 0.05)),
        (lambda: GradientClip(float("inf")), lambda params: None),
    ],
    ids=["default", "norm", "largest", "sum", "value", "none"],
)
def test_it_is_torchs_clipping_to_the_bit(make, clip):
    learn = fit(make_learner(3, 1, make()), 2)
    expected, norms, after = by_hand(clip, learn.gradient_clip.norm_type)
    assert same(weights(learn.model), expected)
    assert learn.gradient_clip.norms == pytest.approx(norms)
    assert [n * c for n, c in zip(norms, learn.gradient_clip.coefs, strict=True)] == pytest.approx(
        after, rel=1e-4
    )


def test_nothing_clipped_is_a_coefficient_of_one():
    for cb in (GradientClip(1e6), GradientClip(value=1e6)):
        fit(make_learner(cbs=cb))
        assert cb.coefs == [1.0] * 3


def test_frozen_parameters_take_no_part():
    learn = make_learner(cbs=GradientClip(0.1))
    learn.model[0].requires_grad_(False)
    for p in learn.model[0].parameters():
        p.grad = torch.full_like(p, 100.0)
    learn.opt = torch.optim.SGD(learn.model[2].parameters(), lr=0.1)
    fit(learn)
    assert max(learn.gradient_clip.norms) < 50


def test_one_entry_is_kept_for_each_step_made():
    cancel = spy(
        [], "cancel", {("before_step", 1): CANCELS["step"](), ("before_step", 3): CANCELS["batch"]()}
    )
    learn = fit(make_learner(3, 1, [GradientClip(), cancel]), 2)
    assert len(learn.gradient_clip.norms) == len(learn.gradient_clip.coefs) == 4
    fit(learn)
    assert len(learn.gradient_clip.norms) == 3
    learn.validate()
    assert len(learn.gradient_clip.norms) == 3


@pytest.mark.parametrize("make", [GradientClip, lambda: GradientClip(value=1.0)])
def test_a_batch_without_gradients_is_a_norm_of_zero(make):
    cancel = spy([], "cancel", {("before_backward", 0): CANCELS["backward"]()})
    learn = fit(make_learner(cbs=[make(), cancel]))
    assert (learn.gradient_clip.norms[0], learn.gradient_clip.coefs[0]) == (0.0, 1.0)


def test_its_state_goes_through_a_file_and_copies_keep_it():
    cb = GradientClip(0.1)
    fit(make_learner(cbs=cb))
    torch.save(cb.state_dict(), file := io.BytesIO())
    file.seek(0)
    other = GradientClip()
    other.load_state_dict(torch.load(file, weights_only=True))
    for copied in (other, copy.deepcopy(cb), pickle.loads(pickle.dumps(cb))):
        assert (copied.norms, copied.coefs) == (cb.norms, cb.coefs)
    empty = GradientClip()
    empty.load_state_dict(GradientClip().state_dict())
    assert empty.norms == []


@in_turn(
    "wrong",
    [{"max_norm": 0}, {"max_norm": -1.0}, {"norm_type": 0}, {"value": -0.1}, {"max_norm": float("nan")}],
)
def test_numbers_that_are_not_above_zero_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a number above 0, got "):
        GradientClip(**wrong)


def test_other_arguments_are_refused():
    with pytest.raises(TypeError, match="max_norm must be a number above 0, got '1'"):
        GradientClip("1")
    with pytest.raises(ValueError, match="give only one of them"):
        GradientClip(max_norm=1.0, value=0.5)


@pytest.mark.parametrize(
    ("opt_func", "norm_type", "max_norm"), covering(OPTS, [2.0, 1.0, math.inf], [0.3, 1e6])
)
def test_the_norm_is_clipped_as_torch_clips_it(opt_func, norm_type, max_norm):
    expected, norms, _ = by_hand(
        lambda params: clip_grad_norm_(params, max_norm, norm_type), norm_type, batches_of(RAGGED), opt_func
    )
    learn, clip = quiet(batches_of(RAGGED), batches_of([2]), opt=opt_func), GradientClip(max_norm, norm_type)
    for _ in range(2):  # a second fit begins its lists anew
        learn.model.load_state_dict(make_model().state_dict())
        learn.opt = None
        learn.fit(2, cbs=clip)
        assert same(weights(learn.model), expected)
        assert list(clip.norms) == pytest.approx(norms)
        assert len(clip.coefs) == 6
    assert list(clip.coefs) == pytest.approx([min(1, max_norm / (n + 1e-6)) for n in norms])
    if max_norm == 1e6:
        assert set(clip.coefs) == {1.0}
    assert all(isinstance(v, float) for v in [*clip.norms, *clip.coefs])


def test_readers_before_it_see_what_is_unclipped_and_those_after_it_what_is_clipped():
    seen = {0: [], 19: [], 21: []}

    def reading(order):
        def read(cb):
            seen[order].append(nn.utils.get_total_norm([p.grad for p in cb.model.parameters()]).item())

        cb = Callback(name=f"reads{order}", before_step=read)
        cb.order = order
        return cb

    learn = quiet(batches_of(RAGGED))
    learn.fit(1, cbs=[GradientClip(0.01), *map(reading, seen)])
    assert seen[0] == seen[19] == pytest.approx(list(learn.gradient_clip.norms))
    assert seen[21] == pytest.approx([0.01] * 3, rel=1e-3)


def test_gradients_that_are_not_finite_are_seen_in_the_norms():
    train = batches_of(RAGGED)
    train[1] = (train[1][0] * math.inf, train[1][1])
    learn = quiet(train)
    learn.fit(1, cbs=(clip := GradientClip()))
    assert math.isfinite(clip.norms[0])
    assert not math.isfinite(clip.norms[1])


def test_clipping_under_a_scaler_clips_what_is_unscaled():
    norms = []
    for scale in (2.0, 2.0**12):
        learn = quiet(batches_of(RAGGED))
        learn.fit(2, cbs=[GradientClip(0.05), MixedPrecision("fp16", init_scale=scale)])
        norms.append((list(learn.gradient_clip.norms), weights(learn.model)))
    assert norms[0][0] == norms[1][0]
    assert same(norms[0][1], norms[1][1])
