"""`hookcb diagnose --steps N` ends scripts of other trainers, and says what it has seen."""

import json

import pytest

from hookcb.cli.main import main

BEGIN = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(160, 8)
y = (x.sum(1) > 0).long()
data = TensorDataset(x, y)

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
"""

LIGHTNING = """
import lightning

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, i):
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
trainer = lightning.Trainer(max_epochs=10**6, accelerator="cpu", devices=1, **off)
try:
    trainer.fit(Lit(), DataLoader(data, 16))
finally:
    print("tidied up")
"""

TRANSFORMERS = """
import tempfile, transformers

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}

args = transformers.TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=10**6, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
)
rows = [{"x": a, "labels": b} for a, b in zip(x, y)]
try:
    transformers.Trainer(Net(), args, train_dataset=rows).train()
finally:
    print("tidied up")
"""

ACCELERATE = """
import accelerate

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
net = make()
prepared = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-2), DataLoader(data, 8))
net, opt, loader = prepared
try:
    while True:
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(cross_entropy(net(x), y))
                opt.step()
                opt.zero_grad()
finally:
    print("tidied up")
"""


@pytest.mark.filterwarnings("ignore")  # of the trainers
@pytest.mark.parametrize(
    ("lines", "n_batches"),
    [
        pytest.param(LIGHTNING, 30, id="Lightning"),
        pytest.param(TRANSFORMERS, 60, id="transformers"),
        pytest.param(ACCELERATE, 60, id="Accelerate"),
    ],
)
def test_a_trainer_ends_after_so_many_steps_and_the_verdict_decides(lines, n_batches, tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(BEGIN + lines)
    code = main(["diagnose", "--json", "--steps", "30", str(script)])
    out, err = capfd.readouterr()
    state = json.loads(out)
    (model,) = state["models"]
    assert (code, state["steps"], model["verdict"]["status"]) == (0, 30, "healthy")
    assert model["verdict"]["looked"][0].startswith(f"{n_batches} batches")
    assert "tidied up" in err
    assert err.count("the script ends now, after 30 steps, as by Ctrl-C") == 1
