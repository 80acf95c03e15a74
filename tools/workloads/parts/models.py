"""The joined models over packed batches: encoders into a language model, teacher and student."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F

from parts.configs import Config, language_model
from parts.data import AUDIO, IMAGE
from parts.packing import IGNORED, offsets


class LanguageModel(nn.Module):
    """Tokens to logits, packed."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model: Any = language_model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """[1, tokens] -> logits [1, tokens, vocabulary]."""
        return self.logits(self.language_model.get_input_embeddings()(input_ids), position_ids, lengths)

    def logits(self, embeds: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embeddings [1, tokens, hidden] -> logits."""
        places = offsets(lengths)
        return self.language_model(
            inputs_embeds=embeds, position_ids=position_ids, cu_seq_lens_q=places, use_cache=False
        ).logits


class Multimodal(LanguageModel):
    """Qwen's vision tower, and Whisper's encoder if there is one, into a language model."""

    def __init__(self, language_model: Any, vision: nn.Module, audio: Any = None) -> None:
        super().__init__(language_model)
        self.vision = vision
        if audio is not None:
            self.audio = audio
            self.audio_projector = nn.Linear(audio.config.d_model, language_model.config.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        audio_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Features take the places of their placeholders; `pixel_values` is [tokens, 4 patches, values of a
        patch]."""
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = self.vision(
                pixel_values.flatten(0, 1).to(embeds.dtype), grid_thw=image_grid_thw
            ).pooler_output
            embeds = embeds.masked_scatter((input_ids == IMAGE)[..., None], seen)
        if input_features is not None:
            heard = self.audio(input_features.to(embeds.dtype)).last_hidden_state
            heard = self.audio_projector(heard.unflatten(1, (-1, 2)).mean(2))  # two frames make a token
            embeds = embeds.masked_scatter((input_ids == AUDIO)[..., None], heard[audio_mask])
        return self.logits(embeds, position_ids, lengths)


class Supervised(nn.Module):
    """Cross entropy of a model's logits, the mean over the labels that count."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.net(**inputs), labels)


class Tiled(LanguageModel):
    """A vision tower for images or tiles of one size, a projector with `merge` x `merge` patches a token, and
    a language model."""

    def __init__(
        self, language_model: nn.Module, vision_tower: nn.Module, projector: nn.Module, merge: int
    ) -> None:
        super().__init__(language_model)
        self.vision_tower, self.projector, self.merge = vision_tower, projector, merge

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Features take the places of their placeholders; the tower's class token is left out."""
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            patches = self.vision_tower(pixel_values.to(embeds.dtype)).last_hidden_state[:, 1:]
            embeds = embeds.masked_scatter(
                (input_ids == IMAGE)[..., None], self.projector(self._merged(patches))
            )
        return self.logits(embeds, position_ids, lengths)

    def _merged(self, patches: torch.Tensor) -> torch.Tensor:
        """[images, patches, width] -> [images, patches / merge^2, merge^2 * width], squares of patches side
        by side."""
        if self.merge == 1:
            return patches
        side = math.isqrt(patches.shape[1]) // self.merge
        squares = patches.unflatten(1, (side, self.merge, side, self.merge)).transpose(2, 3)
        return squares.flatten(3, 5).flatten(1, 2)


class Distillation(nn.Module):
    """A frozen teacher's distribution and the labels: KL divergence a token, and cross entropy."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(**inputs)
        learned = self.student(**inputs)
        divergence = F.kl_div(
            learned[0].float().log_softmax(-1),
            taught[0].float().log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        return cross_entropy(learned, labels) + divergence


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[1, tokens, vocabulary] and [1, tokens]: the mean over labels that are not -100."""
    return F.cross_entropy(logits[0].float(), labels[0], ignore_index=IGNORED)


def internvl(vision: Any, text: Config) -> nn.Module:
    """An InternViT, a projector over 2 x 2 patches, a language model."""
    config = T.InternVLConfig(vision_config=vision, text_config=text.to_dict())
    projector = T.models.internvl.modeling_internvl.InternVLMultiModalProjector(config)
    return Supervised(Tiled(language_model(text), T.InternVLVisionModel(vision), projector, merge=2))


def llava(vision: Any, text: Config) -> nn.Module:
    """CLIP's tower without the class token, a projector, a language model."""
    projector = T.models.llava.modeling_llava.LlavaMultiModalProjector(
        T.LlavaConfig(vision_config=vision, text_config=text.to_dict())
    )
    return Supervised(Tiled(language_model(text), T.CLIPVisionModel(vision), projector, merge=1))


def frozen(model: nn.Module, *parts: str) -> nn.Module:
    """The model with the modules of these names frozen."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in parts:
            module.requires_grad_(False)
    return model
