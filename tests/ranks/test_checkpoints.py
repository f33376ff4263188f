"""Checkpoints of several ranks: any number of ranks, and a plain model, reads what another has written."""

import pytest

from tests.ranks.support import HAS_FSDP2, launched, shared

pytestmark = pytest.mark.slow

N = 96
ALONE = ["write_plain"]
OF_TWO = ["write_ddp", "write_fsdp2", "resumed_ddp", "resumed_fsdp2", "resumed_tp", "resumed_ddp_sums"]
OF_TWO += ["resumed_fsdp2_sums", "damaged", "flat", "read_plain_ddp", "read_plain_fsdp2", "read_ddp_ddp"]
OF_TWO += ["read_ddp_fsdp2", "read_fsdp2_ddp", "read_fsdp2_fsdp2", "go_on_plain_fsdp2", "without_sampler"]
OF_TWO += ["others_sums_ddp", "signaled_fsdp2", "plain_state", "chain_ddp"]
OF_ONE = ["read_plain_plain", "read_ddp_plain", "read_fsdp2_plain", "go_on_ddp_plain", "go_on_fsdp2_plain"]
OF_ONE += ["chain_plain"]
OF_FOUR = ["read_ddp_fsdp2", "read_fsdp2_ddp", "go_on_ddp_fsdp2", "go_on_fsdp2_ddp", "health_on_four"]
OF_FOUR += ["others_sums_ddp", "others_sums_fsdp2", "chain_fsdp2"]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """What each launch found, by number of ranks; the folder with what they wrote is "folder"."""

    def make(folder):
        found = {}
        for name, cases, world in (
            ("write", ALONE, 1),
            ("2", OF_TWO, 2),
            ("1", OF_ONE, 1),
            ("4", OF_FOUR, 4),
        ):
            found[name] = launched(
                "checkpoint_worker.py", folder / name, ",".join(cases), world=world, timeout=100
            )
            assert [rank["exit"] for rank in found[name]] == [0] * world, found[name][0]["log"][-2000:]
        return {**found, "folder": str(folder)}

    return shared(tmp_path_factory, "checkpoints", make, timeout=400)


def each(launches, launch, case):
    outcomes = [rank[case] for rank in launches[launch]]
    assert all("result" in outcome for outcome in outcomes), outcomes
    return [outcome["result"] for outcome in outcomes]


def written(launches, name):
    return each(launches, "write" if name == "plain" else "2", f"write_{name}")[0]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_several_ranks_write_a_folder_to_which_each_writes_its_part(launches, wrap):
    found = written(launches, wrap)
    assert found["names"] == ["epoch-0001"]
    own = ["__0_0.distcp", "__1_0.distcp"] if wrap == "fsdp2" else ["__0_0.distcp"]
    rest = [".metadata", "hookcb.json", "rank-0.pt", "rank-1.pt", "state.pt"]
    assert set(found["files"]) >= {*own, *rest}


def test_one_process_writes_a_file(launches):
    assert written(launches, "plain")["names"] == ["epoch-0001.pt"]


READS = [(world, *case.split("_")[1:]) for world, cases in (("1", OF_ONE), ("2", OF_TWO), ("4", OF_FOUR))
         for case in cases if case.startswith("read_")]  # fmt: skip


@pytest.mark.parametrize(("world", "name", "wrap"), READS)
def test_any_number_of_ranks_reads_what_others_have_written(launches, world, name, wrap):
    wanted = written(launches, name)
    state = {key: wanted[key] for key in ("weights", "moments", "average")}
    for found in each(launches, world, f"read_{name}_{wrap}"):
        assert found["restored"] == state
        assert found["validated"] == wanted["average"]
        assert (found["saved"], found["saved_moments"]) == (wanted["weights"], wanted["moments"])


# where one of FSDP2 fails, those that read its files do, too
WITH_FSDP2 = pytest.mark.skipif(not HAS_FSDP2, reason="torch 2.6 has no FSDP2 on CPUs")


@pytest.mark.parametrize(
    ("world", "case"), [("2", "read_plain_ddp"), pytest.param("4", "read_fsdp2_ddp", marks=WITH_FSDP2)]
)
def test_random_numbers_of_another_number_of_ranks_differ_by_rank(launches, world, case):
    drawn = [tuple(found["random"]) for found in each(launches, world, case)]
    assert len(set(drawn)) == len(drawn)


GO_ON = [("1", "ddp", "plain"), ("1", "fsdp2", "plain"), ("2", "plain", "fsdp2"), ("4", "ddp", "fsdp2")]


@pytest.mark.parametrize(("world", "name", "wrap"), [*GO_ON, ("4", "fsdp2", "ddp")])
def test_no_sample_is_repeated_or_dropped_in_the_middle_of_an_epoch(launches, world, name, wrap):
    before = [s for found in each(launches, "write" if name == "plain" else "2", f"write_{name}")
              for s in found["seen"]["1"]]  # fmt: skip
    ranks = each(launches, world, f"go_on_{name}_{wrap}")
    first = [sample for found in ranks for sample in found["left"]["1"]]
    assert len(before) + len(first) <= N
    assert len(set(before) | set(first)) == len(before) + len(first)
    again = [sample for found in ranks for sample in found["after_one"]["1"]]
    until = [sample for found in ranks for sample in found["left"]["1"][: found["n_first"]]]
    assert sorted(before + until + again) == list(range(N))
    assert len({found["weights"] for found in ranks}) == 1


def test_an_epoch_of_two_ranks_then_one_then_four_has_each_sample_once(launches):
    chain = [("2", "chain_ddp"), ("1", "chain_plain"), ("4", "chain_fsdp2")]
    found = [each(launches, launch, case) for launch, case in chain]
    assert sorted(sample for ranks in found for rank in ranks for sample in rank["seen"]) == list(range(N))
    assert found[-1][0]["bests"] == ["best"]


@pytest.mark.parametrize("case", [case for case in OF_TWO if case.startswith("resumed_")])
def test_a_resumed_fit_ends_as_one_that_never_ended(launches, case):
    for found in each(launches, "2", case):
        same = ("same", "same_moments", "same_average", "same_losses", "same_buffers", "same_health")
        assert {key: found[key] for key in same} == dict.fromkeys(same, True)
        assert found["at_end"] == ["best", "epoch-0002", "epoch-0002-batch-000004", "epoch-0003"]
        assert found["files"] == ["epoch-0002-batch-000004", "epoch-0002", "epoch-0003"]


@WITH_FSDP2
def test_records_of_sharded_gradients_go_on_with_another_number_of_ranks(launches):
    for found in each(launches, "4", "health_on_four"):
        assert found == {"n_steps": 30, "n_norms": 30}


def test_a_signal_in_a_validation_of_a_sharded_model_is_resumed_too(launches):
    for found in each(launches, "2", "signaled_fsdp2"):
        assert found["same"]
        assert found["names"] in (["epoch-0001", "epoch-0002-trained"], ["epoch-0001", "epoch-0002"])


def test_an_optimizer_whose_state_cannot_be_divided_is_an_error(launches):
    for rank in launches["2"]:
        assert "OfShards has 'seen' of this rank's shard as a plain tensor" in rank["plain_state"]["text"]


@WITH_FSDP2
def test_gradients_that_others_have_accumulated_are_an_error(launches):
    for rank in launches["4"]:
        for case in ("others_sums_ddp", "others_sums_fsdp2"):
            text = "was written while 2 processes accumulated gradients, which 4 cannot continue"
            assert text in rank[case]["text"]
    for rank in launches["2"]:
        assert "of the whole model, which a sharded one cannot continue" in rank["others_sums_ddp"]["text"]


def test_a_damaged_folder_is_named_and_the_one_before_is_resumed(launches):
    main, other = each(launches, "2", "damaged")
    assert main["n"] == other["n"] == 24
    (text,) = main["warned"]
    assert "epoch-0002 is damaged: __0_0.distcp is missing, or does not match its checksum: resuming" in text
    assert other["warned"] == []


def test_flat_parameters_are_refused_with_what_to_use(launches):
    for rank in launches["2"]:
        assert rank["flat"]["error"] in ("ValueError", "RankError")
        assert "use torch.distributed.fsdp.fully_shard" in rank["flat"]["text"]


def test_the_middle_of_an_epoch_needs_a_sampler_for_another_number_of_ranks(launches):
    for rank in launches["2"]:
        assert "must be a DataLoader with a DistributedSampler" in rank["without_sampler"]["text"]
