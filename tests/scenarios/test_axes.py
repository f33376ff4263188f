"""Figures are drawn on axes of the user's own, too."""

import inspect

import hookcb


def test_all_that_draws_on_one_axes_takes_it():
    classes = [x for name in hookcb.__all__ if isinstance(x := getattr(hookcb, name), type)]
    drawing = {
        f"{kind.__name__}.{name}": inspect.signature(method).parameters
        for kind in classes
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name.startswith("plot") or "Figure" in str(inspect.signature(method).return_annotation)
    }
    assert len(drawing) > 10
    without = {name for name, given in drawing.items() if not given.keys() & {"ax", "axs"}}
    assert not without
    given = [parameter for found in drawing.values() for parameter in found.values()]
    assert all(x.default is None for x in given if x.name in ("ax", "axs"))
