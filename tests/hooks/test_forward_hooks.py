"""What hooks see and store in the forward, alone, several at once and under function transforms."""

import pytest
import torch
import torch.nn.functional as F
from fastcore.foundation import L
from torch import nn
from torch.func import functional_call, grad, vmap

from hookcb import find_modules
from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from hookcb.testing import count_hooks
from tests.hooks import support as zoo
from tests.hooks.support import G, X, args, sequential


def snapshot(out):
    """The layer's own copy of what it returned, made before anyone can change it."""
    return [t.detach().clone() for t in zoo.flat(out).values()] if can_be_walked(out) else None


def can_be_walked(out):
    return not isinstance(out, (zoo.Angry, set, nn.Module)) and not hasattr(out, "__next__")


PLAIN_OUTPUTS = [
    n for n in zoo.OUTPUTS if n not in {"cyclic_list", "deep_list", "generator", "set", "angry_object"}
]


@pytest.mark.parametrize("name", [name for name in PLAIN_OUTPUTS if name != "tuple_with_another_init"])
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


@pytest.mark.parametrize("name", zoo.IN_PLACE)
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
@pytest.mark.parametrize(
    "options", [{}, {"pre": True}, {"is_forward": False}, {"is_forward": False, "pre": True}]
)
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
