"""Image-language models whose images have one size: a tower, a projector, a language model; texts with and
without images."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT, VISION, clip, frozen, llama, quiet, qwen2, siglip
from tools.zoo_models.samples import END, IMAGE, START, VIDEO, Sample, after, blanks, pictures, words


def llava() -> nn.Module:
    return T.LlavaForConditionalGeneration(
        T.LlavaConfig(
            vision_config=clip(), text_config=llama(), image_token_index=IMAGE, vision_feature_layer=-1
        )
    )


def vipllava() -> nn.Module:
    config = T.VipLlavaConfig(
        vision_config=clip(), text_config=llama(), image_token_index=IMAGE, vision_feature_layers=[-2, -1]
    )
    return T.VipLlavaForConditionalGeneration(config)


def internvl() -> nn.Module:
    vision = T.InternVLVisionConfig(**VISION | {"image_size": 16, "patch_size": 4})
    net = T.InternVLForConditionalGeneration(
        T.InternVLConfig(vision_config=vision, text_config=qwen2(), image_token_id=IMAGE)
    )
    return frozen(net, "model.vision_tower")


def aya_vision() -> nn.Module:
    text = T.Cohere2Config(
        **TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    )
    return T.AyaVisionForConditionalGeneration(
        T.AyaVisionConfig(vision_config=siglip(), text_config=text, image_token_index=IMAGE)
    )


def paligemma() -> nn.Module:
    text = T.GemmaConfig(**TEXT | {"head_dim": 12})
    config = T.PaliGemmaConfig(
        vision_config=siglip(projection_dim=48),
        text_config=text,
        image_token_index=IMAGE,
        projection_dim=48,
        vocab_size=TEXT["vocab_size"],
        hidden_size=48,
    )
    return T.PaliGemmaForConditionalGeneration(config)


def gemma3() -> nn.Module:
    text = T.Gemma3TextConfig(
        **TEXT | {"head_dim": 12, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    )
    config = T.Gemma3Config(
        vision_config=siglip(),
        text_config=text,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return T.Gemma3ForConditionalGeneration(config)


def got_ocr2() -> nn.Module:
    vision = T.GotOcr2VisionConfig(
        hidden_size=32,
        output_channels=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        mlp_dim=64,
        window_size=4,
        global_attn_indexes=[1],
    )
    return T.GotOcr2ForConditionalGeneration(
        T.GotOcr2Config(
            vision_config=vision, text_config=qwen2(), image_token_index=IMAGE, image_seq_length=4
        )
    )


def blip2() -> nn.Module:
    vision = T.Blip2VisionConfig(**VISION | {"initializer_range": 0.02})
    qformer = T.Blip2QFormerConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        encoder_hidden_size=32,
    )
    text = T.OPTConfig(**OPT)
    config = T.Blip2Config(
        vision_config=vision,
        qformer_config=qformer,
        text_config=text,
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    return frozen(T.Blip2ForConditionalGeneration(quiet(config)), "vision_model", "language_model")


def instructblip() -> nn.Module:
    vision = T.InstructBlipVisionConfig(**VISION | {"initializer_range": 0.02})
    qformer = T.InstructBlipQFormerConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        encoder_hidden_size=32,
    )
    config = T.InstructBlipConfig(
        vision_config=vision,
        qformer_config=qformer,
        text_config=T.OPTConfig(**OPT),
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    return frozen(T.InstructBlipForConditionalGeneration(quiet(config)), "vision_model", "language_model")


OPT = dict(
    vocab_size=120,
    hidden_size=48,
    word_embed_proj_dim=48,
    ffn_dim=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def kosmos2() -> nn.Module:
    text = T.Kosmos2Config().text_config
    text.update(
        dict(
            vocab_size=120,
            embed_dim=48,
            layers=2,
            ffn_dim=96,
            attention_heads=4,
            max_position_embeddings=256,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    return T.Kosmos2ForConditionalGeneration(
        quiet(T.Kosmos2Config(text_config=text.to_dict(), vision_config=dict(VISION), latent_query_num=4))
    )


def florence2() -> nn.Module:
    vision = dict(
        depths=[1, 1],
        patch_size=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[3, 1],
        patch_prenorm=[False, True],
        embed_dim=[16, 32],
        num_heads=[2, 4],
        num_groups=[2, 4],
        window_size=4,
        projection_dim=48,
        max_position_embeddings=8,
    )
    text = T.BartConfig(
        vocab_size=120,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=128,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    config = T.Florence2Config(vision_config=vision, text_config=text.to_dict(), image_token_id=IMAGE)
    return T.Florence2ForConditionalGeneration(quiet(config))


def cohere2_vision() -> nn.Module:
    text = T.Cohere2Config(
        **TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    )
    config = T.Cohere2VisionConfig(
        vision_config=siglip(), text_config=text, image_token_id=IMAGE, alignment_intermediate_size=64
    )
    return T.Cohere2VisionForConditionalGeneration(config)


def deepseek_vl() -> nn.Module:
    return T.DeepseekVLForConditionalGeneration(
        T.DeepseekVLConfig(vision_config=siglip(), text_config=llama(), image_token_id=IMAGE)
    )


def ovis2() -> nn.Module:
    """Patches are soft choices from a vocabulary of pictures, with tokens that say where a picture begins and
    ends."""
    vision = T.models.ovis2.configuration_ovis2.Ovis2VisionConfig(
        **VISION | {"vocab_size": 24, "hidden_stride": 2}
    )
    config = T.Ovis2Config(
        vision_config=vision,
        text_config=qwen2(),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[110, 111, 112, 113, 114],
        vocab_size=TEXT["vocab_size"],
        hidden_size=48,
    )
    return T.Ovis2ForConditionalGeneration(config)


def git() -> nn.Module:
    config = T.GitConfig(
        vision_config=dict(VISION),
        vocab_size=120,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        pad_token_id=0,
        use_cache=False,
    )
    return T.GitForCausalLM(quiet(config))


def llama4() -> nn.Module:
    """A tower whose patches are shuffled into features, and a mixture of experts that looks back in
    chunks."""
    vision = T.Llama4VisionConfig(
        **VISION
        | {
            "intermediate_size": 128,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        }
    )
    text = T.Llama4TextConfig(
        **TEXT
        | {
            "head_dim": 12,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "attention_chunk_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    )
    config = T.Llama4Config(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    outputs = T.modeling_outputs.MoeCausalLMOutputWithPast
    if not hasattr(outputs, "image_outputs"):  # transformers 5.24 reads it, and fails in training
        outputs.image_outputs = None
    return T.Llama4ForConditionalGeneration(config)


def _typed(make):
    """Samples with the token types that PaliGemma and Gemma 3 train with: 1 for an image's placeholders."""

    def typed(g: torch.Generator) -> Sample:
        sample = make(g)
        return sample | {"token_type_ids": (sample["input_ids"] == IMAGE).long()}

    return typed


def _prefix_typed(g: torch.Generator) -> Sample:
    """PaliGemma's own types: 0 for image and prompt, which see each other, 1 for the answer."""
    sample = pictures(16, share=0.7)(g)
    return sample | {"token_type_ids": (sample["labels"] != -100).long()}


def _instructed(g: torch.Generator) -> Sample:
    """Every sample has an image and an instruction for the query transformer next to its text."""
    instruction = words(g, 3, 9)
    sample = after(blanks(4), words(g))
    return sample | {
        "pixel_values": torch.randn(3, 32, 32, generator=g),
        "qformer_input_ids": instruction,
        "qformer_attention_mask": torch.ones_like(instruction),
    }


def _pictured(g: torch.Generator) -> Sample:
    """Every sample has one image."""
    return after(blanks(4), words(g)) | {"pixel_values": torch.randn(3, 32, 32, generator=g)}


def _captioned(g: torch.Generator) -> Sample:
    """A picture goes before the text by itself: it has no placeholders."""
    text = words(g)
    return {"input_ids": text, "labels": text.clone(), "pixel_values": torch.randn(3, 32, 32, generator=g)}


def _kosmos(g: torch.Generator) -> Sample:
    sample = after(blanks(4, VIDEO), words(g))
    return sample | {
        "pixel_values": torch.randn(3, 32, 32, generator=g),
        "image_embeds_position_mask": (sample["input_ids"] == VIDEO).long(),
    }


def _florence(g: torch.Generator) -> Sample:
    """A prompt behind the image's placeholders (16 places and a pooled one), and a longer answer that the
    decoder learns."""
    return {
        "input_ids": torch.cat([blanks(17), words(g, 3, 8)]),
        "labels": words(g),
        "pixel_values": torch.randn(3, 32, 32, generator=g),
    }


ENTRIES = [
    Entry("llava", "vision", llava, pictures(16)),
    Entry("vipllava", "vision", vipllava, pictures(16, most=2)),
    Entry("internvl", "vision", internvl, pictures(4, size=16, most=3)),
    Entry("aya_vision", "vision", aya_vision, pictures(4, most=2)),
    Entry("paligemma", "vision", paligemma, _prefix_typed),
    Entry("gemma3", "vision", gemma3, _typed(pictures(4, most=2))),
    Entry("cohere2_vision", "vision", cohere2_vision, pictures(4, most=2)),
    Entry("deepseek_vl", "vision", deepseek_vl, pictures(16)),
    Entry("ovis2", "vision", ovis2, pictures(4, most=2)),
    Entry("git", "vision", git, _captioned),
    Entry("llama4", "vision", llama4, pictures(4, most=2)),
    Entry("got_ocr2", "vision", got_ocr2, pictures(4, size=64)),
    Entry("blip2", "vision", blip2, _pictured),
    Entry("instructblip", "vision", instructblip, _instructed),
    Entry("kosmos2", "vision", kosmos2, _kosmos),
    Entry("florence2", "vision", florence2, _florence),
]
