"""skorch's nets, watched: what is their own, beside the table."""

import numpy as np
import pytest
import torch

from hookcb import ActivationStats, GradientHealth, assert_no_hooks, watch
from tests.interop.trainers import BS, N_TRAIN, SETS, Net, quiet

with quiet():
    from skorch import NeuralNetClassifier, NeuralNetRegressor


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


X, Y = SETS[0].tensors


def classifier(**options):
    defaults = {
        "criterion": torch.nn.CrossEntropyLoss,
        "optimizer": torch.optim.Adam,
        "batch_size": BS,
        "max_epochs": 3,
        "train_split": None,
        "verbose": 0,
    }
    return NeuralNetClassifier(Net, **(defaults | options)).initialize()


def test_a_classifier_is_watched_while_it_fits_and_predicts():
    net = classifier()
    with watch(net.module_, net.optimizer_, ActivationStats(on_valid=True), GradientHealth()) as w:
        net.partial_fit(X, Y)
        net.predict(X)
    assert len(w.activation_stats.stats) == len(w.gradient_health.stats) == 3 * N_TRAIN
    assert len(w.activation_stats.valid_stats) == N_TRAIN  # a prediction is in eval mode
    assert_no_hooks(net.module_)


def test_fit_makes_a_new_module_that_is_not_watched():
    net = classifier()
    with watch(net.module_, net.optimizer_, ActivationStats()) as w:
        net.fit(X, Y)  # initialises again; with warm_start it goes on
    assert len(w.activation_stats.stats) == 0
    assert "not called" in w.coverage.missing["before_batch"]
    net = classifier(warm_start=True)
    with watch(net.module_, net.optimizer_, ActivationStats()) as w:
        net.fit(X, Y)
    assert len(w.activation_stats.stats) == 3 * N_TRAIN


def test_gradients_of_a_closure_are_those_that_the_step_gets():
    net = classifier(optimizer=torch.optim.SGD, lr=0.1, max_epochs=1)
    before = [p.clone() for p in net.module_.parameters()]
    with watch(net.module_, net.optimizer_, GradientHealth()) as w:
        net.partial_fit(X[:BS], Y[:BS])
    after = list(net.module_.parameters())
    change = torch.cat([((a - b) / 0.1).flatten() for a, b in zip(after, before, strict=True)]).norm().item()
    assert w.gradient_health.step_series("total_norm") == pytest.approx([change], rel=1e-4)
    ratio = w.gradient_health.stats[0]["net.0.weight"]["update_ratio"]
    assert ratio == pytest.approx(((after[0] - before[0]).norm() / before[0].norm()).item(), rel=1e-4)


def test_an_interrupted_fit_goes_on_without_hooks():
    class Interrupts(NeuralNetRegressor):
        def on_batch_end(self, net, **kwargs):
            if len(self.history[-1, "batches"]) == 2:
                raise KeyboardInterrupt  # which skorch takes for the end

    net = Interrupts(
        torch.nn.Linear, module__in_features=4, module__out_features=1, train_split=None, verbose=0
    )
    net.set_params(batch_size=BS).initialize()
    with watch(net.module_, net.optimizer_, ActivationStats(), GradientHealth()) as w:
        net.partial_fit(X, np.zeros((len(X), 1), dtype=np.float32))
    assert len(w.gradient_health.stats) == 2
    assert_no_hooks(net.module_)
