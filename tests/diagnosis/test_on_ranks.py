"""Evidence and findings of several ranks, which are threads here."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hookcb import Finding
from hookcb.core.ranks import ALONE, Ranks
from hookcb.diagnosis.fault import findings_of
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.on_ranks import (
    compare_batches,
    findings_of_all,
    keep_losses,
    share_inputs,
    share_losses,
)
from hookcb.diagnosis.run import Observation, Run, Series
from hookcb.diagnosis.verdict import Gap
from tests.diagnosis.checks.support import measured


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
    return Run(loss=Series.of(range(len(values)), values), n_batches=len(values), **more)


def test_losses_of_each_rank_are_kept_for_pages():
    evidences = [losses(*[float(rank)] * 250) for rank in range(3)]
    on_ranks(keep_losses, evidences)
    for evidence in evidences:
        assert [set(own.values) for own in evidence.losses_of_ranks] == [{0.0}, {1.0}, {2.0}]
        assert all(50 <= len(own) <= 100 for own in evidence.losses_of_ranks)


def test_losses_are_averaged():
    one, other = shared(losses(1.0, 2.0), losses(3.0, 0.0))
    assert one.loss == other.loss == Series([0, 1], [2.0, 1.0])


def test_a_run_is_judged_anew_after_it_was_averaged():
    run = measured(losses(*[2.3] * 60, sources={"loss"}), Loss, kind="mse")
    judge(run)
    assert findings_of("loss.flat", run)
    run.loss = Series.of(range(60), [2.3 - 0.01 * i for i in range(60)])
    judge(run)
    assert not findings_of("loss.flat", run)


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
    ranks = shared(*(measured(losses(1.0), Loss, constant=x, guess=x) for x in numbers))
    (one, other) = (run.measured(Loss) for run in ranks)
    for number in (one.constant, one.guess, other.constant, other.guess):
        assert number == pytest.approx(agreed, nan_ok=True)


def hashed(*inputs, targets=None, drawn=()):
    """Evidence of batches with these hashes, in one epoch."""
    targets = range(len(inputs)) if targets is None else targets
    return Run(batch_hashes=[list(zip(inputs, targets, strict=True))], random_states=list(drawn))


def compared(*evidences, is_replica=True):
    """Code, text and ranks of what is observed on each rank."""
    on_ranks(lambda evidence, ranks: compare_batches(evidence, ranks, is_replica), evidences)
    assert all(evidence.observed == evidences[0].observed for evidence in evidences)
    return [[(x.code, x.text, x.ranks) for x in evidence.observations] for evidence in evidences]


def test_ranks_with_the_same_batches_are_named():
    one, other = compared(*(hashed(1, 2, 3, 4) for _ in range(2)))
    assert one == other
    assert one[0][1].startswith("The inputs of ranks 0, 1 are the same in each of the first 4 batches")
    ((code, text, ranks),) = compared(hashed(1, 2, 3, 4), hashed(9, 2, 3, 4), hashed(1, 2, 3, 4))[0]
    assert (code, ranks) == ("data.duplicated", (0, 2))
    assert "The inputs of ranks 0, 2 are" in text


def test_ranks_with_batches_of_their_own_are_fine():
    evidence = hashed(1, 2, 3, 4)
    assert compared(evidence, hashed(1, 2, 3, 5)) == [[], []]
    assert "batches of all ranks" in evidence.observed


@pytest.mark.parametrize("n", [0, 3])
def test_few_batches_are_not_compared(n):
    evidence = hashed(1, 2, 3, 4)
    assert compared(evidence, hashed(*range(n))) == [[], []]
    assert not evidence.observed
    assert "not compared" in evidence.missing["batches of all ranks"]


def test_ranks_that_share_a_model_may_share_batches():
    assert compared(*(hashed(1, 2, 3, 4) for _ in range(2)), is_replica=False) == [[], []]


def test_inputs_without_tensors_are_unknown():
    assert compared(*(hashed(*[None] * 4) for _ in range(2))) == [[], []]


def test_a_rank_whose_batches_repeat_finds_it_itself():
    one, other = compared(hashed(1, 2, 3, 4), hashed(5, 6, 5, 6, targets=(0, 1, 0, 1)))
    assert one == []
    ((code, text, ranks),) = other
    assert (code, ranks) == ("data.repeated", (1,))
    assert "2 of the first 4 batches of an epoch have come before in it, on rank 1 of 2" in text


def test_a_batch_that_all_ranks_repeat_is_meant():
    assert compared(hashed(*[1] * 4, targets=[0] * 4), hashed(*[2] * 4, targets=[0] * 4)) == [[], []]


def test_the_same_inputs_with_other_targets_do_not_repeat():
    assert compared(hashed(1, 1, 1, 1), hashed(1, 2, 3, 4)) == [[], []]


def test_ranks_that_draw_the_same_numbers_are_named():
    one, _ = compared(*(hashed(n, n, n, n, drawn=(5, 6, 7, 8)) for n in range(2)))
    ((code, text, _),) = one
    assert code == "random.duplicated"
    assert text.startswith("Ranks 0, 1 draw the same random numbers in the forward")
    assert compared(hashed(drawn=(5, 6, 7, 8)), hashed(drawn=(5, 6, 7, 9))) == [[], []]
    assert compared(hashed(drawn=(5, 6, 7)), hashed(drawn=(5, 6, 7))) == [[], []]


def scaled(*rms):
    return Run(input_std=Series.of(range(len(rms)), rms), input_rms=Series.of(range(len(rms)), rms))


def test_inputs_are_compared_with_those_of_the_others():
    evidences = scaled(1.0, 1.0), scaled(1.0, 1.0), scaled(100.0, 100.0)
    on_ranks(share_inputs, evidences)
    assert [evidence.rms_of_others for evidence in evidences] == pytest.approx([10.0, 10.0, 1.0])
    merged = math.sqrt((1 + 1 + 1e4) / 3)
    assert all(evidence.input_std.values == pytest.approx([merged] * 2) for evidence in evidences)
    assert evidences[2].input_rms.values == [100.0, 100.0]


def test_inputs_that_are_unknown_are_not_compared():
    evidences = scaled(1.0), scaled()
    on_ranks(share_inputs, evidences)
    assert evidences[0].input_std.values == [1.0]
    assert math.isnan(evidences[0].rms_of_others)
    evidences = scaled(), scaled()
    on_ranks(share_inputs, evidences)
    assert math.isnan(evidences[0].rms_of_others)


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
    assert one.head.endswith("step 0  on ranks 1, 2 of 3")


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
