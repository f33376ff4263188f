"""The exported trace: which ranges there are, what they are called, and that they lie inside each other."""

import gzip
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from hookcb import EMA, Callback, GradientClip, Learner, MixedPrecision, ProfilerCallback
from tests.profiling.support import (
    BACKWARD,
    LAYER,
    PHASES,
    Trace,
    assert_phases_in_steps,
    exported,
    nothing_left,
    profiled,
    read,
    tree,
    whole,
)
from tests.support import (
    Net,
    covering,
    fit,
    in_terminal,
    make_batches,
    make_learner,
    make_model,
    same,
    weights,
)

WINDOW = {"wait": 1, "warmup": 1, "active": 2}
NET = [
    "Net",
    ["stem (Linear)"],
    ["blocks.0 (Sequential)", ["blocks.0.0 (Linear)"], ["blocks.0.1 (ReLU)"]],
    ["blocks.1 (Sequential)", ["blocks.1.0 (Linear)"], ["blocks.1.1 (ReLU)"]],
    ["stem (Linear) #1"],
    ["head (Linear)"],
]


def learner(model, n=4, d=2, loss_func=F.mse_loss, **kwargs):
    return Learner(make_batches(n, d=d), model, loss_func, torch.optim.SGD, lr=0.01, **kwargs)


def traced(model, folder, n=4, **options):
    options = WINDOW | options
    return exported(profiled(learner(model, n), **options), folder)


def forwards(trace, root):
    """Ranges of the layers of each step as a tree, without those under other phases."""
    found = []
    for step in trace.steps.values():
        (forward,) = [r for r in trace.named("forward") if step.holds(r)]
        found.append(tree([r for r in trace.layers(root) if forward.holds(r)]))
    return found


def unnumbered(nodes):
    return [n.split(" #")[0] if isinstance(n, str) else unnumbered(n) for n in nodes]


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """One trace of a net with blocks and a layer that is called twice."""
    torch.manual_seed(0)
    learn = Learner((make_batches(4), make_batches(1)), Net(), F.mse_loss, torch.optim.SGD, lr=0.01)
    profiler = profiled(learn, **WINDOW)
    return exported(profiler, tmp_path_factory.mktemp("net"))


# ---- forward


def test_each_step_holds_its_phases_one_after_another(net):
    assert list(net.steps) == [2, 3]
    for step in net.steps.values():
        phases = [r for r in net.named(*PHASES) if step.holds(r)]
        names = [r.name for r in phases]
        assert [n for n in names if n != "callbacks"] == ["data", "forward", "loss", "backward", "optimizer"]
        assert "callbacks" in names
        assert sum(r.seconds for r in phases) <= step.seconds


def test_what_torch_does_lies_in_the_phase_it_belongs_to(net):
    for step in net.steps.values():
        part = {r.name: r for r in net.named(*PHASES) if step.holds(r) and r.name != "callbacks"}
        assert net.count("aten::linear", part["forward"]) == net.count("aten::linear", step) == 5
        assert net.count("aten::mse_loss", part["loss"]) == net.count("aten::mse_loss", step) == 1
        accumulate = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        assert net.count(accumulate, part["backward"]) == net.count(accumulate, step) == 9
        stepped = [r for r in net.matching("Optimizer.step.*") if step.holds(r)]
        assert [part["optimizer"].holds(r) for r in stepped] == [True]


def test_layers_are_named_ranges_nested_as_the_modules_call_each_other(net):
    assert forwards(net, "Net") == [[NET], [NET]]


def test_layers_have_ranges_in_the_forward_of_profiled_steps_only(net):
    steps = list(net.steps.values())
    for r in net.layers("Net"):
        assert any(f.holds(r) for f in net.named("forward")) or r.start > steps[-1].end, r


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1)

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def test_calls_of_a_layer_are_numbered_anew_in_each_step(tmp_path):
    def block(k):
        call = f" #{k}" if k else ""
        return [f"block (Sequential){call}", [f"block.0 (Linear){call}"], [f"block.1 (Tanh){call}"]]

    trace = traced(Loops(), tmp_path)
    assert forwards(trace, "Loops") == [[["Loops", block(0), block(1), block(2), ["head (Linear)"]]]] * 2


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x, depth=2):
        return self(torch.tanh(self.fc(x)), depth - 1) if depth else x.sum(1, keepdim=True)


def test_a_model_that_calls_itself_is_inside_itself(tmp_path):
    inner = ["Recursive #1", ["fc (Linear) #1"], ["Recursive #2"]]
    assert (
        forwards(traced(Recursive(), tmp_path), "Recursive") == [[["Recursive", ["fc (Linear)"], inner]]] * 2
    )


class Twice(Learner):
    def predict(self):
        return (self.model(self.x) + self.model(-self.x)) / 2


def test_a_model_called_twice_is_numbered_as_any_layer(tmp_path):
    learn = Twice(make_batches(4), nn.Sequential(nn.Linear(2, 1)), F.mse_loss, torch.optim.SGD)
    trace = exported(profiled(learn, **WINDOW), tmp_path)
    both = [["Sequential", ["0 (Linear)"]], ["Sequential #1", ["0 (Linear) #1"]]]
    assert forwards(trace, "Sequential") == [both, both]


def test_a_model_that_is_one_layer_is_called_by_its_class(tmp_path):
    trace = traced(nn.Linear(2, 1), tmp_path)
    assert forwards(trace, "Linear") == [[["Linear"]]] * 2
    assert len([r for r in trace.backwards if r.name == "backward Linear"]) == 2


def test_validation_and_the_model_used_by_callbacks_do_not_count_as_calls(tmp_path):
    def use(cb):
        cb.model(cb.x)
        if cb.training:
            cb.learn.validate()

    for event in ("before_batch", "after_loss", "after_backward", "after_step", "after_batch"):
        torch.manual_seed(0)
        learn = Learner((make_batches(4), make_batches(1)), Net(), F.mse_loss, torch.optim.SGD, lr=0.01)
        profiler = profiled(learn, 2, cbs=[Callback(**{event: use})], wait=2, warmup=1, active=2)
        trace = exported(profiler, tmp_path)
        assert list(trace.steps) == [3, 4]
        assert [unnumbered(one) for one in forwards(trace, "Net")] == [unnumbered([NET])] * 2, event
        assert {row.name: row.calls for row in profiler.layers() if row.calls != 1} == {"stem": 2}, event


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        raise ValueError(self.fc(x).shape)


class Survives(nn.Module):
    """Calls layers that raise, one of them at the end of a chain, and goes on."""

    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), Raises()))
        self.bad, self.good = Raises(), nn.Sequential(nn.Linear(2, 1))

    def forward(self, x):
        for layer in (self.bad, self.chain, self.bad):
            try:
                layer(x)
            except ValueError:
                x = x + 1
        return self.good(x)


def test_of_layers_that_raise_the_ranges_end_and_the_next_nest_rightly(tmp_path):
    chain = ["chain (Sequential)", ["chain.0 (Linear)"]]
    chain += [
        ["chain.1 (Sequential)", ["chain.1.0 (Tanh)"], ["chain.1.1 (Raises)", ["chain.1.1.fc (Linear)"]]]
    ]
    inside = [["bad (Raises)", ["bad.fc (Linear)"]], chain, ["bad (Raises) #1", ["bad.fc (Linear) #1"]]]
    expected = ["Survives", *inside, ["good (Sequential)", ["good.0 (Linear)"]]]
    trace = traced(Survives(), tmp_path)
    assert forwards(trace, "Survives") == [[expected]] * 2
    assert {r.name for r in trace.backwards} >= {"backward good.0 (Linear)"}


class RaisingHooks(nn.Module):
    """Its layers carry hooks that raise, before and after the forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.a.register_forward_pre_hook(self.fail)
        self.b.register_forward_hook(self.fail)

    @staticmethod
    def fail(*_):
        raise ValueError("no")

    def forward(self, x):
        for layer in (self.a, self.b):
            try:
                layer(x)
            except ValueError:
                x = x * 2
        return self.c(x)


def test_where_hooks_of_the_user_raise_the_ranges_end_too(tmp_path):
    learn = learner(RaisingHooks())
    profiler = ProfilerCallback(**WINDOW)
    fit(learn, cbs=profiler)
    (one, _) = forwards(exported(profiler, tmp_path), "RaisingHooks")
    ((root, *children),) = one
    assert root == "RaisingHooks"
    assert children[-1] == ["c (Linear)"]
    assert all(len(child) == 1 for child in children)
    assert not torch.autograd._profiler_enabled()


class Threads(nn.Module):
    """Calls two of its layers in threads of their own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        outs = {}

        def run(name, gate, other):
            gate.wait(1)
            outs[name] = getattr(self, name)(x)
            other.set()

        gates = [threading.Event(), threading.Event()]
        gates[0].set()
        args = [("b", gates[0], gates[1]), ("a", gates[1], gates[0])]
        threads = [threading.Thread(target=run, args=a) for a in args]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return self.c(outs["a"] + outs["b"])


def test_layers_that_are_called_in_threads_do_not_mix_up_the_ranges(tmp_path):
    torch.manual_seed(0)
    model, plain = Threads(), Threads()
    plain.load_state_dict(model.state_dict())
    fit(learner(plain))
    trace = traced(model, tmp_path)
    (one, _) = forwards(trace, "Threads")
    ((root, *children),) = one
    assert root == "Threads"
    assert children[-1] == ["c (Linear)"]
    assert same(weights(model), weights(plain))


@pytest.mark.parametrize(
    "name", ['say "hi"', "back\\slash", "two\nlines", "é → ü", "a (b) #1", "ProfilerStep#7"]
)
def test_odd_names_of_layers_leave_the_trace_whole(name, tmp_path):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 1))
    profiler = profiled(learner(model), **WINDOW)
    profiler.export_chrome_trace(tmp_path / "t.json")
    read(tmp_path / "t.json")
    assert profiler.layers()[name].type == "Linear"
    assert profiler.layers()[name].backward > 0


def test_a_copy_of_the_model_in_validation_is_no_layer_of_the_model(tmp_path):
    learn = Learner((make_batches(4), make_batches(1)), Net(), F.mse_loss, torch.optim.SGD, lr=0.01)
    profiler = profiled(learn, 2, cbs=[EMA(0.9)], wait=2, warmup=1, active=3)
    assert forwards(exported(profiler, tmp_path), "Net") == [[NET]] * 3


class ByClosure(Learner):
    def step(self):
        def closure():
            self.opt.zero_grad()
            loss = F.mse_loss(self.model(self.x), self.y)
            loss.backward()
            return loss

        self.opt.step(closure)


def test_a_closure_that_calls_the_model_again_is_the_optimizers_affair(tmp_path):
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    options = {"opt_func": lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=3), "lr": 0.1}
    fit(ByClosure(make_batches(4), plain, F.mse_loss, **options))
    profiler = profiled(ByClosure(make_batches(4), model, F.mse_loss, **options), **WINDOW)
    trace = exported(profiler, tmp_path)
    assert forwards(trace, "Net") == [[NET], [NET]]
    layers = profiler.layers()
    assert (layers["head"].calls, layers["head"].output_bytes) == (1, 4 * 1 * 4)
    for step in trace.steps.values():
        (phase,) = [r for r in trace.named("backward") if step.holds(r)]
        (optimizer,) = [r for r in trace.named("optimizer") if step.holds(r)]
        for r in trace.backwards:
            assert not step.holds(r) or phase.holds(r) or optimizer.holds(r), r
    assert same(weights(model), weights(plain))


class Penalised(Learner):
    """Adds the size of the gradient with respect to the input, which takes a backward inside the loss."""

    def get_loss(self):
        x = self.x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return F.mse_loss(self.pred, self.y) + grad.pow(2).mean()


def test_a_backward_inside_the_loss_does_not_blur_that_of_the_step(tmp_path):
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    fit(Penalised(make_batches(4), plain, F.mse_loss, torch.optim.SGD, lr=0.01))
    learn = Penalised(make_batches(4), model, F.mse_loss, torch.optim.SGD, lr=0.01)
    trace = exported(profiled(learn, **WINDOW), tmp_path)
    assert forwards(trace, "Net") == [[NET], [NET]]
    for step in trace.steps.values():
        inside = [r for r in trace.named("backward", "loss") if step.holds(r)]
        for r in trace.backwards:
            assert not step.holds(r) or any(phase.holds(r) for phase in inside), r
    assert same(weights(model), weights(plain))


def test_layers_under_transforms_of_torch_func_are_ranges_too(tmp_path):
    class Transformed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            x = torch.func.functional_call(self.a, dict(self.a.named_parameters()), x)
            return self.c(torch.func.vmap(self.b)(x))

    trace = traced(Transformed(), tmp_path)
    expected = ["Transformed", ["a (Linear)"], ["b (Linear)"], ["c (Linear)"]]
    assert forwards(trace, "Transformed") == [[expected]] * 2


def test_a_fit_in_a_thread_of_its_own_is_profiled_as_any(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(traced(Net(), tmp_path)))
    thread.start()
    thread.join()
    assert forwards(found[0], "Net") == [[NET], [NET]]
    assert len(found[0].backwards) == 2 * 10


# ---- which layers


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("stem", [["stem (Linear)"], ["stem (Linear) #1"]]),
        ("blocks.*.0", [["blocks.0.0 (Linear)"], ["blocks.1.0 (Linear)"]]),
        (nn.ReLU, [["blocks.0.1 (ReLU)"], ["blocks.1.1 (ReLU)"]]),
        (["blocks.1", "head"], [["blocks.1 (Sequential)"], ["head (Linear)"]]),
        (lambda m: isinstance(m, nn.Sequential), [["blocks.0 (Sequential)"], ["blocks.1 (Sequential)"]]),
        ((), []),
    ],
    ids=["name", "glob", "type", "list", "predicate", "none"],
)
def test_only_the_layers_asked_for_have_ranges(modules, expected, tmp_path):
    profiler = profiled(learner(Net()), **WINDOW, modules=modules)
    trace = exported(profiler, tmp_path)
    assert [one[1:] if one and one[0] == "Net" else one for one in forwards(trace, "Net")] == [expected] * 2
    wanted = {name.split(" ")[0] for (name,) in expected}
    assert {r.name.split(" ")[1] for r in trace.backwards} - {"Net"} <= wanted
    assert {row.name for row in profiler.layers()} - {"Net", ""} == wanted
    assert [r.name for r in trace.named("forward")] == ["forward"] * 2
    assert sum(row.seconds for row in profiler.phases().rows) == pytest.approx(profiler.phases().step)


# ---- backward


def test_the_backward_of_each_layer_is_in_a_row_of_its_own(net):
    rows = {r.row for r in net.backwards}
    assert len(rows) == 1
    assert net.row_names[rows.pop()] == "backward by layer"
    assert {r.row for r in net.layers("Net")}.isdisjoint({r.row for r in net.backwards})


def test_the_backward_of_layers_lies_in_its_step_and_nests_as_the_modules(net):
    for step in net.steps.values():
        (phase,) = [r for r in net.named("backward") if step.holds(r)]
        mine = [r for r in net.backwards if step.holds(r)]
        assert all(phase.holds(r) for r in mine)
        ((root, *children),) = tree(mine)
        assert root == "backward Net"
        assert [BACKWARD.fullmatch(name)["name"] for name, *_ in children] == [
            *("head", "stem", "blocks.1", "blocks.0", "stem")
        ]
        for name, *inner in children:
            k = BACKWARD.fullmatch(name)["name"].removeprefix("blocks.")
            if k in "01":
                assert inner == [[f"backward blocks.{k}.1 (ReLU)"], [f"backward blocks.{k}.0 (Linear)"]]
            else:
                assert inner == []
    assert len(net.backwards) == 2 * 10


def test_the_work_of_autograd_lies_in_the_backward_of_the_layer_that_it_is_of(net):
    leaves = [r for r in net.backwards if "(Linear)" in r.name]
    for step in net.steps.values():
        nodes = net.matching("autograd::engine::evaluate_function: AddmmBackward0")
        nodes = [r for r in nodes if step.holds(r)]
        owners = [[leaf.name.split()[1] for leaf in leaves if leaf.holds(node)] for node in nodes]
        assert owners == [["head"], ["stem"], ["blocks.1.0"], ["blocks.0.0"], ["stem"]]


def test_a_frozen_layer_before_all_others_has_no_backward(tmp_path):
    model = make_model()
    model[0].requires_grad_(False)
    profiler = profiled(learner(model), **WINDOW)
    trace = exported(profiler, tmp_path)
    assert {r.name for r in trace.backwards} <= {
        "backward Sequential",
        "backward 2 (Linear)",
        "backward 1 (ReLU)",
    }
    assert not profiler.layers()["0"].backward
    assert profiler.layers()["2"].backward > 0


def test_a_residual_path_keeps_the_backward_of_each_layer_apart(tmp_path):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            y = self.a(x)
            return self.head(x + y + self.b(y))

    trace = traced(Residual(), tmp_path)
    for step in trace.steps.values():
        ((_, *children),) = tree([r for r in trace.backwards if step.holds(r)])
        assert [name for (name,) in children] == [f"backward {n} (Linear)" for n in ("head", "b", "a")]


@pytest.mark.parametrize("cb", [lambda: GradientClip(1.0), MixedPrecision], ids=["clip", "amp"])
def test_with_other_callbacks_all_ranges_nest(cb, tmp_path):
    trace = exported(profiled(learner(Net()), cbs=[cb()], **WINDOW), tmp_path)
    assert forwards(trace, "Net") == [[NET], [NET]]
    for step in trace.steps.values():
        (phase,) = [r for r in trace.named("backward") if step.holds(r)]
        mine = [r for r in trace.backwards if step.holds(r)]
        assert len(mine) == 10
        assert all(phase.holds(r) for r in mine)


def test_a_cancelled_backward_has_no_ranges(tmp_path):
    from hookcb import CancelBackwardException

    def cancel(cb):
        if cb.train_iter == 2:
            raise CancelBackwardException

    trace = exported(profiled(learner(Net()), cbs=[Callback(before_backward=cancel)], **WINDOW), tmp_path)
    assert [sum(s.holds(r) for r in trace.backwards) for s in trace.steps.values()] == [0, 10]
    assert forwards(trace, "Net") == [[NET], [NET]]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(2, 2), nn.Linear(2, 1), reentrant
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, x):
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_activation_checkpointing_computes_again_is_no_call_of_the_forward(reentrant, tmp_path):
    torch.manual_seed(0)
    model, plain = Checkpointed(reentrant), Checkpointed(reentrant)
    plain.load_state_dict(model.state_dict())
    fit(learner(plain))
    profiler = profiled(learner(model), **WINDOW)
    trace = exported(profiler, tmp_path)
    block = ["block (Sequential)", ["block.0 (Linear)"], ["block.1 (Tanh)"], ["block.2 (Linear)"]]
    expected = ["Checkpointed", ["stem (Linear)"], block, ["head (Linear)"]]
    assert forwards(trace, "Checkpointed") == [[expected]] * 2
    assert {row.name: row.calls for row in profiler.layers() if row.depth} == dict.fromkeys(
        ["stem", "block", "block.0", "block.1", "block.2", "head"], 1
    )
    for name in ("block", "block.0"):
        found = [r for r in trace.backwards if f" {name} (" in r.name]
        assert bool(found) == (profiler.layers()[name].backward is not None)
        assert found or reentrant  # which hides a graph in the graph
    assert same(weights(model), weights(plain))


# ---- files


def test_a_trace_of_a_plain_loop_has_the_same_operators(net, tmp_path):
    torch.manual_seed(0)
    model, batches = Net(), make_batches(4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for x, y in batches[2:]:
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    expected = {e.key: e.count for e in prof.key_averages()}
    for name in ("aten::linear", "aten::addmm", "aten::relu", "aten::mse_loss", "AddmmBackward0", "aten::mm"):
        assert sum(net.count(name, step) for step in net.steps.values()) == expected[name], name


def test_it_is_exported_as_often_as_wanted(tmp_path):
    profiler = profiled(make_learner(6), **WINDOW)
    plain, zipped = exported(profiler, tmp_path, "a.json"), exported(profiler, tmp_path, "b.json.gz")
    assert plain.ranges == zipped.ranges == exported(profiler, tmp_path, "a.json").ranges
    assert read(tmp_path / "a.json") == read(tmp_path / "b.json.gz")
    profiler.export_chrome_trace(str(tmp_path / "c.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json.gz", "c.json"]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_each_cycle_has_a_file_of_its_own(suffix, tmp_path):
    options = {"wait": 1, "warmup": 0, "active": 1, "repeat": 3}
    profiler = profiled(make_learner(7, 0), trace=tmp_path / f"my.trace{suffix}", **options)
    names = [f"my.trace{k}{suffix}" for k in ("", "-2", "-3")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    assert [list(whole(tmp_path / name).steps) for name in names] == [[1], [3], [5]]
    assert list(exported(profiler, tmp_path).steps) == [5]
    assert [list(exported(profiler, tmp_path, cycle=k).steps) for k in (0, 1, 2)] == [[1], [3], [5]]
    with pytest.raises((LookupError, ValueError)):
        profiler.export_chrome_trace(tmp_path / "no.json", cycle=3)


def test_a_folder_is_made_and_gets_files_that_tensorboard_finds(tmp_path):
    profiled(make_learner(7, 0), trace=str(tmp_path / "runs" / "first"), wait=0, warmup=0, active=1, repeat=2)
    files = sorted((tmp_path / "runs" / "first").iterdir())
    assert len(files) == 2
    for file in files:
        # its plugin reads the worker from what stands before: https://github.com/pytorch/kineto/tree/main/tb_plugin
        assert file.name.endswith(".pt.trace.json.gz")
        assert file.name.removesuffix(".pt.trace.json.gz").strip(".")
        with gzip.open(file) as f:
            assert f.read(1) == b"{"
    assert sorted(k for file in files for k in whole(file).steps) == [0, 1]


def test_what_is_written_and_what_is_exported_is_the_same(tmp_path):
    profiler = profiled(make_learner(), trace=tmp_path / "a.json", wait=0, warmup=1, active=2)
    assert whole(tmp_path / "a.json").ranges == exported(profiler, tmp_path).ranges


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 5), reason="torch loses stacks on Python 3.12.0–4, pytorch#155446"
)
def test_stacks_are_exported_where_they_were_recorded(tmp_path):
    profiler = profiled(make_learner(), with_stack=True, wait=0, warmup=1, active=1)
    profiler.export_stacks(tmp_path / "stacks.txt")
    profiler.export_stacks(str(tmp_path / "again.txt"), metric="self_cpu_time_total")
    lines = (tmp_path / "stacks.txt").read_text().splitlines()
    assert lines
    assert all(line.rsplit(" ", 1)[1].isdigit() for line in lines)
    assert any(__file__.rsplit("/", 1)[1] in line or "learner.py" in line for line in lines)
    with pytest.raises(ValueError, match=r"self_cpu_time_total"):
        profiler.export_stacks(tmp_path / "no.txt", metric="beauty")
    whole_trace = exported(profiler, tmp_path)
    assert list(whole_trace.steps) == [1]
    without = profiled(make_learner(), wait=0, warmup=1, active=1)
    with pytest.raises((RuntimeError, ValueError), match="with_stack"):
        without.export_stacks(tmp_path / "no.txt")
    assert not (tmp_path / "no.txt").exists()


def test_shapes_are_in_the_trace_where_asked_for(tmp_path):
    def shapes(**options):
        profiled(make_learner(), wait=0, warmup=1, active=1, trace=tmp_path / "t.json", **options)
        events = read(tmp_path / "t.json")["traceEvents"]
        return [e["args"].get("Input Dims") for e in events if e["name"] == "aten::linear"]

    assert shapes(record_shapes=True) == [[[4, 2], [3, 2], [3]], [[4, 3], [1, 3], [1]]]
    assert shapes() == [None, None]


# ---- compiled


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """One of torch's own containers would not be compiled: its forward is none of the user's."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(2, 2), nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x))


def compiled(way, part=None):
    torch.manual_seed(0)
    model = Net()
    if part is not None:
        model.blocks[part] = Block()
        model.blocks[part].compile(backend="aot_eager")
    elif way == "torch.compile":
        return torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    return model


def graphs():
    stats = torch._dynamo.utils.counters
    return stats["stats"]["unique_graphs"], dict(stats["graph_break"]), dict(stats["recompiles"])


silence = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@silence
@pytest.mark.parametrize(
    ("way", "called_before"), covering(["torch.compile", "model.compile"], [False, True], of=1)
)
def test_a_compiled_model_is_compiled_once_and_is_one_row(way, called_before, fresh_dynamo, tmp_path):
    plain = compiled(way)
    fit(learner(plain, 6))
    expected = graphs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = compiled(way)
    if called_before:
        model.train()(make_batches(1)[0][0]).sum().backward()
        model.zero_grad()
    learn = learner(model, 6)
    profiler = ProfilerCallback(wait=1, warmup=1, active=1, repeat=2)
    fit(learn, cbs=profiler)
    assert profiler.compiled == ("Net",)
    assert graphs() == expected
    assert expected[0] == 1
    trace = exported(profiler, tmp_path)
    assert list(trace.steps) == profiler.profiled_steps[1:] == [5]
    (region,) = trace.matching("Torch-Compiled Region.*")
    assert [f.holds(region) for f in trace.named("forward")] == [True]
    assert not [
        r for r in trace.ranges if LAYER.fullmatch(r.name) and r.name.startswith(("stem", "blocks", "head"))
    ]
    rows = [row for row in profiler.layers() if row.type == "compiled graph"]
    assert [row.calls for row in rows] == [1]
    assert rows[0].name.startswith("Torch-Compiled Region")
    assert 0 < rows[0].forward <= {row.name: row.seconds for row in profiler.phases().rows}["forward"]
    assert "compiled graph" in in_terminal(profiler.report())
    assert same(weights(model), weights(plain))
    with nothing_left(learn):
        fit(learn)


@silence
def test_of_a_compiled_part_the_layers_around_it_have_ranges(fresh_dynamo, tmp_path):
    plain = compiled(None, part=0)
    fit(learner(plain, 6))
    expected = graphs()
    assert expected[0] == 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = compiled(None, part=0)
    profiler = profiled(learner(model, 6), wait=1, warmup=1, active=2)
    assert profiler.compiled == ("blocks.0",)
    assert graphs() == expected
    trace = exported(profiler, tmp_path)
    for one in forwards(trace, "Net"):
        ((root, *children),) = one
        flat = [name for name, *_ in children]
        assert root == "Net"
        assert [name for name in flat if not name.startswith("blocks.0")] == [
            *("stem (Linear)", "blocks.1 (Sequential)", "stem (Linear) #1", "head (Linear)")
        ]
        assert ["blocks.1 (Sequential)", ["blocks.1.0 (Linear)"], ["blocks.1.1 (ReLU)"]] in children
    assert not trace.matching(r"blocks\.0\..*")
    assert len(trace.matching("Torch-Compiled Region.*")) == 2
    assert [row.calls for row in profiler.layers() if row.type == "compiled graph"] == [1]
    assert same(weights(model), weights(plain))


@silence
def test_a_model_that_is_compiled_inside_the_window_leaves_a_whole_trace(fresh_dynamo, tmp_path):
    model = compiled("torch.compile")
    profiler = ProfilerCallback(wait=0, warmup=0, active=3)
    fit(learner(model, 6), cbs=profiler)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    profiler.export_chrome_trace(tmp_path / "t.json")
    trace = Trace(tmp_path / "t.json")  # what torch notes while it compiles does not nest
    assert_phases_in_steps(trace)
    assert list(trace.steps) == [0, 1, 2]
    assert len(trace.matching("Torch-Compiled Region.*")) >= 3
    assert all(any(f.holds(r) for f in trace.named("forward")) for r in trace.matching("Torch-Compiled R.*"))
    profiler.layers(), profiler.report()


@pytest.mark.slow
@silence
def test_the_report_says_that_a_graph_was_compiled_again(fresh_dynamo):
    torch.manual_seed(0)
    model = torch.compile(Net(), backend="aot_eager", dynamic=False)
    batches = [*make_batches(2), *make_batches(2, bs=3)]
    learn = Learner(batches, model, F.mse_loss, torch.optim.SGD, lr=0.01)
    texts = []
    for active in ([1, 2], [2, 3]):  # of the first two the second has fewer samples
        profiler = ProfilerCallback(wait=active[0], warmup=0, active=2)
        fit(learn, cbs=profiler)
        assert profiler.profiled_steps == active
        texts.append(in_terminal(profiler.report(), 300))
    assert ["compile compiled" in text or "recompil" in text for text in texts] == [True, False]
