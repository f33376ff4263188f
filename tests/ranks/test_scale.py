"""What ranks send is what docs/scale.md says, at any number of ranks."""

import re
from pathlib import Path

import pytest

from tests.ranks.support import launched, shared

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
WORLDS = (2, 64, 1_024, 8_192)
N_LOOKS, N_EPOCHS, N_LAYERS, N_PARAMS = 12, 2, 2, 4  # of tests/ranks/fake_worker.py
GROWING = {
    "vote": lambda n: 40,
    "`StepTimer`, 100 steps": lambda n: 64 * n,
    "`MemoryStats`, an epoch": lambda n: 8 * n,
    "gather of 500 bytes": lambda n: 8 * n + 500 * n,
    "losses and hashes, a fit of 12 batches": lambda n: (8 + 1_792) * n,
    "checksums of a checkpoint": lambda n: 16 + 76 * n,
    "hops of a reduction, tree": lambda n: 2 * (n - 1).bit_length(),
    "hops of a reduction, ring": lambda n: 2 * (n - 1),
}
PLANS = 8_000  # bytes of a rank in a save, by torch


def test_the_table_of_the_page_is_right():
    rows = re.findall(r"^\| (.*?) \| ([\d, |]+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    found = {name: [int(x.replace(",", "")) for x in cells.split(" | ")] for name, cells in rows}
    wanted = {name: [size(n) for n in WORLDS] for name, size in GROWING.items()}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 64, 1_024])
def test_counts_are_those_of_the_page(world, tmp_path_factory):
    def make(folder):
        return launched("fake_worker.py", folder, world, world=1)[0]

    found = shared(tmp_path_factory, "costs" if world == 1_024 else f"costs-{world}", make)
    assert "fsdp2" in found, found["log"][-2000:]

    def more(how, name):
        return found[how][name]["bytes"] - found[how]["none"]["bytes"]

    for how in ("ddp", "fsdp2"):
        assert more(how, "MemoryStats") == N_EPOCHS * GROWING["`MemoryStats`, an epoch"](world)
        assert more(how, "TerminateOnNaN") == N_LOOKS * GROWING["vote"](world)
        assert more(how, "NanTrace") == N_LOOKS * 16
        assert 0 <= more(how, "ActivationStats") - N_LOOKS * 8 * (10 * N_LAYERS + 1) <= 200
        of_hosts = more(how, "StepTimer") - GROWING["`StepTimer`, 100 steps"](world)
        assert 0 < of_hosts <= (8 + 300) * world
    # findings and the verdict do not grow; hosts, phases, what parts have measured, and new findings do
    hosts = of_hosts - 8 * world
    states = GROWING["losses and hashes, a fit of 12 batches"](world)
    grows = states + GROWING["`StepTimer`, 100 steps"](world) + 20 * world + hosts
    assert 0 < more("ddp", "Diagnose") - grows < 17_000
    checksums = N_EPOCHS * GROWING["checksums of a checkpoint"](world)
    assert 0 < more("ddp", "Checkpoint") - checksums - 14 * world < N_EPOCHS * (PLANS * world + 20_000)
    of_looks = N_LOOKS * 8 * 15 * N_PARAMS + 8 * (2 * N_PARAMS + 1)
    assert more("fsdp2", "GradientHealth") - of_looks == 16
