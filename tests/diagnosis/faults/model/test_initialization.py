"""Hidden units that begin equal, matrices that stay one unit, weights that stay zero, and closed gates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.model.initialization import ShutGate, Symmetric, ZeroLayer, _share_alike
from hookcb.diagnosis.frame import is_of_torch
from hookcb.diagnosis.run import Passed, Run, Skipped
from tests.diagnosis.faults.support import followed, found_by, plain_weight, stepped, told, trained


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def at_start(model):
    return [x.layer for x in followed(Symmetric, model)[0].seen]


def after_steps(model, params=None):
    """Parameters that are found after five steps of these, by default of all."""
    symmetric, run = followed(Symmetric, model)
    stepped(model, model.parameters() if params is None else params)
    assert told(run, Symmetric, n_steps=30)
    return [x.param for x in symmetric.seen]


def test_a_model_as_torch_makes_it_is_fine():
    assert at_start(net()) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_hidden_units_that_begin_equal_up_to_sign_are_seen_but_not_those_of_the_last_layer(sign):
    model = net()
    for layer in (model[2], model[4]):
        nn.init.constant_(layer.weight, 0.5)
        layer.weight.data[::2] *= sign
    assert at_start(model) == ["2"]
    model[2].weight.requires_grad_(False)
    assert at_start(model) == []


def test_weights_that_are_emptied_between_forwards_are_not_compared():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].weight.data = torch.empty(0)  # as DeepSpeed's ZeRO-3 does
    assert at_start(model) == []


def test_the_share_of_pairs_is_counted():
    rows = torch.arange(20.0).reshape(4, 5)
    assert _share_alike(rows) == 0.0
    assert _share_alike(rows[[0, 0, 1, 2]]) == pytest.approx(1 / 6)
    assert _share_alike(torch.ones(4, 5)) == 1.0
    assert _share_alike(torch.ones(3, 5)) == 0.0  # too few to tell


def test_layers_of_torch_are_told_from_others():
    assert is_of_torch(nn.Linear(2, 2))
    assert not is_of_torch(nn.ParameterList())
    assert not is_of_torch(type("Own", (nn.Module,), {"__module__": "own"})())


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
    assert after_steps(model) == ["w"]


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

    assert set(after_steps(Model())) == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}


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
    before = model.w.detach().clone()
    assert after_steps(model) == []
    assert not torch.equal(model.w, before)


def test_a_constant_matrix_that_is_not_trained_is_no_finding():
    model = Scaled(lambda x, w: F.linear(x, w).tanh())
    assert after_steps(model, model.head.parameters()) == []


def test_layers_of_torch_are_told_by_the_look_at_the_model_only():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    assert after_steps(model) == ["0.weight"]


def test_random_matrices_are_no_finding():
    model = Scaled(lambda x, w: F.linear(x, w).tanh())
    nn.init.normal_(model.w)
    assert after_steps(model) == []


def evidence(*params, n_steps=40):
    return Run(params={p.name: p for p in params}, n_steps=n_steps)


ZERO, SOME = [0.0] * 6, [1.0] * 6


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ({"weight_norm": ZERO, "norm": ZERO}, True),
        ({"weight_norm": ZERO, "norm": [0.0, 0.0, 1e-9, 0.0, 0.0, 0.0]}, False),  # a gate that opens later
        ({"weight_norm": SOME, "norm": ZERO}, False),
    ],
)
def test_a_layer_of_zeros_without_a_gradient_is_found(body, is_found):
    head = plain_weight("head", weight_norm=SOME, norm=SOME)
    (found,) = found_by(ZeroLayer, evidence(plain_weight("body", **body), head))
    if is_found:
        assert (found.code, found.layer, found.severity) == ("init.zero", "body", "error")
    else:
        assert isinstance(found, Passed)


def test_the_last_weight_may_be_zero_and_few_steps_tell_nothing():
    body, head = (
        plain_weight("body", weight_norm=SOME, norm=SOME),
        plain_weight("head", weight_norm=ZERO, norm=ZERO),
    )
    (found,) = found_by(ZeroLayer, evidence(body, head))
    assert isinstance(found, Passed)
    (found,) = found_by(ZeroLayer, evidence(plain_weight("body", weight_norm=ZERO[:4], norm=ZERO[:4]), head))
    assert isinstance(found, Passed)  # as the other was looked at often enough
    (found,) = found_by(ZeroLayer, evidence(plain_weight("body", weight_norm=ZERO[:4], norm=ZERO[:4])))
    assert isinstance(found, Skipped)


def test_a_branch_that_is_masked_to_zero_is_a_note_where_the_model_learns():
    """As the symbolic part of a KAN, whose weights begin at zero and whose mask is zero."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.symbolic, self.head = (
                nn.Linear(4, 8),
                nn.Linear(4, 8, bias=False),
                nn.Linear(8, 1),
            )
            nn.init.zeros_(self.symbolic.weight)

        def forward(self, x):
            return self.head(F.relu(self.body(x)) + 0 * self.symbolic(x))

    torch.manual_seed(0)
    verdict = trained(Masked())
    assert verdict.status == "healthy"
    assert {x.code: x.severity for x in verdict.findings}["init.zero"] == "info"


class WithExtra(nn.Module):
    """A net with a layer for further features, of which there are none."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(1, 8), nn.Linear(8, 3)
        self.extra.weight = nn.Parameter(torch.zeros(8, 0))

    def forward(self, x):
        return self.last((self.first(x) + self.extra(x[:, :0])).tanh())


def test_a_parameter_without_elements_is_no_layer_of_zeros():
    torch.manual_seed(0)
    model = WithExtra()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(30):
            nn.functional.cross_entropy(model(torch.randn(32, 6)), torch.randint(3, (32,))).backward()
            opt.step()
            opt.zero_grad()
    assert "init.zero" not in [x.code for x in w.diagnose().findings]


def test_gates_as_torch_makes_them_are_open():
    assert not [*followed(ShutGate, nn.LSTM(4, 8))[0].seen, *followed(ShutGate, nn.GRU(4, 8))[0].seen]


@pytest.mark.parametrize(("make", "n"), [(nn.LSTM, 3), (nn.GRU, 1)])
def test_gates_that_a_bias_shuts_are_seen(make, n):
    layer = make(4, 8)
    nn.init.constant_(layer.bias_ih_l0, -9.0)
    found = followed(ShutGate, nn.Sequential(layer, nn.Linear(8, 1)))[0].seen
    assert len(found) == n  # a GRU's update gate keeps the state
    assert (found[0].code, found[0].param) == ("gate.shut", "0.bias_ih_l0")
