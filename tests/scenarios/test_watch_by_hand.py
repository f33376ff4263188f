"""A watch of loops that move weights without an optimizer, or that it cannot see whole."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, Recorder, watch
from tests.support import in_turn, make_batches, make_model, same, weights

BATCHES = make_batches(6)
X, Y = BATCHES[0]


@torch.no_grad()
def in_place(p):
    p.sub_(0.1 * p.grad)


def by_data(p):
    p.data.add_(p.grad, alpha=-0.1)


def by_new_data(p):
    p.data = p.data - 0.1 * p.grad


def descend(model, write, *cbs, every=1, watched=True):
    """SGD by hand; gradients are cleared before the next forward."""
    w = watch(model, *cbs) if watched else None
    for i, (x, y) in enumerate(BATCHES):
        if i % every == 0:
            model.zero_grad()
        F.mse_loss(model(x), y).backward()
        if (i + 1) % every == 0:
            for p in model.parameters():
                write(p)
    if w is not None:
        w.close()
    return w


@pytest.mark.parametrize("write", [in_place, by_data, by_new_data])
def test_weights_that_move_without_an_optimizer_are_seen(write):
    model, plain = make_model(), make_model()
    w = descend(model, write, GradientHealth)
    descend(plain, write, watched=False)
    assert same(weights(model), weights(plain))
    assert w.facts.n_moved_by_hand == 6
    assert "weights moved 6 times without a step of a watched optimizer" in str(w.coverage)
    assert w.coverage.seen["before_step"] == w.coverage.seen["after_step"] == 5
    assert "before_step" not in w.coverage.missing


def test_gradients_and_updates_are_those_of_an_optimizer():
    by_hand = descend(make_model(), in_place, GradientHealth)
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, GradientHealth) as by_opt:
        for x, y in BATCHES:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
    for name in ("norm", "clipped_norm", "update_ratio"):
        found, expected = (
            [[row[name] for row in record] for record in w.gradient_health.stats] for w in (by_hand, by_opt)
        )
        assert found == [pytest.approx(record, rel=1e-4) for record in expected[1:]]
    assert by_hand.gradient_health.not_optimized == []
    assert len(by_hand.gradient_health.step_series("lr")) == 5
    assert all(x != x for x in by_hand.gradient_health.step_series("lr"))


def test_a_batch_after_which_nothing_has_moved_is_a_step_left_out():
    w = descend(make_model(), in_place, GradientHealth, every=2)
    assert w.facts.n_moved_by_hand == 3
    # from the third batch on, as it was seen at the second that weights are moved by hand
    assert w.gradient_health.step_series("skipped") == [1.0, 0.0, 1.0, 0.0]


def test_accumulation_with_an_optimizer_is_no_step_by_hand():
    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Callback(before_step=lambda cb: log.append(cb.learn.opt))) as w:
        for i, (x, y) in enumerate(BATCHES):
            F.mse_loss(model(x), y).backward()
            if i % 3 == 2:
                opt.step()
                opt.zero_grad()
    assert log == [opt, opt]
    assert w.facts.n_moved_by_hand == 0


def test_an_optimizer_that_comes_later_makes_the_steps_from_then_on():
    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, Callback(before_step=lambda cb: log.append(type(cb.learn.opt).__name__))) as w:
        for i, (x, y) in enumerate(BATCHES):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            if i < 3:
                for p in model.parameters():
                    in_place(p)
            else:
                opt.step()
    assert w.facts.n_moved_by_hand == 3
    assert log == ["StepByHand", "StepByHand", "StepByHand", "SGD", "SGD"]
    assert w.coverage.seen["before_step"] == w.coverage.seen["after_step"] == 5


def test_weights_that_stay_are_no_step():
    model = make_model()
    with watch(model, GradientHealth) as w:
        for x, y in BATCHES:
            F.mse_loss(model(x), y).backward()
    assert w.facts.n_moved_by_hand == 0
    assert "no optimizer of the model made a step" in w.coverage.missing["before_step"]


def test_a_verdict_on_steps_by_hand_says_what_it_could_not_see():
    verdict = descend(make_model(), in_place, Diagnose(show=False)).diagnose()
    assert verdict, verdict
    by_hand = "the loop updates its weights without a torch.optim.Optimizer, at an unknown learning rate"
    assert by_hand in verdict.coverage
    assert any("param.not_in_optimizer" in text for text in verdict.coverage)
    assert "parameters outside the optimizer" not in verdict.ruled_out
    assert not any(text.startswith("clipping") for text in verdict.ruled_out)


# ---- what is not there to see


def test_a_model_that_is_freed_before_its_watch_is_closed_is_no_failure_of_ours():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = watch(model, opt, Diagnose(show=False))
    for x, y in BATCHES:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    del model
    gc.collect()
    w.close()
    coverage = w.diagnose().coverage
    assert "the model was freed before its watch was closed, so its final state was not inspected" in coverage
    assert not any("report it" in text for text in coverage)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ERROR  The optimizer lacks some parameters")
def test_a_batch_that_is_under_way_is_counted_once_it_has_gone_back():
    model = make_model()
    opt = torch.optim.SGD(model[0].parameters(), lr=1e-3)  # of a part: a batch ends as the next one begins
    with watch(model, Diagnose(show=False)) as w:
        for x, y in make_batches(40):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        assert w.has_batch
        assert w.diagnose().coverage[0].startswith("40 batches")
    assert w.diagnose().coverage[0].startswith("40 batches")


def test_the_optimizer_of_another_model_is_told():
    model = make_model()
    with pytest.warns(UserWarning, match="optimizer has no parameter of Sequential"):
        w = watch(model, torch.optim.SGD(make_model(1).parameters()), GradientHealth)
    with w:
        F.mse_loss(model(X), Y).backward()
    assert "has no parameter of the model" in w.coverage.missing["before_step"]
    relu = nn.ReLU()  # has none to share
    with watch(relu, torch.optim.SGD(make_model().parameters())) as w:
        assert not w.facts.has_other_optimizer


def test_a_batch_that_closes_inside_a_step_is_not_that_of_the_backward_before():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def go_back(x=X, y=Y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with watch(model, opt, Recorder) as w:  # as Lightning accumulates gradients
        for x, y in BATCHES[:3]:
            go_back(x, y)
        opt.step(go_back)
    assert len(w.recorder.losses) == 4


# ---- callbacks, in whatever form they are given


@in_turn(
    "give",
    [
        lambda m, o: watch(m, o, [Recorder, ActivationStats()]),
        lambda m, o: watch(m, o, cbs=[Recorder, ActivationStats()]),
        lambda m, o: watch(m, o, Recorder, cbs=ActivationStats),
        lambda m, o: watch(m, o, [Recorder], ActivationStats()),
        lambda m, o: watch(m, [o], cbs=(cb for cb in (Recorder, ActivationStats))),
        lambda m, o: watch(m, [Recorder, ActivationStats()]),
        lambda m, o: watch(m, None, [Recorder], cbs=[ActivationStats()]),
        lambda m, o: watch(m, Recorder, cbs=[ActivationStats()]),
    ],
)
def test_callbacks_are_given_one_by_one_or_in_lists(give):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with give(model, opt) as w:
        F.mse_loss(model(X), Y).backward()
        opt.step()
    assert len(w.recorder.losses) == len(w.activation_stats.stats) == 1


def test_a_string_is_no_list_of_callbacks():
    with pytest.raises(TypeError, match="'ActivationStats'"):
        watch(make_model(), None, "ActivationStats")


def test_weights_that_are_moved_for_a_backward_and_back_are_read_as_the_optimizer_finds_them():
    """As sharpness-aware minimization does, from the first step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    start, ratios, drifts = model[0].weight.detach().clone(), [], []
    with watch(model, opt, GradientHealth()) as w:
        for _ in range(4):
            x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
            nn.functional.cross_entropy(model(x), y).backward()
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            before = model[0].weight.detach().clone()
            opt.step()
            opt.zero_grad()
            after = model[0].weight.detach()
            ratios.append(float((after - before).norm() / before.norm()))
            drifts.append(float((after - start).norm() / start.norm()))
    health = w.gradient_health
    assert list(health.series("0.weight", "update_ratio")) == pytest.approx(ratios, rel=1e-3)
    assert list(health.series("0.weight", "drift")) == pytest.approx(drifts, rel=1e-3)
    assert list(health.step_series("lr")) == pytest.approx([0.1] * 4)
