"""GradientAccumulation makes the steps of large batches."""

import copy
import io
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import (
    EMA,
    Callback,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    check_callback,
)
from tests.support import (
    CANCELS,
    EVENTS,
    events,
    fit,
    make_batches,
    make_model,
    primary_plan,
    same,
    spy,
    weights,
)


def learner(train, cbs=(), valid=None, loss_func=F.mse_loss):
    return Learner((train, valid), make_model(), loss_func, torch.optim.SGD, lr=0.1, cbs=cbs)


def unsized(batches):
    return type("Unsized", (), {"__iter__": lambda self: iter(batches)})()


def stepped_at(train, groups, n_epoch=1, loss_func=F.mse_loss):
    """Weights after one step for each list of indices of batches, as one batch."""
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(n_epoch):
        for group in groups:
            x, y = (torch.cat(items) for items in zip(*[train[i] for i in group], strict=True))
            loss_func(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_it_is_the_plain_loop_that_divides_the_loss_to_the_bit(n):
    train, model = make_batches(7), make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for i, (x, y) in enumerate(train):
            (F.mse_loss(model(x), y) / min(n, 7 - i // n * n)).backward()
            if (i + 1) % n == 0 or i == 6:
                opt.step()
                opt.zero_grad()
    learn = fit(learner(train, GradientAccumulation(n)), 2)
    assert same(weights(learn.model), weights(model))
    assert not learn.accumulating


@pytest.mark.parametrize("sized", [True, False])
def test_batches_weigh_by_their_samples(sized):
    train = make_batches(5, bs=4, last=1)
    learn = fit(learner(train if sized else unsized(train), GradientAccumulation(2)), 2)
    assert_close(weights(learn.model), stepped_at(train, [[0, 1], [2, 3], [4]], 2))
    first_is_small = train[::-1]
    learn = fit(learner(first_is_small, GradientAccumulation(3)), 2)
    assert_close(weights(learn.model), stepped_at(first_is_small, [[0, 1, 2], [3, 4]], 2))


@pytest.mark.parametrize(
    "make", [lambda: nn.MSELoss(reduction="sum"), lambda: partial(F.mse_loss, reduction="sum")]
)
def test_a_sum_is_not_scaled(make):
    train = [(x, y / 10) for x, y in make_batches(4, bs=2, last=1)]
    learn = fit(learner(train, GradientAccumulation(2), loss_func=make()))
    assert_close(weights(learn.model), stepped_at(train, [[0, 1], [2, 3]], loss_func=make()))


def summing(pred, y):
    return (pred - y).square().sum()


def summing_in_parts(pred, y):  # as of a variational autoencoder
    return F.mse_loss(pred, y, reduction="sum") + -0.5 * torch.sum(pred)


def with_default(pred, y, reduction="sum"):
    return F.mse_loss(pred, y, reduction=reduction)


def averaging_by_hand(pred, y):
    return (pred - y).square().sum() / len(y)


def averaging_with_penalty(pred, y):
    return 2 * F.mse_loss(pred, y) + 0.01 * pred.square().mean()


def averaged_or_summed(train, groups, loss_func, is_sum):
    """Weights after a step for each group, of whose batches the losses are averaged or summed."""
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in groups:
        n = sum(len(train[i][0]) for i in group)
        for x, y in (train[i] for i in group):
            (loss_func(model(x), y) * (1 if is_sum else len(x) / n)).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    ("loss_func", "is_sum"),
    [
        (summing, True),
        (summing_in_parts, True),
        (with_default, True),
        (partial(with_default, reduction="mean"), False),
        (averaging_with_penalty, False),
        (lambda pred, y: F.l1_loss(pred, y), False),
    ],
)
def test_the_loss_of_a_plain_function_is_averaged_or_summed_as_it_was_made(loss_func, is_sum):
    train = [(x, y / 10) for x, y in make_batches(4, bs=2, last=1)]
    learn = fit(learner(train, GradientAccumulation(2), loss_func=loss_func))
    assert_close(weights(learn.model), averaged_or_summed(train, [[0, 1], [2, 3]], loss_func, is_sum))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_cannot_be_found_out_is_told(reduction):
    train = [(x, y / 10) for x, y in make_batches(3, bs=2, last=1)]
    with pytest.warns(UserWarning, match=r"averaging_by_hand is a mean or a sum .* reduction='mean'"):
        silent = fit(learner(train, GradientAccumulation(2), loss_func=averaging_by_hand), 2)
    told = fit(learner(train, GradientAccumulation(2, reduction=reduction), loss_func=averaging_by_hand), 2)
    groups = [[0, 1], [2], [0, 1], [2]]
    assert_close(
        weights(told.model), averaged_or_summed(train, groups, averaging_by_hand, reduction == "sum")
    )
    assert same(weights(silent.model), weights(told.model)) == (reduction == "mean")


def test_what_is_told_comes_before_what_the_loss_says_of_itself():
    train, loss_func = make_batches(4), nn.MSELoss()
    learn = fit(learner(train, GradientAccumulation(2, reduction="sum"), loss_func=loss_func))
    assert_close(weights(learn.model), averaged_or_summed(train, [[0, 1], [2, 3]], loss_func, is_sum=True))


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="'none'"):
        GradientAccumulation(2, reduction="none")


def test_steps_fire_once_a_group_and_the_loss_reads_as_it_is():
    log, losses = [], []
    look = Callback(after_batch=lambda cb: losses.append(cb.loss.item()))
    waits = Callback(name="waits", after_batch=lambda cb: log.append(("a", f"waits {cb.learn.accumulating}")))
    learn = fit(learner(make_batches(3), [GradientAccumulation(2), spy(log, "a"), waits, look]))
    of_batches = [e for e in events(log) if e in ("before_step", "after_step", "waits True", "waits False")]
    assert of_batches == ["waits True"] + ["before_step", "after_step", "waits False"] * 2
    assert "after_cancel_step" not in events(log)
    assert losses == list(learn.recorder.losses)


@pytest.mark.parametrize(("event", "level"), [("after_loss", "batch"), ("before_backward", "batch")])
@pytest.mark.parametrize("order", [-1000, 1000])
@pytest.mark.parametrize(
    ("cancelled", "groups"),
    [(0, [[1, 2], [3, 4]]), (1, [[0, 2], [3, 4]]), (4, [[0, 1], [2, 3]]), (3, [[0, 1], [2, 4]])],
)
def test_a_batch_cancelled_before_its_backward_does_not_count(event, level, order, cancelled, groups):
    train = make_batches(5)
    cancel = spy([], "cancel", {(event, cancelled): CANCELS[level]()}, order=order)
    learn = fit(learner(train, [GradientAccumulation(2), cancel]))
    assert_close(weights(learn.model), stepped_at(train, groups))


@pytest.mark.parametrize("cancelled", [0, 1, 2, 3])
def test_a_cancelled_backward_does_not_count(cancelled):
    train = make_batches(4)
    left = [i for i in range(4) if i != cancelled]
    cancel = spy([], "cancel", {("before_backward", cancelled): CANCELS["backward"]()})
    learn = fit(learner(train, [GradientAccumulation(2), cancel]))
    assert_close(weights(learn.model), stepped_at(train, [left[:2], left[2:]]))


@pytest.mark.parametrize("level", ["batch", "train", "epoch", "fit"])
def test_the_loss_is_as_it_was_when_a_cancel_has_taken_effect(level):
    losses = []
    see = {
        event: lambda cb: losses.append(cb.loss.item()) for event in ("after_loss", f"after_cancel_{level}")
    }
    cancel = spy([], "cancel", {("before_backward", 0): CANCELS[level]()})
    fit(learner(make_batches(2), [GradientAccumulation(2), Callback(name="look", **see), cancel]))
    assert losses[0] == losses[1]


def test_a_training_cut_short_still_makes_the_step_of_what_it_has():
    train = make_batches(5)
    cancel = spy([], "cancel", {("after_batch", 2): CANCELS["train"]()}, run_valid=False)
    learn = fit(learner(train, [GradientAccumulation(2), cancel]))
    assert_close(weights(learn.model), stepped_at(train, [[0, 1], [2]]))


def test_a_cancel_at_the_step_after_the_training_ends_nothing_else():
    for level in ("step", "batch", "train"):
        cancel = spy([], "cancel", {("before_step", 1): CANCELS[level]()})
        learn = fit(learner(unsized(make_batches(3)), [GradientAccumulation(2), cancel]), 2)
        assert len(learn.recorder.rows) == 2


@pytest.mark.parametrize("order", [-1000, 1000])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, *CANCELS.values()])
def test_nothing_is_left_however_the_fit_ends(order, error):
    for event in EVENTS:
        plan = primary_plan(event) | {(event, 0): error("planted")}
        accumulation = GradientAccumulation(2)
        learn = learner(make_batches(3), [accumulation, spy([], "devil", plan, order=order)], make_batches(1))
        with suppress(ValueError, KeyboardInterrupt, RuntimeError):
            fit(learn)
        assert not learn.accumulating
        assert accumulation.state_dict() == GradientAccumulation(2).state_dict()


@pytest.mark.parametrize("event", [event for event in EVENTS if not event.startswith("after_cancel")])
@pytest.mark.parametrize("order", [-1000, 1000])
def test_a_validation_inside_changes_nothing(event, order):
    inside, train = [], make_batches(3)

    def validate(cb):
        if not inside:
            inside.append(1)
            cancel = Callback(name="cancel", before_batch=lambda cb: raise_(CANCELS["batch"]))
            cb.learn.validate(cbs=cancel)
            inside.pop()

    nested = Callback(name="nested", **{event: validate})
    nested.order = order
    learn = fit(learner(train, [GradientAccumulation(2), nested], make_batches(2, seed=1)))
    assert same(weights(learn.model), weights(fit(learner(train, GradientAccumulation(2))).model))


def raise_(error):
    raise error


def test_one_batch_outside_a_fit_makes_its_step():
    learn = learner(make_batches(3), GradientAccumulation(3))
    learn.one_batch()
    assert_close(weights(learn.model), stepped_at(make_batches(3), [[0]]))


def test_its_state_goes_through_a_file():
    class Reload(Callback):
        order = 1000

        def after_batch(self):
            torch.save(self.learn.gradient_accumulation.state_dict(), file := io.BytesIO())
            file.seek(0)
            self.learn.gradient_accumulation.before_fit()
            self.learn.gradient_accumulation.load_state_dict(torch.load(file, weights_only=True))

    train = make_batches(5, last=1)
    runs = [fit(learner(train, [GradientAccumulation(3), *cbs]), 2) for cbs in ((), [Reload()])]
    assert same(weights(runs[0].model), weights(runs[1].model))


@pytest.mark.parametrize("n", [0, -2])
def test_numbers_below_one_are_refused(n):
    with pytest.raises(ValueError, match="1 or more"):
        GradientAccumulation(n)


@pytest.mark.parametrize("n", [2.0, "2", None, True])
def test_what_is_no_number_is_refused(n):
    with pytest.raises(TypeError, match="give a whole number of batches"):
        GradientAccumulation(n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", [2.0**8, 2.0**60])
def test_all_four_together_are_the_plain_loop_to_the_bit(dtype, scale):
    train, valid, options = (
        make_batches(6),
        make_batches(2, seed=1),
        {"init_scale": scale, "backoff_factor": 2.0**-30},
    )
    model, norms, valid_losses = make_model(), [], []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, **options)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    for _ in range(3):
        for i, (x, y) in enumerate(train):
            with torch.autocast("cpu", dtype):
                loss = F.mse_loss(model(x), y) / 2
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(opt)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
                before = scaler.get_scale()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                if scaler.get_scale() >= before:
                    average.update_parameters(model)
        with torch.no_grad(), torch.autocast("cpu", dtype):
            valid_losses.append(sum(F.mse_loss(average(x), y).item() for x, y in valid) / 2)
    cbs = [
        EMA(0.7),
        GradientClip(0.3),
        GradientAccumulation(2),
        MixedPrecision(dtype, **options if scaler.is_enabled() else {}),
    ]
    learn = fit(learner(train, cbs, valid), 3)
    assert same(weights(learn.model), weights(model))
    assert same(weights(learn.ema.model), weights(average.module))
    assert str(learn.gradient_clip.norms) == str(norms)
    assert [row["valid_loss"] for row in learn.recorder.rows] == valid_losses
    overflows = dtype is torch.float16 and scale > 2.0**30
    assert learn.mixed_precision.skipped == sum(norm != norm or norm == float("inf") for norm in norms)
    assert (learn.mixed_precision.skipped > 0) == overflows


def test_it_keeps_the_contract_of_callbacks():
    check_callback(lambda: GradientAccumulation(1))
    assert copy.deepcopy(GradientAccumulation(3)).n == 3
