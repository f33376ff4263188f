"""Observes dropout between the model's last layer and the loss."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import DispatchMode, saved
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.measurements.loss_graph import main_term
from hookcb.diagnosis.measurements.loss_terms import read_terms
from hookcb.diagnosis.run import Observation

MAX_ELEMENTS = 65_536  # of a mask that are read
N_MEANT = 3  # evaluations of a batch in a row of validations, as for a mean over masks of dropout
HALF = 0.5  # p that torch leaves out where it is the default
SURE = 5.0  # standard deviations


def dropped_share(node: Any) -> float:
    """Share of the loss's input that a dropout sets to 0; 0 without dropout, NaN if the input is unknown.

    Args:
        node: `loss.grad_fn`, or None.
    """
    main = main_term(read_terms(node))
    if main is None:
        return math.nan
    given = graph.behind(main.given) if graph.name(main.given) in graph.HEADS else main.given
    if graph.name(given) == "NativeDropout":
        return float(saved(given, "p", math.nan))
    if graph.name(given) != "Mul" or graph.only_input(given) is None:
        return 0.0
    if (factors := graph.factors(given)) is None:
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


class DropoutProbe(DispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees dropout in a forward without gradients: numbers from a Bernoulli distribution, divided by its p.

    Args:
        record: is called at each dropout.
        guard: keeps errors out of the forward.
    """

    def __init__(self, record: Callable[[], object], guard: Guard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record, self._guard = record, guard
        self._kept: Any = None  # share that the operation before has kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation unchanged."""
        self._guard.call("ops", self._see, func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _see(self, name: str, args: tuple[Any, ...]) -> None:
        kept, self._kept = self._kept, None
        is_whole = name == "native_dropout" and args[1] > 0 and args[2] is not False
        is_scaled = name == "div_" and isinstance(kept, float) and 0 < kept < 1 and args[1] == kept
        is_attention = name.startswith("_scaled_dot_product") and _first_number(args) > 0
        if is_whole or is_scaled or is_attention:
            self._record()
        if name == "bernoulli_":
            self._kept = args[1] if len(args) > 1 else HALF


def _first_number(args: tuple[Any, ...]) -> float:
    """Dropout of a fused attention, which is its first argument of this type."""
    return next((x for x in args if isinstance(x, float)), 0.0)


def observe_dropout_in_eval(layers: dict[str, int], n_alike: int) -> Iterator[Observation]:
    """Dropout in eval mode.

    Args:
        layers: step of the first validation in which a layer dropped, by layer.
        n_alike: how often that validation evaluated the same inputs.
    """
    is_meant = n_alike >= N_MEANT
    often = f" It evaluates the same batch {n_alike} times, as Monte Carlo dropout does." if is_meant else ""
    for layer, step in layers.items():
        yield Observation(
            "dropout.in_eval",
            layer,
            step=step,
            text=f"{f'Layer {layer}' if layer else 'The model'} applies dropout in eval mode, so it gives "
            f"different answers for one input, and validations are noisier and worse than it is.{often}",
            causes=("F.dropout(x, p), or dropout_p of an attention, without training=self.training",),
            next_steps=(
                "Pass training=self.training to F.dropout, and dropout_p=p if self.training else 0.0 to an "
                "attention",
            ),
            severity="info" if is_meant else "warning",
        )
