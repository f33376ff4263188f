"""Registers checks that are functions, as faults without handlers."""

import inspect
from collections.abc import Callable, Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.run import Run

CheckFunction = Callable[[Run], Iterator[Result]]


def check(code: str, *, site: Site, **about: object) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check; see `Fault` for the arguments."""

    def register(function: CheckFunction) -> CheckFunction:
        def findings(self: Fault, run: Run) -> Iterator[Result]:
            return function(run)

        kind = type(function.__name__, (Fault,), {"findings": findings, "__doc__": inspect.getdoc(function)})
        kind.__module__ = function.__module__
        kind.__name__ = kind.__qualname__ = f"_{function.__name__}_fault"
        function.__globals__[kind.__name__] = kind  # by which pickle finds it
        fault(code, headline="", site=site, **about)(kind)  # type: ignore[arg-type]
        return function

    return register
