"""samples.mixed: a softmax over the samples of a batch, or a view that cuts across them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import n_samples, parts
from hookcb.core.torch_private import input_shape, saved
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run

SOFTMAX = ("Softmax", "LogSoftmax")
VIEWS = ("View", "UnsafeView", "ReshapeAlias")
MAX_NEAR = 256  # nodes from the loss back to the last layers


class Batch(NamedTuple):
    """Number of samples of a batch, and of steps or positions in each, 0 if there are none."""

    n: int
    n_steps: int


@fault("samples.mixed", Site.MODULES, needs="batch graph", leads_to=EVERYTHING, exact=True)
class MixedSamples(Fault):
    """A softmax over the samples of a batch, or a view or reshape that cuts across them.

    Exact: dimensions in the graph of the first loss, for inputs, outputs and targets whose first dimension is
    that of the samples, one target each. A softmax over dimension 0 of (samples, several scores), between the
    last layer and the loss, or of (samples, steps …) inside of the model; a view of (samples, steps …) as
    (steps, samples …), or of (steps, samples …) as (samples, …). A dimension that is a multiple of the number
    of samples holds pairs of them, as in contrastive losses, and is left out; so are batch norm and all sums,
    means and norms over the batch, which are often meant.

    Source: torch.nn.Softmax, `dim`; torch.Tensor.view, which keeps the order of the elements.
    """

    headline = "Samples of a batch are mixed"
    uses = (Loss, Targets)
    passed = "a softmax or view across the samples of a batch"

    def __init__(self) -> None:
        super().__init__()
        self._is_known = False

    def on_first_graph(self, run: Run) -> None:
        if (batch := _batch_of(run)) is None:
            return
        self._is_known, loop = True, run.loop
        near = set(graph.near(loop.loss_node, MAX_NEAR))
        for node in graph.walk([loop.loss_node, *graph.roots(loop.pred)], at_most=graph.MAX_NODES):
            name, shape = graph.name(node), input_shape(node)
            if name in SOFTMAX:
                self._see_softmax(run, node, shape, batch, node in near)
            elif name in VIEWS and (before := _shape_before(node)) and _cuts(before, shape, batch.n):
                self.see(
                    f"A tensor of shape {_text(before)} is viewed as {_text(shape)}, in a batch of {batch.n} "
                    "samples: view and reshape keep the order of the elements, so each row gets parts of "
                    "several samples.",
                    "warning",
                    when=run.step,
                    value=float(batch.n),
                    causes=("view or reshape in place of transpose or permute",),
                    next_steps=("Move the dimension with transpose(0, 1), and reshape only then",),
                )

    def _see_softmax(self, run: Run, node: Any, shape: tuple[int, ...], batch: Batch, is_near: bool) -> None:
        n, rest = batch.n, shape[1:]
        is_over_samples = len(shape) > 1 and shape[0] == n and saved(node, "dim", 1) % len(shape) == 0
        if not is_over_samples or math.prod(rest) < 2 or any(x % n == 0 for x in rest):
            return
        if is_near or batch.n_steps in rest:
            kind = "softmax" if graph.name(node) == "Softmax" else "log_softmax"
            self.see(
                f"A {kind} over dimension 0 of a tensor of shape {_text(shape)} runs over the {n} samples of "
                "the batch, so what one sample gets depends on the others.",
                when=run.step,
                value=float(n),
                causes=("dim=0, or no dim, for which softmax takes 0 if there are three dimensions",),
                next_steps=("Give the dimension of the classes or positions, such as dim=-1",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        seen = [] if findings_of("head.axis", run) else self.seen  # which names the same softmax
        return self.told(run, seen, "" if self._is_known else run.why_not("samples of a batch"))


def _batch_of(run: Run) -> Batch | None:
    """The batch, None if it is not certain that the first dimension is that of the samples."""
    xb, yb, pred = run.loop.xb, run.measured(Targets).of_batch(run), run.loop.pred
    given = [x for _, x in parts(xb) if isinstance(x, Tensor) and x.ndim]
    targets = next((y for _, y in parts(yb) if isinstance(y, Tensor)), None)
    output = next((x for _, x in parts(pred) if isinstance(x, Tensor)), None)
    if targets is None or output is None or not given or not output.ndim or not targets.ndim:
        return None
    n, x = len(targets), given[0]
    is_sure = targets.numel() == n == n_samples(tuple(given)) == output.shape[0] and n > 1
    has_steps = x.ndim > 2 or (x.ndim == 2 and not x.is_floating_point())
    n_steps = x.shape[1] if has_steps and x.shape[1] > 1 else 0
    return Batch(n, n_steps) if is_sure else None


def _shape_before(node: Any) -> tuple[int, ...]:
    """Shape that a view is taken of; () if it is unknown."""
    sizes = saved(node, "self_sym_sizes") or saved(node, "self_sizes")
    if isinstance(sizes, tuple):
        return sizes
    behind = graph.only_input(node)
    return input_shape(behind) if graph.name(behind) in graph.MOVING else ()


def _cuts(before: tuple[int, ...], now: tuple[int, ...], n: int) -> bool:
    """Whether a view exchanges samples and steps without moving elements."""
    if len(before) < 3 or len(now) < 2 or n not in before[:2]:
        return False
    other = before[1] if before[0] == n else before[0]
    if other < 2 or other % n == 0:
        return False
    return now[:2] == (other, n) if before[0] == n else now[0] == n


def _text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
