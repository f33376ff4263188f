"""Helpers of the tests of ranks: launching processes, and the learner that they train."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookcb import Learner, accuracy
from tests.support import start

HAS_FSDP2 = hasattr(torch.cpu.Stream, "record_event")  # on CPUs, which torch 2.6 lacks
ROOT = Path(__file__).parents[2]
TIMEOUT = 15.0  # seconds of the group, which turn a hang into a failure


# ---- in the test


def free_port():
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def environment(rank, world, port):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(world)}
    return where | {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def begin(worker, folder, *args, world=2):
    """Start `worker FOLDER *args` as ranks, without torchrun's agent, which ends the others if one fails.

    The worker is a file of this folder, or a path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, worker = free_port(), Path(__file__).parent / worker
    processes = []
    for rank in range(world):
        with mock.patch.dict(os.environ, environment(rank, world, port)):
            processes.append(start(worker, folder, *args, log=folder / f"{rank}.log"))
    return processes


def end(processes, folder, timeout=120.0, only=None):
    """Wait for ranks, or for `only` the first of them, and end the others.

    Returns:
        For each rank what it wrote, {} if nothing, its exit code as "exit", and its output as "log".
    """
    until = time.monotonic() + timeout
    try:
        for process in processes[:only]:
            process.join(max(0.0, until - time.monotonic()))
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    return [read(folder, rank) | {"exit": code} for rank, code in enumerate(codes)]


def launched(worker, folder, *args, world=2, timeout=120.0, only=None):
    return end(begin(worker, folder, *args, world=world), folder, timeout, only)


def forked(script, folder, *args, world=None, timeout=300.0):
    """Run `script *args` alone, or in ranks with the environment of torchrun; as `launched`."""
    port, processes = free_port(), []
    for rank in range(world or 1):
        of_rank = environment(rank, world, port) | {"TORCHELASTIC_RUN_ID": "none"} if world else {}
        with mock.patch.dict(os.environ, of_rank):
            processes.append(start(script, *args, log=folder / f"{rank}.log"))
    return end(processes, folder, timeout)


def by_torchrun(worker, folder, *args, world=2, timeout=180):
    """As `launched`, by torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    command += [str(Path(__file__).parent / worker), str(folder), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "torchrun.log", "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    output = (folder / "torchrun.log").read_text(errors="replace")
    return [read(folder, rank) | {"exit": code, "log": output} for rank in range(world)]


def read(folder, rank):
    file, log = folder / f"{rank}.json", folder / f"{rank}.log"
    found = json.loads(file.read_text()) if file.exists() else {}
    return found | ({"log": log.read_text(errors="replace")} if log.exists() else {})


def shared(tmp_path_factory, name, make, timeout=300):
    """What `make(folder)` returns, made once for all workers of the test session."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = base / f"shared-{name}", base / f"shared-{name}.json"
    try:
        os.close(os.open(base / f"shared-{name}.lock", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        until = time.monotonic() + timeout
        while not result.exists() and time.monotonic() < until:
            time.sleep(0.1)
    else:
        made = {}
        try:
            made = make(folder)
        finally:
            result.with_suffix(".new").write_text(json.dumps(made))
            result.with_suffix(".new").replace(result)
    return json.loads(result.read_text())


# ---- in the ranks


class OwnTime:
    """Clock that counts what this thread computes, and its lags, which take no time.

    Neither the load of the machine nor waits for other ranks count, so that a lag is found on any machine.
    """

    def __init__(self):
        self._lags = 0.0

    def __call__(self):
        return time.thread_time() + self._lags

    def lag(self, seconds):
        self._lags += seconds

    @contextlib.contextmanager
    def patched(self):
        """Have `StepTimer` and `Diagnose` read this clock in a block."""
        with (
            mock.patch("hookcb.core.clock.perf_counter", self),
            mock.patch("hookcb.profiling.steps.timer.perf_counter", self),
        ):
            yield


def join_group(timeout=TIMEOUT):
    """Join the group of all ranks; returns the rank and their number."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return distributed.get_rank(), distributed.get_world_size()


def answer(folder, facts):
    """Write what this rank has seen, whole."""
    file = Path(folder) / f"{distributed.get_rank()}.json"
    file.with_suffix(".new").write_text(json.dumps(facts, default=str))
    file.with_suffix(".new").replace(file)


def run_cases(cases, folder):
    """Call the functions one after another; write what they return or raise by name."""
    facts = {}
    for name, case in cases.items():
        began = time.perf_counter()
        try:
            outcome = {"result": case()}
        except Exception as error:
            outcome = {"error": type(error).__name__, "text": str(error)}
        facts[name] = outcome | {"seconds": round(time.perf_counter() - began, 2)}
        answer(folder, facts)


def data(n, seed=0):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def small_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make_learner(
    n_valid=51, model=None, opt=torch.optim.SGD, lr=0.1, wrap=DistributedDataParallel, n_train=None
):
    """A learner of a classifier, by default six batches an epoch; samplers repeat samples to validate."""
    torch.manual_seed(0)
    model = wrap(model or small_model())
    train, valid = data(n_train or 24 * distributed.get_world_size()), data(n_valid, 1)
    loaders = (
        DataLoader(train, 4, sampler=DistributedSampler(train)),
        DataLoader(valid, 10, sampler=DistributedSampler(valid, shuffle=False)),
    )
    return Learner(loaders, model, cross_entropy, opt, lr=lr, metrics=accuracy)


def digest(model):
    return hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:8]
