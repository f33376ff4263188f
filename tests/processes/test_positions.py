"""Positions of code that is in progress: what it does, where, and whether it may take long."""

import os
import sys
import threading
from contextlib import contextmanager

import torch
from torch import nn

from hookcb.core.whose import OURS, TORCH, frames_of
from hookcb.processes.positions import (
    Call,
    Position,
    collective_in,
    describe,
    doing_of,
    excuse_of,
    position_in,
)
from tests.support import in_turn

USER = Call("/home/me/train.py", "train")


def call(file, function="f"):
    return Call(TORCH + file.replace("/", os.sep), function)


BACKWARD = call("autograd/graph.py", "_engine_run_backward")
FORWARD = call("nn/modules/module.py", "_wrapped_call_impl")
STEP = call("optim/optimizer.py", "wrapper")
LOADER = call("utils/data/dataloader.py", "__next__")


@in_turn(
    ("calls", "doing"),
    [
        ([USER], ""),
        ([BACKWARD, USER], "in the backward"),
        ([FORWARD, USER], "in the forward"),
        ([USER, FORWARD, BACKWARD, USER], "in the backward"),  # a checkpointed part is computed again
        ([STEP, USER], "in the optimizer's step"),
        ([BACKWARD, USER, STEP, USER], "in the backward"),  # of a closure
        ([LOADER, USER], "in the loader"),
        ([Call("/home/me/optimizer.py", "wrapper"), USER], ""),
        ([call("autograd/graph.py", "register_hook"), USER], ""),
    ],
)
def test_the_stage_is_told_by_the_calls_in_progress(calls, doing):
    assert doing_of(calls) == doing


@in_turn(
    ("calls", "name"),
    [
        ([], ""),
        (
            [call("distributed/distributed_c10d.py", "all_reduce"), call("distributed/c10d_logger.py")],
            "all_reduce",
        ),
        (
            [
                call("distributed/distributed_c10d.py", "all_gather"),
                call("distributed/distributed_c10d.py", "all_gather_object"),
            ],
            "all_gather_object",
        ),
        ([call("distributed/distributed_c10d.py", "_new_group_with_tag")], ""),
        ([call("distributed/fsdp/api.py", "all_reduce")], ""),
        ([call("nn/parallel/distributed.py", "_pre_forward")], "DistributedDataParallel"),
        ([Call(OURS + os.path.join("processes", "exchange.py"), "wait")], "a collective of hookcb"),
        ([USER, call("nn/parallel/distributed.py", "_run_ddp_forward")], ""),
    ],
)
def test_a_collective_is_the_one_that_the_user_has_called(calls, name):
    assert collective_in(calls) == name


@in_turn(
    ("calls", "excuse"),
    [
        ([USER], ""),
        ([call("_dynamo/convert_frame.py"), USER], "it compiles"),
        ([call("_dynamo/eval_frame.py"), USER], ""),  # compiled code runs
        ([call("_inductor/compile_fx.py"), BACKWARD, USER], "it compiles"),
        ([call("utils/cpp_extension.py"), USER], "it compiles"),
        ([call("serialization.py", "save"), USER], "it reads or writes a checkpoint"),
        ([call("distributed/checkpoint/state_dict_saver.py"), USER], "it reads or writes a checkpoint"),
        (
            [Call("/usr/lib/python3/site-packages/safetensors/torch.py", "save"), USER],
            "it reads or writes a checkpoint",
        ),
        ([call("distributed/distributed_c10d.py", "barrier"), USER], ""),
        ([Call("/usr/lib/python3/pdb.py", "interaction"), USER], "it is being debugged"),
        ([BACKWARD, USER], ""),
    ],
)
def test_what_may_take_long_is_told_by_the_files(calls, excuse):
    assert excuse_of(calls) == excuse


class Waits(nn.Module):
    """Waits in its forward, until `event`."""

    def __init__(self, event):
        super().__init__()
        self.event = event

    def forward(self, x):
        self.event.wait(10)  # here
        return x


@contextmanager
def running(act, event):
    """Frames of a thread that has called `act`, which waits for `event`."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        while not (frames := list(frames_of(sys._current_frames()[thread.ident], bool))) or not any(
            x.f_code.co_name == "wait" for x in frames
        ):
            pass
        yield frames
    finally:
        event.set()
        thread.join()


def test_the_line_and_the_module_are_those_of_the_innermost_code_of_the_user():
    event = threading.Event()
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Waits(event)))
    names = {id(m): name for name, m in net.named_modules()}
    with running(lambda: net(torch.ones(1, 2)), event) as frames:
        found = position_in(frames, names)
    assert found.place.startswith(os.path.join("tests", "processes", "test_positions.py:"))
    assert (found.code, found.module) == ("self.event.wait(10)  # here", "1.0")
    assert (found.doing, found.call, found.excuse) == ("in the forward", "", "")


def test_a_user_who_is_asked_has_time():
    def ask(input):
        return input("go on? ")

    event = threading.Event()
    with running(lambda: ask(lambda text: event.wait(10)), event) as frames:
        assert position_in(frames, {}).excuse == ""  # `input` is a variable
    assert excuse_of([USER], 'input("go on? ")') == "it waits for an input"


A = {"place": "train.py:3", "code": "loss.backward()", "doing": "in the backward"}


@in_turn(
    ("positions", "text"),
    [
        (
            [Position(0, batch=3, **A), Position(1, batch=3, place="train.py:9", code="wait()")],
            "rank 1 is at train.py:9, `wait()`, after 3 batches; "
            "rank 0 waits at train.py:3, `loss.backward()`, in the backward of batch 3",
        ),
        (
            [Position(r, batch=3, **A) for r in (0, 2)]
            + [Position(1, batch=3, place="a.py:1", call="barrier")],
            "rank 1 waits in barrier at a.py:1, after 3 batches; "
            "ranks 0, 2 wait at train.py:3, `loss.backward()`, in the backward of batch 3",
        ),
        (
            [Position(0, batch=3, **A)],
            "nothing is known of rank 1; "
            "rank 0 waits at train.py:3, `loss.backward()`, in the backward of batch 3",
        ),
        (
            [
                Position(0, batch=5),
                Position(1, end="raised ValueError: x", batch=5, place="a.py:1", module="0.1"),
            ],
            "rank 1 raised ValueError: x at a.py:1, after 5 batches, in layer 0.1; "
            "rank 0 was last seen after 5 batches",
        ),
        (
            [Position(0, end="was ended by SIGTERM", batch=5, **A), Position(1, batch=5)],
            "rank 1 was last seen after 5 batches; rank 0 was ended by SIGTERM at train.py:3, "
            "`loss.backward()`, in the backward of batch 5",
        ),
        (
            [
                Position(0, "a", place="a.py:1", excuse="it compiles"),
                Position(1, "b", end="has ended its training"),
            ],
            "rank 0 (a) is at a.py:1, after 0 batches (it compiles); "
            "rank 1 (b) has ended its training, after 0 batches",
        ),
    ],
)
def test_ranks_that_differ_come_first(positions, text):
    n = max(2, len(positions))
    assert describe(positions, range(n)) == text


def test_many_places_are_counted():
    text = describe([Position(r, place=f"a.py:{r}") for r in range(9)], range(9))
    assert text.count("is at") == 4
    assert text.endswith("; 5 other ranks are at 5 other places")
