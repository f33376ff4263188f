"""Types of callbacks as attributes of a loop, by their default names."""

from typing import Any

from hookcb.activations.callback import ActivationStats
from hookcb.core.callback import Callback
from hookcb.core.callback_list import Callbacks, listed
from hookcb.core.loop import Loop
from hookcb.gradients.callback import GradientHealth
from hookcb.loggers.callback import Log
from hookcb.loggers.files import CSVLogger, JSONLLogger
from hookcb.loggers.mlflow import MLflowLogger
from hookcb.loggers.tensorboard import TensorBoardLogger
from hookcb.nans.anomaly import DetectAnomaly
from hookcb.nans.terminate import TerminateOnNaN
from hookcb.nans.trace import NanTrace
from hookcb.profiling.callback import ProfilerCallback
from hookcb.profiling.memory.callback import MemoryStats
from hookcb.profiling.steps.timer import StepTimer
from hookcb.report.collect import outline
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.ema import EMA
from hookcb.training.metrics import Metrics
from hookcb.training.progress import Progress
from hookcb.training.recorder import Recorder

LOGGERS = (CSVLogger, JSONLLogger, MLflowLogger, TensorBoardLogger)


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

    def _repr_html_(self) -> str:
        return outline(self)

    def _checked(self, cbs: Callbacks) -> list[Callback]:
        return super()._checked([_as_callback(cb) for cb in listed(cbs)])


def _as_callback(cb: Any) -> Any:
    """A callback that logs, if `cb` is a logger of hookcb."""
    return Log(cb) if isinstance(cb, LOGGERS) else cb
