"""Tables and reports of ProfilerCallback: right sums, rows and counts, at any width."""

import collections
import copy
import functools
import gc
import random
import re
import time
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hookcb import Callback, Learner, ProfilerCallback
from hookcb.core.text import duration
from tests.hooks import support as zoo
from tests.profiling.support import PHASES, exported, nothing_left, profiled
from tests.support import (
    Net,
    everything,
    fit,
    in_terminal,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    weights,
)

NAP = 0.03  # seconds
SORT_KEYS = ["count", "cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total"]
SORT_KEYS += ["cpu_memory_usage", "self_cpu_memory_usage", "flops"]
HEADERS = {"count": "count", "cpu_time_total": "CPU", "self_cpu_time_total": "self CPU"}
FIELDS = ["name", "type", "depth", "calls", "forward", "forward_self", "backward", "backward_self"]
FIELDS += ["device_forward", "device_forward_self", "device_backward", "device_backward_self", "memory"]
FIELDS += ["output_bytes", "share", "flops", "flops_per_second"]


class Nap(nn.Module):
    def forward(self, x):
        time.sleep(NAP)
        return x * 1


class NapsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(NAP)
        return grad


class LateNap(nn.Module):
    def forward(self, x):
        return NapsBackward.apply(x)


class Sleepy(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        self.block = nn.Sequential(nn.Linear(3, 3), Nap(), nn.Sequential(LateNap(), nn.Linear(3, 3)))

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


class SleepyLoader:
    def __iter__(self):
        for batch in make_batches(3):
            time.sleep(NAP)
            yield batch
        time.sleep(3 * NAP)  # after the last batch, which is in no step


class SleepySGD(torch.optim.SGD):
    def step(self):
        time.sleep(NAP / 2)
        return super().step()

    def zero_grad(self):
        time.sleep(NAP / 2)
        return super().zero_grad()


def sleepy_loss(pred, y):
    time.sleep(NAP)
    return F.mse_loss(pred, y)


def begins(cb):
    cb.starts.append(time.perf_counter())


def calmly(profile, n_naps):
    """A profiler, made again if other programs have made its steps longer than their naps."""
    for _ in range(6):
        if (profiler := profile()).phases().step < 1.3 * n_naps * NAP:
            break
    return profiler


@pytest.fixture(scope="module")
def sleepy():
    """Profiler of a training that sleeps once in each phase, and the time of two steps by the clock."""
    clock = Callback(before_batch=begins, after_batch=lambda cb: time.sleep(NAP))

    def profile():
        torch.manual_seed(0)
        clock.starts = []
        learn = Learner(SleepyLoader(), Sleepy(), sleepy_loss, SleepySGD, lr=0.01)
        return profiled(learn, cbs=[clock], wait=0, warmup=1, active=2)

    profiler = calmly(profile, n_naps=6)
    return profiler, clock.starts[2] - clock.starts[1]


@pytest.fixture(scope="module")
def net():
    """A profiled training of blocks and a layer that is called twice, with everything asked for."""
    torch.manual_seed(0)
    learn = Learner(make_batches(5), Net(), F.mse_loss, torch.optim.SGD, lr=0.01)
    return profiled(learn, profile_memory=True, with_flops=True, record_shapes=True)


def phases(profiler):
    return {row.name: row for row in profiler.phases().rows}


def root(profiler):
    (row,) = [row for row in profiler.layers() if row.depth == 0]
    return row


def children(rows, parent):
    if parent.depth == 0:
        return [row for row in rows if row.depth == 1]
    return [r for r in rows if r.name.startswith(f"{parent.name}.") and r.depth == parent.depth + 1]


def shown_all(profiler):
    return [profiler.layers(), profiler.phases(), profiler.table(), profiler.report()]


# ---- times


def test_sums_of_self_times_are_the_whole(sleepy, net):
    for profiler in (sleepy[0], net):
        rows = list(profiler.layers())
        assert sum(r.forward_self for r in rows) == pytest.approx(root(profiler).forward)
        assert sum(r.backward_self or 0 for r in rows) == pytest.approx(root(profiler).backward)
        for row in rows:
            inside = children(rows, row)
            assert row.forward == pytest.approx(row.forward_self + sum(r.forward for r in inside))
            back = sum(r.backward or 0 for r in inside)
            assert row.backward == pytest.approx(row.backward_self + back)
            assert row.forward_self >= 0
            assert row.backward_self >= 0


def test_the_model_takes_up_the_forward(sleepy):
    profiler, _ = sleepy
    forward = phases(profiler)["forward"].seconds
    assert 0.8 * forward < root(profiler).forward <= forward
    assert root(profiler).backward <= phases(profiler)["backward"].seconds


def test_phases_add_up_to_the_step(sleepy, net):
    for profiler in (sleepy[0], net):
        times = profiler.phases()
        assert [row.name for row in times.rows] == [*PHASES, "other"]
        assert sum(row.seconds for row in times.rows) == pytest.approx(times.step)
        assert sum(row.share for row in times.rows) == pytest.approx(1)
        for row in times.rows:
            assert row.seconds >= 0, row
            assert row.share == pytest.approx(row.seconds / times.step)
    assert phases(sleepy[0])["other"].share < 0.2


def test_a_step_is_as_long_as_the_clock_says(sleepy):
    profiler, took = sleepy
    assert 6 * NAP < profiler.phases().step < 20 * NAP
    assert profiler.phases().step == pytest.approx(took, rel=0.3)


def test_each_phase_has_the_time_that_was_spent_in_it(sleepy):
    profiler, _ = sleepy
    for name in PHASES:
        assert NAP * 0.99 < phases(profiler)[name].seconds < 6 * NAP, name


@pytest.mark.parametrize("order", [-900, 900])
def test_naps_of_callbacks_are_theirs_at_whichever_event(order):
    def nap(cb):
        time.sleep(NAP / 3)

    events = ["before_batch", "after_pred", "after_loss", "before_backward", "after_backward"]
    events += ["before_step", "after_step", "after_batch"]
    sleeper = Callback(**dict.fromkeys(events, nap))
    sleeper.order = order
    profiler = calmly(
        lambda: profiled(make_learner(n_valid=0), cbs=[sleeper], wait=0, warmup=1, active=1), n_naps=8 / 3
    )
    for row in profiler.phases().rows:
        if row.name == "callbacks":
            assert row.seconds > 8 * NAP / 3
        else:
            assert row.seconds < NAP, row


def test_what_comes_between_steps_is_in_none():
    def nap(cb):
        time.sleep(NAP)

    events = [
        "before_epoch",
        "before_train",
        "after_train",
        "before_validate",
        "after_validate",
        "after_epoch",
    ]
    sleeper = Callback(**dict.fromkeys(events, nap))
    learn = Learner((SleepyLoader(), make_batches(1)), make_model(), F.mse_loss, torch.optim.SGD, lr=0.1)
    profiler = calmly(lambda: profiled(learn, 2, cbs=[sleeper], wait=1, warmup=0, active=4), n_naps=1)
    assert profiler.profiled_steps == [1, 2, 3, 4]
    assert NAP < phases(profiler)["data"].seconds < profiler.phases().step < 1.7 * NAP


def test_a_slow_forward_is_in_the_row_of_its_layer(sleepy):
    layers = sleepy[0].layers()
    assert NAP * 0.99 < layers["block.1"].forward_self < 4 * NAP
    for row in layers:
        if row.name != "block.1":
            assert row.forward_self < 0.8 * NAP, row
    for name in ("block", "block.1"):
        assert layers[name].forward >= NAP * 0.99
    assert max(layers, key=lambda row: row.forward_self).name == "block.1"


def test_a_slow_backward_is_in_the_row_of_its_layer(sleepy):
    layers = sleepy[0].layers()
    assert NAP * 0.99 < layers["block.2.0"].backward_self < 4 * NAP
    for row in layers:
        if row.name != "block.2.0":
            assert row.backward_self < 0.8 * NAP, row
    for name in ("block", "block.2", "block.2.0"):
        assert layers[name].backward >= NAP * 0.99


def test_shares_are_of_the_step(sleepy, net):
    for profiler in (sleepy[0], net):
        step = profiler.phases().step
        for row in profiler.layers():
            assert 0 <= row.share <= 1
            assert row.share == pytest.approx((row.forward + (row.backward or 0)) / step, rel=1e-3), row


def test_times_are_those_of_the_exported_trace(net, tmp_path):
    trace = exported(net, tmp_path)

    def a_step(ranges):
        return pytest.approx(sum(r.seconds for r in ranges) / 3, rel=1e-3, abs=1e-7)

    assert len(trace.steps) == 3
    assert net.phases().step == a_step(trace.steps.values())
    for name in PHASES:
        assert phases(net)[name].seconds == a_step(trace.named(name)), name
    nodes = trace.matching("autograd::engine::evaluate_function.*")
    for row in net.layers():
        if row.depth:
            ranges = [r for r in trace.layers("Net") if r.name.startswith(f"{row.name} (")]
            assert row.forward == a_step(ranges), row
            ranges = [r for r in trace.backwards if r.name.startswith(f"backward {row.name} (")]
            assert row.backward == a_step(n for n in nodes if any(r.holds(n) for r in ranges)), row


# ---- rows


def test_rows_are_the_modules_in_their_order_and_depth(net):
    layers = net.layers()
    assert [(row.name, row.type, row.depth) for row in layers][1:] == [
        ("stem", "Linear", 1),
        ("blocks.0", "Sequential", 1),
        ("blocks.0.0", "Linear", 2),
        ("blocks.0.1", "ReLU", 2),
        ("blocks.1", "Sequential", 1),
        ("blocks.1.0", "Linear", 2),
        ("blocks.1.1", "ReLU", 2),
        ("head", "Linear", 1),
    ]
    assert root(net).type == "Net"
    assert len(layers) == len(layers.rows) == 9
    assert list(layers) == list(layers.rows)
    assert layers["blocks.0.0"] is layers.rows[3]
    with pytest.raises(LookupError, match=r"nothing"):
        layers["nothing"]
    for field in FIELDS:
        assert hasattr(layers.rows[0], field), field


def test_calls_are_counted_a_step(net):
    assert {row.name: row.calls for row in net.layers() if row.calls != 1} == {"stem": 2}


class Sometimes(nn.Module):
    """Calls one of its layers in every second forward, one three times, and one never."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.never, self.n = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2), 0

    def forward(self, x):
        self.n += 1
        for _ in range(3):
            x = torch.tanh(self.a(x))
        return self.b(x) if self.n % 2 else x.sum(1, keepdim=True)


def test_of_a_layer_that_is_not_always_called_everything_is_the_mean_of_a_step():
    learn = Learner(make_batches(6), Sometimes(), F.mse_loss, torch.optim.SGD, lr=0.01)
    layers = profiled(learn, wait=1, warmup=1, active=4).layers()
    assert layers["a"].calls == 3
    assert layers["b"].calls == pytest.approx(0.5)
    assert layers["a"].output_bytes == 3 * 4 * 2 * 4
    assert layers["b"].output_bytes == pytest.approx(0.5 * 4 * 1 * 4)
    never = [row for row in layers if row.name == "never"]
    assert [row.calls for row in never] in ([], [0])


def test_what_was_not_asked_for_is_none(sleepy):
    for row in sleepy[0].layers():
        assert row.memory is None
        assert row.flops is None
        assert row.flops_per_second is None
    if not torch.cuda.is_available():
        for row in sleepy[0].layers():
            devices = [
                row.device_forward,
                row.device_forward_self,
                row.device_backward,
                row.device_backward_self,
            ]
            assert devices == [None] * 4
        assert [row.device_seconds for row in sleepy[0].phases().rows] == [None] * 7


# ---- bytes


class Record(NamedTuple):
    out: torch.Tensor
    extra: object


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(7, 4), nn.LSTM(4, 5, num_layers=2, batch_first=True)
        for name, make in OUTPUTS.items():
            self.add_module(name, zoo.Plain(make))
        self.flat, self.head = nn.Flatten(), nn.Linear(15, 1)

    def forward(self, x):
        x, _ = self.rnn(self.emb(x))
        for name in OUTPUTS:
            getattr(self, name)(x)
        return self.head(self.flat(x))


OUTPUTS = {
    "doubled": lambda _, x: x.double(),
    "counted": lambda _, x: (x > 0).sum(1),
    "signs": lambda _, x: x > 0,
    "halved": lambda _, x: x.bfloat16(),
    "nested": lambda _, x: {"a": x * 2, "b": [x[:, 0].clone(), None, "text"], "c": Record(x.sum(), 3)},
    "nothing": lambda _, x: None,
    "empty": lambda _, x: x[:0] * 2,
}
SIZES = {
    "emb": 6 * 3 * 4 * 4,
    "rnn": 6 * 3 * 5 * 4 + 2 * (2 * 6 * 5 * 4),
    "doubled": 6 * 3 * 5 * 8,
    "counted": 6 * 5 * 8,
    "signs": 6 * 3 * 5,
    "halved": 6 * 3 * 5 * 2,
    "nested": 6 * 3 * 5 * 4 + 6 * 5 * 4 + 4,
    "nothing": 0,
    "empty": 0,
    "flat": 6 * 15 * 4,
    "head": 6 * 4,
}


def test_bytes_of_outputs_are_exact_whatever_a_layer_returns():
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randint(7, (6, 3), generator=g), torch.randn(6, 1, generator=g)) for _ in range(4)]
    learn = Learner(batches, Outputs(), F.mse_loss, torch.optim.SGD, lr=0.01)
    layers = profiled(learn, wait=1, warmup=1, active=2).layers()
    assert {row.name: row.output_bytes for row in layers if row.depth} == SIZES


def test_bytes_of_a_layer_called_twice_are_of_both_calls(net):
    layers = net.layers()
    assert layers["stem"].output_bytes == 2 * 4 * 2 * 4
    assert layers["head"].output_bytes == 4 * 1 * 4
    assert root(net).output_bytes == 4 * 1 * 4


def test_memory_is_what_the_forward_allocates_and_keeps():
    class Grows(nn.Module):
        def forward(self, x):
            big = torch.zeros(50_000)  # freed when this returns
            return x + big.sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 100), Grows(), nn.Tanh(), nn.Linear(100, 1))
    learn = Learner(make_batches(4), model, F.mse_loss, torch.optim.SGD, lr=0.001)
    layers = profiled(learn, profile_memory=True, wait=1, warmup=1, active=2).layers()
    assert [row.memory for row in layers if row.depth] == [4 * 100 * 4] * 3 + [4 * 1 * 4]
    assert layers.rows[0].memory == 4 * 100 * 4 + 4 * 1 * 4  # autograd keeps none but the output of tanh


def test_what_callbacks_do_with_the_model_is_in_no_reading():
    def use(cb):
        if cb.training:
            cb.model(cb.x)
            cb.learn.validate()

    options = {"profile_memory": True, "with_flops": True, "wait": 1, "warmup": 0, "active": 2}
    found = []
    for cbs in ([], [Callback(before_batch=use, after_loss=use, after_step=use, after_batch=use)]):
        layers = profiled(make_learner(), cbs=cbs, **options).layers()
        found.append([(r.name, r.calls, r.output_bytes, r.memory, r.flops) for r in layers])
    assert found[0] == found[1]


# ---- flops


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, stride=2)
        self.grouped = nn.Conv2d(6, 4, (1, 3), groups=2, bias=False)
        self.act, self.head = nn.ReLU(), nn.Linear(4 * 4 * 2, 5)

    def forward(self, x):
        return self.head(self.act(self.grouped(self.stem(x))).flatten(1))


N = 2
FORWARD = {  # of multiplying and adding, two a pair
    "stem": 2 * N * 6 * 4 * 4 * 3 * 3 * 3,
    "grouped": 2 * N * 4 * 4 * 2 * (6 // 2) * 1 * 3,
    "act": 0,
    "head": 2 * N * 32 * 5,
}


@functools.cache
def conv_layers(on):
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(N, 3, 8, 8, generator=g), torch.randn(N, 5, generator=g)) for _ in range(4)]
    learn = Learner((data, data), Conv(), F.mse_loss, torch.optim.SGD, lr=0.01)
    return profiled(learn, with_flops=True, on=on, wait=1, warmup=1, active=2).layers()


def test_flops_of_a_forward_are_those_counted_by_hand():
    layers = conv_layers("valid")
    assert {row.name: row.flops or 0 for row in layers if row.depth} == FORWARD
    assert layers.rows[0].flops == sum(FORWARD.values())
    for row in layers:
        assert row.backward is None or row.backward == 0
        if row.flops:
            assert row.flops_per_second == pytest.approx(row.flops / row.forward)


# ---- operators


def cells(table):
    """The rows of what is printed, the first being its header."""
    lines = [line for line in in_terminal(table, 500).splitlines() if line[0] in "┃│"]
    rows = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]
    n = sum(line[0] == "┃" for line in lines)
    return [[" ".join(texts).strip() for texts in zip(*rows[:n], strict=True)], *rows[n:]]


def seconds(text):
    number, unit = re.fullmatch(r"([\d.,]+) ?(s|ms|µs|us|ns)", text).groups()
    return float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}[unit]


def test_operators_are_counted_as_torch_counts_them(net):
    torch.manual_seed(0)
    model, batches = Net(), make_batches(5)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for x, y in batches[2:]:
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    expected = {e.key: e for e in prof.key_averages() if "#" not in e.key}
    found = {row[0]: row for row in cells(net.table(row_limit=1000))[1:]}
    for name in ("aten::linear", "aten::addmm", "aten::relu", "aten::mse_loss", "AddmmBackward0", "aten::mm"):
        assert int(found[name][1].replace(",", "")) == expected[name].count, name
    assert set(found) >= {name for name in expected if name.startswith("aten::")} - {"aten::detach", "detach"}


def test_self_times_of_operators_leave_out_what_is_inside_them(net, tmp_path):
    trace = exported(net, tmp_path)
    own, stack = collections.Counter(), []
    ranges = [r for r in trace.ranges if r.cat in ("cpu_op", "user_annotation")]
    for r in sorted(ranges, key=lambda r: (r.start, -r.end)):
        while stack and not stack[-1].holds(r):
            stack.pop()
        if stack:
            own[stack[-1].name] -= r.seconds
        own[r.name] += r.seconds
        stack.append(r)
    header, *rows = cells(net.table(row_limit=1000))
    found = {row[0]: seconds(row[header.index(HEADERS["self_cpu_time_total"])]) for row in rows}
    for name in ("aten::addmm", "aten::mm", "aten::t", "AddmmBackward0"):
        assert found[name] == pytest.approx(own[name], rel=0.02), name


def test_neither_phases_nor_layers_are_operators(net):
    names = {row[0] for row in cells(net.table(row_limit=1000))[1:]}
    assert not names & set(PHASES)
    assert not [name for name in names if re.search(r"ProfilerStep|\((Linear|Sequential|ReLU)\)", name)]
    assert "Net" not in names


@in_turn("key", SORT_KEYS)
def test_the_table_is_sorted_by_any_of_torchs_keys(key, net):
    table = net.table(sort_by=key, row_limit=7)
    header, *rows = cells(table)
    assert len(rows) == 7
    if key in HEADERS:
        k = header.index(HEADERS[key])
        values = [int(r[k].replace(",", "")) if key == "count" else seconds(r[k]) for r in rows]
        assert values == sorted(values, reverse=True)
    assert "aten::" in in_terminal(table)


def test_a_wrong_key_is_refused_with_the_keys_there_are(net):
    with pytest.raises(ValueError, match=r"'beauty'") as raised:
        net.table(sort_by="beauty")
    for key in SORT_KEYS:
        assert key in str(raised.value)


def test_the_table_has_as_many_rows_as_asked_for(net):
    assert [len(cells(net.table(row_limit=k))) - 1 for k in (1, 3)] == [1, 3]
    assert len(cells(net.table())) - 1 == 20
    assert 20 < len(cells(net.table(row_limit=1000))) - 1 < 200


# ---- words


def test_the_report_says_what_is_slow(sleepy):
    text = in_terminal(sleepy[0].report())
    assert "block.1" in text
    assert "block.2.0" in text
    assert "callbacks" in text


def test_the_report_shows_the_share_of_time_spent_waiting_for_data():
    class Slow(SleepyLoader):
        pass

    slow = profiled(Learner(Slow(), make_model(), F.mse_loss, torch.optim.SGD), wait=0, warmup=1, active=2)
    fast = profiled(make_learner(), wait=0, warmup=1, active=2)
    assert phases(slow)["data"].share > 0.7
    for profiler in (slow, fast):
        data, step = phases(profiler)["data"], profiler.phases().step
        line = profiler.report().lines[0]
        assert line.startswith(f"{data.share:.1%} of the step is spent waiting for data")
        assert line.endswith(f"a step would take {duration(step - data.seconds)}")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_is_shown_at_any_width_with_names_to_tell_the_rows_by(width, sleepy, net):
    for profiler in (sleepy[0], net):
        for thing in shown_all(profiler):
            lines = in_terminal(thing, width).splitlines()
            assert max(map(len, lines)) <= width
        text = in_terminal(profiler.layers(), width)
        assert all(row.type in text for row in profiler.layers() if len(row.type) < 7), text
        assert "head" in text
        assert "forward" in in_terminal(profiler.phases(), width)
        assert "aten" in in_terminal(profiler.table(), width)


def test_the_hierarchy_is_shown(net):
    text = in_terminal(net.layers(), 160)
    lines = [line for line in text.splitlines() if re.search(r"Net|Linear|Sequential|ReLU", line)]
    assert len(lines) == 9
    assert [re.search(r"Net|Linear|Sequential|ReLU", line)[0] for line in lines] == [
        r.type for r in net.layers()
    ]


def test_many_layers_are_shown_too():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(25)], nn.Linear(2, 1))
    learn = Learner(make_batches(3), model, F.mse_loss, torch.optim.SGD)
    profiler = profiled(learn, wait=1, warmup=1, active=1)
    assert len(profiler.layers()) == 77
    for thing in shown_all(profiler):
        assert in_terminal(thing, 80)
        assert repr(thing)


# ---- what it leaves alone


def noisy():
    torch.manual_seed(0)
    model = [nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 1)]
    return Learner(make_batches(4), nn.Sequential(*model), F.mse_loss, torch.optim.Adam, lr=0.01)


EVERYTHING = {"profile_memory": True, "with_flops": True, "record_shapes": True, "with_stack": True}


@in_turn(
    "options",
    [{}, {"wait": 0, "warmup": 0, "active": 4}, {"wait": 0, "active": 1, "repeat": 0}, EVERYTHING],
    ids=["default", "at once", "repeated", "everything"],
)
def test_weights_and_random_numbers_are_to_the_bit_what_they_are_without(options):
    found = []
    for cbs in ((), ProfilerCallback(**options)):
        learn = noisy()
        random.seed(3)
        note = Callback(before_step=lambda cb: cb.seen.extend(p.grad.clone() for p in cb.model.parameters()))
        note.seen = []
        with learn.added_cbs(note):
            fit(learn, 2, cbs=cbs)
        state = everything(learn.model)
        found.append(
            {
                "weights": weights(learn.model),
                "gradients": note.seen,
                "optimizer": [v for s in learn.opt.state.values() for v in s.values()],
                "random": [state["random state of torch"]],
                "losses": torch.tensor(learn.recorder.losses).unbind(),
            }
        )
        here = {k: state[k] for k in ("random state of Python", "grad mode", "flags", "modes", "attributes")}
        found[-1]["rest"] = here | {
            k: state[k] for k in ("hooks", "hooks of all modules", "modes of dispatch")
        }
    without, with_it = found
    assert without.pop("rest") == with_it.pop("rest")
    for what, values in without.items():
        assert same(list(values), list(with_it[what])), what


class Keeps(nn.Module):
    """Notes weakly what passes through it."""

    def __init__(self):
        super().__init__()
        self.fc, self.head, self.refs = nn.Linear(2, 3), nn.Linear(3, 1), []

    def forward(self, x):
        y = self.fc(x)
        self.refs.append(weakref.ref(y))
        return self.head(y)


def test_no_tensor_of_a_step_is_kept_alive():
    left = []

    def look(cb):
        left.append(sum(ref() is not None for ref in cb.model.refs))
        cb.model.refs.clear()

    learn = Learner(make_batches(5), Keeps(), F.mse_loss, torch.optim.SGD)
    forget = Callback(
        after_step=lambda cb: setattr(cb.learn, "loss", None) or setattr(cb.learn, "pred", None)
    )
    forget.order = 39
    learn.remove_cbs([cb for cb in learn.cbs if cb.name in ("recorder", "metrics")])
    looks = Callback(after_batch=look, name="looks")
    options = {"record_shapes": True, "profile_memory": True, "with_flops": True}
    with nothing_left(learn):
        fit(learn, cbs=[forget, looks, ProfilerCallback(wait=1, warmup=1, active=3, **options)])
    assert left == [0] * 5


def test_neither_learner_nor_model_is_kept_alive_after_the_fit():
    learn = make_learner(6)
    profiler = profiled(learn)
    profiler.layers(), profiler.report()
    refs = [weakref.ref(learn), weakref.ref(learn.model), weakref.ref(learn.opt)]
    del learn
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert len(profiler.layers()) == 4


def test_readings_asked_for_inside_the_fit_are_those_of_the_last_cycle():
    seen = []

    def read(cb):
        if cb.train_iter in (3, 4, 6):
            seen.append(
                (cb.train_iter, cb.learn.profiler.profiled_steps, cb.learn.profiler.layers()["0"].calls)
            )

    profiler = profiled(
        make_learner(8), cbs=[Callback(after_loss=read)], wait=1, warmup=1, active=1, repeat=2
    )
    assert profiler.profiled_steps == [2, 5]
    assert seen == [(3, [2], 1), (4, [2], 1), (6, [2, 5], 1)]


def test_readings_are_of_all_steps_of_all_cycles_or_say_of_which():
    profiler = profiled(make_learner(7, 0), wait=1, warmup=0, active=1, repeat=3)
    text = in_terminal(profiler.layers())
    assert profiler.profiled_steps == [1, 3, 5]
    assert "5" in text.splitlines()[0]
    assert copy.deepcopy(profiler).layers().rows == profiler.layers().rows


def test_of_validation_batches_there_is_no_backward():
    profiler = profiled(make_learner(3, 4), on="valid", wait=1, warmup=1, active=2)
    for row in profiler.layers():
        assert not row.backward
        assert row.forward > 0
    assert phases(profiler)["backward"].seconds == phases(profiler)["optimizer"].seconds == 0
    for thing in shown_all(profiler):
        assert in_terminal(thing)


def test_on_all_both_kinds_of_batches_are_steps():
    profiler = profiled(make_learner(2, 2), on="all", wait=0, warmup=1, active=3)
    assert {row.calls for row in profiler.layers()} == {1}
    assert phases(profiler)["forward"].seconds > 0
    for thing in shown_all(profiler):
        assert in_terminal(thing)
