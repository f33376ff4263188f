"""A look before training leaves no trace, whatever happens in it, and refuses what it cannot look at."""

import copy
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookcb
from hookcb import Verdict, assert_healthy, assert_no_hooks
from tests.hooks import support as zoo
from tests.support import SaysSo, changes_in, in_turn, make_batches, make_model, unsettle
from tests.training.support import TakesDict, TwoInputs, Wide

pytestmark = pytest.mark.filterwarnings("ignore:ERROR  :UserWarning")
BATCH = make_batches(1, bs=8)[0]


class Noisy(nn.Module):
    """Draws random numbers of all kinds, counts its calls in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.body = Wide()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count += 1
        return self.body(x + torch.randn(()) * random.random() * np.random.rand())


def adam(model):
    """An optimizer with state, hooks of its own and a schedule that knows it."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    return opt


def state_of(opt):
    groups = [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    state = [{k: v.clone() if torch.is_tensor(v) else v for k, v in of.items()} for of in opt.state.values()]
    hooks = (len(opt._optimizer_step_pre_hooks), len(opt._optimizer_step_post_hooks))
    return {"groups": groups, "state": state, "hooks": hooks, "attributes": sorted(vars(opt))}


def changed_by(look, model, opt=None, batch=BATCH):
    """What is not as before after `look`, of model, optimizer, batch and the generators of random numbers."""
    numpy_before, before = np.random.get_state()[1].tolist(), copy.deepcopy(state_of(opt)) if opt else None
    batch_before = copy.deepcopy(batch)
    with changes_in(model) as changed:
        look()
    if opt is not None and not zoo.alike(before, state_of(opt)):
        changed.append("optimizer")
    if np.random.get_state()[1].tolist() != numpy_before:
        changed.append("random state of numpy")
    if not zoo.alike(batch, batch_before) or any(t.grad is not None for t in zoo.flat(batch).values()):
        changed.append("batch")
    return [what for what in changed if what != "versions of weights"]


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_look_leaves_no_trace(steps):
    model = Noisy()
    opt = adam(model)
    unsettle(model)
    model.body.stem.bias.requires_grad_(False)
    model.body.head.bias.grad = None
    verdicts = []

    def look():
        verdicts.append(hookcb.diagnose(model, BATCH, F.mse_loss, opt, steps=steps))

    assert changed_by(look, model, opt) == []
    assert isinstance(verdicts[0], Verdict)
    assert_no_hooks(model)


def test_a_look_without_steps_may_come_between_the_users_forward_and_backward():
    """Weights that are written to, if only with what they were, would make that backward fail."""
    model, alone = make_model(), make_model()
    F.mse_loss(alone(BATCH[0]), BATCH[1]).backward()
    loss = F.mse_loss(model(BATCH[0]), BATCH[1])
    hookcb.diagnose(model, BATCH, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], [p.grad for p in alone.parameters()]))


def test_an_optimizer_without_state_has_none_afterwards():
    model = make_model()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    hookcb.diagnose(model, BATCH, F.mse_loss, opt, steps=3)
    assert not opt.state
    assert opt.param_groups[0]["lr"] == 0.01


def test_training_after_a_look_is_to_the_bit_that_without():
    def trained(looked):
        torch.manual_seed(0)
        model = Noisy()
        random.seed(0)
        np.random.seed(0)
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        if looked:
            hookcb.diagnose(model, BATCH, F.mse_loss, opt, steps=4)
        for x, y in make_batches(4):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        return dict(model.state_dict()), opt.state_dict()

    assert zoo.alike(trained(False), trained(True))


class FailsAt(nn.Module):
    """Raises in call number `at`, in the forward or the backward."""

    def __init__(self, error, at=1, backward=False):
        super().__init__()
        self.body, self.error, self.at, self.backward = Noisy(), error, at, backward

    def forward(self, x):
        out = self.body(x)
        if self.body.count >= self.at:
            if not self.backward:
                raise self.error
            out.register_hook(self.fail)
        return out

    def fail(self, grad):
        raise self.error


@in_turn("error", [SaysSo(1, 2), KeyboardInterrupt(), SystemExit(3)])
@in_turn("at", [1, 2])
@in_turn("where", ["forward", "backward", "loss"])
def test_an_error_arrives_as_it_is_and_leaves_no_trace(error, at, where):
    model = FailsAt(error, at if where != "loss" else 99, backward=where == "backward")
    opt = adam(model)
    unsettle(model)
    calls = []

    def loss_func(pred, y):
        calls.append(1)
        if where == "loss" and len(calls) == at:
            raise error
        return F.mse_loss(pred, y)

    def look():
        with pytest.raises(type(error)) as raised:
            hookcb.diagnose(model, BATCH, loss_func, opt, steps=3)
        assert raised.value is error

    assert changed_by(look, model, opt) == []
    assert_no_hooks(model)


def test_an_error_that_a_finding_explains_leaves_no_trace():
    model = nn.Sequential(nn.Linear(2, 3))
    batch = torch.randn(4, 2), torch.tensor([0, 1, 2, 7])
    verdicts = []

    def look():
        verdicts.append(hookcb.diagnose(model, batch, F.cross_entropy))

    assert changed_by(look, model, batch=batch) == []
    assert verdicts[0].primary.code == "label.out_of_range"


def test_the_optimizers_own_error_leaves_no_trace():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise SaysSo(1, 2)

    model = Wide()
    opt = Fails(model.parameters(), lr=0.1, momentum=0.9)

    def look():
        with pytest.raises(SaysSo):
            hookcb.diagnose(model, BATCH, F.mse_loss, opt, steps=2)

    assert changed_by(look, model, opt) == []


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_a_model_that_gives_no_finite_number_leaves_no_trace(what):
    model = make_model()
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
    verdicts = []

    def loss_func(pred, y):
        return F.mse_loss(pred, y) * float(what)

    def look():
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        verdicts.append(hookcb.diagnose(model, BATCH, loss_func, opt, steps=3))

    assert changed_by(look, model) == []
    assert verdicts[0].status == "sick"


NOT_LOOKED_AT = {"frozen_all_but_the_input"}  # nothing of it is trained


@in_turn("name", sorted(set(zoo.MODELS) - NOT_LOOKED_AT)[::4])
def test_odd_models_are_looked_at_without_a_trace(name):
    model = zoo.make(name)
    batch = zoo.make_input(1), zoo.make_input(2)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)

    def look():
        hookcb.diagnose(model, batch, lambda pred, y: pred.float().square().mean(), opt, steps=1)

    assert changed_by(look, model, opt, batch) == []


def test_a_lazy_model_is_refused_and_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
    with pytest.raises(ValueError, match="lazy"):
        hookcb.diagnose(model, BATCH, F.mse_loss)
    assert model[0].has_uninitialized_params()


def test_shared_and_frozen_weights_stay_shared_and_frozen():
    model = Wide()
    model.stem.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    hookcb.diagnose(model, BATCH, F.mse_loss, opt, steps=2)
    assert model.again.weight is model.mid.weight
    assert not model.stem.weight.requires_grad
    assert {id(p) for p in opt.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_it_works_where_gradients_are_off_and_leaves_them_off():
    with torch.no_grad():
        verdict = hookcb.diagnose(make_model(), BATCH, F.mse_loss)
        assert not torch.is_grad_enabled()
    assert "loss.detached" not in [f.code for f in verdict.findings]


def test_batches_of_all_usual_kinds_are_taken():
    x, y = BATCH
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in ((x, y), [(x, y), (x, y)]):
        assert hookcb.diagnose(model, batch, F.mse_loss, opt, steps=2).coverage
    assert hookcb.diagnose(TwoInputs(), (x, x, y), F.mse_loss).coverage
    assert hookcb.diagnose(TakesDict(), {"x": x, "labels": y}).coverage
    assert hookcb.diagnose(model, (x,), lambda pred: pred.square().mean(), n_inp=1).coverage


def test_a_batch_is_taken_as_torchs_own_loader_gives_it():
    """Which is a list `[x, y]`, where samples are pairs."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH), 4)
    model = make_model()
    verdict = hookcb.diagnose(model, next(iter(loader)), F.mse_loss)
    assert verdict.findings == hookcb.diagnose(model, tuple(next(iter(loader))), F.mse_loss).findings
    assert hookcb.diagnose(model, list(loader), F.mse_loss).coverage


class Batches:
    """A loader of one's own, which draws random numbers in each pass."""

    def __iter__(self):
        order = torch.randperm(len(BATCH[0]))
        return iter([tuple(part[order] for part in BATCH)])


@pytest.mark.parametrize("kind", ["DataLoader", "generator", "own"])
def test_of_a_loader_the_first_batch_is_taken_and_the_loader_stays_as_it_is(kind):
    dataset, generator = torch.utils.data.TensorDataset(*BATCH), torch.Generator()
    drawn = {"generator": generator} if kind == "generator" else {}
    loader = torch.utils.data.DataLoader(dataset, 4, shuffle=True, **drawn) if kind != "own" else Batches()
    model, seen = make_model(), []

    def loss_func(pred, y):
        seen.append(y)
        return F.mse_loss(pred, y)

    before = torch.get_rng_state(), generator.get_state()
    assert changed_by(lambda: hookcb.diagnose(model, loader, loss_func), model, batch=None) == []
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    assert torch.equal(seen[0], next(iter(loader))[1])


def test_several_batches_are_taken_in_turn():
    seen = []

    def loss_func(pred, y):
        seen.append(y[0, 0].item())
        return F.mse_loss(pred, y)

    batches = make_batches(3)
    model = make_model()
    hookcb.diagnose(model, batches, loss_func, torch.optim.SGD(model.parameters(), lr=0.001), steps=5)
    assert seen[:5] == [batches[k][1][0, 0].item() for k in (0, 1, 2, 0, 1)]


def test_a_look_prints_nothing_and_warns_of_nothing(capsys, recwarn):
    model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    hookcb.diagnose(model, (torch.randn(8, 2), torch.arange(8) % 3), F.cross_entropy, opt, steps=25)
    assert capsys.readouterr() == ("", "")
    assert list(recwarn) == []


def test_the_same_look_gives_the_same_verdict():
    model = Wide()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    looks = [hookcb.diagnose(model, BATCH, F.mse_loss, opt, steps=10) for _ in range(2)]
    assert looks[0].findings == looks[1].findings
    assert looks[0].status == looks[1].status


# ---- wrong arguments


def wrong():
    """Name, arguments in place of the right ones, and what the message must speak of."""
    opt = torch.optim.SGD(make_model().parameters(), lr=0.1)
    return [
        ("no model", {"model": None}, "model"),
        ("a class as model", {"model": nn.Linear}, "model"),
        ("a function as model", {"model": F.relu}, "model"),
        ("a list of layers as model", {"model": [nn.Linear(2, 1)]}, "model"),
        ("a model without parameters", {"model": nn.ReLU()}, "nothing to train"),
        ("a name as loss", {"loss_func": "mse"}, "loss_func"),
        ("a number as loss", {"loss_func": 3}, "loss_func"),
        ("no loss", {"loss_func": None}, "loss"),
        ("a class as optimizer", {"opt": torch.optim.SGD, "steps": 1}, "opt"),
        ("a number as optimizer", {"opt": 3}, "opt"),
        ("an optimizer of another model", {"opt": opt}, "optimizer"),
        ("steps below 0", {"steps": -1}, "steps"),
        ("half a step", {"steps": 1.5, "opt": "own"}, "steps"),
        ("a truth value as steps", {"steps": True, "opt": "own"}, "steps"),
        ("no steps", {"steps": None}, "steps"),
        ("steps without optimizer", {"steps": 1}, "opt"),
        ("no batches", {"batch": []}, "batch"),
        ("an empty batch", {"batch": ()}, "batch"),
        (
            "a dataset as batch",
            {"batch": torch.utils.data.TensorDataset(*BATCH)},
            "batch",
        ),
        ("an iterator as batch", {"batch": iter([BATCH])}, "batch"),
        ("more inputs than items", {"n_inp": 3}, "n_inp"),
        ("0 inputs", {"n_inp": 0}, "n_inp"),
        ("a word as n_inp", {"n_inp": "1"}, "n_inp"),
    ]


@in_turn(("what", "given", "says"), wrong(), ids=lambda x: x if isinstance(x, str) else "")
@in_turn("look", [hookcb.diagnose, assert_healthy])
def test_wrong_arguments_are_refused_by_name_before_anything_is_touched(look, what, given, says):
    model = make_model()
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    arguments = {"model": model, "batch": BATCH, "loss_func": F.mse_loss, **given}
    if arguments.get("opt") == "own":
        arguments["opt"] = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused():
        with pytest.raises((TypeError, ValueError, LookupError), match=rf"\b{re.escape(says)}") as raised:
            look(**arguments)
        assert "None, and a batch" not in str(raised.value)  # what nobody has given is not told

    assert changed_by(refused, model) == []
    if what != "no loss":  # which shows only in what the model gives
        assert not calls


def test_assert_healthy_is_silent_for_a_healthy_model_and_raises_the_verdict_for_a_sick_one():
    torch.manual_seed(0)
    batch = torch.randn(32, 8), torch.randint(3, (32,))
    assert assert_healthy(nn.Linear(8, 3), batch, F.cross_entropy) is None
    model = nn.Sequential(nn.Linear(8, 3), nn.Softmax(dim=1))
    with pytest.raises(AssertionError) as raised:
        assert_healthy(model, batch, F.cross_entropy)
    verdict = hookcb.diagnose(model, batch, F.cross_entropy)
    assert str(verdict) in str(raised.value)
    assert_no_hooks(model)


def test_assert_healthy_gives_the_models_own_error_as_it_is():
    error = SaysSo(1, 2)
    with pytest.raises(SaysSo) as raised:
        assert_healthy(FailsAt(error), BATCH, F.mse_loss)
    assert raised.value is error
