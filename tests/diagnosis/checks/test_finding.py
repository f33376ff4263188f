"""Findings of checks have place, kind and steps of what they are made from."""

import math

import pytest

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.evidence import Layer, Param, Series
from hookcb.diagnosis.trends import Span
from hookcb.diagnosis.verdict import Finding

LAYER = Layer("net.0", "Linear", "Linear 8→4", 0)
PARAM = Param("net.0.weight", "net.0", "Linear", "Linear 8→4", 0, (4, 8))


@pytest.mark.parametrize(
    ("at", "place"),
    [
        (LAYER, ("net.0", "", "Linear 8→4")),
        (PARAM, ("net.0", "net.0.weight", "Linear 8→4")),
        ("net", ("net", "", "")),
        ("", ("", "", "")),
        (None, ("", "", "")),
    ],
)
def test_the_place_is_that_of_the_layer_or_the_parameter(at, place):
    found = finding("unit.dead", "error", at=at, message="dead")
    assert (found.layer, found.param, found.kind) == place


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        (Span(3, 9, 4), (3, 9)),
        (Series([2, 5, 7], [0.0, 0.0, 0.0]), (2, 7)),
        (0, (0, 0)),
        ((4, None), (4, None)),
        ((None, None), (None, None)),
    ],
)
def test_the_steps_are_the_first_and_the_last(when, steps):
    found = finding("unit.dead", "error", when=when, message="dead")
    assert (found.step, found.last_step) == steps


def test_the_rest_is_given_as_it_is():
    found = finding("a.b", "info", value=1.0, limit=2.0, message="m", causes=("c",), next_steps=("n",))
    assert found == Finding(
        "a.b", "info", value=1.0, limit=2.0, message="m", causes=("c",), next_steps=("n",), consequence_of=""
    )
    assert math.isnan(finding("a.b", "info", message="m").limit)
