"""Cost of the loop itself: microseconds per step and ratio to a handwritten loop, compared with peers.

    python benchmarks/loop.py [--steps 2000] [--rounds 9]

The first table is for the bare loop. The others are for one-cycle training in bfloat16, with two batches per
step, clipped gradients, and averaged weights, compared with the same written by hand.

Linear 10-10-1 (ReLU between), batch 32, SGD, one thread, batches in a list. All contestants run in one
process, in turn, round after round in changing order, so that other load on the machine affects all alike.
A ratio is the median over rounds of a contestant's time divided by the plain loop's in the same round. Peers
that are not installed are left out; the extra `bench` lists them.
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from timing import Run, compare
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import EMA, Callback, Event, GradientAccumulation, GradientClip, Learner, MixedPrecision, Progress
from hookcb.cli import demo


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    hundred = [(torch.randn(32, 10), torch.randn(32, 1)) for _ in range(100)]
    return [hundred[i % 100] for i in range(steps)]


class Batches:
    """A loader that no library can mistake for anything else."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def plain(steps: int) -> Run:
    """The bare loop: only the five lines that train."""
    model, data = net(), batches(steps)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> None:
        model.train()
        for x, y in data:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()

    return run


def quickstart(steps: int) -> Run:
    """The loop of PyTorch's quickstart tutorial, which moves each batch to the device."""
    model, data, device = net(), batches(steps), torch.device("cpu")
    opt = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> None:
        model.train()
        for x, y in data:
            x, y = x.to(device), y.to(device)
            pred = model(x)
            loss = F.mse_loss(pred, y)
            loss.backward()
            opt.step()
            opt.zero_grad()

    return run


def hookcb_bare(steps: int, n_noop: int = 0) -> Run:
    """A Learner without callbacks, or with some that are called at every event and do nothing."""
    learn = Learner(batches(steps), net(), F.mse_loss, torch.optim.SGD, lr=0.01)
    learn.remove_cbs(learn.cbs)
    noops = {str(event): _nothing for event in Event}
    learn.add_cbs([Callback(name=f"noop{i}", **noops) for i in range(n_noop)])
    return lambda: learn.fit(1)


def hookcb_default(steps: int) -> Run:
    """A Learner as people use it: it records losses and learning rates, and prints nothing."""
    learn = Learner(batches(steps), net(), F.mse_loss, torch.optim.SGD, lr=0.01)
    learn.remove_cb(Progress)
    return lambda: learn.fit(1)


def by_hand(make: Callable[[], nn.Module], data: list[Any], loss_func: Callable[..., torch.Tensor]) -> Run:
    """One cycle, bfloat16, two batches per step, clipping, and averaged weights, with torch's own tools."""
    model, n = make(), len(data)
    opt = torch.optim.AdamW(model.parameters())

    def run() -> None:
        schedule = OneCycleLR(
            opt,
            1e-3,
            n,
            pct_start=0.25,
            div_factor=25,
            final_div_factor=4e3,
            base_momentum=0.85,
            max_momentum=0.95,
        )
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
        model.train()
        for i, (x, y) in enumerate(data):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_func(model(x), y)
            (loss / 2).backward()
            if i % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                average.update_parameters(model)
                opt.zero_grad()
            if i + 1 < n:
                schedule.step()

    return run


def with_callbacks(
    make: Callable[[], nn.Module], data: list[Any], loss_func: Callable[..., torch.Tensor]
) -> Run:
    """The same with hookcb's callbacks."""
    learn = Learner(data, make(), loss_func, torch.optim.AdamW)
    learn.remove_cbs(learn.cbs)
    learn.add_cbs([MixedPrecision(), GradientAccumulation(2), GradientClip(1.0), EMA(0.999)])
    return lambda: learn.fit_one_cycle(1)


def _nothing(cb: Callback) -> None:
    """Do nothing."""


def fastai(steps: int) -> Run:
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner as FastaiLearner
    from fastai.optimizer import OptimWrapper

    class FastaiBatches(Batches):
        n_inp, bs, device = 1, 32, torch.device("cpu")

    dls = DataLoaders(FastaiBatches(batches(steps)), FastaiBatches(batches(1)), device=torch.device("cpu"))
    sgd = lambda params, **_: OptimWrapper(params, torch.optim.SGD)  # noqa: E731
    learn = FastaiLearner(dls, net(), loss_func=F.mse_loss, opt_func=sgd, lr=0.01)
    learn.remove_cb(ProgressCallback)

    def run() -> None:
        with learn.no_logging():
            learn.fit(1)

    return run


def lightning(steps: int) -> Run:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    data = Batches(batches(steps))  # a list would be read as several loaders

    def run() -> None:
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(quiet, False))
        trainer.fit(Module(), data)

    return run


def ignite(steps: int) -> Run:
    from ignite.engine import create_supervised_trainer

    model, data = net(), batches(steps)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, opt, F.mse_loss)
    return lambda: trainer.run(data, max_epochs=1)


def skorch(steps: int) -> Run:
    from skorch import NeuralNet

    data = batches(steps)
    model = NeuralNet(
        net(), nn.MSELoss, optimizer=torch.optim.SGD, lr=0.01, max_epochs=1, train_split=None, verbose=0,
        iterator_train=lambda dataset, **_: Batches(data),
    )  # fmt: skip
    model.initialize()
    return lambda: model.partial_fit(data[0][0].numpy(), data[0][1].numpy())


def accelerate(steps: int) -> Run:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, data = net(), batches(steps)
    model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def run() -> None:
        model.train()
        for x, y in data:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()

    return run


CONTESTANTS: dict[str, Callable[[int], Run]] = {
    "plain loop": plain,
    "plain loop again (noise)": plain,
    "PyTorch quickstart loop": quickstart,
    "hookcb, no callbacks": hookcb_bare,
    "hookcb, 10 no-op callbacks": lambda steps: hookcb_bare(steps, 10),
    "hookcb, default callbacks": hookcb_default,
    "Ignite": ignite,
    "skorch": skorch,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "fastai": fastai,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console = Console()
    runs: dict[str, Run] = {}
    for name, make in CONTESTANTS.items():
        try:
            runs[name] = make(args.steps)
        except (
            ImportError,
            RuntimeError,
        ) as missing:  # RuntimeError: a broken binary
            console.print(f"{name} is left out: {missing}")
    compare("Linear 10-10-1, batch 32", runs, args.steps, args.rounds)
    digits = list(demo.digits().train)[:-1]
    for title, make, data, loss_func in (
        ("Linear 10-10-1, batch 32", net, batches(args.steps), F.mse_loss),
        ("CNN of the demo, batch 64", demo.build_model, digits * (args.steps // 100), F.cross_entropy),
    ):
        these = {"by hand": by_hand, "by hand again (noise)": by_hand, "hookcb": with_callbacks}
        runs = {name: contestant(make, data, loss_func) for name, contestant in these.items()}
        compare(f"{title}, with everything", runs, len(data), args.rounds)


if __name__ == "__main__":
    main()
