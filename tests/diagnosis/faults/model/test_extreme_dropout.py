"""A dropout that leaves almost nothing."""

import pytest
from torch import nn

from hookcb.diagnosis.faults.model.extreme_dropout import ExtremeDropout
from tests.diagnosis.faults.support import followed


@pytest.mark.parametrize(
    ("layer", "is_told"),
    [
        (nn.Dropout(0.9), True),
        (nn.Dropout2d(0.95), True),
        (nn.Dropout(0.5), False),
        (nn.MultiheadAttention(8, 2, dropout=0.9), True),
    ],
)
def test_a_dropout_of_nearly_all_is_seen(layer, is_told):
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.ReLU(), nn.Linear(8, 8))
    seen = followed(ExtremeDropout, model)[0].seen
    assert [(x.layer, x.severity) for x in seen] == [("1", "warning")] * is_told
