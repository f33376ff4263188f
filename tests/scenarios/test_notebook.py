"""What a notebook shows of a learner, a watch and records, as the last expression of a cell."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from hookcb import (
    ActivationStats,
    Diagnose,
    GradientHealth,
    Learner,
    MemoryStats,
    ProfilerCallback,
    Recorder,
    StepTimer,
    watch,
)
from tests.support import changes_in, make_batches, make_learner, make_model

VOID = {"br", "hr", "img", "meta"}


class Tags(HTMLParser):
    """Tags and text of markup, whose tags must all be closed in order."""

    def __init__(self, markup):
        super().__init__()
        self.names, self.text, self._open = set(), "", []
        self.feed(markup)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        assert not [name for name, _ in attrs if name in ("src", "href", "srcdoc") or name.startswith("on")]
        self._open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.text += text


def shown(x):
    """The text that a notebook shows of `x`; it runs no script, and loads and links nothing."""
    tags = Tags(x._repr_html_())
    assert not tags.names & {"script", "iframe", "link", "object", "style"}
    return re.sub(r"\s+", " ", tags.text)


@pytest.fixture(scope="module")
def sick():
    """A learner of a model with dead units, in a module whose name is markup."""
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Linear(2, 4))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias.fill_(-1e6)
    cbs = Diagnose(show=False, on_sick="ignore"), StepTimer(), MemoryStats()
    learn = make_learner(30, model=model, cbs=cbs)
    with learn.no_logging():
        learn.fit(1)
    return learn


def test_a_learner_shows_the_headline_its_cause_and_what_is_recorded(sick):
    verdict, text = sick.diagnose(), shown(sick)
    assert verdict.status == "sick"
    assert " ".join(verdict.headline.split()) in text
    assert " ".join(verdict.primary.message.split()) in text
    assert verdict.primary.next_steps[0] in text
    assert "<script>alert(1)</script>" in text  # as text
    assert "Recorded by: memory_stats, recorder, step_timer" in text
    assert "activation_stats" in text
    assert repr(sick) in text


def test_records_show_their_table(sick):
    table = shown(sick.activation_stats)
    assert table == shown(sick.activation_stats.records)
    assert "activations in the last of" in table
    assert "head" in table
    for cb in (sick.gradient_health, sick.step_timer, sick.memory_stats):
        assert shown(cb) == shown(cb.records)
    assert "gradients in the last of" in shown(sick.gradient_health)


def test_what_has_recorded_nothing_says_so_or_shows_its_repr():
    for cb in (StepTimer(), MemoryStats(), ProfilerCallback(), Recorder()):
        assert cb._repr_html_() is None
    for cb in (ActivationStats(), GradientHealth()):
        assert "nothing is recorded" in shown(cb)


def test_a_learner_without_diagnose_inspects_no_batch_for_it():
    learn = Learner(make_batches(2), make_model(), nn.functional.mse_loss, cbs=ActivationStats())
    with changes_in(learn) as changed:
        text = shown(learn)
    assert not changed
    assert "No verdict: no Diagnose is among the callbacks" in text
    learn = make_learner(cbs=Diagnose())
    assert "No verdict: nothing is recorded yet" in shown(learn)


def test_a_watch_shows_the_same_while_it_follows_and_afterwards():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for xb, yb in make_batches(30):
            nn.functional.mse_loss(model(xb), yb).backward()
            opt.step()
            opt.zero_grad()
        assert " ".join(w.diagnose().headline.split()) in shown(w)
        assert "state=following" in shown(w)
    assert " ".join(w.diagnose().headline.split()) in shown(w)
    assert "state=closed" in shown(w)
    assert "No verdict: nothing is recorded in this loop" in shown(watch(model, opt))
