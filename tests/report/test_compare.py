"""Runs are compared by what they end with, and conditions on them hold, fail, or are lost in noise."""

import math
import random

import pytest

from hookcb import Diagnose, compare, synth_learner
from hookcb.cli.main import main
from hookcb.diagnosis.run import Series
from hookcb.diagnosis.verdict import Verdict
from hookcb.records.content import MemoryUsed, TimeSpent
from hookcb.report.compare import Comparison, Figure
from hookcb.report.data import PageData
from hookcb.report.page import Page
from tests.support import in_turn


def run(seconds=1.0, noise=0.05, loss=1.0, seed=0, n=200, **fields):
    """A page with times of steps, and losses."""
    rng = random.Random(seed)
    steps = list(range(n))
    times = Series(steps, [seconds * (1 + noise * rng.gauss(0, 1)) for _ in steps])
    losses = Series(steps, [loss * (1 + noise * rng.gauss(0, 1)) for _ in steps])
    epochs = {"accuracy": Series([99, 199], [0.5, 0.9])}
    verdict = Verdict("healthy", None, (), (), ()).to_dict()
    page = PageData("HEALTHY  all", verdict, run={"loss": losses}, epochs=epochs, **fields)
    page.time, page.memory = TimeSpent({"forward": times}), MemoryUsed(used=Series([0, 1], [1e6, 2e6]))
    return page


def write(tmp_path, **runs):
    return [str(Page(page).save(tmp_path / f"{name}.html")) for name, page in runs.items()]


def test_figures_are_those_of_the_runs():
    found = compare(run(), run(2.0, loss=0.5, seed=1), names=["old", "new"])
    assert found["step_time"].ratio == pytest.approx(2, rel=0.02)
    assert found["loss"].ratio == pytest.approx(0.5, rel=0.05)
    assert found["accuracy"].values == (0.9, 0.9)
    assert found["memory"].values == (2e6, 2e6)
    low, high = found["step_time"].interval()
    assert 1.9 < low < 2 < high < 2.1
    assert all(text in str(found) for text in ("old", "new", "accuracy", "new / old", "healthy"))


@in_turn(
    ("condition", "is_met"),
    [
        ("step_time > 1.1", True),
        ("step_time>3", False),
        ("step_time < 1.1", False),
        (" step_time < 3 ", True),
        ("accuracy < 1", False),
        ("accuracy > 0.9", True),
        ("status > 1", False),
        ("memory > 1e3", False),
    ],
)
def test_a_condition_is_met_or_not(condition, is_met):
    found = compare(run(), run(2.0, seed=1))
    assert found.check(condition).is_met is is_met


def test_a_condition_within_the_noise_is_inconclusive():
    outcome = compare(run(noise=0.5), run(1.05, noise=0.5, seed=1)).check("step_time > 1.05")
    assert outcome.is_met is None
    assert "with the noise within the runs" in outcome.why


def test_a_loss_that_is_not_finite_meets_each_condition():
    found = compare(run(), run(loss=math.nan), names=["old", "new"])
    assert found.check("loss > 2") == (True, "loss is nan in new")
    assert found.check("loss < 2").is_met


def test_one_run_against_itself_differs_in_nothing():
    page = run()
    found = compare(page, page)
    assert [figure.ratio for figure in found.figures] == [1.0] * len(found.figures)
    assert found.departures == [[]]
    assert found.differences == []
    assert "No layer departs" in found.headline


def test_most_intervals_have_the_true_ratio():
    rng, hits = random.Random(0), 0
    for _ in range(100):
        samples = []
        for _ in range(2):
            x, own = 0.0, []
            for _ in range(300):
                x = 0.7 * x + rng.gauss(0, 0.1)
                own.append(math.exp(x))
            samples.append(tuple(own))
        low, high = Figure("step_time", (1.0, 1.0), tuple(samples)).interval()
        hits += low <= 1 <= high
    assert 85 <= hits <= 99


def test_a_number_that_is_not_there_is_not_compared():
    found = compare(run(), PageData("No verdict"))
    assert found["loss"].values[1] is None
    assert math.isnan(found["loss"].ratio)
    with pytest.raises(LookupError, match="no figure 'loss' that both runs have; there are none"):
        found.check("loss > 1")
    assert "–" in str(found)
    assert compare(PageData("a"), PageData("b")).figures == []


def test_learners_pages_and_files_can_be_compared(tmp_path):
    learners = [synth_learner(lr=lr) for lr in (0.1, 0.001)]
    for learn in learners:
        with learn.no_logging():
            learn.fit(2, cbs=Diagnose(show=False))
    path = learners[1].report(tmp_path / "slow.html").path
    found = compare(learners[0], learners[0].report(), path)
    assert found.names == ["run 1", "run 2", "slow"]
    assert len(found.departures) == 2
    assert any("lr" in difference.key for difference in found.differences)
    state = found.to_dict()
    assert state["figures"]["loss"] == [pytest.approx(figure) for figure in found["loss"].values]
    assert found.save(tmp_path / "all.html").stat().st_size > 50_000


@in_turn(
    ("make", "error", "said"),
    [
        (lambda: compare(run()), ValueError, "2 to 8 runs, got 1"),
        (lambda: compare(*[run()] * 9), ValueError, "2 to 8 runs, got 9"),
        (lambda: compare(run(), run(), names=["a"]), ValueError, "2 runs, but 1 names"),
        (lambda: compare(run(), 3), TypeError, "got 3"),
        (lambda: compare(run(), "nowhere.html"), FileNotFoundError, "nowhere.html"),
        (lambda: compare(run(), run()).check("loss is low"), ValueError, "no condition"),
        (lambda: compare(run(), run()).check("loss > much"), ValueError, "no condition"),
        (lambda: compare(run(), run())["speed"], LookupError, "there are loss, accuracy, step_time"),
    ],
)
def test_wrong_arguments_are_told(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_names_that_are_alike_are_told_apart():
    assert compare(run(title="a"), run(title="a"), run(title="b")).names == ["a (1)", "a (2)", "b"]
    assert isinstance(compare(run(), run()), Comparison)


@pytest.mark.parametrize(
    ("conditions", "code", "said"),
    [
        (["step_time > 1.5"], 1, "fails: step_time is ×2"),
        (["step_time > 3", "accuracy < 0.5"], 0, "holds: accuracy is ×1"),
        (["loss > 1"], 3, "inconclusive: loss"),
        (["loss > 1", "step_time > 1.5"], 1, "fails"),
        (["speed > 1"], 2, ""),
        (["step_time is fine"], 2, ""),
        ([], 0, "No layer departs"),
    ],
)
def test_the_command_has_an_exit_code_for_each_outcome(tmp_path, capsys, conditions, code, said):
    files = write(tmp_path, old=run(), new=run(2.0, seed=1))
    options = [part for condition in conditions for part in ("--fail-if", condition)]
    assert main(["compare", *files, *options]) == code
    told = capsys.readouterr()
    assert said in told.out
    assert told.err.startswith("hookcb compare: ") is (code == 2)


def test_the_command_writes_a_page(tmp_path, capsys):
    files = write(tmp_path, old=run(), new=run(2.0, seed=1))
    assert main(["compare", *files, "-o", str(tmp_path / "both.html")]) == 0
    assert "both.html" in capsys.readouterr().out
    assert main(["compare", *files, "-o", str(tmp_path)]) == 2
    assert main(["compare", files[0]]) == 2


def test_the_page_of_compared_runs_has_its_sentence_without_scripts(tmp_path):
    found = compare(run(), run(loss=2.0))
    text = found.save(tmp_path / "both.html").read_text(encoding="utf-8")
    assert f'<h1 id="headline">{found.headline}</h1>' in text
    assert "HEALTHY  all" in text.partition("<main>")[0]
