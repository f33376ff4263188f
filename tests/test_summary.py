"""The model summary, tried with what models, batches and terminals can do; numbers against counts by hand."""

import functools
import gc
import html
import io
import random
import types
import warnings
import weakref
from collections import OrderedDict, UserDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from support import DIAGNOSTICS, Net, Pair, SaysSo, fit, make_batches, make_learner, same, spy, weights
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from hookcb import (
    ActivationStats,
    Callback,
    HookCallback,
    Learner,
    count_hooks,
    dummy_eval,
    has_params,
    layer_info,
    model_sizes,
    module_summary,
    num_features_model,
    total_params,
)

DEPTHS = [None, 0, 1, 2, 3, 10**9]


# ---- models


class Calls(nn.Module):
    """Its forward is the function given; called with the module first."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, n=2):
        x = self.fc(x)
        return self(x, n - 1) if n else x


class Falsy(nn.Module):
    """A container that says it is empty."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def __len__(self):
        return 0

    def forward(self, x):
        return self.fc(x)


def randn(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kwargs)


def cnn():
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 4, 3, padding=1),
            norm=nn.BatchNorm2d(4),
            act=nn.ReLU(inplace=True),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            drop=nn.Dropout(0.5),
            head=nn.Linear(4, 2),
        )
    )


def encoder(n=2, **kwargs):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, n, enable_nested_tensor=False)


def mlp():
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 2))


def tied():
    model = Calls(lambda m, ids: m.decoder(m.embed(ids)), embed=nn.Embedding(11, 6), decoder=nn.Linear(6, 11))
    model.decoder.weight = model.embed.weight
    return model


def shared_between_blocks():
    fc = nn.Linear(3, 3)
    block = lambda: nn.Sequential(OrderedDict(fc=fc, own=nn.Linear(3, 3)))  # noqa: E731
    return Calls(lambda m, x: m.b(m.a(x)), a=block(), b=block())


def parameter_containers():
    return Calls(
        lambda m, x: x @ m.several[0] @ m.named["w"] * m.lone,
        several=nn.ParameterList([torch.ones(3, 4), torch.ones(5)]),
        named=nn.ParameterDict({"w": torch.ones(4, 2), "unused": torch.ones(7)}),
        lone=nn.Parameter(torch.ones(())),
    )


def frozen_part():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def with_gaps():
    """Children and parameters that are None, an empty Sequential, a child nobody calls."""
    model = Calls(
        lambda m, x: m.falsy(m.skip(m.fc(x))),
        fc=nn.Linear(4, 4, bias=False),
        skip=nn.Sequential(),
        falsy=Falsy(),
        spare=nn.Linear(4, 9),
    )
    model.register_module("downsample", None)
    model.register_parameter("shift", None)
    model.register_buffer("cache", None)
    return model


def deep(n=60):
    model = nn.Linear(2, 2)
    for _ in range(n):
        model = nn.Sequential(model)
    return model


def by_block(kind):
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return Calls(
        lambda m, x: functools.reduce(
            lambda h, k: m.blocks[k](h), m.blocks if kind is nn.ModuleDict else (0, 1), x
        ),
        blocks=kind({"up": blocks[0], "down": blocks[1]} if kind is nn.ModuleDict else blocks),
    )


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    return Calls(lambda m, x: checkpoint(m.fc, x, use_reentrant=False), fc=nn.Linear(4, 3))


PACKED = pack_sequence([randn(3, 5), randn(2, 5)])
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
MASK = torch.tensor([[False, False, False, True, True]] * 3)
MODELS = {
    "cnn": lambda: (cnn(), randn(4, 3, 8, 8)),
    "LSTM, a single layer": lambda: (nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), randn(2, 6, 5)),
    "GRU of packed sequences": lambda: (nn.GRU(5, 7, bidirectional=True), PACKED),
    "TransformerEncoder": lambda: (encoder(), randn(3, 5, 8)),
    "TransformerEncoder with a bool mask": lambda: (
        Calls(lambda m, x, mask: m.enc(x, src_key_padding_mask=mask), enc=encoder()),
        randn(3, 5, 8),
        MASK,
    ),
    "MultiheadAttention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), *randn(3, 3, 5, 8)),
    "lone parameter": lambda: (Calls(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 4))), randn(2, 3)),
    "shared layer, lone parameter": lambda: (Net(), randn(4, 2)),
    "shared between blocks": lambda: (shared_between_blocks(), randn(4, 3)),
    "tied weights": lambda: (tied(), IDS),
    "recursion": lambda: (Recursive(), randn(4, 3)),
    "ModuleList": lambda: (by_block(nn.ModuleList), randn(2, 4)),
    "ModuleDict": lambda: (by_block(nn.ModuleDict), randn(2, 4)),
    "ParameterList and ParameterDict": lambda: (parameter_containers(), randn(2, 3)),
    "parametrized": lambda: (
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 3)), parametrizations.spectral_norm(nn.Linear(3, 3))
        ),
        randn(2, 4),
    ),
    "spectral norm by a pre-hook": lambda: (
        nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 3))),
        randn(2, 4),
    ),
    "no parameters": lambda: (nn.Sequential(nn.ReLU(), nn.Flatten()), randn(2, 3, 4)),
    "single layer": lambda: (nn.Linear(10, 30), randn(4, 10)),
    "empty": lambda: (nn.Sequential(), randn(4, 10)),
    "identity": lambda: (nn.Identity(), randn(4, 10)),
    "frozen part": lambda: (frozen_part(), randn(2, 4)),
    "all frozen": lambda: (mlp().requires_grad_(False), randn(2, 10)),
    "bfloat16": lambda: (mlp().bfloat16(), randn(2, 10).bfloat16()),
    "half": lambda: (mlp().half(), randn(2, 10).half()),
    "complex": lambda: (nn.Linear(3, 2, dtype=torch.complex64), randn(2, 3, dtype=torch.complex64)),
    "with gaps": lambda: (with_gaps(), randn(2, 4)),
    "deep": lambda: (deep(), randn(3, 2)),
    "wide": lambda: (nn.Sequential(*(nn.Linear(2, 2) for _ in range(150))), randn(3, 2)),
    "checkpointed": lambda: (checkpointed(), randn(2, 4)),
    "several inputs": lambda: (nn.Bilinear(3, 4, 5), randn(2, 3), randn(2, 4)),
    "a batch of one": lambda: (cnn(), randn(1, 3, 8, 8)),
    "an empty batch": lambda: (mlp(), randn(0, 10)),
    "int input": lambda: (nn.EmbeddingBag(11, 4), IDS),
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
projections = pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own, at the first forward


def row(summary, name):
    return next(r for r in summary if r.name == name)


def row_of_type(summary, kind):
    return next(r for r in summary if r.type == kind)


def shown(text):
    """A text as one finds numbers in it: without separators of thousands."""
    for separator in (",", "_", "'", "\u2009", "\u202f"):
        text = text.replace(separator, "")
    return text


def in_terminal(summary, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(summary)
    return console.file.getvalue()


# ---- what a summary may not touch


def everything(model):
    """What must be the same after a summary as before, by what it is."""
    params, buffers = list(model.named_parameters(remove_duplicate=False)), list(model.named_buffers())
    buffers = [(name, b) for name, b in buffers if not isinstance(b, nn.UninitializedBuffer)]
    material = [p for _, p in params if not isinstance(p, nn.UninitializedParameter)]
    here = torch.nn.modules.module
    return {
        "random state of torch": torch.get_rng_state(),
        "random state of Python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "flags": [
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
        ],
        "modes of dispatch": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks": count_hooks(model),
        "hooks of all modules": [
            len(getattr(here, f"_global_{kind}"))
            for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        ],
        "names": [name for name, _ in model.named_modules(remove_duplicate=False)],
        "types": [type(m) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "modes": [m.training for m in model.modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in params],
        "weights": [p.detach().clone() for p in material],
        "versions of weights": [p._version for p in material],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for _, p in params],
        "buffers": [(name, id(b), b.clone()) for name, b in buffers],
        "state_dict": list(model.state_dict()),
    }


def alike(a, b):
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@contextmanager
def untouched(model):
    before = everything(model)
    try:
        yield
    finally:
        after = everything(model)
        changed = [what for what, was in before.items() if not alike(was, after[what])]
        assert not changed


def unsettle(model):
    """Mixed modes, and gradients that wait for a step."""
    for k, m in enumerate(model.modules()):
        m.training = k % 3 != 1
    for p in model.parameters():
        p.grad = torch.ones_like(p)


@models
@pytest.mark.parametrize("grad", [True, False])
def test_a_summary_leaves_everything_as_it_was(make, grad):
    model, *xb = make()
    unsettle(model)
    with torch.set_grad_enabled(grad), untouched(model):
        module_summary(model, *xb)
    with torch.set_grad_enabled(grad), untouched(model):
        layer_info(model, *xb)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_flags_stay_whatever_they_are(on, fails):
    def forward(m, x):
        if fails:
            raise SaysSo(1, 2)
        return m.rnn(m.enc(x))

    model = Calls(forward, enc=encoder(), rnn=nn.LSTM(8, 4))
    flags = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    try:
        torch._C._set_mkldnn_enabled(on)
        torch.backends.mha.set_fastpath_enabled(on)
        with untouched(model), pytest.raises(SaysSo) if fails else torch.enable_grad():
            module_summary(model, randn(3, 5, 8))
    finally:
        torch._C._set_mkldnn_enabled(flags[0])
        torch.backends.mha.set_fastpath_enabled(flags[1])


def test_random_numbers_drawn_in_forward_are_given_back():
    def forward(m, x):
        random.random()
        return F.dropout(x, training=True) + torch.rand(())

    with untouched(model := Calls(forward)):
        module_summary(model, randn(2, 3))


def _count_in_place(m, x):
    m.steps += 1
    return m.fc(x)


def _count_anew(m, x):
    m.steps = m.steps + 1
    return m.fc(x)


def _count_by_data(m, x):
    m.steps.data = m.steps.data + 1
    return m.fc(x)


def _grow(m, x):
    m.steps.resize_(3).fill_(7)
    return m.fc(x)


def _fill_cache(m, x):
    m.cache = x.detach().clone()
    return m.fc(x)


def _register(m, x):
    m.register_buffer("late", torch.zeros(2))
    return m.fc(x)


def _write_by_index(m, x):
    m.table[0] = x.mean()
    return m.fc(x)


@pytest.mark.parametrize(
    "forward", [_count_in_place, _count_anew, _count_by_data, _grow, _fill_cache, _register, _write_by_index]
)
@pytest.mark.parametrize("inner", [False, True])
def test_buffers_written_in_forward_are_as_before(forward, inner):
    model = Calls(forward, fc=nn.Linear(3, 2), steps=torch.zeros(()), table=torch.zeros(4))
    model.register_buffer("cache", None, persistent=False)
    model = nn.Sequential(model) if inner else model
    with untouched(model):
        module_summary(model, randn(2, 3))
    assert [b for m in model.modules() for b in m._buffers.values()].count(None) == 1


def test_buffers_written_through_another_reference_are_as_before():
    model = Calls(lambda m, x: m.fc(x) + m.caches[0].add_(1), fc=nn.Linear(3, 2), keys=torch.zeros(2))
    model.caches = [model.keys]
    with untouched(model):
        module_summary(model, randn(2, 3))
    assert model.caches[0] is model.keys


def test_a_buffer_that_two_modules_share_stays_one():
    ones = torch.ones(3)
    model = nn.Sequential(*(Calls(lambda m, x: x + m.shared.add_(1), shared=ones) for _ in range(2)))
    with untouched(model):
        assert module_summary(model, randn(2, 3)).n_buffers == 3
    assert model[0].shared is model[1].shared is ones


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(11, 4, max_norm=0.1),
        lambda: nn.EmbeddingBag(11, 4, max_norm=0.1),
    ],
    ids=["Embedding, max_norm", "EmbeddingBag, max_norm"],
)
def test_weights_written_in_forward_are_as_before(make):
    with untouched(model := make()):
        module_summary(model, IDS)


def test_gradients_taken_in_forward_are_not_added_to_those_that_wait():
    def adapt(m, x):
        with torch.enable_grad():
            m.fc(x).sum().backward()
        return m.fc(x)

    for waits in (False, True):
        model = Calls(adapt, fc=nn.Linear(3, 2))
        if waits:
            unsettle(model)
        with untouched(model):
            module_summary(model, randn(2, 3))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_a_scripted_part_is_summed_up_as_one_layer(first, look):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    parts = [scripted, nn.BatchNorm1d(4)]
    model = nn.Sequential(*(parts if first else parts[::-1]), nn.Linear(4, 2))
    with untouched(model):
        result = look(model, randn(3, 4))
    if look is module_summary:
        assert sum(r.params for r in result) == result.n_params == 20 + 8 + 8 + 10
        assert row(result, "2").shape == S([3, 2])
    else:
        assert result[-1] == ("Linear", 10, True, S([3, 2]), False)


def test_a_buffer_a_waiting_backward_needs_is_not_written_to():
    model = Calls(lambda m, x: m.fc(x) * m.scale, fc=nn.Linear(3, 2), scale=torch.full((2,), 2.0))
    loss = model(randn(4, 3)).sum()
    module_summary(model, randn(4, 3))
    loss.backward()
    assert model.fc.bias.grad.tolist() == [8, 8]


def test_a_model_that_keeps_a_tensor_from_its_forward_can_still_be_trained():
    def forward(m, x):
        if not hasattr(m, "positions"):
            m.positions = torch.arange(x.shape[1]) * torch.ones(())
        return m.fc(x * m.positions)

    model = Calls(forward, fc=nn.Linear(3, 2))
    module_summary(model, randn(2, 3))
    model(randn(2, 3).requires_grad_()).sum().backward()
    assert model.fc.weight.grad.isfinite().all()


def test_a_model_that_takes_gradients_in_its_forward_is_summarised():
    def forward(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(m.fc(x).sum(), x)[0]

    model = Calls(forward, fc=nn.Linear(3, 2))
    with untouched(model):
        summary = module_summary(model, randn(4, 3))
    assert row_of_type(summary, "Calls").shape == torch.Size([4, 3])
    assert row(summary, "fc").shape == torch.Size([4, 2])


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_summary_works_in_every_grad_mode(ambient):
    model = cnn()
    with ambient():
        assert module_summary(model, randn(2, 3, 8, 8)).n_params == sum(p.numel() for p in model.parameters())
    model(randn(2, 3, 8, 8)).sum().backward()


def test_train_methods_that_keep_parts_frozen_are_not_led_astray():
    class FrozenNorm(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].training = not self[1].training
            return self

    model = FrozenNorm(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    for modes in ([True, False, True, True], [False, True, True, False]):
        for m, mode in zip(model.modules(), modes, strict=True):
            m.training = mode
        with untouched(model):
            module_summary(model, randn(4, 3))


def test_hooks_of_the_user_stay_and_forward_hooks_that_matter_run():
    model = mlp()
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda m, args, out: None)
    model[2].register_full_backward_hook(lambda m, gi, go: None)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    n = count_hooks(model)
    with untouched(model):
        module_summary(model, randn(2, 10))
    assert n == count_hooks(model) == 4


@pytest.mark.parametrize("error", [SaysSo(1, 2), KeyboardInterrupt(), RuntimeError("boom"), StopIteration(3)])
@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_an_error_in_forward_arrives_as_it_was_and_leaves_nothing_behind(error, look):
    def fail(m, x):
        m.running += 1
        torch.rand(())
        raise error

    broken = Calls(fail, running=torch.zeros(()))
    model = nn.Sequential(OrderedDict(stem=nn.Linear(3, 3), rnn=nn.BatchNorm1d(3), broken=broken))
    unsettle(model)
    with untouched(model), pytest.raises(type(error)) as caught:
        look(model, randn(4, 3))
    assert caught.value is error


def test_an_error_in_forward_says_which_layers_had_run():
    def fail(m, x):
        raise RuntimeError("boom")

    model = nn.Sequential(
        OrderedDict(stem=nn.Linear(3, 3), middle=nn.Linear(3, 3), broken=Calls(fail), head=nn.Linear(3, 3))
    )
    with pytest.raises(RuntimeError) as caught:
        module_summary(model, randn(4, 3))
    assert caught.value.args == ("boom",)
    notes = " ".join(caught.value.__notes__)
    assert "middle" in notes
    assert "head" not in notes


def test_an_error_before_any_layer_ran_arrives_too():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        module_summary(nn.Linear(3, 3), randn(4, 5))
    assert caught.value.__notes__


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_lazy_modules_stay_lazy(look):
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with untouched(model):
        look(model, randn(5, 4))
    assert model[1].has_uninitialized_params()
    assert type(model[1]) is nn.LazyLinear
    assert model(randn(5, 4)).shape == (5, 2)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_count_as_they_will_be():
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))
    summary = module_summary(model, randn(5, 4))
    assert sum(r.params for r in summary) == summary.n_params == 23
    assert "LazyLinear" in str(summary)


# ---- counts


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


# ---- shapes


@dataclass
class Out:
    a: Tensor
    b: Any = None


S = torch.Size


@pytest.mark.parametrize(
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
    inner = Calls(lambda m, x: output(x))
    model = Calls(lambda m, x: m.inner(m.fc(x)), fc=nn.Linear(5, 3), inner=inner)
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


@pytest.mark.parametrize("key", ["[/red]", "<b>", "a.b", 3, ("t", 1)])
def test_any_key_of_a_dict_can_be_shown(key):
    summary = module_summary(Calls(lambda m, x: {key: x}), randn(4, 3))
    assert next(iter(summary)).shape == {key: S([4, 3])}
    assert str(summary)
    assert in_terminal(summary)
    assert "<b>:" not in summary._repr_html_()


def test_shapes_are_those_of_the_output_not_of_what_later_became_of_it():
    model = Calls(lambda m, x: m.fc(x).resize_(2, 2), fc=nn.Linear(5, 3))
    assert row(module_summary(model, randn(4, 5)), "fc").shape == S([4, 3])


class HasAll:
    """Answers every question for an attribute with itself."""

    def __getattr__(self, name):
        return self


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.parametrize(
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
    model = Calls(lambda m, x: m.inner(m.fc(x)), fc=nn.Linear(5, 3), inner=Calls(lambda m, x: output(x)))
    with untouched(model):
        summary = module_summary(model, randn(4, 5))
        infos = layer_info(model, randn(4, 5))
    assert row(summary, "inner").called
    assert [info.type for info in infos] == ["Linear", "Calls"]
    assert all("Linear" in text for text in (str(summary), in_terminal(summary), summary._repr_html_()))


def test_a_generator_a_layer_returns_is_not_used_up():
    model = Calls(
        lambda m, x: sum(m.inner(m.fc(x))), fc=nn.Linear(5, 3), inner=Calls(lambda m, x: (r for r in x))
    )
    for summary in (module_summary(model, randn(4, 5)), module_summary(model, randn(4, 5), depth=1)):
        assert row_of_type(summary, "Calls").shape == S([3])


def test_layers_called_by_keyword_or_without_input_have_their_shapes():
    model = Calls(
        lambda m, x: m.act(input=m.fc(input=x)) + m.shift(),
        fc=nn.Linear(5, 3),
        act=nn.ReLU(),
        shift=Calls(lambda m: m.w, w=nn.Parameter(torch.ones(3))),
    )
    summary = module_summary(model, randn(4, 5))
    assert [row(summary, name).shape for name in ("fc", "act", "shift")] == [S([4, 3]), S([4, 3]), S([3])]
    assert [info.shape for info in layer_info(model, randn(1, 5))] == [S([1, 3]), S([1, 3]), S([3])]


# ---- multiply-adds


def attention(b, q, k, d, dv=None):
    return b * q * k * (d + (d if dv is None else dv))


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


# ---- batches


def test_a_mapping_means_keyword_arguments():
    model = Calls(lambda m, *, x, scale: m.fc(x) * scale, fc=nn.Linear(3, 2))
    for batch in ({"x": randn(4, 3), "scale": 2.0}, UserDict(x=randn(4, 3), scale=2.0)):
        assert row(module_summary(model, batch), "fc").shape == S([4, 2])
        assert layer_info(model, batch)[0].params == 8


def test_several_inputs_may_be_anything():
    model = Calls(lambda m, d, x, how: m.fc(d["x"] + x) if how == "sum" else None, fc=nn.Linear(3, 2))
    assert row(module_summary(model, {"x": randn(4, 3)}, randn(4, 3), "sum"), "fc").called


def test_a_batch_is_moved_to_where_the_model_is():
    model = nn.Sequential(nn.Linear(10, 30, device="meta"), nn.LSTM(30, 7, device="meta"))
    summary = module_summary(model, randn(4, 10))
    assert row(summary, "0").shape == S([4, 30])
    assert row(summary, "0").multiply_adds == 4 * 10 * 30
    assert summary.n_params == 330 + 4 * 7 * (30 + 7 + 2)


# ---- arguments


@pytest.mark.parametrize("depth", [-1, "x", 1.5, [1]])
def test_a_wrong_depth_is_refused(depth):
    calls = []
    model = Calls(lambda m, x: calls.append(x))
    with pytest.raises((TypeError, ValueError), match="depth"):
        module_summary(model, randn(2, 3), depth=depth)
    assert not calls


@pytest.mark.parametrize("look", [module_summary, layer_info])
@pytest.mark.parametrize("model", ["x", None, nn.Linear, [nn.Linear(2, 2)]])
def test_what_is_no_model_is_refused(look, model):
    with pytest.raises(TypeError, match=r"(?i)module|model|learner"):
        look(model, randn(2, 3))


@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_a_missing_batch_is_said(look):
    with pytest.raises((TypeError, ValueError)) as caught:
        look(mlp())
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "xb" in said or "batch" in said


@pytest.mark.parametrize(
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
    with untouched(model), pytest.raises(error):
        module_summary(model, *xb)


# ---- how it looks


EVIL = ["[red]", "[/red]", "[bold]x[/bold]", "[link=http://x]y", ":warning:", "\\[b]", "{x}", "%s", "[", "[]"]


def evil_model(name):
    kind = type(f"{name}Kind", (nn.Linear,), {})
    model = nn.Sequential()
    model.add_module(name, kind(3, 2))
    model.add_module("plain", nn.Linear(2, 2))
    return model


@pytest.mark.parametrize("name", EVIL)
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
    model, *xb = make()
    for depth in (None, 0, 1):
        summary = module_summary(model, *xb, depth=depth)
        for text in (str(summary), in_terminal(summary, 80), summary._repr_html_()):
            assert str(summary.n_params) in shown(text)


def long_names(n_deep):
    model = nn.Sequential(OrderedDict(first=nn.Linear(1000, 1234), second=nn.Linear(1234, 98)))
    for _ in range(n_deep):
        model = nn.Sequential(OrderedDict(a_rather_long_name_of_a_block=model))
    return model


narrow = pytest.mark.parametrize("columns", [40, 60, 80])
indented = pytest.mark.parametrize("n_deep", [0, 12])


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


# ---- with a learner


class Stateless:
    """Gives its batches by a generator function; has no length."""

    def __init__(self, batches):
        self.batches, self.n_given = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.n_given += 1
            yield batch


class Noise(Dataset):
    """Draws from torch's and Python's generators for every sample."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.rand(2) + random.random(), torch.rand(1)


def norm_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(2, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            Scaled(4),
            nn.Linear(4, 1),
        )


class Scaled(nn.Module):
    """Multiplies by a buffer, which its backward needs, and counts its calls in another."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("scale", torch.full((n,), 1.5))
        self.register_buffer("n_seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.n_seen += 1
        return x * self.scale


@contextmanager
def learner_untouched(learn):
    def state():
        return {
            key: (id(value), len(value) if isinstance(value, list | dict) else 0)
            for key, value in vars(learn).items()
            if not key.startswith("_")
        }

    before = state()
    with untouched(learn.model):
        try:
            yield
        finally:
            after = state()
            assert [k for k in {*before, *after} if before.get(k) != after.get(k)] == []


def test_a_learner_sums_up_its_model_and_what_trains_it():
    class MyLoss(nn.MSELoss):
        pass

    learn = make_learner(
        cbs=[ActivationStats(), Callback(name="extra")], loss_func=MyLoss(), model=norm_net()
    )
    with learner_untouched(learn):
        summary = learn.summary()
    assert learn.opt is None
    for text in (str(summary), in_terminal(summary), summary._repr_html_()):
        plain = text.lower().replace("_", "")
        for word in ("sgd", "myloss", "activationstats", "recorder", "extra", "batchnorm1d"):
            assert word in plain
    assert summary.n_params == sum(p.numel() for p in learn.model.parameters())
    assert row(summary, "5").shape == S([4, 1])
    assert summary.multiply_adds == 4 * (2 * 4 + 4)


def test_a_learner_shows_what_it_has_after_a_fit_and_with_a_ready_optimizer():
    learn = fit(make_learner())
    with learner_untouched(learn):
        assert "SGD" in str(learn.summary())
    model = mlp()
    ready = make_learner(model=norm_net(), opt_func=torch.optim.RMSprop(model.parameters()))
    assert "RMSprop" in str(ready.summary())
    partly = make_learner(
        opt_func=functools.partial(torch.optim.SGD, momentum=0.9), loss_func=functools.partial(F.mse_loss)
    )
    text = str(partly.summary())
    assert "SGD" in text
    assert "mse_loss" in text


@pytest.mark.parametrize("name", ["[/red]", "[red]", ":warning:"])
def test_names_around_a_learner_are_shown_as_they_are(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    loss = type(f"{name}Loss", (nn.MSELoss,), {})()
    cb = type(f"{name}Callback", (Callback,), {})(name="evil")
    opt = type(f"{name}SGD", (torch.optim.SGD,), {})
    learn = make_learner(loss_func=loss, cbs=cb, opt_func=opt)
    for summary in (learn.summary(), fit(learn) and learn.summary()):
        for text in (str(summary), in_terminal(summary), html.unescape(summary._repr_html_())):
            assert f"{name}Loss" in text
            assert f"{name}SGD" in text
            assert f"{name}Callback" in text or "evil" in text


def test_a_summary_of_a_learner_emits_no_event_and_prints_nothing(capsys):
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    learn.summary()
    module_summary(learn, randn(4, 2))
    layer_info(learn, randn(4, 2))
    assert log == []
    assert capsys.readouterr() == ("", "")


def test_results_of_an_earlier_fit_stay():
    learn = fit(make_learner(), cbs=[make() for make in DIAGNOSTICS[::2]])
    stats, losses, rows = (
        repr(r) for r in (learn.activation_stats.stats, learn.recorder.losses, learn.recorder.rows)
    )
    means = repr(learn.means.hooks.stored)
    with learner_untouched(learn):
        learn.summary()
        module_summary(learn, randn(4, 2))
        layer_info(learn, randn(4, 2))
    assert repr(learn.activation_stats.stats) == stats
    assert repr(learn.recorder.losses) == losses
    assert repr(learn.recorder.rows) == rows
    assert repr(learn.means.hooks.stored) == means


EVENTS_OF_A_FIT = [
    "before_fit",
    "before_epoch",
    "before_train",
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_backward",
    "before_step",
    "after_step",
    "after_batch",
    "before_validate",
    "after_validate",
    "after_epoch",
    "after_fit",
]


@pytest.mark.parametrize("event", EVENTS_OF_A_FIT)
def test_a_summary_in_the_middle_of_a_fit_changes_nothing(event):
    def run(look):
        torch.manual_seed(0)
        n_hooked = []
        watchers = [
            ActivationStats(include_paramless=True),
            ActivationStats(every=2, name="every_other"),
            HookCallback(hook=lambda m, i, o: o.mean(), name="means"),
            HookCallback(hook=lambda m, i, o: n_hooked.append(type(m)), name="counter"),
        ]
        learn = make_learner(model=norm_net(), cbs=[*watchers, Callback(name="look", **{event: look})])
        fit(learn, 2)
        results = [(w.stats, w.names, w.left_out) for w in watchers[:2]], watchers[2].hooks.stored
        return weights(learn.model), learn.recorder.losses, repr(results), n_hooked, torch.get_rng_state()

    def look(cb):
        with learner_untouched(cb.learn):
            assert cb.learn.summary().n_params == sum(p.numel() for p in cb.model.parameters())
            module_summary(cb.learn, randn(4, 2))
            layer_info(cb.learn, randn(4, 2))

    plain, watched = run(lambda cb: None), run(look)
    assert same(plain[0], watched[0])
    assert plain[1] == watched[1]
    assert plain[2] == watched[2]
    assert plain[3] == watched[3]
    assert torch.equal(plain[4], watched[4])


@pytest.mark.parametrize("event", ["before_batch", "after_loss", "after_batch"])
def test_a_summary_in_a_fit_of_a_model_that_renormalises_its_weights_changes_nothing(event):
    def run(look):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = tied()
        model.embed.max_norm = 1.0
        ids = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))
        learn = Learner(([(x, x.flip(0)) for x in ids], None), model, F.cross_entropy, lr=0.1)
        return fit(learn, 2, cbs=Callback(name="look", **{event: look})).recorder.losses

    assert run(lambda cb: None) == run(lambda cb: cb.learn.summary())


def test_a_summary_in_the_middle_of_a_fit_does_not_take_its_batches():
    data = TensorDataset(randn(12, 2), randn(12, 1))
    loaders = [
        Stateless(make_batches(3)),
        DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True),
    ]
    for loader in loaders:
        learn = Learner((loader, None), norm_net(), F.mse_loss, torch.optim.SGD)
        seen = []

        class Looks(Callback):
            def after_batch(self, seen=seen):
                seen.append(self.iter)
                assert len(seen) <= 6  # else the loader began anew at each look
                self.learn.summary()

        fit(learn, 2, cbs=Looks)
        assert seen == [0, 1, 2, 0, 1, 2], type(loader)


@pytest.mark.parametrize(
    "how",
    [
        lambda data, g: {"batch_size": 4, "shuffle": True, "generator": g},
        lambda data, g: {"batch_size": 4, "sampler": RandomSampler(data, generator=g)},
        lambda data, g: {
            "batch_sampler": BatchSampler(SubsetRandomSampler(range(12), generator=g), 4, False)
        },
    ],
    ids=["loader", "sampler", "batch sampler"],
)
def test_a_loader_with_a_generator_of_its_own_goes_on_as_without_a_summary(how):
    def run(look):
        data = TensorDataset(randn(12, 2), randn(12, 1))
        loader = DataLoader(data, **how(data, torch.Generator().manual_seed(3)))
        learn = Learner((loader, None), norm_net(), F.mse_loss, torch.optim.SGD)
        look(learn)
        torch.manual_seed(0)
        return fit(learn)

    plain, watched = run(lambda learn: None), run(lambda learn: learn.summary())
    assert plain.recorder.losses == watched.recorder.losses
    assert same(weights(plain.model), weights(watched.model))


def test_random_numbers_the_data_draws_are_given_back():
    learn = Learner((DataLoader(Noise(), batch_size=3, shuffle=True), None), norm_net(), F.mse_loss)
    with learner_untouched(learn):
        learn.summary()


def test_a_generator_class_is_asked_for_one_batch_at_most():
    loader = Stateless(make_batches(3))
    assert Learner((loader, None), norm_net(), F.mse_loss).summary().n_params > 0
    assert loader.n_given <= 1


def test_a_one_shot_iterator_loses_no_batch_in_silence():
    learn = Learner(((b for b in make_batches(3)), None), norm_net(), F.mse_loss)
    said = None
    try:
        learn.summary()
    except (ValueError, TypeError, RuntimeError) as error:
        said = str(error)
    assert said is None or "iterator" in said or "batch" in said
    fit(learn)
    assert len(learn.recorder.losses) == 3


def test_a_loader_without_a_batch_is_said():
    with pytest.raises(ValueError, match="batch"):
        Learner((Stateless([]), None), norm_net(), F.mse_loss).summary()


class Loss(nn.Module):
    """A model with keyword arguments whose output has the loss."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x, y):
        out = self.fc(x)
        return Pair(out, F.mse_loss(out, y))


@pytest.mark.parametrize(
    ("batch", "model", "n_inp"),
    [
        ({"x": randn(4, 2), "y": randn(4, 1)}, Loss, None),
        ((randn(4, 3), randn(4, 4), randn(4, 5)), lambda: nn.Bilinear(3, 4, 5), None),
        ((randn(4, 3), randn(4, 4), randn(4, 5), randn(4)), lambda: nn.Bilinear(3, 4, 5), 2),
        (randn(4, 2), lambda: nn.Linear(2, 1), None),
        ((PACKED, randn(2)), lambda: nn.GRU(5, 7), None),
    ],
    ids=["mapping", "several", "n_inp", "tensor", "packed"],
)
def test_a_learner_gives_its_model_the_inputs_of_a_training_batch(batch, model, n_inp):
    learn = Learner([batch], model(), F.mse_loss, n_inp=n_inp)
    with learner_untouched(learn):
        summary = learn.summary()
    assert summary.multiply_adds > 0 or isinstance(learn.model, nn.Bilinear)
    assert all(r.called for r in summary)


def test_an_overridden_predict_is_what_calls_the_model():
    class Own(Learner):
        def predict(self):
            return self.model(self.xb[0], scale=2.0)

    model = Calls(lambda m, x, *, scale: m.fc(x) * scale, fc=nn.Linear(2, 1))
    learn = Own(make_batches(), model, F.mse_loss)
    with learner_untouched(learn):
        assert row(learn.summary(), "fc").shape == S([4, 1])
        assert row(module_summary(learn, randn(7, 2)), "fc").shape == S([7, 1])
        assert layer_info(learn, randn(1, 2)) == [("Linear", 3, True, S([1, 1]), False)]


def test_an_error_in_the_summary_of_a_learner_leaves_it_as_it_was():
    error = SaysSo(1, 2)

    class Own(Learner):
        def predict(self):
            self.model(*self.xb)
            raise error

    learn = Own(make_batches(), norm_net(), F.mse_loss, cbs=ActivationStats())
    with learner_untouched(learn), pytest.raises(SaysSo) as caught:
        learn.summary()
    assert caught.value is error
    broken = make_learner(model=nn.Linear(5, 1))
    with learner_untouched(broken), pytest.raises(RuntimeError, match="shapes"):
        broken.summary()


def test_a_learner_in_a_narrow_terminal_shows_all_it_has(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    summary = make_learner(model=norm_net(), cbs=ActivationStats()).summary()
    assert str(summary.n_params) in shown(str(summary))
    assert "SGD" in str(summary)
    assert "mse_loss" in str(summary)


# ---- compiled


def never(*args):
    raise AssertionError("compiled")


@pytest.mark.parametrize(
    "compiled", [lambda m: torch.compile(m, backend=never), lambda m: m.compile(backend=never) or m]
)
def test_a_compiled_model_is_summed_up_as_the_model_inside(compiled):
    plain, *xb = MODELS["cnn"]()
    whole = module_summary(plain, *xb)
    model = compiled(cnn())
    with untouched(model):
        summary = module_summary(model, *xb)
    fields = ["name", "type", "depth", "params", "shape", "n_calls", "multiply_adds"]
    assert [[getattr(r, f) for f in fields] for r in summary] == [
        [getattr(r, f) for f in fields] for r in whole
    ]
    assert str(summary) == str(whole)
    assert layer_info(model, *xb) == layer_info(plain, *xb)
    assert total_params(model) == total_params(plain)
    assert num_features_model(model) == num_features_model(plain) == 2
    learn = Learner([(*xb, torch.zeros(4, dtype=torch.long))], model, F.cross_entropy)
    with learner_untouched(learn):
        assert [r.name for r in learn.summary()] == [r.name for r in whole]


@pytest.mark.parametrize("wrap", [True, False])
def test_a_model_with_a_compiled_part_adds_up(wrap):
    part = nn.Linear(4, 4)
    model = nn.Sequential(torch.compile(part, backend="eager") if wrap else part, nn.Linear(4, 2))
    if not wrap:
        part.compile(backend="eager")
    with untouched(model):
        summary = module_summary(model, randn(3, 4))
    assert sum(r.params for r in summary) == summary.n_params == 30
    assert summary.multiply_adds == 3 * (16 + 8)
    assert row(summary, "1").n_calls == row(summary, "0").n_calls == 1


# ---- fastai's functions


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(10, 30), (330, True)),
        (lambda: nn.Linear(10, 30).requires_grad_(False), (330, False)),
        (lambda: nn.ReLU(), (0, False)),
        (lambda: nn.Sequential(), (0, False)),
        (lambda: frozen_part(), (23, "partly")),
        (lambda: tied(), (77, True)),
        (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 3), (12, True)),
        (lambda: nn.LSTM(5, 7), (4 * 7 * 14, True)),
        (lambda: nn.MultiheadAttention(8, 2), (288, True)),
        (lambda: parameter_containers(), (12 + 5 + 8 + 7 + 1, True)),
        (lambda: nn.BatchNorm1d(8), (16, True)),
    ],
)
def test_total_params_counts_each_parameter_once(make, expected):
    found = total_params(make())
    assert found == expected
    assert (found.n, found.trainable) == expected
    assert found.trainable is expected[1] or found.trainable == "partly"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_has_no_elements_yet():
    assert total_params(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))).n == 8


def test_has_params_finds_parameters_at_any_depth():
    assert has_params(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))) is True
    assert has_params(Calls(None, w=nn.Parameter(torch.ones(())))) is True
    assert has_params(nn.Sequential(nn.ReLU())) is False
    assert has_params(Calls(None, b=torch.ones(()))) is False


def test_dummy_eval_gives_the_output_of_one_sample_in_eval_mode():
    seen = []
    spying = Calls(lambda m, x: seen.append((m.training, x.dtype, x.shape, torch.is_grad_enabled())) or x)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.9), spying).train()
    model[1].eval()
    with untouched(model):
        out = dummy_eval(model)
    assert out.shape == (1, 8, 62, 62)
    assert not out.requires_grad
    assert seen == [(False, torch.float32, S([1, 8, 62, 62]), False)]
    assert out.std() > 0.01
    assert dummy_eval(model, size=(5, 9)).shape == (1, 8, 3, 7)
    assert dummy_eval(model.bfloat16(), (5, 9)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("first", "out"),
    [
        (lambda: nn.Conv2d(6, 6, 3, groups=6), (1, 6, 6, 6)),
        (lambda: nn.ConvTranspose2d(4, 7, 3), (1, 7, 10, 10)),
        (lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 1)), (1, 2, 8, 8)),
        (lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), (1, 4, 8, 8)),
        (lambda: nn.Conv2d(1, 2, 1).requires_grad_(False), (1, 2, 8, 8)),
    ],
    ids=["depthwise", "transposed", "after norm", "parametrized", "grey and frozen"],
)
def test_dummy_eval_finds_the_input_channels(first, out):
    assert dummy_eval(first(), (8, 8)).shape == out


def test_model_sizes_are_those_of_the_children():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    unsettle(model)
    with untouched(model):
        sizes = model_sizes(model, size=(16, 16))
    assert sizes == [S([1, 8, 14, 14]), S([1, 8, 1, 1]), S([1, 8]), S([1, 5])]
    with untouched(model):
        assert num_features_model(model) == 5


@pytest.mark.parametrize("kernel", [31, 33, 70, 200])
def test_num_features_tries_larger_images(kernel):
    model = nn.Sequential(nn.Conv2d(1, 3, kernel, stride=50), nn.ReLU())
    with untouched(model):
        assert num_features_model(model) == 3


@pytest.mark.parametrize("look", [dummy_eval, model_sizes, num_features_model])
@pytest.mark.parametrize(
    "error", [KeyError("k"), TypeError("t"), AttributeError("a"), SaysSo(1, 2), RuntimeError("boom")]
)
def test_the_true_error_is_shown_and_modes_come_back(look, error):
    def fail(m, x):
        m.n += 1
        raise error

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Calls(fail, n=torch.zeros(())))
    unsettle(model)
    with untouched(model), pytest.raises(type(error)) as caught:
        look(model)
    assert caught.value is error


@pytest.mark.parametrize("look", [dummy_eval, model_sizes, num_features_model])
@pytest.mark.parametrize("make", [nn.ReLU, nn.Sequential, lambda: nn.Sequential(nn.ReLU(), nn.Flatten())])
def test_a_model_without_channels_is_refused_clearly(look, make):
    with pytest.raises(ValueError, match="channel"):
        look(make())


def test_layer_info_lists_the_leaves():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)
    )
    model[2].bias.requires_grad_(False)
    model[3].requires_grad_(False)
    model.train()
    xb = randn(1, 3)
    expected = [
        ("Linear", 16, True, S([1, 4]), False),
        ("BatchNorm1d", 8, True, S([1, 4]), True),
        ("ReLU", 0, False, S([1, 4]), True),
        ("Linear", 20, "partly", S([1, 4]), True),
        ("Linear", 10, False, S([1, 2]), False),
    ]
    for what in (model, Learner(make_batches(d=3), model, F.mse_loss)):
        found = layer_info(what, xb)
        assert isinstance(found, list)
        assert found == expected
        assert found[3]._asdict() == {
            "type": "Linear",
            "params": 20,
            "trainable": "partly",
            "shape": S([1, 4]),
            "same": True,
        }


def test_layer_info_gives_the_shapes_of_the_batch_it_got():
    assert [info.shape for info in layer_info(mlp(), randn(4, 10))] == [S([4, 30]), S([4, 30]), S([4, 2])]


def test_layer_info_of_nested_outputs():
    (info,) = layer_info(nn.LSTM(5, 7, batch_first=True), randn(1, 6, 5))
    assert info[:4] == ("LSTM", 392, True, (S([1, 6, 7]), (S([1, 1, 7]), S([1, 1, 7]))))
