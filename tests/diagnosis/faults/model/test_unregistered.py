"""Parameters that the forward uses and that the model does not have, in programs as people write them."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.model.unregistered import Unregistered
from hookcb.diagnosis.measurements.outside import MIN_STEPS, OutsideParameters
from hookcb.diagnosis.run import Passed
from tests.diagnosis.faults.support import followed, told
from tests.support import each, first

D, N = 12, 16


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(i):
    x = numbers(N, D, seed=i)
    return x, (x.sum(1) > 0).long()


class Net(nn.Module):
    """A trunk, what `middle` does with its output, and a head."""

    def __init__(self, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def middle(self, x):
        return x

    def forward(self, x):
        return self.head(self.middle(F.relu(self.trunk(x))))


class Listed(Net):
    def middle(self, x):
        for layer in self.layers.values() if isinstance(self.layers, dict) else self.layers:
            x = F.relu(layer(x))
        return x


class Local(Net):
    def middle(self, x):
        return nn.Linear(D, D)(x)


class Anew(Net):
    def middle(self, x):
        self.extra = nn.Linear(D, D)
        return self.extra(x)


class Late(Net):
    def middle(self, x):
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(D, D)
        return self.extra(x)


class Weighted(Net):
    def middle(self, x):
        return x @ self.weight


class Remasked(Net):
    def middle(self, x):
        self.trunk.weight = nn.Parameter(self.trunk.weight * (numbers(D, D) > 0))
        return x


def train(model, n=2 * MIN_STEPS, opt=None, step=lambda i: None):
    opt = torch.optim.Adam(model.parameters(), lr=1e-2) if opt is None else opt
    with watch(model, opt, cbs=Diagnose(on_sick="ignore")) as loop:
        for i in range(n):
            x, y = batch(i)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step(i)
    return loop.diagnose()


def unregistered(verdict):
    return [x for x in verdict.findings if x.code == "param.unregistered"]


@pytest.mark.parametrize(
    ("layers", "first"),
    first(
        [
            ([nn.Linear(D, D), nn.Linear(D, D)], "layers[0].weight"),
            ((nn.Linear(D, D),), "layers[0].weight"),
            ({"in": nn.Linear(D, D)}, "layers['in'].weight"),
            ([nn.Sequential(nn.Linear(D, D), nn.ReLU())], "layers[0].0.weight"),
        ]
    ),
)
def test_layers_in_a_plain_container_are_named(layers, first):
    verdict = train(Listed(layers=layers))
    (found,) = unregistered(verdict)
    assert verdict.primary is found
    assert (found.severity, found.param) == ("error", first)
    assert first in found.message
    assert "nn.ModuleList" in found.next_steps[0]
    assert "parameters that the model does not have" not in verdict.ruled_out


@pytest.mark.slow
def test_layers_that_no_attribute_has_are_told_by_their_shapes():
    hidden = nn.Linear(D, D, bias=False)

    class Net_(Net):
        def middle(self, x):
            return hidden(x)

    (found,) = unregistered(train(Net_()))
    assert found.param == ""
    assert f"of shape {D}×{D}" in found.message
    assert found.message.startswith("1 parameter that the forward uses is not")


@pytest.mark.slow
@pytest.mark.parametrize("make", [Local, Anew, Remasked])
def test_what_a_forward_makes_anew_is_found(make):
    verdict = train(make())
    (found,) = unregistered(verdict)
    assert verdict.primary is found
    assert "anew in each call" in found.message
    assert "Create it in __init__" in found.next_steps[0]


@pytest.mark.slow
def test_a_layer_made_after_the_optimizer_is_in_no_optimizer():
    verdict = train(Late())
    assert not unregistered(verdict)
    assert verdict.primary.code == "param.not_in_optimizer"
    assert "extra.weight, extra.bias" in verdict.primary.message


@pytest.mark.slow
def test_a_learner_finds_a_late_layer_too():
    model = Late()
    learn = Learner([batch(i) for i in range(40)], model, F.cross_entropy, lr=0.1)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(on_sick="ignore"))
    assert learn.diagnose().primary.code == "param.not_in_optimizer"


@pytest.mark.slow
def test_a_late_layer_that_is_added_to_the_optimizer_is_healthy():
    model = Late()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    def add(i):
        if i == 0:
            opt.add_param_group({"params": model.extra.parameters()})

    verdict = train(model, opt=opt, step=add)
    assert verdict.status == "healthy"
    assert "parameters outside the optimizer" in verdict.ruled_out
    assert "layers that came into the model later were not recorded: extra" in verdict.coverage


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda p: p.float(), lambda p: p.float().t()])
def test_a_tensor_computed_from_a_parameter_before_is_named(make):
    weight = make(nn.Parameter(numbers(D, D).double() / 4))
    verdict = train(Weighted(weight=weight))
    (found,) = unregistered(verdict)
    assert verdict.primary is found
    assert found.param == "weight"
    assert "before it was assigned" in found.causes[0]


def test_the_error_of_a_second_backward_is_explained_by_it():
    model = Weighted(weight=nn.Parameter(numbers(D, D)).exp() / 9)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_on(i):
        x, y = batch(i)
        F.cross_entropy(model(x), y).backward()
        opt.step()

    with pytest.raises(RuntimeError, match="second time"), watch(model, opt, cbs=Diagnose()) as loop:  # noqa: PT012
        train_on(0)
        train_on(1)
    (found,) = unregistered(loop.diagnose())
    assert found.param == "weight"
    assert "freed" in found.message


# ---- nothing to find


def has_looked(verdict):
    return "parameters that the model does not have" in verdict.ruled_out


def trained(layer):
    model = Listed(layers=[layer])
    return model, torch.optim.Adam([*model.parameters(), *layer.parameters()], lr=1e-2), None


def trained_now_and_then(layer):
    other = torch.optim.SGD(layer.parameters(), lr=0.1)
    return Listed(layers=[layer]), None, lambda i: other.step() if i % 30 == 29 else None


def trained_by_hand(layer):
    @torch.no_grad()
    def step(i):
        for p in layer.parameters():
            p -= 0.1 * p.grad
            p.grad = None

    return Listed(layers=[layer]), None, step


def frozen(layer):
    return Listed(layers=[layer.requires_grad_(False)]), None, None


def without_grad(layer):
    class Teacher(Net):
        def middle(self, x):
            with torch.no_grad():
                target = layer(x)
            return x + target

    return Teacher(), None, None


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", each(2, [trained, trained_now_and_then, trained_by_hand, frozen, without_grad])
)
def test_what_is_trained_frozen_or_not_in_the_graph_is_no_fault(make):
    model, opt, step = make(nn.Linear(D, D))
    verdict = train(model, opt=opt, step=step or (lambda i: None))
    assert not unregistered(verdict)
    assert verdict.status == "healthy"
    assert has_looked(verdict)


@pytest.mark.slow
def test_parameters_of_a_model_that_made_the_inputs_are_not_meant():
    encoder, model = nn.Linear(D, D), Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    delta = nn.Parameter(torch.zeros(N, D))
    with watch(model, opt, cbs=Diagnose(on_sick="ignore")) as loop:
        for i in range(2 * MIN_STEPS):
            x, y = batch(i)
            given = encoder(x) + delta if i % 2 else nn.Parameter(x)
            loss = F.cross_entropy(model(given), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert not unregistered(loop.diagnose())
    assert has_looked(loop.diagnose())


@pytest.mark.slow
def test_functional_call_with_other_parameters_is_left_out_and_said():
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, cbs=Diagnose(on_sick="ignore")) as loop:
        for i in range(2 * MIN_STEPS):
            x, y = batch(i)
            others = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
            loss = F.cross_entropy(torch.func.functional_call(model, others, (x,)), y)
            loss.backward()
            for name, p in model.named_parameters():
                p.grad = others[name].grad
            opt.step()
    verdict = loop.diagnose()
    assert verdict.status == "healthy"
    assert not has_looked(verdict)
    assert any("param.unregistered" in line and "functional_call" in line for line in verdict.coverage)


@pytest.mark.slow
def test_a_checkpointed_region_that_hides_its_graph_is_said():
    class Checkpointed(Net):
        def middle(self, x):
            return checkpoint(nn.Identity(), x, use_reentrant=True)

    verdict = train(Checkpointed())
    assert not has_looked(verdict)
    assert any("param.unregistered" in line and "use_reentrant" in line for line in verdict.coverage)


def test_a_few_steps_do_not_tell_whether_it_is_trained():
    verdict = train(Listed(layers=[nn.Linear(D, D)]), n=MIN_STEPS - 1)
    assert not unregistered(verdict)
    assert not has_looked(verdict)


def follow(outside, run, model, i):
    run.loop.xb, run.n_steps = (batch(i)[0],), i
    run.loop.pred = model(batch(i)[0])
    outside.on_prediction(run)


def test_nothing_is_kept_alive():
    layer = nn.Linear(D, D)
    model = Listed(layers=[layer])
    outside, run = followed(OutsideParameters, model)
    follow(outside, run, model, 0)
    assert not outside.is_known(0)
    alive = [weakref.ref(p) for p in (*model.parameters(), *layer.parameters())]
    del model, layer, run.loop.model, run.loop.pred
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert [type(x) for x in told(run, Unregistered, n_steps=100)] == [Passed]
    outside.on_step(run)
    assert not outside.has_joined


def test_graphs_are_read_seldom_after_the_first(monkeypatch):
    model, n_read = Net(), 0
    outside, run = followed(OutsideParameters, model)

    def count(*args):
        nonlocal n_read
        n_read += 1
        return iter(())

    monkeypatch.setattr("hookcb.core.graph.walk", count)
    for i in range(40):
        follow(outside, run, model, i)
    assert n_read == 4 + 9
