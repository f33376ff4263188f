"""Counts of the labels of all batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.measurements.tally import MAX_ELEMENTS, N_WAITING, Tally, at_path, path_to, saved_labels
from hookcb.diagnosis.measurements.targets import Targets, entropy_of
from tests.support import along, first, fit, in_turn


@pytest.mark.parametrize(
    ("n", "dtype"), along([1, N_WAITING, 2 * N_WAITING + 3], [torch.int64, torch.int32, torch.uint8])
)
def test_all_labels_are_counted(n, dtype):
    torch.manual_seed(0)
    tally, batches = Tally(5), [torch.randint(5, (7, 2)).to(dtype) for _ in range(n)]
    for y in batches:
        tally.add(y)
    expected = torch.bincount(torch.cat(batches).flatten().long(), minlength=5).tolist()
    assert tally.read() == tally.read() == expected
    assert tally.n_batches == n


def test_other_indices_are_left_out():
    tally = Tally(3, ignored=1)
    tally.add(torch.tensor([0, 1, 2, 2, -100, 3, 255]))
    assert tally.read() == [1, 0, 2]


def test_later_changes_of_the_labels_do_not_count():
    tally, y = Tally(2), torch.zeros(4).long()
    tally.add(y)
    y.fill_(1)
    assert tally.read() == [4, 0]


def test_many_labels_are_counted_in_part():
    tally, y = Tally(2), torch.arange(3 * MAX_ELEMENTS).reshape(3, -1) % 2
    tally.add(y)
    assert sum(tally.read()) == MAX_ELEMENTS


def test_labels_are_found_behind_a_loss_that_is_scaled():
    y = torch.tensor([0, 1])
    loss = 1 + F.cross_entropy(nn.Linear(2, 2)(torch.ones(2, 2)), y) / 4
    nll = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    path = path_to(loss.grad_fn, nll)
    assert path == (0, 0)
    assert saved_labels(at_path(loss.grad_fn, path)).tolist() == [0, 1]
    assert path_to(nll, loss.grad_fn) is None
    assert saved_labels(at_path(loss.grad_fn, (0, 5))) is None
    loss.backward()
    assert saved_labels(nll) is None


class Seen(Diagnose):
    """Keeps the counts."""

    def after_fit(self):
        super().after_fit()
        self.targets = self.evidence().measured(Targets)


def data(n, is_sorted=True):
    torch.manual_seed(0)
    y = torch.randint(3, (n, 8))
    y = y.flatten().sort().values.view(n, 8) if is_sorted else y
    return [(torch.randn(8, 4), x) for x in y]


@pytest.mark.slow
def test_a_training_counts_each_batch_of_sorted_labels():
    batches = data(200)
    expected = torch.bincount(torch.cat([y for _, y in batches]), minlength=3).tolist()
    seen = Seen("ignore", show=False)
    fit(Learner(batches, nn.Linear(4, 3), F.cross_entropy, lr=1e-3), 1, cbs=seen)
    assert (seen.targets.counts, seen.targets.n_counted) == (expected, 200)


@pytest.mark.parametrize("is_reported", first([False, True]))
def test_a_plain_loop_counts_each_batch_whether_it_reports_its_loss_or_not(is_reported):
    batches, model, seen = data(200), nn.Linear(4, 3), Seen("ignore", show=False)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, seen) as w:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            if is_reported:
                loss = w.report_loss(loss / 2)
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert (seen.targets.are_fair, seen.targets.n_counted) == (True, 200)
    assert seen.targets.counts == torch.bincount(torch.cat([y for _, y in batches]), minlength=3).tolist()


@pytest.mark.slow
def test_of_labels_that_are_mixed_a_part_is_counted_after_the_first_64_batches():
    seen = Seen("ignore", show=False)
    fit(Learner(data(800, is_sorted=False), nn.Linear(4, 3), F.cross_entropy, lr=1e-3), 1, cbs=seen)
    targets = seen.targets
    assert N_WAITING < targets.n_counted < 400
    assert targets.are_fair
    assert sum(targets.counts) == 8 * targets.n_counted
    assert min(targets.counts) > 0.28 * sum(targets.counts)


@in_turn(
    ("labels", "is_mixed"),
    [
        (lambda i: torch.randint(10, (16,)), True),
        (lambda i: torch.arange(10).roll(i), True),  # as of a balanced choice
        (lambda i: torch.full((16,), i % 10), False),
        (lambda i: torch.randint(2, (16,)) + 2 * (i % 5), False),
        (lambda i: torch.zeros(16).long(), False),  # the others may come
        (lambda i: torch.randint(10, (1,)), False),  # of which no two can be compared
        (lambda i: torch.randint(9 + (i > 100), (16,)), False),  # a class that comes late
    ],
)
def test_labels_are_mixed_if_their_batches_look_as_drawn_at_random(labels, is_mixed):
    torch.manual_seed(0)
    tally = Tally(10)
    for i in range(2 * N_WAITING):
        tally.add(labels(i))
    assert tally.is_mixed == is_mixed


def test_other_targets_are_not_counted():
    batches = [(x, y.float()[:, None].expand(-1, 3)) for x, y in data(20)]
    for loss_func in (F.mse_loss, F.cross_entropy):
        seen = Seen("ignore", show=False)
        fit(Learner(batches, nn.Linear(4, 3), loss_func, lr=1e-3), 1, cbs=seen)
        assert (seen.targets.counts, seen.targets.n_counted) == ([], 0)


def test_the_entropy_of_counts_is_the_loss_of_their_shares():
    counts, y = [1, 0, 3], torch.tensor([0, 2, 2, 2])
    for smoothing in (0.0, 0.1):
        shares = torch.tensor([(1 - smoothing) * k / 4 + smoothing / 3 for k in counts])
        scores = shares.clamp_min(1e-30).log().expand(4, 3)
        loss = F.cross_entropy(scores, y, label_smoothing=smoothing)
        assert entropy_of(counts, smoothing) == pytest.approx(float(loss), rel=1e-4)
