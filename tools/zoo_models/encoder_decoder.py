"""Encoder-decoder models of text and of images: what the encoder makes feeds every layer of the decoder."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import VISION, quiet
from tools.zoo_models.samples import VOCABULARY, Sample, words

BERT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def t5() -> nn.Module:
    config = T.T5Config(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T.T5ForConditionalGeneration(quiet(config))


def bart() -> nn.Module:
    config = T.BartConfig(
        vocab_size=VOCABULARY,
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
    return T.BartForConditionalGeneration(quiet(config))


def vision_encoder_decoder() -> nn.Module:
    encoder = T.ViTConfig(**VISION, hidden_dropout_prob=0.0)
    decoder = T.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    config = T.VisionEncoderDecoderConfig(
        encoder=encoder, decoder=decoder, decoder_start_token_id=1, pad_token_id=0
    )
    return T.VisionEncoderDecoderModel(config)


def encoder_decoder() -> nn.Module:
    config = T.EncoderDecoderConfig(
        encoder=T.BertConfig(**BERT),
        decoder=T.BertConfig(**BERT, is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    return T.EncoderDecoderModel(config)


def donut() -> nn.Module:
    """Windows that shift from layer to layer, merged between stages, before a decoder."""
    encoder = T.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    )
    decoder = T.MBartConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        is_decoder=True,
        is_encoder_decoder=False,
        add_cross_attention=True,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = T.VisionEncoderDecoderConfig(
        encoder=encoder, decoder=quiet(decoder), decoder_start_token_id=1, pad_token_id=0
    )
    return T.VisionEncoderDecoderModel(config)


def _translation(g: torch.Generator) -> Sample:
    return {"input_ids": words(g), "labels": words(g)}


def _caption(g: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 32, 32, generator=g), "labels": words(g)}


ENTRIES = [
    Entry("t5", "encoder-decoder", t5, _translation),
    Entry("bart", "encoder-decoder", bart, _translation),
    Entry("vision_encoder_decoder", "encoder-decoder", vision_encoder_decoder, _caption),
    Entry("donut", "encoder-decoder", donut, _caption),
    Entry("encoder_decoder", "encoder-decoder", encoder_decoder, _translation),
]
