"""How a summary looks as text, in a terminal and as HTML."""

import gc
import html
import weakref
from collections import OrderedDict

import pytest
from torch import nn

from hookcb import module_summary
from tests.hooks.summary_models import cnn, models, randn
from tests.support import in_terminal, row, shown

EVIL = ["[red]", "[/red]", "[bold]x[/bold]", "[link=http://x]y", ":warning:", "\\[b]", "{x}", "%s", "[", "[]"]


def evil_model(name):
    kind = type(f"{name}Kind", (nn.Linear,), {})
    model = nn.Sequential()
    model.add_module(name, kind(3, 2))
    model.add_module("plain", nn.Linear(2, 2))
    return model


@pytest.mark.parametrize("name", EVIL)
def test_names_are_shown_as_they_are(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summary = module_summary(evil_model(name), randn(4, 3))
    assert row(summary, name).type == f"{name}Kind"
    for text in (str(summary), in_terminal(summary), html.unescape(summary._repr_html_())):
        assert text.count(name) >= 2
        assert f"{name}Kind" in text


def test_names_are_escaped_in_html():
    summary = module_summary(evil_model("<script>&"), randn(4, 3))
    page = summary._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;&amp;Kind" in page


def test_html_is_a_table_with_all_rows():
    model = cnn()
    page = module_summary(model, randn(4, 3, 8, 8))._repr_html_()
    assert "<table" in page
    assert page.count("<table") == page.count("</table>")
    assert page.count("<tr") == page.count("</tr>") > len(list(model.children()))
    assert all(name in page for name, _ in model.named_children())


def test_text_is_plain_and_says_the_totals(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    summary = module_summary(cnn(), randn(4, 3, 8, 8))
    text = str(summary)
    assert text == repr(summary)
    assert "\x1b" not in text
    assert str(summary.n_params) in shown(text)
    assert str(summary.n_trainable) in shown(text)
    assert max(map(len, text.splitlines())) <= 100
    assert capsys.readouterr().out == ""


@models
def test_every_summary_can_be_shown_in_all_ways(make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model, *xb = make()
    for depth in (None, 0, 1):
        summary = module_summary(model, *xb, depth=depth)
        for text in (str(summary), in_terminal(summary, 80), summary._repr_html_()):
            assert str(summary.n_params) in shown(text)


def long_names(n_deep):
    model = nn.Sequential(OrderedDict(first=nn.Linear(1000, 1234), second=nn.Linear(1234, 98)))
    for _ in range(n_deep):
        model = nn.Sequential(OrderedDict(a_rather_long_name_of_a_block=model))
    return model


narrow = pytest.mark.parametrize("columns", [40, 60, 80])
indented = pytest.mark.parametrize("n_deep", [0, 12])


@narrow
@indented
def test_a_narrow_terminal_cuts_no_count(columns, n_deep, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    summary = module_summary(long_names(n_deep), randn(4, 1000))
    for text in (str(summary), in_terminal(summary, columns)):
        for count in (1000 * 1234 + 1234, 1234 * 98 + 98, summary.n_params):
            assert str(count) in shown(text)
    assert all(len(line.rstrip()) <= columns for line in in_terminal(summary, columns).splitlines())


def test_a_summary_does_not_keep_the_model_or_change_with_it():
    model = cnn()
    summary = module_summary(model, randn(4, 3, 8, 8))
    text, ref = str(summary), weakref.ref(model)
    model.head = nn.Linear(4, 900)
    assert str(summary) == text
    del model
    gc.collect()
    assert ref() is None
    assert str(summary) == text
