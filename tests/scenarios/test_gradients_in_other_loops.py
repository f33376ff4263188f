"""What GradientHealth reads in loops that step, change weights or end in ways of their own."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import (
    EMA,
    CancelBackwardException,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    ChannelsLast,
    GradientHealth,
    Learner,
    MixedPrecision,
)
from tests.gradients.support import (
    assert_matches,
    at,
    batches,
    by_hand,
    close,
    learner,
    mlp,
    norm_of,
    ratio,
    seeded,
    wide,
)
from tests.support import along, fit, in_turn
from tests.training.support import equal

sgd, adam = torch.optim.SGD, torch.optim.Adam

# ---- loops of another kind


def test_a_closure_of_lbfgs_is_one_step():
    class Closing(Learner):
        def step(self):
            def closure():
                self.opt.zero_grad()
                loss = self.loss_func(self.model(*self.xb), *self.yb)
                loss.backward()
                return loss

            self.opt.step(closure)

    model = mlp()
    twin, data = copy.deepcopy(model), batches(3)
    opt, norms, ratios = torch.optim.LBFGS(twin.parameters(), lr=0.1, max_iter=4), [], []
    for x, y in data:
        F.mse_loss(twin(x), y).backward()
        norms.append(norm_of(twin[0].weight.grad))
        before = wide(twin[0].weight)

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = F.mse_loss(twin(x), y)
            loss.backward()
            return loss

        opt.step(closure)
        opt.zero_grad()
        ratios.append(ratio(wide(twin[0].weight), before))
    health = GradientHealth()
    learner(model, data, health, opt=partial(torch.optim.LBFGS, max_iter=4), kind=Closing)
    assert all(map(close, health.series("0.weight", "norm"), norms))
    assert all(map(close, health.series("0.weight", "update_ratio"), ratios))
    assert health.step_series("skipped") == [0, 0, 0]


def test_of_two_optimizers_that_take_turns_each_parameter_has_its_own_updates():
    class Turns(Learner):
        def step(self):
            (self.opt if self.iter % 2 == 0 else self.second).step()

    model, health = mlp(), GradientHealth()
    learn = Turns(batches(), model, F.mse_loss, sgd(model[0].parameters(), 0.1), cbs=[health])
    learn.second = sgd(model[2].parameters(), 0.1)
    fit(learn)
    assert [x > 0 for x in health.series("0.weight", "update_ratio")] == [True, False, True, False]
    assert [x > 0 for x in health.series("2.weight", "update_ratio")] == [False, True, False, True]


class Swapping(sgd):
    """Gives each parameter a new tensor."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("hidden", [5, 600])
def test_parameters_pointed_at_new_tensors_by_the_optimizer_are_followed(hidden):
    health = GradientHealth(detail_every=1)
    learner(mlp(hidden=hidden), None, health, opt=Swapping)
    skip = () if hidden == 5 else ("update_ratio", "drift")
    assert_matches(health, by_hand(mlp(hidden=hidden), batches(), Swapping), skip=skip)
    assert all(x > 0 for x in health.series("0.weight", "update_ratio"))


def repointed(cb):
    for p in cb.model.parameters():
        p.data = p.data.clone()


def clamped(cb):
    for p in cb.model.parameters():
        p.data.clamp_(-0.3, 0.3)  # no version says so


def doubled(cb):
    with torch.no_grad():
        for p in cb.model.parameters():
            p.mul_(2.0)


@pytest.mark.parametrize(
    ("change", "event"), along([repointed, clamped, doubled], ["after_batch", "before_batch"])
)
def test_weights_changed_between_steps_are_no_part_of_an_update(change, event):
    sizes = []

    def note(cb):
        sizes.append({name: wide(p) for name, p in cb.model.named_parameters()})

    health = GradientHealth()
    change_cb = at(event, change, order=7, name="change")
    notes = at("before_step", note, order=9, name="early"), at("after_step", note, order=-9, name="late")
    learner(mlp(), None, change_cb, health, *notes)
    for k in range(4):
        before, after = sizes[2 * k : 2 * k + 2]
        for name in before:
            assert close(health.stats[k][name]["update_ratio"], ratio(after[name], before[name]), rel=1e-3)


def test_channels_last_changes_no_reading():
    def make():
        return seeded(
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 1)
            )
        )

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, 3, 5, 5, generator=g), torch.randn(5, 1, generator=g)) for _ in range(3)]
    first, second = GradientHealth(), GradientHealth()
    learner(make(), data, first, ChannelsLast())
    learner(make().to(memory_format=torch.channels_last), data, second)
    steps = by_hand(make(), data)
    for health in (first, second):
        assert_matches(health, steps, rel=1e-3)


def test_lazy_parameters_are_read_once_they_are_there():
    def make():
        return seeded(lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(1)))

    health = GradientHealth()
    learn = Learner(batches(), make(), F.mse_loss, sgd, cbs=[health])
    try:
        fit(learn)
    except (ValueError, RuntimeError) as refused:  # by the learner, for any callback
        with pytest.raises(type(refused)):
            fit(Learner(batches(), make(), F.mse_loss, sgd))
    else:
        assert len(health.names) == 4


# ---- gradients of outputs


@pytest.mark.parametrize("amp", [False, True])
def test_gradients_of_outputs_are_unscaled(amp):
    model, grads = mlp(), []
    twin, scale = copy.deepcopy(model), 2.0**10 if amp else 1.0
    opt = sgd(twin.parameters(), 0.1)
    for x, y in batches():
        with torch.autocast("cpu", torch.float16, enabled=amp):
            outs = [twin[0](x)]
            outs.append(twin[2](twin[1](outs[0])))
            for out in outs:
                out.retain_grad()
            loss = F.mse_loss(outs[1], y)
        (loss * scale).backward()
        for p in twin.parameters():
            p.grad /= scale
        grads.append([wide(out.grad) / scale for out in outs])
        opt.step()
        opt.zero_grad()
    health = GradientHealth(activations=True)
    learner(model, None, health, *([MixedPrecision("fp16", init_scale=scale)] if amp else []))
    assert len(health.output_stats.stats) == 4
    for k, pair in enumerate(grads):
        for layer, grad in zip(("0", "2"), pair, strict=True):
            stats = health.output_stats.stats[k][layer]
            assert close(stats["std"], grad.std().item(), rel=2e-3)
            assert close(stats["abs_max"], grad.abs().max().item(), rel=2e-3)
            assert close(stats["mean"], grad.mean().item(), rel=2e-2, abs_tol=1e-6)


# ---- batches that end otherwise


def cancelling(event, cancel, step):
    def act(cb):
        if cb.train_iter == step and cb.training:
            raise cancel

    return at(event, act, order=5, name="cancelling")


def test_a_step_that_another_callback_cancels_is_told_as_skipped():
    health = GradientHealth()
    learn = learner(mlp(), None, cancelling("before_step", CancelStepException, 1), health)
    assert health.step_series("skipped") == [0, 1, 0, 0]
    assert health.skipped == 1
    assert [x > 0 for x in health.series("0.weight", "update_ratio")] == [True, False, True, True]
    # its gradient stays, and the next is added to it
    assert health.series("0.weight", "norm")[2] > 0
    assert learn.diagnose().findings == ()


@in_turn(
    ("event", "cancel"),
    along(
        ["after_loss", "before_backward", "after_backward", "before_step", "after_step"],
        [CancelBatchException, CancelFitException],
    ),
)
def test_a_batch_that_is_cancelled_leaves_no_half_of_a_record(event, cancel):
    health = GradientHealth(activations=True)
    learn = learner(mlp(), None, cancelling(event, cancel, 1), health)
    assert len(health.stats) == len(health.step_stats) <= 4
    for k, record in enumerate(health.stats):
        for stats in record:
            assert math.isfinite(stats["norm"]), (k, stats)
            assert math.isfinite(stats["drift"])
    assert health.steps()[0] == 0
    assert learn.diagnose().findings == ()


def test_a_batch_without_a_backward_has_no_gradients_to_read():
    health = GradientHealth()
    learner(mlp(), None, cancelling("before_backward", CancelBackwardException, 1), health)
    norms = dict(zip(health.steps(), health.series("0.weight", "norm"), strict=True))
    assert not norms.get(1, 0) > 0
    assert norms[0] > 0
    assert norms[3] > 0
    assert health.report().rows
    assert list(health.without_grad) == []


def test_validations_average_weights_and_leave_the_readings_as_they_are():
    plain, health = GradientHealth(), GradientHealth()
    learner(mlp(), (batches(), None), plain, n_epoch=2)
    inside = at(
        "after_backward", lambda cb: cb.learn.validate() if cb.training else None, order=3, name="inside"
    )
    learner(mlp(), (batches(), batches(2, seed=5)), EMA(0.5), inside, health, n_epoch=2)
    assert equal(plain.table(), health.table())


def test_weights_of_another_precision_from_some_step_on_are_read_on():
    def widened(cb):
        if cb.train_iter == 2:
            cb.model.double()
        if cb.train_iter >= 2:
            cb.learn.xb, cb.learn.yb = tuple(x.double() for x in cb.xb), tuple(y.double() for y in cb.yb)

    health = GradientHealth()
    learner(mlp(), None, at("before_batch", widened), health)
    steps = by_hand(mlp(), batches())
    assert_matches(health, steps, rel=1e-3)


def test_it_works_in_lr_find_and_outside_a_fit():
    health = GradientHealth()
    learn = Learner(batches(), mlp(), F.mse_loss, sgd, lr=0.1, cbs=[health])
    with learn.no_logging():
        learn.one_batch()
        learn.lr_find(num_it=5)
    fit(learn)
    assert_matches(health, by_hand(after_one_batch(), batches()))


def after_one_batch():
    """The model as it was before the fit."""
    model = mlp()
    x, y = batches()[0]
    F.mse_loss(model(x), y).backward()
    sgd(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return model


def test_two_of_a_kind_read_each_their_own():
    weights, biases = (
        GradientHealth(params="*.weight", name="weights"),
        GradientHealth(params="*.bias", name="biases"),
    )
    learner(mlp(), None, weights, biases)
    assert (weights.names, biases.names) == (["0.weight", "2.weight"], ["0.bias", "2.bias"])
    assert_matches(
        weights,
        by_hand(mlp(), batches()),
        names=weights.names,
        skip_step=("total_norm", "clipped_total_norm", "mean_norm"),
    )
