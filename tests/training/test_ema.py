"""EMA is torch's average of the weights, and training is what it is without."""

import copy
import io
import pickle
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import EMA, ActivationStats, Callback, Learner, MixedPrecision, check_callback, count_hooks
from tests.support import CANCELS, EVENTS, fit, make_batches, primary_plan, same, spy, weights

VALID = make_batches(2, seed=1)


class Masked(nn.Module):
    """Batch norm, a tied weight, and a mask with -inf."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem, self.norm, self.head = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)
            self.again = nn.Linear(2, 2)
        self.again.weight = self.stem.weight
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]), persistent=False)

    def forward(self, x):
        x = self.again(self.norm(self.stem(x)).relu())
        return self.head(x + x * self.mask.exp())


def learner(cbs=(), valid=VALID, model=None):
    opt_func = partial(torch.optim.SGD, momentum=0.9)
    return Learner((make_batches(3), valid), model or Masked(), F.mse_loss, opt_func, lr=0.1, cbs=cbs)


def by_hand(n_epoch=2, decay=0.8):
    """Trained model, average, and the losses of the validations of the average."""
    model, losses = Masked(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for _ in range(n_epoch):
        model.train()
        for x, y in make_batches(3):
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            average.update_parameters(model)
            average.module.mask.copy_(model.mask)
            average.module.norm.num_batches_tracked.copy_(model.norm.num_batches_tracked)
        losses.append(loss_of(average))
    return model, average.module, losses


def loss_of(model):
    model.eval()
    with torch.no_grad():
        return sum(F.mse_loss(model(x), y).item() for x, y in VALID) / len(VALID)


def values(model):
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("decay", [0.8, 0, 1])
def test_it_is_torchs_average_and_training_is_as_without_to_the_bit(decay):
    model, average, losses = by_hand(decay=decay)
    learn = fit(learner(EMA(decay)), 2)
    assert same(values(learn.model), values(model))
    assert same(values(learn.ema.model), values(average))
    assert [row["valid_loss"] for row in learn.recorder.rows] == losses
    assert not any(m.training for m in learn.ema.model.modules())
    learn.model.load_state_dict(learn.ema.model.state_dict())


def test_a_mask_with_infinities_does_not_spoil_the_average():
    learn = fit(learner(EMA(0.8)), 2)
    assert torch.equal(learn.ema.model.mask, Masked().mask)


def test_validations_may_be_of_the_plain_weights():
    plain, learn = fit(learner()), fit(learner(EMA(0.8, validate=False)))
    assert learn.recorder.rows[0]["valid_loss"] == plain.recorder.rows[0]["valid_loss"]
    averaged = fit(learner(EMA(0.8)))
    assert averaged.recorder.rows[0]["valid_loss"] != plain.recorder.rows[0]["valid_loss"]
    assert averaged.validate()[0] == plain.validate()[0]


def test_in_the_validation_the_model_is_the_average_and_the_average_stays_what_it_is():
    seen, model = [], Masked()
    tensors = [*model.parameters(), *model.buffers()]

    def look(cb):
        if not cb.training:
            assert all(
                a is b for a, b in zip((*cb.model.parameters(), *cb.model.buffers()), tensors, strict=True)
            )
            seen.append(same(values(cb.model), values(cb.learn.ema.model)))

    fit(learner([EMA(0.8), Callback(after_pred=look)], model=model), 2)
    assert seen == [True] * 4
    assert all(a is b for a, b in zip((*model.parameters(), *model.buffers()), tensors, strict=True))


@pytest.mark.parametrize("order", [-1000, 1000])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, *CANCELS.values()])
def test_the_exchange_is_undone_however_the_fit_ends(order, error):
    def run(event, *cbs):
        plan = primary_plan(event) | {(event, 1): error("planted")}
        learn = learner([*cbs, spy([], "devil", plan, order=order)])
        with suppress(ValueError, KeyboardInterrupt, RuntimeError):
            fit(learn, 2)
        assert not learn.opt._optimizer_step_post_hooks
        return values(learn.model)

    for event in EVENTS:
        assert same(run(event, EMA(0.8)), run(event))


@pytest.mark.parametrize("event", [event for event in EVENTS if not event.startswith("after_cancel")])
@pytest.mark.parametrize("order", [-1000, 1000])
def test_a_validation_inside_changes_nothing(event, order):
    inside = []

    def validate(cb):
        if not inside:
            inside.append(1)
            before = values(cb.model)
            cb.learn.validate()
            assert same(values(cb.model), before)
            inside.pop()

    nested = Callback(name="nested", **{event: validate})
    nested.order = order
    learn = fit(learner([EMA(0.8), nested]), 2)
    model, average, losses = by_hand()
    assert same(values(learn.model), values(model))
    assert same(values(learn.ema.model), values(average))
    assert [row["valid_loss"] for row in learn.recorder.rows] == losses


@pytest.mark.parametrize("level", ["epoch", "fit"])
def test_the_weights_are_back_when_a_cancel_in_the_validation_has_taken_effect(level):
    seen, trained = [], fit(learner(valid=None))
    see = Callback(name="look", **{f"after_cancel_{level}": lambda cb: seen.append(values(cb.model))})
    see.order = 1000
    cancel = Callback(name="cancel", after_pred=lambda cb: cb.training or raise_(CANCELS[level]))
    fit(learner([EMA(0.8), see, cancel]))
    assert len(seen) == 1
    assert same(seen[0], values(trained.model))


def raise_(error):
    raise error


def test_of_two_only_one_may_be_validated():
    with pytest.raises(ValueError, match="give the other EMA validate=False"):
        fit(learner([EMA(0.8), EMA(0.5, name="fast")]))
    learn = fit(learner([EMA(0.5, validate=False, name="fast"), EMA(0.8)]), 2)
    model, average, losses = by_hand()
    assert same(values(learn.model), values(model))
    assert same(values(learn.ema.model), values(average))
    assert [row["valid_loss"] for row in learn.recorder.rows] == losses


def test_cancelled_steps_do_not_count():
    cancels = {("before_step", k): CANCELS["step"]() for k in range(9)}
    learn = fit(learner([EMA(0.8), spy([], "cancel", cancels)]))
    assert same(weights(learn.ema.model)[:2], weights(Masked())[:2])
    assert learn.ema.state_dict()["n_averaged"] == 0


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    options = {"init_scale": 2.0**60, "backoff_factor": 2.0**-30}
    learn = learner([EMA(0.8), MixedPrecision("fp16", **options)])
    learn.opt = torch.optim.SGD(learn.model.parameters(), lr=0.1, fused=fused)
    fit(learn, 2)
    assert 0 < learn.mixed_precision.skipped < 6
    assert learn.ema.state_dict()["n_averaged"] == 6 - learn.mixed_precision.skipped


def test_hooks_are_inert_on_the_copy():
    stats, ema = ActivationStats(), EMA(0.8)
    learn = fit(learner([stats, ema, Callback(after_step=lambda cb: cb.learn.ema.model(VALID[0][0]))]))
    assert len(stats.stats) == 3
    assert count_hooks(learn.model) == 0


def test_a_compiled_model_is_averaged_too():
    model = Masked()
    model.compile(backend="eager")
    learn = fit(learner(EMA(0.8), model=model), 2)
    assert same(values(learn.ema.model), values(by_hand()[1]))


def test_its_state_goes_through_a_file_and_goes_on():
    class Reload(Callback):
        order = 1000

        def after_batch(self):
            ema = self.learn.ema
            torch.save(ema.state_dict(), file := io.BytesIO())
            file.seek(0)
            ema.after_fit()
            ema.before_fit()
            ema.load_state_dict(torch.load(file, weights_only=True))

    reload = Reload()
    reload.run_valid = False
    learn = fit(learner([EMA(0.8), reload]), 2)
    assert same(values(learn.ema.model), values(by_hand()[1]))


def test_copies_have_the_average_and_each_fit_makes_a_new_one():
    learn = learner(EMA(0.8))
    with pytest.raises(AttributeError, match="before its first fit"):
        _ = learn.ema.model
    fit(learn)
    first = learn.ema.model
    for copied in (copy.deepcopy(learn.ema), pickle.loads(pickle.dumps(learn.ema))):
        assert same(values(copied.model), values(first))
    fit(learn)
    assert learn.ema.model is not first


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match="give a number from 0 to 1"):
        EMA(decay)


@pytest.mark.parametrize("decay", ["0.9", None, True])
def test_a_decay_that_is_no_number_is_refused(decay):
    with pytest.raises(TypeError, match="give a number from 0 to 1"):
        EMA(decay)


def test_it_keeps_the_contract_of_callbacks():
    check_callback(lambda: EMA(0.5, validate=False))
