"""Compile trains as torch.compile does by hand, really compiles, and leaves the model as it was."""

import pickle
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from hookcb import ActivationStats, Callback, Compile, HookCallback
from tests.support import each, fit, make_batches, make_learner, make_model, same, train_by_hand, weights
from tests.training.support import DEVIL, batches_of, quiet, raising

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Own(nn.Module):
    """A forward that is not in one of torch's own files."""

    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x):
        return self.body(x)


class OwnSequential(nn.Sequential):
    """A class of one's own, with torch's forward."""


def own_sequential():
    return OwnSequential(*make_model())


@pytest.mark.parametrize("make", [make_model, Own, own_sequential])
def test_it_compiles_once_for_training_and_once_for_validation_and_trains_as_by_hand(make):
    counter = CompileCounter()
    learn = fit(make_learner(model=make(), cbs=Compile(backend=counter)), 2)
    assert counter.frame_count == 2
    assert counter.op_count == 6  # all three layers, both times
    model = make()
    model.compile(backend="eager")
    train_by_hand(model, make_batches(3), n_epoch=2)
    assert same(weights(learn.model), weights(model))
    fit(learn, 1)  # what is compiled already is taken again
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, at inductor's import
@pytest.mark.parametrize(
    "options", [{"backend": "aot_eager"}, pytest.param({}, marks=[NEEDS_COMPILER, pytest.mark.slow])]
)
def test_other_backends_train_as_the_plain_model(options):
    learn, plain = fit(make_learner(cbs=Compile(**options))), fit(make_learner())
    assert all(map(torch.allclose, weights(learn.model), weights(plain.model)))


def test_the_model_is_compiled_in_the_fit_and_afterwards_as_it_was():
    model = make_model()
    before, names = sorted(vars(model)), list(model.state_dict())
    during = Callback(before_batch=lambda cb: seen.append(cb.model._compiled_call_impl is not None))
    seen = []
    learn = fit(make_learner(model=model, cbs=[Compile(backend="eager"), during]))
    assert seen == [True] * 5
    assert learn.model is model
    assert sorted(vars(model)) == before
    assert list(model.state_dict()) == names


def test_it_is_undone_after_an_error():
    def fail(cb):
        raise KeyboardInterrupt

    learn = make_learner(cbs=[Compile(backend="eager"), Callback(after_loss=fail)])
    with pytest.raises(KeyboardInterrupt):
        fit(learn)
    assert learn.model._compiled_call_impl is None


def test_a_model_that_was_compiled_before_stays_so():
    model = Own()
    model.compile(backend="eager")
    impl = model._compiled_call_impl
    fit(make_learner(model=model, cbs=Compile(backend="aot_eager")))
    assert model._compiled_call_impl is impl
    wrapper = torch.compile(Own(), backend="eager")
    learn = make_learner()
    learn.model = wrapper
    fit(learn, cbs=Compile(backend="aot_eager"))
    assert wrapper._compiled_call_impl is None


@pytest.mark.parametrize("make", [pytest.param(make_model, marks=pytest.mark.slow), Own])
def test_hooks_of_callbacks_are_seen_and_give_what_they_give_without_compiling(make):
    def results(*cbs):
        stats, means = ActivationStats(), HookCallback(hook=lambda m, i, o: o.mean(), name="means")
        fit(make_learner(model=make(), cbs=[*cbs, stats, means]), 2)
        assert len(stats.coverage.fired) == len(stats.coverage.hooked) == 2
        return [torch.stack(list(means.results.values())), *map(torch.tensor, stats.layer_stats(0))]

    assert same(results(Compile(backend="eager")), results())


@pytest.mark.parametrize(("make", "again"), each(2, [(make_model, True), (Own, True), (Own, False)]))
def test_hooks_that_come_or_go_between_fits_are_known_to_the_next(make, again):
    model, calls, kept = make(), [], Compile(backend="eager")
    learn = make_learner(model=model)

    def called():
        calls.clear()
        fit(learn, cbs=kept if again else Compile(backend="eager"))
        return len(calls)

    assert called() == 0
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    handle = layer.register_forward_hook(lambda m, i, o: calls.append(1))
    assert called() == 5  # three training batches and two of the validation
    handle.remove()
    assert called() == 0


def test_wrong_options_are_refused_before_training():
    with pytest.raises(TypeError, match="no option 'backen'; did you mean 'backend'"):
        Compile(backen="eager")
    learn = make_learner(cbs=Compile(backend="no such"))
    with pytest.raises(Exception, match="no such"):
        fit(learn)
    assert learn.train_iter == 0
    assert learn.model._compiled_call_impl is None


def test_it_can_be_pickled_after_a_fit():
    fit(make_learner(cbs=(cb := Compile(backend="eager"))))
    assert pickle.loads(pickle.dumps(cb)).options == {"backend": "eager"}


@pytest.mark.parametrize("raised", [None, *DEVIL])
def test_a_model_is_compiled_in_the_fit_and_not_after_it(raised):
    calls = []

    def backend(graph, inputs):
        calls.append(1)
        return graph.forward

    torch._dynamo.reset()
    learn, log = quiet(batches_of([4, 4]), batches_of([4])), []
    names = list(learn.model.state_dict())
    look = Callback(name="look", after_pred=lambda cb: log.append(cb.model._compiled_call_impl is not None))
    for _ in range(2):
        try:
            devil = [raising("after_epoch", raised())] if raised else []
            learn.fit(1, cbs=[Compile(backend=backend), look, *devil])
        except (ValueError, KeyboardInterrupt):
            pass
        assert learn.model._compiled_call_impl is None
        assert list(learn.model.state_dict()) == names
    assert calls
    assert all(log)
    plain = quiet(batches_of([4, 4]), batches_of([4]))
    plain.fit(2)
    assert all(torch.allclose(a, b) for a, b in zip(weights(learn.model), weights(plain.model), strict=True))
    learn.model.compile(backend="eager")
    compiled = learn.model._compiled_call_impl
    learn.fit(1, cbs=Compile(backend=backend))
    assert learn.model._compiled_call_impl is compiled
