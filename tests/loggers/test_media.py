"""The verdict goes to loggers as a text, and what was recorded as figures."""

import json
import math

import pytest
import torch

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, synth_learner, watch
from hookcb.loggers import JSONLLogger, Log, TensorBoardLogger, read_jsonl

MAPS = {f"figures/activation_stats/{stat}" for stat in ("rms", "kurtosis", "near_zero")}
MAPS |= {"figures/gradient_health/norm"}


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.texts, self.figures, self.n, self.n_closed = [], [], 0, 0

    def log(self, values, step):
        self.n += 1

    def log_text(self, name, text, step):
        self.texts.append((name, text, step))

    def log_figure(self, name, figure, step):
        self.figures.append((name, figure, step))


class OnlyNumbers:
    def __init__(self):
        self.n = 0

    def log(self, values, step):
        self.n += 1


def fit(*cbs, n=2, fails=False):
    learn = synth_learner()
    with learn.no_logging():
        if fails:
            with pytest.raises(KeyError, match="lost"):
                learn.fit(n, cbs=[*cbs, Callback(after_epoch=fail, name="fails")])
        else:
            learn.fit(n, cbs=cbs)
    return learn


def fail(cb):
    raise KeyError("lost")


def test_the_verdict_and_figures_arrive_at_the_end():
    kept, plain = Kept(), OnlyNumbers()
    cbs = [ActivationStats(with_hist=True), GradientHealth(), Log([kept, plain]), Diagnose(show=False)]
    learn = fit(*cbs)
    ((name, text, step),) = kept.texts
    assert (name, step) == ("verdict", 19)
    assert text.startswith(learn.diagnosis.verdict.headline)
    assert all(finding.message[:20] in text for finding in learn.diagnosis.verdict.findings)
    names = ["run", "activation_stats/depth", "activation_stats/histograms", "gradient_health/flow"]
    assert {name for name, *_ in kept.figures} >= MAPS
    maps = MAPS | {name.replace("/", "/diagnosis_", 1) for name in MAPS}  # what Diagnose records, too
    shown = [(name, step) for name, _, step in kept.figures if name not in maps]
    assert sorted(shown) == sorted((f"figures/{name}", 19) for name in names)
    assert plain.n == kept.n


def test_heat_maps_are_logged_after_few_epochs_and_at_the_end():
    kept = Kept()
    learn = fit(ActivationStats(), GradientHealth(), Log(kept), n=5)
    assert kept.texts == []
    assert {name for name, *_ in kept.figures} == MAPS
    assert [step for name, _, step in kept.figures if "norm" in name] == [9, 19, 39, 49]
    (image,) = kept.figures[-1][1].axes[0].images
    norms = learn.gradient_health.series("*", "norm")
    assert image.get_array().shape == (len(norms), 50)
    assert image.get_array()[0, 7] == pytest.approx(math.log10(norms[0][7]), rel=1e-5)


def test_heat_maps_are_logged_at_the_end_of_a_loop_that_tells_of_no_epochs():
    kept, model = Kept(), torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, ActivationStats(), Log(kept)):
        for _ in range(4):
            model(torch.ones(2, 3)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    assert [name.rpartition("/")[2] for name, *_ in kept.figures] == ["rms", "kurtosis", "near_zero"]


def test_without_maps_and_a_diagnosis_nothing_but_numbers_is_logged():
    kept = Kept()
    fit(ActivationStats(), Log(kept, maps=False))
    assert kept.texts == kept.figures == []


def test_a_fit_that_fails_has_its_verdict_logged_too():
    kept = Kept()
    fit(Log(kept), Diagnose(show=False), fails=True)
    assert [name for name, *_ in kept.texts] == ["verdict"]


def test_a_logger_that_fails_ends_no_training():
    class Fails(Kept):
        def log_text(self, name, text, step):
            raise OSError("full")

    fails, kept = Fails(), Kept()
    with pytest.warns(UserWarning, match="full"):
        learn = fit(Log([fails, kept], maps=False), Diagnose(show=False))
    assert len(kept.texts) == 1
    assert fails.figures == []
    assert len(learn.recorder.losses) == 20


def test_a_callback_of_ones_own_can_take_the_verdict():
    class Sends(Callback):
        def take_verdict(self, verdict):
            self.sent = verdict
            raise ConnectionError("offline")

    sends = Sends()
    with pytest.warns(UserWarning, match="offline"):
        learn = fit(sends, Diagnose(show=False))
    assert sends.sent is learn.diagnosis.verdict


def test_a_figure_that_cannot_be_drawn_ends_no_training(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no room")

    monkeypatch.setattr("hookcb.training.recorder.make_panels", fail)
    with pytest.warns(UserWarning, match="no room"):
        fit(Log(Kept()), Diagnose(show=False))


def test_jsonl_has_the_text(tmp_path):
    learn = fit(Log(JSONLLogger(tmp_path / "run.jsonl")), Diagnose(show=False))
    row = read_jsonl(tmp_path / "run.jsonl")[-1]
    assert row["step"] == 19
    assert row["verdict"].startswith(learn.diagnosis.verdict.headline)
    line = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(line)["texts"] == {"verdict": row["verdict"]}


def test_figures_do_not_touch_those_of_the_user():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, backend = pyplot.get_fignums(), pyplot.get_backend()
    fit(ActivationStats(), Log(Kept()), Diagnose(show=False))
    assert (pyplot.get_fignums(), pyplot.get_backend()) == (before, backend)


def test_a_folder_for_tensorboard_needs_its_package_only(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    fit(ActivationStats(with_hist=True), Log(logger), Diagnose(show=False))
    assert not logger.is_open
