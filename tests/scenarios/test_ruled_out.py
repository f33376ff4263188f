"""What a check could not see it does not rule out; it says why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookcb
from hookcb import ActivationStats, Diagnose, GradientHealth, Learner, watch
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.faults.model.dropout import ExtremeDropout
from hookcb.diagnosis.judge import _in_order, judge
from hookcb.diagnosis.measurements.loss_graph import read_loss
from hookcb.diagnosis.measurements.origin import Origin
from hookcb.diagnosis.run import Layer, Param, Partial, Passed, Run, Series
from hookcb.diagnosis.verdict import Finding
from tests.support import fit

HEAD = "an activation before the loss"
pytestmark = [
    pytest.mark.filterwarnings("ignore:ERROR  :UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # by Dynamo itself
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def net(*last):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), *last)


def batches(n=3):
    return [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(n)]


def learner(model, loss_func=F.cross_entropy, n=3):
    return Learner(batches(n), model, loss_func, torch.optim.SGD, lr=0.01)


def verdict_on(model, loss_func=F.cross_entropy, n=3):
    return fit(learner(model, loss_func, n), cbs=Diagnose(show=False)).diagnose()


def not_checked(verdict, code):
    """The reason why a check could not run."""
    lines = [line for line in verdict.coverage if line.startswith("not checked") and code in line]
    assert len(lines) == 1, verdict.coverage
    return lines[0].partition("(")[2].rstrip(")")


# ---- torch.compile


def compiled_outside(model):
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def compiled_head(model):
    model[-1].compile(backend="aot_eager")
    return model


HOW = {"outside": compiled_outside, "in place": compiled_in_place, "a layer": compiled_head}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["in place", *(pytest.param(x, marks=pytest.mark.slow) for x in ("outside", "a layer"))]
)
def test_a_softmax_before_cross_entropy_is_found_in_a_compiled_model_as_in_a_plain_one(how):
    plain = verdict_on(net(nn.Softmax(dim=1)))
    compiled = verdict_on(HOW[how](net(nn.Softmax(dim=1))))
    assert plain.primary.code == compiled.primary.code == "head.activation"
    assert compiled.primary.layer == plain.primary.layer == "3"
    assert HEAD not in compiled.ruled_out


@pytest.mark.slow
def test_a_compiled_model_without_a_softmax_has_that_ruled_out_by_its_original():
    verdict = verdict_on(compiled_outside(net()))
    assert "head.activation" not in [f.code for f in verdict.findings]
    assert HEAD in verdict.ruled_out


@pytest.mark.slow
def test_a_loss_function_that_is_compiled_too_is_read_from_its_original():
    loss_func = torch.compile(lambda pred, y: F.cross_entropy(pred, y), backend="aot_eager")
    assert verdict_on(net(nn.Softmax(dim=1)), loss_func).primary.code == "head.activation"


@pytest.mark.slow
def test_a_watch_sees_the_softmax_of_a_compiled_model():
    model = net(nn.Softmax(dim=1))
    compiled, opt = compiled_outside(model), torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(compiled, opt, Diagnose(show=False)) as w:
        for x, y in batches():
            loss = w.report_loss(F.cross_entropy(compiled(x), y))
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert w.diagnose().primary.code == "head.activation"


@pytest.mark.slow
def test_a_preflight_sees_the_softmax_of_a_compiled_model():
    model = compiled_outside(net(nn.Softmax(dim=1)))
    assert hookcb.diagnose(model, batches(1)[0], F.cross_entropy).primary.code == "head.activation"


class Drops(nn.Module):
    """Draws random numbers, updates buffers, counts its calls."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x):
        return self.body(x)


@pytest.mark.slow
def test_the_look_at_the_original_changes_nothing():
    """Weights, running statistics, random numbers and the number of compilations are those without it."""

    def train(cbs):
        torch._dynamo.reset()
        torch.manual_seed(1)
        data = batches(4)
        model = Drops()
        learn = Learner(data, compiled_outside(model), F.cross_entropy, torch.optim.SGD, lr=0.1)
        fit(learn, 2, cbs=cbs)
        return [*model.state_dict().values(), torch.get_rng_state()]

    alone, looked_at = train([]), train([Diagnose(show=False)])
    assert all(torch.equal(a, b) for a, b in zip(alone, looked_at, strict=True))


class RefusesEager(nn.Module):
    """Cannot be run without torch.compile."""

    def __init__(self):
        super().__init__()
        self.body = net(nn.Softmax(dim=1))

    def forward(self, x):
        if not torch.compiler.is_compiling():
            raise NotImplementedError("only compiled")
        return self.body(x)


@pytest.mark.slow
def test_an_original_that_cannot_be_run_leaves_it_open():
    verdict = verdict_on(compiled_outside(RefusesEager()))
    assert HEAD not in verdict.ruled_out
    assert not_checked(verdict, "head.activation") == "torch.compile hides what the loss is computed from"
    assert any("could not be run without torch.compile: NotImplementedError" in x for x in verdict.coverage)


# ---- what else hides a graph


class OwnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.softmax(1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return out * (grad - (grad * out).sum(1, keepdim=True))


class Own(nn.Module):
    def forward(self, x):
        return OwnSoftmax.apply(x)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.body, self.use_reentrant = net(nn.Softmax(dim=1)), use_reentrant

    def forward(self, x):
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.use_reentrant)


def test_an_autograd_function_of_ones_own_hides_what_gives_the_loss():
    verdict = verdict_on(net(Own()))
    assert HEAD not in verdict.ruled_out
    reason = not_checked(verdict, "head.activation")
    assert reason == "OwnSoftmax, a custom autograd function, hides what the loss is computed from"


@pytest.mark.slow
def test_a_checkpointed_region_hides_it_only_if_it_is_reentrant():
    verdict = verdict_on(Recomputed(use_reentrant=True))
    assert HEAD not in verdict.ruled_out
    assert "use_reentrant=True hides" in not_checked(verdict, "head.activation")
    assert verdict_on(Recomputed(use_reentrant=False)).primary.code == "head.activation"


def test_a_loss_of_unknown_kind_rules_nothing_out():
    verdict = verdict_on(
        net(nn.Softmax(dim=1)), lambda pred, y: (pred - F.one_hot(y, 3)).abs().pow(1.5).mean()
    )
    assert HEAD not in verdict.ruled_out
    assert not_checked(verdict, "head.activation").startswith("the kind of the loss is unknown")


def test_a_graph_of_torchs_own_operations_is_never_taken_for_hidden():
    x = torch.randn(6, 5, requires_grad=True)
    y = torch.randint(5, (6,))
    for pred in (
        x,
        x.double(),
        x.t().t(),
        x.clone()[:, :5],
        x.exp(),
        x @ torch.randn(5, 5),
        x.view(6, 5).relu(),
    ):
        assert read_loss(F.cross_entropy(pred, y.to(pred.device)).grad_fn).hidden_by == ""
    assert read_loss(torch.stack([x.sum(), x.std()]).sum().grad_fn).hidden_by == ""


def test_layers_in_torchscript_are_not_ruled_out():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    verdict = verdict_on(nn.Sequential(nn.Linear(8, 16), scripted, nn.Linear(16, 3)), n=8)
    for code in ("init.symmetric", "act.scale", "act.collapse"):
        assert "TorchScript" in not_checked(verdict, code)
    assert "symmetric initialization" not in verdict.ruled_out


# ---- evidence that is not there


@pytest.mark.slow
def test_graphs_are_not_said_to_be_freed_in_a_run_too_short_to_tell():
    assert "retained graphs" not in verdict_on(net()).ruled_out
    assert "retained graphs" in verdict_on(net(), n=62).ruled_out


def test_labels_are_not_cleared_while_the_loss_has_not_been_seen_to_fall():
    verdict = verdict_on(net())
    assert "labels that do not follow from the inputs" not in verdict.ruled_out
    assert "fewer than 50 batches" in not_checked(verdict, "data.labels")


def test_without_an_optimizer_a_preflight_rules_out_nothing_about_one():
    verdict = hookcb.diagnose(net(), batches(1)[0], F.cross_entropy)
    for fine in (
        "parameters twice in the optimizer",
        "parameters outside the optimizer",
        "weight decay (none)",
    ):
        assert fine not in verdict.ruled_out
    assert "gradients left over from the step before" not in verdict.ruled_out
    for code in ("param.duplicated", "param.not_in_optimizer", "wd.dominates"):
        assert not_checked(verdict, code) == "no optimizer was given"


@pytest.mark.slow
def test_a_preflight_does_not_say_that_nobody_waits_for_data():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    verdict = hookcb.diagnose(model, batches(1)[0], F.cross_entropy, opt, steps=20)
    assert not any("waiting for data" in fine for fine in verdict.ruled_out)
    assert "parameters twice in the optimizer" in verdict.ruled_out


def test_gradient_health_alone_does_not_know_which_layers_are_used():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.cut = net(), nn.Linear(8, 3)

        def forward(self, x):
            return self.body(x) + self.cut(x).detach()

    both = fit(learner(Half(), n=8), cbs=[ActivationStats(), GradientHealth()]).diagnose()
    assert both.primary.code == "param.unreachable"
    alone = fit(learner(Half(), n=8), cbs=[GradientHealth()]).diagnose()
    assert "layers without gradient" not in alone.ruled_out
    assert (alone.primary.code, alone.primary.severity) == ("param.unreachable", "warning")
    assert "the loss may not depend on them" in alone.primary.message


def test_nan_is_not_ruled_out_where_a_loss_was_nan():
    evidence = Run(sources={"batch", "loss"}, n_batches=3, loss=Series([0, 1, 2], [1.0, float("nan"), 1.0]))
    evidence.measured(Origin).has_looked = True
    assert "NaN and infinities" not in judge(evidence).ruled_out
    assert not_checked(judge(evidence), "nonfinite.first").startswith("the loss of step 1 was not finite")


def test_a_part_of_a_model_can_show_a_fault_and_cannot_rule_it_out():
    layer = Layer("0", "Linear", "Linear 8→8", 0, {"std": Series([0, 1, 2], [1.0, 1.0, 1.0])})
    param = Param("0.weight", "0", "Linear", "Linear 8→8", 0, (8, 8), stats={"norm": Series([0], [1.0])})
    evidence = Run(
        sources={"activations", "model"}, n_batches=3, params={"0.weight": param}, layers={"0": layer}
    )
    assert any("scale of activations" in fine for fine in judge(evidence).ruled_out)
    evidence.lack(Partial("a part is hidden"), "activations", "model")
    evidence.measured(ExtremeDropout).see("it drops all", at="0", next_steps=("drop less",))
    verdict = judge(evidence)
    assert verdict.primary.code == "dropout.extreme"
    assert not any("scale of activations" in fine for fine in verdict.ruled_out)
    assert not_checked(verdict, "act.scale") == "a part is hidden"


def test_a_number_near_its_limit_is_not_called_ruled_out_beside_a_finding():
    check, primary = FAULTS["unit.dead"], Finding("update.too_small", "warning", "", "", 0, 1e-6, 1e-5, "…")
    near, clear = Passed("dead units (48%)", 0.48, 0.6), Passed("dead units (4%)", 0.04, 0.6)
    assert _in_order([(check, near)], primary) == ()
    assert _in_order([(check, near)], None) == ("dead units (48%)",)
    assert _in_order([(check, clear)], primary) == ("dead units (4%)",)
    assert _in_order([(check, Passed("a mask"))], primary) == ("a mask",)
