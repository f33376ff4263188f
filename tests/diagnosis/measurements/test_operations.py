"""Attention and embeddings as they are seen inside a forward, against entropies computed row by row."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb.diagnosis.faults.model.attention import low_heads
from hookcb.diagnosis.measurements.operations import Operations, OpProbe
from hookcb.diagnosis.run import Run
from tests.support import along, in_turn

B, HEADS, T, D = 2, 4, 6, 8
SHARP = torch.tensor([1.0, 1.0, 400.0, 400.0]).view(HEADS, 1, 1)  # of heads, by which scores grow


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(t=T, s=None, kv_heads=HEADS):
    q, k, v = (
        numbers(B, HEADS, t, D),
        numbers(B, kv_heads, s or t, D, seed=1),
        numbers(B, kv_heads, s or t, D),
    )
    return (q * SHARP).requires_grad_(), k.requires_grad_(), v.requires_grad_()


def entropy(row):
    return -sum(p * math.log(p) for p in row if p > 0)


def by_hand(weights):
    """Share of heads with a mean entropy, over samples and queries, below 5 % of ln T."""
    n_samples, n_heads, _, n_keys = weights.shape
    n_low = 0
    for h in range(n_heads):
        rows = [row for b in range(n_samples) for row in weights[b, h].tolist() if not math.isnan(row[0])]
        n_low += sum(entropy(row) for row in rows) / len(rows) < 0.05 * math.log(n_keys)
    return n_low / n_heads


def plain(q, k, mask=None, scale=None):
    """Attention weights, in float64; a `mask` is True for allowed keys, or is added."""
    scores = q.double() @ k.double().transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1).detach()


def probe(record, embedded=lambda *_: None):
    """A probe that shows attention and embeddings, both of no module."""
    operations = Operations()
    operations._record = lambda layer, *seen: record(*seen)
    operations.listeners = [SimpleNamespace(failure=None, add_indices=embedded)]
    return OpProbe(operations._see)


def seen(call):
    """Shares that the probe has seen; the results of the call are the same with and without it."""
    found = []
    with probe(lambda weights, _: found.append(low_heads(weights))):
        out = call()
    again = call()
    assert torch.equal(out, again)
    return found


def share(call):
    """The one share that was found."""
    (found,) = seen(call)
    assert found.shape == ()
    return float(found)


# ---- attention as people write it


@pytest.mark.parametrize("dim", [-1, 3])
def test_attention_by_hand_is_seen_at_its_softmax(dim):
    q, k, v = qkv()
    expected = by_hand(plain(q, k))
    assert expected == 0.5
    assert share(lambda: ((q @ k.transpose(-1, -2)) / math.sqrt(D)).softmax(dim) @ v) == expected


MASKS = {
    "none": None,
    "boolean": numbers(T, T, seed=5) > -1,
    "boolean by head": (numbers(B, HEADS, T, T, seed=5) > -0.5) | torch.eye(T, dtype=torch.bool),
    "keys of a sample": (torch.arange(T) < torch.tensor([[T], [4]]))[:, None, None],
    "one key each": torch.eye(T, dtype=torch.bool),
    "added": 3 * numbers(T, T, seed=6),
    "minus infinity": torch.zeros(T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf),
}
MASKS["boolean"][:, 0] = True


@in_turn(("mask", "with_grad"), along(MASKS, [True, False]))
def test_scaled_dot_product_attention_is_seen_with_its_mask(mask, with_grad):
    (q, k, v), mask = qkv(), MASKS[mask]
    with torch.set_grad_enabled(with_grad):
        found = share(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert found == by_hand(plain(q, k, mask))


@pytest.mark.parametrize("t", [4, T, 40])
def test_it_is_seen_with_a_causal_mask(t):
    q, k, v = qkv(t)
    found = share(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert found == by_hand(plain(q, k, torch.ones(t, t).tril().bool()))


def test_a_causal_mask_makes_the_difference():
    """Each query looks at the one before it, and at all later ones, which it may not see."""
    scores = torch.full((T, T), -50.0).masked_fill(torch.ones(T, T).triu(1).bool(), 50.0)
    scores += 50 * torch.eye(T).roll(-1, 1).tril()
    scores[range(1, T), range(T - 1)] = 50.0
    q = (scores @ torch.eye(T)).expand(1, 1, T, T).contiguous() * math.sqrt(T)
    k = v = torch.eye(T).expand(1, 1, T, T).contiguous()
    assert share(lambda: F.scaled_dot_product_attention(q, k, v)) == by_hand(plain(q, k)) == 0
    causal = torch.ones(T, T).tril().bool()
    found = share(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert found == by_hand(plain(q, k, causal)) == 1


@pytest.mark.parametrize("scale", [1e-4, 1.0, 5.0])
def test_a_scale_of_ones_own_counts(scale):
    q, k, v = qkv()
    found = share(lambda: F.scaled_dot_product_attention(q, k, v, scale=scale))
    assert found == by_hand(plain(q, k, scale=scale))


def test_dropout_of_attention_does_not_count_as_looking_at_one_place():
    q, k, v = (numbers(B, HEADS, 16, D, seed=s).requires_grad_() for s in range(3))
    found = []
    with probe(lambda weights, _: found.append(float(low_heads(weights)))):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.9)
    assert found == [0.0]


def test_attention_to_another_sequence_is_seen():
    q, k, v = qkv(t=3, s=9)
    assert share(lambda: F.scaled_dot_product_attention(q, k, v)) == by_hand(plain(q, k))


@pytest.mark.parametrize(("with_grad", "kv_heads"), along([True, False], [1, 2]))
def test_heads_that_share_keys_are_seen(kv_heads, with_grad):
    q, k, v = qkv(kv_heads=kv_heads)
    with torch.set_grad_enabled(with_grad):
        found = share(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert found == by_hand(plain(q, k.repeat_interleave(HEADS // kv_heads, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_seen(dtype):
    q, k, v = (x.detach().to(dtype) for x in qkv())
    assert share(lambda: F.scaled_dot_product_attention(q, k, v)) == by_hand(plain(q, k))


@in_turn("need_weights", [True, False])
@in_turn("training", [True, False])
def test_multihead_attention_is_seen(need_weights, training):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(HEADS * D, HEADS, batch_first=True).train(training)
    with torch.no_grad():
        m.in_proj_weight[: 3 * D] *= 300  # queries of three of four heads
    x = numbers(B, T, HEADS * D).requires_grad_()
    weights = m(x, x, x, average_attn_weights=False)[1].detach()
    assert by_hand(weights) == 0.75
    assert share(lambda: m(x, x, x, need_weights=need_weights)[0]) == 0.75


def test_rows_that_are_masked_whole_do_not_count_in_a_fused_call_or_by_hand():
    q = k = v = numbers(1, 1, 40, D)
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[0] = True
    assert by_hand(plain(q, k, mask)) == 0
    assert share(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)) == 0
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -math.inf)
    assert share(lambda: torch._safe_softmax(scores, -1) @ v) == 0


@in_turn(
    "call",
    [
        lambda: numbers(8, 10).softmax(-1),  # of classes
        lambda: numbers(2, 5, 4, 4).softmax(1),  # of pixels
        lambda: numbers(2, 4, 1, 9).softmax(-1),  # of a single query
        lambda: numbers(2, 4, 9, 3).softmax(-1),  # of three keys
        lambda: numbers(2, 4, 9, 9).log_softmax(-1),
        lambda: F.scaled_dot_product_attention(*(numbers(2, 4, 3, 8) for _ in range(3))),
        lambda: F.scaled_dot_product_attention(numbers(2, 4, 1, 8), numbers(2, 4, 9, 8), numbers(2, 4, 9, 8)),
        lambda: numbers(3, 3) @ numbers(3, 3),
    ],
)
def test_what_is_no_attention_or_of_too_few_places_is_not_seen(call):
    assert seen(call) == []


def test_gradients_are_to_the_bit_as_without():
    def run():
        q, k, v = qkv()
        out = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            + (q @ k.transpose(-1, -2)).softmax(-1) @ v
        )
        out.square().sum().backward()
        return torch.stack([q.grad, k.grad, v.grad])

    assert len(seen(run)) == 2


# ---- hooks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HEADS * D, HEADS * D)

    def forward(self, x):
        q = self.proj(x).unflatten(-1, (HEADS, D)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Sequential(Block(), Block()))


def operations(model, looking=lambda: True):
    """Hooks on a model, in batches of a training that are inspected or not, and the layers with attention."""
    layers = []
    listener = SimpleNamespace(failure=None, see_attention=lambda layer, m, weights: layers.append(layer))
    run = Run(loop=SimpleNamespace(model=model, training=True, in_loop_thread=True, train_iter=0))
    hooks = run.measured(Operations)
    hooks.on_model(run)
    hooks.listeners.append(listener)

    def call(x):
        run.looking = looking()
        hooks.on_batch(run)
        model(x)

    return hooks, run, call, layers


def n_modes():
    return torch._C._len_torch_dispatch_stack()


def test_the_innermost_module_whose_code_runs_is_named():
    model = blocks()
    hooks, run, call, layers = operations(model)
    call(numbers(B, T, HEADS * D))
    hooks.close(run)
    assert layers == ["0", "1.0", "1.1"]
    assert n_modes() == 0


def test_only_calls_that_are_wanted_are_looked_at():
    wanted = [True, False, True]
    hooks, run, call, layers = operations(blocks(), wanted.pop)
    for _ in range(3):
        call(numbers(B, T, HEADS * D))
    hooks.close(run)
    assert len(layers) == sum(hooks.n_seen.values()) == 6
    wanted.append(True)
    call(numbers(B, T, HEADS * D))
    assert len(layers) == 6


def test_of_many_inspected_batches_the_first_three_are_seen_and_those_whose_number_has_doubled():
    hooks, run, call, layers = operations(blocks())
    seen = []
    for n in range(1, 14):
        call(numbers(B, T, HEADS * D))
        seen += [n] * bool(layers)
        layers.clear()
    assert seen == [1, 2, 3, 6, 12]
    hooks.listeners[0].is_under_way = True
    call(numbers(B, T, HEADS * D))
    hooks.close(run)
    assert len(layers) == 3


def test_a_listener_that_fails_keeps_its_error_and_costs_neither_the_forward_nor_the_others():
    hooks, run, call, layers = operations(blocks())

    def fails(*_):
        raise ValueError("no")

    broken = SimpleNamespace(failure=None, see_attention=fails)
    hooks.listeners.insert(0, broken)
    call(numbers(B, T, HEADS * D))
    hooks.close(run)
    assert str(broken.failure) == "no"
    assert len(layers) == 3


def test_a_forward_that_raises_leaves_nothing_on():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = nn.Sequential(Block(), Fails())
    hooks, run, call, _ = operations(model)
    with pytest.raises(RuntimeError, match="no"):
        call(numbers(B, T, HEADS * D))
    assert n_modes() == 0
    hooks.close(run)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@in_turn("is_causal", [True, False])
@in_turn("t", [T, 50])  # of which some queries are inspected
def test_positions_of_queries_are_told_for_a_sequence_that_attends_to_itself(is_causal, t):
    q, k, v = (numbers(B, HEADS, t, D, seed=s) for s in range(3))
    found = []
    with probe(lambda *seen: found.append(seen)):
        F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:])
        (q @ k.transpose(-1, -2)).softmax(-1)
    (weights, places), (_, none), (_, all_places) = found
    assert none is None
    assert all_places.tolist() == list(range(t))
    assert bool((weights[..., torch.arange(t) > places[:, None]] > 0).any()) is not is_causal


def test_indices_of_embeddings_are_seen_with_their_padding():
    found, x = [], torch.arange(6).view(2, 3)
    with probe(lambda *_: None, lambda *seen: found.append(seen)):
        nn.Embedding(9, 4, padding_idx=3)(x)
        F.embedding(x, torch.randn(7, 2))
    assert [(name, n, padding) for name, n, _, padding in found] == [("", 9, 3), ("", 7, -1)]
    assert all(torch.equal(indices, x) for _, _, indices, _ in found)
