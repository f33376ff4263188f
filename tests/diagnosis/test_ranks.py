"""Runs and findings of several ranks, which are threads here."""

import math

import pytest

from hookcb import Finding
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.origin import Found, Origin
from hookcb.diagnosis.ranks import Together, findings_of_all
from hookcb.diagnosis.run import Run, Series
from hookcb.diagnosis.verdict import Gap
from tests.diagnosis.faults.ranks.support import merged, on_ranks, run_of_all
from tests.support import in_turn


def losses(*values, of_optimizers=None, guess=math.nan, **more):
    run = Run(loss=Series.of(range(len(values)), values), n_batches=len(values), **more)
    run.measured(Curves).losses = of_optimizers or {}
    loss = run.measured(Loss)
    loss.guess = loss.constant = guess
    return run


def test_losses_of_each_rank_are_kept_for_pages():
    for run in merged(*(losses(*[float(rank)] * 250) for rank in range(3))):
        of_ranks = run.measured(Loss).of_ranks
        assert [set(own.values) for own in of_ranks] == [{0.0}, {1.0}, {2.0}]
        assert all(50 <= len(own) <= 100 for own in of_ranks)


def test_losses_are_averaged_in_a_run_of_all_and_the_run_of_a_rank_stays_as_it_is():
    own = losses(1.0, 2.0, guess=0.69), losses(3.0, 0.0, guess=0.68)
    one, other = merged(*own)
    assert one.loss == other.loss == Series([0, 1], [2.0, 1.0])
    assert [run.loss.values for run in own] == [[1.0, 2.0], [3.0, 0.0]]
    assert [run.measured(Loss).guess for run in (one, *own)] == [pytest.approx(0.685), 0.69, 0.68]
    assert ([run.notes for run in own], one.notes) == ([[], []], ["2 ranks"])


def test_losses_of_each_optimizer_and_penalties_are_averaged():
    own = [losses(1.0, of_optimizers={0: Series([0], [x]), 1: Series()}) for x in (1.0, 2.0)]
    for x, run in enumerate(own):
        run.measured(Loss).penalty = Series([0], [float(x)])
    for run in merged(*own):
        assert run.measured(Curves).losses == {0: Series([0], [1.5]), 1: Series()}
        assert run.measured(Loss).penalty == Series([0], [0.5])


def test_a_smoothed_loss_is_that_of_all_ranks():
    own = losses(*[1.0] * 20), losses(*[3.0] * 20)
    assert own[0].smooth_loss().values[-1] == 1.0
    assert merged(*own)[0].smooth_loss().values[-1] == 2.0


def test_ranks_with_other_batches_keep_their_losses():
    one, other = merged(losses(1.0, 2.0, guess=1.0), losses(3.0, guess=1.0))
    assert (one.loss.values, other.loss.values) == ([1.0, 2.0], [3.0])
    assert "different batches" in one.notes[-1] == other.notes[-1]


@in_turn(
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
    for run in merged(*(losses(1.0, guess=x) for x in numbers)):
        loss = run.measured(Loss)
        assert [loss.constant, loss.guess] == pytest.approx([agreed] * 2, nan_ok=True)


def test_a_part_that_fails_on_a_rank_is_not_merged_and_does_not_keep_others_waiting():
    class Weak(Measurement):
        merged = False

        def state(self, run):
            return 1 / len(run.loss)

        def merge(self, run, of_ranks, rank):
            self.merged = True

    def run_of(run, ranks):
        run.measured(Weak)
        return run_of_all(run, ranks)

    (one, other), n = on_ranks(run_of, [losses(1.0), Run()])
    assert n == 1
    assert [run.measured(Weak).merged for run in (one, other)] == [False, False]
    assert (one.reasons.keys(), other.reasons.keys()) == (set(), {"Weak"})


def scaled(*rms):
    run = Run()
    run.measured(Inputs).std, run.measured(Inputs).rms = (Series.of(range(len(rms)), rms) for _ in range(2))
    return run


def test_inputs_are_compared_with_those_of_the_others():
    runs = merged(scaled(1.0, 1.0), scaled(1.0, 1.0), scaled(100.0, 100.0))
    inputs = [run.measured(Inputs) for run in runs]
    assert [x.rms_of_others for x in inputs] == pytest.approx([10.0, 10.0, 1.0])
    root = math.sqrt((1 + 1 + 1e4) / 3)
    assert all(x.std.values == pytest.approx([root] * 2) for x in inputs)
    assert inputs[2].rms.values == [100.0, 100.0]


def test_inputs_that_are_unknown_are_not_compared():
    inputs = merged(scaled(1.0), scaled())[0].measured(Inputs)
    assert inputs.std.values == [1.0]
    assert math.isnan(inputs.rms_of_others)
    assert math.isnan(merged(scaled(), scaled())[0].measured(Inputs).rms_of_others)


def found(*findings, gaps=()):
    def function(own, ranks):
        of_ranks = Together(ranks).results(own, gaps[ranks.rank] if gaps else [])
        return findings_of_all(of_ranks, ranks.world)

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


def test_of_findings_in_the_same_step_that_of_a_rank_which_it_is_about_is_told():
    on_0, on_1 = (Finding("loss.spike", "info", step=9, message=x, ranks=(1,)) for x in ("seen", "known"))
    (one,), _, _ = found([on_0], [on_1])
    assert (one.message, one.ranks) == ("known", (1,))


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


def evidence(**origin):
    run = losses(*[1.0] * 20, sources={"loss", "batch", "model"})
    vars(run.measured(Origin)).update(origin)
    return run


def judged(run, ranks):
    return judge(run, Together(ranks))


def test_the_verdict_is_the_same_on_all_ranks_and_orders_causes_of_different_ranks():
    late = evidence(found=Found("The loss is nan.", "head"), step=5, is_sought=True)
    early = evidence(found=Found(n_inputs=1), step=5, is_sought=True)
    verdicts, _ = on_ranks(judged, [late, early])
    assert verdicts[0] == verdicts[1]
    assert [(f.code, f.ranks, f.consequence_of) for f in verdicts[0].findings] == [
        ("input.nonfinite", (1,), ""),
        ("nonfinite.first", (0,), "input.nonfinite"),
    ]
    assert "on rank 1" in verdicts[0].headline
    assert verdicts[0].to_dict()["primary"]["ranks"] == [1]


def test_nothing_that_a_rank_has_found_is_ruled_out(monkeypatch):
    monkeypatch.setattr("hookcb.diagnosis.judge.MIN_CHECKED", 0)
    faulty, clean = evidence(found=Found(n_inputs=1), step=5, is_sought=True), evidence()
    for run in (faulty, clean):
        run.measured(Inputs).nonfinite = Series([0], [0.0])
    assert "NaN in the inputs" in judge(clean).ruled_out
    verdicts, _ = on_ranks(judged, [clean, faulty])
    assert "NaN in the inputs" not in verdicts[0].ruled_out
