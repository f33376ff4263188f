"""The kind, purity and scale of a loss, and the head of its scores, as read from its graph alone before."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb.diagnosis.measurements.loss_graph import LossGraph, n_between, penalty_of, read_loss
from tests.support import along, in_turn

N, C, T = 6, 5, 3
PLAIN = {"is_pure": True, "scale": 1.0}
CE = {"kind": "cross-entropy", "applies": "softmax"}
BCE = {"kind": "binary cross-entropy", "applies": ""}
LOGITS = {"kind": "binary cross-entropy", "applies": "sigmoid"}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scores(*shape, seed=0):
    return numbers(*shape or (N, C), seed=seed).requires_grad_()


X, X2 = scores(), scores(N, T, seed=1)
Y, Y2 = torch.arange(N) % C, torch.arange(N) % T
SOFT = numbers(N, C, seed=2).softmax(-1)
ADVANTAGES = numbers(N, seed=3)
BITS = (numbers(N, C, seed=4) > 0).float()
SEQUENCE, TOKENS = scores(N, T, C), torch.arange(N * T).view(N, T) % C
PIXELS = torch.arange(N * 2 * 2).view(N, 2, 2) % C


def log_p(x=X):
    return F.log_softmax(x, -1)


def read(loss):
    return read_loss(loss.grad_fn)


def expect(loss, **fields):
    found = read(loss)._asdict()
    assert {name: found[name] for name in fields} == fields


# ---- kinds


@in_turn(
    ("loss", "kind"),
    [
        (lambda: F.cross_entropy(X, Y), CE),
        (lambda: nn.CrossEntropyLoss()(X, Y), CE),
        (lambda: F.cross_entropy(X[0], Y[0]), CE),
        (lambda: F.cross_entropy(X, Y, weight=torch.arange(1.0, C + 1)), CE),
        (lambda: F.cross_entropy(X, Y, ignore_index=0), CE),
        (lambda: F.cross_entropy(SEQUENCE.transpose(1, 2), TOKENS), CE),
        (lambda: F.cross_entropy(SEQUENCE.flatten(0, 1), TOKENS.flatten()), CE),
        (lambda: F.cross_entropy(scores(N, C, 2, 2), PIXELS), CE),
        (lambda: F.cross_entropy(scores(N, C, 2, 2, 2), PIXELS[..., None].expand(N, 2, 2, 2)), CE),
        (lambda: F.nll_loss(log_p(), Y), CE),
        (lambda: nn.NLLLoss()(nn.LogSoftmax(1)(X), Y), CE),
        (lambda: F.nll_loss(log_p(SEQUENCE).transpose(1, 2), TOKENS), CE),
        (lambda: F.cross_entropy(X.bfloat16().float(), Y), CE),
        (lambda: F.nll_loss(X, Y), {"kind": "nll", "applies": ""}),
        (lambda: F.binary_cross_entropy(X.clamp(0.1, 0.9), BITS), BCE),
        (lambda: F.binary_cross_entropy_with_logits(X, BITS), LOGITS),
        (lambda: nn.BCEWithLogitsLoss()(X[:, 0], BITS[:, 0]), LOGITS),
        (lambda: F.mse_loss(X, SOFT), {"kind": "mse", "applies": ""}),
        (lambda: F.smooth_l1_loss(X, SOFT), {"kind": "huber", "applies": ""}),
        (lambda: F.huber_loss(X, SOFT), {"kind": "huber", "applies": ""}),
    ],
)
def test_a_plain_mean_of_a_usual_loss_is_told_with_what_it_applies(loss, kind):
    expect(loss(), **kind, **PLAIN, head="")


@in_turn(
    "loss",
    [
        lambda: F.cross_entropy(X, SOFT),
        lambda: F.cross_entropy(X, Y, label_smoothing=0.1),
        lambda: F.cross_entropy(X, SOFT, label_smoothing=0.1),
        lambda: F.cross_entropy(X, Y, label_smoothing=0.1, weight=torch.ones(C)),
        lambda: F.cross_entropy(SEQUENCE.transpose(1, 2), TOKENS, label_smoothing=0.1),
        lambda: -(SOFT * log_p()).sum(-1).mean(),
    ],
)
def test_cross_entropy_with_soft_or_smoothed_targets_is_told_with_its_softmax(loss):
    expect(loss(), **CE, head="")


@in_turn(
    "loss",
    [
        lambda: X.mean(),
        lambda: -F.cosine_similarity(X, SOFT).mean(),
        lambda: torch.ones(3).mean(),
        lambda: F.hinge_embedding_loss(X, 2 * BITS - 1),
        lambda: X.softmax(-1).square().mean(),
    ],
)
def test_what_else_a_loss_may_be_has_no_kind(loss):
    found = read(loss())
    assert (found.kind, found.is_pure, found.applies, found.head) == ("", False, "", "")


def test_no_node_at_all_is_no_kind():
    assert read_loss(None).kind == ""


# ---- purity and scale


MEAN = F.cross_entropy
NONE = {"reduction": "none"}


@in_turn(
    ("loss", "factor"),
    [
        (lambda: 0.3 * MEAN(X, Y), 0.3),
        (lambda: MEAN(X, Y) * 0.3, 0.3),
        (lambda: MEAN(X, Y) / 4, 0.25),
        (lambda: 2 * -MEAN(X, Y), -2.0),
        (lambda: (8 * MEAN(X, Y) / 4).view(1) * -3, -6.0),
        (lambda: 2 * F.mse_loss(X, SOFT), 2.0),
        (lambda: F.binary_cross_entropy_with_logits(X, BITS) / 10, 0.1),
    ],
)
def test_a_loss_that_is_scaled_by_a_number_is_itself_at_that_scale(loss, factor):
    assert read(loss()).is_pure
    assert read(loss()).scale == pytest.approx(factor)
    assert read(loss()).kind != ""


@in_turn(
    ("loss", "mean"),
    [
        (lambda: MEAN(X, Y, reduction="sum"), lambda: MEAN(X, Y)),
        (lambda: MEAN(X, Y, **NONE).sum(), lambda: MEAN(X, Y)),
        (lambda: MEAN(X, Y, reduction="sum") / N, lambda: MEAN(X, Y)),
        (lambda: MEAN(X, Y, **NONE).mean(), lambda: MEAN(X, Y)),
        (lambda: MEAN(SEQUENCE.mT, TOKENS, **NONE).sum(-1).mean(), lambda: MEAN(SEQUENCE.mT, TOKENS)),
        (lambda: -log_p()[torch.arange(N), Y].sum(), lambda: MEAN(X, Y)),
        (lambda: MEAN(X, Y) * torch.tensor(3.0), lambda: MEAN(X, Y)),
        (lambda: torch.tensor(3.0) * MEAN(X, Y), lambda: MEAN(X, Y)),
        (lambda: MEAN(X, Y) / torch.tensor(4), lambda: MEAN(X, Y)),
        (lambda: F.mse_loss(X, SOFT, **NONE).sum(-1).mean(), lambda: F.mse_loss(X, SOFT)),
        (lambda: F.mse_loss(X, SOFT, **NONE).mean(), lambda: F.mse_loss(X, SOFT)),
        (
            lambda: F.binary_cross_entropy_with_logits(X, BITS, reduction="sum"),
            lambda: F.binary_cross_entropy_with_logits(X, BITS),
        ),
    ],
)
def test_the_scale_of_sums_and_means_by_hand_is_right_or_not_known(loss, mean):
    found = read(loss())
    assert found.is_pure
    assert math.isnan(found.scale) or found.scale == pytest.approx((loss() / mean()).item(), rel=1e-4)


@in_turn(
    ("loss", "kind", "sign"),
    [
        (lambda: -F.cross_entropy(X, Y), "cross-entropy", -1),
        (lambda: -F.mse_loss(X, SOFT), "mse", -1),
        (lambda: -F.binary_cross_entropy(X.sigmoid(), BITS), "binary cross-entropy", -1),
        (lambda: F.cross_entropy(X, Y).unsqueeze(0).double().squeeze(), "cross-entropy", 1),
        (lambda: F.cross_entropy(X, Y).clone().view(1).mean(), "cross-entropy", 1),
    ],
)
def test_sign_and_shape_of_a_loss_leave_it_what_it_is(loss, kind, sign):
    expect(loss(), kind=kind, is_pure=True, scale=sign)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: -log_p().gather(1, Y[:, None]).mean(),
        lambda: -log_p()[torch.arange(N), Y].mean(),
        lambda: -log_p().gather(1, Y.view(-1, 1)).squeeze(1).mean(),
    ],
)
def test_cross_entropy_by_hand_is_told(loss):
    expect(loss(), **CE, is_pure=True, head="")


@in_turn(
    "loss",
    [
        lambda: F.cross_entropy(X, Y) + F.cross_entropy(X2, Y2),
        lambda: F.cross_entropy(X, Y) + 0.1 * F.mse_loss(X2, X2.detach() + 1),
        lambda: F.mse_loss(X, SOFT) - F.l1_loss(X, SOFT),
        lambda: F.cross_entropy(X, Y) + 1e-4 * X.square().sum(),
        lambda: torch.stack([F.cross_entropy(X, Y), F.mse_loss(X, SOFT)]).sum(),
        lambda: sum([F.cross_entropy(X, Y), F.cross_entropy(X2, Y2)]),
        lambda: F.cross_entropy(X, Y) + 1.0,
        lambda: F.cross_entropy(X, Y).sqrt(),
        lambda: F.cross_entropy(X, Y) ** 2,
        lambda: F.mse_loss(X, SOFT).log(),
        lambda: -(-F.cross_entropy(X, Y, reduction="none")).exp().mean(),
        lambda: F.cross_entropy(X, Y) * X.square().mean(),
        lambda: F.cross_entropy(X, Y) / X.square().sum(),
    ],
)
def test_what_more_a_loss_is_made_of_leaves_it_no_pure_one(loss):
    assert not read(loss()).is_pure
    assert read(loss()).kind != ""


@in_turn(
    ("loss", "kinds"),
    [
        (lambda: F.mse_loss(X, SOFT), ("mse",)),
        (lambda: F.mse_loss(X, SOFT) + 0.5 * (X2 - 1).square().mean(), ("mse", "mse")),
        (lambda: -(F.mse_loss(X, SOFT) + F.cross_entropy(X2, Y2)), ("mse", "cross-entropy")),
        (lambda: F.mse_loss(X, SOFT) - (X2 - 1).abs().mean(), ()),
        (lambda: F.mse_loss(X, SOFT) + (X2 @ X2.t()).mean(), ()),
        (lambda: F.mse_loss(X, SOFT) + (F.cross_entropy(X, Y, reduction="none") * ADVANTAGES).mean(), ()),
    ],
)
def test_a_sum_of_losses_has_their_kinds_if_all_are_known_and_have_one_sign(loss, kinds):
    assert read(loss()).kinds == kinds


@in_turn(
    "loss",
    [
        lambda: -(log_p().gather(1, Y[:, None])[:, 0] * ADVANTAGES).mean(),
        lambda: -(ADVANTAGES * log_p().gather(1, Y[:, None])[:, 0]).mean(),
        lambda: -(ADVANTAGES * log_p()[torch.arange(N), Y]).sum(),
        lambda: (F.cross_entropy(X, Y, reduction="none") * ADVANTAGES).mean(),
        lambda: (ADVANTAGES * F.cross_entropy(X, Y, reduction="none")).mean(),
        lambda: (ADVANTAGES * F.mse_loss(X, SOFT, reduction="none").mean(1)).sum(),
        lambda: (F.nll_loss(log_p(), Y, reduction="none") / ADVANTAGES).mean(),
        lambda: (F.cross_entropy(X, Y, reduction="none") @ ADVANTAGES) / N,
    ],
)
def test_advantages_may_be_negative_so_a_policy_gradient_is_no_pure_loss(loss):
    assert not read(loss()).is_pure


# ---- heads


HEADS = {
    "Softmax": lambda x: x.softmax(-1),
    "Sigmoid": torch.sigmoid,
    "Relu": F.relu,
}
BETWEEN = {
    "nothing": lambda x: x,
    "a view": lambda x: x.view(N * T, C).view(N, T, C),
    "reshape of what is transposed": lambda x: x.transpose(0, 1).reshape(T, N, C).transpose(0, 1),
    "flatten and back": lambda x: x.flatten().unflatten(0, (N, T, C)),
    "float64": lambda x: x.double(),
    "bfloat16 and back": lambda x: x.bfloat16().float(),
    "contiguous": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1).permute(1, 2, 0),
    "swapaxes": lambda x: x.swapaxes(0, 1).swapaxes(0, 1),
    "one more dimension": lambda x: x.unsqueeze(1).squeeze(1),
    "clone": lambda x: x.clone(),
    "view_as": lambda x: x.view_as(x),
    "movedim": lambda x: x.movedim(0, 1).movedim(1, 0),
    "all of it": lambda x: x[:],
}
LOSSES = {
    "cross-entropy of rows": lambda x: F.cross_entropy(x.reshape(-1, C), TOKENS.reshape(-1)),
    "cross-entropy of maps": lambda x: F.cross_entropy(x.transpose(1, 2), TOKENS),
    "soft targets": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((N * T, C), 1 / C)),
    "smoothed": lambda x: F.cross_entropy(x.flatten(0, 1), TOKENS.flatten(), label_smoothing=0.1),
    "scaled and negated": lambda x: -2 * F.cross_entropy(x.flatten(0, 1), TOKENS.flatten()),
    "one of two": lambda x: F.cross_entropy(x.flatten(0, 1), TOKENS.flatten()) + x.detach().mean(),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "nll": lambda x: F.nll_loss(x.flatten(0, 1), TOKENS.flatten()),
}


@in_turn(("head", "between"), along(HEADS, BETWEEN))
def test_a_head_is_seen_through_views_casts_and_transposes(head, between):
    out = BETWEEN[between](HEADS[head](SEQUENCE))
    assert out.shape == SEQUENCE.shape
    assert {name: read(loss(out)).head for name, loss in LOSSES.items()} == dict.fromkeys(LOSSES, head)


@in_turn("between", BETWEEN)
def test_scores_as_a_linear_layer_gives_them_have_no_head(between):
    hidden = numbers(N, T, 4).requires_grad_()
    torch.manual_seed(0)
    for out in (nn.Linear(4, C)(hidden), nn.Linear(4, C)(hidden.relu()), hidden @ numbers(4, C)):
        assert {read(loss(BETWEEN[between](out))).head for loss in LOSSES.values()} == {""}


@in_turn(
    "out", [lambda x: F.leaky_relu(x), lambda x: x.tanh(), lambda x: 5 * x.sigmoid(), lambda x: x + x.relu()]
)
def test_other_last_steps_are_no_head(out):
    assert {read(loss(out(SEQUENCE))).head for loss in LOSSES.values()} == {""}


def test_a_sigmoid_before_the_loss_that_needs_it_is_its_head_and_nothing_is_applied():
    found = read(F.binary_cross_entropy(X.sigmoid().view(-1), BITS.view(-1)))
    assert (found.head, found.applies) == ("Sigmoid", "")


def test_under_autocast_it_is_what_it_is_without():
    x, layer = numbers(N, 4), nn.Linear(4, C)
    with torch.autocast("cpu", torch.bfloat16):
        assert read(F.cross_entropy(layer(x), Y)) == LossGraph(
            "cross-entropy",
            True,
            1.0,
            "softmax",
            takes="scores",
            is_raw=True,
            n_classes=C,
            kinds=("cross-entropy",),
        )
        assert read(F.cross_entropy(layer(x).softmax(-1), Y)).head == "Softmax"
        assert read(F.mse_loss(layer(x), SOFT)).kind == "mse"


def test_a_loss_can_be_read_twice_and_its_gradients_stay_to_the_bit():
    x = scores()
    F.cross_entropy(x, Y).backward()
    expected, x.grad = x.grad, None
    loss = F.cross_entropy(x, Y)
    assert read(loss) == read(loss)
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_a_graph_of_many_nodes_is_read_up_to_some():
    x = scores()
    deep = X.sum()
    for _ in range(200):
        deep = deep + X.sum()
    assert read(deep * F.mse_loss(x, SOFT)).kind == "mse"
    assert read(deep).kind == ""


def test_a_penalty_on_weights_leaves_the_kind_known_and_the_guess_not():
    layer = nn.Linear(4, C)
    loss = F.cross_entropy(layer(numbers(N, 4)), Y)
    found = read(loss + 0.1 * layer.weight.square().sum())
    assert (found.sure_kind, found.is_pure, found.has_penalty) == ("cross-entropy", False, True)
    assert read(loss - 0.1 * layer.weight.square().sum()).sure_kind == ""
    assert read(loss + layer(numbers(N, 4)).mean()).sure_kind == ""


def test_operations_of_a_loss_are_counted_from_the_models_output():
    x, y, layer = torch.randn(32, 6), torch.randint(3, (32,)), nn.Linear(6, 3)
    out = layer(x)
    assert n_between(F.cross_entropy(out, y).grad_fn, out) == 2
    loop = sum(F.cross_entropy(row, label) for row, label in zip(out, y, strict=True))
    assert n_between(loop.grad_fn, {"logits": out}) >= 3 * 32


def test_operations_are_not_those_of_a_loss_if_there_are_layers_among_them():
    x, judge, layer = torch.randn(8, 6), nn.Linear(3, 1).requires_grad_(False), nn.Linear(6, 3)
    out, other = layer(x), layer(x)
    assert n_between(judge(out).sum().grad_fn, out) == 0
    assert n_between((out * other).sum().grad_fn, out) == 0  # of another call of the model
    assert n_between(other.sum().grad_fn, out) == 0
    assert n_between(out.sum().grad_fn, None) == n_between(None, out) == 0


G = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(16, 5, generator=G), torch.randint(3, (16,), generator=G)
VALUES, ONES = torch.randn(16, 3, generator=G), (torch.rand(16, 3, generator=G) < 0.5).float()
MAIN_TERMS = {
    "classes": lambda p: F.cross_entropy(p, LABELS),
    "weights": lambda p: F.cross_entropy(p, LABELS, weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1),
    "smoothing": lambda p: F.cross_entropy(p, LABELS, label_smoothing=0.2),
    "bits": lambda p: F.binary_cross_entropy_with_logits(p, ONES, pos_weight=torch.tensor(3.0)),
    "probabilities": lambda p: F.binary_cross_entropy(p.sigmoid(), ONES),
    "half of squares": lambda p: 0.5 * F.mse_loss(p, VALUES),
    "squares by hand": lambda p: ((p - VALUES) ** 2).mean(),
    "a product by hand": lambda p: (p - VALUES).square().mean(),
    "absolute errors": lambda p: F.l1_loss(p, VALUES),
}
PENALTIES = {
    "squares": lambda net: sum(p.square().sum() for p in net.parameters()),
    "absolute values": lambda net: 0.1 * sum(p.abs().mean() for p in net.parameters()),
    "norm": lambda net: 3 * net.weight.norm(),
}


@in_turn(("penalty", "loss"), along(PENALTIES, MAIN_TERMS))
def test_it_is_what_was_added_to_the_loss(loss, penalty):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    added = PENALTIES[penalty](net)
    found = penalty_of(MAIN_TERMS[loss](net(INPUTS)) + added)
    assert not found.requires_grad
    assert found.item() == pytest.approx(added.item(), rel=1e-4)


@in_turn("loss", MAIN_TERMS)
def test_a_loss_without_a_penalty_has_none(loss):
    torch.manual_seed(0)
    assert penalty_of(MAIN_TERMS[loss](nn.Linear(5, 3)(INPUTS))).item() == pytest.approx(0, abs=1e-6)


@in_turn(
    "loss",
    [
        lambda p: F.cross_entropy(p, LABELS, reduction="sum"),
        lambda p: F.huber_loss(p, VALUES),
        lambda p: p.tanh().mean(),
        lambda p: p.detach().mean(),
    ],
    ids=["a sum", "Huber", "of no known kind", "detached"],
)
def test_of_other_losses_it_is_unknown(loss):
    assert penalty_of(loss(nn.Linear(5, 3)(INPUTS)) + 0.0) is None


def test_after_the_backward_it_is_unknown():
    loss = F.mse_loss(nn.Linear(5, 3)(INPUTS), VALUES)
    loss.backward()
    assert penalty_of(loss) is None
