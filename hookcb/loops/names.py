"""Types of callbacks as attributes of a loop, by their default names."""

from hookcb.activations.callback import ActivationStats
from hookcb.core.loop import Loop
from hookcb.gradients.callback import GradientHealth
from hookcb.loggers.callback import Log
from hookcb.nans.anomaly import DetectAnomaly
from hookcb.nans.terminate import TerminateOnNaN
from hookcb.nans.trace import NanTrace
from hookcb.profiling.callback import ProfilerCallback
from hookcb.profiling.memory.callback import MemoryStats
from hookcb.profiling.steps.timer import StepTimer
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.ema import EMA
from hookcb.training.metrics import Metrics
from hookcb.training.progress import Progress
from hookcb.training.recorder import Recorder


class NamedLoop(Loop):
    """A loop with typed attributes for hookcb's callbacks; for others there is `learn.get(MyCallback)`."""

    activation_stats: ActivationStats
    checkpoint: Checkpoint
    detect_anomaly: DetectAnomaly
    early_stopping: EarlyStopping
    ema: EMA
    gradient_health: GradientHealth
    log: Log
    memory_stats: MemoryStats
    metrics: Metrics
    nan_trace: NanTrace
    profiler: ProfilerCallback
    progress: Progress
    recorder: Recorder
    step_timer: StepTimer
    terminate_on_nan: TerminateOnNaN
