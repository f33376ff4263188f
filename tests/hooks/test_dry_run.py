"""dummy_eval, model_sizes, num_features_model and layer_info."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from hookcb import Learner, dummy_eval, layer_info, model_sizes, num_features_model
from tests.hooks.support import Plain, S, mlp, randn
from tests.support import SaysSo, changes_in, in_turn, make_batches, unsettle


def test_dummy_eval_gives_the_output_of_one_sample_in_eval_mode():
    seen = []
    spying = Plain(lambda m, x: seen.append((m.training, x.dtype, x.shape, torch.is_grad_enabled())) or x)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.9), spying).train()
    model[1].eval()
    with changes_in(model) as changed:
        out = dummy_eval(model)
    assert changed == []
    assert out.shape == (1, 8, 62, 62)
    assert not out.requires_grad
    assert seen == [(False, torch.float32, S([1, 8, 62, 62]), False)]
    assert out.std() > 0.01
    assert dummy_eval(model, size=(5, 9)).shape == (1, 8, 3, 7)
    assert dummy_eval(model.bfloat16(), (5, 9)).dtype == torch.bfloat16


@in_turn(
    ("first", "out"),
    [
        (lambda: nn.Conv2d(6, 6, 3, groups=6), (1, 6, 6, 6)),
        (lambda: nn.ConvTranspose2d(4, 7, 3), (1, 7, 10, 10)),
        (lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 1)), (1, 2, 8, 8)),
        (lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), (1, 4, 8, 8)),
        (lambda: nn.Conv2d(1, 2, 1).requires_grad_(False), (1, 2, 8, 8)),
    ],
    ids=["depthwise", "transposed", "after norm", "parametrized", "grey and frozen"],
)
def test_dummy_eval_finds_the_input_channels(first, out):
    assert dummy_eval(first(), (8, 8)).shape == out


def test_model_sizes_are_those_of_the_children():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    unsettle(model)
    with changes_in(model) as changed:
        sizes = model_sizes(model, size=(16, 16))
    assert changed == []
    assert sizes == [S([1, 8, 14, 14]), S([1, 8, 1, 1]), S([1, 8]), S([1, 5])]
    with changes_in(model) as changed:
        assert num_features_model(model) == 5
    assert changed == []


@in_turn("kernel", [31, 33, 70, 200])
def test_num_features_tries_larger_images(kernel):
    model = nn.Sequential(nn.Conv2d(1, 3, kernel, stride=50), nn.ReLU())
    with changes_in(model) as changed:
        assert num_features_model(model) == 3
    assert changed == []


@in_turn("look", [dummy_eval, model_sizes, num_features_model])
@in_turn("error", [KeyError("k"), TypeError("t"), AttributeError("a"), SaysSo(1, 2), RuntimeError("boom")])
def test_the_true_error_is_shown_and_modes_come_back(look, error):
    def fail(m, x):
        m.n += 1
        raise error

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Plain(fail, n=torch.zeros(())))
    unsettle(model)
    with changes_in(model) as changed, pytest.raises(type(error)) as caught:
        look(model)
    assert changed == []
    assert caught.value is error


@in_turn("look", [dummy_eval, model_sizes, num_features_model])
@in_turn("make", [nn.ReLU, nn.Sequential, lambda: nn.Sequential(nn.ReLU(), nn.Flatten())])
def test_a_model_without_channels_is_refused_clearly(look, make):
    with pytest.raises(ValueError, match="channel"):
        look(make())


def test_layer_info_lists_the_leaves():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)
    )
    model[2].bias.requires_grad_(False)
    model[3].requires_grad_(False)
    model.train()
    xb = randn(1, 3)
    expected = [
        ("Linear", 16, True, S([1, 4]), False),
        ("BatchNorm1d", 8, True, S([1, 4]), True),
        ("ReLU", 0, False, S([1, 4]), True),
        ("Linear", 20, "partly", S([1, 4]), True),
        ("Linear", 10, False, S([1, 2]), False),
    ]
    for what in (model, Learner(make_batches(d=3), model, F.mse_loss)):
        found = layer_info(what, xb)
        assert isinstance(found, list)
        assert found == expected
        assert found[3]._asdict() == {
            "type": "Linear",
            "params": 20,
            "trainable": "partly",
            "shape": S([1, 4]),
            "same": True,
        }


def test_layer_info_gives_the_shapes_of_the_batch_it_got():
    assert [info.shape for info in layer_info(mlp(), randn(4, 10))] == [S([4, 30]), S([4, 30]), S([4, 2])]


def test_layer_info_of_nested_outputs():
    (info,) = layer_info(nn.LSTM(5, 7, batch_first=True), randn(1, 6, 5))
    assert info[:4] == ("LSTM", 392, True, (S([1, 6, 7]), (S([1, 1, 7]), S([1, 1, 7]))))
