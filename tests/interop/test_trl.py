"""TRL's trainers, which are Trainers of transformers: a verdict, and the weights that they get without it."""

from pydoc_data.topics import topics

import pytest
import torch

from tests.interop.trainers import quiet

NEEDS = "pip install 'hookcb[engines]', which the tests with other packages do not need"
with quiet():
    trl = pytest.importorskip("trl", reason=NEEDS)
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from hookcb.adapters.transformers import DiagnoseCallback

pytestmark = pytest.mark.slow  # a training of some seconds each
TEXTS = [text[i : i + 60] for text in topics.values() for i in range(0, len(text) - 60, 400)][:128]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
DATA = {
    "SFT": {"text": TEXTS},
    "DPO": {
        "prompt": [text[:30] for text in TEXTS],
        "chosen": [text[30:] for text in TEXTS],
        "rejected": [text[:29:-1] for text in TEXTS],
    },
    "GRPO": {"prompt": [text[:20] for text in TEXTS[:64]]},
}
OPTIONS = {"SFT": {"max_length": 64}, "DPO": {"max_length": 64}}
OPTIONS["GRPO"] = {"num_generations": 4, "max_completion_length": 8}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


def tokenizer():
    """Makes a token of each byte, so that nothing is downloaded."""
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rewards(completions, **given):
    return [float(text.count("e")) for text in completions]


def trained(kind, folder, report_to, **options):
    """A trainer of TRL after its training, of a model that comes from files, as DPO reads it again."""
    torch.manual_seed(0)
    tokens = tokenizer()
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokens), pad_token_id=0, bos_token_id=1, eos_token_id=1, **SHAPE)
    ).save_pretrained(folder)
    lora = {"peft_config": LORA} if options.pop("lora", False) else {}
    reward = {"reward_funcs": rewards} if kind == "GRPO" else {}
    silent = {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}
    settings = silent | {"learning_rate": 2e-3, "num_train_epochs": 1} | OPTIONS[kind] | options
    args = getattr(trl, f"{kind}Config")(str(folder / "out"), report_to=report_to, **settings)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=LlamaForCausalLM.from_pretrained(folder),
        args=args,
        train_dataset=Dataset.from_dict(DATA[kind]),
        processing_class=tokens,
        **lora,
        **reward,
    )
    trainer.train()
    return trainer


def verdict_of(trainer):
    (callback,) = (cb for cb in trainer.callback_handler.callbacks if isinstance(cb, DiagnoseCallback))
    return callback.diagnose(), callback.coverage


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", {"packing": True, "bf16": True}),
        ("SFT", {"lora": True, "gradient_accumulation_steps": 2}),
        ("DPO", {"lora": True, "gradient_checkpointing": False}),
        ("GRPO", {"gradient_checkpointing": False}),
    ],
)
def test_a_training_of_trl_has_a_verdict_and_the_same_weights(kind, options, tmp_path):
    watched, plain = (trained(kind, tmp_path, to, **options) for to in ("hookcb", "none"))
    verdict, coverage = verdict_of(watched)
    assert verdict.status == "healthy", str(verdict)
    assert coverage.seen["after_step"] == watched.state.global_step
    assert len(verdict.ruled_out) > 20
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_rate_of_one_is_found_in_trl(kind, tmp_path):
    verdict, _ = verdict_of(trained(kind, tmp_path, "hookcb", learning_rate=1.0))
    assert (verdict.status, verdict.primary.code) == ("sick", "update.too_large")


def test_hooks_that_trl_leaves_on_an_embedding_in_each_step_are_found(tmp_path):
    """Seen in TRL 1.16 with transformers 5.24, with and without hookcb; a later version may remove them."""
    trainer = trained("DPO", tmp_path, "hookcb", lora=True, gradient_checkpointing=True)
    verdict, _ = verdict_of(trainer)
    are_left = len(trainer.model.get_input_embeddings()._forward_hooks) > trainer.state.global_step // 2
    assert are_left == ("time.growing" in [finding.code for finding in verdict.findings]), str(verdict)
