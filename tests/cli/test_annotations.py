"""Annotations of a GitHub workflow."""

import pytest

from hookcb import Finding, Verdict
from hookcb.cli.annotations import annotations
from tests.support import start

SICK = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
opt = torch.optim.SGD(model[0].parameters(), 0.1)
for _ in range(12):
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
"""


def of(*findings, **about):
    primary = next((f for f in findings if f.severity != "info"), None)
    status = {None: "healthy", "error": "sick", "warning": "suspect"}[primary and primary.severity]
    return [*annotations(Verdict(status, primary, findings, (), (), **about), "Net", "a,b.py")]


def test_each_cause_is_one_line_with_its_level_and_nothing_else_is_told():
    cause = Finding(
        "x.y", "error", "net.0", message="50% of it:\nall", headline="It fails", next_steps=("Mend it",)
    )
    other = Finding("z.z", "warning", message="Slow")
    effect = Finding("v.w", "error", message="no", consequence_of="x.y")
    note = Finding("n.n", "info", message="by the way")
    first, second = of(cause, other, effect, note)
    assert first == (
        "::error file=a%2Cb.py,title=It fails%3A net.0::"
        "50%25 of it:%0Aall%0ANext: Mend it.%0Ahookcb explain x.y"
    )
    assert second == "::warning file=a%2Cb.py,title=z.z::Slow%0Ahookcb explain z.z"


@pytest.mark.parametrize(("status", "level"), [("healthy", "notice"), ("unknown", "warning")])
def test_a_model_without_causes_has_its_headline(status, level):
    verdict = Verdict(status, None, (), (), (), reason="nothing ran")
    [line] = annotations(verdict, "Net", "train.py")
    assert line == f"::{level} file=train.py,title=Net::{verdict.headline}"


@pytest.mark.slow
def test_the_command_prints_them_below_the_verdict(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SICK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    process = start("-m", "hookcb", "diagnose", "--github", "train.py", log=tmp_path / "log")
    process.join()
    assert process.exitcode == 1
    shown = (tmp_path / "log").read_text(encoding="utf-8")
    lines = [line for line in shown.splitlines() if line.startswith("::")]
    assert lines[0].startswith("::error file=train.py,title=")
    assert "hookcb explain param." in lines[0]
