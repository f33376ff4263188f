"""moe.imbalance and moe.dead, and the routers that they are read from."""

import pytest
import torch
from torch import nn

from hookcb.diagnosis.faults.model.experts import DeadExperts, UnevenExperts
from hookcb.diagnosis.measurements.operations import Operations, OpProbe
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.routers import Load, Routers
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from tests.diagnosis.faults.support import followed, numbers

N, D = 6, 8


class Mixture(nn.Module):
    """Experts as a list, chosen in one of several ways."""

    def __init__(self, choose):
        super().__init__()
        self.router, self.choose = nn.Linear(D, N), choose
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(N))

    def forward(self, x):
        return self.choose(self.router(x).softmax(-1))


class Router(nn.Linear):
    """Chooses itself, beside a module with stacked experts, as in transformers."""

    def forward(self, x):
        return super().forward(x).softmax(-1).topk(2, dim=-1)[1]


class Stacked(nn.Module):
    def __init__(self, n_experts=N):
        super().__init__()
        self.gate, self.experts = Router(D, N), nn.Module()
        self.experts.up = nn.Parameter(torch.randn(n_experts, D, D))

    def forward(self, x):
        return self.gate(x)


def loads_of(model, x, step=3):
    part, run = followed(Routers, model)
    run.loop.train_iter = step
    part.on_batch(run)
    operations = run.measured(Operations)
    with OpProbe(operations._see):
        model(x)
    assert operations.failure is part.failure is None
    part.tell(run)
    operations.close(run)
    return part.loads


def counts(indices):
    return tuple(torch.bincount(indices.flatten(), minlength=N).tolist())


@pytest.mark.parametrize(
    ("choose", "k"),
    [
        (lambda p: p.topk(2, dim=-1)[1], 2),
        (lambda p: p.topk(1)[1], 1),
        (lambda p: p.max(dim=-1)[1], 1),
        (lambda p: p.argmax(-1), 1),
    ],
)
def test_tokens_of_each_expert_are_counted_in_each_way_to_choose(choose, k):
    torch.manual_seed(0)
    model, x = Mixture(choose), numbers(3, 5, D)
    chosen = model(x)
    assert loads_of(model, x) == {"": [Load(3, counts(chosen), k)]}


def test_a_router_that_is_beside_its_experts_is_found():
    torch.manual_seed(0)
    model, x = nn.Sequential(Stacked(), nn.Identity()), numbers(15, D)
    assert loads_of(model, x) == {"0.gate": [Load(3, counts(model(x)), 2)]}


@pytest.mark.parametrize(
    "model",
    [
        Stacked(n_experts=N + 1),  # of another number
        Mixture(lambda p: p.topk(2, dim=0)[1]),  # experts that choose tokens
        Mixture(lambda p: p.max()),
        nn.Sequential(Router(D, N), nn.Identity()),  # no experts
        nn.Sequential(nn.Conv1d(5, N, 3), Router(D - 2, N)),
    ],
)
def test_other_choices_are_not_those_of_a_router(model):
    assert loads_of(model, numbers(5, 5, D)) == {}


def test_a_model_without_experts_cannot_have_the_faults():
    for fault in (UnevenExperts, DeadExperts):
        _, run = followed(fault, nn.Linear(D, N))
        routers = run.measured(Routers)
        assert routers.done
        routers.tell(run)
        assert list(fault().findings(run)) == [Absent("the model has no experts")]


def test_tokens_of_ranks_are_added_in_looks_of_all_and_shared_ones_count_once():
    def merged(*of_ranks):
        routers = Routers()
        routers.merge(Run(), of_ranks, 0)
        return routers.loads

    one, other = [Load(1, (5, 0), 1), Load(2, (4, 1), 1)], [Load(2, (0, 5), 1), Load(4, (1, 4), 1)]
    assert merged({"moe": one}, {"moe": other}) == {"moe": [Load(2, (4, 6), 1)]}
    assert merged({"moe": one}, {"moe": list(one)}) == {"moe": one}  # as in tensor parallelism
    assert merged({"first": one}, {"last": other}) == {"first": one, "last": other}  # as in a pipeline


def test_ranks_give_as_many_looks_as_are_small_enough():
    run, routers = Run(), Routers()
    routers.loads = {"moe": [Load(step, (1,) * 6_000, 1) for step in range(20)]}
    assert [load.step for load in routers.state(run)["moe"]] == list(range(6, 20))
    run.measured(Processes).world = 1_024
    assert routers.state(run) is None


# ---- findings

STEPS = [0, 1, 2, 5, 10, 19, 38, 76, 152]
EVEN, UNEVEN = [100] * 8, [600, 100, 20, 20, 20, 20, 10, 10]
DEAD = [0, 200, 100, 100, 100, 100, 100, 100]


def judged(fault, *of_looks, k=1, scale=1):
    run = Run()
    loads = [Load(s, tuple(scale * x for x in c), k) for s, c in zip(STEPS, of_looks, strict=False)]
    run.measured(Routers).loads = {"moe": loads}
    (found,) = fault().findings(run)
    if isinstance(found, Passed | Skipped):
        return type(found)
    return found.code, found.severity, found.step, found.value, found.limit


def test_a_router_that_stays_uneven_is_told():
    assert judged(UnevenExperts, *[EVEN] * 5, *[UNEVEN] * 4) == ("moe.imbalance", "warning", 19, 6.0, 4.0)
    assert judged(UnevenExperts, *[EVEN] * 6, *[UNEVEN] * 3)[0] == "moe.imbalance"
    # of two of four experts, no one gets more than twice its share
    found = judged(UnevenExperts, *[[390, 10, 390, 10]] * 9, k=2)
    assert found == ("moe.imbalance", "warning", 19, pytest.approx(1.95), 1.6)


def test_a_router_that_is_uneven_at_first_or_at_times_is_not():
    for looks in ([UNEVEN] * 8 + [EVEN], [EVEN, UNEVEN] * 4 + [EVEN], [EVEN] * 8 + [UNEVEN], [DEAD] * 9):
        assert judged(UnevenExperts, *looks) is Passed


def test_an_expert_without_tokens_in_all_late_looks_is_told_with_its_number():
    assert judged(DeadExperts, *[EVEN] * 5, *[DEAD] * 4) == ("moe.dead", "warning", 19, 1.0, 0.0)
    assert judged(DeadExperts, *[DEAD] * 8, EVEN) is Passed
    assert judged(DeadExperts, *[DEAD] * 7, EVEN, DEAD) is Passed


def test_an_expert_that_has_lost_its_tokens_is_told_after_two_looks():
    lost = [100, 100, 100, 100, 100, 100, 0, 200]
    assert judged(DeadExperts, *[EVEN] * 7, lost, lost)[:4] == ("moe.dead", "warning", 76, 1.0)
    assert judged(DeadExperts, *[EVEN] * 8, lost) is Passed
    rare = [100, 100, 100, 100, 100, 100, 1, 199]  # with its share, it would have got two
    assert judged(DeadExperts, *[rare] * 7, lost, lost) is Passed


def test_a_router_that_still_uses_most_of_its_experts_is_a_note():
    one_of_all = [
        390,
        140,
        135,
        135,
    ]  # the busiest is among the two of most tokens; the others share the rest
    assert judged(UnevenExperts, *[one_of_all] * 9, k=2)[:2] == ("moe.imbalance", "info")


def test_few_batches_or_few_tokens_are_not_judged():
    dead, uneven = [0, 2, 1, 1, 1, 1, 1, 1], [6, 1, 0, 0, 0, 0, 0, 1]
    assert judged(DeadExperts, *[dead] * 9, scale=40) is Skipped  # tokens
    assert judged(UnevenExperts, *[uneven] * 9, scale=1) is Skipped
    for fault, load in ((DeadExperts, dead), (UnevenExperts, uneven)):
        assert judged(fault, *[load] * 8, scale=100) is Skipped  # batches


def test_a_router_that_collapses_late_is_told_from_then_on():
    found = judged(UnevenExperts, *[EVEN] * 7, *[UNEVEN] * 2)
    assert found[:2] == ("moe.imbalance", "warning")
    assert judged(UnevenExperts, *[EVEN] * 8, UNEVEN) is Passed  # one batch may be of one kind
    assert judged(UnevenExperts, *[EVEN] * 7, UNEVEN, UNEVEN[::-1]) is Passed  # another favorite


def test_experts_of_transformers_without_their_load_balancing_loss_get_advice_for_that():
    run = Run()
    run.measured(Routers).loads = {"moe": [Load(s, tuple(DEAD), 1) for s in STEPS]}
    run.measured(Routers).lacks_balance = True
    (found,) = DeadExperts().findings(run)
    assert "output_router_logits = True" in found.next_steps[0]
