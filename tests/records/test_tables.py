"""Reports of models with many layers can be read in any terminal, and say what needs a look first."""

import math
import re
from collections import OrderedDict

import pytest
import torch
from rich.console import Console
from torch import nn

from hookcb import ActivationStats, Finding, GradientHealth, Learner, MemoryStats, Verdict, module_summary
from hookcb.records.records import module_of
from hookcb.records.tables import Column, Mark, fitted, marks_of
from tests.support import in_terminal

N = 12  # blocks, of four layers each
DEAD = "model.encoder.layers.7.self_attention.output.dense"


class Branch(nn.Module):
    """A module with named children, called in their order."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


def block():
    output = Branch(dense=nn.Linear(4, 4), LayerNorm=nn.LayerNorm(4))
    return Branch(
        self_attention=Branch(query=nn.Linear(4, 4), output=output),
        intermediate=Branch(dense=nn.Linear(4, 4)),
    )


def big_model():
    torch.manual_seed(0)
    layers = nn.Sequential(*[block() for _ in range(N)])
    return Branch(model=Branch(encoder=Branch(layers=layers)), head=nn.Linear(4, 1))


@pytest.fixture(scope="module")
def learn():
    model = big_model()
    with torch.no_grad():
        dead = model.get_submodule(DEAD)
        dead.weight.zero_()
        dead.bias.zero_()
    x = torch.randn(16, 4)
    batches = [(x, x[:, :1])] * 3
    cbs = [ActivationStats(), GradientHealth(activations=True), MemoryStats(every=1)]
    learn = Learner((batches, batches[:1]), model, nn.functional.mse_loss, torch.optim.SGD, lr=1e-9, cbs=cbs)
    with learn.no_logging():
        learn.fit(1)
    return learn


REPORTS = {
    "activations": lambda learn, **options: learn.activation_stats.report(**options),
    "gradients": lambda learn, **options: learn.gradient_health.report(**options),
    "outputs": lambda learn, **options: learn.gradient_health.output_stats.report(**options),
}
reports = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)


def name_cells(text):
    """The first column of a table, without its head."""
    return [re.split("[│|]", line)[1] for line in text.splitlines() if line[:1] in ("│", "|")]


# ---- which rows


@reports
def test_of_many_rows_the_20_worst_are_shown_and_how_to_see_the_others(report, learn):
    everything = report(learn, worst=None)
    assert [row.name for row in everything] == [row.name for row in sorted(everything, key=order(learn))]
    usual = report(learn)
    assert len(usual) == 20
    assert f"the 20 worst of {len(everything)}; worst=None shows all" in in_terminal(usual, 120)
    weights = [row.weight for row in usual]
    assert weights == sorted(weights, reverse=True)
    assert weights == sorted((row.weight for row in everything), reverse=True)[:20]
    assert [row.name for row in report(learn, worst=3)] == [row.name for row in usual][:3]


def order(learn):
    names = [name for name, _ in learn.model.named_parameters()]
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return lambda row: names.index(row.name) if row.name in names else owners.index(row.name)


def test_few_rows_are_all_shown_in_the_order_of_the_model():
    stats = ActivationStats()
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)])
    nn.init.zeros_(model[20].weight)
    nn.init.zeros_(model[20].bias)
    learn = Learner([torch.ones(3, 2)], model, torch.mean, torch.optim.SGD, cbs=stats)
    with learn.no_logging():
        learn.fit(1)
    assert [row.name for row in stats.report()] == [str(i) for i in range(30)]
    assert stats.report(worst=1).rows[0].name == "20"
    assert "worst" not in in_terminal(stats.report())


def test_without_a_verdict_facts_decide_on_the_worst_layer_and_none_is_marked(learn):
    report = learn.activation_stats.report()
    assert report.rows[0].name == DEAD
    assert not any(row.mark for row in report)
    assert "look at" not in in_terminal(report, 200)


def test_layers_that_a_verdict_has_findings_about_come_first_with_the_codes(learn):
    names = [row.name for row in learn.activation_stats.report(worst=None)]
    found = [("layer.exploded", names[5]), ("layer.dead", DEAD), ("layer.dead", names[5]), ("loss.flat", "")]
    findings = tuple(Finding(code, "warning", layer=layer) for code, layer in found)
    verdict = Verdict("suspect", findings[0], findings, (), ())
    report = learn.activation_stats.report(verdict=verdict)
    marks = [(row.name, row.mark) for row in report]
    assert marks[:2] == [(names[5], "layer.exploded, layer.dead"), (DEAD, "layer.dead")]
    assert not any(mark for _, mark in marks[2:])
    assert "look at" in in_terminal(report, 200)
    outputs = learn.gradient_health.output_stats.report(verdict=verdict)
    assert [row.mark for row in outputs][:2] == ["layer.exploded, layer.dead", "layer.dead"]


def test_a_finding_about_a_layer_marks_each_of_its_calls_and_outputs():
    lstm = nn.LSTM(2, 2, batch_first=True)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.lstm = nn.Linear(2, 2), lstm

        def forward(self, x):
            return self.lstm(self.fc(self.fc(x)))[0]

    stats = ActivationStats()
    learn = Learner([torch.ones(3, 4, 2)], Twice(), torch.mean, torch.optim.SGD, cbs=stats)
    with learn.no_logging():
        learn.fit(1)
    findings = tuple(Finding("layer.dead", "error", layer=layer) for layer in ("fc", "lstm"))
    report = stats.report(verdict=Verdict("sick", findings[0], findings, (), ()))
    assert {module_of(row.name) for row in report} == {"fc", "lstm"}
    assert {row.mark for row in report} == {"layer.dead"}


def test_a_parameter_with_a_finding_comes_first_and_then_those_without_a_gradient():
    health = GradientHealth()
    model = Branch(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    learn = Learner([torch.ones(3, 2)] * 2, model, torch.mean, torch.optim.SGD, lr=1e-9, cbs=health)
    with learn.no_logging():
        learn.fit(1)
    found = Finding("grad.attenuated", "warning", param="b.bias"), Finding("loss.flat", "warning")
    verdict = Verdict("suspect", found[0], found, (), ())
    rows = health.report(worst=7, verdict=verdict).rows
    assert [row.name for row in rows[:2]] == ["b.bias", "unused"]
    assert [row.mark for row in rows] == ["grad.attenuated", *[""] * 6]
    assert not any(row.mark for row in health.report())
    assert health.report(worst=7).rows[0].name == "unused"
    assert "none" in in_terminal(health.report(), 80)


def test_gradients_without_a_finding_are_ordered_by_how_far_they_are_from_the_usual():
    health = GradientHealth()
    model = Branch(
        a=nn.Linear(2, 2, bias=False), b=nn.Linear(2, 2, bias=False), c=nn.Linear(2, 1, bias=False)
    )
    learn = Learner(
        [(torch.ones(3, 2), torch.ones(3, 1))], model, nn.functional.mse_loss, torch.optim.SGD, cbs=health
    )
    with learn.no_logging():
        learn.fit(1)
    norms = {row.name: row.last["norm"] for row in health.report(worst=None)}
    usual = sorted(norms.values())[1]
    by_hand = sorted(norms, key=lambda name: abs(math.log(norms[name] / usual)), reverse=True)
    assert [row.name for row in health.report(worst=3)] == by_hand


@reports
def test_a_depth_shows_the_worst_of_each_group(report, learn):
    rows = report(learn, depth=4, worst=None)
    everything = report(learn, worst=None)
    groups = {}
    for row in everything:
        groups.setdefault(tuple(row.module.split(".")[:4]), []).append(row)
    assert len(rows) == len(groups) == N + 1
    for row, group in zip(rows, groups.values(), strict=True):
        assert row.n == len(group)
        assert row.weight == max(other.weight for other in group)
        assert row.name in [other.name for other in group]
    assert "worst of" in in_terminal(rows, 120)
    assert len(report(learn, depth=1)) == 2


@reports
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"worst": 0}, ValueError),
        ({"worst": "all"}, TypeError),
        ({"worst": True}, TypeError),
        ({"depth": 0}, ValueError),
    ],
)
def test_an_invalid_choice_of_rows_is_refused(report, options, error, learn):
    with pytest.raises(error, match=next(iter(options))):
        report(learn, **options)


def test_the_memory_of_many_layers_shows_those_first_that_keep_most(learn):
    rows = learn.memory_stats.report().layers.rows
    everything = learn.memory_stats.layers().rows
    assert len(rows) == 20 < len(everything)
    kept = [row.kept_self for row in rows]
    assert kept == sorted((row.kept_self for row in everything), reverse=True)[:20]
    assert "the 20 largest of" in in_terminal(learn.memory_stats.report(), 100)
    tree = learn.memory_stats.report(worst=None).layers
    assert [row.name for row in tree] == [row.name for row in everything]
    assert len(learn.memory_stats.report(2).layers) == 4


def test_a_layer_that_was_not_called_in_the_last_batch_is_not_said_to_be_nan():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(x) if x[0, 0] else self.other(x)

    stats = ActivationStats()
    batches = [torch.zeros(3, 2), torch.ones(3, 2)]
    learn = Learner(batches, Sometimes(), torch.mean, torch.optim.SGD, cbs=stats)
    with learn.no_logging():
        learn.fit(1)
    assert stats.report()["other"].note == "not called in this batch"
    assert "NaN" not in in_terminal(stats.report())


# ---- how it fits


@reports
@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_can_be_told_apart_in_any_terminal(report, width, learn):
    for options in ({}, {"worst": None}, {"depth": 4}):
        of = report(learn, **options)
        text = in_terminal(of, width)
        assert max(map(len, text.splitlines())) <= width
        told = re.search(r"each name begins with (\S+)", text)
        begin = told[1] if told else ""
        names = [cell.strip() for cell in name_cells(text)]
        names = [name for name in names if name]  # a mark may take two lines
        everything = [row.name for row in report(learn, worst=None)]
        for name, row in zip(names, of, strict=True):
            end = name.removeprefix("…")
            assert row.name.endswith(end)
            assert name == row.name.removeprefix(begin) or len(name) >= 24
            assert [other for other in everything if other.endswith(end)] == [
                row.name
            ] or begin + name == row.name
        assert re.search("norm|std|look at|note", text), "no other column is left"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_column_of_names_has_24_columns_of_the_terminal_or_its_content(width, learn):
    cells = name_cells(in_terminal(learn.activation_stats.report(), width))
    content = max(len(cell.strip()) for cell in cells)
    assert all(len(cell) - 2 == content for cell in cells)
    assert content >= 24


def test_all_names_are_whole_and_all_columns_there_if_there_is_room(learn):
    text = in_terminal(learn.activation_stats.report(worst=None), 200)
    assert all(row.name in text for row in learn.activation_stats.report(worst=None))
    assert all(head in text for head in ("type", "output", "mean", "std", "near zero", "trend"))
    assert "each name begins" not in text


class Row:
    def __init__(self, name, number):
        self.name, self.number = name, number


def drawn(names, width, **kwargs):
    rows = [Row(name, i) for i, name in enumerate(names)]
    columns = [Column("first", lambda row: f"{row.number}"), Column("second", lambda row: f"{row.number}", 1)]
    table = fitted(rows, names, columns, Console(width=width).options, **kwargs)
    return table, [str(cell) for cell in table.columns[0].cells]


def test_numbers_are_left_out_before_names_are_cut():
    names = ["a" * 23 + "x", "b" * 24]
    assert [len(drawn(names, width)[0].columns) for width in (45, 44, 36, 35)] == [3, 2, 2, 1]
    assert drawn(names, 35)[1] == names


def test_what_all_names_begin_with_is_left_out_before_they_are_cut():
    names = ["a.long.beginning.for.all." + end for end in ("layer.0.attention", "layer.1.attention")]
    table, cells = drawn(names, 40)
    assert cells == ["0.attention", "1.attention"]
    assert str(table.caption) == "each name begins with a.long.beginning.for.all.layer."


def test_names_are_cut_from_the_left_and_only_as_far_as_they_stay_apart():
    ends = ["attention_output_projection_" + c * 4 for c in "xy"]
    names = ["zero." + ends[0], "one." + ends[1], "x"]
    _, cells = drawn(names, 28)
    assert cells == ["…_output_projection_xxxx", "…_output_projection_yyyy", "x"]
    names = [f"layer{i}." + "same_" * 8 for i in range(3)]
    for width in (60, 50, 47):
        assert len(set(drawn(names, width)[1])) == 3


def test_a_single_name_is_told_apart_from_those_that_are_not_shown():
    name, other = "blocks.3.a_rather_long_attention_name.dense", "blocks.4.a_rather_long_attention_name.dense"
    _, (cell,) = drawn([name], 52, among=[other])
    assert cell.endswith("3.a_rather_long_attention_name.dense")


def test_names_of_wide_letters_are_cut_to_what_fits():
    _, cells = drawn(["注意" * 20, "力层" * 20], 30)
    assert all(cell.startswith("…") for cell in cells)
    table, _ = drawn(["注意" * 20, "力层" * 20], 30)
    assert max(map(len, in_terminal(table, 30).splitlines())) <= 30


def test_a_summary_leaves_out_numbers_before_it_cuts_names():
    for width, heads in ((60, "layer params"), (100, "layer type output params trained mult-adds")):
        text = in_terminal(module_summary(big_model(), torch.ones(2, 4)), width)
        assert max(map(len, text.splitlines())) <= width
        assert all(head in text.splitlines()[0] for head in heads.split())
        assert "self_attention" in text


def test_a_summary_leaves_out_numbers_before_it_wraps_names():
    name = "layer_normalization_before_output"
    inner = nn.Sequential(OrderedDict({name: nn.Linear(4, 4)}))
    model = nn.Sequential(OrderedDict(encoder=inner))
    assert f"  {name} " in in_terminal(module_summary(model, torch.ones(2, 4)), 80)


def test_marks_are_the_codes_of_a_verdicts_findings_by_layer_the_worst_first():
    findings = [
        Finding("grad.nonfinite", "error", layer="fc", param="fc.weight"),
        Finding("loss.flat", "warning"),
        Finding("layer.dead", "warning", layer="relu"),
        Finding("layer.dead", "info", layer="fc"),
        Finding("layer.dead", "info", layer="fc"),
    ]
    verdict = Verdict("sick", findings[0], tuple(findings), (), ())
    marks = marks_of(verdict, "layer")
    assert marks == {"fc": Mark(5, "grad.nonfinite, layer.dead"), "relu": Mark(3, "layer.dead")}
    assert marks_of(verdict, "param") == {"fc.weight": Mark(5, "grad.nonfinite")}
    assert marks_of(None, "layer") == {}


def test_a_code_in_a_report_is_not_broken_within_a_word():
    cells = Column("look at", lambda row: "grad.attenuated", is_text=True), Column("n", lambda row: "1" * 40)
    table = fitted([None], ["fc"], cells, Console(width=50).options)
    assert "grad.attenuated" in in_terminal(table, 50)


@pytest.mark.parametrize("callback", [ActivationStats, GradientHealth])
def test_a_report_of_nothing_says_so_and_a_wrong_verdict_is_refused(callback):
    assert str(callback().report()).startswith("nothing is recorded, no ")
    with pytest.raises(TypeError, match=r"verdict must be a Verdict, .* got 'sick'"):
        callback().report(verdict="sick")
