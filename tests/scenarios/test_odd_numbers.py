"""No fault raises, whatever numbers it is given."""

import math
import random

import hookcb.diagnosis.judge  # noqa: F401  # which registers all faults
from hookcb.diagnosis.fault import FAULTS, doc_of
from hookcb.diagnosis.faults.ranks.straggler import SlowRank
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.dead_units import Dead, DeadUnits
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Absent, Layer, Param, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.processes.stragglers import Straggler

ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-320, 1e300, -1e300, 1.0, -1.0, 1e-9)
STATS = ("rms", "norm", "clipped_norm", "weight_norm", "update_ratio", "drift", "zero_rows", "abs_max")
OUTPUTS = ("std", "abs_max", "zeros", "spread", "saturated")
OF_STEPS = ("total_norm", "clip_coef", "lr", "scale", "skipped")
SHAPES = ((), (0,), (4,), (0, 3), (1, 1), (8, 8), (64, 64))


class Odd:
    """Makes up evidence of odd numbers; `values` are what is drawn from."""

    def __init__(self, seed, values, n):
        self.random, self.values, self.n = random.Random(seed), values, n

    def number(self):
        return self.random.choice(self.values)

    def series(self):
        n = self.n if self.n < 2 else self.random.choice((0, 1, self.n, self.n))
        steps = range(n) if self.random.random() < 0.8 else [0] * n
        return Series(list(steps), [self.number() for _ in range(n)])

    def param(self, i):
        name, shape = f"l{i % 4}.w{i}", self.random.choice(SHAPES)
        kind, place = self.random.choice(("Linear", "RNN", "Embedding")), self.random.choice((None, i))
        stats = {stat: self.series() for stat in STATS if self.random.random() < 0.9}
        numbers = {key: self.number() for key in ("resolution", "lr", "weight_decay")}
        flags = {"is_optimized": bool(i % 3), "is_adaptive": bool(i % 2)}
        return Param(name, name[:2], kind, "", i, shape, place, stats=stats, **numbers, **flags)

    def layer(self, i):
        kind = self.random.choice(("Sigmoid", "Linear", "Embedding"))
        return Layer(f"l{i}", kind, "", i, {stat: self.series() for stat in OUTPUTS}, self.number())

    def evidence(self):
        given = ("lr", "loss")
        run = Run(
            layers={x.name: x for x in map(self.layer, range(5))},
            params={x.name: x for x in map(self.param, range(8))},
            steps={stat: self.series() for stat in OF_STEPS},
            n_steps=self.random.choice((0, 1, 100)),
            **{name: self.series() for name in given},
        )
        loss, kinds = run.measured(Loss), ("", "cross-entropy", "nll", "mse")
        loss.kind, loss.guess = self.random.choice(kinds), self.number()
        vars(run.measured(Curves)).update({name: self.series() for name in ("waits", "batches", "memory")})
        vars(run.measured(Inputs)).update(
            {name: self.series() for name in ("std", "rms", "sizes", "nonfinite")}
        )
        run.measured(SlowRank).slowest = self.rank()
        dead = {name: Dead(self.number(), self.number(), 3, 40, 0, 16) for name in run.params}
        run.measured(DeadUnits).of = dead
        return run

    def rank(self):
        seconds = [self.number() for _ in range(5)]
        return Straggler(3, "a", *seconds[:4], "data", seconds[4], 4, self.random.choice((2, 5)))


def is_sound(kind, result):
    if not isinstance(result, Finding):
        return isinstance(result, Passed | Skipped | Absent)
    return result.code == kind.code and all((result.message, result.next_steps, str(result)))


def test_no_fault_raises_and_each_says_something():
    given = [Run()]
    for seed in range(12):
        for n in (0, 1, 2, 12, 70):
            draws = ODD if seed % 3 else [random.Random(seed).choice(ODD)]
            given.append(Odd(seed, draws, n).evidence())
    wrong = []
    for code, kind in FAULTS.items():
        for i, run in enumerate(given):
            try:
                results = list(run.measured(kind).findings(run))
            except Exception as error:
                results = [error]
            if not results or not all(is_sound(kind, result) for result in results):
                wrong.append((code, i, results))
    assert wrong == []


def test_all_faults_have_a_text():
    assert all(map(doc_of, FAULTS.values()))
