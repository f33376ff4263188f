"""Labels that the loss ignores."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from tests.support import in_turn

CODE, NAN = "label.ignored", "nonfinite.first"


def plain(labels, loss=F.cross_entropy):
    """The verdict of a plain loop with these labels, batch by batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for y in labels:
            loss(model(torch.randn(len(y), 5)), y).backward()
            opt.step()
            opt.zero_grad()
    return w.diagnose()


def masked(n_batches, of=lambda i: True, index=-100):
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(3, (8,), generator=generator) for _ in range(n_batches))
    return [y.fill_(index) if of(i) else y for i, y in enumerate(drawn)]


def codes(verdict):
    return [x.code for x in verdict.findings]


def zero_if_none(scores, y):
    return F.cross_entropy(scores, y, reduction="sum") / (y >= 0).sum().clamp(min=1)


def learned(labels, loss=F.cross_entropy):
    """The verdict of a Learner with these labels."""
    learn = Learner([(torch.randn(8, 5), y) for y in labels], nn.Linear(5, 3), loss, lr=0.1)
    learn.fit(1, cbs=Diagnose(show=False))
    return learn.diagnose()


@in_turn("index", [-100, 7])
def test_if_each_is_ignored_that_is_the_verdict(index):
    with pytest.warns(UserWarning, match=f"step 0: all targets of its batch are {index}"):
        verdict = plain(masked(20, index=index), lambda p, y: F.cross_entropy(p, y, ignore_index=index))
    assert codes(verdict)[:2] == [CODE, NAN]
    assert f"are {index}, the index that the loss ignores" in verdict.findings[0].message


@in_turn("trained", [learned, plain])
def test_a_loss_that_is_0_without_a_label_is_seen(trained):
    with pytest.warns(UserWarning, match="All 80 targets of the 10 inspected batches are -100"):
        verdict = trained(masked(20), zero_if_none)
    assert codes(verdict)[0] == CODE


def test_one_batch_is_the_origin_of_a_loss_that_is_nan():
    with pytest.warns(UserWarning, match="step 12: all targets of its batch are -100"):
        verdict = plain(masked(20, of=lambda i: i == 12))
    assert CODE not in codes(verdict)
    (finding,) = [x for x in verdict.findings if x.code == NAN]
    assert (finding.step, "a mean of nothing, 0/0" in finding.message) == (12, True)


@in_turn("of", [lambda i: False, lambda i: i % 5 != 4, lambda i: i > 2])
def test_some_batches_without_a_label_are_none(of):
    verdict = learned(masked(20, of), zero_if_none)
    assert not {CODE, NAN} & set(codes(verdict))
    assert "labels that are all ignored" in verdict.ruled_out


def test_class_weights_of_0_are_not_taken_for_labels_that_are_ignored():
    with pytest.warns(UserWarning, match="The loss is nan"):
        verdict = plain(masked(20, lambda i: False), lambda p, y: F.cross_entropy(p, y, torch.zeros(3)))
    assert CODE not in codes(verdict)
    assert not any("ignores" in x.message for x in verdict.findings)


def test_an_output_that_is_nan_is_not_taken_for_labels_that_are_ignored():
    with pytest.warns(UserWarning, match="The loss is nan"):
        verdict = plain(masked(20, lambda i: False), lambda p, y: F.cross_entropy(p * math.nan, y))
    assert CODE not in codes(verdict)
