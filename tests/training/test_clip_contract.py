"""GradientClip clips as torch does in a loop by hand, and remembers what it has clipped."""

import math

import pytest
import torch.nn.functional as F
from torch import nn

from hookcb import (
    Callback,
    GradientClip,
    MixedPrecision,
)
from tests.support import CANCELS, make_model, same, spy, weights
from tests.training.support import (
    OPTS,
    Wide,
    batches_of,
    momentum,
    quiet,
)

RAGGED = [4, 4, 2]


def clipped_by_hand(clip, opt_func, norm_type=2.0, n_epoch=2):
    model = make_model()
    opt, norms = opt_func(model.parameters(), lr=0.1), []
    for x, y in batches_of(RAGGED) * n_epoch:
        F.mse_loss(model(x), y).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type).item())
        clip(model.parameters())
        opt.step()
        opt.zero_grad()
    return weights(model), norms


@pytest.mark.parametrize("opt_func", OPTS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_the_norm_is_clipped_as_torch_clips_it(opt_func, norm_type, max_norm):
    expected, norms = clipped_by_hand(
        lambda params: nn.utils.clip_grad_norm_(params, max_norm, norm_type), opt_func, norm_type
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


def test_values_are_clipped_as_torch_clips_them():
    expected, norms = clipped_by_hand(lambda params: nn.utils.clip_grad_value_(params, 0.1), momentum)
    learn = quiet(batches_of(RAGGED), opt=momentum)
    learn.fit(2, cbs=(clip := GradientClip(value=0.1)))
    assert same(weights(learn.model), expected)
    assert list(clip.norms) == pytest.approx(norms)
    assert all(0 < c <= 1 for c in clip.coefs)


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


def test_frozen_parameters_and_a_batch_without_gradients_are_no_trouble():
    model = Wide()
    model.stem.requires_grad_(False)
    learn = quiet(batches_of(RAGGED), batches_of([2]), model)
    learn.fit(1, cbs=[GradientClip(), spy([], "a", {("before_backward", 0): CANCELS["backward"]()})])
    assert len(learn.gradient_clip.norms) == 3
    assert learn.gradient_clip.norms[0] == 0


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
