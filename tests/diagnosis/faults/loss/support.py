"""Made-up losses."""

import math
import random

from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Run
from tests.diagnosis.support import measured, series

NAN, INF = math.nan, math.inf
CE = "cross-entropy"


def losses(values, kind=CE, guess=NAN, kinds=(), **kwargs):
    return measured(Run(loss=series(values), **kwargs), Loss, kind=kind, guess=guess, kinds=kinds)


def noisy(values, size=0.1):
    random_ = random.Random(0)
    return [x + random_.gauss(0, size) for x in values]


def flat(level, n=100):
    return [level + 0.02 * (-1) ** i for i in range(n)]
