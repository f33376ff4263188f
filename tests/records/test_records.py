"""Records that are saved and loaded without a callback."""

from typing import Any, Self

import pytest
import torch

from hookcb.records.records import SavedRecords
from hookcb.records.store import StatStore


class Means(SavedRecords):
    columns = ("mean",)
    keys = frozenset({"store"})

    def __init__(self, store: StatStore) -> None:
        self.store = store

    def store_of(self, phase: str) -> StatStore:
        return self.store if phase == "train" else StatStore(self.columns, 4)

    def state(self) -> dict[str, Any]:
        return {"store": self.store.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        return cls(StatStore.from_state(state["store"]))


def means() -> Means:
    store = StatStore(Means.columns, keep=4)
    for step in range(3):
        record = store.begin(epoch=0, step=step)
        store.put("head.a", [record], torch.tensor([[float(step)]]))
        store.put("head.b", [record], torch.tensor([[-float(step)]]))
    return Means(store)


def test_a_file_becomes_records_again(tmp_path):
    loaded = Means.load(means().save(tmp_path / "means.pt"))
    assert loaded.names == ["head.a", "head.b"]
    assert loaded.steps() == [0, 1, 2]
    assert loaded.table() == means().table()


def test_a_file_with_other_keys_is_refused(tmp_path):
    class Others(Means):
        keys = frozenset({"store", "more"})

    with pytest.raises(ValueError, match=r"means\.pt"):
        Others.load(means().save(tmp_path / "means.pt"))


def test_an_index_or_name_gives_one_layer_and_a_slice_or_glob_several():
    records = means()
    assert records.series(1, "mean") == records.series("head.b", "mean") == [0.0, -1.0, -2.0]
    assert list(records.series("head.*", "mean")) == list(records.series(slice(None), "mean"))
    assert records.layer_series("head.a", "mean") == [0.0, 1.0, 2.0]
    assert records.stats[2]["head.a"] == {"mean": 2.0}
    assert len(records.stats[2]["head.*"]) == 2


def test_what_was_not_recorded_is_a_lookup_error():
    with pytest.raises(LookupError, match=r"did you mean 'head\.a'\?"):
        means().series("head.aa", "mean")
    with pytest.raises(LookupError, match="there is no statistic 'std'"):
        means().series("head.*", "std")
    with pytest.raises(LookupError, match="there is no layer 2"):
        means().series(2, "mean")
