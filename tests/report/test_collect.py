"""A page has what callbacks have recorded, and the series that shows each finding."""

import math

import pytest
import torch
from torch import nn

from hookcb import (
    ActivationStats,
    Diagnose,
    GradientHealth,
    Learner,
    MemoryStats,
    StepTimer,
    accuracy,
    synth_learner,
    watch,
)
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.report.collect import collect


@pytest.fixture(scope="module")
def learn():
    learn = synth_learner()
    cbs = [
        ActivationStats(with_hist=True),
        GradientHealth(),
        StepTimer(),
        MemoryStats(every=4),
    ]
    with learn.no_logging():
        learn.fit(3, cbs=[*cbs, Diagnose(show=False)])
    return learn


@pytest.fixture(scope="module")
def page(learn):
    return collect(learn)


def test_the_run_has_each_loss_and_rate_and_each_epoch_its_end(learn, page):
    assert page.run["loss"].values == pytest.approx(learn.recorder.losses)
    assert page.run["lr"].values == learn.recorder.lrs
    assert page.epochs["valid_loss"].steps == [9, 19, 29]
    assert page.epochs["valid_loss"].values == [row["valid_loss"] for row in learn.recorder.rows]
    assert "clip_coef" not in page.run  # nothing was clipped


def test_layers_have_their_statistics_and_histograms(learn, page):
    stats = learn.activation_stats
    assert [(row.name, row.type, row.n_params) for row in page.modules] == [
        (name, type(m).__name__, sum(p.numel() for p in m.parameters(recurse=False)))
        for name, m in learn.model.named_modules()
    ]
    for name in stats.names:
        own = page.layers[name]
        assert own.stats["std"].steps == stats.steps()
        assert own.stats["std"].values == pytest.approx(stats.series(name, "std"), nan_ok=True)
        counts = [series.values for series in own.hist.bins]
        assert sum(map(sum, counts)) == pytest.approx(30 * 16 * stats.outputs[name][1][1], rel=0.01)
        assert own.hist.edges == sorted(own.hist.edges)
        assert len(own.hist.edges) == len(counts) - 1


def test_parameters_have_their_gradients(learn, page):
    health = learn.gradient_health
    assert list(page.params) == health.names
    for name, own in page.params.items():
        assert own.module == name.rpartition(".")[0]
        assert own.stats["norm"].values == pytest.approx(health.series(name, "norm"))
        assert "rms" not in own.stats


def test_time_memory_and_configuration_are_there(learn, page):
    assert sum(map(sum, (series.values for series in page.time.phases.values()))) == pytest.approx(
        sum(t.total for t in learn.step_timer.times)
    )
    row = learn.memory_stats.layers().rows[1]
    sizes = [row.kept_self, row.param_bytes, row.grad_bytes, row.optimizer_bytes]
    assert page.memory.layers[row.name] == sizes
    config = {title: dict(rows) for title, rows in page.config.items()}
    assert config["Callbacks"]["MemoryStats"] == "every=4"
    assert "LedStats" not in config["Callbacks"]
    assert config["Run"]["torch"] == torch.__version__
    assert config["Model"]["parameters"] == f"{sum(p.numel() for p in learn.model.parameters()):,}"
    assert page.notes == []


def test_each_finding_has_the_series_that_shows_it():
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(16, 16), nn.Sigmoid())]
    x = torch.randn(32, 16)
    learn = Learner(
        [(x, x[:, :1])] * 40,
        nn.Sequential(*layers, nn.Linear(16, 1)),
        loss_func=nn.functional.mse_loss,
        opt_func=torch.optim.SGD,
        lr=0.01,
    )
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose("ignore", show=False))
    page = collect(learn)
    found = {finding["code"]: finding["shown_by"] for finding in page.verdict["findings"]}
    assert found["grad.attenuated"] == {"of": "params", "name": "0.weight", "stat": "norm", "limit": None}
    for code, shown in found.items():
        assert (shown is None) <= (not FAULTS[code].shown_by or "." in FAULTS[code].shown_by)
        if shown is not None and shown["of"] != "run":
            assert shown["stat"] in getattr(page, shown["of"])[shown["name"]].stats


def test_a_page_says_what_the_printed_verdict_says_of_its_scope_and_of_each_finding(learn):
    past = Finding("loss.diverging", "warning", step=1, last_step=19, recovered=90)
    on_rank = Finding("act.collapse", "info", "0", step=3, ranks=(1,), n_ranks=8)
    unplaced = Finding("label.single_class", "info")
    found = (past, on_rank, unplaced)
    verdict = Verdict("suspect", past, found, (), (), of_rank="rank 0", remarks=("after 200 steps",))
    page = collect(learn, verdict)
    assert page.headline == "SUSPECT  of rank 0 only: loss.diverging, recovered by 90; after 200 steps"
    told = [(own["when"], own["on_ranks"]) for own in page.verdict["findings"]]
    assert told == [("steps 1–19, recovered by 90", ""), ("step 3", "rank 1 of 8"), ("", "")]
    assert all(
        when in finding.head and ranks in finding.head
        for finding, (when, ranks) in zip(found, told, strict=True)
    )


@pytest.mark.parametrize(
    ("cbs", "clips", "norms"),
    [
        ([GradientHealth], True, {"clipped_total_norm", "clipped_mean_norm"}),
        ([GradientHealth], False, {"total_norm", "mean_norm"}),
        ([Diagnose], True, {"clipped_total_norm", "clipped_mean_norm", "total_norm"}),
    ],
)
def test_norms_that_are_read_after_clipping_are_named_so(cbs, clips, norms):
    model = nn.Linear(4, 1)
    opt, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(8, 4)
    with watch(model, opt, *(cb() if cb is not Diagnose else cb(show=False) for cb in cbs)) as w:
        for _ in range(4):
            opt.zero_grad()
            (100 * model(x)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
    page = collect(w)
    assert {name for name in page.run if name.endswith("norm")} == norms
    assert (
        ("clipped_norm" in page.params["weight"].stats)
        == ("norm" not in page.params["weight"].stats)
        == clips
    )
    if clips:
        assert page.run["clipped_total_norm"].values == pytest.approx([0.5] * 4, rel=1e-3)
        assert "total_norm" not in page.run or min(page.run["total_norm"].values) > 1
    assert ("Not recorded: gradients before clipping." in page.notes) == clips


def test_every_series_that_a_check_names_can_be_there():
    for check in FAULTS.values():
        if check.shown_by:
            of, _, stat = check.shown_by.partition(".")
            assert of in ("run", "layers", "params")
            assert stat
        else:
            assert not check.draws_limit


def test_a_layer_that_is_seldom_called_has_only_its_records_and_its_nan():
    class Seldom(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.seldom = nn.Linear(2, 2), nn.Linear(2, 2)
            self.n = 0

        def forward(self, x):
            self.n += 1
            x = self.often(x)
            if self.n % 3 == 0:
                with torch.no_grad():
                    self.seldom(x * (math.nan if self.n == 6 else 1.0))
            return x

    learn = Learner(
        [(torch.ones(4, 2), torch.ones(4, 2))] * 9,
        Seldom(),
        loss_func=nn.functional.mse_loss,
        opt_func=torch.optim.SGD,
        lr=1e-3,
    )
    with learn.no_logging():
        learn.fit(1, cbs=ActivationStats())
    series = collect(learn).layers["seldom"].stats["mean"]
    assert series.steps == [2, 5, 8]
    assert [math.isnan(x) for x in series.values] == [False, True, False]


def test_metrics_are_on_the_page():
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    learn = Learner(
        ([(x, y)] * 3, [(x, y)]),
        nn.Linear(4, 3),
        loss_func=nn.functional.cross_entropy,
        opt_func=torch.optim.SGD,
        lr=0.1,
        metrics=accuracy,
    )
    with learn.no_logging():
        learn.fit(2)
    page = collect(learn)
    assert page.epochs["accuracy"].values == [row["accuracy"] for row in learn.recorder.rows]
    assert any("ActivationStats" in note for note in page.notes)


def test_a_loss_that_is_nan_from_the_first_batch_on_is_on_the_page():
    batches = [(torch.full((4, 2), math.nan), torch.zeros(4, 1))] * 3
    learn = Learner(
        (batches, None), nn.Linear(2, 1), loss_func=nn.functional.mse_loss, opt_func=torch.optim.SGD
    )
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose("ignore", show=False))
    loss = collect(learn).run["loss"]
    assert loss.steps == [0, 1, 2]
    assert all(map(math.isnan, loss.values))
