"""A part of a diagnosis that fails costs what it is for: neither the verdict, nor the training.

Which functions of which probes are called at which events is found out by a training that is traced.
"""

import gc
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F
from hookcb.diagnosis.recorder import EvidenceRecorder
from torch import nn

from hookcb import Callback, Diagnose, Event, Learner, watch
from hookcb.cli.main import main
from hookcb.core.torch_private import DataLoaderIter
from hookcb.diagnosis import attached, probes
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.guard import COSTS, Guard
from hookcb.diagnosis.judge import _run, judge
from hookcb.diagnosis.measurements.lines import LineSamples
from hookcb.diagnosis.measurements.spent import SpentTime
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.reader import SOURCES
from hookcb.diagnosis.run import Passed
from tests.support import covering, each, fit, make_batches, make_learner, make_model, same, weights

FOLDER = str(Path(probes.__file__).parent)
N = 9  # batches: six are inspected, and layers are timed in the one after them
TEXT = "planted"


@pytest.fixture(autouse=True)
def nothing_stays():
    """What hookcb has put on torch and Python is off, whatever has failed."""
    before = DataLoaderIter.__next__, list(gc.callbacks), threading.active_count()
    yield
    assert before == (DataLoaderIter.__next__, gc.callbacks, threading.active_count())


class Net(nn.Module):
    """Something to look at for most probes."""

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
    with watch(model, opt, *cbs) as w:
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
    """The weights without a diagnosis, and what one does not check."""
    return weights(train()[1]), unchecked(diagnosed(train)[1])


@cache
def calls(train):
    """Functions of probes and the events at which others call them, with all parts that call them."""
    found, parts, loops = [], defaultdict(set), []

    def trace(frame, event, arg):
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not _is_probe(code) or caller is None or "<" in code.co_qualname:
            return
        if code.co_name == "__torch_dispatch__":  # which runs the operation
            return
        place = Path(code.co_filename).stem, code.co_qualname
        if not _is_probe(caller.f_code):
            found.append((place, loops[0]._event))
        while caller is not None and caller.f_code not in GUARDS:
            caller = caller.f_back
        parts[place].add(None if caller is None else caller.f_locals["part"])

    first = Callback(name="first", before_fit=lambda cb: loops.append(cb.learn))
    first.order = -1000
    sys.setprofile(trace)
    try:
        train(first, Diagnose("ignore", show=False))
    finally:
        sys.setprofile(None)
    return {(place, event): parts[place] for place, event in found}


GUARDS = {Guard.call.__code__, Guard.always.__code__}


def _is_probe(code):
    file = code.co_filename
    return file.startswith(FOLDER) and not file.endswith("suite.py")


def poison(monkeypatch, places, event=None):
    """Has functions of probes raise, all the time or at an event of the loop."""
    loops = []
    monkeypatch.setattr(
        EvidenceRecorder, "before_fit", _noting(EvidenceRecorder.before_fit, loops), raising=True
    )
    for file, name in places:
        module = sys.modules[f"{probes.__name__}.{file}"]
        owner, _, attribute = name.rpartition(".")
        real = vars(getattr(module, owner) if owner else module)[attribute]
        if owner:
            monkeypatch.setattr(getattr(module, owner), attribute, _raising(real, loops, event))
            continue
        for other in [m for key, m in sys.modules.items() if key.startswith("hookcb.diagnosis")]:
            if vars(other).get(attribute) is real:
                monkeypatch.setattr(other, attribute, _raising(real, loops, event))


def _noting(real, loops):
    def before_fit(cb):
        loops.append(cb.learn)
        real(cb)

    return before_fit


def _raising(real, loops, event):
    function = real.fget if isinstance(real, property) else real

    def raising(*args, **kwargs):
        if event is None or loops[-1]._event == event:
            if function.__name__ in ("close", "remove"):  # else it leaves something open
                function(*args, **kwargs)
            raise RuntimeError(TEXT)
        return function(*args, **kwargs)

    return property(raising) if isinstance(real, property) else raising


def check_contained(train, parts=None):
    """Asserts that a training is as without a diagnosis, and that its verdict lacks only what has failed."""
    plain, gaps = usual(train)
    diagnosis, verdict, trained = diagnosed(train)
    assert same(trained, plain)
    told = [note for note in verdict.looked if TEXT in note]
    failed = diagnosis._guard._failed
    assert told
    assert failed
    if parts is not None:
        assert failed <= parts
    partial = {cost for part in failed for cost in COSTS[part]}
    lost = {code for code, check in FAULTS.items() if partial & {code, *check.needs}}
    assert unchecked(verdict) - gaps <= lost
    results = [result for code in lost for result in _run(FAULTS[code], diagnosis.evidence())]
    assert not [result for result in results if isinstance(result, Passed)]
    return verdict


@by_loop
def test_the_verdict_comes_if_all_probes_fail(train, monkeypatch):
    poison(monkeypatch, {place for place, _ in calls(train)})
    verdict = check_contained(train)
    assert verdict.status in ("healthy", "unknown")


EVENTS = [event for event in Event if "cancel" not in event]


@pytest.mark.parametrize(("train", "event"), covering(LOOPS, EVENTS, of=1))
def test_probes_that_fail_at_an_event_cost_what_they_are_for(train, event, monkeypatch):
    places = {place: parts for (place, at), parts in calls(train).items() if at == event}
    if not places:
        pytest.skip("no probe acts at it")
    poison(monkeypatch, places, event)
    check_contained(train)


@pytest.mark.slow
@by_loop
def test_a_probe_that_fails_costs_only_what_it_is_for(train):
    """Each function at each event, alone."""
    wrong = []
    for (place, event), parts in calls(train).items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            poison(monkeypatch, [place], event)
            try:
                check_contained(train, None if None in parts else parts)
            except Exception as error:  # all are to be told
                wrong.append((*place, str(event), f"{error!r:.400}"))
    assert wrong == []


def raises(*args, **kwargs):
    raise RuntimeError(TEXT)


# ---- what calls the probes, and what makes a verdict of what they have seen


OF_GUARD = ("__init__", "observe")  # which call the probes by a guard, before the training too
HANDLERS = sorted(name for name, x in vars(Probes).items() if callable(x) and name not in OF_GUARD)
ENDS = ["recorder.probed_evidence", "recorder.gather", "recorder.note_unseen", "callback.falls_slowly"]
ENDS += ["callback.judge", "judge.explained", "gather._add_activations", "gather._add_gradients"]
ENDS += ["recorder.Frame.of", "callback.Diagnose._judge"]
ENDS += ["recorder.EvidenceRecorder.evidence", "recorder.EvidenceRecorder.finish"]


@pytest.mark.parametrize("place", each(6, [f"probes.suite.Probes.{name}" for name in HANDLERS] + ENDS))
def test_the_training_goes_on_and_the_failure_is_told(place, monkeypatch):
    usual(by_watch)
    called = []
    real = resolve_name(f"hookcb.diagnosis.{place}")

    def fails(*args, **kwargs):
        called.append(place)
        if real.__name__ in ("close", "finish"):  # else it leaves something open
            real(*args, **kwargs)
        raises()

    monkeypatch.setattr(f"hookcb.diagnosis.{place}", fails)
    diagnosis, verdict, trained = diagnosed(by_watch)
    assert same(trained, usual(by_watch)[0])
    assert any(TEXT in line for line in verdict.coverage) == bool(called)
    assert diagnosis.verdict is verdict


# ---- callbacks that a diagnosis attaches, and its own events


OURS = [Diagnose, attached.AttachedStats, attached.AttachedHealth]
ACTS = [
    (kind, event)
    for kind in OURS
    for event in EVENTS[1:]
    if getattr(kind, event) is not getattr(Callback, event)
]


@pytest.mark.parametrize(("train", "act"), covering(LOOPS, ACTS, of=1))
def test_a_callback_of_ours_that_fails_ends_no_training(train, act, monkeypatch):
    usual(train)
    kind, event = act
    monkeypatch.setattr(kind, event, lambda cb: raises())
    _, verdict, trained = diagnosed(train)
    assert same(trained, usual(train)[0])
    assert any(TEXT in line for line in verdict.looked)


def test_what_cannot_be_recorded_is_refused_before_the_training(monkeypatch):
    monkeypatch.setattr(attached.AttachedHealth, "before_fit", lambda cb: raises())
    with pytest.raises(RuntimeError, match=TEXT):
        by_watch(Diagnose(show=False))


def test_an_error_of_the_users_function_ends_the_training():
    with pytest.raises(RuntimeError, match=TEXT):
        fit(make_learner(30, lr=1e9), cbs=Diagnose(raises, show=False))


# ---- checks


def test_a_check_that_fails_costs_its_own_code(monkeypatch):
    evidence = diagnosed(by_learner)[0].evidence()
    gaps = unchecked(judge(evidence))
    for code, check in FAULTS.items():
        broken = replace(check, function=raises)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAULTS, code, broken)
            verdict = judge(evidence)
        assert unchecked(verdict) - {code} == gaps - {code}
        (told,) = _run(broken, replace(evidence, sources=set(SOURCES), absent={}))
        assert TEXT in told.reason


def test_checks_that_all_fail_end_no_training(monkeypatch):
    for code, check in FAULTS.items():
        monkeypatch.setitem(FAULTS, code, replace(check, function=raises))
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


def test_the_command_gives_a_verdict_if_all_probes_fail(command, monkeypatch):
    places = {place for place, _ in calls(by_watch)}
    poison(monkeypatch, places)
    out = command()
    assert "Net, trained by Adam" in out
    assert TEXT in out


# what hooks of a watch call in the forward, the backward and the step of a script
IN_HOOKS = ["first_parameter_behind", "stepping_optimizer", "WeightMark", "unwrapped"]
IN_HOOKS += ["WatchedOptimizers.include", "ExternalLoop.report_pred", "ExternalLoop.begin_backward"]
IN_HOOKS += ["ExternalLoop.end_backward", "ExternalLoop.begin_step", "ExternalLoop.end_step"]


@pytest.mark.parametrize("place", IN_HOOKS)
def test_the_command_raises_nothing_into_the_script(place, command, monkeypatch):
    monkeypatch.setattr(f"hookcb.loops.watcher.{place}", raises)
    assert TEXT in command()
