"""A checkpoint in a folder is whole or not there, and what is damaged is named."""

import json
import os
import pickle
import shutil

import pytest
import torch

from hookcb.core.alone import ALONE
from hookcb.training.checkpoint import folder as module
from hookcb.training.checkpoint.folder import (
    copy_checkpoint,
    is_folder_of_ranks,
    read_folder,
    remove_checkpoint,
    remove_unfinished,
    with_tensors,
    write_folder,
)

STATE = {
    "format": 2,
    "epoch": 3,
    "model": {"w": torch.arange(6.0).view(2, 3)},
    "cbs": {"a": [torch.ones(2), 5]},
}


@pytest.fixture
def written(tmp_path):
    write_folder(STATE, {"random": 1}, tmp_path / "epoch-0003", ALONE)
    return tmp_path / "epoch-0003"


def test_tensors_of_the_model_are_read_apart_from_the_rest(written):
    state = read_folder(written, ALONE)
    assert state["model"]["w"].is_meta
    assert state["model"]["w"].shape == (2, 3)
    assert torch.equal(state["cbs"]["a"][0], torch.ones(2))
    assert state["cbs"]["a"][1] == 5
    model = with_tensors(state["model"], "model", written)
    assert torch.equal(model["w"], STATE["model"]["w"])
    assert STATE["model"]["w"].device.type == "cpu"  # what was written is unchanged


def test_nothing_unfinished_stays_beside_it(written):
    assert os.listdir(written.parent) == ["epoch-0003"]
    assert json.loads((written / "hookcb.json").read_text())["world"] == 1


@pytest.mark.parametrize("name", [".metadata", "state.pt", "rank-0.pt", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["changed", "short", "missing"])
def test_a_damaged_part_is_named(written, name, how):
    content = bytearray((written / name).read_bytes())
    content[len(content) // 2] ^= 1
    (written / name).unlink()
    if how != "missing":
        (written / name).write_bytes(content if how == "changed" else content[:-1])
    with pytest.raises(ValueError, match=f"epoch-0003 is damaged: {name} is missing, or does not match"):
        read_folder(written, ALONE)


def test_a_marker_that_cannot_be_read_is_damage(written):
    (written / "hookcb.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged: hookcb\.json cannot be read"):
        read_folder(written, ALONE)


def test_the_table_of_contents_runs_no_code(written):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(written / "evil"),)

    (written / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises((ValueError, pickle.UnpicklingError), match="does not belong"):
        with_tensors(torch.empty(2, 3, device="meta"), "model.w", written)
    assert not (written / "evil").exists()


def test_a_folder_without_its_marker_is_no_checkpoint(written):
    assert is_folder_of_ranks(written)
    (written / "hookcb.json").unlink()
    assert not is_folder_of_ranks(written)


def test_writing_fails_whole_if_the_disk_does(written, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_whole", fail)
    with pytest.raises(OSError, match="No space"):
        write_folder({**STATE, "epoch": 4}, {}, written, ALONE)
    assert read_folder(written, ALONE)["epoch"] == 3
    remove_unfinished(written.parent)
    assert os.listdir(written.parent) == ["epoch-0003"]


def test_one_of_the_same_name_is_replaced(written):
    write_folder({**STATE, "epoch": 4}, {}, written, ALONE)
    assert read_folder(written, ALONE)["epoch"] == 4


def test_one_that_was_being_replaced_when_the_process_was_killed_is_back(written):
    shutil.move(written, written.with_name("best.replaced.partial"))
    remove_unfinished(written.parent)
    assert os.listdir(written.parent) == ["best"]
    assert read_folder(written.with_name("best"), ALONE)["epoch"] == 3


@pytest.mark.parametrize("has_links", [True, False])
def test_a_copy_stays_when_the_original_is_removed(written, monkeypatch, has_links):
    if not has_links:

        def fail(*args, **kwargs):
            raise OSError("no links here")

        monkeypatch.setattr(os, "link", fail)
    for _ in range(2):
        copy_checkpoint(written, written.with_name("best"))
    remove_checkpoint(written)
    assert os.listdir(written.parent) == ["best"]
    read_folder(written.with_name("best"), ALONE)


def test_a_file_is_copied_and_removed_as_a_folder_is(tmp_path):
    file, best = tmp_path / "epoch-0001.pt", tmp_path / "best.pt"
    for content in (b"first", b"second"):
        file.write_bytes(content)
        copy_checkpoint(file, best)
        assert best.read_bytes() == content
    for _ in range(2):
        remove_checkpoint(file)
    assert os.listdir(tmp_path) == ["best.pt"]
