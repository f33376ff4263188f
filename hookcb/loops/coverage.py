"""Limits of a loop hookcb does not run: events that are not seen, callbacks that cannot follow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.switch import OFF
from hookcb.diagnosis.reader import Way, also, way_of
from hookcb.hooks.coverage import BY_CLOSURE
from hookcb.nans.trace import NanTrace
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision
from hookcb.training.channels_last import ChannelsLast
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.clip import GradientClip
from hookcb.training.compile import Compile
from hookcb.training.distributed import Distributed
from hookcb.training.ema import EMA
from hookcb.training.freeze import Freeze
from hookcb.training.metrics import Metrics
from hookcb.training.save_model import SaveModelCallback
from hookcb.training.schedules.base import RateCallback

# callbacks that do what is the loop's job, and how the loop does it
REFUSED: Mapping[type[Callback], tuple[str, str, str]] = {  # what to do in a loop, Lightning, transformers
    MixedPrecision: (
        "use torch.autocast and a torch.amp.GradScaler in your loop, and pass that as scaler=",
        "give Trainer(precision=…)",
        "give TrainingArguments(bf16=True)",
    ),
    GradientAccumulation: (
        "step the optimizer every few batches in your loop",
        "give Trainer(accumulate_grad_batches=…)",
        "give TrainingArguments(gradient_accumulation_steps=…)",
    ),
    GradientClip: (
        "call torch.nn.utils.clip_grad_norm_ before the step in your loop",
        "give Trainer(gradient_clip_val=…)",
        "give TrainingArguments(max_grad_norm=…)",
    ),
    RateCallback: (
        "step a torch scheduler in your loop",
        "return a torch scheduler from configure_optimizers",
        "give TrainingArguments(lr_scheduler_type=…)",
    ),
    Checkpoint: (
        "save model and optimizer in your loop",
        "give Trainer(callbacks=[ModelCheckpoint(…)])",
        "give TrainingArguments(save_strategy=…)",
    ),
    SaveModelCallback: (
        "save model and optimizer in your loop",
        "give Trainer(callbacks=[ModelCheckpoint(…)])",
        "give TrainingArguments(save_strategy=…, load_best_model_at_end=True)",
    ),
    Compile: (
        "compile the model before you watch it",
        "compile the module before the fit",
        "give TrainingArguments(torch_compile=True)",
    ),
    Distributed: (
        "wrap the model before you watch it",
        "give Trainer(strategy=…)",
        "start the script with torchrun",
    ),
    ChannelsLast: (
        "use x.to(memory_format=torch.channels_last) in your loop",
        "use x.to(memory_format=torch.channels_last) in training_step",
        "use x.to(memory_format=torch.channels_last) in the model",
    ),
    Freeze: (
        "set requires_grad of the parameters in your loop",
        "set requires_grad of the parameters before the fit",
        "set requires_grad of the parameters before the training",
    ),
    Metrics: (
        "compute them in your loop, which has the targets",
        "compute them in validation_step, which has the targets",
        "give Trainer(compute_metrics=…)",
    ),
    NanTrace: (
        "use hookcb.DetectAnomaly, as a batch of your loop cannot be run again",
        "give Trainer(detect_anomaly=True)",
        "use hookcb.DetectAnomaly",
    ),
}
LOOPS: tuple[Way, ...] = ("watch", "lightning", "transformers")


def check_follows(cb: Callback, has_opt: bool, way: Way) -> None:
    """Refuses a callback that would run part of the training itself, or lacks an optimizer.

    Raises:
        TypeError: If it cannot follow; the message says what to do instead.
    """
    hint = next((hints[LOOPS.index(way)] for kind, hints in REFUSED.items() if isinstance(cb, kind)), None)
    if isinstance(cb, EMA) and cb.validate:
        in_loop = f"w.{cb.name}.model in your loop"
        averaged = in_loop if way == "watch" else f"{cb.name}.model of the HookcbCallback after the training"
        hint = f"give it validate=False, and validate {averaged}"
    elif isinstance(cb, EMA) and not has_opt:
        raise TypeError(f"{cb!r} averages after steps of the optimizer; give the optimizer too")
    if hint is not None:
        raise TypeError(
            f"{cb!r} takes part in the training, and hookcb does not control this loop; {hint}; "
            "see docs/guide/loops.md"
        )


@dataclass(slots=True)
class Facts:
    """Counts of what was seen of a loop besides its events.

    Attributes:
        n_calls: calls of the model that became batches, or parts of them.
        n_part_calls: calls of parts of a model not yet called as a whole, which became batches too.
        n_without_grad: calls in train mode without gradients.
        n_eval_inside: calls in eval mode between the call of a training batch and its step.
        n_elsewhere: calls and steps in other threads.
        n_penalties: gradients of outputs computed with create_graph=True.
        n_losses_outside: losses reported when no batch was open, or without a graph in training.
        n_losses_reported: losses reported for a batch.
        n_losses_found: losses that were not reported, but found when their backward began.
        n_losses_unfound: backwards whose loss was neither reported nor found.
        n_losses_of_others: those among them that went on to parameters of other models.
        n_given: those to which the model gives features or targets, without an optimizer of its own.
        n_beside: backwards that did not reach the model, between its call and its step; known of scripts.
        n_cut: training batches ended by a call in eval mode before their backward.
        n_closures: steps of LBFGS.
        n_steps_alone: steps without a training call of the model before them.
        eval_trains: whether the loop trains in eval mode.
        n_clipped: steps before which gradients were written to after their backward, as by clipping.
        reports_steps: whether the loop itself reports when a step begins.
        n_moved_by_hand: number of times that weights moved after a backward without an optimizer step.
        has_other_optimizer: whether the given optimizer has no parameter of the model.
        has_ended: whether the watch is closed.
        is_off: whether hookcb was switched off when it was opened, by HOOKCB=0.
        failure: what failed in the search for losses, "" if nothing did.
        of_rank: what the numbers are those of, if other ranks train the model too.
        way: how the reader follows the loop.
    """

    n_calls: int = 0
    n_part_calls: int = 0
    n_without_grad: int = 0
    n_eval_inside: int = 0
    n_elsewhere: int = 0
    n_penalties: int = 0
    n_losses_outside: int = 0
    n_losses_reported: int = 0
    n_losses_found: int = 0
    n_losses_unfound: int = 0
    n_losses_of_others: int = 0
    n_given: int = 0
    n_beside: int = 0
    n_cut: int = 0
    n_closures: int = 0
    n_steps_alone: int = 0
    n_clipped: int = 0
    eval_trains: bool = False
    reports_steps: bool = False
    n_moved_by_hand: int = 0
    has_other_optimizer: bool = False
    has_ended: bool = False
    is_off: bool = False
    failure: str = ""
    of_rank: str = ""
    way: Way = "watch"


@dataclass(frozen=True, slots=True)
class WatchCoverage:
    """Events of a loop as seen from outside, and what was missed.

    Attributes:
        seen: how often each event was emitted.
        missing: events that were not emitted, each with the reason.
        notes: other observations, and what was ignored.
    """

    seen: Mapping[str, int]
    missing: Mapping[str, str]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, seen: Mapping[str, int], facts: Facts, n_epochs: int, n_optimizers: int) -> "WatchCoverage":
        """Coverage of a loop that reported `n_epochs` and in which `n_optimizers` stepped."""
        expected = [e.value for e in Event if not e.endswith("_fit") and "cancel" not in e]
        missing = {event: _why(event, seen, facts) for event in expected if not seen.get(event)}
        in_order = {e.value: seen[e] for e in Event if seen.get(e)}
        return cls(in_order, missing, tuple(_notes(seen, facts, n_epochs, n_optimizers)))

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"{event}: {n} time{'s' * (n != 1)}" for event, n in self.seen.items()),
                *(f"not seen: {event}: {why}" for event, why in self.missing.items()),
                *self.notes,
            ]
        )


def _why(event: str, seen: Mapping[str, int], facts: Facts) -> str:
    """Reason why an event was not emitted."""
    if facts.is_off:
        return OFF
    when, _, level = event.partition("_")
    if when == "after" and seen.get(f"before_{level}"):
        cut = "was cut short by an error, or not watched to its end"
        return cut if facts.has_ended else f"has not ended yet{_also('epochs', facts)}"
    if level == "validate":
        inside = " except in the middle of a training batch" if facts.n_eval_inside else ""
        return f"the model was not called in eval mode{inside}"
    if level in ("train", "epoch", "batch") or not seen.get("before_batch"):
        return _why_no_batch(seen, facts)
    if level == "pred":
        return _why_no_pred(facts)
    if level == "loss":
        return _why_no_loss(facts)
    if not seen.get("before_train"):
        return "the model was called in eval mode only, as in a validation"
    if level == "step":
        return _why_no_step(facts)
    if facts.n_penalties:
        return "all gradients came with create_graph=True, which is taken for a penalty in the loss"
    return f"no gradient reached the output of the model, which shows the loss{_also('loss', facts)}"


def _also(what: str, facts: Facts) -> str:
    """Advice for the reader of the loop, after a semicolon; "" if there is none."""
    return also(what, way_of(facts.way))


def _why_no_batch(seen: Mapping[str, int], facts: Facts) -> str:
    if seen.get("before_batch"):
        return "the model was called in eval mode only, as in a validation"
    if facts.n_without_grad:
        return "the model was called in train mode only without gradients"
    if facts.n_elsewhere:
        return f"the model was called in other threads only{_also('thread', facts)}"
    return f"the model was not called{_also('model', facts)}"


def _why_no_step(facts: Facts) -> str:
    if facts.n_closures:
        return BY_CLOSURE
    if facts.has_other_optimizer:
        return "the given optimizer has no parameter of the model; give the one that trains it"
    if facts.n_moved_by_hand:
        return "weights moved without an optimizer step, which was seen only afterwards"
    return "no optimizer of the model made a step in this thread, or a GradScaler skipped it"


def _why_no_loss(facts: Facts) -> str:
    if facts.n_losses_outside:
        return f"it came when no batch was open{_also('early', facts)}"
    if facts.n_losses_of_others:
        return f"each backward went on to parameters of other optimizers{_also('loss', facts)}"
    if facts.n_losses_unfound:
        return f"no backward was called on a loss of one element{_also('loss', facts)}"
    return f"it is found when a backward begins, and none was seen{_also('loss', facts)}"


def _why_no_pred(facts: Facts) -> str:
    if facts.n_calls:
        return "no call of the model has ended"
    if facts.n_elsewhere:
        return f"the model was called in other threads only{_also('thread', facts)}"
    if facts.n_losses_found:
        return f"no call of the model was seen, as where its caller is compiled{_also('model', facts)}"
    return f"the model itself was not called{_also('model', facts)}"


def _notes(seen: Mapping[str, int], facts: Facts, n_epochs: int, n_optimizers: int) -> Iterator[str]:
    if facts.is_off:
        yield OFF
        return
    several = n_optimizers if n_optimizers > 1 else 0
    counted = {
        "calls in train mode without gradients, ignored": facts.n_without_grad,
        "calls in eval mode in the middle of a training batch, ignored": facts.n_eval_inside,
        "calls of parts of the model, which had not been called as a whole": facts.n_part_calls,
        "calls or steps in other threads, ignored": facts.n_elsewhere,
        "steps without a training call of the model before them": facts.n_steps_alone,
        "steps of LBFGS, without step events, as they have no single gradient": facts.n_closures,
        "gradients of outputs with create_graph=True, taken for a penalty": facts.n_penalties,
        "losses reported when no batch was open or without a graph, ignored": facts.n_losses_outside,
        "losses reported": facts.n_losses_reported,
        "losses found when backward was called on them": facts.n_losses_found,
        f"backwards whose loss was not found{_also('loss', facts)}": facts.n_losses_unfound,
        "training batches cut short by a call in eval mode before their backward": facts.n_cut,
        "optimizers; a batch ends when all have stepped, or when the next one begins": several,
    }
    yield from filter(None, (facts.of_rank, facts.failure))
    if not n_epochs and facts.way == "watch":  # a trainer reports them
        yield "ends of epochs are unknown; call w.end_epoch() at the end of each"
    yield from (f"{n} {note}" for note, n in counted.items() if n)
    if n := facts.n_moved_by_hand:
        yield (
            f"weights moved {n} time{'s' * (n != 1)} without a step of a watched optimizer; their gradients, "
            "except the first ones, are read when the backward ends"
        )
    if facts.eval_trains:
        yield "batches in eval mode with gradients count as training, as a step followed"
    if (n := facts.n_clipped) and not facts.reports_steps:
        yield (
            f"gradients of {n} step{'s' * (n != 1)} were written to after the backward, as clipping does, "
            f"and are read after clipping{_also('unclipped', facts)}"
        )
