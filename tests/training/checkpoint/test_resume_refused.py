"""What cannot be gone on from is refused before training starts, by name, and nothing is changed."""

import io
import pickle
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hookcb import Callback
from hookcb.training.checkpoint.callback import Checkpoint
from tests.support import same, weights
from tests.training.checkpoint.support import Net, differing, go_on, learner, outcome, seed_all, train

adam, sgd = torch.optim.Adam, torch.optim.SGD


def refused(error, *, make=learner, resume, match, cbs=()):
    """Asserts that nothing was trained, and that the learner is as it was."""
    seed_all(1)
    learn, log = make(), []
    before = weights(learn.model)
    seen = Callback(name="seen", before_batch=lambda cb: log.append(1))
    with learn.no_logging(), pytest.raises(error, match=match) as caught:
        learn.fit(3, cbs=[*cbs, seen], resume=resume)
    assert log == []
    assert same(before, weights(learn.model))
    with learn.no_logging():
        learn.fit(1)
    return caught.value


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two files of a fit."""
    folder = tmp_path_factory.mktemp("written")
    train(learner, 2, Checkpoint(folder))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def truncate(file, n_bytes):
    file.write_bytes(file.read_bytes()[:n_bytes])


# ---- files that are not whole


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused_by_its_name(folder, share):
    file = folder / "epoch-0002.pt"
    truncate(file, int(share * file.stat().st_size))
    refused(ValueError, resume=file, match=r"epoch-0002.pt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("latest", [True, False], ids=["latest", "folder"])
def test_the_newest_whole_file_is_taken_with_a_warning_where_the_newest_is_truncated(folder, share, latest):
    file = folder / "epoch-0002.pt"
    truncate(file, int(share * file.stat().st_size))
    with pytest.warns(UserWarning, match=r"epoch-0002.pt"):
        resumed = go_on(learner, 3, Checkpoint(folder), resume="latest" if latest else folder)
    assert differing(outcome(train(learner, 3)), outcome(resumed)) == []
    assert sorted(file.name for file in folder.iterdir()) == [f"epoch-000{n}.pt" for n in (1, 2, 3)]


def test_a_folder_without_a_whole_file_is_refused(folder):
    for file in folder.iterdir():
        truncate(file, 100)
    refused(ValueError, resume="latest", match=str(folder), cbs=[Checkpoint(folder)])


# ---- files of others


def of_learn_save(file):
    train(learner, 1).save(file)


def of_pickle(file):
    file.write_bytes(pickle.dumps({"format": 1, "model": {}}))


def of_text(file):
    file.write_text("epoch 2\n" * 100)


def of_numpy(file):
    np.savez(file.with_suffix(".npz"), a=np.zeros(3))
    file.with_suffix(".npz").rename(file)


def of_lightning(file):
    state = {
        "epoch": 2,
        "global_step": 10,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": Net().state_dict(),
    }
    torch.save({**state, "optimizer_states": [], "lr_schedulers": [], "callbacks": {}, "loops": {}}, file)


def of_a_state_dict(file):
    torch.save(Net().state_dict(), file)


def of_a_tensor(file):
    torch.save(torch.zeros(3), file)


def of_a_list(file):
    torch.save([1, 2], file)


def of_a_model(file):
    torch.save(Net(), file)


def of_old_torch(file):
    torch.save({"epoch": 1}, file, _use_new_zipfile_serialization=False)


def of_half(file):
    train(learner, 1, Checkpoint(file.parent / "half"))
    state = torch.load(file.parent / "half" / "epoch-0001.pt", weights_only=True)
    torch.save({"format": state["format"]}, file)


FOREIGN = [
    of_learn_save,
    of_pickle,
    of_text,
    of_numpy,
    of_lightning,
    of_a_state_dict,
    of_a_tensor,
    of_a_list,
    of_a_model,
    of_old_torch,
    of_half,
]


@pytest.mark.parametrize("write", FOREIGN, ids=lambda write: write.__name__)
def test_a_foreign_file_is_refused_by_its_name(tmp_path, write):
    write(tmp_path / "other.pt")
    refused(ValueError, resume=tmp_path / "other.pt", match=r"other.pt")


def test_no_code_of_a_foreign_file_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "broken"), "w"))

    torch.save({"format": Evil()}, tmp_path / "evil.pt")
    refused(ValueError, resume=tmp_path / "evil.pt", match=r"evil.pt")
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("version", [0, 99, "hookcb 0", None])
def test_a_file_of_another_format_is_refused(folder, version):
    file = folder / "epoch-0002.pt"
    state = torch.load(file, weights_only=True)
    assert state["format"] != version
    torch.save({**state, "format": version}, file)
    refused(ValueError, resume=file, match=r"epoch-0002.pt")


def test_a_file_in_memory_order_of_another_folder_can_be_moved(folder, tmp_path):
    moved = shutil.move(folder / "epoch-0001.pt", tmp_path / "elsewhere.ckpt")
    assert differing(outcome(train(learner, 2)), outcome(go_on(learner, 2, resume=str(moved)))) == []


# ---- paths


def test_a_file_that_is_not_there_is_refused(tmp_path):
    refused(FileNotFoundError, resume=tmp_path / "none.pt", match=r"none.pt")


def test_an_empty_folder_is_refused_where_it_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    refused((FileNotFoundError, ValueError), resume=tmp_path / "empty", match="empty")


@pytest.mark.parametrize("there", [True, False])
def test_the_latest_of_an_empty_folder_begins_anew(tmp_path, there):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
        (folder / "epoch-0001.pt.partial").write_bytes(b"PK")
        (folder / "notes.pt").write_bytes(b"PK")
    begun = train(learner, 2, Checkpoint(folder), resume="latest")
    assert differing(outcome(train(learner, 2)), outcome(begun)) == []


def test_the_latest_needs_a_checkpoint():
    refused(ValueError, resume="latest", match="Checkpoint")


def test_the_latest_is_the_newest_by_epoch_and_batch_and_not_the_best(tmp_path):
    train(learner, 2, Checkpoint(tmp_path, every=2, keep=9, monitor="valid_loss"))
    for file in sorted(tmp_path.iterdir(), reverse=True):
        file.touch()  # as after copying them
    log = []
    seen = Callback(name="seen", before_train=lambda cb: log.append(cb.epoch))
    go_on(learner, 3, Checkpoint(tmp_path, monitor="valid_loss"), seen, resume="latest")
    assert log == [2]


@pytest.mark.parametrize("resume", [3, True, b"latest", 0.5])
def test_what_is_no_path_is_refused(resume):
    refused((TypeError, ValueError), resume=resume, match="resume")


def test_fewer_epochs_than_were_made_are_refused(folder):
    seed_all(1)
    learn = learner()
    with learn.no_logging(), pytest.raises(ValueError, match="n_epoch"):
        learn.fit(1, cbs=Checkpoint(folder), resume="latest")


# ---- files of another fit


def with_model(model):
    return lambda: learner(model=model())


def wider():
    model = Net()
    model.head = nn.Linear(4, 2)
    return model


def renamed():
    model = Net()
    model.top, model.head = model.head, nn.Identity()
    return model


def longer():
    model = Net()
    model.extra = nn.Linear(1, 1)
    return model


def unbuffered():
    model = Net()
    del model.calls
    model.calls = 0
    return model


@pytest.mark.parametrize("model", [wider, renamed, longer, unbuffered], ids=lambda model: model.__name__)
def test_a_file_of_another_model_is_refused(folder, model):
    error = refused_fit(folder, with_model(model))
    assert "model" in str(error) or "buffer" in str(error)


def refused_fit(folder, make):
    seed_all(1)
    learn = make()
    before = weights(learn.model)
    with learn.no_logging(), pytest.raises(ValueError, match=r"epoch-0002.pt") as caught:
        learn.fit(3, cbs=Callback(name="checkpoint"), resume=folder / "epoch-0002.pt")
    assert same(before, weights(learn.model))
    return caught.value


OTHERS = {
    "another class": torch.optim.AdamW,
    "a class of the same keys": type("MySGD", (sgd,), {}),
    "another number of groups": lambda params, lr: sgd(
        [{"params": params[:2]}, {"params": params[2:]}], lr=lr
    ),
    "fewer parameters": lambda params, lr: sgd(params[:2], lr=lr),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_file_of_another_optimizer_is_refused(folder, which):
    error = refused_fit(folder, lambda: learner(opt_func=OTHERS[which]))
    assert "SGD" in str(error) or "optimizer" in str(error)


def test_groups_of_other_sizes_are_refused(tmp_path):
    def grouped(k, params, lr):
        return sgd([{"params": params[:k]}, {"params": params[k:]}], lr=lr)

    train(lambda: learner(opt_func=partial(grouped, 2)), 2, Checkpoint(tmp_path))
    refused_fit(tmp_path, lambda: learner(opt_func=partial(grouped, 3)))


def test_a_file_is_read_from_a_device_that_is_not_there(folder):
    """As one from a GPU would be: torch's own loader fails on it without map_location."""
    file = folder / "epoch-0002.pt"
    buffer = io.BytesIO(file.read_bytes())
    assert torch.load(buffer, weights_only=True, map_location="meta")
    state = torch.load(file, weights_only=True)
    assert all(t.device.type == "cpu" for t in state["model"].values())
