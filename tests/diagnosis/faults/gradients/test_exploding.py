"""Gradients that explode, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.gradients.exploding import Exploding
from hookcb.diagnosis.run import Passed, Skipped
from tests.diagnosis.support import evidence, gradient, only, series, stack
from tests.support import in_turn


def test_a_gradient_that_grows_towards_the_input_names_the_largest():
    found = only(Exploding().findings, evidence(*stack([1e5, 100.0, 10.0, 1.0, 1.0])))
    assert (found.code, found.severity, found.layer) == ("grad.exploding", "error", "layers.0")
    assert found.value == pytest.approx(1e4)


def test_a_recurrent_layer_with_several_weights_counts_once():
    rnn = [gradient(f"rnn.{k}", i, [1e6] * 8, "RNN", layer="rnn") for i, k in enumerate("ih")]
    found = only(Exploding().findings, evidence(*rnn, gradient("head", 2)))
    assert (found.layer, found.next_steps[0][:4]) == ("rnn", "Clip")


@pytest.mark.parametrize("sizes", [[600.0, 1.0, 1.0, 1.0], [1e-9, 1e-8, 1e-4, 1.0], [500.0, 1.0]])
def test_gradients_of_healthy_or_vanishing_ratios_do_not_explode(sizes):
    assert isinstance(only(Exploding().findings, evidence(*stack(sizes))), Passed)


def jump(after, at=20, height=50.0):
    norms = series([1.0] * at + [height] + [1.0] * 20)
    loss = [2.0] * (at + 1) + [after] * 20
    params = [gradient("a", 0, [0.1] * 41), gradient("b", 1, [0.1] * at + [5.0] + [0.1] * 20)]
    return evidence(*params, steps={"total_norm": norms}, loss=loss)


def test_a_jump_of_the_norm_after_which_the_loss_is_higher_is_found_with_its_layer():
    found = only(Exploding().findings, jump(after=9.0))
    assert (found.severity, found.step, found.layer) == ("warning", 20, "b")
    assert found.value == pytest.approx(50)


@in_turn("given", [jump(2.0), jump(1.0), jump(9.0, height=9.0), jump(9.0, at=4)])
def test_a_jump_without_consequence_or_history_gives_no_finding(given):
    assert isinstance(only(Exploding().findings, given), Passed)


def test_a_single_record_cannot_explode():
    assert isinstance(only(Exploding().findings, evidence(*stack([1e9, 1.0, 1.0], n=1))), Skipped)
