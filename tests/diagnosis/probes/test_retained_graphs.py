"""Graphs of past batches that are kept alive, in loops that keep them and in loops that do not."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb.diagnosis.probes.retained_graphs import EVERY, KEY, N_TRACKED, RetainedGraphs

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


def loop(keep, n=N_TRACKED + 10, every=5):
    """Observations in a training that calls `keep` with each loss."""
    torch.manual_seed(0)
    model, retained = nn.Linear(3, 2), RetainedGraphs()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    loss = pred = None
    for step in range(n):
        pred = model(X)
        loss = F.mse_loss(pred, Y)
        if retained.is_due(step):
            retained.mark_graph(loss.grad_fn, step)
        opt.zero_grad()
        loss.backward()
        opt.step()
        keep(loss, pred)
        if step % every == 0:
            retained.count_alive()
    retained.count_alive()
    return list(retained.observations())


class Running:
    """A sum that goes on with its graph."""

    def __init__(self):
        self.total = 0.0

    def __call__(self, loss, pred):
        self.total = self.total + loss


def appended():
    losses = []
    return lambda loss, pred: losses.append(loss)


def into_dict():
    rows = []
    return lambda loss, pred: rows.append({"loss": (loss / 2, pred.shape)})


@pytest.mark.parametrize("keep", [appended, Running, into_dict])
def test_losses_that_are_kept_with_their_graph_are_told(keep):
    (found,) = loop(keep())
    assert (found.code, found.value) == ("memory.graphs_kept", N_TRACKED - 2)
    assert f"The graphs of {N_TRACKED - 2} batches since step" in found.text


def detached():
    losses = []
    return lambda loss, pred: losses.append(loss.detach())


def numbers():
    losses = []
    return lambda loss, pred: losses.append(loss.item())


def the_last_two():
    losses = []

    def keep(loss, pred):
        losses.append(loss)
        del losses[:-2]

    return keep


def every_second():
    losses = []
    return lambda loss, pred: losses.append(loss if len(losses) % 2 else None)


def an_epoch():
    """Losses of ten batches, which are averaged and dropped."""
    losses = []

    def keep(loss, pred):
        losses.append(loss)
        if len(losses) == 10:
            losses.clear()

    return keep


@pytest.mark.parametrize("keep", [detached, numbers, the_last_two, every_second, an_epoch])
def test_losses_that_are_dropped_in_time_or_kept_as_numbers_are_no_finding(keep):
    assert loop(keep()) == []


def test_a_loop_that_only_holds_its_last_batch_is_no_finding():
    assert loop(lambda loss, pred: None) == []


def test_fewer_batches_than_it_follows_are_too_few():
    assert loop(appended(), n=N_TRACKED - 3) == []
    assert len(loop(appended(), n=N_TRACKED)) == 1


def test_it_is_told_even_where_the_losses_are_dropped_afterwards():
    losses, retained = [], RetainedGraphs()
    for step in range(N_TRACKED):
        losses.append(torch.ones(3, requires_grad=True).sum())
        retained.mark_graph(losses[-1].grad_fn, step)
    retained.count_alive()
    losses.clear()
    retained.count_alive()
    (found,) = retained.observations()
    assert (found.step, found.value) == (0, N_TRACKED - 2)


def test_the_first_step_it_names_is_one_that_it_follows():
    (found,) = loop(appended(), n=3 * N_TRACKED, every=3 * N_TRACKED - 1)
    assert found.step == 2 * N_TRACKED // EVERY


def test_losses_without_a_graph_are_not_followed():
    retained = RetainedGraphs()
    for step in range(2 * N_TRACKED):
        retained.mark_graph(None, step)
        retained.count_alive()
    assert list(retained.observations()) == []


def test_it_keeps_no_graph_alive_itself():
    x = torch.ones(3, requires_grad=True)
    retained, loss = RetainedGraphs(), (x * 2).sum()
    node = loss.grad_fn
    retained.mark_graph(node, 0)
    token = weakref.ref(node.metadata[KEY])
    assert token() is not None
    del loss, node
    gc.collect()
    assert token() is None


def test_gradients_of_a_noted_loss_are_to_the_bit_as_without():
    x = torch.arange(3.0, requires_grad=True)
    loss = (x.exp() * x).sum()
    RetainedGraphs().mark_graph(loss.grad_fn, 0)
    loss.backward()
    assert torch.equal(x.grad, (x.exp() * x + x.exp()).detach())


def test_graphs_that_are_kept_later_on_are_told_too():
    kept = []
    (found,) = loop(lambda loss, pred: kept.append(loss), n=10 * N_TRACKED)
    assert found.step == 0
    late = []
    n = (EVERY + 2) * N_TRACKED
    calls = iter(range(n))
    (found,) = loop(lambda loss, pred: next(calls) > N_TRACKED and late.append(loss), n=n)
    assert found.step > N_TRACKED
