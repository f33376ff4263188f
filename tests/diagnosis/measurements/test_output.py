"""The output beside its targets: which operation limits it, and whether it suits the loss and them."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, diagnose, watch
from hookcb.diagnosis.faults.head.activation import HeadActivation
from hookcb.diagnosis.faults.head.range import read_head
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import LossGraph, read_loss
from hookcb.diagnosis.measurements.output import Output
from hookcb.diagnosis.run import Run
from tests.support import each, in_turn

INF = math.inf
BCE = F.binary_cross_entropy_with_logits


def scores(n_out=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, generator=g) @ torch.randn(5, n_out, generator=g).requires_grad_()


HEADS = {
    "sigmoid": (lambda x: x.sigmoid(), 0, 1),
    "tanh": (lambda x: x.tanh(), -1, 1),
    "softmax": (lambda x: x.softmax(-1), 0, 1),
    "log_softmax": (lambda x: x.log_softmax(-1), -INF, 0),
    "ReLU": (F.relu, 0, INF),
    "softplus": (F.softplus, 0, INF),
    "hardtanh": (lambda x: F.hardtanh(x, -2, 3), -2, 3),
    "ReLU6": (F.relu6, 0, 6),
    "tanh, scaled and shifted": (lambda x: (x.tanh() + 1) / 2, 0, 1),
    "sigmoid, from 5 down": (lambda x: 5 - 2 * x.sigmoid(), 3, 5),
    "-ReLU + 1": (lambda x: 1 - F.relu(x), -INF, 1),
    "sigmoid, reshaped": (lambda x: x.sigmoid().t().reshape(-1)[:, None], 0, 1),
}


@in_turn("name", HEADS)
def test_the_range_of_a_head_is_known(name):
    make, low, high = HEADS[name]
    head = read_head(make(scores()))
    assert (head.low, head.high) == pytest.approx((low, high), abs=1e-5)


@in_turn(
    "make",
    [
        lambda x: x,
        F.leaky_relu,
        F.gelu,
        lambda x: x.sigmoid() * torch.rand(3),  # an element has a range of its own
        lambda x: x.tanh() + torch.arange(24.0).view(8, 3),
        lambda x: x.sigmoid() + x,
        lambda x: x.detach().sigmoid(),
    ],
)
def test_outputs_without_a_common_range_have_no_head(make):
    assert read_head(make(scores())) is None


def model(*head, n_out=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, n_out), *head)


def batch(target):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 5, generator=g)
    return x, target(x)


def bits(x):
    return (x[:, :1] > 0).float()


def classes(x):
    return (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def codes(model, batch, loss):
    return {f.code for f in diagnose(model, batch, loss).findings if f.severity != "info"}


def zeros(x):
    return torch.zeros(len(x), dtype=torch.long)


def signed(x):
    return x[:, :1]


def with_outlier(x):
    return x[:, :1].tanh() + 9 * (torch.arange(len(x))[:, None] == 3)


def squares(p, y):
    return ((p - y) ** 2).mean()


def nll_of_probabilities(p, y):
    return F.nll_loss(torch.log(p.clamp_min(1e-7)), y)


def normalized_by_hand(p, y):
    return -(y * torch.log((p / p.sum(-1)[:, None]).clamp(1e-7, 1))).sum(-1).mean()


def bounded_bce(p, y):
    return F.binary_cross_entropy(p.clamp(1e-7, 1 - 1e-7), y)


def flat(x):
    return x[:, 0]


def bce_by_hand(p, y):
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def squeezed(p, y):
    return F.huber_loss(p.squeeze(), y)


def of_pairs(p, y):
    return F.smooth_l1_loss(*torch.broadcast_tensors(p.unsqueeze(-1), y.unsqueeze(1)))


def one_hot(x):
    return F.one_hot(classes(x), 3).float()


FAULTS = {
    "softmax of one unit": (model(nn.Softmax(1)), bits, F.binary_cross_entropy, "head.degenerate"),
    "log_softmax of one unit": (model(nn.LogSoftmax(1)), zeros, F.nll_loss, "head.degenerate"),
    "cross-entropy of one unit": (model(), zeros, F.cross_entropy, "head.degenerate"),
    "one unit, normalized by hand": (model(nn.Softmax(1)), bits, normalized_by_hand, "head.degenerate"),
    "sigmoid, targets of both signs": (model(nn.Sigmoid()), signed, F.mse_loss, "head.range"),
    "tanh, large targets": (model(nn.Tanh()), lambda x: 9 + x[:, :1], F.l1_loss, "head.range"),
    "ReLU, targets of both signs": (model(nn.ReLU()), signed, F.smooth_l1_loss, "head.range"),
    "squares by hand": (model(nn.ReLU()), signed, squares, "head.range"),
    "classes as bits": (model(), lambda x: classes(x)[:, None].float(), BCE, "label.range"),
    "labels of -1 and 1": (model(), lambda x: bits(x) * 2 - 1, BCE, "label.range"),
    "ReLU before log": (model(nn.ReLU(), n_out=3), classes, nll_of_probabilities, "head.activation"),
    "scores before log": (model(n_out=3), classes, nll_of_probabilities, "head.activation"),
    "ReLU as a probability": (model(nn.ReLU()), bits, bounded_bce, "head.activation"),
    "score as a probability": (model(), bits, bounded_bce, "head.activation"),
    "sigmoid for classes": (model(nn.Sigmoid(), n_out=3), classes, nll_of_probabilities, "head.activation"),
    "a column beside a row": (model(), flat, F.mse_loss, "label.broadcast"),
    "a column beside a row, by hand": (model(), flat, squares, "label.broadcast"),
    "a row beside a column": (model(nn.Flatten(0)), signed, F.l1_loss, "label.broadcast"),
    "a squeezed column": (model(), signed, squeezed, "label.broadcast"),
    "bits in a row": (model(nn.Sigmoid()), lambda x: bits(x)[:, 0], bce_by_hand, "label.broadcast"),
    "one-hot rows of integers": (
        model(n_out=3), lambda x: F.one_hot(classes(x), 3), F.cross_entropy, "label.form",
    ),
    "a column of indices": (model(n_out=3), lambda x: classes(x)[:, None], F.cross_entropy, "label.form"),
    "indices as floats": (model(n_out=3), lambda x: classes(x).float(), F.cross_entropy, "label.form"),
    "a row of bits": (model(), lambda x: bits(x)[:, 0], BCE, "label.form"),
    "bits as integers": (model(), lambda x: bits(x).long(), BCE, "label.form"),
}  # fmt: skip
HEALTHY = {
    "sigmoid": (model(nn.Sigmoid()), bits, F.binary_cross_entropy),
    "logits": (model(), bits, BCE),
    "soft bits": (model(), lambda x: bits(x) * 0.8 + 0.1, BCE),
    "softmax and log": (model(nn.Softmax(1), n_out=3), classes, nll_of_probabilities),
    "log_softmax": (model(nn.LogSoftmax(1), n_out=3), classes, F.nll_loss),
    "cross-entropy": (model(n_out=3), classes, F.cross_entropy),
    "regression": (model(), lambda x: 9 * x[:, :1], F.mse_loss),
    "sigmoid for a share": (model(nn.Sigmoid()), lambda x: x[:, :1].sigmoid(), F.mse_loss),
    "ReLU for a size": (model(nn.ReLU()), lambda x: x[:, :1].abs(), F.mse_loss),
    "a row beside a row": (model(nn.Flatten(0)), flat, F.mse_loss),
    "all pairs on purpose": (model(n_out=4), lambda x: x[:, :4], of_pairs),
    "one output for several targets": (model(), lambda x: x, F.mse_loss),
    "a single sample": (model(), lambda x: x[:1, 0], lambda p, y: F.mse_loss(p[:1], y)),
    "one-hot rows of floats": (model(n_out=3), one_hot, F.cross_entropy),
    "tanh with one outlier": (model(nn.Tanh()), with_outlier, F.mse_loss),
}  # fmt: skip


@pytest.mark.parametrize("name", each(3, FAULTS))
def test_a_head_that_does_not_suit_is_named_before_training(name):
    net, target, loss, code = FAULTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of sizes
        assert code in codes(net, batch(target), loss)


@pytest.mark.parametrize("name", each(3, HEALTHY))
def test_a_head_that_suits_is_not(name):
    net, target, loss = HEALTHY[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = codes(net, batch(target), loss)
    assert not {x for x in found if x.startswith(("head.", "label."))}


CLASSES_AS_VALUES = {
    "softmax": (model(nn.Softmax(1), n_out=3), one_hot, F.mse_loss, "CrossEntropyLoss"),
    "sigmoid": (model(nn.Sigmoid()), bits, F.l1_loss, "BCEWithLogitsLoss"),
    "ReLU": (model(nn.ReLU()), bits, squares, "BCEWithLogitsLoss"),
    "scores": (model(), bits, F.smooth_l1_loss, "BCEWithLogitsLoss"),
}


@in_turn("name", CLASSES_AS_VALUES)
def test_classes_in_a_loss_of_values_are_a_note(name):
    net, target, loss, advice = CLASSES_AS_VALUES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = diagnose(net, batch(target), loss)
    (found,) = (f for f in verdict.findings if f.code == "loss.of_values")
    assert (found.severity, verdict.status) == ("info", "healthy")
    assert advice in found.next_steps[0]


@in_turn(
    "target",
    [lambda x: torch.ones(len(x), 1), lambda x: bits(x) * 0.9, lambda x: (x > 0).float(), signed],
    ids=["all real, as in a GAN", "smoothed", "pixels", "values"],
)
def test_other_targets_are_no_classes(target):
    net = model(n_out=target(batch(flat)[0]).shape[1])
    assert "loss.of_values" not in {f.code for f in diagnose(net, batch(target), F.mse_loss).findings}


def test_a_loss_that_refuses_its_targets_under_watch_is_told_in_words():
    net, (x, y) = model(n_out=3), batch(one_hot)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    w = watch(net, opt, Diagnose("ignore", show=False))
    with pytest.raises(RuntimeError), w:
        F.cross_entropy(net(x), y.long())
    assert w.diagnose().primary.code == "label.form"


def test_all_pairs_of_samples_are_found_under_watch_too():
    net, (x, y) = model(), batch(flat)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    with warnings.catch_warnings(), watch(net, opt, Diagnose("ignore", show=False)) as w:
        warnings.simplefilter("ignore")
        w.report_loss(F.mse_loss(net(x), y)).backward()
        opt.step()
    assert w.diagnose().primary.code == "label.broadcast"
    assert "(64, 1)" in w.diagnose().primary.message
    assert "(64,)" in w.diagnose().primary.message


def test_of_a_sum_of_losses_the_one_of_this_model_is_read():
    net, first = model(), model()

    def of_twins(p, y):
        return F.mse_loss(first(y.expand(-1, 5)), y) + F.mse_loss(p, y[:, 0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = diagnose(net, batch(signed), of_twins)
    assert verdict.primary.code == "label.broadcast"


def test_targets_of_all_pairs_are_told_too():
    rewards = torch.linspace(0, 1, 64)
    verdict = diagnose(model(), batch(signed), lambda p, y: ((p - (rewards + 0.9 * y)) ** 2).mean())
    assert verdict.primary is None  # by hand: nobody knows these targets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = diagnose(model(), batch(signed), lambda p, y: F.mse_loss(p, rewards + 0.9 * y))
    assert verdict.primary.code == "label.broadcast"
    assert "shape (64, 1) and the targets have shape (64, 64)" in verdict.primary.message


def test_targets_of_an_unknown_comparison_are_not_called_fine():
    net, second = model(nn.Sigmoid()), nn.Linear(1, 1)
    verdict = diagnose(net, batch(signed), lambda p, y: F.mse_loss(second(p), y))
    assert "head.range" in [code for gap in verdict.gaps for code in gap.codes]


def test_a_softmax_over_one_key_inside_the_model_is_no_head():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.out = nn.Linear(5, 1), nn.Linear(5, 3)

        def forward(self, x):
            keys = x[:, None]  # one key for each sample
            return self.out((self.score(keys).softmax(1) * keys).sum(1))

    torch.manual_seed(0)
    assert "head.degenerate" not in codes(Pooled(), batch(classes), F.cross_entropy)


def test_under_watch_a_reported_loss_gives_its_targets():
    net = model(nn.Sigmoid())
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = batch(lambda x: 5 * x[:, :1])
    with watch(net, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(3):
            w.report_loss(F.mse_loss(net(x), y)).backward()
            opt.step()
            opt.zero_grad()
    assert w.diagnose().primary.code == "head.range"
    assert w.diagnose().primary.layer == "3"


class Loop:
    """A loop whose first loss has this graph."""

    loss_node, pred, train_iter = None, (), 2


def told_of(graph):
    """What is seen of a loss with this graph, after a layer named head.act."""
    run = Run(loop=Loop())
    run.measured(Loss).graph, run.measured(Output).layer = graph, "head.act"
    fault = HeadActivation()
    fault.on_first_graph(run)
    return fault.seen


@in_turn("head", ["Softmax", "Sigmoid", "Relu"])
@in_turn("applies", ["softmax", "sigmoid"])
def test_an_activation_before_a_loss_that_applies_its_own_is_named(head, applies):
    (found,) = told_of(LossGraph("cross-entropy", True, 1.0, applies, head))
    assert (found.code, found.layer, found.step) == ("head.activation", "head.act", 2)
    assert {"Softmax": "softmax", "Sigmoid": "sigmoid", "Relu": "ReLU"}[head] in found.message


@pytest.mark.parametrize(("head", "layer"), [((), ""), ((nn.Softmax(-1),), "3")])
def test_a_softmax_after_the_model_is_not_said_to_be_a_layer_of_it(head, layer):
    x, y = batch(classes)
    net = model(*head, n_out=3)
    verdict = diagnose(net, (x, y), lambda p, y: F.cross_entropy(p if head else p.softmax(-1), y))
    (found,) = [f for f in verdict.findings if f.code == "head.activation"]
    assert found.layer == layer
    assert ("The model ends in a softmax" in found.message) == bool(head)
    assert "Remove the softmax" in found.next_steps[0]


def test_probabilities_for_nll_are_named():
    graph = read_loss(F.nll_loss(scores().softmax(-1), torch.zeros(8, dtype=torch.long)).grad_fn)
    (found,) = told_of(graph)
    assert "log_softmax" in found.next_steps[0]


@in_turn(
    "graph",
    [
        LossGraph(),
        LossGraph("cross-entropy", True, 1.0, "softmax", ""),
        LossGraph("mse", True, 1.0, "", "Sigmoid"),
        LossGraph("mse", True, 1.0, "", "Relu", takes="values"),
        LossGraph("binary cross-entropy", True, 1.0, "", "Sigmoid", takes="probabilities"),
        LossGraph("nll", True, 1.0, "", "", takes="log-probabilities"),
    ],
)
def test_a_head_that_fits_its_loss_is_no_finding(graph):
    assert not told_of(graph)


def test_a_head_that_is_dead_is_named_before_training():
    net = model(nn.ReLU())
    nn.init.constant_(net[2].bias, -9.0)
    assert "head.stuck" in codes(net, batch(lambda x: 1 + x[:, :1].abs()), F.mse_loss)
