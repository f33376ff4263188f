"""Pictures show the data they are given, all of it, and leave pyplot alone."""

import itertools
import math
import pickle
import sys
from itertools import pairwise

import pytest
import torch

from hookcb import ActivationStats
from hookcb.activations.plots import Hist, color_dim, depth_lines, layer_chart, layer_lines
from hookcb.records.plots import ALARM
from tests.support import each, in_turn, make_learner

pytest.importorskip("matplotlib")
from matplotlib import rcParams
from matplotlib.figure import Figure

NAN, INF = math.nan, math.inf
PNG = b"\x89PNG"


def counts(bins=6, records=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (bins + 2, records), generator=generator).float().log1p()


def dim(hists, **where):
    """The figure of histograms in records at steps 0, 1, 2, …"""
    shapes = [values.shape for values, *_ in hists.values()]
    return color_dim(
        {
            name: Hist(values, *(edges if len(edges) == 1 else [edges_of(values, *edges)]))
            for name, (values, *edges) in hists.items()
        },
        range(min((n for _, n in shapes), default=0)),
        **where,
    )


def hists(n, **shape):
    values = {f"layer{i}": counts(seed=i, **shape) for i in range(n)}
    return {name: (x, edges_of(x, -1.0 - i, 2.0 + i)) for i, (name, x) in enumerate(values.items())}


def edges_of(values, low, high):
    return torch.linspace(low, high, len(values) - 1, dtype=torch.float64).tolist()


def shown(image):
    return torch.from_numpy(image.get_array().filled(NAN))


def bars_of(fig):
    return [ax for ax in fig.axes if ax.get_label() == "<colorbar>"]


def panels_of(fig):
    return [ax for ax in fig.axes if ax not in bars_of(fig)]


def y_labels(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def x_labels(ax):
    return [label.get_text() for label in ax.get_xticklabels()]


def charts():
    """One figure of each kind, with all that is odd in it."""
    gaps = [1.0, NAN, 0.0, INF]
    return [
        dim(hists(3)),
        layer_lines("fc", {"mean": gaps, "near_zero": [0.0, 1.0, NAN, 0.5]}, [0, 10, 20, 30]),
        layer_chart({"conv": [0.0, 1.0], "fc": [NAN, 0.5]}, [3, 4], "near zero"),
    ]


def laid_out(fig):
    fig.draw_without_rendering()
    return fig


def same(a, b):
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.allclose(a.nan_to_num(), b.nan_to_num())


# the colourful dimension


def test_every_bin_and_record_is_shown_in_rows_of_equal_height():
    values = counts(bins=6, records=5)
    (panel,) = panels_of(dim({"fc": (values, [-9.0, -3.0, -1.0, 0.0, 1.0, 3.0, 9.0])}))
    under, over, inside = panel.images
    same(shown(under), values[:1])
    same(shown(over), values[-1:])
    same(shown(inside), values[1:-1])
    assert inside.get_extent() == [-0.5, 4.5, 0.0, 6.0]
    assert (under.get_extent()[3], over.get_extent()[2]) == (0.0, 6.0)
    assert [image.origin for image in panel.images] == ["lower"] * 3
    bottom, top = panel.get_ylim()
    assert (bottom, top) == (under.get_extent()[2], over.get_extent()[3])
    assert bottom < 0.0 < 6.0 < top
    assert panel.get_xlim() == (-0.5, 4.5)
    assert [line.get_ydata()[0] for line in panel.lines] == [0.0, 6.0]


@in_turn(
    "ends, bins", itertools.product([(-2.0, 3.0), (0.0, 5e-5), (-3e38, 3e38), (-1e-30, 0.0)], [2, 6, 60])
)
def test_ticks_are_the_true_numbers_of_the_edges(ends, bins):
    low, high = ends
    values = counts(bins=bins)
    edges = edges_of(values, low, high)
    (panel,) = panels_of(dim({"fc": (values, edges)}))
    first, *inner, last = y_labels(panel)
    assert (float(first.removeprefix("<")), float(last.removeprefix(">"))) == (low, high)
    assert first.startswith("<")
    assert last.startswith(">")
    for position, text in zip(panel.get_yticks()[1:-1], inner, strict=True):
        assert float(text) == pytest.approx(edges[int(position)], rel=1e-2)
    assert len({first, *inner, last}) == len(inner) + 2


def test_0_has_a_tick_if_it_is_an_edge():
    edges = [-1024.0, -32.0, -1.0, 0.0, 1.0, 32.0, 1024.0]
    (panel,) = panels_of(dim({"fc": (counts(bins=6), edges)}))
    assert "0" in y_labels(panel)


@pytest.mark.parametrize("n", each(4, [1, 2, 3, 5, 9, 10, 60]))
def test_no_layer_is_dropped_and_no_cell_is_left_over(n):
    data = hists(n)
    fig = dim(data)
    assert [panel.get_title() for panel in panels_of(fig)] == list(data)
    for panel, (values, edges) in zip(panels_of(fig), data.values(), strict=True):
        same(shown(panel.images[-1]), values[1:-1])
        assert panel.images[-1].get_extent()[2:] == [0.0, len(edges) - 1.0]
    (bar,) = bars_of(fig)
    assert bar.get_ylabel() == "log(1 + count)"
    rows, columns = panels_of(fig)[0].get_subplotspec().get_gridspec().get_geometry()
    assert columns - 1 <= rows <= columns


def test_layers_share_one_colour_scale():
    data = {"a": (counts() * 0.1, 0.0, 1.0), "b": (counts() * 3, 0.0, 1.0)}
    most = float(data["b"][0].max())
    images = [image for panel in panels_of(dim(data)) for image in panel.images]
    assert len(images) == 6
    for image in images:
        assert image.get_clim() == pytest.approx((0.0, most))
        assert image.get_cmap().name == "viridis"


LONG_NAMES = [f"encoder.layers.{i // 5}.attention.self.{'qkvoz'[i % 5] * 20}.projection" for i in range(60)]


@pytest.fixture(scope="module", params=[10, pytest.param(60, marks=pytest.mark.slow)])
def many_layers(request):
    """Layers with long names; to lay out 60 takes seconds."""
    return laid_out(dim(dict.fromkeys(LONG_NAMES[: request.param], (counts(), -1.0, 1.0))))


@pytest.fixture(params=[1, 2])
def few_layers(request):
    return laid_out(dim(hists(request.param)))


def check_colour_bar(fig):
    (bar,) = bars_of(fig)
    assert 0.15 <= bar.bbox.width / fig.dpi <= 0.3
    assert bar.bbox.x0 - max(panel.bbox.x1 for panel in panels_of(fig)) < 0.5 * fig.dpi
    assert bar.bbox.height >= 0.8 * (panels_of(fig)[0].bbox.y1 - panels_of(fig)[-1].bbox.y0)


def test_the_colour_bar_beside_few_layers_is_narrow_and_high(few_layers):
    check_colour_bar(few_layers)


def test_the_colour_bar_beside_many_layers_is_as_wide(many_layers):
    check_colour_bar(many_layers)


def test_counts_of_zero_have_a_scale_too():
    (panel,) = panels_of(dim({"fc": (torch.zeros(8, 3), 0.0, 1.0)}))
    assert panel.images[-1].get_clim() == (0.0, 1.0)


def test_steps_are_named_in_the_lowest_row_only():
    fig = dim(hists(5))
    fig.draw_without_rendering()
    assert [panel.get_xlabel() for panel in panels_of(fig)] == ["", "", "", "step", "step"]
    numbered = [any(t.label1.get_visible() for t in p.xaxis.get_major_ticks()) for p in panels_of(fig)]
    assert numbered == [False, False, True, True, True]  # the lowest of each column
    assert [panel.get_xlabel() for panel in panels_of(dim(hists(4)))] == ["", "", "step", "step"]


@pytest.mark.parametrize("records", [1, 2, 3])
def test_few_records_are_counted_in_whole_numbers(records):
    fig = dim({"fc": (counts(records=records), 0.0, 1.0)})
    (panel,) = panels_of(fig)
    fig.draw_without_rendering()
    inside = [tick for tick in panel.get_xticks() if -0.5 <= tick <= records - 0.5]
    assert inside == list(range(records))


@pytest.mark.parametrize("n", [1, 12])
def test_thousands_of_records_are_averaged_pixel_by_pixel(n):
    values = counts(records=10_000)
    panel = panels_of(dim({f"fc{i}": (values, 0.0, 1.0) for i in range(n)}))[-1]
    picture, (left, right, *_) = shown(panel.images[-1]), panel.images[-1].get_extent()
    step = round((right - left) / picture.shape[1])
    assert picture.shape[1] <= panel.figure.bbox.width / math.ceil(math.sqrt(n))
    assert step * picture.shape[1] == right - left
    same(picture[:, 0], values[1:-1, :step].mean(1))
    same(picture[:, -1], values[1:-1, step * (picture.shape[1] - 1) :].mean(1))
    assert panel.get_xlim() == (-0.5, 9_999.5)


def test_long_titles_do_not_overlap(many_layers):
    titles = [panel.title for panel in panels_of(many_layers)]
    boxes = [title.get_window_extent() for title in titles]
    for (box, after), title in zip(pairwise(boxes), titles, strict=False):
        assert box.x1 <= after.x0 or box.y0 > after.y1, title.get_text()
    texts = [title.get_text() for title in titles]
    assert len(set(texts)) == len(titles)
    assert all(text.startswith(f"{i}: …") for i, text in enumerate(texts))
    assert boxes[-1].x0 >= 0


def test_names_alike_without_their_beginnings_are_numbered():
    names = [start * 40 + "z" * 80 for start in "ab"]
    titles = [panel.get_title() for panel in panels_of(dim(dict.fromkeys(names, (counts(), 0.0, 1.0))))]
    assert [title[:4] for title in titles] == ["0: …", "1: …"]


def test_records_are_labeled_with_their_steps():
    fig = color_dim({"fc": Hist(counts(records=4), edges_of(counts(), 0.0, 1.0))}, [10, 20, 35, 50])
    (panel,) = panels_of(laid_out(fig))
    assert dict(zip(panel.get_xticks().tolist(), x_labels(panel), strict=True)) == {
        0: "10",
        1: "20",
        2: "35",
        3: "50",
    }


def test_records_with_nan_have_a_mark_and_those_without_a_call_are_gray():
    values = counts(records=4)
    values[:, 1] = NAN
    (panel,) = panels_of(
        color_dim({"fc": Hist(values, edges_of(values, 0.0, 1.0), [0.0, NAN, 0.5, 1.0])}, range(4))
    )
    marks = [line for line in panel.lines if line.get_label() == "NaN or inf"]
    assert [list(line.get_xdata()) for line in marks] == [[2, 3]]
    assert shown(panel.images[-1])[:, 1].isnan().all()
    assert panel.get_facecolor() == (0.85, 0.85, 0.85, 1.0)
    assert sorted(text.get_text() for text in panel.get_legend().get_texts()) == [
        "NaN or inf",
        "did not fire",
    ]


# depth


def test_depth_is_drawn_from_first_layer_to_last_on_a_logarithmic_axis():
    fig = depth_lines(["a", "b", "c"], {"step 0": [1.0, 0.1, 0.01], "step 9": [1.0, 0.0, INF]})
    (panel,) = fig.axes
    assert panel.get_yscale() == "log"
    first, last, odd = panel.lines
    assert list(first.get_ydata()) == [1.0, 0.1, 0.01]
    same(torch.tensor(last.get_ydata()), torch.tensor([1.0, NAN, NAN]).double())
    assert list(odd.get_xdata()) == [1, 2]
    assert x_labels(panel) == ["a", "b", "c"]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [
        "step 0",
        "step 9",
        "0, NaN or inf",
    ]


def test_one_layer_is_drawn_where_the_user_wants_it():
    fig = Figure()
    ax = fig.subplots(1, 2)[1]
    assert dim({"fc": (counts(), 0.0, 1.0)}, ax=ax) is fig
    assert ax.get_title() == "fc"
    assert len(ax.images) == 3
    assert len(bars_of(fig)) == 1


def test_in_a_part_of_a_figure_the_whole_is_returned():
    fig = Figure()
    part = fig.subfigures(1, 2)[0]
    assert dim(hists(1), ax=part.subplots()) is fig


def test_several_layers_do_not_fit_one_ax():
    ax = Figure().subplots()
    with pytest.raises(ValueError, match=r"one layer, not for 2; name a layer, or leave ax out"):
        dim(hists(2), ax=ax)
    assert not ax.images


# lines


def test_each_statistic_has_a_panel_over_the_steps():
    series = {"mean": [1.0, 2.0, 3.0], "std": [0.1, 0.2, 0.3], "near_zero": [0.0, 0.5, 1.0]}
    fig = layer_lines("blocks.0.fc", series, [0, 10, 20])
    assert fig.get_suptitle() == "blocks.0.fc"
    assert [panel.get_title() for panel in fig.axes] == ["mean", "std", "near zero"]
    assert [panel.get_xlabel() for panel in fig.axes] == ["step"] * 3
    for panel, values in zip(fig.axes, series.values(), strict=True):
        (line,) = panel.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 10, 20], values)
        assert panel.get_legend() is None
    assert fig.axes[2].get_ylim() == (0.0, 1.0)
    assert fig.axes[0].get_ylim() != (0.0, 1.0)
    assert len({panel.get_position().y0 for panel in fig.axes}) == 1


def test_gaps_stay_open_and_infinity_is_marked_below():
    fig = layer_lines("fc", {"std": [1.0, NAN, 2.0, INF, -INF, 3.0, 4.0]}, list(range(0, 70, 10)))
    (panel,) = fig.axes
    line, marks = panel.lines
    same(torch.tensor(line.get_ydata()), torch.tensor([1.0, NAN, 2.0, NAN, NAN, 3.0, 4.0]).double())
    assert line.get_markevery() == [0, 2]  # a point between gaps makes no line
    assert line.get_marker() == "."
    assert list(marks.get_xdata()) == [30, 40]
    assert set(marks.get_ydata()) == {panel.get_ylim()[0]}
    assert marks.get_color() == ALARM
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["infinite"]


@pytest.mark.parametrize("values", each(2, [[NAN] * 3, [INF] * 3, [NAN, INF, NAN], [3e38, -3e38, 0.0]]))
def test_panels_cover_the_same_steps_whatever_the_values(values):
    fig = layer_lines("fc", {"mean": values, "std": [1.0, 2.0, 3.0]}, [5, 6, 7])
    assert fig.axes[0].get_xlim() == fig.axes[1].get_xlim() == (4.5, 7.5)
    assert fig._repr_png_().startswith(PNG)


def test_a_single_record_is_a_point():
    (panel,) = layer_lines("fc", {"mean": [1.0]}, [7]).axes
    assert panel.lines[0].get_markevery() == [0]
    left, right = panel.get_xlim()
    assert [tick for tick in panel.get_xticks() if left <= tick <= right] == [7]


def test_lines_are_drawn_where_the_user_wants_them():
    fig = Figure()
    axs = fig.subplots(2, 2)[1]
    fig.suptitle("mine")
    assert layer_lines("fc", {"mean": [1.0], "std": [2.0]}, [0], axs=axs) is fig
    assert [ax.get_title() for ax in fig.axes] == ["", "", "mean", "std"]
    assert (fig.get_suptitle(), axs[0].get_ylabel()) == ("mine", "fc")


def test_too_few_axes_are_refused():
    with pytest.raises(ValueError, match="2 axs are needed, one each for mean, std; got 1"):
        layer_lines("fc", {"mean": [1.0], "std": [2.0]}, [0], axs=[Figure().subplots()])


def test_series_and_steps_of_different_length_are_refused():
    with pytest.raises(ValueError, match="shape"):
        layer_lines("fc", {"mean": [1.0, 2.0, 3.0]}, [0, 1])


# shares


def test_shares_are_a_row_per_layer_with_the_first_on_top():
    fig = layer_chart({"conv": [0.0, 0.25, 1.0], "fc": [0.5, 0.5, 0.75]}, [0, 50, 100], "near zero")
    (panel,) = panels_of(fig)
    (image,) = panel.images
    same(shown(image), torch.tensor([[0.0, 0.25, 1.0], [0.5, 0.5, 0.75]]))
    assert image.get_extent() == [-0.5, 2.5, -0.5, 1.5]
    assert panel.get_ylim() == (1.5, -0.5)  # upside down: row 0 is the uppermost
    assert y_labels(panel) == ["conv", "fc"]
    assert x_labels(panel) == ["0", "50", "100"]
    assert (panel.get_xlabel(), panel.get_title(loc="left")) == ("step", "near zero")
    assert image.get_clim() == (0.0, 1.0)
    (bar,) = bars_of(fig)
    assert bar.get_ylabel() == "share"
    assert panel.get_legend() is None


def test_a_layer_that_did_not_fire_is_grey_and_the_legend_says_so():
    (panel,) = panels_of(layer_chart({"conv": [0.1, NAN], "fc": [NAN, NAN]}, [0, 1], "near zero"))
    same(shown(panel.images[0]), torch.tensor([[0.1, NAN], [NAN, NAN]]))
    grey = panel.get_facecolor()
    assert grey == (0.85, 0.85, 0.85, 1.0)
    assert panel.images[0].get_cmap().get_bad()[3] == 0.0  # what is missing is clear: the grey is seen
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["did not fire"]
    assert panel.get_legend().legend_handles[0].get_color() == "0.85"


@pytest.mark.parametrize(("n", "figsize"), each(3, [(60, None), (400, None), (60, (4, 3))]))
def test_names_of_many_layers_do_not_overlap(n, figsize):
    names = [f"encoder.layers.{i}.attention.self.query.projection" for i in range(n)]
    fig = layer_chart({name: [i / n] for i, name in enumerate(names)}, [0], "near zero", figsize)
    (panel,) = panels_of(fig)
    assert len(panel.images[0].get_array()) == n
    fig.draw_without_rendering()
    boxes = [label.get_window_extent() for label in panel.get_yticklabels()]
    assert len(boxes) >= min(n, 12)
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    assert panel.bbox.width > fig.bbox.width / 2
    for row, text in zip(panel.get_yticks(), y_labels(panel), strict=True):
        assert text.startswith((f"{row}…", f"{row}: ", f"encoder.layers.{row}."))


def test_averaged_shares_leave_out_what_did_not_fire():
    row = [0.0, NAN, 1.0, NAN] * 2_500
    (panel,) = panels_of(layer_chart({"fc": row}, list(range(10_000)), "near zero", figsize=(2, 1)))
    picture = shown(panel.images[0])
    step = 10_000 / picture.shape[1]
    assert picture.shape[1] <= panel.figure.bbox.width == 200
    assert not picture.isnan().any()
    assert picture.mean() == pytest.approx(0.5, abs=1 / step)


def test_shares_are_drawn_where_the_user_wants_them():
    fig = Figure()
    ax = fig.subplots()
    assert layer_chart({"fc": [0.5]}, [0], "near zero", ax=ax) is fig
    assert len(ax.images) == 1


# all of them


@pytest.mark.parametrize(
    "draw",
    [
        lambda: dim({}),
        lambda: dim({"fc": (torch.zeros(8, 0), 0.0, 1.0)}),
        lambda: layer_lines("fc", {}, [0]),
        lambda: layer_lines("fc", {"mean": []}, []),
        lambda: layer_chart({}, [0], "near zero"),
        lambda: layer_chart({"fc": []}, [], "near zero"),
        lambda: depth_lines([], {}),
    ],
)
def test_with_nothing_recorded_the_error_says_what_to_do(draw):
    with pytest.raises(ValueError, match="nothing to draw yet; train for a batch first"):
        draw()


def test_figures_are_as_large_as_asked():
    for fig in (
        dim(hists(4), figsize=(5, 4)),
        layer_lines("fc", {"mean": [1.0], "std": [1.0]}, [0], figsize=(5, 4)),
        layer_chart({"fc": [1.0]}, [0], "near zero", figsize=(5, 4)),
    ):
        assert tuple(fig.get_size_inches()) == (5, 4)
        assert type(fig.get_layout_engine()).__name__ == "ConstrainedLayoutEngine"


def test_figures_can_be_saved_shown_and_pickled(tmp_path):
    for fig in charts():
        fig.savefig(tmp_path / "picture.png")
        fig.savefig(tmp_path / "picture.svg")
        assert (tmp_path / "picture.png").read_bytes().startswith(PNG)
        assert "<svg" in (tmp_path / "picture.svg").read_text()
        assert pickle.loads(pickle.dumps(fig))._repr_png_() == fig._repr_png_()


def test_pyplot_and_its_settings_are_left_alone(monkeypatch):
    before = dict(rcParams)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it would raise
        patch.delattr("matplotlib.pyplot", raising=False)
        for fig in charts():
            fig._repr_png_()
    assert dict(rcParams) == before
    import matplotlib.pyplot as plt

    known = plt.get_fignums()
    charts()
    assert plt.get_fignums() == known


def test_a_notebook_shows_a_figure_once():
    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    for fig in charts():
        data, _ = formatter.format(fig)
        assert data["image/png"].startswith(PNG)
        assert set(data) == {"image/png", "text/plain"}


@pytest.mark.parametrize("missing", ["matplotlib", "matplotlib.figure"])
def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for draw in (
        lambda: dim(hists(2)),
        lambda: layer_lines("fc", {"mean": [1.0]}, [0]),
        lambda: layer_chart({"fc": [0.5]}, [0], "near zero"),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'hookcb\[plot\]'"):
            draw()


# of a training


def test_pictures_of_a_training_show_its_records():
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    stats = ActivationStats(with_hist=True)
    make_learner(n_train=4, model=net, cbs=[stats]).fit(1)
    panels = panels_of(stats.color_dim())
    assert [panel.get_title() for panel in panels] == stats.names
    assert x_labels(panels[-1]) == ["0", "1", "2", "3"]
    (panel,) = stats.plot_depth().axes
    first, last = panel.lines
    assert list(first.get_ydata()) == [layer["std"] for layer in stats.stats[0]]
    assert list(last.get_ydata()) == [layer["std"] for layer in stats.stats[-1]]
    (panel,) = stats.plot_depth(step=2).axes
    assert [line.get_label() for line in panel.lines] == ["step 0", "step 2"]
    assert len(stats.plot_depth(step=0).axes[0].lines) == 1
    with pytest.raises(ValueError, match="no batch was recorded up to step -1; the first is at step 0"):
        stats.plot_depth(step=-1)
    with pytest.raises(ValueError, match="nothing to draw yet"):
        ActivationStats().plot_depth()
