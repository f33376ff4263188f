"""What hooks see and store of the gradients of outputs, inputs, parameters and tensors."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from hookcb.testing import count_hooks
from tests.hooks import support as zoo
from tests.hooks.support import G, X, args, explode, sequential
from tests.support import in_turn, no_collection

DIFFERENTIABLE = [
    "tensor", "tuple", "tuple_of_one", "list", "nested", "partly_used", "namedtuple", "dict", "ordered_dict",
    "dict_with_odd_keys", "dict_of_dict", "dataclass", "frozen_dataclass", "slotted_dataclass",
    "dataclass_with_another_init", "return_type_of_max", "same_tensor_twice", "bfloat16", "float64",
    "complex", "zero_d", "one_element", "empty", "its_input", "its_input_and_more", "view", "expanded",
    "fresh_leaf", "views_of_chunk", "unbound", "own_parameter", "tensor_subclass", "bool", "int", "user_dict",
    "tuple_with_another_init", "detached",
]  # fmt: skip


def output_gradients(model, x, g):
    """By autograd, without any hook: {path: gradient of that tensor of the odd layer's output}."""
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


@in_turn("name", DIFFERENTIABLE)
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


@in_turn(
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


@in_turn("name", IN_PLACE_GRADIENTS)
def test_gradients_of_an_output_are_those_before_what_came_in_place(name):
    in_place, plain = IN_PLACE_GRADIENTS[name]
    model = zoo.Around(lambda s, x: s.fc(x), lambda o, h: plain(o))
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
    model = sequential(zoo.lin, lambda: nn.ReLU(inplace=True), zoo.lin)
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
    model = sequential(zoo.lin, lambda: zoo.frozen(zoo.lin()), zoo.lin)
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
    model, seen = sequential(), []
    with Hook(model[1], lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        out = model(X)
        out.backward(G, retain_graph=True)
        out.backward(G * 2)
    assert len(seen) == 2
    assert torch.equal(seen[0][1][0] * 2, seen[1][1][0])
    assert torch.allclose(seen[0][0][0] * 2, seen[1][0][0])


def test_two_forwards_before_two_backwards_do_not_mix():
    model, seen = sequential(), []
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

    model, plain = sequential(), sequential()
    first = []
    with Hooks(list(model), lambda m, gi, go: first.append((gi, go)), is_forward=False, detach=detach):
        got = penalty(model)
    assert zoo.alike(got, penalty(plain))
    assert len(first) >= 3
    assert torch.equal(first[2][0][0], got[0])


def test_gradients_kept_with_their_graph_can_be_differentiated():
    model = sequential()
    x = X.clone().requires_grad_()
    with Hook(model[0], args, is_forward=False, detach=False) as h:
        out = model(x)
        torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        gi, go = h.stored
        assert go[0].requires_grad
        assert gi[0].requires_grad
        gi[0].sum().backward()


def test_autograd_grad_of_a_part_of_the_graph_calls_no_hook_below_it():
    model = sequential(zoo.lin, nn.Tanh, zoo.lin, nn.Tanh, zoo.lin)
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
    model = sequential()
    with Hooks(list(model), args, is_forward=False) as both:
        torch.autograd.grad(model(X), model[2].weight, G)
    assert torch.equal(both.stored[2][1][0], G)
    assert both.stored[0] is None


def test_a_hook_function_may_run_the_module_and_another_backward():
    model, seen = sequential(), []

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


@in_turn("options", [{}, {"pre": True}, {"is_forward": False}, {"is_forward": False, "pre": True}])
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
    model = sequential()
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


# the module, how it is called with two tensors, and where their gradients are in (grad_input, grad_kwargs)
CALLS = {
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


@in_turn("name", [n for n in CALLS if n != "changes_a"])
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
    model = sequential()
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
    modules = [m for m in model.modules() if not isinstance(m, nn.MultiheadAttention)]
    with Hooks(modules, args, is_forward=False) as hooks:
        model(X).backward(G)
    silent = [type(m).__name__ for m, s in zip(modules, hooks.stored, strict=True) if s is None]
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


@in_turn("use_reentrant", [True, False])
@in_turn("options", [{"always_call": True}, {"pre": True}, {"is_forward": False}, {}])
def test_hooks_on_every_layer_survive_activation_checkpointing(use_reentrant, options):
    model = zoo.make("reentrant_checkpoint" if use_reentrant else "checkpoint")
    plain = zoo.run(zoo.make("reentrant_checkpoint" if use_reentrant else "checkpoint"))
    with Hooks(list(model.modules()), args, **options) as hooks:
        assert zoo.alike(zoo.run(model)["grads"], plain["grads"])
        assert None not in list(hooks.stored)


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
    with no_collection():
        t = X.clone().requires_grad_() * 2
        with Hook(t, lambda t, g: None, pre=pre):
            (t * 2).sum().backward()
        ref = weakref.ref(t)
        del t
        assert ref() is None


def test_a_tensor_whose_hook_was_never_removed_can_be_collected():
    t = X.clone().requires_grad_() * 2
    h = Hook(t, lambda t, g: None)
    ref = weakref.ref(t)
    del t, h
    gc.collect()
    assert ref() is None


def test_a_parameter_hook_stands_another_that_takes_the_gradient_away():
    """As optimizers do that step in the backward."""
    model = sequential()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Hooks(model.parameters(), lambda p, g: g is None) as hooks:
        model(X).backward(G)
    assert list(hooks.stored) in ([True] * 4, [None] * 4)
    assert [p.grad for p in model.parameters()] == [None] * 4


@pytest.mark.parametrize("pre", [False, True])
def test_no_backward_hook_of_torch_is_used_so_that_users_may_add_either_kind(pre):
    model = nn.Bilinear(3, 4, 2)
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    seen = []
    with Hook(model, lambda m, *grads: None, is_forward=False, pre=pre):
        assert not model._backward_hooks
        assert model._is_full_backward_hook is None  # a legacy hook would forbid full ones for good
        model.register_full_backward_hook(lambda m, gi, go: seen.append(len(gi)))
        model(a, b).sum().backward()
    assert seen == [2]
