"""attn.logits: logits of attention before the softmax, in each way to write attention, and when they grow."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb.diagnosis.faults.model.attention_logits import GrowingLogits
from hookcb.diagnosis.measurements.operations import Operations, OpProbe
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.measurements.test_operations import HEADS, T, numbers, qkv


def seen_of(forward):
    """The largest logit of each call of attention in this forward."""
    operations, fault = Operations(), GrowingLogits()
    operations.listeners = [fault]
    with OpProbe(operations._see):
        forward()
    fault.tell(Run())
    return [round(x, 3) for _, x in fault.numbers.get("", [])]


def largest(q, k, visible, scale):
    scores = q.detach().double() @ k.detach().double().transpose(-1, -2) * scale
    return pytest.approx(float(scores.masked_fill(~visible, -math.inf).amax()), abs=2e-3)


CAUSAL = torch.ones(T, T).tril().bool()


@pytest.mark.parametrize("form", ["causal", "bool", "added", "written", "scaled"])
def test_the_largest_logit_is_that_before_the_softmax_among_visible_keys(form):
    q, k, v = qkv()
    mask, scale = torch.where(CAUSAL, 0.0, -1e4), q.shape[-1] ** -0.5
    forwards = {
        "causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "bool": lambda: F.scaled_dot_product_attention(q, k, v, CAUSAL),
        "added": lambda: F.scaled_dot_product_attention(q, k, v, mask),
        "written": lambda: (q @ k.mT * scale + mask).softmax(-1) @ v,
        "scaled": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=3.0),
    }
    assert seen_of(forwards[form]) == [largest(q, k, CAUSAL, 3.0 if form == "scaled" else scale)]


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_module_of_torch_is_seen_whichever_way_it_computes(need_weights):
    torch.manual_seed(0)
    attn, x = nn.MultiheadAttention(8, HEADS, batch_first=True), numbers(2, T, 8)
    q, k, _ = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).unflatten(-1, (3, HEADS, 2)).unbind(2)
    (seen,) = seen_of(lambda: attn(x, x, x, need_weights=need_weights))
    everywhere = torch.ones(T, T, dtype=torch.bool)
    assert seen == largest(q.transpose(1, 2), k.transpose(1, 2), everywhere, 1 / math.sqrt(2))


def test_a_softmax_over_experts_or_classes_is_no_attention():
    gate, x = nn.Linear(8, 5), numbers(2, T, 8)
    assert seen_of(lambda: gate(x * 1e4).softmax(-1)) == []


# ---- when they grow

STEPS = [0, 1, 2, 5, 19, 38, 76, 152, 304]


def judged(values):
    """Severity, limit and step of what is found of the logits at these steps."""
    run = Run()
    run.measured(Operations).has_attention = True
    run.measured(GrowingLogits).numbers = {"attn": list(zip(STEPS, values, strict=True))}
    results = run.measured(GrowingLogits).findings(run)
    return [(x.severity, x.limit, x.step) for x in results if not isinstance(x, Passed)]


GROWING = [0.1, 0.1, 0.1, 0.3, 8, 20, 45, 110, 240]


def test_logits_that_grow_are_a_note_and_a_warning_above_1000():
    assert judged(GROWING) == [("info", 100.0, 76)]
    assert judged([10 * x for x in GROWING]) == [("warning", 1000.0, 76)]


def test_the_largest_logit_of_all_ranks_counts():
    run = Run()
    run.measured(Operations).has_attention = True
    fault, other = run.measured(GrowingLogits), GrowingLogits()
    fault.numbers = {"attn": [(step, 1.0) for step in STEPS]}
    other.numbers = {"attn": list(zip(STEPS, GROWING, strict=True))}
    fault.merge(run, [fault.state(run), other.state(run)], 0)
    (found,) = fault.findings(run)
    assert (found.layer, found.value) == ("attn", 240)


@pytest.mark.parametrize(
    "values",
    [
        [300.0] * 9,  # large, and as they were
        [0.1, 0.1, 0.1, 0.3, 30, 120, 200, 220, 230],  # they level off
        [0.1, 0.1, 0.1, 0.3, 8, 20, 45, 300, 240],
        [x / 3 for x in GROWING],  # small
        [*GROWING[:6], 8.0, 2400.0, 1e5],  # everything diverges
        [*GROWING[:6], math.nan, math.nan, math.inf],
    ],
)
def test_logits_that_are_small_or_do_not_grow_are_no_finding(values):
    assert judged(values) == []


def test_logits_of_one_attention_that_grow_while_all_others_stay_are_told_however_fast():
    steps, calm = [76, 150, 203, 275, 372, 503], [4.0, 6.0, 8.0, 8.0, 8.0, 8.0]
    fast = [4.0, 6.0, 8.0, 8.0, 50.0, 2900.0]
    for others, expected in ((calm, ["warning"]), ([2 * x for x in fast], []), (None, [])):
        run = Run()
        run.measured(Operations).has_attention = True
        of_layers = {"first": fast} | ({"second": others} if others else {})
        run.measured(GrowingLogits).numbers = {
            k: list(zip(steps, x, strict=True)) for k, x in of_layers.items()
        }
        found = [x for x in run.measured(GrowingLogits).findings(run) if not isinstance(x, Passed)]
        assert [x.severity for x in found] == expected
        assert all("from 8 at step 275 to 2,900 at step 503" in x.message for x in found)


def test_it_asks_for_more_looks_than_masks_need_and_is_not_ruled_out_unseen():
    fault = GrowingLogits()
    assert not fault.is_under_way
    (found,) = fault.findings(Run(reasons={"attention": Skipped("it is hidden")}))
    assert (fault.code, found) == ("attn.logits", Skipped("it is hidden"))
