"""Programs of which little can be read: nothing crashes, no alarm, and the verdict says what is not known."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, diagnose, watch
from tests.support import along, each

N_BATCHES, RATE = 60, 0.03


def net(n_in=6, n_out=3):
    return nn.Sequential(nn.Linear(n_in, 16), nn.Tanh(), nn.Linear(16, n_out))


class Wrapped(nn.Module):
    """A model whose input and output have a form of their own."""

    def __init__(self, give, take=lambda *xb: xb[0], n_out=3):
        super().__init__()
        self.net, self.take, self.give = net(n_out=n_out), take, give

    def forward(self, *xb):
        return self.give(self.net(self.take(*xb)))


class Words(nn.Module):
    """A model of integer inputs."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


def floats(n=32):
    x = torch.randn(n, 6)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def words():
    x = torch.randint(20, (32, 5))
    return x, (x > 9).sum(1) // 2


def labelled_dict():
    x, y = floats()
    return {"x": x}, {"label": y, "name": ["a"] * len(y)}


def no_targets():
    return (torch.randn(32, 6),)


def squares_of_output(pred, *_):
    return (pred.square() - 1).square().mean().exp().log1p()


PROGRAMS = {
    "a loss of no known kind": (net, floats, squares_of_output),
    "integer inputs": (Words, words, F.cross_entropy),
    "batches of one": (net, lambda: floats(1), F.cross_entropy),
    "no targets": (net, no_targets, squares_of_output),
    "dicts": (
        lambda: Wrapped(lambda x: {"scores": x, "n": len(x)}, lambda xb: xb["x"]),
        labelled_dict,
        lambda pred, y: F.cross_entropy(pred["scores"], y["label"]),
    ),
    "tuples": (
        lambda: Wrapped(lambda x: (x, None, [x.detach()]), lambda xb: xb[0]),
        lambda: (lambda x, y: ((x, torch.ones(3)), (y, None)))(*floats()),
        lambda pred, y: F.cross_entropy(pred[0], y[0]),
    ),
    "a loss of two outputs": (
        lambda: Wrapped(lambda x: (x[:, :2], x[:, 2:])),
        floats,
        lambda pred, y: (pred[0].sum(1, keepdim=True) * pred[1]).tanh().mean(),
    ),
    "targets of bool": (
        lambda: net(n_out=1),
        lambda: (lambda x, y: (x, y[:, None] > 0))(*floats()),
        lambda pred, y: F.binary_cross_entropy_with_logits(pred, y.float()),
    ),
    "targets of half precision": (
        lambda: net(n_out=1),
        lambda: (lambda x, y: (x, x[:, :1].half()))(*floats()),
        lambda pred, y: F.mse_loss(pred, y.float()),
    ),
    "a target of no dimension": (
        lambda: net(n_out=1),
        lambda: (torch.randn(1, 6), torch.tensor(0.5)),
        lambda pred, y: F.mse_loss(pred.squeeze(), y),
    ),
    "targets of text": (
        net,
        lambda: (torch.randn(16, 6) + torch.tensor([[3.0], [-3.0]] * 8), ["a", "b"] * 8),
        lambda pred, y: F.cross_entropy(pred, torch.tensor([ord(name) - ord("a") for name in y])),
    ),
    "batches of several sizes": (
        net, lambda: floats(int(torch.randint(1, 30, ()))), F.cross_entropy,
    ),
    "a sum of the losses of samples": (
        net, floats, lambda pred, y: F.cross_entropy(pred, y, reduction="none").sum(),
    ),
    "complex numbers": (
        lambda: Wrapped(lambda x: torch.complex(x, x)),
        floats,
        lambda pred, y: (pred.abs() - 1).square().mean(),
    ),
}  # fmt: skip


def by_learner(model, batches, loss_func):
    learn = Learner(batches, model, loss_func, torch.optim.Adam(model.parameters(), RATE))
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False))
    return learn.diagnose()


def by_watch(model, batches, loss_func):
    opt = torch.optim.Adam(model.parameters(), RATE)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for xb, *yb in batches:
            opt.zero_grad()
            w.report_loss(loss_func(model(xb), *yb)).backward()
            opt.step()
    return w.diagnose()


def by_preflight(model, batches, loss_func):
    n_inp = 1 if len(batches[0]) == 1 else None
    return diagnose(model, batches[0], loss_func, n_inp=n_inp)


@pytest.mark.parametrize(("name", "how"), each(4, along(PROGRAMS, [by_learner, by_watch, by_preflight])))
def test_an_odd_program_is_looked_at_without_an_alarm(name, how):
    make, batch, loss_func = PROGRAMS[name]
    torch.manual_seed(0)
    model, batches = make(), [batch() for _ in range(N_BATCHES)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = how(model, batches, loss_func)
    assert not [x.code for x in verdict.findings if x.severity != "info"]
    assert not [note for note in verdict.looked if "failed" in note or "ended by" in note]
    assert not [gap for gap in verdict.gaps if "failed" in gap.reason]
