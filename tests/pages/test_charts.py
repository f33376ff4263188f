"""Charts of a page in a real browser: they show what was recorded, and nothing between."""

import csv
import math

import pytest

from hookcb import compare, load_report
from hookcb.records.content import HistogramOverTime, ModuleRow, Recorded
from hookcb.records.series import Series
from hookcb.report.data import PageData
from hookcb.report.page import Page
from tests.pages.support import healthy
from tests.pages.test_pages import ROWS, settle

# what a test asks of the first chart with a title
HELPERS = """() => {
window.chartOf = (title) => [...document.querySelectorAll("#run figure")]
    .find((own) => own.querySelector("strong").textContent === title).querySelector(".plot").chart;
window.inkAt = (own, step, name) => {  // pixels of a color in the column of a step
    const u = own.plotted, {top, height} = u.bbox;
    const [r, g, b] = rgb(color(name).slice(1));
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [u.ctx.canvas.width, u.ctx.canvas.height];
    const pen = copy.getContext("2d", {willReadFrequently: true});
    pen.drawImage(u.ctx.canvas, 0, 0);
    const {data} = pen.getImageData(Math.round(u.valToPos(step, "x", true)) - 1, top, 3, height);
    let n = 0;
    for (let i = 0; i < data.length; i += 4)
        n += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 60;
    return n;
};
window.textsOf = (draw) => {
    const texts = [], old = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        texts.push(text); old.call(this, text, ...at);
    };
    draw();
    return new Promise((done) => setTimeout(() => {
        CanvasRenderingContext2D.prototype.fillText = old; done(texts);
    }, 100));
};
}"""


@pytest.fixture
def open_run(open_page, tmp_path):
    """Opens a page of these series of a run."""

    def open_(run=None, **content):
        data = PageData("UNKNOWN  made up", n_batches=40)
        data.run = run or {}
        for name, own in content.items():
            setattr(data, name, own)
        page = open_page(Page(data).save(tmp_path / "made.html"))
        page.evaluate(HELPERS)
        return page

    return open_


def test_a_line_joins_only_records_that_are_next_to_each_other(open_run):
    looked = [0, 1, 2, 3, 4, 5, 7, 10, 14, 19, 38]
    each = list(range(0, 40, 4))
    page = open_run({"loss": Series(looked, [1.0] * 10 + [2.0]), "lr": Series(each, [0.1] * 9 + [0.2])})
    ink = "([title, step]) => inkAt(chartOf(title), step, '--blue')"
    assert page.evaluate(ink, ["loss", 2.5]) > 0
    for step in (12, 16.5, 28):
        assert page.evaluate(ink, ["loss", step]) == 0, step
    assert page.evaluate(ink, ["loss", 14]) > 0  # a point
    assert page.evaluate(ink, ["learning rate", 18]) > 0


def test_a_long_run_is_one_line_though_values_are_left_out(open_run):
    n = 9_000
    page = open_run({"loss": Series(list(range(n)), [1.0 + i * 7919 % 1000 for i in range(n)])}, n_batches=n)
    shown = page.evaluate("chartOf('loss').lines[0].series.steps.length")
    assert 600 < shown < n
    assert page.evaluate("chartOf('loss').cuts[0].cuts.length") == 0
    assert "latest, step 8,999" in page.evaluate("chartOf('loss').box.innerText")


@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "× NaN (1×)"), (math.inf, "▲ infinite (1×)"), (-math.inf, "infinite (1×)")]
)
def test_what_is_not_finite_is_at_its_step_also_if_it_is_all(value, said, open_run):
    page = open_run({"loss": Series([20], [value])})
    assert said in page.evaluate("chartOf('loss').legend.innerText")
    assert page.evaluate("inkAt(chartOf('loss'), 20, '--alarm')") > 0
    assert page.evaluate("inkAt(chartOf('loss'), 10, '--alarm')") == 0
    assert page.evaluate("labels(chartOf('loss'), {min: 0, max: 1}, 150, 1)") == []  # no number has a place


def test_a_logarithmic_axis_is_as_long_as_its_data(open_run):
    steps = list(range(40))
    page = open_run({"loss": Series(steps, [0.1 + 0.001 * i for i in steps])})
    page.select_option("#run-axis", "log")
    settle(page)
    axis = page.evaluate(
        "(() => { const own = chartOf('loss'), {min, max} = own.plotted.scales.y;"
        " return [own.isLog, min, max, labels(own, {min, max}, 150, 1).map(([at]) => at)]; })()"
    )
    assert axis[0]
    assert 0.09 < axis[1] <= 0.1
    assert 0.139 <= axis[2] < 0.16
    assert len(axis[3]) >= 3


def test_numbers_without_a_place_on_a_logarithmic_axis_are_told_with_their_values(open_run):
    page = open_run({"loss": Series([0, 1, 2, 3], [1.0, 0.0, -2.0, 1.5])})
    page.select_option("#run-axis", "log")
    settle(page)
    legend = page.evaluate("chartOf('loss').legend.innerText")
    assert "zero, which has no place" in legend
    assert "negative, which has no place" in legend
    page.evaluate("chartOf('loss').tell(2)")
    assert "\N{MINUS SIGN}2" in page.evaluate("chartOf('loss').box.innerText")


def test_the_latest_number_of_each_line_is_told_with_its_step(open_run):
    page = open_run(
        {"loss": Series([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.5])}, epochs={"valid_loss": Series([1], [7.0])}
    )
    entries = page.evaluate("[...chartOf('loss').legend.children].map((own) => own.textContent)")
    assert entries == ["each batch 1.5 at step 3", "validation 7 at step 1"]
    assert page.evaluate("chartOf('loss').where.textContent").strip() == ""


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_moves_while_numbers_under_the_pointer_are_told(width, pages, open_page):
    page = open_page(pages("healthy"), width)
    height = "document.documentElement.scrollHeight"
    before = page.evaluate(height)
    page.evaluate("timeline.point(3)")
    assert "step 3" in page.inner_text("#run")
    assert page.evaluate(height) == before
    page.evaluate("timeline.point(null)")
    assert page.evaluate(height) == before


def test_epochs_are_ticks_of_the_axis(pages, open_page):
    page = open_page(pages("healthy"))
    page.evaluate(HELPERS)
    assert page.evaluate("timeline.epochs") == list(range(7, 64, 8))
    texts = page.evaluate("textsOf(() => chartOf('loss').draw())")
    assert next(text for text in texts if text.startswith("epoch")) == "epoch 1"
    assert not page.evaluate("[...timeline.live()].some((own) => own.names && own.hasEpochs())")


def test_curves_are_smoothed_as_tensorboard_does_and_stay_so(open_page, tmp_path):
    data = healthy()
    data.every = 1000.0
    page = open_page(Page(data).save(tmp_path / "run.html"))
    page.evaluate(HELPERS)
    page.fill("#run-smoothing", "0.9")
    page.select_option("#run-axis", "log")
    settle(page)
    last, expected = 0.0, []
    for n, x in enumerate(data.run["loss"].values, 1):  # as vz_line_chart2 of TensorBoard
        last = last * 0.9 + 0.1 * x
        expected.append(last / (1 - 0.9**n))
    assert page.evaluate("chartOf('loss').averages[0]") == pytest.approx(expected, rel=1e-5)
    assert "smoothed" in page.evaluate("chartOf('loss').legend.innerText")
    assert page.evaluate("inkAt(chartOf('loss'), 40, '--blue')") > 0
    page.wait_for_timeout(2_500)
    page.evaluate("follow.reload()")
    page.wait_for_event("load")
    page.wait_for_selector("body[data-ready=yes]")
    settle(page)
    page.evaluate(HELPERS)
    assert page.input_value("#run-axis") == "log"
    assert page.evaluate("[chartOf('loss').smoothing, chartOf('loss').isLog]") == [0.9, True]


def test_the_numbers_of_a_chart_are_saved_as_csv(pages, open_page):
    page = open_page(pages("nan"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save loss as CSV").first.click()
    assert download.value.suggested_filename == "nan-loss.csv"
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head[:2] == ["step", "each batch"]
    loss = load_report(pages("nan")).run["loss"]
    assert [int(row[0]) for row in rows if row[1]] == loss.steps
    assert [float(row[1]) for row in rows if row[1]] == pytest.approx(loss.values, rel=1e-7, nan_ok=True)
    cells = page.evaluate("""['=1+1', 'a,"b"', 'plain'].map(csvCell)""")
    assert cells == ["'=1+1", '"a,""b"""', "plain"]


@pytest.mark.parametrize(("scheme", "paper"), [("light", [255, 255, 255]), ("dark", [13, 17, 23])])
def test_a_chart_is_saved_as_a_picture_that_stands_alone(scheme, paper, pages, open_page):
    page = open_page(pages("sick"), scheme=scheme)
    page.evaluate(HELPERS)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save loss as PNG").first.click()
    assert download.value.suggested_filename == "sick-loss.png"
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    texts = page.evaluate("textsOf(() => pictureOf(chartOf('loss')))")
    assert {"loss", "sick", "step"} <= set(texts)
    assert any(text.startswith("each batch ") for text in texts)
    corner, size, plot = page.evaluate(
        """async () => {
            const image = await createImageBitmap(await pictureOf(chartOf("loss")));
            const canvas = document.createElement("canvas");
            [canvas.width, canvas.height] = [image.width, image.height];
            const pen = canvas.getContext("2d");
            pen.drawImage(image, 0, 0);
            const plot = chartOf("loss").plotted.ctx.canvas;
            return [[...pen.getImageData(1, 1, 1, 1).data].slice(0, 3), image.height, plot.height];
        }"""
    )
    assert corner == paper
    assert size > plot + 40  # its title and legend
    hist = page.get_by_role("button", name="Save histogram over time as PNG").first
    with page.expect_download() as download:
        hist.click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


def test_histograms_of_all_layers_are_on_one_screen(pages, open_page, shoot):
    page = open_page(pages("sick"))
    n = sum(own.hist is not None for own in load_report(pages("sick")).layers.values())
    fold = page.locator("#layers-section details", has_text="Histograms of")
    fold.locator("summary").click()
    settle(page)
    buttons = fold.get_by_role("button")
    assert buttons.count() == n > 5
    painted = "canvas => canvas.width > 1 && canvas.getContext('2d').getImageData(0, 0, 1, 1).data[3] === 255"
    assert all(canvas.evaluate(painted) for canvas in fold.locator("canvas").all())
    shoot(page, "histograms")
    buttons.nth(3).focus()
    page.keyboard.press("Enter")
    assert page.locator("#layer h3").first.inner_text() == buttons.nth(3).get_attribute("title")


def test_a_bin_without_elements_has_the_color_of_none(open_run):
    hist = HistogramOverTime([0.0, 1.0], [Series([0, 1], [0.0, 0.0]), Series([0, 1], [32.0, 96.0])])
    layers = {"a": Recorded("a", "", {"std": Series([0, 1], [1.0, 2.0])}, hist)}
    page = open_run(layers=layers)
    assert page.evaluate("cellsOf(layers.page.layers.a.hist).scale.low") == 0


def test_gray_cells_say_why(open_run, shoot):
    steps = list(range(20))
    layers = {
        "called": Recorded("called", "", {"std": Series(steps, [1.0 + i for i in steps])}),
        "rarely": Recorded("rarely", "", {"std": Series(steps[:5], [2.0] * 5)}),
    }
    page = open_run(modules=[ModuleRow(name, "Linear") for name in layers], layers=layers)
    assert page.locator("#map-key .missing").inner_text() == (
        "gray: no batch was inspected, or this layer has no record, but others have"
    )
    tip = page.locator("#map .tip")
    for name, share, said in [
        ("rarely", 0.05, ""),
        ("rarely", 0.3, "other layers have a record of step 12, this one has none"),
        ("rarely", 0.9, "no batch after step 19 was inspected for this"),
        ("called", 0.9, "no batch after step 19 was inspected for this"),
        ("called", 0.3, ""),
    ]:
        strip = page.locator(f'{ROWS}[data-name="{name}"] canvas')
        box = strip.bounding_box()
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 4)
        assert (tip.inner_text() if tip.is_visible() else "") == said, (name, share)
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    shoot(page, "gray")


def test_the_layer_map_and_bars_are_saved_too(pages, open_page):
    page = open_page(pages("sick"))
    page.select_option("#stat", "std")
    data = load_report(pages("sick"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save std of the output by layer as CSV").click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    first = data.layers[head[1]].stats["std"]
    assert set(head) == {"step", *(name for name, own in data.layers.items() if "std" in own.stats)}
    assert [float(row[1]) for row in rows if row[1]] == pytest.approx(first.values, rel=1e-6)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save std of the output by layer as PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save Memory by layer as CSV").click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["layer", *data.memory.columns]
    found = {row[0]: [float(x) for x in row[1:]] for row in rows}
    assert found == {name or "(the model)": own for name, own in data.memory.layers.items() if sum(own)}


def test_charts_of_compared_runs_have_the_same_switches_and_keys(pages, open_page, tmp_path):
    path = compare(pages("healthy"), pages("sick")).save(tmp_path / "both.html")
    page = open_page(path)
    page.evaluate(HELPERS)
    page.fill("#run-smoothing", "0.5")
    page.select_option("#run-axis", "log")
    settle(page)
    assert page.evaluate("[chartOf('loss').smoothing, chartOf('loss').isLog]") == [0.5, True]
    page.evaluate("chartOf('loss').plot.focus()")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("chartOf('loss').where.textContent").strip() == "step 0"
