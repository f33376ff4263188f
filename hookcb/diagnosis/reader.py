"""Advice in the words of how the reader runs hookcb: a Learner, a watch, an adapter, or the command."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

Way = Literal["learner", "watch", "lightning", "transformers", "command"]

SHORT_RUNS = "Find a learning rate: short runs with a tenth of it and with ten times as much"
TORCH_CLIPS = "Clip the norm of the gradients: torch.nn.utils.clip_grad_norm_(parameters, 1.0)"
OPTION = "--trace-nan"
TRACE = f"Run hookcb diagnose {OPTION}, which runs the script a second time and names the line"
MACHINE = "look at that machine: other processes, clock rates, disk"
ADVICE: Mapping[str, Mapping[Way, str]] = {  # what to do, by how the reader runs hookcb
    "rate": {
        "learner": "Find a learning rate: learn.lr_find()",
        **dict.fromkeys(("watch", "lightning", "transformers", "command"), SHORT_RUNS),
    },
    "clip": {
        "learner": "Clip the norm of the gradients: GradientClip(1.0)",
        "watch": TORCH_CLIPS,
        "lightning": "Clip the norm of the gradients: Trainer(gradient_clip_val=1.0)",
        "transformers": "Clip the norm of the gradients lower: TrainingArguments(max_grad_norm=0.1)",
        "command": TORCH_CLIPS,
    },
    "NaN": {
        "learner": "Train with cbs=NanTrace(), which stops before the step and names the operation",
        "watch": "Watch the loop with cbs=DetectAnomaly(), which names the operation",
        "lightning": "Train with Trainer(detect_anomaly=True), which names the operation",
        "transformers": "Train with HookcbCallback(DetectAnomaly()), which names the operation",
        "command": TRACE,
    },
    "NaN found": {  # but not its line, in a batch that was run again
        "learner": "Train with cbs=DetectAnomaly(), which names the operation",
        "watch": "Watch the loop with cbs=DetectAnomaly(), which names the operation",
        "lightning": "Train with Trainer(detect_anomaly=True), which names the operation",
        "transformers": "Train with HookcbCallback(DetectAnomaly()), which names the operation",
        "command": TRACE,
    },
    "line": {"command": f"hookcb diagnose {OPTION} names its line"},
    "straggler": {
        "learner": f"Print learn.step_timer.report(), and {MACHINE}",
        **dict.fromkeys(("watch", "lightning", "transformers", "command"), f"L{MACHINE[1:]}"),
    },
    "coverage": {
        "learner": "verdict.coverage",
        "watch": "verdict.coverage",
        "lightning": "diagnose().coverage of the HookcbCallback",
        "transformers": "diagnose().coverage of the HookcbCallback",
        "command": "--coverage",
    },
    "validation": {
        "learner": "give the Learner two loaders, (train, valid)",
        "watch": "call the model in eval mode on new data, and report the loss with w.report_loss(loss)",
        "lightning": "return the loss from validation_step, or log it as val_loss",
        "transformers": "give Trainer(eval_dataset=…), and TrainingArguments(eval_strategy='epoch')",
        "command": "evaluate the model on new data in eval mode, with a loss of torch.nn.functional",
    },
    # what not every reader can do
    "record": {
        "learner": "cbs={}() records them",
        "watch": "cbs={}() records them",
        "lightning": "HookcbCallback({}()) records them",
        "transformers": "HookcbCallback({}()) records them",
    },
    "unclipped": {"watch": "call w.begin_step(optimizer) before you clip"},
    "loss": {
        "watch": "report it with w.report_loss(loss)",
        "lightning": "call self.manual_backward(loss) if training_step calls the backward itself",
        "transformers": "return it as 'loss' in the output of the model",
    },
    "early": {"watch": "report it after the model is called"},
    "epochs": {"watch": "end an epoch with w.end_epoch() or close()"},
    "model": {"watch": "watch the one that is, such as what torch.compile gave"},
    "thread": {"watch": "watch it in the one that trains"},
}
OR_A_LEARNER = ", or a Learner with a batch to look at"
SOURCES = {  # how to get each source of evidence
    "activations": "ActivationStats",
    "gradients": "GradientHealth",
    "loss": "a known loss",
    "batches": "Diagnose",
    "batch": f"Diagnose{OR_A_LEARNER}",
    "model": f"Diagnose{OR_A_LEARNER}",
    "graph": f"Diagnose{OR_A_LEARNER}",
    "optimizers": "an optimizer",
    "steps": "Diagnose",
    "time": "Diagnose",
    "memory": "Diagnose",
    "ranks": "StepTimer",
}
NOT_SEEN = {  # what is missing without it, for a reader who gives no callbacks
    "activations": "no output of a layer was recorded",
    "gradients": "no gradient was recorded at a step",
    "loss": "the loss is not known",
    "batches": "no batch was inspected",
    "batch": "no batch was inspected",
    "model": "the model was not inspected before training",
    "graph": "the graph of the loss was not seen",
    "optimizers": "no optimizer is known",
    "steps": "no step of an optimizer was inspected",
    "time": "no batch was timed",
    "memory": "memory in use is unknown",
    "ranks": "there are no ranks to compare",
}
_runs_command = False


@contextmanager
def by_command() -> Iterator[None]:
    """Whoever reads what is written in this block has run the command."""
    global _runs_command
    before, _runs_command = _runs_command, True
    try:
        yield
    finally:
        _runs_command = before


def way_of(loop: Way) -> Way:
    """How the reader runs hookcb: by the command, or else in the way of this kind of loop."""
    return "command" if _runs_command else loop


def why_unseen(needs: Sequence[str], way: Way) -> str:
    """Reason why checks that need these sources of evidence could not run, and how to get them."""
    texts = NOT_SEEN if way == "command" else SOURCES
    why = " and ".join(dict.fromkeys(texts[need] for need in needs))
    if way == "command":
        return why
    if way != "learner":
        why = why.replace(OR_A_LEARNER, "")
    return f"needs {why}{also('loss', way) if 'loss' in needs else ''}"


def also(what: str, way: Way) -> str:
    """An advice that ends a sentence, after a semicolon; "" if there is none for this reader."""
    return f"; {ADVICE[what][way]}" if way in ADVICE[what] else ""
