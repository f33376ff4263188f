"""Watching activations changes no training, keeps nothing alive and waits for nothing."""

import array
import collections
import copy
import gc
import random
import tracemalloc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookcb import (
    ActivationStats,
    Callback,
    Learner,
    Metrics,
    Progress,
    Recorder,
    assert_no_hooks,
)
from hookcb.activations.stats import LAYER_STATS
from tests.activations.support import Around, Puts, assert_stats, printed, randn
from tests.hooks import support as zoo
from tests.support import along, each, everything, first, fit, in_turn, notice_waits, unsettle

OPTIONS = {
    "default": {},
    "all": {"modules": lambda m: True, "with_hist": True, "on_valid": True},
    "exact": {"modules": lambda m: True, "with_hist": True, "sample": None},
    "sampled": {"include_paramless": True, "with_hist": True, "sample": 3},
    "seldom": {"include_paramless": True, "every": 2, "keep": 2},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(5, 2)

    def forward(self, x):
        return self.fc(self.drop(self.lstm(self.emb(x))[0][:, -1]))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.emb = nn.Embedding(11, 8)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.enc(self.emb(x)).mean(1))


def cnn():
    block = [nn.Conv2d(3, 70, 3), nn.BatchNorm2d(70), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.2)]
    return nn.Sequential(*block, nn.Flatten(), nn.Linear(70 * 49, 2))


def images(n, seed):
    return [(randn(4, 3, 16, 16, seed=seed + k), torch.arange(4) % 2) for k in range(n)]


def tokens(n, seed):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 11, (4, 7), generator=g), torch.arange(4) % 2) for _ in range(n)]


MODELS = {"cnn": (cnn, images), "lstm": (Lstm, tokens), "transformer": (Transformer, tokens)}


def trained(make, data, *cbs):
    """All that a fit leaves and passes through."""
    torch.manual_seed(0)
    random.seed(0)
    model, seen = make(), []
    unsettle(model)

    def note(cb):
        grads = [None if p.grad is None else p.grad.clone() for p in cb.model.parameters()]
        modes = [m.training for m in cb.model.modules()], torch.is_grad_enabled()
        seen.append((cb.pred.detach().clone(), grads, modes, torch.get_rng_state()))

    noting = Callback(name="noting", after_step=note, after_pred=note)
    noting.order = 2000
    learn = Learner((data(4, 0), data(2, 99)), model, F.cross_entropy, torch.optim.AdamW, cbs=[noting, *cbs])
    after = [m.training for m in model.modules()]
    fit(learn, 2)
    state = {k: v for k, v in everything(model).items() if k not in ("parameters", "gradients", "buffers")}
    assert_no_hooks(model)
    assert after == [m.training for m in model.modules()]
    left = {"buffers": list(model.buffers()), "optimizer": list(learn.opt.state.values())}
    return {"seen": seen, "losses": list(learn.recorder.losses), **left, **state}


@each_option
@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_to_the_bit_what_it_is_without(name, options):
    plain = trained(*MODELS[name])
    stats = ActivationStats(**options)
    watched = trained(*MODELS[name], stats)
    assert [what for what in plain if not zoo.alike(plain[what], watched[what])] == []
    assert len(stats.stats) == 8 or options.get("every")
    assert len(stats.names) >= 3


@pytest.mark.parametrize("name", each(6, [x for x in zoo.MODELS if x != "frozen_all_but_the_input"]))
def test_no_output_raises_or_is_changed(name):
    def run(*cbs):
        model, outs = zoo.make(name), []
        torch.manual_seed(1)
        note = Callback(after_pred=lambda cb: outs.append(cb.pred.detach().clone()))
        batches = [zoo.make_input(k) for k in range(3)]
        fit(Learner(batches, model, square, torch.optim.SGD, lr=1e-3, cbs=[note, *cbs]))
        assert_no_hooks(model)
        return {"outs": outs, "weights": list(model.state_dict().values()), "rng": torch.get_rng_state()}

    def everywhere(name, options):
        return ActivationStats(name=name, **{**options, "modules": lambda m: True})

    plain = run()
    cbs = [everywhere(*option) for option in OPTIONS.items()]
    assert zoo.alike(run(*cbs), plain)
    assert printed(cbs[0].report())
    for stats in cbs:
        assert stats.names or stats.left_out
        assert len(stats.table()) <= len(stats.stats) * len(stats.names) * len(LAYER_STATS)


def square(p):
    return (p * (p + 1)).sum()


def vmapped(s, x):
    return torch.vmap(s.fc)(x)


def with_inner_grad(s, x):
    return torch.func.grad(lambda y: s.fc(y).sum())(x) + s.fc(x)


def with_jacobian(s, x):
    return s.fc(x) + torch.func.jacrev(s.fc)(x[0]).sum()


def with_vmapped_grad(s, x):
    return torch.vmap(torch.func.grad(lambda y: s.fc(y).pow(2).sum()))(x) + s.fc(x)


def with_forward_mode(s, x):
    return torch.func.jvp(s.fc, (x,), (x,))[1] + s.fc(x)


def with_functional_call(s, x):
    return torch.func.functional_call(s.fc, dict(s.fc.named_parameters()), (x,))


def with_double_backward(s, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(s.fc(x).pow(2).sum(), x, create_graph=True)[0]


TRANSFORMS = [vmapped, with_inner_grad, with_jacobian, with_vmapped_grad, with_forward_mode]
TRANSFORMS += [with_functional_call, with_double_backward]


@in_turn(("forward", "options"), along(TRANSFORMS, OPTIONS.values()))
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch.func.jvp
def test_a_layer_inside_a_transform_of_torch_func_raises_nothing(forward, options):
    def run(*cbs):
        model = zoo.Plain(forward, fc=zoo.sequential())
        batches = [zoo.make_input(k) for k in range(4)]
        fit(Learner(batches, model, lambda p: p.pow(2).sum(), torch.optim.SGD, lr=1e-3, cbs=cbs))
        return list(model.parameters())

    stats = ActivationStats(**options)
    assert zoo.alike(run(stats), run())
    assert stats.names or stats.left_out
    assert isinstance(printed(stats.report()), str)


# ---- nothing is kept


@each_option
def test_no_storage_of_an_output_outlives_its_batch(options):
    """A storage made of a Python array keeps the array alive, and nothing else does."""
    refs, alive = [], []

    def make(s, x):
        values = array.array("f", range(50))
        refs.append(weakref.ref(values))
        out = torch.frombuffer(values, dtype=torch.float32)
        return out.view(5, 10), {"t": out.view(5, 10).t()}

    look = Callback(after_batch=lambda cb: alive.append(sum(ref() is not None for ref in refs)))
    look.order = -2000
    model = Around(zoo.Plain(make))
    stats = ActivationStats(**{**options, "modules": ["odd", "fc"]})
    fit(Learner([torch.ones(3, 2)] * 6, model, torch.mean, torch.optim.SGD, cbs=[stats, look]))
    assert len(refs) == 6
    assert alive == [0] * 6
    if "sample" not in options:
        assert_stats(stats.stats[-1]["odd[0]"], torch.arange(50.0))


@pytest.mark.parametrize("options", first([OPTIONS["default"], OPTIONS["all"]]), ids=["default", "all"])
def test_neither_model_nor_learner_nor_outputs_live_on_with_the_statistics(options):
    refs = []
    model = Lstm()

    def note(m, i, o):
        refs.extend(weakref.ref(t) for t in zoo.flat(o).values())

    handles = [m.register_forward_hook(note) for m in model.modules()]
    stats = ActivationStats(**options)
    learn = fit(Learner((tokens(3, 0), tokens(2, 1)), model, F.cross_entropy, torch.optim.SGD, cbs=stats))
    refs += [weakref.ref(model), weakref.ref(learn), *map(weakref.ref, model.modules())]
    learn.remove_cb(stats)
    for handle in handles:
        handle.remove()
    del learn, model, handle, handles
    gc.collect()
    assert len(refs) > 40
    assert not [ref() for ref in refs if ref() is not None]
    assert len(stats.table()) > 0


@pytest.fixture
def traced():
    """Traces memory; what was there before is not looked through."""
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
def test_memory_is_flat_over_hundreds_of_batches(traced):
    held = []

    def note(cb):
        if cb.train_iter % 25 == 24:
            gc.collect()
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            held.append((tracemalloc.get_traced_memory()[0], tensors))

    last = Callback(after_batch=note)
    last.order = 2000
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    stats = ActivationStats(True, keep=40, include_paramless=True)
    learn = Learner([torch.ones(3, 2)] * 400, model, torch.mean, torch.optim.SGD, cbs=[stats, last])
    learn.remove_cbs([Recorder, Metrics, Progress])
    learn.fit(1)
    before, after = [map(max, zip(*half, strict=True)) for half in (held[:8], held[8:])]
    (memory_before, n_before), (memory_after, n_after) = before, after
    assert memory_after - memory_before < 40_000  # one number of each statistic and batch would be more
    assert n_after - n_before < 40
    assert 20 <= len(stats.stats) <= 40


# ---- nothing is waited for

SYNCS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"}
SYNCS |= {"_unique2", "_assert_async", "allclose", "is_pinned", "_pin_memory", "pin_memory"}
READS = ["item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__array__", "data_ptr"]


class Dispatched(TorchDispatchMode):
    """Counts the operators that are dispatched, and the transfers to another device among them."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        for x in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self.seen[f"on {x.device.type}"] += 1
        return func(*args, **(kwargs or {}))


class Observed(nn.Module):
    """Dispatches the forward of a model, hooks included, through a mode."""

    def __init__(self, model, mode):
        super().__init__()
        self.net, self.mode = model, mode

    def forward(self, x):
        with self.mode:
            return self.net(x)


@each_option
@pytest.mark.parametrize("name", MODELS)
def test_nothing_in_a_forward_reads_a_value_back(name, options, monkeypatch):
    # as elsewhere than on a CPU, where reading waits for nothing
    monkeypatch.setattr("hookcb.activations.stats.is_compiling", lambda: True)
    make, data = MODELS[name]
    mode, reads = Dispatched(), collections.Counter()
    for read in READS:
        was = getattr(torch.Tensor, read)

        def counted(x, *args, was=was, read=read, **kwargs):
            reads[read] += torch.utils._python_dispatch._get_current_dispatch_mode() is mode
            return was(x, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, read, counted)
    batches = [data(1, k)[0] for k in range(4)]
    batches[2] = (batches[2][0] * 1e30 if name == "cnn" else batches[2][0], batches[2][1])
    model = Observed(make(), mode)
    stats = ActivationStats(**options)
    fit(Learner(batches, model, F.cross_entropy, torch.optim.SGD, cbs=stats))
    assert len(stats.names) >= 3
    assert mode.seen["on cpu"] > 100
    assert {op for op in mode.seen if op in SYNCS} == set()
    assert not +reads


def test_the_count_of_what_is_read_back_can_fail():
    mode = Dispatched()
    with mode:
        assert torch.ones(1).item() == 1
        torch.ones(3).nonzero()
    assert {op for op in mode.seen if op in SYNCS} == {"_local_scalar_dense", "nonzero"}


@pytest.fixture
def strict_cuda(monkeypatch):
    """A synchronisation in a forward is an error there, and so is what is not deterministic."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=False)
    yield lambda on: notice_waits("error" if on else "default")
    notice_waits("default")
    torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@each_option
@pytest.mark.parametrize("large", [False, True])
def test_a_forward_on_a_gpu_does_not_synchronise(strict_cuda, options, large):
    class Strict(Around):
        def forward(self, x):
            strict_cuda(True)
            try:
                return super().forward(x)
            finally:
                strict_cuda(False)

    outs = [randn(300_000 if large else 5000, seed=k) * 3 + 10 for k in range(4)]
    outs[2][7] = float("nan")
    puts = Puts([out.cuda() for out in outs])
    model = Strict(zoo.Plain(lambda s, x: (s.puts(x), {"a": s.other(x)}), puts=puts, other=puts))
    stats = ActivationStats(**{**options, "modules": "odd.puts"})
    learn = Learner([torch.ones(3, 2)] * 4, model, torch.mean, torch.optim.SGD, device="cuda", cbs=stats)
    fit(learn)
    assert {name.split("#")[0] for name in stats.names} == {"odd.puts"}
    assert len(stats.stats) == 4 or options.get("every")
    if "sample" not in options and "every" not in options:
        for call, out in ((f"odd.puts#{k % 2}", outs[k]) for k in (0, 1)):
            assert_stats(stats.stats[0][call], out, shares=0.03 if large else 1e-6)
    assert printed(copy.deepcopy(stats).report())
