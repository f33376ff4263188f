"""`hookcb replay` runs one batch of a fit again, to the bit, and writes nothing."""

import hashlib
import os
import sys

import pytest

from hookcb import Checkpoint, synth_learner
from hookcb.cli.launch import launch
from hookcb.cli.main import main

SCRIPT = """
import sys

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Checkpoint, Diagnose, Learner, Log, Report, SaveModelCallback

torch.manual_seed(0)
y = torch.randint(3, (320,))
x = F.one_hot(y, 4).float() * 2 + torch.randn(320, 4) / 2
x[37], y[37] = 60 * x[37], (y[37] + 1) % 3
dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
learn = Learner((dl, dl), model, F.cross_entropy, torch.optim.Adam, lr=0.01)
writers = [Checkpoint("kept", every=4, keep=99), Log("log.csv"), Report("page.html"), SaveModelCallback()]
with learn.no_logging():
    learn.fit(int(sys.argv[1]), cbs=[*writers, Diagnose(show=False)])
print([f"{f.step} {f.next_steps}" for f in learn.diagnose().findings if f.code == "loss.spike"])
with open("told.txt", "a") as file:
    file.write("the script went on")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def contents(folder):
    return {path: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_a_batch_is_run_again_to_the_bit_and_nothing_is_written(
    folder, capsys, tmp_path_factory, monkeypatch
):
    launch("train.py", ["5"], False, lambda _: None)
    assert "hookcb replay kept --step" in capsys.readouterr().out
    before = contents(folder)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # the script runs where it did
    assert main(["replay", str(folder / "kept"), "--step", "47"]) == 0
    shown = capsys.readouterr().out
    assert "Step 47, batch 7 of epoch 2, counted from 0, run again from epoch-0003-batch-000004.pt" in shown
    assert "it is that of the first run" in shown
    assert "samples with the largest losses, of 16 from 0" in shown
    assert all(name in shown for name in ("layer 3", "0.weight", "3.bias", "step 46", "step 47"))
    assert contents(folder) == before
    assert os.listdir() == []


def test_the_first_batch_has_none_before_it_and_another_script_can_be_given(folder, capsys):
    launch("train.py", ["1"], False, lambda _: None)
    assert main(["replay", "kept", "--step", "0", "--script", "train.py", "2"]) == 0
    shown = capsys.readouterr().out
    assert "run again from the beginning in kept" in shown
    assert "nan" not in shown


@pytest.mark.parametrize(
    ("step", "script", "why"),
    [
        ("99", [], "train.py trains for fewer steps"),
        ("3", ["--script", "other.py"], "other.py ended with exit code 3"),
        ("3", ["--script", "plain.py"], "plain.py ended"),
    ],
)
def test_a_step_that_is_not_reached_is_an_error(folder, step, script, why, capsys):
    launch("train.py", ["1"], False, lambda _: None)
    (folder / "other.py").write_text("raise SystemExit(3)")
    (folder / "plain.py").write_text("")
    assert main(["replay", "kept", "--step", step, *script]) == 1
    assert f"hookcb replay: there is no step {step} of a fit with a Checkpoint in" in (
        said := capsys.readouterr().err
    )
    assert said.strip().endswith(why)
    assert (folder / "told.txt").read_text().count("went on") == 1


def test_another_model_than_the_first_is_said(folder, capsys):
    launch("train.py", ["1"], False, lambda _: None)
    (folder / "train.py").write_text(SCRIPT.replace("manual_seed(0)", "manual_seed(1)"))
    assert main(["replay", "kept", "--step", "2"]) == 0
    assert "; the first run had " in capsys.readouterr().out


def test_a_folder_without_checkpoints_or_without_a_command_is_an_error(folder, capsys, monkeypatch):
    assert main(["replay", "nothing", "--step", "2"]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    learn = synth_learner()
    with learn.no_logging():
        learn.fit(1, cbs=Checkpoint("kept"))
    assert main(["replay", "kept", "--step", "2"]) == 1
    assert "give it: --script SCRIPT ARGS" in capsys.readouterr().err


def test_a_step_must_be_a_number(capsys):
    with pytest.raises(SystemExit):
        main(["replay", "kept", "--step", "-1"])
    assert "step must be a whole number" in capsys.readouterr().err
