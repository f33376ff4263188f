"""Memory that stays from step to step is found, with its layer; what only waits for a while is none."""

from collections import deque

import pytest
import torch
from torch import nn

from hookcb import Callback, CancelBackwardException
from hookcb.profiling.memory.callback import MemoryStats
from hookcb.profiling.memory.growth import Growth, fit_line, growth_of
from tests.profiling.memory.support import FLOAT, batches_for, learner_for, mlp, watch

BS, N = 8, 12


def grows(growth):
    """Whether the slope is clearly above its standard error."""
    return growth.slope > 4 * growth.error


class Keeps(Callback):
    """Keeps something of each batch, or of the last few."""

    def __init__(self, what, most=None):
        super().__init__()
        self.what, self.kept = what, deque(maxlen=most)

    def after_loss(self):
        self.kept.append(self.what(self))


class NoBackward(Callback):
    order = 10

    def before_backward(self):
        raise CancelBackwardException


@pytest.mark.parametrize("every", [1, 3])
def test_a_list_of_losses_is_found(every):
    growth = watch(mlp(), batches_for(N), [Keeps(lambda cb: cb.loss)], every).growth()
    assert grows(growth)
    assert growth.slope == pytest.approx(FLOAT)
    assert list(growth.layers) == ["(loss)"]
    assert "keep loss.item()" in str(growth)


def test_a_list_of_losses_as_numbers_is_none():
    growth = watch(mlp(), batches_for(N), [Keeps(lambda cb: cb.loss.item())]).growth()
    assert not grows(growth)
    assert not growth.layers
    assert str(growth) == "memory growth: 0 bytes per step (standard error 0 bytes)"


@pytest.mark.parametrize("what", [lambda cb: cb.pred, lambda cb: cb.pred.detach()[0]], ids=["pred", "a view"])
def test_a_list_of_predictions_is_found_with_the_layer_that_made_them(what):
    growth = watch(mlp(), batches_for(N), [Keeps(what)]).growth()
    assert growth.slope == pytest.approx(BS * 3 * FLOAT)
    assert list(growth.layers) == ["2"]
    assert "96 bytes per step (standard error 0 bytes); still alive from earlier batches: layer 2 " in str(
        growth
    )


def test_a_loss_that_keeps_the_whole_graph_is_found_with_all_its_layers():
    stats = watch(mlp(), batches_for(N), [Keeps(lambda cb: cb.loss), NoBackward()])
    growth = stats.growth()
    assert growth.slope == pytest.approx(stats.totals.kept + FLOAT)
    assert set(growth.layers) == {"1", "(loss)"}  # what the linear layers put out is gone, or is ReLU's


@pytest.mark.parametrize("n", [1, 3])
def test_what_stays_for_a_few_batches_is_none(n):
    growth = watch(mlp(), batches_for(20), [Keeps(lambda cb: cb.pred, most=n)]).growth()
    assert not grows(growth)


class Caches(nn.Module):
    """Makes a table in its first forward, and keeps it."""

    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(6, 3), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(1, 6) * 2
        return self.fc(x * self.table)


def test_a_cache_is_no_growth():
    stats = watch(Caches(), batches_for(N))
    assert not grows(stats.growth())
    assert not stats.growth().layers


class Remembers(nn.Module):
    """A layer that keeps what it puts out."""

    def __init__(self):
        super().__init__()
        self.fc, self.head, self.memory = nn.Linear(6, 4), nn.Linear(4, 3), []

    def forward(self, x):
        self.memory.append(self.fc(x))
        return self.head(self.memory[-1])


def test_a_layer_that_remembers_is_found():
    growth = watch(Remembers(), batches_for(N)).growth()
    assert growth.slope == pytest.approx(BS * 4 * FLOAT)
    assert list(growth.layers) == ["fc"]


def test_nothing_is_kept_alive_by_being_watched():
    model = mlp()
    learn, stats = learner_for(model, batches_for(3)), MemoryStats(every=1)
    alive = []

    def count(cb):
        alive.append(cb.memory_stats._watch.ledger.alive)

    with learn.no_logging():
        learn.fit(1, cbs=[stats, Callback(before_batch=lambda cb: count(cb.learn))])
    # before the next forward the prediction of the last one is there, and the loss with its graph
    assert alive == [0, BS * 3 * FLOAT + FLOAT, BS * 3 * FLOAT + FLOAT]


def test_a_few_looks_tell_nothing():
    growth = watch(mlp(), batches_for(2), [Keeps(lambda cb: cb.pred)]).growth()
    assert growth.n_looks == 2
    assert str(growth) == "memory growth is unknown: 2 of 3 batches needed were watched"
    assert str(Growth()) == "memory growth is unknown: 0 of 3 batches needed were watched"


def test_a_line_is_fitted_by_least_squares():
    slope, error = fit_line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
    assert (slope, error) == (2.0, 0.0)
    x = torch.arange(6.0, dtype=torch.double)
    y = torch.tensor([1.0, 2.5, 2.0, 4.5, 4.0, 7.0], dtype=torch.double)
    design = torch.stack([x, torch.ones_like(x)], 1)
    solution = torch.linalg.lstsq(design, y[:, None]).solution
    variance = (design @ solution - y[:, None]).square().sum() / 4 * torch.linalg.inv(design.T @ design)[0, 0]
    assert fit_line(list(zip(x.tolist(), y.tolist(), strict=True))) == pytest.approx(
        (solution[0].item(), variance.sqrt().item())
    )
    assert fit_line([(1.0, 1.0)]) == fit_line([]) == (0.0, 0.0)


def test_the_allocator_counts_by_step():
    looks = [(50 * i, 0, 10**9 + 50 * i * 1200) for i in range(8)]
    growth = growth_of(looks, {})
    assert growth.source == "allocator"
    assert growth.slope == pytest.approx(1200)
    assert grows(growth)


def test_what_the_allocator_shows_by_chance_is_no_growth():
    noise = [5, -3, 4, -6, 2, 6, -4, 3, -5, 1, 4, -2]
    assert not grows(growth_of([(i, 0, 10**9 + 10**6 * x) for i, x in enumerate(noise)], {}))
