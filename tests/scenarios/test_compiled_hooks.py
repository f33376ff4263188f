"""HookCallback and hooks on compiled models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from hookcb import HookCallback
from hookcb.hooks.hook import Hooks, hook_outputs
from hookcb.testing import assert_no_hooks
from tests.hooks import support as zoo
from tests.hooks.support import batches, fit, learner, numbers, three_layers
from tests.support import along, each, first

WAYS = ["torch.compile", "model.compile"]
WAYS_AND_BACKENDS = [("torch.compile", "eager"), ("model.compile", "aot_eager")]
# at each graph break dynamo looks at .grad of the tensors it goes on with, and silences the warning only
# where there is none
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def compiled(model, way, backend, **kwargs):
    if way == "torch.compile":
        return torch.compile(model, backend=backend, **kwargs)
    model.compile(backend=backend, **kwargs)
    return model


def means(**kwargs):
    return HookCallback(**{"hook": lambda m, i, o: o.mean(), "name": "means"} | kwargs)


def gradients(**kwargs):
    return HookCallback(
        **{"hook": lambda m, gi, go: go[0].clone(), "is_forward": False, "name": "gradients"} | kwargs
    )


def without_prefix(results):
    return {name.removeprefix("_orig_mod."): value for name, value in results.items()}


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("how", "given"),
    each(2, along(WAYS_AND_BACKENDS, [(False, means), (True, means), (True, gradients), (False, gradients)])),
)
def test_a_compiled_model_is_watched_as_the_same_model_without_compile(how, given):
    called_before, make_cb = given
    model, plain = three_layers(), three_layers()
    n_valid = 0 if called_before else 2  # in either way it runs in eval mode too
    fit(plain, expected := make_cb(), n_epoch=2, n_valid=n_valid)
    model = compiled(model, *how)
    if called_before:
        x, y = batches(1)[0]
        F.mse_loss(model(x), y).backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    fit(model, cb := make_cb(), n_epoch=2, n_valid=n_valid)
    assert sorted(without_prefix(cb.results)) == ["a", "b", "c"]
    assert all(torch.allclose(v, expected.results[k]) for k, v in without_prefix(cb.results).items())
    assert sorted(without_prefix(dict.fromkeys(cb.coverage.fired))) == ["a", "b", "c"]
    assert all(map(torch.allclose, weights(model), weights(plain)))
    assert_no_hooks(model)


def count_frames(way, *cbs, **kwargs):
    torch._dynamo.reset()
    counter = CompileCounter()
    fit(compiled(three_layers(), way, counter), *cbs, **kwargs)
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("way", [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def test_attaching_before_the_first_call_leaves_the_number_of_frames_as_it_is(way):
    size = {"n_epoch": 3, "n_train": 4, "n_valid": 2}
    plain = count_frames(way, **size)
    assert plain > 0
    assert count_frames(way, means(), **size) == plain
    assert count_frames(way, means(), means(name="two", detach=False, cpu=False), **size) == plain


@pytest.mark.slow
def test_looking_at_every_second_batch_adds_one_frame_however_long_the_fit_is():
    way = "model.compile"
    plain = count_frames(way, n_epoch=1, n_valid=0)
    for n_epoch, n_train in ((1, 2), (3, 6)):
        assert count_frames(way, means(every=2), n_epoch=n_epoch, n_train=n_train, n_valid=0) == plain + 1


@pytest.mark.slow
def test_a_pre_hook_leaves_the_number_of_frames_as_it_is():
    counts = []
    for cbs in ([], [HookCallback(pre=True, hook=lambda m, i: i[0].mean())]):
        torch._dynamo.reset()
        counter = CompileCounter()
        fit(compiled(three_layers(), "torch.compile", counter), *cbs, n_epoch=3, n_valid=0)
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 2


@pytest.mark.parametrize("every", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_forward_callback_breaks_no_graph(every):
    model, plain = three_layers(), three_layers()
    fit(plain, expected := means(every=every), n_epoch=2)
    fit(compiled(model, "torch.compile", "eager", fullgraph=True), cb := means(every=every), n_epoch=2)
    assert numbers(without_prefix(cb.results)) == numbers(expected.results)
    assert all(map(torch.equal, weights(model), weights(plain)))


@pytest.mark.parametrize("way", first(WAYS))
def test_a_compiled_shared_layer_has_one_result_for_each_call(way):
    model, plain = zoo.make("shared"), zoo.make("shared")
    fit(plain, expected := means(), n_valid=0)
    fit(compiled(model, way, "eager"), cb := means(), n_valid=0)
    assert sorted(without_prefix(cb.results)) == sorted(expected.results) == ["fc#0", "fc#1"]
    assert all(torch.allclose(v, expected.results[k]) for k, v in without_prefix(cb.results).items())


@pytest.mark.slow
def test_every_is_right_on_a_compiled_model():
    model, plain = three_layers(), three_layers()
    size = {"n_train": 5, "n_valid": 0, "n_epoch": 2}
    fit(plain, expected := means(every=3), **size)
    fit(compiled(model, "torch.compile", "eager"), cb := means(every=3), **size)
    assert (
        (cb.coverage.n_batches, cb.coverage.n_skipped)
        == (expected.coverage.n_batches, expected.coverage.n_skipped)
        == (4, 6)
    )
    assert numbers(without_prefix(cb.results)) == numbers(expected.results)


@pytest.mark.slow
def test_a_second_fit_sees_a_compiled_model_again():
    model = compiled(three_layers(), "torch.compile", "eager")
    learn = learner(model, n_valid=0, cbs=means())
    for _ in range(2):
        learn.fit(1)
        assert sorted(without_prefix(learn.means.results)) == ["a", "b", "c"]
        learn.means.results.clear()
    learn.remove_cbs(learn.means)
    learn.fit(1)
    assert_no_hooks(model)


@pytest.mark.slow
def test_a_compiled_submodule_is_watched_too():
    for called_before in (False, True):
        model, plain = three_layers(), three_layers()
        x, y = batches(1)[0]
        model.b.compile(backend="eager")
        if called_before:
            F.mse_loss(model(x), y).backward()
            model.zero_grad()
        fit(plain, expected := means(), n_valid=0)
        fit(model, cb := means(), n_valid=0)
        assert numbers(cb.results) == numbers(expected.results)


@pytest.mark.slow
def test_an_in_place_successor_in_a_compiled_model_changes_no_result():
    model, plain = zoo.make("in_place_modules"), zoo.make("in_place_modules")
    for m in (model, plain):
        m[4] = nn.Identity()
    whole = zoo.Plain(lambda s, x: s.net(x), net=model)
    outs = {}
    for name, m in plain.named_children():
        m.register_forward_hook(
            lambda m, i, o, name=name: outs.__setitem__(f"net.{name}", o.detach().clone())
        )
    plain(batches(1)[0][0])
    fit(
        compiled(whole, "torch.compile", "aot_eager"),
        cb := HookCallback(hook=lambda m, i, o: o.clone()),
        n_train=1,
        n_valid=0,
    )
    for name, o in without_prefix(cb.results).items():
        assert torch.allclose(o, outs[name]), name
    assert sorted(without_prefix(cb.results)) == ["net.0", "net.2", "net.5"]


def outputs_by_hand(model, x):
    """Outputs and their means."""
    layers = [model.a, model.b, model.c]
    with hook_outputs(layers) as outs, Hooks(layers, lambda m, i, o: o.mean()) as mus:
        model(x).sum().backward()
    return list(outs.stored), list(mus.stored)


def gradients_by_hand(model, x):
    """Gradients of outputs in both ways to have them, and those of inputs but for the model's own input."""
    layers = [model.a, model.b, model.c]
    with (
        hook_outputs(layers, grad=True) as grads,
        Hooks(layers, lambda m, gi, go: (gi, go), is_forward=False) as both,
    ):
        model(x).pow(2).sum().backward()
    outputs, inputs = [go[0] for _, go in both.stored], [gi[0] for gi, _ in both.stored]
    return [g[0] for g in grads.stored], outputs, inputs[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "look"), along(WAYS_AND_BACKENDS, [outputs_by_hand, gradients_by_hand]))
def test_hooks_by_hand_attached_before_the_first_call_see_what_they_see_without_compile(how, look):
    x = torch.randn(4, 4)
    plain, watched = look(three_layers(), x), look(compiled(three_layers(), *how), x)
    for expected, got in zip(plain, watched, strict=True):
        assert len(expected) == len(got) > 0
        assert all(map(torch.allclose, expected, got))


def test_parameter_hooks_see_a_compiled_model():
    model = compiled(three_layers(), "torch.compile", "aot_eager")
    params = list(model.parameters())
    with (
        Hooks(params, lambda p, g: g.clone()) as post,
        Hooks(params, lambda p, g: g.clone(), pre=True) as pre,
    ):
        model(torch.randn(4, 4)).sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(post.stored, params, strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(pre.stored, params, strict=True))


@pytest.mark.slow
def test_graphs_are_not_recompiled_batch_after_batch():
    counter = CompileCounterWithBackend("eager")
    model = compiled(three_layers(), "torch.compile", counter)
    fit(model, means(every=2), n_train=12, n_valid=6, n_epoch=2)
    assert counter.frame_count <= 4
    counter = CompileCounterWithBackend("eager")
    model = compiled(three_layers(), "torch.compile", counter)
    fit(model, gradients(every=2), n_train=4, n_valid=0)
    few = counter.frame_count
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    model = compiled(three_layers(), "torch.compile", counter)
    fit(model, gradients(every=2), n_train=12, n_valid=0, n_epoch=3)
    assert counter.frame_count == few


@pytest.mark.slow  # as C++ is compiled; what is lowered by aot_eager is looked at above
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, at inductor's import
def test_what_inductor_compiles_is_seen_as_without_compile():
    model, plain = three_layers(), three_layers()
    fit(plain, expected := means())
    fit(compiled(model, "torch.compile", "inductor"), cb := means())
    torch.testing.assert_close(without_prefix(cb.results), expected.results)
    torch.testing.assert_close(weights(model), weights(plain))
