"""Targets that are the input, as seen in models that return their loss, and in encoders with decoders."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from tests.support import first

N, T, V, D = 16, 12, 16, 16
ORDER = torch.randperm(V, generator=torch.Generator().manual_seed(0))  # the token after each


def sentences(n=60):
    """Sentences in which most tokens follow from the one before, `(N, T + 1)`."""
    g = torch.Generator().manual_seed(1)
    found = []
    for _ in range(n):
        w = [torch.randint(V, (N,), generator=g)]
        for _ in range(T):
            other = torch.randint(V, (N,), generator=g)
            w.append(torch.where(torch.rand(N, generator=g) < 0.8, ORDER[w[-1]], other))
        found.append(torch.stack(w, 1))
    return found


def causal(n):
    return nn.Transformer.generate_square_subsequent_mask(n)


class ReturnsLoss(nn.Module):
    """A causal model that returns its loss, and its scores only if they are wanted."""

    def __init__(self, mask=causal, ignored=-1, leaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.layer, self.head = nn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=True), nn.Linear(D, V)
        self.mask, self.ignored, self.leaks = mask, ignored, leaks

    def forward(self, x, y, return_scores=False):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        if self.leaks == "pooled":
            h = h + self.tokens(y).mean(1, keepdim=True)
        elif self.leaks:
            h = h + self.tokens(y)
        scores = self.head(self.layer(h, src_mask=self.mask(x.shape[1])))
        loss = F.cross_entropy(scores.view(-1, V), y.reshape(-1), ignore_index=self.ignored)
        return (scores if return_scores else None), loss


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.body = nn.Transformer(D, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(D, V)

    def embed(self, x):
        return self.tokens(x) + self.places(torch.arange(x.shape[1]))

    def forward(self, x, decoded, y):
        h = self.body(self.embed(x), self.embed(decoded), tgt_mask=causal(decoded.shape[1]))
        scores = self.head(h)
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())


def verdict_on(model, batches, epochs=1, **options):
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for batch in batches * epochs:
            _, loss = model(*batch, **options)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return w.diagnose()


def severity_of(code, verdict):
    return next((x.severity for x in verdict.findings if x.code == code), "")


COPIES, SHIFTED = "label.copies_input", "label.shifted"


@pytest.mark.parametrize("return_scores", first([True, False]))
def test_a_model_that_returns_its_loss_need_not_return_its_scores(return_scores):
    copied = [(w[:, :-1], w[:, :-1]) for w in sentences(20)]
    verdict = verdict_on(ReturnsLoss(), copied, return_scores=return_scores)
    assert severity_of(COPIES, verdict) == "warning"
    assert verdict.primary.code == COPIES
    shifted = [(w[:, :-1], w[:, 1:]) for w in sentences(20)]
    verdict = verdict_on(ReturnsLoss(), shifted, return_scores=return_scores)
    assert verdict.status == "healthy"
    verdict = verdict_on(ReturnsLoss(lambda n: None), shifted, return_scores=return_scores)
    assert severity_of("mask.future", verdict) == "error"


class TwoAhead(ReturnsLoss):
    """It predicts the next token and, by a head of its own, the one after it."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(D, V)

    def forward(self, x, y, z):
        h = self.layer(self.tokens(x) + self.places(torch.arange(x.shape[1])), src_mask=self.mask(x.shape[1]))
        scores = self.head(h)
        first, second = (
            F.cross_entropy(s.view(-1, V), at.reshape(-1)) for s, at in ((scores, y), (self.second(h), z))
        )
        return scores, first + 0.5 * second


def test_labels_that_are_shifted_twice_are_told_and_those_of_a_second_head_are_not():
    twice = [(w[:, :-2], w[:, 2:]) for w in sentences(20)]
    verdict = verdict_on(ReturnsLoss(), twice)
    assert severity_of(SHIFTED, verdict) == "warning"
    assert verdict.primary.code == SHIFTED
    shifts_itself = [(w[:, :-1], torch.cat([w[:, 2:], w[:, :1] * 0 - 1], 1)) for w in sentences(20)]
    assert verdict_on(ReturnsLoss(), shifts_itself).primary.code == SHIFTED
    verdict = verdict_on(TwoAhead(), [(w[:, :-2], w[:, 1:-1], w[:, 2:]) for w in sentences(20)])
    assert severity_of(SHIFTED, verdict) == ""


@pytest.mark.slow
def test_targets_that_do_not_count_are_read_from_the_graph_of_the_loss_too():
    batches = [(w[:, :-1], w[:, :-1].masked_fill(torch.arange(T) < 3, -1)) for w in sentences(20)]
    assert severity_of(COPIES, verdict_on(ReturnsLoss(), batches)) == "warning"


@pytest.mark.slow
def test_the_loss_of_guessing_is_known_if_only_the_loss_is_returned():
    verdict = verdict_on(ReturnsLoss(), [(w[:, :-1], w[:, 1:]) for w in sentences(60)])
    assert any("guessing gives 2.77" in text for text in verdict.ruled_out)


@pytest.mark.slow
def test_targets_embedded_beside_the_input_are_an_error_once_the_loss_tells():
    batches = [(w[:, :-1], w[:, 1:]) for w in sentences(60)]
    verdict = verdict_on(ReturnsLoss(leaks=True), batches, epochs=12)
    assert severity_of(COPIES, verdict) == "error"
    assert "call 2 of an embedding" in verdict.primary.next_steps[0]
    assert severity_of(COPIES, verdict_on(ReturnsLoss(leaks="pooled"), batches)) == ""


@pytest.mark.slow
def test_a_decoder_that_gets_its_targets_is_an_error():
    pairs = [(w[:, :8], ORDER[w[:, :8]].flip(1)) for w in sentences(30)]
    verdict = verdict_on(Translator(), [(x, y, y) for x, y in pairs])
    assert severity_of(COPIES, verdict) == "error"
    longer = [(x, torch.cat([y, x[:, :2]], 1)) for x, y in pairs]
    assert severity_of(COPIES, verdict_on(Translator(), [(x, y, y) for x, y in longer])) == "error"


def begun(y):
    return F.pad(y[:, :-1], (1, 0))


@pytest.mark.slow
def test_a_decoder_that_gets_the_tokens_before_is_fine():
    pairs = [(w[:, :8], ORDER[w[:, :8]].flip(1)) for w in sentences(30)]
    assert severity_of(COPIES, verdict_on(Translator(), [(x, begun(y), y) for x, y in pairs])) == ""


@pytest.mark.slow
def test_an_autoencoder_with_a_decoder_is_fine_and_a_copy_gets_a_note():
    inputs = [w[:, :8] for w in sentences(60)]
    assert severity_of(COPIES, verdict_on(Translator(), [(x, begun(x), x) for x in inputs], 2)) == ""
    verdict = verdict_on(Translator(), [(x, x, x) for x in inputs])
    assert severity_of(COPIES, verdict) == "info"


class Recurrent(nn.Module):
    """A recurrent model of tokens; `how` says what its layer gets."""

    def __init__(self, how="", kind=nn.LSTM, bidirectional=False):
        super().__init__()
        torch.manual_seed(0)
        self.how, width = how, D * (1 + (how == "beside"))
        self.tokens, self.encoder = nn.Embedding(V, D), nn.GRU(D, 16, batch_first=True)
        self.layer = kind(width, 16, batch_first=True, bidirectional=bidirectional)
        self.norm, self.head = nn.Dropout(0.1), nn.Linear(16 * (1 + bidirectional), V)

    def forward(self, x, y):
        h = self.tokens(x)
        if self.how == "beside":
            h = torch.cat([h, self.tokens(y)], -1)
        elif self.how == "autoencoder":  # from the last state of an encoder
            _, state = self.encoder(self.tokens(y))
            h = h + state[-1][:, None]
        scores = self.head(self.norm(self.layer(h)[0]))
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_targets_embedded_for_a_recurrent_decoder_beside_the_input_are_an_error(kind):
    batches = [(w[:, :-1], w[:, 1:]) for w in sentences(20)]
    verdict = verdict_on(Recurrent("beside", kind), batches)
    assert severity_of(COPIES, verdict) == "error"
    assert verdict.primary.code == COPIES
    assert "call 2 of an embedding" in verdict.primary.next_steps[0]


@pytest.mark.slow
def test_a_recurrent_model_with_targets_that_are_not_shifted_is_a_warning():
    copied, shifted = ([(w[:, :-1], w[:, i : T + i]) for w in sentences(20)] for i in (0, 1))
    assert severity_of(COPIES, verdict_on(Recurrent(), copied)) == "warning"
    assert severity_of(COPIES, verdict_on(Recurrent(), shifted)) == ""


@pytest.mark.slow
def test_a_recurrent_autoencoder_and_a_tagger_in_both_directions_are_right():
    batches = [(F.pad(w[:, : T - 1], (1, 0)), w[:, :T]) for w in sentences(20)]
    assert severity_of(COPIES, verdict_on(Recurrent("autoencoder"), batches)) == ""
    copied = [(w[:, :T], w[:, :T]) for w in sentences(20)]
    assert severity_of(COPIES, verdict_on(Recurrent(bidirectional=True), copied)) == "info"


class LastState(nn.Module):
    """An autoencoder whose decoder gets the last state of its encoder at each step, and no tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.encoder = nn.Embedding(V, D), nn.LSTM(D, 16, batch_first=True)
        self.decoder, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, V)

    def forward(self, x, y):
        made, _ = self.encoder(self.tokens(x))
        scores = self.head(self.decoder(made[:, -1:].expand(-1, x.shape[1], -1))[0])
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())


@pytest.mark.slow
def test_an_autoencoder_from_the_last_state_is_a_note():
    copied = [(w[:, :T], w[:, :T]) for w in sentences(20)]
    assert severity_of(COPIES, verdict_on(LastState(), copied)) == "info"
