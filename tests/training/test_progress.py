"""What is shown while a fit runs."""

import contextlib
import io
import re

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from hookcb import (
    Callback,
    CancelFitException,
    Diagnose,
    EarlyStopping,
    MaxTime,
    NanTrace,
    Progress,
    TerminateOnNaN,
)
from tests.support import in_turn, make_learner, spy


def shown(n_epoch=2, **kwargs):
    out = io.StringIO()
    learn = make_learner(cbs=Progress(console=Console(file=out, width=100)), metrics=F.l1_loss)
    learn.fit(n_epoch, **kwargs)
    return learn, out


def test_progress_prints_a_plain_row_per_epoch_where_there_is_no_terminal():
    _, out = shown(3)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert "\x1b" not in out.getvalue()
    assert sum("train_loss" in line for line in lines) == 1
    assert len([line for line in lines if line.split()[0] in ("0", "1", "2")]) == 3
    assert "l1_loss" in out.getvalue()


def test_a_row_is_printed_as_soon_as_its_epoch_ends():
    out = io.StringIO()
    sizes = []
    look = Callback(name="look", before_epoch=lambda cb: sizes.append(out.getvalue().count("\n")))
    learn = make_learner(cbs=[Progress(console=Console(file=out, width=100)), look])
    learn.fit(3)
    assert sizes[0] < sizes[1] < sizes[2]


def test_no_logging_prints_nothing_and_comes_back_after_an_error():
    out = io.StringIO()
    learn = make_learner(cbs=Progress(console=Console(file=out, width=100)))
    with pytest.raises(ZeroDivisionError), learn.no_logging():  # noqa: PT012
        learn.fit(1)
        1 / 0  # noqa: B018
    assert out.getvalue() == ""
    assert len(learn.recorder.rows) == 1
    learn.fit(1)
    assert out.getvalue() != ""
    with pytest.raises(ZeroDivisionError), learn.no_bar():  # noqa: PT012
        assert learn.progress.bar is False
        1 / 0  # noqa: B018
    assert learn.progress.bar is True


def test_what_a_callback_puts_into_the_row_is_recorded_and_shown():
    out = io.StringIO()
    note = Callback(name="note", after_train=lambda cb: cb.learn.row.update(grad_norm=1.25))
    learn = make_learner(cbs=[Progress(console=Console(file=out, width=120)), note])
    learn.fit(1)
    assert learn.recorder.rows[0]["grad_norm"] == 1.25
    assert "grad_norm" in out.getvalue()
    assert "1.25" in out.getvalue()


@in_turn("value", [None, float("nan"), float("inf"), "text", torch.tensor(2.5), 10**30, True])
def test_progress_shows_odd_values_without_failing(value):
    out = io.StringIO()
    note = Callback(name="note", after_train=lambda cb: cb.learn.row.update(odd=value))
    learn = make_learner(cbs=[Progress(console=Console(file=out, width=120)), note])
    learn.fit(2)
    assert "odd" in out.getvalue()


def test_progress_in_a_terminal_gives_the_terminal_back_however_the_fit_ends():
    for raised in (None, ValueError, KeyboardInterrupt, CancelFitException):
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=True)
        plan = {("after_step", 1): raised()} if raised else {}
        learn = make_learner(cbs=[Progress(console=console), spy([], "a", plan)])
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            learn.fit(2)
        assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")
        learn.fit(1)


def fail_soon(pred, y):
    return F.mse_loss(pred, y) * torch.nan


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("cb", "said"),
    [
        (EarlyStopping(min_delta=1e9), r"at epoch 1: valid_loss has not been better than .*, for 1 epoch"),
        (MaxTime(1e-9), r"at epoch 0, batch 0: .* s have passed, and the limit is 1e-09 s"),
        (TerminateOnNaN(), r": loss is nan at epoch 0, batch 0"),
        (NanTrace(), r": loss is nan at epoch 0, batch 0: made in the forward of the loss .*"),
        (
            Diagnose("stop", show=False),
            r"at epoch 0, batch 0: A number is NaN or infinite: The loss is nan .*",
        ),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_who_ends_a_fit_says_so_once_with_its_reason(cb, said, capsys):
    out = io.StringIO()
    learn = make_learner(cbs=Progress(console=Console(file=out, width=40)))
    learn.loss_func = F.mse_loss if isinstance(cb, EarlyStopping | MaxTime) else fail_soon
    learn.fit(5, cbs=cb)
    (line,) = (line for line in out.getvalue().splitlines() if "fit ended" in line)
    assert re.fullmatch(f"fit ended by {type(cb).__name__} ?{said}", line)
    assert line.endswith(cb.reason)
    assert learn.ended_by == line
    with learn.no_logging():
        learn.fit(5, cbs=cb)
    learn.loss_func = F.mse_loss
    learn.fit(1)
    assert out.getvalue().count("fit ended") == 1
    assert (learn.ended_by, capsys.readouterr().out) == ("", "")


def test_a_callback_of_a_user_says_why_it_ends_a_fit_if_it_gives_a_reason():
    def ends(*reason):
        def end(cb):
            raise CancelFitException(*reason)

        return end

    learn, out = shown(cbs=Callback(name="mine", after_train=ends("it is good enough")))
    assert "fit ended by Callback('mine') at epoch 0: it is good enough\n" in out.getvalue()
    learn.fit(1, cbs=Callback(name="mine", before_fit=ends()))
    assert out.getvalue().endswith("fit ended by Callback('mine')\n")
    cb = Diagnose(lambda verdict: ends("seen enough")(None), show=False)
    learn.loss_func = fail_soon
    learn.fit(1, cbs=cb)
    assert cb.reason == "seen enough"


def test_the_training_loop_is_shown_with_who_acts_where(capsys):
    class Watches(Callback):
        def after_backward(self):
            pass

    make_learner(cbs=Watches).show_training_loop()
    out = capsys.readouterr().out
    assert (
        out.index("before_fit")
        < out.index("before_epoch")
        < out.index("before_batch")
        < out.index("after_fit")
    )
    line = next(line for line in out.splitlines() if "after_backward" in line)
    assert "watches" in line.lower()
    assert "watches" not in next(line for line in out.splitlines() if "before_fit" in line).lower()
