"""A watch finds the loss by itself, where the backward begins."""

import gc
import multiprocessing
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Callback, Diagnose, GradientHealth, Recorder, watch
from hookcb.core.torch_private import raw_saved
from hookcb.diagnosis.measurements.loss_graph import read_loss
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.loops.loss_finder import LossFinder
from tests.support import in_turn, make_batches, make_model, same, weights

BATCHES = make_batches(4)
X, Y = BATCHES[0]


def plain(loss, **others):
    loss.backward()


def of_a_list(loss, **others):
    torch.autograd.backward([loss])


def of_one_element(loss, **others):
    loss.reshape(1, 1).backward()


def weighted_as_a_whole(loss, **others):
    loss.backward(torch.tensor(0.5))


def kept_graph(loss, **others):
    loss.backward(retain_graph=True)


def of_chosen_parameters(loss, model, **others):
    loss.backward(inputs=[*model.parameters()])


def by_grad(loss, model, **others):
    params = [*model.parameters()]
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g


def trained(backward, w=None, model=None):
    """The losses of a loop, as it has them itself."""
    model = make_model() if model is None else model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watch(model, opt, Recorder) as w:
        for x, y in BATCHES:
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            backward(loss, model=model)
            opt.step()
            opt.zero_grad()
    return losses, w


@in_turn(
    "backward",
    [plain, of_a_list, of_one_element, weighted_as_a_whole, kept_graph, of_chosen_parameters, by_grad],
)
def test_the_loss_is_what_backward_is_called_on(backward):
    losses, w = trained(backward)
    assert w.recorder.losses == losses
    assert w.facts.n_losses_found == 4
    assert "4 losses found when backward was called on them" in w.coverage.notes
    assert "after_loss" not in w.coverage.missing


def test_of_several_losses_it_is_the_sum():
    model = make_model()
    with watch(model, Recorder) as w:
        out = model(X)
        a, b = out.square().mean(), out.abs().mean()
        torch.autograd.backward([a, b])
        assert w.loss_node is None  # not kept
    assert w.recorder.losses == [(a + b).item()]


def test_of_an_accumulated_loss_it_is_the_share_that_goes_back():
    model, losses = make_model(), []
    with watch(model, Recorder) as w:
        for x, y in BATCHES:
            loss = F.mse_loss(model(x), y) / 3
            loss.backward()
            losses.append(loss.item())
    assert w.recorder.losses == losses


def train_scaled(model, opt, scaler, share=1):
    losses = []
    for x, y in BATCHES:
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        (scaler.scale(loss) if share == 1 else scaler.scale(loss) / share).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return losses


@pytest.mark.parametrize("given", [True, False])
def test_a_scaled_loss_is_recorded_as_it_was_before(given):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=1)
    with watch(model, opt, Recorder, scaler=scaler if given else None) as w:
        losses = train_scaled(model, opt, scaler)
    assert w.recorder.losses == losses
    assert w.facts.n_losses_unfound == 0
    assert w.scaler is scaler


class OwnScaler(torch.amp.GradScaler):
    """A GradScaler with a scale() of its own, which has other arguments."""

    def scale(self, loss, weight=1.0):
        return super().scale(loss) * weight


@in_turn(
    ("kind", "scale", "share"),
    [
        (OwnScaler, lambda scaler, loss: scaler.scale(loss, 1.0), 1),
        (OwnScaler, lambda scaler, loss: scaler.scale(loss=loss), 1),
        (torch.amp.GradScaler, lambda scaler, loss: scaler.scale(loss) / 4, 0.25),
        (torch.amp.GradScaler, lambda scaler, loss: scaler.scale(loss).div_(4), 0.25),
        (torch.amp.GradScaler, lambda scaler, loss: scaler.scale(loss) + scaler.scale(loss), 2),
        (torch.amp.GradScaler, lambda scaler, loss: scaler.scale(loss.expand(3)).mean(), 1),
    ],
)
def test_a_loss_is_known_that_is_scaled_in_the_way_of_the_loop(kind, scale, share):
    scaler = kind("cpu", init_scale=2.0**13)

    def backward(loss, model):
        scale(scaler, loss).backward()
        model.zero_grad()  # of gradients that are scaled

    losses, w = trained(backward)
    assert w.recorder.losses == pytest.approx([share * loss for loss in losses])
    assert not w.facts.failure
    assert w.scaler is scaler


def test_a_loss_that_is_scaled_for_another_net_is_not_that_of_this_one():
    other, scaler = make_model(), torch.amp.GradScaler("cpu")

    def backward(loss, **others):
        scaled = scaler.scale(other(X).square().mean())
        loss.backward()
        scaled.backward()

    losses, w = trained(backward)
    assert w.recorder.losses == losses
    assert w.scaler is None


def of_batched_gradients(loss, model, **others):
    losses, params = [loss, loss.sqrt()], [*model.parameters()]
    gradients = torch.autograd.grad(losses, params, [torch.ones(3)] * 2, is_grads_batched=True)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.mean(0)


def of_a_complex_number(loss, **others):
    (loss * (1 + 0j)).backward(torch.tensor(1 + 0j))


@pytest.mark.parametrize("backward", [of_batched_gradients, of_a_complex_number])
def test_what_is_no_single_real_number_is_no_loss(backward):
    w = trained(backward)[1]
    assert (w.recorder.losses, w.facts.n_losses_unfound) == ([], 4)


def test_a_scaler_that_was_in_use_before_the_watch_is_known_by_its_next_loss():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    train_scaled(model, opt, scaler)
    with watch(model, opt, Recorder) as w:
        losses = train_scaled(model, opt, scaler)
    assert w.recorder.losses == losses
    assert w.facts.n_losses_unfound == 0
    assert w.scaler is scaler


def test_gradients_of_a_share_of_a_scaled_loss_are_read_unscaled():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    with watch(model, opt, GradientHealth) as w:
        train_scaled(model, opt, scaler, share=4)
    assert 0 < max(w.gradient_health.step_series("total_norm")) < 100


def own_kind_of_scaler():
    """A class that scales in a way of its own, as ShardedGradScaler does."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale

    return type("Own", (torch.amp.GradScaler,), {"scale": scale})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scaler_of_a_class_of_its_own_is_known_wherever_it_was_made(when):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = own_kind_of_scaler() if when == "before" else None
    with watch(model, opt, Recorder) as w:
        kind = kind or own_kind_of_scaler()
        scaler = kind("cpu", init_scale=2.0**13)
        losses = train_scaled(model, opt, scaler)
    assert w.recorder.losses == losses
    assert w.scaler is scaler
    assert not hasattr(kind.scale, "call_hooks")


def test_of_weighted_losses_it_is_the_weighted_sum():
    model = make_model()
    with watch(model, Recorder) as w:
        out = model(X)
        a, b = out.square().mean(), out.abs().mean()
        torch.autograd.backward([a, b], [torch.tensor(0.5), torch.tensor(3.0)])
    assert w.recorder.losses == pytest.approx([(0.5 * a + 3 * b).item()])


def test_a_backward_for_other_gradients_only_is_no_loss_and_torch_is_left_as_it_was():
    before = torch.autograd._engine_run_backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.__init__
    first, second = make_model(), make_model()
    w1 = watch(first, Recorder)
    w2 = watch(second, Recorder)
    from torch.autograd import grad

    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    grads = grad(F.mse_loss(first(X), Y), [*first.parameters()])
    w1.close()
    F.mse_loss(second(X), Y).backward()
    w2.close()
    assert len(grads) == 4
    assert (len(w1.recorder.losses), len(w2.recorder.losses)) == (1, 1)
    now = torch.autograd._engine_run_backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.__init__
    assert all(x is y for x, y in zip(now, before, strict=True))


def test_a_scaler_of_another_loop_is_not_that_of_a_loop_without_one():
    model, losses = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with watch(model, opt, Recorder) as w:
        for x, y in BATCHES:
            loss = 0.25 * F.mse_loss(model(x), y)
            losses.append(loss.item())
            loss.backward()
            opt.step()
    assert w.scaler is None
    assert w.recorder.losses == losses


def test_losses_in_the_closure_of_lbfgs_are_those_of_each_evaluation():
    model, losses = make_model(), []
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with watch(model, opt, Recorder) as w:
        for x, y in BATCHES:

            def closure(x=x, y=y):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                losses.append(loss.item())
                return loss

            opt.step(closure)
    assert w.recorder.losses == losses


@in_turn("reentrant", [True, False])
@in_turn("whole", [True, False])
def test_a_checkpointed_model_has_the_loss_of_the_outer_backward(reentrant, whole):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            h = checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant)
            return checkpoint(self.last, h, use_reentrant=reentrant) if whole else self.last(h)

    losses, w = trained(plain, model=Checkpointed())
    assert w.recorder.losses == losses


@pytest.mark.slow
def test_a_compiled_model_has_its_loss():
    losses, w = trained(plain, model=torch.compile(make_model(), backend="aot_eager"))
    assert w.recorder.losses == losses


def test_a_model_that_returns_its_loss_has_it():
    class Whole(nn.Sequential):
        def forward(self, x):
            return {"loss": super().forward(x).square().mean()}

    model, losses = Whole(nn.Linear(2, 1)), []
    with watch(model, Recorder) as w:
        for x, _ in BATCHES:
            loss = model(x)["loss"]
            losses.append(loss.item())
            loss.backward()
    assert w.recorder.losses == losses


def test_gradients_of_something_else_are_no_loss():
    model = make_model()
    with watch(model, Recorder) as w:
        out = model(X)
        out.backward(torch.ones_like(out))
        x = X.clone().requires_grad_()
        torch.autograd.grad(F.mse_loss(model(x), Y), x)
    assert w.recorder.losses == []
    assert w.facts.n_losses_unfound == 2
    assert "report it with w.report_loss(loss)" in w.coverage.missing["after_loss"]


def test_a_loss_that_is_told_is_not_found_too():
    model = make_model()
    with watch(model, Recorder) as w:
        loss = F.mse_loss(model(X), Y)
        told = w.report_loss(loss + 1)
        loss.backward()
    assert w.recorder.losses == [told.item()]
    assert (w.facts.n_losses_reported, w.facts.n_losses_found) == (1, 0)
    assert "1 losses reported" in w.coverage.notes


def test_each_net_of_a_gan_has_losses_of_its_own():
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    opt_g, opt_d = (torch.optim.Adam(net.parameters()) for net in (g, d))
    of_g, of_d = [], []
    with watch(g, opt_g, Recorder) as watch_g, watch(d, opt_d, Recorder) as watch_d:
        for x, _ in BATCHES:
            fake = g(x)
            loss_d = d(x).mean() - d(fake.detach()).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            loss_g = d(fake).square().mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            of_g.append(loss_g.item())
            of_d.append(loss_d.item())
    assert watch_g.recorder.losses == of_g
    assert watch_d.recorder.losses == of_d
    assert watch_d.facts.n_losses_of_others == 4


def test_a_recurrent_state_with_its_graph_is_the_models_own():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNNCell(2, 3), nn.Linear(3, 1)

        def forward(self, x, h):
            h = self.cell(x, h)
            return self.head(h), h

    model = Step()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), Recorder) as w:
        h, outs = torch.zeros(len(X), 3), []
        for _ in range(3):
            out, h = model(X, h)
            outs.append(out)
        loss = torch.cat(outs).square().mean()
        loss.backward()
    assert w.recorder.losses == [loss.item()]


def test_a_gradient_that_comes_in_a_thread_of_autograd_finds_the_loss_of_the_calling_one():
    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            look = threading.Thread(target=lambda: found.append(finder.running.loss()))
            look.start()
            look.join()
            return grad

    found, failures = [], []
    finder = LossFinder(failures.append)
    loss = Elsewhere.apply(torch.ones(3, requires_grad=True)).sum()
    loss.backward()
    assert [x.value.item() for x in found] == [3.0]
    assert finder.running is None
    assert failures == []
    finder.remove()


class Token:
    """Lives as long as the node of a graph."""


def test_the_graph_of_the_loss_is_not_kept():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()
    try:
        with watch(model, opt, Recorder, Diagnose(show=False)) as w:
            for x, y in BATCHES:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                token = loss.grad_fn.metadata["token"] = Token()
                gone = weakref.ref(loss), weakref.ref(token)  # a node has no references of this kind
                opt.step()
                del loss, token
                assert [of() for of in gone] == [None, None]
            assert w.loss is None
    finally:
        gc.enable()


def test_events_are_in_the_order_of_the_contract():
    model, log = make_model(), []
    events = ["after_pred", "after_loss", "before_backward", "after_backward"]
    notes = {event: lambda cb, event=event: log.append((event, cb.learn.loss)) for event in events}
    with watch(model, Callback(**notes)):
        loss = F.mse_loss(model(X), Y)
        loss.backward()
    assert [event for event, _ in log] == events
    assert log[0][1] is None
    assert all(x.equal(loss.detach()) and x.grad_fn is None for _, x in log[1:])


LOSSES = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y),
    "weighted": lambda out, y: F.cross_entropy(out, y, weight=torch.ones(3)),
    "a sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "of probabilities": lambda out, y: F.cross_entropy(out.softmax(1), y),
    "nll": lambda out, y: F.nll_loss(out.sigmoid(), y),
    "mse": lambda out, y: F.mse_loss(out[:, 0], y.float()),
    "binary": lambda out, y: F.binary_cross_entropy_with_logits(
        out[:, 0], y.clamp(max=1).float(), pos_weight=torch.ones(1)
    ),
    "by each sample": lambda out, y: (F.cross_entropy(out, y, reduction="none") * torch.ones(6)).mean(),
    "of two": lambda out, y: F.cross_entropy(out, y) + out.square().mean(),
    "other": lambda out, y: out.logsumexp(1).mean(),
}


@in_turn("kind", LOSSES)
def test_a_graph_is_read_in_its_backward_as_before_it(kind):
    out = nn.Linear(2, 3)(torch.randn(6, 2))
    loss = LOSSES[kind](out, torch.arange(6) % 3)
    before, found = read_loss(loss.grad_fn), []
    out.register_hook(lambda grad: found.append(read_loss(loss.grad_fn)))
    loss.backward()
    before = before._replace(class_weights=None)  # freed with the graph
    if kind == "by each sample":  # whether these weights are negative is not known any more
        before = before._replace(scale=found[0].scale)
    assert repr(found) == repr([before])


def test_of_a_freed_graph_a_factor_is_not_known():
    out = nn.Linear(2, 3)(torch.randn(6, 2))
    loss, found = F.cross_entropy(out, torch.arange(6) % 3) / 4, []
    assert read_loss(loss.grad_fn).scale == 0.25
    out.register_hook(lambda grad: found.append(read_loss(loss.grad_fn)))
    loss.backward()
    assert found[0].is_pure
    assert found[0].kind == "cross-entropy"
    assert found[0].scale != found[0].scale


def test_labels_and_factors_of_a_freed_graph_are_known_until_the_backward_ends():
    out, y = nn.Linear(2, 3)(torch.randn(6, 2)), torch.arange(6) % 3
    loss, found = F.cross_entropy(out, y, weight=torch.ones(3)) * 1024 / 4, []
    terms = lambda: found.append(main_term(read_terms(loss.grad_fn)))  # noqa: E731
    out.register_hook(lambda grad: terms())
    finder = LossFinder(found.append)
    loss.backward()
    finder.remove()
    terms()
    during, after = found
    assert (during.target is y, during.scale, during.class_weights is not None) == (True, 256, True)
    assert (after.target, after.scale == after.scale) == (None, False)


@in_turn("is_told", [False, True])
def test_a_checkpointed_loss_is_computed_as_often_as_without_us(is_told):
    if not hasattr(raw_saved(torch.ones(1, requires_grad=True).exp().grad_fn)[0], "unpack_hook"):
        pytest.skip("torch before 2.8 does not tell of hooks on saved tensors")
    model, n = make_model(), []

    def loss_of(x, y):
        n.append(1)
        return F.mse_loss(model(x), y)

    with watch(model, Diagnose(show=False)) as w:
        for x, y in BATCHES:
            loss = checkpoint(loss_of, x, y, use_reentrant=False) / 2
            if is_told:
                w.report_loss(loss)
            loss.backward()
    assert len(n) == 2 * len(BATCHES)


def classify(head, told, watched=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), *head)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(100, 16, 8, generator=torch.Generator().manual_seed(1))
    w = watch(net, opt, Diagnose(show=False, budget=1.0)) if watched else None
    for x in data:
        loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
        if told:
            w.report_loss(loss)
        loss.backward()
        opt.step()
        opt.zero_grad()
    if w is not None:
        w.close()
    return net, w


@pytest.mark.parametrize(("head", "code"), [((), None), ((nn.Softmax(1),), "head.activation")])
def test_checks_of_a_loss_that_is_found_are_those_of_one_that_is_told(head, code):
    with pytest.warns(UserWarning, match=code) if code else nullcontext():
        (found_net, found), (told_net, told) = (classify(head, is_told) for is_told in (False, True))
    plain_net, _ = classify(head, told=False, watched=False)
    assert same(weights(found_net), weights(plain_net))
    assert same(weights(told_net), weights(plain_net))
    found, told = found.diagnose(), told.diagnose()
    assert found.status == told.status
    assert (found.primary and found.primary.code) == (told.primary and told.primary.code) == code
    gaps = [[text for text in v.coverage if text.startswith("not checked: loss")] for v in (found, told)]
    assert gaps == [[], []]  # the targets of a loss that is found are recovered from its gradient


def test_the_loss_is_found_in_a_forked_process():
    fork = multiprocessing.get_context("fork")
    seen = fork.SimpleQueue()

    def train():
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        model = make_model()
        with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), Callback()) as w:
            for x, y in BATCHES:
                F.mse_loss(model(x), y).backward()
                w.opt.step()
        seen.put(w.coverage.seen["after_loss"])

    child = fork.Process(target=train)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert seen.get() == len(BATCHES)
