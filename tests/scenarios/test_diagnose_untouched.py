"""A training with Diagnose is to the bit the one without; when it ends, nothing is left on or kept alive."""

import contextlib
import copy
import gc
import random
import threading
import warnings
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch
import torch._dynamo  # which replaces torch.manual_seed when it is first imported, as by a fit
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import hookcb
from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    Checkpoint,
    Diagnose,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    Learner,
    MixedPrecision,
    assert_no_hooks,
    watch,
)
from hookcb.core.torch_private import top_saved_hooks
from tests.hooks import support as zoo
from tests.support import (
    CANCELS,
    SaysSo,
    along,
    changes_in,
    each,
    first,
    in_turn,
    make_batches,
    make_model,
    no_collection,
    pairs,
)
from tests.training.support import Unsized, Wide, momentum

# many of these trainings are sick, on purpose or as tiny models with large steps are
pytestmark = pytest.mark.filterwarnings("ignore:ERROR  :UserWarning")
REACHED = (torch, F, torch.Tensor, nn.Module, torch.optim.Optimizer, torch.optim.SGD, torch.autograd)
torch.optim.SGD([torch.zeros(1)])  # the first one replaces `SGD.step`, for torch's profiler
ENDS = {"an error": SaysSo(1, 2), "Ctrl-C": KeyboardInterrupt(), "exit": SystemExit(3)}
ENDS["a cancel"] = CANCELS["fit"]()
STATUSES = ("healthy", "suspect", "sick", "unknown")
SCALE = {"init_scale": 2.0**8, "growth_interval": 2}


def of_process():
    """What of this process a diagnosis might leave changed."""
    return {
        "global hooks of optimizers": (list(_global_optimizer_pre_hooks), list(_global_optimizer_post_hooks)),
        "modes of dispatch": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "autocast and grad": (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()),
        "hooks of saved tensors": top_saved_hooks(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "functions": [
            {name: x for name, x in vars(place).items() if not isinstance(x, ModuleType)} for place in REACHED
        ],
        "threads": set(threading.enumerate()),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks), gc.get_debug()),
        "default type": torch.get_default_dtype(),
        "numpy": (np.random.get_state()[1].tolist(), np.geterr()),
        "threads of torch": torch.get_num_threads(),
    }


@contextlib.contextmanager
def leaving_no_trace():
    """Fails where after the block a hook, a mode, a thread or a replaced function is not as before it."""
    before = of_process()
    try:
        yield
    finally:
        after = of_process()
        assert [what for what in before if before[what] != after[what]] == []


def loss_of(pred, y):
    return F.mse_loss(pred, y) if pred.shape == y.shape else pred.float().square().mean()


def bits(t):
    """NaN is equal to itself here, and 0 is not -0."""
    return t.detach().to_dense().reshape(-1).contiguous().clone().view(torch.uint8)


def state_after(model, losses, opt=None):
    return {
        "losses": [bits(loss) for loss in losses],
        "weights": [bits(p) for p in model.parameters()],
        "grads": [None if p.grad is None else bits(p.grad) for p in model.parameters()],
        "buffers": {name: bits(b) for name, b in model.named_buffers()},
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "optimizer": copy.deepcopy(opt.state_dict()) if opt else None,
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    }


def differing(a, b):
    return [what for what in a if not zoo.alike(a[what], b[what])]


def train(model, batches=None, with_watch=False, make_opt=None, loss_func=loss_of, keep_grads=True):
    """A loop written by hand, followed by Diagnose or by nobody."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    opt = (make_opt or (lambda p: torch.optim.SGD(p, lr=0.05)))(model.parameters())
    losses = []
    w = watch(model, opt, Diagnose(show=False)) if with_watch else contextlib.nullcontext()
    with w:
        for x, y in batches or make_batches(3):
            if losses or not keep_grads:
                opt.zero_grad()
            loss = loss_func(model(x), y)
            if with_watch:
                w.report_loss(loss)
            loss.backward()
            opt.step()
            losses.append(loss.detach().clone())
    if with_watch:
        w.diagnose()
    return state_after(model, losses, opt)


def fit(model, batches, cbs=(), diagnose=(), n_epoch=1, valid=None, make_opt=None, loss_func=loss_of):
    """The state that a fit leaves, and its learner."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    losses = []
    note = Callback(after_loss=lambda cb: losses.append(cb.loss.detach().clone()))
    learn = Learner((batches, valid), model, loss_func, make_opt or torch.optim.SGD, lr=0.05, cbs=list(cbs))
    with learn.no_logging():
        learn.fit(n_epoch, cbs=[note, *diagnose])
    return state_after(model, losses, learn.opt), learn


# ---- to the bit the same

# nothing is trained of the one left out
ZOO = each(2, [name for name in zoo.MODELS if name != "frozen_all_but_the_input"][::3])
BATCHES = [(zoo.make_input(k), zoo.make_input(k + 9)) for k in range(2)]


@pytest.mark.parametrize("name", ZOO)
def test_odd_models_train_to_the_bit_as_without(name):
    """Their layers return dicts, dataclasses, None, sparse, complex, empty and nested tensors and more."""
    alone, _ = fit(zoo.make(name), BATCHES)
    with leaving_no_trace():
        diagnosed, learn = fit(zoo.make(name), BATCHES, diagnose=[Diagnose()])
    assert differing(alone, diagnosed) == []
    assert_no_hooks(learn.model)
    assert learn.diagnose().status in STATUSES


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.stem, self.head = nn.Linear(2, 4), nn.Linear(4, 1)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.ReLU(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant))


class OfTokens(nn.Module):
    """Embedding, what is in the middle, mean and head."""

    def __init__(self, body):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 8), body, nn.Linear(8, 3)

    def forward(self, x):
        h = self.embedding(x)
        h = self.body(h, h, h) if isinstance(self.body, nn.MultiheadAttention) else self.body(h)
        return self.head((h[0] if isinstance(h, tuple) else h).mean(1))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def cnn():
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Dropout2d(0.2), nn.Conv2d(4, 6, 3), *head
    )


IMAGES, TOKENS = (lambda n: torch.randn(n, 1, 8, 8)), (lambda n: torch.randint(11, (n, 5)))
NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), lambda n: torch.randn(n, 2)),
    "cnn": (cnn, IMAGES),
    "lstm": (lambda: OfTokens(nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)), TOKENS),
    "transformer": (lambda: OfTokens(encoder()), TOKENS),
    "attention": (lambda: OfTokens(nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)), TOKENS),
}


def net(name, n=None):
    """A model and batches for it, always the same; for one up to the look at whether it is sick, after 20."""
    n = n or (21 if name == "mlp" else 8)
    make, inputs = NETS[name]
    torch.manual_seed(2)
    return make(), [(inputs(6), torch.randint(3, (6,))) for _ in range(n)]


@pytest.mark.parametrize("name", each(2, NETS))
def test_usual_networks_train_to_the_bit_as_without(name):
    options = {"make_opt": torch.optim.AdamW, "loss_func": F.cross_entropy}
    alone = train(*net(name), **options)
    with leaving_no_trace():
        assert differing(alone, train(*net(name), with_watch=True, **options)) == []


@pytest.mark.parametrize("name", each(2, NETS))
def test_usual_networks_are_fitted_to_the_bit_as_without(name):
    def fitted(diagnose):
        model, batches = net(name)
        return fit(
            model, batches, (), diagnose, valid=batches[:2], make_opt=momentum, loss_func=F.cross_entropy
        )

    plain, _ = fitted([])
    with leaving_no_trace():
        diagnosed, learn = fitted([Diagnose()])
    assert differing(plain, diagnosed) == []
    assert_no_hooks(learn.model)


TOGETHER = {
    "bfloat16": lambda: [MixedPrecision()],
    "float16 with a scaler": lambda: [MixedPrecision(torch.float16, **SCALE)],
    "a scaler that overflows": lambda: [MixedPrecision(torch.float16, init_scale=2.0**40)],
    "accumulation": lambda: [GradientAccumulation(3)],
    "clipping": lambda: [GradientClip(0.1)],
    "clipping by value": lambda: [GradientClip(value=0.01)],
    "an average of weights": lambda: [EMA(0.9)],
    "its own callbacks given too": lambda: [
        ActivationStats(with_hist=True),
        GradientHealth(every=2, activations=True),
    ],
    "all at once": lambda: [
        MixedPrecision(torch.float16, **SCALE),
        GradientAccumulation(2),
        GradientClip(0.1),
        EMA(0.9),
        ActivationStats(every=3),
        GradientHealth(),
    ],
}


@pytest.mark.parametrize("name", first(TOGETHER))
@pytest.mark.usefixtures("fresh_dynamo")
def test_what_else_takes_part_in_the_training_goes_on_to_the_bit(name):
    batches = make_batches(7, bs=6)
    options = {"n_epoch": 2, "valid": make_batches(2, seed=1), "make_opt": torch.optim.Adam}
    plain, one = fit(Wide(), batches, TOGETHER[name](), **options)
    with leaving_no_trace():
        diagnosed, two = fit(Wide(), batches, TOGETHER[name](), [Diagnose()], **options)
    assert differing(plain, diagnosed) == []
    if hasattr(one, "ema"):
        assert zoo.alike(dict(one.ema.model.state_dict()), dict(two.ema.model.state_dict()))
    assert_no_hooks(two.model)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_in_a_watched_loop_trains_to_the_bit_as_without():
    states = []
    for with_watch in (False, True):
        torch._dynamo.reset()
        model, batches = net("mlp", n=5)
        compiled = torch.compile(model, backend="aot_eager")
        states.append(train(compiled, batches, with_watch, loss_func=F.cross_entropy))
        assert_no_hooks(model)
    for state in states:  # torch keeps what it has compiled where it likes
        del state["attributes"]
    assert differing(*states) == []


@pytest.mark.parametrize("reentrant", first([False, True]))
def test_checkpointed_layers_train_to_the_bit_as_without(reentrant):
    def made():
        torch.manual_seed(2)
        return Checkpointed(reentrant)

    alone = train(made(), make_batches(8))
    assert differing(alone, train(made(), make_batches(8), with_watch=True)) == []


@pytest.mark.slow
def test_a_scaler_in_a_watched_loop_is_to_the_bit_as_without():
    def looped(followed):
        model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        w = watch(model, opt, Diagnose(show=False), scaler=scaler) if followed else contextlib.nullcontext()
        with w:
            for x, y in make_batches(24):
                opt.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.mse_loss(model(x), y)
                if followed:
                    w.report_loss(loss)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
        return state_after(model, [], opt), scaler.state_dict()

    (alone, scale), (followed, scale_followed) = looped(False), looped(True)
    assert differing(alone, followed) == []
    assert scale == scale_followed


def test_lazily_made_layers_train_to_the_bit_as_without():
    def lazy():
        return nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    model = lazy()
    assert differing(train(lazy(), make_batches(4)), train(model, make_batches(4), with_watch=True)) == []
    assert_no_hooks(model)


def test_weights_that_go_to_nan_do_so_to_the_bit_as_without():
    def loss_func(pred, y):
        return (pred - y).abs().sqrt().log().mean() * 1e20

    plain, _ = fit(make_model(), make_batches(30), loss_func=loss_func)
    with pytest.warns(UserWarning, match="ERROR"):
        diagnosed, learn = fit(make_model(), make_batches(30), diagnose=[Diagnose()], loss_func=loss_func)
    assert differing(plain, diagnosed) == []
    assert learn.diagnose().status == "sick"


class Counts(nn.Module):
    """What it does depends on how often it was called, on random numbers of all kinds and on a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = (
            nn.Linear(2, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.3),
            nn.Linear(4, 1),
        )
        self.n = 0

    def forward(self, x):
        self.n += 1
        h = (
            self.drop(self.norm(self.a(x)))
            * (1 + self.n / 100)
            * (1 + random.random())
            * (1 + np.random.rand())
        )
        return self.b(h)


@pytest.mark.parametrize("what", first(["loss", "gradient"]))
def test_looking_for_the_origin_of_a_nan_leaves_the_training_to_the_bit(what):
    """Whatever is done again for it: random numbers, buffers and a count of calls go on as without."""

    def trained(diagnose):
        calls = []

        def loss_func(pred, y):
            calls.append(1)
            if len(calls) == 3:
                return (
                    pred.mean() * float("nan")
                    if what == "loss"
                    else (pred - pred.detach()).square().sum().sqrt()
                )
            return F.mse_loss(pred, y)

        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = Counts()
        # the step of a gradient that is not finite is left out
        skip = Callback(
            name="skip", before_step=lambda cb: [p.grad.nan_to_num_(0, 0, 0) for p in model.parameters()]
        )
        state, learn = fit(model, make_batches(12), [skip], diagnose, loss_func=loss_func)
        return state, model.n, learn

    (plain, n, _), (diagnosed, n_diagnosed, learn) = trained([]), trained([Diagnose()])
    assert differing(plain, diagnosed) == []
    assert n_diagnosed == n
    assert "nonfinite.first" in [f.code for f in learn.diagnose().findings]


def test_gradients_and_graphs_that_the_loop_keeps_are_its_own():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in make_batches(22):
            x.requires_grad_()
            pred = model(x)
            loss = F.mse_loss(pred, y)
            w.report_loss(loss)
            loss.backward(retain_graph=True)
            again = torch.autograd.grad(loss, [x])[0]
            assert torch.equal(x.grad, again)  # the second pass goes through the same graph
            assert not pred.retains_grad
            opt.step()
            opt.zero_grad()


# ---- however it ends


class FailsIn(nn.Module):
    def __init__(self, error, at, where):
        super().__init__()
        self.fc, self.error, self.at, self.where, self.n = nn.Linear(2, 1), error, at, where, 0

    def forward(self, x):
        self.n += 1
        out = self.fc(x)
        if self.n == self.at and self.where == "forward":
            raise self.error
        if self.n == self.at and self.where == "backward":
            out.register_hook(self.fail)
        return out

    def fail(self, grad):
        raise self.error


def fail_at(error, at):
    calls = []

    def loss_func(pred, y):
        calls.append(1)
        if len(calls) == at:
            raise error
        return F.mse_loss(pred, y)

    return loss_func


@in_turn(
    ("at", "where", "how"),
    pairs([1, 3], ["forward", "backward", "loss", "loader", "step", "callback"], ENDS),
)
def test_nothing_is_left_on_however_a_fit_ends(how, where, at):
    error = ENDS[how].with_traceback(None)
    model = FailsIn(error, at, where)
    batches = make_batches(5)

    def loader():
        for k, batch in enumerate(batches):
            if k + 1 == at:
                raise error
            yield batch

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            if model.n == at:
                raise error
            return super().step(closure)

    def raise_it(cb):
        if model.n == at:
            raise error

    learn = Learner(
        Unsized(loader()) if where == "loader" else batches,
        model,
        fail_at(error, at) if where == "loss" else F.mse_loss,
        Fails if where == "step" else torch.optim.SGD,
        lr=0.1,
        cbs=Callback(after_backward=raise_it) if where == "callback" else (),
    )
    with leaving_no_trace(), learn.no_logging():
        if how == "a cancel":
            with contextlib.suppress(RuntimeError, CANCELS["fit"]):  # raised where no cancel is heard
                learn.fit(1, cbs=Diagnose())
        else:
            with pytest.raises(type(error)) as raised:
                learn.fit(1, cbs=Diagnose())
            assert raised.value is error
    assert_no_hooks(model)
    assert "forward" not in vars(model.fc)
    if at > 1 or where != "loader":
        assert learn.diagnose().status in STATUSES


@pytest.mark.parametrize(
    ("how", "where"), along(["an error", "Ctrl-C", "exit"], ["forward", "backward", "loop"])
)
def test_nothing_is_left_on_however_a_watched_loop_ends(how, where):
    error = ENDS[how].with_traceback(None)
    model = FailsIn(error, 3, where)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    verdicts = []

    def looped():
        with watch(model, opt, Diagnose(show=False)) as w:
            verdicts.append(w.diagnose)
            for x, y in make_batches(5):
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                if model.n == 3 and where == "loop":
                    raise error
                opt.step()

    with leaving_no_trace(), pytest.raises(type(error)) as raised:
        looped()
    assert raised.value is error
    assert_no_hooks(model)
    assert not opt._optimizer_step_pre_hooks
    assert not opt._optimizer_step_post_hooks
    assert verdicts[0]().status in STATUSES


def test_nothing_is_left_on_where_the_diagnosis_ends_the_fit():
    def loss_func(pred, y):
        return (pred - y).mean() * float("nan")

    learn = Learner(make_batches(30), make_model(), loss_func, torch.optim.SGD, lr=0.1)
    with leaving_no_trace(), learn.no_logging():
        learn.fit(1, cbs=Diagnose(on_sick="stop"))
    assert len(learn.recorder.losses) < 30
    assert learn.diagnose().status == "sick"
    assert_no_hooks(learn.model)


def test_a_callback_that_fails_before_the_fit_leaves_nothing_on():
    def fail(cb):
        raise SaysSo(1, 2)

    for order in (-99, 99):
        failing = Callback(before_fit=fail)
        failing.order = order
        learn = Learner(make_batches(2), make_model(), F.mse_loss, torch.optim.SGD, cbs=failing)
        with leaving_no_trace(), learn.no_logging(), pytest.raises(SaysSo):
            learn.fit(1, cbs=Diagnose())
        assert_no_hooks(learn.model)


# ---- nothing raises out of what the user calls


class Returns(nn.Module):
    """The whole model gives something odd; its loss is taken from a tensor that it keeps."""

    def __init__(self, make):
        super().__init__()
        self.fc, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        h = self.fc(x)
        self.h = h
        return self.make(self, h)


WHOLE = {name: f for name, (f, _) in zoo.OUTPUTS.items()}


@pytest.mark.parametrize("name", each(2, WHOLE))
def test_a_model_may_return_whatever_it_likes(name):
    def loss_func(pred, y):
        return model.h.square().mean()

    model = Returns(WHOLE[name])
    batches = [(zoo.make_input(k), None) for k in range(2)]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, _ in batches:
            model(x)
            loss = loss_func(None, None)
            w.report_loss(loss)
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert w.diagnose().to_json()
    assert_no_hooks(model)


TARGETS = {
    "none": None,
    "a string": "cat",
    "a list of strings": ["cat", "dog", "cow", "ape"],
    "a dict": {"boxes": [torch.ones(2, 4), torch.ones(0, 4)], "n": 3},
    "an empty tensor": torch.ones(0, 4),
    "a 0-d tensor": torch.tensor(3.0),
    "booleans": torch.ones(4, dtype=torch.bool),
    "complex numbers": torch.ones(4, dtype=torch.complex64),
    "integers far out": torch.tensor([2**62, -(2**62), 0, 1]),
    "sparse": torch.eye(4).to_sparse(),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "of another class": torch.ones(4).as_subclass(zoo.Sub),
    "numpy": np.ones(4),
}


@in_turn("name", TARGETS)
def test_a_target_may_be_whatever_it_likes(name):
    def loss_func(pred, y):
        return pred.square().mean()

    batches = [(zoo.make_input(k), TARGETS[name]) for k in range(3)]
    learn = Learner(batches, zoo.sequential(), loss_func, torch.optim.SGD, lr=0.1)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose())
    assert str(learn.diagnose())


@in_turn("name", ["cross_entropy", "nll_loss", "mse_loss", "bce", "ctc", "tuple"])
def test_a_loss_may_be_whatever_it_likes(name):
    losses = {
        "cross_entropy": lambda p, y: F.cross_entropy(
            p, y, reduction="sum", label_smoothing=0.1, ignore_index=2
        ),
        "nll_loss": lambda p, y: F.nll_loss(p.log_softmax(1), y),
        "mse_loss": lambda p, y: F.mse_loss(p, y[:, None].float().expand_as(p)),
        "bce": lambda p, y: F.binary_cross_entropy_with_logits(
            p, F.one_hot(y, 4).float(), pos_weight=torch.ones(4)
        ),
        "ctc": lambda p, y: F.ctc_loss(
            p.log_softmax(-1)[:, None], y[None, :1] + 1, torch.tensor([4]), torch.tensor([1])
        ),
        "tuple": lambda p, y: sum([F.cross_entropy(p, y), p.square().mean(), torch.zeros(())]),
    }
    batches = [(zoo.make_input(k), torch.arange(4) % 3) for k in range(3)]
    learn = Learner(batches, zoo.sequential(), losses[name], torch.optim.SGD, lr=0.01)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose())
    assert str(learn.diagnose())


# ---- nothing is kept alive


class Seen:
    """Weak references to what a training made, by batch."""

    def __init__(self):
        self.refs = []

    def note(self, batch, *tensors):
        self.refs += [(batch, weakref.ref(t)) for t in tensors]

    def alive(self, before=10**9):
        return [(batch, ref().shape) for batch, ref in self.refs if ref() is not None and batch < before]


class Notes(nn.Module):
    """Notes what is made inside it."""

    def __init__(self, seen):
        super().__init__()
        self.a, self.b, self.seen, self.n = nn.Linear(2, 3), nn.Linear(3, 1), seen, 0

    def forward(self, x):
        h = self.a(x).relu()
        out = self.b(h)
        self.seen.note(self.n, x, h, out)
        self.n += 1
        return out


def fresh_batches(n, seen):
    for k in range(n):
        g = torch.Generator().manual_seed(k)
        x, y = torch.randn(4, 2, generator=g), torch.randn(4, 1, generator=g)
        seen.note(k, x, y)
        yield x, y


def test_no_tensor_of_a_batch_lives_on_in_a_watched_loop():
    seen = Seen()
    model = Notes(seen)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_collection(), watch(model, opt, Diagnose(show=False)) as w:
        for k, (x, y) in enumerate(fresh_batches(25, seen)):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            seen.note(k, loss)
            w.report_loss(loss)
            loss.backward()
            opt.step()
            assert seen.alive(before=k) == []
            del x, y, loss
    verdict = w.diagnose()
    gc.collect()
    assert seen.alive() == []
    assert str(verdict)


def test_no_tensor_and_no_model_lives_on_after_a_fit():
    seen = Seen()
    diagnose = Diagnose()

    def loss_func(pred, y):
        loss = F.mse_loss(pred, y)
        seen.note(99, loss)
        return loss

    def fitted():
        model = Notes(seen)
        learn = Learner(Unsized(fresh_batches(25, seen)), model, loss_func, torch.optim.Adam, lr=0.1)
        with learn.no_logging():
            learn.fit(1, cbs=diagnose)
        seen.note(99, *model.parameters(), *model.modules(), learn.opt)
        return learn.diagnose()

    verdict = fitted()
    gc.collect()
    assert [ref() for _, ref in seen.refs if ref() is not None] == []
    assert diagnose.verdict is not None
    assert str(verdict)


def test_no_tensor_and_no_model_lives_on_after_a_fit_that_fails():
    seen = Seen()
    diagnose = Diagnose()

    def fitted():
        model = Notes(seen)
        learn = Learner(
            Unsized(fresh_batches(9, seen)), model, fail_at(ZeroDivisionError(), 5), torch.optim.SGD, lr=0.1
        )
        with learn.no_logging(), contextlib.suppress(ZeroDivisionError):
            learn.fit(1, cbs=diagnose)
        seen.note(99, *model.parameters(), *model.modules())

    fitted()
    gc.collect()
    assert seen.alive() == []


def test_no_model_lives_on_after_a_look_before_training():
    seen = Seen()

    def looked():
        model = Notes(seen)
        opt = torch.optim.Adam(model.parameters())
        batch = next(fresh_batches(1, seen))
        verdict = hookcb.diagnose(model, batch, F.mse_loss, opt, steps=3)
        seen.note(99, *model.parameters(), *model.modules())
        return verdict

    verdict = looked()
    gc.collect()
    assert [ref() for _, ref in seen.refs if ref() is not None] == []
    assert str(verdict)


def test_memory_does_not_grow_with_the_batches():
    """What is recorded is numbers, and few: no tensor more after 200 batches than after 100."""
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with watch(model, opt, Diagnose(show=False)) as w:
        for k, (x, y) in enumerate(make_batches(2) * 100):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            w.report_loss(loss)
            loss.backward()
            opt.step()
            if k in (99, 199):
                gc.collect()
                counts.append(sum(isinstance(t, torch.Tensor) for t in gc.get_objects()))
    assert counts[1] <= counts[0] + 10


def test_the_model_is_untouched_but_for_its_training():
    model = Wide()
    with changes_in(model) as changed:
        learn = Learner(make_batches(22), model, F.mse_loss, torch.optim.SGD, lr=0.1)
        with learn.no_logging():
            learn.fit(1, cbs=Diagnose())
    trained = {"weights", "versions of weights", "gradients", "buffers", "random state of torch"}
    assert set(changed) <= trained


def test_a_checkpoint_of_a_diagnosed_fit_resumes_to_the_bit(tmp_path):
    def learner():
        torch.manual_seed(0)
        return Learner(
            (make_batches(12), make_batches(2, seed=1)), Wide(), F.mse_loss, torch.optim.Adam, lr=0.01
        )

    whole, parts = learner(), learner()
    with whole.no_logging():
        torch.manual_seed(3)
        whole.fit(3, cbs=Diagnose())
    with parts.no_logging():
        torch.manual_seed(3)
        parts.fit(1, cbs=[Diagnose(), Checkpoint(tmp_path)])
    resumed = learner()
    with resumed.no_logging():
        resumed.fit(3, cbs=[Diagnose(), Checkpoint(tmp_path)], resume="latest")
    assert zoo.alike(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    assert resumed.diagnose().status in ("healthy", "suspect")


@pytest.mark.slow
def test_a_checkpoint_without_diagnose_resumes_with_it_and_the_other_way_round(tmp_path):
    for k, (before, after) in enumerate([([], [Diagnose()]), ([Diagnose()], [])]):
        folder = tmp_path / str(k)
        for n_epoch, cbs in ((1, before), (2, after)):
            learn = Learner(make_batches(4), make_model(), F.mse_loss, torch.optim.SGD, lr=0.01)
            # the second fit of the second pair says that the state of Diagnose is not used
            with learn.no_logging(), warnings.catch_warnings():
                if (k, n_epoch) == (1, 2):
                    warnings.simplefilter("ignore")
                learn.fit(n_epoch, cbs=[*cbs, Checkpoint(folder)], resume="latest")
        assert len(learn.recorder.rows) == 2
