"""What GradientHealth does to a training: nothing, but for steps it is told to leave out or to stop at."""

import array
import collections
import copy
import gc
import random
import re
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    Learner,
    MixedPrecision,
    assert_no_hooks,
)
from tests.gradients.support import (
    INF,
    NAN,
    OPTIONS,
    Encoder,
    Lstm,
    adam,
    at,
    batches,
    cnn,
    each_option,
    images,
    learner,
    mlp,
    norm_of,
    seeded,
    spoiling,
    tokens,
)
from tests.hooks import support as zoo
from tests.support import along, everything, first, fit, in_turn, same, weights
from tests.training.support import equal

MODELS = {"mlp": (mlp, lambda: batches(5), F.mse_loss)}
MODELS |= {"cnn": (cnn, lambda: images(0)[:4], F.cross_entropy)}
MODELS |= {"lstm": (Lstm, lambda: tokens(0)[:4], F.cross_entropy)}
MODELS |= {"encoder": (Encoder, lambda: tokens(0)[:4], F.cross_entropy)}


def trained(name, *cbs, opt=torch.optim.AdamW):
    """All that a fit leaves and passes through."""
    make, data, loss = MODELS[name]
    torch.manual_seed(0)
    random.seed(0)
    model, seen = seeded(make), []

    def note(cb):
        grads = [None if p.grad is None else p.grad.clone() for p in cb.model.parameters()]
        modes = [m.training for m in cb.model.modules()], torch.is_grad_enabled()
        seen.append((cb.pred.detach().clone(), grads, modes, torch.get_rng_state()))

    noting = Callback(name="noting", after_step=note, after_pred=note)
    noting.order = 2000
    learn = Learner((data(), data()), model, loss, opt, lr=1e-2, cbs=[noting, *cbs])
    fit(learn, 2)
    assert_no_hooks(model)
    state = {k: v for k, v in everything(model).items() if k not in ("parameters", "gradients", "buffers")}
    left = {"buffers": list(model.buffers()), "optimizer": list(learn.opt.state.values())}
    return {"seen": seen, "losses": list(learn.recorder.losses), **left, **state}


@in_turn(("name", "options"), along(MODELS, OPTIONS.values()))
def test_a_training_is_to_the_bit_what_it_is_without(name, options):
    plain, health = trained(name), GradientHealth(**options)
    watched = trained(name, health)
    assert [what for what in plain if not equal(plain[what], watched[what])] == []
    assert len(health.stats) > 1


@pytest.mark.parametrize("others", first([
    lambda: [GradientClip(0.1), GradientAccumulation(2)],
    lambda: [MixedPrecision("fp16", init_scale=2.0**20), EMA(0.9)],
    lambda: [MixedPrecision(), GradientClip(value=0.01)],
]))  # fmt: skip
@pytest.mark.parametrize("opt", first([partial(adam, fused=True), partial(torch.optim.SGD, momentum=0.9)]))
def test_beside_other_callbacks_a_training_is_to_the_bit_what_it_is_without(others, opt):
    plain = trained("mlp", *others(), opt=opt)
    health, stats = GradientHealth(activations=True), ActivationStats()
    watched = trained("mlp", *others(), health, stats, opt=opt)
    assert [what for what in plain if not equal(plain[what], watched[what])] == []
    alone = GradientHealth()
    trained("mlp", *others(), alone, opt=opt)
    assert equal(alone.table(), health.table())
    assert len(stats.stats) == 10


# ---- steps that are left out, or stopped at


@pytest.mark.parametrize(
    ("opt", "options"),
    along(
        [partial(torch.optim.SGD, momentum=0.9), adam, partial(adam, fused=True)],
        [{}, {"every": 4}, {"params": "0.*"}],
    ),
)
def test_a_step_that_is_left_out_is_as_if_its_batch_had_not_been(opt, options):
    data = batches(7)
    without = learner(mlp(), [b for k, b in enumerate(data) if k not in (2, 5)], opt=opt, lr=0.01)
    health = GradientHealth(on_nonfinite="skip", **options)
    seen = []
    note = at("after_batch", lambda cb: seen.append([p.grad for p in cb.model.parameters()]), name="note")
    learn = learner(mlp(), data, spoiling((2, 5)), health, note, GradientClip(10.0), opt=opt, lr=0.01)
    assert same(weights(learn.model), weights(without.model))
    assert health.skipped == 2
    assert all(grad is None for grads in (seen[2], seen[5]) for grad in grads)
    if not options:
        assert health.step_series("skipped") == [0, 0, 1, 0, 0, 1, 0]
        assert [x == 0 for x in health.series("0.weight", "update_ratio")] == [k in (2, 5) for k in range(7)]
        assert health.series("2.weight", "nonfinite") == [0, 0, 1, 0, 0, 1, 0]
        (finding,) = [f for f in learn.diagnose().findings if f.code == "nonfinite.first"]
        assert (finding.param, finding.step) == ("2.weight", 2)


def test_with_accumulation_the_whole_group_is_left_out():
    data = batches(8)
    health = GradientHealth(on_nonfinite="skip")
    learn = learner(mlp(), data, GradientAccumulation(2), spoiling((2,)), health)
    without = learner(mlp(), data[:2] + data[4:], GradientAccumulation(2))
    assert same(weights(learn.model), weights(without.model))
    assert health.skipped == 1


@pytest.mark.parametrize(
    ("opt", "bad"), along([partial(torch.optim.SGD, momentum=0.9), partial(adam, amsgrad=True)], [NAN, INF])
)
def test_raise_names_parameter_and_step_and_leaves_all_as_before_the_step(opt, bad):
    before = {}

    def note(cb):
        if cb.train_iter == 3:
            before["weights"] = weights(cb.model)
            before["opt"] = copy.deepcopy(cb.opt.state_dict())

    ended = at("after_fit", lambda cb: before.update(ended=True), name="ended")
    health = GradientHealth(on_nonfinite="raise", activations=True)
    model = mlp()
    cbs = [at("after_backward", note, name="note"), ended, health, GradientClip(0.1)]
    spoil = [spoiling((3,), name, bad) for name in ("0.bias", "2.weight")]
    spoil[1].name = "second"
    learn = Learner(batches(6), model, F.mse_loss, opt, lr=0.1, cbs=[*cbs, *spoil])
    with pytest.raises(FloatingPointError, match=re.escape("0.bias")) as error:
        fit(learn)
    assert re.search(r"\b3\b", " ".join([str(error.value), *getattr(error.value, "__notes__", [])]))
    assert same(weights(model), before["weights"])
    assert zoo.alike(learn.opt.state_dict(), before["opt"])
    assert before["ended"]
    assert_no_hooks(model)
    assert len(health.stats) >= 3
    fit(learn, cbs=at("before_fit", lambda cb: learn.remove_cbs([*spoil]), order=-999, name="calm"))
    assert len(health.stats) == 6


def test_by_default_a_nan_goes_through_and_is_written_down():
    health = GradientHealth()
    learn = learner(mlp(), batches(5), spoiling((2,)), health)
    assert any(w.isnan().any() for w in weights(learn.model))
    assert health.skipped == 0
    assert health.step_series("skipped") == [0] * 5


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_an_ordinary_overflow_is_left_to_the_scaler(on_nonfinite):
    def run(*cbs):
        amp = MixedPrecision("fp16", init_scale=2.0**24, growth_interval=50)
        return learner(mlp(), batches(20), amp, *cbs, lr=0.01), amp

    health = GradientHealth(on_nonfinite=on_nonfinite)
    (learn, amp), (plain, _) = run(health), run()
    assert same(weights(learn.model), weights(plain.model))
    assert health.skipped == amp.skipped > 0


def test_a_nan_that_no_scale_mends_is_raised_in_the_end():
    data = batches(30)
    for x, _ in data[4:]:
        x[0, 0] = NAN
    amp = MixedPrecision("fp16", init_scale=2.0**6)
    with pytest.raises(FloatingPointError, match=r"0\.weight"):
        learner(mlp(), data, amp, GradientHealth(on_nonfinite="raise"), lr=0.01)


def test_sparse_and_odd_gradients_that_are_not_finite_are_noticed():
    model = seeded(lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1)))
    data = [(torch.tensor([1, 2, 1]), torch.ones(3, 1) * (INF if k == 1 else 1)) for k in range(3)]
    before = weights(model)
    health = GradientHealth(on_nonfinite="skip")
    learn = learner(model, data, health)
    assert all(w.isfinite().all() for w in weights(learn.model))
    assert not same(before, weights(learn.model))
    assert health.skipped == 1


# ---- nothing is kept, nothing is waited for


@each_option
def test_no_storage_of_a_gradient_outlives_its_batch(options):
    """A storage made of a Python array keeps the array alive, and nothing else does."""
    refs, alive = [], []

    def swap(cb):
        for p in cb.model.parameters():
            values = array.array("f", [0.1] * p.numel())
            refs.append(weakref.ref(values))
            p.grad = torch.frombuffer(values, dtype=torch.float32).view_as(p)

    look = at("before_batch", lambda cb: alive.append(sum(ref() is not None for ref in refs)), -2000, "look")
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 600), nn.ReLU(), nn.Linear(600, 1)))
    learner(model, batches(6), at("after_backward", swap), GradientHealth(**options), look)
    assert len(refs) == 24
    assert alive == [0] * 6
    assert [ref() for ref in refs] == [None] * 24


@each_option
def test_neither_model_nor_learner_live_on_with_the_readings(options):
    health, model = GradientHealth(**options), seeded(lambda: nn.Linear(3, 1))
    learn = learner(model, None, health)
    refs = [weakref.ref(x) for x in (model, learn, learn.opt, model.weight)]
    learn.remove_cb(health)
    del learn, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
    assert health.table()
    assert health.report().rows


SYNCS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}


class Dispatched(TorchDispatchMode):
    """Counts operators between the callbacks before and after the one that is watched."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def watched(mode):
    """Callbacks that enter and leave the mode around what acts at order 0."""
    events = ["before_batch", "before_backward", "after_backward", "before_step", "after_step", "after_batch"]
    enter = Callback(name="enter", **{e: lambda cb: mode.__enter__() for e in events})
    leave = Callback(name="leave", **{e: lambda cb: mode.__exit__(None, None, None) for e in events})
    enter.order, leave.order = -1, 1
    return enter, leave


def half_and_clipped():
    return [MixedPrecision("fp16", init_scale=2.0**8), GradientClip(0.1)]


@in_turn("options", [{}, {"activations": True}])
@in_turn(
    ("name", "others"),
    # there is no LSTM in float16 on a CPU
    [(name, list) for name in MODELS] + [(name, half_and_clipped) for name in MODELS if name != "lstm"],
)
def test_recording_reads_no_value_back(name, options, others):
    make, data, loss = MODELS[name]
    mode, health = Dispatched(), GradientHealth(**options)
    learner(seeded(make), data() * 2, *watched(mode), health, *others(), loss=loss, opt=adam)
    assert len(health.stats) == len(data()) * 2
    assert sum(mode.seen.values()) > 20
    read = {op: n for op, n in mode.seen.items() if op in SYNCS}
    scales = 0 if others is list else 2 * len(health.stats)  # the scaler's, for which no CPU waits
    assert read == {} or (set(read) == {"_local_scalar_dense"} and sum(read.values()) <= scales)


def test_the_count_of_what_is_read_back_can_fail():
    mode = Dispatched()
    learner(
        mlp(), None, *watched(mode), at("before_step", lambda cb: norm_of(cb.loss.item() * torch.ones(1)))
    )
    assert mode.seen["_local_scalar_dense"] == 4
