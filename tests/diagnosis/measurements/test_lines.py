"""Lines of a loop are sampled from a thread, and nothing stays of it."""

import sys
import threading
import time
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hookcb.core.batch import map_tensors
from hookcb.diagnosis.measurements import lines as module
from hookcb.diagnosis.measurements.lines import MIN_SAMPLES, LineSamples, Source
from tests.core.support import without_lines
from tests.support import Clock, in_turn

SWITCH = sys.getswitchinterval()
LATE = "lines.sample(seconds, delay) # in a call, so an earlier line"


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert sys.getswitchinterval() == SWITCH
    assert not [thread for thread in threading.enumerate() if thread.name == "hookcb-lines"]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.sample_lines(monkeypatch)
    return clock


def sampled():
    lines = LineSamples(lambda: True)
    lines.start()
    return lines


def by_line(lines):
    """Seconds in a batch by the text of the line."""
    return {name.partition(", ")[2]: round(x / 1000, 6) for name, x in lines.seconds().items()}


def test_each_line_has_its_time_in_a_mean_batch(clock):
    lines = sampled()
    for step in range(20):
        lines.note_step()
        clock.sleep()
        clock.sleep(2000)
        if step % 2:
            clock.sleep(500)
        lines.end_batch(is_counted=True)
    assert by_line(lines) == {"clock.sleep()": 1, "clock.sleep(2000)": 2, "clock.sleep(500)": 0.25}
    assert lines.n == 20 * 20 + 10 * 10
    assert [name.partition(", ")[2] for name in lines.steps] == ["lines.note_step()"]


def test_batches_that_do_not_count_are_left_out(clock):
    lines = sampled()
    for step in range(40):
        lines.note_step()
        clock.sleep(9000 if step % 2 else 1000)
        lines.end_batch(is_counted=not step % 2)
    assert list(by_line(lines).values()) == [1]


def test_few_samples_say_nothing(clock):
    lines = sampled()
    for _ in range(MIN_SAMPLES // 10 - 1):
        lines.note_step()
        clock.sleep()
        lines.end_batch(is_counted=True)
    assert lines.seconds() == {}


def in_a_loop(clock, batches, body=lambda: None):
    lines = sampled()
    for _ in batches:
        lines.note_step()
        body()
        lines.end_batch(is_counted=True)
    return lines


def generate(clock, n=20):
    for i in range(n):
        clock.sleep()
        yield i


def test_a_fetch_is_the_for_statement_around_a_step(clock):
    lines = in_a_loop(clock, generate(clock))
    assert by_line(lines) == {"for _ in batches": 0.95}  # the loop was not known in the first
    assert lines.fetches == set(lines.seconds())


def test_a_for_statement_in_the_body_is_no_fetch(clock):
    lines = sampled()
    for _ in range(20):
        lines.note_step()
        for _ in generate(clock, 3):
            pass
        lines.end_batch(is_counted=True)
    assert by_line(lines) == {"for _ in generate(clock, 3)": 3}
    assert [name.partition(", ")[2] for name in lines.fetches] == ["for _ in range(20)"]


def test_what_lbfgs_computes_between_its_evaluations_is_no_fetch():
    lines = LineSamples(lambda: True)
    lines.is_running = True
    p = torch.ones(1, requires_grad=True)
    opt = torch.optim.LBFGS([p], tolerance_change=0)
    opt._add_grad = Mock(side_effect=map(lines.sample, repeat(1.0)))  # in place of what it computes there

    def closure():
        lines.note_step()
        lines.end_batch(is_counted=True)
        p.grad = torch.ones(1)
        return p.sum()

    # the place of a loop in one line is also that of its step
    for _ in range(5): opt.step(closure)  # fmt: skip  # noqa: E701
    (place,) = lines.seconds()
    assert "for _ in range(5): opt.step(closure)" in place
    assert place in lines.steps
    assert place not in lines.fetches


def test_a_call_of_next_is_a_fetch(clock):
    batches, lines = generate(clock), sampled()
    for _ in range(20):
        next(batches)
        lines.note_step()
        lines.end_batch(is_counted=True)
    assert by_line(lines) == {"next(batches)": 0.95}
    assert lines.fetches > set(lines.seconds())


def test_a_statement_of_several_lines_is_one_place(clock):
    lines = sampled()
    for _ in range(20):
        lines.note_step()
        print(
            clock.sleep(),
            clock.sleep(),
            end="",
            file=SimpleNamespace(write=lambda text: None),
        )
        lines.end_batch(is_counted=True)
    assert by_line(lines) == {"print(": 2}


def test_the_function_that_a_trainer_calls_is_named(clock):
    lines = sampled()

    def training_step(x):
        lines.note_step()
        return x

    def on_batch_end(x):
        clock.sleep()
        return x

    for _ in range(20):
        map_tensors(training_step, [torch.ones(1)])  # a function of this package
        map_tensors(on_batch_end, [torch.ones(1)])
        lines.end_batch(is_counted=True)
    assert by_line(lines) == {"map_tensors(on_batch_end, [torch.ones(1)])": 1}

    def trainer(x):
        return map_tensors(on_batch_end, map_tensors(training_step, x))

    lines = sampled()
    for _ in range(20):
        map_tensors(lambda x: trainer([x])[0], [torch.ones(1)])
        lines.end_batch(is_counted=True)
    ((name, seconds),) = by_line(lines).items()
    assert name.endswith(("on_batch_end()", "map_tensors(on_batch_end, map_tensors(training_step, x))"))
    assert seconds == 1


def test_a_line_that_calls_a_function_has_its_time(clock):
    work = partial(clock.sleep, 5000)

    def step():
        work()

    assert by_line(in_a_loop(clock, range(20), step)) == {"body()": 5}


def test_samples_that_come_late_are_of_python_code():
    lines = LineSamples(lambda: True)
    lines.is_running = True
    for _ in range(50):
        lines.note_step()
        for delay, seconds in ((0.0, 3.0), (5e-4, 1.0)):
            lines.sample(seconds, delay)  # in a call, so an earlier line held it up, or the machine
        lines.end_batch(is_counted=True)
    own = LATE, "lines.note_step()"
    assert by_line(lines) == {LATE: 0.004}
    ((code, line),) = lines._seconds["earlier"]
    before = code, line - 2
    lines._seconds["python"][before] = 25.0  # as if it had been interrupted there, too
    assert by_line(lines) == dict(zip(own, (0.003, 0.0015), strict=True))
    lines._seconds["python"][before] = 2.5  # of what is not known, no more than twice as much
    assert by_line(lines) == dict(zip(own, (0.0039, 0.00015), strict=True))
    del lines._seconds["python"][before]
    del lines._seconds["waits"][code, line]  # as a line that never waits
    assert by_line(lines) == {LATE: 0.001}
    lines._seconds["earlier"][before] = 50.0
    assert by_line(lines) == dict(zip(own, (0.001, 0.001), strict=True))


def test_samples_that_come_very_late_are_of_their_line():
    lines = LineSamples(lambda: True)
    lines.is_running = True
    for _ in range(50):
        lines.note_step()
        for delay, seconds in ((0.0, 1.0), (5e-3, 2.0)):
            lines.sample(seconds, delay)
        lines.end_batch(is_counted=True)
    ((code, line),) = lines._seconds["late"]
    lines._seconds["python"][code, line - 2] = 25.0  # a Python line cannot have held them up for so long
    assert sorted(by_line(lines).values()) == [0.0005, 0.003]


@pytest.mark.slow
def test_a_thread_sees_lines_that_wait_and_python_code():
    lines, ends = LineSamples(lambda: True), time.monotonic() + 10
    lines.note_step()
    lines.start()
    while time.monotonic() < ends and lines.n < 150:
        sum(i % 7 for i in range(100_000))
        time.sleep(3e-3)
        lines.end_batch(is_counted=True)
    lines.close()
    found = by_line(lines)
    assert found["time.sleep(3e-3)"] > 0
    assert found["sum(i % 7 for i in range(100_000))"] > 0


def test_an_instruction_without_a_line_is_sampled_as_the_one_before():
    lines = LineSamples(lambda: True)
    lines.is_running = True

    @without_lines
    def loop():
        for _ in range(50):
            lines.note_step()
            lines.sample(1.0)
            lines.end_batch(is_counted=True)

    loop()
    (place,) = lines.seconds()
    assert place in lines.steps


def test_a_thread_that_fails_ends_and_keeps_its_error(monkeypatch):
    def fails(*args):
        raise KeyError("odd")

    monkeypatch.setattr(LineSamples, "sample", fails)
    lines = sampled()
    lines._thread.join(30)
    assert repr(lines.failure) == "KeyError('odd')"
    lines.close()


def test_it_samples_only_while_it_is_asked_to():
    lines = LineSamples(lambda: False)
    lines.note_step()
    lines.start()
    lines.start()  # it runs already
    time.sleep(0.05)
    lines.close()
    lines.close()
    lines.end_batch(is_counted=True)
    assert lines.n == 0


def test_threads_switch_as_the_user_has_it_again():
    before = sys.getswitchinterval()
    lines = LineSamples(lambda: True)
    lines.start()
    assert sys.getswitchinterval() == pytest.approx(module.SWITCH)
    sys.setswitchinterval(0.02)  # set by the user meanwhile
    lines.close()
    assert sys.getswitchinterval() == pytest.approx(0.02)
    sys.setswitchinterval(before)


SOURCE = """\
for x in read(
    batches,
):
    if x.sum() > 0:
        train(
            x,
            lr=0.1,
        )
    else:
        y = next(
            others,
        )

@decorated
def own():
    for k in range(3):
        work(k)
""".splitlines(keepends=True)


@in_turn(
    ("line", "first", "text"),
    [
        (1, 1, "for x in read("),
        (2, 1, "for x in read("),
        (4, 4, "if x.sum() > 0"),
        (5, 5, "train("),
        (7, 5, "train("),
        (11, 10, "y = next("),
        (16, 16, "for k in range(3)"),
        (99, 99, ""),
    ],
)
def test_a_line_belongs_to_the_innermost_statement(line, first, text):
    assert Source(SOURCE).statement(line) == (first, text)


def test_loops_are_found_by_what_is_in_their_body():
    source = Source(SOURCE)
    assert source.loops_around(6) == [1]
    assert source.loops_around(10) == [1]
    assert source.loops_around(17) == [16]
    assert source.loops_around(1) == source.loops_around(15) == []


def test_calls_of_next_are_found_in_all_lines_of_their_statement():
    source = Source(SOURCE)
    assert source.nexts == {10, 11, 12}


def test_the_first_parameter_of_a_module_is_not_fetched():
    source = Source(["x = x.to(next(net.parameters()).device)\n", "x = next(batches())\n", "x = next(it)\n"])
    assert source.nexts == {2, 3}


def test_source_that_cannot_be_read_has_its_lines():
    source = Source(["%matplotlib inline\n", "for x in batches:\n", "    step(next(x))\n"])
    assert source.statement(2) == (2, "for x in batches")
    assert source.loops_around(3) == []
    assert 3 not in source.nexts
    assert Source([]).statement(7) == (7, "")
