"""Cost of recording gradients: time relative to the same training without it, compared with peers.

    python benchmarks/gradients.py [--only tiny mlp resnet transformer] [--rounds 9] [--ours] [--busy]

A turn is a fit of many steps, including setup and reading the results. hookcb is compared with its Learner
without callbacks, Lightning with its Trainer without `grad_norm`, Ignite with its engine, the others with a
plain loop. All write to memory or to a temporary folder, never to a network. Peers that cannot be imported
are listed below the table. Ignite's handler writes TensorBoard files; Lightning's `log_dict` has no logger.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from activations import ALL, STEPS, hookcb, made
from loop import Batches
from timing import Group, Run, compare_groups
from torch import nn
from torch.nn.utils import clip_grad_norm_
from workloads import Workload, loss_func

from hookcb import ActivationStats, Callback, GradientHealth

EXACT = "every element of gradients, and of weights up to 65,536 elements; otherwise 1,024"
OURS: dict[str, tuple[Callable[[], list[Callback]], str]] = {
    "hookcb without callbacks": (list, ""),
    "hookcb without callbacks again (noise)": (list, ""),
    "GradientHealth()": (lambda: [GradientHealth()], EXACT),
    "GradientHealth(every=10)": (lambda: [GradientHealth(every=10)], f"every 10th step: {EXACT}"),
    "GradientHealth(on_nonfinite='skip')": (
        lambda: [GradientHealth(on_nonfinite="skip")],
        f"{EXACT}; one flag per step",
    ),
    "GradientHealth(activations=True)": (
        lambda: [GradientHealth(activations=True)],
        f"{EXACT}; gradients of outputs like ActivationStats",
    ),
    "GradientHealth, ActivationStats (every=10)": (
        lambda: [GradientHealth(every=10), ActivationStats(every=10)],
        f"every 10th step: {EXACT}; outputs",
    ),
}

# Called after each backward of a plain loop; created once per model.
After = Callable[[], object]
Peer = Callable[[nn.Module, Path, ExitStack], After]


def after_backward(workload: Workload, install: Peer, folder: Path, stack: ExitStack) -> Run:
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


def nothing(model: nn.Module, folder: Path, stack: ExitStack) -> After:
    return lambda: None


def by_hand(model: nn.Module, folder: Path, stack: ExitStack) -> After:
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


def clip_of_torch(model: nn.Module, folder: Path, stack: ExitStack) -> After:
    params, norms = list(model.parameters()), list[torch.Tensor]()
    return lambda: norms.append(clip_grad_norm_(params, float("inf")))


def wandb_watch(model: nn.Module, folder: Path, stack: ExitStack) -> After:
    import wandb

    quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    record = stack.enter_context(wandb.init(mode="offline", dir=folder, settings=quiet))
    record.watch(model, log="gradients", log_freq=1)
    return lambda: record.log({})


def anomaly_mode(workload: Workload, folder: Path, stack: ExitStack) -> Run:
    """Autograd's anomaly mode: checks the gradients of every operation, and keeps its stack trace."""
    run = after_backward(workload, nothing, folder, stack)

    def watched() -> None:
        with torch.autograd.detect_anomaly():
            run()

    return watched


PEERS: dict[str, tuple[Peer, str]] = {
    "plain loop": (nothing, ""),
    "loop of .norm().item(), isnan, isinf": (by_hand, "every element of gradients"),
    "torch clip_grad_norm_(inf)": (clip_of_torch, "every element of gradients: one number"),
    "wandb.watch(log='gradients', log_freq=1)": (wandb_watch, "every element of gradients: histograms"),
}
ANOMALY = "torch.autograd.detect_anomaly", "every element of all gradients: whether NaN"
NOTES = {"Lightning grad_norm": "every element of gradients: norms", ANOMALY[0]: ANOMALY[1]}
NOTES["Ignite GradsScalarHandler(norm)"] = "every element of gradients: norms"


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

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
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


def groups_of(name: str, only_ours: bool, stack: ExitStack) -> tuple[list[Group], str]:
    """Contestants for a workload, and a note about those that are left out."""
    steps, peer_steps = STEPS[name]
    workload, short = replace(ALL[name], steps=steps), replace(ALL[name], steps=peer_steps)
    groups = [Group({who: hookcb(workload, cbs()) for who, (cbs, _) in OURS.items()}, steps)]
    if only_ours:
        return groups, "without peers"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    loops: dict[str, Callable[[], Run]] = {
        who: lambda p=peer: after_backward(short, p, folder, stack) for who, (peer, _) in PEERS.items()
    }
    loops[ANOMALY[0]] = lambda: anomaly_mode(short, folder, stack)
    makers: list[dict[str, Callable[[], Run]]] = [
        loops,
        {
            "Ignite without handlers": lambda: ignite(short, False),
            "Ignite GradsScalarHandler(norm)": lambda: ignite(short, True),
        },
        {
            "Lightning without grad_norm": lambda: lightning(short, False),
            "Lightning grad_norm": lambda: lightning(short, True),
        },
    ]
    missing: list[str] = []
    groups += [Group(runs, peer_steps) for contestants in makers if (runs := made(contestants, missing))]
    return groups, "not installed: " + "; ".join(missing) if missing else ""


def show_costs(name: str, rounds: int, only_ours: bool, clock: Callable[[], float]) -> None:
    notes = {who: note for who, (_, note) in (OURS | PEERS).items()} | NOTES
    with ExitStack() as stack:
        groups, caption = groups_of(name, only_ours, stack)
        compare_groups(ALL[name].title, groups, rounds, notes=notes, caption=caption, clock=clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), help="workloads")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ours", action="store_true", help="no peers")
    parser.add_argument("--busy", action="store_true", help="measure processor time, for a busy machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers warn about themselves
    for name in args.only:
        show_costs(name, args.rounds, args.ours, time.process_time if args.busy else time.perf_counter)


if __name__ == "__main__":
    main()
