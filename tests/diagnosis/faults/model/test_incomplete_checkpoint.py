"""Files that lack weights that were trained."""

import copy
import sys
from io import BytesIO
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from hookcb.diagnosis.measurements.loads import Saves
from tests.diagnosis.faults.support import found_in_loop, from_start
from tests.support import each, first

CODE = "checkpoint.incomplete"


@pytest.fixture(autouse=True)
def _from_start():
    with from_start():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


def found(contents, model=None, opt=None):
    """Findings of a training at whose end these are saved, each in a file."""
    model = model or Net()
    opt = opt or Adam(model.parameters(), lr=1e-3)

    def end():
        for content in contents(model, opt):
            torch.save(content, BytesIO())

    return found_in_loop(model, opt, CODE, end=end)


@pytest.mark.slow
def test_the_optimizers_state_without_a_part_of_its_weights_is_found():
    ((severity, message),) = found(lambda m, opt: [{"body": m.body.state_dict(), "opt": opt.state_dict()}])
    assert severity == "warning"
    assert "of 6 parameters, but no file has the weights of 2 of these: head.weight, head.bias." in message


@pytest.mark.slow
def test_parameters_of_the_loss_that_are_trained_and_not_saved_are_found():
    model, scale = Net(), nn.Parameter(torch.ones(7))
    model.register_forward_hook(lambda m, args, output: output + 0 * scale.sum())
    opt = Adam([*model.parameters(), scale], lr=1e-3)
    ((_, message),) = found(lambda m, opt: [{"m": m.state_dict(), "opt": opt.state_dict()}], model, opt)
    assert "the weights of 1 of these: 1 outside of the model" in message
    both = lambda m, opt: [{"m": m.state_dict(), "opt": opt.state_dict()}, {"scale": scale}]  # noqa: E731
    assert found(both, model, opt) == []


@pytest.mark.slow
def test_a_head_alone_is_found_only_if_the_layers_before_it_were_trained():
    ((severity, message),) = found(lambda m, opt: [m.head.state_dict()])
    assert severity == "warning"
    assert "All that was saved of the model is head.weight, head.bias." in message
    model = Net()
    model.body.requires_grad_(False)
    assert found(lambda m, opt: [m.head.state_dict()], model) == []
    assert found(lambda m, opt: [m.head.state_dict(), m.body.state_dict()]) == []


@pytest.mark.parametrize(
    "contents",
    first(
        [
            lambda m, opt: [m.state_dict()],
            lambda m, opt: [m],
            lambda m, opt: [{"model": m, "opt": opt.state_dict()}],
            lambda m, opt: [m.body.state_dict()],
            lambda m, opt: [opt.state_dict()],
            lambda m, opt: [{"m": m.state_dict(), "opt": opt.state_dict()}],
            lambda m, opt: [
                {"m": {f"module.{k}": v for k, v in m.state_dict().items()}, "o": opt.state_dict()}
            ],
            lambda m, opt: [{"ema": copy.deepcopy(m).half().state_dict(), "opt": opt.state_dict()}],
            lambda m, opt: [m.state_dict(), {"head": m.head.state_dict(), "opt": opt.state_dict()}],
            lambda m, opt: [],
        ]
    ),
)
def test_right_files_are_silent(contents):
    assert found(contents) == []


@pytest.mark.slow
def test_adapters_and_tied_weights_are_whole():
    model = Net()
    model.body.requires_grad_(False)
    opt = SGD(model.parameters(), lr=0.05, momentum=0.9)  # it holds what is frozen too
    assert found(lambda m, opt: [{"head": m.head.state_dict(), "opt": opt.state_dict()}], model, opt) == []
    model = Net()
    model.body[0] = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), model.body[2])
    assert found(lambda m, opt: [{"m": m.state_dict(), "opt": opt.state_dict()}], model) == []


@pytest.fixture(params=["_evaluate_tensors_for_save", "_flatten"])
def safe(request, monkeypatch):
    """A stand-in of safetensors, whose save calls one of two functions, by its version."""
    library = ModuleType("safetensors.torch")
    setattr(library, request.param, lambda tensors: None)
    library.save_file = lambda tensors, file: getattr(library, request.param)(tensors)
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", library)
    return library


def found_safe(safe, save):
    """Findings of a training at whose end this is called with the model, its optimizer, and save_file."""
    model = Net()
    opt = Adam(model.parameters(), lr=1e-3)
    save_file = safe.save_file  # as "from safetensors.torch import save_file" binds it
    return found_in_loop(model, opt, CODE, end=lambda: save(model, opt, save_file))


@pytest.mark.slow
def test_a_head_that_safetensors_saves_alone_is_found(safe):
    ((severity, message),) = found_safe(safe, lambda m, opt, save: save(m.head.state_dict(), "a"))
    assert severity == "warning"
    assert "All that was saved of the model is head.weight, head.bias." in message


@pytest.mark.slow
def test_weights_that_safetensors_saves_are_in_a_file(safe):
    def save(m, opt, save_file):
        save_file({name: x.clone() for name, x in m.state_dict().items()}, "a")
        torch.save({"body": m.body.state_dict(), "opt": opt.state_dict()}, BytesIO())

    assert found_safe(safe, save) == []


def test_safetensors_is_as_it_was_afterwards(safe):
    names = [name for name in vars(safe) if name in ("_evaluate_tensors_for_save", "_flatten")]
    real = [getattr(safe, name) for name in names]
    ear = Saves()
    ear.hear_safetensors()
    assert [getattr(safe, name) for name in names] != real
    del ear
    assert [getattr(safe, name) for name in names] == real


@pytest.mark.slow
def test_a_head_alone_is_not_told_if_safetensors_cannot_be_heard(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", ModuleType("safetensors.torch"))
    assert found(lambda m, opt: [m.head.state_dict()]) == []


def normed():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(body, nn.Linear(8, 1))


def trained_of(m):
    return {name: p.detach() for name, p in m.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "contents",
    each(
        2,
        [
            lambda m, opt: [{"model": trained_of(m), "optimizer": opt.state_dict()}],
            lambda m, opt: [{name: x.clone() for name, x in trained_of(m).items()}],
            lambda m, opt: [{f"module.{name}": x for name, x in trained_of(m).items()}],
            lambda m, opt: [m[0].state_dict() | {"1.running_mean": None, "1.running_var": None}],
        ],
    ),
)
def test_all_parameters_without_running_statistics_are_found(contents):
    ((severity, message),) = found(contents, normed())
    assert severity == "warning"
    assert "none has the running statistics of 1 batch norms, which the training has changed: 0.1." in message


def buffers(m):
    return {name: x.clone() for name, x in m.named_buffers()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "contents",
    each(
        3,
        [
            lambda m, opt: [m.state_dict()],
            lambda m, opt: [{"params": trained_of(m), "buffers": buffers(m)}],
            lambda m, opt: [{**trained_of(m), **buffers(m)}],
            lambda m, opt: [{"params": trained_of(m), "buffers": list(m.buffers())}],
            lambda m, opt: [trained_of(m), buffers(m)],
            lambda m, opt: [{"ema": trained_of(m), "model": m.state_dict(), "opt": opt.state_dict()}],
            lambda m, opt: [m[0][1].state_dict() | {"running_mean": None, "running_var": None}],
            lambda m, opt: [],
        ],
    ),
)
def test_running_statistics_that_are_in_any_file_are_saved(contents):
    assert found(contents, normed()) == []


@pytest.mark.slow
def test_running_statistics_that_nothing_has_changed_need_not_be_saved():
    model = normed()
    model[0][1].eval()
    assert found(lambda m, opt: [trained_of(m)], model) == []


def loaded_again(repair):
    """Findings if a file of parameters is loaded into a copy, to which something is done then."""
    model, again, file = normed(), normed(), BytesIO()

    def end():
        torch.save(trained_of(model), file)
        file.seek(0)
        again.load_state_dict(torch.load(file), strict=False)
        repair(model, again)

    return found_in_loop(model, Adam(model.parameters(), lr=1e-3), CODE, end=end)


@pytest.mark.slow
def test_a_copy_that_is_loaded_without_running_statistics_is_named():
    ((severity, message),) = loaded_again(lambda model, again: again.eval())
    assert severity == "warning"
    assert "into Sequential with strict=False, and lacks 0.1.running_mean, 0.1.running_var: these" in message


@pytest.mark.slow
def test_statistics_that_are_measured_anew_are_not_named_as_lost():
    ((_, message),) = loaded_again(lambda model, again: again(torch.randn(32, 4)))
    assert "Files have all 6 parameters of the model" in message
