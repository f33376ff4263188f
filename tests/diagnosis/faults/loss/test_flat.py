"""loss.flat: losses that stay, fall or vary."""

import math
import random

import pytest
import torch
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.loss.flat import FlatLoss
from hookcb.diagnosis.rules import falls_slowly
from hookcb.diagnosis.run import Passed, Series, Skipped
from tests.diagnosis.faults.loss.support import NAN, losses, noisy
from tests.diagnosis.support import only
from tests.support import first, in_turn, pairs


@in_turn(
    ("level", "guess", "severity"),
    [(2.35, 2.3, "warning"), (9.0, 2.3, "warning"), (0.7, 2.3, "info"), (2.3, NAN, "info")],
)
@in_turn("noise", [0.0, 0.03])
def test_a_loss_that_stays_is_told(level, guess, severity, noise):
    found = only(FlatLoss, losses(noisy([level] * 100, noise), guess=guess))
    assert (found.code, found.severity) == ("loss.flat", severity)
    assert (found.step, found.last_step) == (10, 99)


@in_turn(
    "values",
    [
        noisy([2.3 - 0.005 * i for i in range(100)]),
        [2.3] * 60 + [1.0] * 40,
        [2.3 - 0.3 * i / 100 for i in range(60)],
        [-0.1 - 0.01 * i for i in range(60)],
        [2.3] + [0.5] * 99,
    ],
)
def test_a_loss_that_falls_is_not_flat(values):
    assert isinstance(only(FlatLoss, losses(values, guess=2.3)), Passed)


@in_turn(("n_classes", "share", "bend"), pairs([10, 1000], [0.01, 0.03], [0.5, 1, 3]))
def test_a_loss_that_surely_falls_is_not_flat_however_little(n_classes, share, bend):
    """Steadily, faster at first, or faster at last; guessing is where it begins."""
    guess = math.log(n_classes)
    for n in (60, 150, 1000):
        values = noisy([guess * (1 - share * (i / n) ** bend) for i in range(n)], guess * share / 6)
        given = losses(values, guess=guess)
        assert isinstance(only(FlatLoss, given), Passed)
        assert falls_slowly(given)


@pytest.mark.parametrize("size", [0.1, 0.4])
def test_a_loss_whose_noise_hides_whether_it_falls_is_not_called_flat(size):
    values = noisy([2.3] * 60, size)
    found = only(FlatLoss, losses(values, guess=2.3))
    assert isinstance(found, Skipped)
    assert only(FlatLoss, losses(noisy([2.3] * 1000, 0.1), guess=2.3)).severity == "warning"


def test_noise_is_not_taken_for_a_fall():
    random_ = random.Random(1)
    fell = 0
    for _ in range(200):
        values = [2.3 + random_.gauss(0, 0.02) for _ in range(100)]
        fell += isinstance(only(FlatLoss, losses(values, guess=2.3)), Passed)
    assert fell <= 2  # three standard deviations leave one in seven hundred


def test_a_loss_of_an_unknown_kind_may_be_an_objective_that_need_not_fall():
    values = noisy([2.3] * 100)
    assert "need not fall" in only(FlatLoss, losses(values, "")).reason
    assert only(FlatLoss, losses(values, "mse")).severity == "info"


def test_a_short_run_or_a_warm_up_is_not_called_flat():
    assert isinstance(only(FlatLoss, losses([2.3] * 49)), Skipped)
    rising = Series(list(range(60)), [1e-4 * i for i in range(60)])
    assert isinstance(only(FlatLoss, losses([2.3] * 60, lr=rising)), Skipped)


@pytest.mark.parametrize("sign", first([1, -1]))
def test_a_loss_that_an_optimizer_maximizes_is_not_judged(sign):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(60):
            x = torch.randn(32, 6)
            (sign * nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())).backward()
            opt.step()
            opt.zero_grad()
    verdict = w.diagnose()
    assert not [x for x in verdict.findings if x.code.startswith("loss.")]
    assert "the optimizer maximizes the loss" in " ".join(verdict.coverage)


def opposed(game, n=150):
    """What is said of a loss that cannot fall, as nothing tells the targets, if a game is played."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 2), nn.Linear(2, 1)
    both = torch.optim.SGD(first.parameters(), lr=1e-5), torch.optim.SGD(second.parameters(), lr=1e-5)
    model = second if game == "discriminator" else nn.Sequential(first, second) if game == "turns" else first
    bce = nn.BCEWithLogitsLoss()
    mixed = torch.arange(256.0)[:, None] % 2  # nothing that the inputs tell
    with watch(
        model, both if game == "turns" else both[model is second], Diagnose("ignore", show=False)
    ) as w:
        for i in range(n):
            made = first(torch.randn(256, 4))
            if game == "turns":
                w.report_loss(bce(model(torch.randn(256, 4)), mixed)).backward()
                both[i % 2].step()
            elif game == "discriminator":
                w.report_loss(bce(second(made.detach()), mixed)).backward()
                both[1].step()
                second(made).mean().backward()
                both[0].step()
            elif game in ("generator", "frozen"):
                w.report_loss(bce(second(made), mixed)).backward()
                both[0].step()
                if game == "generator":
                    both[1].step()
            else:
                w.report_loss(bce(made, mixed.expand(-1, 2))).backward()
                both[0].step()
            for opt in both:
                opt.zero_grad()
    found = w.diagnose()
    return [x.severity for x in found.findings if x.code == "loss.flat"], " ".join(found.coverage)


@pytest.mark.parametrize("game", first(["alone", "frozen"]))
def test_a_loss_that_stays_without_an_opponent_is_told(game):
    assert opposed(game)[0] == ["warning"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "why"),
    [
        ("generator", "through another model that is trained"),
        ("discriminator", "another model that gets gradients computes the inputs"),
        ("turns", "two optimizers step in turn"),
    ],
)
def test_a_loss_that_stays_in_a_game_is_not_told(game, why):
    severities, coverage = opposed(game)
    assert severities == []
    assert why in coverage


@pytest.mark.slow
def test_guessing_targets_that_are_all_the_same_is_no_limit():
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(80):
            opt.zero_grad()
            w.report_loss(
                nn.functional.binary_cross_entropy_with_logits(model(torch.randn(32, 4)), torch.ones(32, 1))
            ).backward()
            opt.step()
    assert not [x for x in w.diagnose().findings if x.code == "loss.flat"]
