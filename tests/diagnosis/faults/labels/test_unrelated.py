"""Meaningless labels, detected by overfitting a single batch with a copy of the model."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Finding, Learner
from hookcb.diagnosis.faults.labels import unrelated
from hookcb.diagnosis.faults.labels.unrelated import UnrelatedLabels
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Run, Series
from tests.support import everything, first, fit, in_turn

FLAT = Finding("loss.flat", "warning")


def net(d=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))


def batches(n=4, bs=8, same_inputs=False):
    """Labels that do not follow from inputs."""
    g = torch.Generator().manual_seed(0)
    xs = [torch.zeros(bs, 8) if same_inputs else torch.randn(bs, 8, generator=g) for _ in range(n)]
    return [(x, torch.randint(3, (bs,), generator=g)) for x in xs]


def learner(model=None, data=None, **kwargs):
    kwargs.setdefault("loss_func", F.cross_entropy)
    return Learner((data or batches(), None), model or net(), opt_func=torch.optim.SGD, lr=1e-3, **kwargs)


def at_end(learn, act):
    """Result of `act` at the end of a fit."""
    found = []
    fit(learn, cbs=Callback(name="looks", after_fit=lambda cb: found.append(act())))
    (only,) = found
    return only


def look(learn, findings, n_batches, falls_slowly=False):
    """What is found in doubt, at the end of a fit."""
    fault, live, told = UnrelatedLabels(), Run(loop=learn, n_batches=n_batches), Run()
    fault.on_model(live)
    if falls_slowly:
        told.loss = Series.of(range(60), [1.0 - 5e-4 * i for i in range(60)])
        told.measured(Loss).guess = 1.0
    assert fault.on_doubt(told, findings) == bool(fault.seen)
    return fault.seen


def seen(learn, *findings, n_batches=4):
    return at_end(learn, lambda: look(learn, findings, n_batches))


def test_where_a_copy_learns_one_batch_by_heart_the_labels_are_told():
    (found,) = seen(learner(), FLAT, n_batches=1234)
    assert (found.code, found.step) == ("data.labels", 0)
    assert 0 <= found.value < 0.5
    assert "flat over 1,234 batches" in found.message


def test_its_numbers_are_the_loss_of_that_batch_before_and_after():
    model = net()
    model[2].p = 0.0
    (found,) = seen(learner(model), FLAT)
    x, y = batches()[-1]
    assert f"from {F.cross_entropy(model(x), y).item():.3g} to " in found.message


def test_a_model_that_cannot_even_learn_one_batch_is_not_the_labels_fault():
    assert seen(learner(data=batches(same_inputs=True)), FLAT) == []
    model = net()
    model[0].requires_grad_(False)
    nn.init.zeros_(model[0].weight)
    assert seen(learner(model), FLAT) == []


@in_turn(
    "findings",
    [
        (),
        (Finding("loss.init", "warning"),),
        (FLAT, Finding("unit.dead", "error")),
        (FLAT, Finding("update.too_small", "warning")),
        (Finding("grad.attenuated", "warning"), FLAT, Finding("loss.init", "info")),
    ],
)
def test_it_is_only_tried_where_the_loss_is_flat_and_nothing_else_is_wrong(findings):
    assert seen(learner(), *findings) == []


def test_notes_and_a_loss_that_began_high_do_not_keep_it_from_being_tried():
    others = (
        Finding("hook.silent", "info"),
        Finding("loss.init", "warning"),
        Finding("dropout.extreme", "info"),
    )
    assert len(seen(learner(), *others, FLAT)) == 1


def test_large_models_are_left_alone(monkeypatch):
    learn = learner()
    monkeypatch.setattr(unrelated, "MAX_PARAMS", sum(p.numel() for p in learn.model.parameters()))
    assert len(seen(learn, FLAT)) == 1
    monkeypatch.setattr(unrelated, "MAX_PARAMS", sum(p.numel() for p in learn.model.parameters()) - 1)
    assert seen(learn, FLAT) == []


def test_losses_on_other_kinds_of_targets_are_tried_too():
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 8, generator=g), torch.randn(8, 3, generator=g)) for _ in range(3)]
    assert len(seen(learner(data=data, loss_func=F.mse_loss), FLAT)) == 1


# ---- a loss that falls, if only a little


def clusters(shuffled, n_classes=4, bs=32):
    """Points around the corner of their class, or that of another."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(bs) % n_classes
    x = 2 * nn.functional.one_hot(y, 8).float() + torch.randn(bs, 8, generator=g)
    return [(x, y[torch.randperm(bs, generator=g)] if shuffled else y)]


def seen_slow(data, *findings, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    learn = learner(model, data, **kwargs)
    return at_end(learn, lambda: look(learn, findings, 150, not findings))


def test_labels_that_are_learned_in_any_order_alike_are_told_of_a_loss_that_hardly_falls():
    (found,) = seen_slow(clusters(shuffled=True))
    assert (found.code, found.severity) == ("data.labels", "warning")
    assert "barely fallen in 150 batches" in found.message
    assert "permuted labels" in found.message


@pytest.mark.slow
def test_labels_that_are_learned_faster_than_in_other_orders_follow_from_inputs():
    assert seen_slow(clusters(shuffled=False)) == []
    assert seen_slow(clusters(shuffled=False), FLAT) == []
    (found,) = seen_slow(clusters(shuffled=True), FLAT)
    assert (found.code, found.severity) == ("data.labels", "info")


@pytest.mark.parametrize(
    "labels",
    [torch.arange(8), torch.tensor([0] * 20 + [1] * 4), torch.zeros(32, dtype=torch.long)],
    ids=["each once", "mostly one", "one"],
)
def test_labels_of_which_one_batch_cannot_tell_are_let_be(labels):
    g = torch.Generator().manual_seed(0)
    assert seen_slow([(torch.randn(len(labels), 8, generator=g), labels)]) == []


def test_targets_that_are_not_classes_are_let_be():
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(32, 8, generator=g), torch.randn(32, 8, generator=g))]
    assert seen_slow(data, loss_func=F.mse_loss) == []


# ---- nothing is left behind


def values(x):
    """The values of `everything`, with tensors as bytes."""
    if isinstance(x, torch.Tensor):
        return x.numpy(force=True).tobytes()
    if isinstance(x, dict):
        return {key: values(v) for key, v in x.items()}
    return [values(v) for v in x] if isinstance(x, list | tuple) else x


@pytest.mark.parametrize("slow", first([False, True]))
@pytest.mark.parametrize("fails", first([False, True]))
def test_the_learner_is_left_as_it_is_even_where_the_model_fails(fails, slow):
    class Fails(nn.Module):
        n = 0

        def forward(self, x):
            Fails.n += 1
            if fails and Fails.n > 10:
                raise RuntimeError("no")
            return x

    model = nn.Sequential(net(), nn.BatchNorm1d(3), Fails())
    learn = learner(model, batches(1, 24) if slow else None)
    args = ((), 4, True) if slow else ((FLAT,), 4)

    def state():
        tensors = values([*model.state_dict().values(), *(p.grad for p in model.parameters())])
        opt = values(list(learn.opt.state_dict().values()))
        return (
            values(everything(model)),
            tensors,
            opt,
            random.getstate(),
            {n: id(x) for n, x in vars(learn).items()},
        )

    def looked():
        model.eval()
        model[0][0].train()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before, grads = state(), [p.grad for p in model.parameters()]
        if fails:
            with pytest.raises(RuntimeError, match="no"):
                look(learn, *args)
        else:
            look(learn, *args)
        assert state() == before
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        return Fails.n

    n_calls = at_end(learn, looked)
    assert n_calls > (10 if fails or not slow else 200)


def test_it_works_where_gradients_are_off():
    learn = learner()

    def looked():
        with torch.no_grad():
            found = look(learn, (FLAT,), 4)
            return len(found), torch.is_grad_enabled()

    assert at_end(learn, looked) == (1, False)
