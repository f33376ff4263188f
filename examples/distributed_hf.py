"""Hugging Face's Trainer on two processes: torchrun --nproc_per_node 2 distributed_hf.py.

By Accelerate, `accelerate launch --multi_gpu --num_processes 2 distributed_hf.py`, without a GPU too.

A tiny GPT-2 learns the characters of Python's documentation, which every Python has; nothing is downloaded.
"""

import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hookcb import Diagnose
from hookcb.adapters.transformers import HookcbCallback

torch.manual_seed(0)
codes = torch.tensor([ord(c) % 128 for c in "".join(topics.values())])[: 512 * 64].view(512, 64)
data = [{"input_ids": ids, "labels": ids} for ids in codes]
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as folder, HookcbCallback(Diagnose(show=False)) as inside:
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(folder, num_train_epochs=2, learning_rate=2e-3, **quiet)
    Trainer(model, args, train_dataset=data, callbacks=[inside]).train()

# one verdict for all ranks, which each of them has; Diagnose() would print it on rank 0
print(f"rank {args.process_index} of {args.world_size}: {inside.diagnose()}")
