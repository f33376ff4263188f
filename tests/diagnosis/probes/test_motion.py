"""Whether parameters have moved, against full copies of them; matrices that stay one unit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.probes.motion import MIN_BATCHES, Motion

N = 32


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 3))


def train(model, params, n=5, lr=0.1, opt=torch.optim.SGD, d=8):
    opt = opt(params, lr=lr)
    for i in range(n):
        loss = F.mse_loss(model(numbers(N, d, seed=i)), numbers(N, 3, seed=100 + i))
        opt.zero_grad()
        loss.backward()
        opt.step()


def codes(motion, n_steps=30, n_backward=30):
    return [(s.code, s.param) for s in motion.observations(n_steps, n_backward)]


@pytest.mark.parametrize("trained", [range(6), [0], [1, 5], [2, 3], []])
def test_what_has_moved_is_what_differs_from_a_copy(trained):
    model = net()
    before, motion = copy.deepcopy(model), Motion(model)
    params = list(model.parameters())
    assert len(params) == 6
    train(model, [params[i] for i in trained] or [torch.ones(1, requires_grad=True)])
    expected = {
        name: not torch.equal(p, q)
        for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True)
    }
    assert motion.moved() == expected
    assert sum(expected.values()) == len(trained)


def test_a_layer_that_comes_later_is_compared_with_its_own_beginning():
    model = net()
    motion, kept = Motion(model), model[3].weight
    train(model, model.parameters())
    model[3] = nn.Linear(40, 3)
    motion.begin(model)
    assert motion.moved()["3.weight"] is False
    train(model, [model[3].weight])
    assert motion.moved()["3.weight"] is True
    assert motion.moved()["0.weight"] is True
    assert kept is not model[3].weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_change_by_one_bit_is_a_move(dtype):
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(7, dtype=dtype))
    motion = Motion(model)
    assert motion.moved() == {"p": False}
    with torch.no_grad():
        model.p[4] += torch.finfo(dtype).eps
    assert motion.moved() == {"p": True}


def test_of_a_small_parameter_every_element_is_followed():
    for i in range(64):
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(8, 8))
        motion = Motion(model)
        with torch.no_grad():
            model.p.view(-1)[i] = 1.0
        assert motion.moved()["p"]


@pytest.mark.parametrize("shape", [(64, 64), (200, 200), (1000, 3), (3, 5000), (512, 16, 3, 3)])
def test_of_a_large_one_elements_all_over_are(shape):
    for part in range(4):
        model = nn.Module()
        model.p = nn.Parameter(numbers(*shape))
        motion = Motion(model)
        with torch.no_grad():
            model.p.view(-1).chunk(4)[part].add_(1.0)
        assert motion.moved()["p"]


def test_parameters_of_all_shapes_and_kinds_are_followed():
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.turned = nn.Parameter(numbers(6, 9).T)
    model.complex = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    model.lazy = nn.LazyLinear(3)
    motion = Motion(model)
    assert motion.moved() == {"scalar": False, "turned": False, "complex": False}
    with torch.no_grad():
        model.scalar += 1
        model.turned[8, 5] += 1
        model.complex[1] += 1j
    assert motion.moved() == {"scalar": True, "turned": True, "complex": True}


# ---- steps that are never made


def test_backwards_without_any_step_are_told():
    motion = Motion(net())
    (found,) = motion.observations(0, 25)
    assert (found.code, found.layer, found.step, found.value) == ("param.not_stepped", "", 0, 0.0)
    assert "In 25 batches" in found.text


def test_nineteen_backwards_are_too_few():
    assert MIN_BATCHES == 20
    motion = Motion(net())
    assert codes(motion, 0, 19) == []
    assert codes(motion, 0, 20) == [("param.not_stepped", "")]


def test_steps_that_are_made_or_weights_that_move_without_are_no_finding():
    model = net()
    motion = Motion(model)
    assert codes(motion, 1, 30) == []
    with torch.no_grad():
        model[0].weight += 1e-3  # by hand, as p -= lr * p.grad
    assert codes(motion, 0, 30) == []


def test_a_frozen_model_has_no_step_to_make():
    assert codes(Motion(net().requires_grad_(False)), 0, 30) == []


def test_a_loop_that_is_only_looked_at_has_none_either():
    assert codes(Motion(net()), n_steps=0, n_backward=0) == []


def test_steps_without_any_backward_are_told_as_that():
    model = net()
    motion = Motion(model)
    assert list(motion.observe_no_backward(19)) == []
    (found,) = motion.observe_no_backward(20)
    assert (found.code, "reach the model before any of 20" in found.text) == ("param.not_stepped", True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(on_sick="ignore")) as w:
        for _ in range(24):
            model(torch.randn(2, 8)).square().mean()  # a loss whose backward is forgotten
            opt.step()
        verdict = w.diagnose()
    assert [x.code for x in verdict.findings] == ["param.not_stepped"]
    assert "loss.backward() is missing" in verdict.primary.causes[0]


def test_gradients_of_another_models_loss_need_no_step():
    """As those that reach a target network, or one that gives features."""
    motion = Motion(net())
    assert [x.severity for x in motion.observations(0, 30, n_given=30)] == ["info"]
    assert [x.severity for x in motion.observations(0, 30, n_given=15)] == [""]


# ---- matrices that stay one unit


class Scaled(nn.Module):
    """A hidden layer of one's own, which begins as a constant."""

    def __init__(self, use, value=0.5, shape=(8, 8)):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.full(shape, value))
        self.head, self.use = nn.Linear(8, 3), use

    def forward(self, x):
        return self.head(self.use(x, self.w))


@pytest.mark.parametrize(
    "use", [lambda x, w: F.linear(x, w).tanh(), lambda x, w: (x @ w).tanh()], ids=["F.linear", "@"]
)
def test_a_constant_matrix_whose_rows_or_columns_stay_equal_is_told(use):
    model = Scaled(use)
    nn.init.constant_(model.head.weight, 0.1)
    motion = Motion(model)
    train(model, model.parameters())
    assert codes(motion) == [("init.symmetric", "w")]


def test_a_constant_recurrent_layer_is_told():
    torch.manual_seed(0)
    rnn = nn.RNN(8, 8, batch_first=True)
    for p in rnn.parameters():
        nn.init.constant_(p, 0.1)
    head = nn.Linear(8, 3)
    nn.init.constant_(head.weight, 0.1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = rnn, head

        def forward(self, x):
            return self.head(self.rnn(x[:, None] * torch.ones(3, 1))[0][:, -1])

    model = Model()
    motion = Motion(model)
    train(model, model.parameters())
    assert {param for _, param in codes(motion)} == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert {s.layer for s in motion.observations(30, 30)} == {"rnn"}


@pytest.mark.parametrize(
    ("use", "value", "shape"),
    [
        (lambda x, w: x * w[torch.arange(len(x)) % 8], 1.0, (8, 8)),  # element by element
        (lambda x, w: F.linear(x, w).tanh(), 0.0, (8, 8)),  # zeros, as of a branch that begins at nothing
        (lambda x, w: F.linear(x, w).tanh(), 0.5, (3, 8)),  # too few units to say so
    ],
    ids=["elements", "zeros", "three units"],
)
def test_constants_that_are_meant_are_no_finding(use, value, shape):
    model = Scaled(use, value, shape)
    model.head = nn.Linear(shape[0], 3)
    motion = Motion(model)
    train(model, model.parameters())
    assert motion.moved()["w"]
    assert codes(motion) == []


def test_a_constant_matrix_that_is_not_trained_is_no_finding():
    model = Scaled(lambda x, w: F.linear(x, w).tanh())
    motion = Motion(model)
    train(model, model.head.parameters())
    assert codes(motion) == []


def test_layers_of_torch_are_left_to_the_look_at_the_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    motion = Motion(model)
    train(model, model.parameters())
    assert codes(motion) == []


def test_random_matrices_are_no_finding():
    model = Scaled(lambda x, w: F.linear(x, w).tanh())
    nn.init.normal_(model.w)
    motion = Motion(model)
    train(model, model.parameters())
    assert codes(motion) == []
