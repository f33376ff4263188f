"""Shifts: inputs and targets of batches that are others for good."""

import gc
import math
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.measurements.ranges import Left, PatternFinder, Shift, ShiftFinder
from hookcb.diagnosis.measurements.shifts import Growth, Shifts, sample_of
from hookcb.diagnosis.run import Run
from tests.diagnosis.faults.ranks.support import merged
from tests.support import in_turn


def found_in(means, sizes=None):
    """Shifts in means, and sizes, of batches."""
    finder = ShiftFinder("inputs", ("mean", "standard deviation"))
    of_each = enumerate(zip(means, sizes or [1.0] * len(means), strict=True))
    return [x for step, numbers in of_each if (x := finder.add(step, *numbers)) is not None]


def noise(n, level=0.0, size=0.05, seed=0):
    random_ = random.Random(seed)
    return [random_.gauss(level, size) for _ in range(n)]


def test_the_first_batch_of_others_is_found_and_told_with_both_ranges():
    (shift,) = found_in(noise(100) + noise(60, 1.0))
    assert (shift.step, shift.of, [x.name for x in shift.left]) == (100, "inputs", ["mean"])
    assert shift.text.startswith(
        "the inputs of the batches from step 100 on are unlike those before: mean 0.9"
    )
    assert min(noise(100)) == shift.left[0].before[0]
    assert shift.left[0].since[0] > 0.8


def test_a_size_that_changes_alone_is_found_and_so_is_a_second_change():
    first, second = found_in(noise(150), noise(50, 1.0) + noise(50, 0.3) + noise(50, 4.0))
    assert (first.step, second.step) == (50, 100)
    assert [x.name for x in first.left] == ["standard deviation"]
    assert [x.step for x in found_in(noise(50) + noise(50, 1.0) + noise(50) + noise(50, 0.5))] == [50, 150]


@in_turn("seed", range(4))
def test_noise_drift_and_repeated_epochs_are_no_shift(seed):
    random_ = random.Random(seed)
    assert not found_in(noise(3_000, seed=seed))
    assert not found_in([random_.paretovariate(1.2) for _ in range(3_000)])  # of heavy tails
    assert not found_in([x + i / 200 for i, x in enumerate(noise(1_000, seed=seed))])
    ramp = [i / 50 for i in range(50)] * 6  # in order, with a range that is known after the first epoch
    assert not found_in(ramp)


def test_odd_batches_are_no_shift_and_do_not_hide_one():
    means = noise(100)
    means[60] = 1e6
    assert not found_in(means)
    assert [x.step for x in found_in(means + noise(20, 1.0))] == [100]
    several = noise(100)
    several[50:56] = [5.0] * 6
    assert not found_in(several)


def test_one_batch_that_is_as_before_does_not_end_a_shift_and_nan_counts_for_nothing():
    means = noise(100) + noise(20, 1.0)
    means[104] = 0.0
    assert [x.step for x in found_in(means)] == [100]
    means[30], means[102], means[110] = math.nan, math.inf, math.nan
    assert [x.step for x in found_in(means)] == [100]


def test_odd_batches_are_known_with_what_is_odd():
    finder = ShiftFinder("inputs", ("mean", "standard deviation"))
    means = noise(100)
    means[60], means[10] = 1.0, 1.0  # too early for a range
    for step, mean in enumerate(means):
        finder.add(step, mean, 1.0)
    ((step, (left,)),) = finder.odd
    assert (step, left.name, left.since) == (60, "mean", (1.0, 1.0))
    patterns = PatternFinder()
    for step, distance in enumerate(noise(100, 0.3, 0.02)):
        patterns.add(step, math.nan, 1.2 if step == 80 else distance)
    assert [step for step, _ in patterns.odd] == [80]


def test_fewer_than_32_batches_before_or_eight_after_are_not_judged():
    assert not found_in(noise(30) + noise(200, 1.0))
    assert not found_in(noise(100) + noise(8, 1.0))


def test_changes_that_are_small_against_the_numbers_themselves_are_none():
    assert not found_in([0.1] * 100 + [0.1 + 1e-7] * 50)  # rounding
    assert not found_in([0.1] * 100 + [0.15] * 50)
    assert found_in([0.1] * 100 + [0.25] * 50)


def test_samples_are_views_of_any_layout():
    base = torch.arange(40_000.0).view(10, 40, 100)
    for x in (
        base,
        base[:, :, :-1],
        base.transpose(0, 2),
        base[0, 0, 0],
        base[:1, :1],
        base[0, :1].expand(3000, 100),
    ):
        sample = sample_of(x)
        assert min(x.numel(), 400) <= sample.numel() <= 1_024
        assert sample.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert set(sample.flatten().tolist()) <= set(x.flatten().tolist())


def followed(batches, targets=()):
    """Shifts of batches and targets that a loop tells."""
    part, run = Shifts(), Run(loop=SimpleNamespace(xb=(), yb=(), train_iter=0, loss_node=None))
    part.on_first_graph(run)
    for step, x in enumerate(batches):
        run.loop.train_iter, run.loop.xb = step, x if isinstance(x, tuple) else (x,)
        run.loop.yb = (targets[step],) if targets else ()
        part.on_batch(run)
        part.on_loss(run)
    part.tell(run)
    part.freeze()
    return part


def test_the_largest_tensor_of_the_inputs_is_followed_in_batches_of_any_length():
    torch.manual_seed(0)
    batches = [
        (torch.ones(4), torch.randint(5 + 20 * (step >= 50), (4, 5 + step % 7)), torch.ones(4, 12).bool())
        for step in range(80)
    ]
    (shift,) = followed(batches).found
    assert (shift.step, shift.of) == (50, "inputs")
    assert {x.name for x in shift.left} == {"mean", "standard deviation"}


def test_numbers_are_those_of_the_sample_whatever_its_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        x = torch.full((40, 3), 5, dtype=dtype)
        x[::2] = 1
        (shift,) = followed([x] * 40 + [x * 3] * 20).found
        (mean, std) = shift.left
        assert (mean.before, mean.since) == ((3.0, 3.0), (9.0, 9.0))
        assert (std.before, std.since) == ((2.0, 2.0), (6.0, 6.0))


def shifts_of(batches):
    return [(x.step, x.slack > 0) for x in followed(batches).found]


def tokens(n, table, seed=0, shape=(8, 24)):
    """Text of a Markov chain in which each token mostly follows from the one before, by these numbers."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(50, (n, shape[0], 1), generator=rng)
    for _ in range(shape[1] - 1):
        is_next = torch.rand(n, shape[0], 1, generator=rng) < 0.8
        other = torch.randint(50, (n, shape[0], 1), generator=rng)
        x = torch.cat([x, torch.where(is_next, (7 * x[..., -1:] + 3) % 50, other)], -1)
    return [*table[x]]


@in_turn("shape", [(8, 24), (40, 50)])
def test_another_table_of_tokens_is_found_by_the_pairs_of_neighbors(shape):
    same = torch.arange(50)
    other = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    ((step, is_about),) = shifts_of(tokens(150, same, shape=shape) + tokens(60, other, 1, shape))
    assert is_about
    assert abs(step - 150) <= 2
    assert not shifts_of(tokens(150, same, shape=shape) + tokens(60, same, 1, shape))


def test_columns_in_another_order_and_images_that_are_turned_are_found():
    torch.manual_seed(0)
    tables = [torch.randn(16, 12) + torch.arange(12) / 4 for _ in range(200)]
    ((step, is_about),) = shifts_of(tables[:130] + [x.flip(1) for x in tables[130:]])
    assert is_about
    assert abs(step - 130) <= 2
    assert not shifts_of(tables)
    images = [torch.randn(4, 3, 20, 20) + torch.linspace(0, 2, 20) for _ in range(200)]
    ((step, _),) = shifts_of(images[:120] + [x.transpose(2, 3) for x in images[120:]])
    assert abs(step - 120) <= 2


def test_batches_of_another_size_are_not_other_data():
    torch.manual_seed(0)
    same = torch.arange(50)
    assert not shifts_of(tokens(150, same, shape=(8, 24)) + tokens(100, same, 1, (64, 24)))
    of_column = torch.randn(40)
    assert not shifts_of([torch.randn(16 * (1 + 3 * (i >= 120)), 40) + of_column for i in range(200)])


def test_two_blocks_in_a_row_must_have_another_pattern():
    def found(distances):
        finder = PatternFinder()
        steps = ((16 * i + j, x, j) for i, x in enumerate(distances) for j in range(16))
        numbers = [(step, x if j == 0 else math.nan, x) for step, x, j in steps]
        return [shift for at in numbers if (shift := finder.add(*at)) is not None]

    usual = [math.nan, 0.06, 0.08, 0.07, 0.06, 0.07, 0.08]
    (shift,) = found([*usual, 0.07, 0.12, 0.3, 0.31, 0.2])  # with one in which it begins
    assert (shift.step, shift.last, shift.left[0].since) == (144, 139, (0.3, 0.31))
    assert "from about step 144 on are unlike those before: distance of their pattern 0.3" in shift.text
    assert not found([*usual, 0.07, 0.5, 0.07, 0.5, 0.07])
    assert found([math.inf, *usual[1:], 0.07, 0.5, 0.5])
    assert not found([*usual, 0.07, math.inf, 0.5, 0.5])  # of another shape
    assert not found([*usual[:5], 0.3, 0.3, 0.3])
    assert not found([*usual, 0.12, 0.16, 0.17, 0.2, 0.24, 0.3, 0.35, 0.4])  # a drift


def test_a_batch_that_is_repeated_is_another_pattern_from_a_step_that_is_not_known_well():
    torch.manual_seed(0)
    batches = [torch.randn(16, 12) for _ in range(200)]
    (shift,) = followed(batches[:150] + [batches[150]] * 60).found
    assert shift.last < 150 < shift.step + shift.slack


@in_turn("damage", [lambda x: x * 300, lambda x: x * math.nan, lambda x: x + math.inf])
def test_a_damaged_batch_does_not_change_the_pattern(damage):
    torch.manual_seed(0)
    tables = [torch.randn(16, 12) + torch.arange(12) / 4 for _ in range(260)]
    tables[3], tables[150] = damage(tables[3]), damage(tables[150])
    assert not shifts_of(tables)
    assert len(shifts_of(tables[:200] + [x.flip(1) for x in tables[200:]])) == 1


def test_data_in_order_and_text_of_changing_topics_have_no_other_pattern():
    torch.manual_seed(0)
    of_class = torch.randn(10, 64)
    in_order = [of_class[step % 100 // 10] + torch.randn(8, 64) for step in range(400)]
    assert not shifts_of(in_order[:100] * 2 + in_order)
    topics = torch.randint(500, (40, 60))
    text = [topics[step // 5 % 40][torch.randint(60, (8, 30))] for step in range(400)]
    assert not shifts_of(text)


def test_batches_without_numbers_are_left_out():
    part = followed(["text", torch.zeros(0, 3), torch.ones(3).bool(), torch.ones(3).to_sparse()] * 20)
    assert not part.found


def test_inputs_that_a_model_makes_are_no_data():
    scale = torch.ones((), requires_grad=True)
    assert followed([torch.full((4, 2), 1.0 + 9 * (i >= 50)) for i in range(80)]).found
    assert not followed([torch.full((4, 2), 1.0 + 9 * (i >= 50)) * scale for i in range(80)]).found


def test_targets_that_have_grown_are_told_with_their_first_step():
    torch.manual_seed(0)
    sizes = [1.0] * 200 + [1.05**i for i in range(100)]
    growth = followed([torch.ones(4)] * 300, [s * torch.randn(50, 20) for s in sizes]).growth
    assert 214 <= growth.step <= 216
    assert growth.before == pytest.approx(1, abs=0.05)
    assert growth.after == pytest.approx(1.05**96, rel=0.1)
    assert growth.text.startswith("the targets have grown from 1")
    assert followed([torch.ones(4)] * 300, [s * torch.randn(50, 20) for s in reversed(sizes)]).growth is None
    assert followed([torch.ones(4)] * 300, [(9 * s * torch.rand(50)).long() for s in sizes]).growth is None


def test_inputs_that_are_changed_in_place_are_seen_under_watch_and_nothing_is_kept():
    torch.manual_seed(0)
    data, labels, kept = torch.randn(400, 6) + 3, torch.randint(3, (400,)), []
    model, diagnose = nn.Linear(6, 3), Diagnose(show=False)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, diagnose) as w:
        for step in range(150):
            at = slice(step % 50 * 8, step % 50 * 8 + 8)
            x, y = data[at].sub_(3.0), labels[at] + 0
            kept += [weakref.ref(x), weakref.ref(y)]
            w.report_loss(F.cross_entropy(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
    del x, y
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    first, second = diagnose.evidence().measured(Shifts).found
    assert (first.step, second.step, first.of) == (50, 100, "inputs")


@pytest.mark.cuda
def test_numbers_leave_a_gpu_without_waiting():
    torch.manual_seed(0)
    x = torch.randn(600, 4, 6, device="cuda")
    x[300:] += 2
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    part, run = Shifts(), Run(loop=SimpleNamespace(xb=(), yb=(), train_iter=0, loss_node=None))
    for step in range(600):
        run.loop.train_iter, run.loop.xb = step, (x[step],)
        part.on_batch(run)
    torch.cuda.set_sync_debug_mode("default")
    part.tell(run)
    assert [shift.step for shift in part.found] == [300]


def test_of_several_ranks_those_whose_batches_have_changed_are_known():
    left, runs = (Left("mean", (0.0, 1.0), (3.0, 4.0)),), [Run(), Run(), Run()]
    everywhere, about = Shift(50, "inputs", left), Shift(70, "inputs", left, slack=4)
    of_ranks = [everywhere], [everywhere, about], [everywhere, about._replace(step=73)]
    for run, found in zip(runs, of_ranks, strict=True):
        run.measured(Shifts).found = found
    runs[2].measured(Shifts).growth = Growth(60, 1.0, 9.0)
    for run in merged(*runs):
        shifts = run.measured(Shifts)
        assert [(x.step, x.ranks) for x in shifts.found] == [(50, ()), (70, (1, 2))]
        assert "the inputs of the batches of ranks 1, 2 from about step 70 on" in shifts.found[1].text
        assert shifts.growth.text == "the targets of rank 2 have grown from 1 to 9 since step 60"
    assert runs[0].measured(Shifts).found == [everywhere]
