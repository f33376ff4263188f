"""Wrong arguments: the message says which one was meant, and what is possible."""

import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import hookcb
from hookcb import (
    SWA,
    ActivationStats,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    Schedule,
    diagnose,
    module_summary,
    watch,
)
from hookcb.core.other_names import ELSEWHERE
from tests.support import in_turn, make_batches, make_learner, make_model

BATCH = make_batches(1)[0]
OTHERS = [  # the call, the name that another library has for an argument, and that of hookcb
    (Learner, "criterion", "loss_func"),
    (Learner, "optimizer", "opt_func"),
    (Learner, "callbacks", "cbs"),
    (Learner, "dataloaders", "dls"),
    (Learner.fit, "epochs", "n_epoch"),
    (Learner.fit, "max_epochs", "n_epoch"),
    (Learner.fit, "callbacks", "cbs"),
    (Learner.fit, "learning_rate", "lr"),
    (Learner.fit, "ckpt_path", "resume"),
    (Learner.fit_one_cycle, "epochs", "n_epoch"),
    (Learner.fit_one_cycle, "max_lr", "lr_max"),
    (Learner.lr_find, "num_iter", "num_it"),
    (Learner.validate, "dataloader", "dl"),
    (Learner.get_preds, "with_inputs", "with_input"),
    (watch, "opt", "optimizer"),
    (watch, "callbacks", "cbs"),
    (diagnose, "criterion", "loss_func"),
    (diagnose, "optimizer", "opt"),
    (EarlyStopping, "restore_best_weights", "restore_best"),
    (Checkpoint, "dirpath", "folder"),
    (Checkpoint, "every_n_train_steps", "every"),
    (CSVLogger, "filename", "path"),
    (GradientClip, "gradient_clip_val", "max_norm"),
    (GradientAccumulation, "accumulate_grad_batches", "n"),
    (SWA, "swa_lrs", "lr"),
    (module_summary, "input_shape", "input_size"),
]
KERAS = """x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight
    sample_weight initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq
    optimizer loss loss_weights metrics weighted_metrics jit_compile"""  # of Model.fit and compile


@in_turn(("call", "name", "meant"), OTHERS, ids=lambda x: getattr(x, "__name__", x))
def test_an_argument_by_the_name_of_another_library_is_named_as_here(call, name, meant):
    first = (make_learner(),) if call.__qualname__.startswith("Learner.") else ()
    with pytest.raises(TypeError) as raised:
        call(*first, **{name: 1})
    assert f"{call.__qualname__} has no argument {name!r}; did you mean {meant!r}? it takes: " in str(
        raised.value
    )
    known = inspect.signature(call).parameters  # as help and IDEs show it
    assert meant in known
    assert all(param.kind is not param.VAR_KEYWORD for param in known.values())


def test_an_argument_that_stands_elsewhere_is_answered_by_what_to_use():
    learn = make_learner()
    for name in KERAS.split():
        with pytest.raises(
            TypeError, match=rf"^Learner\.fit has no argument '{name}'; (use .+|did you mean .+)it takes: "
        ):
            learn.fit(1, **{name: 1})
    with pytest.raises(
        TypeError, match=r"^Learner has no argument 'gradient_clip_val'; use GradientClip\(max_norm\)"
    ):
        Learner([BATCH], make_model(), gradient_clip_val=1.0)


def test_what_to_use_is_there():
    named = {name: place for place in ELSEWHERE.values() for name in re.findall(r"(?<![.\w])[A-Z]\w+", place)}
    of_torch = {"AdamW", "DataLoader", "StepLR", "True", "False"}
    assert [
        place for name, place in named.items() if name not in of_torch and not hasattr(hookcb, name)
    ] == []
    methods = {name for place in ELSEWHERE.values() for name in re.findall(r"learn\.(\w+)", place)}
    assert [name for name in methods if not hasattr(Learner, name)] == []


def test_options_that_a_callback_passes_on_may_have_any_name_but_that_of_another_library():
    with pytest.raises(TypeError, match=r"^MixedPrecision has no argument 'precision'; did you mean 'dtype'"):
        MixedPrecision(precision="bf16")
    with pytest.raises(TypeError, match=r"^ActivationStats has no argument 'layers'; did you mean 'modules'"):
        ActivationStats(layers="x")
    assert MixedPrecision("fp16", init_scale=2.0).dtype is torch.float16


def test_a_call_with_its_own_arguments_works_as_before():
    learn = make_learner()
    with learn.no_logging():
        learn.fit(n_epoch=1, cbs=EarlyStopping(patience=1))
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'n_epoch'"):
            learn.fit()
    with pytest.raises(TypeError, match=r"EarlyStopping has no argument 'colour'; it takes: monitor, mode"):
        EarlyStopping(colour=1)


def refused():
    """What is called, with its arguments in the wrong order or of the wrong kind, and what it says."""
    model, (x, y) = make_model(), BATCH
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, loader = StepLR(opt, 1), DataLoader(TensorDataset(x, y))
    return [
        (watch, (opt, model), r"got the optimizer SGD; the order is watch\(model, optimizer\)"),
        (watch, (model, scheduler), r"got the scheduler StepLR; give the optimizer .*scheduler\.optimizer"),
        (watch, (model, [opt, scheduler]), r"got the scheduler StepLR"),
        (watch, (model, opt, scheduler), r"scheduler StepLR is not a Callback; watch needs no scheduler"),
        (watch, (model, loader), "optimizer must be a torch optimizer, .* got the loader DataLoader$"),
        (watch, (make_learner(),), r"got Learner\(dls=.*; the order is watch\(model, optimizer\)"),
        (Learner, (model, loader, F.mse_loss), r"the loader DataLoader; the order is Learner\(dls, model, "),
        (Learner, (loader, model, opt), "loss_func must be .* got the optimizer SGD$"),
        (Learner, (loader, model, F.mse_loss, scheduler), "opt_func must be .* got the scheduler StepLR$"),
        (Learner, (x.numpy(), model), r"the ndarray float32\[.*TensorDataset\(torch.from_numpy\(x\), torch"),
        (Learner, (BATCH, model), r"the tensor float32\[.*TensorDataset\(x, y\), b"),
        (diagnose, (BATCH, model), r"got \(float32\[.*; the order is diagnose\(model, \(x, y\), loss_func\)"),
        (diagnose, (model, x, y), r"loss_func .* got the tensor float32.*; inputs and targets are one batch"),
        (diagnose, (model, x), r"pass loss_func=…, and a batch \(x, y\), as this one has no target"),
        (diagnose, (model, iter(loader)), "can be read only once; give one batch, such as next"),
        (diagnose, (model, (batch for batch in loader)), "is the generator <genexpr>, but it can be read"),
        (diagnose, (model, loader.dataset), r"batch is the dataset TensorDataset.*DataLoader\(TensorDataset"),
        (diagnose, (model, (loader, loader)), "batch is a tuple of loaders; give one"),
    ]


@in_turn(("call", "given", "says"), refused(), ids=lambda x: getattr(x, "__name__", ""))
def test_swapped_and_mistaken_arguments_are_named_for_what_they_are(call, given, says):
    with pytest.raises((TypeError, ValueError), match=says) as raised:
        call(*given)
    assert "tensor(" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_scheduler_as_callback_is_told_how_it_is_made():
    learn = make_learner()
    with pytest.raises(TypeError, match="scheduler StepLR is not a Callback; .*" + Schedule.__name__):
        learn.add_cb(StepLR(torch.optim.SGD(learn.model.parameters()), 1))


def test_arrays_of_numpy_in_a_batch_are_told_of_with_the_remedy():
    x, y = (part.numpy().astype(np.float64) for part in BATCH)
    learn = make_learner()
    for use in (
        lambda: diagnose(learn.model, (x, y), F.mse_loss),
        lambda: learn.one_batch((BATCH[0], y)),
        lambda: learn.get_preds([(x, y)]),
        lambda: module_summary(learn.model, x),
    ):
        with pytest.raises(TypeError) as raised:
            use()
        (note,) = raised.value.__notes__
        assert "torch.from_numpy(x) makes a tensor" in note
    with pytest.raises(TypeError) as raised:
        diagnose(learn.model, BATCH[0], F.mse_loss)
    assert raised.value.__notes__[0].endswith("yb (); a batch with a target is (x, y)")
