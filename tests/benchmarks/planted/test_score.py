"""The score of the planted suite, and the rules of others, on made-up numbers."""

import math
from dataclasses import replace

import baselines
import pytest
import score
import torch
from baselines import Activation, Buffered, Gradient, Recorded, RuleRecorder, Start, Step, Weights
from case import Case
from torch import nn

from hookcb import Learner, assert_no_hooks, watch
from hookcb.diagnosis.verdict import Finding, Verdict
from tests.support import in_turn

CONTROL = Case("a control", train=None, target=0.5)
FAULT = Case("a fault", train=None, codes=frozenset({"unit.dead", "data.labels"}), planted_at=40)


def verdict(*findings, primary=None):
    alarms = {f.severity for f in findings}
    status = "sick" if "error" in alarms else "suspect" if "warning" in alarms else "healthy"
    return Verdict(status, primary, findings, (), ())


def of(case, *findings, primary=None, losses=(0.1,), seed=0):
    return score.outcome(case, seed, verdict(*findings, primary=primary), losses)


DEAD = Finding("unit.dead", "error", layer="act", step=50)
FLAT = Finding("loss.flat", "warning", step=60)
LABELS = Finding("data.labels", "info")


# ---- one outcome


def test_a_control_is_right_when_it_is_healthy_and_has_learned():
    assert of(CONTROL).is_right
    assert of(CONTROL, LABELS).is_right
    assert not of(CONTROL, FLAT, primary=FLAT).is_right
    assert not of(CONTROL, losses=[0.6]).is_right


def test_a_control_has_learned_by_its_last_ten_losses():
    assert of(CONTROL, losses=[9.0] * 5 + [0.4] * 10).has_learned
    assert not of(CONTROL, losses=[0.1] * 10 + [0.6] * 10).has_learned
    assert not of(CONTROL, losses=[math.nan] * 10).has_learned
    assert not of(CONTROL, losses=[]).has_learned


def test_a_fault_is_named_by_any_finding_of_its_codes_info_too():
    assert of(FAULT, LABELS).is_named
    assert not of(FAULT, LABELS).is_flagged
    assert not of(FAULT, FLAT, primary=FLAT).is_named
    assert of(FAULT, FLAT, primary=FLAT).is_flagged


def test_the_cause_comes_first_when_the_primary_has_a_code_of_the_case():
    assert of(FAULT, DEAD, FLAT, primary=DEAD).is_cause_first
    assert not of(FAULT, FLAT, DEAD, primary=FLAT).is_cause_first
    assert not of(FAULT, LABELS).is_cause_first
    assert of(replace(FAULT, codes=frozenset({"data.labels"})), LABELS).is_cause_first


def test_a_note_is_enough_for_a_fault_that_says_so():
    noted = replace(FAULT, codes=frozenset({"wd.norms"}), note_suffices=True)
    note = Finding("wd.norms", "info")
    assert not of(replace(noted, note_suffices=False), note).is_flagged
    assert of(noted, note).is_flagged
    assert of(noted, note, FLAT, primary=FLAT).is_cause_first
    assert not of(noted).is_flagged
    assert not of(noted, LABELS).is_flagged


def test_the_layer_is_right_by_name_or_by_a_parameter_inside_it():
    blocks = replace(FAULT, layers=frozenset({"act", "blocks.0"}))
    assert of(FAULT, DEAD, primary=DEAD).is_layer_right is None
    assert of(blocks, DEAD, primary=DEAD).is_layer_right
    inside = replace(DEAD, layer="", param="blocks.0.linear.weight")
    assert of(blocks, inside, primary=inside).is_layer_right
    beside = replace(DEAD, layer="head", param="blocks.01.weight")
    assert of(blocks, beside, primary=beside).is_layer_right is False
    named_elsewhere = replace(FLAT, layer="act")  # neither the primary nor of the case's codes
    assert of(blocks, beside, named_elsewhere, primary=beside).is_layer_right is False


@in_turn(("step", "is_soon"), [(40, True), (60, True), (61, False), (39, False), (None, False)])
def test_a_fault_is_seen_soon_within_twenty_steps_of_where_it_was_planted(step, is_soon):
    assert of(FAULT, replace(DEAD, step=step), primary=DEAD).is_soon is is_soon


def test_an_exact_finding_without_a_step_is_of_what_was_there_from_the_start():
    groups = Finding("param.not_in_optimizer", "error")
    case = replace(FAULT, codes=frozenset({groups.code}), planted_at=0)
    assert of(case, groups, primary=groups).is_soon
    assert not of(replace(case, planted_at=40), groups, primary=groups).is_soon
    dead = replace(DEAD, step=None)
    assert not of(replace(FAULT, planted_at=0), dead, primary=dead).is_soon


def test_wrong_errors_are_no_consequences_no_warnings_and_not_of_the_case():
    wrong = Finding("act.scale", "error")
    follows = Finding("nonfinite.first", "error", consequence_of="unit.dead")
    assert of(FAULT, DEAD, follows, FLAT, wrong, primary=DEAD).n_wrong == 1
    assert of(FAULT, DEAD, follows, FLAT, wrong, primary=DEAD).extra == ("loss.flat", "act.scale")


# ---- together


def test_a_score_is_of_one_seed_and_of_controls_that_have_learned():
    outcomes = [
        of(CONTROL),
        of(replace(CONTROL, name="alarmed"), FLAT, primary=FLAT),
        of(replace(CONTROL, name="not learned"), FLAT, primary=FLAT, losses=[2.0]),
        of(FAULT, DEAD, primary=DEAD),
        of(replace(FAULT, name="missed")),
        of(CONTROL, FLAT, primary=FLAT, seed=1),
    ]
    found = score.score(0, outcomes)
    assert (found.n_controls, found.false_alarms, found.not_learned) == (2, ("alarmed",), ("not learned",))
    assert (found.n_faults, found.recall, found.named) == (2, 0.5, 0.5)
    assert (found.cause_first, found.soon) == (0.5, 0.5)
    assert math.isnan(found.layer_right)
    assert score.score(1, outcomes).false_alarms == ("a control",)


def test_a_case_that_could_not_be_run_is_wrong_and_counts():
    broke = [score.broken(CONTROL, 0, "ValueError: no"), score.broken(FAULT, 0, "ValueError: no")]
    found = score.score(0, broke)
    assert found.false_alarms == ("a control",)
    assert found.recall == 0
    assert not any(x.is_right for x in broke)


def test_a_row_shows_the_usual_one_of_the_wrong_outcomes():
    late = replace(FLAT, step=90)
    outcomes = [
        of(FAULT, DEAD, primary=DEAD),
        of(FAULT, FLAT, primary=FLAT, seed=1),
        of(FAULT, seed=2),
        of(FAULT, late, primary=late, seed=3),
        of(CONTROL),
    ]
    fault, control = score.rows(outcomes)
    assert (fault.shown.seed, fault.n_right, fault.n_seeds, fault.fails) == (1, 1, 4, True)
    assert (control.shown.case, control.fails) == ("a control", False)


def test_rules_that_flag_no_control_are_counted_apart():
    def flags(name, is_control, *rules, has_learned=True):
        return score.Flags(name, 0, is_control, {"tool": rules}, has_learned)

    there = [
        flags("a", True, "noisy"),
        flags("b", True),
        flags("c", True, "exact", has_learned=False),
        flags("d", False, "noisy"),
        flags("e", False, "noisy", "exact"),
        flags("f", False),
    ]
    noisy = score.misfiring("tool", there)
    assert score.baseline_score("tool", there, noisy) == score.BaselineScore("tool", 3, 2, 2, 1, silent=1)
    assert score.rule_counts("tool", there) == [("noisy", 2, 1), ("exact", 1, 0)]


# ---- the rules of others

N = 60
WEIGHTS, GRADIENT = Weights(0.1, 0.0, 0.0, 0.5, 1.0), Gradient(1e-2, 0.3, 0.1, 1.0, 0.05)
STEP = Step(WEIGHTS, GRADIENT, update=1e-4, unchanged=False)


def steps(weights=None, gradient=None, **changed):
    parts = {"weights": weights or {}, "gradient": gradient or {}}
    changed |= {part: getattr(STEP, part)._replace(**values) for part, values in parts.items()}
    return [STEP._replace(**changed)] * N


def recorded(**changed):
    """A training in which nothing is wrong, but for what is changed."""
    names = "first.weight", "last.weight"
    there = Recorded(
        losses=[2.3 * 0.97**i for i in range(N)],
        accuracies=[min(0.95, 0.1 + 0.02 * i) for i in range(N)],
        n_classes=10,
        inputs=(0.0, 1.0, -3.0, 3.0),
        output_stuck=[False] * 6,
        starts={name: Start((32, 32), 1 / 96, 0.17, 1 / 96) for name in names},
        steps={name: steps() for name in names},
        kinds={"relu": "ReLU", "tanh": "Tanh"},
        activations={"relu": [Activation(0.1, 1.0)] * N, "tanh": [Activation(0.0, 2.0)] * N},
        buffered={"relu": [Buffered(0.1, 0.0, 0.8)] * 6, "tanh": [Buffered(0.0, 0.1, 0.6)] * 6},
    )
    there.labels.update({label: 100 for label in range(10)})
    return replace(there, **changed)


def first(**changed):
    return {"first.weight": steps(**changed), "last.weight": steps()}


def test_no_rule_fires_where_nothing_is_wrong():
    assert {b.name: b.fired(recorded()) for b in baselines.BASELINES} == {
        "SageMaker Debugger": [],
        "TheDeepChecker": [],
        "AutoTrainer": [],
    }


@in_turn(
    ("rule", "changed"),
    [
        ("vanishing_gradient", {"steps": first(gradient={"mean": 9e-8})}),
        ("exploding_tensor", {"outputs_finite": False}),
        ("all_zero", {"steps": first(gradient={"zeros": 1.0})}),
        ("unchanged_tensor", {"steps": first(unchanged=True)}),
        ("weight_update_ratio", {"steps": first(update=1.1)}),
        ("loss_not_decreasing", {"losses": [2.3] * N}),
        ("dead_relu", {"activations": {"relu": [Activation(0.51, 1.0)]}}),
        ("saturated_activation", {"activations": {"tanh": [Activation(0.51, 1.0)]}}),
        ("poor_weight_initialization", {"steps": first(gradient={"spread": 9e-4})}),
        ("overfit", {"valid_losses": [(N, 5.0)]}),
    ],
)
def test_a_rule_of_sagemaker_fires(rule, changed):
    assert rule in baselines.SAGEMAKER(recorded(**changed))


@in_turn(
    ("rule", "changed"),
    [
        ("features_constant", {"inputs": (3.0, 0.0, 3.0, 3.0)}),
        ("features_unnormalized", {"inputs": (0.0, 300.0, -900.0, 900.0)}),
        ("labels_unbalanced", {"labels": recorded().labels + baselines.Counter({0: 9000})}),
        (
            "poor_initial_weights",
            {"starts": recorded().starts | {"first.weight": Start((32, 32), 1.0, 4.0, 1 / 96)}},
        ),
        ("poor_initial_loss", {"losses": [5.0, *recorded().losses[1:]]}),
        ("numerical_instability", {"losses": [math.nan]}),
        ("untrained_parameter", {"steps": first(update=0.0)}),
        ("negative_weights", {"steps": first(weights={"negative": 0.96})}),
        ("dead_weights", {"steps": first(weights={"small": 0.96})}),
        ("dead_activations", {"buffered": {"relu": [Buffered(0.51, 0.0, 0.8)]}}),
        ("saturated_activations", {"buffered": {"tanh": [Buffered(0.0, 0.51, 0.9)]}}),
        ("unstable_activations", {"buffered": {"relu": [Buffered(0.0, 0.0, 0.2)]}}),
        ("constant_output", {"output_stuck": [True] * 6}),
        ("stagnated_loss", {"losses": [2.3] * N}),
        ("diverging_loss", {"losses": [2.3 * 2 ** (i // 10) for i in range(N)]}),
        ("fluctuating_loss", {"losses": [2.0 + (i // 10) % 2 for i in range(N)]}),
    ],
)
def test_a_rule_of_the_deep_checker_fires(rule, changed):
    assert rule in baselines.THEDEEPCHECKER(recorded(**changed))


def of_means(means, part):
    made = [STEP._replace(**{part: getattr(STEP, part)._replace(mean=mean)}) for mean in means]
    return {"first.weight": made, "last.weight": steps()}


@pytest.mark.parametrize(
    ("rule", "means", "part"),
    [
        ("diverging_parameters", [0.1 * 2.1**i for i in range(N)], "weights"),
        ("diverging_gradients", [0.1 * 2.1**i for i in range(N)], "gradient"),
        ("vanishing_gradients", [0.1 * 0.4**i for i in range(N)], "gradient"),
    ],
)
def test_a_rule_of_the_deep_checker_sees_what_doubles_or_halves(rule, means, part):
    assert rule in baselines.THEDEEPCHECKER(recorded(steps=of_means(means, part)))


def test_the_deep_checker_ends_when_a_batch_is_fitted_for_good():
    stuck = recorded(losses=[2.3 * 0.97**i if i < 10 else 0.01 for i in range(N)])
    assert "stagnated_loss" in baselines.THEDEEPCHECKER(stuck)
    fitted = replace(stuck, accuracies=[0.5] * 10 + [1.0] * (N - 10))
    assert "stagnated_loss" not in baselines.THEDEEPCHECKER(fitted)


@in_turn(
    ("problem", "changed"),
    [
        ("vanish", {"steps": first(gradient={"norm": 1e-5}), "accuracies": [0.1] * N}),
        ("explode", {"steps": first(gradient={"norm": 30.0}), "accuracies": [0.1] * N}),
        ("relu", {"steps": {"first.weight": steps(gradient={"zeros": 0.8})}, "accuracies": [0.1] * N}),
        ("not_converge", {"accuracies": [0.1] * N}),
        ("unstable", {"accuracies": [0.75 + 0.1 * (i // 6 % 2) for i in range(N)]}),
        ("explode", {"losses": [1.0] * (N - 1) + [math.inf]}),
        ("not_converge", {"accuracies": [math.nan] * N, "losses": [2.3] * N}),
    ],
)
def test_autotrainer_names_the_problem(problem, changed):
    assert baselines.autotrainer(recorded(**changed)) == [problem]


def test_autotrainer_looks_at_gradients_only_where_training_is_poor():
    good = {"accuracies": [0.1] * 6 + [0.9] * (N - 6)}
    assert baselines.autotrainer(recorded(steps=first(gradient={"norm": 30.0}), **good)) == []


# ---- what they read


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(n=20):
    torch.manual_seed(1)
    return [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(n)]


def by_learner():
    recorder, (model, opt) = RuleRecorder(), make()
    learn = Learner(batches(), model, nn.functional.cross_entropy, opt)
    with learn.no_logging():
        learn.fit(1, cbs=recorder)
    return recorder.recorded


def test_a_watch_records_what_a_learner_records():
    recorder, (model, opt) = RuleRecorder(), make()
    with watch(model, opt, recorder) as w:
        for x, y in batches():
            w.report_loss(nn.functional.cross_entropy(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
    seen, learned = recorder.recorded, by_learner()
    for name in ("losses", "inputs", "starts", "steps", "kinds", "activations", "buffered", "output_stuck"):
        # as text, for NaN is not itself
        assert str(getattr(seen, name)) == str(getattr(learned, name)), name
    assert (seen.n_classes, learned.n_classes) == (0, 3)  # a watch does not see the target


def test_the_numbers_are_those_of_a_plain_loop():
    seen, (model, opt) = by_learner(), make()
    x, y = batches()[0]
    w = model[0].weight
    before = w.detach().clone()
    out = model[1](model[0](x))
    nn.functional.cross_entropy(model(x), y).backward()
    grad = w.grad.clone()
    opt.step()
    step = seen.steps["0.weight"][0]
    assert step.update == pytest.approx((w - before).abs().mean().item())
    assert step.weights.mean == pytest.approx(before.abs().mean().item())
    assert step.weights.negative == pytest.approx((before < 0).double().mean().item())
    assert step.gradient.norm == pytest.approx(grad.norm().item())
    assert step.gradient.mean == pytest.approx(grad.abs().mean().item())
    inactive = (out == 0).all(0).double().mean().item()
    assert seen.activations["1"][0].inactive == pytest.approx(inactive)
    inputs = torch.cat([x for x, _ in batches()])
    assert seen.inputs[0] == pytest.approx(inputs.mean().item(), abs=1e-6)
    assert seen.inputs[1] == pytest.approx(inputs.std(correction=0).item(), rel=1e-5)


def test_what_is_recorded_changes_no_training():
    trained = []
    for cbs in ([], [RuleRecorder()]):
        model, opt = make()
        learn = Learner(batches(), model, nn.functional.cross_entropy, opt)
        with learn.no_logging():
            learn.fit(1, cbs=cbs)
        assert_no_hooks(model)
        trained.append([*(p.tolist() for p in model.parameters()), torch.rand(1).item()])
    assert trained[0] == trained[1]


def test_units_are_channels_of_images_and_the_last_dimension_of_all_else():
    assert baselines.by_unit(torch.zeros(2, 3, 4, 5)).shape == (40, 3)
    assert baselines.by_unit(torch.zeros(2, 3, 4)).shape == (6, 4)
    assert baselines.by_unit(torch.zeros(7)).shape == (7, 1)


def test_a_buffer_tells_dead_and_saturated_units():
    x = torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.99, 0.4]])
    found = baselines.buffered("Sigmoid", x)
    assert found.dead == pytest.approx(1 / 3)
    assert found.saturated == pytest.approx(2 / 3)  # at 0 and at 1
    assert baselines.buffered("ReLU", x).saturated == 0
