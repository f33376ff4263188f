"""Report writes pages while a training goes on, and never ends it."""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from hookcb import Callback, Diagnose, Report, load_report, synth_learner, watch


class Reads(Callback):
    """Reads the page after each batch."""

    def __init__(self, path):
        super().__init__()
        self.path, self.seen = path, []

    def after_batch(self):
        if self.path.exists():
            self.seen.append(load_report(self.path))


def fit(*cbs, n=2):
    learn = synth_learner()
    with learn.no_logging():
        learn.fit(n, cbs=cbs)
    return learn


def test_pages_are_written_while_the_fit_goes_on_and_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("hookcb.report.callback.MAX_SHARE", 1e9)
    path = tmp_path / "new" / "run.html"
    reads = Reads(path)
    fit(Diagnose(show=False), Report(path, every=1e-9), reads)
    counts = [page.n_batches for page in reads.seen]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert {page.every for page in reads.seen} == {1e-9}
    end = load_report(path)
    assert (end.n_batches, end.every, end.title) == (20, None, "run")
    assert end.verdict["status"] == "healthy"
    assert [file.name for file in path.parent.iterdir()] == ["run.html"]


def test_the_last_page_has_the_verdict_of_the_end_wherever_the_callback_stands(tmp_path):
    paths = [tmp_path / "first.html", tmp_path / "last.html"]
    learn = fit(Report(paths[0], name="one"), Diagnose(show=False), Report(paths[1], name="two"))
    for path in paths:
        assert load_report(path).headline == learn.diagnosis.verdict.headline


def test_a_fit_that_fails_in_its_first_batch_has_a_page_too(tmp_path):
    def fail(cb):
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fit(Report(tmp_path / "run.html"), Diagnose(show=False), Callback(after_pred=fail, name="fails"))
    page = load_report(tmp_path / "run.html")
    assert page.n_batches == 0
    assert "UNKNOWN" in page.headline


@pytest.mark.parametrize("where", ["folder", "below a file"])
def test_a_page_that_cannot_be_written_is_warned_of_once_and_ends_no_training(tmp_path, where):
    (tmp_path / "file").touch()
    path = tmp_path if where == "folder" else tmp_path / "file" / "run.html"
    with pytest.warns(UserWarning, match="Report cannot write") as said:
        learn = fit(Report(path, every=1e-9))
    assert len(said) == 1
    assert len(learn.recorder.losses) == 20


def test_a_slow_page_comes_less_often(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    written = []

    def slow(loop):
        written.append(now[0])
        now[0] += 2.0
        raise OSError("full")

    monkeypatch.setattr("hookcb.report.callback.collect", slow)

    def pass_time(cb):
        now[0] += 1.0

    with pytest.warns(UserWarning, match="full"):
        fit(Report(tmp_path / "run.html", every=3), Callback(after_batch=pass_time, name="waits"), n=30)
    apart = [b - a for a, b in pairwise(written[:-1])]
    assert apart
    assert min(apart) >= 200  # 2 s are 1 % of them


def test_a_watched_loop_writes_pages(tmp_path):
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with watch(net, opt, cbs=[Diagnose(show=False), Report(tmp_path / "run.html")]) as w:
        for _ in range(12):
            loss = net(torch.ones(4, 3)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
    page = load_report(tmp_path / "run.html")
    assert page.n_batches == 12
    assert load_report(w.report(tmp_path / "other.html").path).headline == page.headline


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"path": 3}, TypeError, "path of a file"),
        ({"every": 0}, ValueError, "every"),
        ({"every": "often"}, TypeError, "every"),
    ],
)
def test_wrong_arguments_are_told(arguments, error, said):
    with pytest.raises(error, match=said):
        Report(**arguments)
