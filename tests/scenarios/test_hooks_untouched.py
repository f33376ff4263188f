"""Watching changes nothing: each kind of hook on each model of the zoo."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import torch
from torch import nn

from hookcb import find_modules
from hookcb.hooks.hook import Hook, Hooks, hook_outputs
from hookcb.testing import count_hooks
from tests.hooks import support as zoo
from tests.support import along, in_turn, no_collection


def everything(m, *what):
    """Stores all there is."""
    return what


def nothing(*what):
    """Sees all there is and keeps none of it."""


def falsy(*what):
    """An observer may return anything."""
    return False


KINDS = {
    "forward": {},
    "forward with graph": {"detach": False},
    "forward with kwargs": {"with_kwargs": True},
    "forward, always called": {"always_call": True},
    "forward, first": {"prepend": True},
    "forward on the CPU": {"cpu": True},
    "pre": {"pre": True},
    "pre with kwargs": {"pre": True, "with_kwargs": True},
    "gradient": {"is_forward": False},
    "gradient with graph": {"is_forward": False, "detach": False},
    "gradient with kwargs": {"is_forward": False, "with_kwargs": True},
    "gradient pre": {"is_forward": False, "pre": True},
}
MODIFYING = {
    f"{name}, may modify": {**KINDS[name], "modify": True}
    for name in ("forward", "pre", "gradient", "gradient pre")
}
IN_ALL_MODELS = {  # the rest are shades of these
    "forward": {},
    "forward with graph, kwargs, always called, first": {
        "detach": False,
        "with_kwargs": True,
        "always_call": True,
        "prepend": True,
    },
    "pre with kwargs": KINDS["pre with kwargs"],
    "gradient": KINDS["gradient"],
    "gradient with graph and kwargs": {"is_forward": False, "with_kwargs": True, "detach": False},
    "gradient pre": KINDS["gradient pre"],
}
EXPECTED = {}


def expected(name):
    if name not in EXPECTED:
        EXPECTED[name] = zoo.run(zoo.make(name))
    return EXPECTED[name]


def differences(plain, watched, equal=zoo.alike):
    """What differs, by name; for an assertion that says more than False."""
    outs = zip(plain["outs"], watched["outs"], strict=True)
    wrong = [f"output of pass {k}" for k, (a, b) in enumerate(outs) if not zoo.alike(a, b)]
    for what in ("grads", "buffers"):
        pairs = {n: (plain[what][n], watched[what][n]) for n in plain[what]}
        wrong += [
            f"{what} {n}" for n, (a, b) in pairs.items() if a is not b and not (b is not None and equal(a, b))
        ]
    return wrong + ["rng"] * (not torch.equal(plain["rng"], watched["rng"]))


WATCHES = [(kind, everything, options) for kind, options in IN_ALL_MODELS.items()]
WATCHES += [(kind, nothing, options) for kind, options in MODIFYING.items()]
WATCHES += [("stored", None, {"grad": False}), ("stored with gradients", None, {"grad": True})]


@in_turn(("name", "nth"), along(zoo.MODELS, range(3)))
def test_outputs_and_gradients_are_bit_identical_under_observers(name, nth):
    """Each model is watched in every third way, so that neighbors, which are alike, share all of them."""
    plain, n_hooks = expected(name), count_hooks(zoo.make(name))
    for kind, func, options in WATCHES[nth::3]:
        model = zoo.make(name)
        modules = list(model.modules())
        with Hooks(modules, func, **options) if func else hook_outputs(modules, **options) as hooks:
            watched = zoo.run(model)
            list(hooks.stored)
        # where gradients of inputs may be replaced, those of one call are added up before they join others
        equal = torch.allclose if kind == "gradient, may modify" else zoo.alike
        assert differences(plain, watched, equal) == [], kind
        assert count_hooks(model) == n_hooks, kind


@in_turn(
    ("name", "func"),
    along(
        ["residual", "in_place_modules", "in_place_view_output", "returns_tuple", "lstm"], [nothing, falsy]
    ),
)
def test_what_an_observer_returns_replaces_nothing(name, func):
    for kind in ("forward", "pre", "gradient", "gradient pre"):
        model = zoo.make(name)
        with Hooks(list(model.modules()), func, **KINDS[kind]):
            assert differences(expected(name), zoo.run(model)) == [], kind


@in_turn(("mode", "kind"), along([torch.no_grad, torch.inference_mode], KINDS))
def test_hooks_work_without_grad(kind, mode):
    model = zoo.make("in_place_modules").eval()
    x = zoo.make_input()
    plain = model(x.clone()).detach()
    with Hooks(list(model.children()), everything, **KINDS[kind]) as hooks:
        with mode():
            out = model(x.clone())
        stored = list(hooks.stored)
    assert torch.equal(out, plain)
    if "gradient" in kind:
        assert stored == [None] * len(stored)
    else:
        assert None not in stored


def test_what_was_stored_in_inference_mode_can_be_used_afterwards():
    model = zoo.make("norm_and_dropout").eval()
    with hook_outputs(list(model.children())) as hooks, torch.inference_mode():
        model(zoo.make_input())
    assert len(hooks.stored) == 5
    for t in hooks.stored:
        factor = torch.ones(4, requires_grad=True)
        (t.clone().add_(1) * factor).sum().backward()
        assert torch.equal(factor.grad, (t + 1).sum(0))


@in_turn(
    ("name", "kind"),
    along(
        ["residual", "in_place_modules", "lstm", "shared", "returns_frozen_dataclass"],
        [k for k in KINDS if "graph" not in k],
    ),
)
def test_a_forward_without_backward_leaves_no_activation_alive(name, kind):
    model = zoo.make(name)
    alive = []

    class Probe(nn.Module):
        def forward(self, x):
            y = x * 2
            alive.append(weakref.ref(y))
            return (y * y).sum()  # for its backward the product keeps y

    whole = nn.Sequential(model, Probe())
    with Hooks(list(whole.modules()), nothing, **KINDS[kind]), no_collection():
        out = whole(zoo.make_input())
        assert alive[0]() is not None
        del out
        assert alive[0]() is None


@in_turn("kind", KINDS)
def test_a_backward_leaves_no_activation_alive(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    alive = []
    probe = model[1].register_forward_hook(lambda m, i, o: alive.append(weakref.ref(o)))
    with Hooks(list(model), nothing, **KINDS[kind]), no_collection():
        model(zoo.make_input()).sum().backward()
        assert alive[0]() is None
    probe.remove()


@in_turn("kind", IN_ALL_MODELS)
def test_a_removed_hook_keeps_neither_model_nor_function_alive(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def func(*what):
        return None

    hooks = Hooks(list(model), func, **IN_ALL_MODELS[kind])
    zoo.run(model)
    hooks.remove()
    refs = [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0].weight)]
    with no_collection():
        del model
        assert [r() for r in refs] == [None] * 3
    ref = weakref.ref(func)
    del func, hooks
    gc.collect()
    assert ref() is None


@in_turn("kind", IN_ALL_MODELS)
def test_a_hook_that_was_never_removed_dies_with_its_model(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooks = Hooks(list(model), everything, **IN_ALL_MODELS[kind])
    zoo.run(model)
    ref = weakref.ref(model)
    del model, hooks
    gc.collect()
    assert ref() is None


def copies(model):
    """Copies of a model by every usual way."""
    yield "deepcopy", copy.deepcopy(model)
    yield "pickle", pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield "torch.save", torch.load(file, weights_only=False)
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.update_parameters(model)
    yield "EMA", ema
    yield "copy of a copy", pickle.loads(pickle.dumps(copy.deepcopy(model)))


@in_turn("kind", [*KINDS, *MODIFYING])
def test_copies_of_a_hooked_model_record_nothing_and_pollute_nothing(kind):
    model = zoo.make("in_place_modules")
    calls = []

    def func(*what):  # a closure, which cannot be pickled
        calls.append(1)

    with Hooks(list(model.modules()), func, **{**KINDS, **MODIFYING}[kind]):
        for way, copied in copies(model):
            copied(zoo.make_input()).sum().backward()
            assert calls == [], way
            assert copied.state_dict().keys() - {"n_averaged"} == {
                ("module." if way == "EMA" else "") + key for key in model.state_dict()
            }, way
        zoo.run(model)
        assert calls
    calls.clear()
    zoo.run(copied)
    assert calls == []


@in_turn("kind", [*KINDS, *MODIFYING])
def test_a_copy_made_between_forward_and_backward_is_as_inert(kind):
    model = zoo.make("in_place_modules")
    calls = []
    with Hooks(list(model.modules()), lambda *what: calls.append(1), **{**KINDS, **MODIFYING}[kind]):
        out = model(zoo.make_input())
        copied, n = copy.deepcopy(model), len(calls)
        pickle.dumps(model)
        copied(zoo.make_input()).sum().backward()
        assert len(calls) == n
        out.sum().backward()
        assert calls


def test_a_saved_hooked_model_does_not_carry_what_was_stored():
    model = zoo.make("norm_and_dropout")
    plain = len(pickle.dumps(model))
    with hook_outputs(list(model.children()), detach=False) as hooks:
        model(torch.randn(10_000, 4))
        assert len(hooks.stored) == 5
        assert len(pickle.dumps(model)) < plain + 20_000


@in_turn("options", [{}, {"pre": True}, {"modify": True}, {"pre": True, "modify": True}])
def test_copies_of_a_model_with_parameter_hooks_record_nothing(options):
    model = zoo.make("norm_and_dropout")
    calls = []
    with Hooks(model.parameters(), lambda p, g: calls.append(1), **options):
        for way, copied in copies(model):
            copied(zoo.make_input()).sum().backward()
            assert calls == [], way
        model(zoo.make_input()).sum().backward()
        assert len(calls) == len(list(model.parameters()))
    assert count_hooks(model) == 0


def test_removing_a_copied_hook_leaves_the_original_on():
    model = nn.Linear(4, 4)
    with Hook(model, everything) as h:
        model(zoo.make_input())
        copied = copy.deepcopy(h)
        copied.remove()
        model(zoo.make_input(5))
        assert torch.equal(h.stored[1], model(zoo.make_input(5)))
    assert count_hooks(model) == 0


def test_a_whole_model_can_be_hooked_by_a_selection():
    model = zoo.make("transformer_layer")
    with Hooks(find_modules(model, "*"), everything) as hooks:
        model(zoo.make_input())
    assert len(hooks) == len(find_modules(model, "*"))


def test_no_warning_is_ever_shown_while_a_hooked_model_is_saved(tmp_path):
    model = zoo.make("norm_and_dropout")
    with (
        Hooks(list(model.modules()), everything, is_forward=False),
        Hooks(model.parameters(), everything),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        zoo.run(model)
        torch.save(model, tmp_path / "whole.pt")
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        torch.load(tmp_path / "weights.pt", weights_only=True)
        torch.load(tmp_path / "whole.pt", weights_only=False)
    assert [str(w.message) for w in caught] == []
