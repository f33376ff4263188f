"""Callbacks are taken in each form by all that take them: none, one, several; an iterable is read once."""

import torch

from hookcb import ActivationStats, Callback, CSVLogger, GradientHealth, watch
from hookcb.core.callback_list import listed
from tests.support import fit, in_turn, make_learner, make_model


class Counts(Callback):
    """A callback that can be iterated over, which it is not to be."""

    def __iter__(self):
        raise AssertionError("it is one callback")


FORMS = {
    "none": (lambda: None, []),
    "a class": (lambda: ActivationStats, ["activation_stats"]),
    "an instance": (lambda: ActivationStats(), ["activation_stats"]),
    "one that is iterable": (lambda: Counts(), ["counts"]),
    "a logger": (lambda: CSVLogger("x.csv"), ["log"]),
    "a tuple": (lambda: (GradientHealth, CSVLogger("x.csv")), ["gradient_health", "log"]),
    "a generator": (lambda: (cb for cb in [GradientHealth, Counts()]), ["gradient_health", "counts"]),
}


@in_turn(("make", "names"), FORMS.values(), ids=FORMS)
def test_callbacks_are_taken_in_each_form(make, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = make_learner(cbs=make())
    assert {cb.name for cb in learn.cbs} >= set(names)
    learn = fit(make_learner(), cbs=make())
    assert [name for name in names if not isinstance(getattr(learn, name), Callback)] == []
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, cbs=make()) as first:
        assert sorted(cb.name for cb in first.cbs) == sorted(names)
    with watch(model, opt, make()) as second:
        assert sorted(cb.name for cb in second.cbs) == sorted(names)


def test_optimizers_are_listed_as_callbacks_are():
    opts = [torch.optim.SGD(make_model().parameters(), lr=0.1) for _ in range(2)]
    assert listed(opts[0]) == opts[:1]
    assert listed(iter(opts)) == opts
