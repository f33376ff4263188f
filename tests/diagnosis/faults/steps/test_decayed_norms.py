"""Weight decay of norms and embeddings, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.steps.decayed_norms import DecayedNorms
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import evidence, measured, only, weight


def transformer(norm, matrix, **kwargs):
    params = [
        weight("norm", "LayerNorm", (16,), weight_decay=norm),
        weight("body", "Linear", weight_decay=matrix),
        weight("tokens", "Embedding", weight_decay=norm),
    ]
    run = evidence(*params, n_steps=1000, **{"lr": 1e-3} | kwargs)
    return measured(run, Operations, has_attention=True)


def test_decay_of_norms_and_embeddings_is_noted_with_its_sum():
    found = only(DecayedNorms().findings, transformer(norm=0.1, matrix=0.1))
    assert (found.code, found.severity) == ("wd.norms", "info")
    assert found.value == pytest.approx(0.1)
    assert "2 weights of norms and embeddings (norm.weight, tokens.weight)" in found.message


@pytest.mark.parametrize(("norm", "lr"), [(0.0, 1e-3), (0.01, 1e-3), (0.1, 1e-4)])
def test_decay_of_matrices_alone_or_of_a_small_sum_is_not_noted(norm, lr):
    assert isinstance(only(DecayedNorms().findings, transformer(norm=norm, matrix=0.1, lr=lr)), Passed)


def test_decay_of_norms_is_not_judged_without_attention():
    given = transformer(norm=0.1, matrix=0.1)
    given.measured(Operations).has_attention = False
    assert isinstance(only(DecayedNorms().findings, given), Skipped)
