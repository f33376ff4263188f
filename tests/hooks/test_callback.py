"""HookCallback in fits by Learner."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Callback, CancelBatchException, HookCallback
from hookcb.testing import assert_no_hooks, count_hooks
from tests.hooks import support as zoo
from tests.hooks.support import Gradients, Means, batches, fit, learner, numbers, three_layers
from tests.support import BATCH, each, in_turn


class Everywhere(Means):
    run_valid = True


def outputs_by_hand(model, n_train=3, n_epoch=1):
    """Outputs of a, b and c in each training batch, by plain PyTorch."""
    model = copy.deepcopy(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for _ in range(n_epoch):
        for x, y in batches(n_train):
            a = model.a(x)
            b = model.b(a.relu())
            c = model.c(b.relu())
            for t in (a, b, c):
                t.retain_grad()
            F.mse_loss(c, y).backward()
            rows.append({"a": (a.detach(), a.grad), "b": (b.detach(), b.grad), "c": (c.detach(), c.grad)})
            opt.step()
            opt.zero_grad()
    return rows


# ---- what it records


def test_results_are_those_of_the_last_training_batch_and_validation_is_left_alone():
    model = three_layers()
    rows = outputs_by_hand(model, n_epoch=2)
    cb = Means()
    fit(model, cb, n_epoch=2)
    assert list(cb.results) == ["a", "b", "c"]
    assert numbers(cb.results) == {k: o.mean().item() for k, (o, _) in rows[-1].items()}
    assert [s.item() for s in cb.hooks.stored] == [v.item() for v in cb.results.values()]
    assert [(e, i, name) for e, i, _, name in cb.log] == [
        (e, i, n) for e in range(2) for i in range(3) for n in "abc"
    ]
    assert all(training for _, _, training, _ in cb.log)
    assert_no_hooks(model)


def test_gradient_results_are_autograds_and_there_when_backward_has_ended():
    model = three_layers()
    rows = outputs_by_hand(model, n_epoch=2)
    seen = []
    cb = Gradients()
    watcher = Callback(after_backward=lambda w: seen.append(dict(cb.results)))
    fit(model, cb, watcher, n_epoch=2)
    assert len(seen) == len(rows) == 6
    for results, row in zip(seen, rows, strict=True):
        assert sorted(results) == ["a", "b", "c"]
        assert all(torch.equal(results[k][1][0], row[k][1]) for k in "abc")
    assert cb.results["a"][0] == (None,)
    assert_no_hooks(model)


def test_a_layer_called_with_keywords_is_seen_with_them():
    model = zoo.make("keyword_inputs")
    cb = HookCallback("takes", with_kwargs=True, hook=lambda m, i, k, o: (len(i), sorted(k)))
    back = HookCallback(
        "takes",
        is_forward=False,
        with_kwargs=True,
        hook=lambda m, gi, gk, go: (len(gi), sorted(gk)),
        name="back",
    )
    fit(model, cb, back)
    assert cb.results == {"takes": (0, ["a", "b"])}
    assert back.results == {"takes": (0, ["a", "b"])}


@in_turn("order", [-1000, 0, 1000])
@in_turn("every", [1, 2, 3, 100])
def test_every_acts_on_batches_0_n_2n_whatever_the_order(every, order):
    steps = []
    cb = HookCallback("a", every=every, hook=lambda m, i, o: steps.append(cb.train_iter))
    cb.order = order
    fit(three_layers(), cb, n_train=5, n_epoch=2)
    assert steps == list(range(0, 10, every))
    assert cb.coverage.n_batches == len(steps)
    assert cb.coverage.n_skipped == 10 - len(steps)


@pytest.mark.parametrize("order", [-1000, 1000])
def test_every_holds_for_gradients_too(order):
    steps = []
    cb = HookCallback("a", every=2, is_forward=False, hook=lambda m, gi, go: steps.append(cb.train_iter))
    cb.order = order
    fit(three_layers(), cb, n_train=5)
    assert steps == [0, 2, 4]


@pytest.mark.parametrize("order", [-1000, 1000])
def test_a_cancelled_batch_does_not_shift_every(order):
    def skip_first_epoch(cb):
        if cb.epoch == 0 and cb.iter == 0:
            raise CancelBatchException

    skipper = Callback(before_batch=skip_first_epoch)
    steps = []
    cb = HookCallback("a", every=2, hook=lambda m, i, o: steps.append((cb.epoch, cb.iter)))
    cb.order = order
    fit(three_layers(), skipper, cb, n_train=4, n_epoch=2)
    assert (1, 0) in steps
    assert (0, 1) not in steps
    assert (0, 2) in steps


def test_results_of_a_looked_at_batch_stay_until_the_next_one():
    model = three_layers()
    rows = outputs_by_hand(model, n_train=4)
    seen = []
    cb = Means(every=3)
    fit(
        model,
        cb,
        Callback(after_batch=lambda w: seen.append((w.training, cb.results["a"].item()))),
        n_train=4,
    )
    values = [rows[k]["a"][0].mean().item() for k in (0, 0, 0, 3)]
    assert [v for training, v in seen if training] == values
    assert [v for training, v in seen if not training] == [values[-1]] * 2


def test_run_valid_looks_at_validation_also():
    cb = Everywhere("a")
    fit(three_layers(), cb, n_epoch=2)
    assert [(e, i, t) for e, i, t, _ in cb.log] == [
        (e, i, t) for e in range(2) for t, n in ((True, 3), (False, 2)) for i in range(n)
    ]


def test_a_layer_in_eval_mode_is_seen_in_training():
    model = zoo.make("norm_and_dropout")

    class Frozen(Callback):
        def before_train(self):
            self.model[1].eval()

    cb = Means(nn.BatchNorm1d)
    fit(model, cb, Frozen())
    assert len(cb.log) == 3
    assert list(cb.results) == ["1"]


def test_a_validation_inside_the_training_disturbs_nothing():
    def results(*extra, event):
        forward, backward = Means(), Gradients()
        log = []
        note = Callback(
            after_batch=lambda w: w.training and log.append((dict(forward.results), dict(backward.results)))
        )
        inner = (
            [Callback(name="inner", **{event: lambda w: w.training and w.learn.validate()})] if extra else []
        )
        model = three_layers()
        learn = fit(model, forward, backward, *inner, note)
        return log, [p.detach() for p in learn.model.parameters()], forward.log

    for event in BATCH:
        nested, plain = results(1, event=event), results(event=event)
        assert zoo.alike(nested[0], plain[0]), event
        assert zoo.alike(nested[1], plain[1]), event
        assert [row for row in nested[2] if row[2]] == plain[2], event


def test_a_validation_after_the_fit_leaves_results_and_coverage_as_they_are():
    model, cb = three_layers(), Means()
    learn = learner(model, cbs=cb)
    learn.fit(1)
    before, n = dict(cb.results), cb.coverage.n_batches
    learn.validate()
    assert cb.results == before
    assert cb.coverage.n_batches == n
    assert_no_hooks(model)


def test_a_shared_layer_has_one_result_for_each_call():
    model = zoo.make("shared")
    x, y = batches(1)[0]
    h = model.fc(x)
    out = model.fc(h.tanh())
    h.retain_grad()
    out.retain_grad()
    F.mse_loss(out, y).backward()
    model.zero_grad()
    forward = HookCallback(hook=lambda m, i, o: o.clone(), name="forward")
    back = HookCallback(is_forward=False, hook=lambda m, gi, go: go[0], name="back")
    pre = HookCallback(pre=True, hook=lambda m, i: i[0].clone(), name="pre")
    fit(model, forward, back, pre, n_train=1, n_valid=0)
    assert sorted(forward.results) == sorted(back.results) == sorted(pre.results) == ["fc#0", "fc#1"]
    assert torch.equal(forward.results["fc#0"], h.detach())
    assert torch.equal(forward.results["fc#1"], out.detach())
    assert torch.equal(pre.results["fc#0"], x)
    assert torch.equal(pre.results["fc#1"], h.detach().tanh())
    assert torch.equal(back.results["fc#0"], h.grad)
    assert torch.equal(back.results["fc#1"], out.grad)
    assert list(forward.coverage.hooked) == ["fc"] == list(forward.coverage.fired)


def test_a_layer_called_once_in_some_batches_and_twice_in_others_keeps_nothing_of_the_last_batch():
    n = [0]

    def sometimes(s, x):
        n[0] += 1
        return s.fc(s.fc(x)) if n[0] == 1 else s.fc(x)

    cb = HookCallback(hook=lambda m, i, o: 1)
    fit(zoo.Plain(sometimes, fc=zoo.lin()), cb, n_train=2, n_valid=0)
    assert list(cb.results) == ["fc"]


def checkpoint_all_but_the_last(model, use_reentrant):
    def f(s, x):
        return s.c(
            checkpoint(lambda h: s.act(s.b(s.act(s.a(h)))), x.requires_grad_(), use_reentrant=use_reentrant)
        )

    model.f = f


@in_turn("use_reentrant", [True, False])
@in_turn("every", [None, 2])
def test_recomputation_under_checkpointing_is_not_seen(use_reentrant, every):
    model, plain = three_layers(), three_layers()
    checkpoint_all_but_the_last(model, use_reentrant)
    n = []
    cb = HookCallback(hook=lambda m, i, o: (n.append(1), o.clone())[1], every=every)
    pre = HookCallback(pre=True, hook=lambda m, i: n.append(1), every=every, name="pre")
    rows = outputs_by_hand(plain)
    fit(model, cb, pre)
    assert list(cb.results) == ["a", "b", "c"]
    assert len(n) == (2 if every else 3) * 3 * 2
    assert all(torch.equal(cb.results[k], rows[-1][k][0]) for k in "abc")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_under_checkpointing_are_seen_once_and_right(use_reentrant):
    model = three_layers()
    rows = outputs_by_hand(model)
    checkpoint_all_but_the_last(model, use_reentrant)
    n = []
    cb = HookCallback(is_forward=False, hook=lambda m, gi, go: (n.append(1), go[0])[1])
    pre = HookCallback(is_forward=False, pre=True, hook=lambda m, go: go[0], name="pre")
    fit(model, cb, pre)
    for results in (cb.results, pre.results):
        assert sorted(results) == ["a", "b", "c"]
        assert all(torch.equal(results[k], rows[-1][k][1]) for k in "abc")
    assert len(n) == 9


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_calls_of_a_shared_layer_keep_their_numbers_in_backward(use_reentrant):
    def f(s, x):
        def block(h):
            return s.fc(h).tanh()

        # a checkpointed block is computed again in the order of backward, the last one first
        for _ in range(3):
            x = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    x, y = batches(1)[0]
    fc, outs = zoo.make("shared").fc, []
    h = x
    for _ in range(3):
        outs.append(fc(h))
        outs[-1].retain_grad()
        h = outs[-1].tanh()
    F.mse_loss(h, y).backward()
    model = zoo.make("shared")
    model.f = lambda s, x: f(s, x.requires_grad_())
    cb = HookCallback(is_forward=False, hook=lambda m, gi, go: go[0])
    fit(model, cb, n_train=1, n_valid=0)
    assert sorted(cb.results) == ["fc#0", "fc#1", "fc#2"]
    assert all(torch.allclose(cb.results[f"fc#{k}"], o.grad) for k, o in enumerate(outs))


def test_a_call_that_the_loss_does_not_use_keeps_its_number():
    model = zoo.make("shared")
    model.f = lambda s, x: (s.fc(x * 2), s.fc(x))[1]
    cb = HookCallback(is_forward=False, hook=lambda m, gi, go: 1)
    fit(model, cb)
    assert list(cb.results) == ["fc#1"]


def test_a_model_that_is_one_layer_is_seen():
    for options in ({"hook": lambda m, i, o: 1}, {"hook": lambda m, gi, go: 1, "is_forward": False}):
        cb = HookCallback(**options)
        fit(zoo.lin(), cb)
        assert list(cb.results.values()) == [1]
        assert list(cb.coverage.fired) == list(cb.coverage.hooked)


def test_batches_outside_a_fit_are_not_looked_at_and_do_no_harm():
    model, cb = three_layers(), Means(remove_end=False)
    learn = learner(model, cbs=cb)
    learn.validate()
    learn.one_batch()
    learn.get_preds()
    learn.fit(1)
    before = dict(cb.results)
    n = cb.coverage.n_batches
    learn.validate()
    learn.get_preds()
    assert zoo.alike(before, dict(cb.results))
    assert cb.coverage.n_batches == n
    cb.hooks.remove()
    assert_no_hooks(model)


def test_a_layer_of_another_model_is_refused():
    with pytest.raises(LookupError):
        fit(model := three_layers(), HookCallback(three_layers().a, hook=lambda *a: None))
    assert_no_hooks(model)


def test_layers_tells_the_hooked_modules_and_layer_name_their_names():
    model, names = three_layers(), []
    cb = HookCallback(["a", "c"], hook=lambda m, i, o: names.append((m, cb.layer_name(m))))
    fit(model, cb, n_train=1, n_valid=0)
    assert names == [(model.a, "a"), (model.c, "c")]


def test_two_of_a_kind_do_not_disturb_each_other():
    model = three_layers()
    rows = outputs_by_hand(model)
    one, two = Means("a", name="one"), Means(["a", "c"], name="two", every=2)
    back = Gradients(name="back")
    fit(model, one, two, back)
    assert list(one.results) == ["a"]
    assert list(two.results) == ["a", "c"]
    assert two.results["c"].item() == rows[2]["c"][0].mean().item()
    assert torch.equal(back.results["b"][1][0], rows[2]["b"][1])


def test_a_model_swapped_between_fits_is_looked_up_anew():
    cb = Means(remove_end=False)
    first, second = three_layers(), zoo.make("norm_and_dropout")
    learn = learner(first, cbs=cb)
    learn.fit(1)
    learn.model = second
    learn.fit(1)
    assert list(cb.results) == ["0", "1", "4"]
    assert list(cb.coverage.hooked) == ["0", "1", "4"]
    assert_no_hooks(first)
    learn.remove_cbs([cb])


def test_a_layer_swapped_between_fits_is_looked_up_anew():
    cb = HookCallback("a", hook=lambda m, i, o: type(m).__name__)
    model = three_layers()
    learn = learner(model, cbs=cb)
    learn.fit(1)
    model.a = nn.Sequential(zoo.lin(), nn.Tanh())
    learn.fit(1)
    assert cb.results == {"a": "Sequential"}
    assert_no_hooks(model)


def test_hooks_that_stay_on_are_not_doubled_by_the_next_fit():
    model, cb = three_layers(), Means(remove_end=False)
    learn = learner(model, cbs=cb)
    learn.fit(1)
    n = count_hooks(model)
    learn.fit(1)
    assert 0 < count_hooks(model) == n
    assert len(cb.log) == 9
    before = dict(cb.results)
    model(torch.randn(4, 4))  # nobody looks outside a fit
    assert cb.results == before or set(cb.results) == set(before)
    cb.hooks.remove()
    assert_no_hooks(model)


def test_hooks_come_off_when_a_fit_fails_at_any_place():
    for event in ("before_fit", "before_batch", "after_pred", "before_backward", "after_step", "after_fit"):

        def fail(cb):
            raise KeyError("mine")

        model = three_layers()
        with pytest.raises(KeyError, match="mine"):
            fit(model, Means(), Gradients(), Callback(**{event: fail}))
        assert_no_hooks(model)


def test_in_place_layers_are_told_as_they_were():
    model, plain = zoo.make("in_place_modules"), zoo.make("in_place_modules")
    outs, grads = {}, {}
    for name, m in plain.named_children():
        m.inplace = False

        def keep(m, i, o, name=name):
            outs[name] = o.detach().clone()
            o.register_hook(lambda g: grads.__setitem__(name, g))

        m.register_forward_hook(keep)
    torch.manual_seed(3)
    x, y = batches(1)[0]
    F.mse_loss(plain(x), y).backward()
    torch.manual_seed(3)
    forward = HookCallback(include_paramless=True, hook=lambda m, i, o: o.clone(), name="forward")
    back = Gradients(include_paramless=True, name="back")
    fit(model, forward, back, n_train=1, n_valid=0)
    assert list(forward.results) == list("012345")
    assert all(torch.equal(forward.results[k], outs[k]) for k in outs)
    assert all(torch.equal(back.results[k][1][0], grads[k]) for k in grads)
    for name, (gi, _) in back.results.items():
        below = str(int(name) - 1)
        if gi[0] is None and name != "0":
            assert back.coverage.without_grad[name]
        elif name != "0":
            assert torch.equal(gi[0], grads[below])


def test_results_are_detached_and_with_detach_off_have_their_graph():
    model = three_layers()
    fit(model, cb := HookCallback(hook=lambda m, i, o: o))
    assert not any(v.requires_grad for v in cb.results.values())
    assert not any(s.requires_grad for s in cb.hooks.stored)
    fit(model, cb := HookCallback(hook=lambda m, i, o: o.sum(), detach=False, cpu=False))
    assert all(v.requires_grad for v in cb.results.values())


def test_a_callback_that_modifies_steers_the_activation():
    model, plain = three_layers(), three_layers()
    plain.f = lambda s, x: s.c(s.act(s.b(s.act(s.a(x)) * 0.5)))
    fit(plain)

    def half(m, i, o):
        return o * 0.5

    cb = HookCallback("act", modify=True, hook=half)
    model.f = lambda s, x: s.c(F.relu(s.b(s.act(s.a(x)))))
    learn = fit(model, cb, n_valid=0)
    assert zoo.alike([p.detach() for p in learn.model.parameters()], [p.detach() for p in plain.parameters()])


def test_a_callback_that_clamps_gradients_reaches_the_weights():
    model, plain = three_layers(), three_layers()
    x, y = batches(1)[0]
    a = plain.a(x)
    a.register_hook(lambda g: g * 0)
    F.mse_loss(plain.c(plain.act(plain.b(plain.act(a)))), y).backward()
    assert not plain.a.weight.grad.any()
    cb = HookCallback("a", is_forward=False, pre=True, modify=True, hook=lambda m, go: go[0] * 0)
    before = model.a.weight.detach().clone()
    fit(model, cb, n_train=1, n_valid=0)
    assert torch.equal(model.a.weight, before)
    assert not torch.equal(model.b.weight, three_layers().b.weight)


def test_prepend_and_always_call_are_taken():
    model, log = three_layers(), []
    model.a.register_forward_hook(lambda m, i, o: log.append("user"))
    fit(
        model,
        HookCallback("a", prepend=True, always_call=True, hook=lambda m, i, o: log.append("ours")),
        n_train=1,
        n_valid=0,
    )
    assert log == ["ours", "user"]


TRAINED = [name for name in zoo.MODELS if name != "frozen_all_but_the_input"]  # which has nothing to train


@pytest.mark.parametrize("name", each(4, TRAINED))
def test_every_model_of_the_zoo_trains_to_the_same_bits(name):
    def trained(*cbs):
        torch.manual_seed(5)
        model = zoo.make(name)
        with warnings.catch_warnings():
            # some layers have nothing to show
            warnings.filterwarnings("ignore", message=".*(saw|seen|never|nothing).*")
            fit(model, *cbs, n_train=2, n_valid=0, n_epoch=2)
        return {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()

    plain = trained()
    for is_forward in (True, False):
        cb = HookCallback("*", is_forward=is_forward, hook=lambda m, i, o: (i, o))
        watched = trained(cb)
        assert [k for k in plain[0] if not torch.equal(plain[0][k], watched[0][k])] == [], is_forward
        assert torch.equal(plain[1], watched[1])
        assert isinstance(str(cb.coverage), str)
        assert set(cb.coverage.fired) | set(cb.coverage.silent) == set(cb.coverage.hooked)


# ---- wrong use


def test_data_parallel_is_refused_with_alternatives():
    model = nn.DataParallel(three_layers())
    model.device_ids = [0, 1]  # as with two GPUs
    for options in ({"hook": lambda *a: None}, {"hook": lambda *a: None, "is_forward": False}):
        with pytest.raises((TypeError, ValueError), match=r"Distributed|FSDP|\.module"):
            fit(model, HookCallback(**options))
        assert_no_hooks(model)


def test_a_wrong_selection_is_named():
    with pytest.raises(LookupError, match="nosuch"):
        fit(model := three_layers(), HookCallback("nosuch.*", hook=lambda *a: None))
    assert_no_hooks(model)


@in_turn("options", [{"every": 0}, {"every": -1}, {"every": 1.5}, {"every": "2"}, {"hook": 3}])
def test_wrong_arguments_are_refused_at_once(options):
    with pytest.raises((TypeError, ValueError)):
        HookCallback(**{"hook": lambda *a: None} | options)


def test_a_hook_callback_without_a_hook_is_refused_before_training():
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="hook"):
        fit(three_layers(), HookCallback())


@in_turn(
    "options",
    [{}, {"pre": True}, {"is_forward": False}, {"is_forward": False, "pre": True}, {"modify": True}],
)
def test_an_error_in_the_hook_goes_on_and_names_layer_and_callback(options):
    error = zoo.collections.Counter  # any class; the exception below is what counts

    class Failing(HookCallback):
        def hook(self, *what):
            raise planted

    planted = KeyError("mine", error)
    model = three_layers()
    with pytest.raises(KeyError) as raised:
        fit(model, Failing("b", **options))
    assert raised.value is planted
    notes = "\n".join(planted.__notes__)
    assert "Failing" in notes or "failing" in notes
    assert "'b'" in notes or " b " in notes or "b (Linear" in notes
    assert_no_hooks(model)
    fit(model)


def test_the_training_s_own_error_is_kept():
    def fail(s, x):
        raise KeyError("mine")

    model = three_layers()
    model.c.forward = lambda x: fail(None, x)
    for options in ({}, {"always_call": True}, {"is_forward": False}):
        with pytest.raises(KeyError, match="mine"):
            fit(model, HookCallback(hook=lambda *a: None, **options))
        assert_no_hooks(model)


def test_an_always_called_callback_that_fails_on_none_hides_no_error():
    model = three_layers()

    def fail(x):
        raise KeyError("mine")

    model.c.forward = fail
    with pytest.raises(KeyError, match="mine"):
        fit(model, HookCallback(hook=lambda m, i, o: o.mean(), always_call=True))
    assert_no_hooks(model)


# ---- copies


@pytest.mark.parametrize("cls", [Means, Gradients])
def test_copies_of_a_model_made_in_a_fit_pollute_nothing(cls):
    class Ema(Callback):
        def before_fit(self):
            self.ema = torch.optim.swa_utils.AveragedModel(self.model)

        def after_pred(self):
            if self.training:
                self.copied = copy.deepcopy(self.model)
                self.copied(self.x * 100).sum().backward()
                self.ema(self.x * 100).sum().backward()

        def before_step(self):
            self.ema.update_parameters(self.model)
            self.copied = copy.deepcopy(self.model)
            self.copied(self.x * 100).sum().backward()

    plain, watched = cls(), cls()
    fit(three_layers(), plain)
    fit(three_layers(), watched, Ema())
    assert zoo.alike(dict(plain.results), dict(watched.results))
    assert plain.coverage.n_batches == watched.coverage.n_batches


def test_a_fitted_callback_can_be_pickled_and_fitted_again():
    cb = Means(name="means")
    fit(three_layers(), cb)
    copied = pickle.loads(pickle.dumps(cb))
    assert numbers(copied.results) == numbers(cb.results)
    assert list(copied.coverage.fired) == list(cb.coverage.fired)
    fit(model := three_layers(), copied)
    assert numbers(copied.results) == numbers(cb.results)
    assert_no_hooks(model)


def test_a_callback_copied_in_the_middle_of_a_fit_can_be_fitted_by_itself():
    made = []
    cb = Means(name="means")

    def copy_it(w):
        if not made and w.training:
            made.append(copy.deepcopy(cb))

    fit(three_layers(), cb, Callback(after_loss=copy_it))
    copied = made[0]
    fit(model := three_layers(), copied)
    assert list(copied.results) == ["a", "b", "c"]
    assert_no_hooks(model)


class Forgetful(HookCallback):
    """Overrides every event that hooks live by, and calls super() in none."""

    def hook(self, m, i, o):
        return o.mean()

    def before_fit(self):
        self.log = ["before_fit"]

    def before_train(self):
        self.log.append("before_train")

    def before_batch(self):
        self.log.append(("before_batch", self.hooks is not None))

    def before_backward(self):
        self.log.append("before_backward")

    def after_backward(self):
        self.log.append("after_backward")

    def after_batch(self):
        self.log.append(("after_batch", len(self.results)))

    def after_fit(self):
        self.log.append(("after_fit", len(self.layers)))


def test_a_subclass_that_forgets_super_has_its_hooks_all_the_same():
    model = three_layers()
    learn = fit(model, Forgetful(every=2), Means(every=2, name="means"))
    forgetful = learn.forgetful
    assert forgetful.results == learn.means.results
    assert forgetful.coverage.fired == learn.means.coverage.fired
    assert (forgetful.n_batches, forgetful.n_skipped) == (2, 1)
    batch = [("before_batch", True), "before_backward", "after_backward", ("after_batch", 3)]
    assert forgetful.log == ["before_fit", "before_train", *batch * 3, ("after_fit", 3)]
    assert_no_hooks(model)


def test_a_subclass_of_one_that_forgets_super_calls_each_once():
    class Careful(Forgetful):
        def before_fit(self):
            super().before_fit()
            self.log.append("careful")

    class WithoutMethods(Careful):
        pass

    learn = fit(three_layers(), WithoutMethods())
    assert learn.without_methods.log[:3] == ["before_fit", "careful", "before_train"]
    assert learn.without_methods.n_batches == 3
    assert len(learn.without_methods.results) == 3


def test_layers_are_there_in_a_before_fit_without_super_and_chosen_in_one_with_it():
    class Forgets(Means):
        def before_fit(self):
            self.log = list(self.layers)

    class Chooses(Means):
        def before_fit(self):
            self.modules = "b"
            super().before_fit()
            self.chosen = list(self.layers)

    learn = fit(three_layers(), Forgets(), Chooses("nosuch.*"))
    assert learn.forgets.log[:3] == ["a", "b", "c"]
    assert learn.chooses.chosen == list(learn.chooses.results) == ["b"]


def test_functions_given_for_an_event_do_not_take_the_place_of_hooks():
    seen = []
    model = three_layers()
    cb = HookCallback(
        hook=lambda m, i, o: o.mean(), name="means", before_fit=lambda cb: seen.append(len(cb.layers))
    )
    learn = fit(model, cb)
    assert seen == [3]
    assert len(learn.means.results) == 3
    assert_no_hooks(model)


def test_hooks_come_off_when_an_after_fit_without_super_fails():
    class Failing(Forgetful):
        def after_fit(self):
            raise ZeroDivisionError("mine")

    model = three_layers()
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(model, Failing())
    assert_no_hooks(model)


def test_a_phase_that_joins_while_it_runs_closes_for_callbacks_that_forget_super():
    late = Forgetful()

    def join(cb):
        if cb.train_iter == 1:
            cb.learn.add_cb(late)

    learn = fit(three_layers(), Callback(before_batch=join), Means())
    assert learn.forgetful.n_batches == 1  # the third batch; of the second it has not seen the beginning


def test_options_of_hooks_are_passed_on_and_a_wrong_name_is_refused_at_once():
    cb = HookCallback(hook=lambda m, i: i, pre=True, prepend=True)
    fit(three_layers(), cb)
    assert all(hook.pre and hook.prepend for hook in cb.hooks)
    with pytest.raises(
        TypeError, match=r"no argument 'prepand'; did you mean 'prepend'\?.* gather, pre, modify"
    ):
        HookCallback(hook=lambda m, i, o: o, prepand=True)


# ---- batches that are not looked at


def test_hooks_stay_on_the_layers_in_batches_that_are_not_looked_at():
    counts = []
    look = Callback(after_pred=lambda cb: counts.append(count_hooks(cb.model)), name="look")
    learn = fit(three_layers(), Means(every=3), look, n_train=7, n_valid=0)
    assert counts == [counts[0]] * 7
    assert counts[0] > 0
    assert_no_hooks(learn.model)


def test_no_gate_is_asked_in_batches_that_are_not_looked_at():
    asked = []

    class Asked(Means):
        def hooks_act(self):
            asked.append(self.train_iter)
            return super().hooks_act()

    fit(three_layers(), Asked(every=3), n_train=7, n_valid=2)
    assert set(asked) == {0, 3, 6}


def test_a_hook_of_the_user_on_a_layer_keeps_its_place_behind_ours():
    order = []

    class Ours(HookCallback):
        def hook(self, m, i, o):
            order.append("ours")

    def register(cb):
        if cb.train_iter == 0:
            cb.model.c.register_forward_hook(lambda m, i, o: order.append("theirs"))

    late = Callback(before_batch=register, name="late")
    fit(three_layers(), Ours(modules="c", every=3), late, n_train=4, n_valid=0)
    assert order == ["ours", "theirs", "theirs", "theirs", "ours", "theirs"]
