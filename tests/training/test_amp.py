"""MixedPrecision does what autocast and a GradScaler do in a plain loop, and leaves neither on."""

import copy
import io
import pickle
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

from hookcb import Callback, Learner, MixedPrecision, check_callback
from tests.support import (
    CANCELS,
    EVENTS,
    fit,
    make_batches,
    make_learner,
    make_model,
    primary_plan,
    same,
    spy,
    weights,
)

DTYPES = [torch.bfloat16, torch.float16]
SCALER = {"init_scale": 2.0**8, "growth_interval": 2}
INSIDE = [event for event in EVENTS if not event.startswith("after_cancel")]


def precision(dtype, **options):
    return MixedPrecision(dtype, **(SCALER | options if dtype is torch.float16 else {}))


def scaler_for(dtype, **options):
    return torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, **(SCALER | options))


def by_hand(dtype, n_epoch=1, skip_step=(), **options):
    """Weights, training losses and number of skipped steps of the loop in torch's documentation."""
    model, losses, skipped, k = make_model(), [], 0, 0
    opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), scaler_for(dtype, **options)
    for _ in range(n_epoch):
        for x, y in make_batches(5):
            with torch.autocast("cpu", dtype):
                loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if k not in skip_step:
                before = scaler.get_scale()
                scaler.step(opt)
                scaler.update()
                skipped += scaler.get_scale() < before
                opt.zero_grad()
            k += 1
    return weights(model), losses, skipped


def learner(cbs=(), model=None):
    return make_learner(
        5, 2, cbs, model=model, opt_func=lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9)
    )


def assert_nothing_left(learn):
    assert not torch.is_autocast_enabled("cpu")
    assert learn.scaler is None


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_a_fit_is_that_of_a_plain_loop_to_the_bit(dtype):
    learn = fit(learner(precision(dtype)), 3)
    expected, losses, _ = by_hand(dtype, 3)
    assert same(weights(learn.model), expected)
    assert list(learn.recorder.losses) == losses
    assert all(p.dtype is torch.float32 for p in learn.model.parameters())
    assert_nothing_left(learn)


@pytest.mark.parametrize("inside_fit", [True, False])
def test_validations_are_in_half_precision_too(inside_fit):
    seen = []
    look = Callback(after_pred=lambda cb: cb.training or seen.append(cb.pred.dtype))
    learn = learner([MixedPrecision(), look])
    if inside_fit:
        fit(learn)
    else:
        learn.validate()
    assert seen == [torch.bfloat16] * 2
    assert_nothing_left(learn)


def test_steps_whose_gradients_overflow_are_skipped_and_counted():
    options = {"init_scale": 2.0**40, "backoff_factor": 2.0**-12}
    expected, _, skipped = by_hand(torch.float16, 2, **options)
    learn = fit(learner(precision(torch.float16, **options)), 2)
    assert learn.mixed_precision.skipped == skipped > 0
    assert same(weights(learn.model), expected)
    learn.mixed_precision._options["init_scale"] = 2.0
    fit(learn)
    assert learn.mixed_precision.skipped == 0


def test_callbacks_see_the_loss_and_the_whole_gradients_unscaled():
    norms = []
    look = Callback(before_step=lambda cb: norms.append(cb.model[0].weight.grad.norm().item()))
    learn = fit(learner([precision(torch.float16, init_scale=2.0**6), look]))
    seen, norms = norms, []
    plain = Callback(before_step=lambda cb: norms.append(cb.model[0].weight.grad.norm().item()))
    fit(learner([MixedPrecision(), plain]))
    assert seen == pytest.approx(norms, rel=0.05)
    assert max(learn.recorder.losses) < 100


@pytest.mark.parametrize("skip", [(0,), (1, 2), (4,)])
def test_gradients_that_stay_after_a_cancelled_step_are_those_of_a_plain_loop(skip):
    cancel = spy([], "cancel", {("before_step", k): CANCELS["step"]() for k in skip})
    learn = fit(learner([precision(torch.float16, growth_interval=100), cancel]), 2)
    assert same(weights(learn.model), by_hand(torch.float16, 2, skip, growth_interval=100)[0])


@pytest.mark.parametrize("level", ["batch", "train"])
def test_a_batch_cancelled_in_before_step_leaves_the_scaler_usable(level):
    cancel = spy([], "cancel", {("before_step", 0): CANCELS[level]()})
    learn = fit(learner([precision(torch.float16), cancel]), 2)
    assert learn.mixed_precision.skipped == 0
    assert not same(weights(learn.model), weights(make_model()))


def test_a_step_without_any_gradient_is_cancelled():
    log = []
    cancel = spy(log, "a", {("before_backward", 0): CANCELS["backward"]()})
    fit(learner([precision(torch.float16), cancel]))
    assert [event for _, event in log].count("after_cancel_step") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("order", [-1000, 1000])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, *CANCELS.values()])
def test_nothing_stays_on_however_the_fit_ends(dtype, order, error):
    for event in EVENTS:
        plan = primary_plan(event) | {(event, 0): error("planted")}
        learn = learner([precision(dtype), spy([], "devil", plan, order=order)])
        with suppress(ValueError, KeyboardInterrupt, RuntimeError):
            fit(learn)
        assert_nothing_left(learn)


@pytest.mark.parametrize("level", ["batch", "train", "epoch", "fit"])
def test_autocast_is_off_when_a_cancel_has_taken_effect(level):
    seen = []
    see = {f"after_cancel_{level}": lambda cb: seen.append(torch.is_autocast_enabled("cpu"))}
    cancel = spy([], "cancel", {("after_pred", 0): CANCELS[level]()})
    fit(learner([MixedPrecision(), Callback(name="look", **see), cancel]))
    assert seen == [False]


@pytest.mark.parametrize("use", ["validate", "get_preds", "one_batch"])
@pytest.mark.parametrize("event", ["before_batch", "after_pred"])
def test_an_error_outside_a_fit_leaves_autocast_off(use, event):
    learn = learner([MixedPrecision(), spy([], "devil", {(event, 0): KeyboardInterrupt()})])
    with pytest.raises(KeyboardInterrupt):
        getattr(learn, use)()
    assert_nothing_left(learn)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("event", INSIDE)
@pytest.mark.parametrize("order", [-1000, 1000])
def test_a_validation_inside_changes_nothing(dtype, event, order):
    inside = []

    def validate(cb):
        if not inside:
            inside.append(1)
            on = torch.is_autocast_enabled("cpu")
            cb.learn.validate()
            assert torch.is_autocast_enabled("cpu") == on
            inside.pop()

    nested = Callback(name="nested", **{event: validate})
    nested.order = order
    learn = fit(learner([precision(dtype), nested]), 2)
    assert same(weights(learn.model), by_hand(dtype, 2)[0])
    assert_nothing_left(learn)


def test_a_validation_inside_that_fails_and_is_caught_leaves_only_its_own_autocast():
    on = {}

    def validate(cb):
        with pytest.raises(ZeroDivisionError):
            cb.learn.validate(cbs=Callback(name="devil", after_pred=lambda cb: 1 / 0))
        on[cb.name] = torch.is_autocast_enabled("cpu")

    cbs = [
        Callback(name=e, **{e: lambda cb: cb.training and validate(cb)}) for e in ("after_pred", "after_step")
    ]
    fit(learner([MixedPrecision(), *cbs]))
    assert on == {"after_pred": True, "after_step": False}


def test_a_validation_inside_is_of_the_weights_there_are_then():
    losses = []

    def validate(cb):
        if cb.training and cb.iter == 0:
            kept = [p.detach().clone() for p in cb.model.parameters()]
            with torch.no_grad():
                for p in cb.model.parameters():
                    p.data.zero_()
                losses.append(cb.learn.validate()[0])
                for p, q in zip(cb.model.parameters(), kept, strict=True):
                    p.data.copy_(q)

    learn = fit(learner([MixedPrecision(), Callback(after_pred=validate)]))
    batches = make_batches(2, seed=1)
    assert losses == [pytest.approx(sum(y.pow(2).mean().item() for _, y in batches) / 2)]
    assert same(weights(learn.model), by_hand(torch.bfloat16)[0])


def test_its_state_goes_through_a_file_and_goes_on():
    class Reload(Callback):
        order = 1000

        def after_batch(self):
            torch.save(self.learn.mixed_precision.state_dict(), file := io.BytesIO())
            file.seek(0)
            self.learn.scaler.update(2.0**3)
            self.learn.mixed_precision.load_state_dict(torch.load(file, weights_only=True))

    options = {"init_scale": 2.0**40, "backoff_factor": 2.0**-12}
    reload = Reload()
    reload.run_valid = False

    def skip():
        return spy([], "cancel", {("before_step", 6): CANCELS["step"]()})

    runs = [
        fit(learner([precision(torch.float16, **options), *cbs]), 2) for cbs in ([skip()], [skip(), reload])
    ]
    assert same(weights(runs[0].model), weights(runs[1].model))
    assert runs[0].mixed_precision.skipped == runs[1].mixed_precision.skipped > 0


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "fp16", "float16", *DTYPES])
def test_dtypes_may_be_named(dtype):
    cb = MixedPrecision(dtype)
    assert cb.dtype in DTYPES
    for copied in (pickle.loads(pickle.dumps(cb)), copy.deepcopy(cb)):
        assert copied.dtype is cb.dtype


@pytest.mark.parametrize("dtype", [torch.float32, "fp8", 16, None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"give torch\.bfloat16, torch\.float16, 'bf16' or 'fp16'"):
        MixedPrecision(dtype)


def test_options_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"\['init_scale'\] are for a GradScaler"):
        MixedPrecision(init_scale=2.0)
    with pytest.raises(TypeError, match="scale_init"):
        MixedPrecision("fp16", scale_init=2.0)
    with pytest.raises(ValueError, match="a GradScaler refuses"):
        MixedPrecision("fp16", growth_factor=0.5)


def test_two_scalers_are_refused():
    learn = learner([MixedPrecision("fp16"), MixedPrecision("fp16", name="second")])
    with pytest.raises(RuntimeError, match=r"learn\.scaler is set already"):
        learn.fit(1)
    assert_nothing_left(learn)


def test_a_mapping_and_a_loss_of_the_models_own_are_computed_in_half_precision():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()

        def forward(self, x, y):
            self.seen = self.body(x).dtype
            return type("Output", (), {"loss": F.mse_loss(self.body(x), y)})()

    learn = Learner([{"x": x, "y": y} for x, y in make_batches()], Own(), opt_func=torch.optim.SGD)
    fit(learn, cbs=MixedPrecision())
    assert learn.model.seen is torch.bfloat16


def test_it_keeps_the_contract_of_callbacks():
    check_callback(lambda: MixedPrecision("fp16"), alters_training=True)
