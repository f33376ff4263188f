"""`hookcb diagnose script.py` runs a script as Python does, and says whether what it trains is healthy."""

import json
import os
import re
import runpy
import sys
import textwrap
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import optimizer

from hookcb import Learner, load_report
from hookcb.cli.main import main
from hookcb.cli.model_tracker import MAX_MODELS
from hookcb.core.whose import OURS
from hookcb.gradients.callback import GradientHealth
from hookcb.gradients.capture import GradientReader
from tests.support import each, first, skip_unless_compiled_in_place

BEGIN = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
W = torch.randn(16, 3)

def batches(n=40):
    for _ in range(n):
        x = torch.randn(32, 16)
        yield x, (x @ W).argmax(1)

def make(lr=1e-2):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    return net, torch.optim.Adam(net.parameters(), lr)

def train(net, opt, n=40):
    for x, y in batches(n):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss
"""
HEALTHY = "train(*make())\n"
SICK = "train(*make(lr=10.0))\n"


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a script of these lines after `BEGIN`; gives exit code, output and errors, with single spaces."""

    # a process group of another test in this process has left one that adds the rank
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def run(lines, *args):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + textwrap.dedent(lines))
        code = main(["diagnose", str(script), *args])
        shown = capsys.readouterr()
        return code, re.sub(" +", " ", shown.out), re.sub(" +", " ", shown.err)

    return run


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """No line of a verdict is wrapped before its hundredth column."""
    monkeypatch.setenv("COLUMNS", "120")


def titles(out):
    """The line above each verdict, up to the optimizers."""
    return [heading.partition(",")[0] for heading in headings(out)]


def headings(out):
    """The line above each verdict."""
    lines = out.splitlines()
    return [a for a, b in pairwise(lines) if b.startswith(("HEALTHY", "SLOW", "SUSPECT", "SICK", "UNKNOWN"))]


# ---- verdicts and exit codes


def test_a_healthy_script_is_said_to_be_and_exits_with_0(run):
    code, out, err = run(HEALTHY)
    assert code == 0
    assert titles(out) == ["Sequential"]
    assert "HEALTHY as far as checked" in out
    assert "40 batches" in out
    assert not err


def test_a_sick_script_gets_the_cause_at_once_and_at_the_end_and_exits_with_1(run):
    code, out, err = run(SICK)
    assert code == 1
    assert "SICK Steps are too large" in out
    assert err.startswith("hookcb diagnose: ERROR Steps are too large")
    assert len(err.splitlines()) == 1


def test_a_suspect_script_exits_with_1(run):
    code, out, _ = run("net, opt = make()\nnet.insert(2, nn.Dropout(0.95))\ntrain(net, opt)")
    assert code == 1
    assert "SUSPECT A dropout drops nearly everything" in out


@pytest.mark.slow
def test_a_script_that_is_only_slow_is_told_so_and_exits_with_0(run):
    lines = """
    import time
    class Slow(torch.utils.data.IterableDataset):
        def __iter__(self):
            for x, y in batches(20):
                time.sleep(0.05)
                yield x, y
    net, opt = make()
    for x, y in torch.utils.data.DataLoader(Slow(), batch_size=None):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    """
    code, out, err = run(lines)
    assert code == 0
    assert "SLOW Training waits for its batches" in out
    assert not err  # nothing that makes the model wrong was told


@pytest.mark.slow
def test_an_error_that_is_told_and_over_is_told_at_the_end(run):
    lines = """
    net, opt = make(lr=1e-3)
    values = iter([0.02, *[3.0 * 0.9**i for i in range(60)]])
    for x, y in batches(61):
        loss = F.cross_entropy(net(x), y)
        loss = loss * (next(values) / loss.detach())
        opt.zero_grad()
        loss.backward()
        opt.step()
    """
    code, out, err = run(lines)
    assert code == 1
    assert err.startswith("hookcb diagnose: ERROR The loss rises and stays high")
    assert re.search(r"SUSPECT The loss rises and stays high, recovered by \d+ \(loss\.diverging; ", out)


@pytest.mark.parametrize(
    "lines", first([HEALTHY, SICK, "net, opt = make()\nfor x, y in batches():\n    net(x)\nopt.step()"])
)
def test_no_advice_is_for_those_who_call_hookcb_in_their_code(run, lines):
    _, out, _ = run(lines, "--coverage")
    assert not re.search(r"\bw\.|cbs=|learn\.|Diagnose|GradientHealth|GradientClip", out)
    assert "More: --coverage." in out


def test_each_model_has_a_verdict_and_one_that_is_sick_decides(run):
    code, out, _ = run(HEALTHY + SICK)
    assert code == 1
    assert titles(out) == ["Sequential", "Sequential (2)"]
    assert out.index("HEALTHY") < out.index("SICK")


@pytest.mark.slow
def test_more_models_than_are_watched_at_a_time_all_have_verdicts(run):
    _, out, _ = run(HEALTHY * (MAX_MODELS + 2))
    assert len(titles(out)) == MAX_MODELS + 2


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("print('no model here')", "; a model counts as trained if "),
        ("with torch.no_grad():\n    make()[0](W.T)", "; a model counts as trained if "),
        (
            "W.requires_grad_().sum().backward()",
            ": backward was run 1 time, but on parameters of no",
        ),
        ("raise ValueError", ", until it failed\n"),
    ],
)
def test_a_script_that_trains_nothing_is_told_so_and_why(run, lines, why):
    code, out, _ = run(lines)
    assert code == 1
    assert not titles(out)
    assert "no training was seen in" in out
    assert why in out


@pytest.mark.parametrize("write", first(["p.data.add_(p.grad, alpha=-lr)", "p.sub_(lr * p.grad)"]))
def test_weights_that_are_moved_by_hand_are_a_training(run, write):
    code, out, _ = run(f"""
        net, lr = make()[0], 0.1
        for x, y in batches():
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    {write}
        """)
    assert code == 0
    assert "Sequential\nHEALTHY" in out
    assert "the loop updates its weights without a torch.optim.Optimizer" in " ".join(out.split())


@pytest.mark.slow
def test_an_optimizer_of_another_copy_is_noticed(run):
    code, out, _ = run("net, opt = make()\ntrain(make()[0], opt)")
    assert code == 1
    assert "Sequential got gradients, but its parameters were not moved" in out


SWAPPED = """
G, D = nn.Linear(8, 2), nn.Linear(2, 1)
d, g = torch.optim.Adam(D.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
bce = nn.BCEWithLogitsLoss()
for i in range(30):
    fake = G(torch.randn(64, 8))
    loss = bce(D(torch.randn(64, 2)), torch.ones(64, 1)) + bce(D(fake.detach()), torch.zeros(64, 1))
    d.zero_grad(); loss.backward(); d.step()
    loss = bce(D(fake), torch.ones(64, 1))
    g.zero_grad(); loss.backward(); g.step()
"""


@pytest.mark.slow
def test_a_model_whose_optimizer_has_the_parameters_of_another_is_in_the_result(run):
    """As DCGAN with the generator's optimizer made of the discriminator's parameters."""
    code, out, _ = run(SWAPPED)
    assert code == 1
    assert headings(out) == [
        "G (Linear), not trained: no optimizer has its parameters",
        "D (Linear), trained by Adam, Adam (2)",
    ]
    assert out.count("SICK Parameters never change") == 1


@pytest.mark.parametrize("order", first([[0, 1], [1, 0]]))
def test_a_sick_model_decides_whatever_is_trained_before_or_after_it(run, order):
    parts = [
        "sick, _ = make()\nfor x, y in batches(30):\n    F.cross_entropy(sick(x), y).backward()\n",
        HEALTHY,
    ]
    code, out, _ = run("".join(parts[i] for i in order))
    assert code == 1
    assert len(titles(out)) == 2
    assert "SICK Parameters never change" in out


@pytest.mark.slow
def test_a_model_with_an_optimizer_of_which_nothing_was_seen_is_not_healthy(run):
    code, out, _ = run(HEALTHY + "net, opt = make()\nnet(W.T)\n")
    assert code == 1
    assert headings(out)[1] == "Sequential (2), not trained: Adam (2) made no step"
    assert "UNKNOWN nothing was seen: " in out
    assert "hookcb diagnose: Adam (2) made no step" in out


def test_a_model_trained_by_lbfgs_is_not_said_to_have_made_no_step(run):
    code, out, _ = run(
        """
        net = make()[0]
        opt = torch.optim.LBFGS(net.parameters(), max_iter=3)
        for x, y in batches(5):
            def closure():
                opt.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                return loss
            opt.step(closure)
        """
    )
    assert code == 0
    assert headings(out) == ["Sequential, trained by LBFGS"]
    assert "HEALTHY as far as checked" in out  # by layers and losses: a step by closures has no one gradient
    assert "were not moved" not in out
    assert "LBFGS made no step" not in out


@pytest.mark.parametrize("use", first(["net(W.T)", "net(W.T.clone().requires_grad_()).sum().backward()"]))
def test_a_model_that_is_only_used_is_no_fault(run, use):
    """Inference, also with gradients on, and a look at what a model is sensitive to."""
    code, out, _ = run(HEALTHY + f"net = make()[0]\n{use}\n".replace("make()[0]", "nn.Linear(16, 3)"))
    assert code == 0, out
    assert "Sequential" in titles(out)


@pytest.mark.slow
def test_an_optimizer_of_something_else_is_named_and_no_fault(run):
    code, out, _ = run(
        HEALTHY + "alpha = torch.zeros(1, requires_grad=True)\nfree = torch.optim.SGD([alpha], 0.1)\n"
    )
    assert code == 0, out
    assert headings(out) == ["Sequential, trained by Adam"]
    assert "SGD has no parameters of a model that was called in the main thread with gradients on" in out


# ---- as Python runs it


def test_the_script_is_main_with_its_arguments_and_its_folder_to_import_from(run, tmp_path):
    (tmp_path / "beside.py").write_text("found = 'beside'")
    lines = "import beside, os\nprint(sys.argv[1:], __name__, __file__, beside.found)\nimport __main__\n"
    _, out, _ = run(lines + "assert __main__.make is make", "--", "-h", "--lr", "3")
    assert out.splitlines()[0] == f"['--', '-h', '--lr', '3'] __main__ {tmp_path / 'script.py'} beside"


def test_the_numbers_are_those_of_python(run, tmp_path, capsys):
    lines = "net, opt = make()\nprint(repr(train(net, opt).item()), torch.rand(1).item())"
    _, out, _ = run(lines)
    runpy.run_path(tmp_path / "script.py", run_name="__main__")
    assert out.splitlines()[0] == capsys.readouterr().out.strip()


def test_an_exception_is_shown_as_python_shows_it_and_the_verdict_follows(run):
    code, out, err = run(SICK + "def last(net):\n    net(W)\nlast(make()[0])")
    assert code == 1
    told = err[err.index("Traceback") :].splitlines()
    assert told[1].endswith("in <module>")
    assert told[-1].startswith(("RuntimeError: mat1 and mat2", "RuntimeError: addmm: mat1 and mat2"))
    assert OURS not in "".join(told)
    assert headings(out) == [
        "Sequential, trained by Adam, until the script failed",
        "Sequential (2), not trained: Adam (2) made no step, until the script failed",
    ]


def test_a_chain_of_exceptions_has_no_frame_of_ours(run):
    lines = "try:\n    make()[0](W)\nexcept RuntimeError as error:\n    raise ValueError('other') from error"
    _, _, err = run(lines)
    assert "mat1 and mat2" in err
    assert err.rstrip().endswith("ValueError: other")
    assert OURS not in err


def test_a_script_that_cannot_be_compiled_is_shown_as_python_shows_it(run):
    code, _, err = run("x = (")
    assert code == 1
    assert err.rstrip().endswith("SyntaxError: '(' was never closed")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (HEALTHY + "sys.exit()", 0),
        (HEALTHY + "sys.exit(0)", 0),
        (HEALTHY + "sys.exit(7)", 7),
        (SICK + "sys.exit(0)", 1),
        (SICK + "sys.exit(7)", 7),
        (HEALTHY + "sys.exit('no more')", 1),
    ],
)
def test_an_exit_of_the_script_is_honoured(run, lines, expected):
    code, out, err = run(lines)
    assert code == expected
    assert titles(out) == ["Sequential"]
    assert ("no more\n" in err) is ("no more" in lines)


@pytest.mark.slow
def test_after_ctrl_c_the_verdict_comes_all_the_same(run):
    code, out, err = run(HEALTHY + "import signal\nsignal.raise_signal(signal.SIGINT)")
    assert code == 130
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert headings(out) == ["Sequential, trained by Adam, until the script failed"]


@pytest.mark.slow
def test_afterwards_all_is_as_it_was(run):
    def state():
        patched = nn.Module.__call__, torch.Tensor.backward, torch.amp.GradScaler.scale, Learner.fit
        patched += torch.optim.Optimizer.add_param_group, len(optimizer._global_optimizer_post_hooks)
        return patched, sys.argv, sys.path[:], sys.modules["__main__"], os.getcwd()

    before = state()
    run(HEALTHY)
    run("raise ValueError")
    assert state() == before


def test_a_file_that_there_is_not_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", "nowhere.py"])
    assert ended.value.code == 2
    assert "there is no file 'nowhere.py'" in capsys.readouterr().err


# ---- what is a model, and whose a loss is

GAME = """
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.Linear(32, 1))
g, d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
bce = nn.BCEWithLogitsLoss()
for i in range(40):
    fake = G(torch.randn(64, 8))
    real = bce(D(torch.randn(64, 2)), torch.ones(64, 1))
    loss = real + bce(D(fake.detach()), torch.zeros(64, 1))
    d.zero_grad(); loss.backward(); d.step()
    loss = bce(D(fake), torch.ones(64, 1))
    g.zero_grad(); loss.backward(); g.step()
"""


@pytest.fixture
def told(monkeypatch):
    """The losses that watches were told, by the number of parameters of their model."""
    from hookcb.cli.tracked_model import ScriptWatch

    told = {}
    tell = ScriptWatch.tell

    def note(watch, loss):
        told.setdefault(sum(p.numel() for p in watch.model.parameters()), []).append(loss.item())
        tell(watch, loss)

    monkeypatch.setattr(ScriptWatch, "tell", note)
    return told


def test_two_players_have_verdicts_of_their_own_and_only_losses_of_their_own(run, told):
    code, out, _ = run(GAME)
    assert code == 0
    assert titles(out) == ["G (Sequential)", "D (Sequential)"]
    assert {n: len(losses) for n, losses in told.items()} == {129: 40}  # of D on its turn


@pytest.mark.slow
def test_two_models_of_one_optimizer_are_healthy_and_the_last_has_the_loss(run, told):
    code, out, _ = run(
        """
        a, b = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Linear(8, 3)
        opt = torch.optim.Adam([*a.parameters(), *b.parameters()], 1e-2)
        train(lambda x: b(a(x)), opt)
        """
    )
    assert code == 0, out
    assert titles(out) == ["Sequential", "Linear"]
    assert {n: len(losses) for n, losses in told.items()} == {27: 39}  # the optimizer is known from a step on


@pytest.mark.parametrize("this", first(["self", "s"]))
def test_a_model_whose_method_calls_its_parts_is_one_model(run, told, this):
    code, out, _ = run(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
                self.head = nn.Linear(self.body(torch.zeros(1, 16)).shape[1], 3)

            def scores(self, x):
                return self.head(self.body(x))

        net = Net()
        opt = torch.optim.Adam(net.parameters(), 1e-2)
        train(net.scores, opt)
        """.replace("self", this)
    )
    assert code == 0, out
    assert titles(out) == ["Net"]
    assert "40 batches" in out
    assert [len(losses) for losses in told.values()] == [40]


@pytest.mark.slow
def test_a_part_that_was_tried_by_itself_belongs_to_its_model(run):
    code, out, _ = run("net, opt = make()\nnet[0](torch.randn(2, 16))\nprint(train(net, opt).item())")
    assert code == 0
    assert titles(out) == ["Sequential"]


@pytest.mark.slow
def test_a_model_that_is_trained_in_eval_mode_is_seen(run):
    code, out, _ = run(
        """
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).eval()
        train(net, torch.optim.Adam(net.parameters(), 1e-2))
        """
    )
    assert code == 1
    assert "SICK Layers are in the wrong mode: layer 1" in out


@pytest.mark.slow
def test_a_model_with_keyword_arguments_only_is_seen_from_its_first_batch(run):
    code, out, _ = run(
        """
        class Net(nn.Linear):
            def forward(self, *, x):
                return super().forward(x)

        net = Net(16, 3)
        train(lambda x: net(x=x), torch.optim.Adam(net.parameters(), 1e-2))
        """
    )
    assert code == 0
    assert "40 batches" in out


def test_a_loss_without_graph_is_told(run):
    code, out, err = run("net, opt = make()\nF.cross_entropy(net(W.T).detach(), torch.arange(3)).backward()")
    assert code == 1
    assert "does not require grad" in err
    assert "SICK The loss depends on no parameter" in out


def test_a_scaled_loss_is_told_unscaled(run, told):
    code, out, _ = run(
        """
        scaler = torch.amp.GradScaler("cpu")
        net, opt = make()
        for x, y in batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        """
    )
    assert code == 0, out
    (losses,) = told.values()
    assert losses[0] < 2  # the scale is 65536


@pytest.mark.parametrize("lines", first(["f = torch.compile(net, **how)", "f = net\nnet.compile(**how)"]))
def test_compiled_models_are_seen_and_compile_as_they_would(run, lines):
    if "net.compile" in lines:
        skip_unless_compiled_in_place()
    how = "net, opt = make()\nhow = dict(backend='eager', fullgraph=True)\n"
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    strict += "warnings.filterwarnings('ignore', 'Guards may run slower')\n"  # Python 3.13.0
    code, out, _ = run(strict + how + lines + "\ntrain(f, opt)")
    assert code == 0, out
    assert titles(out) == ["Sequential"]
    assert "40 batches" in out


COMPILED_STEP = """
from torch._dynamo.utils import counters
counters.clear()
graphs = []
def backend(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph
net, opt = make()
step = torch.compile(lambda: opt.step(), backend=backend)
for _ in range(20):
    opt.zero_grad()
    loss = net(W.T).square().mean()
    loss.backward()
    step()
print(loss.item(), graphs, sum(counters["graph_break"].values()) <= 2)
"""


@pytest.mark.slow
def test_a_compiled_step_is_compiled_as_it_would_be(run, tmp_path, capsys, fresh_dynamo):
    code, out, _ = run(COMPILED_STEP)
    assert code == 0, out
    torch._dynamo.reset()
    runpy.run_path(tmp_path / "script.py", run_name="__main__")
    assert out.splitlines()[0] == capsys.readouterr().out.strip()
    assert "20 batches" in out


# ---- a Learner in the script

LEARN = "from hookcb import Diagnose, diagnose, synth_learner\nlearn = synth_learner()\n"


@pytest.mark.parametrize("cbs", first(["()", "Diagnose", "[Diagnose(show=False)]"]))
def test_a_learner_is_looked_at_from_inside_and_once(run, cbs):
    code, out, _ = run(LEARN + f"with learn.no_logging():\n    learn.fit(4, cbs={cbs})")
    assert code == 0, out
    assert titles(out) == ["Sequential"]
    assert "loss at the beginning" in " ".join(out.split())  # which needs the targets


@pytest.mark.parametrize(
    "given",
    each(
        3,
        [
            "1, cbs=None",
            "1, None, None",
            "1, cbs=ActivationStats",
            "1, cbs=ActivationStats(every=2)",
            "1, cbs=(ActivationStats, GradientHealth())",
            "1, cbs=(cb for cb in [ActivationStats, GradientHealth])",
            "1, cbs=CSVLogger('x.csv')",
            "1, cbs=[CSVLogger('x.csv'), Diagnose(show=False)]",
            # refused with the same message
            "1, cbs=CSVLogger",
            "1, cbs='ActivationStats'",
            "1, cbs=3",
            "1, cbs=[ActivationStats, ActivationStats]",
            "",
            "1, callbacks=None",
        ],
    ),
)
def test_a_fit_takes_callbacks_as_it_does_alone(run, given, tmp_path, monkeypatch, capsys):
    lines = f"""
    from hookcb import ActivationStats, CSVLogger, Diagnose, GradientHealth, synth_learner
    learn = synth_learner()
    try:
        with learn.no_logging():
            learn.fit({given})
    except Exception as error:
        print(type(error).__name__, error)
    print([cb.name for cb in learn.cbs], [p.sum().item() for p in learn.model.parameters()])
    """
    outs = []
    for how in "watched", "alone":
        (tmp_path / how).mkdir()
        monkeypatch.chdir(tmp_path / how)
        if how == "watched":
            outs.append(run(lines)[1])
        else:
            runpy.run_path(str(tmp_path / "script.py"))
            outs.append(re.sub(" +", " ", capsys.readouterr().out))
        outs.append("".join(path.name for path in (tmp_path / how).iterdir()))
    watched, files, alone, files_alone = outs
    assert watched.startswith(alone)
    assert files == files_alone == "x.csv" * ("x.csv" in given)


def test_a_search_for_a_rate_and_a_preflight_are_no_training(run):
    look = "learn.lr_find()\ndiagnose(learn.model, next(iter(learn.dls.train)), learn.loss_func)\n"
    code, out, _ = run(LEARN + look)
    assert code == 1
    assert not titles(out)


# ---- nothing of ours breaks the script


def test_what_fails_in_a_callback_of_ours_is_told_and_the_script_goes_on(run, monkeypatch):
    monkeypatch.setattr(GradientReader, "before_step", None)
    _, out, err = run("train(*make())\nprint('to the end')")
    assert out.startswith("to the end\n")
    assert titles(out) == ["Sequential"]
    assert "a part of Diagnose failed, please report it: TypeError(" in out
    assert "HEALTHY as far as checked" in out
    assert not err


def test_a_model_that_cannot_be_watched_is_told_and_the_script_goes_on(run, monkeypatch):
    def refuse(health):
        raise TypeError("not this one")

    monkeypatch.setattr(GradientHealth, "before_fit", refuse)
    code, out, _ = run("train(*make())\nprint('to the end')")
    assert code == 1
    assert out.startswith("to the end\n")
    assert "Sequential could not be watched: TypeError('not this one')" in out


def test_a_page_of_each_model_is_written(tmp_path, capsys):
    script, page = tmp_path / "script.py", tmp_path / "pages" / "run.html"
    lines = "for _ in range(2):\n    train(*make())\nprint(sys.argv[1:])"
    script.write_text(BEGIN + lines)
    main(["diagnose", "--html", str(page), str(script), "--", "-x"])
    out = capsys.readouterr().out
    assert "['--', '-x']" in out
    pages = [load_report(page), load_report(page.with_name("run-2.html"))]
    assert [data.n_batches for data in pages] == [len(data.run["loss"]) for data in pages]
    assert all(data.verdict is not None and data.modules for data in pages)
    assert f"{pages[0].title}: {page}" in out


@pytest.mark.slow
def test_a_page_that_cannot_be_written_changes_no_exit_code(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(BEGIN + HEALTHY)
    code = main(["diagnose", str(script)])
    assert main(["diagnose", f"--html={tmp_path}", str(script)]) == code
    assert "cannot be written" in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_that_changes_the_folder_leaves_the_page_where_it_was_asked_for(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "script.py").write_text(f"{BEGIN}{HEALTHY}import os\nos.chdir('outputs')\n")
    main(["diagnose", "--html", "run.html", "script.py"])
    assert (tmp_path / "run.html").is_file()
    assert str(tmp_path / "run.html") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "is_told"), first([("sys.exit(0)", False), ("sys.exit()", False), ("sys.exit(7)", True)])
)
def test_an_exit_of_a_script_that_is_done_is_no_error_of_the_training(end, is_told, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}import sys\n{HEALTHY}{end}\n")
    main(["diagnose", "--coverage", str(script)])
    assert ("was ended by SystemExit" in capsys.readouterr().out) == is_told


# ---- a module, JSON, and coverage


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with the module fine and the module ill, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cli_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "fine.py").write_text(f"print('given', __import__('sys').argv[1:])\n{BEGIN}{HEALTHY}")
    (folder / "ill.py").write_text(BEGIN + SICK)
    yield "cli_package"
    for name in [name for name in sys.modules if name.startswith("cli_package")]:
        del sys.modules[name]


def test_a_module_is_run_by_its_name(package, capsys):
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    assert main(["diagnose", "-m", f"{package}.fine", "--epochs", "3"]) == 0
    assert "given ['--epochs', '3']" in capsys.readouterr().out
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    assert main(["diagnose", "-m", f"{package}.ill"]) == 1
    assert "SICK" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-m", "cli_package.gone"], "there is no module 'cli_package.gone' to be had from"),
        (["-m", "gone.away"], "there is no module 'gone.away'"),
        (["cli_package.fine"], "for a module: hookcb diagnose -m cli_package.fine"),
        (["gone.py"], "there is no file 'gone.py'\n"),
    ],
)
def test_what_cannot_be_run_is_told(args, told, package, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["diagnose", *args])
    assert told in capsys.readouterr().err


def test_with_json_all_that_the_script_writes_goes_to_stderr(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "__stdout__", open(1, "w", closefd=False))  # noqa: SIM115  # as Python opens it
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print('p'); os.system('echo q'); sys.__stdout__.write('by hand\\n')")
    assert main(["diagnose", "--json", str(script)]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["models"] == []
    assert sorted(err.split()) == ["by", "hand", "p", "q"]


def test_verdicts_as_json_are_all_that_stdout_gets(package, capfd):
    code = main(["diagnose", "--json", "-m", f"{package}.fine"])
    out, err = capfd.readouterr()
    state = json.loads(out)
    assert (code, state["exit_code"], state["schema"]) == (0, 0, 1)
    assert [model["verdict"]["status"] for model in state["models"]] == ["healthy"]
    assert "given []" in err
    assert main(["diagnose", "--json", "--html", "run.html", "-m", f"{package}.ill"]) == 1
    state = json.loads(capfd.readouterr().out)
    assert state["models"][0]["verdict"]["primary"]["code"]
    assert "run.html" in state["notes"][-1]


def test_coverage_lists_what_was_not_seen(package, capsys):
    main(["diagnose", "-m", f"{package}.fine"])
    assert "not checked: " not in capsys.readouterr().out
    main(["diagnose", "--coverage", "-m", f"{package}.fine"])
    assert "not checked: time.data_bound" in capsys.readouterr().out


def test_a_command_that_is_not_there_ends_in_a_similar_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["diagnos", "train.py"])
    assert capsys.readouterr().err.endswith(
        "did you mean diagnose?\nfor what is possible, type: hookcb --help\n"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_gets_completions(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "diagnose" in capsys.readouterr().out
