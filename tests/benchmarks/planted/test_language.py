"""The planted language models see what their names say."""

import faults_language
import language
import language_controls
import torch
from torch.nn import functional as F

from tests.support import in_turn

N = 24


def sees(attend):
    """Which position's output changes with the input of which other one, `(N, N)`."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, N, 8)
    before = attend(x, x, x)
    columns = []
    for i in range(N):
        changed = x.clone()
        changed[:, :, i] += 1
        columns.append((attend(changed, changed, changed) != before).any(-1)[0].any(0))
    return torch.stack(columns, dim=1)


PAST = torch.ones(N, N, dtype=torch.bool).tril()


@in_turn(
    "attend",
    [
        language.fused,
        language.written_out,
        language.added,
        language_controls.biased,
        language_controls.rotary,
        faults_language.wrong_scale,
    ],
)
def test_causal_attention_sees_itself_and_the_past(attend):
    assert not (sees(attend) & ~PAST).any()
    assert sees(attend)[1].tolist() == [True] * 2 + [False] * (N - 2)


def test_a_window_and_a_prefix_are_as_wide_as_they_say():
    assert torch.equal(sees(language_controls.windowed), PAST.triu(-7))
    prefix = torch.arange(N) < language_controls.N_PREFIX
    assert torch.equal(sees(language_controls.prefixed), PAST | prefix)


def test_the_wrong_masks_show_what_they_should_hide():
    assert sees(F.scaled_dot_product_attention).all()
    assert torch.equal(
        sees(faults_language.sees_next), PAST | torch.eye(N, dtype=torch.bool).roll(1, 1).triu()
    )
    assert torch.equal(sees(faults_language.only_self), torch.eye(N, dtype=torch.bool))


def test_targets_are_the_inputs_shifted_by_one():
    for make in (language.character_batches, language.word_batches, language.sentence_batches):
        for x, y in make(0, n_step=3):
            assert x.shape == y.shape == (16, language.LENGTH)
            assert torch.equal(x[:, 1:], y[:, :-1])


def test_sentences_are_padded_on_the_right():
    padding = language.sentences() == language.PAD
    assert not padding[:, :2].any()
    assert not (padding[:, :-1] & ~padding[:, 1:]).any()
    assert 0.3 < padding.float().mean() < 0.9


def test_only_matrices_decay():
    model = language.LanguageModel(tied=False)
    matrices, others = language.adamw(model).param_groups
    assert matrices["weight_decay"] > others["weight_decay"] == 0
    assert {id(p) for p in matrices["params"]} == {
        id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)
    }
