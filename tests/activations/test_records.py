"""Reading what was recorded: by layer, as a table, as a report, from a file."""

import math
import pickle
from pathlib import Path

import pytest
import torch
from fastcore.foundation import L
from torch import nn

from hookcb import ActivationRecords, ActivationStats, Callback, CancelFitException, Learner
from hookcb.activations.buffer import MAX_BATCHES, MAX_ELEMENTS
from hookcb.activations.stats import LAYER_STATS, take
from tests.activations.support import (
    NAN,
    STATS,
    Around,
    Puts,
    assert_same_hists,
    assert_same_readings,
    numbered,
    printed,
    randn,
    tags,
    watch,
)
from tests.support import Net, fit, in_turn, make_learner, spy


def of_net(n_train=3, n_valid=2, n_epoch=1, **kwargs):
    stats = ActivationStats(**{"include_paramless": True} | kwargs)
    fit(make_learner(n_train, n_valid, model=Net(), cbs=stats), n_epoch)
    return stats


NAMES = ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head", "stem#0", "stem#1"]


def test_the_names_of_statistics_are_told_in_order():
    assert LAYER_STATS == STATS


def test_what_is_read_is_lists_of_dicts_of_plain_numbers():
    stats = of_net(on_valid=True)
    assert sorted(stats.names) == NAMES
    for records, n in ((stats.stats, 3), (stats.valid_stats, 2)):
        assert isinstance(records, L)
        assert len(records) == n
        for record in records:
            assert len(record) == len(list(record)) == len(stats.names) == 7
            for one in record:
                assert tuple(one) == STATS
                assert {type(value) for value in one.values()} <= {int, float}
            assert {type(record.epoch), type(record.step)} == {int}
            assert isinstance(record.phase, str)
    assert isinstance(stats.stats[-1], type(stats.stats[0]))
    assert len(stats.stats[1:]) == 2


def test_a_layer_of_a_record_is_found_by_index_and_by_name():
    stats = of_net()
    assert "head" in stats.stats[0]
    assert "nothing" not in stats.stats[0]
    for record in stats.stats:
        for k, name in enumerate(stats.names):
            assert record[k] == record[name] == record[k - 7] == list(record)[k]
        for wrong in (7, -8):
            with pytest.raises(LookupError):
                record[wrong]
        with pytest.raises(LookupError, match="heat"):
            record["heat"]


READERS = {
    "layer_stats": lambda stats, layer: stats.layer_stats(layer),
    "series": lambda stats, layer: stats.series(layer, "max"),
    "hist": lambda stats, layer: stats.hist(layer),
    "hist_edges": lambda stats, layer: stats.hist_edges(layer),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_layer_is_given_by_index_name_slice_or_glob(read):
    stats = of_net(with_hist=True)

    def same(several, names):
        assert isinstance(several, L)
        assert [repr(one) for one in several] == [repr(read(stats, name)) for name in names]

    names = list(stats.names)
    for k, name in enumerate(names):
        assert repr(read(stats, k)) == repr(read(stats, k - 7)) == repr(read(stats, name))
    same(read(stats, slice(None)), names)
    same(read(stats, slice(1, 6, 2)), names[1:6:2])
    same(read(stats, slice(None, None, -1)), names[::-1])
    same(read(stats, slice(-2, None)), names[-2:])
    same(read(stats, "*"), names)
    same(read(stats, "blocks.*"), [name for name in names if name.startswith("blocks.")])
    same(read(stats, "hea?"), ["head"])


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_layer_that_is_not_there_is_named_with_what_there_is(read):
    stats = of_net(with_hist=True)
    for wrong, hint in (("haed", "did you mean 'head'"), ("conv.*", "blocks.0.0"), ("", "head")):
        with pytest.raises(LookupError, match=hint) as info:
            read(stats, wrong)
        assert repr(wrong) in str(info.value)
        assert "stem#1" in str(info.value)
    for wrong in (7, -8, 100):
        with pytest.raises(LookupError, match=str(wrong)):
            read(stats, wrong)


def test_a_stat_that_is_not_there_is_named_with_what_there_is():
    with pytest.raises((LookupError, ValueError), match="near_zero") as info:
        of_net().series("head", "near_zeros")
    assert "'near_zeros'" in str(info.value)


def test_series_have_one_float_a_record():
    stats = of_net(5)
    for name in stats.names:
        for stat in STATS:
            series = stats.series(name, stat)
            assert isinstance(series, list)
            assert series == [record[name][stat] for record in stats.stats]
            assert {type(value) for value in series} == {float}
        three = stats.layer_stats(name)
        assert isinstance(three, L)
        assert list(three) == [stats.series(name, stat) for stat in ("mean", "std", "near_zero")]
    assert [len(three) for three in stats.layer_stats("*")] == [3] * 7


def test_nothing_recorded_reads_as_nothing():
    for stats in (ActivationStats(), ActivationStats(True, on_valid=True)):
        for _ in range(2):  # before a fit, and after one that ends before its first batch
            assert list(stats.names) == list(stats.stats) == list(stats.valid_stats) == stats.table() == []
            assert isinstance(stats.stats, L)
            assert isinstance(printed(stats.report()), str)
            with pytest.raises(LookupError, match="head"):
                stats.series("head", "mean")
            if not hasattr(stats, "learn"):
                stop = spy([], "stop", {("before_train", 0): CancelFitException()})
                fit(make_learner(cbs=[stats, stop]))


# ---- names that look like something else


ODD_NAMES = ["a[b]", "[red]", "[/red]", "[/]", "[link=x]", "*", "?", "[0]", "0", "-1", "a b", "blau-grün"]
ODD_NAMES += ["{}", "%s", ":warning:"]


def oddly_named():
    model = Around(Puts([(randn(5), {"[/bold]": randn(3) + 7, "[!a]": None})]))
    for k, name in enumerate(ODD_NAMES):
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.bias, 100.0 * k)
        model.add_module(name, layer)

    def forward(x):
        for name in ODD_NAMES:
            getattr(model, name)(x)
        return Around.forward(model, x)

    model.forward = forward
    stats = ActivationStats(modules=lambda m: m is not model, with_hist=True)
    fit(Learner([torch.ones(3, 2)] * 2, model, torch.mean, torch.optim.SGD, lr=0.0, cbs=stats))
    return stats


@in_turn("name", ODD_NAMES)
def test_a_name_that_looks_like_a_glob_an_index_or_markup_is_a_name(name):
    stats = oddly_named()
    assert name in stats.names
    assert stats.series(name, "mean")[0] == pytest.approx(100 * ODD_NAMES.index(name), abs=5)
    assert len(stats.layer_stats(name)) == 3
    assert stats.hist(name).shape == (62, 2)
    assert stats.stats[0][name]["std"] == stats.series(name, "std")[0]
    assert name in printed(stats.report())


def test_paths_that_look_like_markup_or_globs_are_shown_and_found_too():
    stats = oddly_named()
    path = next(name for name in stats.names if "/bold" in name)
    assert stats.series("odd[0]", "nonfinite") == [0.0, 0.0]
    assert stats.series(path, "mean")[0] == pytest.approx(randn(3).mean().item() + 7, rel=1e-5)
    text = printed(stats.report(), width=200)
    assert "[/bold]" in text
    assert "odd[0]" in text
    assert "[!a]" in text
    assert any("[!a]" in path and kind == "NoneType" for path, kind in stats.left_out.items())


# ---- table


def test_a_table_has_one_row_for_each_number_and_its_fields_are_columns():
    stats = of_net(3, 2, n_epoch=2, on_valid=True)
    rows = stats.table()
    assert isinstance(rows, list)
    assert rows[0]._fields == ("record", "epoch", "step", "phase", "layer", "stat", "value")
    assert len(rows) == 10 * 7 * len(STATS)
    columns = {field: [row[k] for row in rows] for k, field in enumerate(rows[0]._fields)}
    assert sorted(set(columns["record"])) == list(range(10))
    assert {type(value) for value in columns["value"]} <= {int, float}
    in_order = [*stats.stats[:3], *stats.valid_stats[:2], *stats.stats[3:], *stats.valid_stats[2:]]
    for k, record in enumerate(in_order):
        of_record = [row for row in rows if row.record == k]
        assert {row[1:4] for row in of_record} == {(record.epoch, record.step, record.phase)}
        values = {(row.layer, row.stat): row.value for row in of_record}
        assert len(of_record) == len(values)
        assert values == {(name, stat): record[name][stat] for name in stats.names for stat in STATS}


def test_a_layer_that_did_not_fire_has_no_rows_and_one_of_nan_has():
    class Sometimes(Around):
        def forward(self, x):
            if x[0, 0] == 1:
                self.odd(x)
            return self.fc(x)

    stats = ActivationStats(modules=["odd", "fc"])
    fit(numbered(3, 0, stats, Sometimes(Puts([torch.full((5,), NAN)]))))
    rows = [(row.record, row.step, row.stat) for row in stats.table() if row.layer == "odd"]
    assert rows == [(1, 1, stat) for stat in STATS]
    assert len(stats.table()) == 4 * len(STATS)
    values = {row.stat: row.value for row in stats.table() if row.layer == "odd"}
    assert values["nonfinite"] == 5
    assert math.isnan(values["mean"])


# ---- report


def line_of(text, name):
    return next(line for line in text.splitlines() if name in line)


def test_a_report_tells_of_each_layer_its_type_and_the_shape_of_its_output():
    model = nn.Sequential()
    model.add_module("first", nn.Conv2d(3, 17, 3))
    model.add_module("second", nn.Flatten())
    model.add_module("third", nn.Linear(17 * 36, 13))
    stats = ActivationStats(include_paramless=True)
    batches = [randn(5, 3, 8, 8, seed=k) for k in range(9)]
    fit(Learner(batches, model, torch.mean, torch.optim.SGD, cbs=stats))
    text = printed(stats.report())
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())
    for name, kind, sizes in (
        ("first", "Conv2d", ("5", "17", "6")),
        ("second", "Flatten", ("5", "612")),
        ("third", "Linear", ("5", "13")),
    ):
        line = line_of(text, name)
        assert kind in line
        assert all(size in line for size in sizes)


@pytest.mark.parametrize(
    "outs",
    [
        [torch.full((3, 2), NAN)] * 3,
        [torch.full((3, 2), math.inf)] * 3,
        [torch.zeros(0, 2)] * 2,
        [torch.zeros(4)],
        [torch.tensor(3.0)] * 2,
        [randn(5) * 1e30, randn(5) * 1e-30, torch.full((2,), NAN), torch.zeros(3)],
        [torch.zeros(3, 2), torch.full((3, 2), -1e38)],
        [(None, "text")] * 2,
        [(None, randn(3))] * 150,
    ],
    ids=["nan", "inf", "empty", "zero", "zero_d", "all_kinds", "flat_then_far", "left_out", "long"],
)
def test_a_report_is_shown_whatever_was_recorded(outs):
    stats = watch(*outs)
    text = printed(stats.report())
    assert "odd" in text
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())
    assert not stats.left_out or "NoneType" in text
    assert printed(stats.report(), width=40)
    assert printed(stats.report(), width=250)


def test_a_report_notes_nan_as_a_fact_and_judges_nothing():
    good = [randn(50, seed=k) for k in range(4)]
    bad = [*good[:3], torch.full((50,), NAN)]
    dead = [torch.zeros(50)] * 4
    rows = [watch(*outs).report()["odd"] for outs in (good, bad, dead)]
    assert [row.note for row in rows] == ["", "50 NaN or inf", ""]
    assert [row.mark for row in rows] == ["", "", ""]
    assert [row.weight[1:] for row in rows[1:]] == [(50.0, 0.0), (0.0, 1.0)]


# ---- files


OPTIONS = [{}, {"with_hist": True, "on_valid": True}, {"keep": 4, "every": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_loaded_reads_as_what_was_saved(tmp_path, options):
    stats = of_net(9, 3, n_epoch=2, **options)
    file = tmp_path / "new" / "stats.pt"
    path = stats.save(str(file))
    assert path == file
    assert isinstance(path, Path)
    assert torch.load(path, weights_only=True)
    for where in (path, str(path)):
        loaded = ActivationStats.load(where)
        assert isinstance(loaded, ActivationRecords)
        assert_same_readings(loaded, stats)
        if "with_hist" in options:
            assert_same_hists(loaded, stats)
    with pytest.raises(LookupError, match="did you mean 'head'"):
        loaded.series("haed", "mean")
    if "with_hist" not in options:
        with pytest.raises(RuntimeError, match="with_hist=True"):
            loaded.hist(0)
    assert_same_readings(ActivationStats.load(loaded.save(tmp_path / "again.pt")), stats)


def test_what_is_odd_is_loaded_too(tmp_path):
    for stats in (oddly_named(), watch(*[torch.full((3,), NAN)] * 3, (None, "text")), ActivationStats()):
        loaded = ActivationStats.load(stats.save(tmp_path / "stats.pt"))
        assert_same_readings(loaded, stats)
        assert isinstance(repr(loaded), str)


def test_statistics_that_another_version_lacks_or_has_besides_shift_no_others():
    stats = of_net(9, 3, with_hist=True, bins=4)
    state = stats.records.state()
    for store in state["stores"].values():
        stds = store["columns"].index("std")
        store["columns"][stds] = "gone"
        store["columns"].insert(0, "gone too")
        store["values"] = {name: torch.cat([x[:, :1], x], 1) for name, x in store["values"].items()}
    loaded = ActivationRecords.from_state(state)
    assert_same_hists(loaded, stats)
    for layer in stats.names:
        assert all(math.isnan(x) for x in loaded.series(layer, "std"))
        for stat in set(STATS) - {"std"}:
            assert repr(loaded.series(layer, stat)) == repr(stats.series(layer, stat))


def test_saving_in_mid_fit_writes_what_there_is_and_disturbs_nothing(tmp_path):
    def save(cb):
        cb.learn.activation_stats.save(tmp_path / f"{cb.train_iter}.pt")

    saver = Callback(after_batch=save)
    saver.order = 1000
    stats, plain = tags(), tags(name="plain")
    fit(numbered(4, 0, [stats, plain, saver]))
    assert [len(ActivationStats.load(tmp_path / f"{k}.pt").stats) for k in range(4)] == [1, 2, 3, 4]
    assert_same_readings(stats, plain)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil-was-here"),)


def test_a_foreign_or_truncated_file_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = of_net(with_hist=True).save(tmp_path / "good.pt").read_bytes()
    learn = make_learner()
    foreign = {
        "text.pt": b"hello, world\n" * 50,
        "empty.pt": b"",
        "half.pt": good[: len(good) // 2],
        "nearly.pt": good[:-1],
        "start.pt": good[:4],
        "evil.pt": pickle.dumps(Evil()),
        "evil_torch.pt": Evil(),
        "weights.pt": learn.model.state_dict(),
        "tensor.pt": torch.zeros(3),
        "list.pt": [1, 2],
        "none.pt": None,
        "dict.pt": {},
    }
    for name, what in foreign.items():
        Path(name).write_bytes(what) if isinstance(what, bytes) else torch.save(what, name)
    learn.save("learner.pt")
    for name in [*foreign, "learner.pt"]:
        with pytest.raises(ValueError, match=name):
            ActivationStats.load(tmp_path / name)
    assert not Path("evil-was-here").exists()
    with pytest.raises(FileNotFoundError, match="absent"):
        ActivationStats.load(tmp_path / "absent.pt")


@pytest.mark.parametrize(
    ("sample", "said"),
    [("auto", "above 8,192 elements: from 4,096"), (100, "from 100 elements of each output"), (None, "")],
)
def test_the_report_says_where_it_saw_a_sample_only(sample, said):
    stats = ActivationStats(sample=sample)
    model = nn.Linear(2, 70_000)
    fit(Learner([torch.ones(1, 2)], model, torch.mean, torch.optim.SGD, cbs=stats))
    assert said in printed(stats.report())
    assert ("elements" in printed(stats.report())) == bool(said)
    assert stats.records.sample == sample


# ---- without a callback


def test_records_are_made_read_saved_and_loaded_without_a_callback(tmp_path):
    records = ActivationRecords(with_hist=True, bins=4)
    for step in range(3):
        records.take("fc", torch.full((6,), float(step)), "Linear")
        records.take("pair", torch.ones(2), "Pair")
        records.take("pair", None, "Pair")
        records.end_batch("train", 0, step)
    assert records.names == ["fc", "pair#0"]
    assert records.left_out == {"pair#1": "NoneType"}
    assert records.series("fc", "mean") == [0.0, 1.0, 2.0]
    loaded = ActivationRecords.load(records.save(tmp_path / "records.pt"))
    assert_same_readings(loaded, records)
    assert_same_hists(loaded, records)
    loaded.take("fc", torch.full((6,), 3.0), "Linear")
    loaded.end_batch("train", 0, 3)
    assert loaded.series("fc", "mean") == [0.0, 1.0, 2.0, 3.0]
    assert loaded.hist_edges("fc").tolist() == [-1024.0, -(2.0**-10), 0.0, 2.0**-10, 1024.0]


def test_layers_of_different_shapes_are_named_in_the_order_of_their_first_record():
    records = ActivationRecords()
    for name, n in {"first": 3, "second": 4, "third": 3}.items():
        records.take(name, torch.ones(n), "Linear")
    records.end_batch("train", 0, 0)
    assert records.names == ["first", "second", "third"]


def test_a_dropped_batch_leaves_nothing():
    records = ActivationRecords()
    records.take("fc", torch.ones(3), "Linear")
    records.drop_batch()
    records.end_batch("train", 0, 0)
    assert records.names == list(records.stats) == []
    assert records.outputs == {}


@pytest.mark.parametrize("n", [10, 60_000, 70_000])
def test_outputs_wait_for_one_another_in_bounded_memory_and_each_keeps_its_numbers(n):
    records = ActivationRecords(sample=None)
    for step in range(150):
        records.take("fc", torch.full((n,), float(step)), "Linear")
        records.take("small", torch.tensor([float(step)]), "Linear")
        records.end_batch("train", 0, step)
        waiting = [w.output.elements.numel() for w in records.buffer._waiting]
        assert sum(waiting) <= MAX_ELEMENTS
        assert len(waiting) < 2 * MAX_BATCHES
    assert records.series("fc", "mean") == records.series("small", "mean") == list(map(float, range(150)))


@pytest.mark.parametrize("option", ["hook", "cpu", "gather", "modify"])
def test_options_without_a_use_are_refused(option):
    with pytest.raises(TypeError, match=f"ActivationStats takes no {option}=.*HookCallback"):
        ActivationStats(**{option: True})


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="phase must be 'train' or 'valid', got 'test'"):
        ActivationRecords().steps("test")


def test_samples_that_wait_share_one_block_of_memory():
    records, outputs = ActivationRecords(), torch.randn(60, 20_000)
    for i, x in enumerate(outputs):
        with torch.inference_mode(i % 2 == 0):
            records.take(f"{i}", x, "Linear")
    records.end_batch("train", epoch=0, step=0)
    waiting = [item.output.elements for item in records.buffer._waiting]
    assert len({x.untyped_storage().data_ptr() for x in waiting}) == 1
    assert all(torch.equal(kept, take(x, "auto")[0]) for kept, x in zip(waiting, outputs, strict=True))
    assert len(pickle.dumps(records)) < 200_000
