"""Names of fastai, whose code is ported by its imports: `from hookcb.fastai import *`.

Most are hookcb's own. The callbacks defined here differ from hookcb's only in that they take the arguments
of fastai; docs/porting/fastai.md says what acts otherwise than there.
"""

from collections.abc import Callable
from typing import Any

from hookcb.activations.callback import ActivationStats
from hookcb.core.arguments import check_count, check_number
from hookcb.core.callback import Callback
from hookcb.core.events import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
)
from hookcb.core.randomness import set_seed
from hookcb.hooks.callback import HookCallback
from hookcb.hooks.dry_run import dummy_eval, model_sizes, num_features_model
from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from hookcb.hooks.modules import has_params, total_params
from hookcb.hooks.summary import layer_info, module_summary
from hookcb.loggers import CSVLogger
from hookcb.loops import ported
from hookcb.loops.learner import Learner
from hookcb.nans.terminate import TerminateOnNaN
from hookcb.training import accumulate, amp
from hookcb.training.channels_last import ChannelsLast
from hookcb.training.clip import GradientClip
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.metrics import accuracy
from hookcb.training.recorder import Recorder
from hookcb.training.save_model import SaveModelCallback
from hookcb.training.schedules import plateau

__all__ = [
    "ActivationStats",
    "CSVLogger",
    "Callback",
    "CancelBackwardException",
    "CancelBatchException",
    "CancelEpochException",
    "CancelFitException",
    "CancelStepException",
    "CancelTrainException",
    "CancelValidException",
    "ChannelsLast",
    "EarlyStoppingCallback",
    "GradientAccumulation",
    "GradientClip",
    "Hook",
    "HookCallback",
    "Hooks",
    "Learner",
    "MixedPrecision",
    "Recorder",
    "ReduceLROnPlateau",
    "SaveModelCallback",
    "TerminateOnNaNCallback",
    "accuracy",
    "dummy_eval",
    "has_params",
    "hook_output",
    "hook_outputs",
    "layer_info",
    "model_sizes",
    "module_summary",
    "num_features_model",
    "set_seed",
    "total_params",
]
# as a package has, so that Python lets __getattr__ tell why `from hookcb.fastai import MixUp` fails
__path__: list[str] = []

TerminateOnNaNCallback = TerminateOnNaN


class EarlyStoppingCallback(EarlyStopping):
    """`EarlyStopping` with fastai's arguments.

    Args:
        monitor, min_delta, patience: see `EarlyStopping`.
        comp: `np.less` or `np.greater`, which is better; by default less if the name contains "loss" or
            "error".
        **options: the other arguments of `EarlyStopping`.

    >>> from operator import gt
    >>> from hookcb import EarlyStoppingCallback
    >>> EarlyStoppingCallback("accuracy", comp=gt, patience=3).mode
    'max'
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | str | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(monitor, options.pop("mode", comp), min_delta, patience, **options)


class ReduceLROnPlateau(plateau.ReduceLROnPlateau):
    """hookcb's `ReduceLROnPlateau` with fastai's arguments.

    Args:
        monitor, min_delta, min_lr: see `hookcb.ReduceLROnPlateau`.
        comp: `np.less` or `np.greater`, which is better; by default less if the name contains "loss" or
            "error".
        patience: number of epochs in a row without improvement after which the rate is lowered, 1 or more.
        factor: the rate is divided by this, more than 1.
        **options: the other arguments of `hookcb.ReduceLROnPlateau`.
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | str | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        factor: float = 10.0,
        min_lr: float = 0.0,
        **options: Any,
    ) -> None:
        check_count("patience", patience, "epochs")
        check_number("factor", factor, 1, hint=", as the rate is divided by it")
        mode = options.pop("mode", comp)
        super().__init__(monitor, mode, min_delta, patience - 1, 1 / factor, min_lr, **options)


class GradientAccumulation(accumulate.GradientAccumulation):
    """hookcb's `GradientAccumulation` over `n_acc` samples, not batches."""

    def __init__(self, n_acc: int = 32, *, reduction: str | None = None, name: str | None = None) -> None:
        super().__init__(n_acc=n_acc, reduction=reduction, name=name)


class MixedPrecision(amp.MixedPrecision):
    """hookcb's `MixedPrecision`, by default in fp16.

    Args:
        amp_mode: "fp16" or "bf16".
        **options: arguments of GradScaler, and `name`.
    """

    def __init__(self, amp_mode: str = "fp16", **options: Any) -> None:
        super().__init__(amp_mode, **options)


def __getattr__(name: str) -> Any:
    return ported.missing_name(name, __name__)
