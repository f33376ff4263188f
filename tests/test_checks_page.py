"""The page of all checks is made from their registry, and says of each what it looks at and why there."""

import math
import re

import margins
import pytest
from margin import MARGINS, Margin, read_margins
from margins import Measured, Number

from docs import checks as docs
from docs.checks import document, main
from hookcb import Diagnose, synth_learner
from hookcb.diagnosis.explain import explain
from hookcb.diagnosis.fault import FAULTS, Site, doc_of, fault
from hookcb.diagnosis.judge import _run, explained
from hookcb.diagnosis.reader import SOURCES
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding
from tests.support import in_turn

OF_THE_MACHINE = {
    "time.data_bound",
    "time.other",
    "time.layer",
    "time.garbage",
    "time.growing",
    "memory.growth",
}
NOTES = {"train.unfinished", "wd.norms"}  # of a healthy training too
CODES = set(FAULTS)
STATISTICAL = [check for check in FAULTS.values() if not check.exact]
MARGIN = Margin(
    "unit.dead", 0.6, is_low=False, healthy=0.44, control="dilated convolutions", lowest=0.75, highest=1.0
)


# ---- the page


@pytest.mark.skipif(not docs.PAGE.exists(), reason="an installed package has no page beside it")
def test_the_page_is_current():
    assert docs.PAGE.read_text("utf-8") == document(read_margins()), f"run {docs.COMMAND}"


def test_the_page_has_each_check_with_all_that_is_known_of_it():
    page = document([MARGIN])
    for check in FAULTS.values():
        assert doc_of(check) in page
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert len(headings) == len(FAULTS)
    assert {code for heading in headings for code in re.findall(r"`([^`]+)`", heading)} == CODES
    assert page.count("Margin: not measured.") == len(STATISTICAL) - 1


def test_each_check_has_an_anchor_that_its_findings_and_the_table_link_to():
    page = document()
    anchors = re.findall(r'^<a id="(.*)"></a>\n\n### `(.*)`$', page, re.MULTILINE)
    assert {anchor for anchor, _ in anchors} == CODES
    assert len(anchors) == len(CODES)
    assert all(anchor == code for anchor, code in anchors)
    for code in CODES:
        path, _, anchor = Finding(code, "error").link.partition("#")
        assert (docs.PAGE.parent.parent / path, anchor) == (docs.PAGE, code)
        assert page.count(f"[`{code}`](#{code})") == 1


def test_what_is_explained_of_a_check_is_its_section_of_the_page():
    page = document()
    for code in FAULTS:
        title, *told, link = explain(code).split("\n\n")
        section = page.partition(f"### `{code}`\n\n")[2].partition("\n\n<a id=")[0].partition("\n\n## ")[0]
        assert told == [part for part in section.strip().split("\n\n") if not part.startswith("Margin: ")]
        assert (title, link) == (code, f"See also: docs/checks.md#{code}")


@in_turn(
    ("code", "near"),
    [
        ("unit.ded", "similar: unit.dead"),
        ("Unit.Dead", "similar: unit.dead"),
        ("unit", "similar: unit.dead, unit.saturated"),
        ("flat", "similar: loss.flat"),
        ("zzz", f"available: {', '.join(FAULTS)}"),
        ("", f"available: {', '.join(FAULTS)}"),
    ],
)
def test_of_a_code_that_is_unknown_those_like_it_are_named(code, near):
    with pytest.raises(LookupError) as raised:
        explain(code)
    assert str(raised.value).startswith(f"there is no check {code!r}; {near}")


def test_checks_come_in_the_order_of_the_flow():
    page = document()
    sections = [page.index(f"## {docs.SITES[site]}") for site in sorted(docs.SITES)]
    assert sections == sorted(sections)
    assert set(docs.SITES) >= {check.site for check in FAULTS.values()}


def test_check_tells_a_page_that_is_missing_or_old_and_writes_nothing(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "checks.md"
    monkeypatch.setattr(docs, "PAGE", page)
    assert main(["--check"]) == 1
    assert not page.exists()
    assert docs.COMMAND in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    page.write_text(page.read_text("utf-8") + " ", "utf-8")
    assert main(["--check"]) == 1


def test_without_a_checkout_there_are_no_margins(tmp_path):
    assert read_margins(tmp_path / "margins.json") == []


# ---- margins


def test_a_margin_says_how_far_healthy_and_faulty_are_apart():
    assert str(MARGIN) == "healthy up to 0.44 (dilated convolutions), faults from 0.75 to 1; limit 0.6."


def test_where_low_is_faulty_healthy_ones_come_down():
    margin = Margin("grad.attenuated", 1e-4, True, healthy=3e-4, control="a GPT", lowest=5e-7, highest=5e-7)
    assert str(margin) == "healthy down to 0.0003 (a GPT), faults at 5e-07; limit 0.0001."


def test_a_limit_of_each_training_is_the_unit():
    margin = Margin("loss.flat", None, False, healthy=0.8, control="a GPT", lowest=1.05, highest=2.0)
    assert str(margin) == "healthy up to 0.8 times the limit (a GPT), faults from 1.1 to 2 times the limit."


def test_healthy_runs_beyond_the_limit_are_counted():
    margin = Margin("input.scale", 100.0, False, n_beyond=2, beyond=3e4, beyond_control="pixels", n_alarms=1)
    text = str(margin)
    assert text.startswith("no healthy run known, no planted fault has it; limit 100.")
    assert "2 healthy runs are beyond the limit, up to 30,000 (pixels)" in text
    assert "1 of them with a false alarm" in text


def test_each_measured_margin_is_of_a_statistical_check_and_apart():
    measured = read_margins()
    assert measured or not MARGINS.exists()
    for margin in measured:
        assert margin.code in {check.code for check in STATISTICAL}
        assert not margin.n_alarms, f"a false alarm was measured: {margin}"


def run(case, *numbers, codes=(), **kwargs):
    return Measured(case, 0, frozenset(codes), numbers, **kwargs)


DEAD = {"codes": ["unit.dead"]}
SHARES = [
    run("narrow", Number("unit.dead", 0.3, 0.6)),
    run("dilated", Number("unit.dead", 0.44, 0.6)),
    run("has not learned", Number("unit.dead", 0.59, 0.6), has_learned=False),
    run("broke", Number("unit.dead", 0.59, 0.6), error="ValueError: no"),
    run("a bias", Number("unit.dead", 1.0, 0.6, "error"), **DEAD),
    run("a rate", Number("unit.dead", 0.75, 0.6, "warning"), **DEAD),
    run("not seen", Number("unit.dead", 0.1, 0.6), **DEAD),
    run("another fault", Number("unit.dead", 0.61, 0.6, "warning"), codes=["loss.flat"]),
]


def test_a_margin_is_of_controls_that_learn_and_of_faults_that_are_named_so():
    (found,) = margins.margins(SHARES)
    assert (found.healthy, found.control, found.is_low) == (0.44, "dilated", False)
    assert (found.lowest, found.highest, found.n_faults) == (0.75, 1.0, 2)
    assert found.beyond is None


def test_controls_beyond_the_limit_are_set_apart():
    more = [run("a", Number("unit.dead", 0.7, 0.6)), run("b", Number("unit.dead", 0.9, 0.6, "error"))]
    (found,) = margins.margins([*SHARES, *more])
    assert (found.healthy, found.control) == (0.44, "dilated")
    assert (found.n_beyond, found.beyond, found.beyond_control, found.n_alarms) == (2, 0.9, "b", 1)


def test_where_findings_are_below_the_limit_the_lowest_healthy_one_counts():
    low, high = Number("act.collapse", 1e-3, 1e-6), Number("act.collapse", 0.2, 1e-6)
    fault = run("a fault", Number("act.collapse", 0.0, 1e-6, "error"), codes=["act.collapse"])
    (found,) = margins.margins([run("low", low), run("high", high), fault])
    assert (found.is_low, found.healthy, found.control, found.lowest) == (True, 1e-3, "low", 0.0)
    (alone,) = margins.margins([run("low", low), run("high", high)])
    assert (alone.is_low, alone.control, alone.n_faults) == (True, "low", 0)


def test_each_limit_of_a_code_has_a_margin_and_limits_of_a_training_are_the_unit():
    sizes = [Number("update.too_large", 0.1, 0.2), Number("update.too_large", 0.01, 0.05)]
    losses = [Number("loss.flat", 1.0, 2.0), Number("loss.flat", 0.3, 0.4), Number("loss.flat", -3.0, -2.0)]
    found = margins.margins([run("a", *sizes, *losses)])
    assert [(x.code, x.limit, x.healthy) for x in found] == [
        ("update.too_large", 0.2, 0.1),
        ("update.too_large", 0.05, 0.01),
        ("loss.flat", None, 0.75),
    ]


def test_numbers_come_from_findings_and_from_what_is_ruled_out(monkeypatch):
    def check(evidence):
        yield Finding("unit.dead", "error", value=1.0, limit=0.6)
        yield Passed("dead units (10 %)", 0.1, 0.6)
        yield Passed("without a number")
        yield Passed("an infinite one", math.inf, 0.6)
        yield Skipped("nothing was looked at")

    dead = type("Dead", (FAULTS["unit.dead"],), {"findings": lambda self, run: check(run)})
    registered = {"unit.dead": dead, **{code: kind for code, kind in FAULTS.items() if kind.exact}}
    monkeypatch.setattr(margins, "FAULTS", registered)
    assert list(margins.numbers(Run())) == []  # without what it needs
    found = list(margins.numbers(Run(sources=frozenset({"gradients"}))))
    assert found == [Number("unit.dead", 1.0, 0.6, "error"), Number("unit.dead", 0.1, 0.6)]


def test_what_is_written_is_read_again(tmp_path):
    written = [MARGIN, Margin("loss.flat", None, True)]
    margins.write_margins(written, [0, 1], tmp_path / "margins.json")
    assert read_margins(tmp_path / "margins.json") == written


# ---- numbers that are ruled out


def test_a_healthy_training_is_on_the_right_side_of_each_limit():
    learn, watcher = synth_learner(), Diagnose(show=False)
    with learn.no_logging():
        learn.fit(40, cbs=watcher)
    assert watcher.verdict.status == "healthy"
    found = {x.code: x for x in margins.numbers(watcher.evidence()) if x.code not in OF_THE_MACHINE | NOTES}
    low = {"grad.attenuated", "act.collapse", "update.too_small", "clip.always", "loss.unbounded"}
    assert len(found) >= 8
    for code, x in found.items():
        assert x.value > x.limit if code in low else x.value < x.limit, x


# ---- the registry


def lacking(checks, *patterns):
    """Codes of the checks in whose text one of the patterns does not occur."""
    return [x.code for x in checks if not all(re.search(p, doc_of(x), re.MULTILINE) for p in patterns)]


def test_a_check_says_what_it_computes():
    assert lacking(FAULTS.values(), r"^(Formula|Exact): \S") == []


def test_a_statistical_check_has_a_source_and_before_it_a_limit():
    assert lacking(STATISTICAL, r"\A(?s:.)*?\d(?s:.)*^Source: \S") == []


def test_what_a_check_needs_and_leads_to_is_there():
    for code, check in FAULTS.items():
        assert check.needs or code == "nonfinite.first"  # which takes gradients or a batch
        assert set(check.needs) <= set(SOURCES), code
        for pattern in check.leads_to:
            begin, is_open, _ = pattern.partition("*")
            assert any(x.startswith(begin) if is_open else x == pattern for x in CODES), (code, pattern)


def test_a_fault_is_found_by_its_code():
    assert [FAULTS[code].code for code in FAULTS] == list(FAULTS)


def test_a_headline_is_a_short_sentence_in_plain_english():
    for headline in (kind.headline for kind in FAULTS.values()):
        assert headline[:1].isupper(), headline
        assert not headline.endswith("."), headline
        assert 2 <= len(headline.split()) <= 9, headline
        assert not set("_`=()") & set(headline), headline


def test_a_number_is_optional_where_something_is_ruled_out():
    assert Passed("weight decay (none)") == Passed("weight decay (none)")
    assert Passed("dead units (0 %)", 0.0, 0.6) != Passed("dead units (0 %)")


def test_a_second_fault_of_a_code_is_refused():
    with pytest.raises(ValueError, match=r"there is already a fault 'hook\.silent', SilentLayer"):
        fault("hook.silent", Site.MODULES)
    assert FAULTS["hook.silent"].__name__ == "SilentLayer"


@in_turn("code", ["param.not_stepped", "param.restored", "init.zero", "gate.shut"])
def test_weights_that_cannot_learn_explain_a_flat_loss(code):
    cause, flat = Finding(code, "error", step=0), Finding("loss.flat", "warning", step=0)
    assert [f.consequence_of for f in explained([flat, cause], Run())] == ["", code]


def test_a_check_without_any_evidence_says_that_it_could_not_look():
    by_itself = {"model", "graph"}  # who has looked at these has seen all there is
    for code, check in FAULTS.items():
        found = _run(check, Run(sources=set(SOURCES) - by_itself))
        assert found, code
        assert all(isinstance(result, Skipped | Absent) for result in found), (code, found)
