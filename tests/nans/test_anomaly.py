"""DetectAnomaly looks for anomalies in its window, and gives torch's switches back as they were."""

import copy
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn

from hookcb import Callback, CancelTrainException, DetectAnomaly, MixedPrecision, watch
from tests.support import EVENTS, fit, in_turn, make_batches, make_learner, make_model, spy
from tests.training.support import DEVIL, ENDS, all_flags, batches_of, flags_kept, quiet, raising

RAGGED = [4, 4, 2]


def anomaly_mode():
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


@pytest.fixture(params=[(False, True), (True, False)])
def mode(request):
    before = anomaly_mode()
    torch.set_anomaly_enabled(*request.param)
    yield request.param
    torch.set_anomaly_enabled(*before)


@pytest.mark.parametrize(("start", "stop"), [(2, 4), (4, None)])
def test_anomalies_are_looked_for_in_the_window_and_nowhere_else(start, stop, mode):
    seen = []

    def look(cb):
        seen.append((cb.training, cb.train_iter, anomaly_mode()))
        if cb.training and cb.iter == 1:
            cb.learn.validate(make_batches(1))

    fit(make_learner(cbs=[DetectAnomaly(start, stop), Callback(after_pred=look)]), 2)
    for training, i, now in seen:
        if training:
            assert now == ((True, True) if start <= i < (stop or 6) else mode)
        elif i in (3, 6):
            assert now == mode  # a validation after an epoch, not one inside a batch
    assert anomaly_mode() == mode


def test_after_a_training_that_was_cut_short_the_validation_is_not_looked_at():
    seen = []
    look = Callback(before_validate=lambda cb: seen.append(torch.is_anomaly_enabled()))
    cut = spy([], "a", {("after_backward", 1): CancelTrainException()})
    fit(make_learner(cbs=[DetectAnomaly(), look, cut]))
    assert seen == [False]


@pytest.mark.parametrize(
    ("window", "error"), [((-1,), ValueError), ((2, 2), ValueError), ((0.5,), TypeError)]
)
def test_a_window_without_a_batch_is_refused(window, error):
    with pytest.raises(error, match="start"):
        DetectAnomaly(*window)


def test_windows_that_overlap_in_two_threads_leave_the_mode_as_the_first_found_it(mode):
    first_is_in, second_is_in, first_is_over = (threading.Event() for _ in range(3))
    seen = []

    def first(cb):
        if not first_is_in.is_set():
            first_is_in.set()
            assert second_is_in.wait(30)

    def second(cb):
        if not second_is_in.is_set():
            second_is_in.set()
            assert first_is_over.wait(30)
            seen.append(anomaly_mode())

    def run(wait_for, at):
        wait_for.wait(30)
        fit(make_learner(n_train=1, n_valid=0, cbs=[DetectAnomaly(), Callback(after_pred=at)]))

    began = threading.Event()
    began.set()
    threads = [threading.Thread(target=run, args=args) for args in ((began, first), (first_is_in, second))]
    for thread in threads:
        thread.start()
    threads[0].join()
    first_is_over.set()
    threads[1].join()
    assert seen == [(True, True)]
    assert anomaly_mode() == mode


def test_a_copy_made_in_a_window_does_not_close_it():
    copies, seen = [], []

    def look(cb):
        copies.append(copy.deepcopy(cb.learn.detect_anomaly))
        copies[-1].after_batch()
        seen.append(torch.is_anomaly_enabled())

    fit(make_learner(n_train=2, n_valid=0, cbs=[DetectAnomaly(), Callback(after_pred=look)]))
    assert seen == [True, True]


def test_it_is_refused_beside_a_gradscaler_with_what_to_use_instead():
    learn = make_learner(cbs=[DetectAnomaly(), MixedPrecision("fp16")])
    with pytest.raises(RuntimeError, match="NanTrace"):
        fit(learn)
    assert learn.train_iter == 0
    learn.remove_cb(MixedPrecision)
    learn.scaler = torch.amp.GradScaler("cpu", enabled=False)
    fit(learn)
    assert learn.train_iter == 3
    model = make_model()
    with pytest.raises(RuntimeError, match="bfloat16"):
        watch(model, DetectAnomaly(), scaler=torch.amp.GradScaler("cpu"))


@in_turn(("start", "stop"), [(0, None), (0, 2), (2, 5), (4, None), (9, None)])
@in_turn("already", [False, True])
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


@in_turn(("shift", "raised"), list(enumerate(ENDS)))
def test_however_the_fit_ends_anomaly_mode_is_as_before(shift, raised):
    torch.set_anomaly_enabled(shift % 2 == 0, check_nan=False)
    try:
        for event in EVENTS[shift % 2 :: 2]:
            with flags_kept(), suppress(*DEVIL, RuntimeError):
                devil = raising(event, raised(), order=1000)
                quiet(batches_of(RAGGED), batches_of([2])).fit(1, cbs=[DetectAnomaly(), devil])
    finally:
        torch.set_anomaly_enabled(False)


def test_the_error_names_the_operation_that_made_the_nan():
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x * 0).mul(0).sqrt() * 0

    before = all_flags()
    with (
        pytest.warns(UserWarning, match="SqrtBackward0"),
        pytest.raises(RuntimeError, match="SqrtBackward0") as caught,
    ):
        quiet(batches_of(RAGGED), model=Root(2, 1)).fit(1, cbs=DetectAnomaly())
    assert any("batch 0" in note for note in caught.value.__notes__)
    assert all_flags() == before
