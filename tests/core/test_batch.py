"""Batches of any form and loaders of any kind."""

import collections
import copy
import dataclasses
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookcb import (
    Callback,
    Learner,
    Loop,
    accuracy,
)
from hookcb.core.batch import map_tensors, parts, to_device
from tests.support import (
    PACKED,
    Pair,
    Takes,
    X,
    Y,
    Z,
    along,
    events,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    train_by_hand,
    weights,
)


def ends_like(got, expected):
    if torch.is_tensor(expected):
        return torch.is_tensor(got) and torch.equal(got, expected)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(ends_like(got[k], expected[k]) for k in expected)
    if not isinstance(expected, (tuple, list)):
        return got == expected
    return len(got) == len(expected) and all(map(ends_like, got, expected))


@in_turn(
    ("batch", "n_inp", "args", "kwargs", "targets"),
    [
        (X, None, (X,), {}, ()),
        ((X,), None, (X,), {}, ()),
        ([X], None, (X,), {}, ()),
        ((X, Y), None, (X,), {}, (Y,)),
        ([X, Y], None, (X,), {}, (Y,)),
        (Pair(X, Y), None, (X,), {}, (Y,)),
        ((X, Y, Z), None, (X, Y), {}, (Z,)),
        ((X, Y, Z), 1, (X,), {}, (Y, Z)),
        ((X, Y, Z), 3, (X, Y, Z), {}, ()),
        ((X, Y), 2, (X, Y), {}, ()),
        (((X, Z), Y), None, ((X, Z),), {}, (Y,)),
        (([X, {"k": Z}], Y), None, ([X, {"k": Z}],), {}, (Y,)),
        (({"x": X, "m": Z}, Y), None, ({"x": X, "m": Z},), {}, (Y,)),
        ((X, {"t": Y}), None, (X,), {}, ({"t": Y},)),
        ((Pair(X, Z), Y), None, (Pair(X, Z),), {}, (Y,)),
        ({"x": X, "mask": Z}, None, (), {"x": X, "mask": Z}, ()),
        (collections.OrderedDict(x=X, mask=Z), None, (), {"x": X, "mask": Z}, ()),
        (types.MappingProxyType({"x": X}), None, (), {"x": X}, ()),
        ((PACKED, Y), None, (PACKED,), {}, (Y,)),
        (PACKED, None, (PACKED,), {}, ()),
    ],
)
def test_a_batch_of_any_form_reaches_the_model_and_the_loss_function_whole(
    batch, n_inp, args, kwargs, targets
):
    seen = []

    def loss_func(pred, *yb):
        seen.append(yb)
        return pred.square().mean()

    model = Takes()
    learn = Learner([batch, batch], model, loss_func, torch.optim.SGD, n_inp=n_inp)
    before = weights(model)
    fit(learn)
    assert len(model.got) == len(seen) == 2
    assert ends_like(model.got[0][0], args)
    assert [type(a) for a in model.got[0][0]] == [type(a) for a in args]
    assert ends_like(model.got[0][1], kwargs)
    assert ends_like(seen[0], targets)
    assert not same(before, weights(model))


def test_single_inputs_and_targets_read_as_x_and_y():
    seen = []
    look = Callback(name="look", after_pred=lambda cb: seen.append((cb.x, cb.y, cb.xb, cb.yb)))
    fit(Learner([(X, Y)], Takes(), lambda p, y: p.mean(), torch.optim.SGD, cbs=look))
    x, y, xb, yb = seen[0]
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert (type(xb), type(yb)) == (tuple, tuple)
    seen.clear()
    look = Callback(name="look", after_pred=lambda cb: seen.append((cb.x, cb.y, cb.xb, cb.yb)))
    fit(Learner([(X, Y, Z)], Takes(), lambda p, y, z: p.mean(), torch.optim.SGD, n_inp=1, cbs=look))
    assert torch.equal(seen[0][0], X)
    assert len(seen[0][1]) == 2


def test_a_mapping_trains_on_the_output_s_own_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x, labels):
            pred = self.fc(x)
            return types.SimpleNamespace(loss=F.mse_loss(pred, labels), logits=pred)

    torch.manual_seed(0)
    model = Model()
    by_hand = copy.deepcopy(model.fc)
    batches = make_batches()
    learn = Learner([{"x": x, "labels": y} for x, y in batches], model, opt_func=torch.optim.SGD, lr=0.1)
    fit(learn)
    losses = train_by_hand(by_hand, batches)
    assert same(weights(model.fc), weights(by_hand))
    assert list(learn.recorder.losses) == losses


def test_without_a_loss_function_a_tensor_output_is_refused_before_any_step():
    model = make_model()
    before = weights(model)
    learn = Learner(make_batches(), model)
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError), match="loss"):
        fit(learn)
    assert same(weights(model), before)


def test_batches_and_predictions_of_half_precision_and_integers_reach_the_metrics():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    batches = [(torch.randint(0, 5, (6, 2)), torch.randint(0, 3, (6,))) for _ in range(3)]
    learn = Learner((batches, batches), model, F.cross_entropy, metrics=accuracy)
    fit(learn)
    assert 0 <= learn.recorder.rows[0]["accuracy"] <= 1


@in_turn("n_inp", [-1, 0, 1.5, "1"])
def test_an_n_inp_that_cannot_be_is_refused(n_inp):
    with pytest.raises((ValueError, TypeError), match="n_inp"):
        fit(Learner(make_batches(), make_model(), F.mse_loss, n_inp=n_inp))


def test_an_n_inp_larger_than_the_batch_is_refused_with_its_name():
    with pytest.raises((ValueError, TypeError), match="n_inp"):
        fit(Learner(make_batches(), make_model(), F.mse_loss, n_inp=5))


def test_predict_and_get_loss_can_be_overridden():
    class Mine(Learner):
        def predict(self):
            return self.model(*self.xb) * 2

        def get_loss(self):
            return self.loss_func(self.pred, *self.yb) + 1

    batches = make_batches()
    learn = fit(Mine((batches, batches), make_model(), F.mse_loss, torch.optim.SGD, lr=0.1))
    model = make_model()
    losses = train_by_hand(model, batches, loss_func=lambda p, y: F.mse_loss(p * 2, y) + 1)
    assert list(learn.recorder.losses) == losses
    preds, _ = learn.get_preds()
    model.eval()
    with torch.no_grad():
        assert torch.equal(preds, torch.cat([model(x) * 2 for x, _ in batches]))


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        yield from make_batches()


class Stateless:
    """An iterable whose __iter__ is a generator function."""

    def __iter__(self):
        yield from make_batches()


def loaders():
    flat = [(x, y) for xs, ys in make_batches() for x, y in zip(xs, ys, strict=True)]
    return {
        "list": make_batches(),
        "tuple of three": None,
        "loader": DataLoader(flat, batch_size=4),
        "stream": DataLoader(Stream(), batch_size=None),
        "bare stream": Stream(),
        "generator class": Stateless(),
        "deque": collections.deque(make_batches()),
    }


@in_turn(
    ("kind", "form"),
    along([k for k, v in loaders().items() if v is not None], ["alone", "pair", "attributes"]),
)
def test_every_kind_of_loader_trains_alike(kind, form):
    dl = loaders()[kind]
    dls = {"alone": dl, "pair": (dl, None), "attributes": types.SimpleNamespace(train=dl, valid=dl)}[form]
    learn = fit(Learner(dls, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1), 2)
    model = make_model()
    train_by_hand(model, make_batches(), 2)
    assert same(weights(learn.model), weights(model))
    assert len(learn.recorder.losses) == 6
    assert ("valid_loss" in learn.recorder.rows[0]) == (form == "attributes")


def test_a_loader_without_length_has_no_n_iter():
    seen = []
    look = Callback(name="look", after_batch=lambda cb: seen.append((cb.iter, cb.n_iter, cb.pct_train)))
    fit(Learner(Stateless(), make_model(), F.mse_loss, torch.optim.SGD, cbs=look), 2)
    assert [s[:2] for s in seen] == [(0, None), (1, None), (2, None)] * 2
    assert all(0 <= s[2] <= 1 for s in seen)
    assert [s[2] for s in seen] == sorted(s[2] for s in seen)


def test_a_loader_whose_len_raises_counts_as_without_length():
    class NoLen(Stateless):
        def __len__(self):
            raise TypeError("no length")

    learn = fit(Learner(NoLen(), make_model(), F.mse_loss, torch.optim.SGD))
    assert len(learn.recorder.losses) == 3


def test_a_list_of_exactly_two_batches_is_no_pair_of_loaders():
    batches = [list(b) for b in make_batches(2)]
    learn = fit(Learner(batches, make_model(), F.mse_loss, torch.optim.SGD, lr=0.1))
    assert len(learn.recorder.losses) == 2


def test_without_validation_its_events_do_not_fire_and_the_row_has_no_valid_loss():
    log = []
    learn = fit(make_learner(n_valid=0, cbs=spy(log, "a"), metrics=F.l1_loss))
    assert not {"before_validate", "after_validate"} & set(events(log))
    assert "valid_loss" not in learn.recorder.rows[0] or learn.recorder.rows[0]["valid_loss"] is None
    with pytest.raises((TypeError, ValueError), match=r"valid|dl"):
        learn.validate()
    with pytest.raises((TypeError, ValueError), match=r"valid|dl"):
        learn.get_preds()


@in_turn("bad", [None, 3, "train", nn.Linear(2, 1), object(), (1, 2), (make_batches(), 3)])
def test_dls_of_the_wrong_kind_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match=r"dls|train|valid|batches"):
        fit(Learner(bad, make_model(), F.mse_loss))


def test_a_function_that_makes_batches_is_refused_or_called():
    def generate():
        yield from make_batches()

    try:
        learn = fit(Learner(generate, make_model(), F.mse_loss, torch.optim.SGD), 2)
    except TypeError as exc:
        assert "generate" in str(exc) or "function" in str(exc)  # noqa: PT017
    else:
        assert len(learn.recorder.losses) == 6


@pytest.mark.parametrize("form", ["alone", "pair"])
def test_a_dataset_given_in_place_of_a_loader_is_refused(form):
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    with pytest.raises((TypeError, ValueError), match="DataLoader"):
        fit(Learner(data if form == "alone" else (data, data), make_model(), F.mse_loss))


@pytest.mark.parametrize("empty", [list, lambda: iter(()), lambda: DataLoader(Stream(), batch_size=None)])
def test_an_empty_training_loader_is_told(empty, monkeypatch):
    monkeypatch.setattr(Stream, "__iter__", lambda self: iter(()))
    learn = Learner((empty(), None), make_model(), F.mse_loss)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="batch"):
        fit(learn)


def test_an_empty_validation_loader_is_told():
    learn = make_learner()
    with pytest.raises((ValueError, TypeError), match="batch"):
        learn.validate([])
    with pytest.raises((ValueError, TypeError), match="batch"):
        learn.validate(iter(()))
    with pytest.raises((ValueError, TypeError), match="batch"):
        learn.get_preds([])


def test_a_one_shot_iterator_is_not_silently_empty_in_the_second_epoch():
    learn = Learner((iter(make_batches()), None), make_model(), F.mse_loss, torch.optim.SGD)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"batch|iterator"):
        fit(learn, 2)


def test_a_one_shot_iterator_is_not_silently_empty_in_the_second_validation():
    learn = Learner((make_batches(), iter(make_batches())), make_model(), F.mse_loss, torch.optim.SGD)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"batch|iterator"):
        fit(learn, 2)


@in_turn("model", [None, F.relu, nn.Linear, lambda x: x, "model"])
def test_a_model_that_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match="Module"):
        Learner(make_batches(), model, F.mse_loss)
    with pytest.raises(TypeError, match="Module"):
        Loop(model)


@in_turn("n_epoch", [-1, 1.5, "2", None])
def test_a_number_of_epochs_that_cannot_be_is_refused_before_anything_fires(n_epoch):
    log = []
    learn = make_learner(cbs=spy(log, "a"))
    with pytest.raises((ValueError, TypeError), match="n_epoch"):
        fit(learn, n_epoch)
    assert log == []


def test_a_fit_of_no_epochs_fires_before_and_after_fit_alone():
    log = []
    fit(make_learner(cbs=spy(log, "a")), 0)
    assert events(log) == ["before_fit", "after_fit"]


@pytest.mark.parametrize("lr", [-1, "fast", float("nan")])
def test_a_learning_rate_that_cannot_be_is_refused(lr):
    with pytest.raises((ValueError, TypeError), match=r"lr|learning rate"):
        fit(make_learner(), lr=lr)


@pytest.mark.parametrize("key", ["loss_func", "opt_func", "metrics"])
def test_arguments_of_the_wrong_kind_are_refused_by_name(key):
    with pytest.raises(TypeError, match=key.removesuffix("s")):
        fit(make_learner(**{key: 3}))


def test_a_loss_that_is_no_scalar_is_told():
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"loss|scalar|element"):
        fit(make_learner(loss_func=lambda p, y: (p - y) ** 2))


def test_a_loss_function_that_returns_a_float_is_told():
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"loss|ensor"):
        fit(make_learner(loss_func=lambda p, y: 0.5))


def test_strings_in_a_batch_are_gathered_one_a_sample():
    names = [["a", "b"], ["c", "d"]]
    batches = [((X[2 * i : 2 * i + 2], names[i]), Y[2 * i : 2 * i + 2, :1]) for i in range(2)]

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            return self.fc(x[0])

    (x, who), preds, _ = Learner((batches, batches), Named(), F.mse_loss).get_preds(with_input=True)
    assert who == ["a", "b", "c", "d"]
    assert torch.equal(x, X)
    assert preds.shape == (4, 1)


def test_a_batch_is_moved_whole_to_another_device():
    @dataclasses.dataclass(frozen=True)
    class Sample:
        x: torch.Tensor
        name: str

    batch = {"a": [X, (Y, "text")], "pair": Pair(X, None), "sample": Sample(Z, "z"), "n": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"][0].is_meta
    assert moved["sample"].x.is_meta
    assert moved["sample"].name == "z"
    assert moved["n"] == 3
    assert not batch["sample"].x.is_meta


def test_what_is_on_the_device_already_is_not_copied():
    batch = (X, [Y])
    moved = to_device(batch, torch.device("cpu"))
    assert moved[0] is X
    assert moved[1][0] is Y


@pytest.mark.cuda
def test_batches_are_moved_to_the_model_s_gpu():
    learn = Learner(make_batches(), make_model().cuda(), F.mse_loss, lr=0.1)
    fit(learn)
    assert next(learn.model.parameters()).is_cuda
    learn = Learner((make_batches(), make_batches()), make_model(), F.mse_loss, device="cuda")
    fit(learn)
    assert next(learn.model.parameters()).is_cuda
    preds, _ = learn.get_preds()
    assert not preds.is_cuda


def test_what_moves_itself_does_so_at_any_depth():
    class Own:
        def to(self, device):
            return ("moved to", device)

    @dataclasses.dataclass
    class Sample:
        own: Own
        packed: object

    device = torch.device("meta")
    moved = to_device([Sample(Own(), [PACKED])], device)[0]
    assert moved.own == ("moved to", device)
    assert moved.packed[0].data.is_meta
    assert not moved.packed[0].batch_sizes.is_meta


@dataclasses.dataclass
class Node:
    x: torch.Tensor
    parent: object = None
    children: list = dataclasses.field(default_factory=list)


def test_what_contains_itself_is_gone_through_once():
    """Without it, three children that know their parent would have 3^25 parts."""
    root = Node(X)
    root.children = [Node(Y, parent=root) for _ in range(3)]
    found = [path for path, x in parts(root) if isinstance(x, torch.Tensor)]
    assert found == [".x", *(f".children[{i}].x" for i in range(3))]
    doubled = map_tensors(lambda x: 2 * x, root)
    assert torch.equal(doubled.children[2].x, 2 * Y)
    assert doubled.children[2].parent is root
    twice = {"x": X}
    twice |= {"a": twice, "b": twice}
    assert [path for path, x in parts(twice)] == [".x", ".a", ".b"]


def test_a_part_that_occurs_twice_has_both_paths():
    pair = (X, Y)
    assert [path for path, _ in parts([pair, pair])] == ["[0][0]", "[0][1]", "[1][0]", "[1][1]"]


def test_fields_that_are_not_set_are_left_out():
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        aux: torch.Tensor = dataclasses.field(init=False)

    assert [path for path, _ in parts(Output(X))] == [".logits"]
    assert not hasattr(map_tensors(torch.neg, Output(X)), "aux")
