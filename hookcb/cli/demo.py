"""The demo: a small network learns handwritten digits, and shows what its layers do."""

from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookcb.activations.callback import ActivationStats
from hookcb.cli.faults import Fault, Setup
from hookcb.cli.ranks import own_rank
from hookcb.core.callback import Callback
from hookcb.core.console import show
from hookcb.core.randomness import random_kept
from hookcb.diagnosis.callback import Diagnose
from hookcb.gradients.callback import GradientHealth
from hookcb.loops.data import Loaders
from hookcb.loops.learner import Learner
from hookcb.processes.process_group import n_processes
from hookcb.profiling.callback import ProfilerCallback
from hookcb.training.amp import MixedPrecision
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.distributed import Distributed
from hookcb.training.metrics import accuracy

PICTURE = "activations.png"
TRACE = "trace.json"
FOLDER = "hookcb-demo"


def show_training(
    learn: Learner, fault: Fault | None = None, with_profile: bool = False, html: Path | None = None
) -> None:
    """Shows what the callbacks of `train_digits` have seen; of several ranks, only rank 0 does.

    Args:
        learn: the learner that `train_digits` has returned.
        fault: the fault that was planted, if any.
        with_profile: whether to show times of layers and phases.
        html: file to write a page to.

    Raises:
        OSError: If the page cannot be written.
    """
    if own_rank():
        return
    if fault is not None:
        show(f"planted fault: {fault.about}", soft_wrap=True, highlight=False)
        _write_page(learn, html)
        show(learn.diagnose(), soft_wrap=True)
        return
    show(learn.activation_stats.report())
    show(learn.gradient_health.report())
    show(_picture(learn.activation_stats), highlight=False, markup=False)
    if with_profile:
        show(learn.profiler.layers())
        show(learn.profiler.report())
        show(f"timeline of the profiled steps: {TRACE}; open it at ui.perfetto.dev", highlight=False)
    last = learn.recorder.rows[-1]
    show(
        f"validation accuracy {last['accuracy']:.1%} after {learn.n_epoch} epochs, on digits never trained on"
    )
    _write_page(learn, html)
    verdict = learn.diagnose()
    show(verdict.headline if verdict else verdict, soft_wrap=True)


def _write_page(learn: Learner, html: Path | None) -> None:
    if html is not None:
        learn.report(html)
        show(f"the run as a page: {html}", soft_wrap=True, highlight=False, markup=False)


def _picture(stats: ActivationStats) -> str:
    if find_spec("matplotlib") is None:
        return f"{PICTURE} was not drawn, because matplotlib is not installed; pip install 'hookcb[plot]'"
    stats.color_dim().savefig(PICTURE)
    return f"histograms of every layer, batch by batch: {PICTURE}"


def digits(batch_size: int = 64, seed: int = 0) -> Loaders:
    """Scikit-learn's 1,797 handwritten digits; every fifth one is held out, 360 in all.

    Args:
        batch_size: samples in a training batch.
        seed: seed of the split and of the order of training batches.

    Returns:
        Loaders of `(x, y)`: x float32 `(N, 1, 8, 8)`, standardized by the training part, y int64 `(N,)`.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed; the message says how to get it.
    """
    try:
        with random_kept():
            from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed; pip install 'hookcb[demo]'"
        ) from missing
    data: Any = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None], torch.tensor(data.target)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    held_out, train = order[::5], order[torch.arange(len(order)) % 5 != 0]
    x = (x - x[train].mean()) / x[train].std()
    return Loaders(
        DataLoader(TensorDataset(x[train], y[train]), batch_size, shuffle=True, generator=generator),
        DataLoader(TensorDataset(x[held_out], y[held_out]), 256),
    )


def build_model(kind: str = "cnn") -> nn.Sequential:
    """Builds a classifier, "cnn" or "mlp", of images `(N, 1, 8, 8)`; it returns scores `(N, 10)`.

    Raises:
        ValueError: If `kind` is anything else.
    """
    if kind == "mlp":
        layers = {
            "flat": nn.Flatten(),
            "hidden": nn.Linear(64, 64),
            "act": nn.ReLU(),
            "head": nn.Linear(64, 10),
        }
    elif kind == "cnn":
        layers = {
            **{f"{name}1": layer for name, layer in _conv(1, 16).items()},
            **{f"{name}2": layer for name, layer in _conv(16, 32).items()},
            "flat": nn.Flatten(),
            "head": nn.Linear(32 * 2 * 2, 10),
        }
    else:
        raise ValueError(f"model must be 'cnn' or 'mlp', got {kind!r}")
    return nn.Sequential(OrderedDict(layers))


def train_digits(
    model: str = "cnn",
    epochs: int = 10,
    seed: int = 0,
    folder: str | Path = "hookcb-demo",
    resume: bool = False,
    trace: str | Path | None = None,
    fault: Fault | None = None,
) -> Learner:
    """Trains for one cycle, on a GPU if there is one, with `Diagnose` and the callbacks that it reads.

    Under torchrun, all of its processes train together.

    Args:
        model: see `build_model`.
        epochs: number of epochs, including those before a resume.
        seed: seed of the weights, the split and the order of batches.
        folder: folder for the checkpoint after each epoch.
        resume: whether to continue from the newest checkpoint in `folder`.
        trace: profile some steps, and write a Chrome trace of them to this file; see `ProfilerCallback`.
        fault: a fault to plant; such a training writes no checkpoint.

    Returns:
        The learner; its `recorder`, `activation_stats` and `gradient_health` have the numbers.

    Raises:
        ValueError, FileNotFoundError: If there is nothing to resume, or the checkpoint does not fit.
    """
    if fault is not None and resume:
        raise ValueError("a training with a fault always starts afresh; leave out --resume or --fault")
    torch.manual_seed(seed)
    setup = Setup(digits(seed=seed), build_model(model), torch.optim.AdamW, lr=1e-2)
    if fault is not None:
        fault.plant(setup)
    device = "cuda" if torch.cuda.device_count() >= max(1, n_processes()) else None
    learn = Learner(
        setup.dls,
        setup.model,
        F.cross_entropy,
        setup.opt_func,
        metrics=accuracy,
        cbs=[Distributed()] if n_processes() > 1 else [],
        device=device,
    )
    cbs: list[Callback] = [ActivationStats(with_hist=True, include_paramless=True), GradientHealth()]
    if not resume:  # in a resumed fit the others have the records from its beginning, but Diagnose does not
        cbs.append(Diagnose(show=False))
    if fault is None:
        cbs.append(Checkpoint(folder))
    if trace is not None:
        cbs.append(ProfilerCallback(wait=5, warmup=2, active=10, trace=trace))
    if device and torch.cuda.is_bf16_supported():  # on a CPU it is slower than float32
        cbs.append(MixedPrecision())
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of layers this small wait for each other, on a busy machine for long
    try:
        learn.fit_one_cycle(epochs, lr_max=setup.lr, cbs=cbs, resume=folder if resume else None)
    finally:
        torch.set_num_threads(n_threads)
    return learn


def _conv(n_in: int, n_out: int) -> dict[str, nn.Module]:
    conv = nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False)
    return {"conv": conv, "norm": nn.BatchNorm2d(n_out), "act": nn.ReLU()}
