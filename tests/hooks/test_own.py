"""A model that is saved or copied while hooks of ours are on is to the byte what it is without them."""

import copy
import io
import pickle
import pickletools
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    Diagnose,
    GradientHealth,
    HookCallback,
    Hooks,
    MemoryStats,
    NanTrace,
    StepTimer,
    watch,
)
from hookcb.testing import count_hooks
from tests.support import each, fit, in_turn, make_batches, make_learner, make_model

SAVE = {
    "torch.save": torch.save,
    "torch.save, legacy": partial(torch.save, _use_new_zipfile_serialization=False),
    "pickle": pickle.dump,
    "pickle in Python": lambda x, file: pickle._Pickler(file).dump(x),
    "protocol 2": partial(pickle.dump, protocol=2),
}
OPTIONS = [
    {},
    {"prepend": True, "always_call": True},
    {"pre": True, "with_kwargs": True},
    {"with_kwargs": True, "always_call": True},
    {"is_forward": False},
    {"is_forward": False, "pre": True},
]
CALLBACKS = (
    partial(ActivationStats, include_paramless=True),
    partial(GradientHealth, activations=True),
    partial(HookCallback, hook=print, is_forward=False),
    Diagnose,
    MemoryStats,
    NanTrace,
    StepTimer,
    partial(EMA, validate=False),
)
GLOBALS = [nn.Sequential, nn.Linear, nn.ReLU, set]


def saved(item, how="torch.save"):
    file = io.BytesIO()
    SAVE[how](item, file)
    return file.getvalue()


def seen(*args):
    """A hook of the user's, which pickle finds by its name."""


def hooks_of_ours(model):
    for options in OPTIONS:
        yield Hooks(list(model.modules()), lambda *what: None, **options)
    for options in ({}, {"pre": True}):
        yield Hooks(list(model.parameters()), lambda *what: None, **options)


@in_turn("how", SAVE)
def test_a_file_of_a_hooked_model_has_the_same_bytes(how):
    model = make_model()
    items = [model, [model, model], {"net": model, "step": 3}]
    if how == "torch.save, legacy":  # which reads the sources of all modules again and again
        del items[1:]
    plain = [saved(item, how) for item in items]
    for hooks in hooks_of_ours(model):
        with hooks:
            assert count_hooks(model) > 0
            assert [saved(item, how) for item in items] == plain


def test_all_hooks_at_once_leave_no_byte_either():
    model = make_model()
    plain = saved(model)
    hooks = list(hooks_of_ours(model))
    assert saved(model) == plain
    for h in hooks:
        h.remove()
    assert saved(model) == plain


def test_a_file_of_a_watched_model_is_read_with_weights_only():
    model = make_model()
    plain = saved(model)
    with (
        watch(model, None, ActivationStats(), GradientHealth(), Diagnose()) as w,
        torch.serialization.safe_globals(GLOBALS),
    ):
        assert count_hooks(model) > 0
        file = saved(model)
        read = torch.load(io.BytesIO(file), weights_only=True)
        assert file == plain
        model(torch.ones(2, 2)).sum().backward()
    assert all(map(torch.equal, read.state_dict().values(), model.state_dict().values()))
    assert count_hooks(read) == 0
    assert len(w.activation_stats.stats) == 1


def test_a_users_own_hooks_stay_in_the_file_in_their_order():
    model = make_model()
    Hooks(model, seen).remove()
    before = [
        model[0].register_forward_hook(seen, with_kwargs=True),
        model[0].register_forward_pre_hook(seen),
    ]
    hooks = list(hooks_of_ours(model))
    after = [
        model[0].register_forward_hook(seen, prepend=True, always_call=True),
        model[0].register_forward_pre_hook(seen, with_kwargs=True),
        model[0].register_full_backward_hook(seen),
    ]
    during = saved(model), saved(copy.deepcopy(model))
    copied = copy.deepcopy(model)
    for h in hooks:
        h.remove()
    assert during == (saved(model), saved(copied))
    assert list(copied[0]._forward_hooks) == [after[0].id, before[0].id]
    assert list(copied[0]._forward_hooks_with_kwargs) == [before[0].id]
    assert list(copied[0]._forward_hooks_always_called) == [after[0].id]
    assert list(copied[0]._forward_pre_hooks_with_kwargs) == [after[1].id]
    for handle in before + after:
        handle.remove()
    assert count_hooks(model) == 0


def test_copies_have_no_hook_and_the_original_keeps_its_own():
    model, calls = make_model(), []
    with Hooks(model, lambda *what: calls.append(1)), Hooks(list(model.parameters()), lambda *what: None):
        n = count_hooks(model)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.optim.swa_utils.AveragedModel(model),
        ]
        assert [count_hooks(twin) for twin in copies] == [0, 0, 0]
        for twin in copies:
            twin(torch.ones(2, 2))
        assert calls == []
        assert count_hooks(model) == n
        model(torch.ones(2, 2))
        assert len(calls) == len(model)


def test_a_shallow_copy_shares_its_dicts_as_without_us():
    model = make_model()
    with Hooks(model, lambda *what: None):
        twin = copy.copy(model[0])
        assert twin._forward_hooks is model[0]._forward_hooks
        file = saved(twin)
    assert count_hooks(twin) == 0
    assert saved(twin) == file


class Whole(nn.Sequential):
    """Saves all of its attributes, as modules with a `__getstate__` of their own do."""

    def __getstate__(self):
        return self.__dict__.copy()


def eager(*args, **kwargs):
    """In the place of a compiled call, one that pickle finds by its name."""


@pytest.mark.parametrize("cbs", [(Callback,), (MemoryStats,)])
def test_what_stands_before_a_compiled_call_is_in_no_file(cbs):
    model = Whole(nn.Linear(2, 1))
    model._compiled_call_impl = eager
    with watch(model, None, *cbs) as w:
        w.begin_batch(True, ())
        stand_in = vars(model)["_compiled_call_impl"]
        assert stand_in is not eager
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin._compiled_call_impl.func is eager
        assert b"hookcb" not in saved(model)


def modules_in(file):
    return [arg for op, arg, _ in pickletools.genops(file) if isinstance(arg, str) and "hookcb" in arg]


@pytest.mark.parametrize("make", each(3, CALLBACKS))
def test_a_fit_puts_nothing_of_ours_into_a_file_of_the_model_or_the_optimizer(make):
    files = []

    def save(cb):
        files.append(saved([cb.model, cb.opt, list(cb.model.parameters())]))
        assert modules_in(pickle.dumps([cb.model, cb.opt])) == []

    events = dict.fromkeys(("before_batch", "after_pred", "after_backward", "after_step"), save)
    plain = fit(make_learner(), cbs=Callback(**events, name="saver")).model
    before, files = files, []
    learn = fit(make_learner(), cbs=[make(), Callback(**events, name="saver")])
    assert files == before
    assert set(vars(learn.model)) == set(vars(plain))


def test_a_watch_sets_no_attribute_on_model_or_optimizer():
    model = make_model()
    opt = torch.optim.Adam(model.parameters())
    plain = [set(vars(x)) for x in (*model.modules(), opt)]
    with watch(model, opt, *(make() for make in CALLBACKS if make is not NanTrace)):
        for x, y in make_batches(2):
            F.mse_loss(model(x), y).backward()
            assert [set(vars(x)) for x in (*model.modules(), opt)] == plain
            assert modules_in(pickle.dumps([model, opt])) == []
            copy.deepcopy(opt)
            opt.step()
            opt.zero_grad()


class EverythingSGD(torch.optim.SGD):
    """Saves all of its attributes."""

    def __getstate__(self):
        return self.__dict__.copy()


def test_an_optimizer_that_saves_all_of_itself_has_no_hook_of_ours():
    model = make_model()
    files = []
    opt = EverythingSGD(model.parameters(), lr=0.1)
    opt.register_step_post_hook(seen)
    plain = pickle.dumps(opt)
    save = Callback(before_train=lambda cb: files.append(pickle.dumps(opt)), name="saver")
    fit(make_learner(model=model, opt_func=opt), cbs=[EMA(), save])
    assert files == [plain]


def test_outputs_that_hooks_follow_are_saved_without_a_warning():
    model = make_model()
    with Hooks(list(model.modules()), lambda *what: None, is_forward=False):
        torch.save(model(torch.ones(2, 2)), io.BytesIO())


def test_other_ordered_dicts_are_saved_as_ever():
    class Sub(OrderedDict):
        pass

    with Hooks(make_model(), seen):
        for item in (OrderedDict(), OrderedDict(b=1, a=[2]), OrderedDict({0: True, 1: None})):
            item.note = "its own"
            for twin in (copy.deepcopy(item), copy.copy(item), pickle.loads(pickle.dumps(item))):
                assert type(twin) is OrderedDict
                assert list(twin.items()) == list(item.items())
                assert twin.note == "its own"
        assert copy.copy(Sub(a=1)) == Sub(a=1)
