"""What hooks see, store and put in place, how they come off, and what an error in one does."""

import pytest
import torch
import torch.nn.functional as F
from fastcore.foundation import L
from torch import nn
from torch.func import functional_call, grad, vmap

from hookcb import find_modules
from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from hookcb.testing import assert_no_hooks, count_hooks
from tests.hooks import support as zoo
from tests.hooks.support import G, X, args, explode, sequential
from tests.support import Pair, in_turn


def test_a_hook_stores_and_changes_nothing():
    torch.manual_seed(0)
    layer = nn.Linear(2, 3)
    x = torch.randn(4, 2, requires_grad=True)
    plain = layer(x)
    for value in (False, 0, None, torch.zeros(4, 3), "text"):
        seen = []

        def look(m, i, o, seen=seen, value=value):
            seen.append((m, i, o))
            return value

        with Hook(layer, look) as hook:
            out = layer(x)
        assert torch.equal(out, plain)
        assert out.requires_grad
        (m, i, o), *_ = seen
        assert m is layer
        assert isinstance(i, tuple)
        assert not i[0].requires_grad
        assert not o.requires_grad
        assert hook.stored is value
        layer(x)
        assert len(seen) == 1
    assert_no_hooks(layer)


def test_a_hook_goes_when_its_block_raises_and_removing_is_idempotent():
    layer = zoo.lin()
    with pytest.raises(ZeroDivisionError), Hook(layer, lambda m, i, o: 1) as hook:  # noqa: PT012
        layer(X)
        1 / 0  # noqa: B018
    assert count_hooks(layer) == 0
    hook.remove()
    hook.remove()
    assert hook.stored == 1


def test_removing_one_hook_leaves_the_others_of_the_same_module():
    layer = zoo.lin()
    one, two = Hook(layer, lambda m, i, o: 1), Hook(layer, lambda m, i, o: 2)
    one.remove()
    one.remove()
    layer(X)
    assert (one.stored, two.stored) == (None, 2)
    two.remove()
    assert count_hooks(layer) == 0


def test_hooks_on_a_sequential_are_on_its_children_and_on_a_module_on_itself():
    model = sequential()
    with Hooks(model, lambda m, i, o: type(m)) as hooks:
        model(X)
        assert list(hooks.stored) == [nn.Linear, nn.Tanh, nn.Linear]
        assert len(hooks) == 3
        assert [h.stored for h in hooks] == list(hooks.stored)
    assert count_hooks(model) == 0
    with Hooks(model[0], lambda m, i, o: 1) as hooks:
        assert len(hooks) == 1
    with Hooks(find_modules(model), lambda m, i, o: 1) as hooks:
        assert len(hooks) == 2
        assert list(hooks.stored) == [None, None]
    assert count_hooks(model) == 0


def test_hook_output_stores_with_or_without_graph_whatever_the_structure():
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": [x * 2, None], "b": Pair(x, 3)}

    x = torch.randn(2, 2, requires_grad=True)
    with hook_output(Odd()) as hook:
        assert hook.stored is None
    layer = Odd()
    with hook_output(layer) as hook:
        layer(x)
    assert not hook.stored["a"][0].requires_grad
    assert type(hook.stored["b"]) is Pair
    assert hook.stored["b"].y == 3
    with hook_output(layer, detach=False) as hook:
        layer(x)
    assert hook.stored["a"][0].grad_fn is not None
    model = sequential()
    with hook_outputs([model[0], model[2]]) as hooks:
        y = model(X)
    assert torch.equal(hooks.stored[1], y)
    assert torch.equal(hooks.stored[0], model[0](X))


def snapshot(out):
    """The layer's own copy of what it returned, made before anyone can change it."""
    return [t.detach().clone() for t in zoo.flat(out).values()] if can_be_walked(out) else None


def can_be_walked(out):
    return not isinstance(out, (zoo.Angry, set, nn.Module)) and not hasattr(out, "__next__")


PLAIN_OUTPUTS = [
    n for n in zoo.OUTPUTS if n not in {"cyclic_list", "deep_list", "generator", "set", "angry_object"}
]


@in_turn("name", [name for name in PLAIN_OUTPUTS if name != "tuple_with_another_init"])
def test_a_stored_output_has_the_type_and_the_values_of_the_layers_own(name):
    model = zoo.make(f"returns_{name}")
    own = []
    f = model.odd.f
    model.odd.f = lambda s, x: own.append(f(s, x)) or own[0]
    with hook_output(model.odd) as h:
        model(X)
    assert type(h.stored) is (torch.Tensor if name == "own_parameter" else type(own[0]))
    if name not in {"object", "module"}:
        assert zoo.alike(h.stored, own[0])
    assert not any(t.requires_grad for t in zoo.flat(h.stored).values())


@in_turn("name", zoo.IN_PLACE)
def test_a_stored_output_is_as_the_layer_gave_it_before_what_came_in_place(name):
    model = zoo.make(f"in_place_{name}")
    own = []
    f = model.odd.f

    def snap(s, x):
        out = f(s, x)
        own.append(snapshot(out))
        return out

    model.odd.f = snap
    with hook_output(model.odd) as h:
        model(X)
    assert zoo.alike(list(zoo.flat(h.stored).values()), own[0])


def test_an_observer_sees_detached_tensors_and_with_detach_off_the_layers_own():
    model, seen = sequential(), []
    with Hook(model[1], lambda m, i, o: seen.append((i[0], o))), Hook(model[1], args, detach=False) as kept:
        model(X)
    assert not seen[0][0].requires_grad
    assert not seen[0][1].requires_grad
    i, o = kept.stored
    assert i[0].grad_fn is not None
    assert o.grad_fn is not None
    assert torch.equal(seen[0][1], o)


def test_what_is_stored_with_graph_can_be_differentiated():
    model = sequential()
    with Hook(model[0], lambda m, i, o: (o * o).sum(), detach=False) as h:
        model(X)
    h.stored.backward()
    out = model[0](X).detach()
    assert torch.allclose(model[0].bias.grad, 2 * out.sum(0))


def test_forward_hooks_get_what_the_module_got():
    model = zoo.Layer(lambda s, a, b=None, *, c=None: s.fc(a))
    with (
        Hook(model, lambda m, *what: (m, *what)) as plain,
        Hook(model, lambda m, *what: (m, *what), with_kwargs=True) as kw,
        Hook(model, lambda m, *what: (m, *what), pre=True) as pre,
        Hook(model, lambda m, *what: (m, *what), pre=True, with_kwargs=True) as pre_kw,
    ):
        out = model(X, b=3, c={"d": G})
    for h, n in ((plain, 3), (kw, 4), (pre, 2), (pre_kw, 3)):
        assert h.stored[0] is model
        assert len(h.stored) == n
        assert isinstance(h.stored[1], tuple)
        assert zoo.alike(h.stored[1], (X,))
    for h in (kw, pre_kw):
        assert zoo.alike(h.stored[2], {"b": 3, "c": {"d": G}})
    assert torch.equal(plain.stored[2], out)
    assert torch.equal(kw.stored[3], out)


def test_a_pre_hook_sees_the_input_before_the_module_changes_it():
    model = sequential(nn.ReLU)
    model[0].inplace = True
    with Hook(model[0], lambda m, i: i[0].clone(), pre=True) as h:
        model(X.clone())
    assert torch.equal(h.stored, X)


def test_an_always_called_hook_sees_the_call_that_fails():
    def fail(s, x):
        raise KeyError("mine")

    model, seen = zoo.Layer(fail), []
    with (
        Hook(model, lambda m, i, o: seen.append(o), always_call=True),
        Hook(model, args) as other,
        pytest.raises(KeyError, match="mine"),
    ):
        model(X)
    assert seen == [None]
    assert other.stored is None


def test_hooks_see_what_another_hook_has_put_in_place():
    model = zoo.lin()
    with (
        Hook(model, lambda m, i, o: o * 0 + 5, modify=True),
        Hook(model, lambda m, i, o: o) as after,
        Hook(model, lambda m, i, o: o, prepend=True) as before,
    ):
        out = model(X)
    assert torch.equal(out, torch.full((4, 4), 5.0))
    assert torch.equal(after.stored, out)
    assert torch.equal(before.stored, model(X))


def test_a_pre_hook_put_in_front_is_called_first():
    model, log = zoo.lin(), []
    with (
        Hook(model, lambda *a: log.append(1), pre=True),
        Hook(model, lambda *a: log.append(0), pre=True, prepend=True),
    ):
        model(X)
    assert log == [0, 1]


def test_a_recursive_module_is_seen_at_each_call():
    model = zoo.make("recursive")
    seen = []
    with Hook(model, lambda m, i, o: seen.append(o)):
        out = model(X)
    assert len(seen) == 3
    assert all(torch.equal(o, out) for o in seen)


def test_lazy_modules_are_seen_from_the_first_forward_on():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(1))
    modules = list(model)
    with (
        hook_outputs(modules) as outs,
        hook_outputs(modules, grad=True) as grads,
        Hooks(modules, args, pre=True) as pre,
    ):
        model(X).sum().backward()
    assert [tuple(o.shape) for o in outs.stored] == [(4, 3), (4, 3), (4, 1)]
    assert [tuple(g[0].shape) for g in grads.stored] == [(4, 3), (4, 3), (4, 1)]
    assert torch.equal(pre.stored[0][0][0], X)
    assert_no_hooks_but_lazy_ones_own(model)


def assert_no_hooks_but_lazy_ones_own(model):
    for m in model:
        assert not m._forward_hooks
        assert not m._forward_pre_hooks


def test_functional_call_is_seen_with_the_weights_given():
    model = sequential()
    params = {k: v * 2 for k, v in model.named_parameters()}
    with hook_outputs(list(model)) as outs, hook_outputs(list(model), grad=True) as grads:
        functional_call(model, params, (X,)).backward(G)
    assert torch.equal(outs.stored[0], F.linear(X, params["0.weight"], params["0.bias"]))
    assert torch.equal(grads.stored[1][0], G @ params["2.weight"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by torch, for the first jvp
@in_turn("options", [{}, {"pre": True}, {"is_forward": False}, {"is_forward": False, "pre": True}])
def test_function_transforms_work_with_hooks_on(options):
    model = sequential()
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(params, x):
        return functional_call(model, params, (x,)).pow(2).sum()

    def all_transforms():
        return [
            vmap(model)(X),
            grad(loss)(params, X),
            vmap(grad(loss), (None, 0))(params, X),
            torch.func.jvp(lambda x: loss(params, x), (X,), (G,)),
            torch.func.hessian(loss, argnums=1)(params, X[0]),
            torch.func.jacrev(loss, argnums=1)(params, X),
        ]

    plain = all_transforms()
    with Hooks(list(model), lambda m, *what: what, **options) as hooks:
        watched = all_transforms()
        list(hooks.stored)
    assert zoo.alike(watched, plain)


def test_function_transforms_work_with_outputs_and_gradients_stored():
    model = sequential()
    with hook_outputs(list(model)) as outs, hook_outputs(list(model), grad=True) as grads:
        got = vmap(grad(lambda x: model(x).sum()))(X)
    assert torch.equal(got, vmap(grad(lambda x: model(x).sum()))(X))
    list(outs.stored), list(grads.stored)


def test_hooks_takes_whatever_holds_modules():
    model = sequential()
    for ms in (model, list(model), (m for m in model), find_modules(model, "*"), tuple(model)):
        with Hooks(ms, lambda m, i, o: o) as hooks:
            model(X)
        assert isinstance(hooks.stored, L)
        assert len(hooks) == len(hooks.stored) >= 3
        assert torch.equal(hooks[2].stored, model(X))
        assert [h.stored is s for h, s in zip(hooks, hooks.stored, strict=True)] == [True] * len(hooks)
    assert count_hooks(model) == 0
    with Hooks(model[0], lambda m, i, o: o) as hooks:
        model(X)
    assert len(hooks) == 1
    with Hooks(model[0].weight, args) as hooks:
        model(X).backward(G)
    assert len(hooks) == 1
    with Hooks(model.parameters(), lambda p, g: g) as hooks:
        model(X).backward(G)
    assert len(hooks) == 4
    assert count_hooks(model) == 0


def test_a_module_listed_twice_is_hooked_for_each():
    model = zoo.lin()
    with Hooks([model, model], lambda m, i, o: o) as hooks:
        out = model(X)
    assert len(hooks) == 2
    assert all(torch.equal(s, out) for s in hooks.stored)


def test_gather_without_other_processes_changes_nothing():
    model = sequential()
    with Hooks(list(model), lambda m, i, o: o, gather=True) as hooks:
        out = model(X)
    assert torch.equal(hooks.stored[2], out)
    assert torch.equal(hooks[2].stored, out)


def test_stored_outputs_of_a_meta_model_can_be_read():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with hook_outputs(list(model), cpu=True) as hooks:
        model(torch.empty(2, 4, device="meta"))
        assert [o.shape for o in hooks.stored] == [(2, 4), (2, 4)]


OF_OUTPUTS = {"is_forward": False, "pre": True, "modify": True}  # replaces gradients of outputs


def test_an_output_can_be_replaced_and_gradients_flow_through_what_replaced_it():
    model, plain = sequential(), sequential()
    with Hook(model[0], lambda m, i, o: o * 2 + i[0], modify=True):
        out = model(X)
        out.backward(G)
    expected = plain[2]((plain[0](X) * 2 + X).tanh())
    expected.backward(G)
    assert torch.equal(out, expected)
    assert zoo.alike([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@in_turn("value", [False, 0, (), "", {}])
def test_every_value_but_none_replaces_the_output(value):
    model = zoo.lin()
    with Hook(model, lambda m, i, o: value, modify=True):
        out = model(X)
    assert type(out) is type(value)
    assert out == value


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)])
def test_an_input_can_be_replaced(wrap):
    model = zoo.lin()
    with Hook(model, lambda m, i: wrap(i[0] * 2), pre=True, modify=True):
        out = model(X)
    assert torch.equal(out, model(X * 2))


def test_keyword_inputs_can_be_replaced():
    model = zoo.Layer(lambda s, a, b=None: s.fc(a) + b)
    with Hook(
        model, lambda m, i, k: ((i[0] * 2,), {"b": k["b"] * 3}), pre=True, modify=True, with_kwargs=True
    ):
        out = model(X, b=G)
    assert torch.equal(out, model.fc(X * 2) + G * 3)


@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: (g,)])
def test_the_gradient_of_an_output_can_be_replaced_also_before_a_change_in_place(wrap):
    model = sequential(zoo.lin, lambda: nn.ReLU(inplace=True), zoo.lin)
    h0 = model[0](X)
    with Hook(model[0], lambda m, go: wrap(go[0] * 3), **OF_OUTPUTS):
        model(X).backward(G)
    go = (G @ model[2].weight) * (h0 > 0) * 3
    assert torch.allclose(model[0].weight.grad, go.t() @ X, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: (g,)])
def test_the_gradient_of_an_input_can_be_replaced_through_this_call_only(wrap):
    fc = zoo.lin()
    x = X.clone().requires_grad_()
    with Hook(fc, lambda m, gi, go: wrap(gi[0] * 0), is_forward=False, modify=True):
        h = x * 1
        out = h + fc(h)
        out.backward(G)
    assert torch.equal(x.grad, G)
    assert torch.equal(fc.weight.grad, G.t() @ X)
    assert out.grad_fn is not None


def test_gradients_of_several_inputs_are_replaced_one_at_a_time():
    model = nn.Bilinear(4, 4, 4)
    a, b = X.clone().requires_grad_(), G.clone().requires_grad_()
    plain = torch.autograd.grad(model(a, b), [a, b], G)
    seen = []

    def double(m, gi, go):
        seen.append([g is not None for g in gi])
        return tuple(None if g is None else g * (2 + 3 * k) for k, g in enumerate(gi))

    with Hook(model, double, is_forward=False, modify=True):
        model(a, b).backward(G)
    assert sorted(seen) == [[False, True], [True, False]]
    assert torch.equal(a.grad, plain[0] * 2)
    assert torch.equal(b.grad, plain[1] * 5)


def test_gradients_of_several_outputs_are_replaced_one_at_a_time():
    model = zoo.make("returns_tuple")
    plain = zoo.make("returns_tuple")
    plain.pick = lambda o, h: o[0] * 3 * 0.5 + o[1] * 7
    plain(X).backward(G)

    def scale(m, go):
        return tuple(None if g is None else g * f for g, f in zip(go, (0.5, 7), strict=True))

    with Hook(model.odd, scale, **OF_OUTPUTS):
        model(X).backward(G)
    assert torch.allclose(model.before.weight.grad, plain.before.weight.grad, atol=1e-6)
    assert torch.allclose(model.odd.fc.weight.grad, plain.odd.fc.weight.grad, atol=1e-6)


def test_a_gradient_in_a_dict_can_be_replaced():
    model, plain = zoo.make("returns_dict"), zoo.make("returns_dict")
    plain.pick = lambda o, h: o["logits"] * 2
    plain(X).backward(G)
    with Hook(model.odd, lambda m, go: ({"logits": go[0]["logits"] * 2, "n": None},), **OF_OUTPUTS):
        model(X).backward(G)
    assert torch.equal(model.before.weight.grad, plain.before.weight.grad)


@pytest.mark.parametrize("options", [{}, {"pre": True}])
def test_a_gradient_of_another_shape_is_refused_with_the_module_named(options):
    model = sequential()
    with (
        Hook(model[2], lambda m, *g: g[-1][0][:1, :1].repeat(7, 7), is_forward=False, modify=True, **options),
        pytest.raises((ValueError, TypeError, RuntimeError)) as error,
    ):
        model(X).backward(G)
    assert "Linear" in str(error.value) + "".join(getattr(error.value, "__notes__", ()))


def test_a_limit_can_be_put_on_a_signal():
    model = sequential()
    with Hook(model[0], lambda m, i, o: None if o.abs().max() < 1e-9 else o.clamp(-0.1, 0.1), modify=True):
        out = model(X)
    assert torch.equal(out, model[2](model[0](X).clamp(-0.1, 0.1).tanh()))


def test_a_hook_can_be_attached_and_removed_in_mid_forward():
    model = sequential()
    hooks = []
    starter = model[0].register_forward_hook(lambda m, i, o: hooks.append(Hook(model[2], args)) and None)
    stopper = model[2].register_forward_hook(lambda m, i, o: hooks[-1].remove())
    out = model(X)
    starter.remove()
    stopper.remove()
    assert torch.equal(out, model(X))
    assert len(hooks) == 1
    assert hooks[0].removed
    assert count_hooks(model) == 0


@in_turn(
    "options",
    [{}, {"is_forward": False}, {"is_forward": False, "pre": True}, {"is_forward": False, "modify": True}],
)
def test_a_hook_attached_to_a_module_while_it_runs_starts_with_it_or_with_the_next_call(options):
    hooks = []

    def attaching(s, x):
        if not hooks:
            hooks.append(Hook(s, lambda *a: None, **options))
        return s.fc(x)

    model = zoo.Layer(attaching)
    other = model.register_forward_hook(lambda m, i, o: None)
    for _ in range(3):
        model.zero_grad()
        x = X.clone().requires_grad_()
        model(x).backward(G)
        assert torch.equal(x.grad, G @ model.fc.weight)
        assert torch.equal(model.fc.weight.grad, G.t() @ X)
    hooks[0].remove()
    other.remove()
    assert count_hooks(model) == 0


@in_turn(
    "options",
    [
        {},
        {"pre": True},
        {"modify": True},
        {"is_forward": False},
        {"is_forward": False, "pre": True},
        {"is_forward": False, "modify": True},
    ],
)
def test_a_hook_can_remove_itself_in_its_own_call(options):
    model, calls = sequential(), []

    def once(*what):
        calls.append(1)
        hook.remove()
        hook.remove()

    hook = Hook(model[1], once, **options)
    for _ in range(2):
        model(X.clone().requires_grad_()).backward(G)
    assert calls == [1]
    assert hook.removed
    assert count_hooks(model) == 0


def test_a_parameter_hook_can_remove_itself_in_its_own_call():
    def calls_in_two_passes(pre):
        model, calls = sequential(), []
        hook = Hook(model[0].weight, lambda p, g: (calls.append(1), hook.remove()), pre=pre)
        for _ in range(2):
            model(X).backward(G)
        assert count_hooks(model) == 0
        return len(calls)

    assert [calls_in_two_passes(pre) for pre in (False, True)] == [1, 1]


@pytest.mark.parametrize("options", [{"is_forward": False}, {"is_forward": False, "pre": True}])
def test_a_gradient_hook_removed_after_the_forward_is_not_called_in_backward(options):
    model, calls = sequential(), []
    with Hooks(list(model), lambda *a: calls.append(1), **options):
        out = model(X)
    out.backward(G)
    assert calls == []


def test_what_was_stored_stays_readable_after_removal():
    model = sequential()
    with Hook(model[0], args) as h:
        assert not h.removed
        model(X)
    assert h.removed
    assert torch.equal(h.stored[1], model[0](X))


def test_hooks_come_off_when_the_body_of_with_fails():
    model = sequential()
    with pytest.raises(KeyError), Hooks(list(model), args, is_forward=False), Hooks(model.parameters(), args):
        raise KeyError
    assert_no_hooks(model)


class NeedsKeyword(Exception):
    """Cannot be made again from its args, as one of them is a keyword."""

    def __init__(self, a, *, b):
        super().__init__(a)
        self.b = b


KINDS_OF_CALL = [
    {},
    {"pre": True},
    {"with_kwargs": True},
    {"always_call": True},
    {"modify": True},
    {"is_forward": False},
    {"is_forward": False, "pre": True},
    {"is_forward": False, "with_kwargs": True},
    {"is_forward": False, "modify": True},
    {"is_forward": False, "pre": True, "modify": True},
]


@in_turn("error", [ValueError("boom"), NeedsKeyword(1, b=2), StopIteration(3)])
@in_turn("options", KINDS_OF_CALL)
def test_an_error_of_the_hook_function_goes_on_as_it_is_and_names_module_and_function(options, error):
    error = type(error)(1, b=2) if isinstance(error, NeedsKeyword) else type(error)(*error.args)
    model = sequential()

    def explosive(*what):
        raise error

    hook = Hook(model[1], explosive, **options)
    with pytest.raises(type(error)) as raised:
        model(X).backward(G)
    assert raised.value is error
    notes = "\n".join(error.__notes__)
    assert "Tanh" in notes
    assert "explosive" in notes
    assert len(error.__notes__) == 1
    assert hook.removed
    assert count_hooks(model) == 0
    model.zero_grad()
    model(X).backward(G)
    assert torch.equal(model[2].bias.grad, G.sum(0))


@in_turn("options", KINDS_OF_CALL)
def test_an_interrupt_in_a_hook_function_goes_on_as_it_is(options):
    model, interrupt = sequential(), [KeyboardInterrupt("mine")]

    def interrupted(*what):
        if interrupt:
            raise interrupt[0]

    with Hook(model[1], interrupted, **options):
        with pytest.raises(KeyboardInterrupt, match="mine") as raised:
            model(X).backward(G)
        assert raised.value is interrupt.pop()
        model.zero_grad()
        model(X).backward(G)
    assert torch.equal(model[2].bias.grad, G.sum(0))
    assert count_hooks(model) == 0


@pytest.mark.parametrize("options", [{}, {"pre": True}, {"modify": True}])
def test_an_error_in_a_parameter_hook_goes_on_as_it_is(options):
    model, error = sequential(), NeedsKeyword(1, b=2)

    def explosive(*what):
        raise error

    hook = Hook(model[0].weight, explosive, **options)
    with pytest.raises(NeedsKeyword) as raised:
        model(X).backward(G)
    assert raised.value is error
    assert "explosive" in "\n".join(error.__notes__)
    assert hook.removed
    model(X).backward(G)
    assert count_hooks(model) == 0


@pytest.mark.parametrize("part", ["function", "gate"])
def test_an_error_that_is_taken_does_not_reach_the_forward(part):
    def fails(*seen):
        raise ValueError("ours")

    layer, taken = nn.Linear(2, 3), []
    hook = Hook(layer, fails) if part == "function" else Hook(layer, lambda *seen: None, gate=fails)
    hook.take_error = taken.append
    for _ in range(2):
        layer(torch.ones(1, 2))
    assert [str(error) for error in taken] == ["ours"]
    assert hook.removed


def test_one_failing_hook_of_several_takes_only_itself_off():
    model = sequential()
    good = Hooks(list(model), args)
    bad = Hook(model[1], explode)
    with pytest.raises(ValueError, match="boom"):
        model(X)
    assert bad.removed
    assert not any(h.removed for h in good)
    model(X)
    assert None not in list(good.stored)
    good.remove()
    assert count_hooks(model) == 0


def test_the_forwards_own_error_comes_out_although_an_always_called_hook_fails_too():
    mine = KeyError("mine")

    def fail(s, x):
        raise mine

    model = zoo.Layer(fail)
    hook = Hook(model, explode, always_call=True)
    with pytest.raises(KeyError) as raised:  # warnings are errors here
        model(X)
    assert raised.value is mine
    assert hook.removed


def test_a_function_that_fails_on_the_output_it_is_given_fails_with_its_own_error():
    model = zoo.make("returns_dict")
    with pytest.raises(AttributeError, match="mean") as raised, Hook(model.odd, lambda m, i, o: o.mean()):
        model(X)
    assert "Layer" in "\n".join(raised.value.__notes__)


@pytest.mark.parametrize(
    "options",
    [
        {"always_call": True, "is_forward": False},
        {"always_call": True, "pre": True},
    ],
)
def test_options_that_make_no_sense_together_are_refused(options):
    model = zoo.lin()
    with pytest.raises(ValueError, match="always_call"):
        Hook(model, args, **options)
    assert count_hooks(model) == 0


def test_options_for_modules_are_refused_on_tensors():
    model = zoo.lin()
    for options in ({"with_kwargs": True}, {"always_call": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Hook(model.weight, args, **options)
    assert count_hooks(model) == 0


@in_turn("m", [None, 3, "0", zoo.lin, print, {"a": 1}.values()])
def test_what_is_no_module_is_a_type_error(m):
    with pytest.raises(TypeError):
        Hook(m, args)


def test_a_function_that_is_none_is_a_type_error():
    model = zoo.lin()
    for func in (None, 3):
        with pytest.raises(TypeError):
            Hook(model, func)
    assert count_hooks(model) == 0


def test_tensors_without_gradient_are_refused():
    with pytest.raises(ValueError, match="grad"):
        Hook(X, args)
    with pytest.raises(ValueError, match="grad"):
        Hook(zoo.frozen(zoo.lin()).weight, args)
    with pytest.raises(ValueError, match=r"(?i)uninitiali[sz]ed|lazy"):
        Hook(nn.LazyLinear(3).weight, args)


def failing_generator(model):
    yield model[0]
    yield model[1]
    raise KeyError("mine")


@in_turn(
    "bad",
    [
        lambda m: [m[0], m[1], "2"],
        lambda m: [m[0], None],
        lambda m: [m[0], 3],
        lambda m: [m[0], [zoo.lin(), 3]],
        lambda m: [m[0].weight, zoo.frozen(zoo.lin()).weight],
        lambda m: [m[0].weight, nn.LazyLinear(3).weight],
        failing_generator,
    ],
)
def test_registration_of_several_is_all_or_nothing(bad):
    model = sequential()
    with pytest.raises((TypeError, ValueError, KeyError)):
        Hooks(bad(model), args)
    assert_no_hooks(model)


def test_a_module_that_refuses_a_hook_leaves_none_on_the_others():
    class Refuses(nn.Module):
        def register_forward_hook(self, *args, **kwargs):
            raise RuntimeError("not me")

        def register_forward_pre_hook(self, *args, **kwargs):
            raise RuntimeError("not me")

        def forward(self, x):
            return x

    model = nn.Sequential(zoo.lin(), Refuses())
    for options in ({}, {"pre": True}, {"is_forward": False}):
        with pytest.raises(RuntimeError, match="not me"):
            Hooks(model, args, **options)
        assert_no_hooks(model)
