"""Metrics are computed over all of a validation, and named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, EarlyStopping, Learner, Metrics, accuracy
from tests.support import Takes, X, Y, Z, fit, in_turn, make_learner


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


@in_turn("bad", [3, [3], "accuracy", {"a": 3}])
def test_what_is_no_metric_is_refused(bad):
    with pytest.raises(TypeError):
        Metrics(bad)


@in_turn("name", ["epoch", "train_loss", "valid_loss", "time"])
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


class Pair:
    """Two metrics in one object, as a MetricCollection of torchmetrics is."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.preds = []

    def update(self, pred, y):
        self.preds.append(pred)

    def compute(self):
        preds = torch.cat(self.preds)
        return {"least": preds.min(), "largest": preds.max()}


def test_a_metric_that_computes_several_gives_a_column_for_each():
    learn = make_learner(metrics=[Pair(), F.l1_loss])
    fit(learn, 2)
    preds, y = learn.get_preds()
    row = learn.recorder.rows[-1]
    expected = (preds.min().item(), preds.max().item(), F.l1_loss(preds, y).item())
    assert (row["least"], row["largest"], row["l1_loss"]) == pytest.approx(expected)
    assert "pair" not in row


@pytest.mark.slow  # takes seconds to import
def test_metrics_of_torchmetrics_are_computed_over_all_of_the_validation():
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    scores = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    target = torch.arange(30) % 3
    batches = list(zip(scores.split(7), target.split(7), strict=True))
    # Its groups share the state of metrics that happen to agree on the first batch.
    metrics = torchmetrics.MetricCollection(
        {
            "f1": MulticlassF1Score(3, average="macro"),
            "top2": MulticlassAccuracy(3, top_k=2, average="micro"),
        },
        compute_groups=False,
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


def test_a_metric_that_gives_a_vector_is_named_in_its_first_batch():
    def per_sample(pred, target):
        return (pred - target).abs().mean(dim=1)

    learn = make_learner(metrics=per_sample)
    with pytest.raises(
        ValueError, match=r"metric 'per_sample' returned a tensor of shape \(\d+,\); reduce it"
    ):
        fit(learn)
    learn = make_learner(metrics=lambda pred, target: (pred - target).abs().mean().reshape(1, 1))
    fit(learn)
    assert learn.recorder.rows[0]["metric"] > 0


# ---- on training batches


def test_metrics_of_training_batches_are_those_of_the_predictions_trained_on():
    def note(cb):
        if cb.training:
            seen.append((float(F.l1_loss(cb.pred.detach(), *cb.yb)), len(cb.xb[0])))

    named = {"l1": F.l1_loss, "twice": lambda pred, y: 2 * F.l1_loss(pred, y)}
    learn, seen = make_learner(metrics=F.l1_loss, cbs=Metrics(named, on_train=True)), []
    learn.add_cbs(Callback(after_loss=note))
    with learn.no_logging():
        learn.fit(1)
    wanted = sum(value * n for value, n in seen) / sum(n for _, n in seen)
    row = learn.recorder.rows[-1]
    assert row["train_l1"] == pytest.approx(wanted)
    assert row["train_twice"] == pytest.approx(2 * wanted)
    assert "l1_loss" in row
    assert learn.train_metrics.names == ["train_l1", "train_twice"]


def test_metrics_of_training_keep_no_graph_and_change_nothing():
    class Kept:
        def __init__(self):
            self.preds = []

        def update(self, pred, y):
            self.preds.append(pred)

        def compute(self):
            return float(len(self.preds))

        def reset(self):
            self.preds = []

    plain, watched, kept = make_learner(), make_learner(), Kept()
    fit(plain, 2)
    fit(watched, 2, cbs=Metrics({"n": kept}, on_train=True))
    assert not any(pred.requires_grad for pred in kept.preds)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    )
    assert watched.recorder.rows[-1]["train_n"] == len(kept.preds)


def test_a_metric_of_training_can_be_monitored():
    learn = make_learner(cbs=Metrics(F.l1_loss, on_train=True))
    stop = EarlyStopping("train_l1_loss", "min", patience=5)
    fit(learn, 2, cbs=stop)
    assert stop.best == min(row["train_l1_loss"] for row in learn.recorder.rows)
