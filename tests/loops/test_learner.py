"""Learner trains as a loop by hand does, and gives back what it took."""

import contextlib
import copy
import gc
import inspect
import itertools
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    HookCallback,
    Learner,
    Recorder,
)
from tests.support import (
    BATCH,
    DIAGNOSTICS,
    VALID,
    NoSuper,
    Pair,
    X,
    Y,
    Z,
    events,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    modes,
    same,
    spy,
    train_by_hand,
    weights,
)

SCREEN = 80  # lines


def test_the_loop_is_on_one_screen():
    names = ("fit", "_epochs", "_epoch", "_phase", "_batches", "_batch", "_backward")
    sources = [inspect.getsourcelines(inspect.unwrap(getattr(Learner, name))) for name in names]
    begins = [begin for _, begin in sources]
    assert begins == sorted(begins)
    assert begins[-1] + len(sources[-1][0]) - begins[0] <= SCREEN  # with decorators, docstrings and all


@in_turn(
    "opt_func",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9, weight_decay=0.1),
    ],
)
@in_turn("diagnostics", [False, True])
def test_weights_losses_and_random_state_agree_with_a_plain_loop_bit_for_bit(opt_func, diagnostics):
    def model_and_loader():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
        x, y = torch.randn(18, 2), torch.randn(18, 1)
        return model, DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)

    model, loader = model_and_loader()
    losses = train_by_hand(model, loader, 3, opt=opt_func(model.parameters(), lr=0.05))
    state = torch.get_rng_state()
    expected = weights(model)

    model, loader = model_and_loader()
    learn = Learner((loader, None), model, F.mse_loss, opt_func, lr=0.05)
    fit(learn, 3, cbs=[make() for make in DIAGNOSTICS[:1] + DIAGNOSTICS[2:]] if diagnostics else ())
    assert same(weights(model), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(learn.recorder.losses) == losses


def test_two_fits_go_on_with_the_same_optimizer():
    batches = make_batches(3)
    learn = Learner((batches, None), make_model(), F.mse_loss, torch.optim.Adam, lr=0.1)
    fit(fit(learn))
    model = make_model()
    train_by_hand(model, batches, 2, opt=torch.optim.Adam(model.parameters(), lr=0.1))
    assert same(weights(learn.model), weights(model))


def test_the_learning_rate_given_to_fit_stays_until_another_is_given():
    learn = make_learner(lr=0.1)
    seen = []
    for lr in (None, 0.02, None, 0.3, None):
        fit(learn, lr=lr)
        seen.append(list(learn.recorder.lrs))
    assert seen == [[lr] * 3 for lr in (0.1, 0.02, 0.02, 0.3, 0.3)]


def test_a_learning_rate_of_the_first_fit_is_the_one_it_trains_with():
    batches = make_batches(3)
    learn = fit(Learner((batches, None), make_model(), F.mse_loss, torch.optim.SGD, lr=9.0), lr=0.1)
    model = make_model()
    train_by_hand(model, batches, lr=0.1)
    assert same(weights(learn.model), weights(model))


def test_a_ready_optimizer_keeps_its_own_learning_rates():
    model = make_model()
    opt = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.25
    )
    learn = fit(Learner((make_batches(), None), model, F.mse_loss, opt, lr=7.0))
    assert learn.opt is opt
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25]
    assert list(learn.recorder.lrs) == [0.25] * 3
    by_hand = make_model()
    opt = torch.optim.SGD(
        [{"params": by_hand[0].parameters(), "lr": 0.5}, {"params": by_hand[2].parameters()}], lr=0.25
    )
    train_by_hand(by_hand, make_batches(), opt=opt)
    assert same(weights(model), weights(by_hand))


def test_a_learning_rate_changed_by_a_callback_is_recorded_for_the_batches_it_trained():
    class Decay(Callback):
        def before_batch(self):
            if self.training:
                for group in self.opt.param_groups:
                    group["lr"] = 0.1 / (1 + self.train_iter)

    learn = fit(make_learner(n_valid=0, cbs=Decay))
    assert list(learn.recorder.lrs) == [0.1, 0.1 / 2, 0.1 / 3]


def test_frozen_layers_stay_as_they_are_and_the_rest_trains():
    model = make_model()
    model[0].requires_grad_(False)
    before = weights(model)
    fit(make_learner(model=model, cbs=ActivationStats()))
    after = weights(model)
    assert same(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("frozen", ["no parameters", "all frozen"])
def test_a_model_that_cannot_be_trained_is_refused_before_anything_fires(frozen):
    model = nn.Flatten() if frozen == "no parameters" else make_model().requires_grad_(False)
    log = []
    learn = Learner((make_batches(), None), model, F.mse_loss, cbs=spy(log, "a"))
    with pytest.raises((ValueError, RuntimeError, TypeError), match="param"):
        fit(learn)
    assert log == []


@in_turn("raised", [None, ValueError, CancelFitException])
@in_turn("event", ["before_batch", "after_validate"])
def test_the_modes_of_a_partly_eval_model_are_restored_however_the_fit_ends(event, raised):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.Linear(3, 1)))
    model.train()
    model[1].eval()
    model[2][0].eval()
    before = modes(model)
    plan = {(event, 0): raised()} if raised else {}
    with contextlib.suppress(ValueError):
        fit(make_learner(model=model, cbs=spy([], "a", plan)))
    assert modes(model) == before
    learn = make_learner(model=model)
    learn.validate()
    assert modes(model) == before
    learn.get_preds()
    assert modes(model) == before
    learn.one_batch()
    assert modes(model) == before


@in_turn("event", ["before_validate", "after_pred", "after_validate", "after_epoch"])
@in_turn("raised", [ValueError, KeyboardInterrupt, CancelFitException, CancelEpochException])
def test_grad_mode_is_restored_however_the_validation_ends(event, raised):
    log = []
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        fit(make_learner(n_train=1, cbs=spy(log, "a", {(event, int(event == "after_pred")): raised()})))
    assert events(log).count(event) == 1 + (event == "after_pred")
    assert torch.is_grad_enabled()


def test_training_happens_in_train_mode_with_gradients_and_validation_without_either():
    seen = []

    class Look(Callback):
        def after_loss(self):
            seen.append(
                (self.training, self.model.training, torch.is_grad_enabled(), self.loss.requires_grad)
            )

        def after_epoch(self):
            seen.append(torch.is_grad_enabled())

    fit(make_learner(n_train=1, n_valid=1, cbs=Look))
    assert seen == [(True, True, True, True), (False, False, False, False), True]


def test_predictions_come_in_order_with_inputs_targets_and_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).train()
    valid = make_batches(3, seed=1, last=2)
    learn = Learner((make_batches(), valid), model, F.mse_loss)
    state, before = torch.get_rng_state(), weights(model)
    xs, ys = (torch.cat(t) for t in zip(*valid, strict=True))
    expected = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected = torch.cat([expected(x) for x, _ in valid])
    losses = (expected - ys).square()

    for with_input, with_loss in itertools.product([False, True], repeat=2):
        got = learn.get_preds(with_input=with_input, with_loss=with_loss)
        wanted = [xs] * with_input + [expected, ys] + [losses] * with_loss
        assert len(got) == len(wanted)
        for g, w in zip(got[: 2 + with_input], wanted, strict=False):
            assert torch.equal(g, w)
            assert not g.requires_grad
        if with_loss:
            assert len(got[-1]) == 10
            assert got[-1].flatten().tolist() == pytest.approx(losses.flatten().tolist(), rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(weights(model), before)
    assert all(modes(model))


def test_each_sample_s_loss_is_one_number_also_where_a_sample_has_several_targets():
    model = nn.Linear(2, 3)
    batches = [(torch.randn(4, 2), torch.randn(4, 3)) for _ in range(2)]
    preds, ys, losses = Learner((batches, batches), model, nn.MSELoss()).get_preds(with_loss=True)
    assert losses.shape[0] == 8
    per_sample = losses.reshape(8, -1).mean(1)
    assert per_sample.tolist() == pytest.approx((preds - ys).square().mean(1).tolist(), rel=1e-5)


def test_the_loss_function_keeps_its_reduction():
    for loss_func in (nn.MSELoss(), nn.MSELoss(reduction="sum")):
        learn = make_learner(loss_func=loss_func)
        reduction = loss_func.reduction
        learn.get_preds(with_loss=True)
        assert loss_func.reduction == reduction
        with pytest.raises(ZeroDivisionError):
            learn.get_preds((b if b else 1 / 0 for b in [make_batches(1)[0], None]), with_loss=True)
        assert loss_func.reduction == reduction
    with pytest.raises(ValueError, match="reduction"):
        make_learner(loss_func=lambda p, y: (p - y).mean()).get_preds(with_loss=True)


def test_predictions_of_loaders_without_targets_have_none():
    learn = make_learner()
    preds, targets = learn.get_preds([X, Y])
    assert targets is None
    assert preds.shape == (8, 1)
    preds, targets = learn.get_preds([(X,), (Y,)])
    assert targets is None
    inputs, preds, targets = learn.get_preds([X, Y], with_input=True)
    assert torch.equal(inputs, torch.cat([X, Y]))


def test_predictions_are_nested_as_the_model_gives_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, a, b):
            return {"sum": self.fc(a + b), "pair": (a, Pair(b, None))}

    model = Model()
    batches = [(X, Y, Z, X), (Y, Z, X, Y)]
    learn = Learner((batches, batches), model, lambda p, *y: p["sum"].mean(), n_inp=2)
    inputs, preds, targets = learn.get_preds(with_input=True)
    assert [torch.equal(g, w) for g, w in zip(inputs, (torch.cat([X, Y]), torch.cat([Y, Z])), strict=True)]
    assert torch.equal(inputs[1], torch.cat([Y, Z]))
    assert torch.equal(targets[1], torch.cat([X, Y]))
    assert torch.equal(preds["pair"][1].x, torch.cat([Y, Z]))
    assert preds["pair"][1].y is None
    assert preds["sum"].shape == (8, 1)


def test_batches_that_cannot_be_joined_are_told():
    learn = make_learner(model=nn.Linear(2, 2), loss_func=lambda p, *y: p.mean())
    with pytest.raises(ValueError, match="shape"):
        learn.get_preds([torch.randn(2, 5, 2), torch.randn(2, 4, 2)])


def test_predictions_do_not_share_memory_with_a_buffer_that_is_overwritten():
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
            self.out = torch.zeros(4, 1)

        def forward(self, x):
            with torch.no_grad():
                return self.out.copy_(self.fc(x))

    model = Reuses()
    batches = make_batches(3)
    preds, _ = Learner((batches, batches), model, F.mse_loss).get_preds()
    with torch.no_grad():
        assert torch.equal(preds, torch.cat([model.fc(x) for x, _ in batches]))


def test_a_callback_that_cancels_batches_does_not_shift_predictions_against_targets():
    class Skip(Callback):
        def before_batch(self):
            if self.iter == 1:
                raise CancelBatchException

    learn = make_learner(n_valid=3, cbs=Skip)
    preds, targets = learn.get_preds()
    assert len(preds) == len(targets) == 8
    with torch.no_grad():
        expected = [learn.model(x) for x, _ in (learn.dls.valid[0], learn.dls.valid[2])]
    assert torch.equal(preds, torch.cat(expected))


def test_validate_with_cbs_attaches_them_for_its_length():
    log = []
    learn = make_learner()
    learn.validate(cbs=spy(log, "a"))
    assert events(log) == [*VALID[:5], *VALID[1:5], "after_validate"]
    assert len(learn.cbs) == 3
    with pytest.raises(ZeroDivisionError):
        learn.validate((1 / 0 for _ in range(1)), cbs=spy(log, "b"))
    assert len(learn.cbs) == 3
    assert torch.is_grad_enabled()


def test_one_batch_trains_on_one_batch_with_its_events():
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    x, y = learn.dls.train[0]
    loss = learn.one_batch()
    model = make_model()
    assert loss.item() == train_by_hand(model, [(x, y)])[0]
    assert same(weights(learn.model), weights(model))
    assert events(log) == BATCH
    assert torch.equal(learn.xb[0], x)
    other = make_batches(1, seed=7)[0]
    assert learn.one_batch(other).item() == train_by_hand(model, [other])[0]
    assert same(weights(learn.model), weights(model))


def test_training_goes_on_from_a_file_as_if_never_interrupted(tmp_path):
    def make():
        return make_learner(n_valid=0, opt_func=torch.optim.Adam, lr=0.05)

    whole = fit(make(), 2)
    first = fit(make())
    path = first.save(tmp_path / "half.pt")
    assert path.exists()
    second = make()
    second.load(path)
    assert same(weights(second.model), weights(first.model))
    fit(second)
    assert same(weights(second.model), weights(whole.model))
    plain = make()
    plain.load(str(path), with_opt=False)
    assert same(weights(plain.model), weights(first.model))
    fit(plain)
    assert not same(weights(plain.model), weights(whole.model))


def test_a_learner_that_was_never_fitted_saves_and_loads(tmp_path):
    learn = make_learner()
    path = learn.save(tmp_path / "new.pt")
    other = make_learner(model=make_model(seed=5))
    other.load(path)
    assert same(weights(other.model), weights(learn.model))
    fit(other)


def test_a_file_saved_without_optimizer_loads(tmp_path):
    learn = fit(make_learner(opt_func=torch.optim.Adam))
    path = learn.save(tmp_path / "weights.pt", with_opt=False)
    other = make_learner(model=make_model(seed=5), opt_func=torch.optim.Adam)
    other.load(path)
    assert same(weights(other.model), weights(learn.model))
    fit(other)


class Evil:
    """Runs code when unpickled."""

    ran = False

    def __reduce__(self):
        return (setattr, (Evil, "ran", True))


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "tensor", "foreign", "pickle", "evil"])
def test_a_file_of_another_kind_is_told_and_changes_nothing(tmp_path, kind):
    learn = fit(make_learner())
    path = learn.save(tmp_path / "file.pt")
    if kind in ("truncated", "empty"):
        path.write_bytes(path.read_bytes()[: 200 if kind == "truncated" else 0])
    elif kind == "text":
        path.write_text("no weights at all\n" * 9)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"model": 1}))
    else:
        torch.save({"tensor": torch.ones(3), "foreign": {"epoch": 3}, "evil": {"model": Evil()}}[kind], path)
    before = weights(learn.model)
    with pytest.raises(ValueError, match=r"file.pt"):
        learn.load(path)
    assert same(weights(learn.model), before)
    assert not Evil.ran


def test_a_file_that_is_not_there_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        make_learner().load(tmp_path / "nothing.pt")


def test_weights_that_do_not_fit_are_told(tmp_path):
    path = make_learner(model=nn.Linear(2, 1)).save(tmp_path / "linear.pt")
    learn = make_learner()
    before = weights(learn.model)
    with pytest.raises(RuntimeError):
        learn.load(path)
    assert same(weights(learn.model), before)


def test_saving_over_a_file_leaves_the_old_one_whole_where_it_fails(tmp_path):
    class Unsaveable(nn.Linear):
        def get_extra_state(self):
            return 1 / 0

        def set_extra_state(self, state):
            pass

    learn = fit(make_learner())
    path = learn.save(tmp_path / "file.pt")
    before = path.read_bytes()
    bad = make_learner(model=Unsaveable(2, 1))
    with pytest.raises(ZeroDivisionError):
        bad.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]


@in_turn("raised", [None, ValueError, KeyboardInterrupt, CancelFitException])
def test_a_callback_kept_after_the_fit_keeps_neither_learner_nor_model_nor_batches(raised):
    cbs = [make() for make in DIAGNOSTICS[:1] + DIAGNOSTICS[2:]] + [Recorder(name="r2"), NoSuper()]
    model = make_model()
    learn = make_learner(model=model)
    refs = [weakref.ref(o) for o in (learn, model, model[0], learn.dls.train[0][0])]
    plan = {("after_pred", 1): raised()} if raised else {}
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        fit(learn, cbs=[*cbs, spy([], "a", plan)])
    del learn, model, plan
    gc.collect()
    assert [r() for r in refs] == [None] * 4
    assert len(cbs) == 4


def test_a_removed_callback_does_not_keep_the_learner():
    cb = ActivationStats()
    learn = make_learner(cbs=cb)
    fit(learn)
    learn.remove_cb(cb)
    ref = weakref.ref(learn)
    del learn
    gc.collect()
    assert ref() is None


def test_the_graph_of_a_batch_is_not_kept_after_the_fit():
    refs = []
    learn = make_learner(cbs=Callback(name="look", after_loss=lambda cb: refs.append(weakref.ref(cb.loss))))
    fit(learn)
    gc.collect()
    assert sum(r() is not None for r in refs[:3]) == 0


def test_a_model_dropped_while_the_learner_lives_is_not_the_callback_s_business():
    cb = HookCallback(hook=lambda m, i, o: 1, name="h")
    model = make_model()
    learn = fit(make_learner(model=model, cbs=cb))
    ref = weakref.ref(model)
    learn.model = nn.Linear(2, 1)
    learn.opt = None
    del model
    gc.collect()
    assert ref() is None


def test_a_copied_or_pickled_learner_trains_on_by_itself():
    learn = fit(make_learner(metrics=F.l1_loss))
    twins = [copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))]
    before = weights(learn.model)
    for twin in twins:
        fit(twin)
        assert len(twin.recorder.losses) == 3
        assert twin.recorder is not learn.recorder
    assert same(weights(learn.model), before)
    fit(learn)
    for twin in twins:
        assert same(weights(twin.model), weights(learn.model))


def test_a_model_that_is_swapped_between_fits_gets_an_optimizer_of_its_own():
    learn = fit(make_learner())
    learn.model = make_model(seed=7)
    before = weights(learn.model)
    fit(learn)
    assert not same(weights(learn.model), before)


def test_a_head_that_is_replaced_between_fits_is_trained():
    learn = fit(make_learner())
    learn.model[2] = nn.Linear(3, 1)
    before = weights(learn.model[2])
    fit(learn)
    assert not same(weights(learn.model[2]), before)


def test_a_ready_optimizer_of_another_model_is_refused_before_training():
    opt = torch.optim.SGD(make_model(seed=3).parameters(), lr=0.1)
    learn = make_learner(opt_func=opt)
    with pytest.raises(ValueError, match="has none of the parameters"):
        learn.fit(1)


def test_gradients_left_by_an_interrupted_fit_are_not_added_to():
    def interrupt(cb):
        raise KeyboardInterrupt

    learn = make_learner()
    start = copy.deepcopy(learn.model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        fit(learn, cbs=Callback(after_backward=interrupt))
    assert same(weights(learn.model), list(start.values()))
    fit(learn)
    assert same(weights(learn.model), weights(fit(make_learner()).model))


def test_what_to_do_with_uneven_ranks_is_checked():
    with pytest.raises(ValueError, match="uneven must be 'error' or 'stop', got 'join'"):
        make_learner().fit(1, uneven="join")


def test_weights_of_a_model_with_a_part_named_module_are_loaded_with_and_without_it(tmp_path):
    whole = nn.Sequential(OrderedDict(module=nn.Linear(1, 1)))
    batches = [(torch.ones(4, 1), torch.ones(4, 1))]
    file = Learner(batches, whole, nn.functional.mse_loss).save(tmp_path / "whole.pt")
    for model in (nn.Sequential(OrderedDict(module=nn.Linear(1, 1))), nn.Linear(1, 1)):
        Learner(batches, model, nn.functional.mse_loss).load(file)
        part = model.module if isinstance(model, nn.Sequential) else model
        assert torch.equal(part.weight, whole.module.weight)
