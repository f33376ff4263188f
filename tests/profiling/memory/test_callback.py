"""Watching memory changes nothing, counts each forward once, and ends however the fit does."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

from hookcb import (
    EMA,
    Callback,
    CancelBatchException,
    Compile,
    GradientAccumulation,
    GradientHealth,
    MixedPrecision,
    assert_no_hooks,
    count_hooks,
)
from hookcb.profiling.memory.callback import MemoryStats
from tests.profiling.memory.support import FLOAT, Blocks, batches_for, learner_for, mlp, watch
from tests.support import in_turn, same, weights

BS = 8
KNOWS_TOP = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


def fitted(model, cbs, batches=None, **options):
    learn = learner_for(model, batches, **options)
    with learn.no_logging():
        learn.fit(1, cbs=cbs)
    return learn


# ---- nothing changes


@in_turn("cb", [GradientAccumulation, MixedPrecision, EMA, lambda: GradientHealth(every=1)])
def test_beside_other_callbacks_weights_are_the_same(cb):
    plain, watched = Blocks(), Blocks()
    watched.load_state_dict(plain.state_dict())
    fitted(plain, [cb()])
    learn = fitted(watched, [cb(), MemoryStats(every=2)])
    assert same(weights(plain), weights(watched))
    assert learn.memory_stats.totals.kept > 0


def test_hooks_are_on_in_watched_batches_alone():
    n_hooks = []

    class Counts(Callback):
        order = 1000

        def after_pred(self):
            n_hooks.append(count_hooks(self.model))

        def after_batch(self):
            assert_no_hooks(self.model)

    fitted(mlp(), [MemoryStats(every=3), Counts()])
    assert n_hooks == [8, 0, 0, 8]  # two on each of three layers and the model


def test_the_model_may_be_copied_while_it_is_watched():
    copies = []

    class Copies(Callback):
        order = 1000

        def after_pred(self):
            copies.append(copy.deepcopy(self.model))
            pickle.dumps(self.model)
            copies[-1](self.xb[0]).sum().backward()

    stats = watch(mlp(), cbs=[Copies()])
    assert [row.calls for row in stats.layers()] == [1, 1, 1, 1]


def test_results_outlive_a_copy_and_the_model():
    model = Blocks()
    stats = watch(model)
    ref = weakref.ref(model)
    text = str(stats.report())
    for copied in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats)):
        assert str(copied.report()) == text
        assert str(copied.coverage) == str(stats.coverage)
        fitted(mlp(), [copied])
        assert [row.name for row in copied.layers()] == ["", "0", "1", "2"]
    del model
    gc.collect()
    assert ref() is None
    assert str(stats.report()) == text


def test_each_fit_begins_anew():
    stats = MemoryStats(every=1)
    learn = learner_for(mlp(), batches_for(5))
    with learn.no_logging():
        learn.fit(1, cbs=stats)
        learn.fit(2, cbs=stats)
    assert stats.n_batches == 10
    assert stats.growth().n_looks == 10
    assert stats.growth().slope == 0


def test_what_is_done_beside_a_fit_leaves_results_alone():
    stats = MemoryStats(every=1)
    learn = learner_for(mlp(), valid=batches_for(2), cbs=stats)
    with learn.no_logging():
        learn.fit(1)
        before = str(stats.report())
        learn.validate()
        learn.get_preds()
        learn.summary()
        learn.lr_find(num_it=3)
        learn.one_batch()
    assert str(stats.report()) == before
    assert_no_hooks(learn.model)


# ---- each forward counts once


class Inside(Callback):
    """Does something in the middle of each training batch."""

    order = 1000

    def __init__(self, event, act):
        super().__init__(**{event: lambda cb: act(cb.learn) if cb.learn.training else None})


@in_turn("event", ["before_batch", "after_pred", "after_loss", "after_backward"])
@in_turn("act", [lambda learn: learn.validate(), lambda learn: learn.summary()], ids=["validate", "summary"])
def test_a_validation_in_the_middle_does_not_count(event, act):
    plain = watch(mlp(), valid=batches_for(2))
    stats = watch(mlp(), cbs=[Inside(event, act)], valid=batches_for(2))
    assert str(stats.report()) == str(plain.report())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_repeats_does_not_count(use_reentrant):
    stats = watch(Blocks(use_reentrant=use_reentrant))
    assert {row.calls for row in stats.layers() if row.name != "blocks"} == {1}
    assert stats.layers()["blocks.1.act"].kept == 0
    inputs = 4 * BS * 16 * FLOAT
    assert stats.layers()[""].kept == inputs + BS * 16 * FLOAT  # and that of the head
    if KNOWS_TOP and not use_reentrant:
        assert stats.notes == ["recomputed in the backward: blocks.0, blocks.1, blocks.2, blocks.3"]


class OnCpu(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 6), mlp(6, 9, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x).sigmoid()
        with save_on_cpu():
            x = self.body(x)
        return self.head(x.sigmoid())


def test_hooks_of_the_users_own_win_and_are_told():
    stats = watch(OnCpu())
    assert stats.layers()["body"].kept == 0
    assert stats.layers()[""].kept == stats.layers()[""].kept_self == 2 * BS * 6 * FLOAT  # both sigmoids'
    assert stats.notes == (["not counted, kept by save_on_cpu: body"] if KNOWS_TOP else [])


def test_hooks_that_are_switched_off_are_told():
    with disable_saved_tensors_hooks("none, please"):
        stats = watch(mlp())
    assert stats.totals.kept == 0
    why = "bytes kept for the backward are unknown: hooks on saved tensors are switched off"
    assert stats.notes == [why]
    assert why in " ".join(str(stats.report()).split())


def test_hooks_around_the_fit_stay_in_action():
    packed = []
    with saved_tensors_hooks(lambda x: packed.append(tuple(x.shape)) or x, lambda x: x):
        watch(mlp(), every=1)
        watched = [shape for shape in packed if shape != (1,)]  # by which an older torch is asked
        del packed[:]
        fitted(mlp(), [])
    assert packed == watched != []


@pytest.mark.skipif(not KNOWS_TOP, reason="this torch does not tell which hooks are on")
@pytest.mark.parametrize("order", [-1, 1])
def test_hooks_that_another_callback_enters_and_leaves_stay_its_own(order):
    packed = []

    class Packs(Callback):
        def before_batch(self):
            self.hooks = saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x)
            self.hooks.__enter__()

        def after_backward(self):
            self.hooks.__exit__()
            packed.append("end")

    packs = Packs()
    packs.order = order
    fitted(mlp(), [packs, MemoryStats(every=1)])
    torch.ones(2, requires_grad=True).exp()
    assert packed.count("end") == 4
    assert packed[-1] == "end"


class Transforms(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        y = self.fc(x)
        y = y + torch.func.grad(lambda z: z.sin().square().sum())(y)
        return (y + torch.func.vmap(torch.func.jacrev(torch.sin))(y).sum(-1)).sigmoid()


def test_transforms_inside_a_forward_work_and_the_rest_is_counted():
    plain, watched = Transforms(), Transforms()
    watched.load_state_dict(plain.state_dict())
    fitted(plain, [])
    stats = fitted(watched, [MemoryStats(every=1)]).memory_stats
    assert same(weights(plain), weights(watched))
    assert stats.layers()[""].kept >= BS * 3 * FLOAT


class ChangesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(6, 3), nn.Sigmoid()

    def forward(self, x):
        y = self.act(self.fc(x))
        y += 1
        return y


def test_a_wrong_change_in_place_is_an_error_that_names_the_layer():
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: .* saved in act, is at version 1"
    ):
        watch(ChangesInPlace())


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("not this way")


class FallsBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Sigmoid(), Raises())

    def forward(self, x):
        x = self.stem(x)
        try:
            x = self.body(x)
        except ValueError:
            x = x.exp()
        return self.head(x)


def test_a_layer_that_raises_ends_with_its_error():
    stats = watch(FallsBack())
    assert stats.layers()["body"].calls == stats.layers()["head"].calls == 1
    assert stats.layers()["body.1"].kept == 0  # its graph was dropped with the error
    assert stats.layers()[""].kept_self == BS * 6 * FLOAT  # exp's output, in the model itself
    with pytest.raises(ValueError, match="not this way"):
        watch(nn.Sequential(nn.Linear(6, 3), Raises()))


def test_a_cancelled_batch_leaves_nothing():
    def cancel(cb):
        if cb.train_iter % 2 == 0:
            raise CancelBatchException

    stats = watch(mlp(), cbs=[Callback(after_loss=cancel)])
    assert (stats.n_batches, stats.growth().n_looks) == (2, 2)
    stats = watch(mlp(), cbs=[Callback(after_backward=cancel)], every=2)
    with pytest.raises(RuntimeError, match="no batch was watched"):
        stats.layers()


# ---- kinds of tensors and models


class Hides(nn.Module):
    def forward(self, x):
        return x.relu().to_mkldnn()


def test_tensors_that_hide_their_memory_are_told():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.hides = nn.Linear(6, 3), Hides()

        def forward(self, x):
            return self.hides(self.fc(x)).to_dense()

    stats = watch(Net())
    assert stats.coverage.left_out == dict.fromkeys(["hides", "Net"], "torch._mkldnn")
    assert stats.layers()["hides"].kept == BS * 3 * FLOAT  # the ReLU's output


def test_tensors_made_of_others_count_these():
    model = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid())
    batches = [(TwoTensor(x, x.clone()), 0) for x, _ in batches_for(2)]
    for m in model.modules():
        for name, p in m.named_parameters(recurse=False):
            setattr(m, name, nn.Parameter(TwoTensor(p.detach(), p.detach().clone())))
    stats = watch(model, batches, loss_func=lambda p, y: p.sum())
    assert stats.layers()["1"].kept == 2 * BS * 4 * FLOAT
    assert stats.layers()["0"].param_bytes == stats.layers()["0"].grad_bytes == 2 * 28 * FLOAT


def test_a_model_called_by_its_parts_is_watched():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    learn = learner_for(Parts())
    learn.predict = lambda: learn.model.head(learn.model.stem(learn.xb[0]).relu())
    stats = MemoryStats(every=1)
    with learn.no_logging():
        learn.fit(1, cbs=stats)
    assert stats.totals.kept - stats.totals.kept_by_loss == BS * 5 * FLOAT
    assert stats.coverage.silent == {"Parts": "it was not called"}


def test_a_choice_that_finds_nothing_says_what_there_is():
    with pytest.raises(LookupError, match="it has: 0, 1, 2"):
        watch(mlp(), modules="convs")


# ---- torch.compile


# of dynamo's own, which filters it in a way that does not see warnings made errors
dynamo_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def by_blocks(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrapped(block, backend)
    return model


@dynamo_warns
@pytest.mark.parametrize("compiled", [pytest.param(wrapped, marks=pytest.mark.slow), in_place, by_blocks])
def test_a_compiled_graph_counts_as_one_layer_and_is_compiled_once(compiled):
    torch.compiler.reset()
    counters.clear()
    plain, stats = watch(Blocks()), watch(compiled(Blocks(), "aot_eager"), batches_for(6), every=2)
    assert counters["stats"]["unique_graphs"] == counters["frames"]["total"] == 1
    assert stats.totals.kept == plain.totals.kept
    rows = stats.layers()
    if compiled is by_blocks:
        assert rows["blocks.0"].kept == plain.layers()["blocks.0"].kept
        assert rows["blocks.0"].type == "Block, compiled"
        assert stats.advice[0].frees == plain.advice[0].frees
        assert stats.coverage.silent["blocks.0.fc"] == "it is inside blocks.0, which is compiled"
    else:
        assert rows[""].kept == plain.layers()[""].kept
        assert stats.coverage.fired == ("Blocks, compiled",)
        assert stats.coverage.silent["stem"] == "it is inside Blocks, which is compiled"


def test_the_callback_that_compiles_is_not_disturbed():
    torch.compiler.reset()
    counters.clear()
    model = Blocks()
    learn = fitted(model, [Compile(backend="eager"), MemoryStats(every=2)])
    assert counters["stats"]["unique_graphs"] == 1
    assert learn.memory_stats.layers()[""].kept == watch(Blocks()).layers()[""].kept
    assert model._compiled_call_impl is None


def test_transforms_inside_what_is_compiled_work():
    torch.compiler.reset()
    counters.clear()
    model = Transforms()
    plain = copy.deepcopy(model)
    stats = watch(wrapped(model, "eager"), batches_for(4), every=2)
    watch(plain, batches_for(4))
    assert counters["stats"]["unique_graphs"] == 1
    assert stats.totals.kept > 0
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@dynamo_warns
def test_a_compiled_function_inside_a_forward_counts_for_the_layer_that_calls_it():
    torch.compiler.reset()
    counters.clear()

    @torch.compile(backend="aot_eager")
    def f(x):
        return x + torch.func.grad(lambda z: z.sin().sum())(x).sigmoid()

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return f(self.fc(x))

    stats = watch(Calls(), batches_for(4), every=2)
    assert counters["stats"]["unique_graphs"] == 1
    assert stats.layers()[""].kept_self >= BS * 3 * FLOAT
