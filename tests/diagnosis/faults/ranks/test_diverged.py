"""Weights of ranks that part, on made-up hashes."""

from array import array

import pytest

from hookcb import Finding
from hookcb.diagnosis.faults.ranks.alone import MIN_STEPS, LoneProcesses
from hookcb.diagnosis.faults.ranks.diverged import DivergedReplicas
from hookcb.diagnosis.measurements.processes import Processes, Role
from hookcb.diagnosis.measurements.replica_hashes import SET_BY_OTHERS, Look, OfRank, ReplicaHashes
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from tests.support import in_turn

LOOKS = 0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 16, 17
WHOLE = 0, 1, 2, 4, 8, 10, 16  # at which gradients are hashed
NAMES = ["0.weight", "0.bias"]


def weights(n, rank):
    """Hashes of the weights of replicas."""
    return [100 + n, 200 + n]


def own_weights(n, rank):
    """Those of ranks that begin alike, and part at the first step."""
    return [1_000 * rank * (n > 0) + x for x in weights(n, rank)]


def gradients(n, rank):
    return [300 + n, 400 + n]


def own_gradients(n, rank):
    return [1_000 * (rank + 1) + x for x in gradients(n, rank)]


def state(
    rank, weights=weights, backward=gradients, given=None, rates=lambda rank: (0.1,), talks=True, **about
):
    """What a rank has told; functions give numbers by step and rank."""
    looks = {}
    for n in LOOKS:
        now = [array("I", f(n, rank)) if n in WHOLE else array("I") for f in (backward, given or backward)]
        looks[n] = Look(n, array("I", weights(n, rank)), *now, rates(rank), 3 * n if talks else 0)
    return OfRank(**{"structure": 1, "places": array("q", [0, 0]), "looks": looks, "n_steps": 18} | about)


def told(kind, *states, roles=None, is_ddp=False, world=None):
    """The only result of a fault on what ranks have told."""
    run, found = Run(), ReplicaHashes()
    everyone = tuple(range(len(states))) if is_ddp else ()
    run.measured(Processes).roles = roles or [Role(rank, everyone) for rank in range(len(states))]
    run.parts[ReplicaHashes] = found
    found.names = NAMES
    found.merge(run, states, 0)
    (result,) = kind().findings(run)
    return result


def diverged(n=2, is_ddp=False, roles=None, **about):
    return told(DivergedReplicas, *(state(rank, **about) for rank in range(n)), is_ddp=is_ddp, roles=roles)


def alone(n=2, roles=None, **about):
    return told(LoneProcesses, *(state(rank, **about) for rank in range(n)), roles=roles)


FINE = Passed("replicas that differ")
NOT_ALONE = Passed("processes that train alone")


def from_step(first, place=1, which=1):
    """Weights of which one differs on one rank from a step on."""

    def made(n, rank):
        found = weights(n, rank)
        found[place] += 7 * (n >= first and rank == which)
        return found

    return made


# ---- replicas of DistributedDataParallel


def test_replicas_that_stay_alike_are_fine():
    assert diverged(is_ddp=True) == FINE


@in_turn("first", [0, 1, 5, 17])
def test_replicas_that_part_are_an_error_with_rank_parameter_and_step(first):
    found = diverged(4, is_ddp=True, weights=from_step(first, which=2))
    assert (found.code, found.severity, found.layer, found.param) == (
        "replica.diverged",
        "error",
        "0",
        "0.bias",
    )
    assert (found.step, found.ranks) == (first, (2,))
    when = "before the first step" if not first else f"after {first} step"
    assert f"Parameter 0.bias differs on rank 2 from that of rank 0 {when}" in found.message


def test_if_rank_0_is_the_odd_one_it_is_named():
    found = diverged(3, is_ddp=True, weights=from_step(4, which=0))
    assert found.ranks == (0,)
    assert "from that of most ranks" in found.message


def test_the_first_step_comes_before_the_first_parameter():
    def made(n, rank):
        return [weights(n, rank)[0] + rank * (n > 8), weights(n, rank)[1] + rank * (n > 3)]

    assert diverged(is_ddp=True, weights=made).param == "0.bias"


@in_turn(
    ("about", "words"),
    [
        ({"given": own_gradients}, "clipped, scaled"),
        ({"rates": lambda rank: (0.1 * (rank + 1),)}, "a schedule that follows a number of its rank"),
        ({}, "a state of the optimizer"),
        ({"backward": own_gradients}, "an all-reduce that loses data"),
        (
            {"backward": lambda n, rank: [0, 0] if rank else gradients(n, rank)},
            "an all-reduce that loses data",
        ),
        ({"backward": lambda n, rank: [0, 0]}, "a state of the optimizer"),  # of which nothing is known
    ],
)
def test_gradients_tell_the_cause(about, words):
    found = diverged(is_ddp=True, weights=from_step(5), **about)
    assert words in found.causes[0]
    assert "after 5 steps, and was equal after 4" in found.message


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"n_replaced": 2}, "parameters that were replaced"),
        ({"n_raw": 9}, "a call of the model inside"),
        ({"hooks": ("mine",)}, "the communication hook mine"),
    ],
)
def test_what_is_known_of_the_wrapper_tells_why_gradients_differ(about, words):
    roles = [Role(rank, (0, 1), **about) for rank in range(2)]
    found = diverged(roles=roles, weights=from_step(1), backward=own_gradients)
    assert words in found.causes[0]


def test_a_raw_call_whose_backward_was_not_seen_is_told():
    roles = [Role(rank, (0, 1), n_raw=9) for rank in range(2)]
    about = {"backward": lambda n, rank: [0, 0], "given": own_gradients}
    assert "a call of the model inside" in diverged(roles=roles, weights=from_step(1), **about).causes[0]


def test_a_step_in_no_sync_is_told():
    states = [state(rank, from_step(1), own_gradients) for rank in range(2)]
    for own in states:
        own.looks[0].was_synced = False
    assert "no_sync" in told(DivergedReplicas, *states, is_ddp=True).causes[0]


def test_only_steps_that_all_have_made_are_compared():
    one, other = state(0), state(1, from_step(17))
    del one.looks[17]
    assert told(DivergedReplicas, one, other, is_ddp=True) == FINE
    other.looks = {18: other.looks[17]}
    unseen = Skipped("no two ranks have weights that must be equal")
    assert told(DivergedReplicas, one, other, is_ddp=True) == unseen


def test_groups_of_replicas_are_compared_for_themselves():
    roles = [Role(rank, (rank % 2, rank % 2 + 2)) for rank in range(4)]
    made = lambda n, rank: own_weights(n, rank % 2)  # noqa: E731
    assert diverged(4, roles=roles, weights=made) == FINE
    found = diverged(4, roles=roles, weights=lambda n, rank: own_weights(n, rank if rank == 3 else rank % 2))
    assert found.ranks == (3,)


def test_parts_of_parameters_are_compared_with_the_same_part_only():
    apart = {"weights": own_weights, "is_ddp": True}
    found = [state(rank, own_weights, places=array("q", [5 + rank, SET_BY_OTHERS])) for rank in range(2)]
    assert isinstance(told(DivergedReplicas, *found, is_ddp=True), Skipped)
    assert diverged(places=array("q", [5, 6]), **apart).param == "0.weight"
    sharded = [Role(rank, is_sharded=True) for rank in range(2)]
    assert told(DivergedReplicas, *found, roles=sharded) == Absent(
        "ranks have different parts of the parameters"
    )


def test_replicas_that_average_weights_from_time_to_time_are_apart_by_design():
    roles = [Role(rank, (0, 1), is_periodic=True) for rank in range(2)]
    assert isinstance(diverged(roles=roles, weights=own_weights), Absent)


def test_a_rank_alone_compares_nothing():
    assert [next(iter(kind().findings(Run()))) for kind in (DivergedReplicas, LoneProcesses)] == [
        Skipped("the parameters of all ranks were not compared")
    ] * 2


# ---- without a wrapper


def test_gradients_that_are_averaged_by_hand_keep_ranks_alike():
    assert diverged(backward=own_gradients, given=gradients) == FINE
    assert alone(backward=own_gradients, given=gradients) == NOT_ALONE


def test_weights_that_were_trained_alike_and_part_for_good_are_a_warning():
    found = diverged(weights=from_step(8), backward=own_gradients, given=gradients)
    assert (found.severity, found.param, found.ranks, found.step) == ("warning", "0.bias", (1,), 8)


def test_the_same_step_with_another_result_is_an_error():
    def halves(n, rank):
        return [5_000 * (rank + 1) + n, weights(n, rank)[1] + rank * (n > 4)]

    found = diverged(weights=halves, given=own_gradients, backward=lambda n, rank: [9 + rank, 400 + n])
    assert (found.severity, found.param, found.step) == ("error", "0.bias", 5)
    assert "clipped, scaled" in found.causes[0]


def test_weights_that_meet_again_or_were_apart_once_are_fine():
    periodic = lambda n, rank: [x + rank * (n % 8 > 0) for x in weights(n, rank)]  # noqa: E731
    assert not isinstance(diverged(weights=periodic, backward=own_gradients), Finding)
    assert not isinstance(alone(weights=periodic, backward=own_gradients), Finding)
    last = {"weights": from_step(17), "backward": own_gradients, "given": gradients}
    assert diverged(**last) == FINE


def test_what_else_writes_weights_is_taken_to_average_them():
    about = {"weights": from_step(8), "backward": own_gradients, "given": gradients, "n_written": 1}
    assert diverged(**about) == FINE


@in_turn(
    "about",
    [
        {"weights": own_weights, "backward": own_gradients},  # experts, stages
        {"weights": lambda n, rank: [7 * rank, n], "backward": own_gradients},  # halves
        {"weights": from_step(1), "backward": lambda n, rank: [0, 0]},
        {"weights": own_weights, "talks": False},  # an ensemble on the same batches
        {"weights": own_weights, "rates": lambda rank: (0.1 * (rank + 1),)},  # a search
    ],
)
def test_ranks_that_were_never_trained_alike_are_not_replicas(about):
    result = diverged(**about)
    assert not isinstance(result, Finding)


# ---- processes that train alone


@pytest.mark.parametrize("same", [True, False])
def test_processes_that_never_communicate_are_told(same):
    found = alone(weights=weights if same else own_weights, backward=own_gradients, talks=False)
    assert (found.code, found.severity, found.ranks) == ("replica.alone", "warning", (0, 1))
    assert "in 18 steps no collective was begun" in found.message


def test_processes_that_communicate_but_not_what_they_learn_are_told():
    found = alone(weights=own_weights, backward=own_gradients)
    assert found.severity == "warning"
    assert "neither gradients nor weights were averaged" in found.message
    assert alone(weights=own_weights, backward=own_gradients, n_written=1) == NOT_ALONE


@pytest.mark.parametrize(
    "about",
    [
        {"weights": lambda n, rank: [x + rank for x in weights(n, rank)]},
        {"rates": lambda rank: (0.1 * (rank + 1),), "weights": own_weights},
    ],
)
def test_an_ensemble_or_a_search_is_a_note(about):
    assert alone(talks=False, **about).severity == "info"


def test_few_steps_evaluations_and_stages_are_not_judged():
    about = {"weights": own_weights, "talks": False}
    unseen = Skipped(f"no two processes have made {MIN_STEPS} steps without a wrapper")
    assert alone(**about, n_steps=MIN_STEPS - 1) == unseen
    assert alone(**about, has_loss=False) == unseen
    one, other = state(0, **about), state(1, **about, n_steps=0)
    assert told(LoneProcesses, one, other) == unseen
    assert told(LoneProcesses, one, state(1, **about, structure=2)) == unseen


def test_replicas_and_shards_are_not_alone():
    about = {"weights": own_weights, "talks": False}
    assert alone(**about, roles=[Role(rank, (0, 1)) for rank in range(2)]) == NOT_ALONE
    assert alone(**about, roles=[Role(rank, is_sharded=True) for rank in range(2)]) == NOT_ALONE


def test_unknown_counts_of_collectives_prove_nothing():
    states = [state(rank, own_weights, own_gradients, n_written=1) for rank in range(2)]
    for own in states:
        for look in own.looks.values():
            look.n_collectives = None
    assert told(LoneProcesses, *states) == NOT_ALONE
