"""Wrong arguments are refused before training starts, by messages that name the value and what to do."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from hookcb import (
    EMA,
    Callback,
    ChannelsLast,
    Compile,
    DetectAnomaly,
    EarlyStopping,
    Freeze,
    GradientAccumulation,
    GradientClip,
    MaxTime,
    MixedPrecision,
    OneCycle,
    ReduceLROnPlateau,
    Schedule,
    TerminateOnNaN,
    WarmupCosine,
)
from tests.support import in_turn, make_model, same, spy, weights
from tests.training.support import Unsized, batches_of, groups, quiet, scripted, sgd

STEP = partial(lrs.StepLR, step_size=1)
nan, inf = math.nan, math.inf

# what is made, the errors it may be, and what the message must say
WRONG = [
    (lambda: Schedule(STEP, "step"), ValueError, ["step", "batch", "epoch"]),
    (lambda: Schedule(STEP, per=None), ValueError, ["None", "batch", "epoch"]),
    (lambda: Schedule(3), TypeError, ["3"]),
    (lambda: Schedule(None), TypeError, ["None"]),
    (lambda: Schedule(STEP(sgd(make_model().parameters(), 0.1))), TypeError, ["StepLR"]),
    (lambda: OneCycle(0.0), ValueError, ["0"]),
    (lambda: OneCycle(-1.0), ValueError, ["-1"]),
    (lambda: OneCycle(nan), ValueError, ["nan"]),
    (lambda: OneCycle(div=0.0), ValueError, ["div", "0"]),
    (lambda: OneCycle(div_final=-3.0), ValueError, ["div_final", "-3"]),
    (lambda: OneCycle(pct_start=1.5), ValueError, ["pct_start", "1.5"]),
    (lambda: OneCycle(pct_start=-0.1), ValueError, ["pct_start", "-0.1"]),
    (lambda: OneCycle(moms=(0.95, 0.85, 0.9)), ValueError, ["moms", "0.95", "two"]),
    (lambda: OneCycle(moms=(0.95,)), ValueError, ["moms", "0.95", "two"]),
    (lambda: OneCycle(moms=(1.5, 0.85)), ValueError, ["moms", "1.5"]),
    (lambda: WarmupCosine(1.5), ValueError, ["warmup", "1.5"]),
    (lambda: WarmupCosine(-1), ValueError, ["warmup", "-1"]),
    (lambda: WarmupCosine(-0.5), ValueError, ["warmup", "-0.5"]),
    (lambda: WarmupCosine(nan), ValueError, ["warmup", "nan"]),
    (lambda: WarmupCosine(lr_min=-1e-3), ValueError, ["lr_min", "-0.001"]),
    (lambda: ReduceLROnPlateau(factor=10), ValueError, ["factor", "10", "0.1"]),
    (lambda: ReduceLROnPlateau(factor=1.0), ValueError, ["factor", "1.0"]),
    (lambda: ReduceLROnPlateau(factor=-0.5), ValueError, ["factor", "-0.5"]),
    (lambda: ReduceLROnPlateau(mode="auto"), ValueError, ["auto", "min", "max"]),
    (lambda: ReduceLROnPlateau(patience=-1), ValueError, ["patience", "-1"]),
    (lambda: ReduceLROnPlateau(min_lr=-1.0), ValueError, ["min_lr", "-1"]),
    (lambda: EarlyStopping(mode="up"), ValueError, ["up", "min", "max"]),
    (lambda: EarlyStopping(patience=0), ValueError, ["patience", "0"]),
    (lambda: EarlyStopping(patience=-2), ValueError, ["patience", "-2"]),
    (lambda: EarlyStopping(patience="3"), TypeError, ["patience", "'3'"]),
    (lambda: MixedPrecision("fp8"), ValueError, ["fp8", "bf16", "fp16"]),
    (lambda: MixedPrecision(torch.float32), ValueError, ["float32", "bfloat16", "float16"]),
    (lambda: MixedPrecision(torch.bfloat16, init_scale=2.0), TypeError, ["init_scale", "float16"]),
    (lambda: MixedPrecision("bf16", growth_interval=3), TypeError, ["growth_interval"]),
    (lambda: MixedPrecision("fp16", initial_scale=3), TypeError, ["initial_scale"]),
    (lambda: GradientAccumulation(0), ValueError, ["n", "0"]),
    (lambda: GradientAccumulation(-2), ValueError, ["-2"]),
    (lambda: GradientAccumulation(1.5), TypeError, ["1.5"]),
    (lambda: GradientAccumulation("2"), TypeError, ["'2'"]),
    (lambda: GradientAccumulation(n_acc=0), ValueError, ["n_acc", "0"]),
    (lambda: GradientClip(0.0), ValueError, ["max_norm", "0"]),
    (lambda: GradientClip(-1.0), ValueError, ["-1"]),
    (lambda: GradientClip(nan), ValueError, ["nan"]),
    (lambda: GradientClip(value=0.0), ValueError, ["value", "0"]),
    (lambda: GradientClip(value=-0.5), ValueError, ["value", "-0.5"]),
    (lambda: GradientClip(2.0, value=0.5), (TypeError, ValueError), ["max_norm", "value"]),
    (lambda: GradientClip(norm_type=0.0), ValueError, ["norm_type", "0"]),
    (lambda: GradientClip("1"), TypeError, ["'1'"]),
    (lambda: EMA(1.5), ValueError, ["decay", "1.5"]),
    (lambda: EMA(-0.1), ValueError, ["decay", "-0.1"]),
    (lambda: EMA(nan), ValueError, ["decay", "nan"]),
    (lambda: EMA("0.9"), TypeError, ["decay", "'0.9'"]),
    (lambda: Freeze("0", until=-1), ValueError, ["until", "-1"]),
    (lambda: Freeze("0", until="2"), TypeError, ["until", "'2'"]),
    (lambda: Freeze("0", until=1.5), TypeError, ["until", "1.5"]),
    (lambda: DetectAnomaly(-1), ValueError, ["start", "-1"]),
    (lambda: DetectAnomaly(3, 3), ValueError, ["3"]),
    (lambda: DetectAnomaly(5, 2), ValueError, ["5", "2"]),
    (lambda: MaxTime(-1), ValueError, ["-1"]),
    (lambda: MaxTime(nan), ValueError, ["nan"]),
    (lambda: MaxTime("60"), TypeError, ["'60'"]),
    (lambda: MaxTime(None), TypeError, ["None"]),
]


def refusal(make, kind):
    """What an error of this kind says, "" if there is none."""
    try:
        make()
    except kind as error:
        return str(error)
    return ""


def test_a_wrong_argument_is_refused_by_a_message_that_says_what_it_was():
    told = [(parts, refusal(make, kind)) for make, kind, parts in WRONG]
    assert [(parts, text) for parts, text in told if not all(part in text for part in parts)] == []
    assert [text for _, text in told if text.endswith(".")] == []


def plateau(opt):
    return lrs.ReduceLROnPlateau(opt)


def foreign(opt):
    return STEP(sgd(make_model().parameters(), 0.1))


def breaks(opt):
    STEP(opt)
    raise OSError("no file")


# what is fitted, with a validation loader or without, the errors it may be, and what the message must say
REFUSED = [
    (lambda: Schedule(lambda opt: None), True, TypeError, ["None", "partial"]),
    (lambda: Schedule(lambda opt: STEP), True, TypeError, ["partial"]),
    (lambda: Schedule(lambda opt: opt), True, TypeError, ["partial"]),
    (lambda: Schedule(plateau), True, TypeError, ["hookcb.ReduceLROnPlateau"]),
    (lambda: Schedule(foreign), True, ValueError, ["optimizer"]),
    (lambda: Schedule(breaks), True, OSError, ["no file"]),
    (lambda: Schedule(lrs.StepLR), True, TypeError, ["step_size"]),
    (lambda: ReduceLROnPlateau("valid_loss"), False, (ValueError, LookupError), ["valid_loss", "train_loss"]),
    (lambda: EarlyStopping("valid_loss"), False, (ValueError, LookupError), ["valid_loss", "train_loss"]),
    (lambda: EarlyStopping("vaild_loss"), True, (ValueError, LookupError), ["vaild_loss", "valid_loss"]),
    (lambda: ReduceLROnPlateau("train_los"), True, (ValueError, LookupError), ["train_los'", "train_loss"]),
    (lambda: EarlyStopping("acuracy"), True, (ValueError, LookupError), ["acuracy", "accuracy"]),
    (lambda: EarlyStopping("accuracy"), False, (ValueError, LookupError), ["accuracy"]),
    (lambda: Freeze("blocks.*"), True, LookupError, ["blocks.*", "0", "2"]),
    (lambda: Freeze(nn.Conv2d), True, LookupError, ["Conv2d"]),
    (lambda: Freeze("*"), True, ValueError, ["train"]),
    (lambda: Freeze("*", until=1), True, ValueError, ["train"]),
    (lambda: Compile(backend="no such backend"), True, Exception, ["no such backend"]),
]


def accuracy(pred, y):
    return (pred - y).abs().mean()


@in_turn("nth", range(len(REFUSED)))
def test_what_cannot_be_trained_with_is_refused_before_training_and_leaves_nothing(nth):
    make, with_valid, kind, parts = REFUSED[nth]
    model, log = make_model(), []
    learn = quiet(batches_of([3, 3]), batches_of([2]) if with_valid else None, model, metrics=accuracy)
    before = weights(model)
    with pytest.raises(kind) as info:
        learn.fit(3, cbs=[make(), spy(log, "late", order=1000)])
    message = " ".join([str(info.value), *getattr(info.value, "__notes__", [])])
    assert all(part in message for part in parts), message
    assert {event for _, event in log} <= {"before_fit", "after_fit"}
    assert same(weights(model), before)
    assert learn.opt is None or groups(learn.opt) == groups(sgd(make_model().parameters(), 0.1))
    assert all(p.requires_grad for p in model.parameters())
    assert model._compiled_call_impl is None
    learn.fit(1)


@pytest.mark.parametrize("make", [EarlyStopping, ReduceLROnPlateau])
def test_a_monitor_nobody_records_is_named_with_the_columns_there_are(make):
    learn = quiet(batches_of([3, 3]), batches_of([2]), metrics=accuracy)
    with pytest.raises(LookupError) as info:
        learn.fit(3, cbs=make("perplexity"))
    assert all(part in str(info.value) for part in ("perplexity", "train_loss", "valid_loss", "accuracy"))


@pytest.mark.parametrize("make", [EarlyStopping, ReduceLROnPlateau])
def test_a_column_that_a_callback_adds_may_be_monitored(make):
    learn = quiet(batches_of([3, 3]), Unsized(batches_of([2])))
    learn.fit(3, cbs=[make("score", mode="max", patience=9), scripted([1.0, 2.0, 3.0])])
    assert len(learn.recorder.rows) == 3


ALL = {
    "schedule": lambda **k: Schedule(STEP, **k),
    "one_cycle": OneCycle,
    "warmup_cosine": WarmupCosine,
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "mixed_precision": MixedPrecision,
    "gradient_accumulation": GradientAccumulation,
    "gradient_clip": GradientClip,
    "ema": EMA,
    "compile": lambda **k: Compile(backend="eager", **k),
    "channels_last": ChannelsLast,
    "freezing": lambda **k: Freeze("0", **k),
    "terminate_on_nan": TerminateOnNaN,
    "detect_anomaly": DetectAnomaly,
    "max_time": lambda **k: MaxTime(3600, **k),
    "early_stopping": lambda **k: EarlyStopping(patience=99, **k),
}
ORDERS = {
    "freezing": -90, "channels_last": -80, "compile": -70, "gradient_accumulation": -30,
    "mixed_precision": -20, "terminate_on_nan": -10, "detect_anomaly": -10, "gradient_clip": 20, "ema": 30,
    "schedule": 70, "one_cycle": 70, "warmup_cosine": 70, "reduce_lr_on_plateau": 70,
    "early_stopping": 80, "max_time": 80,
}  # fmt: skip


def test_every_callback_takes_a_name_and_two_of_a_kind_can_be_named_apart():
    named = {kind: (make(name="first"), make(name="second")) for kind, make in ALL.items()}
    assert {(one.name, other.name) for one, other in named.values()} == {("first", "second")}
    assert [kind for kind, make in ALL.items() if make().name != kind] == []
    assert {kind: one.order for kind, (one, _) in named.items()} == ORDERS
    assert [kind for kind, (one, _) in named.items() if "first" not in repr(one)] == []
    for make in ALL.values():
        with pytest.raises(ValueError, match="no name"):
            make(name="no name")


@in_turn("kind", [kind for kind in ALL if kind != "compile"])
def test_every_callback_bears_the_loops_other_uses_before_any_fit_and_after_one(kind):
    learn = quiet(batches_of([3, 3]), batches_of([2]))
    learn.add_cb(ALL[kind]())
    for _ in range(2):
        learn.validate()
        learn.get_preds()
        learn.one_batch()
        learn.summary()
        learn.fit(1)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_anomaly_enabled()
    assert learn.opt.param_groups[0]["lr"] == 0.1
    assert all(p.requires_grad for p in learn.model.parameters())


def test_a_callback_that_takes_part_in_lr_find_says_so():
    takes_part = {kind: make().run_lr_find for kind, make in ALL.items()}
    apart = {"schedule", "one_cycle", "warmup_cosine", "reduce_lr_on_plateau", "early_stopping"}
    assert Callback.run_lr_find is True
    assert {kind for kind, part in takes_part.items() if not part} >= apart
