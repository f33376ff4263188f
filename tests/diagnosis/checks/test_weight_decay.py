"""Weight decay, on made-up numbers."""

import pytest

from hookcb.diagnosis.checks.weight_decay import decayed_norms, dominating_decay
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.checks.support import evidence, only, weight


@pytest.mark.parametrize(
    "param",
    [
        weight(weight_decay=100.0, clipped_norm=[1.0] * 40),
        weight(weight_decay=100.0, clipped_norm=[1.0] * 12, is_adaptive=True, update_ratio=[0.014] * 12),
        weight(  # AdamW in balance: its gradient holds the decay, of weights that are almost gone
            weight_decay=100.0, is_adaptive=True, lr=1e-3, weight_norm=[2.0 * 0.9**i for i in range(40)],
            update_ratio=[0.3] * 40, drift=[1 - 0.9**i for i in range(40)],
        ),
    ],
)  # fmt: skip
def test_decay_that_makes_up_the_step_or_has_eaten_the_weights_is_told(param):
    found = only(dominating_decay, evidence(param, lr=1e-3))
    assert (found.code, found.severity) == ("wd.dominates", "error")
    assert "100" in found.causes[0]


@pytest.mark.parametrize(
    "param",
    [
        weight(weight_decay=0.0, optimizer=0),
        weight(weight_decay=5e-4),
        weight(weight_decay=0.1, clipped_norm=[0.01] * 40, is_adaptive=True, update_ratio=[3e-3] * 40),
        weight(weight_decay=9.0, clipped_norm=[1.0] * 10 + [10.0] * 30),
        weight(weight_decay=5e-4, weight_norm=[0.01] * 40, drift=[5.0] * 40),
    ],
)
def test_decay_of_usual_size_is_no_finding(param):
    assert isinstance(only(dominating_decay, evidence(param, lr=1e-3)), Passed)


def test_the_decay_of_an_optimizer_that_is_not_known_is_not_called_none():
    given = evidence(weight(weight_decay=0.0, optimizer=0), is_by_hand=True)
    assert only(dominating_decay, given) == Skipped("the optimizer of the parameters is not known")


def test_decay_needs_ten_records():
    assert isinstance(
        only(dominating_decay, evidence(weight(weight_decay=9.0, clipped_norm=[1.0] * 9))), Skipped
    )


# ---- norms and embeddings


def transformer(norm, matrix, **kwargs):
    params = [
        weight("norm", "LayerNorm", (16,), weight_decay=norm),
        weight("body", "Linear", weight_decay=matrix),
        weight("tokens", "Embedding", weight_decay=norm),
    ]
    return evidence(*params, observed={"attention"}, n_steps=1000, **{"lr": 1e-3} | kwargs)


def test_decay_of_norms_and_embeddings_is_noted_with_its_sum():
    found = only(decayed_norms, transformer(norm=0.1, matrix=0.1))
    assert (found.code, found.severity) == ("wd.norms", "info")
    assert found.value == pytest.approx(0.1)
    assert "2 weights of norms and embeddings (norm.weight, tokens.weight)" in found.message


@pytest.mark.parametrize(("norm", "lr"), [(0.0, 1e-3), (0.01, 1e-3), (0.1, 1e-4)])
def test_decay_of_matrices_alone_or_of_a_small_sum_is_not_noted(norm, lr):
    assert isinstance(only(decayed_norms, transformer(norm=norm, matrix=0.1, lr=lr)), Passed)


def test_decay_of_norms_is_not_judged_without_attention():
    given = transformer(norm=0.1, matrix=0.1)
    given.observed = set()
    assert isinstance(only(decayed_norms, given), Skipped)
