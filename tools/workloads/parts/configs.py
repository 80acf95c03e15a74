"""The public configurations: language models by layers, width, heads and vocabulary; encoders; and small ones
of the same architecture."""

from __future__ import annotations

import transformers as T
from torch import nn

from parts.packing import PER_IMAGE, PER_SAMPLE

Config = T.PreTrainedConfig
SMALL_VOCABULARY = 512


def _text(
    kind: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    head_dim: int,
    tied: bool = False,
) -> Config:
    extra = {"head_dim": head_dim} if kind == "Qwen3" else {}
    return getattr(T, f"{kind}Config")(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        attn_implementation=PER_SAMPLE,
        use_cache=False,
        **extra,
    )


def language_model(config: Config) -> nn.Module:
    """Embedding, layers and head."""
    return T.AutoModelForCausalLM.from_config(config)


def small_text(kind: str, hidden: int = 32, tied: bool = False) -> Config:
    """Two layers with grouped heads."""
    return _text(kind, 2, hidden, 4, 2, 2 * hidden, SMALL_VOCABULARY, hidden // 4, tied)


def qwen2_5_7b() -> Config:
    return _text("Qwen2", 28, 3584, 28, 4, 18_944, 152_064, 128)


def qwen2_5_72b() -> Config:
    return _text("Qwen2", 80, 8192, 64, 8, 29_568, 152_064, 128)


def llama3_8b() -> Config:
    return _text("Llama", 32, 4096, 32, 8, 14_336, 128_256, 128)


def llama3_70b() -> Config:
    return _text("Llama", 80, 8192, 64, 8, 28_672, 128_256, 128)


def qwen3_32b() -> Config:
    return _text("Qwen3", 64, 5120, 64, 8, 25_600, 151_936, 128)


def qwen3_8b() -> Config:
    return _text("Qwen3", 36, 4096, 32, 8, 12_288, 151_936, 128)


def qwen3_1_7b() -> Config:
    return _text("Qwen3", 28, 2048, 16, 8, 6144, 151_936, 128, tied=True)


def qwen3_14b(vocabulary: int = 151_936) -> Config:
    return _text("Qwen3", 40, 5120, 40, 8, 17_408, vocabulary, 128)


# -- mixtures of experts


def _qwen3_moe(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    experts: int,
    width: int,
    chosen: int,
    vocabulary: int = 151_936,
    head_dim: int = 128,
) -> Config:
    return getattr(T, "Qwen3MoeConfig")(  # noqa: B009 (it takes more than its signature says)
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=width,
        intermediate_size=3 * hidden,
        norm_topk_prob=True,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        attn_implementation=PER_SAMPLE,
        use_cache=False,
    )


def qwen3_235b_a22b() -> Config:
    return _qwen3_moe(94, 4096, 64, 4, 128, 1536, 8)


def qwen3_30b_a3b() -> Config:
    return _qwen3_moe(48, 2048, 32, 4, 128, 768, 8)


def small_mixture(hidden: int = 32) -> Config:
    """Two layers of Qwen3-MoE with eight experts; a token takes two."""
    return _qwen3_moe(2, hidden, 4, 2, 8, hidden, 2, SMALL_VOCABULARY, hidden // 4)


def deepseek_v3() -> Config:
    """DeepSeek-V3: 671B parameters; a token uses 37B."""
    return _deepseek_v3(61, 7168, 128, 256, 2048, 8, 8, 3, 1536, 512, 128, 64, 129_280)


def small_deepseek_v3() -> Config:
    """Three layers of DeepSeek-V3, the first without experts, the others with eight in two groups."""
    return _deepseek_v3(3, 48, 4, 8, 32, 2, 2, 1, 24, 16, 8, 4, SMALL_VOCABULARY)


def _deepseek_v3(
    layers: int,
    hidden: int,
    heads: int,
    experts: int,
    width: int,
    chosen: int,
    groups: int,
    dense_layers: int,
    query_rank: int,
    key_rank: int,
    head_dim: int,
    rope_dim: int,
    vocabulary: int,
) -> Config:
    return getattr(T, "DeepseekV3Config")(  # noqa: B009 (as above)
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=groups // 2,
        moe_intermediate_size=width,
        intermediate_size=9 * width,
        first_k_dense_replace=dense_layers,
        q_lora_rank=query_rank,
        kv_lora_rank=key_rank,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        attn_implementation=PER_SAMPLE,
        use_cache=False,
    )


# -- encoders


def _qwen_vit(depth: int, hidden: int, heads: int, ffn: int, out: int, full: list[int]) -> nn.Module:
    config = T.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=ffn,
        out_hidden_size=out,
        fullatt_block_indexes=full,
    )
    tower = T.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config)
    tower.config._attn_implementation = PER_IMAGE  # pyright: ignore[reportPrivateUsage]
    return tower


def qwen_vit(out: int, ffn: int = 3420) -> nn.Module:
    """Qwen2.5-VL's tower: 28 of 32 layers see windows of 8 x 8 patches."""
    return _qwen_vit(32, 1280, 16, ffn, out, [7, 15, 23, 31])


def small_qwen_vit(out: int) -> nn.Module:
    return _qwen_vit(2, 32, 2, 64, out, [1])


def intern_vit_6b() -> T.InternVLVisionConfig:
    return T.InternVLVisionConfig(
        num_hidden_layers=45,
        hidden_size=3200,
        num_attention_heads=25,
        intermediate_size=12_800,
        use_qk_norm=True,
        norm_type="rms_norm",
        image_size=448,
        patch_size=14,
    )


def clip_l_336() -> T.CLIPVisionConfig:
    return T.CLIPVisionConfig(
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )


def small_intern_vit() -> T.InternVLVisionConfig:
    return T.InternVLVisionConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        use_qk_norm=True,
        norm_type="rms_norm",
        image_size=448,
        patch_size=14,
    )


def small_clip() -> T.CLIPVisionConfig:
    return T.CLIPVisionConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=336,
        patch_size=14,
        projection_dim=32,
    )


def whisper_large() -> nn.Module:
    """The encoder of Whisper large-v3: 1,500 positions for 30 s."""
    return _whisper(32, 1280, 20, 5120)


def small_whisper() -> nn.Module:
    return _whisper(2, 32, 2, 64)


def _whisper(layers: int, hidden: int, heads: int, ffn: int) -> nn.Module:
    config = T.WhisperConfig(
        encoder_layers=layers,
        d_model=hidden,
        encoder_attention_heads=heads,
        encoder_ffn_dim=ffn,
        num_mel_bins=128,
        max_source_positions=1500,
    )
    return T.models.whisper.modeling_whisper.WhisperEncoder(config)
