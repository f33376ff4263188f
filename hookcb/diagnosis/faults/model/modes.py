"""mode.mismatch: batch norms with a wrong mode or batch size, and models that were left in eval mode."""

import traceback
from collections.abc import Iterator, Mapping
from weakref import WeakValueDictionary

from torch import Tensor, nn

from hookcb.core.batch import n_samples
from hookcb.core.text import as_layer
from hookcb.core.torch_private import BatchNorm, Dropout
from hookcb.diagnosis.fault import EVERY, EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding, Severity
from hookcb.hooks.modules import named_modules

MIN_CALLS = 3  # without gradients
MIN_SINGLE = 0.9  # share of batches with a single sample
REFUSED = "Expected more than 1 value per channel"  # beginning of torch's error


@fault("mode.mismatch", Site.MODULES, needs="batches model", leads_to=EVERYTHING, subject="modes", exact=True)
class Modes(Fault):
    """A batch norm that is trained in eval mode, or that normalizes with a single sample.

    Formula: in a training batch, `training` is False and one of its parameters has `requires_grad`; or there
    is one value per channel, an error, or one sample in nine of ten batches, a warning. A batch norm with
    frozen parameters may be in eval mode, as in fine-tuning. A note if a watched loop calls a model with
    dropout or batch norm in train mode without gradients, at least three times, and never in eval mode.

    Source: torch.nn.BatchNorm2d.
    """

    headline = "Layers are in the wrong mode"
    cadence = EVERY
    passed = "train and eval modes"

    def __init__(self) -> None:
        super().__init__()
        self._norms: Mapping[str, nn.Module] = {}
        self._names: list[str] = []
        self._drops = False
        self._frozen: set[str] = set()  # as for fine-tuning, with statistics that were learned before
        self._in_eval: dict[str, int] = {}  # step at which trained batch norms were first in eval mode
        self._without_dropout: int | None = None  # first step with all of the model in eval mode
        self._n_batches = self._n_single = 0  # of one sample
        self._refused: tuple[str, int] | None = None  # name of the batch norm that has raised, and the step

    def on_model(self, run: Run) -> None:
        modules = named_modules(run.loop.model)
        # a watch must not keep its model alive
        self._norms = WeakValueDictionary({x: m for x, m in modules.items() if isinstance(m, BatchNorm)})
        self._names = list(self._norms)
        self._drops = any(isinstance(m, Dropout) and m.p > 0 for m in modules.values())
        self._frozen = {name for name, m in self._norms.items() if not m.training and _has_learned(m)}
        self.done = not (self._names or self._drops)  # as there is nothing to see

    def on_batch(self, run: Run) -> None:
        loop, is_whole = run.loop, run.loop.model.training
        for name, m in self._norms.items():
            if m.training:
                self._frozen.discard(name)
            elif m.track_running_stats and _is_trained(m) and not (is_whole and name in self._frozen):
                self._in_eval.setdefault(name, run.step)
        is_new = self._drops and not is_whole and self._without_dropout is None
        if is_new and any(p.requires_grad for p in loop.model.parameters()):
            self._without_dropout = run.step
        if self._names:
            self._n_single += n_samples((*loop.yb, loop.xb)) == 1

    def on_batch_end(self, run: Run) -> None:
        self._n_batches += 1

    def on_error(self, run: Run, error: BaseException) -> None:
        if isinstance(error, ValueError) and str(error).startswith(REFUSED):
            names = {id(m): name for name, m in self._norms.items()}
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if (name := names.get(id(frame.f_locals.get("self")))) is not None:
                    self._refused = name, run.step

    def on_end(self, run: Run) -> None:
        loop, is_watched = run.loop, run.loop.is_external and not run.loop.seen["before_validate"]
        if is_watched and (n := loop.facts.n_without_grad) >= MIN_CALLS:
            self.see(
                f"The model was called {n} times in train mode without gradients, and never in eval mode. "
                "If these calls were a validation, its dropout and batch norms acted as in training.",
                "info",
                value=float(n),
                causes=("a validation without model.eval()",),
                next_steps=("Call model.eval() before a validation, and model.train() after it",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        unless = "" if run.n_batches else "too little was seen of the batches"
        return self.told(run, [*self.seen, *self._found()], unless)

    def _found(self) -> Iterator[Finding]:
        for name, step in self._in_eval.items():
            yield self.finding(
                f"Batch norm {as_layer(name)} is in eval mode while it is trained: it normalizes by old "
                "running statistics, which are not updated.",
                at=name,
                when=step,
                causes=(".eval() was called on the model or on this layer, without .train() afterwards",),
                next_steps=("Call model.train() before training; to freeze it, freeze its parameters too",),
            )
        if self._without_dropout is not None and not self._in_eval:
            yield self.finding(
                "The model is trained in eval mode, so its dropout does nothing.",
                "warning",
                when=self._without_dropout,
                causes=(".eval() was called on the model, without .train() afterwards",),
                next_steps=("Call model.train() before training",),
            )
        severity: Severity = "error"
        if self._refused is not None:
            (name, step), by = self._refused, "one value per channel, which leaves nothing of the input"
        elif self._names and self._n_batches and self._n_single >= MIN_SINGLE * self._n_batches:
            name, step, severity = self._names[0], 0, "warning"
            by = "a single sample, because each batch has only one"
        else:
            return
        yield self.finding(
            f"Batch norm {as_layer(name)} normalizes by {by}.",
            severity,
            at=name,
            when=step,
            value=1.0,
            causes=("a batch of one sample", "a last batch with the remaining sample"),
            next_steps=("Use larger batches, drop_last=True, or GroupNorm instead of batch norm",),
        )

    def freeze(self) -> None:
        self._norms = {}


def _has_learned(m: nn.Module) -> bool:
    return isinstance(m.running_mean, Tensor) and bool(m.running_mean.any())


def _is_trained(m: nn.Module) -> bool:
    return any(p.requires_grad for p in m.parameters(recurse=False))
