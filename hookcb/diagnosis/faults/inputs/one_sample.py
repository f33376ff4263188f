"""input.one_sample: data of one sample that is given to all samples of a batch."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import n_samples, parts
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.collating import Collating
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run

MIN_BATCHES, N_BATCHES = 3, 8  # inspected ones


@fault("input.one_sample", Site.INPUT, needs="batches", leads_to=f"{EVERYTHING} train.unfinished", exact=True)
class OneSample(Fault):
    """An input or a target of one sample that is given to all N samples of the batch.

    Exact: a tensor whose first dimension is 1, or is expanded from 1, beside N samples. It is part of a
    tensor that has exactly N such samples, which differ, as `x[:1]` is of `x`, in each of three inspected
    batches or more, and has three different values in these. What is the same for all batches, as a grid of
    positions, or was made for the batch as a whole, as a mask, a time or a condition, is right; so is a
    sample of another input, to which the others are compared. A copy is not seen, as its origin is unknown,
    such as that of a tensor moved to a GPU; unless the `collate_fn` of a DataLoader without workers makes it:
    floats of shape (1, …) that are those of one sample, while the data set gives each its own, which differ.

    Source: PyTorch, "Broadcasting semantics".
    """

    severity = "warning"
    headline = "One sample's data is given to all samples"
    uses = (Targets,)
    hears = (Collating,)
    passed = "data of one sample that is given to all"

    def __init__(self) -> None:
        super().__init__()
        # by what it is, of each batch: its hash, whether samples differ, its shape, and number of samples
        self._given = defaultdict[str, list[tuple[Tensor, Tensor, tuple[int, ...], int]]](list)
        # by what collate_fn has made of one sample, of each batch: its shape, and the number of samples
        self._collated = defaultdict[str, list[tuple[tuple[int, ...], int]]](list)
        self._n_batches = 0

    def on_loss(self, run: Run) -> None:
        """Looks at inputs, which are still known, and at targets."""
        if self._n_batches == N_BATCHES:
            self.done = True
            return
        named = [(f"Input {path}".strip(), x) for path, x in parts(run.loop.xb)]
        n = max((len(x) for _, x in named if isinstance(x, Tensor) and x.ndim), default=0)
        n = n if n > 1 else n_samples(run.loop.pred) or 0
        self._n_batches += n > 1
        collated = heard(Collating)
        for name, x in named:
            if n == collated.n > 1 and isinstance(x, Tensor) and tuple(x.shape) in collated.shapes:
                self._collated[name].append((tuple(x.shape), n))
        named += [("The target", x) for _, x in parts(run.measured(Targets).of_batch(run))]
        places = Counter(x.untyped_storage().data_ptr() for _, x in named if has_stats(x))
        for name, x in named:
            is_one = n > 1 and _is_one_of(x, n) and places[x.untyped_storage().data_ptr()] == 1
            if is_one and (own := hash_of(x[:1])) is not None:
                self._given[name].append((own, _do_differ(x, n), tuple(x.shape), n))

    def tell(self, run: Run) -> None:
        self.seen = []
        for name, given in self._given.items():
            is_each = len(given) >= max(MIN_BATCHES, self._n_batches)
            hashes = {int(own) for own, differ, _, _ in given if is_each and differ}
            if len(hashes) >= MIN_BATCHES:
                *_, shape, n = given[0]
                causes = "an index or a slice such as x[0:1] where x is meant", "expand of a single row"
                self._see(name, shape, n, len(given), causes)
        for name, shapes in self._collated.items():
            if not self.seen and len(shapes) >= max(MIN_BATCHES, self._n_batches - 1):
                cause = "a collate_fn that takes the data of the first sample instead of stacking all"
                self._see(name, *shapes[0], len(shapes), (cause,))

    def _see(
        self, name: str, shape: tuple[int, ...], n: int, n_batches: int, causes: tuple[str, ...]
    ) -> None:
        self.see(
            f"{name} has shape {shape} and is a single one of {n} samples, in each of {n_batches} inspected "
            f"batches: all {n} samples of the batch get the data of one.",
            when=0,
            value=float(n),
            causes=causes,
            next_steps=("Give each sample its own row: print the shapes of all inputs of the model",),
        )

    def freeze(self) -> None:
        self._given.clear()
        self._collated.clear()

    def findings(self, run: Run) -> Iterator[Result]:
        is_known = self._n_batches >= MIN_BATCHES
        return self.told(run, self.seen, "" if is_known else run.why_not("first dimensions of the inputs"))


def _do_differ(x: Tensor, n: int) -> Tensor:
    """Whether the samples of the tensor that this one is a part of are not all the same."""
    size = x.numel() // len(x)
    # a view of the whole of it
    rows = x.detach().new_empty(0).set_(x.untyped_storage(), 0, (n, size), (size, 1))
    return (rows != rows[:1]).any()


def _is_one_of(x: Any, n: int) -> bool:
    """Whether a tensor is a single sample of a tensor with so many, expanded or not."""
    if not (isinstance(x, Tensor) and has_stats(x) and x.ndim and x.numel()):
        return False
    size = x.numel() // len(x)
    is_single = len(x) == 1 or (len(x) == n and x.stride(0) == 0)
    return is_single and x.untyped_storage().nbytes() == n * size * x.element_size()
