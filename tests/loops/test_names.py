"""What a type checker says of reading callbacks from a loop."""

import re

import pytest

import hookcb
from hookcb import ActivationStats, Callback, GradientHealth, Learner, synth_learner

TYPES = [name for name in hookcb.__all__ if isinstance(getattr(hookcb, name), type)]
SCRIPT = """
import hookcb
import torch
from hookcb import ActivationStats, Callback, GradientHealth, Learner, watch

learn = Learner([torch.zeros(2, 1)], torch.nn.Linear(1, 1), cbs=[ActivationStats(), GradientHealth()])
names: list[str] = learn.get(ActivationStats).names
losses = learn.recorder.losses
with watch(learn.model, None, ActivationStats) as w:
    w.activation_stats.report()
    w.gradient_health.report()
    w.report_loss(torch.zeros(()))
    w.end_epoch()

class Mine(Callback):
    def after_batch(self) -> None:
        self.learn.get(GradientHealth).report()
        self.learn.row["seen"] = float(len(self.learn.cbs))
        if self.learn.is_nested:
            self.learn.add_cbs(GradientHealth())

learn.get(Mine).order = 3
last: float = learn.loss.item()
mean: float = learn.activation_stats.stats[-1]["0"]["mean"]
learn.get(int)  # error
learn.loss.itme()  # error
w.loss.itme()  # error
learn.fti(1)  # error
learn.activation_statz  # error
hookcb.ModelCheckpoint  # error
learn.get(ActivationStats).sereis  # error
w.end_epohc()  # error

class Wrong(Callback):
    def after_batch(self) -> None:
        self.learn.accumulatin = True  # error
        self.learn.fti(1)  # error
"""


@pytest.mark.slow  # mypy reads all of hookcb, and what it needs of torch
def test_a_type_checker_knows_each_public_name_and_finds_misspelled_ones(tmp_path):
    api = pytest.importorskip("mypy.api")
    script, names = tmp_path / "script.py", tmp_path / "names.py"
    script.write_text(SCRIPT)
    asked = [f"reveal_type({name})" for name in TYPES]
    lines = [f"from hookcb import {', '.join(TYPES)}", *asked, "from hookcb import Nothing"]
    names.write_text("\n".join(lines))
    options = ["--strict", "--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent"]
    told, _, _ = api.run([*options, str(script), str(names)])
    wrong = [i for i, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# error")]
    assert [int(n) for n in re.findall(r"script\.py:(\d+): error", told)] == wrong, told
    assert told.count("Revealed type is") == len(TYPES)
    assert 'Revealed type is "Any"' not in told
    assert 'Module "hookcb" has no attribute "Nothing"' in told


def test_a_callback_is_found_by_its_class():
    learn = synth_learner(cbs=[ActivationStats(), Callback(name="one"), Callback(name="two")])
    assert learn.get(ActivationStats) is learn.activation_stats
    assert learn.get(Callback, "two") is learn.two
    with pytest.raises(LookupError, match="several Callback are attached; give name=, one of"):
        learn.get(Callback)
    with pytest.raises(LookupError, match=r"no Callback named 'on' .* did you mean Callback as 'one'"):
        learn.get(Callback, "on")
    with pytest.raises(LookupError, match="no GradientHealth is attached; attached are: Act"):
        learn.get(GradientHealth)
    with pytest.raises(LookupError, match="attached are: "):
        Learner([1], learn.model, lambda pred: pred).get(GradientHealth)


def test_a_callback_of_a_fit_that_has_ended_is_found_by_its_class_too():
    learn = synth_learner()
    with learn.no_logging():
        learn.fit(1, cbs=ActivationStats())
    assert learn.get(ActivationStats) is learn.activation_stats
    with pytest.raises(TypeError, match=r"kind must be a class of callbacks.* got 'ActivationStats'"):
        learn.get("ActivationStats")
