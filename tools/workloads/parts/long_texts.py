"""Long samples: one text (or video and text) a row, padded to the longest of a micro-batch, and their models.

Lengths follow Pareto's law, P(more than n) = (least / n) ** exponent, up to a longest length. No joint
distribution of long training data is published, so the exponents are assumptions: with exponent 1 from 4,096
to 262,144 tokens the median is 8k, and one sample in 20 has more than 64k. Texts are not packed: attention is
causal, so no token sees the padding after its text, and labels leave it out. Costs of attention then depend
exactly on the length of a row; in packed rows they would be means.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F

from parts.configs import Config
from parts.data import FIRST_WORD, IMAGE, SAMPLES, WORDS, qwen_images
from parts.packing import IGNORED, Sample


@dataclass(frozen=True)
class LongTexts(torch.utils.data.Dataset[Sample]):
    """Texts of `least` to `most` tokens with a tail of this exponent. Sample i is the same whenever it is
    read."""

    least: int
    most: int
    exponent: float = 1.0

    def __len__(self) -> int:
        return SAMPLES

    @property
    def small(self) -> LongTexts:
        """The same law with short texts, for small models."""
        return replace(self, least=6, most=6 * self.most // self.least)

    def length(self, i: int) -> int:
        """Tokens of sample i, by inversion of the law between `least` and `most`."""
        drawn = random.Random(f"length {i}").random()
        ratio = (self.least / self.most) ** self.exponent
        return round(self.least * (1 - drawn * (1 - ratio)) ** (-1 / self.exponent))

    def __getitem__(self, i: int) -> Sample:
        words = torch.randint(
            FIRST_WORD, WORDS, (self.length(i) + 1,), generator=torch.Generator().manual_seed(i)
        )
        return {"input_ids": words[:-1], "labels": words[1:]}

    def sizes(self, i: int) -> dict[str, int]:
        """The lengths of sample i's tensors by key, without making them."""
        return dict.fromkeys(("input_ids", "labels"), self.length(i))


# Articles of Wikipedia by their number of tokens, (more than, up to, articles): the dataset card of
# https://huggingface.co/datasets/seonglae/wikipedia_token, which counts 6.46 million.
WIKIPEDIA = (
    (64, 1024, 5_320_881),  # "up to 1,024" there
    (1024, 2048, 693_911),
    (2048, 4096, 300_935),
    (4096, 8192, 106_221),
    (8192, 16_384, 30_611),
    (16_384, 32_768, 4812),
    (32_768, 65_536, 1253),
    (65_536, 128_000, 46),
)


@dataclass(frozen=True)
class CountedTexts(LongTexts):
    """Texts with the lengths of a corpus, log-uniform between the limits of each of its classes (more than,
    up to, texts) that has more than `least` and at most `most` tokens; lengths are divided by `shrink`."""

    classes: tuple[tuple[int, int, int], ...] = WIKIPEDIA
    shrink: int = 1

    @property
    def small(self) -> CountedTexts:
        """The same corpus with texts 64 times shorter, for small models."""
        return replace(self, shrink=64)

    def length(self, i: int) -> int:
        """Tokens of sample i."""
        drawn = random.Random(f"length {i}")
        held = [c for c in self.classes if self.least <= c[0] < self.most]
        ((least, most, _),) = drawn.choices(held, [count for *_, count in held])
        length = least * (min(most, self.most) / least) ** drawn.random()
        return max(2, round(length / self.shrink))


@dataclass(frozen=True)
class Videos(torch.utils.data.Dataset[Sample]):
    """Videos of `least` to `most` tokens, in frames of `frame` tokens, each with a question and an answer of
    `words` tokens."""

    least: int
    most: int
    frame: int = 256
    words: int = 256

    def __len__(self) -> int:
        return SAMPLES

    @property
    def small(self) -> Videos:
        """The same law with frames of four tokens, for small models."""
        return Videos(8, 8 * self.most // self.least, frame=4, words=4)

    def frames(self, i: int) -> int:
        """Frames of sample i's video."""
        return max(1, LongTexts(self.least, self.most).length(i) // self.frame)

    def __getitem__(self, i: int) -> Sample:
        counts, tensors = qwen_images((self.frame,) * self.frames(i))
        words = torch.randint(
            FIRST_WORD, WORDS, (self.words + 1,), generator=torch.Generator().manual_seed(i)
        )
        seen = sum(counts)
        labels = torch.cat([torch.full((seen - 1,), IGNORED), words])
        return {"input_ids": torch.cat([torch.full((seen,), IMAGE), words[:-1]]), "labels": labels} | tensors

    def sizes(self, i: int) -> dict[str, int]:
        """The lengths of sample i's tensors by key, without making them."""
        counts, _ = qwen_images((self.frame,) * self.frames(i))
        tokens = sum(counts)
        return dict.fromkeys(("input_ids", "labels"), tokens + self.words) | {
            "pixel_values": tokens,
            "image_grid_thw": len(counts),
        }


def long_language_model(config: Config) -> nn.Module:
    """Embedding, layers and head for rows of up to 262,144 tokens, with PyTorch's attention."""
    config.max_position_embeddings = 262_144
    return T.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


class LongText(nn.Module):
    """Cross entropy of texts [samples, tokens], the mean over labels that are not -100."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model: Any = language_model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(self.language_model(input_ids=input_ids, use_cache=False).logits, labels)


class LongVideo(nn.Module):
    """Qwen's vision tower on the frames of videos, into a language model; cross entropy of the answers."""

    def __init__(self, language_model: Any, vision: Any) -> None:
        super().__init__()
        self.language_model: Any = language_model
        self.vision: Any = vision

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        pixel_values: torch.Tensor,
        image_grid_thw: torch.Tensor,
    ) -> torch.Tensor:
        """[samples, tokens]; `pixel_values` is [tokens of frames, 4 patches, values of a patch]."""
        embeds = self.language_model.get_input_embeddings()(input_ids)
        frames = pixel_values.flatten(0, 1).to(embeds.dtype)
        seen = self.vision(frames, grid_thw=image_grid_thw).pooler_output
        embeds = embeds.masked_scatter((input_ids == IMAGE)[..., None], seen)
        return _cross_entropy(self.language_model(inputs_embeds=embeds, use_cache=False).logits, labels)


class LongDistillation(nn.Module):
    """A frozen teacher's distribution and the labels: KL divergence and cross entropy, both means over labels
    that are not -100."""

    def __init__(self, teacher: Any, student: Any) -> None:
        super().__init__()
        self.teacher: Any = teacher.requires_grad_(False)
        self.student: Any = student

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(input_ids=input_ids, use_cache=False).logits
        learned = self.student(input_ids=input_ids, use_cache=False).logits
        divergence = F.kl_div(
            learned.float().log_softmax(-1), taught.float().log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        counted = labels != IGNORED
        return _cross_entropy(learned, labels) + (divergence * counted).sum() / counted.sum()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
