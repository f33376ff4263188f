"""Attributes that keep graphs, and losses that go back into graphs of earlier batches."""

import gc
import weakref
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.run import Run, Skipped
from tests.support import first


class Net(nn.Module):
    """Keeps what `keep` says, with or without its graph."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.cell, self.head = keep, nn.GRUCell(4, 8), nn.Linear(8, 1)
        self.state, self.kept, self.last = torch.zeros(16, 8), [], None
        self.table = {}
        self.recent = deque(maxlen=4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, given=None):
        start = self.state if self.keep == "state" else given
        self.last = h = self.cell(x, start)
        if self.keep in ("state", "detached state"):
            self.state = h if self.keep == "state" else h.detach()
        elif self.keep == "list":
            self.kept.append(h.mean())
        elif self.keep == "table":
            self.table[len(self.table)] = (h.mean(), 1)
        elif self.keep == "recent":
            self.recent.append(h)
        elif self.keep == "cleared":
            self.kept = [*self.kept, h] if len(self.kept) < 20 else []
        elif self.keep == "numbers":
            self.kept.append(h.mean().item())
        elif self.keep == "mean":
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
        return self.head(h), h


def verdict_of(keep, n=90, carry=None):
    torch.manual_seed(0)
    model, h = Net(keep), None
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(n):
            x = torch.randn(16, 4)
            out, new = model(x, h)
            h = carry(new) if carry else None
            loss = F.mse_loss(out, x.sum(1, keepdim=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
    verdict = w.diagnose()
    assert not [note for note in verdict.coverage if "a part of Diagnose" in note]
    return verdict


@pytest.mark.parametrize(("keep", "name"), first([("list", "kept"), ("table", "table"), ("mean", "mean")]))
def test_an_attribute_that_keeps_all_graphs_is_named(keep, name):
    verdict = verdict_of(keep)
    (found,) = [x for x in verdict.findings if x.code == "memory.state_kept"]
    assert (found.severity, verdict.primary) == ("warning", found)
    assert found.message.startswith(f"Attribute {name} of the model")


@pytest.mark.parametrize("keep", first(["", "detached state", "recent", "cleared", "numbers"]))
def test_what_is_overwritten_bounded_cleared_or_detached_is_no_finding(keep):
    assert [x.code for x in verdict_of(keep).findings if x.code.startswith(("memory", "loss.reused"))] == []


def train(model, opt, carry, n=9):
    h = None
    for _ in range(n):
        x = torch.randn(16, 4)
        out, h = model(x, h if carry else None)
        loss = F.mse_loss(out, x.sum(1, keepdim=True))
        opt.zero_grad()
        loss.backward(retain_graph=carry == "retained")
        opt.step()


def reused(keep, carry=None):
    torch.manual_seed(0)
    model = Net(keep)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    w = watch(model, opt, Diagnose("ignore", show=False))
    with pytest.raises(RuntimeError) as raised:
        train(model, opt, carry)
    w.close(raised.value)
    return w.diagnose()


def test_a_state_that_is_carried_on_with_its_graph_is_named():
    verdict = reused("state")
    assert (verdict.primary.code, verdict.primary.severity) == ("loss.reused_graph", "error")
    assert "through attribute state" in verdict.primary.message


@pytest.mark.parametrize("carry", ["given", "retained"])
def test_a_state_that_is_given_to_the_model_is_said_to_be_an_input(carry):
    verdict = reused("", carry)
    assert verdict.primary.code == "loss.reused_graph"
    assert "through an input of the model" in verdict.primary.message
    end = "has changed weights" if carry == "retained" else "has freed it"
    assert end in verdict.primary.message


def backward_twice(model, opt):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    loss.backward()


def test_a_second_backward_of_the_same_batch_is_another_error():
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    w = watch(model, opt, Diagnose("ignore", show=False))
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        backward_twice(model, opt)
    w.close(raised.value)
    assert not [x for x in w.diagnose().findings if x.code == "loss.reused_graph"]


def test_marks_keep_no_graph_alive():
    model = Net("")
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, Diagnose("ignore", show=False)):
        for _ in range(8):
            out, _ = model(torch.randn(16, 4))
            out.mean().backward()
            opt.step()
        tensor = weakref.ref(model.last)
        model.last = out = _ = None
        gc.collect()
        assert tensor() is None


def test_a_run_without_events_is_not_ruled_out():
    assert [type(x) for x in FAULTS["memory.state_kept"]().findings(Run())] == [Skipped]
    assert [type(x) for x in FAULTS["loss.reused_graph"]().findings(Run())] == [Skipped]
