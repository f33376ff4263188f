"""A fit that goes on from a file says so in one line; one that goes on from nothing says nothing."""

import io
import re
import sys
import types

import pytest
from rich.console import Console

from hookcb import Callback, CancelFitException, Checkpoint, Progress
from tests.training.checkpoint.support import acting, learner, raising, seed_all


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
