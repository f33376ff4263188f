"""Pages of all kinds of runs in a real browser."""

import re
import statistics
from pathlib import Path

import axe_playwright_python
import pytest

from hookcb import Finding, Verdict, compare, load_report
from hookcb.report.collect import with_series
from hookcb.report.page import Page
from tests.pages.support import HOSTILE, KINDS, NAMES, healthy, sick, stored

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
EVERY = [pytest.param(kind, id=kind) for kind in KINDS]
ROWS = "#layers [role=treeitem]"


def settle(page):
    """Waits until charts that are drawn over several frames are there."""
    page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 150))")


def unfold(page, folds="details"):
    """Opens all folds, also those inside of folds."""
    for _ in range(2):
        page.eval_on_selector_all(folds, "(all) => all.forEach((own) => { own.open = true; })")
        settle(page)


def names(page):
    shown = "rows => rows.filter(row => row.checkVisibility()).map(row => row.dataset.name)"
    return page.eval_on_selector_all(ROWS, shown)


@pytest.mark.parametrize(
    ("kind", "width", "scheme"),
    [
        ("healthy", 1280, "light"),
        ("sick", 1280, "dark"),
        ("nan", 1280, "light"),
        ("empty", 1280, "dark"),
        ("ranks", 1280, "light"),
        ("hostile", 3840, "dark"),
    ],
)
def test_a_page_opens_and_fits_its_window(kind, width, scheme, pages, open_page, shoot):
    page = open_page(pages(kind), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#headline").inner_text().strip()
    shoot(page, f"{kind}-{width}-{scheme}")


@pytest.mark.parametrize(("kind", "width", "scheme"), [("large", 3840, "dark"), ("stored", 360, "light")])
def test_a_page_of_many_layers_opens_and_fits_its_window(kind, width, scheme, pages, open_page, shoot):
    page = open_page(pages(kind), width, scheme)
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#layers").bounding_box()["width"] > min(width - 60, 1900)
    shoot(page, f"{kind}-{width}-{scheme}")


@pytest.mark.parametrize("kind", ["healthy", "sick", "nan", "empty", "first", "ranks", "hostile"])
def test_a_page_fits_a_phone_also_with_all_folds_open(kind, pages, open_page, shoot):
    page = open_page(pages(kind), 360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#headline").inner_text().strip()
    shoot(page, f"{kind}-360-light")
    if page.locator(ROWS).count():
        page.locator(ROWS).last.click()
    unfold(page)
    shoot(page, f"{kind}-360-unfolded")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("kind", EVERY)
def test_a_page_gives_back_its_data(kind, pages):
    data = load_report(pages(kind))
    again = load_report(Page(data).save(pages(kind).with_name(f"again-{kind}.html")))
    assert str(again) == str(data)


@pytest.mark.parametrize("kind", ["sick", "large", "stored"])
def test_a_page_is_ready_before_all_of_its_charts_are(kind, pages, open_page, note):
    page = open_page(pages(kind))
    note(f"{kind}: ready after", page.evaluate("readyAt"), "ms")  # below 1 s on a quiet machine
    assert page.evaluate("drawnWhenReady") < page.locator("canvas").count()


@pytest.mark.parametrize("kind", EVERY)
def test_no_page_takes_more_than_300_kB(kind, pages, note):
    assert note(f"{kind}: size", pages(kind).stat().st_size, "bytes") <= 300_000


def test_values_come_back_as_they_were_recorded(pages):
    data, back = stored(), load_report(pages("stored"))
    assert [len(data.layers), len(data.params)] == [100, 200]
    for group in ("layers", "params"):
        for name, own in getattr(data, group).items():
            for stat, series in own.stats.items():
                got = getattr(back, group)[name].stats[stat]
                known = dict(zip(series.steps, series.values, strict=True))
                assert len(got) >= 16
                assert got.values == pytest.approx([known[step] for step in got.steps], rel=1e-3)
                assert got.steps[-1] == series.steps[-1]


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


def test_a_page_says_what_the_printed_verdict_says(open_page, shoot, tmp_path):
    slow = Finding("time.data_bound", "warning", step=6, message="It waits for data.", causes=("disk",))
    past = Finding("loss.diverging", "warning", step=1, last_step=19, recovered=90, ranks=(1,), n_ranks=8)
    data = healthy()
    for primary, start in (slow, "SLOW"), (past, "SUSPECT"):
        verdict = Verdict(
            "suspect", primary, (primary,), (), (), of_rank="rank 0", remarks=("after 200 steps",)
        )
        data.headline, data.verdict = verdict.headline, with_series(verdict, data)
        page = open_page(Page(data).save(tmp_path / f"{start}.html"))
        shoot(page, f"verdict-{start}")
        word = page.locator("#headline .status")
        assert word.inner_text() == start
        assert word.evaluate("own => getComputedStyle(own).backgroundColor") == "rgb(128, 88, 0)"
        assert page.locator("#headline").inner_text().split() == verdict.headline.split()
        shown = page.locator("#verdict h2").inner_text().split()
        on = f"on {primary.on_ranks}" if primary.on_ranks else ""
        assert shown[1:] == f"{primary.when} {on} {primary.code}".split()


def test_a_sick_run_is_one_screen_and_a_click_shows_its_layer(pages, open_page, shoot):
    page = open_page(pages("sick"), is_folded=True)
    shoot(page, "folded")
    assert page.locator("details.section[open]").count() == 0
    assert page.evaluate("document.documentElement.scrollHeight") < 1200
    page.locator("#verdict [data-layer]").first.click()
    settle(page)
    assert page.locator("#layers-section").evaluate("own => own.open")
    assert page.locator("#layer h3").first.inner_text().startswith("0")
    assert page.locator("#layer canvas").count() >= 1


def test_the_figure_of_a_finding_has_its_number_and_its_limit(pages, open_page):
    page = open_page(pages("sick"))
    limit, values = page.evaluate(
        "[document.querySelector('.proof .plot').chart].map(({limit, lines}) => "
        "[limit, Array.from(lines[0].series.values)])[0]"
    )
    primary = load_report(pages("sick")).verdict["primary"]
    assert limit == primary["limit"]
    assert min(abs(x / primary["value"] - 1) for x in values) < 1e-6


@pytest.mark.parametrize("kind", ["sick", "hostile"])
def test_a_page_is_text_without_scripts(kind, pages, browser, shoot):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages(kind).as_uri())
    shoot(page, f"text-{kind}")
    data = load_report(pages(kind))
    text = page.inner_text("body")
    for finding in data.verdict["findings"][:1]:
        for said in (finding["message"], *finding["causes"], *finding["next_steps"]):
            assert said[:60] in text
    assert page.locator("#plain tr").count() > 20
    assert page.locator("#config dd").count() >= 8
    assert page.locator("img, iframe, a[href^=javascript]").count() == 0
    context.close()


def test_the_verdict_is_copied_as_markdown(pages, open_page):
    page = open_page(pages("sick"), permissions=["clipboard-read", "clipboard-write"])
    page.locator("button.copy").click()
    page.locator("button.copy", has_text="Copied").wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("**SICK** The first layers barely learn: layer 0 (grad.attenuated")
    assert "  - Next: Use ReLU or GELU instead of Sigmoid" in text


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
    page.fill("#find", "BLOCK7.LINEAR3")
    assert "block7.linear3" in names(page)
    page.fill("#find", "linear")  # also a type
    assert len([name for name in names(page) if "." in name]) == 500
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


def test_the_map_is_used_without_a_mouse(pages, open_page):
    page = open_page(pages("sick"))
    focused, role = "document.activeElement.dataset.name", "document.activeElement.getAttribute('role')"
    page.focus("#find")
    page.keyboard.press("Tab")
    assert page.evaluate(role) == "treeitem"
    page.keyboard.press("Home")
    assert page.evaluate(focused) == names(page)[0]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#layer h3").first.inner_text().startswith(names(page)[1])
    page.keyboard.press("End")
    assert page.evaluate(focused) == names(page)[-1]
    assert page.locator(f"{ROWS}[tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate(role) != "treeitem"


@pytest.mark.parametrize("kind", ["sick", "nan", "ranks"])
def test_each_statistic_shows_its_own_numbers(kind, pages, open_page):
    page = open_page(pages(kind))
    options = page.eval_on_selector_all("#stat option", "(all) => all.map((own) => own.value)")
    seen = set()
    for option in options:
        page.select_option("#stat", option)
        settle(page)
        seen.add(page.inner_text("#map-key") + "".join(page.locator(f"{ROWS} .value").all_inner_texts()))
    assert len(seen) == len(options) >= 8


def test_what_is_wrong_comes_first_when_asked(pages, open_page):
    page = open_page(pages("sick"))
    page.select_option("#order", "worst")
    assert names(page)[0] == load_report(pages("sick")).verdict["findings"][0]["layer"]


def test_a_page_of_ranks_shows_who_is_slow(pages, open_page):
    page = open_page(pages("ranks"))
    assert "wait for rank 1 (node-b)" in page.inner_text("#ranks")
    assert page.locator("#ranks canvas").count() >= 2
    assert open_page(pages("healthy")).locator("#ranks").is_hidden()


@pytest.mark.parametrize("kind", ["empty", "first"])
def test_a_page_of_nothing_has_no_empty_sections(kind, pages, open_page):
    page = open_page(pages(kind))
    for part in ("#layer-controls", "#time", "#memory", "#ranks", "#depth"):
        assert page.locator(part).is_hidden(), part
    titles = page.eval_on_selector_all("h2", "(all) => all.filter((own) => own.checkVisibility())")
    assert len(titles) <= 4
    assert page.locator("figure canvas").count() <= 1  # the input of the first batch was seen


def test_a_click_among_500_layers_changes_only_what_it_shows(pages, open_page, note):
    page = open_page(pages("large"))
    clicks = page.evaluate(
        """async () => {
            const rows = [...document.querySelectorAll("#layers [role=treeitem]")];
            const clicks = [];
            for (const row of rows.filter((_, i) => i % Math.ceil(rows.length / 6) === 1)) {
                let changed = 0;
                const observer = new MutationObserver((all) => { changed += all.length; });
                observer.observe(document, {subtree: true, childList: true, attributes: true});
                const began = performance.now();
                row.click();
                await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
                observer.disconnect();
                clicks.push([performance.now() - began, changed]);
            }
            return clicks;
        }"""
    )
    times, changes = zip(*clicks, strict=True)
    note("large: a click is answered in", statistics.median(times), "ms")  # 100 on a quiet machine
    assert len(changes) >= 5
    assert max(changes) < 1_000  # elements, of 500 layers


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
    page.locator("#depth canvas").first.wait_for()


def test_a_table_stands_behind_each_chart(pages, open_page):
    page = open_page(pages("sick"))
    folds = page.locator("#run details")
    assert folds.count() >= 1
    folds.first.locator("summary").click()
    settle(page)
    cells = folds.first.locator("td")
    assert cells.count() > 10
    assert folds.first.locator("th").count() >= 2
    page.locator(f'{ROWS}[data-name="4"]').click()
    unfold(page)
    charts = page.locator("figure")
    assert charts.count() >= 15
    for i in range(charts.count()):
        assert charts.nth(i).locator("tbody tr").count() >= 1, charts.nth(i).inner_text()


def test_names_are_only_text(pages, open_page):
    page = open_page(pages("hostile"))
    assert HOSTILE[:40] in page.locator("#headline").inner_text()
    for name in NAMES:
        row = page.locator(ROWS).evaluate_all(
            "(rows, name) => rows.findIndex(row => row.dataset.name === name)", name
        )
        assert row >= 0, name
        page.locator(ROWS).nth(row).click()
        settle(page)
        assert page.locator("#layer canvas").count() >= 1
    unfold(page)
    bad = "img, iframe, a[href^=javascript], [onerror], [onmouseover], [onfocus], [autofocus]"
    assert page.locator(bad).count() == 0
    assert page.locator("script").count() == open_page(pages("empty")).locator("script").count()
    assert page.evaluate("Object.keys(Object.prototype).length") == 0
    assert page.evaluate("({}).steps === undefined && ({}).std === undefined")
    text = page.inner_text("body")
    assert [name for name in NAMES[:5] if name not in text] == []
    page.fill("#find", NAMES[1])
    assert NAMES[1] in names(page)
    page.select_option("#order", "worst")
    assert NAMES[1] in names(page)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("healthy", "light"),
        ("healthy", "dark"),
        ("sick", "light"),
        ("sick", "dark"),
        ("nan", "dark"),
        ("empty", "light"),
        ("first", "dark"),
        ("ranks", "light"),
        ("ranks", "dark"),
        ("hostile", "light"),
    ],
)
def test_axe_finds_nothing_serious(kind, scheme, pages, open_page):
    page = open_page(pages(kind), scheme=scheme, bypass_csp=True)
    if page.locator(ROWS).count():
        page.locator(ROWS).nth(1).click()
        unfold(page, "details:not(.behind), #run .chart:first-child .behind")  # tables take axe long
    settle(page)
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


@pytest.mark.parametrize("kind", ["sick", "ranks"])
def test_it_is_printed_on_white_with_the_whole_verdict(kind, pages, open_page):
    page = open_page(pages(kind), scheme="dark")
    folds = page.locator("#verdict details:not([open])")
    n = folds.count()
    assert n >= 2
    page.emulate_media(media="print")
    settle(page)
    assert not page.locator("#find").is_visible()
    assert folds.count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    pdf = page.pdf(path=f"build/pages/{kind}.pdf", format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000
    page.emulate_media(media="screen")
    settle(page)
    assert folds.count() == n


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
    page = open_page(path, is_live=True)
    data.headline, data.every = "HEALTHY  at the end", None
    Page(data).save(path)
    page.locator("#headline", has_text="end").wait_for(timeout=15_000)
    page.evaluate("window.isThisOne = true")
    page.wait_for_timeout(2_500)
    assert page.evaluate("window.isThisOne")


def test_a_page_does_not_load_itself_while_somebody_types(open_page, tmp_path):
    data = sick()
    data.every = 1000.0
    page = open_page(Page(data).save(tmp_path / "run.html"))
    page.fill("#find", "linear")
    page.focus("#find")
    stays = """() => {
        window.isThisOne = true;
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {bubbles: true}));
        follow.reload();
        return new Promise((done) => setTimeout(() => done(isThisOne), 1000));
    }"""
    assert page.evaluate(stays)
    page.wait_for_event("load")
    page.wait_for_selector("body[data-ready=yes]")
    assert page.evaluate("window.isThisOne") is None
    assert page.input_value("#find") == "linear"
    assert page.evaluate("document.activeElement.id") == "find"


def test_a_page_is_shown_inside_a_notebook(open_page, tmp_path):
    inline = Page(healthy())._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body data-ready=yes>{inline}", encoding="utf-8")
    page = open_page(tmp_path / "notebook.html")
    frame = page.frame_locator("iframe")
    frame.locator("body[data-ready=yes]").wait_for(timeout=15_000)
    assert frame.locator("#headline").inner_text().startswith("HEALTHY")
    assert frame.locator("#run canvas").count() >= 1


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
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
