"""A model whose parts are called by a method of its own, and never it itself, is seen as others are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, Recorder, count_hooks, watch
from tests.support import make_batches


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(2, 8), nn.Tanh()])
        self.actor, self.critic = nn.Linear(8, 1), nn.Linear(8, 1)

    def act(self, x):
        for part in self.trunk:
            x = part(x)
        return self.actor(x), self.critic(x)


class Called(TwoHeads):
    forward = TwoHeads.act


def make(kind):
    torch.manual_seed(0)
    return kind()


def train(model, act, *cbs, n=5, look_before=False):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with watch(model, opt, *cbs) as w:
        for x, y in make_batches(n):
            if look_before:  # a rollout
                with torch.no_grad():
                    act(x)
            action, value = act(x)
            loss = F.mse_loss(action, y) + F.mse_loss(value, y)
            losses.append(loss.item())
            opt.zero_grad()
            loss.backward()
            opt.step()
    return w, losses


@pytest.mark.parametrize("look_before", [False, True])
def test_records_are_those_of_the_same_model_that_is_called(look_before):
    model, other = make(TwoHeads), make(Called)
    w, losses = train(
        model, model.act, ActivationStats(), GradientHealth(), Recorder(), look_before=look_before
    )
    expected, _ = train(other, other, ActivationStats(), GradientHealth(), Recorder())
    assert w.recorder.losses == losses == expected.recorder.losses
    for ours, theirs in (
        (w.activation_stats, expected.activation_stats),
        (w.gradient_health, expected.gradient_health),
    ):
        assert repr(ours.table()) == repr(theirs.table())
    assert (w.coverage.seen["before_batch"], w.coverage.seen["after_batch"]) == (5, 5)
    assert "before_batch" not in w.coverage.missing
    assert any("parts of the model" in note for note in w.coverage.notes)
    assert count_hooks(model) == 0


@pytest.mark.slow
def test_a_verdict_rests_on_its_layers_and_its_loss():
    model = make(TwoHeads)
    w, _ = train(model, model.act, Diagnose(show=False), n=30)
    assert w.diagnose().status in ("healthy", "suspect")
    assert "4 layers" in w.diagnose().coverage[1]
    assert w.diagnose().n_checked > 25


def test_hooks_on_parts_go_when_the_model_is_called_itself():
    model = make(Called)
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), Callback()) as w:
        n = count_hooks(model)
        model(torch.zeros(4, 2))
        assert count_hooks(model) < n
        model.actor(torch.zeros(4, 8)).sum().backward()
    assert w.facts.n_part_calls == 0
    assert w.coverage.seen["before_batch"] == 1


@pytest.mark.filterwarnings("ignore:none of 4 hooked layers was seen")
def test_a_training_of_which_no_forward_is_seen_is_followed_by_its_backwards():
    torch.manual_seed(0)
    model = make(Called)
    seen, opt = watch(model, cbs=[Diagnose(show=False)]), torch.optim.SGD(model.parameters(), lr=0.05)
    with seen as w:
        for x, _ in make_batches(30):  # by functions alone, which no hook sees
            hidden = torch.tanh(F.linear(x, model.trunk[0].weight, model.trunk[0].bias))
            out = F.linear(hidden, model.actor.weight) + F.linear(hidden, model.critic.weight)
            opt.zero_grad()
            out.pow(2).mean().backward()
            opt.step()
    verdict = w.diagnose()
    assert w.facts.n_losses_found == w.coverage.seen["after_step"] == 30
    assert "as far as checked" in verdict.headline
    assert "no call of a layer was seen" in str(verdict)
    assert "outputs of no layer" in str(verdict)
