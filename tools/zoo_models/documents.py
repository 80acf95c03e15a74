"""Models that read documents: patches of pages of any size, boxes of words, long texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers as T
from torch import nn

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT, quiet
from tools.zoo_models.samples import (
    IGNORED,
    IMAGE,
    VOCABULARY,
    Sample,
    after,
    blanks,
    chance,
    integer,
    joined,
    padded,
    words,
)

PATCH = 27  # numbers of a patch of 3 x 3 pixels; a row and a column stand before them
LATENTS = 4  # what Kosmos-2.5 makes of an image
BOXES = 64
PAGE = dict(
    hidden_size=48,
    patch_embed_hidden_size=PATCH,
    d_ff=64,
    d_kv=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    dropout_rate=0.0,
    attention_dropout=0.0,
)


def kosmos2_5() -> nn.Module:
    text = dict(
        vocab_size=VOCABULARY,
        embed_dim=48,
        layers=2,
        ffn_dim=96,
        attention_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
        max_position_embeddings=256,
        use_cache=False,
    )
    config = T.Kosmos2_5Config(
        text_config=text, vision_config=PAGE | {"max_num_patches": 12}, latent_query_num=LATENTS
    )
    return T.Kosmos2_5ForConditionalGeneration(config)


def udop() -> nn.Module:
    config = T.UdopConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        image_size=16,
        patch_size=4,
        decoder_start_token_id=0,
        max_2d_position_embeddings=BOXES,
    )
    return T.UdopForConditionalGeneration(config)


def pix2struct() -> nn.Module:
    text = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        d_kv=12,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        encoder_hidden_size=48,
    )
    config = T.Pix2StructConfig(
        text_config=text, vision_config=PAGE | {"seq_len": 12}, decoder_start_token_id=0, pad_token_id=0
    )
    return T.Pix2StructForConditionalGeneration(config)


def led() -> nn.Module:
    config = T.LEDConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_encoder_position_embeddings=128,
        max_decoder_position_embeddings=128,
        attention_window=8,
        use_cache=False,
        pad_token_id=0,
    )
    return T.LEDForConditionalGeneration(quiet(config))


def fuyu() -> nn.Module:
    config = T.FuyuConfig(
        text_config=T.PersimmonConfig(**TEXT), image_size=16, patch_size=4, image_token_id=IMAGE, **TEXT
    )
    return T.FuyuForCausalLM(quiet(config))


def lfm2_vl() -> nn.Module:
    text = T.Lfm2Config(**TEXT | {"layer_types": ["conv", "full_attention"]})
    vision = T.Siglip2VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_patches=16,
        patch_size=4,
    )
    config = T.Lfm2VlConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, projector_hidden_size=32
    )
    return T.Lfm2VlForConditionalGeneration(config)


def _page(g: torch.Generator, most: int = 12) -> torch.Tensor:
    """The patches of a page of some rows and columns, each behind its row and column."""
    rows, columns = integer(g, 2, 4), integer(g, 1, most // 3 + 1)
    places = torch.cartesian_prod(torch.arange(1, rows + 1), torch.arange(1, columns + 1)).float()
    return torch.cat([places, torch.randn(rows * columns, PATCH, generator=g)], 1)


def _padded_page(page: torch.Tensor) -> torch.Tensor:
    return torch.cat([page, page.new_zeros(12 - len(page), page.shape[1])])


def _asked(g: torch.Generator) -> Sample:
    """A text, or a text behind what a page is read as."""
    count = LATENTS if chance(g) else 0
    sample = after(blanks(count), words(g))
    sample["image_embeds_position_mask"] = (sample["input_ids"] == IMAGE).long()
    if count:
        sample["flattened_patches"] = _padded_page(_page(g))[None]
    return sample


def _asked_batch(samples: Sequence[Sample]) -> Sample:
    keys = {"input_ids": 0, "labels": IGNORED, "image_embeds_position_mask": 0}
    return padded(samples, keys, mask="attention_mask") | joined(samples, ["flattened_patches"])


def _read(g: torch.Generator) -> Sample:
    page = _page(g)
    return {
        "labels": words(g),
        "flattened_patches": _padded_page(page),
        "attention_mask": (torch.arange(12) < len(page)).float(),
    }


def _boxed(g: torch.Generator) -> Sample:
    text = words(g)
    corners = torch.randint(0, BOXES // 2, (len(text), 2), generator=g)
    boxes = torch.cat([corners, corners + torch.randint(1, BOXES // 2, (len(text), 2), generator=g)], 1)
    return {
        "input_ids": text,
        "bbox": boxes,
        "pixel_values": torch.randn(3, 16, 16, generator=g),
        "labels": words(g),
    }


def _boxed_batch(samples: Sequence[Sample]) -> Sample:
    batch = padded(samples, {"input_ids": 0, "bbox": 0, "labels": IGNORED}, mask="attention_mask")
    return batch | {"pixel_values": torch.stack([s["pixel_values"] for s in samples])}


def _long(g: torch.Generator) -> Sample:
    return {"input_ids": words(g, 9, 40), "labels": words(g)}


def _patched(g: torch.Generator) -> Sample:
    count = int(chance(g))
    sample = after(blanks(16 * count), words(g))
    return sample | ({"pixel_values": torch.randn(1, 16, 48, generator=g)} if count else {})


def _shaped(g: torch.Generator) -> Sample:
    """Up to two images of even sizes of their own, padded to 16 patches; 2 x 2 patches make a token."""
    sizes = [(2 * integer(g, 1, 3), 2 * integer(g, 1, 3)) for _ in range(integer(g, 0, 3))]
    sample = after(blanks(sum(h * w // 4 for h, w in sizes)), words(g))
    if sizes:
        sample["pixel_values"] = torch.randn(len(sizes), 16, 48, generator=g)
        sample["pixel_attention_mask"] = (torch.arange(16) < torch.tensor([[h * w] for h, w in sizes])).long()
        sample["spatial_shapes"] = torch.tensor(sizes)
    return sample


def _shaped_batch(samples: Sequence[Sample]) -> Sample:
    keys = {"input_ids": 0, "labels": IGNORED}
    return padded(samples, keys, mask="attention_mask") | joined(
        samples, ["pixel_values", "pixel_attention_mask", "spatial_shapes"]
    )


ENTRIES = [
    Entry("kosmos2_5", "documents", kosmos2_5, _asked, _asked_batch),
    Entry("udop", "documents", udop, _boxed, _boxed_batch),
    Entry("pix2struct", "documents", pix2struct, _read),
    Entry("led", "documents", led, _long),
    Entry("fuyu", "documents", fuyu, _patched),
    Entry("lfm2_vl", "documents", lfm2_vl, _shaped, _shaped_batch),
]
