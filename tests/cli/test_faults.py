"""Each fault that the demo can plant is named by the verdict; without one the demo is healthy."""

import re

import pytest

from hookcb import load_report
from hookcb.cli.demo import train_digits
from hookcb.cli.faults import FAULTS, find_fault
from hookcb.cli.main import main
from tests.support import along, each

MODELS = ("mlp", "cnn")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The demo writes where it is called."""
    monkeypatch.chdir(tmp_path)


def test_there_are_eight_faults():
    assert len(FAULTS) == 8
    assert len({fault.code for fault in FAULTS.values()}) == 8


@pytest.mark.filterwarnings("ignore:ERROR:UserWarning")  # at once, beside the verdict
@pytest.mark.parametrize(("name", "model"), along(FAULTS, MODELS))
def test_a_planted_fault_is_taken_for_the_cause(name, model, capsys):
    learn = train_digits(model, epochs=2, fault=find_fault(name))
    verdict = learn.diagnose()
    assert verdict.status == "sick"
    assert verdict.primary.code == FAULTS[name].code, str(verdict)


@pytest.mark.parametrize("model", each(2, MODELS))
def test_the_demo_as_it_is_is_healthy_and_ends_in_saying_so(model, capsys, monkeypatch):
    monkeypatch.setattr("hookcb.cli.demo.find_spec", lambda name: None)  # saves drawing the picture
    assert main(["demo", "--model", model, "--epochs", "4", "--html"]) == 0
    *_, page, last = capsys.readouterr().out.splitlines()
    assert page == "the run as a page: hookcb-demo.html"
    assert len(load_report("hookcb-demo.html").epochs["accuracy"]) == 4
    assert re.fullmatch(r"HEALTHY +as far as checked: \d+ of \d+ checks ran", last)


@pytest.mark.slow
def test_a_fault_is_told_with_its_verdict_and_leaves_no_checkpoint(capsys, tmp_path):
    args = ["demo", "--model", "mlp", "--epochs", "2", "--fault", "dead-relu", "--html", "a/run.html"]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert load_report("a/run.html").headline.startswith("SICK  Units of a layer get no gradient")
    assert "planted fault: a bias of -10" in shown
    assert "SICK Units of a layer get no gradient: hidden" in " ".join(shown.split())
    assert [own.name for own in tmp_path.iterdir()] == ["a"]  # of the page


def test_the_list_of_faults_has_a_line_for_each(capsys):
    assert main(["demo", "--list-faults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FAULTS)
    for line, fault in zip(lines, FAULTS.values(), strict=True):
        assert line.endswith(fault.about)


def test_a_fault_that_there_is_not_is_told_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--fault", "lr-to-high"])
    assert ended.value.code == 2
    complaint = " ".join(capsys.readouterr().err.split())
    assert "unknown fault 'lr-to-high'" in complaint
    for name in FAULTS:
        assert name in complaint


def test_a_fault_is_not_planted_into_a_training_that_goes_on(capsys):
    assert main(["demo", "--fault", "nan-input", "--resume"]) == 1
    assert "starts afresh" in capsys.readouterr().err
