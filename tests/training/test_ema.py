"""EMA averages as torch does in a loop by hand, validates the average, and moves no training."""

import copy
import io
import itertools
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import EMA, ActivationStats, Callback, GradientAccumulation, Learner, MixedPrecision, count_hooks
from tests.support import (
    CANCELS,
    EVENTS,
    each,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    weights,
)
from tests.training.support import (
    DEVIL,
    ENDS,
    NESTED_AT,
    Unsized,
    Wide,
    batches_of,
    equal,
    momentum,
    quiet,
    raising,
    seeded,
    state_of,
    validating,
)

RAGGED = [4, 4, 2]
VALID = make_batches(2, seed=1)
UNEVEN = batches_of([3, 2], seed=1)


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


class Averaged:
    """The loop by hand with an AveragedModel, training and validation."""

    def __init__(self, n_epoch, decay, model=None, opt_func=momentum, valid=None, use_buffers=True):
        self.model = model or Wide()
        self.average = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers
        )
        opt = opt_func(self.model.parameters(), lr=0.1)
        self.valid_losses, self.plain_losses = [], []
        for _ in range(n_epoch):
            self.model.train()
            self.average.train()
            for x, y in batches_of(RAGGED):
                F.mse_loss(self.model(x), y).backward()
                opt.step()
                opt.zero_grad()
                self.average.update_parameters(self.model)
            self.valid_losses.append(self.loss_of(self.average, valid))
            self.plain_losses.append(self.loss_of(self.model, valid))

    def loss_of(self, model, valid):
        model.eval()
        with torch.no_grad():
            of = [(F.mse_loss(model(x), y).item(), len(y)) for x, y in valid]
        return sum(v * n for v, n in of) / sum(n for _, n in of)


def averaging(*cbs, n_epoch=3, decay=0.7, valid=UNEVEN, model=None, **kwargs):
    seeded()
    learn = quiet(batches_of(RAGGED), valid, model or Wide(), momentum)
    learn.fit(n_epoch, cbs=[EMA(decay, **kwargs), *cbs])
    return learn


def valid_losses(learn):
    return [row["valid_loss"] for row in learn.recorder.rows]


def test_a_mask_with_infinities_does_not_spoil_the_average():
    learn = fit(learner(EMA(0.8)), 2)
    assert torch.equal(learn.ema.model.mask, Masked().mask)


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
    with pytest.raises(ValueError, match="only one average; give the other EMA validate=False"):
        fit(learner([EMA(0.8), EMA(0.5, name="fast")]))
    learn = fit(learner([EMA(0.5, validate=False, name="fast"), EMA(0.8)]), 2)
    model, average, losses = by_hand()
    assert same(values(learn.model), values(model))
    assert same(values(learn.ema.model), values(average))
    assert [row["valid_loss"] for row in learn.recorder.rows] == losses


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    options = {"init_scale": 2.0**60, "backoff_factor": 2.0**-30}
    learn = learner([EMA(0.8), MixedPrecision("fp16", **options)])
    learn.opt = torch.optim.SGD(learn.model.parameters(), lr=0.1, fused=fused)
    fit(learn, 2)
    assert 0 < learn.mixed_precision.skipped < 6
    assert learn.ema.state_dict()["n_averaged"] == 6 - learn.mixed_precision.skipped


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


def test_its_state_has_each_name_of_a_shared_weight_and_buffers_that_are_not_saved():
    averaged = fit(learner(EMA(0.8))).ema.state_dict()["averaged"]
    assert averaged.keys() == {*Masked().state_dict(), "mask"}
    assert torch.equal(averaged["again.weight"], averaged["stem.weight"])


@in_turn(
    ("decay", "error"),
    [*((x, ValueError) for x in (-0.1, 1.1, float("nan"))), *((x, TypeError) for x in ("0.9", None, True))],
)
def test_a_decay_that_is_no_number_from_0_to_1_is_refused(decay, error):
    with pytest.raises(error, match="must be a number from 0 to 1"):
        EMA(decay)


@in_turn("decay", [0.7, 0.999, 0.0, 1.0])
@in_turn("model", [Wide, make_model])
def test_the_average_and_its_validation_are_torchs_and_training_is_as_without(decay, model):
    seeded()
    hand = Averaged(3, decay, model(), valid=UNEVEN)
    learn = averaging(decay=decay, model=model(), valid=Unsized(UNEVEN))
    assert same(weights(learn.model), weights(hand.model))
    ours, theirs = list(learn.ema.model.parameters()), list(hand.average.module.parameters())
    assert same(ours, theirs)
    theirs = dict(hand.average.module.named_buffers()) | {"norm.num_batches_tracked": torch.tensor(9)}
    assert all(torch.equal(b, theirs[name]) for name, b in learn.ema.model.named_buffers())
    assert valid_losses(learn) == hand.valid_losses
    assert not any(m.training for m in learn.ema.model.modules())
    with torch.no_grad():
        assert torch.isfinite(learn.ema.model(UNEVEN[0][0])).all()


def test_validation_may_be_of_the_plain_weights():
    seeded()
    hand = Averaged(3, 0.7, valid=UNEVEN)
    learn = averaging(validate=False)
    assert valid_losses(learn) == hand.plain_losses != hand.valid_losses
    assert same(list(learn.ema.model.parameters()), list(hand.average.module.parameters()))


def test_outside_a_fit_and_inside_its_training_validation_is_of_the_plain_weights():
    learn = averaging()
    plain = list(learn.validate())
    learn.add_cb(EMA(0.5))
    assert list(learn.validate()) == plain
    seen = {}

    def note(when):
        def act(cb):
            if not cb.learn.is_nested:
                seen[when] = cb.learn.validate()[0]

        return act

    look = Callback(
        name="look", after_train=note("train"), after_validate=note("valid"), after_epoch=note("end")
    )
    look.order = 29
    learn.fit(2, cbs=look)
    averaged = learn.recorder.rows[-1]["valid_loss"]
    assert seen["valid"] == averaged
    assert seen["train"] == seen["end"] == learn.validate()[0] != averaged


@pytest.mark.parametrize("order", [29, 31])
def test_a_validation_inside_exchanges_nothing_twice(order):
    plain = averaging(n_epoch=2)
    for event in NESTED_AT:
        learn = averaging(validating(event, order), n_epoch=2)
        assert same(weights(learn.model), weights(plain.model)), event
        assert same(list(learn.ema.model.parameters()), list(plain.ema.model.parameters())), event
        assert valid_losses(learn) == valid_losses(plain), event


@pytest.mark.parametrize(("shift", "raised"), each(2, enumerate(ENDS)))
def test_however_the_fit_ends_the_plain_weights_are_there_again(shift, raised):
    def run(*cbs):
        seeded()
        learn = quiet(batches_of(RAGGED), UNEVEN, Wide(), momentum)
        learn.one_batch()
        learn.opt.zero_grad()
        identity = state_of(learn.model)["identity"]
        try:
            learn.fit(2, cbs=cbs)
        except (*DEVIL, RuntimeError):
            pass
        assert state_of(learn.model)["identity"] == identity
        assert not learn.opt._optimizer_step_post_hooks
        return state_of(learn.model) | {"identity": None}

    for event, order in zip(EVENTS[shift % 2 :: 2], itertools.cycle([-1000, 1000, 1000]), strict=False):
        devil = [raising(event, raised("why"), order=order) for _ in range(2)]
        assert equal(run(EMA(0.5), devil[0]), run(devil[1])), event


@in_turn("event", ["before_batch", "after_pred", "after_loss", "after_batch", "before_validate"])
def test_a_validation_inside_the_validation_that_breaks_off_gives_the_weights_back(event):
    class Nested(Callback):
        def after_loss(self):
            if not self.training and not self.learn.is_nested_twice:
                self.learn.is_nested_twice = True
                self.learn.validate(cbs=raising(event, KeyboardInterrupt()))

    seeded()
    learn = quiet(batches_of(RAGGED), UNEVEN, Wide(), momentum)
    learn.is_nested_twice = False
    with pytest.raises(KeyboardInterrupt):
        learn.fit(3, cbs=[EMA(0.5), Nested()])
    seeded()
    plain = quiet(batches_of(RAGGED), None, Wide(), momentum)
    plain.fit(1)
    assert same(weights(learn.model), weights(plain.model))


@in_turn("how", ["accumulating", "cancelled step", "cancelled batch", "overflow"])
def test_only_real_steps_enter_the_average(how):
    steps = {
        "accumulating": ([GradientAccumulation(2)], [1, 2]),
        "cancelled step": ([spy([], "a", {("before_step", 1): CANCELS["step"]()})], [0, 2]),
        "cancelled batch": ([spy([], "a", {("after_loss", 0): CANCELS["batch"]()})], [1, 2]),
        "overflow": ([MixedPrecision("fp16", init_scale=2.0**60, backoff_factor=2.0**-50)], None),
    }
    cbs, _ = steps[how]
    trail = []

    class Trail(Callback):
        """The weights after each step that has changed them."""

        order = 25

        def before_step(self):
            self.before = weights(self.model)

        def after_step(self):
            if not same(weights(self.model), self.before):
                trail.append([p.detach().clone() for p in self.model.parameters()])

    learn = quiet(batches_of(RAGGED), model=make_model())
    learn.fit(2, cbs=[EMA(0.5), Trail(), *cbs])
    assert 1 < len(trail) < 6
    average = [p.clone() for p in trail[0]]
    for now in trail[1:]:
        average = [a.lerp(p, 0.5) for a, p in zip(average, now, strict=True)]
    got = list(learn.ema.model.parameters())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, average, strict=True))


def test_without_any_step_validation_is_of_the_weights_there_are():
    cancels = {("before_step", k): CANCELS["step"]() for k in range(9)}
    learn = averaging(spy([], "a", cancels), model=make_model())
    assert same(list(learn.ema.model.parameters()), list(make_model().parameters()))
    assert valid_losses(learn) == [pytest.approx(learn.validate()[0])] * 3


@pytest.mark.parametrize("order", ["stats first", "average first"])
def test_the_copy_carries_no_hook_that_records(order):
    def run(use):
        call = Callback(name="call", after_batch=lambda cb: cb.learn.ema.model(UNEVEN[0][0]) if use else None)
        stats = ActivationStats(include_paramless=True)
        stats.order = -100 if order == "stats first" else 50
        learn = averaging(stats, call, model=make_model())
        names = learn.activation_stats.names
        return learn, [
            [dict(record[name]) for name in names] for record in list(learn.activation_stats.stats)
        ]

    (learn, with_calls), (_, without) = run(True), run(False)
    assert equal(with_calls, without)
    assert count_hooks(learn.model) == 0
    copied = copy.deepcopy(learn.ema.model)
    assert torch.equal(copied(UNEVEN[0][0]), learn.ema.model(UNEVEN[0][0]))


def test_a_second_fit_averages_anew_and_copies_keep_the_average():
    learn = averaging(n_epoch=1, model=make_model())
    cb = learn.ema
    for other in (copy.deepcopy(cb), pickle.loads(pickle.dumps(cb))):
        assert same(weights(other.model), weights(cb.model))
        assert other.model is not cb.model

    def run(again):
        learn = averaging(n_epoch=1, model=make_model())
        learn.fit(2, cbs=learn.ema if again else EMA(0.7))
        return [*weights(learn.ema.model), *weights(learn.model)], valid_losses(learn)

    assert equal(list(run(True)), list(run(False)))


def test_the_trained_model_can_hold_the_averages_in_a_block():
    learn = make_learner()
    ema = EMA(0.5)
    with (
        pytest.raises(AttributeError, match="no averaged model before its first fit"),
        ema.applied(learn.model),
    ):
        pass
    fit(learn, 1, cbs=ema)
    trained = weights(learn.model)
    with ema.applied(learn.model), ema.applied(learn.model):
        assert same(weights(learn.model), weights(ema.model))
        assert not same(weights(learn.model), trained)
    assert same(weights(learn.model), trained)
