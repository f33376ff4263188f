"""Settings of optimizers, layers, steps and losses that a program changes."""

import math
from types import SimpleNamespace
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.measurements.changes import Change
from hookcb.diagnosis.measurements.settings import Settings, operations_of
from hookcb.diagnosis.measurements.step_scales import StepScales
from hookcb.diagnosis.run import Run


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.ones(3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4)
        self.scripted = torch.jit.script(nn.BatchNorm1d(4))
        self.table = Table()
        self.calls, self._private, self.config = 0, 1, SimpleNamespace(cap=30.0)


def changes(change, n=150, writes=False):
    """Changes that are seen if `change(model, opt, step, run)` is called before each batch.

    If `writes`, gradients with such an attribute that is true are written to before the step.
    """
    model = Net()
    opt = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-3)
    x = torch.ones(2, requires_grad=True)
    loop = SimpleNamespace(model=model, opt=opt, train_iter=0, loss_node=(x * 2).mean().grad_fn, n=1, xb=())
    run, settings = Run(loop=loop), Settings()
    settings.on_model(run)
    for step in range(n):
        loop.train_iter = step
        model.calls += 1
        change(model, opt, step, run)
        settings.on_batch(run)
        settings.on_loss(run)
        for _ in range(loop.n):
            settings.on_gradients(run)
        for p in model.parameters() if writes else ():
            if p.grad.writes:
                p.grad.mul_(2)
        settings.on_step(run)
        settings.on_between(run)
    return list(settings.changes)


def test_settings_of_groups_and_numbers_and_dtypes_of_layers_are_followed():
    def change(model, opt, step, run):
        if step == 60:
            opt.param_groups[1]["betas"] = (0.9, 0.5)
        if step == 100:
            model.drop.p = 0.3
        if step == 120:
            model.norm.running_mean = model.norm.running_mean.bfloat16()

    first, second, third = changes(change)
    assert first == Change(60, 59, "betas", (0.9, 0.999), (0.9, 0.5), "parameter group 1")
    assert second == Change(104, 98, "p", 0.0, 0.3, "drop", "drop")
    assert second.text == "p of drop, from 0 to 0.3 between steps 98 and 104"
    assert (third.name, third.before, third.after) == (
        "dtype of running_mean",
        torch.float32,
        torch.bfloat16,
    )


def test_backwards_parameters_that_are_clipped_and_operations_of_the_loss_are_followed():
    def change(model, opt, step, run):
        if step == 50:
            run.loop.n = 4
        if step == 90:
            run.measured(StepScales).n_clipped = 2
        if step == 120:
            x = torch.ones(2, requires_grad=True)
            run.loop.loss_node = (x * 2).sum().grad_fn

    assert [x.text for x in changes(change)] == [
        "backwards per step of the optimizer, from 1 to 4 at step 50",
        "parameters that are clipped of the optimizer, from 0 to 2 at step 90",
        "operations of the loss, now with Sum, without Mean at step 120",
    ]


def test_the_graph_of_the_model_is_followed_where_it_is_looked_at():
    scaled = []

    class Scaled(nn.Sequential):
        def forward(self, x):
            h = self[0](x)
            return self[1](h * 0.5 if scaled else h)

    torch.manual_seed(0)
    model = Scaled(nn.Linear(4, 8), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        for step in range(700):
            scaled.extend([step] * (step == 300))
            opt.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
            opt.step()
    (found,) = [x for x in w.diagnose().findings if x.code == "train.changed"]
    assert found.message.startswith(
        "What changed: autograd graph of the model, now with Mul, near layer 0, between"
    )
    assert found.layer == "0"


def test_names_of_parameters_objects_in_attributes_and_shapes_of_inputs_are_followed():
    def change(model, opt, step, run):
        run.loop.xb = (torch.ones(8 if step < 60 else 32, 4),)
        if step == 0:
            model.config.cap = 30.0
        if step == 90:
            model.config.cap = 20.0
        if step == 120:
            nn.utils.parametrizations.weight_norm(model.body)

    texts = [x.text for x in changes(change, n=200)]
    assert texts[0] == "shape of the inputs, from (8, 4) to (32, 4) at step 60"
    assert texts[1].startswith("cap of config, from 30 to 20 between steps 8")
    new = "now with body (ParametrizedLinear), without body (Linear) between"
    assert texts[2].startswith(f"modules of the model, {new}")
    assert texts[3].startswith("names of parameters of body, from (weight, bias) to (bias) between")


def test_writes_to_buffers_tensors_of_inputs_and_another_optimizer_are_followed():
    def change(model, opt, step, run):
        model.norm.num_batches_tracked += 1  # which the rest of its layer is not hidden by
        run.loop.xb = (torch.zeros(2, 3), torch.zeros(2)) if step < 90 else (torch.zeros(2, 3).half(),)
        if step == 60:
            model.table.rows.mul_(2)
        if step == 120:
            run.loop.opt = torch.optim.SGD(model.parameters(), 0.1)

    rows, tensors, optimizer = changes(change)
    assert (rows.layer, rows.last < 60 <= rows.step < 60 + 10) == ("table", True)
    assert rows.text.startswith("buffer rows of table, which was written to between steps ")
    how = "now with [0] float16, without [0] float32, [1] float32 at step 90"
    assert tensors.text == f"tensors of the inputs, {how}"
    assert optimizer.text == "the optimizer, from AdamW to another SGD at step 120"


def test_gradients_that_something_begins_to_write_to_are_followed_one_in_turn():
    def change(model, opt, step, run):
        for name, p in model.named_parameters():
            p.grad = torch.zeros(p.shape)
            p.grad.writes = step >= 70 and name != "body.weight"

    (found,) = changes(change, writes=True)
    assert (found.name, found.before, found.after) == ("gradient", False, True)
    assert 70 <= found.step < 70 + 8
    assert "is written to between backward and step, first seen between steps" in found.text


def test_gradients_that_are_no_longer_cleared_are_told():
    def change(model, opt, step, run):
        for p in model.parameters() if step < 80 else ():
            p.grad = torch.zeros(p.shape)
            p.grad.writes = True
        for p in model.parameters():
            p.grad.writes = step < 80

    assert "gradients are no longer cleared before each backward, from step 81 on" in [
        x.text for x in changes(change, writes=True)
    ]


def test_modules_that_are_replaced_are_told():
    def change(model, opt, step, run):
        if step == 60:
            model.drop = nn.Identity()

    (found,) = changes(change)
    assert found.text.startswith("modules of the model, now with drop (Identity), without drop (Dropout) b")


def test_numbers_that_scale_a_loss_or_its_parts_and_casts_are_followed():
    x = torch.ones(3, requires_grad=True)

    def change(model, opt, step, run):
        low = x.bfloat16().float() if step >= 90 else x
        loss = (low * 2).logsumexp(0) + (0.5 if step < 60 else 4.0) * x.square().mean()
        run.loop.loss_node = loss.grad_fn

    parts, casts = changes(change)
    assert parts.text == "numbers that scale parts of the loss, from (0.5, 2) to (4, 2) at step 60"
    assert "now with a cast from bfloat16 to float32, a cast from float32 to bfloat16" in casts.text


def test_counters_schedules_rates_and_early_or_short_changes_are_no_settings():
    def change(model, opt, step, run):
        opt.param_groups[0]["weight_decay"] = 0.01 * math.cos(step)
        opt.param_groups[1]["lr"] = 1.0 if step > 80 else 0.1
        opt.param_groups[2]["eps"] = 1e-3 if step in (70, 71) else 1e-8
        model.train(step % 50 > 0)
        run.loop.n = 1 if step % 40 == 39 else 2  # the rest of an epoch
        if step == 20:
            model.drop.p = 0.3

    assert changes(change) == []


def test_a_setting_that_begins_to_follow_a_schedule_is_told_once():
    def change(model, opt, step, run):
        run.measured(StepScales).limit = 5.0 * 0.9 ** max(0, step - 99)
        opt.param_groups[1]["betas"] = (0.9, 0.999 - 0.01 * (step > 60) * (1 + step % 3))

    assert [x.text for x in changes(change)] == [
        "betas of parameter group 1, from (0.9, 0.999) to (0.9, 0.989) at step 61",
        "limit of clip_grad_norm_ of the optimizer, from 5 to 1.937 at step 100",
    ]


def test_a_tensor_is_not_compared():
    def change(model, opt, step, run):
        if step == 60:
            model.drop.p = torch.tensor([0.1, 0.2])
            opt.param_groups[1]["eps"] = torch.tensor([0.1, 0.2])

    assert changes(change) == []


def test_operations_of_a_loss_have_their_numbers_and_end_at_the_last_layers():
    layer = nn.Linear(2, 2)
    loss = F.mse_loss(layer(torch.ones(1, 2)).relu().pow(3), torch.zeros(1, 2))
    assert operations_of(loss.grad_fn) == ("MseLoss(1)", "Pow(3)", "Relu", "Addmm")
    loss.backward()
    assert operations_of(loss.grad_fn)[:2] == ("MseLoss(1)", "Pow(3)")  # as a watch shows it
    assert operations_of(None) == ()


def test_an_object_that_was_replaced_is_not_kept_alive():
    model, settings = Net(), Settings()
    model.config.kept = torch.ones(3)
    run = Run(loop=SimpleNamespace(model=model, opt=None, train_iter=0, xb=()))
    settings.on_model(run)
    gone, model.config = ref(model.config.kept), SimpleNamespace(cap=30.0)
    settings.on_batch(run)
    assert gone() is None


def test_nothing_of_the_model_is_kept_once_the_fit_has_ended():
    settings = Settings()
    settings.on_model(Run(loop=SimpleNamespace(model=Net(), opt=None, train_iter=0)))
    assert settings._of_layers
    settings.freeze()
    assert not settings._of_layers
