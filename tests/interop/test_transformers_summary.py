"""The model summary on Hugging Face models, built small from their configurations; counted by hand."""

import pytest
import torch

from hookcb import Callback, Learner, layer_info, module_summary, total_params
from tests.support import attention, changes_in, fit, in_terminal, row, same, shown, unsettle, weights

transformers = pytest.importorskip("transformers")

S = torch.Size
VOCAB, D, FF, HEADS, LAYERS, B, N = 50, 16, 32, 2, 2, 3, 5
IDS = torch.arange(B * N).reshape(B, N)
BATCH = {"input_ids": IDS, "attention_mask": torch.ones(B, N, dtype=torch.long)}
PADDED = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * B)}


def bert_config(**kwargs):
    return transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FF,
        max_position_embeddings=20,
        **kwargs,
    )


def bert(**kwargs):
    return transformers.BertModel(bert_config(**kwargs))


def gpt2(**kwargs):
    size = {"vocab_size": VOCAB, "n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 20}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0, **kwargs)
    )


def t5():
    size = {
        "vocab_size": VOCAB,
        "d_model": D,
        "d_kv": 8,
        "d_ff": FF,
        "num_layers": LAYERS,
        "num_heads": HEADS,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, decoder_start_token_id=0))


BODY = LAYERS * (B * N * (4 * D * D + 2 * D * FF) + attention(B, N, N, D))
BERT_WORK = BODY + B * D * D  # the pooler
GPT2_WORK = LAYERS * (B * N * 12 * D * D + attention(B, N, N, D)) + B * N * D * VOCAB

MODELS = {
    "BERT": (bert, BATCH, BERT_WORK),
    "BERT, padded": (bert, PADDED, BERT_WORK),
    "BERT, eager": (lambda: bert(attn_implementation="eager"), BATCH, BERT_WORK),
    "BERT, all outputs": (lambda: bert(output_hidden_states=True), BATCH, BERT_WORK),
    "GPT-2": (gpt2, BATCH, GPT2_WORK),
    "GPT-2 with labels": (gpt2, BATCH | {"labels": IDS}, GPT2_WORK),
    "GPT-2 without cache": (lambda: gpt2(use_cache=False), BATCH, GPT2_WORK),
    "BERT, tuple out": (lambda: bert(return_dict=False), BATCH, BERT_WORK),
    "T5": (t5, {"input_ids": IDS, "labels": IDS}, None),
}
models = pytest.mark.parametrize(("make", "batch", "n"), MODELS.values(), ids=MODELS)


@models
@pytest.mark.parametrize("depth", [None, 0, 1, 2, 3])
def test_parameters_and_work_add_up(make, batch, n, depth):
    model = make()
    summary = module_summary(model, batch, depth=depth)
    params = list(model.parameters())
    assert sum(r.params for r in summary) == summary.n_params == sum(p.numel() for p in params)
    assert total_params(model) == (summary.n_params, True)
    assert summary.param_bytes == 4 * summary.n_params
    assert sum(r.multiply_adds for r in summary) == summary.multiply_adds
    if n is not None:
        assert summary.multiply_adds == n


@models
def test_a_summary_leaves_everything_as_it_was(make, batch, n):
    model = make()
    with torch.no_grad():
        model(**batch)  # transformers sets hooks of its own at the first forward
    unsettle(model)
    given = {key: value.clone() for key, value in batch.items()}
    with changes_in(model) as changed:
        summary = module_summary(model, batch)
    assert changed == []
    with changes_in(model) as changed:
        layer_info(model, batch)
    assert changed == []
    assert batch.keys() == given.keys()
    assert all(torch.equal(batch[key], given[key]) for key in given)
    for text in (str(summary), in_terminal(summary), summary._repr_html_()):
        assert str(summary.n_params) in shown(text)


def test_outputs_asked_for_by_the_config_still_come_after_a_summary():
    model = bert(output_hidden_states=True)
    shape = next(iter(module_summary(model, BATCH))).shape
    assert shape["hidden_states"] == (S([B, N, D]),) * (LAYERS + 1)
    assert [h.shape for h in model(**BATCH).hidden_states] == [S([B, N, D])] * (LAYERS + 1)


def test_tied_weights_are_counted_with_the_embedding():
    summary = module_summary(gpt2(), BATCH)
    assert row(summary, "transformer.wte").params == VOCAB * D
    assert (row(summary, "lm_head").params, row(summary, "lm_head").multiply_adds) == (0, B * N * D * VOCAB)
    assert row(summary, "transformer.h.0.attn.c_attn").params == 3 * D * D + 3 * D
    assert row(summary, "lm_head").shape == S([B, N, VOCAB])


def test_the_embedding_t5_shares_is_counted_once():
    model = t5()
    summary = module_summary(model, {"input_ids": IDS, "labels": IDS})
    assert sum(r.params for r in summary if r.type == "Embedding" and r.params == VOCAB * D) == VOCAB * D
    assert all(r.called for r in summary if r.params and r.type == "Linear")


def test_outputs_keep_their_names():
    summary = module_summary(bert(), BATCH)
    shape = next(iter(summary)).shape
    assert shape["last_hidden_state"] == S([B, N, D])
    assert shape["pooler_output"] == S([B, D])
    assert row(summary, "encoder.layer.1.output").shape == S([B, N, D])


@pytest.mark.parametrize("make", [gpt2, lambda: transformers.BertForSequenceClassification(bert_config())])
def test_a_learner_sums_up_a_model_that_brings_its_loss_also_within_a_fit(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = make().state_dict()

    def run(look):
        model = make()
        model.load_state_dict(start)
        labels = IDS if "GPT2" in type(model).__name__ else torch.tensor([0, 1, 0])
        learn = Learner([BATCH | {"labels": labels}] * 2, model, opt_func=torch.optim.SGD, lr=0.1)
        torch.manual_seed(0)
        fit(learn, cbs=Callback(name="look", after_loss=look))
        return weights(model)

    def look(cb):
        with changes_in(cb.learn) as changed:
            summary = cb.learn.summary()
        assert changed == []
        assert summary.n_params == sum(p.numel() for p in cb.model.parameters())
        assert "SGD" in str(summary)

    assert same(run(lambda cb: None), run(look))


def test_a_batch_encoding_means_keyword_arguments():
    encoding = transformers.BatchEncoding(dict(BATCH))
    assert module_summary(bert(), encoding).multiply_adds == BERT_WORK
