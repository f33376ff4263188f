"""Of two ranks one logs, or each into a file of its own."""

import pytest

from hookcb.loggers import CSVLogger, JSONLLogger, Log, TensorBoardLogger
from tests.profiling.support import facts_of_ranks

pytestmark = pytest.mark.slow  # a launch of two ranks
EACH_FIT = [0, 2, 4, 5]  # the last is that of the epoch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return facts_of_ranks(tmp_path_factory)


def test_rank_0_logs_each_step_once(ranks):
    files = ranks[0]["logs"]["files"]
    assert files["main.jsonl"] == 2 * len(EACH_FIT)
    assert files["main.csv"] == 1 + 2 * (3 * 2 + 5)
    assert [one["logs"]["kept"] for one in ranks] == [2 * EACH_FIT, []]


def test_of_all_ranks_each_has_a_file_also_in_a_second_fit(ranks):
    files = ranks[0]["logs"]["files"]
    names = ["all.jsonl", "all.rank1.jsonl", "given.jsonl", "given.rank1.jsonl"]
    assert [files[name] for name in names] == [8] * 4
    assert set(files) == {*names, "main.jsonl", "main.csv", "lacking.jsonl"}


def test_the_other_ranks_may_lack_it(ranks):
    assert ranks[0]["logs"]["files"]["lacking.jsonl"] == len(EACH_FIT)
    assert ranks[0]["logs"]["valid_loss"] == ranks[1]["logs"]["valid_loss"]


def test_of_a_watch_rank_0_logs_too(ranks):
    assert ranks[1]["log_of_a_watch"]["files"] == {"run.jsonl": 7}


def test_another_word_for_ranks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ranks must be 'main' or 'all', got 'each'"):
        Log(tmp_path / "x.jsonl", ranks="each")


def test_a_logger_has_another_file_on_another_rank(tmp_path):
    assert JSONLLogger(tmp_path / "a.b.jsonl").of_rank(3).path.name == "a.b.rank3.jsonl"
    assert CSVLogger(tmp_path / "a.csv").of_rank(0).path.name == "a.csv"
    pytest.importorskip("tensorboard")
    assert TensorBoardLogger(tmp_path / "run").of_rank(2).folder == tmp_path / "run" / "rank2"
