"""A model that another package wraps is diagnosed as any other; two processes are in test_accelerate.py."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests.interop.trainers import quiet
from tests.scenarios.support import LAYERS, PARAMS, Net, check_command, check_watched


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {})  # as in a new process
    torch.manual_seed(0)
    with quiet():
        yield


def prepared(net):
    return Accelerator().prepare(net)


def lora(net):
    return get_peft_model(net, LoraConfig(r=4, target_modules=["body.0", "head"]))


OF_LORA = [f"base_model.model.{layer}.lora_{x}.default.weight" for layer in ("body.0", "head") for x in "AB"]
IN_LORA = [  # of a layer: the frozen one, what drops inputs, and two linear ones
    f"base_model.model.{layer}.{part}"
    for layer in ("body.0", "head")
    for part in ("base_layer", "lora_dropout.default", "lora_A.default", "lora_B.default")
]
IN_LORA.insert(4, "base_model.model.body.1")


@pytest.mark.parametrize("check", [check_watched, check_command])
@pytest.mark.parametrize(
    ("wrap", "title", "layers", "params"),
    [(prepared, "Net", LAYERS, PARAMS), (lora, "PeftModel", IN_LORA, OF_LORA)],
)
def test_a_model_of_another_package_is_diagnosed(check, wrap, title, layers, params, tmp_path, capsys):
    if check is check_watched:
        assert check(wrap(Net()), layers, params).status == "healthy"
    else:
        check(f"{__name__}:{wrap.__name__}", tmp_path, capsys, title, layers, params)
