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
    "losses and hashes, a fit of 12 batches": lambda n: (8 + 2_050) * n,
    "checksums of a checkpoint": lambda n: 16 + 76 * n,
    "hops of a reduction, tree": lambda n: 2 * (n - 1).bit_length(),
    "hops of a reduction, ring": lambda n: 2 * (n - 1),
}
PLANS = 8_000  # bytes of a rank in a save, by torch
COUNTED = [
    "MemoryStats",
    "TerminateOnNaN",
    "NanTrace",
    "ActivationStats",
    "StepTimer",
    "Diagnose",
    "Checkpoint",
]
COUNTED += ["GradientHealth"]
FREE = {"ChannelsLast", "DetectAnomaly", "GradientClip", "HookCallback", "Log"}
FREE |= {"Progress", "ReduceLROnPlateau", "SamplingCallback", "Schedule"}
ONCE = ["OneCycle", "WarmupCosine"]
CALLBACKS = {64: [*COUNTED, *sorted(FREE), *ONCE, "GradientAccumulation"], 1_024: COUNTED}


def costs(tmp_path_factory, world):
    """What rank 0 of ranks that do not exist sends in 2 epochs of 6 batches, alone and with each callback."""

    def make(folder):
        return launched("fake_worker.py", folder, world, *CALLBACKS[world], world=1, timeout=180)[0]

    found = shared(tmp_path_factory, f"costs-{world}", make)
    assert "fsdp2" in found, found["log"][-2000:]
    assert "error" not in found["fsdp2"]["none"], found["fsdp2"]["none"]["error"]
    return found


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The costs of 64 ranks; the numbers of collectives are those of any."""
    return costs(tmp_path_factory, 64)


def test_the_table_of_the_page_is_right():
    rows = re.findall(r"^\| (.*?) \| ([\d, |]+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    found = {name: [int(x.replace(",", "")) for x in cells.split(" | ")] for name, cells in rows}
    wanted = {name: [size(n) for n in WORLDS] for name, size in GROWING.items()}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("world", CALLBACKS)
def test_counts_are_those_of_the_page(world, tmp_path_factory):
    found = costs(tmp_path_factory, world)

    def more(how, name):
        return found[how][name]["bytes"] - found[how]["none"]["bytes"]

    for how in ("ddp", "fsdp2"):
        assert more(how, "MemoryStats") == N_EPOCHS * GROWING["`MemoryStats`, an epoch"](world)
        assert more(how, "TerminateOnNaN") == N_LOOKS * GROWING["vote"](world)
        assert more(how, "NanTrace") == N_LOOKS * 16
        assert 0 <= more(how, "ActivationStats") - N_LOOKS * 8 * (12 * N_LAYERS + 1) <= 200
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


# ---- collectives


def own(cost):
    """Collectives outside of the model's group, which are those of hookcb."""
    return [op for op in cost["ops"] if not op.endswith(" 0")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_step_costs_a_vote(many, how):
    ops = own(many[how]["none"])
    n_votes = sum("float32[10]" in op for op in ops)
    assert 12 <= n_votes <= 12 + 2 * 7  # in each step, and at the events of each epoch
    assert len(ops) - n_votes <= 4 + 2 * 8  # before the fit, and in each epoch
    assert not any("uint8" in op for op in ops)  # no object is sent


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_most_callbacks_communicate_nothing(many, how):
    none, found = many[how]["none"], many[how]
    assert {name for name in FREE if found[name]["ops"] != none["ops"]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_schedule_over_all_steps_agrees_on_their_number_once(many, how):
    none = many[how]["none"]
    for name in ONCE:
        assert many[how][name]["n"] - none["n"] == 1
        assert many[how][name]["bytes"] - none["bytes"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_callback_that_may_cancel_a_batch_costs_one_more_vote_in_each(many, how):
    none, found = many[how]["none"], many[how]["TerminateOnNaN"]
    assert found["n"] - none["n"] == 12
    assert found["bytes"] - none["bytes"] == 12 * GROWING["vote"](64)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_activations_cost_two_reductions_a_record_and_a_fit_four_more(many, how):
    none, found = many[how]["none"], many[how]["ActivationStats"]
    assert found["n"] - none["n"] == 2 * 12 + 4
    assert found["bytes"] - none["bytes"] < 12 * 2 * (8 + 2 + 1) * 8 * 2  # of two layers


@pytest.mark.slow
def test_accumulation_reduces_gradients_once_a_group(many):
    def n_reduced(cost):
        return sum("float32[58] 0" in op for op in cost["ops"])

    assert n_reduced(many["ddp"]["none"]) == 12
    assert n_reduced(many["ddp"]["GradientAccumulation"]) == 6
