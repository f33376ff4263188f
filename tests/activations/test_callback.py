"""HookCallback and ActivationStats see each layer in the right batches, and measure it right."""

import contextlib
import dataclasses
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from hookcb import (
    ActivationStats,
    Callback,
    CancelFitException,
    Hook,
    HookCallback,
    Learner,
    assert_no_hooks,
    count_hooks,
)
from tests.support import (
    EVENTS,
    PACKED,
    Net,
    Pair,
    SaysSo,
    X,
    Y,
    fit,
    layer_oracle,
    make_batches,
    make_learner,
    make_model,
    primary_plan,
    spy,
)


@pytest.mark.parametrize("raised", [CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize("event", EVENTS)
def test_hooks_are_gone_however_the_fit_ends(event, raised):
    model = make_model()
    plan = {**primary_plan(event), (event, 0): raised("why")}
    cbs = [ActivationStats(), HookCallback(hook=lambda m, i, o: 0, name="h"), spy([], "a", plan, order=5)]
    learn = make_learner(1, 1, model=model, cbs=cbs)
    with contextlib.suppress(ValueError, KeyboardInterrupt, RuntimeError):
        fit(learn)
    assert_no_hooks(model)
    assert count_hooks(model) == 0


def test_an_error_in_the_hook_goes_on_and_leaves_no_hook():
    model = make_model()
    error = SaysSo(1, 2)

    def bad(m, i, o):
        raise error

    learn = make_learner(model=model)
    with pytest.raises(SaysSo) as info:
        fit(learn, cbs=HookCallback(hook=bad, name="bad"))
    assert info.value is error
    assert count_hooks(model) == 0


@pytest.mark.parametrize("every", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("order", [-9, 0, 9])
def test_every_acts_on_training_batches_0_n_2n_counted_over_epochs(every, order):
    class Reads(HookCallback):
        seen = ()

        def before_fit(self):
            super().before_fit()
            self.seen = []

        def hook(self, m, i, o):
            self.seen.append((self.epoch, self.iter))

    for make in (lambda: Reads(modules="0", every=every), lambda: ActivationStats(modules="0", every=every)):
        cb = make()
        cb.order = order
        log = []
        others = [spy(log, "a", order=-1), spy(log, "b", order=1)]
        fit(make_learner(n_train=5, cbs=[*others, cb]), 2)
        numbers = [5 * epoch + i for epoch, i in itertools.product(range(2), range(5))]
        expected = [divmod(n, 5) for n in numbers if n % every == 0]
        if isinstance(cb, Reads):
            assert cb.seen == expected
        else:
            assert len(cb.stats) == len(expected)


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True])
def test_an_every_that_cannot_be_is_refused(every):
    for cls in (ActivationStats, HookCallback):
        with pytest.raises((ValueError, TypeError), match="every"):
            cls(every=every, **({"hook": print} if cls is HookCallback else {}))


def test_a_hook_callback_without_a_hook_is_told():
    with pytest.raises((TypeError, NotImplementedError, ValueError), match="hook"):
        fit(make_learner(), cbs=HookCallback())
    with pytest.raises(TypeError, match="hook"):
        HookCallback(hook=3)


def test_modules_that_select_nothing_are_told_when_the_fit_begins():
    model = make_model()
    learn = make_learner(model=model)
    with pytest.raises(LookupError, match="convs"):
        fit(learn, cbs=[ActivationStats(modules="convs.*")])
    assert count_hooks(model) == 0


def test_modules_are_looked_up_at_each_fit():
    stats = ActivationStats(include_paramless=True)
    learn = fit(make_learner(cbs=stats))
    assert list(stats.names) == ["0", "1", "2"]
    learn.model.add_module("3", nn.Tanh())
    fit(learn)
    assert list(stats.names) == ["0", "1", "2", "3"]


def test_hooks_left_on_by_choice_are_not_doubled_and_go_with_remove():
    model = make_model()
    cb = HookCallback(hook=lambda m, i, o: o.mean().item(), remove_end=False, name="h")
    learn = make_learner(model=model, cbs=cb)
    fit(learn)
    n = count_hooks(model)
    assert n == 2
    fit(learn)
    assert count_hooks(model) == n
    cb.remove()
    cb.remove()
    assert count_hooks(model) == 0
    assert len(cb.hooks.stored) == 2


def test_the_stored_results_are_those_of_the_last_training_batch():
    learn = make_learner(lr=0.0, cbs=HookCallback(hook=lambda m, i, o: o.clone(), name="h"))
    fit(learn)
    x, _ = learn.dls.train[-1]
    with torch.no_grad():
        assert torch.equal(learn.h.hooks.stored[0], learn.model[0](x))
        assert torch.equal(learn.h.hooks.stored[1], learn.model(x))


def assert_stats(got, t, eps=0.05, rel=1e-4):
    want = layer_oracle(t, eps)
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=rel, abs=1e-7, nan_ok=True), key
        assert isinstance(got[key], float)


@pytest.mark.parametrize("eps", [0.05, 0.5, 0.0])
def test_activation_statistics_agree_with_float64(eps):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 2),
    )
    batches = [(torch.randn(k, 1, 8, 8) * 3 + 1, torch.randint(0, 2, (k,))) for k in (4, 4, 3)]
    stats = ActivationStats(include_paramless=True, eps=eps)
    fit(Learner(batches, model, F.cross_entropy, torch.optim.SGD, lr=0.0, cbs=stats))
    assert list(stats.names) == list("0123456")
    assert len(stats.stats) == 3
    for record, (x, _) in enumerate(batches):
        for layer, module in enumerate(model):
            x = module(x)
            assert_stats(stats.stats[record][layer], x, eps)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_the_spread_is_right_far_from_zero(offset):
    class Shift(nn.Module):
        def forward(self, x):
            return x + offset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), Shift())
    x = torch.randn(64, 2)
    stats = ActivationStats(include_paramless=True)
    fit(Learner([x], model, lambda p: p.mean(), torch.optim.SGD, lr=0.0, cbs=stats))
    assert_stats(stats.stats[0][1], model(x), rel=1e-3)


class Gives(nn.Module):
    """A layer that puts out what a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Around(nn.Module):
    """Calls a layer of any output and trains on something else."""

    def __init__(self, make):
        super().__init__()
        self.odd = Gives(make)
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        self.out = self.odd(x)
        return self.fc(x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


def watch(make, **kwargs):
    stats = ActivationStats(modules="odd", **kwargs)
    model = Around(make)
    fit(Learner([X, Y], model, lambda p: p.mean(), torch.optim.SGD, cbs=stats))
    return stats, model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: (x, x * 2), ["odd[0]", "odd[1]"]),
        (lambda x: [x, None, x], ["odd[0]", "odd[2]"]),
        (lambda x: {"a": x, "b": {"c": x}}, ["odd.a", "odd.b.c"]),
        (lambda x: Pair(x, x), ["odd.x", "odd.y"]),
        (lambda x: Output(x), ["odd.logits"]),
        (lambda x: (x, (x, [x])), ["odd[0]", "odd[1][0]", "odd[1][1][0]"]),
        (lambda x: x.half(), ["odd"]),
        (lambda x: x.bfloat16(), ["odd"]),
        (lambda x: x.double(), ["odd"]),
        (lambda x: (x * 100).int(), ["odd"]),
        (lambda x: x.mean(), ["odd"]),
        (lambda x: x[:1, :1], ["odd"]),
        (lambda x: x[:, 0].t().contiguous().t(), ["odd"]),
        (lambda x: x.expand(3, 4, 2), ["odd"]),
        (lambda x: (x * 1e4).half().clamp(-6e4, 6e4), ["odd"]),
    ],
)
def test_outputs_of_any_structure_and_type_are_named_by_path_and_measured(make, names):
    stats, model = watch(make)

    def tensors(o):
        if torch.is_tensor(o):
            return [o]
        if isinstance(o, dict):
            o = list(o.values())
        if isinstance(o, Output):
            o = [o.logits]
        return [t for part in o or () for t in tensors(part)] if o is not None else []

    got = [n.replace("['", ".").replace("']", "") for n in stats.names]
    assert got == names or list(stats.names) == [n.replace(".x", "[0]").replace(".y", "[1]") for n in names]
    assert len(stats.stats) == 2
    for layer, t in enumerate(tensors(model.out)):
        assert_stats(stats.stats[1][layer], t, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: None,
        lambda x: (None, "text"),
        lambda x: 3,
        lambda x: x[:0],
        lambda x: x > 0,
        lambda x: torch.complex(x, x),
        lambda x: x.to_sparse(),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
        lambda x: torch.nested.as_nested_tensor([x[0], x[1][:1]], layout=torch.jagged),
        lambda x: x.to("meta"),
        lambda x: object(),
        lambda x: (x for _ in range(2)),
        lambda x: {1: x, None: x},
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_no_output_raises_out_of_the_forward(make):
    stats, model = watch(make)
    assert len(stats.stats) in (0, 1, 2)
    assert count_hooks(model) == 0
    assert stats.names or stats.left_out


def test_nan_and_inf_are_data():
    stats, _ = watch(lambda x: torch.where(x > 0, x, float("nan")))
    assert stats.stats[0][0]["mean"] != stats.stats[0][0]["mean"]
    stats, _ = watch(lambda x: torch.full_like(x, float("inf")))
    assert stats.stats[0][0]["mean"] == float("inf")
    assert stats.stats[0][0]["near_zero"] == 0


def test_what_has_no_statistics_is_listed_as_left_out():
    stats, _ = watch(lambda x: (None, "text", x))
    assert list(stats.names) == ["odd[2]"]
    assert "odd" in str(stats.left_out)


def test_an_lstm_and_a_packed_sequence_are_measured():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(2, 3)
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            self.out = self.lstm(x)
            return self.fc(self.out[1][0][-1])

    model = Rnn()
    stats = ActivationStats(modules="lstm")
    fit(Learner([(X[:, None], Y[:1, :1])], model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert stats.names[0] == "lstm[0]"
    assert len(stats.names) == 3
    assert_stats(stats.stats[0][0], model.out[0])
    assert_stats(stats.stats[0][2], model.out[1][1])
    fit(
        Learner(
            [(PACKED, Y[:2, :1])],
            model,
            F.mse_loss,
            torch.optim.SGD,
            lr=0.0,
            cbs=(s := ActivationStats(modules="lstm")),
        )
    )
    assert s.names[0].startswith("lstm[0]")
    assert_stats(s.stats[0][0], model.out[0].data)


def test_a_layer_called_several_times_gets_one_entry_a_call():
    model = Net()
    stats = ActivationStats(modules=["stem", "head"])
    outs = []
    with Hook(model.stem, lambda m, i, o: outs.append(o.clone())):
        fit(Learner([(X, Y[:, :1])], model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["head", "stem#0", "stem#1"]
    for call, out in enumerate(outs):
        assert_stats(stats.stats[0][stats.names.index(f"stem#{call}")], out)


def test_a_layer_that_is_called_in_some_batches_only_gets_nan_in_the_others():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)
            self.n = -1

        def forward(self, x):
            self.n += 1
            return self.a(x) if self.n % 2 else self.b(x) + self.a(x)

    model = Sometimes()
    stats = ActivationStats()
    batches = make_batches(4)
    fit(Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    assert sorted(stats.names) == ["a", "b"]
    a, b = stats.names.index("a"), stats.names.index("b")
    for i, (x, _) in enumerate(batches):
        assert len(stats.stats[i]) == 2
        assert_stats(stats.stats[i][a], model.a(x))
        if i % 2:
            assert all(v != v for v in stats.stats[i][b].values())
        else:
            assert_stats(stats.stats[i][b], model.b(x))


def test_an_in_place_successor_does_not_change_what_is_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    stats = ActivationStats()
    batches = make_batches()
    fit(Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.0, cbs=stats))
    for record, (x, _) in enumerate(batches):
        assert_stats(stats.stats[record][0], model[0](x))


def test_recomputation_under_checkpointing_is_not_counted():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = make_model(), nn.Linear(1, 1)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    stats = ActivationStats(modules="body.*")
    hooked = HookCallback(modules="body.0", hook=lambda m, i, o: calls.append(1), name="h")
    calls = []
    fit(make_learner(model=Checkpointed(), cbs=[stats, hooked]))
    assert list(stats.names) == ["body.0", "body.1", "body.2"]
    assert len(calls) == 3


def test_statistics_are_of_training_batches_alone_and_calls_between_batches_do_not_count():
    class Peeks(Callback):
        def after_batch(self):
            self.model(torch.full((4, 2), 1e6))

        def before_batch(self):
            self.model(torch.full((4, 2), 1e6))

        def after_step(self):
            self.model(torch.full((4, 2), 1e6))

    def records(cbs):
        stats = ActivationStats(modules="0")
        fit(make_learner(cbs=[stats, *cbs]), 2)
        return stats

    plain = records([])
    assert len(plain.stats) == 6
    between = records([Callback(name="p", after_batch=lambda cb: cb.model(torch.full((4, 2), 1e6)))])
    assert between.table() == plain.table()
    assert list(between.names) == list(plain.names)


def test_before_fit_resets_the_statistics():
    stats = ActivationStats()
    learn = fit(make_learner(cbs=stats), 2)
    fit(learn, 1)
    assert len(stats.stats) == 3


def test_the_report_prints_every_layer():
    stats = ActivationStats(include_paramless=True)
    fit(make_learner(cbs=stats))
    out = io.StringIO()
    Console(file=out, width=120).print(stats.report())
    for name in ("0", "1", "2", "mean", "std"):
        assert name in out.getvalue()
    Console(file=io.StringIO()).print(ActivationStats().report())  # never fitted
