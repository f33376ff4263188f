"""What hooks see and store of the gradients of outputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from tests.hooks import support as zoo
from tests.hooks.support import G, X, args, explode, sequential

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
