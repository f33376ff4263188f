"""A verdict says what is wrong within one screen, whatever is in its findings, and goes into a file."""

import copy
import dataclasses
import io
import json
import math
import pickle
import random
import re

import pytest
import torch
import torch.nn.functional as F
from rich.cells import cell_len
from rich.console import Console
from torch import nn

import hookcb
from hookcb import Diagnose, Finding, Learner, Verdict
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.judge import explained, judge, status_of
from hookcb.diagnosis.run import Run, Series
from hookcb.diagnosis.verdict import Gap
from tests.support import each, first, fit, in_turn, make_batches, make_model

pytestmark = pytest.mark.filterwarnings("ignore:ERROR  :UserWarning")

NAN, INF = math.nan, math.inf
PLAIN = ["gradient", "0.12", "[bold]", "[/]", "", " ", "–", "encoder_layers"]
WORDS = {
    "plain words": PLAIN,
    "words without an end": [*PLAIN, "x" * 300],
    "line breaks and tabs": [*PLAIN, "line\nbreak", "\r\n", "tab\there"],
    "escapes": [*PLAIN, "\x1b[31m", "\x1b]8;;http://x\x07"],
    "wide characters": [*PLAIN, "層" * 60, "層"],
}
NUMBERS = [0.0, -0.0, 1e-45, 3e38, NAN, INF, -INF, 1 / 3, 10.0**30]
STATUS = {"error": "sick", "warning": "suspect"}


def finding(code="grad.attenuated", severity="error", **kwargs):
    return Finding(code, severity, **kwargs)


def verdict_of(*findings, status=None, ruled_out=(), coverage=()):
    alone = [f for f in findings if not f.consequence_of and f.severity != "info"]
    primary = alone[0] if alone else None
    return Verdict(
        status or STATUS[primary.severity] if primary else "healthy", primary, findings, ruled_out, coverage
    )


def texts(rng, n, words=PLAIN):
    return tuple(" ".join(rng.choices(words, k=rng.randint(0, 30))) for _ in range(rng.randint(0, n)))


def anything(rng, words=PLAIN):
    """A finding of whatever length, of these words."""
    first = rng.choice([None, 0, 10**12])
    return Finding(
        rng.choice(list(FAULTS)),
        rng.choice(["error", "warning", "info"]),
        layer=".".join(rng.choices(words, k=rng.randint(0, 40))),
        param=".".join(rng.choices(words, k=rng.randint(0, 40))),
        step=first,
        value=rng.choice(NUMBERS),
        limit=rng.choice(NUMBERS),
        message=" ".join(rng.choices(words, k=rng.randint(0, 200))),
        causes=texts(rng, 9, words),
        next_steps=texts(rng, 9, words),
        consequence_of=rng.choice(["", "", "loss.flat"]),
        kind=rng.choice(["", "Linear 64→64", max(words, key=len)]),
        last_step=None if first is None else first + rng.choice([0, 1, 10**15]),
    )


def rendered(what, width):
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    console.print(what)
    return console.file.getvalue().removesuffix("\n").split("\n")


def nan_learner(show=False):
    """Trained until something in it is NaN."""

    def loss_func(pred, y):
        return (pred - y).square().mean() * (NAN if len(calls) > 1 else 1)

    calls = []
    model = make_model()
    model.register_forward_hook(lambda *args: calls.append(1))
    return fit(Learner(make_batches(4), model, loss_func, torch.optim.SGD, lr=0.01), cbs=Diagnose(show=show))


# ---- its text


@pytest.mark.parametrize("words", each(3, WORDS))
def test_any_verdict_is_at_most_15_lines_of_at_most_100_columns(words):
    rng = random.Random(words)
    for n in [0, 1, 2, 7, 40] * 2:
        findings = [anything(rng, WORDS[words]) for _ in range(n)]
        more = [texts(rng, 40, WORDS[words]) for _ in range(2)]
        verdict = verdict_of(*findings, ruled_out=more[0], coverage=more[1])
        for lines in (verdict.lines(), str(verdict).splitlines()):
            assert 1 <= len(lines) <= 15
            assert max(map(cell_len, lines)) <= 100
        assert "\x1b" not in str(verdict)


@in_turn("words", WORDS)
def test_any_finding_has_no_line_of_more_than_100_columns(words):
    rng = random.Random(words)
    for _ in range(20):
        assert max(map(cell_len, str(anything(rng, WORDS[words])).splitlines())) <= 100


def example(**kwargs):
    options = {
        "layer": "blocks.0.linear",
        "param": "blocks.0.linear.weight",
        "step": 20,
        "last_step": 60,
        "value": 1.8e-07,
        "limit": 1e-04,
        "kind": "Linear 64→64",
        "message": "gradient RMS is 1.8e-07 of the largest layer's (head); limit 1e-04.",
        "causes": ("8 sigmoids in series",),
        "next_steps": ("ReLU or GELU instead of Sigmoid",),
    }
    return finding(**{**options, **kwargs})


def test_the_text_names_layer_numbers_limit_cause_and_next_step():
    for text in (str(example()), str(verdict_of(example()))):
        for what in (
            "ERROR",
            "grad.attenuated",
            "blocks.0.linear",
            "Linear 64→64",
            "20",
            "60",
            "1.8e-07",
            "1e-04",
        ):
            assert what in text
        assert "8 sigmoids in series" in text
        assert "ReLU or GELU instead of Sigmoid" in text
    assert str(verdict_of(example())).startswith("SICK")


def test_the_first_next_step_is_in_the_text_even_where_the_message_is_long():
    text = str(
        verdict_of(example(message="word " * 2000, causes=("cause " * 500,)), coverage=("covered " * 300,))
    )
    assert "ReLU or GELU" in text
    assert "blocks.0.linear" in text


def test_the_primary_is_told_first_and_its_consequences_after_it():
    other = finding("loss.flat", "warning", consequence_of="grad.attenuated", message="flat.")
    text = str(verdict_of(example(), other))
    assert 0 <= text.find("grad.attenuated") < text.find("loss.flat")


def test_two_causes_are_both_named():
    text = str(verdict_of(example(), finding("unit.dead", "warning", layer="head", message="dead.")))
    assert "unit.dead" in text


def test_a_long_layer_name_keeps_its_end_which_tells_layers_apart():
    text = str(verdict_of(example(layer="model.encoder.layers." + "deeply." * 40 + "out_proj", param="")))
    assert "out_proj" in text


def test_the_text_of_a_healthy_one_says_so():
    text = str(Verdict("healthy", None, (), ("dead units (0%)",), ("30 batches",)))
    assert text.startswith("HEALTHY")
    assert "dead units (0%)" in text
    assert "30 batches" in text


def test_an_empty_verdict_has_a_text():
    assert "HEALTHY" in str(Verdict("healthy", None, (), (), ()))


def test_a_finding_with_nothing_but_a_code_has_a_text():
    text = str(Finding("loss.flat", "info"))
    assert "loss.flat" in text
    assert "None" not in text
    assert "nan" not in text


def test_rich_shows_the_same_words_without_reading_them_as_markup():
    verdict = verdict_of(
        example(layer="a[bold]b", param="", message="[red]x[/red] and [/nothing] and :warning:")
    )
    shown = "\n".join(rendered(verdict, 100))
    assert re.sub(r"\s+", " ", shown).strip() == re.sub(r"\s+", " ", str(verdict)).strip()


@pytest.mark.parametrize("width", [80, 100])
def test_rich_wraps_to_a_narrow_terminal_once_and_keeps_indents(width):
    long = example(message="a sentence of plain words that goes on for a while " * 5)
    lines = rendered(verdict_of(long, coverage=("30 batches, 14 of them closely",) * 4), width)
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert all(len(line) <= width for line in lines)
    assert all(re.match(r"SICK|ERROR", line) for line in heads)


def test_rich_shows_it_on_any_console():
    for width in (1, 5, 20, 1000):
        assert rendered(verdict_of(example()), width)


# ---- its values


def values_of(what):
    if isinstance(what, dict):
        return [v for item in what.values() for v in values_of(item)]
    return [v for item in what for v in values_of(item)] if isinstance(what, list) else [what]


@in_turn("value", [NAN, INF, -INF, 1e-45, 0.0])
def test_numbers_that_are_not_finite_are_none_in_json_and_the_rest_comes_back(value):
    verdict = verdict_of(example(value=value, limit=value), ruled_out=("a",), coverage=("b", "c"))
    back = json.loads(verdict.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert back == verdict.to_dict()
    assert back["findings"][0]["value"] == (value if math.isfinite(value) else None)
    assert back["primary"]["code"] == "grad.attenuated"
    assert (back["status"], back["ruled_out"], back["coverage"]) == ("sick", ["a"], ["b", "c"])
    assert all(isinstance(v, str | int | float | None) for v in values_of(back))


def test_the_dict_has_all_fields_and_is_the_callers_own():
    verdict = verdict_of(example())
    given = verdict.to_dict()
    assert set(given) == {f.name for f in dataclasses.fields(Verdict)} | {"coverage"}
    assert set(given["findings"][0]) == {f.name for f in dataclasses.fields(Finding)} | {"link"}
    given["findings"][0]["code"] = "changed"
    given["findings"].clear()
    given["ruled_out"] = None
    assert verdict.to_dict()["findings"][0]["code"] == "grad.attenuated"


def test_gaps_are_a_field_and_stay_in_the_coverage_and_the_dict():
    gaps = Gap(("loss.flat", "loss.spike"), "too few batches"), Gap(("unit.dead",), "needs GradientHealth")
    verdict = Verdict("healthy", None, (), (), ("3 batches",), gaps=gaps)
    lines = [
        "3 batches",
        "not checked: loss.flat, loss.spike (too few batches)",
        "not checked: unit.dead (needs GradientHealth)",
    ]
    assert list(verdict.coverage) == verdict.to_dict()["coverage"] == lines
    assert verdict.to_dict()["gaps"][0] == {"codes": ["loss.flat", "loss.spike"], "reason": "too few batches"}
    assert json.loads(verdict.to_json()) == verdict.to_dict()
    assert "3 batches. More: verdict.coverage." in str(verdict)
    assert pickle.loads(pickle.dumps(verdict)) == verdict


def test_each_check_that_could_not_run_is_in_one_gap_of_its_reason():
    verdict = judge(Run())
    reasons = [gap.reason for gap in verdict.gaps]
    assert len(set(reasons)) == len(reasons) > 1
    assert sum(len(gap.codes) for gap in verdict.gaps) == verdict.n_checks == len(FAULTS)


@in_turn("words", WORDS)
def test_any_verdict_becomes_json(words):
    rng = random.Random(words)
    findings = [anything(rng, WORDS[words]) for _ in range(20)]
    verdict = verdict_of(*findings, ruled_out=texts(rng, 5, WORDS[words]))
    assert json.loads(verdict.to_json()) == verdict.to_dict()


def test_a_verdict_on_a_real_training_becomes_json():
    verdict = nan_learner().diagnose()
    back = json.loads(verdict.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert back == verdict.to_dict()
    assert all(v is None or isinstance(v, str | int | float) for v in values_of(back))
    for item in (verdict, *verdict.findings):
        for field in dataclasses.fields(item):
            assert not isinstance(getattr(item, field.name), torch.Tensor | list | dict)


def test_verdict_and_finding_are_frozen_hashable_and_can_be_copied_and_pickled():
    verdict = verdict_of(example())
    for what, name in (
        (verdict, "status"),
        (verdict, "findings"),
        (verdict.primary, "code"),
        (verdict.primary, "value"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(what, name, "healthy")
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(what, name)
    for made in (copy.deepcopy(verdict), copy.copy(verdict), pickle.loads(pickle.dumps(verdict))):
        assert made == verdict
        assert hash(made) == hash(verdict)
        assert str(made) == str(verdict)
    assert pickle.loads(pickle.dumps(nan_learner().diagnose())).status == "sick"


def test_findings_without_a_number_are_equal_too():
    """NaN does not equal itself, but two findings without a number must be equal."""
    found = Finding("loss.flat", "warning", message="flat.")
    assert pickle.loads(pickle.dumps(found)) == found
    assert Finding("loss.flat", "warning", message="flat.", value=float("nan")) == found
    assert pickle.loads(pickle.dumps(verdict_of(found))) == verdict_of(found)


# ---- how it comes about


def test_without_any_evidence_nothing_is_found_and_it_says_what_could_not_be_looked_at():
    verdict = judge(Run())
    assert (verdict.status, verdict.primary, verdict.findings) == ("unknown", None, ())
    assert verdict.coverage
    assert all(isinstance(line, str) for line in (*verdict.coverage, *verdict.ruled_out))


def cleared(found):
    return dataclasses.replace(found, consequence_of="")


def test_of_any_findings_all_stay_and_each_follows_from_one_that_stands_before_it():
    for seed in range(25):
        rng = random.Random(seed)
        codes = sorted(FAULTS)
        layers = ["", "0", "1", "2.3"]
        given = [
            Finding(
                rng.choice(codes),
                rng.choice(["error", "warning", "info"]),
                layer=rng.choice(layers),
                step=rng.choice([None, 0, 3, 50]),
            )
            for _ in range(rng.randint(1, 9))
        ]
        out = explained(list(given), Run())
        assert sorted(map(repr, map(cleared, out))) == sorted(map(repr, given))
        for k, found in enumerate(out):
            if found.consequence_of:
                assert found.consequence_of in [f.code for f in out[:k]]
                cause = FAULTS[found.consequence_of]
                follows_from_any = cause.exact and found.code.startswith(("loss.trivial", "valid."))
                assert follows_from_any or any(
                    found.code == to or (to.endswith("*") and found.code.startswith(to[:-1]))
                    for to in cause.leads_to
                )
        assert not out[0].consequence_of
        shuffled = rng.sample(given, len(given))
        assert sorted(map(repr, explained(shuffled, Run()))) == sorted(map(repr, out))


@pytest.mark.parametrize("outcome", ["loss.trivial", "valid.overfit", "valid.trivial"])
def test_an_outcome_follows_from_any_exact_cause_even_a_later_one(outcome):
    given = [Finding(outcome, "warning", step=0), Finding("data.duplicated", "warning", step=50)]
    cause, found = explained(given, Run())
    assert (cause.code, found.consequence_of) == ("data.duplicated", "data.duplicated")
    noted = explained([given[0], dataclasses.replace(given[1], severity="info")], Run())
    assert not any(f.consequence_of for f in noted)
    slow = explained([given[0], dataclasses.replace(given[1], code="memory.graphs_kept")], Run())
    assert not any(f.consequence_of for f in slow)


def test_info_is_nobodys_cause():
    for code in FAULTS:
        for to in ("loss.flat", "update.too_small", "grad.attenuated"):
            out = explained([Finding(code, "info", step=0), Finding(to, "error", step=5)], Run())
            assert [f.consequence_of for f in out if f.severity == "error"] == [""]


def check_verdict(verdict):
    """Properties of any verdict."""
    alone = [f for f in verdict.findings if not f.consequence_of]
    severities = {f.severity for f in alone}
    worst = "sick" if "error" in severities else "suspect" if "warning" in severities else "healthy"
    assert verdict.status == ("unknown" if worst == "healthy" and verdict.reason else worst)
    if worst == "healthy":
        assert verdict.primary is None
    else:
        assert verdict.primary in verdict.findings
        assert not verdict.primary.consequence_of
        assert verdict.primary.severity != "info"
        assert verdict.primary.message
        assert verdict.primary.next_steps
        assert verdict.primary.code in str(verdict)
    assert set(verdict.consequences) == {f for f in verdict.findings if f.consequence_of}
    for k, found in enumerate(verdict.findings):
        assert FAULTS[found.code]
        assert found.message
        if found.consequence_of:
            assert found.consequence_of in [f.code for f in verdict.findings[:k]]
    lines = str(verdict).splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 100


def spoiled(what):
    """A training with something wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(32, 4), torch.randint(3, (32,))) for _ in range(30)]
    loss_func, lr = F.cross_entropy, 0.01
    if what == "a learning rate of 1e4":
        lr = 1e4
    elif what == "a softmax too many":
        model.append(nn.Softmax(dim=1))
    elif what == "NaN in the input":
        batches[3][0][:, 1] = NAN
    elif what == "a label out of range":
        batches[2][1][5] = 3
    elif what == "dead units":
        nn.init.constant_(model[0].bias, -50.0)
    elif what == "inputs times 1e6":
        batches = [(x * 1e6, y) for x, y in batches]
    elif what == "constant weights":
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
    elif what == "a detached trunk":
        model[1] = Detaches()
    return Learner(batches, model, loss_func, torch.optim.SGD, lr=lr)


class Detaches(nn.Module):
    def forward(self, x):
        return x.detach()


EXPECTED = {
    "nothing": set(),
    "a learning rate of 1e4": {"update.too_large"},
    "a softmax too many": {"head.activation"},
    "NaN in the input": {"input.nonfinite"},
    "a label out of range": {"label.out_of_range"},
    "dead units": {"unit.dead"},
    "inputs times 1e6": {"input.scale"},
    "constant weights": {"init.symmetric"},
    "a detached trunk": {"param.unreachable"},
}


@in_turn("what", EXPECTED)
def test_a_fault_is_the_primary_finding_and_the_rest_follows(what):
    learn = spoiled(what)
    if what == "a label out of range":
        with pytest.raises(IndexError):
            fit(learn, cbs=Diagnose())
    else:
        fit(learn, cbs=Diagnose())
    verdict = learn.diagnose()
    check_verdict(verdict)
    assert ({verdict.primary.code} if verdict.primary else set()) == EXPECTED[what]


def test_the_layer_of_a_fault_is_named():
    assert fit(spoiled("dead units"), cbs=Diagnose()).diagnose().primary.layer in ("0", "1")
    assert fit(spoiled("a softmax too many"), cbs=Diagnose()).diagnose().primary.layer == "5"
    (primary,) = [fit(spoiled("a detached trunk"), cbs=Diagnose()).diagnose().primary]
    assert primary.param.startswith("0.") or primary.layer == "0"


def test_the_layer_of_a_softmax_before_cross_entropy_is_named_before_training_too():
    learn = spoiled("a softmax too many")
    primary = hookcb.diagnose(learn.model, learn.dls.train[0], F.cross_entropy).primary
    assert (primary.code, primary.layer) == ("head.activation", "5")


def test_a_loss_that_only_varies_between_batches_does_not_diverge():
    """The first batch has a small loss by chance; with a rate of almost nothing, nothing happens."""
    model = make_model()
    learn = Learner(make_batches(24), model, F.mse_loss, torch.optim.SGD, lr=1e-6)
    codes = [f.code for f in fit(learn, cbs=Diagnose()).diagnose().findings]
    assert "loss.diverging" not in codes


@pytest.mark.parametrize("seed", first(range(2)))
def test_a_small_regression_that_learns_is_not_sick(seed):
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(16, 3, generator=g) for _ in range(40)]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = [(x, x[:, :1].sin() + 0.1 * torch.randn(16, 1, generator=g)) for x in xs]
    learn = fit(Learner(batches, model, F.mse_loss, torch.optim.Adam, lr=3e-3), 3, cbs=Diagnose())
    check_verdict(learn.diagnose())
    assert learn.diagnose().status == "healthy"


@pytest.mark.parametrize("name", ["0", "2.1", "0.0.3"])
def test_a_layer_whose_name_reads_as_a_number_is_called_a_layer(name):
    cause = Finding("unit.dead", "error", name, kind="Linear 8→8", step=0, message="…")
    effect = Finding("act.collapse", "warning", name, consequence_of="unit.dead")
    verdict = Verdict("sick", cause, (cause, effect), (), ())
    assert cause.head == f"ERROR  unit.dead  layer {name} (Linear 8→8)  step 0"
    assert verdict.headline == f"SICK  unit.dead: layer {name}"
    assert f"Consequences: act.collapse: layer {name}." in str(verdict)
    assert verdict.to_dict()["primary"]["layer"] == name  # as get_submodule takes it
    assert Finding("unit.dead", "error", "body.0").head == "ERROR  unit.dead  body.0"
    assert Finding("unit.dead", "error", param=f"{name}.weight").head.endswith(f"  {name}.weight")


def test_so_is_it_in_the_sentences_about_it():
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    learn = Learner(make_batches(40, bs=16), model, F.mse_loss, torch.optim.SGD, lr=0.01)
    verdict = fit(learn, 1, cbs=Diagnose(show=False)).diagnose()
    assert verdict.headline.startswith("SICK  Units of a layer get no gradient: layer 2 (unit.dead; ")
    assert verdict.primary.layer == "2"
    assert verdict.primary.message.startswith("Layer 2: 100% of its units")
    assert verdict.primary.next_steps[0] == "Look at the bias of layer 2, and at the inputs of the layer"


# ---- what a verdict is worth


def test_a_note_that_a_training_is_unfinished_stands_last_in_one_line():
    note = Finding("train.unfinished", "info", message="The loss falls. " * 9, next_steps=("Train on",))
    spike = Finding("loss.spike", "info", message="The loss jumps.")
    lines = verdict_of(note, spike, coverage=("9 batches",)).lines()
    assert lines[1].startswith("INFO  loss.spike")
    assert [line[:20] for line in lines[-2:]] == ["  train.unfinished: ", "  Inspected: 9 batch"]
    assert "Train on" not in "".join(lines)


def test_further_notes_have_two_lines_each_below_the_first():
    notes = [
        Finding(code, "info", layer="body", headline="It is so", message="word " * 40)
        for code in ("a.a", "a.a", "a.b", "a.c", "a.d")
    ]
    text = "\n".join(verdict_of(*notes, ruled_out=("that " * 9,) * 9, coverage=("9 batches",)).lines())
    lines = text.splitlines()
    at = lines.index("  More: hookcb explain a.a")
    assert [line[:28] for line in lines[at + 1 : at + 6 : 2]] == [
        "INFO  It is so  body  (a.b):",
        "INFO  It is so  body  (a.c):",
        "  Looked for and not found: ",
    ]
    assert lines[at + 2].endswith("…")
    assert "a.d" not in text


def test_of_notes_facts_with_a_step_come_first_then_what_the_loss_shows():
    codes = {"wd.norms": None, "attn.logits": 200, "loss.spike": 420, "param.overwritten": 430}
    found = explained([Finding(code, "info", step=step) for code, step in codes.items()], Run())
    assert [f.code for f in found] == ["param.overwritten", "loss.spike", "wd.norms", "attn.logits"]


@pytest.mark.parametrize(
    ("width", "last"),
    [
        (100, "  Inspected: 150 batches, 12 closely; 35 layers, 41 parameters. More: verdict.coverage."),
        (80, "  Inspected: 150 batches, 12 closely. More: verdict.coverage."),
        (50, "  More: verdict.coverage."),
    ],
)
def test_where_to_read_the_rest_is_never_cut(width, last):
    verdict = verdict_of(coverage=("150 batches, 12 closely (from batch 20 on)", "35 layers, 41 parameters"))
    assert verdict.lines(width)[-1] == last


def test_a_slow_training_is_no_fault_of_the_model():
    slow = Finding("time.data_bound", "error", message="It waits.")
    seen = Run(n_batches=9)
    assert status_of([slow], "") == "suspect"
    verdict = verdict_of(slow, status="suspect")
    assert verdict
    assert verdict.headline == "SLOW  time.data_bound"
    both = explained([slow, Finding("loss.flat", "warning", step=3)], seen)
    assert [f.code for f in both] == ["loss.flat", "time.data_bound"]
    assert not verdict_of(*both, status=status_of(both, ""))


@pytest.mark.parametrize("status", ["healthy", "suspect", "unknown"])
def test_a_verdict_of_one_of_several_ranks_says_so_first(status, monkeypatch):
    monkeypatch.setattr("hookcb.diagnosis.judge.MIN_CHECKED", 0)
    given = Run(n_batches=0 if status == "unknown" else 9, sources={"loss"})
    given.loss = Series.of(range(9), [1.0] * 9)
    order = given.measured(FAULTS["label.out_of_range"])
    order.seen = [order.finding("A label is out of range.", "warning")] if status == "suspect" else []
    given.sources |= {"batches", "batch"}
    verdict = dataclasses.replace(judge(given), of_rank="rank 0")
    assert verdict.headline.startswith(f"{status.upper()}  of rank 0 only: ")


@in_turn("width", [40, 60, 80, 100])
def test_no_line_ends_inside_a_word(width):
    words = [f"word{i}{'x' * (i % 11)}" for i in range(200)]
    shown = verdict_of(Finding("loss.flat", "error", message=" ".join(words)), coverage=("9 batches", *words))
    for line in shown.lines(width):
        assert set(re.findall(r"word\S*", line)) <= {*words, *(f"{word}." for word in words)}
