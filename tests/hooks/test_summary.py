"""Counts by hand, shapes, and how a summary looks as text, in a terminal and as HTML."""

import gc
import html
import types
import weakref
from collections import OrderedDict, UserDict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hookcb import Learner, layer_info, module_summary, num_features_model, total_params
from tests.hooks.support import (
    IDS,
    MASK,
    PACKED,
    SUMMED,
    CallsItself,
    Plain,
    S,
    cnn,
    encoder,
    frozen_part,
    mlp,
    projections,
    randn,
    tied,
)
from tests.support import (
    Net,
    Pair,
    attention,
    changes_in,
    in_terminal,
    in_turn,
    models,
    row,
    row_of_type,
    shown,
)

DEPTHS = [None, 0, 1, 2, 3, 10**9]


@cache
def summed_up(make):
    """A model, and its summaries by depth."""
    model, *xb = make()
    return model, {depth: module_summary(model, *xb, depth=depth) for depth in DEPTHS}


@models
def test_rows_add_up_to_the_parameters_of_the_model(make):
    model, summaries = summed_up(make)
    params = list(model.parameters())
    for summary in summaries.values():
        assert summary.n_params == sum(p.numel() for p in params)
        assert summary.n_trainable == sum(p.numel() for p in params if p.requires_grad)
        assert summary.n_frozen == summary.n_params - summary.n_trainable
        assert sum(r.params for r in summary) == summary.n_params
        assert sum(r.trainable_params for r in summary) == summary.n_trainable
        assert summary.param_bytes == sum(p.numel() * p.element_size() for p in params)
        assert all(isinstance(r.params, int) and r.params >= r.trainable_params >= 0 for r in summary)


@models
def test_buffers_add_up_too(make):
    model, summaries = summed_up(make)
    buffers = list(model.buffers())
    for summary in summaries.values():
        assert summary.n_buffers == sum(b.numel() for b in buffers)
        assert summary.buffer_bytes == sum(b.numel() * b.element_size() for b in buffers)
        assert sum(r.buffers for r in summary) == summary.n_buffers


@models
def test_totals_do_not_depend_on_the_depth(make):
    _, summaries = summed_up(make)
    whole = summaries[None]
    for folded in summaries.values():
        assert folded.multiply_adds == whole.multiply_adds
        assert folded.activation_bytes == whole.activation_bytes
        assert sum(r.multiply_adds for r in folded) == whole.multiply_adds


@models
def test_rows_are_the_modules_by_name_in_their_order(make):
    model, summaries = summed_up(make)
    summary = summaries[None]
    modules = {name: type(m).__name__ for name, m in model.named_modules() if name}
    found = {r.name: r.type for r in summary if r.name in modules}
    assert list(found.items()) == list(modules.items())
    assert len(summary) == len(list(summary)) >= 1


def test_depth_folds_what_lies_deeper():
    model = nn.Sequential(
        OrderedDict(
            body=nn.Sequential(OrderedDict(a=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), b=nn.Linear(4, 4))),
            head=nn.Linear(4, 1),
        )
    )
    model.body.b.requires_grad_(False)
    xb = randn(3, 4)
    zero, one, two = (module_summary(model, xb, depth=d) for d in (0, 1, 2))
    assert [(r.params, r.trainable_params, r.multiply_adds) for r in zero] == [(45, 25, 108)]
    assert not any("." in r.name for r in one)
    assert (row(one, "body").params, row(one, "body").trainable_params) == (40, 20)
    assert row(one, "body").multiply_adds == 96
    assert row(one, "head").params == 5
    assert {r.name for r in two} >= {"body", "body.a", "body.b", "head"}
    assert not any(r.name.count(".") > 1 for r in two)
    assert row(two, "body.a").params == row(two, "body.b").params == 20
    assert row(two, "body").params == 0
    assert row(two, "body").depth == row(two, "head").depth == row(two, "body.a").depth - 1


def test_own_parameters_stand_in_the_row_of_their_module():
    model = Net()
    summary = module_summary(model, randn(4, 2))
    assert row_of_type(summary, "Net").params == 1
    assert row(summary, "stem").params == row(summary, "blocks.0.0").params == 6
    assert row(summary, "blocks").params == row(summary, "blocks.0").params == 0
    assert row(summary, "stem").n_calls == 2
    assert row(summary, "blocks.1.0").n_calls == 1


def test_tied_weights_are_counted_where_they_come_first():
    summary = module_summary(tied(), IDS)
    assert (row(summary, "embed").params, row(summary, "decoder").params) == (66, 11)
    assert summary.n_params == 77


def test_one_parameter_under_two_names_of_a_module_counts_once():
    model = Plain(lambda m, x: x @ m.w @ m.same, w=nn.Parameter(torch.ones(3, 3)))
    model.same = model.w
    assert module_summary(model, randn(2, 3)).n_params == 9


@projections
@pytest.mark.parametrize(
    ("layer", "n"),
    [
        (lambda: nn.LSTM(5, 7), 4 * 7 * (5 + 7 + 2)),
        (lambda: nn.GRU(5, 7, bidirectional=True), 2 * 3 * 7 * (5 + 7 + 2)),
        (lambda: nn.LSTM(5, 7, proj_size=3), 4 * 7 * (5 + 3 + 2) + 7 * 3),
    ],
)
def test_recurrent_layers_count_all_their_weights(layer, n):
    summary = module_summary(layer(), randn(2, 6, 5))
    assert summary.n_params == n == sum(r.params for r in summary)


def test_attention_counts_its_projections_once():
    summary = module_summary(nn.MultiheadAttention(8, 2), *randn(3, 5, 3, 8))
    assert summary.n_params == 3 * 8 * 8 + 3 * 8 + 8 * 8 + 8
    assert row_of_type(summary, "MultiheadAttention").params == 3 * 8 * 8 + 3 * 8
    assert row(summary, "out_proj").params == 8 * 8 + 8


def test_frozen_and_trainable_are_told_apart():
    summary = module_summary(frozen_part(), randn(2, 4))
    assert (summary.n_params, summary.n_trainable, summary.n_frozen) == (23, 6, 17)
    assert (row(summary, "0.0").params, row(summary, "0.0").trainable_params) == (15, 0)
    assert (row(summary, "1").params, row(summary, "1").trainable_params) == (8, 6)


def test_bytes_of_what_is_stored_and_of_what_is_put_out():
    summary = module_summary(cnn(), randn(4, 3, 8, 8))
    assert summary.n_buffers == 4 + 4 + 1
    assert summary.buffer_bytes == (4 + 4) * 4 + 8
    mixed = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 2).bfloat16())
    mixed[1].register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    summary = module_summary(mixed, randn(4, 10))
    assert summary.param_bytes == 330 * 4 + 62 * 2
    assert summary.activation_bytes == 4 * 30 * 4 + 4 * 2 * 2


@in_turn(
    ("make", "n_bytes"),
    [
        (lambda: (mlp(), randn(4, 10)), 4 * (30 + 30 + 2) * 4),
        (lambda: (CallsItself(), randn(4, 3)), 3 * 4 * 3 * 4),
        (lambda: (nn.LSTM(5, 7, batch_first=True), randn(2, 6, 5)), (2 * 6 * 7 + 2 * 2 * 7) * 4),
        (lambda: (mlp().half(), randn(4, 10).half()), 4 * (30 + 30 + 2) * 2),
        (lambda: (nn.Sequential(Plain(lambda m, x: {"mask": x > 0, "none": None})), randn(4, 10)), 40),
    ],
    ids=["mlp", "called three times", "LSTM", "half", "bool in a dict"],
)
def test_activations_are_the_outputs_of_the_calls_of_leaves(make, n_bytes):
    model, *xb = make()
    assert module_summary(model, *xb).activation_bytes == n_bytes


def test_calls_are_counted():
    model = Plain(
        lambda m, x: m.spare if x is None else m.fc(m.fc(m.fc(x))), fc=nn.Linear(3, 3), spare=nn.Linear(3, 3)
    )
    summary = module_summary(model, randn(4, 3))
    assert (row(summary, "fc").n_calls, row(summary, "fc").called) == (3, True)
    spare = row(summary, "spare")
    assert (spare.n_calls, spare.called, spare.shape, spare.multiply_adds) == (0, False, None, 0)
    assert spare.params == 12
    assert "not called" in str(summary)


@models
def test_what_was_called_is_not_marked(make):
    summary = summed_up(make)[1][None]
    for r in summary:
        assert r.called == (r.n_calls > 0)
        assert r.called or r.shape is None
    if all(r.called for r in summary):
        assert "not called" not in str(summary)


def test_a_layer_called_by_its_forward_counts_as_not_called_but_its_work_counts():
    model = Plain(lambda m, x: m.fc.forward(x), fc=nn.Linear(3, 5))
    summary = module_summary(model, randn(4, 3))
    assert not row(summary, "fc").called
    assert summary.multiply_adds == 4 * 3 * 5


def test_recursion_counts_every_call_and_no_work_twice():
    summary = module_summary(CallsItself(), randn(4, 3))
    assert row(summary, "fc").n_calls == row_of_type(summary, "CallsItself").n_calls == 3
    assert summary.multiply_adds == 3 * 4 * 9
    assert row(summary, "fc").multiply_adds == 3 * 4 * 9


def transformer(b, n, d, ff, layers):
    return layers * (b * n * (4 * d * d + 2 * d * ff) + attention(b, n, n, d))


def sdpa(**kwargs):
    return Plain(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs))


WORK = {
    "Linear": (lambda: (nn.Linear(10, 30), randn(4, 10)), 4 * 10 * 30),
    "Linear without bias": (lambda: (nn.Linear(10, 30, bias=False), randn(2, 5, 10)), 2 * 5 * 10 * 30),
    "Linear of one sample without batch": (lambda: (nn.Linear(10, 30), randn(10)), 300),
    "Linear in half": (lambda: (nn.Linear(10, 30).half(), randn(4, 10).half()), 4 * 10 * 30),
    "Linear in bfloat16": (lambda: (nn.Linear(10, 30).bfloat16(), randn(4, 10).bfloat16()), 4 * 10 * 30),
    "Conv2d": (lambda: (nn.Conv2d(3, 8, 3, padding=1), randn(4, 3, 8, 8)), 4 * 8 * 8 * 8 * 3 * 9),
    "Conv2d, strided": (lambda: (nn.Conv2d(3, 8, 3, stride=2), randn(4, 3, 9, 9)), 4 * 8 * 4 * 4 * 3 * 9),
    "Conv2d, depthwise": (lambda: (nn.Conv2d(6, 6, 3, groups=6), randn(2, 6, 5, 5)), 2 * 6 * 3 * 3 * 9),
    "Conv2d, grouped": (lambda: (nn.Conv2d(6, 4, 3, groups=2), randn(2, 6, 5, 5)), 2 * 4 * 3 * 3 * 3 * 9),
    "Conv1d, dilated": (lambda: (nn.Conv1d(3, 4, 3, dilation=2), randn(2, 3, 10)), 2 * 4 * 6 * 3 * 3),
    "Conv3d": (lambda: (nn.Conv3d(2, 3, 2), randn(1, 2, 4, 4, 4)), 3 * 27 * 2 * 8),
    "ConvTranspose2d": (lambda: (nn.ConvTranspose2d(4, 6, 3, 2), randn(2, 4, 5, 5)), 2 * 25 * 4 * 6 * 9),
    "cnn": (lambda: (cnn(), randn(4, 3, 8, 8)), 4 * (4 * 64 * 3 * 9 + 4 * 2)),
    "lone parameter": (
        lambda: (Plain(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 4))), randn(2, 3)),
        2 * 3 * 4,
    ),
    "einsum": (
        lambda: (Plain(lambda m, x, y: torch.einsum("bij,bjk->bik", x, y)), *randn(2, 3, 4, 4)),
        3 * 64,
    ),
    "LSTM": (lambda: (nn.LSTM(5, 7, batch_first=True), randn(2, 6, 5)), 2 * 6 * 4 * 7 * (5 + 7)),
    "LSTM, two layers both ways": (
        lambda: (nn.LSTM(5, 7, 2, bidirectional=True), randn(6, 2, 5)),
        2 * 6 * 2 * 4 * 7 * ((5 + 7) + (14 + 7)),
    ),
    "LSTM with projection": (
        lambda: (nn.LSTM(5, 7, proj_size=3), randn(6, 2, 5)),
        2 * 6 * (4 * 7 * (5 + 3) + 7 * 3),
    ),
    "LSTM without batch": (lambda: (nn.LSTM(5, 7), randn(6, 5)), 6 * 4 * 7 * (5 + 7)),
    "LSTM of packed sequences": (lambda: (nn.LSTM(5, 7), PACKED), 5 * 4 * 7 * (5 + 7)),
    "LSTM in a Sequential": (
        lambda: (
            Plain(
                lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(5, 7, batch_first=True), head=nn.Linear(7, 2)
            ),
            randn(2, 6, 5),
        ),
        2 * 6 * (4 * 7 * (5 + 7) + 7 * 2),
    ),
    "LSTMCell": (lambda: (nn.LSTMCell(5, 7), randn(2, 5)), 2 * 4 * 7 * (5 + 7)),
    "GRU": (lambda: (nn.GRU(5, 7), randn(6, 2, 5)), 2 * 6 * 3 * 7 * (5 + 7)),
    "GRU of packed sequences, both ways": (
        lambda: (nn.GRU(5, 7, bidirectional=True), PACKED),
        5 * 2 * 3 * 7 * (5 + 7),
    ),
    "RNN": (lambda: (nn.RNN(5, 7), randn(6, 2, 5)), 2 * 6 * 7 * (5 + 7)),
    "attention": (lambda: (sdpa(), *randn(3, 2, 3, 6, 4)), attention(2 * 3, 6, 6, 4)),
    "attention, causal": (lambda: (sdpa(is_causal=True), *randn(3, 2, 3, 6, 4)), attention(2 * 3, 6, 6, 4)),
    "attention, masked": (
        lambda: (sdpa(attn_mask=torch.ones(6, 6, dtype=torch.bool).tril()), *randn(3, 2, 3, 6, 4)),
        attention(2 * 3, 6, 6, 4),
    ),
    "attention across": (
        lambda: (sdpa(), randn(2, 3, 6, 4), randn(2, 3, 9, 4), randn(2, 3, 9, 5)),
        attention(2 * 3, 6, 9, 4, 5),
    ),
    "attention in groups": (
        lambda: (sdpa(enable_gqa=True), randn(2, 4, 6, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 8)),
        attention(2 * 4, 6, 6, 8),
    ),
    "MultiheadAttention": (
        lambda: (nn.MultiheadAttention(8, 2, batch_first=True), *randn(3, 3, 5, 8)),
        3 * 5 * 4 * 8 * 8 + attention(3, 5, 5, 8),
    ),
    "TransformerEncoder": (lambda: (encoder(), randn(3, 5, 8)), transformer(3, 5, 8, 16, 2)),
    "TransformerEncoder, norm first": (
        lambda: (encoder(norm_first=True), randn(3, 5, 8)),
        transformer(3, 5, 8, 16, 2),
    ),
    "TransformerEncoder, bool mask": (
        SUMMED["TransformerEncoder with a bool mask"],
        transformer(3, 5, 8, 16, 2),
    ),
    "layer made in forward": (lambda: (Plain(lambda m, x: nn.Linear(3, 5)(x)), randn(4, 3)), 4 * 3 * 5),
    "checkpointed": (SUMMED["checkpointed"], 2 * 4 * 3),
    "called three times": (SUMMED["recursion"], 3 * 4 * 9),
    "nothing to multiply": (SUMMED["no parameters"], 0),
}


@projections
@in_turn(("make", "n"), WORK.values(), ids=WORK)
def test_multiply_adds_are_those_counted_by_hand(make, n):
    model, *xb = make()
    for train in (True, False):
        summary = module_summary(model.train(train), *xb)
        assert summary.multiply_adds == n
        assert sum(r.multiply_adds for r in summary) == n
        assert next(iter(module_summary(model, *xb, depth=0))).multiply_adds == n


@contextmanager
def without_onednn():
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@projections
@pytest.mark.parametrize(
    "ambient",
    [without_onednn, lambda: sdpa_kernel(SDPBackend.MATH), torch.inference_mode],
    ids=["without oneDNN", "attention by matrix products", "inference mode"],
)
def test_multiply_adds_do_not_depend_on_which_kernels_are_on(ambient):
    for name, (make, n) in WORK.items():
        if any(kind in name for kind in ("LSTM", "GRU", "attention", "Attention", "Transformer")):
            model, *xb = make()
            with ambient():
                assert module_summary(model, *xb).multiply_adds == n, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_multiply_adds_do_not_depend_on_the_precision(dtype):
    for name in (
        "LSTM",
        "LSTM of packed sequences",
        "GRU",
        "attention, masked",
        "TransformerEncoder",
        "Conv2d",
    ):
        make, n = WORK[name]
        model, *xb = make()
        assert module_summary(model.to(dtype), *(x.to(dtype) for x in xb)).multiply_adds == n, name


def test_multiply_adds_stand_in_the_row_of_the_layer_that_did_them():
    model = WORK["LSTM in a Sequential"][0]()[0]
    summary = module_summary(model, randn(2, 6, 5))
    assert row(summary, "rnn").multiply_adds == 2 * 6 * 4 * 7 * 12
    assert row(summary, "head").multiply_adds == 2 * 6 * 7 * 2


@in_turn("train", [True, False])
@in_turn("masked", [True, False])
def test_the_fast_path_of_a_transformer_hides_no_layer(train, masked):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        model = nn.TransformerEncoder(layer, 2).train(train)
    kwargs = {"src": randn(3, 5, 8), "src_key_padding_mask": MASK} if masked else {"src": randn(3, 5, 8)}
    summary = module_summary(model, kwargs)
    for k in range(2):
        assert row(summary, f"layers.{k}.linear1").shape == S([3, 5, 16])
        assert row(summary, f"layers.{k}.norm2").shape == S([3, 5, 8])
        assert row(summary, f"layers.{k}.self_attn").called
    assert summary.multiply_adds == transformer(3, 5, 8, 16, 2)


def never(*args):
    raise AssertionError("compiled")


@pytest.mark.parametrize(
    "compiled", [lambda m: torch.compile(m, backend=never), lambda m: m.compile(backend=never) or m]
)
def test_a_compiled_model_is_summed_up_as_the_model_inside(compiled):
    plain, *xb = SUMMED["cnn"]()
    whole = module_summary(plain, *xb)
    model = compiled(cnn())
    with changes_in(model) as changed:
        summary = module_summary(model, *xb)
    assert changed == []
    fields = ["name", "type", "depth", "params", "shape", "n_calls", "multiply_adds"]
    assert [[getattr(r, f) for f in fields] for r in summary] == [
        [getattr(r, f) for f in fields] for r in whole
    ]
    assert str(summary) == str(whole)
    assert layer_info(model, *xb) == layer_info(plain, *xb)
    assert total_params(model) == total_params(plain)
    assert num_features_model(model) == num_features_model(plain) == 2
    learn = Learner([(*xb, torch.zeros(4, dtype=torch.long))], model, F.cross_entropy)
    with changes_in(learn) as changed:
        assert [r.name for r in learn.summary()] == [r.name for r in whole]
    assert changed == []


@pytest.mark.parametrize("wrap", [True, False])
def test_a_model_with_a_compiled_part_adds_up(wrap):
    part = nn.Linear(4, 4)
    model = nn.Sequential(torch.compile(part, backend="eager") if wrap else part, nn.Linear(4, 2))
    if not wrap:
        part.compile(backend="eager")
    with changes_in(model) as changed:
        summary = module_summary(model, randn(3, 4))
    assert changed == []
    assert sum(r.params for r in summary) == summary.n_params == 30
    assert summary.multiply_adds == 3 * (16 + 8)
    assert row(summary, "1").n_calls == row(summary, "0").n_calls == 1


@dataclass
class Out:
    a: Tensor
    b: Any = None


@in_turn(
    ("output", "shape"),
    [
        (lambda x: (x, x[0]), (S([4, 3]), S([3]))),
        (lambda x: [x, (x[:2], x)], [S([4, 3]), (S([2, 3]), S([4, 3]))]),
        (lambda x: {"a": x, "b": {"c": x[:, 0]}}, {"a": S([4, 3]), "b": {"c": S([4])}}),
        (lambda x: Pair(x, x.sum()), Pair(S([4, 3]), S([]))),
        (lambda x: Out(x, (x[0],)), Out(S([4, 3]), (S([3]),))),
        (lambda x: (x, None), (S([4, 3]), None)),
        (lambda x: {"a": x, "b": None}, {"a": S([4, 3]), "b": None}),
        (lambda x: None, None),
        (lambda x: (), ()),
        (lambda x: x.to_sparse(), S([4, 3])),
        (lambda x: x > 0, S([4, 3])),
        (lambda x: x[:0], S([0, 3])),
    ],
    ids=[
        "tuple",
        "list",
        "dict",
        "namedtuple",
        "dataclass",
        "tuple-with-None",
        "dict-with-None",
        "None",
        "empty",
        "sparse",
        "bool",
        "no-rows",
    ],
)
def test_shapes_are_nested_as_the_output_is(output, shape):
    inner = Plain(lambda m, x: output(x))
    model = Plain(lambda m, x: m.inner(m.fc(x)), fc=nn.Linear(5, 3), inner=inner)
    summary = module_summary(model, randn(4, 5))
    found = row(summary, "inner")
    assert found.called
    assert found.shape == shape
    assert type(found.shape) is type(shape)
    assert row(summary, "fc").shape == S([4, 3])
    for text in (str(summary), in_terminal(summary), summary._repr_html_()):
        assert "fc" in text
    assert layer_info(model, randn(1, 5))[0] == ("Linear", 18, True, S([1, 3]), False)


def test_outputs_of_recurrent_layers_keep_their_states():
    lstm = module_summary(nn.LSTM(5, 7, batch_first=True), randn(2, 6, 5))
    assert next(iter(lstm)).shape == (S([2, 6, 7]), (S([1, 2, 7]), S([1, 2, 7])))
    gru = next(iter(module_summary(nn.GRU(5, 7), PACKED)))
    assert gru.called
    assert gru.shape[1] == S([1, 2, 7])
    assert "5" in str(gru.shape[0])  # five steps in all


@in_turn("key", ["[/red]", "<b>", "a.b", 3, ("t", 1)])
def test_any_key_of_a_dict_can_be_shown(key):
    summary = module_summary(Plain(lambda m, x: {key: x}), randn(4, 3))
    assert next(iter(summary)).shape == {key: S([4, 3])}
    assert str(summary)
    assert in_terminal(summary)
    assert "<b>:" not in summary._repr_html_()


def test_shapes_are_those_of_the_output_not_of_what_later_became_of_it():
    model = Plain(lambda m, x: m.fc(x).resize_(2, 2), fc=nn.Linear(5, 3))
    assert row(module_summary(model, randn(4, 5)), "fc").shape == S([4, 3])


class HasAll:
    """Answers every question for an attribute with itself."""

    def __getattr__(self, name):
        return self


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@in_turn(
    "output",
    [
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x, x[:2]]),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to(torch.complex64),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to("meta"),
        lambda x: torch.max(x, 1),
        lambda x: types.SimpleNamespace(logits=x),
        lambda x: HasAll(),
        lambda x: {x, 3},
        lambda x: "text",
        lambda x: nn.Linear,
    ],
    ids=[
        "jagged",
        "nested",
        "float8",
        "complex",
        "csr",
        "meta",
        "max",
        "object",
        "has-all",
        "set",
        "text",
        "class",
    ],
)
def test_an_output_may_be_anything(output):
    model = Plain(lambda m, x: m.inner(m.fc(x)), fc=nn.Linear(5, 3), inner=Plain(lambda m, x: output(x)))
    with changes_in(model) as changed:
        summary = module_summary(model, randn(4, 5))
        infos = layer_info(model, randn(4, 5))
    assert changed == []
    assert row(summary, "inner").called
    assert [info.type for info in infos] == ["Linear", "Plain"]
    assert all("Linear" in text for text in (str(summary), in_terminal(summary), summary._repr_html_()))


def test_a_generator_a_layer_returns_is_not_used_up():
    model = Plain(
        lambda m, x: sum(m.inner(m.fc(x))), fc=nn.Linear(5, 3), inner=Plain(lambda m, x: (r for r in x))
    )
    for summary in (module_summary(model, randn(4, 5)), module_summary(model, randn(4, 5), depth=1)):
        assert row_of_type(summary, "Plain").shape == S([3])


def test_layers_called_by_keyword_or_without_input_have_their_shapes():
    model = Plain(
        lambda m, x: m.act(input=m.fc(input=x)) + m.shift(),
        fc=nn.Linear(5, 3),
        act=nn.ReLU(),
        shift=Plain(lambda m: m.w, w=nn.Parameter(torch.ones(3))),
    )
    summary = module_summary(model, randn(4, 5))
    assert [row(summary, name).shape for name in ("fc", "act", "shift")] == [S([4, 3]), S([4, 3]), S([3])]
    assert [info.shape for info in layer_info(model, randn(1, 5))] == [S([1, 3]), S([1, 3]), S([3])]


def test_a_mapping_means_keyword_arguments():
    model = Plain(lambda m, *, x, scale: m.fc(x) * scale, fc=nn.Linear(3, 2))
    for batch in ({"x": randn(4, 3), "scale": 2.0}, UserDict(x=randn(4, 3), scale=2.0)):
        assert row(module_summary(model, batch), "fc").shape == S([4, 2])
        assert layer_info(model, batch)[0].params == 8


def test_several_inputs_may_be_anything():
    model = Plain(lambda m, d, x, how: m.fc(d["x"] + x) if how == "sum" else None, fc=nn.Linear(3, 2))
    assert row(module_summary(model, {"x": randn(4, 3)}, randn(4, 3), "sum"), "fc").called


def test_a_batch_is_moved_to_where_the_model_is():
    model = nn.Sequential(nn.Linear(10, 30, device="meta"), nn.LSTM(30, 7, device="meta"))
    summary = module_summary(model, randn(4, 10))
    assert row(summary, "0").shape == S([4, 30])
    assert row(summary, "0").multiply_adds == 4 * 10 * 30
    assert summary.n_params == 330 + 4 * 7 * (30 + 7 + 2)


@in_turn("depth", [-1, "x", 1.5, [1]])
def test_a_wrong_depth_is_refused(depth):
    calls = []
    model = Plain(lambda m, x: calls.append(x))
    with pytest.raises((TypeError, ValueError), match="depth"):
        module_summary(model, randn(2, 3), depth=depth)
    assert not calls


@in_turn("look", [module_summary, layer_info])
@in_turn("model", ["x", None, nn.Linear, [nn.Linear(2, 2)]])
def test_what_is_no_model_is_refused(look, model):
    with pytest.raises(TypeError, match=r"(?i)module|model|learner"):
        look(model, randn(2, 3))


@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_a_missing_batch_is_said(look):
    with pytest.raises((TypeError, ValueError)) as caught:
        look(mlp())
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "xb" in said or "batch" in said


@in_turn(
    ("xb", "error"),
    [
        ((randn(4, 9),), RuntimeError),
        ((torch.ones(4, 10, dtype=torch.long),), RuntimeError),
        ((randn(4, 10), randn(4, 10)), TypeError),
        (("text",), TypeError),
        (({"wrong": randn(4, 10)},), TypeError),
        ((None,), TypeError),
    ],
    ids=["shape", "dtype", "too-many", "text", "keyword", "None"],
)
def test_a_wrong_batch_gives_the_error_of_the_model(xb, error):
    model = mlp()
    with changes_in(model) as changed, pytest.raises(error):
        module_summary(model, *xb)
    assert changed == []


class Reused(nn.Module):
    """Plain one layer on inputs of several shapes."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.act, self.fc = sizes, nn.ReLU(), nn.Linear(2, 3)

    def forward(self, x):
        return [self.act(self.fc(x[:n])) for n in self.sizes][-1]


def test_a_layer_called_several_times_shows_every_shape_it_gave():
    summary = module_summary(Reused((4, 2, 4)), torch.ones(5, 2))
    row = next(row for row in summary if row.name == "fc")
    assert row.n_calls == 3
    assert list(row.shapes.values()) == [torch.Size([4, 3]), torch.Size([2, 3])]
    assert row.shape == torch.Size([4, 3])
    assert "Linear ×3" in str(summary)
    assert "4×3, 2×3" in str(summary)
    assert "1×3, 2×3, 3×3 … and 2 more" in str(module_summary(Reused(range(1, 6)), torch.ones(5, 2)))


class TakesOneDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, batch):
        return self.fc(batch["image"]) * batch["scale"]


class TakesNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, n=None):
        return self.table(torch.arange(n or 4))


def test_a_model_that_takes_one_dict_is_given_it_whole():
    summary = module_summary(TakesOneDict(), {"image": torch.ones(5, 2), "scale": 2.0})
    assert summary.rows[0].shape == torch.Size([5, 3])


def test_a_model_that_takes_nothing_is_run_without_inputs():
    assert module_summary(TakesNothing()).rows[0].shape == torch.Size([4, 3])
    assert module_summary(TakesNothing(), {"n": 2}).rows[0].shape == torch.Size([2, 3])
    with pytest.raises(ValueError, match="no batch xb was given"):
        module_summary(nn.Linear(2, 1))


EVIL = ["[red]", "[/red]", "[bold]x[/bold]", "[link=http://x]y", ":warning:", "\\[b]", "{x}", "%s", "[", "[]"]


def evil_model(name):
    kind = type(f"{name}Kind", (nn.Linear,), {})
    model = nn.Sequential()
    model.add_module(name, kind(3, 2))
    model.add_module("plain", nn.Linear(2, 2))
    return model


@in_turn("name", EVIL)
def test_names_are_shown_as_they_are(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summary = module_summary(evil_model(name), randn(4, 3))
    assert row(summary, name).type == f"{name}Kind"
    for text in (str(summary), in_terminal(summary), html.unescape(summary._repr_html_())):
        assert text.count(name) >= 2
        assert f"{name}Kind" in text


def test_names_are_escaped_in_html():
    summary = module_summary(evil_model("<script>&"), randn(4, 3))
    page = summary._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;&amp;Kind" in page


def test_html_is_a_table_with_all_rows():
    model = cnn()
    page = module_summary(model, randn(4, 3, 8, 8))._repr_html_()
    assert "<table" in page
    assert page.count("<table") == page.count("</table>")
    assert page.count("<tr") == page.count("</tr>") > len(list(model.children()))
    assert all(name in page for name, _ in model.named_children())


def test_text_is_plain_and_says_the_totals(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    summary = module_summary(cnn(), randn(4, 3, 8, 8))
    text = str(summary)
    assert text == repr(summary)
    assert "\x1b" not in text
    assert str(summary.n_params) in shown(text)
    assert str(summary.n_trainable) in shown(text)
    assert max(map(len, text.splitlines())) <= 100
    assert capsys.readouterr().out == ""


@models
def test_every_summary_can_be_shown_in_all_ways(make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, summaries = summed_up(make)
    for depth in (None, 0, 1):
        summary = summaries[depth]
        for text in (str(summary), in_terminal(summary, 80), summary._repr_html_()):
            assert str(summary.n_params) in shown(text)


def long_names(n_deep):
    model = nn.Sequential(OrderedDict(first=nn.Linear(1000, 1234), second=nn.Linear(1234, 98)))
    for _ in range(n_deep):
        model = nn.Sequential(OrderedDict(a_rather_long_name_of_a_block=model))
    return model


narrow = in_turn("columns", [40, 60, 80])


indented = in_turn("n_deep", [0, 12])


@narrow
@indented
def test_a_narrow_terminal_cuts_no_count(columns, n_deep, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    summary = module_summary(long_names(n_deep), randn(4, 1000))
    for text in (str(summary), in_terminal(summary, columns)):
        for count in (1000 * 1234 + 1234, 1234 * 98 + 98, summary.n_params):
            assert str(count) in shown(text)
    assert all(len(line.rstrip()) <= columns for line in in_terminal(summary, columns).splitlines())


def test_a_summary_does_not_keep_the_model_or_change_with_it():
    model = cnn()
    summary = module_summary(model, randn(4, 3, 8, 8))
    text, ref = str(summary), weakref.ref(model)
    model.head = nn.Linear(4, 900)
    assert str(summary) == text
    del model
    gc.collect()
    assert ref() is None
    assert str(summary) == text


# ---- input_size


def test_a_size_stands_for_an_input_and_draws_no_random_numbers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 2))
    before = torch.get_rng_state()
    by_size = module_summary(model, input_size=(1, 3, 8, 8))
    assert torch.equal(before, torch.get_rng_state())
    assert str(by_size) == str(module_summary(model, torch.zeros(1, 3, 8, 8)))


def test_several_sizes_have_a_dtype_each():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)

        def forward(self, tokens, x):
            return self.embed(tokens) + x

    summary = module_summary(Both(), input_size=[(2, 3), (2, 3, 4)], dtype=[torch.int64, torch.float32])
    assert summary.rows[0].shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"input_size": (1, "3")}, "whole numbers, such as"),
        ({"input_size": [(1, 4)], "dtype": [torch.float32] * 2}, "there are 1 inputs and 2 dtypes"),
        ({"input_size": (1, -4)}, "whole numbers, such as"),
    ],
)
def test_a_wrong_size_is_told(given, told):
    with pytest.raises(ValueError, match=told):
        module_summary(nn.Linear(4, 2), **given)
    with pytest.raises(ValueError, match="not both"):
        module_summary(nn.Linear(4, 2), torch.zeros(1, 4), input_size=(1, 4))
