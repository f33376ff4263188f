"""What is refused as an engine, and why; tests/interop has Accelerators that train."""

from types import SimpleNamespace

import pytest

from hookcb import Distributed, synth_learner
from tests.support import in_turn


def engine(**changes):
    """A stand-in for an Accelerator."""
    calls = {"prepare": print, "backward": print}
    facts = {"distributed_type": "NO", "scaler": None, "split_batches": False, "state": None}
    return SimpleNamespace(**(calls | facts | changes))


@pytest.mark.parametrize("given", ["accelerate", 3, SimpleNamespace(prepare=print)])
def test_another_object_is_refused_with_what_to_install(given):
    with pytest.raises(
        TypeError, match=r"engine must be an Accelerator .*pip install 'hookcb\[accelerate\]'"
    ):
        Distributed(engine=given)


@in_turn(
    ("changes", "text"),
    [
        ({"distributed_type": "DEEPSPEED"}, r"DeepSpeed cannot be used .* use hookcb.watch\(model\)"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM makes the optimizer's steps itself"),
        ({"distributed_type": "FSDP", "is_fsdp2": False}, r"FSDP of version 1, .*\(fsdp_version=2\)"),
        ({"scaler": object()}, "mixed_precision='fp16', which cannot be used .* use 'bf16'"),
        ({"split_batches": True}, "split_batches=True, which cannot be used"),
        ({"parallelism_config": SimpleNamespace(tp_size=2)}, r"use Distributed\(prepare=…"),
    ],
)
def test_settings_that_the_learner_cannot_honor_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        Distributed(engine=engine(**changes))


@in_turn(
    ("mode", "options", "name"),
    [
        ("fsdp2", {}, "mode='fsdp2'"),
        ("ddp", {"prepare": print}, "prepare"),
        ("ddp", {"mesh": {"dp": 2}}, "mesh"),
        ("ddp", {"find_unused_parameters": True}, "find_unused_parameters"),
    ],
)
def test_other_arguments_belong_to_the_engine(mode, options, name):
    with pytest.raises(
        ValueError, match=f"{name} is not used if there is engine=; set it in the Accelerator"
    ):
        Distributed(mode, engine=engine(), **options)


def test_an_accelerator_of_other_processes_is_refused():
    learn = synth_learner(cbs=Distributed(engine=engine(num_processes=2)))
    with pytest.raises(ValueError, match=r"made for 2 process\(es\), but there are 1; make it in each"):
        learn.fit(1)
