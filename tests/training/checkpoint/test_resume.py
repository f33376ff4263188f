"""A resumed fit says so, ends to the bit as one that never stopped, and refuses what it cannot go on from."""

import contextlib
import io
import os
import pickle
import re
import shutil
import sys
import types
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    Checkpoint,
    Progress,
)
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision
from hookcb.training.clip import GradientClip
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.schedules.one_cycle import OneCycle
from hookcb.training.schedules.plateau import ReduceLROnPlateau
from hookcb.training.schedules.schedule import Schedule
from hookcb.training.schedules.warmup_cosine import WarmupCosine
from tests.support import EVENTS, along, each, fit, in_turn, same, weights
from tests.training.checkpoint.support import (
    Net,
    Stop,
    acting,
    check_resumes,
    differing,
    go_on,
    learner,
    outcome,
    raising,
    seed_all,
    train,
    uninterrupted,
)

adam, sgd = torch.optim.Adam, torch.optim.SGD

OPTIMIZERS = {
    "SGD with momentum": partial(sgd, momentum=0.9, weight_decay=0.01, nesterov=True),
    "AdamW": torch.optim.AdamW,
    "Adam with amsgrad": partial(adam, amsgrad=True),
    "fused Adam": partial(adam, fused=True),
    "Adam with its rate in a tensor": lambda params, lr: adam(params, lr=torch.tensor(lr)),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "several groups": lambda params, lr: sgd(
        [{"params": params[:2], "lr": lr / 10}, {"params": params[2:], "momentum": 0.9}], lr=lr
    ),
}


def sometimes(event, error, each=3):
    """Cancels at every third batch of the fit."""

    def act(cb):
        if cb.train_iter % each == 1:
            raise error

    cb = Callback(name="sometimes", **{event: act})
    cb.run_valid = False
    return cb


def growing(cb):
    cb.learn.loss = cb.learn.loss * (1e6 if cb.train_iter in (2, 7) else 1)


CALLBACKS = {
    "nothing else": list,
    "accumulation": lambda: [GradientAccumulation(3)],
    "an average": lambda: [EMA(0.9)],
    "bfloat16": lambda: [MixedPrecision()],
    "float16": lambda: [MixedPrecision("fp16", init_scale=2.0**10, growth_interval=3)],
    "float16 that overflows": lambda: [
        MixedPrecision("fp16", init_scale=2.0**40, growth_interval=2),
        Callback(name="growing", before_backward=growing),
    ],
    "one cycle": lambda: [OneCycle(0.1)],
    "warm-up": lambda: [WarmupCosine(3)],
    "steps per epoch": lambda: [Schedule(partial(StepLR, step_size=2, gamma=0.5), per="epoch")],
    "steps per batch": lambda: [Schedule(partial(StepLR, step_size=3, gamma=0.5))],
    "a plateau": lambda: [ReduceLROnPlateau(min_delta=10.0, factor=0.5)],
    "clipping": lambda: [GradientClip(0.5)],
    "statistics of layers": lambda: [ActivationStats(include_paramless=True, on_valid=True)],
    "statistics now and then": lambda: [ActivationStats(every=2, with_hist=True)],
    "all together": lambda: [
        MixedPrecision("fp16", init_scale=2.0**20, growth_interval=2),
        GradientAccumulation(3),
        GradientClip(0.5),
        EMA(0.9),
        OneCycle(0.1),
        EarlyStopping(patience=9),
    ],
    "batches left out": lambda: [sometimes("before_batch", CancelBatchException)],
    "batches cut short": lambda: [sometimes("before_step", CancelBatchException)],
    "steps left out": lambda: [sometimes("before_step", CancelStepException)],
    "backwards left out": lambda: [sometimes("before_backward", CancelBackwardException)],
}


# ---- from any batch and any epoch


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_fit_ends_as_an_uninterrupted_one_with(name, tmp_path):
    check_resumes(lambda: learner(opt_func=OPTIMIZERS[name]), tmp_path)


@pytest.mark.parametrize("name", each(2, CALLBACKS))
def test_a_resumed_fit_ends_as_an_uninterrupted_one_under(name, tmp_path):
    momentum = partial(sgd, momentum=0.9)

    def make():
        return learner(cbs=CALLBACKS[name](), opt_func=momentum)

    check_resumes(make, tmp_path, n_epoch=3, files=slice(1, 4))


@pytest.mark.parametrize("name", ["nothing else", pytest.param("all together", marks=pytest.mark.slow)])
def test_a_fit_resumed_from_any_of_its_files_ends_as_an_uninterrupted_one(name, tmp_path):
    check_resumes(lambda: learner(cbs=CALLBACKS[name]()), tmp_path, every=1, files=slice(None))


@pytest.mark.filterwarnings("ignore:nothing left to train")
def test_a_fit_of_epochs_cut_short_is_resumed_where_it_was(tmp_path):
    def short():
        cut = sometimes("before_batch", CancelTrainException())
        return learner(cbs=cut)

    whole = outcome(train(short, 3))
    saving = Checkpoint(tmp_path, every=1, keep=100)
    train(short, 3, saving)
    for file in saving.files:
        assert differing(whole, outcome(go_on(short, 3, resume=file))) == [], file.name


def test_early_stopping_counts_its_patience_over_the_interruption(tmp_path):
    def make():
        scores = Callback(name="scores", after_epoch=lambda cb: cb.learn.row.update(score=-cb.epoch))
        return learner(cbs=[EarlyStopping("score", patience=4), scores])

    whole = outcome(train(make, 9))
    assert len(whole["rows"]) == 5
    for n_done in (1, 2, 3, 4):
        train(make, n_done, Checkpoint(tmp_path / str(n_done)))
        resumed = go_on(make, 9, Checkpoint(tmp_path / str(n_done)), resume="latest")
        assert differing(whole, outcome(resumed)) == []


def test_a_frozen_layer_and_ready_optimizer_are_resumed(tmp_path):
    def make():
        model = Net()
        model.stem.requires_grad_(False)
        return learner(model=model, opt_func=sgd([*model.head.parameters()], lr=0.1, momentum=0.9))

    check_resumes(make, tmp_path)


@pytest.mark.filterwarnings("ignore:nothing left to train")
@pytest.mark.parametrize(
    ("event", "order", "error"),
    along([e for e in EVENTS if "cancel" not in e], [0, 0, 1000, 1000], [Stop, CancelFitException]),
)
def test_a_fit_that_ends_at_any_event_is_resumed(tmp_path, event, order, error):
    with contextlib.suppress(Stop):
        train(learner, 2, Checkpoint(tmp_path, every=2), acting(event, raising(error()), k=1, order=order))
    there = any(tmp_path.glob("epoch-*.pt"))
    resumed = train(learner, 2, Checkpoint(tmp_path), resume="latest", seed=99 if there else 0)
    assert differing(uninterrupted(learner, 2), outcome(resumed)) == []


def test_many_interruptions_are_as_none(tmp_path):
    whole = uninterrupted(learner, 4)
    for k in range(6):
        stop = acting("after_batch", raising(CancelFitException()), k=2)
        stop.run_valid = False
        train(learner, 4, Checkpoint(tmp_path), stop, resume="latest", seed=k)
    resumed = go_on(learner, 4, Checkpoint(tmp_path), resume="latest")
    assert differing(whole, outcome(resumed)) == []


def test_the_same_learner_goes_on_after_it_was_stopped(tmp_path):
    whole = uninterrupted(learner, 3)
    stopped = train(
        learner, 3, Checkpoint(tmp_path), acting("after_batch", raising(CancelFitException()), k=9)
    )
    fit(stopped, 3, cbs=Checkpoint(tmp_path), resume="latest")
    assert differing(whole, outcome(stopped)) == []


def test_more_epochs_can_be_added(tmp_path):
    train(learner, 2, Checkpoint(tmp_path))
    resumed = go_on(learner, 5, Checkpoint(tmp_path), resume="latest")
    assert differing(uninterrupted(learner, 5), outcome(resumed)) == []
    assert [row["epoch"] for row in resumed.recorder.rows] == [0, 1, 2, 3, 4]


def test_a_fit_that_was_done_is_done(tmp_path):
    whole = outcome(train(learner, 2, Checkpoint(tmp_path)))
    log = []
    seen = Callback(name="seen", before_batch=lambda cb: log.append(1))
    with pytest.warns(UserWarning, match="nothing left to train"):
        again = go_on(learner, 2, Checkpoint(tmp_path), seen, resume="latest")
    assert log == []
    assert differing(whole, outcome(again)) == []


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_fit_that_was_complete_warns_that_nothing_is_left(tmp_path, is_quiet):
    seen = []
    learn = learner(cbs=Callback(before_batch=lambda cb: seen.append(cb.iter)))
    with learn.no_logging():
        learn.fit(1, cbs=Checkpoint(tmp_path))
    seen.clear()
    said = r"nothing left to train: .*epoch-0001\.pt is of epoch 1 of 1, step 5, train_loss .* anew"
    with pytest.warns(UserWarning, match=said) as told, learn.no_logging() if is_quiet else nullcontext():
        learn.fit(1, cbs=Checkpoint(tmp_path), resume="latest")
    assert seen == []
    assert [warning.filename for warning in told] == [__file__]


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


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
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
    assert differing(uninterrupted(learner, 3), outcome(resumed)) == []
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


def test_a_file_with_random_states_in_lists_is_read_as_before(folder):
    file = folder / "epoch-0001.pt"
    state = torch.load(file, weights_only=True)
    for part in ("random", "random_of_phase"):
        version, numbers, rest = state[part]["python"]
        state[part]["python"] = version, tuple(numbers.tolist()), rest
        state[part]["numpy"]["state"]["key"] = state[part]["numpy"]["state"]["key"].tolist()
    torch.save({**state, "format": 2}, file)
    assert differing(uninterrupted(learner, 2), outcome(go_on(learner, 2, resume=file))) == []


def test_a_file_in_memory_order_of_another_folder_can_be_moved(folder, tmp_path):
    moved = shutil.move(folder / "epoch-0001.pt", tmp_path / "elsewhere.ckpt")
    assert differing(uninterrupted(learner, 2), outcome(go_on(learner, 2, resume=str(moved)))) == []


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
    assert differing(uninterrupted(learner, 2), outcome(begun)) == []


def test_the_latest_needs_a_checkpoint():
    refused(ValueError, resume="latest", match="Checkpoint")


def test_of_files_of_one_time_the_latest_is_that_of_the_last_batch_and_not_the_best(tmp_path):
    train(learner, 2, Checkpoint(tmp_path, every=2, keep=9, monitor="valid_loss"))
    for file in tmp_path.iterdir():
        os.utime(file, (1.7e9, 1.7e9))  # as in an archive that keeps no times
    log = []
    seen = Callback(name="seen", before_train=lambda cb: log.append(cb.epoch))
    go_on(learner, 3, Checkpoint(tmp_path, monitor="valid_loss"), seen, resume="latest")
    assert log == [2]


@in_turn("resume", [3, True, b"latest", 0.5])
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


def shown(folder, n_epoch, *cbs, resume="latest", width=60):
    """What a fit shows, and its learner."""
    seed_all(0)
    out = io.StringIO()
    learn = learner(cbs=Progress(console=Console(file=out, width=width)))
    learn.fit(n_epoch, cbs=[Checkpoint(folder, every=2), *cbs], resume=resume)
    return out.getvalue(), learn


def cut(event, k):
    return acting(event, raising(CancelFitException()), k=k)


def numbers(line, *names):
    return [float(re.search(rf"\b{name} ([^,;]+)", line)[1]) for name in names]


def test_an_epochs_file_is_told_with_its_epoch_step_and_losses(tmp_path):
    _, before = shown(tmp_path, 2)
    text, _ = shown(tmp_path, 3)
    (line,) = [line for line in text.splitlines() if "resumed" in line]
    assert text.startswith(line)
    start = f"resumed from {tmp_path / 'epoch-0002.pt'}: epoch 2 of 3, step 10, train_loss "
    assert line.startswith(start)
    assert line.endswith("; to begin anew, leave out resume=")
    row = before.recorder.rows[-1]
    saved = numbers(line, "step", "train_loss", "valid_loss")
    assert saved == pytest.approx([10, row["train_loss"], row["valid_loss"]], rel=1e-3)


def test_a_file_of_a_batch_is_told_with_its_batch_and_loss(tmp_path):
    _, before = shown(tmp_path, 2, cut("after_step", 7))
    file = tmp_path / "epoch-0002-batch-000001.pt"
    text, _ = shown(tmp_path / "other", 2, resume=file)
    line = text.splitlines()[0]
    assert line.startswith(f"resumed from {file}: batch 1 in epoch 2 of 2, step 6, loss ")
    assert numbers(line, "loss") == pytest.approx([before.recorder.losses[5]], rel=1e-3)


def test_a_file_from_before_a_validation_is_told_so(tmp_path):
    def write(cb):
        cb.learn.checkpoint._write("validate", "-trained")  # as on Ctrl-C in a validation
        raise CancelFitException

    seed_all(0)
    learn = learner()
    with learn.no_logging():
        learn.fit(1, cbs=[Checkpoint(tmp_path / "new"), acting("before_validate", write)])
    file = tmp_path / "new" / "epoch-0001-trained.pt"
    text, _ = shown(tmp_path / "other", 2, resume=file)
    assert text.startswith(f"resumed from {file}: all training in epoch 1 of 2, step 5, train_loss ")


@pytest.mark.parametrize("odd", [None, "much", [1.0]])
def test_a_row_that_has_no_number_for_a_loss_ends_nothing(tmp_path, odd):
    class Odd(Callback):
        order = 90

        def after_epoch(self):
            self.learn.row.update(train_loss=odd, valid_loss=odd)

        def state_dict(self):
            return {"losses": odd, "lrs": odd}

    shown(tmp_path, 1, Odd())
    assert "epoch 1 of 2, step 5, loss " in shown(tmp_path, 2, Odd())[0]


def test_a_fit_that_begins_says_nothing_of_resuming(tmp_path):
    assert "resume" not in shown(tmp_path, 1)[0]
    assert "resume" not in shown(tmp_path, 1, resume=None)[0]


def test_nothing_is_printed_without_logging(tmp_path, capsys):
    shown(tmp_path, 1)
    learn = learner()
    with learn.no_logging():
        learn.fit(2, cbs=Checkpoint(tmp_path), resume="latest")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_with_a_bar_shows_the_line_too(tmp_path):
    shown(tmp_path, 1)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, force_interactive=True, width=300)
    learn = learner(cbs=Progress(console=console))
    learn.fit(2, cbs=Checkpoint(tmp_path), resume="latest")
    assert "epoch-0001.pt" in out.getvalue()
    assert "leave out resume=" in out.getvalue()


def test_a_notebook_shows_the_line_above_its_rows(tmp_path, monkeypatch):
    shown(tmp_path, 1)
    pages = []
    handle = types.SimpleNamespace(update=pages.append)
    fake = types.SimpleNamespace(HTML=str, display=lambda page, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    learn = learner(cbs=Progress(console=Console(file=io.StringIO(), force_jupyter=True)))
    learn.fit(2, cbs=Checkpoint(tmp_path), resume="latest")
    assert pages[0].startswith(f"<div>resumed from {tmp_path / 'epoch-0001.pt'}: epoch 1 of 2, step 5, ")
    assert pages[-1].startswith(pages[0].partition("</div>")[0])
    assert "<td>1</td>" in pages[-1]
