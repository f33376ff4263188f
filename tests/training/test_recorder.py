"""Recorder counts what was trained, once and by its weight."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelValidException,
    Learner,
    Metrics,
    Recorder,
)
from tests.support import fit, make_batches, make_learner, make_model, spy, train_by_hand


def test_averages_weigh_batches_by_their_size():
    train, valid = make_batches(3, last=1), make_batches(3, seed=1, last=2)
    learn = fit(
        Learner((train, valid), make_model(), F.mse_loss, torch.optim.SGD, lr=0.1, metrics=F.l1_loss), 2
    )
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for row in learn.recorder.rows:
        losses = train_by_hand(model, train, opt=opt)
        expected = sum(loss * len(x) for loss, (x, _) in zip(losses, train, strict=True)) / 9
        assert row["train_loss"] == pytest.approx(expected, rel=1e-6)
        x, y = (torch.cat(t).double() for t in zip(*valid, strict=True))
        with torch.no_grad():
            pred = copy.deepcopy(model).double()(x)
        assert row["valid_loss"] == pytest.approx(F.mse_loss(pred, y).item(), rel=1e-5)
        assert row["l1_loss"] == pytest.approx(F.l1_loss(pred, y).item(), rel=1e-5)
    assert [row["epoch"] for row in learn.recorder.rows] == [0, 1]
    assert all(row["time"] >= 0 for row in learn.recorder.rows)
    got = learn.validate()
    assert list(got) == pytest.approx([learn.recorder.rows[-1][k] for k in ("valid_loss", "l1_loss")])


def test_averages_weigh_packed_and_mapped_batches_by_their_samples():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(2, 3)

        def forward(self, x):
            return self.gru(x)[1][0].mean(-1, keepdim=True)

    g = torch.Generator().manual_seed(0)
    lengths = [(7, 5, 5, 1), (2,)]
    batches = [
        (pack_sequence([torch.randn(n, 2, generator=g) for n in ns]), torch.randn(len(ns), 1, generator=g))
        for ns in lengths
    ]
    model = Rnn()
    loss, *_ = Learner((batches, batches), model, F.mse_loss).validate()
    with torch.no_grad():
        expected = [F.mse_loss(model(x), y).item() for x, y in batches]
    assert loss == pytest.approx((4 * expected[0] + expected[1]) / 5, rel=1e-5)
    alone = [x for x, _ in batches]
    loss, *_ = Learner((alone, alone), model, lambda p: p.square().mean()).validate()
    with torch.no_grad():
        expected = [model(x).square().mean().item() for x in alone]
    assert loss == pytest.approx((4 * expected[0] + expected[1]) / 5, rel=1e-5)


def test_cancelled_batches_leave_no_record_in_losses_averages_or_metrics():
    class Cancel(Callback):
        def __init__(self, event):
            super().__init__(**{event: self.act})

        def act(self, _):
            if self.iter == 1:
                raise CancelBatchException

    for event in ("before_batch", "after_loss", "before_backward", "after_step"):
        train, valid = make_batches(3), make_batches(3, seed=1)
        stats = ActivationStats()
        model = make_model()
        learn = Learner((train, valid), model, F.mse_loss, torch.optim.SGD, lr=0.0, metrics=F.l1_loss)
        fit(learn, cbs=[Cancel(event), stats])
        loss = [F.mse_loss(model(x), y).item() for x, y in train]
        assert list(learn.recorder.losses) == pytest.approx([loss[0], loss[2]], rel=1e-6), event
        assert len(learn.recorder.lrs) == 2
        assert learn.recorder.rows[0]["train_loss"] == pytest.approx((loss[0] + loss[2]) / 2, rel=1e-6)
        assert len(stats.stats) == 2
        if event in ("before_batch", "after_pred", "after_loss"):
            mae = [F.l1_loss(model(x), y).item() for x, y in valid]
            assert learn.recorder.rows[0]["l1_loss"] == pytest.approx((mae[0] + mae[2]) / 2, rel=1e-6)


def test_cancelled_epochs_and_trainings_leave_the_records_of_their_batches():
    learn = make_learner(cbs=spy([], "a", {("after_step", 1): CancelEpochException()}))
    fit(learn, 2)
    assert len(learn.recorder.losses) == len(learn.recorder.lrs)
    assert len(learn.recorder.losses) in (4, 5)
    assert learn.recorder.rows[-1]["epoch"] == 1
    assert "valid_loss" in learn.recorder.rows[-1]


def test_a_row_of_a_cancelled_validation_does_not_repeat_the_one_before():
    learn = make_learner(
        metrics=F.l1_loss, cbs=spy([], "a", {("before_validate", 1): CancelValidException()})
    )
    fit(learn, 3)
    rows = list(learn.recorder.rows)
    assert len(rows) == 3
    for key in ("valid_loss", "l1_loss"):
        value = rows[1].get(key)
        assert value is None or value != value
        assert rows[2][key] == rows[2][key] != rows[0][key]


def test_the_recorder_starts_anew_at_each_fit_only():
    learn = fit(make_learner(), 2)
    fit(learn, 1)
    assert len(learn.recorder.losses) == 3
    assert len(learn.recorder.rows) == 1
    assert learn.recorder.rows[0]["epoch"] == 0


def test_recorded_losses_are_plain_numbers_that_hold_no_graph():
    learn = fit(make_learner())
    for loss in learn.recorder.losses:
        assert isinstance(loss, float)
    for row in learn.recorder.rows:
        assert all(isinstance(v, (int, float)) for v in row.values())


def test_two_recorders_and_two_metrics_record_the_same_and_nothing_of_each_other():
    learn = make_learner(metrics=F.l1_loss, cbs=[Recorder(name="second"), Recorder(name="third")])
    learn.add_cb(Metrics({"mse": F.mse_loss}, name="more"))
    fit(learn, 2)
    assert learn.second.losses == learn.third.losses
    assert len(learn.second.losses) == 6
    for one, other in zip(learn.second.rows, learn.third.rows, strict=True):
        assert one["valid_loss"] == other["valid_loss"] == pytest.approx(other["mse"])
        assert one["train_loss"] == other["train_loss"]
        assert {"l1_loss", "mse"} <= set(one)


def test_a_picture_shows_losses_metrics_and_rates_over_the_steps():
    pytest.importorskip("matplotlib")
    learn = make_learner(metrics=F.l1_loss)
    learn.fit(3)
    recorder = learn.recorder
    fig = recorder.plot(figsize=(9, 3))
    losses, metric, rates = fig.axes
    assert tuple(fig.get_size_inches()) == (9, 3)
    assert [ax.get_title() for ax in fig.axes] == ["loss", "l1 loss", "learning rate"]
    assert [ax.get_xlabel() for ax in fig.axes] == ["step"] * 3
    drawn = {line.get_label(): line for line in losses.lines}
    assert list(drawn) == ["of a batch", "smoothed", "validation"]
    assert list(drawn["of a batch"].get_ydata()) == recorder.losses
    n = len(recorder.losses) // 3
    assert list(drawn["validation"].get_xdata()) == [n, 2 * n, 3 * n]
    assert list(drawn["validation"].get_ydata()) == [row["valid_loss"] for row in recorder.rows]
    assert list(metric.lines[0].get_ydata()) == [row["l1_loss"] for row in recorder.rows]
    assert list(rates.lines[0].get_ydata()) == recorder.lrs
    copied = Recorder()
    copied.load_state_dict(recorder.state_dict())
    assert list(copied.plot().axes[1].lines[0].get_xdata()) == [n, 2 * n, 3 * n]


def test_a_picture_is_drawn_on_axes_of_the_users_own_one_for_each_panel():
    figures = pytest.importorskip("matplotlib.figure")
    learn = make_learner(metrics=F.l1_loss)
    learn.fit(1)
    own = figures.Figure()
    axs = own.subplots(2, 3).flatten()
    assert learn.recorder.plot(axs=axs[1:4]) is own
    assert [ax.get_title() for ax in axs] == ["", "loss", "l1 loss", "learning rate", "", ""]
    with pytest.raises(
        ValueError, match="must have 3 axes, one for each of the losses, l1_loss, the learning rate; it has 2"
    ):
        learn.recorder.plot(axs=axs[:2])


def test_a_picture_marks_losses_that_are_not_finite():
    pytest.importorskip("matplotlib")
    state = fit(make_learner(), 1).recorder.state_dict()
    state["losses"][1:] = float("nan")
    recorder = Recorder()
    recorder.load_state_dict(state)
    marks = [line for line in recorder.plot().axes[0].lines if line.get_label() == "NaN or inf"]
    assert list(marks[0].get_xdata()) == list(range(1, len(state["losses"])))


def test_without_a_batch_there_is_no_picture():
    with pytest.raises(ValueError, match="nothing to draw yet; train for a batch first"):
        Recorder().plot()
