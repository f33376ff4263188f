"""Batch norms with a wrong mode or batch size."""

import pytest
import torch
from torch import nn

from hookcb.diagnosis.faults.model.modes import Modes
from hookcb.diagnosis.verdict import Finding
from tests.diagnosis.faults.support import followed, told
from tests.support import in_turn


def net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3), nn.BatchNorm1d(3)
    )


def findings(run):
    """One for each place; of one severity, the verdict tells them as one."""
    found = list(run.measured(Modes)._found())
    told_ = [x for x in told(run, Modes) if isinstance(x, Finding)]
    assert [x.severity for x in told_] == list(dict.fromkeys(x.severity for x in found))
    return found


def seen(model, n=10, size=8, at=None):
    """Findings in n batches; `at` may change the model before a batch."""
    modes, run = followed(Modes, model)
    for step in range(n):
        if at is not None:
            at(step)
        begin(modes, run, step, size if isinstance(size, int) else size[step])
        modes.on_batch_end(run)
        run.n_batches += 1
    return findings(run)


def begin(modes, run, step, size):
    """Begins a batch of so many samples, None if that is unknown."""
    run.loop.train_iter = step
    run.loop.xb, run.loop.yb = () if size is None else (torch.ones(size, 2),), ()
    modes.on_batch(run)


def test_batch_norms_in_training_mode_are_fine():
    assert seen(net()) == []
    assert seen(nn.Linear(2, 2)) == []


def test_each_batch_norm_that_is_left_in_eval_is_told_by_name():
    found = seen(net().eval())
    assert [(s.code, s.layer, s.step) for s in found] == [
        ("mode.mismatch", "1", 0),
        ("mode.mismatch", "5", 0),
    ]
    model = net()
    model[5].eval()
    assert [s.layer for s in seen(model)] == ["5"]


def test_one_that_goes_to_eval_in_the_middle_is_told_with_that_step():
    model = net()
    (found,) = seen(model, at=lambda step: model[1].train(step < 4))
    assert (found.layer, found.step) == ("1", 4)


def test_the_model_itself_may_be_a_batch_norm():
    (found,) = seen(nn.BatchNorm1d(3).eval())
    assert found.code == "mode.mismatch"


@in_turn(
    "norm",
    [
        lambda: nn.BatchNorm1d(4).requires_grad_(False),  # frozen on purpose
        lambda: nn.BatchNorm1d(4, affine=False),  # nothing of it is trained
        lambda: nn.BatchNorm1d(4, track_running_stats=False),  # the same in both modes
        lambda: nn.LayerNorm(4),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.Dropout(0.0),
    ],
)
def test_what_may_be_in_eval_mode_is_no_finding(norm):
    assert seen(nn.Sequential(nn.Linear(4, 4), norm()).eval()) == []


def test_a_norm_of_which_only_the_bias_is_trained_is_trained():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].weight.requires_grad_(False)
    assert len(seen(model)) == 1


def learned():
    """A model that was trained before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))
    model(torch.randn(16, 4))
    return model


def test_norms_that_keep_what_they_have_learned_are_meant_to_where_the_model_is_in_train_mode():
    model = learned()
    model[1].eval()
    assert seen(model) == []
    assert [s.layer for s in seen(learned().eval())] == ["1", "3"]


def test_norms_that_have_learned_nothing_are_never_meant_to_be_in_eval():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    assert [s.layer for s in seen(model)] == ["1"]


def test_norms_that_are_switched_off_in_the_middle_are_told_though_they_have_learned():
    model = learned()
    (found,) = seen(model, at=lambda step: model[3].train(step < 6))
    assert (found.layer, found.step) == ("3", 6)


def test_dropout_that_a_whole_model_in_eval_mode_leaves_out_is_a_warning():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
    (found,) = seen(model, at=lambda step: model.train(step < 3))
    assert (found.code, found.severity, found.layer, found.step) == ("mode.mismatch", "warning", "", 3)


def test_dropout_that_is_switched_off_alone_is_meant_to_be():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
    model[1].eval()
    assert seen(model) == []


def test_a_frozen_model_whose_input_alone_is_trained_may_be_in_eval_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)).requires_grad_(False).eval()
    assert seen(model) == []


# ---- batches of one sample


@in_turn(
    ("sizes", "is_told"),
    [
        ([1] * 10, True),
        ([1] * 9 + [8], True),
        ([1] * 8 + [8] * 2, False),
        ([8] * 9 + [1], False),  # a last batch that is left over
        ([2] * 10, False),
        ([None] * 10, False),  # a loop of which only the losses are seen
    ],
)
def test_batches_that_mostly_have_one_sample_are_told_as_a_warning(sizes, is_told):
    found = seen(net(), size=sizes)
    assert [(s.code, s.severity, s.layer) for s in found] == [("mode.mismatch", "warning", "1")] * is_told


def test_single_samples_are_fine_without_a_batch_norm():
    assert seen(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), size=1) == []


def test_without_a_batch_nothing_is_said():
    assert seen(net(), 0) == []


# ---- a batch norm that refuses


def refused(model, x):
    with pytest.raises(ValueError, match="Expected more") as info:
        model(x)
    return info.value


def test_the_batch_norm_that_has_raised_is_told_as_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    model[1][0].eval()
    modes, run = followed(Modes, model)
    run.loop.train_iter = 7
    modes.on_error(run, refused(model, torch.ones(1, 4)))
    (found,) = findings(run)
    assert (found.code, found.severity, found.layer, found.step) == ("mode.mismatch", "error", "1.1", 7)


def test_it_is_told_once_even_where_batches_have_one_sample():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    modes, run = followed(Modes, model)
    begin(modes, run, 0, 1)
    modes.on_error(run, refused(model, torch.ones(1, 4)))
    modes.on_batch_end(run)
    assert [s.severity for s in findings(run)] == ["error"]


def test_other_errors_and_norms_of_other_models_are_not_its_business():
    modes, run = followed(Modes, net())
    for error in (
        refused(nn.BatchNorm1d(4), torch.ones(1, 4)),
        refused(nn.InstanceNorm1d(4), torch.ones(2, 4, 1)),
        ValueError("Expected input batch_size (3) to match target batch_size (4)."),
        RuntimeError("Expected more than 1 value per channel"),
    ):
        modes.on_error(run, error)
    assert findings(run) == []
