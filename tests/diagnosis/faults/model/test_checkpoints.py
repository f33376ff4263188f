"""Weights that are kept without a copy, and files that have those of before the training."""

import copy
from io import BytesIO

import pytest
import torch
from torch.optim import SGD

from tests.diagnosis.faults.support import found_in_loop, from_start, small_net
from tests.support import along, first


@pytest.fixture(autouse=True)
def _from_start():
    with from_start():
        yield


def found(model, code, **options):
    return found_in_loop(model, SGD(model.parameters(), lr=0.05), code, **options)


@pytest.mark.parametrize(
    ("keep", "done"),
    first(
        along(
            [lambda x: x, dict, copy.copy, lambda x: {k: v.cpu() for k, v in x.items()}], ["loaded", "saved"]
        )
    ),
)
def test_a_best_state_without_a_copy_is_found(keep, done):
    model, kept = small_net(), {}

    def each(step):
        if step in (5, 12):
            kept["best"] = keep(model.state_dict())

    def end():
        if done == "loaded":
            model.load_state_dict(kept["best"])
        else:
            torch.save({"epoch": 3, "model": kept["best"]}, BytesIO())

    ((severity, message),) = found(model, "checkpoint.no_copy", each=each, end=end)
    assert severity == "warning"
    assert f"taken after 12 steps was {done} after 30" in message


def test_a_copy_is_not():
    model, kept = small_net(), {}
    live = model.state_dict()  # saved in each epoch, as it is then

    def each(step):
        if step in (5, 12):
            kept["best"] = copy.deepcopy(model.state_dict())
        if step % 10 == 0:
            torch.save(model.state_dict(), BytesIO())
            torch.save(live, BytesIO())
            target.load_state_dict(model.state_dict())

    def end():
        torch.save(kept["best"], BytesIO())
        model.load_state_dict(kept["best"])

    target = small_net()
    assert found(model, "checkpoint.no_copy", each=each, end=end) == []


def test_a_first_state_that_is_loaded_again_is_no_reset():
    model = small_net()
    first = model.state_dict()
    found_now = found(model, "checkpoint.no_copy", end=lambda: model.load_state_dict(first))
    assert "taken after 0 steps was loaded after 30" in found_now[0][1]


def test_a_file_with_the_first_weights_only_is_found():
    model = small_net()
    first, original = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    ((severity, message),) = found(model, "checkpoint.untrained", end=lambda: torch.save(first, BytesIO()))
    assert severity == "error"
    assert "saved after 30 steps are bit-identical to those before the first step" in message
    model = original
    original = copy.deepcopy(model)
    assert found(
        model, "checkpoint.untrained", end=lambda: torch.save({"m": original.state_dict()}, BytesIO())
    )


@pytest.mark.slow
def test_first_weights_beside_trained_ones_and_averages_are_not():
    model = small_net()
    first = copy.deepcopy(model.state_dict())

    def end():
        torch.save(first, BytesIO())
        torch.save(model.state_dict(), BytesIO())

    assert found(model, "checkpoint.untrained", end=end) == []
    model = small_net()
    averaged = {name: x + 0.01 for name, x in model.state_dict().items()}
    assert found(model, "checkpoint.untrained", end=lambda: torch.save(averaged, BytesIO())) == []
    model = small_net()
    torch.save(model.state_dict(), BytesIO())  # before
    assert found(model, "checkpoint.untrained") == []
