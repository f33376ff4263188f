"""Pages of all kinds of runs in a real browser."""

import re
import statistics
from pathlib import Path

import axe_playwright_python
import pytest

from hookcb import compare, load_report
from hookcb.report.page import Page
from tests.pages.support import HOSTILE, KINDS, NAMES, healthy, large

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
EVERY = [pytest.param(kind, id=kind) for kind in KINDS]
ROWS = "#layers [role=treeitem]"


def names(page):
    shown = "rows => rows.filter(row => row.checkVisibility()).map(row => row.dataset.name)"
    return page.eval_on_selector_all(ROWS, shown)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280, 3840])
@pytest.mark.parametrize("kind", ["healthy", "sick", "nan", "empty", "ranks", "hostile"])
def test_a_page_opens_and_fits_its_window(kind, width, scheme, pages, open_page, shoot):
    page = open_page(pages(kind), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#headline").inner_text().strip()
    shoot(page, f"{kind}-{width}-{scheme}")


@pytest.mark.parametrize("kind", EVERY)
def test_a_page_gives_back_its_data(kind, pages):
    data = load_report(pages(kind))
    again = load_report(Page(data).save(pages(kind).with_name(f"again-{kind}.html")))
    assert str(again) == str(data)


@pytest.mark.parametrize("kind", ["sick", "large"])
def test_a_page_opens_within_a_second(kind, pages, open_page):
    times = []
    for _ in range(3):
        page = open_page(pages(kind))
        times.append(page.evaluate("performance.now()"))
    assert min(times) < 2_000  # 1 s on a quiet machine


def test_a_hundred_layers_with_5000_records_take_300_kB(tmp_path):
    path = Page(large(100, 5_000)).save(tmp_path / "run.html")
    assert path.stat().st_size <= 300_000


def test_the_verdict_comes_first_with_the_series_that_shows_it(pages, open_page):
    page = open_page(pages("sick"))
    verdict = page.locator("#verdict")
    assert page.locator("#headline").inner_text().startswith("SICK")
    assert "grad.attenuated" in verdict.inner_text()
    assert "0 (Linear 16→16)" in verdict.inner_text()
    assert verdict.locator("canvas").count() >= 1
    for title in ("Ruled out", "Not looked at"):
        fold = verdict.locator("details", has_text=title).first
        assert not fold.evaluate("fold => fold.open")
        fold.locator("summary").first.click()
        assert fold.evaluate("fold => fold.open")
    top = "id => document.getElementById(id).getBoundingClientRect().top"
    boxes = [page.evaluate(top, name) for name in ("verdict", "run", "layers")]
    assert boxes == sorted(boxes)


def test_a_healthy_page_says_how_much_was_looked_at(pages, open_page):
    page = open_page(pages("healthy"))
    assert page.locator("#headline").inner_text().startswith("HEALTHY")
    assert re.search(r"64 batches", page.locator("#verdict").inner_text())


def test_a_click_shows_the_layer_and_its_parameters(pages, open_page):
    page = open_page(pages("sick"))
    page.locator(f'{ROWS}[data-name="4"]').click()
    layer = page.locator("#layer")
    assert "4" in layer.locator("h3").first.inner_text()
    assert "Linear 16→16" in layer.inner_text()
    assert layer.locator("canvas").count() >= 3
    assert page.locator(f'{ROWS}[data-name="4"]').get_attribute("aria-selected") == "true"


def test_names_are_found_and_statistics_and_order_change(pages, open_page):
    page = open_page(pages("large"))
    everything = len(names(page))
    page.fill("#find", "block7.linear3")
    assert [name for name in names(page) if name.count(".")] == ["block7.linear3"]
    page.fill("#find", "no such layer")
    assert names(page) == []
    assert page.locator("#found").inner_text() == "0 rows found."
    page.fill("#find", "")
    assert len(names(page)) == everything
    before = names(page)
    page.select_option("#order", "worst")
    assert names(page) != before
    stats = page.eval_on_selector_all("#stat option", "options => options.map(o => o.value)")
    for stat in stats:
        page.select_option("#stat", stat)
        assert page.locator("#stat").input_value() == stat
    assert len(stats) >= 4


def test_the_tree_is_folded_by_mouse_and_by_keyboard(pages, open_page):
    page = open_page(pages("large"))
    row = page.locator(f'{ROWS}[data-name="block3"]')
    if row.get_attribute("aria-expanded") == "false":  # as there are many
        row.locator("[aria-hidden]").first.click()
    assert "block3.linear0" in names(page)
    row.focus()
    page.keyboard.press("ArrowLeft")
    assert row.get_attribute("aria-expanded") == "false"
    assert "block3.linear0" not in names(page)
    page.keyboard.press("ArrowRight")
    assert "block3.linear0" in names(page)
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.name") == "block3.linear0"
    page.keyboard.press("Enter")
    assert "block3.linear0" in page.locator("#layer").inner_text()


def test_a_click_is_answered_at_once_among_500_layers(pages, open_page):
    page = open_page(pages("large"))
    times = page.evaluate(
        """async () => {
            const all = [...document.querySelectorAll("#layers [role=treeitem]")];
            const rows = all.filter((row) => row.dataset.name.includes("."));
            const times = [];
            for (const row of rows.filter((_, i) => i % 60 === 5)) {
                const began = performance.now();
                row.click();
                await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
                times.push(performance.now() - began);
            }
            return times;
        }"""
    )
    assert statistics.median(times) < 300  # 100 ms on a quiet machine


def test_the_slider_shows_the_signal_at_another_step(pages, open_page):
    page = open_page(pages("sick"))
    slider, at = page.locator("#depth-step"), page.locator("#depth-at")
    before = at.inner_text()
    slider.focus()
    page.keyboard.press("Home")
    assert at.inner_text() != before
    first = at.inner_text()
    page.keyboard.press("ArrowRight")
    assert at.inner_text() != first
    assert page.locator("#depth canvas").count() >= 1


def test_a_table_stands_behind_each_chart(pages, open_page):
    page = open_page(pages("sick"))
    folds = page.locator("#run details")
    assert folds.count() >= 1
    folds.first.locator("summary").click()
    cells = folds.first.locator("td")
    assert cells.count() > 10
    assert folds.first.locator("th").count() >= 2


def test_names_are_only_text(pages, open_page):
    page = open_page(pages("hostile"))
    assert HOSTILE[:40] in page.locator("#headline").inner_text()
    for name in NAMES:
        row = page.locator(ROWS).evaluate_all(
            "(rows, name) => rows.findIndex(row => row.dataset.name === name)", name
        )
        assert row >= 0, name
        page.locator(ROWS).nth(row).click()
        assert page.locator("#layer canvas").count() >= 1
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["healthy", "sick", "nan", "empty", "ranks"])
def test_axe_finds_nothing_serious(kind, scheme, pages, open_page):
    page = open_page(pages(kind), scheme=scheme, bypass_csp=True)
    if page.locator(ROWS).count():
        page.locator(ROWS).nth(1).click()
    page.evaluate(AXE)
    found = page.evaluate("axe.run()")
    serious = [
        (rule["id"], node["target"], node.get("failureSummary", "")[:200])
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
    assert serious == []
    assert len(found["passes"]) > 5


def test_it_can_be_printed(pages, open_page, tmp_path):
    page = open_page(pages("sick"))
    page.emulate_media(media="print")
    page.wait_for_timeout(300)
    assert not page.locator("#find").is_visible()
    pdf = page.pdf(path=tmp_path / "run.pdf")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000


def test_a_page_that_loads_itself_again_keeps_its_place(open_page, tmp_path):
    data = healthy()
    data.every = 1000.0
    path = Page(data).save(tmp_path / "run.html")
    page = open_page(path, height=500)
    page.fill("#find", "2")
    page.locator(f'{ROWS}[data-name="2"]').click()
    page.evaluate("scrollTo(0, 600)")
    data.headline = "HEALTHY  a second time"
    Page(data).save(path)
    page.wait_for_timeout(2_500)  # as nobody has typed for two seconds
    page.evaluate("follow.reload()")
    page.locator("#headline", has_text="second").wait_for(timeout=15_000)
    page.wait_for_selector("body[data-ready=yes]")
    assert page.locator("#find").input_value() == "2"
    assert page.locator("#layer h3").first.inner_text().startswith("2")
    assert abs(page.evaluate("scrollY") - 600) < 50


def test_a_page_follows_while_the_run_goes_on(open_page, tmp_path):
    data = healthy()
    data.every = 1.0
    path = Page(data).save(tmp_path / "run.html")
    page = open_page(path)
    data.headline, data.every = "HEALTHY  at the end", None
    Page(data).save(path)
    page.locator("#headline", has_text="end").wait_for(timeout=15_000)
    page.evaluate("window.isThisOne = true")
    page.wait_for_timeout(2_500)
    assert page.evaluate("window.isThisOne")


def test_a_page_is_shown_inside_a_notebook(open_page, tmp_path):
    inline = Page(healthy())._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body data-ready=yes>{inline}", encoding="utf-8")
    page = open_page(tmp_path / "notebook.html")
    frame = page.frame_locator("iframe")
    frame.locator("body[data-ready=yes]").wait_for(timeout=15_000)
    assert frame.locator("#headline").inner_text().startswith("HEALTHY")
    assert frame.locator("#run canvas").count() >= 1


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_runs_are_laid_over_one_another(scheme, width, pages, open_page, shoot, tmp_path):
    path = compare(*(pages(kind) for kind in ("healthy", "sick", "nan", "hostile"))).save(
        tmp_path / "all.html"
    )
    page = open_page(path, width, scheme, bypass_csp=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "departs from healthy" in page.locator("#headline").inner_text()
    assert page.locator("#run canvas").count() >= 3
    assert page.locator("#verdict tbody tr").count() == 4
    assert "SGD" in page.locator("#config").inner_text()
    page.evaluate(AXE)
    violations = page.evaluate("axe.run()")["violations"]
    assert [rule["id"] for rule in violations if rule["impact"] in ("serious", "critical")] == []
    shoot(page, f"compare-{width}-{scheme}")
