"""Positions that are clamped to the last row of their table, and indices that only look so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.model.positions import ClampedPositions
from hookcb.diagnosis.run import Run, Skipped
from tests.support import along, first, fit
from tests.support import each as each_nth

V, D, T, N = 12, 16, 24, 8


class Tagger(nn.Module):
    """Tokens and positions, with or without attention."""

    def __init__(self, positions, n_rows=16, has_attention=True, width=D):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(n_rows, width)
        self.layer = (
            nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True) if has_attention else nn.Tanh()
        )
        self.head, self.positions = nn.Linear(D, V), positions

    def forward(self, x):
        places = self.places(self.positions(x))
        return self.head(self.layer(self.tokens(x) + places.mean(-1, keepdim=True)))


def clamped(x):
    return torch.arange(x.shape[1]).clamp(max=15)


def batches(n=24):
    g = torch.Generator().manual_seed(0)
    x = [torch.randint(V, (N, T), generator=g) for _ in range(n)]
    return [(a, a.flip(1)) for a in x]


def token_loss(scores, y):
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def by_learner(model):
    learn = Learner(batches(), model, token_loss, lr=1e-3)
    return fit(learn, 1, cbs=Diagnose("ignore", show=False)).diagnose()


def by_watch(model):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for x, y in batches():
            opt.zero_grad()
            token_loss(model(x), y).backward()
            opt.step()
        return w.diagnose()


def found(verdict):
    return [(x.layer, x.severity) for x in verdict.findings if x.code == "embed.clamped"]


@pytest.mark.parametrize(("train", "has_attention"), first(along([by_learner, by_watch], [True, False])))
def test_positions_beyond_the_table_are_found(train, has_attention):
    torch.manual_seed(0)
    assert found(train(Tagger(clamped, has_attention=has_attention))) == [("places", "warning")]


def each(x):
    return clamped(x).expand(len(x), -1)


def after_padding(x):
    return (torch.arange(x.shape[1]) + 2).clamp(max=15)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [each, after_padding])
def test_positions_of_each_sequence_are_compared(positions):
    assert found(by_learner(Tagger(positions))) == [("places", "warning")]


def in_order(x):
    return torch.arange(x.shape[1])


def distances(x):
    """Of each place to the first one, clamped as in relative positions."""
    place = torch.arange(x.shape[1])
    return (place[None] - place[:, None]).clamp(-7, 8)[: len(x)] + 7


def padded(x):
    """Padding is the last row."""
    return torch.where(in_order(x) < 10, in_order(x).flip(0) % 7, 15)


def segments(x):
    return in_order(x) // 2


RIGHT = {
    "in order": Tagger(in_order, n_rows=T),
    "a few beyond": Tagger(lambda x: in_order(x).clamp(max=20), n_rows=21),
    "distances": Tagger(distances),
    "padding": Tagger(padded),
    "segments": Tagger(segments),
    "a bias by distance": Tagger(clamped, width=4),
    "time before an event": Tagger(lambda x: in_order(x).flip(0).clamp(max=15)),
    "the last row only": Tagger(lambda x: in_order(x) * 0 + 15),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", each_nth(3, RIGHT))
def test_other_indices_are_no_clamped_positions(name):
    verdict = by_learner(RIGHT[name])
    assert found(verdict) == []
    assert "positions that are clamped" in verdict.ruled_out


def test_without_embeddings_it_is_not_ruled_out():
    (result,) = ClampedPositions().findings(Run())
    assert isinstance(result, Skipped)
