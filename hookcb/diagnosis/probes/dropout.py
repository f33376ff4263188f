"""Observes dropout between the model's last layer and the loss."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hookcb.core.torch_private import saved
from hookcb.diagnosis.evidence import Observation
from hookcb.diagnosis.probes.loss_graph import HEADS, main_term
from hookcb.diagnosis.probes.loss_terms import FREED, behind, node_name, read_saved, read_terms

MAX_ELEMENTS = 65_536  # of a mask that are read
SURE = 5.0  # standard deviations


def dropped_share(node: Any) -> float:
    """Share of the loss's input that a dropout sets to 0; 0 without dropout, NaN if the input is unknown.

    Args:
        node: `loss.grad_fn`, or None.
    """
    main = main_term(read_terms(node))
    if main is None:
        return math.nan
    given = behind(main.given) if node_name(main.given) in HEADS else main.given
    if node_name(given) == "NativeDropout":
        return float(saved(given, "p", math.nan))
    if node_name(given) != "Mul" or sum(at is not None for at, _ in given.next_functions) != 1:
        return 0.0
    factors = [read_saved(given, name) for name in ("other", "self")]
    if any(x is FREED for x in factors):
        return math.nan
    return max((_zeros_of_mask(x) for x in factors if isinstance(x, Tensor)), default=0.0)


def _zeros_of_mask(x: Tensor) -> float:
    """Share of zeros of a mask of 0 and 1 / (1 - p), as dropout draws it; 0 for other tensors."""
    x = x.detach().flatten()[:MAX_ELEMENTS].double()
    top = float(x.max()) if x.numel() else 0.0
    if top <= 1 or not bool(((x == 0) | (x == top)).all()):
        return 0.0
    p, zeros = 1 - 1 / top, float((x == 0).double().mean())
    return zeros if zeros and abs(zeros - p) <= SURE * math.sqrt(p * (1 - p) / x.numel()) else 0.0


def observe_dropout(share: float, layer: str, step: int) -> Iterator[Observation]:
    """Dropout on the input of the loss.

    Args:
        share: see `dropped_share`.
        layer: the last layer that was called.
        step: number of the batch.
    """
    if share > 0:
        yield Observation(
            "dropout.scores",
            layer,
            step=step,
            value=share,
            text=f"Dropout sets {share:.0%} of the model's output to 0 just before the loss, which then "
            "compares zeros, not predictions, with the targets.",
            causes=("a dropout after the last layer",),
            next_steps=("Move the dropout before the last linear layer, or remove it",),
        )
