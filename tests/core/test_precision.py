"""No float64 is asked of a device that lacks it, and none is lost where a model has it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from hookcb import ActivationStats, GradientClip, GradientHealth, Learner
from hookcb.activations import records as activations
from hookcb.activations.bins import Bins
from hookcb.activations.stats import LAYER_STATS, layer_stats
from hookcb.core import precision
from hookcb.gradients import samples as grad_samples
from hookcb.gradients import stats as grad_stats
from tests.support import along, first, fit, in_turn

DEVICE = torch.device("meta")


class OnDevice(Tensor):
    """A tensor on a device that lacks float64, as MPS does; its values are in a tensor on the CPU.

    The device is meta, as a build for the CPU can ask no other one.
    """

    is_meta = False

    @staticmethod
    def __new__(cls, x):
        if x.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework lacks it")
        like = {"dtype": x.dtype, "device": DEVICE, "requires_grad": x.requires_grad}
        return Tensor._make_wrapper_subclass(cls, x.shape, x.stride(), x.storage_offset(), **like)

    def __init__(self, x):
        self.on_cpu = x.detach()

    def data_ptr(self):
        return self.on_cpu.data_ptr()

    def tolist(self):
        return self.on_cpu.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Has what is made on the device be made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Runs an operation on the CPU, and raises as MPS does if it would make float64 there."""
    given = {}

    def on_cpu(x):
        if isinstance(x, OnDevice):
            given[id(x.on_cpu)] = x
            return x.on_cpu
        return torch.device("cpu") if isinstance(x, torch.device) and x == DEVICE else x

    device = kwargs.get("device")
    there = (
        bool(tree_map(on_cpu, (args, kwargs)) and given) if device is None else torch.device(device) == DEVICE
    )
    args, kwargs = tree_map(on_cpu, (args, kwargs))
    out = func(*args, **kwargs)
    if not there:
        return out
    return tree_map_only(Tensor, lambda x: given.get(id(x)) if id(x) in given else OnDevice(x), out)


@pytest.fixture
def no_float64(monkeypatch):
    """A device without float64, whose tensors hookcb takes for plain ones."""
    monkeypatch.setattr(activations, "has_stats", lambda x: isinstance(x, Tensor))
    for module in (grad_stats, grad_samples):
        monkeypatch.setattr(module, "is_native", lambda x: True)
    precision._has_float64.cache_clear()
    with Device():
        yield
    precision._has_float64.cache_clear()


def test_the_device_of_these_tests_lacks_float64(no_float64):
    x = OnDevice(torch.ones(2))
    assert (x * 2).device == DEVICE
    assert x.cpu().device.type == "cpu"
    for make in (lambda: x.double(), lambda: torch.zeros(2, dtype=torch.float64, device=DEVICE)):
        with pytest.raises(TypeError, match="float64"):
            make()


@pytest.mark.parametrize(("n", "scale"), along([1, 7, 1_000, 70_000], [1.0, 1e-3, 1e4]))
def test_statistics_on_such_a_device_are_those_of_the_cpu(no_float64, n, scale):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)) * scale
    assert layer_stats(OnDevice(x)).cpu().tolist() == pytest.approx(
        layer_stats(x).tolist(), rel=1e-4, nan_ok=True
    )
    for bins in (Bins(10), Bins(10, (x.amin().item() - 1, x.amax().item() + 1))):
        assert torch.equal(bins.counts_of(OnDevice(x[None])).cpu(), bins.counts_of(x[None]))


def trained(on, sample="auto"):
    model = nn.Sequential(
        nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 220), nn.Linear(220, 40), nn.Linear(40, 220)
    )
    model.append(nn.Flatten(0))
    g = torch.Generator().manual_seed(0)
    for m in model.modules():
        for name, p in list(m._parameters.items()):
            setattr(m, name, nn.Parameter(on(torch.randn(p.shape, generator=g) * 0.1)))
    batches = [(on(torch.randn(8, 3, generator=g)), on(torch.randn(1760, generator=g))) for _ in range(3)]
    stats, health = ActivationStats(with_hist=True, include_paramless=True, sample=sample), GradientHealth()
    clip = GradientClip(0.1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    fit(Learner((batches, None), model, F.mse_loss, opt, cbs=[stats, health, clip]), 2)
    return {row[:-1]: row.value for row in (*stats.table(), *health.table())}


@pytest.mark.parametrize("sample", first(["auto", 1_000]))
def test_a_training_on_such_a_device_is_recorded_as_on_the_cpu(no_float64, sample):
    with _disable_current_modes():
        expected = trained(lambda x: x, sample)
    assert trained(OnDevice, sample) == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)


def reading(stats, layer, stat):
    return stats.series(layer, stat)[-1]


@pytest.mark.parametrize(("n", "size"), along([64, 70_000], [1e60, 1e200, -1e300]))
def test_activations_beyond_float32_are_kept_as_float64(n, size):
    x = size * (1 + torch.arange(n, dtype=torch.float64) / n)[None]
    model = nn.Sequential(nn.Identity(), nn.Linear(n, 1).double())
    stats = ActivationStats(modules=["0"], with_hist=True)
    fit(Learner(([(x, torch.zeros(1, 1))], None), model, lambda out, y: (out * 0).sum(), cbs=stats))
    of = {name: reading(stats, "0", name) for name in LAYER_STATS}
    assert of["mean"] == pytest.approx(x.mean().item())
    assert of["std"] == pytest.approx((x / size).std().item() * abs(size), rel=1e-3)
    assert of["abs_max"] == x.abs().amax().item()
    assert of["nonfinite"] == 0
    assert stats.hist("0").expm1().sum().round().item() == min(n, 4_096 if n > 8_192 else n)


@pytest.mark.parametrize(("n", "size"), along([5, 3_000], [1e60, 1e200, 1e-200]))
def test_gradients_beyond_float32_are_kept_as_float64(n, size):
    model = nn.Linear(n, 1, bias=False).double()
    x = torch.full((1, n), size, dtype=torch.float64)
    health = GradientHealth()
    fit(Learner(([(x, x)], None), model, lambda out, y: out.sum(), torch.optim.SGD, lr=0.0, cbs=health))
    assert reading(health, "weight", "norm") == pytest.approx(size * n**0.5)
    assert reading(health, "weight", "abs_max") == size
    assert reading(health, "weight", "nonfinite") == 0
    assert health.step_series("total_norm") == [pytest.approx(size * n**0.5)]


def test_float32_models_are_recorded_in_float32():
    stats, health = ActivationStats(), GradientHealth()
    model = nn.Linear(3, 2)
    fit(Learner(([(torch.ones(4, 3), torch.ones(4, 2))], None), model, F.mse_loss, cbs=[stats, health]))
    stores = stats.records.store_of("train"), health.records.store_of("train")
    assert {store.series(name).dtype for store in stores for name in store.names} == {torch.float32}


@in_turn(("size", "dtype"), along([1e-40, 1e-30, 1.0, 1e30], [torch.float32, torch.bfloat16, torch.float64]))
def test_wide_norms_have_room_for_any_squares(size, dtype):
    x = (torch.arange(1, 7).view(2, 3) * size).to(dtype)
    assert precision.wide_norm(x, 1).tolist() == pytest.approx(
        [math.sqrt(math.fsum(v * v for v in row)) for row in x.double().tolist()], rel=1e-12
    )


def test_a_wide_norm_keeps_infinity_and_nan():
    x = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0]])
    assert str(precision.wide_norm(x, 1).tolist()) == "[inf, nan, 0.0]"
    assert precision.wide_norm(torch.zeros(2, 0), 1).tolist() == [0, 0]
