"""Callbacks: names, state, what is refused, and odd ones that must work."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import (
    ActivationStats,
    Callback,
    CSVLogger,
    HookCallback,
    Learner,
    Metrics,
    Progress,
    Recorder,
    count_hooks,
)
from tests.support import (
    NoSuper,
    events,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    weights,
)


def named(class_name, base=Callback, **attrs):
    return type(class_name, (base,), attrs)


@in_turn(
    "name", ["model", "fit", "opt", "dls", "xb", "pred", "cbs", "emit", "pct_train", "lr", "loss_func", "row"]
)
def test_a_name_that_would_overwrite_something_of_the_loop_is_refused(name):
    learn = make_learner()
    before = dict(vars(learn))
    with pytest.raises(ValueError, match=name):
        learn.add_cb(Callback(name=name))
    with pytest.raises(ValueError, match=name):
        fit(learn, cbs=Callback(name=name))
    assert vars(learn).keys() == before.keys()
    assert learn.model is before["model"]
    assert learn.cbs == before["cbs"]


def test_a_class_called_model_callback_does_not_overwrite_the_model():
    learn = make_learner()
    with pytest.raises(ValueError, match="model"):
        learn.add_cb(named("ModelCallback"))
    assert isinstance(learn.model, nn.Module)


def test_names_are_snake_case_without_callback():
    names = {
        "ActivationLook": "activation_look",
        "ProfilerCallback": "profiler",
        "MyHTTPLogger": "my_http_logger",
    }
    for class_name, name in names.items():
        assert named(class_name)().name == name
    learn = make_learner(cbs=named("ProfilerCallback"))
    assert learn.profiler.name == "profiler"


def test_two_of_a_kind_need_a_name():
    learn = make_learner()
    with pytest.raises(ValueError, match="activation_stats"):
        learn.add_cbs([ActivationStats(), ActivationStats()])
    assert len(learn.cbs) == 3
    learn.add_cbs([ActivationStats(), ActivationStats(name="second")])
    fit(learn)
    assert len(learn.activation_stats.stats) == len(learn.second.stats) == 3
    with pytest.raises(ValueError, match="second"):
        fit(learn, cbs=Callback(name="second"))


def test_the_same_instance_twice_is_refused():
    log = []
    cb = spy(log, "a")
    learn = make_learner()
    with pytest.raises(ValueError, match="a"):
        fit(learn, cbs=[cb, cb])
    assert log == []
    assert cb not in learn.cbs
    learn.add_cb(cb)
    for again in (lambda: learn.add_cb(cb), lambda: fit(learn, cbs=cb)):
        with pytest.raises(ValueError, match="a"):
            again()
    assert learn.cbs.count(cb) == 1
    fit(learn)
    assert events(log).count("before_fit") == 1


def test_an_instance_that_belongs_to_another_loop_is_refused_until_it_is_removed():
    cb = spy([], "a")
    one, two = make_learner(cbs=cb), make_learner()
    with pytest.raises(ValueError, match="a"):
        two.add_cb(cb)
    assert cb.learn is one
    one.remove_cb(cb)
    two.add_cb(cb)
    assert cb.learn is two


def test_attaching_several_is_all_or_nothing():
    learn = make_learner()
    before = list(learn.cbs)
    good = Callback(name="good")
    for bad in (Callback(name="model"), int, 3, good, named("Needs", __init__=lambda self, a: None)):
        with pytest.raises((TypeError, ValueError)):
            learn.add_cbs([good, bad])
        assert learn.cbs == before
        assert not hasattr(learn, "good")
    make_learner(cbs=good)  # it belongs to nobody


@in_turn("bad", [3, "progress", int, nn.ReLU, print, [3], [[Callback()]], {"a": 1}, object()])
def test_what_is_no_callback_is_refused(bad):
    with pytest.raises(TypeError):
        make_learner(cbs=bad)
    with pytest.raises(TypeError):
        fit(make_learner(), cbs=bad)


def test_a_class_that_needs_arguments_is_refused_by_name():
    class NeedsPatience(Callback):
        def __init__(self, patience):
            self.patience = patience

    with pytest.raises(TypeError, match="NeedsPatience"):
        make_learner(cbs=NeedsPatience)
    make_learner(cbs=NeedsPatience(3))


def test_a_type_error_inside_a_constructor_is_not_taken_for_missing_arguments():
    class Broken(Callback):
        def __init__(self):
            len(3)

    with pytest.raises(TypeError, match="len"):
        make_learner(cbs=Broken)


@in_turn("wrong", ["after_bacth", "before_bach", "after_batches", "before_training", "after_"])
def test_a_misspelt_event_is_refused_wherever_it_is_written(wrong):
    with pytest.raises(TypeError, match=f"unknown event '{wrong}'"):
        named("Wrong", **{wrong: lambda self: None})
    with pytest.raises(TypeError, match=wrong):
        Callback(**{wrong: print})
    mixin = type("Mixin", (), {wrong: lambda self: None})
    with pytest.raises(TypeError, match=wrong):
        type("Mixed", (mixin, Callback), {})
    with pytest.raises(TypeError, match=wrong):
        named("Wrong", HookCallback, **{wrong: lambda self: None})


def test_a_misspelt_event_gets_the_right_one_suggested():
    with pytest.raises(TypeError, match=r"unknown event 'after_bacth'; did you mean 'after_batch'\?"):
        named("Wrong", after_bacth=lambda self: None)
    with pytest.raises(TypeError, match="did you mean 'after_validate'"):
        Callback(after_validat=print)


def test_functions_that_are_no_functions_and_unknown_arguments_are_refused():
    with pytest.raises(TypeError):
        Callback(after_batch=3)
    with pytest.raises(TypeError):
        Callback(on_batch_end=print)
    with pytest.raises(TypeError):
        Callback(print)


def test_a_model_method_named_like_an_event_is_not_called():
    class Model(nn.Linear):
        def after_batch(self):
            raise AssertionError("not yours")

    learn = fit(make_learner(model=Model(2, 1)))
    assert len(learn.recorder.losses) == 3


STATE = ["model", "opt", "xb", "yb", "x", "y", "pred", "loss", "dl", "epoch", "n_epoch", "iter", "n_iter"]
STATE += ["train_iter", "pct_train", "training"]


@in_turn("name", STATE)
def test_the_state_is_read_only_on_a_callback(name):
    seen = []

    def write(cb):
        seen.append(getattr(cb, name) is not None)
        with pytest.raises(AttributeError, match=rf"learn\.{name}"):
            setattr(cb, name, 1)

    fit(make_learner(1, 1, cbs=Callback(name="w", after_step=write)))
    assert seen == [True]


def test_the_state_is_right_at_every_batch():
    seen = []

    class Look(Callback):
        def after_loss(self):
            share = self.pct_train
            seen.append(
                (self.training, self.epoch, self.iter, self.train_iter, self.n_iter, self.n_epoch, share)
            )

    fit(make_learner(2, 1, cbs=Look), 2)
    assert [s[:6] for s in seen] == [
        (True, 0, 0, 0, 2, 2),
        (True, 0, 1, 1, 2, 2),
        (False, 0, 0, 2, 1, 2),
        (True, 1, 0, 2, 2, 2),
        (True, 1, 1, 3, 2, 2),
        (False, 1, 0, 4, 1, 2),
    ]
    assert [s[6] for s in seen if s[0]] == [0, 0.25, 0.5, 0.75]
    assert [s[6] for s in seen if not s[0]] == [0.5, 1]


def test_state_set_through_learn_is_what_goes_on():
    class Double(Callback):
        def before_batch(self):
            self.learn.xb = (self.x * 2,)
            self.learn.yb = (self.y + 1,)

        def after_pred(self):
            self.learn.pred = self.pred * 3

        def after_loss(self):
            self.learn.loss = self.loss * 5

    batches = make_batches()
    learn = fit(Learner((batches, None), make_model(), F.mse_loss, torch.optim.SGD, lr=0.01, cbs=Double))
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches:
        (F.mse_loss(model(x * 2) * 3, y + 1) * 5).backward()
        opt.step()
        opt.zero_grad()
    assert same(weights(learn.model), weights(model))


def test_removing_what_is_not_attached_is_refused():
    learn = make_learner()
    with pytest.raises(ValueError, match=r"ActivationStats|activation_stats"):
        learn.remove_cb(ActivationStats())
    with pytest.raises(ValueError, match="ActivationStats"):
        learn.remove_cb(ActivationStats)


def test_removing_by_class_removes_all_of_it():
    learn = make_learner(cbs=[ActivationStats(name="one"), ActivationStats(name="two")])
    learn.remove_cb(ActivationStats)
    assert [type(cb) for cb in learn.cbs] == [Recorder, Metrics, Progress]


def test_added_and_removed_callbacks_come_back_after_an_error():
    learn = make_learner()
    log = []
    cb = spy(log, "a")
    before = set(map(id, learn.cbs))
    with pytest.raises(ZeroDivisionError), learn.added_cbs(cb):  # noqa: PT012
        assert cb in learn.cbs
        1 / 0  # noqa: B018
    assert set(map(id, learn.cbs)) == before
    with pytest.raises(ZeroDivisionError), learn.removed_cbs([Recorder, Metrics, Progress]):  # noqa: PT012
        assert list(learn.cbs) == []
        learn.fit(1)
        1 / 0  # noqa: B018
    assert set(map(id, learn.cbs)) == before
    fit(learn)
    assert len(learn.recorder.losses) == 3


def test_a_default_callback_given_takes_the_place_of_the_default():
    class MyRecorder(Recorder):
        pass

    mine = Recorder()
    learn = make_learner(cbs=[mine, Progress(bar=False)])
    assert learn.recorder is mine
    assert sorted(type(cb).__name__ for cb in learn.cbs) == ["Metrics", "Progress", "Recorder"]
    learn = make_learner(cbs=MyRecorder())
    assert sum(isinstance(cb, Recorder) for cb in learn.cbs) == 1


@dataclasses.dataclass
class Dated(Callback):
    """A dataclass: equal where its fields are, not hashable, and its __init__ is its own."""

    n: int = 0

    def after_step(self):
        self.n += 1


class SameAsAll(Callback):
    """Equal to everything."""

    def __init__(self, label):
        super().__init__(name=label)
        self.seen = 0

    def __eq__(self, other):
        return True

    __hash__ = None

    def after_step(self):
        self.seen += 1


class Iterable(Callback):
    """Iterable, with a length, and empty: false in a condition."""

    n = 0

    def __iter__(self):
        return iter([])

    def __len__(self):
        return 0

    def after_step(self):
        self.n += 1


class Slotted(NoSuper):
    """With a property called like nothing else."""

    __slots__ = ("extra",)


@in_turn("cls", [Dated, Iterable, NoSuper, Slotted])
def test_odd_callbacks_work_alone_in_a_list_and_as_a_class(cls):
    for cbs in (cls(), [cls()], (cls(),), cls, [cls]):
        learn = fit(make_learner(), cbs=cbs)
        (cb,) = [v for v in vars(learn).values() if isinstance(v, cls)]
        assert cb.n == 3
        assert cb not in list(learn.cbs)
        assert pickle.loads(pickle.dumps(cb)).n == copy.deepcopy(cb).n == 3
        assert cls.__name__ in repr(cb)
    cb = cls()
    learn = make_learner(cbs=cb)
    fit(fit(learn))
    assert cb.n == 6
    learn.remove_cb(cb)
    assert len(learn.cbs) == 3


def test_equal_callbacks_are_told_apart():
    one, two = SameAsAll("one"), SameAsAll("two")
    learn = make_learner(cbs=[one, two])
    assert len(learn.cbs) == 5
    fit(learn)
    learn.remove_cb(two)
    assert [cb for cb in learn.cbs if cb is two] == []
    assert any(cb is one for cb in learn.cbs)
    fit(learn)
    assert (one.seen, two.seen) == (6, 3)
    with pytest.raises(ValueError, match="two"):
        learn.remove_cb(two)


def test_callbacks_pickle_and_copy_while_attached_in_mid_fit_and_after():
    copies = []

    class Copier(Callback):
        def after_batch(self):
            for cb in self.learn.cbs:
                if cb is not self:
                    copies.append(pickle.loads(pickle.dumps(cb)))
                    copies.append(copy.deepcopy(cb))
                    copies.append(copy.copy(cb))

    stats, plain = ActivationStats(), NoSuper()
    learn = make_learner(cbs=[stats, plain])
    fit(learn, cbs=Copier())
    assert len(copies) == 3 * 4 * (3 + 2)  # Progress is off
    for cb in copies:
        assert getattr(cb, "learn", None) is not learn
        assert getattr(cb, "learn", None) is None
    assert len(stats.stats) == 3
    assert plain.n == 3
    last = [cb for cb in copies if isinstance(cb, ActivationStats)][-1]
    with learn.removed_cbs(stats):
        fit(learn, cbs=last)
    assert len(last.stats) == 3
    assert last.names == stats.names
    again = pickle.loads(pickle.dumps(stats))
    assert again.table() == stats.table()
    assert again.names == stats.names


def test_a_copy_does_not_share_results_with_its_original():
    stats = ActivationStats()
    learn = fit(make_learner(cbs=stats))
    copied = copy.deepcopy(stats)
    before = copied.table()
    fit(learn, 3)
    assert copied.table() == before
    assert len(stats.stats) == 9


def test_a_model_copied_in_mid_fit_carries_inert_hooks():
    got = {}

    class Ema(Callback):
        def after_step(self):
            got["deep"] = copy.deepcopy(self.model)
            buffer = io.BytesIO()
            torch.save(self.model, buffer)
            got["saved"] = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            got["n"] = count_hooks(self.model)
            for key in ("deep", "saved"):
                got[key](torch.full((64, 2), 1e6))

    stats, means = ActivationStats(), HookCallback(hook=lambda m, i, o: o.abs().max().item(), name="means")
    learn = fit(make_learner(cbs=[stats, means, Ema()]))
    plain = fit(make_learner(cbs=ActivationStats()))
    assert got["n"] > 0
    assert stats.table() == plain.activation_stats.table()
    n, stored = len(stats.stats), list(means.hooks.stored)
    for key in ("deep", "saved"):
        got[key](torch.full((64, 2), 1e6))
        assert same(weights(got[key]), weights(learn.model))
    assert len(stats.stats) == n
    assert list(means.hooks.stored) == stored


@in_turn(
    ("foreign", "event"),
    [
        ("on_train_batch_end", "after_batch"),  # Lightning, Keras
        ("on_before_optimizer_step", "before_step"),
        ("on_validation_epoch_end", "after_validate"),
        ("on_train_epoch_start", "before_train"),
        ("on_epoch_begin", "before_epoch"),  # Keras, Hugging Face, fastai v1
        ("on_optimizer_step", "after_step"),  # Hugging Face
        ("on_evaluate", "after_validate"),
        ("on_backward_begin", "before_backward"),  # fastai v1
        ("before_forward", "before_batch"),  # Composer, PyTorch's hooks
        ("after_forward", "after_pred"),
        ("begin_fit", "before_fit"),  # fastai v2, in its first months
        ("beforeBatch", "before_batch"),
        ("after_batch_", "after_batch"),
        ("afterbatch", "after_batch"),
    ],
)
def test_methods_that_other_frameworks_would_call_are_refused_with_the_event_meant(foreign, event):
    for base in (Callback, HookCallback, ActivationStats):
        with pytest.raises(TypeError, match=rf"unknown event '{foreign}'; did you mean '{event}'\?"):
            named("Ported", base, **{foreign: lambda self: None})
    with pytest.raises(TypeError, match=f"did you mean '{event}'"):
        Callback(**{foreign: print})


@in_turn("foreign", ["on_save_checkpoint", "on_predict_start", "on_log", "on_before_zero_grad"])
def test_methods_of_other_frameworks_that_have_no_event_here_are_refused_with_all_events(foreign):
    with pytest.raises(TypeError, match=rf"unknown event '{foreign}'; events are before_fit, .*after_fit"):
        named("Ported", **{foreign: lambda self: None})


def test_methods_of_ones_own_may_be_called_anything_else():
    def helper(self):
        return 3

    names = "on_alarm", "report", "_after_batch", "beforehand", "afterwards", "step", "begin", "epoch_ends"
    cb = named("Free", **dict.fromkeys(names, helper))()
    assert [getattr(cb, name)() for name in names] == [3] * len(names)


def test_an_unknown_argument_is_named_as_one_with_those_that_there_are():
    with pytest.raises(
        TypeError, match=r"ActivationStats has no argument 'module'; did you mean 'modules'\?"
    ):
        ActivationStats(module="conv*")
    with pytest.raises(TypeError, match=r"Callback has no argument 'colour'; it takes: name, and functions"):
        Callback(colour=1)
    with pytest.raises(TypeError, match=r"it takes: with_hist, .*bins.*, name, modules, every"):
        ActivationStats(colour=1)


def test_layers_given_as_histograms_are_refused():
    with pytest.raises(TypeError, match=r"with_hist must be True or False, got 'conv\*'; .*modules="):
        ActivationStats("conv*")


def test_what_is_given_in_place_of_a_callback_is_told_how_to_repair_it():
    class Sink:
        def log(self, numbers, step=None):
            raise AssertionError("it is never asked")

    with pytest.raises(TypeError, match=r"'ActivationStats' is not a Callback; .*ActivationStats\(\)"):
        make_learner(cbs="ActivationStats")
    for logger, shown in ((Sink(), "Sink"), (CSVLogger, "CSVLogger")):
        with pytest.raises(TypeError, match=rf"it is a logger: wrap it, Log\({shown}\(…\)\)"):
            fit(make_learner(), cbs=[logger])
    with pytest.raises(TypeError, match="loss_func is the class CrossEntropyLoss; give an instance, Cross"):
        make_learner(loss_func=nn.CrossEntropyLoss)


@pytest.mark.parametrize("asked", ["state_key", "on_init_end", "on_fit_start"])
def test_a_trainer_that_takes_it_for_its_own_callback_is_told_of_the_adapter(asked):
    cb = ActivationStats()
    assert not hasattr(cb, asked)
    with pytest.raises(AttributeError, match=r"adapters\.lightning\.HookcbCallback\(ActivationStats"):
        getattr(cb, asked)
    with pytest.raises(AttributeError, match=r"adapters\.transformers\.HookcbCallback\(ActivationStats"):
        getattr(cb, asked)


def test_attributes_that_are_missing_are_missed_as_without_us():
    with pytest.raises(AttributeError, match="'Callback' object has no attribute 'colour'"):
        Callback().colour  # noqa: B018
    with pytest.raises(AttributeError, match="not attached to a learner"):
        Callback().loss  # noqa: B018
    assert copy.deepcopy(Callback(name="a")).name == "a"
