"""Fixtures for all tests: some make them faster, others check that they leave nothing behind."""

import gc
import os
import random
import signal
import sys
import traceback
import warnings
from types import SimpleNamespace

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

# warnings are errors in tests and their imports, but not in plug-ins that happen to be installed
ERRORS = pytest.mark.filterwarnings(
    "error",
    "ignore:Guards may run slower:RuntimeWarning",  # Python 3.13.0, under torch.compile
    # what torch 2.11 and newer say of TorchScript, their own imports too, and once in a process of profiles
    # and sparse tensors
    "ignore:.torch.jit.[a-z_]+. is deprecated",
    "ignore:Warning. Profiler clears events:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)
N_MODULES = pytest.StashKey[int]()  # that were loaded when garbage collection last exempted them


def pytest_configure(config):
    """Hide GPUs from tests that are not about them, and keep bytecode in pytest's cache.

    So tests are the same on every machine. Where Python has been told not to keep bytecode beside sources,
    each process that tests start would compile the modules of torch again, for seconds.
    """
    if "cuda" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        folder = str(config.cache.mkdir("bytecode"))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempt imported objects, which live to the end, from garbage collection now and in all tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


OF_TORCH_2_6 = {  # how a test fails, and why it is skipped
    "'Stream' object has no attribute 'record_event'": "torch 2.6 has no FSDP2 on CPUs",
    "is_(ListVariable(length=2), TupleVariable": "torch 2.6 compiles no nest of containers in one graph",
    "'NoneType' object has no attribute 'device'": "torch 2.6 has no default device after it was unset",
    "FSDP+TP sharding does not support uneven sharding": "FSDP2 of torch 2.6 shards no DTensor unevenly",
}


def fault_of_torch_2_6(error):
    """Why a test fails, or all that fails in it, if it is for a documented fault of torch 2.6; else empty."""
    if isinstance(error, BaseExceptionGroup):
        faults = list(map(fault_of_torch_2_6, error.exceptions))
        return faults[0] if all(faults) else ""
    text = str(error).replace("\\", "")  # quoted in that of an assertion
    fault = next((fault for said, fault in OF_TORCH_2_6.items() if said in text), "")
    if not fault:
        return ""
    from tests.ranks.support import HAS_FSDP2

    return "" if HAS_FSDP2 else fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that fails for a documented fault of torch 2.6."""
    report = yield
    if report.failed and (reason := fault_of_torch_2_6(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Turn warnings into errors while a file is imported."""
    with warnings.catch_warnings(action="error"):
        return (yield)


def pytest_itemcollected(item):
    """Turn warnings into errors in a test; its own filters come later, so they take precedence."""
    item.add_marker(ERRORS, append=False)


def pytest_runtest_setup(item):
    """Skip tests of a GPU without one, and exempt what the tests before have imported, too.

    With dynamo and sklearn a collection takes 0.1 s.
    """
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and `-m cuda`, as other tests see none")
    if len(sys.modules) > item.config.stash.get(N_MODULES, 0) + 50:
        item.config.stash[N_MODULES] = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Report if no test is left to run: xdist does not mention deselected tests."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.option.markexpr == "not slow":
        terminalreporter.write_line("slow tests are deselected; -m slow runs them, -m '' runs all")


@pytest.fixture(autouse=True, scope="session")
def quick_torch():
    """Use one thread, because tiny layers are slow on many, and skip debug information that no test reads.

    `torch.manual_seed` formats the stack, which is deep in a test, for each type of accelerator not yet
    used. Dynamo looks up the position of each graph break in the stack, and times the guards of each graph,
    for which it empties the CPU's caches.
    """
    import torch  # not at the top: xdist's controller, which runs no tests, imports this file, too

    n = torch.get_num_threads()
    torch.set_num_threads(1)
    no_stack = SimpleNamespace(**{**vars(traceback), "format_stack": list})
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cuda", "mtia", "xpu"):
            patch.setattr(f"torch.{kind}.traceback", no_stack, raising=False)
        if "torch._dynamo" in sys.modules:  # otherwise it takes seconds to import
            extract, profile = "_extract_stack_with_positions", "profile_guard_manager"
            patch.setattr(f"torch._dynamo.exc.{extract}", traceback.StackSummary, raising=False)
            patch.setattr(f"torch._dynamo.guards.{profile}", lambda *args: 0.0, raising=False)
        yield
    torch.set_num_threads(n)


@pytest.fixture(autouse=True, scope="session")
def no_power_cuts():
    """Skip waiting for the disk: it takes milliseconds per file, and tests cannot see the difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # also rejects a closed file
        yield


@pytest.fixture
def fresh_dynamo():
    """Dynamo's state is reset before and after the test."""
    from torch import _dynamo

    _dynamo.reset()
    yield
    _dynamo.reset()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Begin each test with the same random numbers, whatever ran before it in this process."""
    import torch

    torch.default_generator.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left_on():
    """Check that no global hooks or modes are left on."""
    import torch
    from torch.optim import optimizer as of_all

    yield
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in torch 2.6
    assert top is None or top(True) is None
    assert not of_all._global_optimizer_pre_hooks
    assert not of_all._global_optimizer_post_hooks
    assert not torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()


@pytest.fixture
def nothing_compiled(monkeypatch):
    """As in a process of its own, whatever other tests have compiled."""
    monkeypatch.setattr("hookcb.hooks.modules.compile_counts", lambda kind: {})
