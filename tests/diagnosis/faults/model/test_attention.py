"""Attention that looks at one place: attn.collapse and mask.blind, against entropies computed row by row."""

import math

import torch

from hookcb.diagnosis.faults.model.attention import BlindMask, CollapsedAttention, is_blind, low_heads
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.measurements.test_operations import HEADS, B, T, by_hand, entropy, numbers
from tests.support import in_turn

# ---- heads that look at one place


def test_the_share_of_low_heads_is_that_of_entropies_row_by_row():
    for seed in range(5):
        sharpness = 10 ** numbers(HEADS, 1, 1, seed=seed).abs().mul(2)
        weights = (numbers(B, HEADS, T, T, seed=seed) * sharpness).softmax(-1)
        assert low_heads(weights) == by_hand(weights)


@in_turn("n_low", [0, 1, 3, 4])
def test_heads_that_look_at_one_place_are_counted(n_low):
    weights = torch.full((B, HEADS, T, T), 1 / T)
    weights[:, :n_low] = torch.eye(T)
    assert low_heads(weights) == n_low / HEADS
    assert low_heads(weights.bfloat16()) == n_low / HEADS


def test_samples_and_heads_may_share_a_dimension():
    weights = torch.full((B * HEADS, T, T), 1 / T)
    weights[:2] = torch.eye(T)
    assert low_heads(weights) == 2 / (B * HEADS)


def test_the_limit_is_a_twentieth_of_the_entropy_of_looking_everywhere():
    """Entropy of rows with 1 - e on one key and the rest spread evenly over the others."""
    for e in (0.002, 0.005, 0.01, 0.02, 0.05):
        weights = torch.full((1, 1, 4, 16), e / 15)
        weights[..., 0] = 1 - e
        assert low_heads(weights) == float(entropy(weights[0, 0, 0].tolist()) < 0.05 * math.log(16))


def test_rows_without_any_key_do_not_count():
    weights = torch.full((B, HEADS, T, T), 1 / T)
    weights[:, :, 1:] = math.nan
    assert low_heads(weights) == 0
    weights[:, :3] = torch.eye(T)
    weights[:, :, 2:] = math.nan
    assert low_heads(weights) == 3 / 4


# ---- what follows


def judged(fault, numbers):
    """Findings of a fault on these numbers by layer, and whether it is ruled out without any."""
    run = Run()
    run.measured(Operations).has_attention = True
    run.measured(fault).numbers = numbers
    (found,) = run.measured(fault).findings(run)
    return [] if isinstance(found, Passed) else [(found.code, found.layer, found.step, found.value)]


def observations(*shares):
    return judged(CollapsedAttention, {"attn": [(10 * i, x) for i, x in enumerate(shares)]})


def test_attention_that_was_seldom_seen_is_not_ruled_out():
    for fault in (CollapsedAttention, BlindMask):
        (found,) = fault().findings(Run(reasons={"attention": Skipped("it is hidden")}))
        assert found == Skipped("it is hidden")


def test_heads_that_look_at_one_place_in_each_batch_are_told():
    assert observations(1.0, 0.75, 1.0) == [("attn.collapse", "attn", 0, 0.75)]
    assert observations(math.nan, 0.75, 1.0, 1.0) == [("attn.collapse", "attn", 10, 0.75)]


@in_turn("shares", [(), (1.0, 1.0), (1.0, 1.0, 0.5), (0.5, 0.5, 0.5), (math.nan,) * 5])
def test_half_of_the_heads_or_two_batches_are_no_finding(shares):
    assert observations(*shares) == []


# ---- masks


def test_queries_that_see_one_key_each_are_blind_but_sharp_ones_are_not():
    eye = torch.eye(T).expand(B, HEADS, T, T)
    assert is_blind(eye)
    assert is_blind(eye.flatten(0, 1))
    assert is_blind(eye.masked_fill(torch.arange(T)[:, None] == 0, 0))  # a query that sees nothing
    sharp = (numbers(B, HEADS, T, T) * 1e4).softmax(-1)
    assert int((sharp > 0).sum()) == B * HEADS * T  # of which each sees a key of its own
    assert not is_blind(sharp)
    assert not is_blind(numbers(B, HEADS, T, T).softmax(-1))
    assert not is_blind(
        numbers(B, HEADS, T, T).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf).softmax(-1)
    )
    assert not is_blind(torch.eye(T)[None])  # a single one may be sharp


def test_a_blind_layer_is_named_if_it_is_blind_in_each_batch():
    blind = {"a": [(0, 1.0), (1, 1.0), (2, 1.0)], "b": [(0, 1.0), (1, 0.0), (2, 1.0)], "c": [(0, 1.0)]}
    ((code, layer, step, _),) = judged(BlindMask, blind)
    assert (code, layer, step) == ("mask.blind", "a", 0)
