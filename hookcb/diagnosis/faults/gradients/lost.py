"""input.zero and grad.zero: inputs or gradients that are all zero in single steps, and not in the others."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookcb.core.batch import n_samples, parts
from hookcb.core.optim import detached_scalar
from hookcb.core.torch_private import norms_of
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.rules import median
from hookcb.diagnosis.run import Run, Skipped
from hookcb.gradients.samples import sketch_copy
from hookcb.processes.shards import is_shard
from hookcb.records.store import read_numbers

N_DENSE = 64  # steps in which each batch is looked at; later, inspected ones
MIN_SEEN, MAX_SHARE = 10, 0.2  # batches, and share of them that may be zero: more of them are meant so
MIN_SIZE = 16  # elements of a sample; fewer, as of a point on a boundary, may well be zero
MIN_DENSE = 32  # elements of a sample of 1,024 that are not zero, in batches of which only that is read
MIN_SAMPLES = 4  # in a batch; a single one may find all units of a layer dead
MIN_LOSS = 1e-2  # of the median loss; of a smaller one, a gradient may round to zero
STEADY = ("cross-entropy", "binary cross-entropy", "mse")  # losses whose gradient is zero at their end only


class _Zeros(Fault):
    """Base of faults that look for zeros in single batches."""

    cadence = N_DENSE
    severity = "warning"

    def __init__(self) -> None:
        super().__init__()
        self._largest: list[tuple[int, float | Tensor]] = []  # by batch: 0 if all is zero

    def _numbers(self) -> dict[int, float]:
        steps, sizes = [step for step, _ in self._largest], read_numbers([x for _, x in self._largest])
        self._largest = list(zip(steps, sizes, strict=True))
        found = dict[int, float]()
        for step, x in zip(steps, sizes, strict=True):  # a second step in a batch may have nothing to do
            found[step] = max(x, found.get(step, 0.0))
        return found

    def tell(self, run: Run) -> None:
        self._numbers()

    def freeze(self) -> None:
        self._numbers()


@fault("input.zero", Site.INPUT, needs="batches", leads_to="loss.spike grad.zero unit.*", exact=True)
class ZeroInputs(_Zeros):
    """A batch whose inputs are all zero, between others that are not, as one that has not arrived.

    Exact: all sampled elements of the first float input of the model are zero in a batch of two samples or
    more, of 16 elements or more each, in at most a fifth of the first 64 batches and later inspected ones. On
    a CPU all elements are read then; on a GPU only 1,024 of them are, so if fewer than 32 of these are not
    zero in some batch, nothing is said.
    """

    headline = "The inputs of single batches are all zero"
    passed = "batches whose inputs are all zero"

    def on_batch(self, run: Run) -> None:
        given = (x for _, x in parts(run.loop.xb) if isinstance(x, Tensor) and x.is_floating_point())
        x = next(given, None)
        if x is None or x.ndim < 2 or len(x) < 2 or x.numel() < MIN_SIZE * len(x) or is_shard(x):
            return
        n = detached_scalar(sketch_copy(x).count_nonzero())
        if x.is_cpu and n < MIN_DENSE:
            n = MIN_DENSE if bool(x.detach().any()) else 0.0
        self._largest.append((run.step, n))

    def findings(self, run: Run) -> Iterator[Result]:
        sizes = self._numbers()
        zeros = [step for step, x in sizes.items() if x == 0]
        if len(sizes) < MIN_SEEN:
            yield Skipped(f"fewer than {MIN_SEEN} batches of float inputs were looked at")
            return
        seen, is_dense = [], all(x >= MIN_DENSE for x in sizes.values() if x)
        if zeros and is_dense and len(zeros) <= MAX_SHARE * len(sizes):
            seen = [
                self.finding(
                    f"All inputs of {_batches(zeros)} are zero, and in none of the other "
                    f"{len(sizes) - len(zeros)} batches that were looked at.",
                    when=(zeros[0], zeros[-1]),
                    value=float(len(zeros)),
                    causes=(
                        "a buffer that is read before a non_blocking transfer has ended",
                        "samples that could not be read, and for which the dataset gives zeros",
                    ),
                    next_steps=(
                        "Compare the batch with what the dataset gives, and with a blocking transfer",
                    ),
                )
            ]
        yield from self.told(run, seen)


@fault("grad.zero", Site.GRADIENTS, needs="batches steps", leads_to="loss.flat update.*", exact=True)
class ZeroGradients(_Zeros):
    """A step at which all gradients are zero or missing, though the loss is not at its end.

    Exact: the largest norm of all gradients at a step is zero, in at most a fifth of the first 64 steps and
    later inspected ones, while a cross-entropy or squared error, with nothing else beside it, is above a
    hundredth of its median. Hinge losses that are satisfied, masks without an element and parts of a model
    that are not used have zeros of their own, and are not looked at.
    """

    headline = "All gradients are zero at single steps"
    uses = (Loss, Parameters, Steps)
    passed = "steps at which all gradients are zero"

    def __init__(self) -> None:
        super().__init__()
        self._n_samples = 0  # in the batch; its inputs are gone at the step

    def on_batch(self, run: Run) -> None:
        given = run.loop.xb
        self._n_samples = n_samples(given if type(given) is tuple else tuple(x for _, x in parts(given))) or 0

    def on_step(self, run: Run) -> None:
        if self._n_samples < MIN_SAMPLES:
            return
        known = [p.grad for _, p in run.measured(Parameters).params if p.grad is not None]
        grads = known or [p.grad for p in run.loop.model.parameters() if p.grad is not None]  # of new ones
        if any(is_shard(g) or g.layout is not torch.strided for g in grads):
            self.done = True
            return
        with torch.no_grad():
            norms = norms_of([g for g in grads if g.device == grads[0].device]) if grads else []
            self._largest.append((run.step, detached_scalar(torch.stack(norms).amax() if norms else 0.0)))

    def findings(self, run: Run) -> Iterator[Result]:
        sizes, loss, about = self._numbers(), dict(run.loss), run.measured(Loss)
        is_steady = about.kind in STEADY and about.graph_of_one.head != "Relu"
        if not is_steady or run.measured(Steps).n_optimizers > 1:
            yield Skipped("it is not known that the loss has a gradient in each batch")
            return
        if len(sizes) < MIN_SEEN or run.is_by_closure:
            yield Skipped(f"fewer than {MIN_SEEN} steps were looked at")
            return
        low = MIN_LOSS * median(loss.values())
        zeros = [step for step, x in sizes.items() if x == 0 and loss.get(step, 0.0) > max(0.0, low)]
        seen = []
        if zeros and len(zeros) <= MAX_SHARE * len(sizes):
            seen = [
                self.finding(
                    f"All gradients are zero or missing at the step of {_batches(zeros)}, with a loss of "
                    f"{loss[zeros[0]]:.3g}, and at none of the other {len(sizes) - len(zeros)} steps that "
                    "were looked at.",
                    when=(zeros[0], zeros[-1]),
                    value=float(len(zeros)),
                    causes=(
                        "gradients that are cleared between backward() and step() in some branch",
                        "half precision, in which small gradients round to zero",
                    ),
                    next_steps=("Print the largest gradient before step() in these batches",),
                )
            ]
        yield from self.told(run, seen)


def _batches(steps: Sequence[Any]) -> str:
    n = len(steps) - 3
    more = f" and {n} other{'s' * (n > 1)}" if n > 0 else ""
    return f"batch{'es' * (len(steps) > 1)} {', '.join(map(str, steps[:3]))}{more}"
