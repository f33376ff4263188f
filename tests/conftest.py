"""For all tests: what makes them quicker, and what each must leave as it was."""

import gc
import os
import signal
import sys
import traceback
from types import SimpleNamespace

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays to the end: no collection of garbage looks at it, neither now nor in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Say so where nothing is left to run: xdist does not tell of deselected tests."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.option.markexpr == "not slow":
        terminalreporter.write_line("slow tests are deselected; -m slow runs them, -m '' runs all")


@pytest.fixture(autouse=True, scope="session")
def quick_torch():
    """Tiny layers are slow on many threads; and no notes are taken for messages that nobody reads here.

    `torch.manual_seed` notes the stack, which is deep in a test, for each kind of accelerator that was not
    used yet. Dynamo looks up where in it each break of a graph is, and times each graph's guards, for which
    it empties the CPU's caches.
    """
    import torch  # not above: xdist's controller, which runs no test, imports this file too

    n = torch.get_num_threads()
    torch.set_num_threads(1)
    no_stack = SimpleNamespace(**{**vars(traceback), "format_stack": list})
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cuda", "mtia", "xpu"):
            patch.setattr(f"torch.{kind}.traceback", no_stack, raising=False)
        if "torch._dynamo" in sys.modules:  # else it takes seconds to import
            extract, profile = "_extract_stack_with_positions", "profile_guard_manager"
            patch.setattr(f"torch._dynamo.exc.{extract}", traceback.StackSummary, raising=False)
            patch.setattr(f"torch._dynamo.guards.{profile}", lambda *args: 0.0, raising=False)
        yield
    torch.set_num_threads(n)


@pytest.fixture(autouse=True, scope="session")
def no_power_cuts():
    """To wait for the disk takes milliseconds per file, and changes nothing that a test can see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses a closed file too
        yield


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet."""
    from torch import _dynamo

    _dynamo.reset()
    yield
    _dynamo.reset()


@pytest.fixture(autouse=True)
def nothing_is_left_on():
    """Hooks that are no model's, and modes."""
    import torch
    from torch.optim import optimizer as of_all

    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not of_all._global_optimizer_pre_hooks
    assert not of_all._global_optimizer_post_hooks
    assert not torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()
