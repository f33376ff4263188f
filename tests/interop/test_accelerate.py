"""Accelerate on two processes; what it does on one is in the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hookcb import ActivationStats, GradientHealth, watch
from tests.interop.trainers import BS, EPOCHS, N_TRAIN, SETS, Net, loss_func, optimizer, quiet

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        HERE / "accelerate_worker.py",
    ]
    done = subprocess.run([sys.executable, *launch, folder], env=env, capture_output=True, text=True)
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr
    return [json.loads(file.read_text()) for file in files]


def test_each_process_records_its_share_of_the_batches(found):
    torch.manual_seed(0)
    assert [of["wrapped"] for of in found] == ["DistributedDataParallel"] * 2
    assert [of["names"] for of in found] == [["net.0", "net.2"]] * 2
    x = SETS[0].tensors[0]
    first = Net().net[0](x[: BS // 2]), Net().net[0](x[BS // 2 : BS])
    assert [of["means"][0] for of in found] == pytest.approx([y.mean().item() for y in first])
    assert [len(of["means"]) for of in found] == [EPOCHS * N_TRAIN] * 2


def test_gradients_are_read_when_processes_have_shared_them(found):
    one, two = (of["norms"] for of in found)
    assert one == two
    net = Net()
    opt = optimizer(net)
    with watch(net, opt, GradientHealth) as w:  # the same by one process
        for _ in range(EPOCHS):
            for i, (x, y) in enumerate(zip(*(of.split(BS) for of in SETS[0].tensors), strict=True)):
                (loss_func(net(x), y) / 2).backward()
                if i % 2:
                    opt.step()
                    opt.zero_grad()
    assert one == pytest.approx(w.gradient_health.step_series("total_norm"))


def test_a_step_comes_with_every_second_batch(found):
    for of in found:
        assert of["steps"] == [1, 3, 5, 7]
        assert {*of["missing"]} == {"before_validate", "after_validate"}


def test_weights_and_hooks_are_as_without_us(found):
    for of in found:
        assert of["same weights"]
        assert of["hooks"] == 0


def test_the_wrapped_model_is_diagnosed(found):
    assert [of["verdict"] for of in found] == ["healthy"] * 2


def test_a_step_that_overflows_has_no_step_events():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    net = Net()
    model, opt = accelerator.prepare(net, optimizer(net))
    x, y = (of[:BS] for of in SETS[0].tensors)
    with watch(model, opt, ActivationStats, GradientHealth, scaler=accelerator.scaler) as w:
        for factor in 1.0, float("inf"), 1.0:
            accelerator.backward(loss_func(model(x), y) * factor)
            opt.step()
            opt.zero_grad()
    assert len(w.activation_stats.stats) == 3
    assert w.coverage.seen["before_step"] == w.coverage.seen["after_step"] == 2
    assert w.gradient_health.step_series("scale") == [16.0, 8.0]
