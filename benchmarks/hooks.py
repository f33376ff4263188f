"""Cost of hooks: time relative to a plain training step on three workloads, compared with fastai and PyTorch.

    python benchmarks/hooks.py [--only mlp resnet transformer] [--rounds 9]

Hooks are on all leaf modules. fastai is left out if it is not installed.
"""

import argparse
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from timing import Run, compare
from torch import nn
from workloads import WORKLOADS, Workload

from hookcb import Hooks, find_modules, hook_outputs


def nothing(m: nn.Module, i: Any, o: Any) -> None:
    """Do nothing."""


def mean(m: nn.Module, i: Any, o: Any) -> Any:
    return o[0].mean() if isinstance(o, tuple) else o.mean()


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    return find_modules(model, include_paramless=True)


@contextmanager
def torch_hooks(model: nn.Module, kind: str) -> Iterator[None]:
    with ExitStack() as stack:
        for m in leaves(model).values():
            stack.callback(getattr(m, f"register_{kind}_hook")(nothing).remove)
        yield


@contextmanager
def torch_gradients(model: nn.Module) -> Iterator[None]:
    """Keep output gradients as recipes do: retain_grad on each output."""
    outputs: list[Any] = []

    def keep(m: nn.Module, i: Any, o: Any) -> None:
        o = o[0] if isinstance(o, tuple) else o
        o.retain_grad()
        outputs.append(o)

    with ExitStack() as stack:
        for m in leaves(model).values():
            stack.callback(m.register_forward_hook(keep).remove)
        yield


def fastai_means(model: nn.Module) -> Any:
    from fastai.callback.hook import Hooks as FastaiHooks

    return FastaiHooks(list(leaves(model).values()), mean)


CONTESTANTS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: ExitStack(),
    "plain again (noise)": lambda model: ExitStack(),
    "PyTorch forward hooks that do nothing": lambda model: torch_hooks(model, "forward"),
    "hookcb, Hooks that do nothing": lambda model: Hooks(leaves(model), nothing),
    "hookcb, Hooks that do nothing, detach=False": lambda model: Hooks(leaves(model), nothing, detach=False),
    "hookcb, Hooks storing means": lambda model: Hooks(leaves(model), mean),
    "fastai, Hooks storing means": fastai_means,
    "PyTorch full backward hooks that do nothing": lambda model: torch_hooks(model, "full_backward"),
    "hookcb, gradient hooks that do nothing": lambda model: Hooks(leaves(model), nothing, is_forward=False),
    "PyTorch, outputs and gradients by retain_grad": torch_gradients,
    "hookcb, hook_outputs(grad=True)": lambda model: hook_outputs(leaves(model), grad=True),
}


def contestant(workload: Workload, hooks: Callable[[nn.Module], Any]) -> Run:
    model, turn = workload.train()

    def run() -> None:
        with hooks(model):
            turn()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="workloads")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # we know that the inputs of the first layer need no gradient
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    chosen = {
        name: hooks
        for name, hooks in CONTESTANTS.items()
        if not name.startswith("fastai") or importlib.util.find_spec("fastai")
    }
    for name in args.only:
        workload = WORKLOADS[name]
        runs = {who: contestant(workload, hooks) for who, hooks in chosen.items()}
        compare(workload.title, runs, workload.steps, args.rounds)


if __name__ == "__main__":
    main()
