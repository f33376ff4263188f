"""Evidence and findings of several ranks, which are threads here."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hookcb import Finding
from hookcb.core.ranks import ALONE, Ranks
from hookcb.diagnosis.evidence import Evidence, Observation, Series
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.on_ranks import compare_inputs, findings_of_all, share_losses
from hookcb.diagnosis.verdict import Gap


class Meeting:
    """Where threads give an item each, and get those of all."""

    def __init__(self, world):
        self.items, self.barrier = [None] * world, threading.Barrier(world, timeout=20)
        self.n_meetings = 0

    def exchange(self, rank, item):
        self.items[rank] = item
        self.barrier.wait()
        items = list(self.items)
        self.n_meetings += rank == 0
        self.barrier.wait()
        return items


class ThreadRanks(Ranks):
    """Ranks of threads that meet."""

    def __init__(self, meeting, rank):
        super().__init__()
        self.meeting, self.rank, self.world = meeting, rank, len(meeting.items)

    def gather(self, item):
        return self.meeting.exchange(self.rank, item)

    def of_main(self, make):
        return self.gather(make())[0]

    def sum(self, values):
        return [math.fsum(xs) for xs in zip(*self.gather(list(values)), strict=True)]

    def max(self, values):
        return [max(xs) for xs in zip(*self.gather(list(values)), strict=True)]


def on_ranks(function, items):
    """What `function(item, ranks)` returns on each rank, and in how many collectives."""
    meeting = Meeting(len(items))
    ranks = [ThreadRanks(meeting, rank) for rank in range(len(items))]
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items, ranks)), meeting.n_meetings


def shared(*evidences):
    on_ranks(share_losses, evidences)
    return evidences


def losses(*values, **more):
    return Evidence(loss=Series.of(range(len(values)), values), n_batches=len(values), **more)


def test_losses_are_averaged():
    one, other = shared(losses(1.0, 2.0), losses(3.0, 0.0))
    assert one.loss == other.loss == Series([0, 1], [2.0, 1.0])


def test_losses_of_each_optimizer_are_averaged():
    one, other = shared(*(losses(1.0, losses={0: Series([0], [x]), 1: Series()}) for x in (1.0, 2.0)))
    assert one.losses == other.losses == {0: Series([0], [1.5]), 1: Series()}


def test_a_smoothed_loss_is_that_of_all_ranks():
    one, other = losses(*[1.0] * 20), losses(*[3.0] * 20)
    assert one.smooth_loss().values[-1] == 1.0
    shared(one, other)
    assert one.smooth_loss().values[-1] == 2.0


def test_ranks_with_other_batches_keep_their_losses():
    one, other = shared(losses(1.0, 2.0), losses(3.0))
    assert (one.loss.values, other.loss.values) == ([1.0, 2.0], [3.0])
    assert "different batches" in one.notes[0] == other.notes[0]


@pytest.mark.parametrize(
    ("numbers", "agreed"),
    [
        ((0.69, 0.68), 0.685),
        ((0.0, 0.0), 0.0),
        ((-2.0, -2.0), -2.0),
        ((0.69, 0.5), math.nan),
        ((0.69, math.nan), math.nan),
        ((math.nan, math.nan), math.nan),
    ],
)
def test_the_loss_of_a_constant_is_known_only_if_ranks_agree(numbers, agreed):
    one, other = shared(*(losses(1.0, constant=x, guess=x) for x in numbers))
    for number in (one.constant, one.guess, other.constant, other.guess):
        assert number == pytest.approx(agreed, nan_ok=True)


def inputs(*rms):
    return Evidence(
        input_std=Series.of(range(len(rms)), [1.0] * len(rms)), input_rms=Series.of(range(len(rms)), rms)
    )


def duplicated(*evidences, is_replica=True):
    """Text on ranks that have the same batches, "" if none have, None if they were not compared."""
    on_ranks(lambda evidence, ranks: compare_inputs(evidence, ranks, is_replica), evidences)
    for evidence in evidences:
        assert evidence.observations == evidences[0].observations
    if "batches of all ranks" not in evidences[0].observed:
        assert "not compared" in evidences[0].missing["batches of all ranks"]
        return None
    assert {x.code for x in evidences[0].observations} <= {"data.duplicated"}
    return "".join(x.text for x in evidences[0].observations)


def test_ranks_with_the_same_batches_are_named():
    assert "The inputs of ranks 0, 1 have" in duplicated(*(inputs(1.0, 2.0, 3.0, 4.0) for _ in range(2)))
    some = inputs(1.0, 2.0, 3.0, 4.0), inputs(9.0, 2.0, 3.0, 4.0), inputs(1.0, 2.0, 3.0, 4.0)
    assert "The inputs of ranks 0, 2 have" in duplicated(*some)


def test_ranks_with_batches_of_their_own_are_fine():
    assert duplicated(inputs(1.0, 2.0, 3.0, 4.0), inputs(1.0, 2.0, 3.0, 5.0)) == ""


@pytest.mark.parametrize("n", [0, 3])
def test_few_inputs_are_not_compared(n):
    assert duplicated(inputs(1.0, 2.0, 3.0, 4.0), inputs(*[1.0, 2.0, 3.0][:n])) is None


def test_ranks_that_share_a_model_may_share_batches():
    assert duplicated(*(inputs(1.0, 2.0, 3.0, 4.0) for _ in range(2)), is_replica=False) is None


def found(*findings, gaps=()):
    def function(own, ranks):
        return findings_of_all(own, gaps[ranks.rank] if gaps else [], ranks)

    results, n = on_ranks(function, findings)
    assert all(result == results[0] for result in results)
    return (*results[0], n)


def test_if_no_rank_has_found_anything_none_sends_findings():
    assert found([], [], []) == ([], [], 2)


def test_what_all_ranks_have_found_is_told_once():
    alike = [Finding("loss.flat", "warning", step=step, value=value) for step, value in ((9, 1.0), (8, 2.0))]
    (one,), _, _ = found([alike[0]], [alike[1]])
    assert (one.step, one.value, one.ranks) == (8, 2.0, ())


def test_what_some_ranks_have_found_names_them():
    finding = Finding("input.scale", "warning", step=0)
    (one,), _, _ = found([], [finding], [finding])
    assert one.ranks == (1, 2)
    assert one.head.endswith("step 0  on ranks 1, 2")


def test_the_worst_severity_counts():
    (one,), _, _ = found([Finding("loss.flat", "warning")], [Finding("loss.flat", "error")])
    assert one.severity == "error"


def test_a_rank_that_knows_the_layer_is_believed():
    of_nothing, of_layer = Finding("nonfinite.first", "error"), Finding("nonfinite.first", "error", layer="a")
    (one,), _, _ = found([of_nothing], [of_layer])
    assert (one.layer, one.ranks) == ("a", (1,))


def test_gaps_of_any_rank_are_told():
    gaps = [[Gap(("a", "b"), "no loss")], [Gap(("b", "c"), "a probe failed")]]
    findings, all_gaps, _ = found([], [], gaps=gaps)
    assert findings == []
    assert [str(gap) for gap in all_gaps] == [
        "not checked: a, b (no loss)",
        "not checked: c (on rank 1, a probe failed)",
    ]


def evidence(*observations):
    return losses(*[1.0] * 20, sources={"loss", "batch", "model"}, observations=list(observations))


def test_the_verdict_is_the_same_on_all_ranks_and_orders_causes_of_different_ranks():
    late = Observation("nonfinite.first", layer="head", step=5, text="The loss is nan.")
    early = Observation("input.nonfinite", step=5, text="The inputs contain NaN.")
    verdicts, _ = on_ranks(judge, [evidence(late), evidence(early)])
    assert verdicts[0] == verdicts[1]
    assert [(f.code, f.ranks, f.consequence_of) for f in verdicts[0].findings] == [
        ("input.nonfinite", (1,), ""),
        ("nonfinite.first", (0,), "input.nonfinite"),
    ]
    assert "on rank 1" in verdicts[0].headline
    assert verdicts[0].to_dict()["primary"]["ranks"] == [1]


def test_nothing_that_a_rank_has_found_is_ruled_out():
    faulty = evidence(Observation("input.nonfinite", step=5, text="The inputs contain NaN."))
    faulty.observed = {"inputs"}
    clean = evidence()
    clean.observed = {"inputs"}
    assert "NaN in the inputs" in judge(clean, ALONE).ruled_out
    verdicts, _ = on_ranks(judge, [clean, faulty])
    assert "NaN in the inputs" not in verdicts[0].ruled_out
