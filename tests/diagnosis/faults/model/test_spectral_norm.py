"""Spectral norms that are evaluated before their first training batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Diagnose, watch
from hookcb.cli.main import main
from tests.support import first

CODE = "norm.spectral"


def verdict_of(norm, validates_first=True):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    with watch(model, opt, Diagnose(show=False)) as w:
        if validates_first:
            validate(model, x)
        for _ in range(10):
            opt.zero_grad()
            w.report_loss(F.cross_entropy(model(x), y)).backward()
            opt.step()
        validate(model, x)
    return w.diagnose()


def validate(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def test_a_validation_before_the_training_is_noted():
    found = [f for f in verdict_of(nn.utils.spectral_norm).findings if f.code == CODE]
    assert [(f.severity, f.layer) for f in found] == [("info", "0")]
    assert "before the first batch" in found[0].message


@pytest.mark.parametrize(
    ("norm", "first"),
    [
        (nn.utils.spectral_norm, False),
        (nn.utils.parametrizations.spectral_norm, True),
        (lambda m: m, True),
    ],
)
def test_others_are_silent(norm, first):
    assert CODE not in [f.code for f in verdict_of(norm, first).findings]


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)

def net():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))

def validate(model):
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 4))
    model.train()

model = net()
{first}
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    opt.zero_grad()
    F.cross_entropy(model(torch.randn(16, 4)), torch.randint(0, 3, (16,))).backward()
    opt.step()
validate(model)
"""


@pytest.mark.parametrize(
    ("first", "is_told"),
    first(
        [
            ("validate(model)", True),
            ("", False),
            ("model(torch.randn(16, 4)); validate(model)", False),
            (
                "a = net(); a(torch.randn(16, 4)); model.load_state_dict(a.state_dict()); validate(model)",
                False,
            ),
        ]
    ),
    ids=["first", "last", "after a forward", "loaded"],
)
def test_the_command_hears_validations_before_the_training(tmp_path, capsys, first, is_told):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(first=first))
    main(["diagnose", str(script)])
    assert (CODE in capsys.readouterr().out) is is_told
