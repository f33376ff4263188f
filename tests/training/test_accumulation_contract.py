"""GradientAccumulation trains as one large batch made of the group's samples would."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, GradientAccumulation, GradientClip, MixedPrecision
from tests.support import CANCELS, events, make_model, same, spy, weights
from tests.training.support import (
    NESTED_AT,
    TakesDict,
    TwoInputs,
    Unsized,
    batches_of,
    equal,
    momentum,
    quiet,
    raising,
    sgd,
    validating,
)

RAGGED = [4, 2, 4, 3, 1]


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


@pytest.mark.parametrize("n", [2, 3, 5, 9])
@pytest.mark.parametrize("opt_func", [momentum, torch.optim.AdamW])
def test_each_step_is_that_of_one_batch_of_all_the_groups_samples(n, opt_func):
    train = doubles(RAGGED)
    learn = accumulating(train, n, 3, opt=opt_func)
    assert close(weights(learn.model), by_large_batches(grouped(train, n) * 3, opt_func)[0])


def test_groups_of_one_are_no_accumulation_to_the_bit():
    plain, ours = (quiet(batches_of(RAGGED)) for _ in range(2))
    plain.fit(2)
    ours.fit(2, cbs=GradientAccumulation(1))
    assert same(weights(ours.model), weights(plain.model))


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


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "loss_func", [nn.MSELoss(reduction="sum"), nn.MSELoss(), nn.HuberLoss(reduction="sum", delta=0.3)]
)
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


def test_the_step_is_begun_only_where_the_group_is_whole():
    log = []
    accumulating(doubles(RAGGED), 2, 1, [spy(log, "a")])
    mine = events(log)
    train = mine[: mine.index("after_train")]
    ends = [e for e in train if e in ("after_backward", "before_step", "after_step", "after_batch")]
    waits, steps = (
        ["after_backward", "after_batch"],
        ["after_backward", "before_step", "after_step", "after_batch"],
    )
    assert ends == waits + steps + waits + steps + steps
    assert not any(event.startswith("after_cancel") for event in mine)


def test_gradients_are_clipped_once_a_step_as_those_of_the_large_batch():
    train = doubles(RAGGED)
    clip = GradientClip(0.05)
    learn = accumulating(train, 2, 2, [clip])
    expected, norms = by_large_batches(grouped(train, 2) * 2, clip=0.05)
    assert close(weights(learn.model), expected)
    assert list(clip.norms) == pytest.approx(norms)


def test_a_scaler_is_asked_once_a_step_and_the_group_is_that_of_a_plain_half_precision_loop():
    train = batches_of([4, 4, 4, 4, 4])
    model = make_model()
    opt, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for i, (x, y) in enumerate(train):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss / (1 if i == 4 else 2)).backward()
        if i % 2 or i == 4:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    learn = quiet(train)
    learn.fit(1, cbs=[GradientAccumulation(2), MixedPrecision(torch.float16, init_scale=2.0**8)])
    assert same(weights(learn.model), weights(model))


@pytest.mark.parametrize("event", ["before_batch", "after_pred", "after_loss"])
@pytest.mark.parametrize("order", [-1000, 1000])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_batch_cancelled_before_its_backward_is_not_of_the_group(event, order, nth):
    train = doubles(RAGGED)
    cancel = spy([], "devil", {(event, nth): CANCELS["batch"]()}, order=order)
    learn = accumulating(train, 2, 1, [cancel])
    left = train[:nth] + train[nth + 1 :]
    assert close(weights(learn.model), by_large_batches(grouped(left, 2))[0])


@pytest.mark.parametrize("order", [-1000, 1000])
@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("level", ["batch", "backward"])
def test_a_backward_that_is_cancelled_adds_nothing_and_does_not_count(order, nth, level):
    train, seen = doubles(RAGGED), []
    cancel = spy([], "devil", {("before_backward", nth): CANCELS[level]()}, order=order)
    look = Callback(name="look", after_batch=lambda cb: seen.append(cb.loss.item()) if cb.training else None)
    learn = accumulating(train, 2, 1, [cancel, look])
    left = train[:nth] + train[nth + 1 :]
    assert close(weights(learn.model), by_large_batches(grouped(left, 2))[0])
    if level == "backward":
        assert list(learn.recorder.losses) == seen


@pytest.mark.parametrize("event", ["before_batch", "after_loss"])
@pytest.mark.parametrize("sized", [True, False])
def test_a_cancelled_last_batch_does_not_lose_the_group_before_it(event, sized):
    train = doubles(RAGGED)
    cancel = spy([], "devil", {(event, 4): CANCELS["batch"]()})
    learn = quiet(train if sized else Unsized(train), None, make_model().double())
    learn.fit(1, cbs=[GradientAccumulation(3), cancel])
    assert close(weights(learn.model), by_large_batches(grouped(train[:4], 3))[0])


@pytest.mark.parametrize("order", [-1000, 0, 1000])
@pytest.mark.parametrize("nth", [0, 1])
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


@pytest.mark.parametrize("order", [-1000, 1000])
def test_a_validation_inside_is_not_counted(order):
    train = doubles(RAGGED)
    expected = by_large_batches(grouped(train, 2))[0]
    for event in NESTED_AT:
        learn = accumulating(train, 2, 1, [validating(event, order)])
        assert close(weights(learn.model), expected), event


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


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "event", ["before_batch", "after_loss", "after_backward", "after_batch", "before_step"]
)
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


@pytest.mark.parametrize("sized", [True, False])
def test_state_is_plain_and_loading_it_back_changes_nothing(sized):
    def run(*cbs):
        learn = quiet(train if sized else Unsized(train), None, make_model().double())
        learn.fit(3, cbs=[GradientAccumulation(3), *cbs])
        return weights(learn.model)

    def reload(cb):
        state = cb.learn.gradient_accumulation.state_dict()
        assert equal(pickle.loads(pickle.dumps(state)), state)
        cb.learn.gradient_accumulation.load_state_dict(state)

    train, again = doubles(RAGGED), Callback(name="again", after_batch=reload, after_epoch=reload)
    again.order = 100
    assert same(run(again), run())
