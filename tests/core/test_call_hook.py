"""Calls of torch's functions are observed, and torch is otherwise what it was."""

import copy
import gc
import inspect
import os
import pickle
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookcb.core.call_hook import CallHook


class Observed:
    """Notes calls, and the exceptions of what observes them."""

    def __init__(self, name="", told=None):
        self.name, self.told, self.failures, self.hooks = name, [] if told is None else told, [], []

    def follow(self, holder, name, method=None, **options):
        self.hooks.append(CallHook(holder, name, method or self.note, self.failures.append, **options))
        return self.hooks[-1]

    def note(self, *args, **kwargs):
        self.told.append(f"{self.name}begin")
        try:
            result = yield
            self.told.append(f"{self.name}{result}")
        finally:
            self.told.append(f"{self.name}end")


@pytest.fixture
def observed():
    observed = Observed()
    yield observed
    for hook in observed.hooks:
        hook.remove()


@pytest.fixture
def place():
    """A module and classes whose attributes are replaced, which must be the same objects at the end."""

    class Base:
        def plain(self, x=0, *, fails=None):
            """Adds one."""
            if fails:
                raise fails
            return x + 1

        @classmethod
        def of_class(cls, x):
            return cls, x

        @staticmethod
        def static(x):
            return x

        def generate(self, n):
            for i in range(n):
                got = yield i
            yield got

    class Middle(Base):
        pass

    class Beside(Base):
        def plain(self, x=0, *, fails=None):
            return "beside"

        @classmethod
        def of_class(cls, x):
            return "beside"

    class Both(Middle, Beside):
        pass

    place = SimpleNamespace(Base=Base, Middle=Middle, Beside=Beside, Both=Both)
    before = {kind: dict(vars(kind)) for kind in (Base, Middle, Beside, Both)}
    yield place
    for kind, attributes in before.items():
        assert list(vars(kind)) == list(attributes)
        assert all(vars(kind)[name] is x for name, x in attributes.items())


# ---- order, and what remains


def test_owners_are_called_in_order_around_the_call_and_removed_in_any_order(place, observed):
    own, second = vars(place.Base)["plain"], Observed("2 ", observed.told)
    hooks = [observed.follow(place.Base, "plain"), second.follow(place.Base, "plain")]
    wrapper = place.Base.plain
    assert place.Base().plain(1) == 2
    assert observed.told == ["begin", "2 begin", "2 2", "2 end", "2", "end"]
    hooks[0].remove()
    hooks[0].remove()
    assert place.Base.plain is wrapper
    observed.told.clear()
    place.Base().plain()
    assert observed.told == ["2 begin", "2 1", "2 end"]
    hooks[1].remove()
    assert vars(place.Base)["plain"] is own
    assert wrapper(place.Base(), 5) == 6  # as somebody may have kept it
    assert len(observed.told) == 3


@pytest.mark.parametrize("name", ["plain", "of_class", "static"])
@pytest.mark.parametrize("kind", ["Base", "Middle"])
def test_each_kind_of_method_is_called_as_before_also_where_it_is_inherited(place, observed, kind, name):
    kind = getattr(place, kind)
    before = [inspect.signature(getattr(kind, name)), getattr(kind, name).__doc__, getattr(kind(), name)(3)]
    is_of_class = inspect.ismethod(getattr(kind, name))
    hook = observed.follow(kind, name)
    bound, found = getattr(kind(), name), getattr(kind, name)
    assert [inspect.signature(found), found.__doc__, bound(3)] == before
    assert (found.__name__, found.__self__ if is_of_class else None) == (name, kind if is_of_class else None)
    assert len(observed.told) == 3
    hook.remove()


@pytest.mark.parametrize("name", ["plain", "of_class"])
def test_a_subclass_finds_the_method_of_its_next_class_through_one_that_only_inherits(place, observed, name):
    hook = observed.follow(place.Middle, name)
    assert getattr(place.Both(), name)(1) == "beside"
    assert observed.told[0] == "begin"
    hook.remove()


def test_a_subclass_with_its_own_method_is_observed_only_in_what_it_calls(place, observed):
    hook = observed.follow(place.Base, "plain")
    assert place.Beside().plain() == "beside"
    assert observed.told == []
    hook.remove()


def test_functions_of_modules_and_of_c_are_observed(observed):
    place = torch.nn.utils
    own, x = place.clip_grad_norm_, torch.ones(2, requires_grad=True)
    x.sum().backward()
    hooks = [observed.follow(place, "clip_grad_norm_"), observed.follow(torch.Tensor, "erfinv_")]
    assert place.clip_grad_norm_([x], 1.0) == pytest.approx(2**0.5)
    assert pickle.loads(pickle.dumps(place.clip_grad_norm_)) is place.clip_grad_norm_ is not own
    assert torch.zeros(1).erfinv_() == 0  # which no other code calls, as that does which prints a tensor
    assert observed.told.count("begin") == 2
    for hook in hooks:
        hook.remove()
    assert place.clip_grad_norm_ is own
    assert "erfinv_" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [(nn, "Linear", TypeError), (torch.Tensor, "grad", TypeError), (nn, "x", None)],
)
def test_what_is_no_function_is_refused_and_left(observed, place, name, error):
    before = vars(place).get(name)
    with pytest.raises(error or AttributeError, match=name):
        observed.follow(place, name)
    assert vars(place).get(name) is before


# ---- other code that replaces the same function


def theirs(function, told):
    def patched(*args, **kwargs):
        told.append("theirs")
        return function(*args, **kwargs)

    vars(patched).update(vars(function))  # as functools.wraps does
    return patched


def test_what_others_have_put_above_stays_and_calls_a_wrapper_that_passes_on(place, observed):
    own, hook = place.Base.plain, observed.follow(place.Base, "plain")
    below = place.Base.plain
    place.Base.plain = patched = theirs(below, observed.told)
    hook.remove()
    assert place.Base.plain is patched
    assert place.Base().plain(1) == 2
    assert observed.told == ["theirs"]
    again = observed.follow(place.Base, "plain")
    place.Base().plain(1)
    assert observed.told.count("begin") == 1
    again.remove()
    assert place.Base.plain is patched
    place.Base.plain = below  # as they undo it
    again.remove()
    assert place.Base.plain is own


def test_a_hook_that_was_made_above_theirs_is_gone_with_both(place, observed):
    own, hook = place.Base.plain, observed.follow(place.Base, "plain")
    below = place.Base.plain
    place.Base.plain = theirs(below, observed.told)
    above = observed.follow(place.Base, "plain")
    place.Base().plain()
    assert observed.told == ["begin", "theirs", "begin", "1", "end", "1", "end"]
    hook.remove()
    place.Base.plain = below
    above.remove()
    assert place.Base.plain is own


def test_what_others_had_put_below_is_there_again_and_may_be_undone_meanwhile(place, observed):
    own = place.Base.plain
    place.Base.plain = patched = theirs(own, observed.told)
    hook = observed.follow(place.Base, "plain")
    place.Base().plain()
    assert observed.told == ["begin", "theirs", "1", "end"]
    hook.remove()
    assert place.Base.plain is patched
    hook = observed.follow(place.Base, "plain")
    place.Base.plain = own
    hook.remove()
    assert place.Base.plain is own


# ---- exceptions


def test_an_exception_of_the_call_is_the_users_own_and_only_finally_runs(place, observed):
    hook, error = observed.follow(place.Base, "plain", nested=False), KeyError("of the user")
    for end in (error, KeyboardInterrupt()):
        observed.told.clear()
        with pytest.raises(type(end)) as caught:
            place.Base().plain(fails=end)
        assert caught.value is end
        assert (end.__cause__, end.__context__) == (None, None)
        assert observed.told == ["begin", "end"]
    place.Base().plain()  # it is not taken for a nested call
    assert observed.failures == []
    assert observed.told[-2:] == ["1", "end"]
    hook.remove()


def breaks_at_once(self):
    raise ZeroDivisionError
    yield


def breaks_later(self):
    yield
    raise ZeroDivisionError


def breaks_at_the_end(self):
    try:
        yield
    finally:
        raise ZeroDivisionError


def goes_on(self):
    yield
    yield


def takes_other_arguments():
    yield


def is_no_generator(self):
    return 5


def returns_at_once(self):
    return
    yield


def ends_iteration(self):
    yield
    raise StopIteration  # which Python makes a RuntimeError


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (breaks_at_once, ZeroDivisionError),
        (breaks_later, ZeroDivisionError),
        (breaks_at_the_end, ZeroDivisionError),
        (takes_other_arguments, TypeError),
        (is_no_generator, TypeError),
        (ends_iteration, RuntimeError),
        (goes_on, None),
        (returns_at_once, None),
    ],
)
def test_a_failing_observer_changes_neither_the_call_nor_the_others(place, observed, method, kind):
    hooks = [observed.follow(place.Base, "plain", method), observed.follow(place.Base, "plain")]
    assert place.Base().plain() == 1
    assert observed.told == ["begin", "1", "end"]
    assert [type(error) for error in observed.failures] == ([kind] if kind else [])
    for hook in hooks:
        hook.remove()


def test_an_observer_that_fails_as_the_call_does_leaves_the_users_exception(place, observed):
    hook, error = observed.follow(place.Base, "plain", breaks_at_the_end_of_any), KeyError("of the user")
    with pytest.raises(KeyError) as caught:
        place.Base().plain(fails=error)
    assert caught.value is error
    assert [type(x) for x in observed.failures] == [ZeroDivisionError]
    hook.remove()


def breaks_at_the_end_of_any(self, **kwargs):
    try:
        yield
    finally:
        raise ZeroDivisionError


def test_what_ends_the_program_is_not_held_back_and_leaves_nothing_behind(place, observed):
    def ends(self):
        yield
        raise KeyboardInterrupt

    hooks = [
        observed.follow(place.Base, "plain", nested=False),
        observed.follow(place.Base, "plain", ends, nested=False),
    ]
    with pytest.raises(KeyboardInterrupt):
        place.Base().plain()
    assert observed.told == ["begin", "end"]
    assert [hook.inside for hook in hooks] == [set(), set()]
    for hook in hooks:
        hook.remove()


# ---- calls inside calls, threads, processes


def test_calls_inside_a_call_are_left_out_if_asked_also_those_of_the_observer(observed):
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU()))

    def calls(m, x):
        net(x)
        yield
        net(x)
        seen.append(m)

    seen, all_of_them = [], Observed()
    hooks = [
        observed.follow(nn.Module, "__call__", calls, nested=False),
        all_of_them.follow(nn.Module, "__call__"),
    ]
    net(torch.ones(1, 2))
    assert len(seen) == 1
    assert seen[0] is net
    assert all_of_them.told.count("begin") == 3 * 4
    for hook in hooks:
        hook.remove()


def test_a_backward_inside_a_backward_is_left_out_if_asked(observed):
    x, own = torch.ones(2, requires_grad=True), torch.Tensor.backward
    y = x.sum()

    def again(grad):
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).exp().backward()

    y.register_hook(again)
    hook = observed.follow(torch.Tensor, "backward", nested=False)
    y.backward()
    assert observed.told == ["begin", "None", "end"]
    hook.remove()
    assert torch.Tensor.backward is own


def test_one_of_two_owners_may_leave_inside_a_call_and_another_may_come(place, observed):
    def changes(self):
        hooks[0].remove()
        hooks.append(observed.follow(place.Base, "plain"))
        yield

    hooks = [observed.follow(place.Base, "plain"), observed.follow(place.Base, "plain", changes)]
    place.Base().plain()
    assert observed.told == ["begin", "end"]  # neither its result, nor the call that was under way
    hooks[1].remove()
    place.Base().plain()
    assert observed.told == ["begin", "end", "begin", "1", "end"]
    hooks[2].remove()


def test_calls_of_other_threads_are_passed_on_unless_asked_for(place, observed):
    everywhere = Observed()
    hooks = [
        observed.follow(place.Base, "plain"),
        everywhere.follow(place.Base, "plain", all_threads=True, nested=False),
    ]
    both = threading.Barrier(2)  # each thread is in a call, which is not nested in that of the other

    class Slow(place.Base):
        def plain(self):
            return place.Base.plain(self, Wait())

    class Wait(int):
        def __add__(self, other):
            both.wait(10)
            return 1

    threads = [threading.Thread(target=Slow().plain) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observed.told == []
    assert everywhere.told.count("1") == 2
    for hook in hooks:
        hook.remove()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_torchs_own_method_unless_asked_for(place, observed):
    own = place.Base.plain
    observed.follow(place.Base, "plain")
    observed.follow(place.Middle, "plain", in_forks=True)
    if not (child := os.fork()):
        is_right = place.Base.plain is own and place.Middle().plain() == 1 and len(observed.told) == 3
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert place.Base.plain is not own
    for hook in observed.hooks:
        hook.remove()


def test_an_owner_that_is_gone_is_not_kept_alive_and_leaves_torchs_own(place):
    own, owner, told = place.Base.plain, Observed(), []
    owner.told = told
    CallHook(place.Base, "plain", owner.note, owner.failures.append)
    place.Base().plain()
    assert len(told) == 3
    del owner
    gc.collect()
    assert place.Base.plain is own
    place.Base().plain()
    assert len(told) == 3


# ---- what passes through it


def test_a_generator_function_gives_its_own_generator(place, observed):
    hook = observed.follow(place.Base, "generate")
    made = place.Base().generate(2)
    assert observed.told[0] == "begin"  # the call has ended, as it only makes the generator
    assert observed.told[-1] == "end"
    assert [next(made), next(made), made.send("sent")] == [0, 1, "sent"]
    assert inspect.isgenerator(made)
    hook.remove()


def test_models_and_optimizers_are_copied_and_pickled_while_observed(observed):
    hooks = [
        observed.follow(nn.Module, "__call__"),
        observed.follow(torch.optim.Optimizer, "add_param_group"),
        observed.follow(torch.amp.GradScaler, "scale"),
    ]
    net = nn.Linear(1, 1)
    opt, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    assert observed.told.count("begin") == 1
    both = copy.deepcopy((net, opt, scaler)), pickle.loads(pickle.dumps((net, opt, scaler)))
    for hook in hooks:
        hook.remove()
    for copied, its_opt, _ in both:
        copied(torch.ones(1)).sum().backward()
        its_opt.step()
        assert not torch.equal(copied.weight, net.weight)
    assert observed.told.count("begin") == 1


# ---- torch.compile


def counts_of(train):
    """Results of three compiled steps, the operations in each graph, and the number of graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    step = torch.compile(train(), backend=backend)
    results = [step().item() for _ in range(3)]
    return results, graphs, sum(counters["graph_break"].values())


def training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step():
        loss = net(torch.ones(3, 2)).square().mean()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad)
        return loss

    return step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile itself
def test_a_compiled_step_has_the_graphs_and_breaks_it_would_have_and_is_observed(observed, fresh_dynamo):
    def untraceable(*args, **kwargs):
        sys._getframe().f_back  # noqa: B018
        observed.told.append(sum(x.shape[0] for x in args if isinstance(x, torch.Tensor) and x.dim()))
        yield
        observed.told.append(torch.compiler.is_compiling())

    before = counts_of(training)
    places = [(nn.Module, "__call__"), (torch.Tensor, "backward"), (torch.amp.GradScaler, "scale")]
    for place in [*places, (nn.utils, "clip_grad_norm_")]:
        observed.follow(*place, untraceable)
    assert counts_of(training) == before
    assert observed.failures == []
    # the backward, which torch.compile calls outside of its graphs; other calls are inside of them
    assert observed.told.count(False) >= 3
    assert True not in observed.told


def losses_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(x, y)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_jit_compiles_code_that_calls_an_observed_function(observed):
    observed.follow(nn.functional, "mse_loss")
    scripted = torch.jit.script(losses_of)
    assert scripted(torch.zeros(2), torch.ones(2)) == 1
    assert observed.failures == []
