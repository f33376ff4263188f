"""Other tools that record statistics, each attached to a plain loop or to the loop that it belongs to.

All write to memory or to a temporary folder, never to a network. Only Composer's monitor is timed, on a plain
loop: its hooks stay registered, and its logger discards all. Ignite's handler writes TensorBoard files;
Lightning's `log_dict` has no logger.
"""

import importlib
import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from loop import Batches
from timing import Run
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from workloads import Workload, loss_func

from hookcb import find_modules

# Attaches a tool to a model; what it returns is called after each backward.
Install = Callable[[nn.Module, Path, ExitStack], Callable[[], object]]


def plain(workload: Workload, install: Install, folder: Path, stack: ExitStack) -> Run:
    """A plain loop with a tool attached."""
    torch.manual_seed(0)
    model, (x, y) = workload.model(), workload.batch()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    look = install(model, folder, stack)

    def run() -> None:
        for _ in range(workload.steps):
            loss_func(model(x), y).backward()
            look()
            opt.step()
            opt.zero_grad()

    return run


def nothing(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    """Leaves the loop plain."""
    return lambda: None


def by_hooks(act: Callable[[str, Tensor], object]) -> Install:
    """Calls `act` with the name and the output of each layer."""

    def install(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
        for name, m in find_modules(model).items():

            def hook(m: nn.Module, i: Any, o: Any, name: str = name) -> None:
                act(name, o[0] if isinstance(o, tuple) else o)

            stack.callback(m.register_forward_hook(hook).remove)
        return lambda: None

    return install


def no_act(name: str, o: Tensor) -> None:
    """Does nothing."""


def four_reductions(name: str, o: Tensor) -> None:
    """The operations that statistics need at least."""
    o = o.detach()
    o.sum(), torch.linalg.vector_norm(o), o.amin(), o.amax()


def three_by_hand() -> Callable[[str, Tensor], object]:
    """Mean, standard deviation and share near zero, as fastai takes them."""
    seen: list[tuple[float, float, float]] = []

    def act(name: str, o: Tensor) -> None:
        o = o.detach()
        seen.append((o.mean().item(), o.std().item(), (o.abs() <= 0.05).float().mean().item()))

    return act


def miniai() -> Callable[[str, Tensor], object]:
    """Mean, standard deviation and a histogram of 40 bins, as the course with miniai takes them."""
    means: list[float] = []
    stds: list[float] = []
    hists: list[Tensor] = []

    def act(name: str, o: Tensor) -> None:
        o = o.detach().cpu()
        means.append(o.mean().item())
        stds.append(o.std().item())
        hists.append(o.abs().histc(40, 0, 10))

    return act


def wandb_watch(log: str) -> Install:
    def install(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
        import wandb

        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        # its hooks log to the one run that is active
        record = wandb.run or stack.enter_context(wandb.init(mode="offline", dir=folder, settings=quiet))
        record.watch(model, log=log, log_freq=1)
        return lambda: record.log({})

    return install


def composer_monitor(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    let_torchvision_in()
    from composer.callbacks import ActivationMonitor

    monitor = ActivationMonitor("1ba")
    monitor.create_module_names(model)
    logger = SimpleNamespace(destinations=(), log_metrics=lambda metrics: None)
    monitor.register_forward_hook(model, logger, step=None)
    return lambda: None


@cache
def let_torchvision_in() -> None:
    """Make torchvision importable, which Composer imports.

    PyPI's build is for CUDA: with a CPU build of torch it cannot load its operators, and needs two of them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def hf_debug(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    return lambda: None


def tensorboard(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    from torch.utils.tensorboard import SummaryWriter

    writer = stack.enter_context(SummaryWriter(folder))
    calls = dict.fromkeys(find_modules(model), 0)

    def log(name: str, o: Tensor) -> None:
        writer.add_histogram(name, o, calls[name])
        calls[name] += 1

    return by_hooks(log)(model, folder, stack)


def norms_by_hand(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    """The checks people write by hand: norms, and whether there is a NaN or inf."""
    seen: list[dict[str, tuple[float, bool]]] = []

    def look() -> None:
        grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        seen.append(
            {
                name: (g.norm().item(), bool(g.isnan().any().item()) or bool(g.isinf().any().item()))
                for name, g in grads
            }
        )

    return look


def clip_of_torch(model: nn.Module, folder: Path, stack: ExitStack) -> Callable[[], object]:
    params, norms = list(model.parameters()), list[Tensor]()
    return lambda: norms.append(clip_grad_norm_(params, float("inf")))


def fastai(workload: Workload, *options: bool) -> Run:
    """Train with fastai and, if there are any options, its ActivationStats with these."""
    from fastai.callback.hook import ActivationStats as FastaiStats
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner as FastaiLearner
    from fastai.optimizer import OptimWrapper

    class FastaiBatches(Batches):
        n_inp, bs, device = 1, 64, torch.device("cpu")

    def sgd(params: Any, **kwargs: Any) -> OptimWrapper:
        return OptimWrapper(params, torch.optim.SGD)

    torch.manual_seed(0)
    data = [workload.batch()] * workload.steps
    dls = DataLoaders(FastaiBatches(data), FastaiBatches([]), device=torch.device("cpu"))
    stats = [FastaiStats(*options)] if options else []
    learn = FastaiLearner(dls, workload.model(), loss_func=loss_func, opt_func=sgd, lr=1e-3, cbs=stats)
    learn.remove_cb(ProgressCallback)

    def run() -> None:
        with learn.no_logging():
            learn.fit(1)

    return run


def ignite(workload: Workload, watched: bool) -> Run:
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers.tensorboard_logger import GradsScalarHandler

    torch.manual_seed(0)
    model = workload.model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = create_supervised_trainer(model, opt, loss_func)
    if watched:
        from ignite.handlers.tensorboard_logger import TensorboardLogger

        folder = tempfile.mkdtemp()
        logger = TensorboardLogger(log_dir=folder)
        handler = GradsScalarHandler(model, reduction=torch.norm)
        logger.attach(trainer, log_handler=handler, event_name=Events.ITERATION_COMPLETED)
    data = Batches([workload.batch()] * workload.steps)
    return lambda: trainer.run(data, max_epochs=1)


def lightning(workload: Workload, watched: bool) -> Run:
    import lightning as pl
    from lightning.pytorch.utilities import grad_norm

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.model()

        def training_step(self, batch: Any, i: int) -> Tensor:
            x, y = batch
            return loss_func(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if watched:
                self.log_dict(grad_norm(self.net, norm_type=2))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    torch.manual_seed(0)
    module, data = Module(), Batches([workload.batch()] * workload.steps)

    def run() -> None:
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(quiet, False))
        trainer.fit(module, data)

    return run
