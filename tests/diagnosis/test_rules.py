"""Findings have the place, kind and steps of what they are made from; trends are told from noise."""

import math
import random
from functools import partial
from operator import lt

import pytest

from hookcb.activations.stats import LAYER_STATS
from hookcb.diagnosis.faults.head.stuck import StuckHead
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.reader import SOURCES
from hookcb.diagnosis.rules import falls_slowly, persistent, persistent_max
from hookcb.diagnosis.run import Layer, Param, Run, Series, Span
from hookcb.diagnosis.verdict import Finding
from hookcb.gradients.stats import GRAD_STATS, STEP_STATS
from tests.diagnosis.support import measured, series
from tests.support import in_turn

LAYER = Layer("net.0", "Linear", "Linear 8→4", 0)
PARAM = Param("net.0.weight", "net.0", "Linear", "Linear 8→4", 0, (4, 8))


@in_turn(
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
    found = StuckHead().finding("dead", at=at)
    assert (found.layer, found.param, found.kind) == place


@in_turn(
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
    found = StuckHead().finding("dead", when=when)
    assert (found.step, found.last_step) == steps


def test_the_rest_is_given_as_it_is():
    found = StuckHead().finding("m", "info", value=1.0, limit=2.0, causes=("c",), next_steps=("n",))
    about = {"value": 1.0, "limit": 2.0, "causes": ("c",), "next_steps": ("n",), "consequence_of": ""}
    about["headline"] = StuckHead.headline
    assert found == Finding(StuckHead.code, "info", message="m", **about)
    assert math.isnan(StuckHead().finding("m").limit)


def unknown(n):
    return Series(list(range(n)), [math.nan] * n)


@pytest.mark.parametrize("n", [1, 12, 80])
def test_numbers_of_which_none_is_known_find_nothing_and_rule_nothing_out(n):
    """NaN is neither above nor below a limit, and most lists of what is wrong are empty."""
    every = (*LAYER_STATS, "spread", "saturated", "grad_nonfinite")
    kinds = ("Linear", "Linear", "Embedding", "LayerNorm")
    params = {
        f"{i}.weight": Param(
            f"{i}.weight", f"{i}", kind, kind, i, (16, 16), i, weight_decay=0.1,
            optimizer=i % 2, stats=dict.fromkeys(GRAD_STATS, unknown(n)),
        ) for i, kind in enumerate(kinds)
    }  # fmt: skip
    layers = {
        f"{i}": Layer(f"{i}", kind, kind, i, dict.fromkeys(every, unknown(n))) for i, kind in enumerate(kinds)
    }
    curves = dict.fromkeys(
        ("lr", "loss"),
        unknown(n),
    )
    given = Run(
        sources=set(SOURCES),
        n_batches=n,
        n_looked=n,
        layers=layers,
        params=params,
        steps=dict.fromkeys(STEP_STATS, unknown(n)),
        n_steps=n,
        **curves,
    )
    vars(given.measured(Curves)).update(
        {name: unknown(n) for name in ("waits", "batches", "memory")}, losses={0: unknown(n), 1: unknown(n)}
    )
    measured(given, Loss, kind="mse", penalty=unknown(n))
    measured(given, StuckHead, shares=unknown(n))
    inputs = given.measured(Inputs)
    inputs.std, inputs.rms, inputs.sizes = unknown(n), unknown(n), unknown(n)
    inputs.columns = [[math.nan] * 4] * 3
    verdict = judge(given)
    assert verdict.findings == ()
    assert not [text for text in verdict.ruled_out if "nan" in text.split("(")[-1]]


def test_persistent_max_is_what_persistent_compares():
    for seed in range(30):
        draw = random.Random(seed)
        values = [draw.random() for _ in range(draw.randint(0, 12))]
        series, of = Series(list(range(len(values))), values), draw.randint(1, 6)
        n = draw.randint(1, of)
        most = persistent_max(series, n, of)
        assert math.isnan(most) == (len(values) < n)
        for limit in (*values, 0.5):
            assert (persistent(series, partial(lt, limit), n, of) is not None) == (most > limit)


def loss(values, guess):
    random_ = random.Random(0)
    noisy = [x + random_.gauss(0, 0.01) for x in values]
    return measured(Run(loss=series(noisy)), Loss, kind="cross-entropy", guess=guess)


@pytest.mark.parametrize(
    "values", [[2.3] * 100, [2.3 - 0.01 * i for i in range(100)], [2.3 - 1e-3 * i for i in range(49)]]
)
def test_a_flat_a_fast_and_a_short_loss_do_not_fall_slowly(values):
    assert not falls_slowly(loss(values, 2.3))
    assert not falls_slowly(loss([2.3 - 1e-4 * i for i in range(100)], math.nan))
