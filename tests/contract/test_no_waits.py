"""No callback waits for a GPU during a batch, except those that say so."""

import json
import traceback
import warnings

import pytest
import torch
from torch.utils import backend_registration

from tests.contract import pretend_worker, support
from tests.support import notice_waits, start

WAIT = {"DetectAnomaly", "Log", "NanTrace", "TerminateOnNaN"}  # as their docstrings say, or autograd's
OPTIONS_THAT_WAIT = {
    "MixedPrecision-dtype",  # its GradScaler does
    "Checkpoint-every",  # saves in a batch
    "GradientHealth-every-activations-on_nonfinite",  # must know before the step
}
EACH = dict(support.each())
PLANTED = dict(support.planted())
WARNINGS = warnings.__file__


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs a newer PyTorch",
)
def test_no_callback_waits_for_a_device_that_is_not_there(tmp_path, monkeypatch):
    found, log = tmp_path / "found.json", tmp_path / "log"
    monkeypatch.chdir(tmp_path)
    process = start(pretend_worker.__file__, found, log=log)
    process.join(180)
    assert process.exitcode == 0, log.read_text()[-2000:]
    waited = json.loads(found.read_text())
    assert set(waited) == {*EACH, *PLANTED}
    for name in [name for name in waited if name.startswith("MixedPrecision")]:
        assert "autocast" in waited.pop(name).lower()  # there is none for this device
    assert {name: error for name, error in waited.items() if isinstance(error, str)} == {}
    assert [name for name in PLANTED if not waited.pop(name)] == []
    assert {name.split("-")[0] for name, where in waited.items() if where} == WAIT, waited


@pytest.fixture
def waits():
    """A function that turns noticing on and off; in `found` it has the lines of code that waited.

    Mode "error" would not do: an exception in a probe of Diagnose is caught there.
    """
    found = []

    def strict(is_on):
        notice_waits("warn" if is_on else "default")

    def notice(message, *args, **kwargs):
        if "called a synchronizing" in str(message):
            frames = traceback.extract_stack()[:-1]  # with Python's own, which handle a warning
            found.append(next(f"{x.filename}:{x.lineno}" for x in reversed(frames) if x.filename != WARNINGS))

    strict.found = found
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = notice
        yield strict
    notice_waits("default")


def on_gpu(batch):
    return tuple(x.cuda() for x in batch)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [n for n in EACH if n.split("-")[0] not in WAIT and n not in OPTIONS_THAT_WAIT]
)
def test_no_callback_waits_for_a_gpu(name, waits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.trained(EACH[name](), torch.nn.Module.cuda, on_gpu, waits)
    assert waits.found == []


@pytest.mark.cuda
@pytest.mark.parametrize("name", PLANTED)
def test_a_wait_for_a_gpu_is_noticed(name, waits):
    support.trained(PLANTED[name](), torch.nn.Module.cuda, on_gpu, waits)
    assert waits.found
