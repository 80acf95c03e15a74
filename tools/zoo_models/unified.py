"""More ways to join pictures and sounds with text: discrete picture tokens, two towers for one picture,
positions in three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tools.zoo_models import grids
from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT, VISION, llama, quiet, qwen2, siglip
from tools.zoo_models.samples import (
    AUDIO,
    END,
    IGNORED,
    IMAGE,
    START,
    VIDEO,
    VOCABULARY,
    Sample,
    after,
    blanks,
    chance,
    integer,
    joined,
    padded,
    pictures,
    words,
)

VQ: dict[str, Any] = dict(
    embed_dim=8,
    num_embeddings=16,
    latent_channels=8,
    base_channels=32,
    channel_multiplier=(1, 1),
    num_res_blocks=1,
)


def chameleon() -> nn.Module:
    """A picture becomes tokens of the text's vocabulary."""
    words_of_pictures = {f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": 100 + i for i in range(16)}
    config = T.ChameleonConfig(
        **TEXT, vq_config=VQ | {"resolution": 16}, vocabulary_map=words_of_pictures | {"<image>": IMAGE}
    )
    return T.ChameleonForConditionalGeneration(quiet(config))


def janus() -> nn.Module:
    vision = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        mlp_ratio=2,
        projection_dim=48,
        depth=2,
        num_image_tokens=16,
    )
    vq = VQ | dict(num_patches=4, projection_dim=48, image_token_embed_dim=48)
    return T.JanusForConditionalGeneration(
        quiet(T.JanusConfig(text_config=llama(), vision_config=vision, vq_config=vq, image_token_id=IMAGE))
    )


def aria() -> nn.Module:
    """Queries gather a picture's patches; the text model is a mixture of experts."""
    text = T.AriaTextConfig(**TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)
    vision = T.Idefics3VisionConfig(**VISION)
    config = T.AriaConfig(
        vision_config=vision, text_config=text, projector_patch_to_query_dict={16: 4}, image_token_index=IMAGE
    )
    return T.AriaForConditionalGeneration(config)


def deepseek_vl_hybrid() -> nn.Module:
    """Two towers look at one picture, at a low and at a high resolution."""
    high = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        output_channels=16,
        image_size=64,
        patch_size=8,
        mlp_dim=64,
        window_size=4,
        global_attn_indexes=[1],
    )
    config = T.DeepseekVLHybridConfig(
        text_config=llama(),
        vision_config=siglip(),
        high_res_vision_config=T.SamVisionConfig(**high),
        image_token_id=IMAGE,
    )
    return T.DeepseekVLHybridForConditionalGeneration(config)


def glm4v() -> nn.Module:
    vision = grids.TOWER | dict(hidden_size=32, out_hidden_size=48, intermediate_size=96, image_size=32)
    text = TEXT | {"rope_parameters": grids.ROPE}
    tokens = dict(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=112,
        video_end_token_id=111,
    )
    return T.Glm4vForConditionalGeneration(T.Glm4vConfig(vision_config=vision, text_config=text, **tokens))


def qwen3_5() -> nn.Module:
    """Gated delta rules and attention in turn behind a tower with grids."""
    vision = grids.TOWER | dict(
        hidden_size=32, intermediate_size=64, out_hidden_size=48, num_position_embeddings=16
    )
    text = grids.MRoPE | dict(
        head_dim=12,
        rope_parameters=grids.ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    )
    return T.Qwen3_5ForConditionalGeneration(
        T.Qwen3_5Config(vision_config=vision, text_config=text, **grids.TOKENS)
    )


def video_llama_3() -> nn.Module:
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=grids.PATCH,
    )
    return T.VideoLlama3ForConditionalGeneration(
        T.VideoLlama3Config(
            vision_config=vision, text_config=qwen2(), image_token_id=IMAGE, video_token_id=VIDEO
        )
    )


def glmasr() -> nn.Module:
    audio = T.GlmAsrEncoderConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_mel_bins=8,
        max_position_embeddings=32,
    )
    return T.GlmAsrForConditionalGeneration(
        T.GlmAsrConfig(audio_config=audio, text_config=llama(), audio_token_id=AUDIO)
    )


def speecht5() -> nn.Module:
    config = T.SpeechT5Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        encoder_layerdrop=0.0,
        decoder_layers=2,
        decoder_ffn_dim=64,
        decoder_attention_heads=2,
        decoder_layerdrop=0.0,
        conv_dim=[16, 16],
        conv_kernel=[10, 3],
        conv_stride=[5, 2],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        use_cache=False,
        max_text_positions=64,
    )
    return T.SpeechT5ForSpeechToText(quiet(config))


def trocr() -> nn.Module:
    decoder = T.TrOCRConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    config = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(T.DeiTConfig(**VISION), quiet(decoder))
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return T.VisionEncoderDecoderModel(quiet(config))


def musicgen() -> nn.Module:
    """A text encoder and a decoder of four streams of sound tokens; the codec that made those is frozen and
    never runs."""
    text = T.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    sound = T.EncodecConfig(
        num_filters=4,
        hidden_size=8,
        codebook_dim=8,
        codebook_size=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
    )
    decoder = T.MusicgenDecoderConfig(
        vocab_size=16,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_codebooks=4,
        pad_token_id=16,
        bos_token_id=16,
        use_cache=False,
    )
    config = T.MusicgenConfig(
        text_encoder=text.to_dict(), audio_encoder=sound.to_dict(), decoder=decoder.to_dict()
    )
    net = T.MusicgenForConditionalGeneration(quiet(config))
    net.audio_encoder.requires_grad_(False)
    net.config.decoder.decoder_start_token_id = 16
    return net


def _hybrid(g: torch.Generator) -> Sample:
    sample = pictures(16)(g)
    if "pixel_values" in sample:
        sample["high_res_pixel_values"] = torch.randn(1, 3, 64, 64, generator=g)
    return sample


def _llama3(g: torch.Generator) -> Sample:
    if not chance(g):
        return after([], words(g))
    rows, columns = 2 * integer(g, 1, 4), 2 * integer(g, 1, 4)
    sample = after(blanks(rows * columns // 4), words(g))
    pixels = torch.randn(rows * columns, 3 * grids.PATCH**2, generator=g)
    return sample | {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
        "image_merge_sizes": torch.tensor([2]),
    }


def _llama3_collate(samples: Sequence[Sample]) -> Sample:
    keys = ("pixel_values", "image_grid_thw", "image_merge_sizes")
    return padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask") | joined(samples, keys)


def _heard(g: torch.Generator) -> Sample:
    if not chance(g):
        return after([], words(g))
    length = integer(g, 16, 33)
    count = ((length - 1) // 2 + 1 - 4) // 4 + 1
    mask = (torch.arange(32) < length).long()[None]
    return after(blanks(count, AUDIO), words(g)) | {
        "input_features": torch.randn(1, 8, 32, generator=g),
        "input_features_mask": mask,
    }


def _spoken(g: torch.Generator) -> Sample:
    return {"input_values": torch.randn(integer(g, 100, 300), generator=g), "labels": words(g)}


def _spoken_collate(samples: Sequence[Sample]) -> Sample:
    return padded(samples, {"input_values": 0, "labels": IGNORED}, "attention_mask")


def _line(g: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 32, 32, generator=g), "labels": words(g)}


def _music(g: torch.Generator) -> Sample:
    text = words(g)
    return {"input_ids": text, "labels": torch.randint(0, 16, (integer(g, 6, 14), 4), generator=g)}


def _music_collate(samples: Sequence[Sample]) -> Sample:
    batch = padded(samples, {"input_ids": 0}, "attention_mask")
    return batch | {
        "labels": pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED)
    }


ENTRIES = [
    Entry("chameleon", "unified", chameleon, pictures(64, size=16)),
    Entry("janus", "unified", janus, pictures(16)),
    Entry("aria", "unified", aria, pictures(4, most=2)),
    Entry("deepseek_vl_hybrid", "unified", deepseek_vl_hybrid, _hybrid),
    Entry("glm4v", "unified", glm4v, grids.mixed([grids.image], True), grids.collate),
    Entry("qwen3_5", "unified", qwen3_5, grids.mixed([grids.image], True), grids.collate),
    Entry("video_llama_3", "unified", video_llama_3, _llama3, _llama3_collate),
    Entry("glmasr", "unified", glmasr, _heard),
    Entry("speecht5", "unified", speecht5, _spoken, _spoken_collate),
    Entry("trocr", "unified", trocr, _line),
    Entry("musicgen", "unified", musicgen, _music, _music_collate),
]
