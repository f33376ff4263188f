"""Weights of zeros, weights that are put back after each step, and parameters without an optimizer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Callback, Diagnose, Learner, watch
from hookcb.diagnosis.checks.parameters import restored, unreachable, zero_layer
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series, Skipped
from tests.support import fit


def series(values):
    return Series.of(range(len(values)), values)


def weight(name, **stats):
    stats = {stat: series(values) for stat, values in stats.items()}
    return Param(f"{name}.weight", name, "Linear", "Linear 8→8", 0, (8, 8), stats=stats)


def evidence(*params, n_steps=40):
    return Run(params={p.name: p for p in params}, n_steps=n_steps)


def trained(model, cbs=()):
    g = torch.Generator().manual_seed(0)
    batches = [(x := torch.randn(16, 4, generator=g), x.sum(1, keepdim=True)) for _ in range(30)]
    learn = Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.05)
    return fit(learn, 1, cbs=[Diagnose(show=False), *cbs]).diagnose()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


# ---- init.zero


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
    head = weight("head", weight_norm=SOME, norm=SOME)
    (found,) = zero_layer(evidence(weight("body", **body), head))
    if is_found:
        assert (found.code, found.layer, found.severity) == ("init.zero", "body", "error")
    else:
        assert isinstance(found, Passed)


def test_the_last_weight_may_be_zero_and_few_steps_tell_nothing():
    body, head = weight("body", weight_norm=SOME, norm=SOME), weight("head", weight_norm=ZERO, norm=ZERO)
    (found,) = zero_layer(evidence(body, head))
    assert isinstance(found, Passed)
    (found,) = zero_layer(evidence(weight("body", weight_norm=ZERO[:4], norm=ZERO[:4]), head))
    assert isinstance(found, Passed)  # as the other was looked at often enough
    (found,) = zero_layer(evidence(weight("body", weight_norm=ZERO[:4], norm=ZERO[:4])))
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


# ---- param.unreachable


def in_batches(n, **kwargs):
    """Evidence of a layer that was called in `n` of 40 batches and has no gradient in any step."""
    body = weight("body", weight_norm=SOME, norm=SOME)
    branch = Param("branch.weight", "branch", "Linear", "Linear 8→8", 0, (8, 8), n_without=40)
    layers = {x: Layer(x, "Linear", "Linear 8→8", i, {"std": series([1.0] * k)})
              for i, (x, k) in enumerate([("body", 40), ("branch", n)])}  # fmt: skip
    given = evidence(body, branch)
    given.layers, given.steps = layers, {"total_norm": series([1.0] * 40)}
    return given


@pytest.mark.parametrize(("n", "is_found"), [(40, True), (21, True), (20, False), (1, False)])
def test_a_branch_that_is_called_in_few_batches_is_not_cut_off(n, is_found):
    (found,) = unreachable(in_batches(n))
    assert isinstance(found, Passed) != is_found


def test_without_any_backward_no_layer_is_called_unreachable():
    given = in_batches(40)
    given.sources, given.params["body.weight"].stats = {"batches"}, {}
    assert next(unreachable(given)) == Skipped("no backward was seen")
    given.observed = {"backward"}
    assert next(unreachable(given)).code == "param.unreachable"


# ---- param.restored


@pytest.mark.parametrize(
    ("ratios", "has_moved", "n_steps", "kind"),
    [
        ([1e-3] * 6, True, 40, Passed),
        ([1e-3] * 6, False, 19, Skipped),
        ([1e-9] * 6, False, 40, Skipped),
        ([1e-3] * 4, False, 40, Skipped),
    ],
)
def test_weights_that_moved_or_were_barely_inspected_are_not_found(ratios, has_moved, n_steps, kind):
    param = weight("body", update_ratio=ratios)
    param.has_moved = has_moved
    (found,) = restored(evidence(param, n_steps=n_steps))
    assert isinstance(found, kind)


def test_weights_that_are_put_back_after_each_step_are_found():
    kept = {}

    def keep(cb):
        kept["weight"] = cb.model[2].weight.detach().clone()

    def put(cb):
        with torch.no_grad():
            cb.model[2].weight.copy_(kept["weight"])

    verdict = trained(net(), [Callback(name="putter", before_fit=keep, after_batch=put)])
    (found,) = [f for f in verdict.findings if f.code == "param.restored"]
    assert (found.layer, found.param) == ("2", "2.weight")
    assert "bit-identical" in found.message
    assert "param.restored" not in [f.code for f in trained(net()).findings]


# ---- param.not_in_optimizer


def watched(model, opts, given):
    """Verdict on a training by several optimizers, of which a watch was given some."""
    x = torch.randn(64, 8)
    with watch(model, given, Diagnose("ignore", show=False)) as w:
        for _ in range(24):
            model.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            for opt in opts:
                opt.step()
    return w.diagnose()


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def sgd(*parts):
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05)


@pytest.mark.filterwarnings("ignore:the given optimizer has no parameter")
@pytest.mark.parametrize("which", ["all", "a part"])
def test_an_optimizer_of_a_copy_is_named_as_such(which):
    model = two_layers()
    before = copy.deepcopy(model)
    opt = sgd(before) if which == "all" else sgd(before[0], model[2])
    primary = watched(model, [opt], opt).primary
    assert (primary.code, primary.severity, primary.layer) == ("param.not_in_optimizer", "error", "0")
    assert "others of the same shapes, which are not the model's" in primary.message
    assert "was copied or created anew" in primary.causes[0]


def test_an_optimizer_of_a_part_is_not_said_to_be_of_a_copy():
    model = two_layers()
    opt = sgd(model[2])
    primary = watched(model, [opt], opt).primary
    assert primary.code == "param.not_in_optimizer"
    assert "same shapes" not in primary.message


def test_parameters_that_an_optimizer_outside_the_watch_updates_are_fine():
    model = two_layers()
    opts = sgd(model[0]), sgd(model[2])
    assert watched(model, opts, opts[0]).status == "healthy"


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
