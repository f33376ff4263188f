"""Private names of torch: what each gives, and that no file but core/torch_private.py uses any."""

import ast
import functools
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import clip_grad
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

import hookcb
from hookcb.core import torch_private
from tests.core.support import fake_group, group_of_one
from tests.support import in_turn

PACKAGE = Path(hookcb.__file__).parent
HOME = PACKAGE / "core" / "torch_private.py"


def node_of_exp():
    return torch.ones(2, requires_grad=True).exp().grad_fn


def during_backward(look):
    """What `look` gives, called with the node of x * x while its backward runs."""
    x = torch.ones(2, requires_grad=True)
    y = x * x
    found = []
    y.register_hook(lambda grad: found.append(look(y.grad_fn)))
    y.sum().backward()
    return found[0]


def noop(*args, **kwargs):
    return None


# ---- no other file


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def private_names(path):
    """Private names in the attributes, imports and texts of a file; one that ends in _ is a prefix."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {part for alias in node.names for part in [*node.module.split("."), alias.name]}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^(?:torch\.)?(_\w+)", node.value)) if " " not in node.value else set()
    return {name for name in found if is_private(name)}


def uses(path, names):
    """`(line, name)` of each private name of torch in a file, and of each of `names` that is not its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prefixes = tuple(name for name in names if name.endswith("_"))
    of_torch, own, found = set(), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_torch |= {(a.asname or "torch") for a in node.names if a.name.split(".")[0] == "torch"}
            parts = [(a.name.split("."), node) for a in node.names if a.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
            of_torch |= {alias.asname or alias.name for alias in node.names}
            parts = [([*node.module.split("."), *(alias.name for alias in node.names)], node)]
        else:
            parts = []
        found += [(at.lineno, part) for path_of, at in parts for part in path_of if is_private(part)]
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            own |= {getattr(member, "name", "") for member in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            is_torchs = isinstance(root, ast.Name) and root.id in of_torch
            if is_torchs or ((node.attr in names or node.attr.startswith(prefixes)) and node.attr not in own):
                found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            named = node.value.removeprefix("torch.")
            if (
                named in names
                or (is_private(named) and named.startswith(prefixes))
                or "torch._" in node.value
            ):
                found.append((node.lineno, node.value))
    return sorted(set(found))


def strays(package, home):
    """In words, what files of a package but `home` use."""
    names = private_names(home)
    return [
        f"{path.relative_to(package.parent).as_posix()}:{line} uses {name!r}, private to torch; write "
        "a function for it in hookcb/core/torch_private.py, with a test, and call that"
        for path in sorted(package.rglob("*.py"))
        if path != home
        for line, name in uses(path, names)
    ]


def test_no_other_file_uses_private_names_of_torch():
    assert strays(PACKAGE, HOME) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\nid = torch._C._current_graph_task_id()", "_C"),
        ("import torch as t\nt._assert(True)", "_assert"),
        ("from torch import nn\nBase = nn.modules.batchnorm._BatchNorm", "_BatchNorm"),
        ("from torch.autograd import Variable\nVariable._execution_engine", "_execution_engine"),
        ("def f():\n    import torch._dynamo.utils", "_dynamo"),
        ("def f():\n    from torch._dynamo import utils", "_dynamo"),
        ("x = 1\nfrom torch.utils.data.dataloader import _BaseDataLoaderIter", "_BaseDataLoaderIter"),
        ("def f(m):\n    return m._forward_hooks", "_forward_hooks"),
        ("class A:\n    def f(self):\n        self.m._buffers.clear()", "_buffers"),
        ("def f(x):\n    return x.grad._version", "_version"),
        ("def f(node):\n    return node._saved_weight", "_saved_weight"),
        ("def f(node):\n    return getattr(node, '_saved_weight')", "_saved_weight"),
        ("def f(m):\n    return getattr(m, '_orig_mod', m)", "_orig_mod"),
        ("import sys\nis_there = 'torch._dynamo' in sys.modules", "torch._dynamo"),
    ],
)
def test_a_planted_use_is_found(tmp_path, code, name):
    package = tmp_path / "hookcb"
    package.mkdir()
    (package / "fine.py").write_text(
        "import torch\nclass A:\n    def __init__(self):\n        self._values = torch.__version__\n"
        "    def of(self, other):\n        return other._values, other._own, '_softmax'\n"
    )
    assert strays(package, HOME) == []
    (package / "planted.py").write_text(code)
    found = strays(package, HOME)
    line = next(i for i, text in enumerate(code.splitlines(), 1) if name in text)
    assert found[0].startswith("hookcb/planted.py:")
    assert any(
        stray.startswith(f"hookcb/planted.py:{line} uses {name!r}, private to torch") for stray in found
    )
    assert all("write a function for it in hookcb/core/torch_private.py" in stray for stray in found)


def test_each_name_has_a_docstring_and_a_test():
    tree = ast.parse(HOME.read_text(encoding="utf-8"))
    names, documented = set(), set()
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
            documented |= {node.name} if ast.get_docstring(node) else set()
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = (node.targets[0] if isinstance(node, ast.Assign) else node.target).id
            if name[0] != "_" and name not in (
                "Hooks",
                "SavedHooks",
                "Edit",
            ):  # called by functions, or a type
                names.add(name)
            documented |= {name} if isinstance(after, ast.Expr) else set()
    assert names - documented == set()
    assert {name for name in names if f"test_{name.lower()}" not in globals()} == set()


# ---- classes


def test_dispatchmode():
    seen = []

    class Mode(torch_private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@in_turn("data", [list(range(4)), Numbers()])
@in_turn("n_workers", [0, 1])
def test_dataloaderiter(data, n_workers):
    found = iter(DataLoader(data, num_workers=n_workers))
    assert isinstance(found, torch_private.DataLoaderIter)
    assert type(found).__next__ is torch_private.DataLoaderIter.__next__  # which hookcb replaces for a while


@pytest.mark.parametrize("size", [2, None])
def test_listfetcher(size, monkeypatch):
    calls = []
    monkeypatch.setattr(torch_private.ListFetcher, "fetch", lambda self, index: calls.append(index))
    list(DataLoader(list(range(4)), batch_size=size))
    assert calls == ([[0, 1], [2, 3]] if size else [0, 1, 2, 3])


def test_batchnorm():
    norms = nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d()
    assert all(isinstance(m, torch_private.BatchNorm) for m in norms)
    assert not isinstance(nn.LayerNorm(2), torch_private.BatchNorm)


def test_dropout():
    kinds = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
    assert all(isinstance(kind(0.3), torch_private.Dropout) and kind(0.3).p == 0.3 for kind in kinds)


def test_convolution():
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    assert all(isinstance(kind(1, 1, 1), torch_private.Convolution) for kind in kinds)
    assert not isinstance(nn.Linear(1, 1), torch_private.Convolution)


# ---- modules


def test_parameters_of():
    m = nn.Linear(2, 3, bias=False)
    assert torch_private.parameters_of(m) == {"weight": m.weight, "bias": None}
    assert torch_private.parameters_of(nn.Sequential(m)) == {}


def test_children_of():
    m = nn.Linear(2, 3)
    assert torch_private.children_of(nn.Sequential(m)) == {"0": m}
    assert torch_private.children_of(m) == {}


def test_is_initialized():
    assert torch_private.is_initialized(nn.Linear(2, 3))
    assert torch_private.is_initialized(torch.nn.Module())
    assert not torch_private.is_initialized(nn.Linear.__new__(nn.Linear))


def test_buffers_of():
    m = nn.BatchNorm1d(2)
    assert list(torch_private.buffers_of(m)) == ["running_mean", "running_var", "num_batches_tracked"]
    other = torch_private.buffers_of(m)["running_mean"] = torch.ones(2)
    assert m.running_mean is other


def test_unsaved_buffer_names():
    m = nn.BatchNorm1d(2)
    m.register_buffer("scratch", torch.ones(2), persistent=False)
    assert torch_private.unsaved_buffer_names(m) == {"scratch"}
    assert "scratch" not in m.state_dict()
    torch_private.unsaved_buffer_names(m).clear()
    assert "scratch" in m.state_dict()


def test_backward_in_python():
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    node = Twice.apply(torch.ones(2, requires_grad=True)).grad_fn
    assert torch_private.backward_in_python(node) is Twice.backward
    assert torch_private.backward_in_python(node_of_exp()) is None


def test_forward_hooks():
    m = nn.Linear(1, 1)

    def before(*args):
        return None

    m.register_forward_hook(noop)
    m.register_forward_pre_hook(before)
    assert [list(hooks.values()) for hooks in torch_private.forward_hooks(m)] == [[noop], [before]]


def test_backward_hooks():
    m = nn.Linear(1, 1)

    def before(*args):
        return None

    m.register_full_backward_hook(noop)
    m.register_full_backward_pre_hook(before)
    assert [list(hooks.values()) for hooks in torch_private.backward_hooks(m)] == [[noop], [before]]


def test_hook_kinds():
    m, p = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    for register in (
        m.register_forward_hook,
        m.register_forward_pre_hook,
        m.register_full_backward_hook,
        m.register_full_backward_pre_hook,
        m.register_state_dict_post_hook,
        m.register_state_dict_pre_hook,
        m.register_load_state_dict_pre_hook,
        m.register_load_state_dict_post_hook,
        p.register_hook,
        p.register_post_accumulate_grad_hook,
    ):
        register(noop)
    of_module = {kind for kind in torch_private.HOOK_KINDS if len(getattr(m, kind, None) or ())}
    of_tensor = {kind for kind in torch_private.HOOK_KINDS if len(getattr(p, kind, None) or ())}
    assert of_tensor == {"_backward_hooks", "_post_accumulate_grad_hooks"}
    assert of_module | of_tensor == set(torch_private.HOOK_KINDS)


def test_plain_call():
    m, seen = nn.Linear(1, 1), []
    m.register_forward_hook(lambda *args: seen.append(1))
    torch_private.set_compiled_call(m, noop)
    assert torch_private.plain_call(m)(torch.ones(1)).shape == (1,)
    assert seen == [1]


def test_call_name():
    names = []

    class Looking(nn.Module):
        def forward(self):
            frame = sys._getframe(1)
            while frame is not None:
                names.extend([frame.f_code.co_name] if frame.f_locals.get("self") is self else [])
                frame = frame.f_back

    Looking()()
    assert names.count(torch_private.CALL_NAME) == 1


# ---- torch.compile


def test_compiled_call():
    m = nn.Linear(1, 1)
    assert torch_private.compiled_call(m) is None
    m.compile(backend="eager")
    assert callable(torch_private.compiled_call(m))


def test_set_compiled_call():
    m = nn.Linear(1, 1)
    torch_private.set_compiled_call(m, lambda *args, **kwargs: (args, kwargs))
    assert m(1, b=2) == ((1,), {"b": 2})


def test_undo_compile():
    m = nn.Linear(1, 1)
    m.compile(backend="eager")
    torch_private.undo_compile(m)
    torch_private.undo_compile(m)
    assert torch_private.compiled_call(m) is None
    assert m(torch.ones(1)).shape == (1,)


def test_compiled_name():
    compiled = torch.compile(nn.Sequential(nn.Linear(1, 1)), backend="eager")
    assert next(iter(compiled.state_dict())) == f"{torch_private.COMPILED_NAME}.0.weight"


def test_is_compile_wrapper():
    m = nn.Linear(1, 1)
    assert torch_private.is_compile_wrapper(torch.compile(m, backend="eager"))
    m.compile(backend="eager")
    assert not torch_private.is_compile_wrapper(m)


def test_without_compile_wrapper():
    m = nn.Linear(1, 1)
    assert torch_private.without_compile_wrapper(torch.compile(m, backend="eager")) is m
    assert torch_private.without_compile_wrapper(m) is m


def test_is_dynamo_imported(fresh_dynamo, monkeypatch):
    assert torch_private.is_dynamo_imported()  # by the fixture
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert not torch_private.is_dynamo_imported()


@pytest.fixture
def edited(fresh_dynamo):
    """Graphs that a backend refuses with `cos` in them, which an edit puts there and may undo."""
    seen = []

    def backend(gm, example_inputs):
        seen.append([x.target for x in gm.graph.nodes if x.op == "call_method"])
        if "cos" in seen[-1]:
            raise RuntimeError("refused")
        return gm.forward

    def edit(gm):
        node = next(x for x in gm.graph.nodes if x.op == "call_method")
        with gm.graph.inserting_before(node):
            added = gm.graph.call_method("cos", node.args)
        return lambda: gm.graph.erase_node(added)

    return torch.compile(lambda x: x.sin(), backend=backend), edit, seen


def test_edit_graphs(edited):
    f, edit, seen = edited
    end = torch_private.edit_graphs(edit)
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin())
    assert seen == [["cos", "sin"], ["sin"]]  # compiled as it was, as the edited one could not be
    end()
    torch._dynamo.reset()
    f(torch.ones(2))
    assert seen[2:] == [["sin"]]


def test_compiles_graph():
    from torch._dynamo.output_graph import OutputGraph

    before = getattr(OutputGraph, torch_private.COMPILES_GRAPH)
    first, second = (torch_private.edit_graphs(lambda gm: None) for _ in range(2))
    first()  # in another order than they begin
    assert getattr(OutputGraph, torch_private.COMPILES_GRAPH) is not before
    second()
    assert getattr(OutputGraph, torch_private.COMPILES_GRAPH) is before


def test_mark_static_address(fresh_dynamo):
    x = torch.zeros(3)
    torch_private.mark_static_address(x)
    f = torch.compile(lambda y: x.add_(y), backend="eager")
    assert f(torch.ones(3)) is x


def test_compile_counts(fresh_dynamo, monkeypatch):
    counts = torch_private.compile_counts("frames")
    before, n = counts["total"], torch_private.compile_counts("stats")["unique_graphs"]
    f = torch.compile(lambda x: x + 1, backend="eager")
    f(torch.ones(2))
    f(torch.ones(2))
    assert counts["total"] == before + 1
    assert torch_private.compile_counts("stats")["unique_graphs"] == n + 1
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert torch_private.compile_counts("frames") == {}


def test_untraced(fresh_dynamo):
    called = []
    look = torch_private.untraced(lambda: called.append(torch.compiler.is_compiling()))
    assert look.__wrapped__.__name__ == "<lambda>"
    f = torch.compile(lambda x: (look(), x + 1)[1], backend="eager")
    for _ in range(2):
        assert f(torch.ones(1)) == 2
    assert called == [False, False]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_script_instead():
    @functools.wraps(F.relu)
    def wrapper(*args, **kwargs):
        return F.relu(*args, **kwargs)

    torch_private.script_instead(wrapper, F.relu)
    assert torch.jit.script(wrapper)(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 1.0]


def test_held_versions():
    weight = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight])
    before = torch_private.held_versions(opt)
    weight.data = torch.zeros(2)
    with torch.no_grad():
        weight.add_(1)
    assert torch_private.held_versions(opt) == [weight._version] != before


def test_skip_frames(fresh_dynamo):
    compiling = []

    def inner(x):
        return x + torch.compiler.is_compiling()

    def outer(x):
        compiling.append(torch.compiler.is_compiling())
        return inner(x)

    torch_private.skip_frames(outer)
    assert torch.compile(outer, backend="eager")(torch.ones(1)) == 2  # what it calls is compiled
    assert compiling == [False]


def test_as_it_is(fresh_dynamo):
    compiling, breaks = [], []

    @torch_private.as_it_is
    def hook(grad):
        """Notes."""
        compiling.append(torch.compiler.is_compiling())

    def step(x):
        (2 * x).sum().backward()

    def compiled(x):
        torch._dynamo.utils.counters.clear()
        torch.compile(step, backend="eager")(x)
        breaks.append(torch._dynamo.utils.counters["graph_break"].total())

    assert hook.__doc__ == "Notes."
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")
        x = torch.ones(2, requires_grad=True)
        compiled(x)
        x.register_hook(hook)
        torch._dynamo.reset()
        compiled(x)
    assert compiling == [False]
    assert breaks == [1, 1]


# ---- tensors and storages


def test_version_of():
    x = torch.ones(2)
    n = torch_private.version_of(x)
    x.add_(1)
    assert torch_private.version_of(x) == torch_private.version_of(x[:1]) == n + 1
    x.data.add_(1)
    assert torch_private.version_of(x) == n + 1
    with torch.inference_mode():
        inference = torch.ones(2)
    with pytest.raises(RuntimeError):
        torch_private.version_of(inference)


def test_is_view():
    x = torch.ones(2, requires_grad=True) * 2
    assert torch_private.is_view(x[:1])
    assert not torch_private.is_view(x)
    assert not torch_private.is_view(x[:1].detach().clone())


def test_tensor_hooks():
    x = torch.ones(2, requires_grad=True)
    assert torch_private.tensor_hooks(x) == {}
    handle = x.register_hook(noop)
    assert list(torch_private.tensor_hooks(x).values()) == [noop]
    handle.remove()
    assert not torch_private.tensor_hooks(x)


def two_of_one():
    """A sparse tensor that is not coalesced: 3 at (0, 1) in two parts."""
    return torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True)


def test_coo_indices():
    assert torch_private.coo_indices(two_of_one()).tolist() == [[0, 0], [1, 1]]


def test_coo_values():
    assert torch_private.coo_values(two_of_one()).tolist() == [1.0, 2.0]


def test_storage_id():
    x, y = torch.ones(4), torch.ones(4)
    ids = [torch_private.storage_id(z.untyped_storage()) for z in (x, x[2:], x.detach(), y)]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    empty = [torch.empty(0), torch.empty(0)]  # whose data is nowhere
    assert len({torch_private.storage_id(z.untyped_storage()) for z in empty}) == 2


def test_flattened():
    xs = [torch.rand(2, 3), torch.rand(()), torch.rand(3, 2).T, torch.rand(0)]
    assert torch.equal(torch_private.flattened(xs), torch.cat([x.reshape(-1) for x in xs]))
    one = torch.ones(2, 2)
    assert torch_private.flattened([one]).data_ptr() == one.data_ptr()


def test_norms_of():
    xs = [torch.rand(2, 3), torch.rand(5), torch.tensor(-2.0)]
    found = torch_private.norms_of(xs)
    assert isinstance(found, list)
    torch.testing.assert_close(found, [(x.double() ** 2).sum().sqrt().float() for x in xs])


def test_operator_schema():
    schema = torch_private.operator_schema(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.is_mutable) == ("aten::add_", True)
    assert not torch_private.operator_schema(torch.ops.aten.add.Tensor).is_mutable


def operators(function, *args, **kwargs):
    """The operators that a function runs, as modes see them."""
    seen = set()

    class Mode(torch_private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Mode():
        function(*args, **kwargs)
    return seen


def test_cudnn_rnn():
    packet = torch_private.cudnn_rnn()
    args = [arg.name for arg in torch_private.operator_schema(packet.default).arguments]
    assert args[:2] == ["input", "weight"]  # by which its cost is counted
    if torch.cuda.is_available():
        assert packet in operators(nn.LSTM(2, 2, device="cuda"), torch.rand(3, 2, 2, device="cuda"))


def test_cpu_attention():
    q = torch.rand(1, 2, 8, 16)
    assert torch_private.cpu_attention() in operators(F.scaled_dot_product_attention, q, q, q)


# ---- graphs and backwards


def test_in_backward():
    assert not torch_private.in_backward()
    assert during_backward(lambda node: torch_private.in_backward())
    assert not torch_private.in_backward()


def test_running_node():
    assert torch_private.running_node() is None
    x, seen = torch.ones(2, requires_grad=True), []

    class Looking(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_private.running_node())
            return grad

    y = Looking.apply(x)
    y.sum().backward()
    assert seen == [y.grad_fn]


def test_will_run():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    y, other = a.exp(), b.exp()
    seen = []
    z = y * 1
    z.register_hook(lambda grad: seen.extend(map(torch_private.will_run, (y.grad_fn, other.grad_fn))))
    z.sum().backward()
    assert seen == [True, False]
    with pytest.raises(RuntimeError):
        torch_private.will_run(y.grad_fn)


def test_run_backward(monkeypatch):
    called, real = [], getattr(torch.autograd, torch_private.RUN_BACKWARD)

    def noting(*args, **kwargs):
        called.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, torch_private.RUN_BACKWARD, noting)
    x = torch.ones(2, requires_grad=True)
    a, b = (2 * x).sum(), (3 * x).sum()
    a.backward(inputs=[x], retain_graph=True)
    torch.autograd.grad([a, b], [x], [torch.ones(()), torch.full((), 4.0)], allow_unused=True)
    assert called[0][0] == (a,)
    assert called[1][0] == (a, b)
    assert [w.item() for given in called for w in given[1]] == [1, 1, 4]
    assert [[id(y) for y in given[4]] for given in called] == [[id(x)], [id(x)]]


def test_is_batched_gradient():
    seen, x = [], torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda grad: seen.append(torch_private.is_batched_gradient(grad)))
    torch.autograd.grad(y, x, torch.eye(2), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_after_backward():
    order, x = [], torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda x: order.append("gradient"))
    y = x * 2
    y.register_hook(lambda grad: torch_private.after_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["gradient", "end"]
    with pytest.raises(RuntimeError):
        torch_private.after_backward(noop)


def test_sequence_nr():
    x = torch.ones(2, requires_grad=True)
    numbers = [torch_private.sequence_nr(y.grad_fn) for y in (x.exp(), x.exp(), x.exp())]
    assert numbers == sorted(set(numbers))


def test_input_shape():
    x = torch.ones(2, 3, requires_grad=True)
    assert torch_private.input_shape((x * 2).grad_fn) == (2, 3)
    assert torch_private.input_shape(x.sum().grad_fn) == torch_private.input_shape(None) == ()


def test_signed():
    x = torch.ones(2, 3, requires_grad=True)
    assert torch_private.saved(x.softmax(-1).grad_fn, "dim") == -1  # torch shows 2**64 - 1
    assert torch_private.saved(x.permute(1, -2).grad_fn, "dims") == (1, -2)
    assert [torch_private.signed(n) for n in (2**64 - 100, 2**63 - 1, 0.5, None)] == [
        -100,
        2**63 - 1,
        0.5,
        None,
    ]


def test_saved():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    loss = F.mse_loss(x, y, reduction="sum")
    assert torch_private.saved(loss.grad_fn, "reduction") == 2
    assert torch_private.saved(x.exp().grad_fn, "reduction", 7) == 7
    assert torch_private.saved(x.exp().grad_fn, "reduction") is None
    product = x * y
    assert torch_private.saved(product.grad_fn, "other") is y
    assert torch_private.saved(product.grad_fn, "self") is None  # y needs no gradient
    weighted = F.nll_loss(x[None].log_softmax(-1), torch.tensor([1]), y)
    assert torch_private.saved(weighted.grad_fn, "weight") is y
    logits = F.binary_cross_entropy_with_logits(x, torch.zeros(2), pos_weight=y)
    assert torch_private.saved(logits.grad_fn, "pos_weight") is y
    product.sum().backward()
    with pytest.raises(RuntimeError):
        torch_private.saved(product.grad_fn, "other")


def test_input_dtype():
    x = torch.ones(2, requires_grad=True)
    assert torch_private.input_dtype(x.bfloat16().grad_fn) is torch.bfloat16
    assert torch_private.input_dtype(x.exp().grad_fn) is torch.float32
    assert torch_private.input_dtype(None) is None


def test_reads_only():
    x = torch.ones(2, requires_grad=True)
    reads = []

    def unpack(packed):
        reads.append(packed)
        return packed

    with saved_tensors_hooks(lambda y: y, unpack):
        node = x.exp().grad_fn
    if not hasattr(torch_private.raw_saved(node)[0], "unpack_hook"):
        return  # torch before 2.8 does not tell
    with pytest.raises(RuntimeError, match="a hook would run to read result"):
        torch_private.saved(node, "result")
    assert not reads
    setattr(unpack, torch_private.READS_ONLY, True)
    assert torch_private.saved(node, "result").equal(x.exp())
    assert len(reads) == 1


def test_raw_saved():
    class Keeping(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x + 1)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x, packed = torch.ones(2, requires_grad=True), []
    for y, n in [(x.exp(), 1), (Keeping.apply(x), 2), (x + 1, 0)]:  # torch 2.11 frees the node with y
        found = torch_private.raw_saved(y.grad_fn)
        assert len(found) == n
        for saved in found:
            saved.register_hooks(lambda y: (packed.append(y.tolist()), y)[1], lambda y: y)
    assert packed[1:] == [[1.0, 1.0], [2.0, 2.0]]
    y = Keeping.apply(x)
    y.sum().backward()
    assert torch_private.raw_saved(y.grad_fn) == []


# ---- hooks on saved tensors


def test_saved_hooks_enabled():
    assert torch_private.saved_hooks_enabled()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not torch_private.saved_hooks_enabled()


def test_push_saved_hooks():
    packed = []
    torch_private.push_saved_hooks(
        lambda x: packed.append(x) or 5, lambda five: torch.full((2,), float(five))
    )
    try:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
    finally:
        torch_private.pop_saved_hooks()
    assert len(packed) == 1
    y.sum().backward()
    assert x.grad.tolist() == [5.0, 5.0]


def test_pop_saved_hooks():
    packed = []
    torch_private.push_saved_hooks(lambda x: packed.append("first") or x, lambda x: x)
    torch_private.push_saved_hooks(lambda x: packed.append("last") or x, lambda x: x)
    node_of_exp()
    torch_private.pop_saved_hooks()
    node_of_exp()
    torch_private.pop_saved_hooks()
    node_of_exp()
    assert packed == ["last", "first"]


def version_of_torch():
    return tuple(int(x) for x in torch.__version__.split(".")[:2])


def test_knows_top():
    assert (version_of_torch() >= (2, 8)) == torch_private.KNOWS_TOP


def test_top_saved_hooks(monkeypatch):
    assert torch_private.top_saved_hooks() is None
    pair = (lambda x: x, lambda x: x)
    with saved_tensors_hooks(*pair):
        assert torch_private.top_saved_hooks() == (pair if torch_private.KNOWS_TOP else None)
        monkeypatch.setattr(torch_private, "KNOWS_TOP", False)
        assert torch_private.top_saved_hooks() is None


def test_disable_saved_hooks():
    torch_private.disable_saved_hooks("these are not allowed here")
    try:
        with pytest.raises(RuntimeError, match="these are not allowed here"):
            save_on_cpu().__enter__()
    finally:
        torch_private.enable_saved_hooks()


def test_enable_saved_hooks():
    torch_private.disable_saved_hooks("no")
    torch_private.enable_saved_hooks()
    with save_on_cpu():
        assert torch_private.saved_hooks_enabled()


def test_replace_saved_hooks_switch():
    calls = []

    def disable(*args):
        calls.append("disable")
        torch_private.disable_saved_hooks(*args)

    def enable():
        calls.append("enable")
        torch_private.enable_saved_hooks()

    torch_private.replace_saved_hooks_switch(disable, enable)
    try:
        torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
    finally:
        torch_private.replace_saved_hooks_switch(
            torch_private.disable_saved_hooks, torch_private.enable_saved_hooks
        )
    assert calls == ["disable", "enable"]
    torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
    assert len(calls) == 2


@pytest.mark.skipif(not torch_private.KNOWS_TOP, reason="this torch does not tell which hooks are on")
def test_checkpoint_hooks():
    names = []

    def forward(x):
        top = torch_private.top_saved_hooks()
        names.append("" if top is None else top[0].__qualname__.partition(".")[0])
        return x.exp()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert names == [torch_private.CHECKPOINT_HOOKS]


# ---- transforms and traces


def test_in_transform():
    seen = []
    torch.func.vmap(lambda x: (seen.append(torch_private.in_transform()), x)[1])(torch.ones(2))
    assert [*seen, torch_private.in_transform()] == [True, False]


def test_is_transform_tensor():
    seen = []
    torch.func.grad(lambda x: (seen.append(torch_private.is_transform_tensor(x)), x)[1])(torch.tensor(1.0))
    assert [*seen, torch_private.is_transform_tensor(torch.ones(1))] == [True, False]


def test_without_transform():
    x, seen = torch.arange(3.0), []
    torch.func.vmap(lambda row: (seen.append(torch_private.without_transform(row)), row)[1])(x)
    assert torch.equal(seen[0], x)
    assert not torch_private.is_transform_tensor(seen[0])


def test_transforms_left():
    seen = []

    def f(x):
        with torch_private.transforms_left():
            seen.append(torch_private.in_transform())
        seen.append(torch_private.in_transform())
        return x

    torch.func.grad(f)(torch.tensor(1.0))
    assert seen == [False, True]


def test_keeps_snapshots():
    seen, key = [], torch._C.DispatchKey.PythonTLSSnapshot

    def note():
        is_included = torch._C._dispatch_tls_local_include_set().has(key)
        seen.append(is_included and not torch._C._dispatch_tls_local_exclude_set().has(key))

    def f(x):
        with torch_private.transforms_left(), torch_private.keeps_snapshots():
            note()
        note()
        return x

    torch.func.vmap(f)(torch.ones(2))
    assert seen == [True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which goes
def test_is_jit_tracing():
    seen = []

    def f(x):
        seen.append(torch_private.is_jit_tracing())
        return x + 1

    torch.jit.trace(f, torch.ones(1), check_trace=False)
    assert [*seen, torch_private.is_jit_tracing()] == [True, False]


# ---- profilers, optimizers and scalers


def test_is_profiling():
    assert not torch_private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiling()
    assert not torch_private.is_profiling()


@pytest.fixture
def history():
    torch_private.start_memory_history(100)
    yield
    torch_private.stop_memory_history()


@pytest.mark.cuda
def test_start_memory_history(history):
    torch.empty(1000, device="cuda")
    traces = torch_private.memory_history()["device_traces"]
    frames = [frame for trace in traces for event in trace for frame in event["frames"]]
    assert any(frame["filename"] == __file__ for frame in frames)


@pytest.mark.cuda
def test_stop_memory_history(history):
    torch_private.stop_memory_history()
    assert not torch_private.is_memory_history_on()


@pytest.mark.cuda
def test_memory_history(history):
    kept = torch.empty(1000, device="cuda")
    found = torch_private.memory_history()
    assert {"segments", "device_traces"} <= set(found)
    assert sum(segment["allocated_size"] for segment in found["segments"]) >= kept.nbytes


def test_is_memory_history_on(request):
    assert not torch_private.is_memory_history_on()
    if torch.cuda.is_available():
        request.getfixturevalue("history")
        assert torch_private.is_memory_history_on()


def test_opt_called():
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(opt, 1)
    assert torch_private.OPT_CALLED not in vars(opt)
    opt.step()
    assert vars(opt)[torch_private.OPT_CALLED] is True


def test_clip(monkeypatch):
    seen = []
    monkeypatch.setattr(clip_grad, torch_private.CLIP, lambda params, limit, norm, *_: seen.append(limit))
    clip_grad.clip_grad_norm_([nn.Parameter(torch.ones(1))], 3.0)
    assert seen == [3.0]


def test_mark_stepped():
    def step(mark):
        opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
        if mark:
            torch_private.mark_stepped(opt)
        scheduler.step()

    step(mark=True)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        step(mark=False)


def test_scaler_stage():
    p = nn.Parameter(torch.ones(1))
    opt, scaler = torch.optim.SGD([p], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    stages = [torch_private.scaler_stage(scaler, opt)]
    scaler.unscale_(opt)
    stages.append(torch_private.scaler_stage(scaler, opt))
    scaler.step(opt)
    stages.append(torch_private.scaler_stage(scaler, opt))
    assert [stage.name for stage in stages] == ["READY", "UNSCALED", "STEPPED"]


@pytest.fixture
def flat():
    """A FullyShardedDataParallel around another one, on the first of two ranks that do not communicate."""
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(orig):
        options = {"use_orig_params": orig, "device_id": torch.device("cpu")}
        inner = FullyShardedDataParallel(nn.Linear(3, 3), **options)
        return FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(3, 2)), **options)

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield make
    distributed.destroy_process_group()


@pytest.fixture
def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    with fake_group(2):
        yield fully_shard(nn.Linear(4, 4))


def test_is_fully_sharded(fully_sharded):
    assert torch_private.is_fully_sharded(fully_sharded)
    assert not torch_private.is_fully_sharded(nn.Linear(2, 2))


def test_plain_class(fully_sharded):
    assert type(fully_sharded).__name__ == "FSDPLinear"
    assert torch_private.plain_class(fully_sharded) is torch_private.plain_class(nn.Linear(2, 2)) is nn.Linear


def test_is_flattened(flat):
    assert not torch_private.is_flattened(nn.Linear(2, 2).weight)
    assert all(torch_private.is_flattened(p) for orig in (True, False) for p in flat(orig).parameters())


def test_flattened_sizes(flat):
    model = flat(True)
    sizes = torch_private.flattened_sizes(model)
    assert [sizes[id(p)] for p in model.parameters()] == [9, 3, 6, 2]
    model = flat(False)
    sizes = torch_private.flattened_sizes(model)
    assert [sizes[id(p)] for p in model.parameters()] == [8, 12]
    assert torch_private.flattened_sizes(nn.Linear(2, 2)) == {}


def test_flattened_modules(flat):
    model = flat(False)
    assert torch_private.flattened_modules(model) == {
        id(m) for m in model.modules() if isinstance(m, nn.Linear)
    }


def test_reshard_flat(flat):
    model = flat(True)
    torch_private.reshard_flat(model)  # before a forward, nothing is gathered
    with torch.no_grad():
        model(torch.ones(1, 3))
    (handle, _) = torch_private.flat_handles(model)
    assert not handle.needs_unshard()
    torch_private.reshard_flat(model)
    assert handle.needs_unshard()


def test_flat_handles(flat):
    assert len(torch_private.flat_handles(flat(True))) == 2
    assert torch_private.flat_handles(nn.Linear(2, 2)) == []


def test_wrappers():
    assert set(torch_private.WRAPPERS.values()) >= {torch_private.COMPILED_NAME}


def test_wrapped_module(flat):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inside = nn.Linear(2, 2)
    assert torch_private.wrapped_module(checkpoint_wrapper(inside)) is inside
    assert torch_private.wrapped_module(torch.compile(inside, backend="eager")) is inside
    assert torch_private.wrapped_module(inside) is None
    assert isinstance(torch_private.wrapped_module(flat(True)), nn.Sequential)


def test_make_store():
    with group_of_one():
        store = torch_private.make_store("hookcb/a")
        store.set("key", "x")
        assert store.get("key") == b"x"
        assert store.check(["key"])
        assert not torch_private.make_store("hookcb/b").check(["key"])
        assert store.add("n", 0) == 0
        assert store.add("n", 2) == 2
        assert store.compare_set("first", "", "a") == b"a"
        assert store.compare_set("first", "", "b") == b"a"  # only the first is kept


def test_store_client(tmp_path, monkeypatch):
    limit = timedelta(seconds=3)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert torch_private.store_client(limit) is None
    with group_of_one():  # of threads or of one process: nobody else reaches it
        assert torch_private.store_client(limit) is None
    host = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    file = distributed.FileStore(str(tmp_path / "store"), 1)
    for store in host, file:
        with group_of_one(distributed.PrefixStore("of the group", store)):
            own = torch_private.store_client(limit)
            own.set("key", "x")
            assert store.get("key") == b"x"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(host.port))
    assert torch_private.store_client(limit).get("key") == b"x"


def test_n_collectives(monkeypatch):
    def fails():
        raise RuntimeError("no backend counts")

    assert torch_private.n_collectives() == 0
    with group_of_one():
        before = torch_private.n_collectives()
        distributed.all_reduce(torch.ones(2))
        distributed.barrier()
        assert torch_private.n_collectives() == before + 2
        c10d, silent = distributed.distributed_c10d, SimpleNamespace(_get_sequence_number_for_group=fails)
        monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=[silent]))
        assert torch_private.n_collectives() is None
        monkeypatch.undo()


def test_calling_replica():
    with group_of_one():
        inside = nn.Linear(2, 2)
        model, seen = nn.parallel.DistributedDataParallel(inside), []
        inside.register_forward_hook(lambda *args: seen.append(torch_private.calling_replica()))
        model(torch.ones(1, 2))
        inside(torch.ones(1, 2))
        assert seen == [model, None]


def test_replicated_parameters():
    with group_of_one():
        inside = nn.Linear(2, 2)
        model = nn.parallel.DistributedDataParallel(inside)
        weight, inside.weight = inside.weight, nn.Parameter(torch.ones(2, 2))
        assert [id(p) for p in torch_private.replicated_parameters(model)] == [id(weight), id(inside.bias)]


def test_communication_hooks():
    with group_of_one():
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert torch_private.communication_hooks(model) == []
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        assert torch_private.communication_hooks(model) == ["fp16_compress_hook"]


def test_group_timeout():
    with group_of_one():
        world = distributed.group.WORLD
        assert torch_private.group_timeout(world) == distributed.distributed_c10d.default_pg_timeout
        short = distributed.new_group(timeout=timedelta(seconds=7))
        assert torch_private.group_timeout(short) == timedelta(seconds=7)
    written_in_python = SimpleNamespace(_device_types=[])
    assert torch_private.group_timeout(written_in_python).total_seconds() > 0


def test_is_joining():
    with group_of_one():
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert not torch_private.is_joining(model)
        with model.join():
            assert torch_private.is_joining(model)
        assert not torch_private.is_joining(model)
    assert not torch_private.is_joining(nn.Linear(2, 2))


def test_place_in():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    with fake_group(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2))
        assert torch_private.place_in((5, 4), mesh, [Shard(0), Shard(1)]) == ((2, 2), (3, 2))
        assert torch_private.place_in((5, 4), mesh, [Replicate(), Replicate()]) == ((5, 4), (0, 0))


def test_raw_stream(monkeypatch):
    name = "_cuda_getCurrentRawStream"  # which a build without CUDA may not have
    monkeypatch.setattr(torch._C, name, lambda index: 70 + index, raising=False)
    assert torch_private.raw_stream(torch.device("cuda", 1)) == 71


@pytest.mark.cuda
def test_raw_stream_on_a_card():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_private.raw_stream(torch.device("cuda", 0)) == stream.cuda_stream
    assert torch_private.raw_stream(torch.device("cuda", 0)) == torch.cuda.default_stream().cuda_stream
