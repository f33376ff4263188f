"""Tokens of language models, compared with the targets that the gradient of the scores tells."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, diagnose, watch
from hookcb.diagnosis.measurements.tokens import MIN_BATCHES, UNKNOWN, Tokens, _targets_like
from hookcb.diagnosis.run import Run
from tests.support import along, each, first, in_turn, pairs

N, T, V, D = 8, 12, 16, 16
ORDER = (
    torch.randperm(V - 1, generator=torch.Generator().manual_seed(0)) + 1
)  # the token after each; 0 is left


def sentences(length=T + 1, n=N, seed=0):
    """Sentences in which most tokens follow from the one before."""
    g = torch.Generator().manual_seed(seed)
    columns = [torch.randint(1, V, (n,), generator=g)]
    for _ in range(length - 1):
        other = torch.randint(1, V, (n,), generator=g)
        columns.append(torch.where(torch.rand(n, generator=g) < 0.8, ORDER[columns[-1] - 1], other))
    return torch.stack(columns, 1)


def data(n=40, of=lambda w: (w[:, :-1], w[:, 1:])):
    return [of(sentences(seed=i)) for i in range(n)]


def same(w):
    return w[:, :-1], w[:, :-1].clone()


def padded(w):
    w = torch.where(torch.arange(T + 1) < torch.arange(4, 4 + N)[:, None], w, 0)
    return w[:, :-1], w[:, 1:]


MASKS = {
    "causal": torch.ones(T, T).tril(),
    "none": torch.ones(T, T),
    "inverted": torch.ones(T, T).triu(),
    "late": torch.ones(T, T).tril(1),
    "window": torch.ones(T, T).tril() * torch.ones(T, T).triu(-3),
    "prefix": (torch.ones(T, T).tril() + (torch.arange(T) < 5)).clamp(max=1),
    "self": torch.eye(T),
}


class Gpt(nn.Module):
    """A small transformer; positions are numbered unless `positions` is 0."""

    def __init__(self, mask="causal", fused=True, padding=None, positions=1, shift=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(V, D, padding_idx=padding), nn.Embedding(T, D)
        self.qkv, self.out, self.head = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, V)
        self.mask, self.fused, self.step, self.shift = MASKS[mask].bool(), fused, positions, shift

    def forward(self, x):
        n, t = x.shape
        x = F.pad(x[:, :-1], (1, 0)) if self.shift else x
        h = self.tokens(x) + self.positions(torch.arange(t) * self.step)
        q, k, v = self.qkv(h).view(n, t, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        mask = self.mask[:t, :t]
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e4).softmax(-1) @ v
        return self.head(h + self.out(out.transpose(1, 2).reshape(n, t, D)))


def cross_entropy(p, y, **kwargs):
    return F.cross_entropy(p.flatten(0, 1), y.flatten(), **kwargs)


def trained(model, batches, loss_func=cross_entropy):
    learn = Learner(batches, model, loss_func, torch.optim.AdamW(model.parameters(), 1e-2))
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose("ignore", show=False))
    return learn.diagnose()


def watched(model, batches, loss_func=cross_entropy):
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, y in batches:
            opt.zero_grad()
            loss_func(model(x), y).backward()
            opt.step()
    return w.diagnose()


LOOPS = [trained, watched]
OF_TOKENS = {"mask.future", "mask.blind", "label.copies_input", "label.padding", "embed.single_index"}


def seen(verdict):
    """Codes and severities of findings about tokens."""
    return {x.code: x.severity for x in verdict.findings if x.code in OF_TOKENS}


def gaps(verdict):
    return {code: gap.reason for gap in verdict.gaps for code in gap.codes}


# ---- what is trained


@pytest.mark.parametrize(
    ("mask", "train", "fused"), first(pairs(["none", "inverted", "late"], LOOPS, [True, False]))
)
def test_a_mask_that_shows_the_next_token_is_named(mask, train, fused):
    verdict = train(Gpt(mask, fused), data())
    assert seen(verdict) == {"mask.future": "error"}
    assert verdict.primary.code == "mask.future"


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "train"), along(["causal", "window"], LOOPS))
def test_a_mask_that_hides_it_is_fine(train, mask):
    verdict = train(Gpt(mask), data())
    assert seen(verdict) == {}
    assert "masks that show the next token" in verdict.ruled_out


@pytest.mark.slow
def test_a_prefix_may_be_visible_if_it_is_not_a_target():
    def ignored(w):
        return w[:, :-1], w[:, 1:].masked_fill(torch.arange(T) < 4, -100)

    assert seen(trained(Gpt("prefix"), data(of=ignored))) == {}


@pytest.mark.slow
def test_a_loss_that_shifts_its_targets_itself_is_understood():
    def shifted(p, y):
        return cross_entropy(p[:, :-1], y[:, 1:])

    assert seen(trained(Gpt(), data(of=same), shifted)) == {}
    assert seen(trained(Gpt("none"), data(of=same), shifted)) == {"mask.future": "error"}


@pytest.mark.slow
def test_masked_tokens_may_be_predicted_from_both_sides():
    def masked(w):
        x = w[:, :-1]
        is_masked = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(x.sum()))) < 0.3
        return x.masked_fill(is_masked, 0), x.masked_fill(~is_masked, -100)

    assert seen(trained(Gpt("none"), data(of=masked))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("train", each(2, LOOPS))
def test_targets_that_are_not_shifted_are_named_from_a_few_batches_on(train):
    assert seen(train(Gpt(), data(120, of=same))) == {"label.copies_input": "warning"}
    assert seen(train(Gpt(), data(6, of=same))) == {"label.copies_input": "warning"}


@pytest.mark.slow
def test_a_token_autoencoder_gets_a_note():
    assert seen(trained(Gpt("none"), data(120, of=same))) == {"label.copies_input": "info"}


@pytest.mark.slow
def test_a_model_that_shifts_its_input_itself_is_fine():
    assert seen(trained(Gpt(shift=True), data(of=same))) == {}


@pytest.mark.slow
def test_a_recurrent_model_has_no_masks_to_check():
    class Lstm(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.lstm, self.head = nn.Embedding(V, D), nn.LSTM(D, D), nn.Linear(D, V)

        def forward(self, x):
            return self.head(self.lstm(self.tokens(x.T))[0].transpose(0, 1))

    verdict = trained(Lstm(), data())
    assert seen(verdict) == {}
    assert "no attention was seen" in gaps(verdict)["mask.future"]
    assert "targets that are not shifted" in verdict.ruled_out


@pytest.mark.slow
def test_an_autoencoder_may_see_all_of_the_text_that_it_decodes():
    class Encoded(Gpt):
        def __init__(self):
            super().__init__("none")
            self.decoder = nn.GRU(D, D, batch_first=True)

        def forward(self, x):
            h = self.tokens(x)
            whole = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0].mean(1)
            return self.head(self.decoder(h[:, :-1], whole[None].contiguous())[0])

    def loss_func(p, y):
        return cross_entropy(p, y[:, 1:])

    assert seen(trained(Encoded(), data(of=same), loss_func)) == {}


@pytest.mark.parametrize(("fused", "train"), first(along([True, False], LOOPS)))
def test_a_mask_that_hides_all_other_tokens_is_named(train, fused):
    verdict = train(Gpt("self", fused), data())
    assert seen(verdict) == {"mask.blind": "warning"}


@pytest.mark.parametrize("train", each(2, [trained, watched]))
def test_padding_that_counts_is_named(train):
    verdict = train(Gpt(padding=0), data(of=padded))
    assert seen(verdict) == {"label.padding": "warning"}
    assert next(x for x in verdict.findings if x.code == "label.padding").value == pytest.approx(
        0.3, abs=0.15
    )


def _weighted(p, y):
    return cross_entropy(p, y, weight=(torch.arange(V) > 0).float())


def _multiplied(p, y):
    return (cross_entropy(p, y, reduction="none") * (y.flatten() != 0)).sum() / (y != 0).sum()


def _selected(p, y):
    return F.cross_entropy(p[y != 0], y[y != 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_func", "train"),
    along([lambda p, y: cross_entropy(p, y, ignore_index=0), _weighted, _multiplied, _selected], LOOPS),
)
def test_padding_that_does_not_count_is_fine_however_it_is_left_out(train, loss_func):
    assert seen(train(Gpt(padding=0), data(of=padded), loss_func)) == {}


@pytest.mark.parametrize("train", each(2, [trained, watched]))
def test_positions_that_are_all_0_are_named(train):
    verdict = train(Gpt(positions=0), data())
    assert seen(verdict) == {"embed.single_index": "warning"}
    assert next(x for x in verdict.findings if x.code == "embed.single_index").layer == "positions"


def test_a_model_without_tokens_has_nothing_to_check():
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(10)]
    verdict = trained(nn.Linear(4, 3), batches, F.cross_entropy)
    assert not OF_TOKENS & set(gaps(verdict))
    assert seen(verdict) == {}


def test_the_preflight_sees_it_in_a_batch():
    found = {x.code for x in diagnose(Gpt("none"), data(1)[0], cross_entropy).findings}
    assert "mask.future" in found


# ---- what is compared


@in_turn("layout", ["NTC", "TNC", "NCT", "flat", "shorter"])
def test_the_gradient_of_a_cross_entropy_tells_its_targets(layout):
    x, y = sentences(T), sentences(T, seed=1)
    y[0, :3] = -100
    scores = torch.randn(N, T, V, requires_grad=True)
    cross_entropy(scores, y).backward()
    expected = y.masked_fill(y == -100, UNKNOWN)
    grad = {
        "NTC": scores.grad,
        "TNC": scores.grad.transpose(0, 1),
        "NCT": scores.grad.transpose(1, 2),
        "flat": scores.grad.flatten(0, 1),
        "shorter": scores.grad[:, :-1],
    }[layout]
    found = _targets_like(x, grad, 1)
    assert torch.equal(found, expected[:, :-1] if layout == "shorter" else expected)


def test_gradients_of_another_shape_tell_nothing():
    assert _targets_like(sentences(T), torch.randn(N, 3), 1) is None
    assert _targets_like(sentences(T), torch.randn(N, T), 1) is None
    assert _targets_like(sentences(3), torch.randn(N, 3, V), 1) is None  # too short


def test_what_was_embedded_is_forgotten_with_its_batch():
    tokens = Tokens()
    tokens.add_indices("emb", V, sentences(), -1)
    run = Run(loop=SimpleNamespace(pred=torch.randn(N, T, V, requires_grad=True) * 1))
    tokens.on_batch(run)
    tokens.on_prediction(run)
    run.loop.pred.sum().backward()
    assert tokens.n_batches == 0


def test_no_more_batches_are_compared_than_needed():
    tokens = Tokens()
    for i in range(2 * MIN_BATCHES):
        tokens.on_batch(Run())
        tokens.add_indices("emb", V, sentences(T, seed=i), -1)
        scores = torch.randn(N, T, V, requires_grad=True) * 1
        tokens.on_prediction(Run(loop=SimpleNamespace(pred=scores)))
        cross_entropy(scores, sentences(T, seed=i)).backward()
    assert tokens.n_batches == MIN_BATCHES
    tokens.tell(Run())
    (relation, _) = tokens.relations  # the same along both dimensions
    assert (relation.is_next, relation.n_targets) == (False, MIN_BATCHES * N * T)
    assert math.isclose(relation.n_padding, 0)
