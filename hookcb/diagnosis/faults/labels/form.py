"""label.form: targets in a form that the loss refuses."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from hookcb.core.batch import parts
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.run import Run


class Refusal(NamedTuple):
    """A form of targets that a loss of torch refuses."""

    error: str  # pattern of torch's message
    takes: str  # what the loss takes
    next_steps: tuple[str, ...]
    is_of_integers: bool | None = None  # whether it is about integer targets only, or about others only


REFUSALS = (
    Refusal(
        r"class probabilities, got",
        "Cross-entropy takes class indices of shape (N), or float probabilities of shape (N, C)",
        ("For one-hot targets, pass y.argmax(1)",),
    ),
    Refusal(
        r"multi-target not supported",
        "This loss takes class indices of shape (N)",
        ("For indices of shape (N, 1), pass y.squeeze(1)", "For one-hot targets, pass y.argmax(1)"),
    ),
    Refusal(
        r"expected (target dtype to be|scalar type) Long",
        "Cross-entropy takes class indices as integers",
        ("Pass y.long(); for probabilities, give them the shape of the scores",),
        is_of_integers=False,
    ),
    Refusal(
        r"Target size .* must be the same as input size|target size .* different to the input size",
        "Binary cross-entropy takes a target for each output, in the same shape",
        ("For one output, pass y.unsqueeze(1)", "For class indices, use nn.CrossEntropyLoss"),
    ),
    Refusal(
        r"can't be cast to the desired output type (Long|Int)|Found dtype (Long|Int) but expected Float",
        "This loss takes floats as targets",
        ("Pass y.float(); for class indices, use nn.CrossEntropyLoss",),
        is_of_integers=True,
    ),
    Refusal(
        r"Expected target size",
        "Cross-entropy takes scores of shape (N, C, …), with the classes in dim 1",
        ("Pass scores.transpose(1, 2), or flatten both: scores.flatten(0, 1) and y.flatten()",),
    ),
)


@fault("label.form", Site.INPUT, needs="batch", leads_to=EVERYTHING, exact=True)
class RefusedTargets(Fault):
    """Targets whose shape or type a loss of torch refuses, such as one-hot rows in place of class indices.

    Exact: the error that torch's loss has raised.

    Source: torch.nn.CrossEntropyLoss and torch.nn.BCEWithLogitsLoss, "Shape".
    """

    headline = "The loss refuses the form of the targets"
    uses = (Curves,)
    passed = "targets that the loss refuses"

    def on_error(self, run: Run, error: BaseException) -> None:
        if not isinstance(error, RuntimeError | ValueError):
            return
        y = next((y for _, y in parts(run.loop.yb) if isinstance(y, Tensor)), None)
        is_of_integers = None if y is None else not (y.is_floating_point() or y.is_complex())
        for refusal in REFUSALS:
            if refusal.is_of_integers in (None, is_of_integers) and re.search(refusal.error, str(error)):
                about = "" if y is None else f"; the targets are {y.dtype} of shape {tuple(y.shape)}"
                self.see(
                    f"{refusal.takes}{about}. PyTorch says: {str(error).splitlines()[0]:.120}",
                    when=run.step,
                    causes=("targets in the form of another loss",),
                    next_steps=refusal.next_steps,
                )
                return

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, run.measured(Curves).why_unseen(run))
