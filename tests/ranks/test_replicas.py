"""Watched plain loops of two ranks: faults of replicas are named with their cause, right uses are not."""

import inspect

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.support import launched, shared
from tests.support import in_turn


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Facts of all cases but those of `OTHER_RIGHT`."""

    def launch(folder):
        return launched("replica_worker.py", folder, "but", *OTHER_RIGHT, timeout=240)

    return shared(tmp_path_factory, "replicas", launch, 300)


@pytest.fixture(scope="module")
def other_ranks(tmp_path_factory):
    """Facts of `OTHER_RIGHT`."""

    def launch(folder):
        return launched("replica_worker.py", folder, *OTHER_RIGHT, timeout=240)

    return shared(tmp_path_factory, "other-replicas", launch, 300)


def of_both(ranks, name):
    """The verdict on a case, which must be the same on both ranks."""
    assert all(name in rank for rank in ranks), [rank.get("log", "")[-2000:] for rank in ranks]
    one, other = (rank[name] for rank in ranks)
    assert "result" in one, one
    assert one["result"] == other["result"]
    return one["result"]


SYNC = "gradients differ after the backward"
FAULTS = {  # severity, parameter, ranks, step, and words of the message and the cause
    "all_reduce_that_loses_data": ("error", "0.weight", [1], 1, SYNC, "the communication hook hook"),
    "broadcast_that_loses_data": ("error", "3.weight", [1], 0, "before the first step", "a broadcast that"),
    "no_init_sync": ("error", "0.weight", [1], 0, "before the first step", "init_sync=False"),
    "hooks_lost": ("error", "3.weight", [1], 1, SYNC, "its hooks are lost"),
    "raw_module_every_second_step": (
        "error",
        "0.weight",
        [1],
        1,
        "19 forwards did not go",
        "model.module(x)",
    ),
    "raw_module_watched_inside": ("error", "0.weight", [1], 1, "20 forwards did not go", "model.module(x)"),
    "raw_module_always": ("error", "0.weight", [1], 1, "40 forwards did not go", "model.module(x)"),
    "step_in_no_sync": ("error", "0.weight", [1], 1, "inside of no_sync()", "no_sync()"),
    "all_reduce_by_hand_that_stops": ("warning", "0.weight", [1], 16, SYNC, "an all-reduce that"),
    "clip_of_dtensors_on_one_rank": (
        "error",
        "3.bias",
        [1],
        1,
        "but not as the optimizer got them",
        "clipped",
    ),
    "clip_of_halves_on_one_rank": ("error", "bias", [1], 1, "but not as the optimizer got them", "clipped"),
}


@in_turn("name", FAULTS)
def test_replicas_that_part_are_told_with_rank_parameter_step_and_cause(ranks, name):
    if name == "no_init_sync" and name[3:] not in inspect.signature(DistributedDataParallel).parameters:
        pytest.skip("DistributedDataParallel of this torch has no init_sync")
    severity, param, of, step, words, cause = FAULTS[name]
    alarms = of_both(ranks, name)["alarms"]
    assert [x[0] for x in alarms] == ["replica.diverged"], alarms
    assert alarms[0][1:2] + alarms[0][3:6] == [severity, param, of, step]
    assert words in alarms[0][6]
    assert cause in alarms[0][7][0]


@in_turn(
    ("name", "step", "words"),
    [
        ("clip_on_one_rank", 0, "limit of clip_grad_norm_ none on rank 0, 0.1 on rank 1."),
        ("rate_of_one_rank", 10, "lr 0.05 on rank 0, 0.025 on rank 1; at step 9 they were the same."),
        ("momentum_of_one_rank_of_shards", 10, "momentum 0.9 on rank 0, 0.5 on rank 1; at step 9 "),
    ],
)
def test_settings_of_one_rank_are_told_and_not_how_replicas_come_apart_by_them(ranks, name, step, words):
    (alarm,) = of_both(ranks, name)["alarms"]
    assert [*alarm[:2], *alarm[4:6]] == ["replica.settings", "error", [1], step]
    assert words in alarm[6]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alone", "no collective was begun"),
        ("alone_with_logging", "neither gradients nor weights were averaged"),
        ("alone_on_the_same_batches", "no collective was begun"),
    ],
)
def test_processes_that_train_alone_are_a_warning(ranks, name, words):
    ((code, severity, *_, text, _),) = of_both(ranks, name)["alarms"]
    assert (code, severity) == ("replica.alone", "warning")
    assert f"in 40 steps {words}" in text


@in_turn(
    ("name", "code", "of"),
    [
        ("inputs_of_one_rank", "input.scale", [1]),
        ("the_same_batches", "data.duplicated", []),
        ("the_same_batches_watched_inside", "data.duplicated", []),
        ("a_buffer_of_one_rank", "replica.buffers", [1]),
        ("the_same_order", "data.same_order", []),
        ("batches_that_repeat", "data.repeated", [1]),
        ("averaged_twice", "grad.rescaled", []),
    ],
)
def test_what_a_learner_sees_of_ranks_is_seen_in_a_plain_loop(ranks, name, code, of):
    assert [[x[0], x[4]] for x in of_both(ranks, name)["alarms"]] == [[code, of]]


@in_turn(
    ("name", "code"),
    [
        ("the_same_dropout", "random.duplicated"),
        ("own_statistics", "replica.buffers"),
        ("sweep", "replica.alone"),
        ("ensemble", "replica.alone"),
        ("a_class_on_no_rank", "label.unseen"),
    ],
)
def test_what_may_be_meant_is_a_note(ranks, name, code):
    verdict = of_both(ranks, name)
    assert verdict["alarms"] == []
    assert code in [note[0] for note in verdict["notes"]]


RIGHT = (
    "healthy",
    "wrapped_later",
    "accumulating",
    "zero_optimizer",
    "reduced_by_hand",
    "fully_sharded",
    "halves",
    "another_order",
)
OTHER_RIGHT = (
    *("clipped_on_all", "unused_parameters", "half_precision_hook", "power_sgd_hook", "joining"),
    *("average_on_rank_0", "best_weights_on_rank_0", "local_sgd_by_hand", "local_sgd_of_torch"),
    *("post_local_sgd_hook", "diloco", "stages", "experts", "tensor_parallel"),
)


def check_healthy(verdict):
    assert (verdict["status"], verdict["alarms"]) == ("healthy", [])
    assert not [note for note in verdict["notes"] if note[0].startswith("replica")]


@in_turn("name", RIGHT)
def test_right_uses_are_healthy(ranks, name):
    check_healthy(of_both(ranks, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_RIGHT)
def test_other_right_uses_are_healthy(other_ranks, name):
    check_healthy(of_both(other_ranks, name))


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_the_rank_that_the_others_wait_for_is_named_with_its_phase(ranks, phase):
    name = {"data": "slow_to_read", "forward": "slow_forward"}[phase]
    alarms = {alarm[0]: alarm[1:] for alarm in of_both(ranks, name)["alarms"]}
    severity, *_, of, _, text, _ = alarms.pop("time.straggler")
    assert (severity, of, alarms.keys() - {"time.data_bound"}) == ("warning", [1], set())
    assert "ms on its data and forward in a step, the others " in text
    assert f"its {phase} takes " in text


@pytest.mark.parametrize("name", ["as_fast_as_the_other", "slow_with_a_collective_in_the_forward"])
def test_ranks_that_wait_elsewhere_are_not_slow(ranks, name):
    verdict = of_both(ranks, name)
    assert verdict["alarms"] == []
    assert "time.straggler" not in verdict["gaps"]


def test_classes_that_only_another_rank_has_are_not_unseen(ranks):
    verdict = of_both(ranks, "a_class_on_each_rank")
    assert (verdict["alarms"], "label.unseen" in verdict["gaps"]) == ([], False)
    assert "label.unseen" not in [note[0] for note in verdict["notes"]]
