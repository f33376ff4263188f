"""Trainers that get their verdict without a change of their call, or, with HOOKCB=0, none at all."""

import importlib
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch

from hookcb import ActivationStats, Diagnose, count_hooks
from hookcb.core.switch import OFF
from tests.interop.trainers import LossNet, hf_trainer, lightning_trainer, loaders, quiet, transformers

with quiet():
    from transformers import Trainer, TrainingArguments

    from hookcb.adapters.lightning import DiagnoseCallback, HookcbCallback
    from hookcb.adapters.transformers import DiagnoseCallback as ReportedDiagnose
    from tests.interop.lightning_modules import CallsItself

ROOT = Path(__file__).parents[2]
GROUP = "lightning.pytorch.callbacks_factory"


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The entry points of pyproject.toml, as an installed package has them."""
    info = tmp_path / "hookcb-0.dist-info"
    info.mkdir()
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    lines = [f"[{GROUP}]", *(f"{name} = {function}" for name, function in given.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hookcb\nVersion: 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def lightning_fit(*callbacks):
    """The trainer and the module of a fit, with what hookcb has hooked in the midst of it."""
    trainer, module = lightning_trainer(None), CallsItself()
    trainer.callbacks[:0] = callbacks
    hooks, forward = [], module.forward
    module.forward = lambda x: hooks.append(count_hooks(module)) or forward(x)
    trainer.fit(module, *loaders())
    ours = [cb for cb in trainer.callbacks if isinstance(cb, HookcbCallback)]
    return ours, hooks, [p.detach().clone() for p in module.parameters()]


@pytest.mark.usefixtures("installed")
def test_lightning_gets_a_verdict_by_hookcb_1_alone(monkeypatch):
    for value in ("", "0"):
        monkeypatch.setenv("HOOKCB", value)
        ours, hooks, plain = lightning_fit()
        assert not ours
        assert not any(hooks)
    monkeypatch.setenv("HOOKCB", "1")
    (callback,), hooks, weights = lightning_fit()
    assert type(callback) is DiagnoseCallback
    assert callback.diagnose().status == "healthy"
    assert any(hooks)
    assert all(map(torch.equal, weights, plain))


@pytest.mark.usefixtures("installed")
def test_a_trainer_that_has_a_verdict_gets_no_second_one(monkeypatch):
    monkeypatch.setenv("HOOKCB", "1")
    (own, added), *_ = lightning_fit(HookcbCallback(Diagnose()))
    assert own.diagnose().status == "healthy"
    assert added.followed is None
    (_, added), *_ = lightning_fit(HookcbCallback(ActivationStats()))
    assert added.diagnose().status == "healthy"


def test_lightning_is_left_alone_by_hookcb_0(monkeypatch):
    monkeypatch.setenv("HOOKCB", "0")
    (callback,), hooks, weights = lightning_fit(HookcbCallback(Diagnose(), ActivationStats()))
    assert not any(hooks)
    assert callback.diagnose().reason == OFF
    assert not callback.coverage.seen
    assert all(map(torch.equal, weights, lightning_fit()[2]))


def test_transformers_is_left_alone_by_hookcb_0(monkeypatch):
    monkeypatch.setenv("HOOKCB", "0")
    model, callback = transformers([Diagnose(), ActivationStats()])
    assert callback.diagnose().reason == OFF
    assert not callback.coverage.seen
    assert all(map(torch.equal, model.parameters(), transformers(None)[0].parameters()))


def test_transformers_gets_a_verdict_by_report_to(tmp_path):
    model = LossNet()
    trainer = hf_trainer(model, str(tmp_path), None, report_to="hookcb")
    trainer.train()
    (callback,) = (cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ReportedDiagnose))
    assert callback.diagnose().status == "healthy"
    assert count_hooks(model) == 0
    with tempfile.TemporaryDirectory() as folder:
        plain = Trainer(LossNet(), TrainingArguments(folder, report_to="none", use_cpu=True))
        everything = TrainingArguments(folder, report_to="all", use_cpu=True)
    assert not any(isinstance(cb, ReportedDiagnose) for cb in plain.callback_handler.callbacks)
    assert "hookcb" not in everything.report_to
