"""hookcb.hooks.compiled: what stands before the call of a module that was compiled in place."""

import pytest
from torch import nn

from hookcb.hooks.compiled import CompiledTap


def compiled_in_place(own):
    model = nn.Linear(1, 1)
    model._compiled_call_impl = own
    return model


def tap(model, log, **options):
    seen = [lambda *args, name=name: log.append((name, *args)) for name in ("begins", "ends", "gives")]
    return CompiledTap(model, *seen, **options)


def test_it_is_called_around_the_forward():
    log = []
    model = compiled_in_place(lambda x, scale: x * scale)
    tap(model, log)
    assert model(3, scale=2) == 6
    assert log == [("begins", (3,), {"scale": 2}), ("gives", 6), ("ends", 6)]


def test_of_a_forward_that_raises_only_its_end_is_told():
    log = []
    model = compiled_in_place(lambda x: x / 0)
    tap(model, log)
    with pytest.raises(ZeroDivisionError):
        model(1)
    assert log == [("begins", (1,), {}), ("ends", None)]


def test_nothing_is_told_while_the_gate_is_closed():
    log = []
    model = compiled_in_place(abs)
    tap(model, log, gate=lambda: False)
    assert model(-1) == 1
    assert not log


@pytest.mark.parametrize("order", [1, -1])
def test_several_are_removed_in_any_order(order):
    log = []
    model = compiled_in_place(abs)
    first, second = [tap(model, log), tap(model, log)][::order]
    first.remove()
    model(-1)
    assert [name for name, *_ in log] == ["begins", "gives", "ends"]
    second.remove()
    assert model._compiled_call_impl is abs
