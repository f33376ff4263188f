"""The public names of hookcb, which the package loads when one of them is first used."""

import hookcb.adapters  # noqa: F401  # the attribute, which imports an adapter when it is used
from hookcb.activations.callback import ActivationStats
from hookcb.activations.coord_check import CoordCheck, coord_check
from hookcb.activations.records import ActivationRecords
from hookcb.core.callback import Callback
from hookcb.core.events import (
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
from hookcb.core.loop import Loop
from hookcb.core.randomness import set_seed
from hookcb.core.sampling import SamplingCallback
from hookcb.diagnosis.callback import Diagnose
from hookcb.diagnosis.one_backward import check_gradients
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.fastai import EarlyStoppingCallback, SaveModelCallback, TerminateOnNaNCallback
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.flow import gradient_flow
from hookcb.gradients.records import GradientRecords
from hookcb.hooks.callback import HookCallback
from hookcb.hooks.coverage import Coverage
from hookcb.hooks.dry_run import dummy_eval, model_sizes, num_features_model
from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from hookcb.hooks.modules import find_modules, has_params, total_params
from hookcb.hooks.summary import Summary, layer_info, module_summary
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
from hookcb.loops.learner import Learner
from hookcb.loops.lr_curve import LRFind
from hookcb.loops.preflight import assert_healthy, diagnose
from hookcb.loops.watch import watch
from hookcb.loops.watcher import Watch
from hookcb.nans.anomaly import DetectAnomaly
from hookcb.nans.terminate import TerminateOnNaN
from hookcb.nans.trace import NanTrace
from hookcb.processes.exchange import RankError
from hookcb.profiling.callback import ProfilerCallback
from hookcb.profiling.memory.callback import MemoryStats
from hookcb.profiling.steps.timer import StepTimer
from hookcb.report.callback import Report
from hookcb.report.compare import compare
from hookcb.report.page import load_report
from hookcb.testing import assert_no_hooks, check_callback, count_hooks, synth_learner
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision
from hookcb.training.channels_last import ChannelsLast
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.clip import GradientClip
from hookcb.training.compile import Compile
from hookcb.training.distributed import Distributed
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.ema import EMA
from hookcb.training.freeze import Freeze, freeze, unfreeze
from hookcb.training.max_time import MaxTime
from hookcb.training.metrics import Metrics, accuracy
from hookcb.training.progress import Progress
from hookcb.training.recorder import Recorder
from hookcb.training.schedules.one_cycle import OneCycle
from hookcb.training.schedules.plateau import ReduceLROnPlateau
from hookcb.training.schedules.schedule import Schedule
from hookcb.training.schedules.warmup_cosine import WarmupCosine
from hookcb.training.swa import SWA

__all__ = [
    "EMA",
    "SWA",
    "ActivationRecords",
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
    "CoordCheck",
    "Coverage",
    "DetectAnomaly",
    "Diagnose",
    "Distributed",
    "EarlyStopping",
    "EarlyStoppingCallback",
    "Event",
    "Finding",
    "Freeze",
    "GradientAccumulation",
    "GradientClip",
    "GradientHealth",
    "GradientRecords",
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
    "RankError",
    "Recorder",
    "ReduceLROnPlateau",
    "Report",
    "SamplingCallback",
    "SaveModelCallback",
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
    "compare",
    "coord_check",
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
    "load_report",
    "model_sizes",
    "module_summary",
    "num_features_model",
    "read_csv",
    "read_jsonl",
    "set_seed",
    "synth_learner",
    "total_params",
    "unfreeze",
    "watch",
]
