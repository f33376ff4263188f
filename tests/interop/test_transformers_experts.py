"""Experts of transformers' models: loads are those that their routers return, and attention is seen."""

from functools import partial

import pytest
import torch

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.model.attention_logits import GrowingLogits
from hookcb.diagnosis.measurements.routers import Routers

transformers = pytest.importorskip("transformers")

B, T, N, K, VOCAB = 4, 12, 8, 2, 32
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
OF_EXPERTS = {"num_experts_per_tok": K, "num_key_value_heads": 1, "intermediate_size": 16}


def mixtral(**kwargs):
    config = transformers.MixtralConfig(**SIZES, **OF_EXPERTS, num_local_experts=N, **kwargs)
    return transformers.MixtralForCausalLM(config)


def qwen2(**kwargs):
    of_moe = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": N}
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**SIZES, **OF_EXPERTS, **of_moe, **kwargs)
    )


def qwen3(**kwargs):
    of_moe = {"moe_intermediate_size": 8, "num_experts": N, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, **OF_EXPERTS, **of_moe, **kwargs)
    )


@pytest.mark.parametrize("make", [mixtral, qwen2, qwen3])
def test_loads_are_those_that_the_routers_return_and_attention_is_seen(make):
    torch.manual_seed(0)
    model = make(output_router_logits=make is not qwen2)
    opt, chosen = torch.optim.AdamW(model.parameters()), {}

    def keep(name, m, args, out):
        chosen.setdefault(name, []).append(out[2])

    for name, m in model.named_modules():
        if type(m).__name__.endswith("TopKRouter"):
            m.register_forward_hook(partial(keep, name))
    with watch(model, opt, diagnose := Diagnose(show=False, on_sick="ignore")) as w:
        for step in range(5):
            x = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(step))
            loss = w.report_loss(model(input_ids=x, labels=x).loss)
            loss.backward()
            opt.step()
            opt.zero_grad()
    run = diagnose.evidence()
    routers, logits = run.measured(Routers), run.measured(GrowingLogits).numbers
    assert list(routers.loads) == list(chosen) == [f"model.layers.{i}.mlp.gate" for i in range(2)]
    for name, loads in routers.loads.items():
        counts = [torch.bincount(indices.flatten(), minlength=N).tolist() for indices in chosen[name]]
        assert [(list(x.counts), x.k) for x in loads] == [(n, K) for n in counts]
        assert sum(loads[0].counts) == B * T * K
    assert routers.lacks_balance == (make is qwen2)
    assert {layer.removesuffix(".self_attn") for layer in logits} == {f"model.layers.{i}" for i in range(2)}
