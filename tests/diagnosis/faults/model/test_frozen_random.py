"""Parameters that are frozen by mistake: at random, late, or as adapters."""

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner, watch
from hookcb.cli.main import main
from hookcb.diagnosis.faults.model.frozen_random import FrozenRandom
from hookcb.diagnosis.measurements.flags import looks_random
from tests.diagnosis.faults.support import numbers
from tests.support import along, first, fit, in_turn

REST = ("param.frozen_random", "param.frozen_late", "param.frozen_adapters")


def net():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(trunk, nn.Linear(32, 16))


def told(verdict):
    return [(x.code, x.severity) for x in verdict.findings if x.code in REST]


def batches(n=30):
    return [(x, x.roll(1, 1)) for x in (numbers(16, 16, seed=i) for i in range(n))]


def fitted(model, opt=None, cbs=()):
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.05)
    learn = Learner(batches(), model, F.mse_loss, opt)
    return fit(learn, 1, cbs=[Diagnose("ignore", show=False), *cbs])


def watched(model, each, n=30, opt=None):
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, opt, cbs=Diagnose("ignore", show=False)) as w:
        for i, (x, y) in enumerate(batches(n)):
            each(i)
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            if loss.requires_grad:
                loss.backward()
            opt.step()
    return w.diagnose()


@pytest.mark.slow
def test_a_random_trunk_or_head_is_a_note_if_loads_are_unknown():
    model = net()
    model[0].requires_grad_(False)
    learn = fitted(model)
    assert told(learn.diagnose()) == [("param.frozen_random", "info")]
    assert pickle.loads(pickle.dumps(learn.diagnosis.evidence().measured(FrozenRandom)))
    model = net()
    model[1].requires_grad_(False)
    assert told(fitted(model).diagnose()) == [("param.frozen_random", "info")]


def test_trained_weights_and_small_parts_and_copies_are_not():
    model = net()
    fitted(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    model[0].requires_grad_(False)
    assert told(fitted(model).diagnose()) == []
    model = net()
    fitted(model, torch.optim.SGD(model.parameters(), lr=1e-4))  # so little that it looks random still
    model[0].requires_grad_(False)
    assert told(fitted(model).diagnose()) == []
    model = net()
    model[0][0].requires_grad_(False)
    assert told(fitted(model).diagnose()) == []

    class WithTarget(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.target = copy.deepcopy(self.net).requires_grad_(False)

        def forward(self, x):
            return self.net(x) + 0 * self.target(x)

    assert told(fitted(WithTarget()).diagnose()) == []


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

def net():
    trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(trunk, nn.Linear(32, 16))

torch.manual_seed(0)
model, other = net(), net()
{load}
model[0].requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(30):
    x = torch.randn(16, 16)
    loss = F.mse_loss(model(x), x.roll(1, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("load", first(["", "model.load_state_dict(other.state_dict())"]))
def test_the_command_hears_whether_weights_were_loaded(load, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(load=load))
    main(["diagnose", str(script)])
    out = capsys.readouterr().out
    if load:
        # without `Loads` a note is all that can be said
        assert "WARNING  A frozen part is still random" not in out
    else:
        assert "param.frozen_random" in out


@pytest.mark.slow
def test_parameters_that_are_frozen_by_plan_are_a_note_and_unfrozen_ones_are_not():
    model = net()
    found = watched(model, lambda i: model[0].requires_grad_(i < 4))
    assert told(found) == [("param.frozen_late", "info")]
    model = net()
    model[0].requires_grad_(False)
    assert told(watched(model, lambda i: model[0].requires_grad_(i >= 4))) == []


def test_an_optimizer_that_steps_on_frozen_parameters_is_told():
    model = net()
    opt = torch.optim.SGD(model[0].parameters(), lr=0.05)
    found = watched(model, lambda i: model[0].requires_grad_(i < 4), opt=opt)
    assert ("param.frozen_late", "warning") in told(found)


class Adapted(nn.Module):
    def __init__(self, is_used):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.normal_(self.lora_B.weight) if is_used else nn.init.zeros_(self.lora_B.weight)
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        return self.head(F.relu(self.body(x) + self.lora_B(self.lora_A(x))))


@pytest.mark.parametrize(
    ("is_used", "is_frozen", "is_held", "severity"),
    first(
        [
            (False, True, False, "warning"),
            (True, True, True, "warning"),
            (True, True, False, "info"),
            (False, False, True, ""),
        ]
    ),
)
def test_adapters_that_are_all_frozen_are_told(is_used, is_frozen, is_held, severity):
    model = Adapted(is_used)
    if is_frozen:
        model.lora_A.requires_grad_(False)
        model.lora_B.requires_grad_(False)
    params = [p for p in model.parameters() if is_held or p.requires_grad]
    found = told(fitted(model, torch.optim.SGD(params, lr=0.05)).diagnose())
    assert [s for code, s in found if code == "param.frozen_adapters"] == ([severity] if severity else [])


@in_turn(("seed", "layer"), along(range(5), [nn.Linear(64, 32), nn.Conv2d(8, 16, 3), nn.Conv1d(16, 64, 1)]))
def test_initialized_weights_look_random(layer, seed):
    torch.manual_seed(seed)
    layer.reset_parameters()
    assert looks_random(layer.weight)
    for init in (nn.init.kaiming_normal_, nn.init.xavier_normal_, nn.init.xavier_uniform_):
        init(layer.weight)
        assert looks_random(layer.weight)


def test_other_weights_do_not():
    torch.manual_seed(0)
    w = nn.Linear(64, 32).weight
    low_rank = torch.randn(32, 2) @ torch.randn(2, 64)
    sparse = w * (torch.rand_like(w) < 0.5)
    for other in (w * 3, w + 0.5 * low_rank * w.std(), sparse, w[:4], w[0]):
        assert not looks_random(other)
