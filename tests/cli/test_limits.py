"""`hookcb diagnose --steps N script.py` ends a script early; `--ignore` and `--strict` change what counts."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hookcb.cli.ignored import without
from hookcb.cli.limits import Limit, LimitReached
from hookcb.cli.main import main
from hookcb.cli.model_tracker import Result
from hookcb.cli.script import _exit_code
from hookcb.diagnosis.verdict import Finding, Verdict
from tests.cli.test_script import BEGIN, headings, run, wide  # noqa: F401  # two fixtures
from tests.support import first, in_turn

FOREVER = 10**9
TRAINS = f"train(*make(), n={FOREVER})\n"


@pytest.fixture
def end_after(run, tmp_path):  # noqa: F811
    """Runs a script as `run` does, with options of the command."""

    def end_after(options, lines, capsys):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + lines)
        code = main(["diagnose", *options.split(), str(script)])
        shown = capsys.readouterr()
        return code, " ".join(shown.out.split()), shown.err

    return end_after


@pytest.fixture
def ended(end_after, capsys):
    """As `end_after`; gives exit code, output with single spaces, and errors."""
    return lambda options, lines: end_after(options, lines, capsys)


# ---- the end


def test_a_script_ends_after_so_many_steps_as_by_ctrl_c(ended):
    code, out, err = ended("--steps 30", f"try:\n    {TRAINS}finally:\n    print('tidied up')\nprint('next')")
    assert code == 0
    assert out.startswith("tidied up Sequential, trained by Adam HEALTHY as far as checked")
    assert "checks ran; after 30 steps" in out
    assert "30 batches" in out
    assert "next" not in out
    assert err == "hookcb diagnose: the script ends now, after 30 steps, as by Ctrl-C\n"


@pytest.mark.slow
def test_the_verdict_decides_and_a_training_that_was_cut_is_not_called_unfinished(ended):
    assert ended("--steps 30", f"train(*make(lr=10.0), n={FOREVER})")[0] == 1
    slow = "train(*make(lr=1e-3), n={})"
    assert "The training ends too early" in ended("", slow.format(60))[1]
    assert "The training ends too early" not in ended("--steps 60", slow.format(FOREVER))[1]


def test_minutes_end_a_script_too(ended):
    code, out, _ = ended("--minutes 0.001", TRAINS)
    assert code == 0
    assert "; after 0.001 minutes and " in out


def test_steps_that_the_script_makes_itself_count_too(ended):
    code, out, _ = ended(
        "--steps 25",
        f"""
net, n = make()[0], 0
try:
    while n < {FOREVER}:
        x, y = next(batches(1))
        F.cross_entropy(net(x), y).backward()
        for p in net.parameters():
            p.data.add_(p.grad, alpha=-0.05)
            p.grad = None
        n += 1
finally:
    print(n, "made")
""",
    )
    assert code == 0
    assert out.startswith("25 made")
    assert "; after 25 steps" in out


def test_a_limit_that_is_not_reached_is_told(ended):
    code, out, _ = ended("--steps 100 --minutes 9", "train(*make())")
    assert code == 0
    assert "; after" not in out
    assert "the script ended before --steps 100 and --minutes 9: its optimizers made 40 steps" in out


@pytest.mark.parametrize(
    "lines",
    first(
        [
            "try:\n    {}finally:\n    missing",
            "def run():\n    try:\n        {}    except KeyboardInterrupt:\n"
            "        return 130\nsys.exit(run())",
            "try:\n    {}except KeyboardInterrupt as error:\n    raise KeyboardInterrupt from error",
            "while True:\n    try:\n        {}    except Exception:\n        pass",
        ]
    ),
)
def test_what_the_script_does_once_it_is_ended_does_not_change_the_exit_code(lines, ended):
    code, out, err = ended("--steps 20", lines.format(TRAINS))
    assert code == 0
    assert "until the script failed" not in out
    assert ("NameError" in err) is ("what the script raised after its limit does not count" in out)
    assert ("NameError" in err) is ("missing" in lines)


def test_a_script_that_catches_the_end_is_told_so_and_ended_by_systemexit(ended):
    catch = f"try:\n        {TRAINS}    except KeyboardInterrupt:\n        print('caught', i)"
    code, out, err = ended("--steps 20", f"for i in range(5):\n    {catch}")
    assert code == 0
    assert "caught 0" in out
    assert "caught 1" not in out
    assert err.count("now SystemExit ends it") == 1


CATCHES_ALL = f"""
import atexit
atexit.register(print, 'at exit')
while True:
    try:
        {TRAINS}
    except BaseException as error:
        print(isinstance(error, KeyboardInterrupt), type(error).__name__)
"""


@pytest.mark.slow
def test_a_script_that_catches_all_exceptions_gets_its_verdict_all_the_same(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BEGIN + CATCHES_ALL)
    command = [sys.executable, "-m", "hookcb", "diagnose", "--json", "--steps", "20", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    state = json.loads(done.stdout.splitlines()[0])
    assert (state["steps"], state["models"][0]["verdict"]["status"]) == (20, "healthy")
    assert done.stdout.splitlines()[1:] == ["at exit"]
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith(("True", "False"))] == [
        "True LimitReached",
        "False SystemExit",
    ]
    assert lines[-1].endswith("it ends here, without its `finally` blocks")


# ---- which steps count


def optimizer(n, lr=0.1):
    return torch.optim.SGD([nn.Parameter(torch.ones(n))], lr)


def steps(limit, *counts):
    """Makes steps of optimizers, and tells after how many in all the limit is reached, None if never."""
    made = 0
    for opt, n in counts:
        for _ in range(n):
            made += 1
            if limit.note_step(opt):
                return made
    return None


def test_steps_of_the_optimizer_with_the_most_parameters_count():
    limit, small, large = Limit(10), optimizer(4), optimizer(5)
    assert steps(limit, (small, 50), (large, 20)) == 60  # waits for the one that is there already
    assert steps(Limit(10), *[(small, 5), (large, 1)] * 20) == 60  # as of a GAN
    assert steps(Limit(10), (large, 5), (small, 200)) == 105  # the large one is trained no more
    limit, new, larger = Limit(10), optimizer(4), optimizer(5)
    assert steps(limit, (new, 200)) == 100  # the large one is never trained
    del larger


@pytest.mark.slow
def test_a_model_that_is_not_used_yet_is_waited_for_and_one_that_is_used_is_not(ended):
    begin = "big = nn.Linear(16, 60)\n{}train(*make(), 30)\nprint('warm')\n"
    later = f"train(big, torch.optim.SGD(big.parameters(), 0.1), {FOREVER})"
    _, out, err = ended("--steps 20", begin.format("") + later)
    assert "warm" in out
    assert err.count("a model with more parameters is yet to be trained") == 1
    _, out, err = ended("--steps 20", begin.format("with torch.no_grad():\n    big(W.T)\n") + later)
    assert "warm" not in out


def test_accumulation_counts_steps_and_a_closure_one(ended):
    _, out, _ = ended(
        "--steps 5",
        """
net, opt = make()
opt = torch.optim.LBFGS(net.parameters(), max_iter=4)
n = 0
def closure():
    opt.zero_grad()
    loss = sum(F.cross_entropy(net(x), y) for x, y in batches(2))
    loss.backward()
    return loss
try:
    while True:
        n += 1
        opt.step(closure)
finally:
    print('steps', n)
""",
    )
    assert "steps 5 " in out


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradscaler_skips_does_not_count(fused, ended):
    _, out, _ = ended(
        "--steps 10",
        f"""
net = make()[0]
opt = torch.optim.Adam(net.parameters(), 1e-2, fused={fused})
scaler = torch.amp.GradScaler("cpu")
n = 0
try:
    for x, y in batches({FOREVER}):
        n += 1
        opt.zero_grad()
        scaler.scale(F.cross_entropy(net(x), y) * (float('inf') if n in (3, 4) else 1)).backward()
        scaler.step(opt)
        scaler.update()
finally:
    print('batches', n, 'steps', int(opt.state[net[0].weight]['step']))
""",
    )
    assert "steps 10 " in out
    assert "batches 12 " in out


def test_a_step_inside_the_step_of_a_wrapper_counts_once():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups[0]["params"], {})
            self.inner = inner

        def step(self):
            self.inner.step()

    limit, wrapper = Limit(100), Wrapper(optimizer(3))
    hook = register_optimizer_step_post_hook(lambda opt, *_: limit.note_step(opt))
    for _ in range(7):
        wrapper.step()
    hook.remove()
    assert limit.n_steps == 7


def test_steps_in_another_thread_do_not_count_and_are_told():
    limit, opt = Limit(3), optimizer(2)
    thread = threading.Thread(target=lambda: [limit.note_step(opt) for _ in range(9)])
    thread.start()
    thread.join()
    assert not limit.is_over
    assert limit.note_of_end().endswith("made 0 steps; 9 in other threads do not count")


def test_time_begins_with_the_first_step_of_the_largest_model(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limit, small, large = Limit(minutes=1), optimizer(2), optimizer(3)
    now = 1000.0  # the script has loaded its data
    assert not limit.note_step(small)
    now = 1050.0
    assert not limit.note_step(large)
    now = 1100.0
    assert not limit.note_step(large)
    now = 1111.0
    assert limit.note_step(large)
    assert limit.reached == "after 1 minute and 3 steps"


@pytest.mark.slow
def test_a_model_that_was_not_trained_yet_does_not_count(ended):
    """As an actor whose steps begin once the critic has made some hundreds."""
    code, out, _ = ended("--steps 20", f"late, opt = make()\nlate(W.T)\ntrain(*make(), n={FOREVER})")
    assert "not trained: Adam made no step" in out
    assert "UNKNOWN" in out
    assert code == 0


# ---- a Learner


def test_a_fit_ends_at_the_end_of_a_batch_and_its_checkpoint_resumes(tmp_path, ended, capsys):
    lines = f"""
from hookcb import Checkpoint, synth_learner
torch.manual_seed(0)
learn = synth_learner()
try:
    with learn.no_logging():
        learn.fit(3, cbs=Checkpoint({str(tmp_path / "run")!r}), resume="latest")
finally:
    print(learn.ended_by)
    print("weights", sum(p.double().sum().item() for p in learn.model.parameters()))
"""
    code, out, _ = ended("--steps 13", lines)
    assert code == 0
    assert "EndAtLimit" in out
    assert "13 batches" in out
    _, resumed, _ = ended("", lines)
    whole = lines.replace(str(tmp_path / "run"), str(tmp_path / "whole"))
    _, alone, _ = ended("", whole)
    weights = [text.split("weights ")[1].split()[0] for text in (resumed, alone, out)]
    assert weights[0] == weights[1] != weights[2]


# ---- wrong arguments, --ignore, --strict


@in_turn(
    ("option", "told"),
    [
        ("--steps=0", "steps must be a whole number, 1 or more, got '0'"),
        ("--steps=x", "steps must be a whole number, 1 or more, got 'x'"),
        ("--minutes=-1", "minutes must be a number above 0, such as 2 or 0.5, got '-1'"),
        ("--minutes=nan", "minutes must be a number above 0, such as 2 or 0.5, got 'nan'"),
        ("--ignore=time.data", "there is no check 'time.data'; similar: time.data_bound"),
        ("--ignore=nope.*", "there is no check 'nope.*'; available: "),
    ],
)
def test_wrong_values_are_refused(option, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["diagnose", option, "script.py"])
    assert told in capsys.readouterr().err


DROPOUT = "net, opt = make()\nnet.insert(2, nn.Dropout(0.95))\ntrain(net, opt)"


def test_an_ignored_finding_is_left_out_and_the_headline_says_so(ended):
    assert "SUSPECT A dropout drops nearly everything" in ended("", DROPOUT)[1]
    code, out, _ = ended("--ignore dropout.* --ignore wd.norms", DROPOUT)
    assert code == 0
    assert "HEALTHY as far as checked" in out
    assert "checks ran; ignored: dropout.*, wd.norms" in out


@pytest.mark.slow
def test_an_ignored_finding_is_not_told_live_and_json_has_what_was_ignored(ended):
    sick = "train(*make(lr=10.0), 30)"
    assert "update.too_large" in ended("", sick)[2]
    _, out, err = ended("--json --ignore update.too_large", sick)
    assert "update.too_large" not in err
    state = json.loads(out)
    assert (state["ignored"], state["steps"]) == (["update.too_large"], None)
    assert state["models"][0]["verdict"]["remarks"] == ["ignored: update.too_large"]
    assert "update.too_large" not in {f["code"] for f in state["models"][0]["verdict"]["findings"]}


@pytest.mark.slow
def test_the_page_has_the_verdict_that_was_printed(tmp_path, ended):
    from hookcb import load_report

    ended(f"--html {tmp_path / 'run.html'} --ignore dropout.extreme --steps 35", DROPOUT)
    data = load_report(tmp_path / "run.html")
    assert data.headline.endswith("; after 35 steps; ignored: dropout.extreme")
    assert data.verdict["status"] == "healthy"


def verdict(*findings, status="sick"):
    return Verdict(status, findings[0], findings, ("NaN",), (), n_checked=9, n_checks=9)


def test_what_follows_from_an_ignored_finding_takes_its_place():
    a = Finding("update.too_large", "error")
    b = Finding("unit.dead", "warning", consequence_of="update.too_large")
    c = Finding("loss.flat", "warning", consequence_of="unit.dead")
    found = without(verdict(a, b, c), ["unit.*"])
    assert [(f.code, f.consequence_of) for f in found.findings] == [
        ("update.too_large", ""),
        ("loss.flat", "update.too_large"),
    ]
    found = without(verdict(a, b, c), ["update.too_large"])
    assert (found.status, found.primary.code, found.n_checked) == ("suspect", "unit.dead", 8)
    assert without(verdict(a, b, c), ["*"]).status == "healthy"


def test_nothing_is_healthy_of_which_only_ignored_findings_were_seen():
    seen = Verdict("suspect", None, (Finding("param.unreachable", "warning"),), (), ())
    found = without(seen, ["param.*"])
    assert (found.status, found.reason) == ("unknown", "all that was found is ignored")


def test_strict_exits_with_1_for_any_warning():
    slow = Verdict("healthy", None, (Finding("time.data_bound", "warning"),), (), ())
    note = Verdict("healthy", None, (Finding("wd.norms", "info"),), (), ())
    assert [_exit_code(0, [Result("Net", slow, counts=True)], strict) for strict in (False, True)] == [0, 1]
    assert _exit_code(0, [Result("Net", note, counts=True)], is_strict=True) == 0


def test_what_ends_a_script_is_caught_less_and_less_often(capsys):
    given_up = []
    limit, opt = Limit(1), optimizer(1)
    limit.give_up = lambda: given_up.append(limit.reached)
    for kind in KeyboardInterrupt, SystemExit, SystemExit:
        assert limit.note_step(opt)
        assert not given_up
        with pytest.raises(kind):
            limit.end()
    assert given_up == ["after 1 step"]
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert issubclass(LimitReached, KeyboardInterrupt)
