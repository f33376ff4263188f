"""label.single_class and label.sorted: labels that are all the same, or the same in each batch."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run, Skipped

MIN_BATCHES, MIN_SIZE = 8, 8  # and labels of each batch
N_FIRST = 64  # batches in a row whose order is seen
MIN_PURE, MIN_PURE_OF_FEW, MIN_FEW = 0.75, 0.25, 0.9  # shares of batches of one class, and of one or two
MAX_BY_CHANCE, MIN_EXPECTED, MIN_OF_MANY = 0.05, 1.9, 3.0  # share of batches of one class; classes in a batch
MAX_CHANGES = 0.34  # from batch to batch, if there are two classes, which may alternate on purpose


@fault(
    "label.single_class",
    Site.INPUT,
    needs="batch graph",
    leads_to="loss.* grad.* update.too_small unit.*",
    exact=True,
)
class SingleClass(Fault):
    """All labels that a classifier is trained with are one class.

    Exact: no label of all batches differs from the others, or of 64 batches or fewer if the loss is not a
    cross-entropy of torch; 512 samples in 8 batches or more. Read if the loss is a cross-entropy of the
    model's raw scores, or of their sigmoid or softmax, and there is one optimizer.
    """

    headline = "All labels are of a single class"
    uses = (Targets, Loss)
    severity = "warning"
    passed = "labels of a single class"
    is_known = False

    def tell(self, run: Run) -> None:
        targets, self.seen = run.measured(Targets), []
        y = targets.classes(run.measured(Loss).graph_of_one)
        self.is_known = y is not None
        if y is not None and bool((y == y.flatten()[0]).all()) and sum(map(bool, targets.counts)) < 2:
            n, n_batches = sum(targets.counts), targets.n_counted
            n, n_batches = (n, n_batches) if n else (y.numel(), targets.n_batches)
            self.see(
                f"All {n:,} labels read from {n_batches:,} batches are "
                f"{y.flatten()[0].item():g}, so predicting that class is enough.",
                value=1.0,
                causes=("data sorted by class and not shuffled", "labels that were lost, or a wrong column"),
                next_steps=("Count the labels of the data set: labels.unique(return_counts=True)",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, "" if self.is_known else run.why_not("labels of a classifier"))


@fault(
    "label.sorted",
    Site.INPUT,
    needs="batch graph",
    leads_to="loss.* grad.* update.* unit.* train.unfinished",
)
class SortedLabels(Fault):
    """Batches of a single class in turn, as of data that is sorted by class and not shuffled.

    Formula: share of the batches, of 64 or fewer that are spread over the training, whose labels are one
    class. Limit: 75 %, or 25 % if 90 % have two classes at most. Batches drawn at random must have 1.9
    classes or more, 3 for the second limit, and one class in 5 % of cases at most, by the shares of all
    labels. With two classes, at most a third of the first 64 batches may change the class, as batches of both
    may alternate on purpose. Read if the loss is a cross-entropy of the model's scores with one label for
    each sample, in 8 batches of 8 labels or more. A note if no class comes back and no batch has the end of
    one class and the beginning of the next, as in a training on one class after the other on purpose.

    Source: Bottou, "Stochastic Gradient Descent Tricks", 2012, section 3, "randomly shuffle".
    """

    headline = "Each batch has a single class"
    uses = (Targets, Loss)
    severity = "warning"
    passed = "batches of a single class"
    cadence = N_FIRST

    def __init__(self) -> None:
        super().__init__()
        self._first: list[Tensor] = []  # labels of the first batches: smallest and largest
        self.why_not = "too little was seen of the labels of a classifier"

    def on_loss(self, run: Run) -> None:
        if len(self._first) == N_FIRST:
            return
        y = next(iter(run.measured(Targets).of_batch(run)), None)
        if isinstance(y, Tensor) and y.ndim and y.numel() == len(y) > 0 and not y.is_complex():
            self._first.append(torch.stack(y.aminmax()).float())

    def tell(self, run: Run) -> None:
        self.seen = []
        labels = run.measured(Targets).labels(run.measured(Loss).graph_of_one) or []
        of_each = [Counter(map(int, y.flatten().tolist())) for y in labels if y.numel() == len(y) >= MIN_SIZE]
        if len(of_each) < max(MIN_BATCHES, len(labels) // 2):
            return
        self.why_not = ""
        total: Counter[int] = sum(of_each, Counter())
        shares = [n / total.total() for n in total.values()]
        size = int(median(x.total() for x in of_each))
        expected = sum(1 - (1 - p) ** size for p in shares)  # classes in a batch that is drawn at random
        pure = [next(iter(x)) for x in of_each if len(x) == 1]
        share, few = len(pure) / len(of_each), sum(len(x) <= 2 for x in of_each) / len(of_each)
        is_sorted = share >= MIN_PURE or (
            share >= MIN_PURE_OF_FEW and few >= MIN_FEW and expected >= MIN_OF_MANY
        )
        by_chance = sum(p**size for p in shares)
        if not is_sorted or expected < MIN_EXPECTED or by_chance > MAX_BY_CHANCE or self._alternates(total):
            return
        runs = [a for a, b in pairwise([*pure, None]) if a != b]
        is_stream = len(runs) > len(set(runs)) or any(len(x) == 2 for x in of_each)
        self.see(
            f"{len(pure)} of {len(of_each)} batches have labels of a single class, which differs from batch "
            f"to batch; drawn at random, a batch of {size} has {expected:.2g} of the {len(total)} classes.",
            self.severity if is_stream else "info",
            when=0,
            value=share,
            limit=MIN_PURE,
            causes=("data sorted by class and not shuffled",),
            next_steps=("Shuffle the training data: DataLoader(…, shuffle=True)",),
        )

    def _alternates(self, total: Counter[int]) -> bool:
        """Whether there are two classes that alternate, as of true and made samples."""
        if len(total) > 2 or not self._first:
            return len(total) <= 2
        ends = torch.stack(self._first).tolist()
        pure = [low for low, high in ends if low == high]
        changes = sum(a != b for a, b in pairwise(pure))
        return len(pure) < MIN_BATCHES or changes > MAX_CHANGES * (len(pure) - 1)

    def freeze(self) -> None:
        self._first = []

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, Skipped(self.why_not) if self.why_not else "")
