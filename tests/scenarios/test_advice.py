"""Advice that helps whoever follows it, and no alarm about a training that does well."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from hookcb import Diagnose, Learner
from hookcb.diagnosis.faults.gradients.attenuated import Attenuated
from hookcb.diagnosis.faults.gradients.exploding import Exploding
from hookcb.diagnosis.faults.loss.diverging import DivergingLoss
from hookcb.diagnosis.faults.loss.init import FirstLoss
from hookcb.diagnosis.faults.model.activations import ActivationScale, SaturatedUnits
from hookcb.diagnosis.faults.steps.clipping import ConstantClipping
from hookcb.diagnosis.faults.steps.large_updates import LargeUpdates
from hookcb.diagnosis.faults.steps.small_updates import SmallUpdates
from hookcb.diagnosis.faults.steps.weight_decay import DominatingDecay
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series
from hookcb.diagnosis.verdict import Finding
from tests.diagnosis.support import measured
from tests.support import along, first, in_turn

N = 60  # batches
STAYS = [1.0] * N


def series(values):
    return Series.of(range(len(values)), values)


def weight(name="body", shape=(16, 16), kind="Linear", place=0, layer_place=None, **stats):
    given = {"weight_norm": [4.0] * N, "update_ratio": [1e-3] * N, "rms": [1.0] * N} | stats
    of = {stat: series(x) for stat, x in given.items()}
    return Param(f"{name}.weight", name, kind, kind, place, shape, layer_place, stats=of)


def layer(name, place, kind="Linear", **stats):
    return Layer(name, kind, kind, place, {stat: series(x) for stat, x in stats.items()})


def evidence(*params, layers=(), loss=STAYS, **kwargs):
    of_loss = {key: kwargs.pop(key) for key in ("kind", "guess", "constant") if key in kwargs}
    run = Run(
        params={p.name: p for p in params},
        layers={x.name: x for x in layers},
        lr=series([0.1] * N),
        loss=series(loss),
        **kwargs,
    )
    return measured(run, Loss, **of_loss)


def only(check, given):
    (found,) = check().findings(given) if isinstance(check, type) else check(given)
    return found


def advice(found):
    assert isinstance(found, Finding), found
    return " ".join(found.next_steps)


# ---- trainings whose learning rate is too high, repaired as the verdict says


def clusters():
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(4, (32 * N,), generator=rng)
    x = torch.randn(4, 16, generator=rng)[y] + 0.7 * torch.randn(32 * N, 16, generator=rng)
    return list(zip(x.split(32), y.split(32), strict=True))


def train(make_opt, lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    learn = Learner(clusters(), model, F.cross_entropy, make_opt(model.parameters(), lr))
    losses = []
    diagnosis = Diagnose(show=False)
    with learn.no_logging():
        learn.fit(1, cbs=diagnosis)
    losses = diagnosis.evidence().loss.values
    return diagnosis.verdict, sum(losses[-10:]) / 10


OPTIMIZERS = {
    "SGD": (lambda params, lr: SGD(params, lr=lr), 0.2),
    "momentum": (lambda params, lr: SGD(params, lr=lr, momentum=0.9), 0.05),
    "Adam": (lambda params, lr: Adam(params, lr=lr), 3e-3),
}


@pytest.mark.filterwarnings("ignore:(ERROR|WARNING)  ")
@pytest.mark.parametrize(("times", "name"), along([100, 1000, 10], OPTIMIZERS))
def test_a_learning_rate_divided_as_advised_trains(times, name):
    make_opt, lr = OPTIMIZERS[name]
    verdict, after = train(make_opt, times * lr)
    said = " ".join(verdict.primary.next_steps) if verdict.primary else ""
    divisors = [int(n.replace(",", "")) for n in re.findall(r"Divide the learning rate by ([\d,]+)", said)]
    if not divisors:  # the rate does no harm yet
        assert times < 1000
        assert after < 0.7
        return
    assert times / 20 <= divisors[0] <= 20 * times
    assert train(make_opt, times * lr / divisors[0])[1] < 0.7


class Bert(nn.Module):
    """Embedded tokens, a transformer layer and a head, with weights of a standard deviation of 0.02."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 4)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))


@pytest.mark.filterwarnings("ignore:(ERROR|WARNING)  ")
@pytest.mark.parametrize("lr", first([1.0, 20.0]))
def test_a_rate_that_destroys_a_transformer_is_not_laid_to_its_initialization(lr):
    torch.manual_seed(0)
    tokens = torch.randint(20, (12, 16, 8))
    batches = [(x, x[:, 0] % 4) for x in tokens]
    model = Bert()
    learn = Learner(batches, model, F.cross_entropy, Adam(model.parameters(), lr=lr))
    with learn.no_logging():
        learn.fit(3, cbs=Diagnose(show=False))
    verdict = learn.diagnose()
    assert verdict.primary.code == "update.too_large"
    assert "Divide the learning rate" in advice(verdict.primary)


@pytest.mark.filterwarnings("ignore:(ERROR|WARNING)  ")
def test_without_any_gradient_nobody_is_told_to_multiply_the_learning_rate():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Softmax(dim=1))
    x = torch.randn(30, 16, 8)
    batches = [(xb, (xb[:, :1] > 0).float()) for xb in x]
    learn = Learner(batches, model, F.binary_cross_entropy, Adam(model.parameters()))
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False))
    (found,) = (f for f in learn.diagnose().findings if f.code == "update.too_small")
    assert "learning rate" not in advice(found)
    assert "softmax over one unit" in advice(found)


# ---- the numbers in the advice


def runaway(first):
    """A weight that a first step changes by `first` and later ones by more, beside a loss that explodes."""
    ratios = [first, 5.0, 80.0] + [3.0] * (N - 3)
    norms = [4.0 * math.hypot(1, x) for x in ratios]  # after steps that find it at 4
    return evidence(weight(update_ratio=ratios, weight_norm=norms), loss=[2.3] + [900.0] * (N - 1))


@pytest.mark.parametrize(("first", "told"), [(0.1, "by 10"), (0.35, "by 20"), (14.0, "by 1,000")])
def test_the_first_step_says_by_what_to_divide_the_learning_rate(first, told):
    found = only(LargeUpdates().findings, runaway(first))
    assert found.value == 80.0
    assert found.next_steps[0] == f"Divide the learning rate {told}"


def test_steps_before_the_loss_rises_count_too():
    given = runaway(0.1)
    given.loss = series([2.3, 2.3] + [900.0] * (N - 2))
    assert "by 500" in advice(only(LargeUpdates().findings, given))


def test_a_first_step_of_usual_size_says_no_number():
    assert "Divide" not in advice(only(LargeUpdates().findings, runaway(0.005)))


@pytest.mark.parametrize(("usual", "largest", "told"), [(2e-6, 2e-6, "by 500"), (5e-6, 1e-4, "by 100")])
def test_small_updates_are_multiplied_until_one_of_them_is_large(usual, largest, told):
    params = [weight(name, update_ratio=[usual] * N) for name in "abc"]
    given = evidence(*params, weight("d", update_ratio=[largest] * N))
    assert told in advice(only(SmallUpdates().findings, given))


def test_a_rate_that_moves_one_layer_enough_is_not_too_low_for_the_others():
    params = [weight(name, update_ratio=[1e-7] * N) for name in "abc"]
    found = only(SmallUpdates().findings, evidence(*params, weight("d", update_ratio=[0.01] * N)))
    assert "Multiply" not in advice(found)


def test_a_usual_weight_decay_is_never_raised():
    param = weight(clipped_norm=[1e-9] * N)
    param.weight_decay = 5e-4
    found = only(DominatingDecay().findings, evidence(param))
    assert "0.01" not in advice(found)
    assert "weight_decay to 0 " in advice(found)


def test_clipping_that_tames_huge_gradients_is_not_to_be_left_out():
    steps = {"clip_coef": series([1e-6] * N), "total_norm": series([1e6] * N)}
    assert "leave it out" not in advice(only(ConstantClipping().findings, evidence(weight(), steps=steps)))


def fading(norm):
    return [
        weight(f"l{i}", rms=[1e-8 if i == 0 else 1.0] * N, place=i, layer_place=i, weight_norm=[norm] * N)
        for i in range(3)
    ]


def test_an_initialization_is_only_advised_where_another_was_seen():
    assert "kaiming" in advice(only(Attenuated().findings, evidence(*fading(0.04))))
    assert "nitialize" not in advice(only(Attenuated().findings, evidence(*fading(4.0))))
    grown = layer("body", 0, std=[5000.0] * N)
    for norm, is_large in ((4.0, False), (80.0, True)):
        given = evidence(weight(weight_norm=[norm] * N), layers=[grown])
        given.measured(Inputs).std = series([1.0] * N)
        assert ("kaiming" in advice(only(ActivationScale, given))) == is_large


# ---- trainings that do well


def test_a_token_that_begins_near_zero_and_grows_is_no_large_step():
    norms = [1e-3 * (i + 1) ** 0.5 for i in range(N)]
    token = weight("token", (1, 1, 48), "Vit", update_ratio=[5.0] * 20 + [0.3] * 40, weight_norm=norms)
    assert isinstance(only(LargeUpdates().findings, evidence(token, weight())), Passed)


def test_a_small_last_layer_that_grows_is_no_large_step():
    norms = [0.014 + 0.02 * i**0.5 for i in range(N)]
    head = weight("head", (2, 64), update_ratio=[0.6, 0.4, 0.3] + [0.25] * (N - 3), weight_norm=norms)
    rises = [20.0 + 0.5 * i for i in range(N)]
    assert isinstance(only(LargeUpdates().findings, evidence(head, weight(), loss=rises)), Passed)


@pytest.mark.parametrize("place", [1, None])
def test_keys_that_are_learned_may_have_small_gradients_beside_the_way_of_the_input(place):
    memory = weight("attn", (2, 2, 4, 8), "Attention", place=1, layer_place=place, rms=[1e-6] * N)
    chain = [weight("stem", layer_place=0), weight("head", place=2, layer_place=2)]
    assert isinstance(only(Attenuated().findings, evidence(memory, *chain)), Passed)


def test_the_head_of_a_value_beside_a_policy_may_have_by_far_the_largest_gradient():
    sizes = {
        "critic.0": 0.2,
        "critic.1": 0.01,
        "critic.2": 2.3,
        "actor.0": 9e-4,
        "actor.1": 1e-4,
        "actor.2": 2e-3,
    }
    params = [weight(name, place=i, rms=[x] * N) for i, (name, x) in enumerate(sizes.items())]
    assert isinstance(only(Exploding().findings, evidence(*params)), Passed)
    params[1] = weight("critic.1", place=1, rms=[2.0] * N)
    assert only(Exploding().findings, evidence(*params)).layer == "critic.2"


def grows(kind, end_of_outputs):
    """A loss that rises from 1 to 6, beside outputs whose standard deviation grows from 0.5."""
    loss = [1.0] * 10 + [6.0] * 90
    outputs = [0.5] * 10 + [end_of_outputs] * 90
    head = Layer("head", "Linear", "", 0, {"std": series(outputs), "mean": series([0.0] * 100)})
    return measured(Run(loss=series(loss), layers={"head": head}), Loss, kind=kind)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_a_loss_may_rise_with_the_targets_that_a_model_makes_itself(kind):
    assert isinstance(only(DivergingLoss, grows(kind, 40.0)), Passed)


@pytest.mark.parametrize("kind", ["mse", "huber", "cross-entropy"])
def test_errors_as_large_as_the_outputs_diverge(kind):
    assert only(DivergingLoss, grows(kind, 2.6)).severity == "error"


def test_a_model_that_was_good_and_gets_worse_diverges_however_large_its_outputs():
    given = grows("mse", 40.0)
    given.layers["head"].stats["std"] = series([40.0] * 100)
    assert only(DivergingLoss, given).severity == "error"


@pytest.mark.parametrize(
    ("ratios", "severity"),
    [([1e-3] * N, "info"), ([0.01] * 20 + [0.1] * 40, "error"), ([0.5] + [0.0] * (N - 1), "error")],
)
def test_a_loss_of_unknown_kind_diverges_only_beside_large_steps(ratios, severity):
    given = evidence(weight(update_ratio=ratios), loss=[1.0] * 10 + [9.0] * (N - 10))
    assert only(DivergingLoss, given).severity == severity


@pytest.mark.parametrize(("end", "is_fine"), [(0.1, True), (0.3, False)])
def test_saturated_units_that_a_model_does_well_with_are_no_finding(end, is_fine):
    loss = [0.45] * 40 + [end] * 20
    tanh = layer("act", 0, "Tanh", saturated=[0.8] * N)
    head = weight("head", layer_place=1)
    given = evidence(head, layers=[tanh], loss=loss, constant=1.0)
    assert isinstance(only(SaturatedUnits, given), Passed) == is_fine


@pytest.mark.parametrize(("end", "severity"), [(0.1, "info"), (0.3, "warning")])
def test_a_beginning_far_from_guessing_that_ends_well_is_a_note(end, severity):
    loss = [60.0] * 30 + [end] * 30
    given = evidence(weight(), loss=loss, kind="mse", guess=8.0, constant=1.0)
    assert only(FirstLoss, given).severity == severity


@in_turn(
    ("loss_func", "y", "constant"),
    [
        (F.mse_loss, torch.tensor([[50.0], [52.0], [54.0], [56.0]]), 5.0),
        (F.cross_entropy, torch.tensor([0, 0, 0, 1]), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        (F.binary_cross_entropy_with_logits, torch.tensor([[1.0], [1.0], [0.0], [0.0]]), math.log(2)),
        (F.l1_loss, torch.tensor([[1.0], [2.0], [3.0], [6.0]]), 1.5),
        (F.soft_margin_loss, torch.ones(4, 1), math.nan),
    ],
)
def test_the_loss_of_the_best_constant_is_that_of_the_first_batch(loss_func, y, constant):
    model = nn.Linear(3, 2 if loss_func is F.cross_entropy else 1)
    batches = [(torch.randn(4, 3), y)] * 3
    learn = Learner(batches, model, loss_func, SGD(model.parameters(), lr=1e-9))
    diagnosis = Diagnose(show=False)
    with learn.no_logging():
        learn.fit(1, cbs=diagnosis)
    assert diagnosis.evidence().measured(Loss).constant == pytest.approx(constant, nan_ok=True)


def test_a_parameter_of_a_container_stands_where_its_first_layer_does():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = nn.Parameter(torch.randn(2, 8))
            self.out = nn.Linear(8, 8)

        def forward(self, x):
            return self.out(x + (x @ self.memory.T) @ self.memory)

    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Attention(), nn.Linear(8, 1)))
    learn = Learner([(torch.randn(4, 4), torch.randn(4, 1))] * 3, model, F.mse_loss)
    diagnosis = Diagnose(show=False)
    with learn.no_logging():
        learn.fit(1, cbs=diagnosis)
    params = copy.copy(diagnosis.evidence().params)
    assert params["1.0.memory"].place_of_layer == params["1.0.out.weight"].place_of_layer == 1


def test_no_alarm_is_left_of_a_training_that_only_begins_badly(monkeypatch):
    monkeypatch.setattr("hookcb.diagnosis.judge.MIN_CHECKED", 0)
    given = evidence(
        weight(), loss=[60.0] * 30 + [0.1] * 30, kind="mse", guess=8.0, constant=1.0, n_batches=N
    )
    given.sources |= {"loss"}
    assert judge(given).status == "healthy"
