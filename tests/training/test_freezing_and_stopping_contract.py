"""Freeze, stoppers and switches of torch do what a loop by hand does, and put back what they have moved."""

import datetime
import itertools
import math

import pytest
import torch
from torch import nn

from hookcb import (
    Callback,
    ChannelsLast,
    Compile,
    DetectAnomaly,
    Freeze,
    MaxTime,
    TerminateOnNaN,
    freeze,
    unfreeze,
)
from tests.support import EVENTS, events, make_model, modes, same, spy, weights
from tests.training.support import (
    DEVIL,
    ENDS,
    NESTED_AT,
    Unsized,
    Wide,
    all_flags,
    batches_of,
    flags_kept,
    momentum,
    quiet,
    raising,
    seeded,
    state_of,
    train_plainly,
    validating,
)

RAGGED = [4, 4, 2]


def frozen_by_hand(model, names, n_epoch, until, opt_func):
    opt = opt_func(model.parameters(), lr=0.1)
    parts = [dict(model.named_modules())[name] for name in names]
    for epoch in range(n_epoch):
        model.train()
        frozen = until is None or epoch < until
        for part in parts:
            part.requires_grad_(not frozen)
            for m in part.modules():
                m.training = not (frozen and isinstance(m, nn.BatchNorm1d))
        for x, y in batches_of(RAGGED):
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


WHERE = [
    (["stem", "norm"], ["stem", "norm"]),
    ("[sn][to]*", ["stem", "norm"]),
    (nn.BatchNorm1d, ["norm"]),
    (lambda m: isinstance(m, nn.Linear) and m.out_features == 1, ["head"]),
    ("mid", ["mid"]),
]


@pytest.mark.parametrize("nth", range(len(WHERE)))
@pytest.mark.parametrize("until", [None, 1, 7])
@pytest.mark.parametrize("opt_func", [momentum, torch.optim.AdamW])
def test_what_is_frozen_stays_to_the_bit_and_the_rest_trains_as_by_hand(nth, until, opt_func):
    where, names = WHERE[nth]
    seeded()
    expected = frozen_by_hand(Wide(), names, 3, until, opt_func)
    seeded()
    learn = quiet(batches_of(RAGGED), batches_of([2]), Wide(), opt_func)
    learn.fit(3, cbs=Freeze(where, until))
    assert same(weights(learn.model), expected)
    assert all(p.requires_grad for p in learn.model.parameters())


def test_weights_that_have_moved_before_have_neither_momentum_nor_decay_while_frozen():
    learn = quiet(batches_of(RAGGED), model=Wide(), opt=momentum)
    learn.fit(2)
    before = state_of(learn.model)["state_dict"]
    learn.fit(2, cbs=Freeze(["stem", "norm"]))
    after = learn.model.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name.startswith(("stem", "norm")) or name == "unused"), (
            name
        )
    learn.fit(1)
    assert not torch.equal(learn.model.stem.weight, before["stem.weight"])


@pytest.mark.parametrize("until", [None, 1])
def test_what_the_user_had_frozen_stays_frozen_during_and_after(until):
    model, seen = Wide(), []
    model.stem.weight.requires_grad_(False)
    before = model.stem.weight.clone()
    look = Callback(name="look", before_batch=lambda cb: seen.append(cb.model.stem.bias.requires_grad))
    learn = quiet(batches_of(RAGGED), None, model)
    learn.fit(2, cbs=[Freeze("stem", until), look])
    assert seen == [False] * 3 + [until == 1] * 3
    assert not model.stem.weight.requires_grad
    assert model.stem.bias.requires_grad
    assert torch.equal(model.stem.weight, before)


@pytest.mark.parametrize("raised", ENDS)
def test_however_the_fit_ends_all_may_train_again(raised):
    for event, until in zip(EVENTS, itertools.cycle([None, 1]), strict=False):
        model = Wide()
        model.head.bias.requires_grad_(False)
        model.norm.eval()
        kept, mode = state_of(model)["requires_grad"], modes(model)
        learn = quiet(batches_of(RAGGED), batches_of([2]), model)
        try:
            learn.fit(
                2, cbs=[Freeze(["stem", "norm"], until), Freeze("norm", name="two"), raising(event, raised())]
            )
        except (*DEVIL, RuntimeError):
            pass
        assert state_of(model)["requires_grad"] == kept, event
        assert modes(model) == mode, event


@pytest.mark.parametrize("event", NESTED_AT)
def test_a_validation_inside_thaws_nothing(event):
    def run(*cbs):
        seeded()
        learn = quiet(batches_of(RAGGED), batches_of([2]), Wide(), momentum)
        learn.fit(3, cbs=[Freeze(["stem", "norm"], until=2), *cbs])
        return weights(learn.model)

    assert same(run(validating(event)), run())


def test_a_tied_weight_is_frozen_wherever_it_is_used():
    model = Wide()
    before = model.mid.weight.clone()
    quiet(batches_of(RAGGED), None, model).fit(1, cbs=Freeze("again"))
    assert torch.equal(model.mid.weight, before)


def test_freeze_and_unfreeze_are_there_as_functions():
    model = Wide()
    freeze(model, "stem")
    freeze(model, nn.BatchNorm1d)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith(("stem", "norm")) for name in trains)
    assert {"mid.weight", "head.bias", "unused"} <= trains
    unfreeze(model, "stem")
    assert model.stem.weight.requires_grad
    assert not model.norm.weight.requires_grad
    unfreeze(model)
    assert all(p.requires_grad for p in model.parameters())
    for function in (freeze, unfreeze):
        with pytest.raises(LookupError, match="nowhere"):
            function(model, "nowhere")


# ---- TerminateOnNaN


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nth", [0, 1, 5])
def test_a_loss_that_is_not_finite_ends_the_fit_with_the_weights_before_it(bad, nth):
    calls = []

    def loss_func(pred, y):
        calls.append(1)
        loss = nn.functional.mse_loss(pred, y)
        return loss * bad if len(calls) == nth + 1 else loss

    model, log = make_model(), []
    train_plainly(model, (batches_of(RAGGED) * 2)[:nth], 1, momentum(model.parameters(), 0.1))
    learn = quiet(batches_of(RAGGED), None, opt=momentum, loss_func=loss_func)
    with pytest.warns(UserWarning, match=rf"epoch {nth // 3}, batch {nth % 3}") as warned:
        learn.fit(3, cbs=[TerminateOnNaN(), spy(log, "a")])
    assert len(warned) == 1
    assert same(weights(learn.model), weights(model))
    assert f"epoch {nth // 3}, batch {nth % 3}" in learn.terminate_on_nan.reason
    assert events(log)[-2:] == ["after_cancel_fit", "after_fit"]
    assert len(learn.recorder.losses) == nth
    learn.fit(1, cbs=learn.terminate_on_nan)
    assert not learn.terminate_on_nan.reason


def test_a_bad_loss_in_validation_ends_nothing():
    valid = [(x * math.nan, y) for x, y in batches_of([2])]
    learn = quiet(batches_of(RAGGED), valid)
    learn.fit(2, cbs=[TerminateOnNaN(), validating("after_pred")])
    assert len(learn.recorder.rows) == 2


# ---- DetectAnomaly


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 2), (2, 5), (4, None), (9, None)])
@pytest.mark.parametrize("already", [False, True])
def test_anomalies_are_looked_for_in_the_window_only(start, stop, already):
    seen = []

    class Look(Callback):
        def after_backward(self):
            seen.append(torch.is_anomaly_enabled())

        def after_pred(self):
            if self.training:
                seen.append(torch.is_anomaly_enabled())

    torch.autograd.set_detect_anomaly(already, check_nan=not already)
    try:
        with flags_kept():
            quiet(batches_of(RAGGED), batches_of([2])).fit(2, cbs=[DetectAnomaly(start, stop), Look()])
        inside = [start <= i < (stop or 6) for i in range(6) for _ in range(2)]
        assert seen == [already or on for on in inside]
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("raised", ENDS)
def test_however_the_fit_ends_anomaly_mode_is_as_before(raised):
    for event in EVENTS:
        with flags_kept():
            try:
                devil = raising(event, raised(), order=1000)
                quiet(batches_of(RAGGED), batches_of([2])).fit(1, cbs=[DetectAnomaly(), devil])
            except (*DEVIL, RuntimeError):
                pass


def test_the_error_names_the_operation_that_made_the_nan():
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x * 0).mul(0).sqrt() * 0

    before = all_flags()
    with pytest.warns(UserWarning, match="SqrtBackward0"), pytest.raises(RuntimeError, match="SqrtBackward0"):
        quiet(batches_of(RAGGED), model=Root(2, 1)).fit(1, cbs=DetectAnomaly())
    assert all_flags() == before


# ---- MaxTime


@pytest.mark.parametrize("seconds", [1e-9, datetime.timedelta(microseconds=1)])
def test_a_fit_ends_after_the_batch_in_which_the_time_was_up(seconds):
    log = []
    learn = quiet(Unsized(batches_of(RAGGED)), batches_of([2]))
    for _ in range(2):
        learn.fit(3, cbs=[cb := MaxTime(seconds), spy(log, "a")])
        assert cb.stopped_at is not None
        assert len(learn.recorder.losses) == 1
    assert events(log).count("after_step") == 2
    assert "before_validate" not in events(log)


@pytest.mark.parametrize("seconds", [3600, 3600.0, datetime.timedelta(hours=1), math.inf])
def test_time_that_is_not_up_changes_nothing(seconds):
    plain, learn = (quiet(batches_of(RAGGED), batches_of([2])) for _ in range(2))
    plain.fit(2)
    learn.fit(2, cbs=MaxTime(seconds))
    assert same(weights(learn.model), weights(plain.model))
    assert learn.max_time.stopped_at is None


# ---- ChannelsLast and Compile


class Sees(nn.Module):
    """Notes the memory formats of what it gets."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3)
        self.seen = []

    def forward(self, x, ids, flat):
        self.seen.append([t.is_contiguous(memory_format=torch.channels_last) for t in (x["image"], ids)])
        return self.conv(x["image"]).mean((1, 2, 3))[:, None] + flat.mean() + ids.float().mean()


def images(sizes, last=False):
    g = torch.Generator().manual_seed(0)
    made = []
    for n in sizes:
        x, ids = torch.randn(n, 3, 5, 5, generator=g), torch.ones(n, 3, 2, 2, dtype=torch.int64)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        made.append(({"image": x}, ids, torch.randn(n, 3, 5, generator=g), torch.randn(n, 1, generator=g)))
    return made


def test_channels_last_reaches_model_and_images_of_training_and_validation_and_nothing_else():
    learn = quiet(images(RAGGED), images([2]), Sees())
    learn.fit(2, cbs=ChannelsLast())
    assert learn.model.seen == [[True, False]] * 8
    assert learn.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    plain = quiet(
        images(RAGGED, last=True), images([2], last=True), Sees().to(memory_format=torch.channels_last)
    )
    plain.fit(2)
    assert same(weights(learn.model), weights(plain.model))


def test_images_and_weights_of_one_channel_are_laid_out_too():
    """There `contiguous` changes nothing, and `to` does; see torch's tutorial on channels last."""
    (x, y), conv = (torch.randn(2, 1, 5, 5), torch.randn(2, 1)), nn.Conv2d(1, 2, 3)
    seen = []
    look = Callback(name="look", after_pred=lambda cb: seen.append(cb.x.stride()))
    learn = quiet([(x, y)], None, nn.Sequential(conv, nn.Flatten(), nn.Linear(18, 1)))
    learn.fit(1, cbs=[ChannelsLast(), look])
    assert seen == [x.to(memory_format=torch.channels_last).stride()]
    assert conv.weight.stride() == nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last).weight.stride()


@pytest.mark.parametrize("raised", [None, *DEVIL])
def test_a_model_is_compiled_in_the_fit_and_not_after_it(raised):
    calls = []

    def backend(graph, inputs):
        calls.append(1)
        return graph.forward

    torch._dynamo.reset()
    learn, log = quiet(batches_of([4, 4]), batches_of([4])), []
    names = list(learn.model.state_dict())
    look = Callback(name="look", after_pred=lambda cb: log.append(cb.model._compiled_call_impl is not None))
    for _ in range(2):
        try:
            devil = [raising("after_epoch", raised())] if raised else []
            learn.fit(1, cbs=[Compile(backend=backend), look, *devil])
        except (ValueError, KeyboardInterrupt):
            pass
        assert learn.model._compiled_call_impl is None
        assert list(learn.model.state_dict()) == names
    assert calls
    assert all(log)
    plain = quiet(batches_of([4, 4]), batches_of([4]))
    plain.fit(2)
    assert all(torch.allclose(a, b) for a, b in zip(weights(learn.model), weights(plain.model), strict=True))
    learn.model.compile(backend="eager")
    compiled = learn.model._compiled_call_impl
    learn.fit(1, cbs=Compile(backend=backend))
    assert learn.model._compiled_call_impl is compiled
