"""Gradients left over from the last step, and updates that low precision swallows, in small trainings."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookcb.diagnosis.probes.step as probes_of_steps
from hookcb import Diagnose, watch
from hookcb.diagnosis.probes.step import (
    MIN_STEPS,
    ClearedGradients,
    LostUpdates,
    StaleGradients,
    observe_accumulation,
)
from tests.support import covering


def net(seed=0, n_out=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_out))


def batches(n):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(n)]


def trained(clear, n=12, every=1, opt=torch.optim.SGD, stop=None):
    """Observations if `clear(opt, model, i, when)` clears gradients; each `every`-th batch has a step."""
    model = net()
    stale, opt = StaleGradients(model), opt(model.parameters(), lr=1e-3)
    for i, (x, y) in enumerate(batches(n)):
        clear(opt, model, i, "begin")
        loss = F.mse_loss(model(x), y)
        clear(opt, model, i, "forward")
        stale.before_backward()
        loss.backward()
        if (i + 1) % every == 0:
            opt.step()
            stale.after_step(opt)
            clear(opt, model, i, "end")
    return list(stale.observations())


def at(when, set_to_none=True, every=1, by_model=False):
    def clear(opt, model, i, now):
        if now == when and i % every == 0:
            (model if by_model else opt).zero_grad(set_to_none=set_to_none)

    return clear


@pytest.mark.parametrize("moves_along", [False, True])
def test_gradients_in_a_network_that_is_only_averaged_are_used_by_nothing(moves_along):
    """A target network that follows another one, and a loop that makes its own steps and never clears."""
    target, online, found = net(), net(1), []
    with watch(target, Diagnose(on_sick="ignore")) as w:
        for x, y in batches(12):
            F.mse_loss(target(x), y).backward()
            with torch.no_grad():
                for p, q in zip(target.parameters(), online.parameters(), strict=True):
                    p.sub_(1e-3 * p.grad) if moves_along else p.lerp_(q, 0.01)
        found = [x for x in w.diagnose().findings if x.code == "grad.stale"]
    (told,) = found
    assert told.severity == ("error" if moves_along else "info")
    assert ("zero_grad" in told.next_steps[0], "no_grad" in told.next_steps[0]) == (
        moves_along,
        not moves_along,
    )


def never(opt, model, i, now):
    """Nobody clears anything."""


# ---- gradients left over


@pytest.mark.parametrize("opt", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_that_nobody_clears_are_told(opt):
    (found,) = trained(never, n=12, opt=opt)
    assert (found.code, found.step, found.value) == ("grad.stale", 1, 11)
    assert "In 11 of 12 steps" in found.text


@pytest.mark.parametrize("when", ["begin", "forward", "end"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_gradients_that_are_cleared_anywhere_between_two_backwards_are_fine(when, set_to_none, by_model):
    assert trained(at(when, set_to_none, by_model=by_model)) == []


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("every", [2, 4])
def test_accumulation_is_no_stale_gradient(every, set_to_none):
    assert trained(at("begin", set_to_none, every), n=24, every=every) == []
    assert trained(at("end", set_to_none), n=24, every=every) == []


def test_accumulation_without_ever_clearing_is():
    (found,) = trained(never, n=24, every=4)
    assert found.value == 5


def test_gradients_that_are_cleared_now_and_then_are_no_finding():
    assert trained(at("begin", every=3)) == []


@pytest.mark.parametrize(("n", "is_told"), [(2, False), (3, True)])
def test_three_steps_are_needed(n, is_told):
    assert len(trained(never, n=n)) == is_told


def test_gradients_that_replace_those_of_the_step_before_are_not_stale():
    """Such as those of torch.autograd.grad, which adds nothing to old gradients."""
    model = net()
    params, stale, opt = list(model.parameters()), StaleGradients(model), torch.optim.SGD(model.parameters())
    for x, y in batches(12):
        loss = F.mse_loss(model(x), y)
        stale.before_backward()
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad
        opt.step()
        stale.after_step(opt)
    assert stale.has_looked
    assert not list(stale.observations())


def test_gradients_that_are_zero_by_themselves_are_not_stale():
    model = net()
    for p in model.parameters():
        nn.init.zeros_(p)
    stale, opt = StaleGradients(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        stale.before_backward()
        (model(torch.ones(4, 3)) * 0).sum().backward()
        opt.step()
        stale.after_step(opt)
    assert list(stale.observations()) == []


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_generator_and_a_discriminator_are_told_apart(is_clean):
    """The generator's backward leaves gradients in the discriminator, which are cleared before its own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    opts = {name: torch.optim.SGD(m.parameters(), 1e-3) for name, m in model.items()}
    stale = StaleGradients(model)
    for (x, _), name in itertools.product(batches(8), ("d", "g")):
        if is_clean:
            opts[name].zero_grad()
        fake = model["g"](x)
        loss = -model["d"](fake).mean() if name == "g" else (model["d"](fake.detach()) - model["d"](x)).mean()
        stale.before_backward()
        loss.backward()
        opts[name].step()
        stale.after_step(opts[name])
    assert [s.code for s in stale.observations()] == [] if is_clean else ["grad.stale"] * 2


def test_other_parameters_of_an_optimizer_may_keep_their_gradients():
    model, other = net(), nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    stale, opt = StaleGradients(model), torch.optim.SGD([other, *model.parameters()], lr=1e-3)
    for x, y in batches(6):
        model.zero_grad()
        stale.before_backward()
        F.mse_loss(model(x), y).backward()
        opt.step()
        stale.after_step(opt)
    assert list(stale.observations()) == []


def test_sparse_gradients_are_looked_past():
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    stale, opt = StaleGradients(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        stale.before_backward()
        model(torch.arange(4)).sum().backward()
        opt.step()
        stale.after_step(opt)
    assert list(stale.observations()) == []


def test_gradients_are_read_no_more_once_a_step_had_fresh_ones(monkeypatch):
    n_read = Counter()
    for name in ("_largest", "_is_there"):
        read = getattr(probes_of_steps, name)
        monkeypatch.setattr(
            probes_of_steps, name, lambda x, name=name, read=read: n_read.update([name]) or read(x)
        )
    model, cleared = net(), ClearedGradients()
    stale, opt = StaleGradients(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in batches(12):
        opt.zero_grad()
        stale.before_backward()
        F.mse_loss(model(x), y).backward()
        cleared.after_backward(model[0].bias)
        cleared.before_step()
        opt.step()
        stale.after_step(opt)
    assert n_read == {"_largest": MIN_STEPS - 1, "_is_there": 2}
    assert stale.has_looked
    assert not [*stale.observations(), *cleared.observations()]


def test_an_optimizer_that_is_gone_is_forgotten():
    model = net()
    stale = StaleGradients(model)
    for _ in range(4):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        stale.after_step(opt)
        del opt
    stale.before_backward()
    assert list(stale.observations()) == []


# ---- updates that are swallowed


def stepped(lr, dtype=torch.bfloat16, n=5, scale=1.0, opt=torch.optim.SGD):
    """Observations of `LostUpdates`, and by name the shares from a comparison of whole weights."""
    model = net().to(dtype)
    swallowed, opt = LostUpdates(model), opt(model.parameters(), lr=lr)
    expected = {}
    for step, (x, y) in enumerate(batches(n)):
        opt.zero_grad()
        (scale * F.mse_loss(model(x.to(dtype)), y.to(dtype))).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        swallowed.before_step()
        opt.step()
        swallowed.after_step(step)
        for name, p in model.named_parameters():
            asked = p.grad != 0
            same = (p.detach() == before[name]) & asked
            expected.setdefault(name, []).append(int(same.sum()) / max(1, int(asked.sum())))
    return swallowed, expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-5, 1e-3, 3e-2, 1.0])
def test_shares_are_those_of_whole_weights_compared(dtype, lr):
    swallowed, expected = stepped(lr, dtype)
    assert set(swallowed.shares) == {"0.weight", "2.weight"}
    for name, shares in swallowed.shares.items():
        assert [float(share) for _, share in shares] == pytest.approx(expected[name])
        assert [step for step, _ in shares] == list(range(5))


def test_a_small_rate_in_bfloat16_is_told_and_a_large_one_is_not():
    swallowed, expected = stepped(1e-5)
    found = {s.param: s for s in swallowed.observations()}
    assert set(found) == {"0.weight", "2.weight"}
    for name, s in found.items():
        assert (s.code, s.layer, s.step) == ("update.lost_to_rounding", name.removesuffix(".weight"), 0)
        assert s.value == pytest.approx(sorted(expected[name])[2])
        assert "bfloat16" in s.text
    assert list(stepped(1.0)[0].observations()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_in_full_precision_are_not_followed(dtype):
    assert stepped(1e-9, dtype)[0].shares == {}


def test_two_steps_are_too_few_to_be_told():
    assert list(stepped(1e-6, n=2)[0].observations()) == []
    assert len(list(stepped(1e-6, n=3)[0].observations())) == 2


def test_a_weight_without_a_gradient_has_no_update_to_lose():
    model = net().bfloat16()
    swallowed = LostUpdates(model)
    for step in range(5):
        model[0].weight.grad = None
        model[2].weight.grad = torch.zeros_like(model[2].weight)
        swallowed.before_step()
        swallowed.after_step(step)
    assert "0.weight" not in swallowed.shares
    assert [float(share) for _, share in swallowed.shares["2.weight"]] == [0.0] * 5
    assert list(swallowed.observations()) == []


def test_a_weight_that_moves_in_one_step_of_five_is_not_told():
    model = net().bfloat16()
    swallowed = LostUpdates(model)
    for step in range(5):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        swallowed.before_step()
        if step == 3:
            with torch.no_grad():
                model[0].weight += 1
        swallowed.after_step(step)
    assert [s.param for s in swallowed.observations()] == ["2.weight"]


# ---- accumulated losses


@pytest.mark.parametrize(
    ("n", "divide", "reports", "opt_class"),
    covering([4, 1], [False, True], [True, False], [torch.optim.SGD, torch.optim.Adam]),
)
def test_losses_that_are_summed_over_batches_get_a_note_if_their_scale_matters(n, divide, reports, opt_class):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = opt_class(model.parameters(), 0.01)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(41):
            loss = nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))
            if reports:
                w.report_loss(loss)
            (loss / n if divide else loss).backward()
            if i % n == n - 1:
                opt.step()
                opt.zero_grad()
    noted = [(x.severity, x.value) for x in w.diagnose().findings if x.code == "accum.divisor"]
    is_summed = n == 4 and not divide and opt_class is torch.optim.SGD
    assert noted == ([("info", 4.0)] if is_summed else [])
    assert not [note for note in w.diagnose().coverage if "a part of Diagnose" in note]


@pytest.mark.parametrize("n_backward", [set(), {1}, {2, 4}, {1, 4}])
def test_a_varying_number_of_backwards_gets_no_note(n_backward):
    assert list(observe_accumulation(n_backward, 1.0)) == []


@pytest.mark.parametrize("change", ["none", "zero", "scale", "other", "after"])
def test_gradients_that_do_not_add_up_are_not_said_to_be_summed(change):
    """As in sharpness-aware minimization, and in gradient surgery."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(60):
            nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
            if change == "after" and i % 2:
                for p in model.parameters():
                    p.grad /= 2
            if i % 2:
                opt.step()
            if i % 2 or change in ("none", "zero"):
                opt.zero_grad(set_to_none=change != "zero")
            elif change == "scale":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif change == "other":
                for p in model.parameters():
                    p.grad = p.grad / 2
    assert not [x for x in w.diagnose().findings if x.code == "accum.divisor"]


# ---- cleared gradients


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_that_are_cleared_before_each_step_are_named(to_none, every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False, on_sick="ignore")) as w:
        for i in range(40):
            model(torch.randn(8, 4)).square().mean().backward()
            if i % every == 0:
                opt.zero_grad(set_to_none=to_none)
            opt.step()
            opt.zero_grad()
    codes = [finding.code for finding in w.diagnose().findings if finding.severity == "error"]
    assert ("param.not_stepped" in codes) == (every == 1)
    assert "param.unreachable" not in codes
