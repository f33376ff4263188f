"""NanTrace finds what made the first number that is not finite, and leaves the training as it found it."""

import copy
import inspect
import math
import pickle
import random
import warnings
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelFitException,
    Compile,
    GradientAccumulation,
    HookCallback,
    Learner,
    MixedPrecision,
    TerminateOnNaN,
    count_hooks,
)
from hookcb.core.randomness import random_state, set_random_state
from hookcb.nans import trace as nan_trace
from hookcb.nans.origins import Origins
from hookcb.nans.replay import BatchStarts
from hookcb.nans.trace import NanTrace
from tests.support import fit, in_turn, make_batches, make_learner, same, weights

HERE = "test_trace.py"


# ---- models; the line that makes the NaN ends in `# here`


class Log(nn.Module):
    def forward(self, x):
        x = x - 100
        return x.log()  # here


class ZeroByZero(nn.Module):
    def forward(self, x):
        zero = x * 0
        return zero / zero  # here


class Attention(nn.Module):
    """Divides by the sum of positive weights, of which a mask that is all zeros leaves none."""

    def __init__(self, d=3):
        super().__init__()
        self.qk, self.v = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        scores = torch.exp(self.qk(x) @ x.T)
        kept = scores * torch.zeros(len(x), len(x))
        shares = kept / kept.sum(1, keepdim=True)  # here
        return shares @ self.v(x)


class OwnBatchNorm(nn.Module):
    """Normalises by the unbiased spread of the batch, which one sample has none of."""

    def __init__(self, d=3):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))
        self.register_buffer("running", torch.zeros(d))

    def forward(self, x):
        self.running += 0.1 * x.detach().mean(0)
        spread = x.std(0)  # here
        return self.gain * (x - x.mean(0)) / spread


class InPlace(nn.Module):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = -1
        x.sqrt_()  # here
        return x


class RootAtZero(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()  # here


class NormAtZero(nn.Module):
    def forward(self, x):
        x = x - x.detach()
        return x.pow(2).sum(1, keepdim=True).pow(0.5) + x  # here


class Unselected(nn.Module):
    """NaN in the branch that `where` leaves out: finite forward, gradient that is not."""

    def forward(self, x):
        return torch.where(x > 1e9, (-x.detach().abs() + 0 * x).sqrt(), x)  # here


class DoublesItself(nn.Module):
    """Overflows when a dropped unit makes it divide by zero, which depends on random numbers alone."""

    def forward(self, x):
        kept = F.dropout(torch.ones(len(x)), 0.5)
        return x / kept[:, None]  # here


class CountsInSecret(nn.Module):
    """Fails at its third call, and never again."""

    n = 0

    def forward(self, x):
        self.n += 1
        return x / 0 if self.n == 3 else x


def line_of(cls):
    lines, first = inspect.getsourcelines(cls)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


def third(layer, d=3):
    """A model whose third layer is `layer`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, d), nn.Tanh(), layer, nn.Linear(d, 1))


def traced(model, cbs=(), n_train=3, data=None, n_epoch=1, **kwargs):
    """A learner after a fit with NanTrace, whose warning is let through."""
    learn = make_learner(n_train, 0, model=model, **kwargs)
    if data is not None:
        learn.dls = type(learn.dls)(data)
    with warnings.catch_warnings(action="ignore"):
        return fit(learn, n_epoch, cbs=[NanTrace(), *cbs])


def report_of(*args, **kwargs):
    report = traced(*args, **kwargs).nan_trace.report
    assert report is not None
    return report


def planted(batches, k, what=math.nan, where=0):
    """The batches with one number of the k-th replaced, in the inputs (0) or the targets (1)."""
    batches = [tuple(x.clone() for x in batch) for batch in batches]
    batches[k][where][1, 0] = what
    return batches


# ---- what it finds


@in_turn(
    ("layer", "op"),
    [(Log, "log"), (ZeroByZero, "div"), (Attention, "div"), (OwnBatchNorm, "std"), (InPlace, "sqrt_")],
)
def test_a_nan_made_in_the_forward_is_traced_to_the_layer_the_operation_and_the_line(layer, op):
    data = make_batches(3, bs=1 if layer is OwnBatchNorm else 4)
    report = report_of(third(layer()), data=data)
    assert (report.where, report.type, report.direction) == ("2", layer.__name__, "forward")
    assert report.op == op
    assert report.line.endswith(f"{HERE}:{line_of(layer)}")
    assert report.code.endswith("# here")
    assert report.noticed == "loss is nan"
    assert report.repeated
    assert report.hint
    assert report.hint in " ".join(str(report).split())
    assert (report.epoch, report.batch) == (0, 0)
    assert report.calls[-1].name == "2"
    assert report.calls[-1].nans > 0


@pytest.mark.parametrize(
    ("layer", "op"),
    [(RootAtZero, "SqrtBackward0"), (NormAtZero, "PowBackward0"), (Unselected, "SqrtBackward0")],
)
def test_a_gradient_that_is_not_finite_is_traced_to_its_producer(layer, op):
    report = report_of(third(layer()))
    assert (report.where, report.type, report.direction) == ("2", layer.__name__, "backward")
    assert report.op == op
    assert report.line.endswith(f"{HERE}:{line_of(layer)}")
    assert report.noticed == "gradient of 0.weight and 1 more not finite"
    assert report.hint
    assert report.calls[-1].name == "1"  # the gradient that comes to the layer before
    assert report.calls[-1].nonfinite
    assert not any(call.nonfinite for call in report.calls[:-1])


def root_loss(pred, y):
    return (pred - pred.detach()).sqrt().mean()


def log_loss(pred, y):
    return (pred.abs() * 0 - 1).log().mean()


def test_a_loss_function_that_makes_it_is_named():
    report = report_of(third(nn.ReLU()), loss_func=log_loss)
    assert (report.where, report.type, report.direction) == ("the loss function", "log_loss", "forward")
    assert report.op == "log"
    assert report.line.endswith(f"{HERE}:{inspect.getsourcelines(log_loss)[1] + 1}")
    report = report_of(third(nn.ReLU()), loss_func=root_loss)
    assert (report.where, report.type, report.direction) == ("the loss function", "root_loss", "backward")
    assert report.line.endswith(f"{HERE}:{inspect.getsourcelines(root_loss)[1] + 1}")


def test_a_loss_that_is_infinite_is_traced_too():
    report = report_of(third(nn.ReLU()), loss_func=lambda pred, y: (pred * 0).log().mean())
    assert report.noticed == "loss is -inf"
    assert (report.where, report.op) == ("the loss function", "log")


@in_turn(("where", "path"), [(0, "xb[0]"), (1, "yb[0]")])
@in_turn("what", [math.nan, math.inf])
def test_data_that_is_not_finite_is_said_to_be_so(where, path, what):
    report = report_of(third(nn.ReLU()), data=planted(make_batches(3), 1, what, where))
    direction = "backward" if (what, where) == (math.inf, 0) else "forward"  # as Tanh makes 1 of inf
    assert (report.where, report.direction, report.batch) == ("the batch", direction, 1)
    assert f"the batch contains NaN or inf in {path}" in report.notes
    assert "it is in the batch" in report.summary


def test_a_batch_with_nan_that_the_model_takes_care_of_is_not_to_blame():
    class Fills(nn.Module):
        def forward(self, x):
            return x.nan_to_num()

    data = planted(make_batches(3), 1)
    assert traced(nn.Sequential(Fills(), third(nn.ReLU())), data=data).nan_trace.report is None
    report = report_of(nn.Sequential(Fills(), third(Log())), data=planted(make_batches(3), 0))
    assert report.where == "1.2"
    assert "the batch contains NaN or inf in xb[0]" in report.notes


def test_a_replay_repeats_the_random_numbers_of_the_batch():
    def draws(cb):  # behind it the model would see other random numbers than the batch begins with
        torch.rand(3), random.random()

    for seed in range(5):
        model = third(DoublesItself())
        torch.manual_seed(seed)
        report = report_of(model, [Callback(before_batch=draws)], n_train=10)
        assert (report.where, report.op, report.repeated) == ("2", "div", True)


@pytest.mark.parametrize(
    "draw", [random.random, numpy.random.rand, numpy.random.randn], ids=["py", "np", "gauss"]
)
def test_random_numbers_of_python_and_numpy_are_repeated_too(draw):
    class Draws(nn.Module):
        def forward(self, x):
            drawn.append(float(draw()))
            return x / 0 if len(drawn) >= 4 else x

    drawn = []
    report = report_of(third(Draws()), n_train=10)
    assert report.repeated
    assert len(drawn) == 5
    assert drawn[4] == drawn[3] != drawn[2]


def test_a_failure_that_does_not_repeat_is_said_to_be_so():
    model = third(CountsInSecret())
    report = report_of(model, n_train=5)
    assert (report.direction, report.repeated, report.where, report.batch) == ("not repeated", False, "", 2)
    assert "did not repeat" in report.summary
    assert any("modules keep outside of buffers" in note for note in report.notes)
    assert model[2].n == 3  # the replay's call is not counted


def test_a_loss_that_a_callback_has_spoilt_does_not_repeat():
    def spoil(cb):
        cb.learn.loss = cb.loss * math.nan

    report = report_of(third(nn.ReLU()), [Callback(after_loss=spoil)])
    assert not report.repeated


def test_a_replay_that_fails_itself_is_reported_and_ends_the_fit():
    class RaisesLater(CountsInSecret):
        def forward(self, x):
            if self.n == 3:
                raise OSError("gone")
            return super().forward(x)

    report = report_of(third(RaisesLater()))
    assert not report.repeated
    assert "OSError('gone')" in report.notes[-1]


class MaskedAttention(nn.Module):
    def __init__(self, d=3, softmax=None, all_masked_at=()):
        super().__init__()
        self.q, self.softmax = nn.Linear(d, d), softmax or nn.Softmax(1)
        self.n, self.all_masked_at = 0, all_masked_at

    def forward(self, x):
        mask = torch.ones(len(x), len(x)).triu(1).bool()
        if self.n in self.all_masked_at:
            mask[0] = True
        self.n += self.training
        return self.softmax((self.q(x) @ x.T).masked_fill(mask, -math.inf)) @ x


class MaskedScores(nn.Module):
    """Puts out -inf, which cross-entropy can take."""

    def forward(self, x):
        return x @ x.T + torch.full((len(x), len(x)), -math.inf).triu(1)


def test_minus_inf_of_attention_masks_is_no_alarm():
    layer = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    torch_own = type(
        "TorchOwn", (nn.Module,), {"forward": lambda self, x: layer(x[None], src_mask=mask)[0]}
    )()
    torch_own.layer = layer
    scores = nn.Sequential(nn.Linear(2, 3), MaskedScores())
    first = {"loss_func": lambda pred, y: F.cross_entropy(pred, torch.zeros(len(y), dtype=torch.long))}
    for model, options in ((third(MaskedAttention()), {}), (third(torch_own), {}), (scores, first)):
        learn = traced(model, n_epoch=2, **options)
        assert learn.nan_trace.report is None
        assert len(learn.recorder.losses) == 6
        assert all(map(math.isfinite, learn.recorder.losses))


def test_masks_are_not_taken_for_the_cause_of_something_else():
    report = report_of(
        nn.Sequential(third(MaskedAttention(softmax=nn.Softmax(1)))[:3], Log(), nn.Linear(3, 1))
    )
    assert (report.where, report.op) == ("1", "log")


def test_a_row_that_is_all_masked_is_traced_to_its_softmax():
    report = report_of(third(MaskedAttention(all_masked_at=range(9))))
    assert (report.where, report.type) == ("2.softmax", "Softmax")
    assert report.op in ("_softmax", "")


def test_a_mask_that_leaves_a_softmax_nothing_is_mentioned_beside_it():
    class Masks(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.ones(x.shape, dtype=torch.bool), -math.inf)

    report = report_of(third(nn.Sequential(Masks(), nn.Softmax(1))))
    assert (report.where, report.type) == ("2.1", "Softmax")
    assert "-inf was first in the output of 2.0" in report.notes


def test_minus_inf_that_is_no_mask_is_followed_to_where_it_was_made():
    class LogOfZero(nn.Module):
        def forward(self, x):
            return (x * 0).log()

    report = report_of(third(LogOfZero()))  # the linear layer behind it makes NaN of -inf
    assert (report.where, report.type, report.op) == ("2", "LogOfZero", "log")
    report = report_of(third(LogOfZero())[:3], loss_func=lambda pred, y: pred.mean())
    assert (report.where, report.noticed) == ("2", "loss is -inf")


@pytest.mark.parametrize("has_minus_inf", [False, True])
def test_minus_inf_that_the_model_makes_between_its_layers_is_named_by_its_operation(has_minus_inf):
    class LogBetween(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
            with torch.no_grad():
                self.head.weight[1] = 1.0 if has_minus_inf else -1.0
                self.head.weight[0, :2] = torch.tensor([1.0, -1.0])

        def forward(self, x):
            masked = self.first(x).relu() * 0
            return self.head(masked.log())  # the head makes NaN of -inf

    report = report_of(LogBetween(), loss_func=lambda pred, y: pred.mean())
    assert (report.where, report.op) == ("the model itself", "log")
    assert report.code.startswith("return self.head(masked.log())")


@pytest.mark.parametrize("changes", [False, True])
def test_a_hook_that_returns_nothing_is_left_out_of_the_replay_if_that_is_enough(changes):
    calls, model = [], third(nn.Identity() if changes else Log())

    def hook(m, args, output):
        calls.append(m)
        output.detach().fill_(math.nan if changes else 1.0)

    model[3].register_forward_hook(hook)
    assert report_of(model).where == ("3" if changes else "2")
    assert len(calls) == (2 if changes else 1)


def test_a_layer_whose_nan_is_left_out_later_is_not_to_blame():
    class LeftOut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = Log(), Log(), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.second(self.first(x).nan_to_num()))

    report = report_of(LeftOut())
    assert (report.where, report.op) == ("second", "log")
    assert [call.name for call in report.calls] == ["first", "second"]


def test_a_nan_that_the_program_puts_in_is_at_its_line_and_no_operation_made_it():
    class PutsIn(nn.Module):
        def forward(self, x):
            return x.masked_fill(x == x, math.nan)  # here

    report = report_of(third(PutsIn()))
    assert (report.where, report.type, report.op) == ("2", "PutsIn", "")
    assert report.line.endswith(f"{HERE}:{line_of(PutsIn)}")


@pytest.mark.parametrize("loss_func", [F.mse_loss, lambda pred, y: pred.mean()])
def test_minus_inf_in_the_batch_is_not_called_an_overflow_of_what_takes_it(loss_func):
    data = planted([(torch.rand(4, 3), torch.rand(4, 1))], 0, -math.inf)
    report = report_of(third(nn.Identity())[2:], data=data, loss_func=loss_func)
    assert (report.op, report.hint) == ("", "")
    assert "the batch contains -inf in xb[0]" in report.notes


def test_weights_that_were_spoilt_before_are_mentioned():
    model = third(nn.ReLU())
    with torch.no_grad():
        model[3].weight[0, 1] = math.nan
    report = report_of(model)
    assert report.where == "3"
    assert any("its weight already contained NaN or inf" in note for note in report.notes)


# ---- in every kind of training


def test_in_bf16_autocast_the_replay_is_in_autocast_too():
    seen = []

    class Overflows(nn.Module):
        def forward(self, x):
            seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
            return x / (x - x)

    report = report_of(third(Overflows()), [MixedPrecision()])
    assert (report.where, report.op) == ("2", "div")
    assert seen == [(True, torch.bfloat16)] * 2
    assert not torch.is_autocast_enabled("cpu")


SCALER = {"init_scale": 2.0**40, "backoff_factor": 2.0**-12}


def test_an_ordinary_overflow_of_a_scaler_is_no_alarm():
    def trained(cbs):
        torch.manual_seed(0)
        return fit(
            make_learner(6, 0, [MixedPrecision("fp16", **SCALER), *cbs], model=third(nn.Dropout(0.3))), 2
        )

    with_it, without = trained([NanTrace()]), trained([])
    assert with_it.mixed_precision.skipped == without.mixed_precision.skipped > 0
    assert with_it.nan_trace.report is None
    assert same(weights(with_it.model), weights(without.model))


@pytest.mark.parametrize(("layer", "direction"), [(Log, "forward"), (RootAtZero, "backward")])
def test_with_a_scaler_what_has_nothing_to_do_with_the_scale_is_found(layer, direction):
    report = report_of(third(layer()), [MixedPrecision("fp16")])
    assert (report.where, report.direction) == ("2", direction)


def test_a_number_too_large_for_half_precision_is_found_in_the_forward():
    class Large(nn.Module):
        def forward(self, x):
            return 1e6 + x.float()

    report = report_of(third(Large()), [MixedPrecision("fp16")])
    assert report.where == "3"  # the linear layer that casts it
    assert report.op == "_to_copy"


def test_of_an_accumulated_group_the_batch_is_found_that_failed():
    class RootOfFourth(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt() if x.shape[0] == 3 else x

    data = make_batches(5)
    data[3] = tuple(x[:3] for x in data[3])
    learn = traced(third(RootOfFourth()), [GradientAccumulation(4)], data=data)
    report = learn.nan_trace.report
    assert (report.batch, report.where, report.direction) == (3, "2", "backward")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_in_a_group_an_overflow_is_looked_at_once(n, monkeypatch):
    searched, search = [], nan_trace.search
    monkeypatch.setattr(nan_trace, "search", lambda *args: searched.append(1) or search(*args))
    model, precision = third(nn.ReLU()), MixedPrecision("fp16", **SCALER)
    learn = traced(model, [GradientAccumulation(n), precision], n_train=8, n_epoch=2)
    assert learn.nan_trace.report is None
    assert len(searched) == precision.skipped > 0


@pytest.mark.parametrize("layer", [Log, RootAtZero])
def test_a_compiled_model_runs_uncompiled_in_the_replay(layer):
    torch.compiler.reset()
    report = report_of(third(layer()), [Compile(backend="eager")])
    assert (report.where, report.type) == ("2", layer.__name__)
    assert report.line.endswith(f"{HERE}:{line_of(layer)}")
    torch.compiler.reset()
    report = report_of(torch.compile(third(layer()), backend="eager"))
    assert report.where == "2"


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fc, self.head = nn.Linear(2, 3), Log(), nn.Linear(3, 1)

    def forward(self, x):
        h = self.fc(200 + self.stem(x))
        return self.head(self.fc(h))


@pytest.mark.parametrize("looks_at_operations", [True, False])
def test_a_replay_compiles_nothing(looks_at_operations, monkeypatch):
    def refuses(origins, func, types, args=(), kwargs=None):
        raise NotImplementedError("no rule for this mode")

    def graphs_of(cb):
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        graphs, learn = [], make_learner(3, 0, model=third(Log()))
        with warnings.catch_warnings(action="ignore"):
            fit(learn, cbs=[cb, Compile(backend=backend)])
        return len(graphs)

    if not looks_at_operations:
        monkeypatch.setattr(Origins, "__torch_dispatch__", refuses)
    tracer = NanTrace()
    assert graphs_of(tracer) == graphs_of(TerminateOnNaN()) > 0
    assert (tracer.report.where, tracer.report.op) == ("2", "log" if looks_at_operations else "")


def test_of_a_shared_module_the_call_is_named():
    report = report_of(Shared())
    assert (report.where, report.type) == ("fc#1", "Log")
    assert [call.name for call in report.calls] == ["stem", "fc#0", "fc#1"]


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Mapped(UserDict):
    pass


@in_turn("kind", [dict, Output, SimpleNamespace, Mapped, lambda **fields: (fields,)])
@in_turn("layer", [Log, RootAtZero])
def test_outputs_of_any_kind_are_looked_into(kind, layer):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad = layer()

        def forward(self, x):
            return kind(logits=self.bad(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.inner = nn.Linear(2, 3), Inner()

        def forward(self, x):
            out = self.inner(self.fc(x))
            out = out[0] if isinstance(out, tuple) else out
            return out["logits"] if isinstance(out, dict | UserDict) else out.logits

    report = report_of(Outer(), loss_func=lambda pred, y: pred.mean())
    assert (report.where, report.type) == ("inner.bad", layer.__name__)


class LikeHuggingFace(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.body = third(layer)

    def forward(self, x, labels):
        logits = self.body(x)
        return Output(logits, F.mse_loss(logits, labels))


@pytest.mark.parametrize("layer", [Log, RootAtZero])
def test_a_model_that_computes_its_own_loss_is_traced(layer):
    data = [{"x": x, "labels": y} for x, y in make_batches(3)]
    report = report_of(LikeHuggingFace(layer()), data=data, loss_func=None)
    assert (report.where, report.type) == ("body.2", layer.__name__)
    data[1]["x"][0, 0] = math.nan
    report = report_of(LikeHuggingFace(nn.ReLU()), data=data, loss_func=None)
    assert (report.where, report.batch) == ("the batch", 1)
    assert "the batch contains NaN or inf in xb.x" in report.notes


def test_what_the_model_does_between_its_layers_is_its_own():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            x = self.a(x)
            x = x / (x * 0)  # here
            return self.b(x)

    report = report_of(Between())
    assert (report.where, report.type) == ("the model itself", "Between")
    assert report.line.endswith(f"{HERE}:{line_of(Between)}")


def test_gradients_spoilt_between_layers_are_not_of_the_layer_behind():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            x = self.a(x)
            x = (x * 0).sqrt()  # here
            return self.b(x)

    report = report_of(Between())
    assert (report.where, report.direction) == ("the model itself", "backward")
    assert report.line.endswith(f"{HERE}:{line_of(Between)}")


def test_memory_that_nobody_has_written_to_is_not_to_blame():
    class Writes(nn.Module):
        def forward(self, x):
            own = torch.empty_like(x)
            own.copy_(x - 100)
            return own.log()  # here

    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        report = report_of(third(Writes()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.op == "log"
    assert report.line.endswith(f"{HERE}:{line_of(Writes)}")


def test_activation_checkpointing_changes_nothing():
    class Checkpointed(nn.Module):
        def __init__(self, layer, reentrant):
            super().__init__()
            self.a, self.layer, self.b, self.reentrant = nn.Linear(2, 3), layer, nn.Linear(3, 1), reentrant

        def forward(self, x):
            return self.b(checkpoint(self.layer, self.a(x), use_reentrant=self.reentrant))

    assert report_of(Checkpointed(Log(), False)).where == "layer"
    report = report_of(Checkpointed(RootAtZero(), False))
    assert (report.where, report.direction) == ("layer", "backward")
    assert not any(call.name.startswith("layer#") for call in report.calls)


def test_a_validation_inside_the_training_is_not_looked_at_and_disturbs_nothing():
    class NanInEval(nn.Module):
        def forward(self, x):
            return x if self.training else x * math.nan

    inside = Callback(after_pred=lambda cb: cb.training and cb.learn.validate(make_batches(2)))
    learn = traced(third(NanInEval()), [inside])
    assert learn.nan_trace.report is None
    assert report_of(third(Log()), [inside]).where == "2"


def test_an_operation_that_cannot_be_looked_at_leaves_the_search_by_layers(monkeypatch):
    def refuses(origins, func, types, args=(), kwargs=None):
        raise NotImplementedError("no rule for this mode")

    monkeypatch.setattr(Origins, "__torch_dispatch__", refuses)
    report = report_of(third(Log()))
    assert (report.where, report.op) == ("2", "")


def test_sparse_and_complex_and_half_gradients_are_looked_at():
    class Embeds(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 3, sparse=True), layer
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

        def forward(self, x):
            x = self.table(x) * self.turn.abs() * self.low
            return self.layer(x).mean(1, keepdim=True)

    data = [(torch.arange(4), y) for _, y in make_batches(3)]
    assert traced(Embeds(nn.Tanh()), data=data).nan_trace.report is None
    report = report_of(Embeds(RootAtZero()), data=data)
    assert (report.where, report.direction) == ("layer", "backward")


@pytest.mark.parametrize("scale", [2e38, 1e30])
def test_large_but_finite_gradients_are_no_alarm(scale):
    model, seen = nn.Linear(2, 1, bias=False), []  # the sum of its gradients, or their norm, overflows
    look = Callback(after_backward=lambda cb: seen.append(cb.model.weight.grad.clone()))
    data = [(torch.ones(1, 2), torch.zeros(1, 1))] * 2
    learn = traced(model, [look], data=data, loss_func=lambda pred, y: (pred - pred.detach()).sum() * scale)
    assert learn.nan_trace.report is None
    assert seen[0].isfinite().all()
    assert not (seen[0].norm() + seen[0].sum()).isfinite()


# ---- it leaves everything as it was


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def everything(learn):
    model = learn.model
    numpy_state = numpy.random.get_state(legacy=False)
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "gradients": [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
        "optimizer": copy.deepcopy(learn.opt.state_dict()),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            numpy_state["state"]["key"].tolist(),
            numpy_state["state"]["pos"],
            numpy_state["has_gauss"],
        ),
        "hooks": count_hooks(model),
        "modes": [m.training for m in model.modules()],
        "counts": [getattr(m, "n", None) for m in model.modules()],
        "loss": learn.loss if learn.loss is None else learn.loss.detach().clone(),
        "pred": learn.pred if learn.pred is None else learn.pred.detach().clone(),
        "batch": (learn.xb, learn.yb),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
    }


class Many(nn.Module):
    """Buffers of all kinds, random numbers of all kinds, a counter, then the layer."""

    def __init__(self, layer):
        super().__init__()
        self.fc, self.bn, self.layer, self.head = nn.Linear(2, 3), nn.BatchNorm1d(3), layer, nn.Linear(3, 1)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("large", torch.zeros(70_000))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.n, self.at = 0, 4

    def forward(self, x):
        self.n += 1
        self.replaced = self.replaced + x.detach().mean(0)
        self.large += 1
        self.hidden.data.add_(1)
        x = F.dropout(self.bn(self.fc(x)), 0.3) * random.random() * numpy.random.rand()
        return self.head(self.layer(x) if self.large[0] > self.at else x)


class EndsAt(Callback):
    """Ends the fit as NanTrace does, in another way."""

    order = 90

    def __init__(self, event, batch):
        super().__init__(**{event: self.end_at(batch)})

    @staticmethod
    def end_at(batch):
        def end(cb):
            if cb.training and cb.train_iter == batch:
                raise CancelFitException

        return end


def draw_all(cb):  # between the forward and the alarm, which a replay does not do
    torch.rand(3), random.random(), numpy.random.randn()


def run_of_many(cb, layer, others=()):
    random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
    learn = make_learner(10, 0, model=Many(layer), opt_func=torch.optim.Adam)
    captured = []
    watch = Callback(name="watch", after_cancel_fit=lambda cb: captured.append(everything(cb.learn)))
    with warnings.catch_warnings(action="ignore"):
        fit(learn, cbs=[cb, watch, Callback(name="draws", after_pred=draw_all), *others])
    return learn, captured[0], everything(learn)


@in_turn(
    ("layer", "event"), [(Log, "after_loss"), (RootAtZero, "after_backward"), (CountsInSecret, "after_loss")]
)
@in_turn("precision", [None, "bf16"])
def test_the_training_is_to_the_bit_what_it_would_be_had_it_ended_there_in_another_way(
    layer, event, precision
):
    others = [] if precision is None else [MixedPrecision(precision)]
    torch.manual_seed(0)
    batch = 6 if layer is CountsInSecret else 4
    learn, at_end, after = run_of_many(NanTrace(), layer(), others)
    assert learn.nan_trace.report.batch == batch
    assert learn.nan_trace.report.repeated == (layer is not CountsInSecret)
    others = [] if precision is None else [MixedPrecision(precision)]
    _, expected_at_end, expected = run_of_many(EndsAt(event, batch), layer(), others)
    for key, value in expected.items():
        assert alike(after[key], value), key
        assert alike(at_end[key], expected_at_end[key]), key
    assert learn.model.n == batch + 1


def test_a_fit_without_alarm_is_to_the_bit_what_it_is_without():
    def run(cbs):
        random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
        return everything(fit(make_learner(5, 2, cbs, model=Many(nn.Tanh())), 2))

    with_it, without = run([NanTrace()]), run([])
    assert all(alike(with_it[key], without[key]) for key in without)


def test_buffers_and_what_the_learner_has_are_the_same_objects():
    kept = {}

    def keep(cb):
        model = cb.learn.model
        kept.update(model=model, pred=cb.pred, xb=cb.learn.xb, **dict(model.named_buffers()))

    learn = traced(Many(Log()), [Callback(after_pred=keep)], n_train=8)
    assert learn.nan_trace.report.where == "layer"
    assert kept["model"] is learn.model
    for name, x in learn.model.named_buffers():
        assert x is kept[name]


def test_other_callbacks_do_not_see_the_replay():
    calls = []
    looks = HookCallback(hook=lambda m, i, o: calls.append(1), name="looks")
    backs = HookCallback(hook=lambda m, i, o: calls.append(1), is_forward=False, name="backs")
    for layer, n in ((Log, 2), (RootAtZero, 4)):
        calls.clear()
        stats = ActivationStats()
        report = report_of(third(layer()), [looks, backs, stats])
        assert (report.where, len(calls)) == ("2", n)
        assert not any("#" in name for name in stats.names)


def test_a_hook_that_changes_outputs_is_part_of_the_replay():
    model = third(nn.ReLU())
    model[2].register_forward_hook(lambda m, i, o: o / 0)
    assert report_of(model).where == "2"


def test_gradients_wait_for_a_parameter_hook_only_in_the_training():
    model, calls = third(RootAtZero()), []
    model[3].weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    assert report_of(model).direction == "backward"
    assert len(calls) == 1


# ---- beside others


@in_turn("at_hand", [True, False])
@in_turn("other", [TerminateOnNaN, None])
def test_the_loss_is_looked_at_with_the_gradients_where_a_look_costs(at_hand, other, monkeypatch):
    monkeypatch.setattr(nan_trace, "_is_at_hand", lambda x: at_hand)
    log = []
    after = Callback(after_backward=lambda cb: log.append("after_backward"))
    report = report_of(third(Log()), [after, *([other()] if other else [])])
    assert (report.where, report.noticed) == ("2", "loss is nan")
    assert len(log) == (0 if at_hand or other else 1)


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_callback_that_leaves_out_bad_batches_does_not_hide_them(at_hand, monkeypatch):
    monkeypatch.setattr(nan_trace, "_is_at_hand", lambda x: at_hand)

    def skip(cb):
        if not cb.loss.isfinite():
            raise CancelBatchException

    assert report_of(third(Log()), [Callback(after_loss=skip)]).where == "2"


def test_it_ends_the_fit_before_the_weights_are_touched_and_warns_in_one_line():
    learn = make_learner(3, 1, model=third(Log()), cbs=NanTrace())
    before = weights(learn.model)
    with pytest.warns(
        UserWarning, match="^loss is nan at epoch 0, batch 0: made in the forward of layer 2 "
    ) as caught:
        fit(learn, 3)
    assert len(caught) == 1
    assert str(caught[0].message).startswith(
        "loss is nan at epoch 0, batch 0: made in the forward of layer 2 (Log) by"
    )
    assert same(weights(learn.model), before)
    assert learn.epoch == 0


def test_outside_a_fit_the_step_of_the_batch_is_left_out():
    learn = make_learner(3, 0, model=third(Log()), cbs=NanTrace())
    before = weights(learn.model)
    with pytest.warns(UserWarning, match="loss is nan at batch 0|loss is nan at epoch 0, batch 0"):
        learn.one_batch()
    assert same(weights(learn.model), before)
    assert learn.nan_trace.report.where == "2"


def test_it_does_not_take_part_in_lr_find():
    learn = make_learner(5, 0, model=third(nn.ReLU()), cbs=NanTrace())
    with learn.no_logging():
        learn.lr_find(start_lr=1e-3, end_lr=1e30, num_it=30, stop_div=False)
    assert learn.nan_trace.report is None


def test_the_next_fit_begins_with_no_report():
    learn = traced(third(Log()))
    cb = learn.nan_trace
    learn.model[2] = nn.ReLU()
    fit(learn, cbs=cb)
    assert cb.report is None


def test_its_report_can_be_copied():
    report = report_of(third(Log()))
    for copied in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert str(copied) == str(report)  # NaN, of which there is some in it, equals nothing


def test_nothing_of_the_training_is_kept_after_an_alarm():
    import gc
    import weakref

    learn = traced(third(RootAtZero()))
    cb, model = learn.nan_trace, weakref.ref(learn.model)
    del learn
    gc.collect()
    assert model() is None
    assert cb.report is not None


@in_turn(
    ("arguments", "error", "says"),
    [
        ({"bundle": 3}, TypeError, "bundle must be .*got 3"),
        ({"last": 0}, ValueError, "last must be a whole number"),
        ({"last": "5"}, TypeError, "last must be a whole number of .*, got .5."),
        ({"last": True}, TypeError, "last must be a whole number of .*, got True"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        NanTrace(**arguments)


# ---- the report and the bundle


def test_only_the_last_calls_are_reported_with_their_numbers():
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in range(30)]
    learn = make_learner(1, 0, model=nn.Sequential(*layers, Log(), nn.Linear(2, 1)))
    with warnings.catch_warnings(action="ignore"):
        fit(learn, cbs=NanTrace())
        calls = learn.nan_trace.report.calls
        fit(learn, cbs=(few := NanTrace(last=2, name="few")))
    assert [call.name for call in calls] == [str(k) for k in range(10, 31)]
    assert [call.name for call in few.report.calls] == ["29", "30"]
    x = make_batches(1)[0][0]
    for layer in layers:
        x = layer(x)
    last = calls[-2]
    assert (last.type, last.nonfinite) == ("Linear", "")
    assert (last.low, last.high) == pytest.approx((x.min().item(), x.max().item()))
    assert last.zeros == (x == 0).float().mean()
    assert (calls[-1].nans, calls[-1].nonfinite) == (8, "8 NaN")


@pytest.mark.parametrize("layer", [Log, RootAtZero, CountsInSecret])
def test_the_report_fits_a_terminal_of_80_columns(layer, capsys):
    report = report_of(third(layer()), n_train=5)
    with Console(width=80) as console, console.capture() as capture:
        console.print(report)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(capture.get().split())
    assert report.noticed in text
    assert str(report).splitlines()[0].startswith("noticed")
    assert report.where in str(report)


@pytest.mark.parametrize("layer", [Log, RootAtZero, DoublesItself])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_bundle_reproduces_it_elsewhere(layer, precision, tmp_path):
    path, seen = tmp_path / "runs" / "nan.pt", []
    torch.manual_seed(1)
    learn = make_learner(10, 0, model=Many(layer()))
    others = [] if precision is None else [MixedPrecision(precision)]
    with warnings.catch_warnings(action="ignore"):
        preds = Callback(after_pred=lambda cb: seen.append(cb.pred.detach()))
        fit(learn, cbs=[NanTrace(bundle=path), preds, *others])
    report = learn.nan_trace.report
    assert (report.bundle, report.batch >= 4) == (str(path), True)

    bundle = torch.load(path, weights_only=True)
    model = Many(layer())
    model.load_state_dict(bundle["model"])
    for name, x in bundle["buffers"].items():
        model.get_buffer(name).copy_(x)
    for name, mode in bundle["modes"].items():
        model.get_submodule(name).training = mode
    set_random_state(bundle["random"])
    ((device, enabled, dtype),) = bundle["autocast"]
    with torch.autocast(device, dtype, enabled=enabled):
        pred = model(*bundle["xb"])
        loss = F.mse_loss(pred, *bundle["yb"])
    assert torch.equal(pred.nan_to_num(7), seen[-1].nan_to_num(7))
    if layer is RootAtZero:
        loss.backward()
        assert not model.fc.weight.grad.isfinite().all()
    else:
        assert not loss.isfinite()
    assert bundle["report"]["where"] == "layer"
    assert bundle["random"]["loaders"] == []


def test_a_bundle_of_odd_batches_is_plain_too(tmp_path):
    @dataclass
    class Nested:
        x: torch.Tensor
        labels: list

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = third(Log())

        def forward(self, nested, extra):
            return self.body(nested.x)

    data = [((Nested(x, [1, "a"]), {1, 2}, y)) for x, y in make_batches(2)]
    learn = Learner(data, Takes(), F.mse_loss, n_inp=2)
    with warnings.catch_warnings(action="ignore"):
        fit(learn, cbs=NanTrace(bundle=tmp_path / "b.pt"))
    xb = torch.load(tmp_path / "b.pt", weights_only=True)["xb"]
    assert torch.equal(xb[0]["x"], data[0][0].x)
    assert (xb[0]["labels"], xb[1]) == ([1, "a"], "{1, 2}")


def test_a_bundle_that_cannot_be_written_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="path of a file to write, got the folder"):
        fit(make_learner(cbs=NanTrace(bundle=tmp_path)))


def test_without_an_alarm_no_bundle_is_written(tmp_path):
    fit(make_learner(cbs=NanTrace(bundle=tmp_path / "b.pt")))
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_the_model_changes_in_place_is_mentioned():
    class Spoils(nn.Module):
        def forward(self, x):
            x[0] = math.nan
            return x

    report = report_of(nn.Sequential(Spoils(), third(nn.ReLU())))
    assert any("changes the batch in place" in note for note in report.notes)


def test_after_one_batch_nothing_of_the_model_is_kept():
    learn = make_learner(cbs=(cb := NanTrace()), model=Many(nn.Tanh()))
    learn.one_batch()
    assert cb._start is None
    assert cb._starts.buffers.places == []


@in_turn("n_drawn", [0, 1, 2, 3, 700])
@in_turn("draw", [numpy.random.rand, numpy.random.randn], ids=["rand", "randn"])
def test_the_state_of_numpy_is_that_of_each_batch(n_drawn, draw):
    starts, learn = BatchStarts(), make_learner()
    for _ in range(5):
        expected, noted = random_state()["numpy"], starts.note(learn).random_state()["numpy"]
        key, noted_key = expected["state"].pop("key"), noted["state"]["key"]
        assert noted_key.tolist() == key.tolist()
        assert noted | {"state": {"pos": noted["state"]["pos"]}} == expected
        for _ in range(n_drawn):
            draw()


def test_another_generator_of_numpy_is_followed_too():
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        starts, learn = BatchStarts(), make_learner()
        assert starts.note(learn).random["numpy"]["bit_generator"] == "PCG64"
    finally:
        numpy.random.set_bit_generator(before)
