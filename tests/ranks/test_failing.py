"""A rank that fails, wherever it does, ends all, and the exit codes, which torchrun goes by, say so."""

import pytest

from tests.ranks.support import launched

PLACES = {  # of rank 1; what its traceback says, or rank 0 if it has none
    "dataset": ("ddp", "ValueError: planted"),
    "worker": ("fsdp2", "ValueError: Caught ValueError in DataLoader worker process 0"),
    "loss": ("fsdp2", "in epoch 0, batch 0, with xb (float32[4, 4]) and yb (int64[4])"),
    "validation": ("fsdp2", "in epoch 0, validation batch 0, with xb (float32[10, 4])"),
    "before_fit": ("ddp", "in Fails.before_fit"),
    "after_fit": ("ddp", "in Fails.after_fit"),
    "interrupt": ("fsdp2", "in Fails.after_batch, epoch 0, batch 2"),
    "exit": ("ddp", "rank 1 raised SystemExit in Fails.after_batch, epoch 0, batch 2: 0"),
    "exit between epochs": ("fsdp2", "rank 1 raised SystemExit in Fails.after_epoch, epoch 0: 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_ends_all_with_an_exit_code(place, tmp_path):
    mode, text = PLACES[place]
    first, second = launched("failing_worker.py", tmp_path / "x", mode, place)
    assert text in first["log"] + second["log"]
    assert first["exit"] == 1 or place == "after_fit"  # when its fit may be over
    assert second["exit"] == int(not place.startswith("exit"))  # it asks for 0
