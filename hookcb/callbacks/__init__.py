"""The callbacks that come with hookcb, one small file each."""

from hookcb.callbacks.accumulate import GradientAccumulation
from hookcb.callbacks.activations import ActivationStats
from hookcb.callbacks.amp import MixedPrecision
from hookcb.callbacks.anomaly import DetectAnomaly
from hookcb.callbacks.channels_last import ChannelsLast
from hookcb.callbacks.checkpoint import Checkpoint
from hookcb.callbacks.clip import GradientClip
from hookcb.callbacks.compile import Compile
from hookcb.callbacks.early_stopping import EarlyStopping, EarlyStoppingCallback
from hookcb.callbacks.ema import EMA
from hookcb.callbacks.freeze import Freeze
from hookcb.callbacks.gradients import GradientHealth
from hookcb.callbacks.hook import HookCallback
from hookcb.callbacks.max_time import MaxTime
from hookcb.callbacks.memory import MemoryStats
from hookcb.callbacks.metrics import Metrics
from hookcb.callbacks.nan import TerminateOnNaN, TerminateOnNaNCallback
from hookcb.callbacks.nan_trace import NanTrace
from hookcb.callbacks.one_cycle import OneCycle
from hookcb.callbacks.plateau import ReduceLROnPlateau
from hookcb.callbacks.profiler import ProfilerCallback
from hookcb.callbacks.progress import Progress
from hookcb.callbacks.recorder import Recorder
from hookcb.callbacks.schedule import Schedule
from hookcb.callbacks.step_timer import StepTimer
from hookcb.callbacks.warmup_cosine import WarmupCosine

__all__ = [
    "EMA",
    "ActivationStats",
    "ChannelsLast",
    "Checkpoint",
    "Compile",
    "DetectAnomaly",
    "EarlyStopping",
    "EarlyStoppingCallback",
    "Freeze",
    "GradientAccumulation",
    "GradientClip",
    "GradientHealth",
    "HookCallback",
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
    "Schedule",
    "StepTimer",
    "TerminateOnNaN",
    "TerminateOnNaNCallback",
    "WarmupCosine",
]
