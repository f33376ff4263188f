"""The kernels that read gradients and weights, in float64: on a card, if there is one, else interpreted."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from hookcb import GradientClip, GradientHealth
from hookcb.core.precision import scaled_norm
from hookcb.gradients import device, samples, sums
from hookcb.gradients.samples import Gather, are_same, sketch_copies, sketch_copy, tracked_places
from hookcb.gradients.stats import GRAD_STATS
from hookcb.gradients.sums import BLOCK, CHUNK, COLUMNS, MERGED, READ, Sums
from tests.gradients.support import (
    INF,
    NAN,
    assert_matches,
    at,
    batches,
    by_hand,
    close,
    learner,
    mlp,
    seeded,
)
from tests.support import notice_waits
from tests.training.support import equal

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before any test may do that

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    # the interpreter is numpy, which warns of inf - inf and 0 / 0
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([pytest.mark.cuda] if CUDA else []),
]
each_dtype = pytest.mark.parametrize("dtype", READ, ids=str)


@pytest.fixture
def kernels(monkeypatch):
    """GradientHealth and the samples use kernels, also on the CPU."""
    for module in (device, samples):
        monkeypatch.setattr(module, "works_on", lambda device: True)


def width(x):
    return x.numel() // max(1, len(x)) if x.ndim > 1 else 0


def read(*xs):
    return Sums(DEVICE).of([x.to(DEVICE) for x in xs], [width(x) for x in xs])


def oracle(x):
    wide, rows = x.double(), (x.reshape(len(x), -1) != 0).any(1).sum().item() if x.ndim > 1 and len(x) else 0
    finite = wide[wide.isfinite()]
    largest = finite.abs().max().item() if len(finite) else -1.0
    norm, size, total = (of.item() for of in (scaled_norm(wide.flatten(), 0), wide.abs().sum(), wide.sum()))
    return [norm, size, largest, float(x.numel() - len(finite)), rows, total]


def check(xs):
    got = read(*xs)
    assert torch.equal(got.nan_to_num(7), read(*xs).nan_to_num(7)), "two runs differ"
    for x, row in zip(xs, got.tolist(), strict=True):
        for name, mine, true in zip(COLUMNS, row, oracle(x), strict=True):
            is_cancelling = 1e-6 * x.double().abs().sum().item() if name == "total" else 0.0
            is_exact = name in ("largest", "nonfinite", "rows")
            assert (name == "rows" and x.ndim < 2) or close(
                mine,
                true,
                rel=0 if is_exact else 3e-6,
                abs_tol=is_cancelling if is_cancelling == is_cancelling else 0,
            ), f"{name} of {tuple(x.shape)}: {mine}, not {true}"


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [(), (1,), (5,), (0, 3), (7, 3), (9, 4, 3, 3), (300, 700), (BLOCK, 1), (3, BLOCK), (BLOCK + 1,)]
LARGE = [(CHUNK + 1,), (1, CHUNK), (2, CHUNK + 1), (3, 70_000), (70_000, 3), (CHUNK * 2, 2)]


@each_dtype
def test_sums_are_those_of_float64_whatever_the_shape(dtype):
    check([normal(*shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES + LARGE)])


@each_dtype
def test_a_tensor_may_begin_anywhere(dtype):
    check(
        [normal(1003).to(dtype)[k:] for k in range(9)] + [normal(30, 11).to(dtype)[k:] for k in range(1, 4)]
    )


@each_dtype
@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF, NAN]])
def test_what_is_not_finite_is_counted(dtype, bad):
    some, every = normal(50, 60), torch.full((8, 3), bad[0])
    some[3, : len(bad)] = torch.tensor(bad)
    check([some.to(dtype), every.to(dtype), normal(4, 4).to(dtype)])


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e-16, 1e16, 1e30])
def test_no_square_leaves_float32(size):
    check(
        [normal(40, 30) * size, torch.cat([normal(CHUNK) * size, normal(CHUNK)]), normal(CHUNK * 2, 3) * size]
    )


@pytest.mark.parametrize("size", [1e-300, 1e200])
def test_no_square_leaves_float64(size):
    check([normal(40, 30).double() * size, normal(CHUNK * 2, 3).double() * size])


def with_zeros(shape, rows):
    x = normal(*shape)
    x[rows] = 0
    return x


def test_rows_of_zeros_are_found_wherever_chunks_and_blocks_end():
    lone = torch.zeros(5, 3 * CHUNK + 5)
    lone[1, -1] = lone[3, 0] = lone[4, CHUNK] = 1
    few = torch.zeros(50_257, 2)
    few[::7, 1] = -1
    edges = [torch.zeros(64, 100), torch.zeros(1000, 33)]
    for x in edges:
        x.view(-1)[BLOCK - 1] = x.view(-1)[BLOCK] = x[-1, -1] = 2
    shapes = [((40, 300), slice(3, 30)), ((30_000, 2), slice(None, None, 3)), ((200, 1000), [0, 7, 199])]
    check(
        [lone, few, *edges, *(with_zeros(*some) for some in shapes), torch.zeros(9, 9), torch.zeros(5000, 70)]
    )


def test_rows_that_are_longer_than_all_chunks_of_a_merge():
    x = torch.zeros(3, CHUNK * MERGED + 77, dtype=torch.float16)
    x[1, -1], x[2, 0] = 3, 4
    (chunks, spans), n = sums._divided([(x.numel(), width(x))], [0]), x.numel()
    assert chunks[:, 2].sum() == n
    assert spans.tolist() == [[0, 3 * MERGED, MERGED, 0]]
    assert CUDA is False or read(x)[0, 4] == 2  # the interpreter takes minutes


def test_more_elements_than_32_bits_can_count_are_divided_without_a_gap():
    for n, of_row in ((2**31 + 12_345, 0), (50_257 * 50_000, 50_000), (3 * (2**31 + 1), 2**31 + 1)):
        chunks, _ = sums._divided([(n, of_row)], [0])
        begin, size = chunks[:, 1], chunks[:, 2]
        assert begin[0] == 0
        assert (begin[1:] == (begin + size)[:-1])[size[1:] > 0].all()
        assert size.sum() == n
        assert size.max() < 2**31


def test_samples_are_those_of_each_tensor(kernels):
    odd = [
        normal(7, 3),
        normal(),
        normal(0, 3),
        normal(1500),
        normal(2000).bfloat16(),
        normal(300, 400).half(),
    ]
    odd += [
        normal(64, 32, 3, 3).to(memory_format=torch.channels_last),
        normal(100, 200).t(),
        normal(10).double(),
    ]
    odd += [
        normal(5000)[1:],
        torch.complex(normal(4), normal(4)),
        torch.zeros(3).float().to(torch.float8_e5m2),
    ]
    xs = [x.to(DEVICE) for x in odd]
    for mine, x in zip(sketch_copies(xs), xs, strict=True):
        assert mine.dtype is sketch_copy(x).dtype
        assert torch.equal(mine, sketch_copy(x))
    assert all(are_same(sketch_copies(xs), [sketch_copy(x) for x in xs]))
    other = [x.clone() for x in xs]
    other[3].mul_(2)
    assert are_same(sketch_copies(xs), sketch_copies(other)).count(False) == 1


def test_a_sample_follows_a_tensor_whose_memory_is_replaced():
    p, gather = nn.Parameter(normal(50, 60).to(DEVICE)), Gather(DEVICE)
    first = gather.of([p], tracked_places)
    p.data = torch.zeros(50, 60, device=DEVICE)
    assert first.count_nonzero() == 1024
    assert gather.of([p], tracked_places).count_nonzero() == 0


# ---- GradientHealth with kernels


def wide_mlp():
    return seeded(lambda: nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 1)))


def recorded(make, data, *cbs, **options):
    health = GradientHealth(**options)
    learner(make().to(DEVICE), [(x.to(DEVICE), y.to(DEVICE)) for x, y in data], health, *cbs)
    return health


def test_each_number_is_that_of_a_plain_loop(kernels):
    assert_matches(recorded(mlp, batches(n=6)), by_hand(mlp(), batches(n=6)))
    clip = GradientClip(0.01)
    steps = by_hand(mlp(), batches(), clip=lambda params: nn.utils.clip_grad_norm_(params, 0.01))
    assert_matches(recorded(mlp, batches(), clip), steps)


def test_large_parameters_have_all_numbers_in_all_records(kernels):
    data = batches(6, bs=16, d=64)
    health, steps = recorded(wide_mlp, data), by_hand(wide_mlp(), data)
    assert_matches(health, steps, skip=("update_ratio", "drift"))


def test_numbers_are_those_without_kernels(kernels, monkeypatch):
    data = batches(6, bs=16, d=64)
    mine = recorded(wide_mlp, data, detail_every=1)
    monkeypatch.setattr(device, "works_on", lambda device: False)
    plain = recorded(wide_mlp, data, detail_every=1)
    for name in plain.names:
        for stat in GRAD_STATS:
            numbers = zip(mine.series(name, stat), plain.series(name, stat), strict=True)
            assert all(close(a, b, rel=1e-5) for a, b in numbers), f"{stat} of {name}"


def test_two_trainings_have_the_same_numbers_and_the_weights_of_one_without(kernels):
    models = [wide_mlp().to(DEVICE) for _ in range(3)]
    data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(5, d=64)]
    healths = [GradientHealth(), GradientHealth()]
    for model, cbs in zip(models, ([healths[0]], [healths[1]], []), strict=True):
        learner(model, data, *cbs)
    assert equal(healths[0].table(), healths[1].table())
    for own in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(own[0], own[1])
        assert torch.equal(own[0], own[2])


class Odd(nn.Module):
    """A sparse embedding, half precision, a transposed weight, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(4000, 8, sparse=True)
        self.low = nn.Parameter(normal(40, 50).bfloat16())
        self.turned = nn.Parameter(normal(60, 50).t())
        self.unused = nn.Parameter(normal(3))

    def forward(self, x):
        return self.emb(x).sum() + (self.low.float() * self.turned[:40, :50]).sum().square()


def test_odd_gradients_are_read(kernels):
    grads, health = [], GradientHealth()

    def note(cb):
        grads.append({name: p.grad.clone() for name, p in cb.model.named_parameters() if p.grad is not None})

    data = [torch.tensor([1, 2, 2, 7], device=DEVICE), torch.tensor([5], device=DEVICE)]
    learner(Odd().to(DEVICE), data, at("before_step", note, order=-99), health, lr=1e-6, loss=lambda x: x)
    assert health.without_grad == ["unused"]
    for k, step in enumerate(grads):
        for name, g in step.items():
            g, found = (g.to_dense() if g.is_sparse else g).double().cpu(), health.stats[k][name]
            assert close(found["norm"], g.norm().item(), rel=1e-5)
            assert close(found["abs_max"], g.abs().max().item())
            assert close(found["zero_rows"], (g == 0).all(1).double().mean().item())
            assert found["nonfinite"] == 0


# ---- cards that are not there

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from hookcb.gradients import samples, sums

def build(kernel, signature, constants, target=GPUTarget("cuda", 90, 32)):
    function = kernel.jit
    names = function.arg_names
    signature = {name: signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(function, signature, constants)
    return triton.compile(source, target=target, options=kernel.options)

for kind in "float32", "bfloat16", "float16", "float64":
    sum_of = {"addresses": "*i64", "chunks": "*i64", "parts": "*fp64"}
    built = build(sums._SUM, sum_of, {"kind": kind, "block": sums.BLOCK})
    assert "ld.global.v" in built.asm["ptx"], "elements are read one by one"
    assert "ftz" not in built.asm["ptx"], "denormal numbers count as zeros"
    assert built.metadata.maxnreg == 64
    assert built.metadata.shared <= 16_384
    build(sums._SUM, sum_of, {"kind": kind, "block": sums.BLOCK}, GPUTarget("cuda", 80, 32))
    for out in "*fp32", "*fp64":
        gather = {"addresses": "*i64", "rows": "*i64", "offsets": "*i64", "out": out}
        build(samples._GATHER, gather, {"kind": kind, "block": samples.SKETCH})
build(sums._MERGE, {"parts": "*fp64", "spans": "*i64", "out": "*fp64"}, {"block": sums.MERGED})
for kernel in sums._SUM, sums._MERGE:
    kernel.options.pop("maxnreg", None)
hip = GPUTarget("hip", "gfx942", 64)
build(sums._SUM, sum_of, {"kind": "bfloat16", "block": sums.BLOCK}, hip)
build(sums._MERGE, {"parts": "*fp64", "spans": "*i64", "out": "*fp64"}, {"block": sums.MERGED}, hip)
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
    xs = [normal(300, 40).to(DEVICE), normal(7).bfloat16().to(DEVICE)]
    reader = Sums(DEVICE)
    reader.of(xs, [40, 0])
    sketch_copies(xs)
    notice_waits("error")
    try:
        for scale in (1, 2):
            reader.of([x * scale for x in xs], [40, 0])
            sketch_copies([x * scale for x in xs])
    finally:
        notice_waits("default")


def test_a_kernel_that_cannot_run_is_said_once_and_plain_operations_do(monkeypatch):
    from hookcb.core import triton_kernel

    def fails():
        raise RuntimeError("no C compiler")

    assert not triton_kernel.can_run(torch.device("cpu"), fails)
    monkeypatch.setattr(triton_kernel, "find_spec", lambda name: None)
    assert not triton_kernel.can_run(torch.device("cuda", 0), fails)  # without Triton nothing is said
    monkeypatch.setattr(triton_kernel, "find_spec", lambda name: True)
    with pytest.warns(UserWarning, match="no kernels on cuda:0, plain operations are slower.*no C compiler"):
        assert not triton_kernel.can_run(torch.device("cuda", 0), fails)
