"""Recorder and Metrics count what was trained, once and by its weight."""

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
    accuracy,
)
from tests.support import (
    Takes,
    X,
    Y,
    Z,
    fit,
    make_batches,
    make_learner,
    make_model,
    spy,
    train_by_hand,
)


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


class F1:
    """A metric that no average of batches gives."""

    calls = ()

    def reset(self):
        self.calls = []

    def update(self, pred, y):
        self.calls.append((pred > 0, y > 0))

    def compute(self):
        p, y = (torch.cat(t) for t in zip(*self.calls, strict=True))
        return 2 * (p & y).sum() / (p.sum() + y.sum()).clamp(min=1)


def test_metric_objects_are_reset_before_each_validation_and_computed_over_all_of_it():
    metric = F1()
    learn = make_learner(metrics=[metric, F.l1_loss])
    fit(learn, 2)
    preds, y = learn.get_preds()
    p, t = preds > 0, y > 0
    expected = (2 * (p & t).sum() / (p.sum() + t.sum()).clamp(min=1)).item()
    row = learn.recorder.rows[-1]
    (name,) = [k for k in row if k.lower() in ("f1", "f_1")]
    assert row[name] == pytest.approx(expected)
    loss, f1, l1 = learn.validate()
    assert (f1, l1) == pytest.approx((expected, F.l1_loss(preds, y).item()))
    assert loss == pytest.approx(F.mse_loss(preds, y).item())
    assert len(metric.calls) == 2


def test_metrics_are_named_by_functions_partials_lambdas_and_mappings():
    assert Metrics([accuracy, F.l1_loss]).names == ["accuracy", "l1_loss"]
    assert Metrics({"one": accuracy, "two": F1()}).names == ["one", "two"]
    import functools

    (name,) = Metrics(functools.partial(F.l1_loss, reduction="sum")).names
    assert "l1_loss" in name
    with pytest.raises(ValueError, match="accuracy"):
        Metrics([accuracy, accuracy])


@pytest.mark.parametrize("bad", [3, [3], "accuracy", {"a": 3}])
def test_what_is_no_metric_is_refused(bad):
    with pytest.raises(TypeError):
        Metrics(bad)


@pytest.mark.parametrize("name", ["epoch", "train_loss", "valid_loss", "time"])
def test_a_metric_named_like_another_column_does_not_overwrite_it(name):
    try:
        learn = fit(make_learner(metrics={name: lambda p, y: torch.tensor(-77.0)}))
    except ValueError as exc:
        assert name in str(exc)  # noqa: PT017
    else:
        assert learn.recorder.rows[0][name] != -77


def test_metrics_work_with_several_targets_and_without():
    seen = []

    def metric(pred, *yb):
        seen.append(len(yb))
        return pred.mean()

    batches = [(X, Y, Z)]
    fit(Learner((batches, batches), Takes(), lambda p, y, z: p.mean(), n_inp=1, metrics=metric))
    fit(Learner(([X], [X]), Takes(), lambda p: p.mean(), metrics=metric))
    assert seen == [2, 0]


def test_accuracy_is_the_share_of_right_classes_of_any_shape():
    g = torch.Generator().manual_seed(0)
    for shape in ((7,), (5, 3), (2, 3, 4)):
        pred, target = torch.randn(*shape, 3, generator=g), torch.randint(0, 3, shape, generator=g)
        flat = zip(pred.reshape(-1, 3).tolist(), target.flatten().tolist(), strict=True)
        right = [p.index(max(p)) == t for p, t in flat]
        assert accuracy(pred, target).item() == pytest.approx(sum(right) / len(right))


def test_metrics_of_torchmetrics_are_computed_over_all_of_the_validation():
    import torchmetrics  # not above: every worker imports this file, and this takes seconds
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    scores = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    target = torch.arange(30) % 3
    batches = list(zip(scores.split(7), target.split(7), strict=True))
    metrics = torchmetrics.MetricCollection(
        {"f1": MulticlassF1Score(3, average="macro"), "top2": MulticlassAccuracy(3, top_k=2, average="micro")}
    )
    learn = Learner(
        ([*batches], batches), nn.Linear(3, 3), F.cross_entropy, lr=0.1, metrics=[metrics, accuracy]
    )
    for _ in range(2):
        fit(learn)
        with torch.no_grad():
            pred = learn.model(scores)
        row = learn.recorder.rows[-1]
        right = [(pred.argmax(1) == k) & (target == k) for k in range(3)]
        f1 = [2 * r.sum() / ((pred.argmax(1) == k).sum() + 10) for k, r in enumerate(right)]
        assert row["f1"] == pytest.approx(torch.stack(f1).mean().item())
        assert row["accuracy"] == pytest.approx((pred.argmax(1) == target).float().mean().item())
        assert row["top2"] == pytest.approx(
            (pred.topk(2).indices == target[:, None]).any(1).float().mean().item()
        )


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


def test_a_metric_that_gives_a_vector_is_named_in_its_first_batch():
    def per_sample(pred, target):
        return (pred - target).abs().mean(dim=1)

    learn = make_learner(metrics=per_sample)
    with pytest.raises(ValueError, match=r"metric 'per_sample' gave a tensor of shape \(\d+,\); reduce it"):
        fit(learn)
    learn = make_learner(metrics=lambda pred, target: (pred - target).abs().mean().reshape(1, 1))
    fit(learn)
    assert learn.recorder.rows[0]["metric"] > 0
