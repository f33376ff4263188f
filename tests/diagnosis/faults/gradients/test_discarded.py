"""Gradients that are cleared before a step has used them, and programs that clear them rightly."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.cli.main import main
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.run import Run, Skipped
from tests.support import first

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
N = 4  # backwards in a step


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(i):
    at = slice(8 * i % 256, 8 * i % 256 + 8)
    return X[at], Y[at]


def found(program, n=64, model=None):
    """Findings of a loop that calls a program with its model, optimizer and the number of the batch."""
    model = model or net()
    opt = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(n):
            program(model, opt, i)
    verdict = w.diagnose()
    assert not [note for note in verdict.coverage if "a part of Diagnose" in note]
    return [x for x in verdict.findings if x.code == "grad.discarded"]


def loss_of(model, i):
    x, y = batch(i)
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("how", first(["opt", "model", "zeros", "by hand", "in place"]))
def test_gradients_that_are_cleared_within_an_accumulation_are_found(how):
    def clear(model, opt):
        if how == "opt":
            opt.zero_grad()
        elif how == "model":
            model.zero_grad()
        elif how == "zeros":
            opt.zero_grad(set_to_none=False)
        else:
            for p in model.parameters():
                if how == "in place" and p.grad is not None:
                    p.grad.zero_()
                elif how == "by hand":
                    p.grad = None

    def program(model, opt, i):
        clear(model, opt)
        (loss_of(model, i) / N).backward()
        if i % N == N - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            opt.step()

    (one,) = found(program)
    assert (one.severity, one.value, one.limit) == ("warning", 1.0, float(N))
    assert "the other 3 are computed and thrown away" in one.message
    assert ("test_discarded.py" in one.message) == (how in ("opt", "model", "zeros"))


@pytest.mark.slow
def test_a_window_that_is_cleared_in_its_middle_and_short_epochs_are_found():
    def program(model, opt, i):
        if i % 2 == 0:
            opt.zero_grad()
        loss_of(model, i).backward()
        if i % 18 % N == N - 1 or i % 18 == 17:  # 4, 4, 4, 4 and 2 batches
            opt.step()

    (one,) = found(program, 18 * 6)
    assert (one.value, one.limit) == (2.0, 4.0)


def accumulated(model, opt, i):
    if i % N == 0:
        opt.zero_grad()
    loss_of(model, i).backward()
    if i % N == N - 1:
        opt.step()


def skips_steps(model, opt, i):
    opt.zero_grad()
    loss_of(model, i).backward()
    if i % 7 not in (2, 5) and i % 11:  # as of losses that are not finite
        opt.step()


def skips_many_at_random(model, opt, i):
    opt.zero_grad()
    loss_of(model, i).backward()
    if (i * 7919 + i * i * 31) % 97 > 48:
        opt.step()


def clears_twice(model, opt, i):
    opt.zero_grad()
    model.zero_grad()
    loss_of(model, i).backward()
    opt.step()
    opt.zero_grad()


def sharpness_aware(model, opt, i):
    for k in range(2):
        loss_of(model, i).backward()
        if k:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.moved)
            opt.step()
        else:
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.moved = 0.05 * p.grad / norm
                p.data.add_(p.moved)
        opt.zero_grad()


def combines_by_hand(model, opt, i):
    kept = []
    for k in range(3):
        opt.zero_grad()
        loss_of(model, 3 * i + k).backward()
        kept.append([p.grad.clone() for p in model.parameters()])
    for p, *grads in zip(model.parameters(), *kept, strict=True):
        p.grad = sum(grads) / 3
    opt.step()


def projects_conflicts(model, opt, i):
    """Gradient surgery writes into the gradients of the last backward."""
    kept = []
    for k in range(2):
        opt.zero_grad()
        loss_of(model, 2 * i + k).backward()
        kept.append([p.grad.clone() for p in model.parameters()])
    for p, a, b in zip(model.parameters(), *kept, strict=True):
        p.grad.copy_(a + b)
    opt.step()


def adversarial(model, opt, i):
    x, y = batch(i)
    x = x.clone().requires_grad_()
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        x = (x + 0.01 * x.grad.sign()).detach().requires_grad_() if x.grad is not None else x
    opt.step()


def of_samples(model, opt, i):
    """Norms of the gradients of single samples, before the step of the batch."""
    x, y = batch(i)
    for k in range(3):
        model.zero_grad()
        F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        float(model[0].weight.grad.norm())
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()


def by_hand(model, opt, i):
    """A loop within a step that updates a copy of nothing: the weights move after each backward."""
    opt.zero_grad()
    loss_of(model, i).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
    if i % 2:
        opt.step()


@pytest.mark.parametrize(
    "program",
    first(
        [
            accumulated,
            skips_steps,
            skips_many_at_random,
            clears_twice,
            sharpness_aware,
            combines_by_hand,
            projects_conflicts,
            adversarial,
            of_samples,
            by_hand,
        ]
    ),
)
def test_gradients_that_are_cleared_on_purpose_are_left_alone(program):
    assert found(program, 80) == []


@pytest.mark.slow
def test_a_generator_whose_gradients_from_the_critic_are_cleared_is_left_alone():
    generator, critic = nn.Linear(4, 8), net()
    of_critic = torch.optim.SGD(critic.parameters(), 0.05)

    def program(model, opt, i):
        fake = model(X[:8, :4])
        of_critic.zero_grad()
        F.cross_entropy(critic(fake), Y[:8]).backward()  # not detached: fills the gradients of the generator
        of_critic.step()
        opt.zero_grad()
        if i % 3 == 2:
            F.cross_entropy(critic(model(X[:8, :4])), 2 - Y[:8]).backward()
            opt.step()

    assert found(program, 60, generator) == []


def test_a_run_without_events_skips_and_what_is_kept_is_plain():
    fault = FAULTS["grad.discarded"]
    assert [type(x) for x in fault().findings(Run())] == [Skipped]
    model, kept = net(), Diagnose("ignore", show=False)
    opt = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, opt, kept):
        for i in range(8):
            opt.zero_grad()
            loss_of(model, i).backward()
            if i % 2:
                opt.step()
    assert pickle.dumps(kept)


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for i in range(48):
    opt.zero_grad()
    nn.functional.mse_loss(net(torch.randn(8, 4)), torch.zeros(8, 2)).backward()
    if i % 8 == 7:
        opt.step()
"""


def test_the_command_names_the_line_that_clears(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["diagnose", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "grad.discarded" in shown
    assert "train.py:8, opt.zero_grad()" in shown
