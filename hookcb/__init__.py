"""hookcb: callbacks that let you see inside any PyTorch training run."""

from hookcb.randomness import random_kept

with random_kept():  # rich draws a number when it is imported
    import fastcore.foundation  # noqa: F401  # whoever needs it imports it again
    import rich.console  # noqa: F401

from hookcb.callback import Callback
from hookcb.callbacks import (
    EMA,
    ActivationStats,
    ChannelsLast,
    Checkpoint,
    Compile,
    DetectAnomaly,
    EarlyStopping,
    EarlyStoppingCallback,
    Freeze,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    HookCallback,
    MaxTime,
    MemoryStats,
    Metrics,
    MixedPrecision,
    NanTrace,
    OneCycle,
    ProfilerCallback,
    Progress,
    Recorder,
    ReduceLROnPlateau,
    Schedule,
    StepTimer,
    TerminateOnNaN,
    TerminateOnNaNCallback,
    WarmupCosine,
)
from hookcb.coverage import Coverage
from hookcb.diagnose import assert_healthy, diagnose
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.dryrun import dummy_eval, model_sizes, num_features_model
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
from hookcb.freezing import freeze, unfreeze
from hookcb.gradient_flow import check_gradients, gradient_flow
from hookcb.hooks import Hook, Hooks, hook_output, hook_outputs
from hookcb.learner import Learner
from hookcb.loop import Loop
from hookcb.lr_curve import LRFind
from hookcb.metrics import accuracy
from hookcb.modules import find_modules, has_params, total_params
from hookcb.sampling import SamplingCallback
from hookcb.summary import Summary, layer_info, module_summary
from hookcb.testing import assert_no_hooks, check_callback, count_hooks, synth_learner

__version__ = "0.1.0"
from hookcb.loggers import (
    CSVLogger,
    JSONLLogger,
    Log,
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    read_csv,
    read_jsonl,
)
from hookcb.watch import Watch, watch

__all__ = [
    "EMA",
    "ActivationStats",
    "CSVLogger",
    "Callback",
    "CancelBackwardException",
    "CancelBatchException",
    "CancelEpochException",
    "CancelException",
    "CancelFitException",
    "CancelStepException",
    "CancelTrainException",
    "CancelValidException",
    "ChannelsLast",
    "Checkpoint",
    "Compile",
    "Coverage",
    "DetectAnomaly",
    "Diagnose",
    "EarlyStopping",
    "EarlyStoppingCallback",
    "Event",
    "Finding",
    "Freeze",
    "GradientAccumulation",
    "GradientClip",
    "GradientHealth",
    "Hook",
    "HookCallback",
    "Hooks",
    "JSONLLogger",
    "LRFind",
    "Learner",
    "Log",
    "Logger",
    "Loop",
    "MLflowLogger",
    "MaxTime",
    "MemoryStats",
    "Metrics",
    "MixedPrecision",
    "NanTrace",
    "OneCycle",
    "ProfilerCallback",
    "Progress",
    "Recorder",
    "ReduceLROnPlateau",
    "SamplingCallback",
    "Schedule",
    "StepTimer",
    "Summary",
    "TensorBoardLogger",
    "TerminateOnNaN",
    "TerminateOnNaNCallback",
    "Verdict",
    "WarmupCosine",
    "Watch",
    "accuracy",
    "assert_healthy",
    "assert_no_hooks",
    "check_callback",
    "check_gradients",
    "count_hooks",
    "diagnose",
    "dummy_eval",
    "find_modules",
    "freeze",
    "gradient_flow",
    "has_params",
    "hook_output",
    "hook_outputs",
    "layer_info",
    "model_sizes",
    "module_summary",
    "num_features_model",
    "read_csv",
    "read_jsonl",
    "synth_learner",
    "total_params",
    "unfreeze",
    "watch",
]
