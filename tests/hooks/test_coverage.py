"""What coverage tells of a fit: the layers that were seen, those that were not, and why."""

import warnings

import pytest
from torch import nn

from hookcb import Callback, CancelBatchException, HookCallback
from hookcb.hooks.coverage import FROZEN, NOT_CALLED, Coverage, why_not_called
from hookcb.testing import assert_no_hooks
from tests.hooks import support as zoo
from tests.hooks.support import Gradients, Means, fit, learner, three_layers
from tests.support import in_turn


def test_coverage_says_what_was_looked_at():
    cb = Means(every=2)
    fit(three_layers(), cb, n_epoch=2)
    c = cb.coverage
    assert list(c.hooked) == list(c.fired) == ["a", "b", "c"]
    assert dict(c.silent) == {}
    assert dict(c.left_out) == {}
    assert (c.n_batches, c.n_skipped) == (3, 3)
    assert dict(c.without_grad) == {}
    assert "3" in str(c)


def test_layers_that_come_in_mid_fit_are_told():
    cb, model = Means(), three_layers()

    def replace(learn):
        if learn.train_iter == 1:
            learn.model.c, learn.model.extra = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def look(learn):
        during.append(cb.coverage.added)

    during = []
    fit(model, Callback(before_batch=replace, after_batch=look, name="look"), cb)
    assert during[:3] == [(), ("c", "extra.0"), ("c", "extra.0")]
    assert cb.coverage.added == ("c", "extra.0")
    assert "not recorded: extra.0: it came into the model during the fit" in str(cb.coverage)
    fit(model, cb)
    assert cb.coverage.added == ()
    assert "c" in cb.coverage.fired


def test_layers_that_were_left_out_from_the_beginning_are_not_added_ones():
    cb = Means(modules="b")
    fit(three_layers(), cb)
    assert cb.coverage.added == ()


def silent_reasons(model, **kwargs):
    cb = HookCallback(**{"hook": lambda *a: None} | kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, cb)
    assert set(cb.coverage.silent) == set(cb.coverage.hooked) - set(cb.coverage.fired)
    for name, reason in cb.coverage.silent.items():
        assert reason
        assert name in str(cb.coverage)
    return dict(cb.coverage.silent)


def test_a_layer_called_through_forward_is_told_as_silent():
    reasons = silent_reasons(zoo.make("called_through_forward"))
    assert list(reasons) == ["a"]
    assert "forward" in reasons["a"]


def test_a_layer_that_is_never_used_is_told_as_silent():
    assert list(silent_reasons(zoo.make("unused_layer"))) == ["unused"]


def test_the_output_projection_of_attention_is_told_as_silent_with_its_reason():
    reasons = silent_reasons(zoo.make("attention"))
    assert list(reasons) == ["mha.out_proj"]
    assert "ttention" in reasons["mha.out_proj"]


def test_frozen_layers_without_gradients_are_told_as_silent():
    reasons = silent_reasons(zoo.make("frozen_first"), is_forward=False)
    assert list(reasons) == ["0"]
    assert "grad" in reasons["0"]


def test_a_layer_that_the_loss_does_not_use_is_silent_in_backward_only():
    assert silent_reasons(zoo.make("unused_output")) == {}
    assert list(silent_reasons(zoo.make("unused_output"), is_forward=False)) == ["a"]


def test_a_layer_that_fires_late_is_not_silent():
    n = [0]

    def late(s, x):
        n[0] += 1
        return s.b(s.a(x)) if n[0] > 2 else s.b(x)

    cb = HookCallback(hook=lambda *a: None)
    fit(zoo.Plain(late, a=zoo.lin(), b=zoo.lin()), cb)
    assert sorted(cb.coverage.fired) == ["a", "b"]
    assert dict(cb.coverage.silent) == {}


def test_outputs_that_are_no_tensors_are_left_out_by_path_and_type():
    model = zoo.Around(
        lambda s, x: {"logits": s.fc(x), "n": 3, "more": [None, "text", zoo.Angry(x)]},
        lambda o, h: o["logits"],
    )
    cb = HookCallback("odd", hook=lambda *a: None)
    fit(model, cb)
    assert cb.coverage.left_out == {
        "odd.n": "int",
        "odd.more[0]": "NoneType",
        "odd.more[1]": "str",
        "odd.more[2]": "Angry",
    }
    assert "odd.n" in str(cb.coverage)


def test_why_a_gradient_of_an_input_is_missing_is_told():
    model = zoo.Plain(
        lambda s, x: s.last(s.relu(s.first(x))), first=zoo.lin(), relu=nn.ReLU(inplace=True), last=zoo.lin()
    )
    cb = Gradients("*")
    fit(model, cb)
    for name in ("first", "relu", "last"):
        gi = cb.results[name][0]
        assert name == "first" or gi[0] is not None or name in cb.coverage.without_grad
    model = zoo.make("flatten_then_in_place")
    cb = Gradients("*")
    fit(model, cb)
    lacking = [
        n for n, (gi, go) in cb.results.items() if (gi[0] is None and n not in {"0", "1"}) or go[0] is None
    ]
    explained = {**cb.coverage.without_grad, **cb.coverage.silent}
    assert set(lacking) | (set("234") - set(cb.results)) <= set(explained)
    assert all(explained.values())


def test_coverage_starts_anew_with_each_fit():
    cb = Means()
    learn = learner(three_layers(), cbs=cb)
    learn.fit(2)
    learn.fit(1)
    assert cb.coverage.n_batches == 3


def test_a_callback_that_saw_nothing_warns_once_in_a_fit():
    model = zoo.Plain(lambda s, x: s.a.forward(x), a=zoo.lin())
    learn = learner(model, cbs=HookCallback(hook=lambda *a: None))
    for _ in range(2):
        with pytest.warns(UserWarning, match="seen in the first batch") as caught:
            learn.fit(3)
        assert len(caught) == 1
        assert len(str(caught[0].message)) > 40
    assert_no_hooks(model)


def test_a_gradient_callback_that_saw_nothing_warns_too():
    model = zoo.make("frozen_first")
    with pytest.warns(UserWarning, match="seen in the first batch") as caught:
        fit(model, HookCallback("0", is_forward=False, hook=lambda *a: None), n_epoch=2)
    assert len(caught) == 1


def test_a_callback_whose_first_batches_are_skipped_or_cancelled_does_not_warn():
    def skip(cb):
        if cb.iter < 2 and cb.training:
            raise CancelBatchException

    cb = Means()
    fit(three_layers(), Callback(before_batch=skip), cb)
    assert list(cb.coverage.fired) == ["a", "b", "c"]
    assert cb.coverage.n_batches in (1, 3)


# ---- in words


def coverage(**what):
    parts = {"hooked": (), "fired": (), "silent": {}, "left_out": {}, "without_grad": {}}
    return Coverage(**{**parts, "n_batches": 1, "n_skipped": 0} | what)


def test_it_counts_in_words_and_lists_what_was_not_seen():
    assert str(coverage(hooked=("a",), fired=("a",))) == "1 of 1 layer seen in 1 batch"
    text = str(
        coverage(
            hooked=("a", "b"),
            fired=("b",),
            silent={"a": "it was not called"},
            left_out={"b[1]": "NoneType"},
            without_grad={"b": "why"},
            n_batches=2,
            n_skipped=1,
        )
    )
    assert text.splitlines() == [
        "1 of 2 layers seen in 2 batches, 1 batch not looked at",
        "silent: a: it was not called",
        "left out: b[1]: NoneType",
        "without gradient: b: why",
    ]


@in_turn(("n", "more"), [(1, ""), (5, ""), (6, "… and 1 more"), (9, "… and 4 more")])
def test_the_warning_names_five_layers_at_most(n, more):
    silent = {f"layer{k}": f"reason {k}" for k in range(n)}
    first, *layers = coverage(hooked=tuple(silent), silent=silent).warning().splitlines()
    assert first.startswith(f"none of {n} hooked layer{'s' * (n > 1)} was seen")
    assert layers[:5] == [f"  {name}: {reason}" for name, reason in silent.items()][:5]
    assert [line.strip() for line in layers[5:]] == [more] * bool(more)


def test_why_a_layer_may_never_be_called_goes_by_its_kind_and_place():
    model = nn.Module()
    model.several, model.attn = nn.ModuleList([nn.Linear(2, 2)]), nn.MultiheadAttention(2, 1)
    model.fixed, model.plain = nn.Linear(2, 2).requires_grad_(False), nn.ReLU()
    modules = dict(model.named_modules())
    assert why_not_called(modules, "several") == "a ModuleList is never called itself"
    assert "MultiheadAttention uses its weights" in why_not_called(modules, "attn.out_proj")
    assert why_not_called(modules, "fixed") == FROZEN
    assert why_not_called(modules, "plain") == why_not_called(modules, "several.0") == NOT_CALLED
    assert why_not_called(modules, "gone") == NOT_CALLED
