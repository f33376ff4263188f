"""Tables and reports of memory."""

import pytest

from hookcb.core.text import format_bytes
from hookcb.profiling.memory.callback import MemoryStats
from tests.profiling.memory.support import Blocks, batches_for, learner_for, mlp, watch
from tests.support import in_terminal


@pytest.fixture(scope="module")
def stats():
    return watch(Blocks(), batches_for(5), every=2)


def test_rows_come_in_the_order_of_the_model(stats):
    rows = stats.layers()
    assert [row.name for row in rows][:5] == ["", "stem", "head", "blocks", "blocks.0"]
    assert [row.depth for row in rows][:5] == [0, 1, 1, 1, 2]
    assert len(rows) == len(rows.rows) == 24
    assert rows["blocks.0"].type == "Block"
    assert rows.totals == stats.totals


def test_a_name_that_is_not_there_says_what_is(stats):
    message = "no watched layer is named 'body'; there are stem, head, blocks"
    with pytest.raises(LookupError, match=message):
        stats.layers()["body"]


def test_the_table_shows_the_tree(stats, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = str(stats.layers()).splitlines()
    assert "memory in step 4, the fullest of 3 watched batches" in lines[0]
    assert [head.strip() for head in lines[2].strip("┃").split("┃")] == [
        "layer",
        "type",
        "kept",
        "self",
        "allocated",
        "peak",
        "output",
        "params",
        "grads",
    ]  # SGD keeps nothing
    cells = {line.split("│")[1].rstrip(): line for line in lines if line.startswith("│")}
    assert " Blocks" in cells
    assert "       fc" in cells  # inside of a block, inside of the list, inside of the model
    assert "     0" in cells


def test_a_narrow_terminal_shows_what_matters_most(stats):
    text = in_terminal(stats.layers(), 80)
    assert "kept" in text
    assert "allocated" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_deeper_levels_are_folded_into_those_shown(stats):
    whole, folded = stats.layers(), stats.layers(1)
    assert [row.name for row in folded] == ["", "stem", "head", "blocks"]
    for column in ("kept_self", "param_bytes", "grad_bytes"):
        assert sum(getattr(x, column) for x in folded) == sum(getattr(x, column) for x in whole)
    assert folded["blocks"].kept == folded["blocks"].kept_self == whole["blocks"].kept


def test_the_report_says_what_it_comes_to(stats):
    text = str(stats.report(2))
    totals = stats.totals
    assert f"kept for the backward: {format_bytes(totals.kept)}" in text
    assert f"{format_bytes(totals.kept_by_loss)} of it by the loss" in text
    assert "optimizer none" in text
    assert "memory growth: 0 bytes per step" in text
    advice = stats.advice[0]
    bytes_less = f"frees {format_bytes(advice.frees)}, lowers the peak by {format_bytes(advice.lowers)}"
    assert text.splitlines()[-2:] == ["to checkpoint first:", f"  blocks.* (4 × Block) {bytes_less}"]


def test_where_checkpointing_would_free_nothing_it_says_so():
    assert str(watch(mlp()).report()).endswith("to checkpoint: nothing that would free much")


def test_before_a_batch_was_watched_the_error_says_which_would_be():
    stats = MemoryStats()
    for read in (stats.layers, stats.report, lambda: stats.totals, lambda: stats.advice, lambda: stats.notes):
        with pytest.raises(
            RuntimeError, match="no batch was watched; batches 0, 50, 100 … of a training would"
        ):
            read()
    assert stats.growth().slope == 0
    assert stats.coverage.hooked == ()


def test_what_cannot_be_is_refused_before_training():
    with pytest.raises(
        ValueError, match="every must be a whole number of batches, 1 or more, or None, got 0"
    ):
        MemoryStats(every=0)
    with pytest.raises(TypeError, match="snapshot is 3; give the path of a file to write, or None"):
        MemoryStats(snapshot=3)


def test_each_watched_batch_is_looked_at_and_no_other():
    stats = watch(mlp(), batches_for(5), every=2, n_epoch=3)
    assert (stats.n_batches, stats.n_skipped) == (8, 7)
    assert str(stats.coverage) == "4 of 4 layers seen in 8 batches, 7 batches not looked at"
    assert learner_for(mlp()).cbs  # the default callbacks stay


def test_the_fullest_batch_is_told_of():
    small, large = batches_for(3, bs=2), batches_for(1, bs=20)
    stats = watch(mlp(), [*small, *large, *small])
    assert stats.layers()["1"].kept == 20 * 5 * 4
    assert "step 3, the fullest of 7" in str(stats.layers())
