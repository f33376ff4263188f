"""Statistics of CUDA's allocator: of a fake one everywhere, of the real one if there is a GPU."""

import gc
import pickle

import pytest
import torch
from torch import nn

from hookcb import Callback
from hookcb.profiling.memory.allocator import Allocator, AllocatorHistory
from hookcb.profiling.memory.callback import MemoryStats
from tests.profiling.memory.support import Blocks, batches_for, learner_for, mlp, watch


class Counted:
    """An allocator that code below says what it has done."""

    def __init__(self, monkeypatch):
        self.current = self.peak = 0
        self.n = 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(
            Allocator, "for_tensors", classmethod(lambda cls, tensors: cls([torch.device("cuda", 0)]))
        )

    def stats(self, device):
        self.n += 1
        return {"allocated_bytes": {"all": {"current": self.current, "peak": self.peak}}}

    def take(self, n):
        self.current += n
        self.peak = max(self.peak, self.current)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


class Takes(nn.Module):
    """Takes memory, and gives some of it back."""

    def __init__(self, counted, n, back):
        super().__init__()
        self.counted, self.n, self.back = counted, n, back

    def forward(self, x):
        self.counted.take(self.n)
        self.counted.take(-self.back)
        return x


def test_a_layer_has_what_the_allocator_gave_it(counted):
    counted.take(1000)
    model = nn.Sequential(nn.Linear(6, 3), Takes(counted, 500, 200), nn.Sequential(Takes(counted, 100, 90)))
    frees = Callback(after_batch=lambda cb: counted.take(1000 - counted.current))
    rows = watch(model, batches_for(1), [frees]).layers()
    assert [(row.name, row.allocated, row.peak) for row in rows] == [
        ("", 310, 500),
        ("0", 0, 0),
        ("1", 300, 500),
        ("2", 10, 10),  # below the peak that layer 1 has set, what it gave back is not seen
        ("2.0", 10, 10),
    ]


def test_where_the_peak_has_not_risen_the_most_seen_counts(counted):
    counted.take(10_000)
    counted.take(-10_000)
    model = nn.Sequential(nn.Linear(6, 3), nn.Sequential(Takes(counted, 70, 0), Takes(counted, 0, 50)))
    rows = watch(model, batches_for(1)).layers()
    assert rows["1"].allocated == 20
    assert rows["1"].peak == 70  # at the end of the layer that took it


def test_growth_is_that_of_the_allocator(counted):
    leak = Callback(after_batch=lambda cb: counted.take(256))
    growth = watch(mlp(), batches_for(12), [leak], every=2).growth()
    assert growth.source == "allocator"
    assert growth.slope == pytest.approx(256)
    assert str(growth) == "memory growth: 256 bytes per step (standard error 0 bytes)"


def test_batches_that_are_not_watched_do_not_ask_the_allocator(counted):
    watch(mlp(), batches_for(1), every=10)
    n, counted.n = counted.n, 0
    watch(mlp(), batches_for(9), every=10)
    assert counted.n == n


class Recorded:
    """Stands in for the history of the allocator."""

    def __init__(self, monkeypatch, is_on=False):
        self.is_on, self.calls = is_on, []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_on, raising=False)

    def record(self, enabled="all", **options):
        self.is_on = enabled is not None
        self.calls.append(enabled)


@pytest.fixture
def recorded(monkeypatch):
    return Recorded(monkeypatch)


def run_out(cb):
    raise torch.OutOfMemoryError("CUDA out of memory")


def fit_with(path, **functions):
    learn = learner_for(mlp())
    with learn.no_logging():
        learn.fit(1, cbs=[MemoryStats(snapshot=path), Callback(**functions)])


def test_a_history_is_written_where_memory_runs_out(recorded, tmp_path):
    path = tmp_path / "runs" / "oom.pickle"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_with(path, after_pred=run_out)
    assert pickle.loads(path.read_bytes()) == {"segments": []}
    assert [file.name for file in path.parent.iterdir()] == ["oom.pickle"]
    assert f"the allocator's history until then is in {path}" in caught.value.__notes__
    assert recorded.calls == ["all", None]


def test_no_history_is_written_otherwise(recorded, tmp_path):
    path = tmp_path / "oom.pickle"
    fit_with(path)
    with pytest.raises(ValueError, match="other"):
        fit_with(
            path, after_pred=lambda cb: (_ for _ in ()).throw(ValueError("another error, other than memory"))
        )
    try:
        run_out(None)
    except torch.OutOfMemoryError:
        fit_with(path)  # a second try that succeeds
    assert not path.exists()
    assert recorded.calls == ["all", None] * 3


def test_a_history_that_is_on_already_stays_on(monkeypatch, tmp_path):
    recorded = Recorded(monkeypatch, is_on=True)
    with pytest.raises(torch.OutOfMemoryError):
        fit_with(tmp_path / "oom.pickle", after_pred=run_out)
    assert recorded.calls == []
    assert (tmp_path / "oom.pickle").exists()


def test_a_folder_is_refused_before_training(recorded, tmp_path):
    with pytest.raises(ValueError, match="a folder; give the path of a file to write"):
        fit_with(tmp_path)
    assert recorded.calls == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_cuda_a_snapshot_is_not_asked_for(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        fit_with(tmp_path / "oom.pickle", after_pred=run_out)
    assert not list(tmp_path.iterdir())


@pytest.mark.cuda
def test_on_cuda_the_allocator_is_asked_and_its_statistics_stay():
    gc.collect()  # else what earlier tests have left may be freed in a forward, and counted there
    torch.cuda.reset_peak_memory_stats()
    large = torch.empty(2**26, device="cuda")
    del large
    peak = torch.cuda.max_memory_allocated()
    stats = watch(Blocks().cuda(), batches_for(6), every=2)
    assert torch.cuda.max_memory_allocated() >= peak
    rows = stats.layers()
    assert rows[""].allocated >= rows[""].kept > 0  # blocks of 512 bytes
    assert rows[""].peak >= rows["blocks.0"].allocated
    assert stats.growth().source == "allocator"
    assert stats.growth().slope <= 4 * stats.growth().error


@pytest.mark.cuda
def test_on_cuda_a_history_is_written_where_memory_runs_out(tmp_path):
    learn = learner_for(mlp().cuda())
    path = tmp_path / "oom.pickle"
    too_much = Callback(after_pred=lambda cb: torch.empty(2**50, device="cuda"))
    with learn.no_logging(), pytest.raises(torch.OutOfMemoryError):
        learn.fit(1, cbs=[MemoryStats(snapshot=path), too_much])
    assert "device_traces" in pickle.loads(path.read_bytes())
    AllocatorHistory(path).stop(None)
