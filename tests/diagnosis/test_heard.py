"""What a program calls of torch is heard once for all who listen, and torch is as it was afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from hookcb.diagnosis.heard import EARS, Ear, heard, listen

REAL = nn.Module.load_state_dict


@pytest.fixture
def kind() -> Iterator[type[Ear]]:
    class Loads(Ear):
        calls = ((nn.Module, "load_state_dict", "observe"),)
        fails = False

        def __init__(self) -> None:
            self.n = 0

        def observe(self, m: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
            if self.fails:
                raise ValueError("a bug")
            yield
            self.n += 1

    yield Loads
    EARS.remove(Loads)


def load() -> None:
    model = nn.Linear(2, 2)
    model.load_state_dict(model.state_dict())


def test_each_kind_is_found_by_itself(kind: type[Ear]) -> None:
    assert kind in EARS


def test_two_who_listen_share_what_was_heard_and_the_last_leaves_torch_as_it_was(kind: Any) -> None:
    first = listen([kind, kind], from_start=True)
    load()
    second = listen([kind])
    load()
    assert heard(kind).n == 2
    assert heard(kind).from_start
    first()
    first()
    load()
    assert heard(kind).n == 3
    second()
    assert nn.Module.load_state_dict is REAL
    assert heard(kind).n == 0


def test_an_error_in_it_is_kept_and_not_raised(kind: Any) -> None:
    end = listen([kind])
    try:
        heard(kind).fails = True
        load()
        assert isinstance(heard(kind).failure, ValueError)
    finally:
        end()


def test_a_fit_costs_the_faults_that_read_it_if_it_fails(kind: Any) -> None:
    from hookcb.diagnosis.dispatcher import Dispatcher
    from hookcb.diagnosis.fault import Measurement
    from hookcb.diagnosis.frame import Frame
    from hookcb.diagnosis.run import Partial, Run

    class Reads(Measurement):
        hears = (kind,)

    dispatcher = Dispatcher(Run(), [Reads], 0.0)
    dispatcher.begin()
    assert nn.Module.load_state_dict is not REAL
    heard(kind).fails = True
    load()
    dispatcher.told(Frame())
    assert isinstance(dispatcher.run.reasons["Reads"], Partial)
    dispatcher.close()
    assert nn.Module.load_state_dict is REAL


def test_nothing_is_heard_for_parts_that_are_done(kind: Any) -> None:
    from hookcb.diagnosis.dispatcher import Dispatcher
    from hookcb.diagnosis.fault import Measurement
    from hookcb.diagnosis.run import Run

    class Brief(Measurement):
        hears = (kind,)

        def on_batch_end(self, run: Run) -> None:
            self.done = run.n_batches > 1

    dispatcher = Dispatcher(Run(looking=True), [Brief], 0.0)
    dispatcher.begin()
    dispatcher.end_batch()
    assert nn.Module.load_state_dict is not REAL
    dispatcher.end_batch()
    assert nn.Module.load_state_dict is REAL
    dispatcher.close()
