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
        fault(code, headline="", site=site, **about)(kind)  # type: ignore[arg-type]
        return function

    return register
