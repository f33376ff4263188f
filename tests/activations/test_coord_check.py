"""coord_check tells which layers keep their size in wider models."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import CoordCheck, coord_check

torch.manual_seed(0)
BATCH = torch.randn(32, 8), torch.randint(3, (32,))
WIDTHS = 64, 128, 256


def standard(width):
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


class Readout(nn.Linear):
    """A last layer in the maximal update parametrization: weights of a fixed size, divided by the width."""

    def forward(self, x):
        return F.linear(x * 64 / self.in_features, self.weight, self.bias)


def maximal_update(width):
    model = standard(width)
    model[4] = Readout(width, 3)
    nn.init.normal_(model[4].weight, std=1 / 8)
    hidden = model[2].weight
    others = [p for p in model.parameters() if p is not hidden]
    return model, torch.optim.Adam([{"params": others}, {"params": [hidden], "lr": 0.64 / width}], lr=0.01)


@pytest.fixture(scope="module")
def of_standard():
    return coord_check(standard, WIDTHS, BATCH, F.cross_entropy)


def test_updates_of_hidden_layers_grow_in_the_standard_parametrization(of_standard):
    assert [row.name for row in of_standard] == ["0", "1", "2", "3", "4"]
    assert [row.says for row in of_standard] == ["", "", *["update grows"] * 3]
    assert not of_standard.is_stable
    assert all(abs(row.output_slope) < 0.25 for row in of_standard.rows[:-1])
    assert 0.6 < of_standard["4"].update_slope < 1.1  # Adam: with the width


def test_the_maximal_update_parametrization_keeps_all_sizes():
    check = coord_check(maximal_update, WIDTHS, BATCH, F.cross_entropy)
    assert check.is_stable
    assert check["4"].output_slope < 0  # which a last layer may
    assert all(abs(row.update_slope) < 0.1 for row in check)


def test_sizes_are_those_of_the_output_and_of_what_steps_change():
    def make_model(width):
        model = nn.Linear(8, width, bias=False)
        nn.init.ones_(model.weight)
        return model

    check = coord_check(
        make_model, (2, 4), (torch.ones(5, 8), torch.zeros(())), _half_sum, torch.optim.SGD, 0.1, steps=1
    )
    (row,) = check
    assert row.outputs == pytest.approx((8.0, 8.0))
    assert row.updates == pytest.approx((0.1 * 8 * 5, 0.1 * 8 * 5))  # each weight falls by 0.1 · 5
    assert row.output_slope == pytest.approx(0.0)


def _half_sum(pred, _):
    return pred.sum()


def test_a_layer_whose_update_vanishes_or_is_not_finite_is_told():
    class Shrunk(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.small, self.bad = nn.Linear(8, width), nn.Linear(8, width)

        def forward(self, x):
            return (self.small(x) / self.small.out_features).sum(1) + 0 * self.bad(x).sum(1)

    check = coord_check(Shrunk, WIDTHS, (BATCH[0], torch.zeros(32)), F.mse_loss, torch.optim.SGD, 0.01)
    assert check["small"].says == "update vanishes"
    assert check["bad"].says == "update is 0 or not finite"


def test_models_that_take_keywords_and_give_their_loss_are_checked():
    class WithLoss(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body, self.head, self.drop = nn.Linear(8, width), nn.Linear(width, 3), nn.Dropout(0.1)

        def forward(self, x, y):
            logits = self.head(self.drop(self.body(x)))
            self.loss = F.cross_entropy(logits, y)
            return self

    check = coord_check(WithLoss, WIDTHS, {"x": BATCH[0], "y": BATCH[1]}, seeds=1)
    assert [row.name for row in check] == ["body", "drop", "head"]
    assert check["drop"].update_slope == pytest.approx(check["body"].update_slope, abs=0.1)  # the same masks


def test_the_random_state_stays_as_it_was():
    before = torch.get_rng_state()
    coord_check(standard, (8, 16), BATCH, F.cross_entropy, seeds=1, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_prints_a_table_and_draws_a_figure(of_standard):
    assert isinstance(of_standard, CoordCheck)
    shown = str(of_standard)
    assert "size of outputs, and of their change in 3 steps, by width" in shown
    assert "update grows" in shown
    pytest.importorskip("matplotlib")
    outputs, updates = of_standard.plot().axes
    assert [line.get_label() for line in updates.lines] == ["0", "1", "2", "3", "4"]
    assert list(outputs.lines[0].get_xdata()) == list(WIDTHS)
    assert list(updates.lines[4].get_ydata()) == list(of_standard["4"].updates)


@pytest.mark.parametrize(
    ("make_model", "widths", "error", "says"),
    [
        (standard, (64,), ValueError, "widths must be two or more"),
        (standard, (64, 0), ValueError, "widths"),
        (
            lambda width: width,
            WIDTHS,
            TypeError,
            "make_model must return a model, or (model, optimizer), got 64",
        ),
        (
            lambda n: nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)]),
            (1, 2),
            ValueError,
            "same names at each width",
        ),
    ],
)
def test_wrong_arguments_are_refused(make_model, widths, error, says):
    with pytest.raises(error, match=says.replace("(", r"\(").replace(")", r"\)")):
        coord_check(make_model, widths, BATCH, F.cross_entropy)
