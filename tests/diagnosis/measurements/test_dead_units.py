"""Units without a gradient, counted against what the model's own activations say."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, Learner
from hookcb.diagnosis.measurements.dead_units import MIN_EXAMPLES, MIN_LOOKS, DeadUnits
from hookcb.diagnosis.run import Run
from tests.support import along, first, fit, in_turn

D, H, N = 6, 10, 64


def batch(n=N, d=D, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g), torch.randn(n, 3, generator=g)


def net(bias=True, n_dead=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, H, bias=bias), nn.ReLU(), nn.Linear(H, 3, bias=bias))
    kill(model[0], n_dead)
    return model


def kill(layer, n):
    """Its first n units give nothing, whatever comes in."""
    with torch.no_grad():
        if layer.bias is None:
            layer.weight[:n] = 0.0
            layer.weight[:n, 0] = -1e-3
        else:
            layer.bias[:n] = -100.0


def following(model):
    units = DeadUnits()
    units.on_model(Run(loop=SimpleNamespace(model=model)))
    return units


def look(units, model, step, x, loss):
    model.zero_grad()
    loss(model(x)).backward()
    units.read_gradients(step, len(x))


def shares_of(units):
    units.tell(Run())
    return units.of


def looked(model, n=10, loss=None, n_examples=N, at=None):
    """Looks at so many batches; `at` may change the model at a step."""
    units = following(model)
    for step in range(n):
        if at is not None:
            at(step)
        x, y = batch(n_examples, seed=step)
        look(units, model, step, x, loss or (lambda out, y=y: F.mse_loss(out, y)))
    return shares_of(units)


@in_turn("n_dead", [0, 1, 4, H])
def test_the_share_of_dead_units_is_that_of_activations_that_are_always_zero(n_dead):
    model = net(n_dead=n_dead)
    x = torch.cat([batch(seed=step)[0] for step in range(10)])
    silent = (model[:2](x) == 0).all(0).float().mean()
    assert silent == n_dead / H
    found = looked(model)["0.weight"]
    assert (found.lately, found.never) == (pytest.approx(float(silent)), pytest.approx(float(silent)))


def test_layers_without_a_bias_are_told_by_rows_of_their_weight():
    model = net(bias=False)
    with torch.no_grad():
        model[0].weight[:3] = -model[0].weight[:3].abs()
    units = following(model)
    for step in range(10):
        look(units, model, step, batch(seed=step)[0].abs(), lambda out: out.square().mean())
    assert shares_of(units)["0.weight"].lately == pytest.approx(3 / H)
    assert shares_of(units)["2.weight"].lately == 0


def test_a_convolution_is_followed_by_channels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 3))
    kill(model[0], 2)
    units = following(model)
    for step in range(8):
        x = torch.randn(N, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        look(units, model, step, x, lambda out: out.square().mean())
    assert shares_of(units)["0.weight"].lately == 2 / 8


def test_a_single_layer_is_named_as_the_model_names_it():
    torch.manual_seed(0)
    assert set(looked(nn.Linear(D, 3))) == {"weight"}


def test_a_bias_that_the_loss_does_not_depend_on_leaves_units_alive():
    model = net()

    def differences(out):
        return (out[1:] - out[:-1]).square().mean() + (out[0] - out[-1]).square().mean()

    model.zero_grad()
    differences(model(batch()[0])).backward()
    model[2].bias.grad.zero_()  # mathematically; rounding may leave a rest
    units = following(model)
    for step in range(8):
        units.read_gradients(step, N)
    assert shares_of(units)["2.weight"].lately == 0
    assert looked(model, loss=differences)["2.weight"].lately == 0


def test_units_of_a_layer_before_a_batch_norm_are_alive_though_their_bias_has_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, H), nn.BatchNorm1d(H), nn.ReLU(), nn.Linear(H, 3))
    units = following(model)
    for step in range(8):
        model.zero_grad()
        x, y = batch(seed=step)
        F.mse_loss(model(x), y).backward()
        model[0].bias.grad.zero_()
        units.read_gradients(step, N)
    assert shares_of(units)["0.weight"].lately == 0


@pytest.mark.parametrize("died_at", [5, 10, 20])
def test_units_that_die_later_are_told_with_the_step_from_which_on(died_at):
    model = net()
    found = looked(model, n=30, at=lambda step: kill(model[0], 7) if step == died_at else None)["0.weight"]
    assert (found.lately, found.never, found.since) == (7 / H, 0, died_at)


def test_units_that_have_died_too_lately_do_not_count_yet():
    model = net()
    found = looked(model, n=30, at=lambda step: kill(model[0], 7) if step == 25 else None)["0.weight"]
    assert (found.lately, found.never) == (0, 0)


def test_units_that_come_back_are_alive():
    model = net(n_dead=5)

    def revive(step):
        if step == 15:
            nn.init.zeros_(model[0].bias)

    assert looked(model, n=20, at=revive)["0.weight"].lately == 0


def test_units_that_were_never_alive_are_told_from_those_that_died():
    model = net(n_dead=2)
    found = looked(model, n=30, at=lambda step: kill(model[0], 6) if step == 10 else None)["0.weight"]
    assert (found.lately, found.never) == (6 / H, 2 / H)


@in_turn(("n_examples", "n"), [(512, 8), (100, 8), (64, 8), (40, 13), (32, 16), (15, 35)])
def test_it_takes_eight_looks_and_512_examples(n_examples, n):
    assert (MIN_LOOKS, MIN_EXAMPLES) == (8, 512)
    found = looked(net(n_dead=3), n=40, n_examples=n_examples)["0.weight"]
    assert (found.n_looked, found.n_examples) == (n, n * n_examples)


@pytest.mark.parametrize(("size", "told"), first([(4, True), (1, False)]))
def test_of_small_batches_so_many_are_looked_at_that_it_is_known(size, told):
    """Units that are dead from the beginning, in 150 batches: of 4 these are enough examples, of one not."""
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(size, D, generator=g), torch.randn(size, 3, generator=g)) for _ in range(150)]
    learn = Learner(batches, net(n_dead=9), F.mse_loss, torch.optim.SGD, 1e-3, cbs=Diagnose(show=False))
    verdict = fit(learn).diagnose()
    found = [f for f in verdict.findings if f.code == "unit.dead"]
    assert bool(found) is told
    assert told or not any("dead units" in text for text in verdict.ruled_out)
    assert not told or "(9 of 10) had no gradient in 128 steps with 512 examples" in found[0].message


def test_with_few_looks_it_says_how_few():
    found = looked(net(), n=3)["0.weight"]
    assert (found.n_looked, found.n_examples) == (3, 3 * N)
    assert shares_of(following(net())) == {}


def test_looks_at_a_satisfied_hinge_loss_do_not_count():
    model = net()
    units = following(model)
    for step in range(40):
        margin = 1e6 if step % 4 == 0 else -1e6  # satisfied in three of four batches
        look(units, model, step, batch(seed=step)[0], lambda out, m=margin: F.relu(m - out).mean())
    found = shares_of(units)
    assert {x.n_looked for x in found.values()} == {MIN_LOOKS}
    assert {x.lately for x in found.values()} == {0}


def test_a_loss_that_is_always_satisfied_tells_nothing():
    assert looked(net(), n=20, loss=lambda out: F.relu(out - 1e6).mean()) == {}


# ---- parameters of one's own


class Own(nn.Module):
    """Two layers out of lists of parameters."""

    def __init__(self, is_matmul, sizes, n_dead):
        super().__init__()
        torch.manual_seed(0)
        pairs = list(itertools.pairwise(sizes))
        shapes = [(i, o) if is_matmul else (o, i) for i, o in pairs]
        self.ws = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self.bs = nn.ParameterList([torch.zeros(o) for _, o in pairs])
        self.is_matmul = is_matmul
        with torch.no_grad():
            self.bs[0][:n_dead] = -1e4

    def forward(self, x):
        for i, (w, b) in enumerate(zip(self.ws, self.bs, strict=True)):
            x = x @ w + b if self.is_matmul else F.linear(x, w, b)
            x = x.relu() if i == 0 else x
        return x


@in_turn(("is_matmul", "n_dead"), along([True, False], [0, 2, 9, 12]))
def test_lists_of_parameters_are_followed_whichever_way_they_are_multiplied(is_matmul, n_dead):
    found = looked(Own(is_matmul, [D, 12, 4], n_dead), loss=lambda out: (out - 1).square().mean())
    assert found["ws.0"].lately == pytest.approx(n_dead / 12)
    assert found["ws.1"].lately == 0


@in_turn(("is_matmul", "n_dead"), along([True, False], [0, 2, 5, D]))
def test_square_ones_too(is_matmul, n_dead):
    found = looked(Own(is_matmul, [D, D, 4], n_dead), loss=lambda out: (out - 1).square().mean())
    assert found["ws.0"].lately == pytest.approx(n_dead / D)


def test_a_layer_of_ones_own_with_weight_and_bias_is_followed():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(D, 12))
            self.offset = nn.Parameter(torch.full((12,), 0.1))

        def forward(self, x):
            return x @ self.kernel + self.offset

    torch.manual_seed(0)
    model = nn.Sequential(Dense(), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        model[0].offset[:9] = -1e4
    assert looked(model)["0.kernel"].lately == 9 / 12


def test_embeddings_and_matrices_without_a_bias_are_left_out():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(50, 8))
            self.emb = nn.Embedding(50, 8)

        def forward(self, x):
            return self.table[:1] + self.emb(x.long().abs() % 50).mean(1)

    assert looked(Table(), loss=lambda out: out.square().mean()) == {}


# ---- gradients that cannot be read


def test_layers_whose_gradient_is_none_or_sparse_are_left_out():
    model = net()
    units = following(model)
    for step in range(10):
        look(units, model, step, batch(seed=step)[0], lambda out: out.square().mean())
        model[0].weight.grad = None if step % 2 else model[0].weight.grad.to_sparse()
        model[0].bias.grad = None
    found = following(model)
    found.read_gradients(0, N)
    assert set(shares_of(found)) == {"2.weight"}


def test_a_frozen_layer_has_no_dead_units():
    model = net(n_dead=5)
    model[0].requires_grad_(False)
    assert set(looked(model)) == {"2.weight"}


def test_a_layer_that_takes_part_now_and_then_is_judged_by_its_own_looks():
    model = net()
    units = following(model)
    for step in range(40):
        x = batch(seed=step)[0]
        whole = step % 3 == 0
        look(
            units, model, step, x, lambda out, w=whole: out.mean() if w else model[2](torch.ones(4, H)).sum()
        )
    found = shares_of(units)
    assert found["0.weight"].n_looked == MIN_LOOKS
    assert found["0.weight"].lately == 0


def test_gradients_that_are_nan_are_gradients():
    assert looked(net(), loss=lambda out: out.mean() * float("nan"))["2.weight"].lately == 0


def test_looking_changes_no_gradient():
    model = net(n_dead=3)
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    before = [p.grad.clone() for p in model.parameters()]
    following(model).read_gradients(0, N)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


# ---- positions of a sample


def images(n, of=40, size=8):
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, size, size, generator=g), torch.randint(3, (n,), generator=g)) for _ in range(of)
    ]


def channels(kernel=3, n_dead=14):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, kernel), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    )
    kill(model[0], n_dead)
    return model


def judged_on(model, batches, loss=F.cross_entropy):
    learn = Learner(batches, model, loss, torch.optim.SGD, lr=1e-3)
    run = fit(learn, 1, cbs=[diagnose := Diagnose("ignore", show=False)]).diagnosis.evidence()
    return run.measured(DeadUnits).of, {x.code: x.severity for x in diagnose.verdict.findings}


@pytest.mark.slow
def test_positions_of_few_images_are_examples():
    dead, found = judged_on(channels(), images(2))
    assert (dead["0.weight"].n_places, dead["4.weight"].n_places) == (8, 1)
    assert (dead["0.weight"].n_examples, dead["0.weight"].n_looked) == (64, 32)
    assert found["unit.dead"] == "error"
    assert "unit.dead" not in judged_on(channels(), images(1))[1]  # 40 images are too few
    assert "unit.dead" not in judged_on(channels(n_dead=0), images(2))[1]


@pytest.mark.slow
def test_a_share_that_healthy_layers_come_near_to_needs_more_than_a_few_images():
    assert "unit.dead" not in judged_on(channels(n_dead=11), images(2))[1]
    assert judged_on(channels(n_dead=11), images(32))[1]["unit.dead"] == "warning"


@pytest.mark.slow
def test_maps_of_one_place_have_no_more_examples_than_images():
    dead, found = judged_on(channels(kernel=8), images(2))
    assert dead["0.weight"].n_places == 1
    assert "unit.dead" not in found


@pytest.mark.slow
def test_tokens_are_examples_of_a_linear_layer():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.wide, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
            kill(self.wide, 14)

        def forward(self, x):
            return self.head(F.relu(self.wide(x)).mean(1))

    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 3, 4, generator=g), torch.randint(3, (4,), generator=g)) for _ in range(50)]
    dead, found = judged_on(Tokens(), batches)
    assert (dead["wide.weight"].n_places, found["unit.dead"]) == (3, "error")


@pytest.mark.slow
def test_positions_count_in_a_compiled_model_too():
    dead, _ = judged_on(torch.compile(channels(), backend="eager"), images(2))
    plain, _ = judged_on(channels(), images(2))
    assert {name: x.n_places for name, x in dead.items()} == {name: x.n_places for name, x in plain.items()}
    assert {x.n_places for x in dead.values()} == {1, 8}
