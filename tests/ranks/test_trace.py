"""All ranks take part in the same collectives, whatever their clocks, data and signals."""

import itertools

import pytest

from tests.ranks.support import launched, shared


def traced(tmp_path_factory, how, part="0/1", world=2, timeout=100):
    """Traces by callbacks: for each rank its collectives, and how its fit ended."""
    name = f"trace-{how}-{part.replace('/', '-of-')}-{world}"
    ranks = shared(
        tmp_path_factory,
        name,
        lambda folder: launched("trace_worker.py", folder, how, part, world=world, timeout=timeout),
        timeout=2 * timeout,
    )
    names = [key for key in ranks[0] if key not in ("exit", "log")]
    assert names, ranks[0]["log"][-2000:]
    return {key: [rank.get(key) for rank in ranks] for key in names}, [rank["exit"] for rank in ranks]


def differing(traces):
    """Callbacks with which ranks took part in different collectives, or ended differently; and where."""
    found = []
    for name, (first, *others) in traces.items():
        for rank, other in enumerate(others, 1):
            if other is None:
                found.append(f"{name}: rank {rank} did not get there")
                continue
            apart = [(a, b) for a, b in zip(first["ops"], other["ops"], strict=False) if a != b]
            if apart or len(first["ops"]) != len(other["ops"]) or first["ending"] != other["ending"]:
                found.append(f"{name}: {first['ending']}, rank {rank} {other['ending']}, {apart[:1]}")
    return found


def check(traces, codes):
    assert differing(traces) == []
    assert set(codes) == {0}
    wrong = {name: ranks[0]["text"] for name, ranks in traces.items() if ranks[0]["ending"] == "RankError"}
    assert wrong == {}
    return traces


def test_with_each_callback_all_ranks_take_part_in_the_same_collectives(tmp_path_factory):
    traces = check(*traced(tmp_path_factory, "alone"))
    assert len(traces) >= 20
    assert {ranks[0]["ending"] for ranks in traces.values()} <= {"ended", "KeyboardInterrupt"}
    plain = [op.split()[0] for op in traces["Callback"][0]["ops"]]
    assert plain.count("allreduce_") > 20  # DDP's own are seen, too


@pytest.mark.slow
@pytest.mark.parametrize(("how", "shape"), [("sharded,diagnosis", "float64[4, 14]"), ("loss", "float64[4]")])
def test_a_callback_that_communicates_when_its_own_rank_says_so_is_caught(tmp_path, how, shape):
    first, _ = launched("trace_worker.py", tmp_path / "x", how, "0/1")
    a, b = ((tmp_path / "x" / f"{rank}.ops").read_text().splitlines() for rank in range(2))
    looks = [[i for i, op in enumerate(ops) if shape in op] for ops in (a, b)]
    assert looks[0] != looks[1], first
    assert a != b


@pytest.mark.slow
def test_with_callbacks_more_and_sharded_ranks_take_part_in_the_same(tmp_path_factory):
    traces = check(*traced(tmp_path_factory, "parts,sharded", world=4))
    assert len(together(traces, 1)) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("how", "part"), [("pairs", "0/1"), ("pairs,sharded", "0/2")])
def test_with_callbacks_of_which_each_two_are_together_all_ranks_take_part_in_the_same(
    tmp_path_factory, how, part
):
    traces = check(*traced(tmp_path_factory, how, part, timeout=280))
    n = len(together(traces, 1))
    assert n >= 20
    if part == "0/1":
        assert len(together(traces, 2)) == n * (n - 1) // 2


def together(traces, n):
    """Which `n` callbacks were in a training together."""
    return {group for name in traces for group in itertools.combinations(sorted(name.split("-")), n)}


@pytest.mark.slow
def test_diagnose_looks_at_the_same_batches_on_sharded_ranks(tmp_path_factory):
    check(*traced(tmp_path_factory, "sharded,long"))
