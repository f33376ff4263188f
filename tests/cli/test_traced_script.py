"""The second run of a script names the line that makes its first NaN, in whatever kind of loop."""

import json
import sys
import textwrap

import pytest
import torch

from hookcb.cli.second_run import MARGIN, WHOLE, Plan
from hookcb.cli.traced_script import run_traced
from hookcb.core.randomness import random_state, set_random_state
from tests.cli.test_script import BEGIN
from tests.support import first

SAFE = "(square + 1e-8).sqrt()"
DISTANCES = """
net = nn.Linear(16, 4)
opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range({n}):
    x, other = torch.randn(8, 16), torch.randn(8, 16)
    if i == {at}:
        other[3] = x[3]
    square = (net(x) - net(other)).pow(2).sum(1)
    loss = {root}.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("not ended")
"""
STEP = """
opt.zero_grad()
loss.backward()
opt.step()
"""


def lines(n=20, at=7, root="square.sqrt()"):
    return DISTANCES.format(n=n, at=at, root=root)


@pytest.fixture
def trace(tmp_path, capfd):
    """What the second run of a script finds, and what it prints."""
    before = torch.is_anomaly_enabled(), random_state()

    def trace(script, step=7, kind="Linear", args=()):
        path = tmp_path / "script.py"
        path.write_text(BEGIN + textwrap.dedent(script))
        files = str(tmp_path / "result"), str(tmp_path / "random")
        torch.save(random_state(), files[1])
        run_traced(Plan(kind, step, False, *files), str(path), list(args))
        return json.loads((tmp_path / "result").read_text()), capfd.readouterr().out

    yield trace
    set_random_state(before[1])
    assert torch.is_anomaly_enabled() is before[0]


def test_a_root_between_output_and_loss_is_named_and_ends_the_script(trace):
    result, out = trace(lines())
    assert result["told"].endswith(": loss = square.sqrt().mean()")
    assert "it comes from SqrtBackward0, in the backward of this line, at " in result["told"]
    assert result["op"] == "SqrtBackward0"
    assert "not ended" not in out


@pytest.mark.parametrize(("at", "is_found"), first([(WHOLE + 30, True), (20, False)]))
def test_of_a_long_run_only_the_steps_before_it_are_followed(trace, at, is_found):
    result, _ = trace(lines(n=at + 5, at=at), step=WHOLE + 30)
    if is_found:
        assert result["told"].endswith(": loss = square.sqrt().mean()")
    else:
        assert result["reason"].startswith("had none in")


@pytest.mark.slow
def test_a_run_without_it_ends_soon_after_and_says_so(trace):
    result, out = trace(lines(n=10**6, at=-1, root=SAFE))
    assert result["reason"] == f"had none in {7 + MARGIN + 2} batches"
    assert "not ended" not in out
    result, out = trace(lines(at=-1, root=SAFE))
    assert result["reason"] == "had none in 20 batches"
    assert "not ended" in out


def test_a_script_that_fails_or_ends_before_it_says_so(trace):
    result, _ = trace(lines(n=5) + "raise OSError('disk full')")
    assert result["reason"] == "failed after 5 batches"
    assert trace("import sys\nsys.exit(0)")[0]["reason"] == "ended before its first batch"


LOOPS = {
    "the loss": ("loss = (net(x).relu() * 0).log().mean()", "log", "loss = (net(x).relu() * 0).log().mean()"),
    "a number of python": ("loss = net(x).mean() * (0 * 1e400)", "mul", "loss = net(x).mean() * (0 * 1e400)"),
    "data of numpy": (
        "loss = (net(x) * torch.from_numpy(np.array([0, np.nan, 1]))).mean()",
        "lift_fresh",
        "loss = (net(x) * torch.from_numpy(np.array([0, np.nan, 1]))).mean()",
    ),
    "a row that is all masked": (
        "loss = net(x).masked_fill(torch.ones(3).bool(), -torch.inf).softmax(1).mean()",
        "_softmax",
        "loss = net(x).masked_fill(torch.ones(3).bool(), -torch.inf).softmax(1).mean()",
    ),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_other_sources_are_named_too(trace, kind):
    loss, op, code = LOOPS[kind]
    script = f"""
    import numpy as np
    net = nn.Linear(16, 3)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches():
        {loss}
        opt.zero_grad()
        loss.backward()
        opt.step()
    """
    result, _ = trace(script, step=0)
    assert result["op"] == op
    assert result["told"].endswith(f": {code}")


def test_a_step_of_the_optimizer_is_named(trace):
    script = """
    net = nn.Linear(16, 3)
    opt = torch.optim.Adam(net.parameters(), eps=0)
    for x, y in batches():
        loss = (net(x) * 0).mean()
        loss.backward()
        opt.step()
    """
    result, _ = trace(script, step=0)
    assert result["told"].endswith(": opt.step()")


@pytest.mark.slow
def test_overflows_that_a_scaler_skips_are_left_alone_and_others_are_not(trace):
    script = """
    net = nn.Linear(16, 3)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    for i, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", torch.float16):
            out = net(x)
        loss = F.cross_entropy(out.float(), y)
        if i == 30:
            loss = loss / 0
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    """
    result, _ = trace(script, step=30)
    assert result["told"].endswith(": loss = loss / 0")


def test_in_a_learner_it_is_named_too(trace):
    script = """
    from hookcb import Learner
    def loss_of(pred, y):
        return (pred - pred.detach()).sum().sqrt()
    Learner(list(batches()), nn.Linear(16, 3), loss_of, lr=0.1).fit(1)
    print("not ended")
    """
    result, out = trace(script, step=0)
    assert result["told"].endswith(": return (pred - pred.detach()).sum().sqrt()")
    assert "not ended" not in out


def test_a_loop_that_moves_weights_itself_ends_too(trace):
    script = """
    net = nn.Linear(16, 3)
    for x, y in batches(10**6):
        loss = net(x).mean().log().mean()
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    """
    result, _ = trace(script, step=0)
    assert result["op"] == "log"


@pytest.mark.slow
def test_the_models_of_other_classes_do_not_count(trace):
    other = "other = nn.Bilinear(2, 2, 2)\nx = torch.ones(1, 2)\n(other(x, x) / 0).mean().backward()"
    script = lines(at=-1, root=SAFE) + other
    result, _ = trace(script)
    assert result["reason"] == "had none in 20 batches"


def test_arguments_and_random_numbers_are_those_of_the_first_run(trace):
    script = "import random\nprint(sys.argv[1:], torch.initial_seed() == 0, random.random())\n" + lines(n=1)
    import random

    state = random.getstate()
    _, out = trace(script, args=["--epochs", "2"])
    random.setstate(state)
    assert out.split("\n")[0] == f"['--epochs', '2'] True {random.random()}"
    assert sys.argv[1:] != ["--epochs", "2"]
