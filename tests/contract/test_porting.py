"""Habits of people who come from fastai, Lightning and Keras work, or end in an error that names ours."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookcb
from hookcb import (
    ActivationStats,
    Checkpoint,
    CSVLogger,
    GradientAccumulation,
    Hooks,
    Learner,
    MixedPrecision,
    accuracy,
    read_csv,
    watch,
)
from hookcb.loops.ported import OF_LEARNER, PUBLIC
from tests.support import fit, make_learner, make_model

WORK = """
learn.fit(1, 1e-3)
learn.fit(1, lr=1e-3, wd=0.01)
learn.fit_one_cycle(1, 1e-3)
learn.fit_one_cycle(1, lr_max=1e-3, div=25., pct_start=0.3, wd=0.01, moms=(0.95, 0.85, 0.95))
learn.fit_flat_cos(1, 1e-3)
learn.fit_flat_cos(1, lr=1e-3, pct_start=0.75, div_final=1e5)
learn.fit_sgdr(2, 1, lr_max=1e-3)
learn.fine_tune(1, base_lr=1e-3, freeze_epochs=1)
assert learn.lr_find(show_plot=False).valley > 0
learn.fit(1); assert len(learn.recorder.values[0]) == 3
learn.fit(1); assert learn.recorder.metric_names[:2] == ["epoch", "train_loss"]
learn.fit(1); assert len(learn.final_record) == 3
learn.create_opt(); assert learn.opt.param_groups
learn.fit(1, cbs=Callback(after_loss=lambda cb: setattr(cb.learn, "loss_grad", cb.learn.loss_grad * 2)))
learn.add_cb(ActivationStats()); learn.remove_cb(ActivationStats)
learn.add_cbs([ActivationStats(), GradientHealth()]); learn.remove_cbs([ActivationStats, GradientHealth])
with learn.added_cbs(ActivationStats()): learn.fit(1)
with learn.no_logging(), learn.no_bar(), learn.no_mbar(): learn.fit(1)
assert len(learn.get_preds(ds_idx=0)[0]) > len(learn.get_preds(ds_idx=1)[0]) == len(learn.get_preds()[0])
learn.save("m"); learn.load("m")
learn.freeze_to(-1); learn.fit(1); learn.unfreeze(); learn.fit(1)
learn.to_fp16(); learn.to_fp32(); learn.to_native_fp16(); learn.to_fp32(); learn.to_bf16().fit(1)
learn.fit(1, cbs=EarlyStoppingCallback(patience=2))
learn.freeze(); learn.fit_one_cycle(1, slice(1e-5, 1e-3)); learn.unfreeze(); learn.fit(1, slice(1e-3))
learn.fit(2, cbs=SaveModelCallback(monitor="accuracy", fname="best")); learn.load("models/best.pth")
learn.fit(1); assert learn.opt.hypers[-1]["lr"] == 1e-3; learn.opt.set_hyper("lr", 1e-4); learn.fit(1)
learn.fine_tune(1, 2e-3, freeze_epochs=1, lr_mult=50, pct_start=0.4, div=3.0)
learn.fit(1, cbs=[ReduceLROnPlateau(), TerminateOnNaNCallback(), GradientClip(0.1), ChannelsLast()])
learn.fit(1, cbs=CSVLogger())
learn.fit(1, cbs=[CSVLogger("other.csv")])
learn.fit(2, cbs=GradientAccumulation(n_acc=16))
set_seed(62, reproducible=False)
x, y = learn.dls.one_batch()
learn.fit(1, cbs=ActivationStats(with_hist=True)); learn.activation_stats.layer_stats(0)
learn.show_training_loop(); learn.summary(); layer_info(learn, x0); module_summary(learn, x0)
with hook_outputs(model) as hooks: model(x0); assert len(hooks.stored) == 3
Learner(dls, model, loss_func=F.cross_entropy, opt_func=torch.optim.AdamW, metrics=accuracy, wd=0.1).fit(1)
""".strip().splitlines()


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What a notebook has after its first cell."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x[:, 0] > 0).long()
    batches = list(zip(x.split(8), y.split(8), strict=True))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    dls = batches, batches[:2]
    found = {name: getattr(hookcb, name) for name in hookcb.__all__}
    learn = Learner(dls, model, F.cross_entropy, metrics=accuracy)
    return found | {"dls": dls, "model": model, "x0": x[:4], "learn": learn, "torch": torch, "F": F}


@pytest.mark.parametrize("habit", WORK)
def test_a_habit_works(habit, names, capsys):
    exec(habit, names)


OF_FASTAI = [  # what others see of its callback.hook, but for options by keyword
    "Hook(m, hook_func, is_forward=True, detach=True, cpu=False, gather=False)",
    "Hooks(ms, hook_func, is_forward=True, detach=True, cpu=False)",
    "hook_output(module, detach=True, cpu=False, grad=False)",
    "hook_outputs(modules, detach=True, cpu=False, grad=False)",
    "dummy_eval(m, size=(64, 64))",
    "model_sizes(m, size=(64, 64))",
    "num_features_model(m)",
    "has_params(m)",
    "total_params(m)",
    "layer_info(learn, *xb)",
    "HookCallback(modules=None, every=None, remove_end=True, is_forward=True, detach=True, "
    "cpu=True, include_paramless=False)",
    "ActivationStats(with_hist=False)",
]


def test_a_name_of_callback_hook_has_its_signature_and_perhaps_more_behind_it():
    other = []
    for signature in OF_FASTAI:
        name, _, params = signature.removesuffix(")").partition("(")
        ours = inspect.signature(getattr(hookcb, name)).parameters.values()
        told = [str(x.replace(annotation=x.empty)) for x in ours if x.kind <= x.VAR_POSITIONAL]
        if not f"{', '.join(told)}, ".startswith(f"{params}, "):
            other.append((signature, told))
    assert other == []


# ---- what they do


def rates(learn):
    return learn.recorder.lrs


def test_a_flat_rate_falls_along_a_cosine_at_the_end():
    learn = make_learner()
    with learn.no_logging():
        learn.fit_flat_cos(4, 0.1, pct_start=0.5, div_final=100)
    lrs, n = rates(learn), len(learn.recorder.lrs)
    assert lrs[: n // 2] == pytest.approx([0.1] * (n // 2))
    assert lrs[n // 2 :] == sorted(lrs[n // 2 :], reverse=True)
    assert lrs[-1] == pytest.approx(0.001)


def test_cycles_begin_with_the_highest_rate():
    learn = make_learner()
    with learn.no_logging():
        learn.fit_sgdr(2, 1, 0.1, cycle_mult=2)
    lrs, n = rates(learn), len(learn.recorder.lrs) // 3
    assert len(learn.recorder.rows) == 3
    assert [lrs[0], lrs[n]] == pytest.approx([0.1, 0.1])
    assert lrs[n - 1] < 0.05
    assert lrs[-1] < 0.05


def test_fine_tune_trains_the_last_child_first():
    learn, trained = make_learner(), []
    first = next(learn.model.parameters())
    before = first.clone()
    learn.add_cb(hookcb.Callback(after_epoch=lambda cb: trained.append(not torch.equal(first, before))))
    with learn.no_logging():
        learn.fine_tune(1, 0.1, freeze_epochs=2)
    assert trained == [False, False, True]
    assert all(p.requires_grad for p in learn.model.parameters())


def test_freeze_to_counts_children_with_parameters():
    learn = make_learner()
    parameters = list(learn.model.parameters())
    learn.freeze_to(-1)
    assert [p.requires_grad for p in parameters[-2:]] == [True, True]
    assert not any(p.requires_grad for p in parameters[:-2])
    learn.freeze_to(0)
    assert all(p.requires_grad for p in parameters)
    with pytest.raises(IndexError, match=r"freeze_to\(7\), but the model's children with parameters are"):
        learn.freeze_to(7)


@pytest.mark.parametrize("opt_func", [torch.optim.SGD, torch.optim.AdamW])
def test_weight_decay_is_that_of_the_optimizer(opt_func):
    def decay(learn):
        return {group["weight_decay"] for group in learn.opt.param_groups}

    learn = make_learner(opt_func=opt_func, wd=0.25)
    fit(learn, 1)
    assert decay(learn) == {0.25}
    fit(learn, 1, wd=0.5)
    assert decay(learn) == {0.5}
    fit(learn, 1)
    assert decay(learn) == {0.5}


def test_weight_decay_that_cannot_be_is_told():
    with pytest.raises(ValueError, match=r"wd must be"):
        fit(make_learner(), 1, wd=-1.0)
    learn = make_learner(opt_func=torch.optim.Rprop)
    with pytest.raises(ValueError, match=r"wd is 0\.1, but Rprop has no weight_decay"):
        fit(learn, 1, wd=0.1)


def test_samples_in_a_group_are_counted_in_batches():
    learn, steps = make_learner(), []
    size = len(learn.dls.train[0][0])
    count = hookcb.Callback(after_step=lambda cb: steps.append(cb.iter))
    fit(learn, 1, cbs=[GradientAccumulation(n_acc=2 * size - 1), count])
    assert steps[0] == 1
    with pytest.raises(ValueError, match="the loader has no batch_size; give n batches"):
        fit(Learner(iter(learn.dls.train), make_model(), F.mse_loss), 1, cbs=GradientAccumulation(n_acc=8))


def test_a_logger_is_a_callback(tmp_path):
    learn = make_learner()
    fit(learn, 2, cbs=CSVLogger(tmp_path / "history.csv"))
    assert read_csv(tmp_path / "history.csv")
    with watch(learn.model, cbs=[CSVLogger(tmp_path / "watched.csv")]) as w:
        assert isinstance(w.log, hookcb.Log)


def test_mixed_precision_comes_and_goes():
    learn = make_learner()
    assert learn.to_bf16() is learn
    assert any(isinstance(cb, MixedPrecision) for cb in learn.cbs)
    assert learn.to_fp32() is learn.to_fp32() is learn
    assert not any(isinstance(cb, MixedPrecision) for cb in learn.cbs)


def test_hooks_that_leave_the_list_leave_their_modules():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    hooks = Hooks(model, lambda m, i, o: o.mean())
    assert [hook.name for hook in hooks[1:3]] == [hook.name for hook in list(hooks)[1:3]]
    del hooks[0]
    assert [len(m._forward_hooks) for m in model] == [0, 1, 1, 1]
    del hooks[1:]
    assert [len(m._forward_hooks) for m in model] == [0, 1, 0, 0]
    assert len(hooks) == 1
    with pytest.raises(IndexError):
        del hooks[5]
    hooks.remove()


# ---- names that are not here


def test_a_name_of_others_says_ours():
    for name, ours in PUBLIC.items():
        with pytest.raises(ImportError, match=f"hookcb has no {name}; it has ") as told:
            exec(f"from hookcb import {name}", {})
        assert ours in str(told.value)
        with pytest.raises(AttributeError, match="; hookcb has "):
            getattr(hookcb, name)
        assert not hasattr(hookcb, name)


def test_an_attribute_of_others_says_ours():
    learn = make_learner()
    for name in OF_LEARNER:
        with pytest.raises(AttributeError, match="; hookcb has "):
            getattr(learn, name)
        assert not hasattr(learn, name)


def test_what_the_sentences_name_is_there():
    words = " ".join([*PUBLIC.values(), *OF_LEARNER.values()]).replace("(", " ").replace(",", " ").split()
    known = [
        word for word in words if word[0].isupper() and word.isidentifier() and word not in ("Adam", "AdamW")
    ]
    others = {"DataLoaders", "DataLoader", "StepLR", "Lightning", "TensorBoard", "MLflow", "HookcbCallback"}
    assert [word for word in known if not hasattr(hookcb, word) and word not in others] == []


def test_other_names_are_wrong_as_ever():
    assert not hasattr(hookcb, "nothing_like_it")
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        exec("from hookcb import nothing_like_it", {})
    with pytest.raises(AttributeError, match=r"'Learner' object has no attribute 'nothing_like_it'$"):
        make_learner().nothing_like_it  # noqa: B018
    star = {}
    exec("from hookcb import *", star)
    assert set(star) - {"__builtins__"} == set(hookcb.__all__)


def test_a_learner_copies_and_pickles_as_before():
    learn = make_learner(cbs=[ActivationStats(), Checkpoint])
    assert copy.copy(learn).model is learn.model
    assert type(copy.deepcopy(learn.model)) is type(learn.model)
    assert isinstance(pickle.loads(pickle.dumps(make_learner().recorder)), hookcb.Recorder)
