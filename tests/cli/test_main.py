"""`hookcb demo` does its main job, and says what is wrong with a wrong option."""

import json
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path
from subprocess import run

import pytest

import hookcb.cli.demo
from hookcb import JSONLLogger, Recorder
from hookcb.cli.main import main
from hookcb.diagnosis.verdict import Verdict
from hookcb.report.data import PageData
from hookcb.report.page import Page
from tests.support import ROOT, in_turn


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The demo writes where it is called."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_matplotlib(monkeypatch):
    """Also saves the half second of drawing, where the picture makes no difference."""
    monkeypatch.setattr("hookcb.cli.demo.find_spec", lambda name: None)


@pytest.mark.parametrize(("model", "seed"), [("cnn", "0"), pytest.param("mlp", "1", marks=pytest.mark.slow)])
def test_the_demo_reads_digits_shows_every_layer_and_draws_it(model, seed, capsys):
    assert main(["demo", "--model", model, "--seed", seed]) == 0
    shown = capsys.readouterr().out
    share = float(shown.rpartition("validation accuracy ")[2].partition("%")[0])
    assert share >= 95
    for layer, _ in hookcb.cli.demo.build_model(model).named_children():
        assert f"│ {layer} " in shown
    assert "batch by batch: activations.png" in shown
    assert Path("activations.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_matplotlib_the_demo_says_how_to_get_the_picture(capsys, without_matplotlib):
    assert main(["demo", "--epochs", "1"]) == 0
    assert "pip install 'hookcb[plot]'" in " ".join(capsys.readouterr().out.split())
    assert not Path("activations.png").exists()


@pytest.mark.slow
def test_the_demo_trains_for_as_many_epochs_as_asked(capsys, without_matplotlib):
    main(["demo", "--epochs", "2"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[:4]]
    assert rows[0] == ["epoch", "train_loss", "valid_loss", "accuracy", "time"]
    assert [row[0] for row in rows[1:3]] == ["0", "1"]


@pytest.mark.slow
def test_the_demo_shows_the_time_of_each_layer_and_writes_its_timeline(capsys, without_matplotlib):
    assert main(["demo", "--model", "mlp", "--epochs", "1", "--profile"]) == 0
    shown = capsys.readouterr().out
    for text in ("layers, per step", "backward", "timeline of the profiled steps: trace.json"):
        assert text in shown
    assert json.loads(Path("trace.json").read_text("utf-8"))["traceEvents"]


@pytest.mark.slow
def test_the_demo_goes_on_where_it_was_stopped(capsys, without_matplotlib):
    def stop(cb):
        if (cb.epoch, cb.iter) == (1, 5):
            signal.raise_signal(signal.SIGINT)

    main(["demo", "--epochs", "2"])
    whole = capsys.readouterr().out.partition("activations")[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "before_backward", stop)
        with pytest.raises(KeyboardInterrupt):
            main(["demo", "--epochs", "2"])
    capsys.readouterr()
    assert main(["demo", "--epochs", "2", "--resume"]) == 0
    resumed = capsys.readouterr().out.partition("activations")[2]
    # of fewer batches, fewer checks can tell
    assert resumed.partition("HEALTHY")[0] == whole.partition("HEALTHY")[0]
    assert "accuracy" in whole.partition("HEALTHY")[0]


def test_a_demo_with_nothing_to_resume_says_so(capsys):
    assert main(["demo", "--resume"]) == 1
    assert "hookcb demo: there is no hookcb-demo" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(capsys, without_matplotlib):
    ends = []
    for _ in range(2):
        main(["demo", "--epochs", "1", "--seed", "3"])
        ends.append(capsys.readouterr().out.partition("activations")[2])
    assert ends[0] == ends[1]


@in_turn(
    ("options", "complaint"),
    [
        (["demo", "--epochs", "0"], "epochs must be a whole number, 1 or more, got '0'"),
        (["demo", "--epochs", "some"], "epochs must be a whole number, 1 or more, got 'some'"),
        (["demo", "--epochs", "-1"], "--epochs"),
        (["demo", "--model", "rnn"], "'mlp', 'cnn'"),
        (["demo", "--seed", "x"], "seed must be a whole number from 0 to 2**63 - 1, got 'x'"),
        (["demo", "--sed", "1"], "--sed"),
        (["demon"], "demon"),
        ([], "command"),
    ],
)
def test_a_wrong_option_is_told_and_exits_with_2(options, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_help_explains_each_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--epochs", "--model", "mlp", "--seed", "default: 10", "digits"):
        assert part in shown


def test_without_scikit_learn_the_demo_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 1
    assert "pip install 'hookcb[demo]'" in capsys.readouterr().err


def test_the_installed_command_is_this_one(capsys):
    (command,) = entry_points(group="console_scripts", name="hookcb")
    with pytest.raises(SystemExit) as ended:
        command.load()(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hookcb {hookcb.__version__}\n"


def test_the_held_out_digits_are_real_and_never_trained_on():
    dls = hookcb.cli.demo.digits(seed=5)
    train, held_out = dls.train.dataset.tensors, dls.valid.dataset.tensors
    assert (len(train[0]), len(held_out[0])) == (1437, 360)
    assert set(held_out[1].tolist()) == set(range(10))
    assert train[0].mean().item() == pytest.approx(0, abs=1e-5)
    assert train[0].std().item() == pytest.approx(1, abs=1e-5)


def test_a_model_that_there_is_not_is_told():
    with pytest.raises(ValueError, match="must be 'cnn' or 'mlp', got "):
        hookcb.cli.demo.build_model("rnn")


# ---- explain


def test_explain_prints_what_a_check_looks_for(capsys):
    assert main(["explain", "unit.dead"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "unit.dead\n\nStatistical. Needs GradientHealth.\n\nUnits that no sample activates,"
    )
    for text in (
        "Limit: 0.6, and 0.8 for an",
        "Source: Lu et al.",
        "`loss.flat`",
        "docs/checks.md#unit.dead",
    ):
        assert text in out
    assert err == ""


def test_explain_of_an_unknown_code_names_those_like_it(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "unit.ded"])
    assert ended.value.code == 2
    assert "there is no check 'unit.ded'; similar: unit.dead" in " ".join(capsys.readouterr().err.split())


def test_explain_without_a_code_says_what_is_missing(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain"])
    assert ended.value.code == 2
    assert "CODE" in capsys.readouterr().err


def test_the_help_has_explain(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "explain" in capsys.readouterr().out


# ---- options


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["diagnose", "--jsn", "train.py"], "--jsn; did you mean --json?"),
        (
            ["compare", "a", "b", "--fial-if=x"],
            "--fial-if=x; did you mean --fail-if?",
        ),
    ],
)
def test_a_misspelled_option_is_told_with_the_one_like_it(given, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert (
        f"unrecognized arguments: {told}\nfor what is possible, type: hookcb {given[0]} --help"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--steps", "20", "--foo"], ("--steps", "--steps 20")),
        (["--html=a b.html", "x", "--json"], ("--html, --json", "'--html=a b.html' --json")),
        (["--foo", "steps", "-n", "3", "--help"], None),
        (["--", "--steps", "20"], None),
    ],
)
def test_options_after_the_script_are_its_own_and_told_if_they_are_options_of_hookcb(
    given, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import sys; print(sys.argv[1:])")
    main(["diagnose", "train.py", *given])
    out, err = capsys.readouterr()
    assert out.startswith(f"{given}\n")
    if told is None:
        assert "note: " not in err
        return
    assert err.startswith(f"note: {told[0]} after the script was given to the script; ")
    assert err.splitlines()[0].endswith(f" stand before it: hookcb diagnose {told[1]} train.py")


# ---- start-up

WITHOUT_TORCH = """
import sys
sys.path.insert(0, {root!r})
sys.modules["torch"] = None  # an import of it fails
from hookcb.cli.main import main
for options in {commands!r}:
    try:
        code = main(options)
    except SystemExit as ended:
        code = ended.code
    print(f"exit code {{code}}")
"""


def test_commands_that_train_nothing_do_not_wait_for_torch():
    for name in ("a.html", "b.html"):
        Page(PageData("HEALTHY", Verdict("healthy", None, (), (), ()).to_dict())).save(name)
    JSONLLogger("run.jsonl").log({"loss": 0.5}, step=7)
    commands = {
        ("--help",): 0,
        ("--version",): 0,
        ("diagnose", "--help"): 0,
        ("diagnose", "--jsn", "train.py"): 2,
        ("demo", "--epoch", "some"): 2,
        ("explain", "unit.dead"): 0,
        ("explain", "unit.ded"): 2,
        ("tail", "--once", "run.jsonl"): 0,
        ("compare", "a.html", "b.html"): 0,
        ("completion", "bash"): 0,
        ("demo", "--list-faults"): 0,
        ("demo", "--fault", "dead-rel"): 2,
        ("diagnose", "gone.py"): 2,
        ("diagnose", "-m", "gone.away"): 2,
        ("summary", "--input", "8,3"): 2,
    }
    code = WITHOUT_TORCH.format(root=str(ROOT), commands=list(map(list, commands)))
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ends = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert ends == [str(code) for code in commands.values()]
    for shown in ("Statistical. Needs GradientHealth", "step 7  loss 0.5", "healthy"):
        assert shown in done.stdout
