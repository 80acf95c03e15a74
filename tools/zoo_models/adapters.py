"""Frozen models trained through adapters: LoRA by `peft`, which must be installed for these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tools.zoo_models.encoder_decoder import t5
from tools.zoo_models.entry import Entry
from tools.zoo_models.experts import Distilled
from tools.zoo_models.samples import IGNORED, Sample, joined, padded, pictures, text_only, words
from tools.zoo_models.vision import llava

SUFFIXES = ("q_proj", "v_proj", ".q", ".v")  # queries and values


def adapted(model: nn.Module, only: str = "") -> nn.Module:
    """`model` frozen but for LoRA matrices, random ones, on the attention layers whose path has `only`."""
    from peft import LoraConfig, get_peft_model

    targets = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and only in n and n.endswith(SUFFIXES)
    ]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def lora_llava() -> nn.Module:
    """As LLaVA is fine-tuned: adapters in the language model, the projector trained whole, the tower
    frozen."""
    net = adapted(llava(), "language_model")
    net.get_submodule("base_model.model.model.multi_modal_projector").requires_grad_(True)
    return net


def lora_tower() -> nn.Module:
    """Adapters in the tower alone: the frozen language model owes the gradients of its input."""
    return adapted(llava(), "vision_tower")


def lora_t5() -> nn.Module:
    return adapted(t5())


def lora_student() -> nn.Module:
    net = Distilled()
    net.student = adapted(net.student)  # type: ignore[assignment]
    return net


def _collate(samples: Sequence[Sample]) -> Sample:
    return padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask") | joined(
        samples, ["pixel_values"]
    )


def _translation(g: torch.Generator) -> Sample:
    return {"input_ids": words(g), "labels": words(g)}


ENTRIES = [
    Entry("lora_llava", "adapters", lora_llava, pictures(16), _collate),
    Entry("lora_tower", "adapters", lora_tower, pictures(16), _collate),
    Entry("lora_t5", "adapters", lora_t5, _translation, _collate),
    Entry("lora_student", "adapters", lora_student, text_only),
]
