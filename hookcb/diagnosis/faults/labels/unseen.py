"""label.unseen: classes of the scores that no training label has ever had."""

from collections.abc import Iterator, Sequence

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.measurements.validations import Validations
from hookcb.diagnosis.run import Run, Skipped
from hookcb.processes.groups import name_own_rank

MAX_CLASSES, MIN_EACH = 1_000, 100  # classes, and labels for each of them, without which nothing is said
MIN_LABELS, MIN_EXPECTED = 8, 30.0  # of a class in a validation; in the training, by its share there
Counts = tuple[Sequence[int], Sequence[int], int]  # of the training and of validations, and how many of these


@fault("label.unseen", Site.INPUT, needs="batch graph", leads_to="valid.*", exact=True)
class UnseenClasses(Fault):
    """Classes that validations have and no training label ever had, so they cannot be learned.

    Exact: counts of the labels of training batches and of validations, by class: of all batches if the loop
    tells targets or loss, or of one of each 8 after the first 64 if the labels of these look as drawn at
    random and no class comes later; else of the first 64, inspected ones, and a random choice. There must
    be 8 labels or more in a validation, and by that share 30 or more expected in the training, so that no
    class is missing by chance. Classes that are in neither are a note, if there are 100 classes or fewer with
    100 labels each on average, because a head may be wider on purpose. Read if the loss is a cross-entropy of
    torch with one label for each sample of the model's raw scores, of 1,000 classes or fewer: tokens may have
    a padded vocabulary.
    """

    headline = "Some classes are never trained"
    uses = (Targets, Loss, Validations)
    severity = "warning"
    passed = "classes that no label has"

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = ((), (), 0)
        self.is_alone = False  # whether labels of other ranks are not known

    def tell(self, run: Run) -> None:
        targets, valid = run.measured(Targets), run.measured(Validations)
        self.is_alone = bool(name_own_rank())
        is_known = targets.are_of_samples and targets.labels(run.measured(Loss).graph_of_one) is not None
        train = targets.counts if is_known and len(targets.counts) <= MAX_CLASSES else []
        of_valid = valid.labels if len(valid.labels) == len(train) else []
        self.counts = train, of_valid, max(1, len(valid.found))

    def state(self, run: Run) -> Counts:
        return self.counts

    def merge(self, run: Run, of_ranks: Sequence[Counts], rank: int) -> None:
        train, valid, n = zip(*of_ranks, strict=True)
        self.is_alone = len({len(x) for x in train}) > 1
        self.counts = _sums(train), _sums(valid), max(n)

    def findings(self, run: Run) -> Iterator[Result]:
        train, valid, n = self.counts
        if not sum(train) or self.is_alone:
            what = "of other ranks" if self.is_alone else "of all batches"
            return self.told(
                run, (), Skipped(f"the labels {what} were not counted, with one for each sample")
            )
        never = [c for c, k in enumerate(train) if not k]
        often = [c for c in never if valid and self._is_expected(c)]
        if often:
            finding = self.finding(
                f"{_classes(often)} never a label in {sum(train):,} samples of the training, but of "
                f"{sum(valid[c] for c in often) // n:,} of the {sum(valid) // n:,} samples of a validation.",
                value=float(len(often)),
                causes=(
                    "data sorted by class that was split without shuffling",
                    "labels of the validation that are numbered in another way",
                ),
                next_steps=(
                    "Count both: torch.unique(labels, return_counts=True)",
                    "Split with shuffle=True, or stratify by the label",
                ),
            )
            return self.told(run, [finding])
        if never and len(train) <= 100 and sum(train) >= MIN_EACH * len(train):
            finding = self.finding(
                f"{_classes(never)} never a label in {sum(train):,} samples; the scores have {len(train)} "
                "classes.",
                "info",
                value=float(len(never)),
                causes=("a head that is wider than the labels need", "a class that was lost from the data"),
                next_steps=("Count the labels: torch.unique(labels, return_counts=True)",),
            )
            return self.told(run, [finding])
        return self.told(run, ())

    def _is_expected(self, c: int) -> bool:
        train, valid, n = self.counts
        return valid[c] >= MIN_LABELS * n and valid[c] * sum(train) >= MIN_EXPECTED * sum(valid)


def _sums(of_ranks: Sequence[Sequence[int]]) -> list[int]:
    return [sum(x) for x in zip(*of_ranks, strict=False)]


def _classes(of: Sequence[int]) -> str:
    if len(of) == 1:
        return f"Class {of[0]} was"
    return f"Classes {join_names([str(c) for c in of], 5)} were"
