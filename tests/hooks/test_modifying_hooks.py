"""What hooks put in the place of inputs, outputs and gradients."""

import pytest
import torch
from torch import nn

from hookcb.hooks.hook import Hook
from tests.hooks import support as zoo
from tests.hooks.support import G, X, sequential

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
