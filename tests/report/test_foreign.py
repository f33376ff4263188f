"""Files of other programs are read without running code, and told apart from those of hookcb."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.optim import Adam

from hookcb.report.foreign import read_events, read_table, read_weights
from hookcb.report.foreign_facts import facts_of


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped():
    model = net()
    opt = Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    opt.step()
    return model, opt


def names_in(file):
    return [name for name, _, is_state in read_weights(file) if not is_state]


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict", "model"])
def test_common_nestings_are_read(tmp_path, key):
    model, opt = stepped()
    torch.save({"epoch": 3, key: model.state_dict(), "opt": opt.state_dict()}, tmp_path / "a.ckpt")
    assert names_in(tmp_path / "a.ckpt") == list(model.state_dict())
    states = [name for name, _, is_state in read_weights(tmp_path / "a.ckpt") if is_state]
    assert "opt: exp_avg of parameter 0" in states
    assert len(states) == 3 * 6


def test_several_models_are_told_apart_and_old_files_are_read(tmp_path):
    both = {"gen": net().state_dict(), "disc": net().state_dict()}
    torch.save(both, tmp_path / "gan.pth", _use_new_zipfile_serialization=False)
    assert "gen: 0.weight" in names_in(tmp_path / "gan.pth")
    assert "disc: 0.weight" in names_in(tmp_path / "gan.pth")
    torch.save(torch.ones(2), tmp_path / "x.pt")
    assert names_in(tmp_path / "x.pt") == ["the tensor"]


RAN = []


class Evil:
    def __reduce__(self):
        return RAN.append, (1,)


def test_code_in_a_file_is_not_run_and_the_message_says_how_to_convert_it(tmp_path):
    torch.save({"model": net().state_dict(), "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="hookcb runs no code from a file"):
        list(read_weights(tmp_path / "evil.pt"))
    assert RAN == []
    torch.save(net(), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"container\.Sequential, .* convert it: torch\.save") as told:
        list(read_weights(tmp_path / "module.pt"))
    assert "\n" not in str(told.value)


def test_a_truncated_file_is_told(tmp_path):
    torch.save(net().state_dict(), tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        list(read_weights(tmp_path / "a.pt"))
    torch.save({"epoch": 3}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="no tensors"):
        list(read_weights(tmp_path / "b.pt"))


def test_weights_of_folders_are_found(tmp_path):
    for name in ("pytorch_model-00001.bin", "pytorch_model-00002.bin", "optimizer.bin", "scheduler.bin"):
        torch.save(net().state_dict(), tmp_path / name)
    assert facts_of(tmp_path).summary.startswith(f"{2 * len(net().state_dict())} tensors, ")
    assert "in 2 files" in facts_of(tmp_path).summary
    (tmp_path / "results.csv").write_text("epoch,loss\n1,2\n")
    assert facts_of(tmp_path).curves["loss"].values == [2.0]


def test_safetensors_are_read_or_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"0" * 50)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hookcb\[safetensors\]'"):
        list(read_weights(tmp_path / "a.safetensors"))


def test_safetensors_and_truncated_ones(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    library.save_file(net().state_dict(), tmp_path / "a.safetensors")
    assert sorted(names_in(tmp_path / "a.safetensors")) == sorted(net().state_dict())
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or damaged"):
        list(read_weights(tmp_path / "a.safetensors"))


def test_events_of_tensorboard_are_read(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for i in range(5):
            writer.add_scalar("loss", i / 2, i)
    assert read_events(tmp_path)["loss"].values == [0, 0.5, 1, 1.5, 2]
    assert facts_of(tmp_path).curves["loss"].values == [0, 0.5, 1, 1.5, 2]


def table(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    return read_table(tmp_path / "a.csv")


def test_tables_have_padded_names_empty_cells_and_other_delimiters(tmp_path):
    curves, unit = table(tmp_path, "      epoch,   train/loss, val/loss\n 0, 1.5,\n 1, nan, 2\n")
    assert unit == "epoch"
    assert curves["train/loss"].values[0] == 1.5
    assert math.isnan(curves["train/loss"].values[1])
    assert list(curves["val/loss"]) == [(1, 2.0)]
    curves, unit = table(tmp_path, "epoch;step;loss;name\n0;1;5;a\n0;2;4;b\n0;2;3;c\n")
    assert unit == "step"
    assert {name: list(x) for name, x in curves.items()} == {"loss": [(1, 5.0), (2, 3.0)]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "has no column step, global_step, iteration, iter or epoch; it has: a, b"),
        ("epoch,name\n1,a\n", "has no numbers beside its column epoch"),
        ("epoch,loss\n", "has no numbers"),
        ("\n", "no header"),
    ],
)
def test_tables_without_numbers_are_told(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        table(tmp_path, text)
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_table(tmp_path / "a.csv")


@pytest.mark.parametrize(("name", "said"), [("a.txt", "of no known kind"), ("a.pt", "cannot be read")])
def test_other_files_are_told(tmp_path, name, said):
    (tmp_path / name).write_text("hello")
    with pytest.raises(ValueError, match=said):
        facts_of(tmp_path / name)
