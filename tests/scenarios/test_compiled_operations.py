"""Attention, routers and scores of compiled models are seen as without compiling, in as many graphs."""

import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hookcb import ActivationStats, Diagnose, assert_no_hooks, watch
from hookcb.diagnosis.compiled_graphs import GraphEditor, follow, way
from hookcb.diagnosis.faults.head.diverging import DivergingLogits
from hookcb.diagnosis.faults.model.attention import CollapsedAttention
from hookcb.diagnosis.faults.model.attention_logits import GrowingLogits
from hookcb.diagnosis.measurements.routers import Routers
from hookcb.diagnosis.measurements.spike_looks import SpikeLooks
from tests.support import skip_unless_compiled_in_place

# at each graph break dynamo looks at .grad of the tensors it goes on with
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
D, HEADS, VOCAB, T, EXPERTS = 16, 2, 11, 8, 4
PLACES = "attention logits", "collapsed heads", "loads", "scores", "layers"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def heads(self, x):
        return (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class ByHand(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS)
        self.weights = nn.Parameter(torch.randn(EXPERTS, D, D) / 4)

    def forward(self, x):
        p, i = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros_like(x[..., :EXPERTS]).scatter(-1, i, p)
        return torch.einsum("bte,btd,edo->bto", gates, x, self.weights)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), attention(), Experts()

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Returns scores, or its loss if it gets targets."""

    def __init__(self, n=2, attention=Attention):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(n))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, x, y=None):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return scores if y is None else F.cross_entropy(scores.flatten(0, 1), y.flatten())


def loss_of(scores, y):
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


FORMS = {
    "torch.compile": lambda model, how: (torch.compile(model, fullgraph=True, **how), loss_of),
    "model.compile": lambda model, how: (model.compile(fullgraph=True, **how) or model, loss_of),
    "block.compile": lambda model, how: (
        [block.compile(fullgraph=True, **how) for block in model.blocks] and model,
        loss_of,
    ),
    "loss in the model": lambda model, how: (torch.compile(model, fullgraph=True, **how), None),
    "loss is compiled": lambda model, how: (
        torch.compile(model, **how),
        torch.compile(loss_of, **how),
    ),
}


def trained(form=None, backend="aot_eager", cbs=(), n_steps=9, make=GPT):
    """A model after a few steps, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counter = make(), CompileCounterWithBackend(backend)
    run, loss_func = FORMS[form](model, {"backend": counter}) if form else (model, loss_of)
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(VOCAB, (n_steps, 4, T + 1), generator=torch.Generator().manual_seed(1))
    with watch(run, opt, cbs) if cbs else nullcontext():
        for x, y in ((t[:, :-1], t[:, 1:]) for t in tokens):
            loss = run(x, y) if loss_func is None else loss_func(run(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert_no_hooks(model)
    return model, counter.frame_count


def diagnosed(form=None, **options):
    """What was seen of a training, the verdict, and how many graphs were compiled."""
    diagnose = Diagnose(show=False)
    _, n_graphs = trained(form, cbs=diagnose, **options)
    run = diagnose.evidence()
    measured = run.measured
    # torch also takes the softmax of a router for attention where it sees each operation
    of_heads = {k: x for k, x in measured(CollapsedAttention).numbers.items() if k.endswith("attn")}
    rows = {name: layer.series("std").values for name, layer in run.layers.items()}
    seen = (
        measured(GrowingLogits).numbers,
        of_heads,
        measured(Routers).loads,
        measured(DivergingLogits).z,
        rows,
    )
    return dict(zip(PLACES, seen, strict=True)), diagnose.verdict, n_graphs


def gaps(verdict, *codes):
    """Why these were not checked."""
    return [gap for gap in map(str, verdict.gaps) if any(code in gap for code in codes)]


def flat(seen):
    """The numbers in what was seen, in order."""
    if isinstance(seen, dict):
        return [x for key in seen for x in flat(seen[key])]
    return [x for part in seen for x in flat(part)] if isinstance(seen, list | tuple) else [seen]


class Idle:
    """A hook."""

    def __call__(self, m, args, output):
        pass


def skip_unless_hooked_modules_share_a_graph():
    """Skip a test if torch compiles a function anew for each hook that is an object, as torch 2.6 does."""
    skip_unless_compiled_in_place()
    counter = CompileCounterWithBackend("eager")
    for m in (Attention(), Attention()):
        m.out.register_forward_hook(Idle())
        m.compile(backend=counter)
        m(torch.ones(1, T, D))
    if counter.frame_count > 1:
        pytest.skip("this torch compiles modules with hooks one by one")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plain():
    return diagnosed()[0]


def assert_seen_as(seen, plain):
    for place in PLACES:
        assert seen[place], place
        if isinstance(plain[place], dict):
            assert seen[place].keys() == plain[place].keys(), place
        assert flat(seen[place]) == pytest.approx(flat(plain[place]), rel=1e-4, abs=1e-5), place


@pytest.mark.parametrize(
    "form", [pytest.param(x, marks=[] if "block" in x else pytest.mark.slow) for x in FORMS]
)
def test_what_a_compiled_model_does_is_seen_as_without_compiling(form, plain):
    if form == "block.compile":
        skip_unless_hooked_modules_share_a_graph()
    elif form == "model.compile":
        skip_unless_compiled_in_place()
    seen, verdict, n_graphs = diagnosed(form)
    assert_seen_as(seen, plain)
    assert n_graphs == (2 if form == "loss is compiled" else 1)  # as many as without us
    assert not gaps(verdict, "attn.", "head.logits", "mask.blind")


def test_more_blocks_than_torch_compiles_anew_share_one_graph():
    # torch compiles a function 8 times, and raises then with fullgraph=True
    skip_unless_hooked_modules_share_a_graph()
    n = 9
    seen, _, n_graphs = diagnosed("block.compile", backend="eager", make=lambda: GPT(n, ByHand), n_steps=2)
    assert n_graphs == 1
    expected, *_ = diagnosed(make=lambda: GPT(n, ByHand), n_steps=2)
    assert seen["layers"].keys() == expected["layers"].keys()
    assert flat(seen["layers"]) == pytest.approx(flat(expected["layers"]), rel=1e-4)


@pytest.mark.slow  # as C++ is compiled
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_training_in_inductor_is_to_the_bit_what_it_is_without(plain):
    skip_unless_hooked_modules_share_a_graph()
    alone, n_alone = trained("block.compile", "inductor")
    diagnose = Diagnose(show=False)
    watched, n_watched = trained("block.compile", "inductor", diagnose)
    assert all(map(torch.equal, alone.parameters(), watched.parameters()))
    assert n_watched == n_alone == 1
    logits = diagnose.evidence().measured(GrowingLogits).numbers
    assert flat(logits) == pytest.approx(flat(plain["attention logits"]), rel=2e-2)  # other rounding


@pytest.mark.slow
def test_what_compiled_code_hides_is_said_and_not_ruled_out():
    _, verdict, _ = diagnosed("torch.compile", make=lambda: GPT(2, ByHand))
    (gap,) = gaps(verdict, "attn.logits")
    assert "hides attention with a softmax of its own (layer blocks.0.attn)" in gap
    assert "without torch.compile" in gap
    assert not any("hides" in gap for gap in gaps(verdict, "moe."))


def test_attention_in_parts_that_are_not_compiled_is_not_ruled_out():
    skip_unless_compiled_in_place()
    model = FORMS["block.compile"]

    def only_the_first(model, how):
        model.blocks[0].compile(**how)
        return model, loss_of

    FORMS["block.compile"] = only_the_first
    try:
        seen, verdict, _ = diagnosed("block.compile", backend="eager", n_steps=5)
    finally:
        FORMS["block.compile"] = model
    assert [*seen["attention logits"]] == ["blocks.0.attn"]
    (gap,) = gaps(verdict, "attn.logits")
    assert "parts that are not compiled were not looked at: blocks.1" in gap


@pytest.mark.slow
def test_operations_in_a_cuda_graph_are_not_computed_and_that_is_told(monkeypatch):
    # as if the compiler ran the model on a stream of its own, as mode="reduce-overhead" does on a card
    monkeypatch.setattr(ActivationStats, "_is_in_graph", lambda self, x: True)
    seen, verdict, _ = diagnosed("torch.compile", backend="eager", n_steps=5)
    assert seen["attention logits"] == seen["loads"] == {}
    for code in ("attn.logits", "moe.dead"):
        (gap,) = gaps(verdict, code)
        assert "what is in CUDA graphs" in gap


def test_an_error_of_ours_leaves_the_graph_as_it_was(monkeypatch):
    skip_unless_hooked_modules_share_a_graph()

    def fails(*args, **kwargs):
        raise LookupError("not now")

    monkeypatch.setattr(
        "hookcb.diagnosis.compiled_graphs.way", fails
    )  # called once the graph is being changed
    diagnose = Diagnose(show=False)
    model, n_graphs = trained("block.compile", "eager", diagnose, n_steps=3)
    assert n_graphs == 1
    assert "LookupError('not now')" in str(diagnose.verdict.looked)
    alone, _ = trained("block.compile", "eager", n_steps=3)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


def test_a_way_leads_from_a_layer_to_another_and_in_a_block_of_its_kind_likewise():
    names = ["", "a", "blocks.0", "blocks.0.attn", "blocks.0.attn.qkv", "blocks.0.mlp.fc", "head"]
    for anchor in names[1:]:
        for layer in names:
            assert follow(anchor, *way(anchor, layer)) == layer
    assert follow("blocks.7.attn.qkv", *way("blocks.0.attn.qkv", "blocks.0.mlp")) == "blocks.7.mlp"


class Gains(nn.Module):
    """A network with a number that somebody changes in mid-run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = x + layer(x * self.gain if i == 2 else x).relu() / 2
        return x


@pytest.mark.slow
def test_a_spike_in_a_compiled_model_is_looked_at_without_compiling_anew():
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, counter, diagnose = Gains(), CompileCounterWithBackend("aot_eager"), Diagnose(show=False)
    run, opt = (
        torch.compile(model, backend=counter, fullgraph=True),
        torch.optim.SGD(model.parameters(), 0.05),
    )
    with watch(run, opt, diagnose):
        for i in range(120):
            x = torch.randn(64, D)
            if i == 100:
                model.gain.fill_(20.0)
            F.cross_entropy(run(x), x.roll(1, 1).argmax(1)).backward()
            opt.step()
            opt.zero_grad()
    looks = diagnose.evidence().measured(SpikeLooks)
    assert counter.frame_count == 1
    assert [*looks.after[100]] == [101, 102]
    names = {f"layers.{i}" for i in range(4)}
    assert all(x.keys() == names for x in (*looks.after[100].values(), *looks.before[100].values()))


def test_no_edit_stays_when_the_training_has_ended(monkeypatch):
    skip_unless_compiled_in_place()
    trained("block.compile", "eager", Diagnose(show=False), n_steps=1)
    edits = []
    monkeypatch.setattr(GraphEditor, "edit", lambda self, gm: edits.append(gm))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert not edits
