"""Weights that load_state_dict leaves out, as their names do not match."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from hookcb import Callback
from hookcb.cli.main import main
from tests.diagnosis.faults.support import found_in_loop, from_start, small_net, trained
from tests.support import first

CODE = "load.unmatched"


@pytest.fixture(autouse=True)
def _from_start():
    with from_start():
        yield


def state_of(model, prefix=""):
    return {prefix + name: x.clone() for name, x in model.state_dict().items()}


def found(model, **options):
    return found_in_loop(model, SGD(model.parameters(), lr=0.05), CODE, **options)


@pytest.mark.parametrize("prefix", first(["module.", "_orig_mod.", "model.", "net.encoder."]))
def test_a_prefix_of_all_names_is_named_with_the_line_that_strips_it(prefix):
    model = small_net()
    model.load_state_dict(state_of(model, prefix), strict=False)
    ((severity, message),) = found(model)
    assert severity == "error"
    assert f"With the prefix {prefix!r} removed from what was given, 6 of 6" in message


@pytest.mark.slow
def test_a_prefix_that_the_model_has_and_a_wrapper_inside_are_named():
    wrapped = nn.Sequential()
    wrapped.add_module("module", small_net())
    wrapped.load_state_dict(state_of(small_net()), strict=False)
    ((_, message),) = found(wrapped)
    assert "With the prefix 'module.' added to what was given" in message
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    given = {name.replace("1.", "1._orig_mod.", 1): x for name, x in state_of(model).items()}
    model.load_state_dict(given, strict=False)
    ((_, message),) = found(model)
    assert "With '_orig_mod.' removed from what was given, 4 of 4 missing names match" in message


@pytest.mark.slow
def test_a_whole_checkpoint_names_other_names_and_few_that_match():
    model = small_net()
    model.load_state_dict({"epoch": 3, "model_state_dict": state_of(model)}, strict=False)
    ((severity, message),) = found(model)
    assert severity == "error"
    assert "The entry 'model_state_dict' of what was given has such names" in message
    model = small_net()
    model.load_state_dict({f"x{name}": x for name, x in state_of(model).items()}, strict=False)
    assert found(model)[0][0] == "error"
    model = small_net()
    model.load_state_dict(
        {(n if n == "4.bias" else f"x{n}"): x for n, x in state_of(model).items()}, strict=False
    )
    ((severity, message),) = found(model)
    assert severity == "warning"
    assert "left 5 of its 6 parameters" in message


@pytest.mark.slow
def test_a_filter_that_keeps_nothing_loads_the_models_own_weights(tmp_path):
    model = small_net()
    torch.save(state_of(model, "module."), tmp_path / "a.pt")
    own = model.state_dict()
    own.update({k: v for k, v in torch.load(tmp_path / "a.pt").items() if k in own})
    model.load_state_dict(own)
    ((severity, message),) = found(model)
    assert severity == "warning"
    assert "was given the model's own weights, 6 tensors" in message
    model = small_net()
    model.load_state_dict({}, strict=False)
    assert "was given no tensors" in found(model)[0][1]


@pytest.mark.slow
def test_right_loads_are_silent():
    model = small_net()
    given = state_of(model)
    for name in ("4.weight", "4.bias"):
        given[f"other.{name}x"] = given.pop(name)
    model.load_state_dict(given, strict=False)  # another head
    assert found(model) == []
    model = small_net()
    model.load_state_dict({"4.bias": torch.ones(1)}, strict=False)  # as adapters
    assert found(model) == []
    model = small_net()
    model.load_state_dict(state_of(model) | state_of(nn.Linear(9, 99), "decoder."), strict=False)
    assert found(model) == []
    model = small_net()
    model.load_state_dict(state_of(model, "module."), strict=False)
    model.load_state_dict(state_of(model))  # a second attempt
    assert found(model) == []
    model = small_net()
    model.load_state_dict(model.state_dict())  # without a file
    assert found(model) == []


def test_a_load_into_another_model_does_not_count():
    teacher = small_net()
    teacher.load_state_dict(state_of(teacher, "module."), strict=False)
    assert found(small_net()) == []
    del teacher


def test_half_of_both_sides_is_a_note():
    model = nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 20), nn.Linear(20, 1))
    given = state_of(model)
    for name in ("1.weight", "1.bias"):
        given[f"x{name}"] = given.pop(name)
    model.load_state_dict(given, strict=False)
    assert [severity for severity, _ in found(model)] == ["info"]


@pytest.mark.slow
def test_a_learner_hears_loads_within_its_fit():
    class Loads(Callback):
        def before_epoch(self):
            self.model.load_state_dict(state_of(self.model, "module."), strict=False)

    with pytest.warns(UserWarning, match=CODE):
        verdict = trained(small_net(), [Loads()])
    assert [x.code for x in verdict.findings if x.severity == "error"] == [CODE]
    assert verdict.primary.code == CODE


@pytest.mark.slow
def test_the_command_hears_a_load_before_the_training(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
net.load_state_dict({"module." + k: v for k, v in net.state_dict().items()}, strict=False)
opt = torch.optim.SGD(net.parameters(), 0.05)
for i in range(30):
    x = torch.randn(16, 4)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""
    )
    assert main(["diagnose", str(script)]) == 1
    assert f"SICK  Pretrained weights do not match by name ({CODE}; " in capsys.readouterr().out


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def read(state, tmp_path):
    torch.save(state, tmp_path / "a.pt")
    return torch.load(tmp_path / "a.pt")


@pytest.mark.slow
def test_a_file_of_parameters_leaves_running_statistics_as_they_were(tmp_path):
    weights = dict(normed().named_parameters())
    model = normed()
    model.load_state_dict(read(weights, tmp_path), strict=False)
    model[1].eval()  # frozen statistics
    ((severity, message),) = found(model)
    assert severity == "warning"
    assert "all 6 parameters, but no running statistics of its 1 batch norms, which stay at mean 0" in message
    model = normed()
    model.load_state_dict(read(weights, tmp_path), strict=False)
    ((severity, message),) = found(model)
    assert severity == "info"
    assert "begin at mean 0 and variance 1; the training has changed them since" in message


@pytest.mark.slow
def test_running_statistics_that_a_file_has_or_that_were_there_are_right(tmp_path):
    weights, whole = dict(normed().named_parameters()), normed().state_dict()
    for states in ([whole], [weights, whole], [whole, weights]):
        model = normed()
        for state in states:
            model.load_state_dict(read(state, tmp_path), strict=False)
        model[1].eval()
        assert found(model) == []
    model = normed()
    model.load_state_dict(weights, strict=False)  # of no file
    assert found(model) == []
