"""`hookcb diagnose --trace-nan script.py` runs a script a second time if it makes a NaN somewhere unknown."""

import json
import linecache
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hookcb.cli.main import main
from hookcb.cli.second_run import ANOMALY, SEED, SecondRun, _with_result, asks_for_trace
from hookcb.cli.traced_script import _told
from hookcb.diagnosis.reader import TRACE
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.nans.nonfinite import Kinds
from hookcb.nans.origins import Made
from tests.cli.test_script import BEGIN, HEALTHY, wide  # noqa: F401  # a fixture
from tests.cli.test_traced_script import lines
from tests.support import first

ROOT = Path(__file__).parents[2]


def test_the_line_is_in_the_verdict_and_what_the_script_writes_comes_twice(tmp_path, monkeypatch):
    """The command is as it is installed, in a process of its own, in which warnings are errors."""
    script = f"""
    import os
    print("begins in", os.path.basename(os.getcwd()), os.environ.get("ADDED"), torch.rand(1).item())
    open("log.txt", "a").write("x")
    os.environ["ADDED"] = "1"
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    print("read", input())
    torch.seed()
    {textwrap.indent(lines(), "    ").strip()}
    """
    path = tmp_path / "script.py"
    path.write_text(BEGIN + textwrap.dedent(script))
    (tmp_path / "stdin.txt").write_text("answer\nnot read\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-W", "error", "-m", "hookcb", "diagnose", "--trace-nan", str(path)]
    with open(tmp_path / "stdin.txt") as stdin:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, stdin=stdin)
    out = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert out.startswith("begins in ")
    begins = [text.partition(" read")[0] for text in out.split("begins in ")[1:]]
    assert len(begins) == 2
    assert len(set(begins)) == 1
    assert out.count("read answer") == 2
    assert (tmp_path / "log.txt").read_text() == "xx"
    assert "Linear, trained by Adam SICK A number is NaN or infinite" in out
    assert "A gradient is not finite at step 7. A second run of the script shows that it comes from" in out
    assert "SqrtBackward0, in the backward of this line, at " in out
    assert "loss = square.sqrt().mean()" in out
    assert "Next: add a small number under the root." in out
    assert "--trace-nan" not in out
    assert "runs a second time now" in done.stderr


def test_a_second_run_that_has_none_is_told_with_what_to_do(tmp_path, capfd, monkeypatch):
    """As JSON, beside which nothing else is in stdout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    script = lines().replace("if i == 7:", 'if i == 7 and not __import__("os").path.exists("ran"):')
    end = "\n__import__('pathlib').Path('ran').touch()\nprint('of the script')"
    (tmp_path / "script.py").write_text(BEGIN + script + end)
    assert main(["diagnose", "--trace-nan", "--json", "script.py"]) == 1
    out, err = capfd.readouterr()
    (model,) = json.loads(out)["models"]
    primary = model["verdict"]["primary"]
    assert primary["code"] == "nonfinite.first"
    assert primary == model["verdict"]["findings"][0]
    assert "A second run of the script had none in 20 batches." in primary["message"]
    assert primary["next_steps"][0].startswith("Seed the script, torch.manual_seed(0)")
    assert err.count("of the script") >= 2


IN_THE_MODEL = """
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).log()
train(*[(net := Net(16, 3)), torch.optim.SGD(net.parameters(), 0.1)])
"""


@pytest.mark.parametrize("script", first([HEALTHY, "raise SystemExit(3)", IN_THE_MODEL]))
def test_a_script_without_nan_or_whose_line_is_known_runs_once(script, tmp_path, capsys, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(BEGIN + script)
    monkeypatch.setattr(SecondRun, "_run", lambda *_: pytest.fail("it runs again"))
    main(["diagnose", "--trace-nan", str(path)])
    shown = capsys.readouterr()
    assert "second" not in shown.err
    assert ("return super().forward(x).log()" in " ".join(shown.out.split())) is (script == IN_THE_MODEL)


@pytest.mark.slow
def test_what_is_ignored_is_not_looked_for(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(BEGIN + lines())
    monkeypatch.setattr(SecondRun, "_run", lambda *_: pytest.fail("it runs again"))
    main(["diagnose", "--trace-nan", "--ignore", "nonfinite.*", str(path)])


def test_of_several_processes_none_runs_again(tmp_path, capsys, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(BEGIN + lines())
    monkeypatch.setattr(SecondRun, "_run", lambda *_: pytest.fail("it runs again"))
    monkeypatch.setattr("hookcb.cli.script.n_processes", lambda: 2)
    main(["diagnose", "--trace-nan", str(path)])
    assert "--trace-nan was left out" in capsys.readouterr().out


def test_a_second_run_that_cannot_start_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", os.devnull + "/python")
    again = SecondRun("train.py", [], False, False)
    told = again.explain(verdict_of(finding()), "Net").primary
    assert "A second run of the script could not be started: " in told.message
    assert told.next_steps == (ANOMALY,)


def test_a_line_whose_finding_is_a_consequence_is_told_below_the_verdict(monkeypatch):
    again = SecondRun("train.py", [], False, False)
    monkeypatch.setattr(again, "_result", lambda *_: FOUND)
    cause = Finding("update.too_large", "error", step=1, message="A step is too large.")
    told = again.explain(verdict_of(cause, finding(consequence_of=cause.code)), "Net")
    assert told.primary is cause
    assert told.findings[1].message.endswith("it comes from log, at train.py:7.")
    assert again.notes == [f"nonfinite.first: {told.findings[1].message}"]


# ---- what is told


def finding(message="The loss is nan at step 3. The model's output is finite.", **about):
    return Finding("nonfinite.first", "error", step=3, message=message, next_steps=(TRACE,), **about)


def verdict_of(*findings):
    return Verdict("sick", findings[0], findings, (), ())


FOUND = {"op": "log", "told": "A second run of the script shows that it comes from log, at train.py:7"}
MADE = Made(1, "log", "train.py:1", Kinds(bad=True))
TOLD = {
    "A second run of the script shows that it comes from log, at train.py:1: return x.log()": MADE,
    "A second run of the script shows that it comes from log, whose argument is NaN or infinite, at "
    "train.py:1: return x.log()": replace(MADE, how="given"),
    "In a second run of the script, it was in a tensor before log took it, at train.py:1: return x.log()": (
        replace(MADE, how="came")
    ),
    "A second run of the script shows that it comes from log": replace(MADE, line=""),
    "A second run of the script shows that it comes from log, of the -inf at train.py:2, at train.py:1: "
    "return x.log()": replace(MADE, op="masked_fill", line="train.py:2", how="given", then=MADE),
}


@pytest.mark.parametrize("text", TOLD)
def test_what_was_found_is_told_in_one_sentence(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("return x.log()\nx = x.masked_fill(mask, -torch.inf)\n")
    linecache.checkcache("train.py")
    made = TOLD[text]
    assert _told(made) == text
    told = _with_result(finding(), {"op": made.to_blame.op, "told": text})
    assert told.message == f"The loss is nan at step 3. {text}."
    assert told.causes == ("a logarithm of 0 or less",)
    assert told.next_steps == ("clamp its input, x.clamp(min=1e-8)",)
    assert not asks_for_trace(told)


def test_an_operation_without_a_hint_is_to_be_looked_at():
    told = _with_result(finding(), FOUND | {"op": "erfinv"})
    assert told.next_steps[0].startswith("Print the smallest and largest number")


@pytest.mark.parametrize(
    ("reason", "step"), [("had none in 3 batches", SEED), ("was ended by Ctrl-C", ANOMALY)]
)
def test_a_reason_is_told_and_the_same_is_not_advised_again(reason, step):
    told = _with_result(finding(), {"reason": reason})
    assert told.message.endswith(f"The model's output is finite. A second run of the script {reason}.")
    assert told.next_steps == (step,)


def test_other_findings_stay_as_they_are():
    other = Finding("loss.flat", "error", message="The loss has not fallen.")
    second_run = SecondRun("train.py", [], False, False)
    verdict = verdict_of(other)
    assert second_run.explain(verdict, "Net") is verdict
