"""All training callbacks at once, in whatever order they are given, train as one loop written by hand."""

import contextlib
import copy
import math
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    ChannelsLast,
    Checkpoint,
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
    accuracy,
    count_hooks,
)
from hookcb.cli.demo import build_model, digits
from tests.support import CANCELS, EVENTS, each, first, make_model, same, weights
from tests.training.support import (
    DEVIL,
    NESTED_AT,
    Unsized,
    Wide,
    all_flags,
    batches_of,
    equal,
    groups,
    momentum,
    quiet,
    raising,
    seeded,
    state_of,
    two_groups,
    validating,
)

N_EPOCH, BS = 2, 256
SCALE = {"init_scale": 2.0**10, "growth_interval": 2}


def all_of_them(dtype=torch.bfloat16, first="conv1"):
    """One of each that can be together, with arguments that make each do something, in the order they act."""
    options = SCALE if dtype is torch.float16 else {}
    anomaly = [] if dtype is torch.float16 else [DetectAnomaly(1, 3)]  # does not go with a GradScaler
    return [
        Freeze(first, until=1),
        ChannelsLast(),
        GradientAccumulation(2),
        MixedPrecision(dtype, **options),
        TerminateOnNaN(),
        *anomaly,
        ActivationStats(every=3),
        GradientClip(0.5),
        EMA(0.8),
        OneCycle(0.02),
        EarlyStopping(patience=99),
        MaxTime(3600),
    ]


class Hand:
    """The same with torch's own tools only."""

    def __init__(self, dtype, kind, first):
        seeded()
        dls, self.dtype = digits(BS), dtype
        self.model = build_model(kind).to(memory_format=torch.channels_last)
        opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        n = len(dls.train)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            opt, 0.02, total_steps=N_EPOCH * n, pct_start=0.25, div_factor=25, final_div_factor=1e5 / 25,
            base_momentum=0.85, max_momentum=0.95,
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, **SCALE)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        self.losses, self.valid, self.norms = [], [], []
        for epoch in range(N_EPOCH):
            self.model.train()
            for p in getattr(self.model, first).parameters():
                p.requires_grad_(epoch >= 1)
            sizes = []
            for i, (x, y) in enumerate(dls.train):
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(self.model(x.to(memory_format=torch.channels_last)), y)
                self.losses.append(loss.item())
                sizes.append(len(y))
                scaler.scale(loss * (len(y) / (2 * sizes[0]))).backward()
                if len(sizes) == 2 or i == n - 1:
                    scaler.unscale_(opt)
                    params = [p for p in self.model.parameters() if p.grad is not None]
                    for p in params:
                        p.grad.mul_(2 * sizes[0] / sum(sizes))
                    self.norms.append(nn.utils.clip_grad_norm_(params, 0.5).item())
                    scaler.step(opt)
                    scaler.update()
                    self.average.update_parameters(self.model)
                    opt.zero_grad()
                    sizes = []
                if len(self.losses) < N_EPOCH * n:
                    scheduler.step()
            self.average.eval()
            self.valid.append(self.validated(dls.valid))

    def validated(self, valid):
        with torch.no_grad(), torch.autocast("cpu", self.dtype):
            preds = [(self.average(x.to(memory_format=torch.channels_last)), y) for x, y in valid]
            of = [(F.cross_entropy(pred, y).item(), len(y)) for pred, y in preds]
        right = sum((pred.argmax(1) == y).sum().item() for pred, y in preds)
        total = sum(n for _, n in of)
        return sum(loss * n for loss, n in of) / total, right / total


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the loop by hand
@pytest.mark.parametrize(
    ("dtype", "kind"), [pytest.param(torch.bfloat16, "cnn", marks=pytest.mark.slow), (torch.float16, "mlp")]
)
def test_on_digits_any_order_of_all_callbacks_gives_the_weights_of_the_loop_by_hand(dtype, kind):
    first = {"cnn": "conv1", "mlp": "hidden"}[kind]
    hand = Hand(dtype, kind, first)
    for seed in range(2):
        seeded()
        cbs = all_of_them(dtype, first)
        random.Random(seed).shuffle(cbs)
        dls, model = digits(BS), build_model(kind)
        learn = quiet(*dls, model, torch.optim.AdamW, 1e-3, cbs, F.cross_entropy, metrics=accuracy)
        learn.fit(N_EPOCH)
        assert learn.recorder.losses == hand.losses
        assert learn.gradient_clip.norms == pytest.approx(hand.norms, rel=1e-6)
        assert same(weights(model), weights(hand.model))
        assert same(list(learn.ema.model.parameters()), list(hand.average.module.parameters()))
        rows = [(row["valid_loss"], row["accuracy"]) for row in learn.recorder.rows]
        assert rows == [pytest.approx(valid, rel=1e-6) for valid in hand.valid]
        assert learn.recorder.rows[-1]["accuracy"] > 0.3


TABLE = [
    "freezing", "channels_last", "compile", "gradient_accumulation", "mixed_precision",
    {"terminate_on_nan", "detect_anomaly"}, "activation_stats", "gradient_clip", "ema", "recorder", "metrics",
    {"schedule", "one_cycle", "warmup_cosine", "reduce_lr_on_plateau"}, {"early_stopping", "max_time"},
    "checkpoint",
]  # fmt: skip
RANK = {name: i for i, of in enumerate(TABLE) for name in (of if isinstance(of, set) else {of})}


@pytest.mark.parametrize("seed", range(3))
def test_the_shown_loop_lists_them_in_the_order_of_the_table(seed, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    rest = [Schedule(Halve), WarmupCosine(), ReduceLROnPlateau(), Compile(), Checkpoint(tmp_path)]
    cbs = [*all_of_them(), *rest]
    random.Random(seed).shuffle(cbs)
    quiet(batches_of([4]), batches_of([4]), cbs=cbs).show_training_loop()
    seen = set()
    for line in capsys.readouterr().out.splitlines():
        event, names = re.search(r"(\w+) *(.*)", line).groups()
        ranks = [RANK[name] for name in names.split(", ") if name]
        assert ranks == sorted(ranks, reverse=event == "after_fit"), line
        seen |= {name for name in names.split(", ") if name}
    assert seen == set(RANK)


class Halve(torch.optim.lr_scheduler.StepLR):
    def __init__(self, opt):
        super().__init__(opt, 1, gamma=0.5)


def small(*cbs, train=None, n_valid=2, **kwargs):
    seeded()
    train = train or batches_of([4, 2, 4, 3])
    valid = batches_of([3] * n_valid, seed=1) if n_valid else None
    return quiet(train, valid, Wide(), momentum, cbs=cbs, **kwargs)


def trained(learn):
    rows = [{k: v for k, v in row.items() if k != "time"} for row in learn.recorder.rows]
    return [weights(learn.model), rows, list(learn.recorder.losses), weights(learn.ema.model)]


@pytest.mark.parametrize(("dtype", "order"), first([(torch.bfloat16, -1000), (torch.float16, 25)]))
def test_a_validation_inside_at_any_event_and_order_changes_nothing(dtype, order):
    learn = small(*all_of_them(dtype, "stem"))
    learn.fit(2)
    for event in NESTED_AT[order > 0 :: 2]:  # each second time, as a validation at each is slow
        nested = small(*all_of_them(dtype, "stem"), validating(event, order, every=2))
        nested.fit(2)
        assert equal(trained(nested), trained(learn)), event


@pytest.mark.parametrize("event", each(2, EVENTS))
def test_however_a_fit_of_all_ends_nothing_stays_and_the_next_is_as_of_new_callbacks(event):
    nth, kinds = EVENTS.index(event) % 2, [KeyboardInterrupt, *CANCELS.values(), ValueError]
    raised = kinds[EVENTS.index(event) % len(kinds)]
    learn = small(*all_of_them(torch.float16, "stem"))
    learn.fit(1)
    flags, before, state = all_flags(), groups(learn.opt), state_of(learn.model)
    learn.add_cb(devil := raising(event, raised("why"), nth, order=1000 - 2000 * nth))
    with contextlib.suppress(*DEVIL, RuntimeError):
        learn.fit(2)
    learn.remove_cb(devil)
    after = state_of(learn.model)
    assert all_flags() == flags
    assert groups(learn.opt) == before
    assert all(after[what] == state[what] for what in ("requires_grad", "modes", "identity"))
    assert (learn.scaler, learn.accumulating, learn.fitting) == (None, False, False)
    assert count_hooks(learn.model) == 0
    fresh = copy.deepcopy(learn)
    fresh.remove_cbs([cb for cb in fresh.cbs if cb.name not in ("recorder", "metrics")])
    fresh.add_cbs(all_of_them(torch.float16, "stem"))
    results = []
    for one in (learn, fresh):
        seeded()
        one.fit(1)
        results.append(trained(one))
    assert equal(*results)


@pytest.mark.parametrize("dtype", first([torch.bfloat16, torch.float16]))
def test_the_last_group_of_a_loader_without_a_length_is_stepped_with_all_that_belongs_to_a_step(dtype):
    def run(train):
        cbs = [cb for cb in all_of_them(dtype, "stem") if not isinstance(cb, OneCycle)]
        learn = small(*cbs, train=train)
        learn.fit(3)
        return [*trained(learn), learn.gradient_clip.norms]

    batches = batches_of([4, 2, 4, 3, 2])
    assert equal(run(Unsized(batches)), run(batches))


def test_fit_one_cycle_is_a_fit_with_that_callback_and_leaves_none():
    runs = []
    for by_name in (True, False):
        learn = small()
        for _ in range(2):
            if by_name:
                learn.fit_one_cycle(2, 0.3, 10, 100, 0.3, (0.9, 0.8), GradientAccumulation(2))
            else:
                learn.fit(2, cbs=[OneCycle(0.3, 10, 100, 0.3, (0.9, 0.8)), GradientAccumulation(2)])
        with pytest.raises(KeyboardInterrupt):
            learn.fit_one_cycle(1, cbs=raising("after_loss", KeyboardInterrupt()))
        runs.append([weights(learn.model), groups(learn.opt)])
        assert not any(isinstance(cb, OneCycle) for cb in learn.cbs)
    assert equal(*runs)
    with pytest.raises(ValueError, match="pct_start"):
        learn.fit_one_cycle(1, pct_start=3)


def test_state_of_all_read_and_loaded_between_epochs_changes_nothing():
    learn = small(*all_of_them(torch.float16, "stem"))
    learn.fit(3)

    def reload(cb):
        for other in cb.learn.cbs:
            other.load_state_dict(copy.deepcopy(other.state_dict()))

    again = small(*all_of_them(torch.float16, "stem"))
    for event in ("before_train", "after_train", "after_epoch"):
        cb = Callback(name=f"again_{event}", **{event: reload})
        cb.order = 1000
        again.add_cb(cb)
    again.fit(3)
    assert equal(trained(again), trained(learn))
    assert again.mixed_precision.skipped == learn.mixed_precision.skipped


@pytest.mark.slow
def test_a_fit_resumed_in_the_middle_ends_in_the_same_weights(tmp_path):
    whole = small(*all_of_them(torch.float16, "stem"))
    whole.fit(3)
    for nth in (1, 6):
        folder = tmp_path / str(nth)
        broken = small(*all_of_them(torch.float16, "stem"), Checkpoint(folder, every=1))
        with pytest.raises(KeyboardInterrupt):
            broken.fit(3, cbs=raising("before_batch", KeyboardInterrupt(), nth))
        resumed = small(*all_of_them(torch.float16, "stem"), Checkpoint(folder, every=1))
        seeded(99)
        resumed.fit(3, resume="latest")
        assert equal(trained(resumed), trained(whole)), nth
        assert resumed.gradient_clip.norms == whole.gradient_clip.norms
        assert resumed.early_stopping.best == whole.early_stopping.best


@pytest.mark.slow
def test_compiled_with_the_others_it_trains_the_same():
    runs = []
    for more in ([], [Compile(backend="eager")]):
        torch._dynamo.reset()
        cbs = [
            GradientAccumulation(2),
            GradientClip(0.5),
            EMA(0.8),
            OneCycle(0.1),
            Freeze("0", until=1),
            *more,
        ]
        model = make_model()
        learn = quiet(
            batches_of([4, 4, 4]), batches_of([4]), model, two_groups(torch.optim.AdamW)(model), cbs=cbs
        )
        learn.fit(2)
        runs.append(weights(model) + weights(learn.ema.model))
        assert list(learn.model.state_dict()) == list(make_model().state_dict())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*runs, strict=True))
    assert all(math.isfinite(w.sum()) for w in runs[1])
