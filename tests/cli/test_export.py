"""`hookcb export` writes the weights in a checkpoint as one plain file."""

import pytest
import torch

from hookcb import EMA, Checkpoint, synth_learner
from hookcb.cli.main import main
from hookcb.core.alone import ALONE
from hookcb.training.checkpoint.folder import write_folder


@pytest.fixture
def learn(tmp_path):
    learn = synth_learner()
    with learn.no_logging():
        learn.fit(1, cbs=[Checkpoint(tmp_path / "runs"), EMA(0.5)])
    return learn


def test_a_checkpoint_gives_the_weights_that_were_validated(learn, tmp_path, capsys):
    assert main(["export", str(tmp_path / "runs"), str(tmp_path / "weights.pt")]) == 0
    assert "weights.pt: " in (shown := capsys.readouterr().out)
    assert "epoch-0001.pt" in shown
    weights = torch.load(tmp_path / "weights.pt")
    for name, x in learn.ema.model.state_dict().items():
        assert torch.equal(weights[name], x)


def test_a_file_of_save_gives_its_weights(learn, tmp_path):
    learn.save(tmp_path / "saved.pt")
    assert main(["export", str(tmp_path / "saved.pt"), str(tmp_path / "weights.pt")]) == 0
    assert list(torch.load(tmp_path / "weights.pt")) == list(learn.model.state_dict())


def test_a_folder_of_several_ranks_gives_safetensors_too(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    x = torch.arange(6.0).view(2, 3)
    state = {"format": 2, "epoch": 1, "model": {"a": x, "b": x.T}, "cbs": {}}
    write_folder(state, {}, tmp_path / "epoch-0001", ALONE)
    assert main(["export", str(tmp_path / "epoch-0001"), str(tmp_path / "weights.safetensors")]) == 0
    weights = safetensors.load_file(tmp_path / "weights.safetensors")
    assert torch.equal(weights["b"], x.T)


@pytest.mark.parametrize("place", ["missing", "empty", "foreign.pt"])
def test_what_is_no_checkpoint_is_an_error_that_names_it(tmp_path, capsys, place):
    (tmp_path / "empty").mkdir()
    torch.save([1], tmp_path / "foreign.pt")
    assert main(["export", str(tmp_path / place), str(tmp_path / "weights.pt")]) == 1
    assert place in capsys.readouterr().err
    assert not (tmp_path / "weights.pt").exists()


@pytest.mark.parametrize("part", ["state.pt", "__0_0.distcp"])
def test_a_part_of_a_checkpoint_is_an_error_that_names_the_whole(tmp_path, capsys, part):
    state = {"format": 2, "epoch": 1, "model": {"a": torch.ones(2)}, "cbs": {}}
    write_folder(state, {}, tmp_path / "epoch-0001", ALONE)
    assert main(["export", str(tmp_path / "epoch-0001" / part), str(tmp_path / "weights.pt")]) == 1
    assert f"give its folder, {tmp_path / 'epoch-0001'}" in capsys.readouterr().err


def test_a_folder_to_write_to_is_an_error(learn, tmp_path, capsys):
    assert main(["export", str(tmp_path / "runs"), str(tmp_path)]) == 1
    assert f"{tmp_path} is a folder; give the name of the file to write" in capsys.readouterr().err


def test_without_safetensors_it_says_how_to_get_it(learn, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hookcb.cli.export.find_spec", lambda name: None)
    assert main(["export", str(tmp_path / "runs"), str(tmp_path / "weights.safetensors")]) == 1
    assert "pip install safetensors" in capsys.readouterr().err
