"""Nothing that only shows something ends a training, whatever it is shown on."""

import io
import logging
import sys
import warnings
from functools import cache

import pytest
import torch
from rich.console import Console
from torch import nn

from hookcb import (
    ActivationStats,
    Diagnose,
    GradientHealth,
    Learner,
    MemoryStats,
    Progress,
    StepTimer,
    gradient_flow,
    module_summary,
)
from hookcb.cli.main import main
from hookcb.core.console import as_text, show, shown_once, spelled, warn
from tests.support import each, first, in_turn, make_batches, make_learner

ENCODINGS = ["ascii", "latin-1", "cp1252", "gbk", "utf-8"]


class Fails(io.StringIO):
    """A stream that cannot be written to."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


class FailsLate(io.StringIO):
    """A stream that notices it at the flush, as a buffered one does."""

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


class Tee:
    """What people put in the place of standard output: it has `write` and `flush`, and no encoding."""

    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)

    def flush(self):
        for file in self.files:
            file.flush()


def closed():
    file = io.StringIO()
    file.close()
    return file


OUTPUTS = {
    "none": lambda: None,
    "closed": closed,
    "broken pipe": lambda: Fails(BrokenPipeError(32, "Broken pipe")),
    "full disk": lambda: Fails(OSError(28, "No space left on device")),
    "broken pipe at the flush": FailsLate,
    "without methods": object,
}
outputs = in_turn("output", OUTPUTS)


def encoded(encoding):
    """Standard output with an encoding, as of a console or of a file that it goes to on Windows."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def written(file):
    file.flush()
    return file.buffer.getvalue().decode(file.encoding)


def sick_model():
    """A net with a name that consoles lack letters of."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("größe→中", nn.Linear(2, 8))
    model.add_module("act", nn.Sigmoid())
    model.add_module("out", nn.Linear(8, 1))
    return model


def sick_fit(*cbs):
    batches = [(x * 1e4, y) for x, y in make_batches(30)]
    learn = Learner((batches, batches[:1]), sick_model(), nn.functional.mse_loss, torch.optim.SGD, lr=1e-9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ERROR|WARNING", UserWarning)
        learn.fit(2, cbs=[Diagnose(), *cbs])
    return learn


# ---- a fit


@pytest.mark.parametrize("encoding", each(2, ENCODINGS))
def test_a_fit_ends_well_on_a_console_of_any_encoding(encoding, monkeypatch):
    out = encoded(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    learn = sick_fit()
    text = written(out)
    assert len(learn.recorder.rows) == 2
    assert "train_loss" in text
    assert learn.diagnosis.verdict.primary.code in text
    assert "?" not in text.replace("?", "", str(learn.diagnosis.verdict).count("?"))


@pytest.mark.slow
@outputs
def test_a_fit_ends_well_with_an_output_that_cannot_be_written(output, monkeypatch):
    monkeypatch.setattr(sys, "stdout", OUTPUTS[output]())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        learn = sick_fit()
    assert len(learn.recorder.rows) == 2
    assert learn.diagnosis.verdict is not None
    told = [str(w.message) for w in told if "could not" in str(w.message)]
    assert len(told) == (0 if output == "none" else 2)  # of the rows, and of the verdict


@in_turn("bar", [False, True])
@outputs
def test_a_console_of_the_users_that_fails_ends_no_fit(output, bar):
    console = Console(file=OUTPUTS[output]() or io.StringIO(), force_terminal=bar)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn = make_learner(cbs=Progress(console=console))
        learn.fit(2)
    assert len(learn.recorder.rows) == 2


def test_a_display_that_fails_in_itself_ends_no_fit():
    class Odd(Console):
        def print(self, *args, **kwargs):
            raise LookupError("odd")

    learn = make_learner(cbs=Progress(console=Odd(file=io.StringIO())))
    with pytest.warns(UserWarning, match=r"could not be shown: LookupError\('odd'\)") as told:
        learn.fit(3)
    assert len(told) == 1
    assert len(learn.recorder.rows) == 3


def test_a_broken_pipe_leaves_standard_output_where_it_was(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Fails(BrokenPipeError(32, "Broken pipe")))
    with pytest.warns(UserWarning, match="could not be written"):
        show("rows")
    assert sys.stdout is out


@pytest.mark.slow
def test_the_weights_are_the_same_on_any_console(monkeypatch):
    weights = []
    for encoding in ("utf-8", "ascii"):
        monkeypatch.setattr(sys, "stdout", encoded(encoding))
        weights.append([p.detach().clone() for p in sick_fit().model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@in_turn("make", [closed, lambda: None, object, lambda: Fails(OSError(28, "full"))])
def test_a_warning_that_cannot_be_written_raises_nothing(make, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Fails(OSError(28, "full")))
    monkeypatch.setattr(sys, "stderr", make())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: sys.stderr.write(f"{message}"))
        show("rows")
        warn("a warning")


def test_a_warning_that_is_an_error_by_the_users_filter_is_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="as asked for"):
            warn("as asked for")


def test_a_warning_names_the_line_of_the_user():
    with pytest.warns(UserWarning, match="something") as told:
        warn("something")
    assert told[0].filename == __file__


# ---- how it is spelled


@in_turn("encoding", ENCODINGS)
def test_what_an_encoding_lacks_is_spelled_and_nothing_else(encoding):
    text = "64→64, ×3 ≤ 1 µs – café, plain? ▁█ 中 \ud800"
    told = spelled(text, encoding)
    told.encode(encoding)
    assert told.count("?") == 1
    assert spelled("plain? [0]", encoding) == "plain? [0]"
    if encoding == "ascii":
        assert told == r"64->64, x3 <= 1 us - cafe, plain? .@ \u4e2d \ud800"
    if encoding == "latin-1":
        assert told.startswith("64->64, ×3 <= 1 µs - café")
    if encoding == "utf-8":
        assert told == text.replace("\ud800", r"\ud800")


def test_every_character_of_our_texts_is_spelled_in_readable_ascii():
    for c in "–—×→←≤≥≠≈±∞·…µ‖Δ√²▁▂▃▄▅▆▇█“”éü\N{MINUS SIGN}\N{RIGHT SINGLE QUOTATION MARK}":
        assert spelled(c, "ascii").isascii()
        assert "\\" not in spelled(c, "ascii"), c


def test_a_stream_without_an_encoding_that_writes_to_one_with_is_written_in_ascii(monkeypatch):
    out, log = encoded("cp1252"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", Tee(out, log))
    show("64→64")
    assert "64->64" in written(out)


@pytest.mark.slow
def test_tables_stay_aligned_in_ascii():
    stats = ActivationStats()
    learn = sick_fit(stats)
    out = encoded("ascii")
    Console(file=out, width=80).print(learn.activation_stats.report())
    rows = [line for line in written(out).splitlines() if line[:1] in "|+"]
    assert len(rows) >= 5
    assert len({len(row) for row in rows}) == 1
    assert any("->" in row for row in rows)


# ---- what is printed by the user


@cache
def reports():
    """All that a fit can show."""
    learn = sick_fit(ActivationStats(), GradientHealth(activations=True), StepTimer(), MemoryStats(every=1))
    health, verdict = learn.gradient_health, learn.diagnosis.verdict
    return [
        learn.activation_stats.report(),
        health.report(),
        health.output_stats.report(),
        health.report(verdict=verdict),
        health.flow(),
        learn.step_timer.report(),
        learn.memory_stats.report(),
        verdict,
        verdict.findings[0],
        module_summary(learn.model, torch.ones(2, 2)),
    ]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_whatever_we_give_can_be_printed(encoding, monkeypatch):
    for report in reports():
        out = encoded(encoding)
        monkeypatch.setattr(sys, "stdout", out)
        print(report)  # noqa: T201
        assert "<rich" not in written(out)
        assert len(written(out)) > 40


def test_print_shows_a_table_in_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for report in reports():
        lines = str(report).splitlines()
        if type(report).__name__ not in ("Verdict", "Finding"):  # sentences
            assert max(map(len, lines)) <= 60, report
    model = sick_model()
    model(torch.ones(2, 2)).sum().backward()
    assert "mean |gradient|" in str(gradient_flow(model))
    assert as_text("text") == "text"


# ---- the command line


def test_the_list_of_faults_is_shown_on_any_console(monkeypatch):
    out = encoded("ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["demo", "--list-faults"]) == 0
    assert len(written(out).splitlines()) > 5


@pytest.mark.parametrize("output", first(["ascii", "cp1252", *OUTPUTS]))
def test_hookcb_diagnose_ends_with_its_exit_code_on_any_output(output, monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.0)\n"
        "for i in range(25):\n"
        "    loss = (model(torch.ones(4, 1)) - 2).square().mean()\n"
        "    loss.backward(); opt.step(); opt.zero_grad()\n"
    )
    out = OUTPUTS[output]() if output in OUTPUTS else encoded(output)
    monkeypatch.setattr(sys, "stdout", out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["diagnose", str(script)]) == 1
    if output not in OUTPUTS:
        assert "Linear" in written(out)


@pytest.mark.parametrize(
    ("rank", "told"), [(None, ["all", "one"]), (0, ["all", "rank 0: one"]), (1, ["rank 1: one"])]
)
def test_of_several_ranks_the_first_speaks_for_all(rank, told, capsys):
    with warnings.catch_warnings(record=True) as caught, shown_once(rank):
        warnings.simplefilter("always")
        with shown_once(rank):
            warn("all")
        warn("one", is_of_rank=True)
        show("shown")
    assert [str(w.message) for w in caught] == told
    assert capsys.readouterr().out == ("" if rank else "shown\n")
    show("after")
    assert capsys.readouterr().out == "after\n"


class _Lines(logging.Handler):
    def __init__(self, broken=False):
        super().__init__()
        self.lines, self.broken = [], broken

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))
        if self.broken:
            raise OSError("the disk is full")


@pytest.mark.parametrize("broken", [False, True])
def test_warnings_and_headlines_are_logged_and_a_broken_handler_ends_nothing(broken):
    handler, logger, learn = _Lines(broken), logging.getLogger("hookcb"), make_learner(lr=0.0)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with pytest.warns(UserWarning, match="100% of it"):
            warn("100% of it")
        with learn.no_logging():
            learn.fit(1, cbs=Diagnose("ignore"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert handler.lines[0] == ("WARNING", "100% of it")
    assert handler.lines[-1][1] == learn.diagnose().headline
    assert handler.lines[-1][0] in ("INFO", "WARNING", "ERROR")


def test_nothing_is_printed_twice_if_nobody_logs(capfd):
    with pytest.warns(UserWarning, match="once"):
        warn("once")
    assert "once" not in capfd.readouterr().err
