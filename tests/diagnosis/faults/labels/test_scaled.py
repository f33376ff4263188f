"""Labels that were divided by 255 with the pixels."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import diagnose
from hookcb.diagnosis.faults.labels.scaled import ScaledLabels
from hookcb.diagnosis.run import Run
from tests.support import in_turn

PIXELS = torch.randint(0, 256, (32, 1, 4, 4), generator=torch.Generator().manual_seed(0)).float()
DIGITS = torch.arange(32).remainder(10).float()


def scaled(x, y):
    fault = ScaledLabels()
    fault.on_first_graph(Run(loop=SimpleNamespace(xb=(x,), yb=(y,), train_iter=0)))
    return [found.message for found in fault.seen]


@pytest.mark.parametrize("y", [DIGITS / 255, DIGITS[:, None] / 255])
def test_labels_divided_by_255_with_the_pixels_are_named(y):
    (text,) = scaled(PIXELS / 255, y)
    assert "whole numbers from 0 to 9" in text


def test_scaled_labels_are_a_warning_before_training():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    verdict = diagnose(net, (PIXELS / 255, DIGITS[:, None] / 255), F.mse_loss)
    assert (verdict.primary.code, verdict.status) == ("label.scaled", "suspect")


@in_turn(
    ("x", "y"),
    [
        (PIXELS / 255, DIGITS),
        (PIXELS / 255, DIGITS.long()),
        (PIXELS, DIGITS / 255),
        (PIXELS / 256, DIGITS / 256),
        (PIXELS / 255, DIGITS * 0),
        (PIXELS / 255, PIXELS.mean((1, 2, 3)) / 255),  # brightness
        (PIXELS / 255, PIXELS[:, :, 0, 0] / 255),  # of a pixel
        (PIXELS / 255, PIXELS / 255),
    ],
)
def test_other_targets_are_not_scaled_labels(x, y):
    assert scaled(x, y) == []
