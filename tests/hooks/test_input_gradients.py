"""What hooks see and store of the gradients of inputs, parameters and tensors."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb.hooks.hook import Hook, Hooks, hook_outputs
from hookcb.testing import count_hooks
from tests.hooks import support as zoo
from tests.hooks.support import G, X, args, sequential
from tests.support import no_collection


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


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("options", [{"always_call": True}, {"pre": True}, {"is_forward": False}, {}])
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
