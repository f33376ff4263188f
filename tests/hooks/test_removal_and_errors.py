"""How hooks come off, what an error in one does, and what is refused."""

import pytest
import torch
from torch import nn

from hookcb.hooks.hook import Hook, Hooks
from hookcb.testing import assert_no_hooks, count_hooks
from tests.hooks import support as zoo
from tests.hooks.support import G, X, args, explode, sequential


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


def test_removing_one_hook_leaves_the_others():
    model = sequential()
    a, b = Hook(model[0], args), Hook(model[0], args)
    a.remove()
    model(X)
    assert a.stored is None
    assert b.stored is not None
    b.remove()
    assert count_hooks(model) == 0


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


@pytest.mark.parametrize("error", [ValueError("boom"), NeedsKeyword(1, b=2), StopIteration(3)])
@pytest.mark.parametrize("options", KINDS_OF_CALL)
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


@pytest.mark.parametrize("options", KINDS_OF_CALL)
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
