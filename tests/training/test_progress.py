"""What is shown while a fit runs."""

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from hookcb import (
    Callback,
    CancelFitException,
    Progress,
)
from tests.support import (
    make_learner,
    spy,
)


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


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", torch.tensor(2.5), 10**30, True])
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
