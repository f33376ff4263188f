"""Hooks on saved tensors that change nothing: no gradient, no check, no life of a tensor."""

import gc
import threading
import weakref

import pytest
import torch
from torch.func import grad

from hookcb.profiling.memory.saved_tensors import SavedTensors
from tests.support import in_turn, no_collection

AUTOGRAD = torch._C._autograd
ORIGINAL = AUTOGRAD._saved_tensors_hooks_disable, AUTOGRAD._saved_tensors_hooks_enable
KNOWS_TOP = hasattr(AUTOGRAD, "_top_saved_tensors_default_hooks")
needs_top = pytest.mark.skipif(not KNOWS_TOP, reason="this torch does not tell which hooks are on")


@pytest.fixture
def seen():
    return []


@pytest.fixture
def saved(seen):
    def see(x):
        seen.append(tuple(x.shape))
        return "a layer"

    saved = SavedTensors(see)
    yield saved
    saved.stop()
    assert (AUTOGRAD._saved_tensors_hooks_disable, AUTOGRAD._saved_tensors_hooks_enable) == ORIGINAL
    assert not nothing_is_on()


def nothing_is_on():
    """Tensors saved under hooks that someone has left active."""
    x = torch.ones(2, requires_grad=True)
    return KNOWS_TOP and x.exp().grad_fn._raw_saved_result.unpack_hook is not None


def leaf(n=3):
    return torch.arange(1.0, n + 1, requires_grad=True)


def test_each_saved_tensor_is_seen_until_it_stops(saved, seen):
    assert not saved.start()
    y = leaf().exp()
    saved.stop()
    saved.stop()
    leaf(4).exp()
    assert seen == [(3,)]
    y.sum().backward()


def test_gradients_are_those_without(saved):
    def grads():
        x = leaf()
        y = (x.sigmoid() * x).exp().softmax(0)[:2]
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), x)]

    plain = grads()
    saved.start()
    for a, b in zip(plain, grads(), strict=True):
        assert torch.equal(a, b)


@in_turn(
    ("make", "change"),
    [
        (lambda x: (y := (x * 1).sigmoid(), y), lambda y: y.detach().add_(1)),  # the output that it saves
        (lambda x: (y := x * 1, y.square()), lambda y: y.detach().mul_(2)),  # an input
        (lambda x: (y := x * 1, y[:2].square()), lambda y: y.detach().zero_()),  # a view of it
        (lambda x: (y := x * 1, y.relu_()), lambda y: y.detach().add_(1)),  # what was changed in place before
    ],
    ids=["output", "input", "view", "in place"],
)
def test_a_change_in_place_is_noticed_as_without(saved, make, change):
    def run(start):
        if start:
            saved.start()
        y, z = make(leaf())
        saved.stop()
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            z.sum().backward()
        return str(caught.value)

    plain, ours = run(False), run(True)
    assert "saved in a layer" in ours
    assert plain.split(":")[0] == ours.split(":")[0]
    assert (
        ours[ours.index("is at version") :].split(".")[0]
        == plain[plain.index("is at version") :].split(".")[0]
    )


def test_a_change_that_does_no_harm_is_none(saved):
    saved.start()
    y = (leaf() * 1).relu_()  # saved after it was changed
    y = y.clone()
    y.add_(1)  # saved by nobody
    y.sum().backward()


def test_a_graph_without_a_backward_frees_what_it_saved(saved):
    saved.start()
    with no_collection():
        y = (leaf() * 1).sigmoid().exp()
        ref = weakref.ref(y.untyped_storage())
        del y
        assert ref() is None


def test_a_backward_frees_what_was_saved(saved):
    saved.start()
    y = leaf() * 1
    z, ref = y.square().sum(), weakref.ref(y.untyped_storage())
    del y
    assert ref() is not None
    z.backward()
    assert ref() is None


@pytest.mark.parametrize("transform", [grad, torch.func.jacrev, lambda f: grad(lambda x: grad(f)(x).sum())])
def test_transforms_of_functions_go_on_working(saved, seen, transform):
    def f(x):
        return torch.func.vmap(torch.sin)(x).square().sum()

    plain, x = transform(f)(leaf().detach()), leaf()
    saved.start()
    assert torch.equal(transform(f)(x.detach()), plain)
    n = len(seen)
    x.exp()
    assert len(seen) == n + 1  # it goes on afterwards


def test_a_transform_that_fails_leaves_them_on(saved, seen):
    saved.start()
    with pytest.raises(ZeroDivisionError):
        grad(lambda x: 1 / 0)(leaf())
    leaf().exp()
    assert seen == [(3,)]


def test_hooks_that_are_switched_off_stay_so(saved, seen):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert saved.start() == "hooks on saved tensors are switched off"
        leaf().exp()
    saved.stop()
    assert seen == []


def test_hooks_around_all_are_not_put_out_of_action(saved, seen):
    with torch.autograd.graph.save_on_cpu():
        why = saved.start()
        leaf().exp()
        saved.stop()
    assert why == "other hooks on saved tensors are active" + " (save_on_cpu)" * KNOWS_TOP
    assert seen == []


def test_hooks_that_come_later_win(saved, seen):
    saved.start()
    with torch.autograd.graph.save_on_cpu():
        if KNOWS_TOP:
            assert saved.other_hooks() == "save_on_cpu"
        y = leaf().exp()
    assert saved.other_hooks() == ""
    y.sum().backward()
    assert seen == []


@needs_top
def test_hooks_that_are_entered_between_stay_on(saved, seen):
    others = []
    other = torch.autograd.graph.saved_tensors_hooks(lambda x: others.append(x.shape) or x, lambda x: x)
    saved.start()
    other.__enter__()
    saved.stop()
    leaf().exp()
    other.__exit__()
    assert len(others) == 1
    assert seen == []


def test_of_two_at_once_the_first_counts(saved, seen):
    second = SavedTensors(lambda x: seen.append("second") or "")
    saved.start()
    assert "other hooks" in second.start()
    leaf().exp()
    second.stop()
    leaf().exp()
    assert [shape for shape in seen if shape != (1,)] == [(3,), (3,)]  # (1,) is an older torch asked


def test_another_thread_is_left_alone(saved, seen):
    saved.start()

    def work():
        grad(lambda x: x.exp().sum())(leaf().detach())
        leaf().exp()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == []
    leaf().exp()
    assert seen == [(3,)]


def test_what_was_saved_while_it_stood_aside_is_read_from_the_graph(saved, seen):
    saved.start()
    x = leaf() * 1
    del seen[:]
    saved.step_aside("compiled")
    y = x.exp().sin()
    assert seen == []
    saved.see_graph([y], [x])
    saved.step_back("compiled")
    assert seen == [(3,), (3,)]  # exp has saved its output, sin its input
    y.sum().backward()
    leaf(4).exp()
    assert seen[2:] == [(4,)]


def test_nothing_holds_it_when_it_has_stopped():
    saved = SavedTensors(lambda x: "")
    saved.start()
    y = leaf().exp()
    saved.stop()
    ref = weakref.ref(saved)
    del saved
    gc.collect()
    assert ref() is None
    y.sum().backward()
