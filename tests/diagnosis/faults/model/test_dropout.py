"""Dropout that leaves almost nothing, that stays on in eval mode, or that comes before the loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, diagnose, watch
from hookcb.diagnosis.faults.model.dropout import ExtremeDropout, dropped_share
from tests.diagnosis.faults.support import followed
from tests.support import along, in_turn

X, Y = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
CE = F.cross_entropy


def scores():
    torch.manual_seed(0)
    return F.linear(X, torch.randn(10, 5).requires_grad_())


def square(pred, y):
    return F.mse_loss(pred, torch.zeros_like(pred))


def nll_by_hand(pred, y):
    return F.nll_loss((pred.softmax(1) + 1e-6).log(), y)


@pytest.mark.parametrize(("loss_func", "p"), along([CE, square, nll_by_hand], [0.1, 0.5, 0.8]))
def test_dropout_on_the_scores_is_seen_with_its_share(loss_func, p):
    assert dropped_share(loss_func(F.dropout(scores(), p), Y).grad_fn) == pytest.approx(p, abs=0.08)


def test_the_fused_dropout_of_a_gpu_is_seen_by_its_node():
    dropped, _ = torch.native_dropout(scores(), 0.3, True)
    assert dropped_share(CE(dropped.view(64, 10), Y).grad_fn) == pytest.approx(0.3)


OTHERS = {
    "none": lambda x: x,
    "in eval mode": lambda x: F.dropout(x, 0.5, training=False),
    "before the last layer": lambda x: F.linear(F.dropout(x, 0.5), torch.eye(10)),
    "beside a shortcut": lambda x: x + F.dropout(x, 0.5),
    "a mask of the data": lambda x: x * (torch.rand(64, 10) < 0.5),
    "a scaled mask of few zeros": lambda x: x * (2.0 * (torch.rand(64, 10) < 0.9)),
    "weights of scores": lambda x: x * torch.rand(10),
    "a temperature": lambda x: x * 3,
    "a gate": lambda x: x * x.sigmoid(),
}


@in_turn(("name", "loss_func"), along(OTHERS, [CE, square]))
def test_nothing_else_is_taken_for_it(name, loss_func):
    assert dropped_share(loss_func(OTHERS[name](scores()), Y).grad_fn) == 0


@pytest.mark.parametrize("make", [lambda x: x.exp().sum().cosh(), lambda x: x.detach().sum()])
def test_without_a_known_loss_it_is_unknown(make):
    assert math.isnan(dropped_share(make(F.dropout(scores(), 0.5)).grad_fn))


def test_masks_that_a_backward_has_freed_are_unknown():
    loss = CE(F.dropout(scores(), 0.5), Y)
    loss.backward()
    assert math.isnan(dropped_share(loss.grad_fn))


@pytest.mark.parametrize("at", [1, 2])
def test_a_training_is_warned_if_the_last_layer_is_a_dropout(at):
    torch.manual_seed(0)
    layers = [nn.ReLU(), nn.Linear(32, 10)]
    layers.insert(at, nn.Dropout(0.5))
    learn = Learner([(X, Y)] * 5, nn.Sequential(nn.Linear(5, 32), *layers), CE, torch.optim.SGD, lr=0.1)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False))
    found = [(x.severity, x.layer) for x in learn.diagnose().findings if x.code == "dropout.scores"]
    assert found == ([("warning", "3")] if at == 2 else [])


def test_it_is_seen_before_a_training_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 10), nn.Dropout(0.5))
    verdict = diagnose(model, [(X, Y)] * 3, CE)
    assert "dropout.scores" in [x.code for x in verdict.findings]


# ---- in eval mode


class Drops(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 2), drop

    def forward(self, x):
        return self.drop(self.linear(x), self)


def drop_fused(x, m):
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[0, 0]


DROPPING = [lambda x, m: F.dropout(x, 0.5), lambda x, m: F.dropout(x, 0.3, True), drop_fused]
NOT_DROPPING = [
    lambda x, m: F.dropout(x, 0.5, m.training),
    lambda x, m: F.dropout(x, 0.0),
    lambda x, m: x * torch.bernoulli(x.sigmoid()) / 0.5,
    lambda x, m: x * torch.empty_like(x).bernoulli_(0.5),
]


def with_dropout(drop):
    """A model, its optimizer and batches."""
    model, batches = Drops(drop), [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(6)]
    return model, torch.optim.SGD(model.parameters(), 0.1), batches


def of_eval(verdict):
    return [x for x in verdict.findings if x.code == "dropout.in_eval"]


def watched(drop, inputs_of):
    """Findings of a watched loop that evaluates these inputs after each batch."""
    model, opt, batches = with_dropout(drop)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, y in batches:
            opt.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            opt.step()
            with torch.no_grad():
                for inputs in inputs_of(x, batches):
                    model.eval()(inputs)
    return of_eval(w.diagnose())


def modes_noted(drop, with_watch):
    if with_watch:
        found = watched(drop, lambda x, batches: [x])
    else:
        model, opt, batches = with_dropout(drop)
        learn = Learner((batches, batches), model, F.cross_entropy, opt)
        with learn.no_logging():
            learn.fit(2, cbs=Diagnose("ignore", show=False))
        found = of_eval(learn.diagnose())
    return [(x.code, x.severity) for x in found]


@pytest.mark.parametrize(("with_watch", "drop"), along([False, True], DROPPING))
def test_dropout_in_eval_mode_is_a_warning(drop, with_watch):
    assert modes_noted(drop, with_watch) == [("dropout.in_eval", "warning")]


@pytest.mark.parametrize(
    ("n", "n_batches", "severity"), [(3, 1, "info"), (1, 4, "warning"), (2, 2, "warning")]
)
def test_dropout_of_a_batch_that_is_evaluated_several_times_is_meant(n, n_batches, severity):
    """As for Monte Carlo dropout; a loader that reuses the memory of its batches evaluates others."""
    x_val = torch.empty(16, 4)

    def inputs_of(x, batches):
        for other, _ in batches[:n_batches]:
            x_val.copy_(other)
            yield from [x_val] * n

    (found,) = watched(DROPPING[0], inputs_of)
    assert found.severity == severity
    assert ("Monte Carlo" in found.message) == (severity == "info")
    assert not found.consequence_of


@in_turn(("with_watch", "drop"), along([False, True], NOT_DROPPING))
def test_numbers_that_are_drawn_in_eval_mode_are_no_dropout(drop, with_watch):
    assert modes_noted(drop, with_watch) == []


@in_turn("mode", ["train", "eval"])
@in_turn("drop", [0.0, 0.2])
def test_a_watched_validation_in_train_mode_gets_a_note_if_modes_matter(drop, mode):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(drop), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(6):
            x, y = torch.randn(16, 4), torch.randint(2, (16,))
            opt.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            opt.step()
            with torch.no_grad():
                model.train(mode == "train")(x)
    noted = [x.severity for x in w.diagnose().findings if x.code == "mode.mismatch"]
    assert noted == (["info"] if drop and mode == "train" else [])


@in_turn(
    ("layer", "is_told"),
    [
        (nn.Dropout(0.9), True),
        (nn.Dropout2d(0.95), True),
        (nn.Dropout(0.5), False),
        (nn.MultiheadAttention(8, 2, dropout=0.9), True),
    ],
)
def test_a_dropout_of_nearly_all_is_seen(layer, is_told):
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.ReLU(), nn.Linear(8, 8))
    seen = followed(ExtremeDropout, model)[0].seen
    assert [(x.layer, x.severity) for x in seen] == [("1", "warning")] * is_told
