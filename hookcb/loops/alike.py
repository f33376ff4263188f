"""Facts that must be the same on all ranks, so that they train one model; compared before a fit."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookcb.core.callback import Callback
from hookcb.core.loop import Loop, label_of
from hookcb.hooks.modules import named_modules
from hookcb.processes.batches import labels_of
from hookcb.training.max_time import MaxTime
from hookcb.training.metrics import Metrics

SIMPLE = (bool, int, float, str, tuple, type(None))


def facts_of(learn: Loop, loss_func: Callable[..., Any] | None) -> dict[str, Any]:
    """Facts that must be the same on all ranks, by what they are; none if this process trains alone."""
    if learn.ranks.world == 1:
        return {}
    cbs = [cb for cb in learn.cbs if not cb.shows_only]
    loss = getattr(loss_func, "__qualname__", type(loss_func).__name__)
    facts: dict[str, Any] = {"callbacks": labels_of(learn)}
    for cb in cbs:
        facts |= {f"{label_of(cb)}({name}=…)": value for name, value in _options(cb).items()}
    facts["metrics"] = [name for cb in cbs if isinstance(cb, Metrics) for name in cb.names]
    facts["validation loader"] = "none" if getattr(learn.dls, "valid", None) is None else "one"
    facts |= {"loss function": loss, "optimizer": type(learn.opt).__name__}
    for i, group in enumerate(learn.opt.param_groups):
        where = f" of parameter group {i}" if len(learn.opt.param_groups) > 1 else ""
        for name, value in group.items():
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if name != "params" and isinstance(value, SIMPLE):
                facts[
                    "learning rate" + where if name == "lr" else f"option {name} of the optimizer{where}"
                ] = value
    modules = named_modules(learn.model)
    facts["number of modules"] = len(modules)
    return facts | {f"layer {name}" if name else "model": type(m).__name__ for name, m in modules.items()}


def _options(cb: Callback) -> dict[str, Any]:
    """Options of a callback that takes part in the training; ranks may end by clocks that differ."""
    if not type(cb).__module__.startswith(("hookcb.training.", "hookcb.fastai")) or isinstance(cb, MaxTime):
        return {}
    names = inspect.signature(type(cb)).parameters
    options = {name: vars(cb)[name] for name in names if name in vars(cb)}
    return {name: value for name, value in options.items() if isinstance(value, SIMPLE)}
