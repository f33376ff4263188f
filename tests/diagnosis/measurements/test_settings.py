"""Settings of optimizers and layers that a program changes."""

import math
from types import SimpleNamespace

import torch
from torch import nn

from hookcb.diagnosis.measurements.settings import Change, Settings
from hookcb.diagnosis.run import Run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        self.calls, self._private = 0, 1


def changes(change, n=150):
    """Changes that are seen if `change(model, opt, step)` is called before each batch."""
    model = Net()
    opt = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-3)
    run, settings = Run(loop=SimpleNamespace(model=model, opt=opt, train_iter=0)), Settings()
    settings.on_model(run)
    for step in range(n):
        run.loop.train_iter = step
        model.calls += 1
        change(model, opt, step)
        settings.on_batch(run)
        settings.on_between(run)
    return list(settings.changes)


def test_settings_of_groups_and_numbers_of_layers_are_followed():
    def change(model, opt, step):
        if step == 60:
            opt.param_groups[1]["betas"] = (0.9, 0.5)
        if step == 100:
            model.drop.p = 0.3

    assert changes(change) == [
        Change(60, 59, "betas", (0.9, 0.999), (0.9, 0.5), group=1),
        Change(101, 98, "p", 0.0, 0.3, layer="drop"),
    ]


def test_counters_schedules_rates_and_early_changes_are_no_settings():
    def change(model, opt, step):
        opt.param_groups[0]["weight_decay"] = 0.01 * math.cos(step)
        opt.param_groups[1]["lr"] = 1.0 if step > 80 else 0.1
        model.train(step % 50 > 0)
        if step == 20:
            model.drop.p = 0.3

    assert changes(change) == []


def test_a_tensor_is_not_compared():
    def change(model, opt, step):
        if step == 60:
            model.drop.p = torch.tensor([0.1, 0.2])
            opt.param_groups[1]["eps"] = torch.tensor([0.1, 0.2])

    assert changes(change) == []


def test_nothing_of_the_model_is_kept_once_the_fit_has_ended():
    settings = Settings()
    settings.on_model(Run(loop=SimpleNamespace(model=Net(), opt=None, train_iter=0)))
    assert settings._of_layers
    settings.freeze()
    assert not settings._of_layers
