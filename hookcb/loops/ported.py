"""fastai's names of a Learner, and what stands for names of fastai, Lightning and Keras that are not here."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

from hookcb.core.arguments import check_count, check_number
from hookcb.core.batch import n_batches
from hookcb.core.optim import Rates
from hookcb.processes.groups import without_replicas
from hookcb.training.amp import MixedPrecision
from hookcb.training.freeze import freeze, unfreeze
from hookcb.training.schedules.schedule import Schedule

CHECKPOINT = "Checkpoint('runs/first', monitor='valid_loss'), whose best epoch is best.pt"
LOGGERS = "Log(…), with a run of wandb or trackio, TensorBoardLogger, MLflowLogger, JSONLLogger or CSVLogger"
SCHEDULE = "Schedule(partial(StepLR, step_size=3), per='epoch') for any of torch, OneCycle, WarmupCosine"
OF_BATCH = "a Callback that changes self.learn.xb and self.learn.yb in before_batch"
FUNCTIONS = "Callback(after_batch=function)"
PREDICTIONS = "learn.get_preds(dl)"
LOOP = "Learner(dls, model, loss_func), or HookcbCallback of hookcb.adapters.lightning in Lightning's own"

PUBLIC: Mapping[str, str] = {  # names that people import, and what hookcb has in their place
    "HookcbCallback": "one for each trainer, in hookcb.adapters.lightning and hookcb.adapters.transformers",
    "GradNorm": "GradientHealth, which records the norm of each parameter's gradient",
    # fastai
    "TrackerCallback": "EarlyStopping and Checkpoint, which take monitor=, mode= and min_delta=",
    "ProgressCallback": "Progress, which every Learner has",
    "ShowGraphCallback": "learn.recorder.plot(), or Report('run.html', every=30) while it trains",
    "WandbCallback": LOGGERS,
    "TensorBoardCallback": LOGGERS,
    "ParamScheduler": SCHEDULE,
    "SchedCos": SCHEDULE,
    "combined_cos": SCHEDULE,
    "MixUp": OF_BATCH,
    "CutMix": OF_BATCH,
    "FetchPredsCallback": PREDICTIONS,
    "GatherPredsCallback": PREDICTIONS,
    "CollectDataCallback": FUNCTIONS,
    "TrainEvalCallback": "nothing to add, as the loop sets train and eval itself",
    "Adam": "torch.optim.Adam, and AdamW for fastai's decoupled weight decay",
    "RAdam": "torch.optim.RAdam",
    "AvgMetric": "metrics=function, which is averaged over samples",
    "AMPMode": "the words 'fp16' and 'bf16'",
    "event": "Event, whose members are names too: Event.BEFORE_BATCH",
    "LRFinder": "learn.lr_find()",
    "NonNativeMixedPrecision": "MixedPrecision",
    "ShortEpochCallback": "a Callback that raises CancelTrainException in after_batch",
    "SkipToEpoch": "Checkpoint(folder), with learn.fit(…, resume='latest')",
    "load_learner": "torch.load(file), of a model, and learn.load(file)",
    "DataLoaders": "(train, valid), a pair of DataLoaders of torch",
    "error_rate": "metrics={'error_rate': lambda pred, y: 1 - accuracy(pred, y)}",
    "params": "a list of parameter groups for the optimizer: opt_func=lambda _, lr: Adam(groups, lr=lr)",
    "to_device": "Learner(device='auto')",
    # Lightning
    "Trainer": LOOP,
    "LightningModule": LOOP,
    "ModelCheckpoint": CHECKPOINT,
    "LearningRateMonitor": "learn.recorder.lrs, and Log(…), which logs lr",
    "LearningRateFinder": "learn.lr_find()",
    "DeviceStatsMonitor": "MemoryStats and StepTimer",
    "StochasticWeightAveraging": "SWA",
    "WeightAveraging": "EMA and SWA",
    "GradientAccumulationScheduler": "GradientAccumulation(n)",
    "Timer": "MaxTime",
    "RichProgressBar": "Progress, which every Learner has",
    "TQDMProgressBar": "Progress, which every Learner has",
    "ModelSummary": "learn.summary(), module_summary(model, input_size=…)",
    "RichModelSummary": "learn.summary(), module_summary(model, input_size=…)",
    "BackboneFinetuning": "Freeze('body', until=3)",
    "BaseFinetuning": "Freeze('body', until=3)",
    "WandbLogger": LOGGERS,
    "MLFlowLogger": "MLflowLogger",
    "seed_everything": "set_seed",
    # Keras
    "Model": "Learner(dls, model, loss_func), for any module of torch",
    "ModelSaver": CHECKPOINT,
    "BackupAndRestore": "Checkpoint(folder), with learn.fit(…, resume='latest')",
    "LearningRateScheduler": SCHEDULE,
    "TensorBoard": LOGGERS,
    "RemoteMonitor": LOGGERS,
    "History": "learn.recorder.rows, losses and lrs",
    "LambdaCallback": FUNCTIONS,
    "CallbackList": "cbs=[…]",
    "ProgbarLogger": "Progress, which every Learner has",
    "SwapEMAWeights": "EMA, whose average is validated",
    "set_random_seed": "set_seed",
}
OF_LEARNER: Mapping[str, str] = {  # attributes of other trainers, and what a Learner has in their place
    "path": "none: save, load and Checkpoint take paths",
    "model_dir": "none: save, load and Checkpoint take paths",
    "export": "torch.save(learn.model), or learn.save(file)",
    "show_results": PREDICTIONS,
    "tta": PREDICTIONS,
    "ordered_cbs": "learn.show_training_loop()",
    "validation_context": "learn.added_cbs(…) around learn.validate()",
    "smooth_loss": "learn.recorder.losses",
    "splitter": PUBLIC["params"],
    "wd_bn_bias": PUBLIC["params"],
    "moms": "fit_one_cycle(moms=(0.95, 0.85))",
    "history": "learn.recorder.rows",
    "compile": "the callback Compile(); optimizer and loss are arguments of Learner",
    "evaluate": "learn.validate()",
    "train_on_batch": "learn.one_batch(batch)",
    "logged_metrics": "learn.recorder.rows[-1]",
    "callback_metrics": "learn.recorder.rows[-1]",
    "current_epoch": "learn.epoch",
    "global_step": "learn.train_iter",
    "should_stop": "raise CancelFitException in a callback",
    "test": "learn.validate(dl)",
}


def missing_name(name: str, module: str = "hookcb") -> Any:
    """Raises the error for a name that `module` does not have; it says what stands for one of others.

    Raises:
        ImportError: For a known name, in `from hookcb import name`, whose message Python would replace.
        AttributeError: Else, so that `hasattr` works.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name not in PUBLIC:
        raise AttributeError(text)
    frame = inspect.currentframe()
    asking = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    if asking is not None and asking.f_code.co_name == "_handle_fromlist":
        raise ImportError(f"hookcb has no {name}; it has {PUBLIC[name]}; see docs/porting/index.md")
    raise AttributeError(f"{text}; hookcb has {PUBLIC[name]}")


def fit_flat_cos(
    learn: Any,
    n_epoch: int,
    lr: Rates | None = None,
    div_final: float = 1e5,
    pct_start: float = 0.75,
    cbs: Any = (),
    **options: Any,
) -> None:
    """Trains with a rate that is flat, and falls along a cosine at the end.

    Args:
        learn: the learner.
        n_epoch: number of epochs.
        lr: the flat rate, see `fit`; by default the optimizer's.
        div_final: the rate ends at `lr / div_final`.
        pct_start: share of the fit in which it is flat, 0..1.
        cbs: callbacks for this fit.
        **options: those of `fit`.
    """
    check_number("pct_start", pct_start, 0, 1, closed=True)
    check_number("div_final", div_final)
    n = max(1, n_epoch * _length(learn, "fit_flat_cos") - 1)

    def factor(step: int) -> float:
        share = min(1.0, max(0.0, (step / n - pct_start) / (1 - pct_start))) if pct_start < 1 else 0.0
        return 1 / div_final + (1 - 1 / div_final) * (1 + math.cos(math.pi * share)) / 2

    with learn.added_cbs(Schedule(partial(LambdaLR, lr_lambda=factor))):
        learn.fit(n_epoch, lr, cbs=cbs, **options)


def fit_sgdr(
    learn: Any,
    n_cycles: int,
    cycle_len: int,
    lr_max: Rates | None = None,
    cycle_mult: int = 2,
    cbs: Any = (),
    **options: Any,
) -> None:
    """Trains in cycles, each of which lowers the rate along a cosine, by torch's CosineAnnealingWarmRestarts.

    Args:
        learn: the learner.
        n_cycles: number of cycles.
        cycle_len: epochs in the first one.
        lr_max: rate at the beginning of a cycle, see `fit`; by default the optimizer's.
        cycle_mult: how many times longer than the one before a cycle is.
        cbs: callbacks for this fit.
        **options: those of `fit`.
    """
    check_count("n_cycles", n_cycles, "cycles")
    check_count("cycle_len", cycle_len, "epochs")
    check_count("cycle_mult", cycle_mult, "times")
    n_epoch = sum(cycle_len * cycle_mult**i for i in range(n_cycles))
    first = cycle_len * _length(learn, "fit_sgdr")
    with learn.added_cbs(Schedule(partial(CosineAnnealingWarmRestarts, T_0=first, T_mult=cycle_mult))):
        learn.fit(n_epoch, lr_max, cbs=cbs, **options)


def fine_tune(
    learn: Any,
    epochs: int,
    base_lr: float = 2e-3,
    freeze_epochs: int = 1,
    lr_mult: float = 100,
    pct_start: float = 0.3,
    div: float = 5.0,
    cbs: Any = (),
    **options: Any,
) -> None:
    """Trains the last child of the model with all others frozen, then the whole model with half the rate.

    Args:
        learn: the learner.
        epochs: number of epochs for the whole model.
        base_lr: highest rate for the last child.
        freeze_epochs: number of epochs for it.
        lr_mult: how many times lower the rate of the optimizer's first parameter group is than that of its
            last, for the whole model; those between are spread by equal factors.
        pct_start: share of the second fit in which the rate rises, between 0 and 1.
        div: the second fit begins at a rate that is this many times lower.
        cbs: callbacks for both fits.
        **options: those of `fit_one_cycle`.
    """
    check_number("base_lr", base_lr)
    check_number("lr_mult", lr_mult)
    learn.freeze()
    try:
        learn.fit_one_cycle(freeze_epochs, slice(base_lr), pct_start=0.99, cbs=cbs, **options)
    finally:
        learn.unfreeze()
    rates = slice(base_lr / 2 / lr_mult, base_lr / 2)
    learn.fit_one_cycle(epochs, rates, pct_start=pct_start, div=div, cbs=cbs, **options)


def freeze_to(learn: Any, n: int) -> None:
    """Freezes the children of the model before the n-th of those with parameters, and unfreezes the others.

    `n` counts as an index does: -1 leaves the last one to train, 0 all. A fit that follows makes a new
    optimizer of `opt_func`. To freeze by name there are `freeze(model, "body.*")` and the callback `Freeze`.

    Raises:
        IndexError: If there are not as many children with parameters.
    """
    model: nn.Module = without_replicas(learn.model)
    names = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    if not -len(names) <= n <= max(0, len(names) - 1):
        raise IndexError(f"freeze_to({n}), but the model's children with parameters are {', '.join(names)}")
    unfreeze(model)
    if frozen := names[:n]:
        freeze(model, frozen)


def freeze_body(learn: Any) -> None:
    """Freezes all children of the model but the last one with parameters; `freeze_to` says more."""
    learn.freeze_to(-1)


def unfreeze_all(learn: Any) -> None:
    """Makes all parameters of the model trainable."""
    learn.freeze_to(0)


def to_fp16(learn: Any, **options: Any) -> Any:
    """Trains in half precision from now on: adds `MixedPrecision("fp16")`; returns the learner."""
    return learn.add_cb(MixedPrecision("fp16", **options))


def to_bf16(learn: Any) -> Any:
    """Trains in bfloat16 from now on: adds `MixedPrecision("bf16")`; returns the learner."""
    return learn.add_cb(MixedPrecision("bf16"))


def to_fp32(learn: Any) -> Any:
    """Removes `MixedPrecision`; returns the learner."""
    is_mixed = any(isinstance(cb, MixedPrecision) for cb in learn.cbs)
    return learn.remove_cb(MixedPrecision) if is_mixed else learn


def set_weight_decay(opt: Any, wd: float) -> None:
    """Sets the weight decay of all groups of an optimizer, as that understands it.

    Raises:
        TypeError, ValueError: If `wd` is not a number of 0 or more, or the optimizer has no weight decay.
    """
    check_number("wd", wd, closed=True)
    for group in opt.param_groups:
        if "weight_decay" not in group:
            raise ValueError(f"wd is {wd:g}, but {type(opt).__name__} has no weight_decay")
        group["weight_decay"] = wd


def _length(learn: Any, method: str) -> int:
    n = n_batches(learn.dls.train)
    if n is None:
        raise ValueError(f"{method} needs the number of batches, and the training loader has no length")
    return n
