"""The script for the host counts operations and calls for each layer, and launches that it replaces."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def host(monkeypatch):
    before, n_threads = set(sys.modules), torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = import_module("host")
    monkeypatch.setattr(module, "DEPTHS", (2, 4))
    monkeypatch.setattr(module, "FIRST", 2)
    monkeypatch.setattr(module, "STEPS", 4)
    yield module
    torch.set_num_threads(n_threads)
    for name in {"host", "compiled", "watched", "workloads"} - before:
        del sys.modules[name]


def test_what_is_added_is_divided_between_layers_and_steps(host):
    plain = {2: {"us": 10.0, "calls": 5, "operations": 3, "launches": 0}} | {
        4: {"us": 14.0, "calls": 9, "operations": 5, "launches": 0}
    }
    other = {
        depth: {
            "us": x["us"] + 3 * depth + 7,
            "calls": x["calls"],
            "operations": 8 * depth,
            "launches": depth,
        }
        for depth, x in plain.items()
    }
    found = host.added(other, plain)
    assert (found["µs/layer"], found["µs/step"]) == (3, 7)
    assert (found["calls/layer"], found["calls/step"]) == (0, 0)
    assert (found["ops/layer"], found["ops/step"]) == (7, -1)
    assert (found["launches/layer"], found["launches/step"]) == (1, 0)


def test_every_contestant_has_its_counts(host, monkeypatch, capsys):
    monkeypatch.setattr(host, "HOOKED", ("ActivationStats()",))
    host.main(["--only", "hooks", "--turns", "1"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert "calls/layer" in head
    assert rows[0].split()[:5] == ["torch's", "hooks", "that", "do", "nothing"]
    assert rows[1].split()[0] == "ActivationStats()"


def test_a_hook_that_does_nothing_adds_no_operation_but_calls(host, monkeypatch):
    monkeypatch.setattr(host, "HOOKED", ())
    rows = host.hooks(turns=1)
    nothing = rows[host.NOTHING]
    assert nothing["ops/layer"] == nothing["launches/layer"] == 0
    assert nothing["calls/layer"] > 0
    assert nothing["x of nothing"] == 1


def test_launches_are_counted_and_replaced_by_nothing(host, monkeypatch):
    class Kernel:
        def launch(self, key, programs):
            raise AssertionError("launched")

    module, room = ModuleType("hookcb.kernel_of_a_test"), ModuleType("hookcb.room_of_a_test")
    module.Kernel, room.works_on = Kernel, lambda device: False
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, room.__name__, room)
    monkeypatch.setattr(host, "LAUNCHED", (module.__name__, "Kernel", "launch"))
    with host.as_on_a_gpu() as launches:
        Kernel().launch("a key", 3)
        assert room.works_on(torch.device("cpu"))
    assert launches == ["a key"]
    assert not room.works_on(torch.device("cpu"))
    with pytest.raises(AssertionError, match="launched"):
        Kernel().launch("a key", 3)
