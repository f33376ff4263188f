"""Linear layers in a row, as the modules of a model tell."""

from collections.abc import Iterator
from itertools import pairwise

from torch import nn

from hookcb.core.torch_private import Dropout
from hookcb.diagnosis.probes.linear_links import linear_stack
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules


def observe_model(model: nn.Module) -> Iterator[Observation]:
    """Linear layers that follow one another in an nn.Sequential, except low-rank factorizations."""
    for name, m in named_modules(model).items():
        if type(m) is not nn.Sequential:
            continue
        active = [(i, x) for i, x in m.named_children() if not isinstance(x, Dropout | nn.Identity)]
        for (i, a), (j, b) in pairwise(active):
            if type(a) is type(b) is nn.Linear and a.out_features >= min(a.in_features, b.out_features):
                first, second = (f"{name}.{at}" if name else at for at in (i, j))
                yield linear_stack(first, second, a.in_features, b.out_features)
