"""A part of a diagnosis that fails costs what it is for: neither the verdict, nor the training."""

import gc
import inspect
import sys
import threading
from dataclasses import replace
from functools import cache
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Diagnose, Event, Learner, watch
from hookcb.cli.main import main
from hookcb.core.torch_private import DataLoaderIter
from hookcb.diagnosis.fault import FAULTS, HANDLERS, Part, parts_for
from hookcb.diagnosis.judge import _run, judge
from hookcb.diagnosis.led import LedHealth, LedStats
from hookcb.diagnosis.measurements.lines import LineSamples
from hookcb.diagnosis.measurements.spent import SpentTime
from hookcb.diagnosis.reader import SOURCES
from hookcb.diagnosis.run import Passed
from tests.support import along, each, fit, make_batches, make_learner, make_model, same, weights

N = 9  # batches: six are inspected, and layers are timed in the one after them
TEXT = "planted"


@pytest.fixture(autouse=True)
def nothing_stays():
    """What hookcb has put on torch and Python is off, whatever has failed."""
    before = DataLoaderIter.__next__, list(gc.callbacks), threading.active_count()
    yield
    assert before == (DataLoaderIter.__next__, gc.callbacks, threading.active_count())


class Net(nn.Module):
    """Something to look at for most faults."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.attend = nn.MultiheadAttention(4, 1, batch_first=True)
        self.norm, self.drop, self.act = nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Tanh()
        self.head = nn.Linear(4, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        x = self.norm(self.drop(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.act(x)).flatten(0, 1)


def batches(n=N):
    tokens = torch.randint(7, (n, 3, 6), generator=torch.Generator().manual_seed(0))
    return [(x[:, :-1], x[:, 1:].flatten()) for x in tokens]


def by_learner(*cbs):
    torch.manual_seed(0)
    learn = Learner((batches(), batches(2)), Net(), F.cross_entropy, torch.optim.Adam, lr=1e-3)
    return fit(learn, cbs=cbs), learn.model


def by_watch(*cbs):
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, opt, *(cbs or [Callback()])) as w:
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    return w, model


LOOPS = [by_learner, by_watch]
by_loop = pytest.mark.parametrize("train", LOOPS)


def diagnosed(train):
    """Trains with a diagnosis; gives it, the verdict, and the weights."""
    loop, model = train(diagnosis := Diagnose("ignore", show=False))
    return diagnosis, loop.diagnose(), weights(model)


def unchecked(verdict):
    """Codes that were not checked."""
    return {code for gap in verdict.gaps for code in gap.codes}


@cache
def usual(train):
    """The weights without a diagnosis, and what one does not check, and has for its checks."""
    diagnosis, verdict, _ = diagnosed(train)
    return weights(train()[1]), unchecked(verdict), diagnosis.evidence().sources


PARTS = parts_for(FAULTS.values())
ENDS = ("tell", "close", "freeze")
PLACES = [
    (kind, name)
    for kind in PARTS
    for name in (*HANDLERS, *ENDS)
    if getattr(kind, name, None) is not getattr(Part, name, None)
]


def poison(monkeypatch, places):
    """Has these methods of parts raise; returns a set, to which parts are added as they fail."""
    failed = set()
    for kind, name in places:
        real = getattr(kind, name)

        def fails(*args, _kind=kind, _real=real, _name=name):
            if _name == "close":  # else it leaves something open
                _real(*args)
            failed.add(_kind)
            raise RuntimeError(TEXT)

        monkeypatch.setattr(kind, name, fails)
    return failed


def check_contained(train, kinds):
    """Asserts that a training is as without a diagnosis, and that its verdict lacks only what has failed.

    Args:
        train: one of `LOOPS`.
        kinds: what `poison` has returned.
    """
    plain, gaps, sources = usual(train)
    diagnosis, verdict, trained = diagnosed(train)
    assert same(trained, plain)
    if not any(TEXT in note for note in verdict.looked):
        return verdict  # it was not called
    run = diagnosis.evidence()
    gone = sources - run.sources
    lost = {code for code, fault in FAULTS.items() if {*parts_for([fault])} & kinds or gone & {*fault.needs}}
    assert unchecked(verdict) - gaps <= lost
    hit = {code for code, fault in FAULTS.items() if {*parts_for([fault])} & kinds}
    results = [result for code in hit for result in _run(FAULTS[code], run)]
    assert not [result for result in results if isinstance(result, Passed)]
    return verdict


@by_loop
def test_the_verdict_comes_if_all_parts_fail(train, monkeypatch):
    verdict = check_contained(train, poison(monkeypatch, PLACES))
    assert any(TEXT in note for note in verdict.looked)
    assert verdict.status in ("healthy", "unknown")


@pytest.mark.parametrize(("train", "event"), each(3, along(LOOPS, (*HANDLERS, *ENDS))))
def test_parts_that_fail_at_an_event_cost_what_they_are_for(train, event, monkeypatch):
    places = [(kind, name) for kind, name in PLACES if name == event]
    check_contained(train, poison(monkeypatch, places))


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(LOOPS)))
def test_parts_that_fail_together_cost_only_what_they_are_for(i):
    """Each method once, six of different parts at a time; all that act at an event fail together above."""
    wrong, own = [], PLACES[i :: len(LOOPS)]
    n = len(own) // 6
    for k in range(n):
        with pytest.MonkeyPatch.context() as monkeypatch:
            failed = poison(monkeypatch, own[k::n])
            try:
                check_contained(LOOPS[i], failed)
            except Exception as error:  # all are to be told
                wrong.append((own[k::n], f"{error!r:.400}"))
    assert wrong == []


def raises(*args, **kwargs):
    raise RuntimeError(TEXT)


# ---- what makes a verdict of what they have seen


ENDINGS = [
    "callback.gather",
    "callback.note_unseen",
    "callback.judge",
    "judge.explained",
    "callback.Frame.of",
]
ENDINGS += ["gather._add_activations", "gather._add_gradients", "callback.Diagnose._judge"]
ENDINGS += ["callback.Diagnose.evidence", "callback.Diagnose._end", "callback.note_end"]


@pytest.mark.parametrize("place", each(3, ENDINGS))
def test_the_training_goes_on_and_the_failure_is_told(place, monkeypatch):
    usual(by_watch)
    called = []
    real = resolve_name(f"hookcb.diagnosis.{place}")

    def fails(*args, **kwargs):
        called.append(place)
        if real.__name__ == "_end":  # else it leaves something open
            real(*args, **kwargs)
        raises()

    monkeypatch.setattr(f"hookcb.diagnosis.{place}", fails)
    diagnosis, verdict, trained = diagnosed(by_watch)
    assert same(trained, usual(by_watch)[0])
    assert any(TEXT in line for line in verdict.coverage) == bool(called)
    assert diagnosis.verdict is verdict


# ---- callbacks that a diagnosis attaches, and its own events


EVENTS = [event for event in Event if "cancel" not in event]
OURS = [Diagnose, LedStats, LedHealth]
ACTS = [
    (kind, event)
    for kind in OURS
    for event in EVENTS[1:]
    if getattr(kind, event) is not getattr(Callback, event)
]


@pytest.mark.parametrize(("train", "act"), each(3, along(LOOPS, ACTS)))
def test_a_callback_of_ours_that_fails_ends_no_training(train, act, monkeypatch):
    usual(train)
    kind, event = act
    monkeypatch.setattr(kind, event, lambda cb: raises())
    _, verdict, trained = diagnosed(train)
    assert same(trained, usual(train)[0])
    assert any(TEXT in line for line in verdict.looked)


def test_what_cannot_be_recorded_is_refused_before_the_training(monkeypatch):
    monkeypatch.setattr(LedHealth, "before_fit", lambda cb: raises())
    with pytest.raises(RuntimeError, match=TEXT):
        by_watch(Diagnose(show=False))


def test_an_error_of_the_users_function_ends_the_training():
    with pytest.raises(RuntimeError, match=TEXT):
        fit(make_learner(30, lr=1e9), cbs=Diagnose(raises, show=False))


# ---- checks


def source_of(fault):
    return inspect.getsource(sys.modules[fault.__module__])


def test_a_fault_that_cannot_be_judged_costs_its_own_code_and_those_that_ask_for_its_findings():
    run = diagnosed(by_learner)[0].evidence()
    gaps = unchecked(judge(run))
    for code, fault in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fault, "findings", raises)
            verdict = judge(run)
            (told,) = _run(fault, replace(run, sources=set(SOURCES), reasons={}))
        lost = {code, *(c for c, f in FAULTS.items() if f'findings_of("{code}"' in source_of(f))}
        assert unchecked(verdict) - lost == gaps - lost
        assert TEXT in told.reason


@pytest.mark.slow
def test_faults_that_cannot_be_judged_end_no_training(monkeypatch):
    for fault in FAULTS.values():
        monkeypatch.setattr(fault, "findings", raises)
    learn = fit(make_learner(30), cbs=Diagnose(show=False))  # judged at batch 20, too
    assert same(weights(learn.model), weights(fit(make_learner(30)).model))
    verdict = learn.diagnose()
    assert not verdict.findings
    assert any(TEXT in gap.reason for gap in verdict.gaps)


# ---- threads


def test_a_thread_of_ours_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(LineSamples, "_sample_until_stopped", raises)
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        w.diagnosis._dispatcher.run.measured(SpentTime).samples.start()
        for x, y in make_batches(3):
            F.mse_loss(model(x), y).backward()
            opt.step()
    assert any(TEXT in line for line in w.diagnose().looked)
    assert "time.other" in unchecked(w.diagnose())


# ---- the command


SCRIPT = f"""
from {__name__} import by_hand
print(sum(p.sum().item() for p in by_hand().parameters()))
"""


def by_hand():
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@pytest.fixture
def command(tmp_path, capsys):
    """Runs a training by the command; gives what it has shown, after what the script prints alone."""

    def command():
        alone = f"{sum(p.sum().item() for p in by_hand().parameters())}\n"
        (tmp_path / "script.py").write_text(SCRIPT)
        main(["diagnose", "--coverage", str(tmp_path / "script.py")])
        out, err = capsys.readouterr()
        assert out.startswith(alone)
        assert "Traceback" not in err
        return out.removeprefix(alone)

    return command


def test_the_command_gives_a_verdict_if_all_parts_fail(command, monkeypatch):
    poison(monkeypatch, PLACES)
    out = command()
    assert "Net, trained by Adam" in out
    assert TEXT in out


# what hooks of a watch call in the forward, the backward and the step of a script
IN_HOOKS = ["first_parameter_behind", "stepping_optimizer", "WeightMark", "unwrapped"]
IN_HOOKS += ["WatchedOptimizers.include", "LoopReporter.report_pred", "LoopReporter.begin_backward"]
IN_HOOKS += ["LoopReporter.end_backward", "LoopReporter.begin_step", "LoopReporter.end_step"]


@pytest.mark.parametrize("place", each(3, IN_HOOKS))
def test_the_command_raises_nothing_into_the_script(place, command, monkeypatch):
    monkeypatch.setattr(f"hookcb.loops.watcher.{place}", raises)
    assert TEXT in command()
