"""Check of the scale of the inputs."""

import pytest
import torch
from torch import nn

from hookcb import Diagnose, Learner, diagnose
from hookcb.diagnosis.faults.inputs.scale import InputScale
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.run import Passed
from tests.diagnosis.support import evidence, measured, only, series, weight
from tests.support import in_turn

NAN = float("nan")


def found(columns, rms=1.0, updates=0.5, **kwargs):
    given = evidence(weight(update_ratio=[updates] * 5), **kwargs)
    measured(given, Inputs, columns=[columns] * 3, rms=series([rms] * 3))
    return only(InputScale().findings, given)


def test_one_column_that_stands_out_is_named():
    finding = found([1.0, 2.0, 190_000.0, NAN, 0.0], rms=85_000.0)
    assert (finding.code, finding.severity, finding.value) == ("input.scale", "error", 190_000.0)
    assert finding.message.startswith("Column 2 of the inputs has a root mean square of 1.9e+05")
    assert finding.next_steps[0].endswith("column by column")


def test_a_column_counts_where_the_mean_of_many_columns_is_small():
    assert found([1.0] * 99 + [100.0], rms=10.0).value == 100.0


def test_columns_that_are_all_large_are_not_named_one_by_one():
    assert found([100.0, 200.0, 300.0], rms=216.0).message.startswith("The inputs have")


@in_turn(
    "given",
    [
        {"columns": [1.0, 29.0], "rms": 20.0},
        {"columns": [1.0, 1e5], "rms": 7e4, "updates": 1e-3},
        {"columns": [], "rms": 1.0},
        {"columns": [NAN, NAN], "rms": 1.0},
    ],
    ids=["below the limit", "no harm", "no table", "missing values"],
)
def test_columns_without_scale_or_harm_are_fine(given):
    assert isinstance(found(**given), Passed)


@pytest.mark.parametrize(("rms", "n", "is_told"), [(0.003, 60, True), (0.03, 60, False), (0.003, 49, False)])
def test_tiny_inputs_are_told_if_nothing_is_learned_from_them(rms, n, is_told):
    finding = found([], rms=rms, updates=1e-3, loss=[2.3] * n)
    assert (not isinstance(finding, Passed)) == is_told
    if is_told:
        assert (finding.severity, finding.value) == ("warning", rms)
        assert "root mean square of 0.003 (limit 0.02)" in finding.message
    assert isinstance(found([], rms=rms, loss=[2.3 * 0.97**i for i in range(n)], updates=1e-3), Passed)


def table(scale):
    torch.manual_seed(0)
    x = torch.randn(32, 6)
    y = x.mean(1, keepdim=True)
    x[:, 4] *= scale
    return x, y


def net(*first):
    return nn.Sequential(*first, nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))


def verdict_of(model, scale):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    learn = Learner([table(scale)] * 60, model, nn.functional.mse_loss, opt)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose("ignore", show=False))
    return learn.diagnose()


@pytest.mark.slow
def test_a_training_on_a_table_with_one_large_column_names_that_first():
    primary = verdict_of(net(), 190_000.0).primary
    assert (primary.code, primary.message[:8]) == ("input.scale", "Column 4")


@pytest.mark.slow
def test_a_batch_norm_first_makes_large_columns_harmless():
    assert verdict_of(net(nn.BatchNorm1d(6)), 190_000.0).status == "healthy"


def pixels(scale, norm, lr):
    """Verdict on a siamese net, which compares two images; its head makes large steps."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, 2), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 8), nn.Sigmoid()]
    embed, head = nn.Sequential(*layers), nn.Linear(8, 1)

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = embed, head

        def forward(self, pairs):
            return self.head((self.embed(pairs[:, :1]) - self.embed(pairs[:, 1:])).abs())

    pairs, same = torch.rand(32, 2, 8, 8), torch.arange(32.0).remainder(2)[:, None]
    pairs[::2, 1] = pairs[::2, 0]
    model = Siamese()
    opt, loss_func = (
        torch.optim.Adam(model.parameters(), lr=lr),
        nn.functional.binary_cross_entropy_with_logits,
    )
    learn = Learner([(scale * pairs, same)] * 12, model, loss_func, opt)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose("ignore", show=False))
    return [x.severity for x in learn.diagnose().findings if x.code == "input.scale"]


@pytest.mark.slow
def test_pixels_are_told_only_if_they_do_harm_before_a_normalization():
    """With a batch norm after the convolution, 0 to 255 train as 0 to 1 do; large steps are of the rate."""
    assert pixels(255.0, nn.BatchNorm2d, lr=0.1) == []
    assert pixels(255.0, lambda n: nn.Identity(), lr=0.1) == ["error"]


def test_a_head_that_begins_at_zero_grows_by_its_size_without_harm():
    model = net(nn.BatchNorm1d(6))
    nn.init.zeros_(model[-1].weight)
    assert verdict_of(model, 190_000.0).status == "healthy"


def test_one_batch_shows_it_before_the_training():
    primary = diagnose(net(), table(190_000.0), nn.functional.mse_loss).primary
    assert (primary.code, primary.message[:8]) == ("input.scale", "Column 4")
