"""Layers that are called and get no gradient."""

from hookcb.diagnosis.faults.steps.unreachable import Unreachable
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Skipped
from tests.diagnosis.faults.support import found_by, plain_weight
from tests.diagnosis.support import series
from tests.support import in_turn

SOME = [1.0] * 6


def evidence(*params, n_steps=40):
    return Run(params={p.name: p for p in params}, n_steps=n_steps)


def in_batches(n, **kwargs):
    """Evidence of a layer that was called in `n` of 40 batches and has no gradient in any step."""
    body = plain_weight("body", weight_norm=SOME, norm=SOME)
    branch = Param("branch.weight", "branch", "Linear", "Linear 8→8", 0, (8, 8), n_without=40)
    layers = {x: Layer(x, "Linear", "Linear 8→8", i, {"std": series([1.0] * k)})
              for i, (x, k) in enumerate([("body", 40), ("branch", n)])}  # fmt: skip
    given = evidence(body, branch)
    given.layers, given.steps = layers, {"total_norm": series([1.0] * 40)}
    return given


@in_turn(("n", "is_found"), [(40, True), (21, True), (20, False), (1, False)])
def test_a_branch_that_is_called_in_few_batches_is_not_cut_off(n, is_found):
    (found,) = found_by(Unreachable, in_batches(n))
    assert isinstance(found, Passed) != is_found


def test_without_any_backward_no_layer_is_called_unreachable():
    given = in_batches(40)
    given.sources, given.params["body.weight"].stats = {"batches"}, {}
    assert found_by(Unreachable, given) == [Skipped("no backward was seen")]
    given.measured(Steps).n_backward = 40
    assert found_by(Unreachable, given)[0].code == "param.unreachable"
