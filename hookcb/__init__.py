"""hookcb: callbacks that let you see inside any PyTorch training run."""

from hookcb.callback import Callback
from hookcb.callbacks import ActivationStats, HookCallback, Metrics, Progress, Recorder
from hookcb.events import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    Event,
)
from hookcb.hooks import Hook, Hooks, hook_output, hook_outputs
from hookcb.learner import Learner
from hookcb.loop import Loop
from hookcb.metrics import accuracy
from hookcb.modules import find_modules
from hookcb.sampling import SamplingCallback
from hookcb.testing import assert_no_hooks, check_callback, count_hooks, synth_learner

__version__ = "0.1.0"

__all__ = [
    "ActivationStats",
    "Callback",
    "CancelBackwardException",
    "CancelBatchException",
    "CancelEpochException",
    "CancelException",
    "CancelFitException",
    "CancelStepException",
    "CancelTrainException",
    "CancelValidException",
    "Event",
    "Hook",
    "HookCallback",
    "Hooks",
    "Learner",
    "Loop",
    "Metrics",
    "Progress",
    "Recorder",
    "SamplingCallback",
    "accuracy",
    "assert_no_hooks",
    "check_callback",
    "count_hooks",
    "find_modules",
    "hook_output",
    "hook_outputs",
    "synth_learner",
]
