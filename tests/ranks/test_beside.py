"""Callbacks and loaders beside `Distributed` give what one process gives with the same batches."""

import json
import math

import pytest

from tests.ranks import beside_worker, data_worker
from tests.ranks.support import launched, shared

WORKER = "beside_worker.py"
CHANGED = {  # what is worth a part of the default run
    "ddp": ["accumulation_and_clip", "ema", "thawed", "one_batch", "resumed"],
    "fsdp2": [
        "accumulation_and_clip",
        "ema",
        "thawed",
        "health",
        "two_fits",
        "after_an_exception",
    ],
}
HALF = {"bf16", "fp16", "fp16_overflow", "fp16_overflow_in_a_part", "fp16_accumulation"}
ALL = [case.__name__ for case in beside_worker.CASES]
PLAIN = [case.__name__ for case in beside_worker.OF_PLAIN_LAYERS]  # as tensor parallelism has none
# what the ranks decide by their losses, clocks and numbers of steps, however they divide the model
OF_ANY_MODEL = ["plateau", "early", "max_time", "measured", "logged", "one_cycle", "terminate", "bf16"]
# what is summed, gathered, saved or hooked of the parts of a model: on meshes of two dimensions, too
ON_FOUR = ["accumulation_and_clip", "clip_norm", "fp16_overflow_in_a_part", "ema", "thawed", "param_groups"]
ON_FOUR += ["health", "diagnosis", "nan_trace", "two_fits", "resumed", "written_by_one", "after_an_exception"]
# torch takes half a minute to compile layers of tensor parallelism
WITHOUT_TP = ["compiled", "compiled_aot", "compiled_thawed", *PLAIN]
# each on one of the two meshes: that of tensor parallelism and FSDP2, or the hybrid one of FSDP2
ON_HYBRID = [name for name in ALL[1::2] if name not in WITHOUT_TP]
ON_FOUR = [f"hybrid/{name}" if name in ON_HYBRID else f"hsdp/{name}" for name in ON_FOUR]
# the former also with FSDP2 alone, and the latter with tensor parallelism alone
ON_TWO = [f"ddp/{name}" for name in ALL]
ON_TWO += [f"fsdp2/{name}" for name in (*ON_HYBRID, *WITHOUT_TP) if name not in OF_ANY_MODEL]
ON_TWO += [f"tp/{name}" for name in ALL if name not in (*WITHOUT_TP, *ON_HYBRID, *OF_ANY_MODEL)]


def names_of(cases):
    return [f"data/{case.__name__}" for case in cases]


BRIEF = [f"{mode}/{name}" for mode, names in CHANGED.items() for name in names]
BRIEF += names_of([*data_worker.COMPARED, *data_worker.ALIKE, *data_worker.REFUSED])
ON_TWO = [name for name in ON_TWO if name not in BRIEF] + names_of(data_worker.WITH_WORKERS)


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    return shared(tmp_path_factory, "beside", lambda folder: launched(WORKER, folder, ",".join(BRIEF)))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    def make(folder):
        return launched(WORKER, folder, ",".join(ON_TWO), timeout=300)

    return shared(tmp_path_factory, "beside-two", make)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    def make(folder):
        return launched(WORKER, folder, ",".join(ON_FOUR), world=4, timeout=300)

    return shared(tmp_path_factory, "beside-four", make)


def results(ranks, name):
    found = [rank.get(name, rank) for rank in ranks]
    assert all("result" in outcome for outcome in found), found
    return [outcome["result"] for outcome in found]


def apart(a, b, tolerance, place=""):
    """Places where two results differ."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [x for i in range(len(a)) for x in apart(a[i], b[i], tolerance, f"{place}/{i}")]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [x for key in a for x in apart(a[key], b[key], tolerance, f"{place}/{key}")]
    if isinstance(a, float) and isinstance(b, float):
        is_same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(a) and math.isnan(b)
        )
        return [] if is_same else [(place, a, b)]
    return [] if a == b else [(place, a, b)]


def check_as_alone(ranks, name, folder):
    mode, case = name.split("/")
    first, *others = results(ranks, name)
    assert [other for other in others if apart(first, other, 0.0)] == []
    of_modules = getattr(beside_worker, case, None) or getattr(data_worker, case)
    n_parts = len(ranks) // 2 if mode in ("tp", "hybrid") else len(ranks)
    alone = beside_worker.bound("alone", n_parts, folder, of_modules)()
    assert apart(first, json.loads(json.dumps(alone)), 2e-3 if case in HALF else 1e-5) == []


COMPARED = [name for name in BRIEF if name not in names_of([*data_worker.ALIKE, *data_worker.REFUSED])]


@pytest.mark.filterwarnings("ignore")  # of what the cases do
@pytest.mark.parametrize("name", COMPARED)
def test_two_processes_give_what_one_gives(brief, name, tmp_path):
    check_as_alone(brief, name, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_TWO)
def test_two_processes_give_what_one_gives_in_all_modes(two, name, tmp_path):
    check_as_alone(two, name, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_processes_on_a_mesh_give_what_one_gives(four, name, tmp_path):
    check_as_alone(four, name, tmp_path)


@pytest.mark.parametrize("name", names_of(data_worker.ALIKE))
def test_both_end_alike(brief, name):
    first, second = results(brief, name)
    assert first == second
    if "validated" in first:
        assert first["validated"] == pytest.approx(first["rows"][-1][1:])


@pytest.mark.parametrize("name", names_of(data_worker.REFUSED))
def test_no_data_is_an_error_of_all(brief, name):
    role = "validation" if "validation" in name else "training"
    for rank in brief:
        assert rank[name]["error"] == "ValueError"
        assert f"the {role} loader has no batches" in rank[name]["text"]
