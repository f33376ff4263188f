"""Shapes of outputs, and the batches that a summary takes or refuses."""

import types
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookcb import layer_info, module_summary
from tests.hooks.summary_models import PACKED, Calls, S, mlp, randn
from tests.support import Pair, changes_in, in_terminal, row, row_of_type


@dataclass
class Out:
    a: Tensor
    b: Any = None


@pytest.mark.parametrize(
    ("output", "shape"),
    [
        (lambda x: (x, x[0]), (S([4, 3]), S([3]))),
        (lambda x: [x, (x[:2], x)], [S([4, 3]), (S([2, 3]), S([4, 3]))]),
        (lambda x: {"a": x, "b": {"c": x[:, 0]}}, {"a": S([4, 3]), "b": {"c": S([4])}}),
        (lambda x: Pair(x, x.sum()), Pair(S([4, 3]), S([]))),
        (lambda x: Out(x, (x[0],)), Out(S([4, 3]), (S([3]),))),
        (lambda x: (x, None), (S([4, 3]), None)),
        (lambda x: {"a": x, "b": None}, {"a": S([4, 3]), "b": None}),
        (lambda x: None, None),
        (lambda x: (), ()),
        (lambda x: x.to_sparse(), S([4, 3])),
        (lambda x: x > 0, S([4, 3])),
        (lambda x: x[:0], S([0, 3])),
    ],
    ids=[
        "tuple",
        "list",
        "dict",
        "namedtuple",
        "dataclass",
        "tuple-with-None",
        "dict-with-None",
        "None",
        "empty",
        "sparse",
        "bool",
        "no-rows",
    ],
)
def test_shapes_are_nested_as_the_output_is(output, shape):
    inner = Calls(lambda m, x: output(x))
    model = Calls(lambda m, x: m.inner(m.fc(x)), fc=nn.Linear(5, 3), inner=inner)
    summary = module_summary(model, randn(4, 5))
    found = row(summary, "inner")
    assert found.called
    assert found.shape == shape
    assert type(found.shape) is type(shape)
    assert row(summary, "fc").shape == S([4, 3])
    for text in (str(summary), in_terminal(summary), summary._repr_html_()):
        assert "fc" in text
    assert layer_info(model, randn(1, 5))[0] == ("Linear", 18, True, S([1, 3]), False)


def test_outputs_of_recurrent_layers_keep_their_states():
    lstm = module_summary(nn.LSTM(5, 7, batch_first=True), randn(2, 6, 5))
    assert next(iter(lstm)).shape == (S([2, 6, 7]), (S([1, 2, 7]), S([1, 2, 7])))
    gru = next(iter(module_summary(nn.GRU(5, 7), PACKED)))
    assert gru.called
    assert gru.shape[1] == S([1, 2, 7])
    assert "5" in str(gru.shape[0])  # five steps in all


@pytest.mark.parametrize("key", ["[/red]", "<b>", "a.b", 3, ("t", 1)])
def test_any_key_of_a_dict_can_be_shown(key):
    summary = module_summary(Calls(lambda m, x: {key: x}), randn(4, 3))
    assert next(iter(summary)).shape == {key: S([4, 3])}
    assert str(summary)
    assert in_terminal(summary)
    assert "<b>:" not in summary._repr_html_()


def test_shapes_are_those_of_the_output_not_of_what_later_became_of_it():
    model = Calls(lambda m, x: m.fc(x).resize_(2, 2), fc=nn.Linear(5, 3))
    assert row(module_summary(model, randn(4, 5)), "fc").shape == S([4, 3])


class HasAll:
    """Answers every question for an attribute with itself."""

    def __getattr__(self, name):
        return self


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.parametrize(
    "output",
    [
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x, x[:2]]),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to(torch.complex64),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to("meta"),
        lambda x: torch.max(x, 1),
        lambda x: types.SimpleNamespace(logits=x),
        lambda x: HasAll(),
        lambda x: {x, 3},
        lambda x: "text",
        lambda x: nn.Linear,
    ],
    ids=[
        "jagged",
        "nested",
        "float8",
        "complex",
        "csr",
        "meta",
        "max",
        "object",
        "has-all",
        "set",
        "text",
        "class",
    ],
)
def test_an_output_may_be_anything(output):
    model = Calls(lambda m, x: m.inner(m.fc(x)), fc=nn.Linear(5, 3), inner=Calls(lambda m, x: output(x)))
    with changes_in(model) as changed:
        summary = module_summary(model, randn(4, 5))
        infos = layer_info(model, randn(4, 5))
    assert changed == []
    assert row(summary, "inner").called
    assert [info.type for info in infos] == ["Linear", "Calls"]
    assert all("Linear" in text for text in (str(summary), in_terminal(summary), summary._repr_html_()))


def test_a_generator_a_layer_returns_is_not_used_up():
    model = Calls(
        lambda m, x: sum(m.inner(m.fc(x))), fc=nn.Linear(5, 3), inner=Calls(lambda m, x: (r for r in x))
    )
    for summary in (module_summary(model, randn(4, 5)), module_summary(model, randn(4, 5), depth=1)):
        assert row_of_type(summary, "Calls").shape == S([3])


def test_layers_called_by_keyword_or_without_input_have_their_shapes():
    model = Calls(
        lambda m, x: m.act(input=m.fc(input=x)) + m.shift(),
        fc=nn.Linear(5, 3),
        act=nn.ReLU(),
        shift=Calls(lambda m: m.w, w=nn.Parameter(torch.ones(3))),
    )
    summary = module_summary(model, randn(4, 5))
    assert [row(summary, name).shape for name in ("fc", "act", "shift")] == [S([4, 3]), S([4, 3]), S([3])]
    assert [info.shape for info in layer_info(model, randn(1, 5))] == [S([1, 3]), S([1, 3]), S([3])]


def test_a_mapping_means_keyword_arguments():
    model = Calls(lambda m, *, x, scale: m.fc(x) * scale, fc=nn.Linear(3, 2))
    for batch in ({"x": randn(4, 3), "scale": 2.0}, UserDict(x=randn(4, 3), scale=2.0)):
        assert row(module_summary(model, batch), "fc").shape == S([4, 2])
        assert layer_info(model, batch)[0].params == 8


def test_several_inputs_may_be_anything():
    model = Calls(lambda m, d, x, how: m.fc(d["x"] + x) if how == "sum" else None, fc=nn.Linear(3, 2))
    assert row(module_summary(model, {"x": randn(4, 3)}, randn(4, 3), "sum"), "fc").called


def test_a_batch_is_moved_to_where_the_model_is():
    model = nn.Sequential(nn.Linear(10, 30, device="meta"), nn.LSTM(30, 7, device="meta"))
    summary = module_summary(model, randn(4, 10))
    assert row(summary, "0").shape == S([4, 30])
    assert row(summary, "0").multiply_adds == 4 * 10 * 30
    assert summary.n_params == 330 + 4 * 7 * (30 + 7 + 2)


@pytest.mark.parametrize("depth", [-1, "x", 1.5, [1]])
def test_a_wrong_depth_is_refused(depth):
    calls = []
    model = Calls(lambda m, x: calls.append(x))
    with pytest.raises((TypeError, ValueError), match="depth"):
        module_summary(model, randn(2, 3), depth=depth)
    assert not calls


@pytest.mark.parametrize("look", [module_summary, layer_info])
@pytest.mark.parametrize("model", ["x", None, nn.Linear, [nn.Linear(2, 2)]])
def test_what_is_no_model_is_refused(look, model):
    with pytest.raises(TypeError, match=r"(?i)module|model|learner"):
        look(model, randn(2, 3))


@pytest.mark.parametrize("look", [module_summary, layer_info])
def test_a_missing_batch_is_said(look):
    with pytest.raises((TypeError, ValueError)) as caught:
        look(mlp())
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "xb" in said or "batch" in said


@pytest.mark.parametrize(
    ("xb", "error"),
    [
        ((randn(4, 9),), RuntimeError),
        ((torch.ones(4, 10, dtype=torch.long),), RuntimeError),
        ((randn(4, 10), randn(4, 10)), TypeError),
        (("text",), TypeError),
        (({"wrong": randn(4, 10)},), TypeError),
        ((None,), TypeError),
    ],
    ids=["shape", "dtype", "too-many", "text", "keyword", "None"],
)
def test_a_wrong_batch_gives_the_error_of_the_model(xb, error):
    model = mlp()
    with changes_in(model) as changed, pytest.raises(error):
        module_summary(model, *xb)
    assert changed == []


class Reused(nn.Module):
    """Calls one layer on inputs of several shapes."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.act, self.fc = sizes, nn.ReLU(), nn.Linear(2, 3)

    def forward(self, x):
        return [self.act(self.fc(x[:n])) for n in self.sizes][-1]


def test_a_layer_called_several_times_shows_every_shape_it_gave():
    summary = module_summary(Reused((4, 2, 4)), torch.ones(5, 2))
    row = next(row for row in summary if row.name == "fc")
    assert row.n_calls == 3
    assert list(row.shapes.values()) == [torch.Size([4, 3]), torch.Size([2, 3])]
    assert row.shape == torch.Size([4, 3])
    assert "Linear ×3" in str(summary)
    assert "4×3, 2×3" in str(summary)
    assert "1×3, 2×3, 3×3 … and 2 more" in str(module_summary(Reused(range(1, 6)), torch.ones(5, 2)))


class TakesOneDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, batch):
        return self.fc(batch["image"]) * batch["scale"]


class TakesNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, n=None):
        return self.table(torch.arange(n or 4))


def test_a_model_that_takes_one_dict_is_given_it_whole():
    summary = module_summary(TakesOneDict(), {"image": torch.ones(5, 2), "scale": 2.0})
    assert summary.rows[0].shape == torch.Size([5, 3])


def test_a_model_that_takes_nothing_is_run_without_inputs():
    assert module_summary(TakesNothing()).rows[0].shape == torch.Size([4, 3])
    assert module_summary(TakesNothing(), {"n": 2}).rows[0].shape == torch.Size([2, 3])
    with pytest.raises(ValueError, match="there is no batch xb"):
        module_summary(nn.Linear(2, 1))
