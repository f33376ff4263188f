"""What a loop and its parts print of themselves: what they hold, in one line, and no values of tensors."""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import ActivationStats, Diagnose, Learner, Report, load_report, watch
from tests.support import make_batches, make_learner, make_model


def test_a_learner_says_what_it_holds():
    learn = Learner(make_batches(1), make_model(), functools.partial(F.mse_loss), cbs=ActivationStats())
    assert repr(learn) == (
        "Learner(dls=Loaders(train=1 batch, valid=None), model=Sequential, "
        "cbs=[activation_stats, recorder, metrics, progress], loss_func=mse_loss, opt=Adam)"
    )
    learn = Learner(iter(make_batches(1)), make_model(), opt_func=torch.optim.SGD(make_model().parameters()))
    assert "train=list_iterator" in repr(learn)
    assert repr(learn).endswith("loss_func=None, opt=SGD)")


def test_a_watch_says_what_it_follows_also_once_it_has_ended():
    model = make_model()
    opts = [torch.optim.SGD(model[0].parameters()), torch.optim.Adam(model[2].parameters())]
    with watch(model, opts, ActivationStats()) as w:
        model(make_batches(1)[0][0]).sum().backward()
        assert repr(w) == (
            "Watch(model=Sequential, opt=[Adam, SGD], cbs=[activation_stats], batches=0, state=following)"
        )
    del model, opts
    gc.collect()
    assert repr(w) == "Watch(model=None, opt=None, cbs=[activation_stats], batches=1, state=closed)"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_that_a_learner_gives_prints_tensors_or_all_of_its_numbers(tmp_path):
    learn = make_learner(20, cbs=[Diagnose(show=False), Report(tmp_path / "run.html")])
    with learn.no_logging():
        learn.fit(2)
    page = load_report(tmp_path / "run.html")
    held = (learn, learn.dls, learn.diagnosis.evidence(), page, page.run["loss"], *learn.cbs)
    for x in held:
        assert "tensor(" not in repr(x)
        assert len(repr(x)) < 250, repr(x)
    assert repr(learn.dls) == "Loaders(train=20 batches, valid=2 batches)"
    assert repr(page.run["loss"]).startswith("Series(40 values, steps 0–39, last ")
    assert repr(page).startswith("PageData('run', '")


def test_a_learner_of_loaders_of_ones_own_says_their_kind():
    class Data:
        train, valid = make_batches(3), None

    learn = Learner(Data(), nn.Linear(2, 1), F.mse_loss)
    assert repr(learn).startswith("Learner(dls=Data(train=3 batches, valid=None), model=Linear, ")
