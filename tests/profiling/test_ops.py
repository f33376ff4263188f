"""Operators are read from the events of torch's profiler."""

from types import SimpleNamespace

from hookcb.profiling.ops import is_python_function
from tests.support import in_turn


@in_turn(
    ("name", "is_python"),
    [
        ("torch/nn/modules/module.py(1735): _wrapped_call_impl", True),
        ("<built-in method relu of type object>", True),
        ("nn.Module: Linear_0", True),
        ("aten::addmm", False),
        ("Optimizer.step#SGD.step", False),
        ("[memory]", False),
    ],
)
def test_without_a_word_of_torch_the_name_tells_python_functions(name, is_python):
    assert is_python_function(SimpleNamespace(name=lambda: name)) is is_python
    told = SimpleNamespace(name=lambda: name, is_python_function=lambda: not is_python)
    assert is_python_function(told) is not is_python
