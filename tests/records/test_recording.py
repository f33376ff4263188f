"""A new kind of records is on the page, in logs and among the figures, and nothing else has to know it."""

from hookcb import Callback, Diagnose, Log
from hookcb.records.content import Recorded
from hookcb.records.recording import Reading, Recording
from hookcb.records.series import Series
from hookcb.report.collect import collect
from tests.support import fit, make_learner


class BiasRecords(Recording):
    """The first element of a bias after each batch."""

    def __init__(self):
        self.series = Series()

    def show_on(self, page):
        page.run["bias"] = self.series
        page.params["0.bias"] = Recorded("0", stats={"first": self.series})

    def newest(self, seen):
        if len(self.series) and seen.get("") != self.series.steps[-1]:
            step = self.series.steps[-1]
            yield Reading("", step, step, {"first": self.series.values[-1]}, {})

    def figures(self, name):
        yield f"{name}/line", lambda: "drawn"


class Bias(Callback):
    """Records the first element of a bias."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.records = BiasRecords()

    def after_batch(self):
        if self.training:
            self.records.series.add(self.train_iter, self.learn.model[0].bias[0].item())


class Odd(Callback):
    """Has `records` that are nothing of hookcb's, and raise."""

    @property
    def records(self):
        raise RuntimeError("not yet")


class Takes:
    """A logger of numbers and figures."""

    def __init__(self):
        self.values, self.figures = {}, {}

    def log(self, values, step):
        self.values.setdefault(step, {}).update(values)

    def log_figure(self, name, figure, step):
        self.figures[name] = figure


def trained(*cbs):
    logger, learn = Takes(), make_learner(5)
    fit(learn, 1, cbs=[Bias(name="bias"), Odd(), Log(logger, every=2), *cbs])
    return learn, logger


def test_a_page_shows_what_the_records_put_there():
    learn, _ = trained()
    page = collect(learn)
    assert page.run["bias"].steps == [0, 1, 2, 3, 4]
    assert page.params["0.bias"].about == "3"  # its shape, known from the model
    assert list(page.run) == ["loss", "lr", "bias"]
    assert any("GradientHealth() records them" in note for note in page.notes)


def test_a_log_has_the_newest_record_once_under_the_name_of_the_callback():
    learn, logger = trained()
    found = {step: x["bias/first"] for step, x in logger.values.items() if "bias/first" in x}
    series = dict(learn.bias.records.series)
    assert found == {step: series[step] for step in found}
    assert max(found) == 4


def test_figures_come_with_the_verdict():
    _, logger = trained(Diagnose(show=False))
    assert logger.figures["figures/bias/line"] == "drawn"
