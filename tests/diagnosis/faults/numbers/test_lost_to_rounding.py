"""Updates that low precision swallows, in small trainings."""

import pytest
import torch
import torch.nn.functional as F

from hookcb.diagnosis.faults.numbers.lost_to_rounding import LostToRounding
from tests.diagnosis.faults.gradients.test_stale import batches, net
from tests.diagnosis.faults.support import followed
from tests.support import along, in_turn


def found(fault, run):
    """One for each weight."""
    fault.tell(run)
    return fault.seen


def stepped(lr, dtype=torch.bfloat16, n=5, scale=1.0, opt=torch.optim.SGD):
    """The fault and its run, and by name the shares from a comparison of whole weights."""
    model = net().to(dtype)
    (fault, run), opt = followed(LostToRounding, model), opt(model.parameters(), lr=lr)
    expected = {}
    for step, (x, y) in enumerate(batches(n)):
        opt.zero_grad()
        (scale * F.mse_loss(model(x.to(dtype)), y.to(dtype))).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        fault.on_step(run)
        opt.step()
        run.loop.train_iter = step
        fault.on_between(run)
        for name, p in model.named_parameters():
            asked = p.grad != 0
            same = (p.detach() == before[name]) & asked
            expected.setdefault(name, []).append(int(same.sum()) / max(1, int(asked.sum())))
    return fault, run, expected


@in_turn(("dtype", "lr"), along([torch.bfloat16, torch.float16], [1e-5, 1e-3, 3e-2, 1.0]))
def test_shares_are_those_of_whole_weights_compared(dtype, lr):
    fault, _, expected = stepped(lr, dtype)
    assert set(fault.shares) == {"0.weight", "2.weight"}
    for name, shares in fault.shares.items():
        assert [float(share) for _, share in shares] == pytest.approx(expected[name])
        assert [step for step, _ in shares] == list(range(5))


def test_a_small_rate_in_bfloat16_is_told_and_a_large_one_is_not():
    fault, run, expected = stepped(1e-5)
    by_name = {s.param: s for s in found(fault, run)}
    assert set(by_name) == {"0.weight", "2.weight"}
    for name, s in by_name.items():
        assert (s.code, s.layer, s.step) == ("update.lost_to_rounding", name.removesuffix(".weight"), 0)
        assert s.value == pytest.approx(sorted(expected[name])[2])
        assert "bfloat16" in s.message
    assert found(*stepped(1.0)[:2]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_in_full_precision_are_not_followed(dtype):
    assert stepped(1e-9, dtype)[0].shares == {}


def test_two_steps_are_too_few_to_be_told():
    assert found(*stepped(1e-6, n=2)[:2]) == []
    assert len(found(*stepped(1e-6, n=3)[:2])) == 2


def test_a_weight_without_a_gradient_has_no_update_to_lose():
    model = net().bfloat16()
    fault, run = followed(LostToRounding, model)
    for step in range(5):
        model[0].weight.grad = None
        model[2].weight.grad = torch.zeros_like(model[2].weight)
        fault.on_step(run)
        run.loop.train_iter = step
        fault.on_between(run)
    assert "0.weight" not in fault.shares
    assert [float(share) for _, share in fault.shares["2.weight"]] == [0.0] * 5
    assert found(fault, run) == []


def test_a_weight_that_moves_in_one_step_of_five_is_not_told():
    model = net().bfloat16()
    fault, run = followed(LostToRounding, model)
    for step in range(5):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        fault.on_step(run)
        if step == 3:
            with torch.no_grad():
                model[0].weight += 1
        run.loop.train_iter = step
        fault.on_between(run)
    assert [s.param for s in found(fault, run)] == ["2.weight"]
