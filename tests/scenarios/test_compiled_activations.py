"""Statistics of compiled models: one graph, the same values, no compiling again and again."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from hookcb import ActivationStats, Diagnose, Learner, assert_no_hooks, watch
from hookcb.activations.stats import WHOLE
from tests.activations.support import STATS, Around, Puts, assert_stats, randn, steps
from tests.hooks import support as zoo
from tests.support import along, first, fit

# at each graph break dynamo looks at .grad of the tensors it goes on with, and silences the warning only
# where there is none
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
WAYS = ["torch.compile", "model.compile"]


def compiled(model, way="torch.compile", backend="eager", **kwargs):
    if way == "torch.compile":
        return torch.compile(model, backend=backend, **kwargs)
    model.compile(backend=backend, **kwargs)
    return model


def make():
    net = zoo.sequential(zoo.lin, lambda: nn.ReLU(inplace=True), zoo.lin)
    return zoo.Plain(lambda s, x: s.net(x), net=net)


def data(sizes, d=4):
    return [(randn(n, d, seed=k), randn(n, d, seed=50 + k)) for k, n in enumerate(sizes)]


def trained(model, stats, sizes=(4,) * 6, n_epoch=1, n_valid=0):
    valid = data((4,) * n_valid) or None
    learn = Learner((data(sizes), valid), model, F.mse_loss, torch.optim.SGD, lr=0.1, cbs=stats)
    fit(learn, n_epoch)
    assert_no_hooks(model)
    return learn


def graphs(cbs, way="torch.compile", **kwargs):
    """Number of graphs that a fit of a model compiles, which has to be one without breaks."""
    torch._dynamo.reset()
    counter = CompileCounter()
    trained(compiled(make(), way, counter, fullgraph=True), cbs, **kwargs)
    return counter.frame_count


def assert_same_values(stats, plain, rel=1e-5, rel_of=None):
    """Both recorded the same, up to a part `rel`, which `rel_of` may tell for each layer."""
    assert sorted(stats.names) == sorted(plain.names)
    assert steps(stats.stats) == steps(plain.stats)
    for name in plain.names:
        rel_here = (rel_of or {}).get(name, rel)
        for stat in STATS:
            want = plain.series(name, stat)
            got = stats.series(name, stat)
            assert got == pytest.approx(want, rel=rel_here, abs=1e-6, nan_ok=True), (name, stat)


OPTIONS = {
    "paramless": {"include_paramless": True},
    "exact": {"include_paramless": True, "sample": None},
    "sampled": {"include_paramless": True, "sample": 3},
    "few": {"include_paramless": True, "keep": 2},
    "containers": {"modules": ["net", "net.*"]},  # a hook on the model itself gets a graph of its own
}
each_way = pytest.mark.parametrize("way", [pytest.param(WAYS[0], marks=pytest.mark.slow), WAYS[1]])


def one_of_each():
    return [ActivationStats(name=name, **options) for name, options in OPTIONS.items()]


@each_way
def test_a_model_watched_before_its_first_call_is_one_graph_and_has_the_values_of_eager(way):
    assert graphs([], way) == 1
    watched, plain = one_of_each(), one_of_each()
    assert graphs(watched, way, n_epoch=2) == 1
    trained(make(), plain, n_epoch=2)
    for stats, expected in zip(watched, plain, strict=True):
        assert_same_values(stats, expected)


def test_a_training_of_a_compiled_model_is_to_the_bit_what_it_is_without():
    models = [compiled(make(), fullgraph=True) for _ in range(2)]
    trained(models[0], [], n_epoch=2)
    trained(models[1], ActivationStats(include_paramless=True), n_epoch=2)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.slow
def test_validation_is_recorded_from_one_graph_more():
    stats, eager = ActivationStats(on_valid=True), ActivationStats(on_valid=True)
    assert graphs(stats, n_epoch=2, n_valid=2) == graphs([], n_epoch=2, n_valid=2) == 2
    trained(make(), eager, n_epoch=2, n_valid=2)
    assert_same_values(stats, eager)
    assert len(stats.valid_stats) == len(eager.valid_stats) == 4
    for a, b in zip(stats.valid_stats, eager.valid_stats, strict=True):
        assert [one["mean"] for one in a] == pytest.approx([one["mean"] for one in b], rel=1e-5)


@pytest.mark.slow
def test_every_third_batch_adds_no_graph():
    stats, eager = ActivationStats(every=3), ActivationStats(every=3)
    assert graphs(stats, sizes=(4,) * 10, n_epoch=2) == 1
    trained(make(), eager, sizes=(4,) * 10, n_epoch=2)
    assert steps(stats.stats) == list(range(0, 20, 3))
    assert_same_values(stats, eager)


@pytest.mark.slow
def test_a_long_fit_that_thins_and_grows_its_records_compiles_nothing_anew():
    for options in ({"keep": 3}, {"keep": 50}, {}):
        assert graphs(ActivationStats(**options), sizes=(4,) * 130) == 1


@pytest.mark.slow
def test_reading_in_mid_fit_compiles_nothing_anew():
    class Reads(ActivationStats):
        def after_batch(self):
            super().after_batch()
            if self.training:
                seen.append((len(self.stats), len(self.table()), self.series("net.0", "mean")[-1]))

    seen = []
    assert graphs(Reads(), sizes=(4,) * 12) == 1
    assert [n for n, _, _ in seen] == list(range(1, 13))
    assert len({mean for _, _, mean in seen}) == 12


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 7, 3, 9, 5, 4, 8)])
def test_a_batch_of_another_size_compiles_no_more_than_without(sizes):
    stats, eager = ActivationStats(include_paramless=True), ActivationStats(include_paramless=True)
    assert graphs(stats, sizes=sizes, n_epoch=2) == graphs([], sizes=sizes, n_epoch=2)
    trained(make(), eager, sizes=sizes, n_epoch=2)
    assert_same_values(stats, eager)


@pytest.mark.slow
def test_a_histogram_has_the_same_counts_and_breaks_the_graph_no_more_in_a_longer_fit():
    n_graphs = []
    for n in (6, 30):
        counter = CompileCounter()
        torch._dynamo.reset()
        stats, eager = ActivationStats(True), ActivationStats(True)
        trained(compiled(make(), "model.compile", counter), stats, sizes=(4,) * n)
        trained(make(), eager, sizes=(4,) * n)
        n_graphs.append(counter.frame_count)
        assert_same_values(stats, eager)
        for name in eager.names:
            assert torch.allclose(stats.hist(name), eager.hist(name))
            assert torch.allclose(stats.hist_edges(name), eager.hist_edges(name))
    assert n_graphs in ([1, 1], [2, 2])


@pytest.mark.slow
@each_way
def test_a_model_that_was_called_before_is_watched_and_fitted_again(way):
    model = compiled(make(), way)
    model(randn(4, 4)).sum().backward()
    model.zero_grad()
    stats = ActivationStats()
    learn = trained(model, stats)
    first = repr(stats.table())
    eager = ActivationStats()
    eager_learn = trained(make(), eager)
    assert_same_values(stats, eager)
    fit(learn)
    fit(eager_learn)
    assert_same_values(stats, eager)
    assert repr(stats.table()) != first


OUTPUTS = {
    "tuple": lambda s, x: (s.fc(x), [x * 2, None], {"a": x + 1}),
    "float64": lambda s, x: s.fc(x).double() + 1e6,
    "int64": lambda s, x: (s.fc(x) * 100).long(),
    "zero_d": lambda s, x: s.fc(x).sum(),
    "empty": lambda s, x: s.fc(x)[:0],
    "nan": lambda s, x: torch.where(x > 0, s.fc(x), torch.nan),
    "complex": lambda s, x: torch.complex(x, x),
    "none": lambda s, x: None,
    "large": lambda s, x: s.fc(x).repeat(100, 200),
    "transposed": lambda s, x: s.fc(x).repeat(100, 3).t(),
    "expanded": lambda s, x: s.fc(x)[:1].expand(50, 4),
    "far_off": lambda s, x: s.fc(x).repeat(40, 40) * 0.1 + 1e5,
}


@pytest.mark.slow
def test_whatever_compiled_layers_put_out_is_measured_in_one_graph():
    def around(s, x):
        for name in OUTPUTS:
            getattr(s, name)(s.a(x))
        return s.a(x)

    def build():
        torch.manual_seed(0)
        layers = {name: zoo.Plain(f, fc=zoo.lin()) for name, f in OUTPUTS.items()}
        return zoo.Plain(around, a=zoo.lin(), **layers)

    counter = CompileCounter()
    stats, eager = (ActivationStats(modules=list(OUTPUTS)) for _ in range(2))
    trained(compiled(build(), backend=counter, fullgraph=True), stats)
    trained(build(), eager)
    assert counter.frame_count == 1
    seen = {name.split("[")[0] for name in eager.names}
    assert seen == set(OUTPUTS) - {"complex", "none"}
    assert_same_values(stats, eager, rel=1e-4, rel_of={"far_off": 1e-3, "float64": 1e-3})
    assert stats.left_out == eager.left_out
    assert {"complex", "none"} <= set(stats.left_out)


@pytest.mark.slow
def test_a_recurrent_layer_that_torch_runs_outside_of_graphs_is_measured():
    def build():
        torch.manual_seed(0)
        return zoo.Plain(lambda s, x: s.a(s.odd(s.a(x))[0]), a=zoo.lin(), odd=nn.RNN(4, 4))

    stats, eager = ActivationStats(modules="odd"), ActivationStats(modules="odd")
    trained(compiled(build()), stats)
    trained(build(), eager)
    assert_same_values(stats, eager, rel=1e-4)
    assert stats.left_out == eager.left_out


@pytest.mark.parametrize(
    "name",
    [
        "residual_around_attention",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("shared", "norm_and_dropout", "in_place_modules")
        ),
    ],
)
def test_a_compiled_model_of_any_structure_is_measured_as_without_compile(name):
    stats, eager = ActivationStats(include_paramless=True), ActivationStats(include_paramless=True)
    torch.manual_seed(3)
    trained(compiled(zoo.make(name)), stats)
    torch.manual_seed(3)
    trained(zoo.make(name), eager)
    assert_same_values(stats, eager, rel=1e-4)


@pytest.mark.slow
def test_a_compiled_part_of_a_model_is_measured_too():
    for build in (compiled, lambda m: compiled(m, "model.compile")):
        torch._dynamo.reset()
        stats, eager = ActivationStats(), ActivationStats()
        for part, cb in ((build(make()), stats), (make(), eager)):
            torch.manual_seed(0)
            trained(zoo.Plain(lambda s, x: s.head(s.body(x)), body=part, head=zoo.lin()), cb)
        assert sorted(stats.names) == ["body.net.0", "body.net.2", "head"]
        assert_same_values(stats, eager)


@pytest.mark.parametrize("n_elements", first([1000, 65_536, 70_000]))
def test_a_large_output_is_as_exact_as_without_compile(n_elements):
    x = randn(n_elements) + 300
    model = Around(Puts([x]))
    model.odd.forward = lambda _: x
    stats = ActivationStats(modules="odd")
    fit(
        Learner(
            [torch.ones(3, 2)] * 3, compiled(model, fullgraph=True), torch.mean, torch.optim.SGD, cbs=stats
        )
    )
    for record in stats.stats:
        assert_stats(record["odd"], x, kurtosis=0.3 if n_elements > WHOLE else 1e-4)  # of a sample


PARTS = {
    "vmap": lambda s, x: s.b(torch.func.vmap(lambda row: s.a(row))(x)),  # torch 2.6 asks for a __name__
    "checkpoint": lambda s, x: s.b(torch.utils.checkpoint.checkpoint(s.a, x, use_reentrant=False)),
    "twice": lambda s, x: s.b(s.a(s.a(x))),
}


@pytest.mark.parametrize(("backend", "name"), first(along(["eager", "aot_eager"], PARTS)))
def test_what_compiled_code_does_with_layers_is_measured_as_without_compile(name, backend):
    def build():
        torch.manual_seed(0)
        return zoo.Plain(PARTS[name], a=zoo.lin(), b=zoo.lin())

    stats, eager = ActivationStats(), ActivationStats()
    trained(compiled(build(), backend=backend, fullgraph=True), stats)
    trained(build(), eager)
    assert_same_values(stats, eager)


def assert_lowered_has_the_values_of_eager(backend):
    stats, eager = ActivationStats(include_paramless=True), ActivationStats(include_paramless=True)
    model, plain = make(), make()
    trained(compiled(model, backend=backend, fullgraph=True), stats)
    trained(plain, eager)
    assert_same_values(stats, eager, rel=1e-4)
    assert all(map(torch.allclose, model.parameters(), plain.parameters()))


@pytest.mark.slow
def test_what_is_lowered_to_plain_operators_has_the_values_of_eager():
    assert_lowered_has_the_values_of_eager("aot_eager")


@pytest.mark.slow  # as C++ is compiled
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_values_of_eager():
    assert_lowered_has_the_values_of_eager("inductor")


@pytest.mark.slow
@each_way
def test_a_diagnosis_compiles_a_graph_once_and_sees_its_outputs(way):
    plain, found = Diagnose(show=False), Diagnose(show=False)
    trained(make(), plain, sizes=(4,) * 90)
    torch._dynamo.reset()
    counter = CompileCounter()
    trained(compiled(make(), way, counter, fullgraph=True), found, sizes=(4,) * 90)
    assert counter.frame_count == 1
    ours, theirs = found.verdict, plain.verdict
    assert [x.code for x in ours.findings] == [x.code for x in theirs.findings]
    assert ours.looked == theirs.looked


@pytest.mark.slow
def test_an_error_while_compiled_code_shows_its_outputs_is_told_and_not_raised(monkeypatch):
    def fails(*args, **kwargs):
        raise LookupError("not now")

    diagnose = Diagnose(show=False)
    monkeypatch.setattr(Diagnose, "see_compiled_output", fails)
    trained(compiled(make()), diagnose)
    assert "LookupError('not now')" in str(diagnose.verdict.looked)


@pytest.mark.slow
def test_outputs_in_a_cuda_graph_are_not_copied_and_that_is_told(monkeypatch):
    # as if the compiler ran the model on a stream of its own, as mode="reduce-overhead" does on a card
    monkeypatch.setattr(ActivationStats, "_is_in_graph", lambda self, x: True)
    diagnose, stats = Diagnose(show=False), ActivationStats(sample=3)
    trained(compiled(make()), diagnose)
    assert any("outputs in CUDA graphs" in line for line in diagnose.verdict.looked)
    trained(compiled(make()), stats)
    assert stats.names == []
    assert set(stats.left_out.values()) == {"a tensor in a CUDA graph"}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "make_cb", [ActivationStats, lambda: ActivationStats(with_hist=True, sample=3), Diagnose]
)
def test_cuda_graphs_of_a_compiler_are_recorded(make_cb):
    cb, model = make_cb(), make().cuda()
    run = torch.compile(model, mode="reduce-overhead")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(run, opt, cb):
        for x, y in data((4,) * 30):
            F.mse_loss(run(x.cuda()), y.cuda()).backward()
            opt.step()
            opt.zero_grad()
    if type(cb) is ActivationStats and cb.sample == "auto":
        means = cb.series("net.0", "mean")
        assert len(means) == 30
        assert len(set(means)) == 30
