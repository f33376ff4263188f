"""GradientAccumulation trains as one large batch made of the group's samples would."""

import copy
import io
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import EMA, Callback, GradientAccumulation, GradientClip, Learner, MixedPrecision
from tests.support import (
    CANCELS,
    EVENTS,
    along,
    events,
    fit,
    in_turn,
    make_batches,
    make_model,
    primary_plan,
    same,
    spy,
    weights,
)
from tests.training.support import (
    DEVIL,
    NESTED_AT,
    TakesDict,
    TwoInputs,
    Unsized,
    batches_of,
    momentum,
    quiet,
    raising,
    sgd,
)

RAGGED = [4, 2, 4, 3, 1]


def learner(train, cbs=(), valid=None, loss_func=F.mse_loss):
    return Learner((train, valid), make_model(), loss_func, torch.optim.SGD, lr=0.1, cbs=cbs)


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


def doubles(sizes, seed=0):
    return [(x.double(), y.double()) for x, y in batches_of(sizes, seed=seed)]


def grouped(batches, n):
    """The batches of one epoch, every n of them as one; the last group may be shorter."""
    groups = [batches[i : i + n] for i in range(0, len(batches), n)]
    return [(torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])) for group in groups]


def by_large_batches(groups, opt_func=sgd, loss_func=F.mse_loss, clip=None):
    model = make_model().double()
    opt = opt_func(model.parameters(), lr=0.1)
    norms = []
    for x, y in groups:
        loss_func(model(x), y).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return weights(model), norms


def accumulating(train, n, n_epoch=1, cbs=(), **kwargs):
    learn = quiet(train, doubles([2]), make_model().double(), **kwargs)
    learn.fit(n_epoch, cbs=[GradientAccumulation(n), *cbs])
    return learn


def close(a, b):
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(a, b, strict=True))


@in_turn("n", [1, 2, 3, 4, 8])
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


@in_turn(
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
    with pytest.warns(
        UserWarning, match=r"averaging_by_hand is a mean or a sum .* assuming a mean; .* reduction='mean'"
    ):
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


@in_turn("level", ["batch", "train", "epoch", "fit"])
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
        learn = fit(learner(Unsized(make_batches(3)), [GradientAccumulation(2), cancel]), 2)
        assert len(learn.recorder.rows) == 2


@in_turn(("shift", "error"), list(enumerate([*DEVIL, *CANCELS.values()])))
def test_nothing_is_left_however_the_fit_ends(shift, error):
    for i, event in enumerate(EVENTS[shift % 3 :: 3]):
        order = (-1000, 1000)[(i + shift) % 2]
        plan = primary_plan(event) | {(event, 0): error("planted")}
        accumulation = GradientAccumulation(2)
        learn = learner(make_batches(3), [accumulation, spy([], "devil", plan, order=order)], make_batches(1))
        with suppress(ValueError, KeyboardInterrupt, RuntimeError):
            fit(learn)
        assert not learn.accumulating
        assert accumulation.state_dict() == GradientAccumulation(2).state_dict()


@in_turn(("event", "order"), along(NESTED_AT, [-1000, 1000]))
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


@in_turn("sized", [True, False])
def test_its_state_goes_through_a_file(sized):
    class Reload(Callback):
        order = 1000

        def after_batch(self):
            torch.save(self.learn.gradient_accumulation.state_dict(), file := io.BytesIO())
            file.seek(0)
            self.learn.gradient_accumulation.before_fit()
            self.learn.gradient_accumulation.load_state_dict(torch.load(file, weights_only=True))

    train = make_batches(5, last=1)
    train = train if sized else Unsized(train)
    runs = [fit(learner(train, [GradientAccumulation(3), *cbs]), 2) for cbs in ((), [Reload()])]
    assert same(weights(runs[0].model), weights(runs[1].model))


@in_turn("n", [0, -2, 2.0, "2", None, True])
def test_what_is_no_number_of_batches_is_refused(n):
    is_number = type(n) is int
    with pytest.raises(
        ValueError if is_number else TypeError,
        match="1 or more" if is_number else "must be a whole number of batches",
    ):
        GradientAccumulation(n)


@in_turn("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@in_turn("scale", [2.0**8, 2.0**60])
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


@in_turn("n", [2, 3, 5, 9])
@in_turn("opt_func", [momentum, torch.optim.AdamW])
def test_each_step_is_that_of_one_batch_of_all_the_groups_samples(n, opt_func):
    train = doubles(RAGGED)
    learn = accumulating(train, n, 3, opt=opt_func)
    assert close(weights(learn.model), by_large_batches(grouped(train, n) * 3, opt_func)[0])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_without_a_length_of_the_loader_the_last_group_of_an_epoch_is_not_lost(n):
    train = doubles(RAGGED)
    learn = accumulating(Unsized(train), n, 3)
    assert close(weights(learn.model), by_large_batches(grouped(train, n) * 3)[0])


@pytest.mark.parametrize("says", [2, 9])
def test_a_loader_that_gives_more_or_fewer_batches_than_it_says_loses_none(says):
    class Says(Unsized):
        def __len__(self):
            return says

    train = doubles(RAGGED)
    learn = accumulating(Says(train), 2, 2)
    assert close(weights(learn.model), by_large_batches(grouped(train, 2) * 2)[0])


@in_turn("n", [2, 3])
@in_turn("loss_func", [nn.MSELoss(reduction="sum"), nn.MSELoss(), nn.HuberLoss(reduction="sum", delta=0.3)])
def test_a_loss_that_is_a_sum_is_summed_and_one_that_is_a_mean_averaged(n, loss_func):
    train = doubles(RAGGED)
    learn = accumulating(train, n, 2, loss_func=loss_func, lr=0.01)
    model = make_model().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in grouped(train, n) * 2:
        loss_func(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert close(weights(learn.model), weights(model))


def test_readers_see_the_loss_as_it_is_and_the_gradients_of_the_whole_group():
    train, losses, norms = doubles(RAGGED), [], []

    class Reads(Callback):
        def after_loss(self):
            self.real = self.loss.item()

        def after_backward(self):
            losses.append((self.loss.item(), self.real))

        def before_step(self):
            norms.append(nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item())

        def after_batch(self):
            losses.append((self.loss.item(), self.real))

    learn = accumulating(train, 2, 1, [Reads()])
    assert all(seen == real for seen, real in losses)
    model, expected = make_model().double(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(0, 5, 2):
        expected += [F.mse_loss(model(x), y).item() for x, y in train[i : i + 2]]
        x, y = grouped(train, 2)[i // 2]
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert list(learn.recorder.losses) == pytest.approx(expected)
    assert norms == pytest.approx(by_large_batches(grouped(train, 2))[1])


@in_turn("event", ["before_batch", "after_pred", "after_loss"])
@in_turn("order", [-1000, 1000])
@in_turn("nth", [0, 1, 2])
def test_a_batch_cancelled_before_its_backward_is_not_of_the_group(event, order, nth):
    train = doubles(RAGGED)
    cancel = spy([], "devil", {(event, nth): CANCELS["batch"]()}, order=order)
    learn = accumulating(train, 2, 1, [cancel])
    left = train[:nth] + train[nth + 1 :]
    assert close(weights(learn.model), by_large_batches(grouped(left, 2))[0])


@in_turn("order", [-1000, 1000])
@in_turn("nth", [0, 1, 2])
@in_turn("level", ["batch", "backward"])
def test_a_backward_that_is_cancelled_adds_nothing_and_does_not_count(order, nth, level):
    train, seen = doubles(RAGGED), []
    cancel = spy([], "devil", {("before_backward", nth): CANCELS[level]()}, order=order)
    look = Callback(name="look", after_batch=lambda cb: seen.append(cb.loss.item()) if cb.training else None)
    learn = accumulating(train, 2, 1, [cancel, look])
    left = train[:nth] + train[nth + 1 :]
    assert close(weights(learn.model), by_large_batches(grouped(left, 2))[0])
    if level == "backward":
        assert list(learn.recorder.losses) == seen


@in_turn("event", ["before_batch", "after_loss"])
@in_turn("sized", [True, False])
def test_a_cancelled_last_batch_does_not_lose_the_group_before_it(event, sized):
    train = doubles(RAGGED)
    cancel = spy([], "devil", {(event, 4): CANCELS["batch"]()})
    learn = quiet(train if sized else Unsized(train), None, make_model().double())
    learn.fit(1, cbs=[GradientAccumulation(3), cancel])
    assert close(weights(learn.model), by_large_batches(grouped(train[:4], 3))[0])


@in_turn("order", [-1000, 0, 1000])
@in_turn("nth", [0, 1])
def test_a_step_cancelled_by_another_leaves_its_gradients_to_the_next_group(order, nth):
    train = doubles([4] * 6)
    cancel = spy([], "devil", {("before_step", nth): CANCELS["step"]()}, order=order)
    learn = accumulating(train, 2, 1, [cancel])
    model = make_model().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for i, (x, y) in enumerate(grouped(train, 2)):
        F.mse_loss(model(x), y).backward()
        if i != nth:
            steps.append(i)
            opt.step()
            opt.zero_grad()
    assert len(steps) == 2
    assert close(weights(learn.model), weights(model))


def test_several_inputs_and_mappings_weigh_by_their_samples():
    train = doubles(RAGGED)
    seeds = [(x, x + 1, y) for x, y in train]
    learn = quiet(seeds, None, TwoInputs().double())
    learn.fit(2, cbs=GradientAccumulation(2))
    large = quiet([(x, x + 1, y) for x, y in grouped(train, 2)], None, TwoInputs().double())
    large.fit(2)
    assert close(weights(learn.model), weights(large.model))

    learn = quiet([{"x": x, "labels": y} for x, y in train], None, TakesDict().double(), loss_func=None)
    learn.fit(2, cbs=GradientAccumulation(3))
    large = quiet(
        [{"x": x, "labels": y} for x, y in grouped(train, 3)], None, TakesDict().double(), loss_func=None
    )
    large.fit(2)
    assert close(weights(learn.model), weights(large.model))


@in_turn("raised", [ValueError, KeyboardInterrupt])
@in_turn("event", ["before_batch", "after_loss", "after_backward", "after_batch", "before_step"])
def test_a_fit_that_broke_off_in_a_group_leaves_nothing_of_it_to_the_next(event, raised):
    train, cb = doubles(RAGGED), GradientAccumulation(3)
    learn = quiet(train, None, make_model().double())
    with pytest.raises(raised):
        learn.fit(2, cbs=[cb, raising(event, raised("why"), nth=0 if event == "before_step" else 1)])
    again = quiet(train, None, copy.deepcopy(learn.model))
    learn.fit(1, cbs=cb)
    again.fit(1, cbs=GradientAccumulation(3))
    assert same(weights(learn.model), weights(again.model))


@pytest.mark.parametrize("level", ["train", "epoch"])
def test_an_epoch_cancelled_in_a_group_ends_no_fit_and_steps_go_on(level):
    train, log = doubles(RAGGED), []
    plan = {("after_batch", 0): CANCELS[level]()}
    learn = quiet(train, None, make_model().double())
    learn.fit(3, cbs=[GradientAccumulation(2), spy(log, "a", plan)])
    assert events(log).count("after_step") >= 6
    assert events(log).count("after_epoch") == 3
    assert all(p.grad is None or not p.grad.any() for p in learn.model.parameters())


def test_another_number_of_batches_than_in_the_checkpoint_is_told():
    old, new = GradientAccumulation(2), GradientAccumulation(3)
    with pytest.warns(UserWarning, match="accumulates 3 batches from here on, and 2 before the checkpoint"):
        new.load_state_dict(old.state_dict())
    GradientAccumulation(2).load_state_dict(old.state_dict())  # warns of nothing
