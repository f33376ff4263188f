"""Embeddings whose outputs are added: embed.scale."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.model.embeddings import EmbeddingScales
from hookcb.diagnosis.run import Passed, Run
from tests.diagnosis.support import evidence, only
from tests.support import first


class Model(nn.Module):
    """Embeddings of tokens and of positions, joined in one of several ways."""

    def __init__(self, way="layer", token=1e-3, position=1.0):
        super().__init__()
        self.way, width = way, 8
        self.tokens, self.places = nn.Embedding(16, width), nn.Embedding(6, width)
        self.table = nn.Parameter(position * torch.randn(1, 6, width))
        nn.init.normal_(self.tokens.weight, std=token)
        nn.init.normal_(self.places.weight, std=position)
        self.head = nn.Linear(2 * width if way == "concatenated" else width, 16)

    def forward(self, x):
        tokens, places = self.tokens(x), self.places(torch.arange(x.shape[1]))
        match self.way:
            case "parameter":
                h = tokens + self.table[:, : x.shape[1]]
            case "slice":
                h = self.places.weight[: x.shape[1]] + tokens
            case "concatenated":
                h = torch.cat([tokens, places.expand_as(tokens)], -1)
            case "scaled":
                h = 1000 * tokens + places
            case "norm":
                h = F.layer_norm(tokens, (8,)) + places
            case _:
                h = tokens + places
        return self.head(h + h.tanh())


def follow(model):
    fault = EmbeddingScales()
    loss = model(torch.randint(16, (4, 6))).mean()
    fault.on_first_graph(Run(loop=SimpleNamespace(model=model, loss_node=loss.grad_fn)))
    assert not fault.unless
    return fault


def judged(fault, loss=2.0):
    """Layers of its findings, in a model that is no better than a constant of a loss of 2."""
    fault.tell(Run())
    run = evidence(loss=[loss] * 100, constant=2.0)
    return [x.layer for x in fault.findings(run) if not isinstance(x, Passed)]


def seen(model):
    return judged(follow(model))


@pytest.mark.parametrize("way", ["layer", "parameter", "slice"])
def test_the_far_smaller_of_two_tables_that_are_added_is_found(way):
    assert seen(Model(way)) == ["tokens"]
    assert seen(Model(way, token=1.0)) == []


@pytest.mark.parametrize("way", ["concatenated", "scaled", "norm"])
def test_tables_that_are_not_added_as_they_are_do_not_count(way):
    assert seen(Model(way)) == []


def test_tables_that_have_grown_do_not_count():
    model = Model(token=1.0, position=0.0)
    fault = follow(model)
    nn.init.normal_(model.places.weight, std=0.1)
    assert judged(fault) == []


def test_a_table_that_begins_at_zero_is_meant_to():
    assert seen(Model(token=0.0)) == []


@pytest.mark.parametrize("in_watch", first([True, False]))
def test_it_is_a_warning_if_the_model_is_no_better_than_a_constant(in_watch):
    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [(x, (x + 1) % 16) for x in torch.randint(16, (220, 8, 6))]

    def loss_func(pred, y):
        return F.cross_entropy(pred.flatten(0, 1), y.flatten())

    if in_watch:
        with watch(model, opt, Diagnose("ignore", show=False)) as loop:
            for x, y in batches:
                loop.report_loss(loss_func(model(x), y)).backward()
                opt.step()
                opt.zero_grad()
    else:
        loop = Learner(batches, model, loss_func, opt)
        with loop.no_logging():
            loop.fit(1, cbs=Diagnose("ignore", show=False))
    assert "embed.scale" in {x.code for x in loop.diagnose().findings if x.severity == "warning"}


def test_in_a_model_that_learns_it_does_no_harm():
    learns = evidence(loss=[2.0 - 0.01 * i for i in range(100)], constant=2.0)
    fault = follow(Model())
    fault.tell(learns)
    fault.freeze()
    assert isinstance(only(lambda run: fault.findings(run), learns), Passed)
    assert only(lambda run: fault.findings(run), evidence(loss=[2.0] * 100, constant=2.0)).value > 30
