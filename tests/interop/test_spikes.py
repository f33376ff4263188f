"""A spike of the loss in loops of others is told with its samples."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookcb import Diagnose, watch

BAD = (1, 4)


def the_spike(verdict):
    (spike,) = [finding for finding in verdict.findings if finding.code == "loss.spike"]
    return spike


def test_accelerate_has_the_worst_samples_of_the_batch():
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    y = torch.randint(3, (1_200,))
    x = F.one_hot(y, 4).float() * 2 + torch.randn(1_200, 4) / 2
    bad = [50 * 16 + i for i in BAD]
    y[bad] = (y[bad] + 1) % 3
    x[bad] *= 60
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16)
    accelerator = accelerate.Accelerator(cpu=True)
    model, opt, data = accelerator.prepare(model, opt, data)
    with watch(model, opt, Diagnose(show=False)) as w:
        for xb, yb in data:
            accelerator.backward(F.cross_entropy(model(xb), yb))
            opt.step()
            opt.zero_grad()
    spike = the_spike(w.diagnose())
    assert spike.step == 50
    assert all(f" {i} (" in spike.message for i in BAD)


def test_a_model_of_transformers_that_computes_its_loss_has_them_too():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with watch(model, opt, Diagnose(show=False)) as w:
        for step in range(80):
            rows = (3 * torch.arange(16) + torch.randint(32, (8, 1))) % 32
            if step == 60:
                rows[list(BAD)] = torch.randint(32, 64, (2, 16))
            model(input_ids=rows, labels=rows).loss.backward()
            opt.step()
            opt.zero_grad()
    spike = the_spike(w.diagnose())
    assert spike.step == 60
    assert all(f" {i} (" in spike.message for i in BAD)
