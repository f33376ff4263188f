"""Saved records and checkpoints are read as pages."""

import pytest
import torch

from hookcb import ActivationStats, Checkpoint, GradientHealth, load_report, synth_learner
from hookcb.cli.main import main
from hookcb.report.saved import load_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    learn = synth_learner()
    with learn.no_logging():
        learn.fit(2, cbs=[ActivationStats(with_hist=True), GradientHealth(), Checkpoint(folder / "fit")])
    learn.activation_stats.records.save(folder / "records" / "activations.pt")
    learn.gradient_health.records.save(folder / "records" / "gradients.pt")
    torch.save({"x": torch.ones(2)}, folder / "records" / "other.pt")
    learn.report(folder / "page.html")
    return folder, learn


@pytest.mark.parametrize("name", ["fit", "records", "page.html"])
def test_a_run_is_read_from_files(runs, name):
    folder, learn = runs
    data = load_run(folder / name)
    assert list(data.layers) == learn.activation_stats.names
    assert list(data.params) == learn.gradient_health.names
    assert data.layers["0"].stats["std"].steps == learn.activation_stats.steps()
    assert ("loss" in data.run) is (name != "records")
    assert data.headline.startswith("No verdict") is (name != "page.html")


def test_the_newest_checkpoint_of_a_folder_is_read(runs):
    assert load_run(runs[0] / "fit").run["loss"].steps == list(range(20))


def test_the_command_writes_a_page(runs, capsys, tmp_path):
    folder, _ = runs
    assert main(["report", str(folder / "fit"), "-o", str(tmp_path / "run.html")]) == 0
    assert "No verdict" in capsys.readouterr().out
    assert load_report(tmp_path / "run.html").n_batches == 20
    assert main(["report", str(folder / "records" / "activations.pt")]) == 0
    assert (folder / "records" / "activations.html").is_file()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "nothing to show"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(b"hello"), str),
        (lambda path: torch.save({"schema": 9}, path), "version 9"),
    ],
)
def test_what_cannot_be_shown_is_told(tmp_path, capsys, make, said):
    path = tmp_path / "run.pt"
    make(path)
    assert main(["report", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("hookcb report: ")
    assert str(path) in told
    assert said is str or said in told
    assert [file.name for file in tmp_path.iterdir() if file != path] == []


def test_records_of_another_version_are_told(runs, tmp_path):
    folder, learn = runs
    state = torch.load(folder / "records" / "activations.pt", weights_only=True) | {"schema": 2}
    torch.save(state, tmp_path / "new.pt")
    with pytest.raises(ValueError, match="version 2, and this hookcb reads version 1"):
        type(learn.activation_stats.records).load(tmp_path / "new.pt")
