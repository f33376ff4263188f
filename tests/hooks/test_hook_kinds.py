"""What Hook, Hooks, hook_output and hook_outputs see, store, replace and refuse."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import zoo
from fastcore.foundation import L
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from hookcb import find_modules
from hookcb.hooks import Hook, Hooks, hook_output, hook_outputs
from hookcb.testing import assert_no_hooks, count_hooks

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))
G = torch.randn(4, 4, generator=torch.Generator().manual_seed(8))


def make(*layers, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*[layer() for layer in layers or (zoo.lin, nn.Tanh, zoo.lin)])


def args(m, *what):
    return what


def explode(*what):
    raise ValueError("boom")


# ---- forward: what is seen and stored


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
    model, seen = make(), []
    with Hook(model[1], lambda m, i, o: seen.append((i[0], o))), Hook(model[1], args, detach=False) as kept:
        model(X)
    assert not seen[0][0].requires_grad
    assert not seen[0][1].requires_grad
    i, o = kept.stored
    assert i[0].grad_fn is not None
    assert o.grad_fn is not None
    assert torch.equal(seen[0][1], o)


def test_what_is_stored_with_graph_can_be_differentiated():
    model = make()
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
    model = make(nn.ReLU)
    model[0].inplace = True
    with Hook(model[0], lambda m, i: i[0].clone(), pre=True) as h:
        model(X.clone())
    assert torch.equal(h.stored, X)


def test_an_always_called_hook_sees_the_call_that_fails():
    def fail(s, x):
        raise KeyError("mine")

    model, seen = zoo.Layer(fail), []
    with Hook(model, lambda m, i, o: seen.append(o), always_call=True), Hook(model, args) as other:  # noqa: SIM117
        with pytest.raises(KeyError, match="mine"):
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


# ---- gradients of outputs


DIFFERENTIABLE = [
    "tensor", "tuple", "tuple_of_one", "list", "nested", "partly_used", "namedtuple", "dict", "ordered_dict",
    "dict_with_odd_keys", "dict_of_dict", "dataclass", "frozen_dataclass", "slotted_dataclass",
    "dataclass_with_another_init", "return_type_of_max", "same_tensor_twice", "bfloat16", "float64", "complex",  # noqa: E501
    "zero_d", "one_element", "empty", "its_input", "its_input_and_more", "view", "expanded", "fresh_leaf",
    "views_of_chunk", "unbound", "own_parameter", "tensor_subclass", "bool", "int", "user_dict",
    "tuple_with_another_init", "detached",
]  # fmt: skip


def output_gradients(model, x, g):
    """By autograd, without any hook: {path: gradient with respect to that tensor of the odd layer's output}."""  # noqa: E501
    h = model.before(x)
    out = model.odd.f(model.odd, h)
    leaves = {path: t for path, t in zoo.flat(out).items() if t.requires_grad}
    if not leaves:
        return {}
    pred = model.after(model.pick(out, h))
    grads = torch.autograd.grad(pred, list(leaves.values()), g, allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def like_stored(path, out):
    """Where the gradient of the tensor at `path` of the output is found in what is stored."""
    return path if isinstance(out, (tuple, list)) else (0, *path)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_stored_gradients_of_an_output_are_autograds(name):
    model = zoo.make(f"returns_{name}")
    expected = output_gradients(model, X, G)
    with hook_output(model.odd, grad=True) as h, hook_output(model.odd) as out:
        pred = model(X)
        assert h.stored is None
        pred.backward(G)
    if not any(g is not None for g in expected.values()):
        assert h.stored is None or all(t is None for t in h.stored)
        return
    for path, g in expected.items():
        got = zoo.at(h.stored, like_stored(path, out.stored))
        assert (got is None) if g is None else zoo.alike_tensors(got, g), path
        assert got is None or not got.requires_grad
    for path, t in zoo.flat(out.stored).items():
        if path not in expected:
            assert zoo.at(h.stored, like_stored(path, out.stored)) is None, (path, t)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tuple", tuple),
        ("list", list),
        ("namedtuple", zoo.Pair),
        ("dict", tuple),
        ("tensor", tuple),
        ("dataclass", tuple),
    ],
)
def test_stored_gradients_have_the_outputs_structure(name, kind):
    model = zoo.make(f"returns_{name}")
    with hook_output(model.odd, grad=True) as h:
        model(X).backward(G)
    assert type(h.stored) is kind
    assert len(h.stored) == {"tuple": 2, "list": 3, "namedtuple": 2}.get(name, 1)


def test_what_has_no_gradient_in_a_nested_output_is_none():
    model = zoo.make("returns_nested")
    with hook_output(model.odd, grad=True) as h:
        model(X).backward(G)
    a = h.stored[1]["a"]
    assert a[1:] == (None, None)
    assert h.stored[1]["b"] == []


IN_PLACE_GRADIENTS = {  # in place, and the same without
    "relu": (lambda o: F.relu(o, inplace=True), F.relu),
    "augmented_assignment": (lambda o: o.__iadd__(1), lambda o: o + 1),
    "twice": (lambda o: o.mul_(2).sigmoid_(), lambda o: (o * 2).sigmoid()),
    "after_a_use": (lambda o: o.sum() + o.mul_(2), lambda o: o.sum() + o * 2),
    "view": (zoo.of_view, lambda o: torch.cat([o[:, :1] * 3, o[:, 1:]], 1)),
    "transposed_view": (zoo.of_transposed, lambda o: o.sigmoid()),
    "mask": (zoo.masked, lambda o: o.masked_fill(o > 0, 0)),
}


@pytest.mark.parametrize("name", IN_PLACE_GRADIENTS)
def test_gradients_of_an_output_are_those_before_what_came_in_place(name):
    in_place, plain = IN_PLACE_GRADIENTS[name]
    model = zoo.Around(lambda s, x: s.fc(x), lambda o, h: in_place(o))
    model.pick, expected = (lambda o, h: plain(o)), None
    expected = output_gradients(model, X, G)[()]
    model.pick = lambda o, h: in_place(o)
    with hook_output(model.odd, grad=True) as h, Hook(model.odd, args, is_forward=False) as both:
        model(X).backward(G)
    assert torch.equal(h.stored[0], expected)
    assert torch.equal(both.stored[1][0], expected)
    assert torch.equal(both.stored[0][0], expected @ model.odd.fc.weight)


def test_gradients_of_items_of_a_tuple_are_those_before_what_came_in_place():
    model = zoo.Around(lambda s, x: (s.fc(x), x.tanh()), lambda o, h: zoo.add_to_item(o))
    with hook_output(model.odd, grad=True) as h:
        model(X).backward(G)
    g = G @ model.after.weight
    assert torch.equal(h.stored[0], g * 2)
    assert torch.equal(h.stored[1], g)


def keep_gradient(o, into):
    if o.requires_grad:
        o.register_hook(into.append)


@pytest.mark.parametrize("pre", [False, True])
def test_a_view_changed_in_place_gives_its_gradient_or_none_never_a_wrong_one(pre):
    model = zoo.make("flatten_then_in_place")
    plain = zoo.make("flatten_then_in_place")
    plain[3].inplace = False
    expected = {}
    handles = [
        m.register_forward_hook(lambda m, i, o, k=k: keep_gradient(o, expected.setdefault(k, [])))
        for k, m in enumerate(plain)
    ]
    plain(X).backward(G)
    [h.remove() for h in handles]
    with Hooks(
        list(model), (lambda m, go: go) if pre else (lambda m, gi, go: go), is_forward=False, pre=pre
    ) as hooks:
        out = model(X)
        assert torch.equal(out, plain(X))
        out.backward(G)
    for k, got in enumerate(hooks.stored):
        if k == 2 and (got is None or got[0] is None):
            continue  # autograd cannot tell it
        assert (got is None and not expected[k]) or torch.equal(got[0], expected[k][0]), k


def test_an_in_place_modules_own_gradients_are_right_or_none():
    model = make(zoo.lin, lambda: nn.ReLU(inplace=True), zoo.lin)
    h0 = model[0](X)
    go = G @ model[2].weight
    with Hook(model[1], args, is_forward=False) as h, Hook(model[0], args, is_forward=False) as below:
        model(X).backward(G)
    grad_in, grad_out = h.stored
    assert torch.equal(grad_out[0], go)
    assert grad_in[0] is None or torch.equal(grad_in[0], go * (h0 > 0))
    assert torch.equal(below.stored[1][0], go * (h0 > 0))


@pytest.mark.parametrize("layer", [nn.Identity, nn.Flatten, lambda: nn.Dropout().eval()])
def test_a_layer_that_hands_on_a_leaf_has_its_gradient_in_every_backward(layer):
    layer, seen, x = layer(), [], X.clone().requires_grad_()
    with (
        Hook(layer, lambda m, gi, go: seen.append((gi[0], go[0])), is_forward=False),
        hook_output(layer, grad=True) as h,
    ):
        for k in range(1, 4):
            (layer(x) * G * k).sum().backward()
            assert len(seen) == k
            assert torch.equal(seen[-1][0], G * k)
            assert torch.equal(seen[-1][1], G * k)
            assert torch.equal(h.stored[0], G * k)


def test_gradients_of_lstm_outputs_that_the_loss_does_not_use_are_none():
    rnn = nn.LSTM(4, 3)
    with hook_output(rnn, grad=True) as h, Hook(rnn, args, is_forward=False) as both:
        out, _ = rnn(X[None])
        out.backward(torch.ones_like(out))
    assert torch.equal(h.stored[0], torch.ones(1, 4, 3))
    assert h.stored[1] == (None, None)
    assert both.stored[1][1] == (None, None)
    assert both.stored[0] == (None,)


def test_gradients_of_a_packed_sequence_are_a_plain_tuple():
    rnn = nn.LSTM(4, 3)
    p = pack_sequence([X, X[:2]])
    with hook_output(rnn, grad=True) as h, Hook(rnn, args, is_forward=False) as both, hook_output(rnn) as out:
        (y, (hn, _cn)) = rnn(p)
        (y.data.sum() * 2 + hn.sum()).backward()
    assert type(h.stored[0]) is tuple
    assert h.stored[0][1:] == (None, None, None)
    assert isinstance(out.stored[0], PackedSequence)
    y2, (hn2, _) = rnn(p)
    g_data, g_hn = torch.autograd.grad(y2.data.sum() * 2 + hn2.sum(), [y2.data, hn2])
    assert torch.equal(h.stored[0][0], g_data)
    assert torch.equal(h.stored[1][0], g_hn)
    assert h.stored[1][1] is None
    assert type(both.stored[0][0]) in (tuple, type(None))


def test_a_layer_not_used_in_the_loss_is_not_called():
    model = zoo.make("unused_output")
    with Hook(model.a, args, is_forward=False) as a, Hook(model.b, args, is_forward=False) as b:
        model(X).backward(G)
    assert a.stored is None
    assert torch.equal(b.stored[1][0], G)


def test_frozen_layers_have_no_gradients_at_the_start_and_have_them_in_the_middle():
    model = zoo.make("frozen_first")
    with hook_outputs(list(model), grad=True) as h:
        model(X).backward(G)
    assert h.stored[0] is None
    assert h.stored[1] is None
    assert torch.equal(h.stored[2][0], G)
    model = make(zoo.lin, lambda: zoo.frozen(zoo.lin()), zoo.lin)
    with hook_outputs(list(model), grad=True) as h:
        model(X).backward(G)
    assert torch.equal(h.stored[1][0], G @ model[2].weight)
    assert torch.equal(h.stored[0][0], G @ model[2].weight @ model[1].weight)


def test_backward_in_two_parts_calls_twice_with_what_came_each_time():
    model = zoo.Layer(lambda s, x: (s.fc(x), x * 2))
    seen = []
    x = X.clone().requires_grad_()
    with Hook(model, lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        a, b = model(x)
        a.backward(G, retain_graph=True)
        b.backward(G)
    (gi0, go0), (gi1, go1) = seen
    assert torch.equal(go0[0], G)
    assert go0[1] is None
    assert go1[0] is None
    assert torch.equal(go1[1], G)
    assert torch.equal(gi0[0], G @ model.fc.weight)
    assert torch.equal(gi1[0], G * 2)


def test_a_retained_graph_gives_the_gradients_each_time():
    model, seen = make(), []
    with Hook(model[1], lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        out = model(X)
        out.backward(G, retain_graph=True)
        out.backward(G * 2)
    assert len(seen) == 2
    assert torch.equal(seen[0][1][0] * 2, seen[1][1][0])
    assert torch.allclose(seen[0][0][0] * 2, seen[1][0][0])


def test_two_forwards_before_two_backwards_do_not_mix():
    model, seen = make(), []
    with Hook(model[0], lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        xs = [X.clone().requires_grad_(), (X * 2).requires_grad_()]
        outs = [model(x) for x in xs]
        outs[0].backward(G)
        outs[1].backward(G)
    for x, (gi, go) in zip(xs, seen, strict=True):
        assert torch.equal(gi[0], x.grad)
        h = model[0](x).tanh()
        assert torch.allclose(go[0], (G @ model[2].weight) * (1 - h * h))


@pytest.mark.parametrize("detach", [True, False])
def test_double_backward_gives_the_same_second_derivatives(detach):
    def penalty(model):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        return g.detach(), x.grad, *[p.grad for p in model.parameters()]

    model, plain = make(), make()
    first = []
    with Hooks(list(model), lambda m, gi, go: first.append((gi, go)), is_forward=False, detach=detach):
        got = penalty(model)
    assert zoo.alike(got, penalty(plain))
    assert len(first) >= 3
    assert torch.equal(first[2][0][0], got[0])


def test_gradients_kept_with_their_graph_can_be_differentiated():
    model = make()
    x = X.clone().requires_grad_()
    with Hook(model[0], args, is_forward=False, detach=False) as h:
        out = model(x)
        torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        gi, go = h.stored
        assert go[0].requires_grad
        assert gi[0].requires_grad
        gi[0].sum().backward()


def test_autograd_grad_of_a_part_of_the_graph_calls_no_hook_below_it():
    model = make(zoo.lin, nn.Tanh, zoo.lin, nn.Tanh, zoo.lin)
    with hook_outputs(list(model), grad=True) as grads, Hooks(list(model), args, is_forward=False) as both:
        mid = model[:2](X)
        out = model[2:](mid)
        (g,) = torch.autograd.grad(out, mid, G)
    plain = torch.autograd.grad(model[2:](mid), mid, G)[0]
    assert torch.equal(g, plain)
    assert grads.stored[0] is None
    assert both.stored[0] is None
    assert torch.equal(grads.stored[4][0], G)
    assert torch.equal(both.stored[2][0][0], g)


def test_autograd_grad_of_a_weight_tells_the_gradients_that_it_computes():
    model = make()
    with Hooks(list(model), args, is_forward=False) as both:
        torch.autograd.grad(model(X), model[2].weight, G)
    assert torch.equal(both.stored[2][1][0], G)
    assert both.stored[0] is None


def test_a_hook_function_may_run_the_module_and_another_backward():
    model, seen = make(), []

    def again(m, gi, go):
        if len(seen) < 3:
            seen.append(go[0])
            with torch.enable_grad():
                m(X).sum().backward()

    x = X.clone().requires_grad_()
    with Hook(model[2], again, is_forward=False):
        model(x).backward(G)
    assert torch.equal(seen[0], G)
    assert [torch.equal(g, torch.ones_like(g)) for g in seen[1:]] == [True, True]
    plain = X.clone().requires_grad_()
    model(plain).backward(G)
    assert torch.equal(plain.grad, x.grad)


@pytest.mark.parametrize(
    "options", [{}, {"pre": True}, {"is_forward": False}, {"is_forward": False, "pre": True}]
)
def test_hooks_let_the_graph_save_nothing_more(options):
    def saved():
        n = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (n.append(t.shape), t)[1], lambda t: t):
            model(X.clone().requires_grad_()).backward(G)
        return n

    model = zoo.make("residual_around_attention")
    plain = saved()
    with Hooks(list(model.modules()), lambda *a: None, **options):
        assert saved() == plain


def test_a_backward_that_is_cut_short_does_not_disturb_the_next():
    model = make()
    seen = []
    with Hook(model[0], lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        out = model(X)
        handle = model[1].register_full_backward_hook(explode)
        failing = model(X)
        with pytest.raises(ValueError, match="boom"):
            failing.backward(G)
        handle.remove()
        seen.clear()
        out.backward(G)
        model(X).backward(G)
    assert len(seen) == 2
    assert zoo.alike(seen[0], seen[1])


# ---- gradients of inputs


@pytest.mark.parametrize("kwargs", [False, True])
def test_nothing_of_the_gradients_is_lost_with_non_tensor_inputs(kwargs):
    model = zoo.Layer(lambda s, n, a, flag, idx: s.fc(a)[idx] * n if flag else None)
    x = X.clone().requires_grad_()
    with Hook(model, args, is_forward=False) as h:
        out = model(3, x, True, torch.tensor([0, 2, 2]))
        out.sum().backward()
    gi, _ = h.stored
    assert len(gi) == 4
    assert gi[0] is None
    assert gi[2:] == (None, None)
    assert torch.equal(gi[1], x.grad)


def two(s, a, b):
    return s.fc(a) * b + a


def uses_twice(s, a, b):
    return (s.fc(a) * a, b.sin() + s.fc(b))


def ignores_b(s, a, b):
    return s.fc(a).tanh()


def changes_a(s, a, b):
    return s.fc(a.mul_(2)) + b


def of_list(s, ab):
    return s.fc(ab[0]) * ab[1][0]


def of_dict(s, ab):
    return s.fc(ab["a"]) * ab["b"]


def of_dataclass(s, ab):
    return s.fc(ab.logits) * ab.state[0]


CALLS = {  # the module, how it is called with two tensors, and where their gradients are in (grad_input, grad_kwargs)  # noqa: E501
    "two": (two, lambda m, a, b: m(a, b), (0, 0), (0, 1)),
    "uses_twice": (uses_twice, lambda m, a, b: m(a, b), (0, 0), (0, 1)),
    "ignores_b": (ignores_b, lambda m, a, b: m(a, b), (0, 0), (0, 1)),
    "second_by_keyword": (two, lambda m, a, b: m(a, b=b), (0, 0), (1, "b")),
    "both_by_keyword": (two, lambda m, a, b: m(b=b, a=a), (1, "a"), (1, "b")),
    "list": (of_list, lambda m, a, b: m([a, (b, None)]), (0, 0, 0), (0, 0, 1, 0)),
    "dict": (of_dict, lambda m, a, b: m({"a": a, "b": b}), (0, 0, "a"), (0, 0, "b")),
    "dict_by_keyword": (of_dict, lambda m, a, b: m(ab={"a": a, "b": b}), (1, "ab", "a"), (1, "ab", "b")),
    "dataclass": (of_dataclass, lambda m, a, b: m(zoo.Out(a, [b])), (0, 0, "logits"), (0, 0, "state", 0)),
    "changes_a": (changes_a, lambda m, a, b: m(a, b), (0, 0), (0, 1)),
}


def call_around(model, call, a, b):
    """A residual connection around the call, and the inputs used before and after it."""
    h, k = a * 1.5, b * 0.5
    before = (h * k).sum()
    out = call(model, h, k)
    outs = list(zoo.flat(out).values())
    return h, k, outs, before + sum((o * (j + 2)).pow(2).sum() for j, o in enumerate(outs)) + (h + k).sum()


@pytest.mark.parametrize("name", [n for n in CALLS if n != "changes_a"])
def test_gradients_of_inputs_are_those_through_this_call_only(name):
    f, call, where_a, where_b = CALLS[name]
    model = zoo.Layer(f)
    a, b = X.clone().requires_grad_(), G.clone().requires_grad_()
    h, k, outs, loss = call_around(model, call, a, b)
    gos = torch.autograd.grad(loss, outs, retain_graph=True)
    expected = torch.autograd.grad(outs, [h, k], gos, retain_graph=True, allow_unused=True)
    plain = torch.autograd.grad(loss, [a, b, model.fc.weight])
    with Hook(model, args, is_forward=False, with_kwargs=True) as hook:
        loss = call_around(model, call, a, b)[3]
        got = torch.autograd.grad(loss, [a, b, model.fc.weight])
    gi, gk, go = hook.stored
    assert zoo.alike(got, plain)
    for where, e in ((where_a, expected[0]), (where_b, expected[1])):
        g = zoo.at((gi, gk), where)
        assert (g is None) if e is None else torch.allclose(g, e, rtol=1e-6, atol=1e-6), where
    for g, e in zip(zoo.flat(go).values(), gos, strict=True):
        assert torch.equal(g, e)


def test_the_input_of_a_module_that_changes_it_in_place_has_its_gradient_or_none():
    model = zoo.Layer(changes_a)
    a, b = X.clone().requires_grad_(), G.clone().requires_grad_()
    with Hook(model, args, is_forward=False) as h:
        out = model(a * 1.5, b * 0.5)
        out.backward(G)
    gi, go = h.stored
    assert torch.equal(go[0], G)
    assert gi[0] is None or torch.allclose(gi[0] * 1.5, a.grad)
    assert gi[1] is None or torch.allclose(gi[1] * 0.5, b.grad)
    assert torch.allclose(a.grad, (G @ model.fc.weight) * 3)


def test_a_tensor_given_twice_has_its_whole_gradient_in_both_places_as_autograd_says():
    model = nn.Bilinear(4, 4, 4)
    x = X.clone().requires_grad_()
    h0 = x * 2
    expected = torch.autograd.grad(model(h0, h0), (h0, h0), G)
    with Hook(model, args, is_forward=False) as h:
        h1 = x * 2
        model(h1, h1).backward(G)
    assert torch.equal(expected[0], expected[1])
    assert torch.allclose(h.stored[0][0], expected[0])
    assert torch.allclose(h.stored[0][1], expected[1])


def test_inputs_without_gradient_are_none_and_the_hook_is_called_all_the_same():
    model = nn.Bilinear(4, 4, 4)
    b = G.clone().requires_grad_()
    with Hook(model, args, is_forward=False) as h:
        model(X, b).backward(G)
        assert h.stored[0][0] is None
        assert torch.equal(h.stored[0][1], b.grad)
        model(X, G).backward(G)
        assert h.stored[0] == (None, None)
        assert torch.equal(h.stored[1][0], G)


def test_a_residual_connection_does_not_count():
    fc = zoo.lin()
    x = X.clone().requires_grad_()
    with Hook(fc, args, is_forward=False) as h:
        (x + fc(x)).backward(G)
    assert torch.equal(h.stored[0][0], G @ fc.weight)
    assert torch.equal(h.stored[1][0], G)


def test_each_call_of_a_shared_module_has_its_own_gradients():
    model = zoo.make("shared")
    seen = []
    a = model.fc(X)
    h = a.tanh()
    go0 = (G @ model.fc.weight) * (1 - h * h)
    x = X.clone().requires_grad_()
    with Hook(model.fc, lambda m, gi, go: seen.append((gi[0], go[0])), is_forward=False):
        model(x).backward(G)
    (gi_last, go_last), (gi_first, go_first) = seen  # backward goes from the last call to the first
    assert torch.equal(go_last, G)
    assert torch.equal(gi_last, G @ model.fc.weight)
    assert torch.allclose(go_first, go0)
    assert torch.equal(gi_first, x.grad)


def test_a_shared_module_called_on_the_same_tensor_tells_its_calls_apart():
    fc = zoo.lin()
    seen = []
    x = X.clone().requires_grad_()
    with Hook(fc, lambda m, gi, go: seen.append((gi[0], go[0])), is_forward=False):
        h = x * 1
        (fc(h) * 2 + fc(h) * 5).backward(G)
    assert sorted(round(float((go / G).mean())) for _, go in seen) == [2, 5]
    for gi, go in seen:
        assert torch.equal(gi, go @ fc.weight)


def test_a_recursive_module_has_the_gradients_of_each_call():
    model, seen = zoo.make("recursive"), []
    x = X.clone().requires_grad_()
    with Hook(model, lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        model(x).backward(G)
    assert len(seen) == 3
    h = [X]
    for _ in range(2):
        h.append(model.fc(h[-1]).tanh())
    by_hand = [G]
    for out in (h[2], h[1]):
        by_hand.append(((by_hand[-1] * (1 - out * out)) @ model.fc.weight).detach())
    for (gi, go), e in zip(sorted(seen, key=lambda s: order_of(s[0][0], by_hand)), by_hand, strict=True):
        assert torch.allclose(go[0], G)  # the same tensor is the output of every call
        assert torch.allclose(gi[0], e, atol=1e-6)


def order_of(g, candidates):
    return min(range(len(candidates)), key=lambda k: float((g - candidates[k]).abs().sum()))


def test_gradients_after_a_forward_that_failed_are_right():
    def sometimes(s, x, fail=False):
        if fail:
            raise KeyError("mine")
        return s.fc(x)

    model = zoo.Layer(sometimes)
    x = X.clone().requires_grad_()
    with Hook(model, args, is_forward=False) as h:
        for _ in range(3):
            with pytest.raises(KeyError):
                model(x, fail=True)
        model(x).backward(G)
    assert torch.equal(h.stored[0][0], x.grad)
    assert torch.equal(h.stored[1][0], G)


def test_output_gradients_are_told_before_the_modules_own_backward():
    model = make()
    early = []
    with Hooks(
        [model[0], model[2]],
        lambda m, go: early.append((m, go[0], m.weight.grad)),
        is_forward=False,
        pre=True,
    ):
        model(X).backward(G)
    assert [m for m, _, _ in early] == [model[2], model[0]]
    assert torch.equal(early[0][1], G)
    assert [w for _, _, w in early] == [None, None]


def test_all_gradient_hooks_have_been_called_when_backward_returns():
    model = zoo.make("transformer_layer")
    with Hooks(
        [m for m in model.modules() if not isinstance(m, nn.MultiheadAttention)], args, is_forward=False
    ) as hooks:
        model(X).backward(G)
    silent = [
        type(m).__name__
        for m, s in zip(
            [m for m in model.modules() if not isinstance(m, nn.MultiheadAttention)],
            hooks.stored,
            strict=True,
        )
        if s is None
    ]
    assert silent == ["NonDynamicallyQuantizableLinear"]  # attention uses its weights, and does not call it


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_under_activation_checkpointing_are_those_without(use_reentrant):
    def checkpointed(s, x):
        return s.c(checkpoint(s.block, s.a(x), use_reentrant=use_reentrant))

    def make_it(f):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return zoo.Plain(
                f, a=zoo.lin(), block=nn.Sequential(zoo.lin(), nn.ReLU(inplace=True), zoo.lin()), c=zoo.lin()
            )

    model, plain = make_it(checkpointed), make_it(lambda s, x: s.c(s.block(s.a(x))))
    stored = []
    for m in (plain, model):
        layers = [m.a, m.block[0], m.block[2], m.c]
        with hook_outputs(layers, grad=True) as grads, Hooks(layers, args, is_forward=False) as both:
            m(X).backward(G)
        stored.append((list(grads.stored), list(both.stored)))
    assert None not in stored[0][0]
    assert zoo.alike(stored[0], stored[1])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("options", [{"always_call": True}, {"pre": True}, {"is_forward": False}, {}])
def test_hooks_on_every_layer_survive_activation_checkpointing(use_reentrant, options):
    model = zoo.make("reentrant_checkpoint" if use_reentrant else "checkpoint")
    plain = zoo.run(zoo.make("reentrant_checkpoint" if use_reentrant else "checkpoint"))
    with Hooks(list(model.modules()), args, **options) as hooks:
        assert zoo.alike(zoo.run(model)["grads"], plain["grads"])
        assert None not in list(hooks.stored)


# ---- parameters and tensors


def test_a_parameter_hook_sees_the_gradient_after_accumulation_and_before():
    model = zoo.lin()
    with (
        Hook(model.weight, lambda p, g: (p, g.clone())) as post,
        Hook(model.weight, lambda p, g: g.clone(), pre=True) as pre,
    ):
        for k in (1, 2):
            model(X).backward(G)
            assert post.stored[0] is model.weight or torch.equal(post.stored[0], model.weight)
            assert torch.equal(post.stored[1], model.weight.grad)
            assert torch.allclose(post.stored[1], G.t() @ X * k)
            assert torch.equal(pre.stored, G.t() @ X)
    assert count_hooks(model) == 0


def test_what_a_parameter_hook_stores_is_not_changed_by_the_next_backward():
    model = zoo.lin()
    with Hook(model.weight, lambda p, g: g.clone()) as h:
        model(X).backward(G)
        first = h.stored
        model.zero_grad(set_to_none=False)
        assert torch.equal(first, G.t() @ X)


@pytest.mark.parametrize("pre", [True, False])
def test_a_parameter_used_twice_has_one_gradient(pre):
    model, seen = zoo.make("shared"), []
    plain = zoo.make("shared")
    plain(X).backward(G)
    with Hook(model.fc.weight, lambda p, g: seen.append(g.clone()), pre=pre):
        model(X).backward(G)
    assert len(seen) == 1
    assert torch.equal(seen[0], plain.fc.weight.grad)


def test_a_tensor_hook_sees_the_gradient_when_it_comes():
    x = X.clone().requires_grad_()
    t = x * 2
    with Hook(t, lambda t, g: (t, g)) as h, Hook(x, lambda t, g: g) as leaf:
        (t * G).sum().backward()
    assert torch.equal(h.stored[1], G)
    assert torch.equal(h.stored[0], X * 2)
    assert torch.equal(leaf.stored, G * 2)


def test_a_parameter_gradient_can_be_replaced_after_and_before_accumulation():
    for pre, expected in ((False, torch.full((4, 4), 3.0)), (True, torch.full((4, 4), 6.0))):
        model = zoo.lin()
        with Hook(model.weight, lambda p, g: torch.full_like(g, 3), pre=pre, modify=True):
            model(X).backward(G)
            model(X).backward(G)
        assert torch.equal(model.weight.grad, expected)


def test_a_tensors_gradient_can_be_replaced():
    x = X.clone().requires_grad_()
    t = x * 2
    with Hook(t, lambda t, g: g.clamp(0), modify=True):
        t.backward(G)
    assert torch.equal(x.grad, G.clamp(0) * 2)


def test_observing_a_parameter_replaces_nothing_whatever_is_returned():
    for pre in (False, True):
        model = zoo.lin()
        with Hook(model.weight, lambda p, g: torch.zeros_like(g), pre=pre) as h:
            model(X).backward(G)
        assert torch.equal(model.weight.grad, G.t() @ X)
        assert torch.equal(h.stored, torch.zeros(4, 4))


def test_a_sparse_gradient_of_an_embedding_is_seen_as_it_is():
    emb = nn.Embedding(9, 4, sparse=True)
    with Hook(emb.weight, lambda p, g: g) as h:
        emb(torch.tensor([1, 1, 5])).sum().backward()
    assert h.stored.is_sparse
    assert torch.equal(h.stored.to_dense(), emb.weight.grad.to_dense())


@pytest.mark.parametrize("pre", [False, True])
def test_a_tensor_with_a_hook_dies_with_its_last_reference(pre):
    gc.collect()
    gc.disable()
    try:
        t = X.clone().requires_grad_() * 2
        with Hook(t, lambda t, g: None, pre=pre):
            (t * 2).sum().backward()
        ref = weakref.ref(t)
        del t
        assert ref() is None
    finally:
        gc.enable()


def test_a_tensor_whose_hook_was_never_removed_can_be_collected():
    t = X.clone().requires_grad_() * 2
    h = Hook(t, lambda t, g: None)
    ref = weakref.ref(t)
    del t, h
    gc.collect()
    assert ref() is None


def test_a_parameter_hook_stands_another_that_takes_the_gradient_away():
    """As optimizers do that step in the backward."""
    model = make()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Hooks(model.parameters(), lambda p, g: g is None) as hooks:
        model(X).backward(G)
    assert list(hooks.stored) in ([True] * 4, [None] * 4)
    assert [p.grad for p in model.parameters()] == [None] * 4


# ---- modify


def test_an_output_can_be_replaced_and_gradients_flow_through_what_replaced_it():
    model, plain = make(), make()
    with Hook(model[0], lambda m, i, o: o * 2 + i[0], modify=True):
        out = model(X)
        out.backward(G)
    expected = plain[2]((plain[0](X) * 2 + X).tanh())
    expected.backward(G)
    assert torch.equal(out, expected)
    assert zoo.alike([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("value", [False, 0, (), "", {}])
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
    model = make(zoo.lin, lambda: nn.ReLU(inplace=True), zoo.lin)
    h0 = model[0](X)
    with Hook(model[0], lambda m, go: wrap(go[0] * 3), is_forward=False, pre=True, modify=True):
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
    with Hook(
        model.odd,
        lambda m, go: tuple(None if g is None else g * f for g, f in zip(go, (0.5, 7), strict=True)),
        is_forward=False,
        pre=True,
        modify=True,
    ):
        model(X).backward(G)
    assert torch.allclose(model.before.weight.grad, plain.before.weight.grad, atol=1e-6)
    assert torch.allclose(model.odd.fc.weight.grad, plain.odd.fc.weight.grad, atol=1e-6)


def test_a_gradient_in_a_dict_can_be_replaced():
    model, plain = zoo.make("returns_dict"), zoo.make("returns_dict")
    plain.pick = lambda o, h: o["logits"] * 2
    plain(X).backward(G)
    with Hook(
        model.odd,
        lambda m, go: ({"logits": go[0]["logits"] * 2, "n": None},),
        is_forward=False,
        pre=True,
        modify=True,
    ):
        model(X).backward(G)
    assert torch.equal(model.before.weight.grad, plain.before.weight.grad)


@pytest.mark.parametrize("options", [{}, {"pre": True}])
def test_a_gradient_of_another_shape_is_refused_with_the_module_named(options):
    model = make()
    with (
        Hook(model[2], lambda m, *g: g[-1][0][:1, :1].repeat(7, 7), is_forward=False, modify=True, **options),
        pytest.raises((ValueError, TypeError, RuntimeError)) as error,
    ):
        model(X).backward(G)
    assert "Linear" in str(error.value) + "".join(getattr(error.value, "__notes__", ()))


def test_a_limit_can_be_put_on_a_signal():
    model = make()
    with Hook(model[0], lambda m, i, o: None if o.abs().max() < 1e-9 else o.clamp(-0.1, 0.1), modify=True):
        out = model(X)
    assert torch.equal(out, model[2](model[0](X).clamp(-0.1, 0.1).tanh()))


# ---- functorch, in mid-forward, removal


def test_functional_call_is_seen_with_the_weights_given():
    model = make()
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
    model = make()
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
    model = make()
    with hook_outputs(list(model)) as outs, hook_outputs(list(model), grad=True) as grads:
        got = vmap(grad(lambda x: model(x).sum()))(X)
    assert torch.equal(got, vmap(grad(lambda x: model(x).sum()))(X))
    list(outs.stored), list(grads.stored)


def test_a_hook_can_be_attached_and_removed_in_mid_forward():
    model = make()
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
    model, calls = make(), []

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
    for pre in (False, True):
        model, calls = make(), []
        hook = Hook(model[0].weight, lambda p, g: (calls.append(1), hook.remove()), pre=pre)  # noqa: B023
        for _ in range(2):
            model(X).backward(G)
        assert calls == [1]
        assert count_hooks(model) == 0


@pytest.mark.parametrize("options", [{"is_forward": False}, {"is_forward": False, "pre": True}])
def test_a_gradient_hook_removed_after_the_forward_is_not_called_in_backward(options):
    model, calls = make(), []
    with Hooks(list(model), lambda *a: calls.append(1), **options):
        out = model(X)
    out.backward(G)
    assert calls == []


def test_removing_one_hook_leaves_the_others():
    model = make()
    a, b = Hook(model[0], args), Hook(model[0], args)
    a.remove()
    model(X)
    assert a.stored is None
    assert b.stored is not None
    b.remove()
    assert count_hooks(model) == 0


def test_what_was_stored_stays_readable_after_removal():
    model = make()
    with Hook(model[0], args) as h:
        assert not h.removed
        model(X)
    assert h.removed
    assert torch.equal(h.stored[1], model[0](X))


def test_hooks_come_off_when_the_body_of_with_fails():
    model = make()
    with pytest.raises(KeyError), Hooks(list(model), args, is_forward=False), Hooks(model.parameters(), args):
        raise KeyError
    assert_no_hooks(model)


# ---- errors


class SaysSo(Exception):
    """Cannot be made again from its args."""

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


@pytest.mark.parametrize("error", [ValueError("boom"), SaysSo(1, b=2), StopIteration(3)])
@pytest.mark.parametrize("options", KINDS_OF_CALL)
def test_an_error_of_the_hook_function_goes_on_as_it_is_and_names_module_and_function(options, error):
    error = type(error)(1, b=2) if isinstance(error, SaysSo) else type(error)(*error.args)
    model = make()

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


@pytest.mark.parametrize("options", KINDS_OF_CALL)
def test_an_interrupt_in_a_hook_function_goes_on_as_it_is(options):
    model, interrupt = make(), [KeyboardInterrupt("mine")]

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
    model, error = make(), SaysSo(1, b=2)

    def explosive(*what):
        raise error

    hook = Hook(model[0].weight, explosive, **options)
    with pytest.raises(SaysSo) as raised:
        model(X).backward(G)
    assert raised.value is error
    assert "explosive" in "\n".join(error.__notes__)
    assert hook.removed
    model(X).backward(G)
    assert count_hooks(model) == 0


def test_one_failing_hook_of_several_takes_only_itself_off():
    model = make()
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


@pytest.mark.parametrize("m", [None, 3, "0", zoo.lin, print, {"a": 1}.values()])
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


# ---- several


def test_hooks_takes_whatever_holds_modules():
    model = make()
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


def failing_generator(model):
    yield model[0]
    yield model[1]
    raise KeyError("mine")


@pytest.mark.parametrize(
    "bad",
    [
        lambda m: [m[0], m[1], "2"],
        lambda m: [m[0], None],
        lambda m: [m[0].weight, zoo.frozen(zoo.lin()).weight],
        lambda m: [m[0].weight, nn.LazyLinear(3).weight],
        failing_generator,
    ],
)
def test_registration_of_several_is_all_or_nothing(bad):
    model = make()
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


def test_a_module_listed_twice_is_hooked_for_each():
    model = zoo.lin()
    with Hooks([model, model], lambda m, i, o: o) as hooks:
        out = model(X)
    assert len(hooks) == 2
    assert all(torch.equal(s, out) for s in hooks.stored)


def test_gather_without_other_processes_changes_nothing():
    model = make()
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
