"""The kernel against an independent float64 oracle: on a card where there is one, else interpreted."""

import math
import os
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch

from hookcb import ActivationRecords, ActivationStats, Learner
from hookcb.activations import buffer, slab
from hookcb.activations.bins import Bins
from hookcb.activations.kernel import BLOCK
from hookcb.activations.slab import NOT_CALLED, SHARE, Slab, can_take
from hookcb.activations.stats import COLUMNS, LAYER_STATS, layer_stats, stats_of
from hookcb.core import triton_kernel
from tests.support import notice_waits, pairs

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before any test may do that

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    # the interpreter is numpy, which warns of inf - inf and 0 / 0
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([pytest.mark.cuda] if CUDA else []),
]

EPS = 0.05
REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
INF, NAN = math.inf, math.nan
POWERS = [COLUMNS.index(x) for x in ("n", "sum1", "sum2", "sum3", "sum4", "pivot", "scale")]
PIVOT, SCALE = POWERS[5:]


def oracle(x, eps=EPS):
    """The ten statistics as Python floats, from a list of Python floats."""
    x = x.detach().cpu()
    x = x if x.dtype is torch.float64 else x.float()
    values, limit = x.flatten().tolist(), torch.tensor(eps, dtype=x.dtype).item()
    n, finite = len(values), [v for v in values if math.isfinite(v)]
    if n == 0:
        return [NAN] * 7 + [0, NAN, NAN]
    mean = math.fsum(values) / n if len(finite) == n else sum(values) / n
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else NAN
    low, high = (min(finite), max(finite)) if finite else (NAN, NAN)
    near, zeros = sum(abs(v) <= limit for v in values), sum(v == 0 for v in values)
    shares = (near / n, zeros / n) if finite else (math.nan, math.nan)
    size = max(abs(low), abs(high))
    rms = size * math.sqrt(math.fsum((v / (size or 1)) ** 2 for v in values) / n) if finite else abs(mean)
    rms, kurtosis = (rms, NAN) if len(finite) == n else (abs(mean), NAN)
    if len(finite) == n and low < high:
        z = [(v - mean) / (high - low) for v in values]
        kurtosis = n * math.fsum(v**4 for v in z) / math.fsum(v * v for v in z) ** 2
    return [mean, std, low, high, size, *shares, n - len(finite), rms, kurtosis]


class Rows:
    """A slab whose kernel takes any tensor; row 2 of record 1 is written."""

    def __init__(self, eps=EPS, bins=None, most=None, counts_all=True):
        self.slab = Slab(torch.device(DEVICE), eps, bins, counts_all)
        self.slab.most = min(most or self.slab.most, self.slab.most)
        self.slab._cursor.fill_(1)
        for call in range(2):
            self.slab._prepared("others", call, torch.zeros(2, device=DEVICE), "", self.slab.sums)

    def output_of(self, x):
        ready = self.slab._prepared("x", 0, x, "", self.slab.sums)
        self.slab._launch(x, ready)
        return ready.output

    def launch(self, x):
        self.output_of(x)
        return self.slab.sums[1, 2]


def sums_of(x, eps=EPS, bins=None, most=None, counts_all=True):
    """The row that one launch writes."""
    rows = Rows(eps, bins, most, counts_all)
    rows.launch(x)
    written = (rows.slab.sums != NOT_CALLED).any(-1).nonzero().tolist()
    assert written == [[1, 2]]
    return rows.slab.sums[1, 2]


def kernel_stats(x, eps=EPS, most=None):
    return stats_of(sums_of(x, eps, most=most))[: len(LAYER_STATS)]


def check(x, eps=EPS, most=None):
    got = kernel_stats(x, eps, most)
    assert got.shape == (10,)
    assert got.device == x.device
    expected = torch.tensor(oracle(x, eps), dtype=torch.float64)
    spread, size = (expected[k].nan_to_num(0, 0).item() for k in (1, 4))
    digits = 1e-9 if x.dtype is torch.float64 else 1e-6
    close = {"rtol": digits, "equal_nan": True}
    torch.testing.assert_close(got[:1].cpu(), expected[:1], atol=digits * spread + 1e-9 * size, **close)
    torch.testing.assert_close(
        got[1:2].cpu(), expected[1:2], atol=0, **close | {"rtol": max(1e-8, 3 * digits)}
    )
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(got[2:8].cpu(), expected[2:8], **exact)
    torch.testing.assert_close(got[8:9].cpu(), expected[8:9], atol=0, **close | {"rtol": 3 * digits})
    torch.testing.assert_close(got[9:].cpu(), expected[9:], atol=0, **close | {"rtol": 1e-2})


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", REAL + WHOLE, ids=str)
@pytest.mark.parametrize("n", [1, 2, 127, BLOCK + 1])
def test_every_dtype_is_widened_and_described(dtype, n):
    if dtype in REAL:
        x = normal(n).to(dtype)
    else:
        unsigned = not dtype.is_signed
        x = (normal(n) * 3).abs().to(dtype) if unsigned else (normal(n) * 50).to(dtype)
    check(x)


@pytest.mark.parametrize("most", [2, 1024])  # 2: each reads more than its share
@pytest.mark.parametrize(
    "n", [1, 2, 127, BLOCK - 1, BLOCK, BLOCK + 1, SHARE, SHARE + 1, 3 * SHARE + 1, 100_003]
)
def test_sizes_around_blocks_and_programs(n, most):
    check(normal(n, seed=n), most=most)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offset", [0, 1e3, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_offset_costs_no_digits(dtype, offset, seed):
    check(normal(3001, seed=seed).to(dtype) + offset)


@pytest.mark.parametrize("seed", range(10))
def test_random_mixtures_of_values(seed):
    x = normal(5000, seed=seed) * 10 ** (normal(5000, seed=seed + 100) * 3)
    kinds = torch.randint(0, 40, (5000,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    check(x.where(kinds > 3, 0.0))
    for kind, odd in enumerate([INF, -INF, NAN][: seed % 4]):
        x = x.where(kinds != kind, odd)
        check(x)


LAYOUTS = {
    "channels-last": lambda: normal(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "channels-last 3d": lambda: normal(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: normal(37, 41).t(),
    "permuted": lambda: normal(3, 4, 5, 6).permute(2, 0, 3, 1),
    "one long dimension": lambda: normal(1, 130, 1).transpose(0, 1),
    "a view that begins later": lambda: normal(2000)[7:],
    "strided": lambda: normal(4000)[::3],
    "cut out": lambda: normal(40, 50)[3:30, 5:41],
    "expanded": lambda: normal(30, 1).expand(30, 50),
    "expanded scalar": lambda: normal(1).expand(2, 100),
    "overlapping": lambda: normal(100).as_strided((40, 40), (1, 1)),
    "negated lazily": lambda: torch.complex(normal(50), normal(50, seed=1)).conj().imag,
    "transposed bool": lambda: (normal(30, 40) > 0.3).t(),
    "0-d": lambda: normal(1)[0],
    "parameter": lambda: torch.nn.Parameter(normal(20, 30)),
    "inside a graph": lambda: torch.nn.Parameter(normal(20, 30)).exp(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_described_and_left_as_it_is(layout):
    x = LAYOUTS[layout]()
    before, version = x.detach().clone(), x._version
    check(x)
    assert torch.equal(x, before)
    assert x._version == version


ODD = [(INF,), (-INF,), (INF, -INF), (NAN,), (NAN, INF), (INF, INF)]


@pytest.mark.parametrize(
    ("dtype", "n", "odd", "place"), pairs(REAL, [1, 3, BLOCK + 5], ODD, ["first", "last", "everywhere"])
)
def test_nan_and_inf_are_counted_and_shown(dtype, n, odd, place):
    odd = tensor(*odd, dtype=dtype)
    x = normal(n).to(dtype)
    check({"first": torch.cat([odd, x]), "last": torch.cat([x, odd]), "everywhere": odd.repeat(n)}[place])


@pytest.mark.parametrize("value", [0.0, -0.0, 3.5, -1e6, NAN, INF])
def test_one_element_has_no_std(value):
    x = tensor(value)
    assert math.isnan(kernel_stats(x, EPS)[1])
    check(x)


def test_values_near_the_ends_of_float32_neither_overflow_nor_vanish():
    top = torch.finfo(torch.float32).max
    check(tensor(top, top, top * 0.5))
    check(tensor(*[top, -top] * 600, 0))  # the sum of its squares overflows, std does not
    check(normal(3000) * 1e-30)  # the squares vanish
    check(tensor(1e-45, -1e-45, 0.0, 1e-40), eps=1e-42)  # denormal


def test_a_constant_has_exactly_no_spread():
    assert kernel_stats(torch.full((3001,), 123_456.7, device=DEVICE), EPS)[1] == 0


def test_a_first_element_far_off_costs_no_digits():
    x = normal(20_000)
    for far in (1e4, -1e8, 1e30):
        x[0] = far
        check(x)
    check(torch.cat([tensor(0.0), normal(20_000) + 1e6]))


def test_float64_keeps_its_digits():
    check(normal(3001).double() * 1e-3 + 1e9)
    check(normal(3001).double() * 1e-60)
    check(tensor(0.05, 0.05 + 1e-17, 0.05 + 1e-15, -0.05, dtype=torch.float64))
    check(tensor(1e300, 0, dtype=torch.float64)[1:])


@pytest.mark.parametrize("eps", [0, 0.05, 1, 2.5, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32], ids=str)
def test_near_zero_includes_its_limit(dtype, eps):
    check(tensor(0, -0.0, 0.05, -0.05, 0.0501, 1, -1, 2.5, -2.5, 2.51, 3).to(dtype), eps)


def test_the_order_is_that_of_the_plain_statistics():
    x = normal(4, 77)
    torch.testing.assert_close(kernel_stats(x, EPS), layer_stats(x, EPS).double(), rtol=1e-5, atol=1e-6)


def test_global_settings_of_the_user_do_not_matter():
    x = normal(300)
    expected = kernel_stats(x, EPS)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"), torch.autocast(DEVICE, torch.bfloat16):
            got = kernel_stats(x, EPS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_calls_agree_to_the_bit():
    x = normal(100_003)
    assert torch.equal(kernel_stats(x, EPS), kernel_stats(x, EPS))


@pytest.mark.parametrize("bins", [Bins(60), Bins(41), Bins(1), Bins(2), Bins(40, (-3.0, 3.0))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_a_histogram_is_counted_in_the_same_pass(bins, dtype):
    x = (normal(3 * SHARE + 3) ** 3 * 30).to(dtype)
    x[:3] = 0
    if dtype is not torch.int32:
        x[:3] = tensor(NAN, INF, -INF)
    counts = sums_of(x, bins=bins, most=2)[len(COLUMNS) :]
    wide = x if dtype is torch.float64 else x.float()
    moved = (counts - bins.counts_of(wide[None])[0]).abs().sum().item()
    assert counts.sum() == (~wide.isnan()).sum()
    assert moved <= (8 if CUDA else 0)  # a card's logarithm is rounded otherwise


@pytest.mark.parametrize("n", [8193, 100_003, 1_000_003])
def test_a_histogram_of_many_elements_is_of_some_that_are_spread_evenly(n):
    bins = Bins(8, (0.0, 1.0))
    x = torch.arange(n, device=DEVICE, dtype=torch.float32) / n
    counts = sums_of(x, bins=bins, counts_all=False)[len(COLUMNS) :].cpu()
    expected = Rows(bins=bins, counts_all=False).output_of(x).n_counted
    assert 4096 <= expected <= n / 1.5
    assert counts.sum().item() == pytest.approx(expected, rel=0.03)
    assert counts[0] == counts[-1] == 0
    assert counts[1:-1].tolist() == pytest.approx([expected / 8] * 8, rel=0.1)
    assert torch.equal(counts, sums_of(x, bins=bins, counts_all=False)[len(COLUMNS) :].cpu())


def test_the_sums_of_parts_merge_to_those_of_the_whole():
    x = normal(30_000) * 3 + 7
    whole = sums_of(x)
    moments = [0.0] * 4  # of the whole, around its pivot
    for part in map(sums_of, x.split([1, 999, 9000, 20_000])):
        n, *sums, pivot, scale = part[POWERS].tolist()
        raw = [n, *(s / scale**k for k, s in enumerate(sums, 1))]
        away = pivot - whole[PIVOT].item()
        for k in range(1, 5):
            moments[k - 1] += sum(math.comb(k, i) * away ** (k - i) * raw[i] for i in range(k + 1))
    scales = whole[SCALE].item() ** torch.arange(1, 5)
    found = whole[POWERS[1:5]].float().cpu()
    torch.testing.assert_close(torch.tensor(moments) * scales, found, rtol=1e-5, atol=0.05)


def test_a_negative_cursor_lets_it_rest():
    rows, x = Rows(), normal(100)
    rows.slab._cursor.fill_(-1)
    assert (rows.launch(x) == NOT_CALLED).all()
    rows.slab._cursor.fill_(1)
    assert rows.launch(x)[0] == 100


def test_a_launch_leaves_nothing_behind_for_the_next():
    bins = Bins(60)
    rows = Rows(bins=bins)
    for n in (50_000, 3, 20_000):
        x = normal(n)
        assert torch.equal(rows.launch(x), sums_of(x, bins=bins))


def as_on_a_card(monkeypatch, works=True):
    """Hooks take tensors on a CPU for those of a card, or those of a card for others."""
    for module in (slab, buffer):
        monkeypatch.setattr(module, "works_on", lambda device, dtype=None: works)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"with_hist": True, "sample": None}, {"every": 3}, {"on_valid": True}], ids=str
)
def test_a_fit_has_the_records_of_plain_operations(monkeypatch, options, is_compiled):
    def trained():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
        model = model.insert(2, model[1]).to(DEVICE)  # called twice
        if is_compiled:
            model.compile(backend="eager", fullgraph=True)
        data = [(normal(40, 4, seed=i), normal(40, 1, seed=i + 7)) for i in range(7)]
        stats = ActivationStats(include_paramless=True, **options)
        learn = Learner(
            (data, data[:2]), model, torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1, cbs=stats
        )
        with learn.no_logging():
            learn.fit(1)
        return stats

    as_on_a_card(monkeypatch, works=False)
    plain = trained()
    as_on_a_card(monkeypatch)
    found = trained()
    assert found.records.buffer.slabs
    assert found.names == plain.names
    assert found.outputs == plain.outputs
    for phase in ("train", "valid"):
        assert found.steps(phase) == plain.steps(phase)
        for name in plain.names:
            for stat in plain.columns:
                close = pytest.approx(plain.series(name, stat, phase), rel=1e-5, abs=1e-6, nan_ok=True)
                if stat not in ("near_zero", "zeros"):  # of a sample, without a card
                    assert found.series(name, stat, phase) == close, (name, stat)
            if options.get("sample", 1) is None:
                assert torch.equal(found.hist(name, phase).float(), plain.hist(name, phase).float())


def test_a_cancelled_batch_and_a_read_in_mid_batch_leave_the_records_right(monkeypatch):
    as_on_a_card(monkeypatch)
    records = ActivationRecords()
    seen = []
    for step in range(80):
        records.take("fc", torch.full((5,), float(step), device=DEVICE), "Linear")
        if step % 7 == 3:
            records.drop_batch()
            continue
        if step % 11 == 5:
            seen.append(records.series("fc", "mean"))
        if step % 2:
            records.take("odd", torch.full((5,), float(-step), device=DEVICE), "Linear")
        records.end_batch("train", 0, step)
    kept = [step for step in range(80) if step % 7 != 3]
    assert records.series("fc", "mean") == list(map(float, kept))
    assert records.series("odd", "mean") == pytest.approx(
        [-float(s) if s % 2 else NAN for s in kept], nan_ok=True
    )
    assert all(own == list(map(float, kept[: len(own)])) for own in seen)
    assert pickle.loads(pickle.dumps(records)).series("fc", "mean") == list(map(float, kept))


def test_importing_the_module_does_not_import_triton():
    code = "import sys, hookcb.activations.kernel; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_elsewhere_than_on_a_card_are_not_taken():
    assert not can_take(torch.zeros(9))
    assert not can_take(torch.zeros(9, device="meta"))


@pytest.fixture
def undecided(monkeypatch):
    """Whether Triton works is asked anew, for a device that is called a card."""
    monkeypatch.setattr(triton_kernel, "torch", torch)
    slab.works_on.cache_clear()
    yield torch.device("cuda")
    slab.works_on.cache_clear()


def test_a_triton_that_cannot_compile_is_left_alone_with_a_warning(undecided, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(slab, "Slab", fails)
    with pytest.warns(UserWarning, match="no kernels on cuda, plain operations are slower: .*no C compiler"):
        assert not slab.works_on(undecided)
    with warnings.catch_warnings(action="error"):
        assert not slab.works_on(undecided)  # once is enough


def test_without_triton_nothing_is_said(undecided, monkeypatch):
    monkeypatch.setattr(triton_kernel, "find_spec", lambda name: None)
    assert not slab.works_on(undecided)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from hookcb.activations.kernel import BLOCK, KERNEL

KINDS = ("fp64", "i64", 0), ("fp32", "i32", 0), ("bf16", "i32", 0), ("fp32", "i64", 64), ("u8", "i32", 64)
TYPES = {"x": "", "rows": "*fp64", "stride": "i32", "place": "i32", "cursor": "*i32", "parts": "*fp64"}
TYPES |= {"totals": "*i64", "n": "i32", "blocks": "i32", "passes": "i32", "limits": "*fp64"}
TYPES |= {"most": "i32"}
for target in GPUTarget("cuda", 75, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64):
    for dtype, n, slots in KINDS:
        signature = TYPES | {"x": "*" + dtype, "n": n, "n_slots": "constexpr", "block": "constexpr"}
        pointers = [i for i, x in enumerate(signature.values()) if x.startswith("*")]
        aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
        constants = {"n_slots": slots, "block": BLOCK}
        source = triton.compiler.ASTSource(KERNEL.jit, signature, constants, aligned)
        kernel = triton.compile(source, target=target, options=KERNEL.options)
        if "ptx" in kernel.asm:
            assert "ld.global.v" in kernel.asm["ptx"], "elements are read one by one"
            assert slots or "ftz" not in kernel.asm["ptx"], "denormal numbers count as zeros"
        assert kernel.metadata.shared <= 8192, kernel.metadata
print("compiled")
"""


def test_the_kernel_compiles_for_cards_that_are_not_there(tmp_path):
    # the interpreter takes what the compiler refuses
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "build.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, "-W", "error", script], env=env, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.cuda
def test_nothing_waits_for_the_card():
    x = normal(2, 3, 500, 7).to(memory_format=torch.channels_last)
    kernel_stats(x, EPS)
    rows = Rows()
    notice_waits("error")
    try:
        stats = [stats_of(rows.launch(part)) for part in (x, x[..., ::2])]
    finally:
        notice_waits("default")
    assert [len(of_part) for of_part in stats] == [8, 8]


@pytest.mark.cuda
def test_more_elements_than_32_bits_can_count():
    x = torch.zeros(2**31 + 2**20 + 5, dtype=torch.int8, device=DEVICE)
    x[-1], x[2**31 + 1] = 7, -3
    got = kernel_stats(x, EPS).tolist()
    assert got[2:5] == [-3, 7, 7]
    assert got[0] == pytest.approx(4 / len(x), rel=1e-6)
    assert got[1] == pytest.approx(math.sqrt(58 / len(x)), rel=1e-6)
    assert got[6] == pytest.approx(1)


@pytest.mark.cuda
def test_dense_tensors_on_a_card_are_taken():
    x = torch.zeros(300, 20, device=DEVICE)
    assert can_take(x)
    assert can_take(x.t())
    assert not can_take(x[:0])
    assert not can_take(x[:1].expand(9, 20))
    assert not can_take(x.to(torch.float8_e5m2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_tensor_on_another_card_than_the_current_is_described_there():
    check(normal(5000).to("cuda:1"))
