"""MixedPrecision trains to the bit as autocast and GradScaler in a loop by hand, and leaves no switch on."""

import copy
import io
import itertools
import pickle
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, CancelStepException, MixedPrecision
from tests.support import (
    CANCELS,
    EVENTS,
    covering,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    primary_plan,
    same,
    spy,
    weights,
)
from tests.training.support import (
    DEVIL,
    ENDS,
    NESTED_AT,
    TakesDict,
    Unsized,
    Wide,
    batches_of,
    flags_kept,
    momentum,
    quiet,
    raising,
    seeded,
    validating,
)

RAGGED = [4, 4, 3]
DTYPES = [torch.bfloat16, torch.float16]
SCALER = {"init_scale": 2.0**8, "growth_interval": 2}
fp16 = torch.float16
FUSED = partial(torch.optim.Adam, fused=True)  # unscales its gradients itself


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


def by_torchs_loop(dtype, train, valid, n_epoch, opt_func=momentum, scaler=None, model=None, clip=None):
    """The loop of torch's examples for automatic mixed precision."""
    model = model or Wide()
    opt = opt_func(model.parameters(), lr=0.1)
    losses, valid_losses, skipped = [], [], 0
    for _ in range(n_epoch):
        model.train()
        for x, y in train:
            with torch.autocast("cpu", dtype):
                loss = nn.functional.mse_loss(model(x), y)
            losses.append(loss.item())
            if scaler is None:
                loss.backward()
                opt.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(opt)
                before = scaler.get_scale()
                scaler.update()
                skipped += scaler.get_scale() < before
            opt.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype):
            of = [(nn.functional.mse_loss(model(x), y).item(), len(y)) for x, y in valid]
        valid_losses.append(sum(v * n for v, n in of) / sum(n for _, n in of))
    return weights(model), losses, valid_losses, skipped


def autocast_at(events):
    """A callback that notes whether autocast is on at each event of a batch."""
    cb = Callback(
        name="switch",
        **{
            e: lambda cb, e=e: events.append((e, cb.training, torch.is_autocast_enabled("cpu")))
            for e in EVENTS
        },
    )
    cb.order = 5
    return cb


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


def test_a_step_without_any_gradient_is_cancelled():
    log = []
    cancel = spy(log, "a", {("before_backward", 0): CANCELS["backward"]()})
    fit(learner([precision(torch.float16), cancel]))
    assert [event for _, event in log].count("after_cancel_step") == 1


@in_turn(("shift", "error"), list(enumerate([*DEVIL, *CANCELS.values()])))
def test_nothing_stays_on_however_the_fit_ends(shift, error):
    for i, event in enumerate(EVENTS[(shift + 1) % 3 :: 3]):  # the others in the test of the next fit
        order, dtype = (-1000, 1000)[(i + shift) % 2], DTYPES[(i + shift) // 2 % 2]
        plan = primary_plan(event) | {(event, 0): error("planted")}
        learn = learner([precision(dtype), spy([], "devil", plan, order=order)])
        with suppress(ValueError, KeyboardInterrupt, RuntimeError):
            fit(learn)
        assert_nothing_left(learn)


@in_turn("level", ["batch", "train", "epoch", "fit"])
def test_autocast_is_off_when_a_cancel_has_taken_effect(level):
    seen = []
    see = {f"after_cancel_{level}": lambda cb: seen.append(torch.is_autocast_enabled("cpu"))}
    cancel = spy([], "cancel", {("after_pred", 0): CANCELS[level]()})
    fit(learner([MixedPrecision(), Callback(name="look", **see), cancel]))
    assert seen == [False]


@in_turn("use", ["validate", "get_preds", "one_batch"])
@in_turn("event", ["before_batch", "after_pred"])
def test_an_error_outside_a_fit_leaves_autocast_off(use, event):
    learn = learner([MixedPrecision(), spy([], "devil", {(event, 0): KeyboardInterrupt()})])
    with pytest.raises(KeyboardInterrupt):
        getattr(learn, use)()
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


@in_turn("dtype", ["bf16", "bfloat16", "fp16", "float16", *DTYPES])
def test_dtypes_may_be_named(dtype):
    cb = MixedPrecision(dtype)
    assert cb.dtype in DTYPES
    for copied in (pickle.loads(pickle.dumps(cb)), copy.deepcopy(cb)):
        assert copied.dtype is cb.dtype


@in_turn("dtype", [torch.float32, "fp8", 16, None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"must be torch\.bfloat16, torch\.float16, 'bf16' or 'fp16', got "):
        MixedPrecision(dtype)


def test_options_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"\['init_scale'\] are for a GradScaler"):
        MixedPrecision(init_scale=2.0)
    with pytest.raises(TypeError, match="scale_init"):
        MixedPrecision("fp16", scale_init=2.0)
    with pytest.raises(ValueError, match="GradScaler does not accept"):
        MixedPrecision("fp16", growth_factor=0.5)


def test_two_scalers_are_refused():
    learn = learner([MixedPrecision("fp16"), MixedPrecision("fp16", name="second")])
    with pytest.raises(RuntimeError, match=r"learn\.scaler is set already"):
        learn.fit(1)
    assert_nothing_left(learn)


@pytest.mark.parametrize(
    ("given", "opt_func", "sized"),
    covering(
        [torch.bfloat16, "bf16", torch.float16, "fp16"], [momentum, torch.optim.AdamW, FUSED], [True, False]
    ),
)
def test_weights_and_losses_are_those_of_torchs_own_loop(given, opt_func, sized):
    train, valid = batches_of(RAGGED), batches_of([3, 2], seed=1)
    of_half = given in (fp16, "fp16")
    scaler = torch.amp.GradScaler("cpu", **SCALER) if of_half else None
    seeded()
    expected = by_torchs_loop(fp16 if of_half else torch.bfloat16, train, valid, 3, opt_func, scaler)
    seeded()
    learn = quiet(train if sized else Unsized(train), valid, Wide(), opt_func)
    learn.fit(3, cbs=MixedPrecision(given, **(SCALER if of_half else {})))
    assert same(weights(learn.model), expected[0])
    assert list(learn.recorder.losses) == expected[1]
    assert [row["valid_loss"] for row in learn.recorder.rows] == expected[2]
    assert learn.scaler is None


def test_bf16_is_the_default_and_it_is_not_what_float32_trains():
    runs = []
    for cbs in ((), MixedPrecision(), MixedPrecision(torch.bfloat16)):
        learn = quiet(batches_of(RAGGED))
        learn.fit(2, cbs=cbs)
        runs.append(weights(learn.model))
    assert same(runs[1], runs[2])
    assert not same(runs[0], runs[1])
    assert all(w.dtype == torch.float32 for w in runs[1])


@in_turn("opt_func", [momentum, FUSED])
@in_turn("scale", [2.0**50, 2.0**100])
def test_steps_that_overflow_are_left_out_and_counted(scale, opt_func):
    train = batches_of(RAGGED)
    options = {"init_scale": scale, "backoff_factor": 2.0**-20, "growth_interval": 4}
    seeded()
    scaler = torch.amp.GradScaler("cpu", **options)
    expected = by_torchs_loop(fp16, train, train, 4, opt_func, scaler)
    seeded()
    learn, scales = quiet(train, train, Wide(), opt_func), []
    look = Callback(name="look", after_batch=lambda cb: scales.append(cb.learn.scaler.get_scale()))
    learn.fit(4, cbs=[cb := precision(fp16, **options), look])
    assert 0 < expected[3] < 12
    assert cb.skipped == expected[3]
    assert scales[-1] == scaler.get_scale()
    assert same(weights(learn.model), expected[0])
    learn.fit(1, cbs=cb)
    assert cb.skipped < expected[3] + 1
    quiet(train).fit(1, cbs=(fresh := precision(fp16)))
    assert fresh.skipped == 0


def test_autocast_is_on_for_prediction_and_loss_and_off_elsewhere():
    seen = []
    learn = quiet(batches_of([3, 3]), batches_of([2]))
    learn.fit(1, cbs=[MixedPrecision(), autocast_at(seen)])
    on = {event for event, _, enabled in seen if enabled}
    off = {event for event, _, enabled in seen if not enabled}
    assert "after_pred" in on
    assert on <= {"before_batch", "after_pred", "after_loss"}
    assert on & off == set()
    assert {"before_backward", "before_step", "after_batch", "before_validate"} <= off


@pytest.mark.parametrize("make", [MixedPrecision, partial(precision, fp16)])
def test_a_validation_inside_a_batch_neither_breaks_autocast_nor_hides_gradients(make):
    def run(*cbs):
        seeded()
        learn = quiet(batches_of(RAGGED), batches_of([3, 2]), Wide(), momentum)
        learn.fit(1, cbs=[make(), *cbs])
        rows = [{k: v for k, v in row.items() if k != "time"} for row in learn.recorder.rows]
        return weights(learn.model), rows

    plain, expected = run()
    for event, order in zip(NESTED_AT, itertools.cycle([-1000, 0, 1000]), strict=False):
        with flags_kept():
            trained, rows = run(validating(event, order))
        assert same(trained, plain), event
        assert rows == expected, event


@in_turn(("shift", "raised"), list(enumerate([*ENDS, *(CANCELS[level] for level in ("train", "backward"))])))
def test_however_a_batch_ends_autocast_is_off_and_the_next_fit_is_right(shift, raised):
    for event, order in zip(EVENTS[shift % 3 :: 3], itertools.cycle([-1000, 1000]), strict=False):
        learn = quiet(batches_of(RAGGED), batches_of([2]))
        with flags_kept():
            try:
                learn.fit(1, cbs=[precision(fp16), raising(event, raised("why"), order=order)])
            except (ValueError, KeyboardInterrupt):
                assert raised in DEVIL
            except RuntimeError as stray:
                assert type(stray.__cause__) is raised, event  # noqa: PT017 - some events raise, some do not
            assert learn.scaler is None
        fresh = quiet(batches_of(RAGGED), model=copy.deepcopy(learn.model))
        learn.fit(1, cbs=precision(fp16))
        fresh.fit(1, cbs=precision(fp16))
        assert same(weights(learn.model), weights(fresh.model)), event


def test_an_error_of_the_model_or_of_the_loss_leaves_autocast_off():
    def loss_func(pred, y):
        raise OSError("why")

    class Breaks(nn.Linear):
        def forward(self, x):
            raise OSError("why")

    for learn in (quiet(batches_of([3]), loss_func=loss_func), quiet(batches_of([3]), model=Breaks(2, 1))):
        for use in (learn.fit, lambda n, cbs, learn=learn: learn.validate(learn.dls.train, cbs=cbs)):
            with flags_kept(), pytest.raises(OSError, match="why"):
                use(1, cbs=MixedPrecision())


@pytest.mark.parametrize(
    ("order", "nth", "where"),
    covering(
        [-1000, -25, 0, 1000],
        [0, 1, 2],
        [("before_step", "step"), ("before_step", "batch"), ("after_backward", "batch")],
    ),
)
def test_gradients_of_a_cancelled_step_add_to_the_next_as_they_do_without_a_scaler(order, nth, where):
    event, level = where
    train = batches_of(RAGGED)
    seeded()
    model = Wide()
    opt, scaler = momentum(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, (x, y) in enumerate(train * 2):
        with torch.autocast("cpu", fp16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if i != nth:
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    seeded()
    learn = quiet(train, None, Wide(), momentum)
    cancel = spy([], "devil", {(event, nth): CANCELS[level]()}, order=order)
    learn.fit(2, cbs=[MixedPrecision(fp16, init_scale=2.0**10), cancel])
    assert same(weights(learn.model), weights(model))


@in_turn("level", ["train", "epoch"])
@in_turn("event", ["before_step", "after_step", "after_backward", "after_loss"])
def test_a_phase_cancelled_around_the_step_leaves_the_scaler_usable(level, event):
    log = []
    learn = quiet(batches_of(RAGGED), batches_of([2]))
    learn.fit(3, cbs=[precision(fp16), spy(log, "a", {(event, 1): CANCELS[level]()})])
    assert log.count(("a", "after_step")) >= 6
    assert all(torch.isfinite(w).all() for w in weights(learn.model))


@pytest.mark.parametrize("nth", [0, 2])
def test_a_batch_without_any_gradient_makes_no_step_as_without_a_scaler(nth):
    def run(*cbs):
        learn = quiet(batches_of(RAGGED))
        learn.fit(1, cbs=[*cbs, spy([], "a", {("before_backward", nth): CANCELS["backward"]()})])
        return weights(learn.model)

    train = batches_of(RAGGED)
    left = [batch for i, batch in enumerate(train) if i != nth]
    model = make_model()
    opt, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", **SCALER)
    for x, y in left:
        with torch.autocast("cpu", fp16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert same(run(precision(fp16)), weights(model))


def test_gradients_are_whole_and_unscaled_for_readers_in_before_step_and_the_loss_is_never_scaled():
    norms, losses = {}, {}
    for scale in (2.0**3, 2.0**12):
        norms[scale], losses[scale] = [], []

        class Reads(Callback):
            def before_step(self, to=norms[scale]):
                to.append([p.grad.norm().item() for p in self.model.parameters()])

            def before_backward(self, to=losses[scale]):
                to.append(self.loss.item())

            def after_backward(self, to=losses[scale]):
                to.append(self.loss.item())

            def after_batch(self, to=losses[scale]):
                to.append(self.loss.item())

        learn = quiet(batches_of(RAGGED))
        learn.fit(1, cbs=[Reads(), precision(fp16, init_scale=scale)])
        assert losses[scale] == [loss for loss in learn.recorder.losses for _ in range(3)]
    assert norms[8.0] == norms[4096.0]


def test_other_batches_and_outputs_are_cast_too():
    x, y = batches_of([5])[0]
    seen = []
    learn = quiet([{"x": x, "labels": y}], [{"x": x, "labels": y}], TakesDict(), loss_func=None)
    look = Callback(name="look", after_pred=lambda cb: seen.append(cb.pred.logits.dtype))
    learn.fit(1, cbs=[MixedPrecision(), look])
    assert seen == [torch.bfloat16] * 2
    learn.add_cb(MixedPrecision())
    learn.add_cb(look)
    learn.validate()
    learn.get_preds()
    learn.one_batch()
    assert not torch.is_autocast_enabled("cpu")


def test_a_fit_inside_an_autocast_of_the_users_own_leaves_that_one_on():
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), flags_kept():
        quiet(batches_of(RAGGED), batches_of([2])).fit(1, cbs=precision(fp16))
        with pytest.raises(ValueError, match="why"):
            quiet(batches_of(RAGGED)).fit(1, cbs=[precision(fp16), raising("after_pred", ValueError("why"))])


def test_a_cancel_of_every_step_of_a_fit_trains_nothing():
    learn = quiet(batches_of(RAGGED))
    before = weights(learn.model)
    cancels = {("before_step", k): CancelStepException() for k in range(6)}
    learn.fit(2, cbs=[cb := precision(fp16), spy([], "a", cancels)])
    assert same(weights(learn.model), before)
    assert cb.skipped == 0
