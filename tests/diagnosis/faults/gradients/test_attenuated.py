"""Gradients that vanish, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.gradients.attenuated import Attenuated
from hookcb.diagnosis.run import Layer, Passed, Skipped
from tests.diagnosis.support import evidence, gradient, only, stack
from tests.support import in_turn


def test_a_gradient_that_falls_from_layer_to_layer_names_the_lowest_one():
    found = only(Attenuated().findings, evidence(*stack([0.05**k for k in range(5, -1, -1)])))
    assert (found.code, found.severity, found.layer) == ("grad.attenuated", "error", "layers.0")
    assert found.value == pytest.approx(0.05**5)
    assert (found.step, found.last_step) == (0, 19)
    assert "×0.05 per layer over 5 layers" in found.message


def test_a_gradient_that_falls_at_once_names_the_layer_at_which_it_falls():
    found = only(Attenuated().findings, evidence(*stack([1e-5, 2e-5, 1e-5, 0.7, 1.0])))
    assert (found.severity, found.layer) == ("warning", "layers.2")


def test_the_activations_in_series_are_named_as_the_cause():
    layers = {f"act{i}": Layer(f"act{i}", "Sigmoid", "Sigmoid", i) for i in range(8)}
    found = only(Attenuated().findings, evidence(*stack([1e-7, 1.0]), layers=layers))
    assert found.causes[0].startswith("8 Sigmoid layers in series")


@in_turn(
    "params",
    [
        stack([3e-4, 0.1, 1.0]),
        stack([1.0, 1e-6]),  # what is small is nearest to the loss: nothing is behind it
        [gradient("lora_a", 0, [0.0] * 2 + [1e-5] + [0.01] * 17), gradient("head", 1)],
        [gradient("body", 0, [0.0] * 20), gradient("mid", 1), gradient("head", 2)],  # of unit.dead
        [gradient("expert", 0, ([0.0] * 4 + [0.5]) * 5), gradient("head", 1, [1.0] * 25)],
        [gradient("emb", 0, [1e-9] * 20, kind="Embedding"), gradient("mid", 1), gradient("head", 2)],
        [gradient("mid", 0, [1e-6] * 10 + [0.1] * 10), gradient("head", 1)],  # it got over it
    ],
)
def test_gradients_that_are_small_by_nature_give_no_finding(params):
    assert isinstance(only(Attenuated().findings, evidence(*params)), Passed)


def test_records_after_convergence_do_not_count():
    loss = [1.0] * 10 + [0.001] * 90
    late = [0.1] * 26 + [1e-9] * 66  # the moving average takes a while
    params = [gradient("body", 0, late), gradient("head", 1, [1.0] * 92)]
    assert isinstance(only(Attenuated().findings, evidence(*params, loss=loss)), Passed)
    assert only(Attenuated().findings, evidence(*params)).layer == "body"


def test_four_records_are_too_few_to_find_vanishing_gradients():
    assert isinstance(only(Attenuated().findings, evidence(*stack([1e-9, 1.0], n=4))), Skipped)
