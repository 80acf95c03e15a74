"""Public architectures, small and random, train with fused operators as they do without."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from secc.runtime.model.default_collate import DefaultCollate
from secc.runtime.model.user_file import extract_loss
from secc.runtime.training.eager_reference import compare_results, run_eager
from tests.fusion.fuse_model import describe_misses, fuse_model, rules_by_class
from tools.zoo_models import entry

STEPS, LOSSES = 6, 1e-4
SIZES: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
T5: dict[str, Any] = dict(
    vocab_size=61,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    feed_forward_proj="gated-gelu",
    dropout_rate=0.0,
    decoder_start_token_id=0,
    pad_token_id=0,
    use_cache=False,
)
GATED = {"swiglu", "rms-norm", "residual-norm", "rope"}

TEXT = {
    "llama": (lambda: T.LlamaForCausalLM(T.LlamaConfig(**SIZES)), GATED),
    "qwen3": (lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**SIZES)), GATED),
    "gemma": (
        lambda: T.GemmaForCausalLM(T.GemmaConfig(**SIZES)),
        {"geglu", "rms-norm", "residual-norm", "rope"},
    ),
    "mistral": (lambda: T.MistralForCausalLM(T.MistralConfig(**SIZES)), GATED),
    "phi3": (lambda: T.Phi3ForCausalLM(T.Phi3Config(**SIZES)), GATED),
    "glm": (lambda: T.GlmForCausalLM(T.GlmConfig(**SIZES)), GATED - {"rope"}),  # interleaved rotation
    "cohere": (lambda: T.CohereForCausalLM(T.CohereConfig(**SIZES)), {"swiglu", "layer-norm"}),
    "t5": (lambda: T.T5ForConditionalGeneration(T.T5Config(**T5)), {"geglu", "rms-norm"}),
}
SLOW_TEXT = {
    "gemma2": (
        lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**SIZES)),
        {"geglu", "rms-norm", "residual-norm", "rope"},
    ),
    "olmo2": (lambda: T.Olmo2ForCausalLM(T.Olmo2Config(**SIZES)), GATED - {"residual-norm"}),
    "granite": (lambda: T.GraniteForCausalLM(T.GraniteConfig(**SIZES)), GATED),
    "starcoder2": (
        lambda: T.Starcoder2ForCausalLM(T.Starcoder2Config(**SIZES)),
        {"layer-norm", "residual-norm", "rope"},
    ),
    "gpt_neox": (
        lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**SIZES)),
        {"layer-norm", "residual-norm", "rope"},
    ),
    "stablelm": (
        lambda: T.StableLmForCausalLM(T.StableLmConfig(**SIZES)),
        GATED - {"rms-norm"} | {"layer-norm"},
    ),
}
ZOO = {"llava": GATED | {"layer-norm"}, "qwen3_moe": GATED, "whisper": {"layer-norm", "residual-norm"}}
SLOW_ZOO = {
    "gemma3": {"geglu", "rms-norm", "residual-norm", "rope", "layer-norm"},
    "qwen2_5_vl": GATED,
    "qwen3_vl": GATED | {"layer-norm"},
    "gpt_oss": {"rms-norm", "residual-norm", "rope"},
    "deepseek_v3": GATED,
    "mixtral": GATED,
    "voxtral": GATED | {"layer-norm"},
    "olmoe": GATED,
}


def texts(count: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (count, 11), generator=torch.Generator().manual_seed(count))
    return {"input_ids": ids, "labels": ids.clone()}


def losses(model: nn.Module, batch: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[float] = []
    for _ in range(STEPS):
        loss = extract_loss(model(**batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def check(model: nn.Module, batch: dict[str, Any], rules: set[str]) -> None:
    """Asserts that the first gradients and the losses of some steps agree within the tolerances of plans."""
    model.train()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    own = run_eager(model, batch)
    with fuse_model(model) as found:
        assert set[str]().union(*rules_by_class(found).values()) == rules, describe_misses(found)
        difference = compare_results(run_eager(model, batch), own)
        assert difference.is_exact, difference
        with_kernels = losses(model, batch)
        assert weights.keys() == model.state_dict().keys()
    model.load_state_dict(weights)
    assert with_kernels == pytest.approx(losses(model, batch), rel=LOSSES)


@pytest.mark.parametrize("name", [*TEXT, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_TEXT)])
def test_language_models_train_exactly(name: str) -> None:
    make, rules = (TEXT | SLOW_TEXT)[name]
    torch.manual_seed(0)
    check(make(), texts(3), rules)


@pytest.mark.parametrize("name", [*ZOO, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_ZOO)])
def test_other_models_train_exactly(name: str) -> None:
    known = entry(name)
    torch.manual_seed(0)
    model, data = known.model(), known.dataset()
    samples = [data[i] for i in range(3)]
    names = frozenset(inspect.signature(model.forward).parameters)
    collate = known.collate or DefaultCollate.fit(samples, names)
    check(model, collate(samples), (ZOO | SLOW_ZOO)[name])
