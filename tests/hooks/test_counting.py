"""Parameters, buffers, bytes, calls and multiply-adds, against counts by hand."""

from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hookcb import Learner, layer_info, module_summary, num_features_model, total_params
from tests.hooks.summary_models import (
    IDS,
    MASK,
    MODELS,
    PACKED,
    Calls,
    Recursive,
    S,
    cnn,
    encoder,
    frozen_part,
    mlp,
    models,
    projections,
    randn,
    tied,
)
from tests.support import Net, attention, changes_in, row, row_of_type

DEPTHS = [None, 0, 1, 2, 3, 10**9]


@models
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_add_up_to_the_parameters_of_the_model(make, depth):
    model, *xb = make()
    summary = module_summary(model, *xb, depth=depth)
    params = list(model.parameters())
    assert summary.n_params == sum(p.numel() for p in params)
    assert summary.n_trainable == sum(p.numel() for p in params if p.requires_grad)
    assert summary.n_frozen == summary.n_params - summary.n_trainable
    assert sum(r.params for r in summary) == summary.n_params
    assert sum(r.trainable_params for r in summary) == summary.n_trainable
    assert summary.param_bytes == sum(p.numel() * p.element_size() for p in params)
    assert all(isinstance(r.params, int) and r.params >= r.trainable_params >= 0 for r in summary)


@models
def test_buffers_add_up_too(make):
    model, *xb = make()
    buffers = list(model.buffers())
    for depth in DEPTHS:
        summary = module_summary(model, *xb, depth=depth)
        assert summary.n_buffers == sum(b.numel() for b in buffers)
        assert summary.buffer_bytes == sum(b.numel() * b.element_size() for b in buffers)
        assert sum(r.buffers for r in summary) == summary.n_buffers


@models
def test_totals_do_not_depend_on_the_depth(make):
    model, *xb = make()
    whole = module_summary(model, *xb)
    for depth in DEPTHS[1:]:
        folded = module_summary(model, *xb, depth=depth)
        assert folded.multiply_adds == whole.multiply_adds
        assert folded.activation_bytes == whole.activation_bytes
        assert sum(r.multiply_adds for r in folded) == whole.multiply_adds


@models
def test_rows_are_the_modules_by_name_in_their_order(make):
    model, *xb = make()
    summary = module_summary(model, *xb)
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
    model = Calls(lambda m, x: x @ m.w @ m.same, w=nn.Parameter(torch.ones(3, 3)))
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


@pytest.mark.parametrize(
    ("make", "n_bytes"),
    [
        (lambda: (mlp(), randn(4, 10)), 4 * (30 + 30 + 2) * 4),
        (lambda: (Recursive(), randn(4, 3)), 3 * 4 * 3 * 4),
        (lambda: (nn.LSTM(5, 7, batch_first=True), randn(2, 6, 5)), (2 * 6 * 7 + 2 * 2 * 7) * 4),
        (lambda: (mlp().half(), randn(4, 10).half()), 4 * (30 + 30 + 2) * 2),
        (lambda: (nn.Sequential(Calls(lambda m, x: {"mask": x > 0, "none": None})), randn(4, 10)), 40),
    ],
    ids=["mlp", "called three times", "LSTM", "half", "bool in a dict"],
)
def test_activations_are_the_outputs_of_the_calls_of_leaves(make, n_bytes):
    model, *xb = make()
    assert module_summary(model, *xb).activation_bytes == n_bytes


def test_calls_are_counted():
    model = Calls(
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
    model, *xb = make()
    summary = module_summary(model, *xb)
    for r in summary:
        assert r.called == (r.n_calls > 0)
        assert r.called or r.shape is None
    if all(r.called for r in summary):
        assert "not called" not in str(summary)


def test_a_layer_called_by_its_forward_counts_as_not_called_but_its_work_counts():
    model = Calls(lambda m, x: m.fc.forward(x), fc=nn.Linear(3, 5))
    summary = module_summary(model, randn(4, 3))
    assert not row(summary, "fc").called
    assert summary.multiply_adds == 4 * 3 * 5


def test_recursion_counts_every_call_and_no_work_twice():
    summary = module_summary(Recursive(), randn(4, 3))
    assert row(summary, "fc").n_calls == row_of_type(summary, "Recursive").n_calls == 3
    assert summary.multiply_adds == 3 * 4 * 9
    assert row(summary, "fc").multiply_adds == 3 * 4 * 9


def transformer(b, n, d, ff, layers):
    return layers * (b * n * (4 * d * d + 2 * d * ff) + attention(b, n, n, d))


def sdpa(**kwargs):
    return Calls(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs))


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
        lambda: (Calls(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 4))), randn(2, 3)),
        2 * 3 * 4,
    ),
    "einsum": (
        lambda: (Calls(lambda m, x, y: torch.einsum("bij,bjk->bik", x, y)), *randn(2, 3, 4, 4)),
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
            Calls(
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
        MODELS["TransformerEncoder with a bool mask"],
        transformer(3, 5, 8, 16, 2),
    ),
    "layer made in forward": (lambda: (Calls(lambda m, x: nn.Linear(3, 5)(x)), randn(4, 3)), 4 * 3 * 5),
    "checkpointed": (MODELS["checkpointed"], 2 * 4 * 3),
    "called three times": (MODELS["recursion"], 3 * 4 * 9),
    "nothing to multiply": (MODELS["no parameters"], 0),
}


@projections
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("make", "n"), WORK.values(), ids=WORK)
def test_multiply_adds_are_those_counted_by_hand(make, n, train):
    model, *xb = make()
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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masked", [True, False])
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
    plain, *xb = MODELS["cnn"]()
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
