"""A small training of a model that may be in a wrapper, and what must hold for it."""

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, load_report, watch
from hookcb.cli.main import main

N = 24  # batches: some are inspected, and layers are timed in the ones after them
LAYERS = ["body.0", "body.1", "head"]
PARAMS = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]
OF_US = "a part of Diagnose", "a part of hookcb", "could not be watched", "please report it"


class Net(nn.Module):
    """A layer in a container, and one beside it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


def train(model):
    opt = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), 1e-2)
    weight = torch.randn(8, 1)
    for _ in range(N):
        x = torch.randn(16, 8)
        F.mse_loss(model(x), x @ weight).backward()
        opt.step()
        opt.zero_grad()


def check_watched(model, layers=LAYERS, params=PARAMS):
    """Watch a training of `model`: nothing of hookcb fails, and layers have these names."""
    with watch(model, cbs=Diagnose(show=False)) as w:
        train(model)
    verdict = w.diagnose()
    lines = "\n".join([*verdict.coverage, *verdict.looked, str(verdict), *w.coverage.notes])
    assert not [text for text in OF_US if text in lines]
    assert w.seen["after_step"] == N
    assert [w.activation_stats.names, w.gradient_health.names] == [layers, params]
    assert [row.name for row in w.report().data.modules if row.name in layers] == layers
    return verdict


def check_command(wrap, folder, capsys, title="Net", layers=LAYERS, params=PARAMS):
    """Run `hookcb diagnose` on a script that trains `module:function` of a Net; as `check_watched`."""
    module, name = wrap.split(":")
    script, page = folder / "script.py", folder / "run.html"
    script.write_text(
        f"import torch\nfrom {module} import {name} as wrap\nfrom tests.scenarios.support import Net, train\n"
        "torch.manual_seed(0)\ntrain(wrap(Net()))\n"
    )
    code = main(["diagnose", "--coverage", "--html", str(page), str(script)])
    shown = capsys.readouterr()
    assert not [text for text in OF_US if text in shown.out + shown.err]
    assert shown.out.splitlines()[1] == f"{title}, trained by Adam", shown.out + shown.err
    assert code == 0, shown.out
    data = load_report(page)
    assert [[*data.layers], [*data.params]] == [layers, params]
