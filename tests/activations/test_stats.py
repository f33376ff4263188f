"""Each statistic against its definition in float64: of tensors, and of what layers put out."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import ActivationStats, Learner
from hookcb.activations.stats import (
    HIGH,
    LAYER_STATS,
    LOW,
    SAMPLED,
    WHOLE,
    added,
    has_stats,
    joined,
    layer_stats,
    stats_of,
    summarize,
    take,
)
from tests.activations.support import (
    INF,
    NAN,
    Around,
    Puts,
    assert_stats,
    calls_of,
    oracle,
    randn,
    watch,
    watch_all,
)
from tests.hooks import support as zoo
from tests.support import PACKED, covering, fit, in_turn


def by_name(x, **options):
    return dict(zip(LAYER_STATS, layer_stats(x, **options).tolist(), strict=True))


def of_taken(taken):
    """The statistics of what `take` has returned."""
    elements, known = taken
    sums = summarize(elements.reshape(1, -1), () if known is None else (known,), 0.05, 0)
    return stats_of(sums)[0, : len(LAYER_STATS)]


def check(x, rel=1e-5, abs_tol=1e-6):
    got = layer_stats(x)
    assert got.shape == (len(LAYER_STATS),)
    assert got.dtype is (torch.float64 if x.dtype is torch.float64 else torch.float32)
    assert got.tolist() == pytest.approx(list(oracle(x).values()), rel=rel, abs=abs_tol, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_dtype_is_measured(dtype):
    check((randn(7, 5, 3) * 3 + 1).to(dtype))


@in_turn("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers_and_booleans_are_measured(dtype):
    check((randn(7, 5).abs() * 2).to(dtype))


@in_turn("offset", [0, 1e2, 1e4, 1e6, -1e6])
def test_the_spread_is_right_at_any_offset(offset):
    x = randn(64, 33).double() + offset
    check(x.float(), rel=1e-3)


def test_strided_layouts_are_measured_like_contiguous_ones():
    x = randn(4, 6, 5, 3)
    for view in (
        x.transpose(1, 3),
        x[:, ::2],
        x.to(memory_format=torch.channels_last),
        x[:1].expand(3, -1, -1, -1),
    ):
        check(view)


def test_one_element_and_no_dimension_have_a_mean_and_no_spread():
    check(torch.tensor(0.02))
    check(torch.tensor([[3.0]]))


def test_an_empty_output_has_nan_for_everything():
    numbers = by_name(torch.empty(0, 3))
    assert numbers.pop("nonfinite") == 0
    assert all(map(math.isnan, numbers.values()))


@in_turn(
    "x",
    [
        torch.tensor([6e4, -6e4, 6e4, -6e4], dtype=torch.float16),
        torch.tensor([3e38, 3e38, -3e38]),
        torch.full((70_000,), 3e38),
        torch.full((70_000,), 7.1),
        randn(1000) * 1e-30,
        randn(70_000) * 1e25,
        randn(70_000).double() * 1e200,
    ],
    ids=["half", "sum overflows", "all large", "constant", "tiny", "squares overflow", "float64"],
)
def test_no_size_of_values_overflows_or_vanishes(x):
    unit = 1e200 if x.dtype is torch.float64 else 1.0  # squares of float64 overflow in the oracle
    scaled, others = list(oracle(x / unit).values())[:5], list(oracle(x).values())[5:]
    values = [value * unit for value in scaled] + others
    most = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
    expected = [math.copysign(math.inf, value) if abs(value) > most else value for value in values]
    if expected[1] == math.inf:
        expected[-1] = math.nan  # the spread has no room in float32
    assert layer_stats(x).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-36, nan_ok=True)


@pytest.mark.parametrize("n", [WHOLE - 1, WHOLE, WHOLE + 1, 3 * WHOLE, 20 * WHOLE + 17])
@pytest.mark.parametrize("offset", [0, 20, -1e6])
def test_large_outputs_are_measured_in_parts_that_join_exactly(n, offset):
    x = randn(n, seed=n) + offset
    x[: n // 3] *= 1 + 1e-3
    check(x, rel=1e-3, abs_tol=1e-4)


@pytest.mark.parametrize("n", [5, 70_000])
@pytest.mark.parametrize("odd", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, 1e3]])
def test_nan_and_infinities_are_counted_and_left_out_of_extremes(n, odd):
    x = randn(n)
    x[1 : 1 + len(odd)] = torch.tensor(odd)
    check(x)


def test_an_output_without_a_finite_element_has_no_extremes():
    stats = by_name(torch.tensor([math.inf, math.nan]))
    assert all(math.isnan(stats[stat]) for stat in ("mean", "std", "min", "max", "abs_max"))
    assert stats["nonfinite"] == 2


@pytest.mark.parametrize("offset", [0, 20, 1e5])
@pytest.mark.parametrize(
    "x", [randn(5, 300), randn(3, 300).relu(), torch.zeros(2, 9)], ids=["normal", "relu", "zeros"]
)
def test_what_compiled_code_and_gpus_run_agrees_with_what_a_cpu_runs(monkeypatch, x, offset):
    rows = x + offset
    rows[-1, 1] = math.inf
    rows[-1, 2] = math.nan
    found = summarize(rows, (), 0.05, rows.shape[1])
    monkeypatch.setattr("hookcb.activations.stats.is_compiling", lambda: True)
    assert torch.allclose(
        found, summarize(rows, (), 0.05, rows.shape[1]), rtol=1e-9, atol=1e-9, equal_nan=True
    )


def test_eps_is_a_magnitude_and_counts_itself():
    x = torch.tensor([-1.0, -0.5, 0.25, 0.5, 1.0])
    assert by_name(x, eps=0.5)["near_zero"] == pytest.approx(0.6)
    assert by_name(x, eps=0)["near_zero"] == 0


def test_up_to_8192_elements_all_are_taken_and_of_more_a_sample_and_exact_moments():
    x = randn(WHOLE + 1)
    elements, exact = take(x[:-1], "auto")
    assert torch.equal(elements, x[:-1])
    assert exact is None
    elements, exact = take(x, "auto")
    assert len(elements) == SAMPLED
    got = of_taken((elements, exact)).tolist()
    want = list(oracle(x).values())
    assert got[:5] == pytest.approx(want[:5], rel=1e-5, abs=1e-6)
    assert got[7] == want[7]


def test_a_sample_of_any_size_and_every_element_can_be_asked_for():
    x = randn(WHOLE + 1)
    assert [len(take(x, sample)[0]) for sample in (2, 100, None)] == [2, 100, WHOLE + 1]
    assert [take(x, sample)[1] for sample in (2, 100, None)] == [None] * 3
    assert torch.equal(take(x[:70], 100)[0], x[:70])


EXPANDED = {
    "rows": randn(1, 3000).expand(7, 3000),
    "columns": randn(3000, 1).expand(3000, 7),
    "heads of a mask": randn(2, 1, 50, 60).expand(2, 5, 50, 60),
    "more elements than a sample": randn(1, 20_000).expand(3, 20_000),
    "a channel": randn(12, 1, 1).expand(12, 64, 64),
    "one number": torch.full((), 3.5).expand(100, 200),
    "one number that is none": torch.full((), math.nan).expand(100, 200),
    "some that are none": torch.tensor([[1.0], [math.nan], [2.0], [math.inf]]).expand(4, 5000),
    "integers": torch.arange(9)[:, None].expand(9, 5000),
    "offset": (1e6 + randn(300, 1)).expand(300, 50),
    "float64": randn(300, 1).double().expand(300, 50),
}


@in_turn("name", EXPANDED)
def test_elements_that_are_repeated_are_read_once_and_count_as_often(name):
    x = EXPANDED[name]
    elements, known = take(x, "auto")
    whole, exact = take(x.contiguous(), "auto")
    assert elements.shape == whole.shape
    assert elements.dtype == whole.dtype
    want = list(oracle(x).values())
    for taken in ((elements, known), (whole, exact)):
        got = of_taken(taken).tolist()
        # float32 sums depend on the processor
        assert got[:5] == pytest.approx(want[:5], rel=1e-5, abs=1e-6, nan_ok=True)
        assert got[7] == want[7]
    for value in x.unique()[:4]:
        share = (x == value).double().mean()
        assert abs((elements == value).double().mean() - share) < 0.02
    assert take(x, 100)[0].shape == (100,)


@pytest.mark.parametrize("x", [randn(7), randn(7).double(), randn(7).bfloat16(), torch.arange(7)])
def test_what_is_taken_is_a_copy(x):
    elements, _ = take(x, "auto")
    before = elements.clone()
    x.zero_()
    assert torch.equal(elements, before)


@pytest.mark.parametrize("n", [4097, 100_003, 2**20, 64 * 64 * 1024])
def test_a_sample_has_one_index_from_each_stratum_and_always_the_same(n):
    taken = take(torch.arange(n).double(), SAMPLED)[0]
    strata = torch.arange(SAMPLED).double() * n / SAMPLED
    assert (taken >= strata.floor()).all()
    assert (taken <= strata + n / SAMPLED).all()
    assert torch.equal(taken, take(torch.arange(n).double(), SAMPLED)[0])


@pytest.mark.parametrize("n", [2**17, 2**20, 64 * 64 * 1024, 100_003 * 3])
def test_a_sample_sees_every_channel_alike(n):
    index = take(torch.arange(n).double(), SAMPLED)[0].long()
    for period in (2, 3, 7, 28, 64, 100, 256, 512, 1024):
        half = math.ceil(period / 2)  # of the channels
        share = (index % period < half).float().mean().item()
        true = (n // period * half + min(n % period, half)) / n
        assert share == pytest.approx(true, abs=4 * 0.5 / SAMPLED**0.5), period


@in_turn(
    "x",
    [
        None,
        "text",
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["None", "text", "complex", "sparse", "meta", "nested"],
)
def test_what_has_no_statistics_is_told_apart(x):
    assert not has_stats(x)


def test_measuring_leaves_the_tensor_and_its_graph_alone():
    x = randn(3, 4).requires_grad_()
    y = x * 2
    before = y.detach().clone()
    assert not layer_stats(y).requires_grad
    assert torch.equal(y, before)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def spread_in(*, size=1000, at=0.0, times=1.0, seed=0):
    return randn(size, seed=seed) * times + at


def with_values(x, **at):
    """`x` with some of its elements replaced, by index."""
    x = x.clone()
    for index, value in at.items():
        x.view(-1)[int(index[1:])] = value
    return x


def overlapping():
    return randn(20).as_strided((10, 10), (1, 1))


TENSORS = {
    "normal": lambda: randn(33, 7),
    "no_elements": lambda: randn(3, 0, 2),
    "zero_d": lambda: torch.tensor(0.03),
    "zero_d_nan": lambda: torch.tensor(NAN),
    "one_element": lambda: torch.tensor([[-2.5]]),
    "two_elements": lambda: torch.tensor([1.0, 4.0]),
    "zeros": lambda: torch.zeros(50, 3),
    "negative_zeros": lambda: -torch.zeros(50, 3),
    "constant": lambda: torch.full((64, 9), 0.1),
    "negative": lambda: -randn(100).abs() - 1,
    "after_relu": lambda: randn(100, 7).relu(),
    "huge": lambda: randn(1000) * 1e25,
    "tiny": lambda: randn(1000) * 1e-25,
    "nearly_overflowing": lambda: torch.full((4097,), 3e38),
    "row_more": lambda: randn(4097) + 3,
    "row_less": lambda: randn(4095) + 3,
    "up_to_the_sample": lambda: randn(8_192) + 1,
    "heavy_tails": lambda: randn(5000) ** 9,
    "one_outlier": lambda: with_values(randn(5000), i77=1e6),
    "ramp": lambda: torch.arange(8000.0).view(80, 100),
    "halves_far_apart": lambda: torch.cat([randn(4096) - 1e4, randn(4096) + 1e4]),
    "first_element_far_off": lambda: with_values(randn(8000), i0=1e5),
}


LAYOUTS = {
    "transposed": lambda: randn(30, 40).t(),
    "channels_last": lambda: randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: randn(5, 6, 7).permute(2, 0, 1),
    "every_third": lambda: randn(90, 20)[::3, 1::2],
    "a_column": lambda: randn(90, 20)[:, 7],
    "expanded": lambda: randn(1, 7, 1).expand(40, 7, 20),
    "expanded_zero_d": lambda: torch.tensor(2.0).expand(100, 100),
    "overlapping": overlapping,
    "offset_in_storage": lambda: randn(1000)[990:],
    "broadcast_and_transposed": lambda: randn(3, 1).expand(3, 50).t(),
}


DTYPES = {
    "half": lambda: randn(100, 9).half(),
    "half_at_its_limit": lambda: (randn(5000) * 1e4).clamp(-65504, 65504).half(),
    "half_below_its_normal": lambda: (randn(1000) * 1e-7).half(),
    "bfloat16": lambda: randn(100, 9).bfloat16(),
    "bfloat16_huge": lambda: (randn(1000) * 1e30).bfloat16(),
    "float64": lambda: randn(100, 9).double(),
    "float64_far_off": lambda: randn(1000).double() + 1e6,
    "bool": lambda: randn(101) > 0.3,
    "uint8": lambda: torch.arange(256).repeat(3).to(torch.uint8),
    "int8": lambda: torch.arange(-128, 128).to(torch.int8),
    "int16": lambda: torch.arange(-30000, 30000, 7).to(torch.int16),
    "int32_far_off": lambda: torch.arange(1000, dtype=torch.int32) + 10_000_000,
    "int64": lambda: torch.arange(-500, 500),
}


NONFINITE = {
    "one_nan": lambda: with_values(randn(1000), i5=NAN),
    "last_is_nan": lambda: with_values(randn(5000), i4999=NAN),
    "one_inf": lambda: with_values(randn(1000), i5=INF),
    "one_minus_inf": lambda: with_values(randn(1000), i999=-INF),
    "both_infs": lambda: with_values(randn(1000), i1=INF, i2=-INF),
    "all_kinds": lambda: with_values(randn(1000), i1=INF, i2=-INF, i3=NAN, i4=0.0),
    "all_nan": lambda: torch.full((7, 3), NAN),
    "all_inf": lambda: torch.full((7, 3), INF),
    "all_minus_inf": lambda: torch.full((7, 3), -INF),
    "inf_and_nan_only": lambda: torch.tensor([INF, NAN, -INF]),
    "one_finite": lambda: torch.tensor([NAN, -3.0, INF]),
    "half_inf": lambda: with_values(randn(1000), i5=1e9).half(),
    "float64_nan": lambda: with_values(randn(1000).double(), i5=NAN),
    "transposed_nan": lambda: with_values(randn(30, 40), i77=NAN).t(),
    "inf_far_off": lambda: with_values(randn(1000) + 1e6, i77=INF),
    "a_lone_inf": lambda: torch.tensor(INF),
}


EVERYTHING = TENSORS | LAYOUTS | DTYPES | NONFINITE


@pytest.mark.parametrize("name", EVERYTHING)
def test_statistics_are_what_their_definition_gives(name):
    x = EVERYTHING[name]()
    larger = {"sample": 100_000}  # than the output: it is all of it
    several = [{}, {"sample": None}, larger, {"with_hist": True, "eps": 1.0}]
    for options, stats in zip(several, watch_all([x, x.clone(), x], several), strict=True):
        assert len(stats.stats) == 3
        for record in stats.stats:
            assert_stats(record["odd"], x, eps=options.get("eps", 0.05))


@pytest.mark.parametrize("size", [2, 100, 4096, 5000, 150_001])
def test_the_spread_is_right_at_any_offset_and_in_each_record(size):
    outs = []
    for offset in (0.0, 1.0, 30.0, 1e2, -1e3, 1e4, -1e5, 1e6):
        outs += [spread_in(size=size, at=offset, times=times) for times in (1.0, 3.0, 1.0)]
        outs += [spread_in(size=size, at=-offset), spread_in(size=size), spread_in(size=size, at=offset)]
    stats = watch(*outs)
    for record, out in zip(stats.stats, outs, strict=True):
        assert_stats(record["odd"], out, shares=0.04 if size > WHOLE else 1e-6)


def test_a_layer_may_put_out_another_kind_in_each_batch():
    outs = [make() for _ in range(2) for make in EVERYTHING.values()]
    stats = watch(*outs, keep=1000)
    for record, out in zip(stats.stats, outs, strict=True):
        assert_stats(record["odd"], out)


@in_turn("eps", [0, 0.05, 0.5, 2, 1e9])
def test_elements_at_eps_itself_are_near_zero(eps):
    x = torch.tensor([0.0, -0.0, 0.5, -0.5, 0.5000001, 2.0, -2.0, 2.5, NAN, INF, -INF])
    got = watch(x, eps=eps).stats[0]["odd"]
    assert got["near_zero"] == pytest.approx(oracle(x, eps)["near_zero"], abs=1e-6)
    assert got["zeros"] == pytest.approx(2 / 11, abs=1e-6)


def test_float64_keeps_what_float32_cannot_tell_apart():
    x = torch.tensor([1e-60, -1e-60, 1e60, 3.0], dtype=torch.float64)
    got = watch(x).stats[0]["odd"]
    assert (got["zeros"], got["nonfinite"]) == (0, 0)
    assert got["near_zero"] == 0.5
    x = torch.linspace(0, 1, 100, dtype=torch.float64) * 1e-3 + 1e6
    assert watch(x).stats[0]["odd"]["std"] == pytest.approx(x.std().item(), rel=1e-3)


# ---- samples


@pytest.mark.parametrize("period", [2, 3, 4, 7, 16, 64, 128, 1000, 4096])
def test_a_share_of_a_large_output_is_right_whatever_the_period_of_its_pattern(period):
    x = (torch.arange(300_007) % period != 0).float()
    got = watch(x).stats[0]["odd"]
    assert got["zeros"] == pytest.approx(1 / period, abs=0.03)
    assert got["near_zero"] == got["zeros"]
    assert_stats(got, x, shares=0.03, kurtosis=INF)  # a single element in 4,096 decides on it
    assert_stats(watch(x, sample=None).stats[0]["odd"], x)


@pytest.mark.parametrize("sample", ["auto", None])
@pytest.mark.parametrize("layout", ["plain", "transposed", "channels_last", "expanded", "half", "int64"])
def test_rare_elements_of_a_large_output_are_not_missed(layout, sample):
    x = randn(4, 10, 50, 40) * 10
    x = {
        "plain": lambda: x,
        "transposed": lambda: x.transpose(1, 3),
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "expanded": lambda: x[:, :1].expand(4, 10, 50, 40),
        "half": x.half,
        "int64": x.long,
    }[layout]()
    shares = 0.03 if sample else 1e-6
    assert_stats(watch(x, sample=sample).stats[0]["odd"], x, shares=shares)
    if not x.is_floating_point() or layout == "expanded":
        return
    x[-1, -1, -1, -1], x[0, 0, 0, 0], x[2, 3, 4, 5] = NAN, INF, -INF
    assert_stats(watch(x, sample=sample).stats[0]["odd"], x, shares=shares)


def test_up_to_8192_elements_all_count():
    for n, exact in ((8_191, True), (8_192, True), (8_193, False)):
        x = torch.ones(n)
        x[:: n // 3 + 1] = 0  # 3 elements, which a sample of 4,096 shows as a multiple of 1/4096
        zeros = watch(x).stats[0]["odd"]["zeros"]
        assert (zeros == pytest.approx(3 / n, rel=1e-5)) == exact
        assert (zeros * 4096) % 1 == pytest.approx(0, abs=1e-3) or exact


@pytest.mark.parametrize(("n", "size"), [(10, 1000), (10, 1009), (2, 1000), (999, 1000), (64, 4097)])
def test_a_sample_of_all_statistics_has_one_element_of_each_stratum(n, size):
    x = torch.arange(float(size))
    got = watch(x, x, sample=n).stats
    width = size / n
    for one in (got[0]["odd"], got[1]["odd"]):
        assert 0 <= one["min"] <= math.ceil(width)
        assert size - math.ceil(width) - 1 <= one["max"] <= size - 1
        assert one["mean"] == pytest.approx(x.mean().item(), abs=width / 2 + 1)
        assert n == 2 or one["std"] == pytest.approx(x.std().item(), rel=0.25)
    assert got[0]["odd"] == got[1]["odd"]


def test_a_sample_is_of_all_the_output_whatever_its_layout():
    x = torch.arange(24_000.0).view(2, 12, 1000)
    for out in (x, x.transpose(0, 2), x.permute(1, 0, 2), x.flip(2), x[:, ::2], x.half()):
        got = watch(out, sample=1000).stats[0]["odd"]
        want = oracle(out)
        assert got["mean"] == pytest.approx(want["mean"], rel=0.1)
        assert got["std"] == pytest.approx(want["std"], rel=0.1)
        assert got["min"] >= want["min"]
        assert got["max"] <= want["max"]


# ---- outputs of models


def of_model(model, batches):
    """Statistics of all modules of a model in training, and of all elements; copies of what they put out."""
    calls = calls_of(model)
    cbs = [
        ActivationStats(modules=lambda m: True),
        ActivationStats(modules=lambda m: True, sample=None, name="all"),
    ]
    torch.manual_seed(3)
    fit(Learner(batches, model, lambda p: p.float().mean(), torch.optim.SGD, lr=0.05, cbs=cbs))
    return cbs, calls


def named(path):
    """What `zoo.flat` calls a path, as the names of layers have it."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


MODELS = [
    *("residual", "shared", "in_place_modules", "in_place_twice", "post_activation_resnet", "lstm"),
    *("transformer_layer", "attention", "autocast", "no_grad_part", "spectral_norm"),
    *("norm_and_dropout", "frozen_in_the_middle", "sparse_embedding", "custom_function"),
    *("returns_tuple", "returns_nested", "returns_dict", "returns_dataclass"),
    *("returns_bfloat16", "returns_float64", "returns_bool", "returns_int", "returns_expanded"),
    *("returns_zero_d", "returns_one_element", "returns_empty", "in_place_relu", "in_place_view"),
    *("in_place_data", "in_place_detached", "in_place_mask", "in_place_item_of_a_tuple"),
    *("in_place_item_of_a_dict", "in_place_view_output", "in_place_output_is_input"),
]


@pytest.mark.parametrize("name", MODELS)
def test_each_call_of_each_module_is_measured_as_it_was_when_it_returned(name):
    model = zoo.make(name)
    (stats, by_all), calls = of_model(model, [zoo.make_input(k) for k in range(3)])
    seen = 0
    for path, module in model.named_modules():
        n_calls = len(calls.get(module, ())) // 3
        for i, outs in enumerate(calls.get(module, ())):
            call = f"#{i % n_calls}" if n_calls > 1 else ""
            for keys, out in outs.items():
                whole = path or type(model).__name__
                (layer,) = {whole + call + named(keys), whole + named(keys) + call} & set(stats.names)
                assert_stats(stats.stats[i // n_calls][layer], out)
                assert_stats(by_all.stats[i // n_calls][layer], out)
                seen += 1
    assert seen == len(stats.table()) // len(LAYER_STATS) == len(by_all.table()) // len(LAYER_STATS) >= 6


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_network_of_convolutions_is_measured_in_any_format(channels_last, dtype):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = cnn().to(dtype).to(memory_format=layout)
    batches = [randn(6, 3, 8, 8, seed=k).to(dtype).to(memory_format=layout) for k in range(3)]
    (stats, _), calls = of_model(model, batches)
    assert sorted(stats.names) == ["0", "1", "2", "3", "4", "5", "6", "Sequential"]
    for name, module in model.named_modules():
        for record, outs in zip(stats.stats, calls[module], strict=True):
            assert_stats(record[name or "Sequential"], outs[()])


def test_an_lstm_is_named_by_path_and_a_packed_sequence_is_measured():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.fc = nn.LSTM(2, 3, num_layers=2, bidirectional=True), nn.Linear(3, 1)

        def forward(self, x):
            return self.fc(self.lstm(x)[1][0][-1])

    model = Rnn()
    for x in (randn(5, 4, 2), PACKED):
        with torch.no_grad():
            out, (h, c) = model.lstm(x)
        stats = ActivationStats(modules="lstm")
        fit(Learner([(x,)], model, torch.mean, torch.optim.SGD, lr=0.0, n_inp=1, cbs=stats))
        assert {"lstm[1][0]", "lstm[1][1]"} < set(stats.names)
        assert len(stats.names) == 3
        assert stats.names[0].startswith("lstm[0]")
        assert x is PACKED or stats.names[0] == "lstm[0]"
        for name, t in zip([stats.names[0], "lstm[1][0]", "lstm[1][1]"], [out.data, h, c], strict=True):
            assert_stats(stats.stats[0][name], t)


@pytest.mark.parametrize("first", ["inference", "plain"])
def test_a_layer_run_in_inference_mode_is_measured_as_any_other(first):
    class Mixed(Around):
        def forward(self, x):
            self.n = getattr(self, "n", 0) + 1
            with torch.inference_mode((self.n % 2 == 1) == (first == "inference")):
                self.odd(x.clone())
            return self.fc(x)

    outs = [randn(9, 3, seed=k) for k in range(5)]
    stats = ActivationStats(True, modules="odd", keep=4)
    batches = [torch.ones(3, 2)] * 5
    fit(Learner(batches, Mixed(Puts(outs)), torch.mean, torch.optim.SGD, cbs=stats))
    for record in stats.stats:
        assert_stats(record["odd"], outs[record.step])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_model_costs_no_precision(dtype):
    class Autocast(Around):
        def forward(self, x):
            with torch.autocast("cpu", dtype):
                return super().forward(x).float()

    outs = [spread_in(size=8000, at=at) for at in (0.0, 20.0, 1e4)]
    stats = ActivationStats(modules="odd")
    fit(Learner([torch.ones(3, 2)] * 3, Autocast(Puts(outs)), torch.mean, torch.optim.SGD, cbs=stats))
    for record, out in zip(stats.stats, outs, strict=True):
        assert_stats(record["odd"], out)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_changes_no_value(default_dtype, dtype):
    x = randn(1000) + 100
    model, batches = Around(Puts([x, x])), [torch.ones(3, 2)] * 2
    stats = ActivationStats(True, modules="odd")
    learn = Learner(batches, model, torch.mean, torch.optim.SGD, cbs=stats)
    default_dtype(dtype)
    fit(learn)
    for record in stats.stats:
        assert_stats(record["odd"], x)
    assert stats.hist("odd")[:, -1].double().expm1().sum().item() == pytest.approx(1000)


def test_a_view_that_is_changed_after_the_layer_was_measured_before():
    class Wipes(Around):
        def forward(self, x):
            out = self.odd(x)
            F.relu(out, inplace=True).zero_()
            return self.fc(x)

    outs = [randn(100, seed=k) for k in range(3)]
    copies = [out.clone() for out in outs]
    stats = ActivationStats(modules="odd", sample=50, with_hist=True)
    exact = ActivationStats(modules="odd", name="exact")
    batches = [torch.ones(3, 2)] * 3
    fit(Learner(batches, Wipes(Puts(outs)), torch.mean, torch.optim.SGD, cbs=[stats, exact]))
    for k, out in enumerate(copies):
        assert_stats(exact.stats[k]["odd"], out)
        assert stats.stats[k]["odd"]["zeros"] == 0


@in_turn(
    "n, dtype",
    itertools.product([2, 1000, 70_000], [torch.float64, torch.float32, torch.bfloat16, torch.int64]),
)
def test_sums_that_are_merged_later_are_in_float64(n, dtype):
    x = (1e3 + 5 * randn(n)).to(dtype)
    for sample in ("auto", None, 1 << 30):
        values = of_taken(take(x, sample))
        assert values.dtype is torch.float64
        assert values[0].item() == pytest.approx(x.double().mean().item(), rel=1e-14)
        assert values[1].item() == pytest.approx(x.double().std().item(), rel=1e-11)


def normal(n, seed=0):
    return 3 * randn(n, seed=seed) + 7


def of_parts(*parts, pivot=6.0):
    """Statistics of all elements of parts, each of which is elements and the number that they stand for."""
    sums = torch.cat([summarize(x[None], (), 0.05, n) for x, n in parts])
    total, pivots = added(sums, torch.tensor(pivot)).sum(0, True), torch.tensor([pivot])
    whole = joined(total, pivots, sums[:, LOW].amin(0, True), sums[:, HIGH].amax(0, True))
    return stats_of(whole)[0, : len(LAYER_STATS)].tolist()


@pytest.mark.parametrize("sizes", [[1, 99, 900], [1000], [0, 1000], [333, 0, 667], [10, 990]], ids=str)
def test_sums_of_parts_make_those_of_the_whole(sizes):
    x = normal(1000)
    found = of_parts(*((part, len(part)) for part in x.split(sizes)))
    assert found == pytest.approx(list(oracle(x).values()), rel=1e-6)


@in_turn("seed", range(8))
def test_sums_of_any_split_make_those_of_the_whole(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, generator=generator, dtype=torch.float64) ** (1 + seed % 3) * 10 ** (seed - 4)
    x[: 500 * (seed % 2)] = x[0]  # some parts have no spread
    x += 3 * x.std() * (seed % 4)
    cuts = sorted(torch.randint(0, 3001, (6,), generator=generator).tolist())
    parts = x.tensor_split(cuts)
    pivot = x[0].item()
    found = of_parts(*((part, len(part)) for part in parts), pivot=pivot)
    assert found == pytest.approx(list(oracle(x).values()), rel=1e-9, abs=1e-12)


def test_a_kurtosis_whose_digits_were_lost_around_a_far_pivot_is_nan():
    x = normal(5000).double()
    for pivot, is_lost in ((7.0, False), (30.0, False), (1e3, True)):
        z = (x - pivot).float().double()
        sums = [
            len(x),
            z.sum(),
            z.square().sum(),
            0,
            0,
            0,
            (z**3).sum(),
            (z**4).sum(),
            pivot,
            1,
            x.min(),
            x.max(),
        ]
        found = stats_of(torch.tensor([sums], dtype=torch.float64))[0]
        assert found[8].item() == pytest.approx(x.square().mean().sqrt().item(), rel=1e-6)
        assert math.isnan(found[9]) == is_lost
        assert is_lost or found[9].item() == pytest.approx(oracle(x)["kurtosis"], rel=1e-2)


def test_the_kurtosis_of_a_sample_has_the_standard_error_that_is_told():
    found = [
        dict(zip(LAYER_STATS, of_taken(take(normal(20_000, seed=k), "auto")).tolist(), strict=True))[
            "kurtosis"
        ]
        for k in range(60)
    ]
    spread = torch.tensor(found) - 3
    assert abs(spread.mean().item()) < 0.04
    assert 0.05 < spread.square().mean().sqrt().item() < 0.11  # sqrt(24 / 4,096) = 0.077


def test_a_sample_counts_for_all_that_it_stands_for():
    x, y = normal(100), normal(100, seed=1) + 5
    whole = list(oracle(torch.cat([x, y.repeat(9)])).values())
    mean, std, *others = of_parts((x, 100), (y, 900))
    spread = [x.double().std().square().item(), y.double().std().square().item()]
    variance = (99 * spread[0] + 899 * spread[1] + 90 * (y.mean() - x.mean()).item() ** 2) / 999
    assert (mean, std) == pytest.approx((whole[0], variance**0.5), rel=1e-6)
    assert others[:-2] == pytest.approx(whole[2:-2], rel=1e-6)
    assert others[-2:] == pytest.approx(whole[-2:], rel=1e-2)  # of a sample


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_share_of_all_parts_is_unknown_only_if_no_part_has_a_finite_element(bad):
    some, none = (torch.tensor([0.0, 0.01, 3.0, 4.0]), 4), (torch.full((4,), bad), 4)
    assert of_parts(some, none)[5:7] == [2 / 8, 1 / 8]
    assert all(map(math.isnan, of_parts(none, none)[5:7]))


@pytest.mark.parametrize(
    ("ratio", "n", "kind"),
    covering(
        [0, 2, 5, 8, 15, 40, 1e4],
        [1_000, 8_192, 8_193, 65_536, 131_072, 1_000_000],
        ["two values", "tiles", "normal"],
    ),
)
def test_the_std_of_few_distinct_values_is_exact_too(kind, n, ratio):
    """Their squares are rounded alike, so that errors add up rather than cancel."""
    generator = torch.Generator().manual_seed(0)
    distinct = {"two values": torch.tensor([1.0, -1.0]), "tiles": torch.randn(8, generator=generator)}
    values = distinct.get(kind, torch.randn(n, generator=generator))
    x = values.repeat(-(-n // len(values)))[:n]
    x = (x + ratio * x.std()) * 0.3
    found = of_taken(take(x, "auto"))
    assert found[0] == pytest.approx(x.double().mean().item(), rel=1e-6, abs=1e-6)
    assert found[1] == pytest.approx(x.double().std().item(), rel=4e-4)
