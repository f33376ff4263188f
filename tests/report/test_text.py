"""The text of a page, which is there without scripts."""

import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn

from hookcb import Diagnose, Finding, Learner, Verdict
from hookcb.diagnosis.figure import MAX_POINTS, over_names, over_steps
from hookcb.diagnosis.run import Series
from hookcb.report.collect import collect, with_series
from hookcb.report.data import PageData
from hookcb.report.page import page_of
from hookcb.report.text import text_of


@pytest.fixture(scope="module")
def sick():
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(16, 16), nn.Sigmoid())], nn.Linear(16, 1))
    x = torch.randn(256, 16)
    batches = [(x[i : i + 32], x[i : i + 32, :1]) for i in range(0, 256, 32)]
    learn = Learner(
        (batches, None), model, loss_func=nn.functional.mse_loss, opt_func=torch.optim.SGD, lr=0.01
    )
    with learn.no_logging():
        learn.fit(4, cbs=Diagnose("ignore", show=False))
    return learn


def page(verdict, **fields):
    data = PageData(verdict.headline, **fields)
    data.verdict = with_series(verdict, data)
    return data


def test_the_verdict_is_in_the_markup_and_its_figure_has_its_numbers(sick):
    verdict, data = sick.diagnose(), collect(sick)
    text = page_of(data)
    assert "The first layers barely learn: layer 0" in text
    for said in (*verdict.primary.causes, *verdict.primary.next_steps, *verdict.looked):
        assert said in text
    figure = verdict.primary.figure
    assert figure.limit == verdict.primary.limit
    assert figure.lines[0].values[figure.names.index("0.weight")] == verdict.primary.value
    assert data.verdict["primary"]["figure"]["names"] == list(figure.names)
    assert PageData.from_json(data.to_json()).verdict["primary"] == data.verdict["primary"]


def test_nothing_that_the_page_shows_is_said_to_be_missing(sick):
    data = collect(sick)
    assert data.layers
    assert data.params
    assert not [note for note in data.notes if "layers" in note or "gradients." in note]


def test_a_sick_run_is_folded_and_a_healthy_one_is_open(sick):
    assert text_of(collect(sick))["OPEN"] == ""
    assert (
        text_of(PageData("HEALTHY  all", Verdict("healthy", None, (), (), ()).to_dict()))["OPEN"] == " open"
    )


def test_others_are_folded_by_what_they_are():
    found = (
        Finding("a.b", "error", "net.0", message="one", headline="It fails"),
        Finding("c.d", "warning", message="two", headline="It is slow"),
        Finding("e.f", "warning", message="three", consequence_of="a.b"),
        Finding("g.h", "info", message="four", headline="By the way"),
    )
    text = text_of(page(Verdict("sick", found[0], found, (), ())))["VERDICT"]
    for title in ("Also wrong (1): It is slow", "What follows from it (1): e.f", "Notes (1): By the way"):
        assert f"<details><summary>{title}</summary>" in text


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"value": 1e-6, "limit": 1e-3}, 'aria-label="measured 1e-06, limit 0.001, logarithmic"'),
        ({"value": 0.9, "limit": 0.5}, 'aria-label="measured 0.9, limit 0.5"'),
        ({"value": -3.0, "limit": 0.0}, 'aria-label="measured -3, limit 0"'),
        ({}, "No figure: what was seen is in the sentence."),
        ({"code": "loss.detached"}, "No figure: this is a fact"),
        ({"code": "loss.detached", "value": 1.0, "limit": 0.0}, "No figure: this is a fact"),
    ],
)
def test_an_alarm_has_its_number_beside_its_limit_or_says_why_not(about, said):
    finding = Finding(**{"code": "user.own", "severity": "error", "message": "m"} | about)
    assert said in text_of(page(Verdict("sick", finding, (finding,), (), ())))["VERDICT"]


def test_a_check_is_explained_on_the_page_and_one_of_the_users_own_is_not():
    for code, is_known in (("loss.detached", True), ("user.own", False)):
        finding = Finding(code, "error", message="m")
        text = text_of(page(Verdict("sick", finding, (finding,), (), ())))["VERDICT"]
        assert (f"How {code} is found" in text) == is_known


def test_the_command_the_commit_and_the_rate_are_below_the_headline():
    config = {"Run": [["command", "python train.py --lr 3"], ["git commit", "abc"]], "AdamW": [["lr", "0.1"]]}
    text = text_of(PageData("HEALTHY  all", config=config))["COMMAND"]
    assert "<code>python train.py --lr 3</code> · <span>commit abc</span> · <span>AdamW lr=0.1</span>" in text


@pytest.mark.parametrize("place", ["headline", "title", "config", "notes", "layers", "finding"])
def test_nothing_of_the_users_is_markup(place):
    name = "<img src=x onerror=alert(1)>\"'</script>"
    finding = Finding(name, "error", name, name, message=name, causes=(name,), kind=name, headline=name)
    fields = {
        "headline": {"headline": name},
        "title": {"headline": "x", "title": name},
        "config": {"headline": "x", "config": {name: [[name, name]]}},
        "notes": {"headline": "x", "notes": [name]},
        "layers": {"headline": "x", "run": {name: Series([0], [1.0])}},
        "finding": {"headline": "x", "verdict": page(Verdict("sick", finding, (finding,), (), ())).verdict},
    }[place]
    text = page_of(PageData(**fields))
    assert "<img" not in text
    assert "onerror=alert(1)>" not in text.replace("&gt;", "")


def test_a_figure_is_short_and_keeps_what_matters():
    values = [1.0] * 1000
    values[333], values[777], values[-1] = 50.0, -7.0, 2.0
    series = Series([*range(1000)], values)
    figure = over_steps("x", {"a": series}, 3.0)
    line = figure.lines[0]
    assert len(line.values) <= MAX_POINTS + 3
    assert {50.0, -7.0, 2.0} <= set(line.values)
    assert all(values[place] == x for place, x in zip(line.places, line.values, strict=True))
    assert over_steps("x", {"a": Series([0, 1], [math.nan, math.inf])}).to_dict()["lines"] == [
        {"label": "a", "places": [0, 1], "values": ["NaN", "Infinity"]}
    ]
    named = over_names("x", {"p": 1.0, "q": math.nan, "r": 2.0})
    assert (named.names, named.lines[0].places, named.to_dict()["limit"]) == (("p", "q", "r"), (0, 2), None)


def test_findings_with_figures_are_equal_after_a_copy_and_can_be_keys():
    figure = over_steps("x", {"a": Series([0, 1], [math.nan, 1.0])}, 3.0)
    finding = Finding("a.b", "error", figure=figure)
    assert pickle.loads(pickle.dumps(figure)).title == "x"
    assert dataclasses.replace(finding) == finding
    assert hash(finding) == hash(dataclasses.replace(finding))
