"""Mixture-of-experts language models, and one that distils one of them: their expert blocks are kept
whole."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT, qwen2
from tools.zoo_models.samples import text_only

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # tp 2 and 4 divide them


def mixtral() -> nn.Module:
    more: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return T.MixtralForCausalLM(T.MixtralConfig(**TEXT | HEADS | more))


def qwen3_moe(**options) -> T.PreTrainedModel:
    config = T.Qwen3MoeConfig(
        **TEXT
        | HEADS
        | {"head_dim": 12, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        | options
    )
    return T.Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    return T.GptOssForCausalLM(
        T.GptOssConfig(
            **TEXT,
            head_dim=12,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


def olmoe() -> nn.Module:
    return T.OlmoeForCausalLM(T.OlmoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2))


def deepseek_v3() -> nn.Module:
    config = T.DeepseekV3Config(
        **TEXT | dict(num_key_value_heads=4),
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return T.DeepseekV3ForCausalLM(config)


def jamba() -> nn.Module:
    """State-space layers, attention layers and expert layers in turn."""
    config = T.JambaConfig(
        **TEXT | {"num_hidden_layers": 4},
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    )
    return T.JambaForCausalLM(config)


def qwen3_next() -> nn.Module:
    """Linear attention and attention in turn."""
    config = T.Qwen3NextConfig(
        **TEXT,
        head_dim=12,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    return T.Qwen3NextForCausalLM(config)


class Distilled(nn.Module):
    """A dense student learns from a mixture-of-experts teacher by the divergence of their answers, and from
    the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = qwen3_moe(num_hidden_layers=3).requires_grad_(False)
        self.student = T.Qwen2ForCausalLM(qwen2())

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(input_ids, attention_mask).logits[:, :-1]
        found = self.student(input_ids, attention_mask).logits[:, :-1]
        targets = labels[:, 1:]
        counted = (targets != -100).float()
        divergence = nn.functional.kl_div(
            found.log_softmax(-1), taught.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        plain = nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return plain + (divergence * counted).sum() / counted.sum().clamp(min=1)


ENTRIES = [
    Entry("mixtral", "experts", mixtral, text_only),
    Entry("qwen3_moe", "experts", qwen3_moe, text_only),
    Entry("gpt_oss", "experts", gpt_oss, text_only),
    Entry("olmoe", "experts", olmoe, text_only),
    Entry("deepseek_v3", "experts", deepseek_v3, text_only),
    Entry("jamba", "experts", jamba, text_only),
    Entry("qwen3_next", "experts", qwen3_next, text_only),
    Entry("moe_distillation", "experts", Distilled, text_only),
]
