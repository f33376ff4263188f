"""`learn.diagnose()` without Diagnose looks at a batch again, without a trace, and says how much was seen."""

import copy
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, Learner, assert_no_hooks
from hookcb.diagnosis.preflight import first_batch, preserve_loader, why_not_readable
from tests.support import first, fit

torch.manual_seed(0)
X = torch.randn(96, 8)
Y = (X @ torch.randn(8, 3)).argmax(1)
HEAD = "an activation before the loss"


def net(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), *last)


def loader(**kwargs):
    return DataLoader(TensorDataset(X, Y), 16, shuffle=True, **kwargs)


def trained(model=None, data=None, loss_func=F.cross_entropy, n_epoch=3, cbs=(), **kwargs):
    learn = Learner(loader() if data is None else data, model or net(), loss_func, lr=1e-2, **kwargs)
    return fit(learn, n_epoch, cbs=[ActivationStats(), GradientHealth(), *cbs])


def was_looked_at(verdict):
    return "one more batch after the training" in verdict.coverage


def reason(verdict):
    """Why no batch was looked at."""
    assert not was_looked_at(verdict)
    (line,) = [line for line in verdict.coverage if "head.activation" in line]
    return line.partition("(")[2].rstrip(")")


# ---- what it sees


@pytest.mark.parametrize(
    ("last", "loss_func"), [(nn.ReLU(), F.cross_entropy), (nn.Softmax(1), F.cross_entropy)]
)
def test_an_activation_on_the_logits_is_found_without_diagnose(last, loss_func):
    verdict = trained(net(last), loss_func=loss_func).diagnose()
    assert (verdict.status, verdict.primary.code, verdict.primary.layer) == ("sick", "head.activation", "3")
    assert [f.code for f in verdict.findings].count("head.activation") == 1


def test_a_healthy_training_is_so_as_far_as_looked_and_says_how_far():
    verdict = trained(n_epoch=10).diagnose()
    assert verdict.status == "healthy"
    assert re.match(r"HEALTHY  as far as checked: (\d+) of (\d+) checks ran$", verdict.lines()[0])
    assert was_looked_at(verdict)
    assert verdict.n_checked >= 38
    for fine in (
        HEAD,
        "NaN in the inputs",
        "symmetric initialization",
        "dropout before the loss",
        "parameters twice in the optimizer",
    ):
        assert fine in verdict.ruled_out
    assert any("loss at the beginning" in fine for fine in verdict.ruled_out)  # the guess is of the batch


def test_more_is_looked_at_than_without_it(monkeypatch):
    learn = trained(n_epoch=10)
    with_it = learn.diagnose()
    monkeypatch.setattr("hookcb.diagnosis.callback.add_preflight", lambda *args: None)
    assert with_it.n_checked >= learn.diagnose().n_checked + 8


def test_the_counts_are_in_the_headline_of_a_sick_one_too():
    verdict = trained(net(nn.ReLU())).diagnose()
    assert (
        verdict.lines()[0] == f"SICK  An activation does not suit the loss: layer 3 (head.activation; "
        f"{verdict.n_checked} of {verdict.n_checks} checks ran)"
    )
    assert verdict.to_dict()["n_checks"] == verdict.n_checks


@pytest.mark.slow
def test_a_model_trained_to_a_small_loss_raises_no_alarm_of_its_beginning():
    """Judged anew it would begin far above guessing, or with closed gates, or with saturated units."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    learn = trained(model, n_epoch=30)
    with torch.no_grad():
        model[2].weight.mul_(50)  # sure of itself, as after a long training
    verdict = learn.diagnose()
    assert was_looked_at(verdict)
    assert verdict.status == "healthy", verdict


def test_an_lstm_that_has_learned_to_shut_its_gates_is_no_fault():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x.unflatten(1, (2, 4)))[0][:, -1])

    learn = trained(Net())
    with torch.no_grad():
        learn.model.lstm.bias_ih_l0[8:16] = -10
    assert "gate.shut" not in [f.code for f in learn.diagnose().findings]


def test_a_diagnose_has_seen_more_and_no_batch_is_asked_for():
    learn = fit(Learner(loader(), net(), F.cross_entropy), 1, cbs=Diagnose(show=False))
    assert learn.diagnose() == learn.diagnosis.verdict
    assert not was_looked_at(learn.diagnose())


def test_a_repeated_parameter_in_the_optimizer_is_found():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    opt.param_groups[0]["params"].append(model[0].weight)
    learn = fit(Learner(loader(), model, F.cross_entropy, opt), 1, cbs=[ActivationStats(), GradientHealth()])
    assert learn.diagnose().primary.code == "param.duplicated"


def test_nan_in_the_weights_of_the_end_is_found():
    learn = trained()
    with torch.no_grad():
        learn.model[0].weight[0] = float("nan")
    verdict = learn.diagnose()
    assert verdict.status == "sick"
    assert "nonfinite.first" in [f.code for f in verdict.findings]


# ---- it leaves no trace


class Noisy(nn.Module):
    """Draws numbers of all kinds, keeps statistics, counts calls, clips its weights, changes its input."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        self.body[0].weight.data.clamp_(-0.3, 0.3 / self.n_calls)
        x.mul_(1 + 1e-3 * random.random() * np.random.rand())
        return self.body(x)


class Own(Dataset):
    """Draws from a generator of its own, and counts what it was asked for."""

    def __init__(self):
        self.generator, self.n_asked = np.random.default_rng(0), 0

    def __len__(self):
        return 48

    def __getitem__(self, i):
        self.n_asked += 1
        return X[i] + torch.tensor(self.generator.normal(), dtype=torch.float32), Y[i]


class Centers(nn.Module):
    """A loss with a state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.n_calls = 0

    def forward(self, pred, y):
        self.n_calls += 1
        self.mean.add_(pred.detach().mean(0))
        return F.cross_entropy(pred, y)


def everything(learn):
    """Bits of all that a look could change."""
    opt = [copy.deepcopy(learn.opt.state_dict())]
    grads = [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]
    modes = [m.training for m in learn.model.modules()]
    counts = [m.n_calls for m in (learn.model, learn.loss_func) if hasattr(m, "n_calls")]
    weights = [x.clone() for m in (learn.model, learn.loss_func) for x in m.state_dict().values()]
    numbers = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
    batch = [learn.xb, learn.yb, learn.pred, learn.loss, learn.training, learn.iter, learn.train_iter]
    return [opt, grads, modes, counts, weights, numbers, batch]


def flat(x):
    if isinstance(x, dict):
        return [item for key, value in x.items() for item in (key, *flat(value))]
    return [item for value in x for item in flat(value)] if isinstance(x, list | tuple) else [x]


def same(a, b):
    pairs = list(zip(flat(a), flat(b), strict=True))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def test_nothing_of_model_loss_optimizer_modes_or_random_numbers_is_changed():
    learn = trained(Noisy(), loss_func=Centers())
    for p in learn.model.parameters():
        p.grad = torch.ones_like(p)
    learn.model.body[1].eval()
    before = everything(learn)
    assert was_looked_at(learn.diagnose())
    assert same(before, everything(learn))
    assert_no_hooks(learn.model)


@pytest.mark.parametrize("workers", first([0, 1]))
def test_a_training_that_goes_on_is_to_the_bit_what_it_is_without(workers):
    def run(looks):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        generator = torch.Generator().manual_seed(5)
        lasting = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
        data = DataLoader(Own(), 16, shuffle=True, generator=generator, num_workers=workers, **lasting)
        learn = trained(Noisy(), data, Centers(), n_epoch=1)
        if looks:
            assert was_looked_at(learn.diagnose())
        fit(learn, 1)
        data._iterator = (
            None  # ends the worker now; left to the collection of garbage it takes a timeout of 5 s
        )
        return [x.clone() for x in learn.model.state_dict().values()], data.dataset.n_asked

    assert same(run(False), run(True))


def test_batches_that_the_user_holds_are_not_changed_in_place():
    batches = [(X[i : i + 16].clone(), Y[i : i + 16]) for i in range(0, 96, 16)]
    learn = trained(Noisy(), batches, n_epoch=1)
    held = [x.clone() for x, _ in batches]
    assert was_looked_at(learn.diagnose())
    assert same(held, [x for x, _ in batches])


def test_it_can_be_asked_again_and_says_the_same():
    learn = trained()
    assert learn.diagnose() == learn.diagnose()


# ---- batches that are not run, with the reason


def test_data_that_can_be_asked_only_once_are_not_touched():
    asked = []

    def stream():
        for i in range(1000):
            asked.append(i)
            yield X[:16], Y[:16]

    class Stream:
        def __init__(self):
            self.source = stream()

        def __iter__(self):
            return (next(self.source) for _ in range(4))

    class Samples(IterableDataset):
        def __init__(self):
            self.source = iter([(x, y) for x, y in zip(X, Y, strict=True)] * 5)

        def __iter__(self):
            return (next(self.source) for _ in range(32))

    for data in (Stream(), DataLoader(Samples(), 16)):
        learn = trained(data=data, n_epoch=1)
        n = len(asked)
        assert "which can be read only once" in reason(learn.diagnose())
        assert len(asked) == n


def test_data_of_ones_own_that_can_be_asked_again_are():
    class Own:
        def __iter__(self):
            return ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 96, 16))

    class Samples(IterableDataset):
        def __iter__(self):
            return zip(X, Y, strict=True)

    for data in (Own(), DataLoader(Samples(), 16)):
        assert was_looked_at(trained(data=data).diagnose())


def test_during_a_fit_no_batch_is_looked_at():
    verdicts = []
    learn = Learner(loader(), net(nn.ReLU()), F.cross_entropy, cbs=[ActivationStats(), GradientHealth()])
    fit(learn, 1, cbs=Callback(after_epoch=lambda cb: verdicts.append(learn.diagnose())))
    assert "a fit is running" in reason(verdicts[0])
    assert HEAD not in verdicts[0].ruled_out
    assert learn.diagnose().primary.code == "head.activation"


class Scales(Callback):
    def before_batch(self):
        self.learn.xb = tuple(x / 2 for x in self.xb)


def test_a_callback_that_may_change_batches_is_told_and_none_is_looked_at():
    verdict = trained(cbs=[Scales()]).diagnose()
    assert reason(verdict) == "Scales acts before the loss, and inspecting one batch would leave it out"


def test_a_callback_that_only_looks_on_is_no_obstacle():
    assert was_looked_at(trained(cbs=[Callback(after_batch=lambda cb: None)]).diagnose())


def test_a_model_that_raises_now_is_told_so():
    learn = trained()
    learn.model[2] = nn.Linear(5, 3)
    assert "inspecting one batch failed with RuntimeError" in reason(learn.diagnose())


def test_a_model_that_was_frozen_afterwards_is_not_called_detached():
    learn = trained()
    learn.model.requires_grad_(False)
    verdict = learn.diagnose()
    assert "loss.detached" not in [f.code for f in verdict.findings]
    assert reason(verdict) == "no parameter of the model requires a gradient"


def test_all_sources_have_the_reason():
    learn = trained(cbs=[Scales()])
    verdict = learn.diagnose()
    lines = [line for line in verdict.coverage if "acts before the loss" in line]
    assert len(lines) == 1
    for code in ("input.nonfinite", "init.symmetric", "head.activation", "param.duplicated"):
        assert code in lines[0]


ROWS = torch.arange(12.0)[:, None]


class Stream(IterableDataset):
    def __iter__(self):
        yield from ROWS


class Counting:
    """A loader that counts its passes."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from ROWS.split(4)


def shuffled(**kwargs):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(ROWS), 4, shuffle=True, generator=generator, **kwargs)


def test_a_loader_that_was_asked_gives_what_it_would_have_given():
    asked, other = shuffled(), shuffled()
    with preserve_loader(asked):
        seen = first_batch(asked)[0]
    batches = [batch for (batch,) in asked]
    assert torch.equal(torch.cat(batches), torch.cat([batch for (batch,) in other]))
    assert torch.equal(seen, batches[0])


def test_attributes_of_a_loader_and_random_numbers_are_put_back():
    loader, before = Counting(), torch.get_rng_state()
    with preserve_loader(loader):
        assert torch.equal(first_batch(loader), ROWS[:4])
        torch.rand(3)
        assert loader.passes == 1
    assert loader.passes == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_no_worker_is_started_for_one_batch(monkeypatch):
    def start(self):
        raise AssertionError("a worker process")

    loader = shuffled(num_workers=2)
    monkeypatch.setattr(torch.multiprocessing.Process, "start", start)
    assert first_batch(loader)[0].shape == (4, 1)


def test_an_iterable_dataset_gives_whole_batches():
    assert torch.equal(first_batch(DataLoader(Stream(), 5)), ROWS[:5])


def test_a_loader_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="has no batch"):
        first_batch([])


def test_what_can_be_asked_only_once_is_not_asked():
    assert "read only once" in why_not_readable(iter(ROWS.split(4)))
    assert why_not_readable(ROWS.split(4)) == why_not_readable(shuffled()) == ""
