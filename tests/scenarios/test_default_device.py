"""Trainings under `torch.set_default_device`: our own numbers stay where they belong."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hookcb
from hookcb import ActivationStats, Callback, Diagnose, GradientClip, GradientHealth, Learner, watch
from hookcb.hooks.dry_run import sample_inputs
from tests.support import along, first

PACKAGE = Path(hookcb.__file__).parent
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
MADE = rf"torch\.({'|'.join(sorted(FACTORIES))})\("
OF_USER = {"testing.py", "cli/demo.py"}  # data that a model gets


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "device": "cpu"}
    return [(torch.randn(16, 6, **make), torch.randint(0, 3, (16,), **make)) for _ in range(30)]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 3), nn.BatchNorm1d(3))


CALLBACKS = {
    "none": list,
    "statistics": lambda: [ActivationStats()],
    "histograms": lambda: [ActivationStats(with_hist=True)],
    "gradients": lambda: [GradientHealth(activations=True)],
    "diagnosis": lambda: [Diagnose("ignore", show=False)],
    "clipping": lambda: [GradientClip(1e9)],
}
OF_LEARNER = {"clipping"}


def run(cbs: list[Callback], watched: bool, default: str) -> tuple[list[torch.Tensor], list[str]]:
    """Weights after a training, and what was recorded."""
    net = model()
    torch.set_default_device(default)
    try:
        if watched:
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            with watch(net, opt, cbs):
                for x, y in data():
                    nn.functional.cross_entropy(net(x), y).backward()
                    opt.step()
                    opt.zero_grad()
        else:
            learn = Learner(data(), net, nn.functional.cross_entropy, torch.optim.SGD, lr=0.1)
            with learn.no_logging():
                learn.fit(1, cbs=cbs)
        shown = [str(cb.state_dict()) for cb in cbs]
        shown += [str(cb.hist(0)) for cb in cbs if isinstance(cb, ActivationStats) and cb.with_hist]
    finally:
        torch.set_default_device(None)  # a device would leave a mode on, through which functions are called
    return list(net.parameters()), shown


@pytest.mark.parametrize(("name", "watched"), first(along(CALLBACKS, [False, True])))
def test_a_default_device_that_is_not_the_models_changes_nothing(name, watched):
    make = (lambda: [Callback()]) if watched and name in OF_LEARNER else CALLBACKS[name]
    weights, shown = run(make(), watched, "cpu")
    others, also_shown = run(make(), watched, "meta")
    assert all(map(torch.equal, weights, others))
    assert also_shown == shown


def test_sample_inputs_are_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        (x,) = sample_inputs((2, 3))
    assert x.is_cpu


def test_each_tensor_that_the_package_makes_names_its_device():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(MADE, text) else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            has_device = any(keyword.arg == "device" for keyword in node.keywords)
            if is_torch and node.func.attr in FACTORIES and not has_device and place not in OF_USER:
                found.append(f"{place}:{node.lineno}")
    assert not found
