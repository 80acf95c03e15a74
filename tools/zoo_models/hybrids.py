"""Language models that mix attention with recurrences: state spaces, linear attention, gated recurrent
units."""

from __future__ import annotations

import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT
from tools.zoo_models.samples import VOCABULARY, text_only

MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_d_state=8, mamba_chunk_size=8)


def mamba2() -> nn.Module:
    config = T.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        use_cache=False,
    )
    return T.Mamba2ForCausalLM(config)


def bamba() -> nn.Module:
    return T.BambaForCausalLM(T.BambaConfig(**TEXT | MAMBA, attn_layer_indices=[1]))


def falcon_h1() -> nn.Module:
    """Attention and a state space side by side in every layer."""
    return T.FalconH1ForCausalLM(T.FalconH1Config(**TEXT | MAMBA, mamba_d_ssm=96))


def recurrent_gemma() -> nn.Module:
    options = {k: v for k, v in TEXT.items() if k != "max_position_embeddings"}
    config = T.RecurrentGemmaConfig(
        **options | {"num_hidden_layers": 3, "intermediate_size": 192}, lru_width=48, attention_window_size=64
    )
    return T.RecurrentGemmaForCausalLM(config)


def rwkv() -> nn.Module:
    config = T.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, context_length=64, use_cache=False
    )
    return T.RwkvForCausalLM(config)


def minimax() -> nn.Module:
    """Lightning attention and softmax attention in turn, each before a mixture of experts."""
    config = T.MiniMaxConfig(
        **TEXT,
        head_dim=12,
        num_local_experts=4,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    )
    return T.MiniMaxForCausalLM(config)


def kimi_linear() -> nn.Module:
    """Gated delta rules and latent attention in turn, with a mixture of experts behind."""
    config = T.KimiLinearConfig(
        **TEXT | {"num_key_value_heads": 4},
        moe_intermediate_size=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        qk_nope_head_dim=8,
        num_experts_per_tok=2,
        num_local_experts=4,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=12,
        linear_num_heads=4,
    )
    return T.KimiLinearForCausalLM(config)


ENTRIES = [
    Entry("mamba2", "hybrids", mamba2, text_only),
    Entry("bamba", "hybrids", bamba, text_only),
    Entry("falcon_h1", "hybrids", falcon_h1, text_only),
    Entry("recurrent_gemma", "hybrids", recurrent_gemma, text_only),
    Entry("rwkv", "hybrids", rwkv, text_only),
    Entry("minimax", "hybrids", minimax, text_only),
    Entry("kimi_linear", "hybrids", kimi_linear, text_only),
]
