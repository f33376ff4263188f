"""Hooks on layers that give a ModelOutput."""

import pytest
import torch

from hookcb.hooks.hook import hook_output
from tests.hooks import support as zoo
from tests.hooks.support import G, X


def test_a_stored_model_output_is_one():
    utils = pytest.importorskip("transformers.utils")
    model = zoo.Around(
        lambda s, x: utils.ModelOutput(logits=s.fc(x), past=(x.tanh(), None)),
        lambda o, h: o.logits + o["past"][0],
    )
    with hook_output(model.odd) as out, hook_output(model.odd, grad=True) as grads:
        model(X).backward(G)
    assert type(out.stored) is utils.ModelOutput
    assert list(out.stored) == ["logits", "past"]
    assert torch.equal(out.stored.logits, model.odd.fc(model.before(X)))
    assert torch.equal(out.stored["logits"], out.stored[0])
    assert torch.equal(grads.stored[0]["logits"], G @ model.after.weight)
    assert torch.equal(grads.stored[0]["past"][0], G @ model.after.weight)
    assert grads.stored[0]["past"][1] is None
