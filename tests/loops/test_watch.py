"""Which events a watch makes of loops that people write."""

import copy
import io
import pickle
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import hookcb
from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelFitException,
    EarlyStopping,
    GradientHealth,
    HookCallback,
    MemoryStats,
    Progress,
    Recorder,
    StepTimer,
    TerminateOnNaN,
    count_hooks,
    watch,
)
from tests.core.support import group_of_one
from tests.support import (
    CANCELS,
    EVENTS,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    skip_unless_compiled_in_place,
    weights,
)

# what the letters of a sequence stand for, so that one fits on a line
SHORT = {
    "before_epoch": "E(",
    "after_epoch": ")E",
    "before_train": "T(",
    "after_train": ")T",
    "before_validate": "V(",
    "after_validate": ")V",
    "before_batch": "(",
    "after_batch": ")",
    "after_pred": "p",
    "after_loss": "l",
    "before_backward": "b",
    "after_backward": "B",
    "before_step": "s",
    "after_step": "S",
    "after_cancel_step": "x",
    "before_fit": "F(",
    "after_fit": ")F",
}
X, Y = make_batches(1)[0]


def probe(log, name="probe"):
    def noting(event):
        return lambda cb: log.append(SHORT.get(event, event))

    return Callback(name=name, **{event: noting(event) for event in EVENTS})


def seen(loop, model=None, opt=None, **kwargs):
    """The events that `loop(w, model, opt)` makes of a training, without those around all."""
    model = make_model() if model is None else model
    opt = torch.optim.SGD(model.parameters(), lr=0.1) if opt is None else opt
    log = []
    with watch(model, opt, probe(log), **kwargs) as w:
        loop(w, model, opt)
    assert log[0] == "F("
    assert log[-1] == ")F"
    assert not w.fitting
    return "".join(log[1:-1])


def step(model, opt, x=X, y=Y, w=None):
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if w is not None:
        w.report_loss(loss)
    loss.backward()
    opt.step()


TRAINED = "(plbBsS)"


# ---- plain loops


def test_a_plain_loop():
    assert seen(lambda w, m, o: [step(m, o) for _ in range(2)]) == f"E(T({TRAINED}{TRAINED})T)E"


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_parts_that_are_torchscript_are_passed_over():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.jit.script(nn.Linear(2, 4))
            self.others = nn.ModuleList([torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1)])

        def forward(self, x):
            return self.others[1](self.others[0](self.first(x)))

    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, ActivationStats()) as w:
        for x, y in make_batches(2):
            step(model, opt, x, y)
    assert list(w.activation_stats.names) == ["others.1"]


def test_a_batch_ends_at_its_only_step():
    log = []
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, probe(log)) as w:
        step(model, opt)
        assert log[-2:] == ["S", ")"]
        assert w.train_iter == 1
        assert not w.has_batch


def test_losses_that_are_told():
    def loop(w, model, opt):
        step(model, opt, w=w)
        assert w.report_loss(X.sum()) is not None

    assert seen(loop) == "E(T((plbBsS))T)E"


def test_epochs_that_are_told():
    def loop(w, model, opt):
        for epoch in range(2):
            assert w.epoch == epoch
            step(model, opt)
            step(model, opt)
            assert w.iter == 1
            w.end_epoch()

    assert seen(loop) == f"E(T({TRAINED}{TRAINED})T)E" * 2


def test_an_epoch_of_nothing_is_no_error():
    assert seen(lambda w, m, o: w.end_epoch()) == ""


def evaluate(model, x=X, grad=False):
    model.eval()
    with torch.set_grad_enabled(grad):
        model(x)
        model(x)
    model.train()


def test_validation_between():
    def loop(w, model, opt):
        for _ in range(2):
            step(model, opt)
            evaluate(model)
            w.end_epoch()

    assert seen(loop) == f"E(T({TRAINED})TV((p)(p))V)E" * 2


def test_validation_without_epochs_told():
    def loop(w, model, opt):
        for _ in range(2):
            step(model, opt)
            evaluate(model)

    assert seen(loop) == f"E(T({TRAINED})TV((p)(p))VT({TRAINED})TV((p)(p))V)E"


def test_validation_losses_are_told_too():
    def loop(w, model, opt):
        step(model, opt)
        model.eval()
        with torch.no_grad():
            w.report_loss(F.mse_loss(model(X), Y))

    assert seen(loop) == f"E(T({TRAINED})TV((pl))V)E"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_validation_in_train_mode_is_left_out(mode):
    def loop(w, model, opt):
        step(model, opt)
        with mode():
            w.report_loss(F.mse_loss(model(X), Y))
            model(X)
        step(model, opt)
        assert w.facts.n_without_grad == 2
        assert w.facts.n_losses_outside == 1
        assert "2 calls in train mode without gradients, ignored" in w.coverage.notes

    assert seen(loop) == f"E(T({TRAINED}{TRAINED})T)E"


def test_what_is_left_out_is_in_no_record():
    model = make_model()
    with watch(model, ActivationStats(on_valid=True)) as w:
        out = model(X)
        with torch.no_grad():
            model(X[:2])
        out.mean().backward()
        evaluate(model)
        with torch.no_grad():
            model(X[:2])
    assert w.activation_stats.names == ["0", "2"]
    assert len(w.activation_stats.stats) == 1
    assert len(w.activation_stats.valid_stats) == 2
    assert w.facts.n_without_grad == 2


def test_validation_in_eval_mode_with_gradients_on():
    def loop(w, model, opt):
        for _ in range(2):
            step(model, opt)
            evaluate(model, grad=True)

    assert seen(loop) == f"E(T({TRAINED})TV((p)(p))VT({TRAINED})TV((p)(p))V)E"


def test_training_in_eval_mode_is_known_from_the_first_step_on():
    def loop(w, model, opt):
        model.eval()
        step(model, opt)
        step(model, opt)
        with torch.no_grad():
            model(X)
        assert "batches in eval mode with gradients count as training, as a step followed" in w.coverage.notes

    assert seen(loop) == f"E(V((p))VT((sS){TRAINED})TV((p))V)E"


# ---- several calls, backwards and steps


def test_accumulation():
    def loop(w, model, opt):
        for i in range(4):
            F.mse_loss(model(X), Y).backward()
            if i % 2:
                opt.step()
                opt.zero_grad()

    assert seen(loop) == f"E(T((plbB){TRAINED}(plbB){TRAINED})T)E"


def test_two_views_are_one_batch():
    def loop(w, model, opt):
        (model(X) - model(X + 1)).square().mean().backward()
        opt.step()

    assert seen(loop) == "E(T((pplbBsS))T)E"


def test_two_backwards_of_one_forward():
    def loop(w, model, opt):
        out = model(X)
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        opt.step()

    assert seen(loop) == f"E(T({TRAINED})T)E"


def test_two_losses_told_of_one_forward():
    def loop(w, model, opt):
        out = model(X)
        w.report_loss(out.square().mean()).backward(retain_graph=True)
        w.report_loss(out.abs().mean()).backward()
        opt.step()

    assert seen(loop) == "E(T((plbBlsS))T)E"


def test_autograd_grad_in_place_of_backward():
    def loop(w, model, opt):
        loss = F.mse_loss(model(X), Y)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            p.grad = g
        opt.step()

    assert seen(loop) == f"E(T({TRAINED})T)E"


def test_a_gradient_penalty_is_part_of_the_loss():
    def loop(w, model, opt):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(X).mean() + g.norm()).backward()
        opt.step()
        assert any("create_graph" in note for note in w.coverage.notes)

    assert seen(loop) == "E(T((pplbBsS))T)E"


def test_a_backward_that_is_a_penalty_only_has_a_reason():
    def loop(w, model, opt):
        # torch warns of create_graph=True in backward, for memory
        with warnings.catch_warnings(action="ignore"):
            model(X).mean().backward(create_graph=True)
        opt.step()
        opt.zero_grad()
        assert "create_graph" in w.coverage.missing["before_backward"]

    assert seen(loop) == "E(T((psS))T)E"


def test_manual_updates_without_an_optimizer():
    model, log = make_model(), []
    with watch(model, probe(log)) as w:
        for _ in range(2):
            F.mse_loss(model(X), Y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    # the first was seen only when it was over
    assert "".join(log) == "F(E(T((plbB)(plbBsS))T)E)F"
    assert "weights moved 2 times without a step of a watched optimizer" in str(w.coverage)


def test_a_batch_that_is_skipped_before_its_backward_goes_into_the_next():
    def loop(w, model, opt):
        model(X)
        step(model, opt)

    assert seen(loop) == "E(T((pplbBsS))T)E"


@in_turn("grad", [False, True])
@in_turn("where", ["before the backward", "before the step"])
def test_a_call_in_eval_mode_in_the_middle_of_a_batch_is_left_out(where, grad):
    def loop(w, model, opt):
        for _ in range(2):
            loss = model(X).mean()
            if where == "before the backward":
                evaluate(model, grad=grad)
            loss.backward()
            if where == "before the step":
                evaluate(model, grad=grad)
            opt.step()
            evaluate(model, grad=grad)
            w.end_epoch()
        notes = w.coverage.notes
        assert "4 calls in eval mode in the middle of a training batch, ignored" in notes
        assert not any("count as training" in note or "cut short" in note for note in notes)

    assert seen(loop) == f"E(T({TRAINED})TV((p)(p))V)E" * 2


def test_coverage_says_that_calls_in_eval_mode_were_no_validation():
    def loop(w, model, opt):
        loss = model(X).mean()
        evaluate(model)
        loss.backward()
        why = "the model was not called in eval mode except in the middle of a training batch"
        assert w.coverage.missing["before_validate"] == why

    seen(loop)


def test_a_training_in_eval_mode_gives_no_warning_of_layers_that_were_not_called(recwarn):
    model = make_model().eval()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, ActivationStats) as w:
        for _ in range(3):
            step(model, opt)
    assert len(w.activation_stats.stats) == 2  # the first call was taken for a validation
    assert not recwarn.list


def test_calls_before_and_after_one_in_eval_mode_are_one_batch_once_they_had_one_backward():
    def loop(w, model, opt):
        for _ in range(3):
            out = model(X)
            evaluate(model)  # makes labels for the other call
            (out - model(X + 1)).square().mean().backward()
            opt.step()
        assert w.facts.n_cut == 0

    both = "(pplbBsS)"
    assert seen(loop) == f"E(T((p){TRAINED}{both}{both})T)E"


def test_a_forward_without_a_backward_before_a_validation_is_known_after_the_first():
    def loop(w, model, opt):
        for _ in range(3):
            step(model, opt)
            model(X)  # the accuracy in training, without no_grad
            evaluate(model)
        assert w.facts.n_eval_inside == 2
        assert w.facts.n_cut == 2

    cut = "(p))TV((p)(p))VT("
    assert seen(loop) == f"E(T({TRAINED}(p){TRAINED}{cut}{TRAINED}(p))TV((p)(p))V)E"


def test_a_validation_while_gradients_accumulate_is_seen():
    def loop(w, model, opt):
        for _ in range(3):
            F.mse_loss(model(X), Y).backward()
        evaluate(model)
        F.mse_loss(model(X), Y).backward()
        opt.step()

    assert seen(loop) == f"E(T((plbB)(plbB)(plbB))TV((p)(p))VT({TRAINED})T)E"


def test_a_step_after_a_validation_is_no_training_in_eval_mode():
    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, probe(log)) as w:  # the optimizer is known from its first step on
        for _ in range(3):
            F.mse_loss(model(X), Y).backward()
            evaluate(model, grad=True)
            opt.step()
        assert not w.facts.eval_trains
        assert "1 steps without a training call of the model before them" in w.coverage.notes
    assert "".join(log) == f"F(E(T((plbB))TV((p)(p))VT((sS){TRAINED}{TRAINED})T)E)F"


# ---- optimizers


def test_optimizer_none_finds_it():
    model, log = make_model(), []
    opt, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(make_model(1).parameters())
    with watch(model, probe(log)) as w:
        step(model, opt)
        for p in other.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        other.step()
        step(model, opt)
        assert w.opt is opt
    assert "".join(log) == f"F(E(T({TRAINED}{TRAINED})T)E)F"


def test_optimizer_none_finds_several_and_counts_no_batch_twice():
    model, log = make_model(), []
    opts = [torch.optim.SGD(model[i].parameters()) for i in (0, 2)]
    with watch(model, probe(log)) as w:
        for _ in range(2):
            F.mse_loss(model(X), Y).backward()
            for opt in opts:
                opt.step()
        assert (
            "2 optimizers; a batch ends when all have stepped, or when the next one begins"
            in w.coverage.notes
        )
    assert "".join(log) == "F(E(T((plbBsSsS)(plbBsSsS))T)E)F"


def test_optimizer_none_finds_one_that_gets_parameters_later():
    model, log = make_model(), []
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with watch(model, probe(log)):
        opt.step()
        opt.add_param_group({"params": [*model.parameters()]})
        step(model, opt)
    assert "".join(log) == f"F(E(T({TRAINED})T)E)F"


def test_steps_of_an_optimizer_that_was_not_given_are_nobodys():
    model = make_model()
    opts = [torch.optim.SGD(model[i].parameters()) for i in (0, 2)]

    def loop(w, model, opt):
        F.mse_loss(model(X), Y).backward()
        opts[1].step()
        opts[0].step()

    assert seen(loop, model, opts[0]) == f"E(T({TRAINED})T)E"


def test_several_optimizers_of_one_model():
    model = make_model()
    opts = [torch.optim.SGD(model[0].parameters()), torch.optim.Adam(model[2].parameters())]

    def loop(w, model, _):
        for _ in range(2):
            F.mse_loss(model(X), Y).backward()
            for opt in opts:
                opt.step()
            assert not w.has_batch

    assert seen(loop, model, opts) == "E(T((plbBsSsS)(plbBsSsS))T)E"


def test_one_of_several_optimizers_steps_more_often():
    model = make_model()
    opts = [torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[2].parameters())]

    def loop(w, model, _):
        for i in range(3):
            F.mse_loss(model(X), Y).backward()
            opts[0].step()
            if i == 2:
                opts[1].step()

    assert seen(loop, model, opts) == "E(T((plbBsS)(plbBsS)(plbBsSsS))T)E"


def gan(n=2):
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    opts = {"g": torch.optim.Adam(g.parameters()), "d": torch.optim.Adam(d.parameters())}

    def loop():
        for _ in range(n):
            fake = g(X)
            opts["d"].zero_grad()
            (d(X).mean() - d(fake.detach()).mean()).backward()
            opts["d"].step()
            opts["g"].zero_grad()
            d(fake).mean().backward()
            opts["g"].step()

    return g, d, opts, loop


def test_a_gan_with_a_watch_on_each_net():
    g, d, opts, loop = gan()
    of_g, of_d = [], []
    with watch(g, opts["g"], probe(of_g)), watch(d, opts["d"], probe(of_d)):
        loop()
    assert "".join(of_g) == f"F(E(T({TRAINED}{TRAINED})T)E)F"
    # when the generator is trained, gradients come through the discriminator too
    # whose loss is not the discriminator's
    assert "".join(of_d) == "F(E(T((pplbBsS)(pbB)(pplbBsS)(pbB))T)E)F"


def test_a_gan_in_a_container_with_two_optimizers():
    g, d, opts, loop = gan()
    log, both = [], nn.ModuleDict({"g": g, "d": d})
    with watch(both, opts.values(), probe(log)) as w:
        loop()
    assert "".join(log) == "F(E(T((ppplbBsS)(plbBsS)(ppplbBsS)(plbBsS))T)E)F"
    assert "8 calls of parts of the model, which had not been called as a whole" in w.coverage.notes


def test_a_gan_through_its_own_forward():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.d = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x, part):
            return getattr(self, part)(x)

    net, log = Both(), []
    opts = [torch.optim.Adam(net.g.parameters()), torch.optim.Adam(net.d.parameters())]
    with watch(net, opts, probe(log)):
        for _ in range(2):
            (net(X, "d").mean() - net(net(X, "g").detach(), part="d").mean()).backward()
            opts[1].step()
            net(net(X, "g"), "d").mean().backward()
            opts[0].step()
    once = "(ppplbBsS)(pplbBsS)"
    assert "".join(log) == f"F(E(T({once}{once})T)E)F"


def closure_of(model, opt):
    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        return loss

    return closure


@in_turn("kind", [torch.optim.SGD, torch.optim.Adam])
@in_turn("by_name", [False, True])
def test_a_closure_is_one_batch_a_step(kind, by_name):
    model = make_model()

    def loop(w, model, opt):
        for _ in range(2):
            closure = closure_of(model, opt)
            loss = opt.step(closure=closure) if by_name else opt.step(closure)
            assert loss > 0

    assert seen(loop, model, kind(model.parameters(), lr=0.1)) == f"E(T({TRAINED}{TRAINED})T)E"


def test_each_evaluation_of_lbfgs_is_a_batch():
    model = make_model()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loop(w, model, opt):
        for _ in range(2):
            opt.step(closure_of(model, opt))
        assert "closure" in w.coverage.missing["before_step"]

    found = seen(loop, model, opt)
    assert found.replace("(plbB)", "e") == "E(T(eeeeee)T)E"


def test_a_watch_that_begins_in_a_step_of_lbfgs_follows_it():
    """As that of a script whose model is called for the first time in the closure."""
    model = make_model()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
    watches = []

    def closure():
        watches[:] = watches or [watch(model, None, Recorder)]
        return closure_of(model, opt)()

    opt.step(closure)
    with watches[0] as w:
        pass
    assert len(w.recorder.losses) == 4
    assert "closure" in w.coverage.missing["before_step"]


def test_two_optimizers_with_closures_make_two_batches():
    model = make_model()
    opts = [torch.optim.LBFGS(model[i].parameters(), max_iter=1) for i in (0, 2)]
    found = seen(lambda w, m, o: [opt.step(closure_of(model, opt)) for opt in opts], model, opts)
    assert found == "E(T((plbB)(plbB))T)E"


def test_a_watch_of_a_model_that_nobody_keeps_says_so():
    with pytest.raises(RuntimeError, match="keep a reference"), watch(nn.ModuleDict({"0": nn.Linear(2, 2)})):
        pass
    assert not _global_optimizer_pre_hooks


def test_a_closure_that_raises_spoils_nothing():
    def loop(w, model, opt):
        def fails():
            model(X)
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            opt.step(fails)
        step(model, opt)
        step(model, opt)

    assert seen(loop) == f"E(T((pplbBsS){TRAINED})T)E"


def test_an_optimizer_around_another_makes_one_step():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            self.inner.step()

    model, log = make_model(), []
    opt = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with watch(model, probe(log)):
        step(model, opt)
        step(model, opt)
    assert "".join(log) == f"F(E(T({TRAINED}{TRAINED})T)E)F"


def test_a_step_that_raises_spoils_nothing():
    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise OSError("disk full")
            return super().step(closure)

    model = make_model()
    opt = Fails(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        with pytest.raises(OSError, match="disk full"):
            step(model, opt)
        opt.fails = False
        step(model, opt)

    assert seen(loop, model, opt) == f"E(T({TRAINED}{TRAINED})T)E"


def test_schedulers_do_not_matter():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)

    def loop(w, model, opt):
        for _ in range(2):
            step(model, opt)
            scheduler.step()

    assert seen(loop, model, opt) == f"E(T({TRAINED}{TRAINED})T)E"


# ---- GradScaler


def scaled(model, opt, scaler, factors=(1.0, float("inf"), 1.0)):
    for factor in factors:
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(X), Y) * factor).backward()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("given", [False, True])
def test_a_scaler_skips_a_step(given):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found = seen(lambda w, m, o: scaled(m, o, scaler), scaler=scaler if given else None)
    assert found == f"E(T({TRAINED}(plbB){TRAINED})T)E"


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]


@in_turn("kind", FUSED)
@in_turn("given", [False, True])
def test_gradients_of_fused_optimizers_are_read_unscaled(kind, given):
    norms = []
    for fused in (False, True):
        model = make_model()
        opt = kind(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with watch(model, opt, GradientHealth(), scaler=scaler if given else None) as w:
            scaled(model, opt, scaler, (1.0, 1.0))
        norms.append([row["norm"] for record in w.gradient_health.stats for row in record])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert len(norms[0]) == 8


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_that_skips_its_step_is_known(kind):
    model = make_model()
    opt = kind(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watch(model, opt, GradientHealth(), scaler=scaler) as w:
        scaled(model, opt, scaler)
    assert w.gradient_health.skipped == 1


def test_what_is_no_scaler_is_refused():
    model = make_model()
    with pytest.raises(TypeError, match="GradScaler"):
        watch(model, scaler=8.0)
    assert count_hooks(model) == 0


# ---- how models are called and what they return


class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


def test_a_model_whose_parts_only_are_called():
    model = Encodes()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        for _ in range(2):
            model.head(model.encoder(X)).mean().backward()
            opt.step()
        assert "4 calls of parts of the model, which had not been called as a whole" in w.coverage.notes

    assert seen(loop, model, opt) == "E(T((pplbBsS)(pplbBsS))T)E"


def test_a_loss_begins_the_batch_where_parts_only_are_called():
    model = Encodes()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        for _ in range(2):
            for _ in range(2):
                w.report_loss(model.head(model.encoder(X)).mean()).backward()
            opt.step()
        with torch.no_grad():
            w.report_loss(model.head(model.encoder(X)).mean())

    assert seen(loop, model, opt) == "E(T((pplbB)(pplbBsS)(pplbB)(pplbBsS))TV((l))V)E"


def test_a_loss_told_after_the_step_is_left_out():
    def loop(w, model, opt):
        loss = model(X).mean()
        loss.backward()
        opt.step()
        w.report_loss(loss)
        assert "1 losses reported when no batch was open or without a graph, ignored" in w.coverage.notes

    assert seen(loop) == f"E(T({TRAINED})T)E"


def test_what_is_no_loss_is_refused_where_it_is_reported():
    def loop(w, model, opt):
        model(X)
        with pytest.raises(TypeError, match=r"loss must be a tensor, got 3\.0"):
            w.report_loss(3.0)
        for several in (torch.ones(3), torch.ones(3, requires_grad=True)):
            with pytest.raises(ValueError, match=r"the loss has shape \(3,\), not one element; reduce it"):
                w.report_loss(several)

    seen(loop)


def test_a_model_that_calls_itself():
    class Recursive(nn.Linear):
        def forward(self, x, depth=2):
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    model = Recursive(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        for _ in range(2):
            model(X).mean().backward()
            opt.step()

    assert seen(loop, model, opt) == f"E(T({TRAINED}{TRAINED})T)E"


def test_a_forward_that_fails_spoils_nothing():
    def loop(w, model, opt):
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 7))
        step(model, opt)

    assert seen(loop) == "E(T((plbBsS))T)E"


def test_a_forward_that_is_interrupted_spoils_nothing():
    class Interrupted(nn.Sequential):
        stop = True

        def forward(self, x):
            if self.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model.stop = False
        step(model, opt)
        step(model, opt)

    assert seen(loop, model, opt) == f"E(T({TRAINED}{TRAINED})T)E"


def test_an_aside_that_is_interrupted_spoils_nothing():
    class Interrupted(nn.Sequential):
        stop = False

        def forward(self, x):
            if self.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        step(model, opt)
        model.stop = True
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(X)
        model.stop = False
        step(model, opt)

    assert seen(loop, model, opt) == f"E(T({TRAINED}{TRAINED})T)E"


def test_a_backward_that_fails_spoils_nothing():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise OSError("disk full")

    model = nn.Sequential(make_model())
    model.forward = lambda x: model[0](Fails.apply(x) if x.requires_grad else x)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        with pytest.raises(OSError, match="disk full"):
            model(X.clone().requires_grad_()).mean().backward()
        step(model, opt)

    assert seen(loop, model, opt) == f"E(T((plb){TRAINED})T)E"


def test_functional_call():
    def loop(w, model, opt):
        params = {name: p * 1.0 for name, p in model.named_parameters()}
        torch.func.functional_call(model, params, (X,)).mean().backward()
        opt.step()

    assert seen(loop) == f"E(T({TRAINED})T)E"


def test_transforms_of_torch_func():
    def loop(w, model, opt):
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params, x, y):
            return w.report_loss(F.mse_loss(torch.func.functional_call(model, params, (x,)), y))

        grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, X, Y)
        for name, p in model.named_parameters():
            p.grad = grads[name].mean(0)
        for x in (w.x, w.pred, w.loss):  # else it would be of no use when the transform is over
            assert not torch._C._functorch.is_functorch_wrapped_tensor(x)
        opt.step()

    assert seen(loop) == "E(T((plsS))T)E"


def test_gradients_of_a_functional_call_are_those_of_the_models_parameters():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(params):
        return F.mse_loss(torch.func.functional_call(model, params, (X,)), Y)

    with watch(model, opt, GradientHealth, hookcb.Diagnose(show=False)) as w:
        for _ in range(6):
            grads = torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})
            for name, p in model.named_parameters():
                p.grad = grads[name]
            opt.step()
            norm = grads["0.weight"].norm().item()
            assert w.gradient_health.stats[-1]["0.weight"]["norm"] == pytest.approx(norm)
    assert "param.unreachable" not in [finding.code for finding in w.diagnose().findings]


def test_a_callback_writes_to_its_own_tensor_inside_a_transform_of_torch_func():
    model, n_seen = make_model(), torch.zeros(())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(params):
        return F.mse_loss(torch.func.functional_call(model, params, (X,)), Y)

    with watch(model, opt, hookcb.Callback(after_pred=lambda cb: n_seen.add_(1))):
        torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})
    assert n_seen == 1


def test_a_diagnosis_beside_transforms_of_torch_func_is_whole():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(params, x, y):
        return F.mse_loss(torch.func.functional_call(model, params, (x[None],)), y[None])

    cbs = [hookcb.Diagnose(show=False), hookcb.ActivationStats(), hookcb.GradientHealth()]
    with watch(model, opt, cbs=cbs) as w:
        for _ in range(4):
            F.mse_loss(model(X), Y).backward()
            opt.step()
            opt.zero_grad()
            params = {name: p.detach() for name, p in model.named_parameters()}
            torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, X, Y)
    assert not [note for note in w.diagnose().coverage if "failed" in note]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_model_traced_in_a_watched_loop_contains_nothing_of_the_hooks():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def traced():
        return [node.kind() for node in torch.jit.trace(model, X).inlined_graph.nodes()]

    before = traced()
    with watch(model, opt, cbs=[hookcb.ActivationStats(), hookcb.Diagnose(show=False)]) as w:
        F.mse_loss(model(X), Y).backward()
        opt.step()
        assert traced() == before
    assert (w.seen["before_batch"], w.facts.n_elsewhere) == (1, 0)


@dataclass
class Out:
    logits: torch.Tensor
    more: object = None


class Plain:
    def __init__(self, x):
        self.x = x


RETURNS = {
    "dict": (lambda x: {"a": {"b": x}}, lambda o: o["a"]["b"], "plbB"),
    "tuple": (lambda x: (None, [x, 3]), lambda o: o[1][0], "plbB"),
    "dataclass": (Out, lambda o: o.logits, "plbB"),
    "an object": (Plain, lambda o: o.x, "p"),
}


@in_turn("kind", RETURNS)
def test_models_return_many_things(kind):
    make, get, expected = RETURNS[kind]

    class Returns(nn.Sequential):
        def forward(self, x):
            return make(super().forward(x))

    model = Returns(nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        get(model(X)).mean().backward()
        opt.step()
        if "b" not in expected:
            assert "w.report_loss(loss)" in w.coverage.missing["before_backward"]

    assert seen(loop, model, opt) == f"E(T(({expected}sS))T)E"


def test_a_model_that_returns_none():
    class Keeps(nn.Sequential):
        def forward(self, x):
            self.out = super().forward(x)

    model = Keeps(nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        model(X)
        w.report_loss(model.out.mean()).backward()
        opt.step()

    assert seen(loop, model, opt) == "E(T((plbBsS))T)E"


def test_a_model_that_returns_its_input():
    class Identity(nn.Sequential):
        def forward(self, x):
            super().forward(x)
            return x

    model, before = Identity(nn.Linear(2, 1)), nn.Linear(2, 2)
    opt = torch.optim.SGD([*before.parameters(), *model.parameters()], lr=0.1)

    def loop(w, model, opt):
        model(X)  # no graph leads there
        model(X.clone().requires_grad_())
        model(before(X)).mean().backward()
        opt.step()

    assert seen(loop, model, opt) == "E(T((ppplbBsS))T)E"


def test_outputs_without_gradients():
    class Argmax(nn.Sequential):
        def forward(self, x):
            return super().forward(x).argmax(1)

    model = Argmax(nn.Linear(2, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        model(X)
        model(X)

    assert seen(loop, model, opt) == "E(T((pp))T)E"


def test_keyword_inputs():
    class Named(nn.Linear):
        def forward(self, *, x):
            return super().forward(x)

    model = Named(2, 1)
    got = []
    cb = Callback(before_batch=lambda cb: got.append(cb.xb))
    with watch(model, cb):
        model(x=X)
    assert got[0] == {"x": X}


def test_a_watch_holds_no_graph_after_the_backward():
    model = make_model()
    with watch(model, Callback()) as w:
        model(X).mean().backward()
        assert w.pred is None
        assert w.xb == ()


# ---- checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_under_activation_checkpointing(reentrant):
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), make_model()

        def forward(self, x):
            return checkpoint(self.b, self.a(x), use_reentrant=reentrant)

    model = Saves()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    assert seen(lambda w, m, o: [step(m, o), step(m, o)], model, opt) == f"E(T({TRAINED}{TRAINED})T)E"


@pytest.mark.parametrize("returns", ["tensor", "object"])
def test_the_whole_model_under_checkpointing(returns):
    class Returns(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if returns == "tensor" else Plain(super().forward(x))

    model = Returns(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        for _ in range(2):
            out = checkpoint(model, X, use_reentrant=False)
            (out if returns == "tensor" else out.x).mean().backward()
            opt.step()

    once = TRAINED if returns == "tensor" else "(psS)"
    assert seen(loop, model, opt) == f"E(T({once}{once})T)E"


def test_the_whole_model_under_reentrant_checkpointing():
    def loop(w, model, opt):
        for _ in range(2):
            checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).mean().backward()
            opt.step()

    assert seen(loop) == f"E(T({TRAINED}{TRAINED})T)E"


def test_the_whole_model_under_reentrant_checkpointing_with_its_loss():
    def loop(w, model, opt):
        for _ in range(2):
            w.report_loss(checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).mean()).backward()
            opt.step()

    assert seen(loop) == "E(T((lbBsS)(lbBsS))T)E"


# ---- torch.compile


@pytest.fixture
def graphs():
    """A backend that lists the graphs it compiles; each break and each recompilation makes one more."""
    torch._dynamo.reset()
    found = []

    def backend(gm, inputs):
        found.append(gm)
        return gm.forward

    yield found, backend
    torch._dynamo.reset()


def test_a_compiled_model(graphs):
    found, backend = graphs
    model = torch.compile(make_model(), backend=backend)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    assert seen(lambda w, m, o: [step(m, o) for _ in range(3)], model, opt) == f"E(T({TRAINED * 3})T)E"
    assert len(found) == 1
    step(model, opt)
    assert len(found) == 1


def test_a_model_compiled_in_place(graphs):
    found, backend = graphs
    model = make_model()
    model.compile(backend=backend)
    compiled = model._compiled_call_impl
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, opt)
    assert seen(lambda w, m, o: [step(m, o) for _ in range(3)], model, opt) == f"E(T({TRAINED * 3})T)E"
    assert model._compiled_call_impl is compiled
    assert len(found) <= 2  # hooks that come and go are guarded by torch itself


def test_a_model_compiled_in_place_after_it_is_watched(graphs):
    skip_unless_compiled_in_place()
    found, backend = graphs
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        model.compile(backend=backend)
        for _ in range(3):
            step(model, opt)

    # the first call is seen by its step, in torch 2.15 by its backward too, and compiled with the hooks anew
    graphs_of = {f"E(T(({first}){TRAINED * 2})T)E": n for first, n in (("sS", 1), ("lbBsS", 2))}
    events = seen(loop, model, opt)
    assert len(found) == graphs_of[events]
    assert type(model._compiled_call_impl).__module__ != "hookcb.hooks.compiled"


def test_a_wrapper_that_was_made_after_is_seen_by_its_backwards_and_coverage_says_so(graphs):
    found, backend = graphs
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(w, model, opt):
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            step(compiled, opt)
        assert "torch.compile" in w.coverage.missing["after_pred"]

    assert seen(loop, model, opt) == "E(T((lbBsS)(lbBsS)(lbBsS))T)E"
    assert len(found) == 1


STEPS = {
    "backward": lambda loss, params, scaler: loss.backward(),
    "scaled": lambda loss, params, scaler: scaler.scale(loss).backward(),
    "autograd.backward": lambda loss, params, scaler: torch.autograd.backward(loss),
    "autograd.grad": lambda loss, params, scaler: set_grads(params, torch.autograd.grad(loss, params)),
}


def set_grads(params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
@in_turn("kind", STEPS)
def test_a_step_that_is_compiled_is_followed_and_compiled_as_it_is_alone(kind):
    def trained(cbs):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make_model()
        opt, params = torch.optim.SGD(model.parameters(), lr=0.1), [*model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        @torch.compile(backend="eager")
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            STEPS[kind](loss, params, scaler)
            return loss.detach()

        losses = []
        with nullcontext() if cbs is None else watch(model, opt, cbs) as w:
            for x, y in make_batches(4):
                losses.append(step(x, y).item())
                if kind == "scaled":
                    scaler.step(opt)
                    scaler.update()
                else:
                    opt.step()
                opt.zero_grad()
        counters = torch._dynamo.utils.counters
        n_graphs, n_breaks = counters["stats"]["unique_graphs"], counters["graph_break"].total()
        return w, losses, weights(model), (n_graphs, n_breaks)

    w, losses, state, counts = trained([Recorder, GradientHealth])
    _, alone, state_alone, counts_alone = trained(None)
    assert w.recorder.losses == losses == alone
    assert same(state, state_alone)
    if (kind, counts_alone) == ("autograd.grad", (0, 1)):  # torch 2.15 alone then compiles nothing of it
        counts_alone = 1, 1
    assert counts == counts_alone
    assert len(w.gradient_health.stats) == 4
    assert "its caller is compiled" in w.coverage.missing["after_pred"]


def test_compiled_by_aot_eager():
    torch._dynamo.reset()
    model = torch.compile(make_model(), backend="aot_eager")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    assert seen(lambda w, m, o: [step(m, o) for _ in range(2)], model, opt) == f"E(T({TRAINED * 2})T)E"
    torch._dynamo.reset()


def test_watches_of_a_model_compiled_in_place_may_end_in_any_order(graphs):
    _, backend = graphs
    model = make_model()
    model.compile(backend=backend)
    compiled = model._compiled_call_impl
    logs = [], []
    first, second = (watch(model, probe(log)) for log in logs)
    model(X)
    first.close()
    model(X)
    second.close()
    assert model._compiled_call_impl is compiled
    assert ["".join(log) for log in logs] == ["F(E(T((p))T)E)F", "F(E(T((pp))T)E)F"]


# ---- other processes and threads


def test_distributed_data_parallel():
    with group_of_one():
        model = nn.parallel.DistributedDataParallel(make_model())

        def twice(state, bucket):  # what the ranks have come to: there only when DDP has finished
            fut = torch.futures.Future()
            fut.set_result(bucket.buffer() * 2)
            return fut

        model.register_comm_hook(None, twice)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        log, grads = [], []
        reader = Callback(after_backward=lambda cb: grads.append(model.module[0].weight.grad.clone()))
        with watch(model, opt, probe(log), reader, ActivationStats()) as w:
            step(model, opt)
            whole = model.module[0].weight.grad.clone()
        assert "".join(log) == f"F(E(T({TRAINED})T)E)F"
        assert torch.equal(grads[0], whole)
        assert w.activation_stats.names == ["0", "2"]


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_calls_and_steps_in_other_threads_are_left_out_and_counted():
    other = make_model(1)
    other_opt = torch.optim.SGD(other.parameters())

    def loop(w, model, opt):
        in_thread(lambda: step(other, other_opt))
        assert w.facts.n_elsewhere == 0
        in_thread(lambda: step(model, opt))
        step(model, opt)
        assert any("other threads" in note for note in w.coverage.notes)

    assert seen(loop) == f"E(T({TRAINED})T)E"


def test_a_model_that_is_called_in_another_thread_only():
    model = make_model()
    with watch(model) as w:
        in_thread(lambda: model(X))
        assert "other threads" in w.coverage.missing["before_batch"]


def test_layers_called_in_other_threads_are_not_recorded():
    model = make_model()
    with watch(model, ActivationStats(), HookCallback(hook=lambda m, i, o: o.shape, name="shapes")) as w:
        out = model(X)
        in_thread(lambda: model(torch.zeros(7, 2)))
        out.mean().backward()
    assert w.activation_stats.names == ["0", "2"]
    assert list(w.shapes.results.values()) == [(4, 3), (4, 1)]


def test_a_watch_made_in_a_thread_follows_it():
    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        with watch(model, opt, probe(log)):
            step(model, opt)

    in_thread(run)
    assert "".join(log) == f"F(E(T({TRAINED})T)E)F"


# ---- several watches, learners, copies


def test_nested_watches_of_one_model():
    model, outer, inner = make_model(), [], []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, probe(outer), ActivationStats()) as a:
        step(model, opt)
        with watch(model, opt, probe(inner), ActivationStats()) as b:
            step(model, opt)
        step(model, opt)
    assert "".join(outer) == f"F(E(T({TRAINED * 3})T)E)F"
    assert "".join(inner) == f"F(E(T({TRAINED})T)E)F"
    assert len(a.activation_stats.stats) == 3
    assert list(b.activation_stats.stats[0]) == list(a.activation_stats.stats[1])


def test_a_watch_on_a_part_and_one_on_the_whole():
    model = Encodes()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    whole, part = [], []
    with (
        watch(model, opt, probe(whole), GradientHealth()) as a,
        watch(model.encoder, probe(part), GradientHealth()) as b,
    ):
        step(model, opt)
        step(model, opt)
    assert "".join(whole) == "".join(part) == f"F(E(T({TRAINED * 2})T)E)F"
    of_part = a.gradient_health.stats[1]["encoder.weight"]
    assert b.gradient_health.stats[1]["weight"] == of_part


def test_a_learner_fits_a_watched_model():
    learn, log = make_learner(), []
    with watch(learn.model, probe(log)), learn.no_logging():
        learn.fit(1, cbs=ActivationStats())
    assert "".join(log) == f"F(E(T({TRAINED * 3})TV((p)(p))V)E)F"
    assert len(learn.activation_stats.stats) == 3


def test_copies_of_a_watched_model_are_inert():
    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, probe(log), ActivationStats(), GradientHealth(activations=True)):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copies.append(torch.load(buffer, weights_only=False))
        for copied in copies:
            step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
        copy.deepcopy(opt)
    assert log == ["F(", ")F"]
    for copied in copies:
        assert same(weights(copied), weights(copies[0]))


def test_a_watch_itself_is_not_copied():
    model = make_model()
    with watch(model) as w, pytest.raises(TypeError, match="pickle its callbacks"):
        pickle.dumps(w)


# ---- callbacks that stand in the way


@in_turn("event", [e for e in EVENTS if e in SHORT and "cancel" not in e and "_fit" not in e])
def test_an_error_of_a_callback_reaches_the_loop_and_ends_the_watch(event):
    def fails(cb):
        raise OSError("disk full")

    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = watch(model, opt, probe(log), Callback(name="failing", **{event: fails}), ActivationStats())

    def loop():
        step(model, opt, w=w)
        evaluate(model)
        w.end_epoch()

    with pytest.raises(OSError, match="disk full") as caught:
        loop()
    assert f"in Callback('failing').{event}" in caught.value.__notes__[0]
    n = len(log)
    if event.endswith("backward"):  # whose end puts back what a callback would take off in it
        step(model, opt)
    assert not w.fitting
    assert count_hooks(model) == 0
    step(model, opt)
    assert log.count(")F") == 1
    assert log[-1] == ")F"
    assert len(log) <= n + 1


@pytest.mark.parametrize("event", ["before_backward", "after_backward"])
def test_an_error_in_a_backward_ends_the_with_block(event):
    def fails(cb):
        raise OSError("disk full")

    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    failing = Callback(name="failing", **{event: fails})
    with (
        pytest.raises(OSError, match="disk full"),
        watch(model, opt, probe(log), failing, MemoryStats(every=1)),
    ):
        step(model, opt)
    assert log[-1] == ")F"
    assert count_hooks(model) == 0


@in_turn("level", CANCELS)
@in_turn("event", ["before_epoch", "before_batch", "after_pred", "after_backward", "after_step"])
def test_cancels_are_ignored_with_one_warning_a_kind(level, event):
    def cancels(cb):
        raise CANCELS[level]

    model, log = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, opt, Callback(name="cancels", **{event: cancels}), probe(log)) as w:
            for _ in range(2):
                opt.zero_grad()
                out = model(X)
                out.mean().backward()
                opt.step()
    assert w.stop_requested == (level == "fit")
    assert "".join(log) == f"F(E(T({TRAINED * 2})T)E)F"
    assert len(caught) == 1
    assert f"Callback('cancels').{event} requested the end of the {level}" in str(caught[0].message)


def test_a_cancelled_fit_before_it_begins_is_asked_for():
    def cancels(cb):
        raise CancelFitException

    with pytest.warns(UserWarning, match="requested the end of the fit"):
        w = watch(make_model(), Callback(before_fit=cancels))
    assert w.stop_requested
    w.close()


def test_a_cancel_outside_its_level_is_named():
    def cancels(cb):
        raise CancelBatchException

    model = make_model()
    with pytest.raises(RuntimeError, match="outside its level"):
        watch(model, Callback(before_fit=cancels))
    assert count_hooks(model) == 0


def test_terminate_on_nan_asks_to_stop():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, TerminateOnNaN) as w:
        step(model, opt, w=w)
        assert not w.stop_requested
        with pytest.warns(UserWarning, match="loss is nan|requested the end") as caught:
            step(model, opt, y=Y * torch.nan, w=w)
    assert len(caught) == 2  # its own, and that it is ignored
    assert w.stop_requested
    assert w.terminate_on_nan.reason == "loss is nan at epoch 0, batch 1"


@pytest.mark.parametrize("monitor", ["train_loss", "valid_loss"])
def test_early_stopping_asks_to_stop(monitor):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)

    def epoch(w):
        step(model, opt, w=w)
        model.eval()
        with torch.no_grad():
            w.report_loss(F.mse_loss(model(X), Y))
        model.train()
        w.end_epoch()

    with watch(model, opt, Recorder(), EarlyStopping(monitor, patience=2)) as w:
        epoch(w)
        epoch(w)
        assert not w.stop_requested
        with pytest.warns(UserWarning, match="look at .stop_requested"):
            epoch(w)
        assert w.stop_requested
        assert w.early_stopping.best_epoch == 0


def test_gradient_health_skips_a_step():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with watch(model, opt, GradientHealth(on_nonfinite="skip")) as w:
        step(model, opt)
        before = weights(model)
        step(model, opt, y=Y * torch.nan)
        assert same(weights(model), before)
        step(model, opt)
        assert not same(weights(model), before)
    assert w.gradient_health.skipped == 1
    assert len(w.gradient_health.stats) == 3
    assert w.gradient_health.stats[1]["0.weight"]["clipped_norm"] != 0


def test_gradient_health_raises_before_the_step():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)
    with (
        pytest.raises(FloatingPointError, match="epoch 0, batch 0"),
        watch(model, opt, GradientHealth(on_nonfinite="raise")),
    ):
        step(model, opt, y=Y * torch.nan)
    assert same(weights(model), before)
    assert count_hooks(model) == 0


REFUSED = {
    "MixedPrecision": ({}, "torch.autocast"),
    "GradientAccumulation": ({}, "every few batches"),
    "GradientClip": ({}, "clip_grad_norm_"),
    "Checkpoint": ({"folder": "x"}, "save model and optimizer"),
    "OneCycle": ({}, "torch scheduler"),
    "ReduceLROnPlateau": ({}, "torch scheduler"),
    "Compile": ({}, "before you watch"),
    "ChannelsLast": ({}, "channels_last"),
    "Freeze": ({"where": "0"}, "requires_grad"),
    "Metrics": ({"metrics": hookcb.accuracy}, "in your loop"),
    "Distributed": ({}, "before you watch"),
    "NanTrace": ({}, "DetectAnomaly"),
    "EMA": ({}, "validate=False"),
}


@in_turn("kind", REFUSED)
def test_callbacks_that_train_are_refused_before_anything_is_hooked(kind):
    kwargs, hint = REFUSED[kind]
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    cb = getattr(hookcb, kind)(**kwargs)
    with pytest.raises(TypeError, match=hint):
        watch(model, opt, ActivationStats(), cb)
    assert count_hooks(model) == 0
    assert "learn" not in cb.__dict__
    with watch(model, opt) as w, pytest.raises(TypeError, match=hint):
        w.add_cb(cb)


def test_ema_averages_the_weights_of_a_loop():
    learn = make_learner(n_valid=0, cbs=EMA(0.5))
    with learn.no_logging():
        learn.fit(1)
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, EMA(0.5, validate=False)) as w:
        for x, y in make_batches():
            step(model, opt, x, y)
        evaluate(model)
        step_of = weights(model)
    assert same(weights(w.ema.model), weights(learn.ema.model))
    assert same(step_of, weights(learn.model))
    with pytest.raises(TypeError, match="give the optimizer too"):
        watch(model, EMA(validate=False))


def test_progress_and_recorder_show_epochs_that_are_told(capsys):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Recorder, Progress) as w:
        for _ in range(2):
            step(model, opt, w=w)
            w.end_epoch()
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows == ["epoch", "0", "1"]
    assert [row["epoch"] for row in w.recorder.rows] == [0, 1]


def test_step_timer_times_the_steps_of_a_loop():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, StepTimer) as w:
        for _ in range(3):
            step(model, opt)
        w.end_epoch()
        step(model, opt)
    times = w.step_timer.times
    assert [row.epoch for row in times] == [0, 0, 0, 1]


def test_what_is_no_callback_is_refused_before_anything_is_hooked():
    model = make_model()
    stats = ActivationStats()
    for wrong, error in [
        ((3,), TypeError),
        ((stats, stats), ValueError),
        ((ActivationStats(), ActivationStats()), ValueError),
        ((HookCallback,), TypeError),
        ((ActivationStats(modules="nowhere"),), LookupError),
        ((Callback(name="coverage"),), ValueError),
        ((Callback(name="seen"),), ValueError),
        ((Callback(name="loss"),), ValueError),
    ]:
        with pytest.raises(error):
            watch(model, None, *wrong)
        assert count_hooks(model) == 0
        assert not _global_optimizer_pre_hooks
        assert not _global_optimizer_post_hooks


def test_two_of_a_kind_have_names_of_their_own():
    model = make_model()
    with watch(model, None, ActivationStats(), ActivationStats(modules="0", name="first")) as w:
        model(X)
    assert w.activation_stats.names == ["0", "2"]
    assert w.first.names == ["0"]


def test_a_callback_may_follow_a_second_loop_when_the_first_has_ended():
    stats, model = ActivationStats(), make_model()
    with watch(model, stats):
        model(X)
        with pytest.raises(ValueError, match="belongs to another"):
            watch(model, stats)
    with watch(model, stats) as w:
        model(X)
        model(X).mean().backward()
        model(X)
    assert w.activation_stats is stats
    assert len(stats.stats) == 2


@in_turn("wrong", [3, "sgd", [3], {"g": 3}, [ActivationStats(), 3], nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer"):
        watch(make_model(), wrong)


@in_turn("wrong", [3, nn.Linear, lambda x: x, "script"])
def test_what_is_no_module_is_refused(wrong):
    if wrong == "script":
        with warnings.catch_warnings(action="ignore"):
            wrong = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(TypeError):
        watch(wrong)
    assert not _global_optimizer_pre_hooks


def test_parameters_in_place_of_the_optimizer_and_a_trainer_in_place_of_the_model_are_told():
    class Trainer:
        """As those of Lightning and transformers are called."""

    class Mine(Trainer):
        pass

    model = make_model()
    for given in (model.parameters(), model.named_parameters()):
        with pytest.raises(TypeError, match=r"; give the optimizer itself, not model\.parameters\(\)"):
            watch(model, given)
    with pytest.raises(TypeError, match=r"got the Mine; for a Trainer use HookcbCallback\(Diagnose\(\)\)"):
        watch(Mine())
    assert count_hooks(model) == 0


def test_clipping_in_the_loop_is_seen_after_it():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, GradientHealth()) as w:
        F.mse_loss(model(X) * 100, Y).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    norm = sum(row["norm"] ** 2 for row in w.gradient_health.stats[0]) ** 0.5
    assert norm == pytest.approx(0.5, rel=1e-4)
    assert any("gradients of 1 step were written to" in note for note in w.coverage.notes)
    assert "at step 0, after clipping" in str(w.gradient_health.report())


def test_gradients_of_a_loop_that_clips_nothing_are_not_said_to_be_read_after_clipping():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, GradientHealth()) as w:
        for _ in range(3):
            F.mse_loss(model(X), Y).backward()
            F.mse_loss(model(X), Y).backward()
            opt.step()
            opt.zero_grad()
    assert w.facts.n_clipped == 0
    assert not any("clipping" in note for note in w.coverage.notes)
    assert "clipping" not in str(w.gradient_health.report())


def test_a_loop_may_tell_of_the_step_before_it_clips():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    with watch(model, opt, GradientHealth(), probe(log)) as w:
        for _ in range(2):
            opt.zero_grad()
            F.mse_loss(model(X) * 100, Y).backward()
            w.begin_step(opt)
            clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
    assert "".join(log) == f"F(E(T({TRAINED}{TRAINED})T)E)F"
    record = w.gradient_health.stats[1]
    assert sum(row["norm"] ** 2 for row in record) ** 0.5 > 1
    assert sum(row["clipped_norm"] ** 2 for row in record) ** 0.5 == pytest.approx(0.5, rel=1e-4)


def test_memory_of_a_loop():
    model = make_model()
    opt = torch.optim.Adam(model.parameters())
    with watch(model, opt, MemoryStats(every=1)) as w:
        for _ in range(3):
            step(model, opt)
    rows = {row.name: row for row in w.memory_stats.layers()}
    assert rows[""].calls == rows["0"].calls == 1
    assert rows[""].kept > 0
    assert w.memory_stats.coverage.n_batches == 3


def test_a_watch_without_callbacks_says_what_a_diagnosis_needs():
    model = make_model()
    with watch(model) as w, pytest.raises(RuntimeError, match=r"give watch a Diagnose\(\)"):
        w.diagnose()


def test_a_watch_without_callbacks_warns_once_when_training_begins(monkeypatch):
    def train(w, model):
        with w:
            for _ in range(2):
                model(X).mean().backward()
            w.end_epoch()
            model(X).mean().backward()

    model = make_model()
    with pytest.warns(UserWarning, match=r"records nothing; .*cbs=Diagnose\(\)\) gives a verdict") as told:
        train(watch(model), model)
    assert len(told) == 1
    train(watch(model).add_cb(Callback()), model)  # warnings are errors here
    monkeypatch.setenv("HOOKCB", "0")
    train(watch(model), model)
