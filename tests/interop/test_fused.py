"""The fused kernels against an independent float64 oracle: on a card where there is one, else interpreted."""

import math
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hookcb.activations import fused
from hookcb.activations.fused import BLOCK, can_fuse, fused_layer_stats
from hookcb.activations.stats import layer_stats
from tests.support import notice_waits

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
RARE = [torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2]
INF, NAN = math.inf, math.nan


def oracle(x, eps=EPS):
    """The eight statistics as Python floats, from a list of Python floats."""
    x = x.detach().cpu()
    x = x if x.dtype is torch.float64 else x.float()
    values, limit = x.flatten().tolist(), torch.tensor(eps, dtype=x.dtype).item()
    n, finite = len(values), [v for v in values if math.isfinite(v)]
    if n == 0:
        return [NAN] * 7 + [0]
    mean = math.fsum(values) / n if len(finite) == n else sum(values) / n
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else NAN
    low, high = (min(finite), max(finite)) if finite else (NAN, NAN)
    near, zeros = sum(abs(v) <= limit for v in values), sum(v == 0 for v in values)
    shares = (near / n, zeros / n) if finite else (math.nan, math.nan)
    return [mean, std, low, high, max(abs(low), abs(high)), *shares, n - len(finite)]


def check(x, eps=EPS):
    got = fused_layer_stats(x, eps)
    assert got.shape == (8,)
    assert got.dtype is (torch.float64 if x.dtype is torch.float64 else torch.float32)
    assert got.device == x.device
    assert not got.requires_grad
    expected = torch.tensor(oracle(x, eps), dtype=torch.float64).to(got.dtype)
    rounding = 1e-9 * expected[4].nan_to_num().item()  # where positive and negative values cancel
    close = {"rtol": 1e-6, "atol": rounding, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(got[:1].cpu(), expected[:1], **close)
    torch.testing.assert_close(got[1:2].cpu(), expected[1:2], **close | {"atol": 0})
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(got[2:].cpu(), expected[2:], **exact)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_that_are_merged_later_are_not_rounded(dtype):
    x = (1e3 + normal(20_000)).to(dtype)
    got, exact = fused_layer_stats(x, EPS, wide=True), x.double()
    assert got.dtype is torch.float64
    assert got[0].item() == pytest.approx(exact.mean().item(), rel=1e-14)
    assert got[1].item() == pytest.approx(exact.std().item(), rel=1e-10)


@pytest.mark.parametrize("dtype", REAL + WHOLE + RARE, ids=str)
@pytest.mark.parametrize("n", [1, 2, 127, BLOCK + 1])
def test_every_dtype_is_widened_and_described(dtype, n):
    if dtype in REAL + RARE[-2:]:
        x = normal(n).to(dtype)
    else:
        unsigned = not dtype.is_signed
        x = (normal(n) * 3).abs().to(dtype) if unsigned else (normal(n) * 50).to(dtype)
    check(x)


@pytest.mark.parametrize("programs", [2, 1024])  # 2: each reads more than one block
@pytest.mark.parametrize("n", [1, 2, 127, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 1, 16 * BLOCK, 100_003])
def test_sizes_around_blocks_and_programs(monkeypatch, n, programs):
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    check(normal(n, seed=n))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("offset", [0, 1e3, 1e6, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_offset_costs_no_digits(dtype, offset, seed):
    check(normal(3001, seed=seed).to(dtype) + offset)


@pytest.mark.parametrize("seed", range(10))
def test_random_mixtures_of_values(monkeypatch, seed):
    monkeypatch.setattr(fused, "PROGRAMS", 2)
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
    "dense, negated lazily": lambda: torch.complex(normal(1), normal(1, seed=1)).conj().imag,
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


class Seen(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


WAITS = {"_local_scalar_dense", "_to_copy", "item", "nonzero", "is_nonzero", "equal"}
COPIED = {"strided", "cut out", "expanded", "expanded scalar", "overlapping"} | {
    layout for layout in LAYOUTS if "negated" in layout
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_waits_and_only_memory_with_gaps_is_copied(layout):
    x = LAYOUTS[layout]()
    fused_layer_stats(x, EPS)  # compiles
    with Seen() as seen:
        fused_layer_stats(x, EPS)
    assert "empty" in seen.names  # the test looks at the right place
    assert not WAITS & {*seen.names}
    assert ("clone" in seen.names) == (layout in COPIED)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("n", [1, 3, BLOCK + 5])
@pytest.mark.parametrize(
    "odd", [(INF,), (-INF,), (INF, -INF), (NAN,), (NAN, INF), (INF, INF)], ids=lambda odd: str(odd)
)
@pytest.mark.parametrize("place", ["first", "last", "everywhere"])
def test_nan_and_inf_are_counted_and_shown(dtype, n, odd, place):
    odd = tensor(*odd, dtype=dtype)
    x = normal(n).to(dtype)
    check({"first": torch.cat([odd, x]), "last": torch.cat([x, odd]), "everywhere": odd.repeat(n)}[place])


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.float8_e5m2], ids=str)
def test_an_empty_tensor_has_no_statistics_and_nothing_that_is_not_finite(shape, dtype):
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    got = fused_layer_stats(x, EPS).tolist()
    assert got[:7] == pytest.approx([NAN] * 7, nan_ok=True)
    assert got[7] == 0


@pytest.mark.parametrize("value", [0.0, -0.0, 3.5, -1e6, NAN, INF])
def test_one_element_has_no_std(value):
    x = tensor(value)
    assert math.isnan(fused_layer_stats(x, EPS)[1])
    check(x)


def test_values_near_the_ends_of_float32_neither_overflow_nor_vanish():
    top = torch.finfo(torch.float32).max
    check(tensor(top, top, top * 0.5))
    check(tensor(*[top, -top] * 600, 0))  # the sum of its squares overflows, std does not
    check(normal(3000) * 1e-30)  # the squares vanish
    check(tensor(1e-45, -1e-45, 0.0, 1e-40), eps=1e-42)  # denormal


def test_a_constant_has_exactly_no_spread():
    assert fused_layer_stats(torch.full((3001,), 123_456.7, device=DEVICE), EPS)[1] == 0


def test_a_first_element_far_off_costs_no_digits(monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 2)
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
    torch.testing.assert_close(fused_layer_stats(x, EPS), layer_stats(x, EPS), rtol=1e-5, atol=1e-6)


def test_global_settings_of_the_user_do_not_matter():
    x = normal(300)
    expected = fused_layer_stats(x, EPS)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"), torch.autocast(DEVICE, torch.bfloat16):
            got = fused_layer_stats(x, EPS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_calls_agree_to_the_bit():
    x = normal(100_003)
    assert torch.equal(fused_layer_stats(x, EPS), fused_layer_stats(x, EPS))


def test_importing_the_module_does_not_import_triton():
    code = "import sys, hookcb.activations.fused; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_tensors_on_a_card_can_fuse():
    assert not can_fuse(torch.zeros(fused.THRESHOLD))
    assert not can_fuse(torch.zeros(fused.THRESHOLD, device="meta"))


@pytest.fixture
def undecided():
    """Whether Triton works is asked anew, also after the test."""
    fused._runs_on.cache_clear()
    yield
    fused._runs_on.cache_clear()


def fails_with(error):
    def kernels():
        raise error

    return kernels


def test_where_triton_works_is_found_out_once(undecided, monkeypatch):
    assert fused._runs_on(torch.device(DEVICE))
    monkeypatch.setattr(fused, "_kernels", fails_with(RuntimeError("asked twice")))
    assert fused._runs_on(torch.device(DEVICE))


def test_a_triton_that_cannot_compile_is_left_alone_with_a_warning(undecided, monkeypatch):
    monkeypatch.setattr(fused, "_kernels", fails_with(RuntimeError("no C compiler")))
    with pytest.warns(UserWarning, match="no fused statistics on .*no C compiler"):
        assert not fused._runs_on(torch.device(DEVICE))
    with warnings.catch_warnings(action="error"):
        assert not fused._runs_on(torch.device(DEVICE))  # once is enough


def test_without_triton_nothing_is_said(undecided, monkeypatch):
    monkeypatch.setattr(fused, "_kernels", fails_with(ModuleNotFoundError("no module named 'triton'")))
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not fused._runs_on(torch.device(DEVICE))


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from hookcb.activations.fused import BLOCK, PROGRAMS, _kernels

def build(kernel, target, aligned=(), constants=None, **signature):
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True}).asm

reduce, merge = _kernels()
for target in GPUTarget("cuda", 75, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64):
    for n in "i32", "i64":
        build(merge, target, parts="*fp64", out="*fp32", n=n, programs="i32", constants={"block": PROGRAMS})
    for dtype in "fp64", "fp32", "bf16", "i64", "u8":
        constants = {"eps": 0.05, "real": tl.float64 if dtype == "fp64" else tl.float32, "block": BLOCK}
        asm = build(reduce, target, (0, 1, 2), constants, x="*" + dtype, parts="*fp64", n="i64")
        if "ptx" in asm:
            assert "ld.global.v" in asm["ptx"], "elements are read one by one"
            assert "ftz" not in asm["ptx"], "denormal numbers count as zeros"
print("compiled")
"""


def test_the_kernels_compile_for_cards_that_are_not_there(tmp_path):
    # the interpreter takes what the compiler refuses
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "build.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, "-W", "error", script], env=env, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.cuda
def test_nothing_waits_for_the_card():
    x = normal(2, 3, 500, 7).to(memory_format=torch.channels_last)
    fused_layer_stats(x, EPS)
    notice_waits("error")
    try:
        stats = [fused_layer_stats(part, EPS) for part in (x, x[..., ::2], x[:0])]
    finally:
        notice_waits("default")
    assert [len(of_part) for of_part in stats] == [8, 8, 8]


@pytest.mark.cuda
def test_more_elements_than_32_bits_can_count():
    x = torch.zeros(2**31 + 2**20 + 5, dtype=torch.int8, device=DEVICE)
    x[-1], x[2**31 + 1] = 7, -3
    got = fused_layer_stats(x, EPS).tolist()
    assert got[2:5] == [-3, 7, 7]
    assert got[0] == pytest.approx(4 / len(x), rel=1e-6)
    assert got[1] == pytest.approx(math.sqrt(58 / len(x)), rel=1e-6)
    assert got[6] == pytest.approx(1)


@pytest.mark.cuda
def test_large_tensors_on_a_card_can_fuse():
    x = torch.zeros(fused.THRESHOLD, device=DEVICE)
    assert can_fuse(x)
    assert not can_fuse(x[1:])
    assert not can_fuse(x.to(torch.complex64))
    assert not can_fuse(x.to(torch.float8_e5m2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_tensor_on_another_card_than_the_current_is_described_there():
    check(normal(5000).to("cuda:1"))
