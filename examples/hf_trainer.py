"""Hugging Face's Trainer with hookcb's callbacks; `pip install 'hookcb[transformers]'`.

The model is a tiny BERT built from its configuration, and the data are random: nothing is downloaded.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hookcb import ActivationStats, GradientHealth
from hookcb.adapters.transformers import HookcbCallback

torch.manual_seed(0)
ids = torch.randint(0, 50, (256, 8))
labels = (ids[:, 0] > 24).long()  # the label depends on the first token
data = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
model = BertForSequenceClassification(config)

with (
    tempfile.TemporaryDirectory() as folder,
    # Trainer does not notify callbacks of an exception; the block removes the hooks even then
    HookcbCallback(ActivationStats(modules="*.output.dense"), GradientHealth()) as inside,
):
    args = TrainingArguments(
        folder,
        num_train_epochs=2,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, args, train_dataset=data, callbacks=[inside]).train()

print(inside.activation_stats.report())
print(inside.diagnose())
print(str(inside.coverage))
