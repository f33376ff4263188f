"""A page holds what was recorded, and says what is wrong with a file that cannot be read."""

import base64
import math
import re
import zlib
from hashlib import sha256

import pytest
import torch
from torch import nn

from hookcb import Diagnose, Learner, Report, compare, load_report, synth_learner, watch
from hookcb.cli.parser import make_parser
from hookcb.diagnosis.run import Series
from hookcb.records.content import Recorded
from hookcb.report.data import PageData
from hookcb.report.page import page_of
from tests.support import make_learner

PACKED = ' type="application/octet-stream" id="script"'


@pytest.fixture(scope="module")
def fitted():
    learn = synth_learner()
    with learn.no_logging():
        learn.fit(4, cbs=Diagnose())
    return learn


def test_a_page_gives_back_the_verdict_and_the_losses(fitted, tmp_path):
    path = fitted.report(tmp_path / "run.html").path
    page = load_report(path)
    assert page.headline == fitted.diagnose().headline
    assert page.verdict["status"] == fitted.diagnose().status
    assert page.run["loss"].steps == list(range(40))
    assert page.run["loss"].values == pytest.approx(fitted.recorder.losses)
    assert "std" in next(iter(page.layers.values())).stats


def test_numbers_come_back_in_their_places_with_those_not_finite():
    odd = Series([0, 5, 9], [1.0, math.inf, math.nan])
    loss = Series([1, 2], [3.0, 4.0])
    page = PageData("x", run={"loss": loss}, layers={"a": Recorded("a", stats={"std": odd})})
    back = PageData.from_json(page.to_json())
    assert back.run["loss"].values == [3.0, 4.0]
    assert back.layers["a"].stats["std"].steps == [0, 5, 9]
    assert str(back.layers["a"].stats["std"].values) == "[1.0, inf, nan]"


def test_a_name_cannot_end_its_element():
    name = "</script><script>alert(1)</script>@@DATA@@"
    layers = {name: Recorded(name, stats={"std": Series([0], [1.0])})}
    text = page_of(PageData(name, title=name, layers=layers, config={name: [[name, name]]}))
    assert "alert(1)</script>" not in text
    assert name not in text


def test_the_policy_of_a_page_allows_its_own_scripts_and_styles_and_nothing_else():
    text = page_of(PageData("x"))
    packed, boot = (re.findall(rf"<script{kind}>(.*?)</script>", text, re.S)[-1] for kind in (PACKED, ""))
    script = zlib.decompress(base64.b64decode(packed))
    style = re.findall("<style>(.*?)</style>", text, re.S)[0]
    hashes = [
        base64.b64encode(sha256(own).digest()).decode() for own in (boot.encode(), script, style.encode())
    ]
    policy = re.findall('Content-Security-Policy" content="(.*?)"', text)[0]
    assert re.findall("'sha256-(.*?)'", policy) == hashes
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert script.startswith(b'"use strict";')


def test_a_learner_without_records_has_a_page_that_says_so(tmp_path):
    net = nn.Linear(2, 1)
    learn = Learner([], net, loss_func=nn.functional.mse_loss, opt_func=torch.optim.SGD)
    page = load_report(learn.report(tmp_path / "run.html").path)
    assert page.verdict is None
    assert page.headline.startswith("No verdict: nothing is recorded")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: text.index('"numbers"') + 50], "is not a whole page"),
        (lambda text: text.replace('"schema": 1', '"schema": 7'), "version 7"),
        (lambda text: text.replace('"numbers": "', '"numbers": "AAAA'), "damaged"),
        (lambda text: text.replace('"numbers": "', '"numbers": "!'), "damaged"),
        (lambda text: "hello", "is not a whole page"),
    ],
)
def test_a_page_that_cannot_be_read_says_why(fitted, tmp_path, change, said):
    path = fitted.report(tmp_path / "run.html").path
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_report(path)


@pytest.mark.parametrize("name", ["x.pdf", "run", "run.html.gz"])
def test_a_page_is_not_written_under_the_name_of_another_format(tmp_path, name, capsys):
    """Neither by a learner, a watch, a callback or a comparison, nor by a command."""
    learn, path = make_learner(), tmp_path / name
    found = compare(learn, learn)
    with watch(learn.model) as w:
        pass
    for write in (learn.report, w.report, learn.report().save, Report, found.save):
        with pytest.raises(ValueError, match=r"a page is an HTML file; give a name in \.html, as .* got '"):
            write(path)
    for command in (
        ["diagnose", "--html", str(path), __file__],
        ["report", str(tmp_path), "-o", str(path)],
        ["compare", "a.html", "b.html", "-o", str(path)],
    ):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args(command)
        assert ended.value.code == 2
        assert "give a name in .html" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    learn.report(tmp_path / "RUN.HTM")
