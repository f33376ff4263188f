"""label.ignored: targets that are all the index which the loss ignores."""

import torch

from hookcb.diagnosis.fault import EVERYTHING, Fault, Site, Unknown, fault
from hookcb.diagnosis.measurements.targets import Ignored, ignored_targets
from hookcb.diagnosis.run import Run

MIN_BATCHES, MAX_BATCHES = 3, 64  # inspected ones


@fault("label.ignored", Site.INPUT, needs="batch", leads_to=f"{EVERYTHING} train.unfinished", exact=True)
class AllIgnored(Fault):
    """Targets of all inspected batches are the index that the loss ignores, so that nothing is learned.

    Exact: each target is `ignore_index` in each of three inspected batches or more, as torch's cross-entropy
    or negative log-likelihood has saved them. Where the backward has freed them: a mean over targets of the
    model's finite output is NaN. Of a single batch whose loss is NaN, `nonfinite.first` tells it.

    Source: torch.nn.CrossEntropyLoss: `ignore_index` targets do not contribute to the gradient.
    """

    headline = "The loss ignores all labels"
    passed = "labels that are all ignored"
    unless: Unknown = "too little was seen of the labels of a cross-entropy"

    def __init__(self) -> None:
        super().__init__()
        self._batches: list[Ignored] = []

    def on_loss(self, run: Run) -> None:
        self.done = len(self._batches) == MAX_BATCHES
        if (ignored := ignored_targets(run.loop.loss_node, run.loop.loss, run.loop.pred)) is not None:
            self._batches.append(ignored)

    def tell(self, run: Run) -> None:
        self.seen, n = [], len(self._batches)
        if n < MIN_BATCHES:
            return
        self.unless = ""
        if bool(torch.stack([batch.are_all for batch in self._batches]).all()):
            index, n_targets = self._batches[0].label, sum(batch.n for batch in self._batches)
            number = f"{n_targets:,} " if all(batch.n for batch in self._batches) else ""
            self.see(
                f"All {number}targets of the {n} inspected batches are {index}, the index that the loss "
                "ignores: nothing is learned from them.",
                value=1.0,
                causes=(
                    "labels that are masked wherever a prompt or padding is thought to be, in sequences that "
                    "were cut before the answer began",
                    f"labels that were never set, or an ignore_index that is a class, here {index}",
                ),
                next_steps=(f"Print (labels != {index}).sum() of a batch, and look where labels are made",),
            )

    def freeze(self) -> None:
        self._batches = []
