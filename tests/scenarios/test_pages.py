"""Pages of all kinds of runs in Chromium; `make pages` runs this, and writes pictures to build/pages/."""

import math
import os
import re
import shutil
import statistics
from pathlib import Path

import pytest

from hookcb import load_report
from hookcb.report.data import PageData
from hookcb.report.page import Page, page_of
from tests.report.support import HOSTILE, KINDS

pytestmark = pytest.mark.pages

PICTURES = Path(__file__).parents[2] / "build" / "pages"
WATCH = """
window.violations = []; window.alerts = []; window.alert = (text) => alerts.push(text);
document.addEventListener("securitypolicyviolation", (e) => violations.push(e.violatedDirective));
new MutationObserver(() => { if (document.body?.dataset.ready) window.readyAt ??= performance.now(); })
  .observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ["data-ready"]});
"""
CLICK = """async (names) => {
  const took = [];
  for (const name of names) {
    const rows = [...document.querySelectorAll("#layers [role=treeitem]")];
    const row = rows.find((own) => own.dataset.name === name);
    const began = performance.now();
    row.click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    took.push(performance.now() - began);
  }
  return took;
}"""
ROWS = "#layers [role=treeitem]"
OF_RUNS = ("healthy", "sick", "nan_ridden", "huge", "two_ranks", "hostile")


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.fail("there is no Chromium: apt-get install chromium, or name the program, CHROMIUM=path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written():
    """Data and file of each kind of run."""
    made = {kind: make() for kind, make in KINDS.items()}
    return {kind: (data, Page(data).save(PICTURES / f"{kind}.html")) for kind, data in made.items()}


@pytest.fixture
def opened(chromium):
    """A function that opens a file; in the end nothing may have gone wrong in any page that it opened."""
    contexts, wrong, requests = [], [], []

    def open_file(path, width=1280, scheme="light"):
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        context.add_init_script(WATCH)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: wrong.append(f"console: {message.type} {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append((request.url.partition("#")[0], path.as_uri())))
        contexts.append((context, page))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready=yes]")
        return page

    yield open_file
    for context, page in contexts:
        wrong += page.evaluate("[...violations, ...alerts]")
        context.close()
    assert not wrong
    assert all(url == own for url, own in requests)


@pytest.fixture(scope="module")
def tell():
    """A function that notes what was measured, in a file that `make pages` prints."""
    file = PICTURES / "measured.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        yield lambda text: lines.write(f"{text}\n")


def settle(page):
    """Waits until charts that are drawn over several frames are there."""
    page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 150))")


def row(page, name):
    return page.locator(f"{ROWS}[data-name={quoted(name)}]")


def quoted(text):
    return '"' + "".join(f"\\{ord(letter):x} " for letter in text) + '"'


def names_of(page):
    return page.eval_on_selector_all(ROWS, "(rows) => rows.map((own) => own.dataset.name)")


def unfold(page, what="details"):
    """Opens all folds, also those within folds."""
    for _ in range(2):
        page.evaluate(
            "(what) => document.querySelectorAll(what).forEach((own) => { own.open = true; })", what
        )
        settle(page)


# ---- opening


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens_and_is_not_wider_than_its_window(opened, written, kind, width, scheme):
    data, path = written[kind]
    page = opened(path, width, scheme)
    settle(page)
    page.screenshot(path=PICTURES / f"{kind}-{width}-{scheme}.png", full_page=True)
    assert page.inner_text("#headline").split() == data.headline.split()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if page.locator(ROWS).count():
        page.locator(ROWS).first.click()
        unfold(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("kind", ["sick", "huge"])
def test_a_page_uses_the_width_of_a_large_screen(opened, written, kind):
    page = opened(written[kind][1], 3840, "dark")
    settle(page)
    page.screenshot(path=PICTURES / f"{kind}-3840-dark.png", full_page=True)
    assert page.evaluate("document.querySelector('#layers').getBoundingClientRect().width") > 1900
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_ready_within_a_second(opened, written, tell, kind):
    took = []
    while len(took) < 3 and min(took, default=math.inf) > 1000:
        took.append(opened(written[kind][1]).evaluate("readyAt"))
    tell(f"{kind}: {written[kind][1].stat().st_size:,} bytes, ready after {min(took):.0f} ms")
    assert min(took) <= 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_small(written, kind):
    assert written[kind][1].stat().st_size <= 300_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_gives_its_data_back(written, kind):
    data, path = written[kind]
    back = load_report(path)
    assert back.headline == data.headline
    assert back.modules == data.modules
    assert back.config == data.config
    assert back.notes == data.notes
    for group in ("layers", "params"):
        ours, theirs = getattr(data, group), getattr(back, group)
        assert list(ours) == list(theirs)
        for name, own in ours.items():
            assert list(own.stats) == list(theirs[name].stats)
            for stat, series in own.stats.items():
                known = dict(zip(series.steps, series.values, strict=True))
                got = theirs[name].stats[stat]
                assert 0 < len(got) <= len(series) or not len(series)
                expected = [known[step] for step in got.steps]
                assert got.values == pytest.approx(expected, rel=1e-3, nan_ok=True)


# ---- what it shows


def test_the_page_of_a_sick_run_names_the_layer_and_draws_its_series(opened, written):
    data, path = written["sick"]
    page = opened(path)
    primary = data.verdict["findings"][0]
    said = page.inner_text("#verdict")
    assert primary["code"] in said
    assert primary["layer"] in said
    assert primary["message"] in said
    assert primary["next_steps"][0] in said
    assert page.locator("#verdict canvas").count() >= 1
    for heading in ("Ruled out", "Not looked at"):
        assert page.locator("#verdict summary", has_text=heading).count() == 1


def test_a_page_of_ranks_names_the_slow_one(opened, written):
    data, path = written["two_ranks"]
    page = opened(path)
    assert data.ranks.sentences[0] in page.inner_text("#ranks")
    assert page.locator("#ranks canvas").count() >= 2
    assert opened(written["healthy"][1]).locator("#ranks").is_hidden()


def test_a_page_without_records_shows_only_what_there_is(opened, written):
    page = opened(written["empty"][1])
    for part in ("#layer-controls", "#time", "#memory", "#ranks", "#depth"):
        assert page.locator(part).is_hidden()
    assert "No numbers of layers were recorded" in page.inner_text("#layers-section")
    assert "Diagnose" in page.inner_text("#headline")
    assert page.locator("#config").is_visible()
    bare = PICTURES / "bare.html"
    bare.write_text(page_of(PageData("No verdict: nothing is recorded.")), encoding="utf-8")
    assert opened(bare).inner_text("#headline") == "No verdict: nothing is recorded."


# ---- the layer map


def test_a_click_on_a_layer_shows_its_curves_and_its_histogram(opened, written):
    page = opened(written["sick"][1])
    row(page, "0.3").click()
    settle(page)
    shown = page.locator("#layer")
    assert "0.3" in shown.inner_text()
    assert shown.locator("canvas").count() >= 3
    assert row(page, "0.3").get_attribute("aria-selected") == "true"
    assert page.locator(f"{ROWS}[aria-selected=true]").count() == 1
    assert shown.locator("figcaption", has_text=re.compile("histogram", re.I)).count() == 1


def test_layers_are_found_by_name_and_by_type(opened, written):
    page = opened(written["huge"][1])
    page.fill("#find", "LINEAR12")
    found = {name for name in names_of(page) if "linear" in name}
    assert {name.rpartition(".")[2] for name in found} == {"linear12", "linear120", "linear124", "linear128"}
    page.fill("#find", "no such layer")
    assert names_of(page) == []
    assert page.inner_text("#found")
    page.fill("#find", "LayerNorm")
    assert len([name for name in names_of(page) if "layernorm" in name]) == 125
    page.fill("#find", "")
    assert "stage0" in names_of(page)


def test_the_tree_folds_by_mouse(opened, written):
    page = opened(written["sick"][1])
    n = len(names_of(page))
    tower = row(page, "0")
    assert tower.get_attribute("aria-expanded") == "true"
    tower.locator(".twig").click()
    assert tower.get_attribute("aria-expanded") == "false"
    assert len(names_of(page)) == n - 16
    tower.locator(".twig").click()
    assert len(names_of(page)) == n


def test_the_tree_is_used_by_keyboard_alone(opened, written):
    page = opened(written["sick"][1])
    focused = "document.activeElement.dataset.name"
    page.focus("#find")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
    page.keyboard.press("Home")
    assert page.evaluate(focused) == names_of(page)[0] == "0"
    n = len(names_of(page))
    page.keyboard.press("ArrowLeft")
    assert len(names_of(page)) == n - 16
    page.keyboard.press("ArrowRight")
    assert len(names_of(page)) == n
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "0.1"
    page.keyboard.press("Enter")
    assert page.locator("#layer h3, #layer h2").first.inner_text().startswith("0.1")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == "0"
    page.keyboard.press("End")
    assert page.evaluate(focused) == names_of(page)[-1] == "1"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") != "treeitem"


@pytest.mark.parametrize("kind", ["sick", "nan_ridden", "two_ranks"])
def test_each_statistic_colors_the_strips_in_its_own_way(opened, written, kind):
    page = opened(written[kind][1])
    options = page.eval_on_selector_all("#stat option", "(all) => all.map((own) => own.value)")
    assert len(options) >= 8
    seen = set()
    for option in options:
        page.select_option("#stat", option)
        settle(page)
        seen.add(page.inner_text("#map-key") + "".join(page.locator("#layers .value").all_inner_texts()))
    assert len(seen) == len(options)


def test_the_worst_layers_come_first_when_asked(opened, written):
    data, path = written["sick"]
    page = opened(path)
    page.select_option("#order", "worst")
    worst = names_of(page)
    assert worst[0] == data.verdict["findings"][0]["layer"]
    page.select_option("#order", "model")
    assert names_of(page) != worst


def test_the_slider_shows_the_signal_at_another_step(opened, written):
    page = opened(written["sick"][1])
    slider = page.locator("#depth-section input[type=range]")
    slider.scroll_into_view_if_needed()
    settle(page)
    pixels = "document.querySelector('#depth canvas').toDataURL()"
    last, before = page.inner_text("#depth-section output"), page.evaluate(pixels)
    slider.focus()
    page.keyboard.press("Home")
    settle(page)
    assert (
        page.inner_text("#depth-section output") == slider.get_attribute("aria-valuetext") == "step 0" != last
    )
    assert page.evaluate(pixels) != before
    page.keyboard.press("End")
    assert page.inner_text("#depth-section output") == last


def test_behind_each_chart_is_a_table_with_its_numbers(opened, written):
    data, path = written["two_ranks"]
    page = opened(path)
    row(page, "0.0.0").click()
    unfold(page)
    charts = page.locator("figure.chart")
    assert charts.count() >= 10
    for i in range(charts.count()):
        chart = charts.nth(i)
        assert chart.locator("table tbody tr").count() >= 1, chart.inner_text()
    loss = page.locator("#run figure", has_text=re.compile("loss", re.I)).first
    assert f"{data.run['loss'].values[0]:.3g}"[:4] in loss.locator("tbody tr").first.inner_text()


def test_500_layers_answer_clicks_at_once(opened, written, tell):
    page = opened(written["huge"][1])
    page.fill("#find", "stage1.block1")
    names = [name for name in names_of(page) if name.count(".") == 2][:9]
    assert len(names) == 9
    took = min(statistics.median(page.evaluate(CLICK, names)) for _ in range(2))
    whole = page.evaluate(CLICK, ["stage1", "stage1"])
    tell(f"huge: a click on a layer is answered in {took:.0f} ms, one on a stage in {max(whole):.0f} ms")
    assert took <= 300
    for stat in ("std", "mean"):
        began = page.evaluate("performance.now()")
        page.select_option("#stat", stat)
        tell(f"huge: the strips show {stat} after {page.evaluate('performance.now()') - began:.0f} ms")


# ---- names that would be more than text


def test_hostile_texts_stay_texts(opened, written):
    page = opened(written["hostile"][1])
    assert page.title().startswith(HOSTILE[0])
    for name in HOSTILE:
        row(page, name).dispatch_event("click")
        settle(page)
        assert page.locator("#layer canvas").count() >= 1, name
    unfold(page)
    n_scripts = opened(written["empty"][1]).locator("script").count()
    assert page.locator("script").count() == n_scripts
    bad = "img, iframe, a[href^=javascript], [onerror], [onmouseover], [onfocus], [autofocus]"
    assert page.locator(bad).count() == 0
    assert page.evaluate("Object.keys(Object.prototype).length") == 0
    assert page.evaluate("({}).std === undefined && ({}).steps === undefined")
    text = page.inner_text("body")
    assert [name for name in HOSTILE[:5] if name not in text] == []
    page.fill("#find", HOSTILE[2])
    assert HOSTILE[2] in names_of(page)
    page.select_option("#order", "worst")
    assert HOSTILE[2] in names_of(page)


# ---- everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stored"])
def test_axe_finds_nothing_serious(opened, written, kind, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(written[kind][1], scheme=scheme)
    if page.locator(ROWS).count():
        page.locator(ROWS).last.dispatch_event("click")
        unfold(
            page, "details:not(.behind), #run .chart:first-child .behind"
        )  # axe takes long on large tables
    found = Axe().run(page).response["violations"]
    bad = {own["id"]: [node["html"][:200] for node in own["nodes"][:3]] for own in found if is_serious(own)}
    assert not bad


def is_serious(violation):
    return violation["impact"] in ("serious", "critical")


@pytest.mark.parametrize("kind", ["sick", "two_ranks"])
def test_a_page_is_printed_with_its_whole_verdict_on_white(opened, written, kind):
    page = opened(written[kind][1], scheme="dark")
    assert page.locator("#verdict details:not([open])").count() > 0
    page.emulate_media(media="print", color_scheme="dark")
    settle(page)
    assert page.locator("#verdict details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    pdf = page.pdf(path=PICTURES / f"{kind}.pdf", format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000
    page.emulate_media(media="screen")
    settle(page)
    assert page.locator("#verdict details:not([open])").count() > 0


# ---- while the run goes on


def test_an_open_page_follows_the_run_and_keeps_its_place(opened, tmp_path):
    data = KINDS["sick"]()
    data.every, first = 2, data.headline
    path = Page(data).save(tmp_path / "run.html")
    page = opened(path)
    page.fill("#find", "linear")
    row(page, "0.4").click()
    scroll = "document.getElementById('config').scrollIntoView({behavior: 'instant'})"
    at = page.evaluate(f"{scroll}, scrollY")
    assert at > 500
    data.headline, data.every = f"{first} and later", None
    Page(data).save(path)
    page.locator("#headline", has_text="and later").wait_for()
    page.wait_for_selector("body[data-ready=yes]")
    settle(page)
    assert page.input_value("#find") == "linear"
    assert row(page, "0.4").get_attribute("aria-selected") == "true"
    assert "0.4" in page.inner_text("#layer")
    assert abs(page.evaluate("scrollY") - at) <= 100
    data.headline = "it has ended"
    Page(data).save(path)
    page.wait_for_timeout(2500)
    assert "and later" in page.inner_text("#headline")


def test_a_page_does_not_load_itself_while_somebody_types(opened, tmp_path):
    data = KINDS["sick"]()
    data.every = 1
    path = Page(data).save(tmp_path / "run.html")
    page = opened(path)
    page.evaluate("window.isOld = true")
    page.focus("#find")
    for _ in range(8):
        page.keyboard.type("0")
        page.wait_for_timeout(250)
    assert page.evaluate("window.isOld") is True
    assert page.input_value("#find") == "0" * 8
    page.wait_for_event("load")
    page.wait_for_selector("body[data-ready=yes]")
    assert page.input_value("#find") == "0" * 8
    assert page.evaluate("document.activeElement.id") == "find"
