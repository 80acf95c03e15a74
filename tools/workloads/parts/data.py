"""Datasets of the mixes: real keys and shapes; token ids are drawn, images and sounds are one drawn row
repeated.

Placeholders of images and audio come before the text, as many as the encoders give features. Sample i is the
same whenever it is read.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from parts.mix import FRAMES_PER_SECOND, Content, distillation, multimodal
from parts.packing import IGNORED, Sample

IMAGE, AUDIO, FIRST_WORD, WORDS = 1, 2, 10, 500  # ids; small vocabularies of test models hold them, too
CLIP_SECONDS, AUDIO_TOKENS, MELS = 30, 750, 128
SAMPLES = 100_000
SHRINK = 32

Images = Callable[
    [tuple[int, ...]], tuple[list[int], Sample]
]  # tokens asked for of each image -> tokens it gets, and its tensors


@dataclass(frozen=True)
class Mix(torch.utils.data.Dataset[Sample]):
    """Samples of text; with `images` a share of them has images, made by that function, and a share `audio`
    has a clip.

    The share with images is IMAGE_SHARE of the environment, for other mixes. `shrink`: lengths of texts and
    tokens of images are so many times smaller.
    """

    images: Images | None = None
    p_image: float = field(default_factory=lambda: float(os.environ.get("IMAGE_SHARE", "0.33")))
    p_audio: float = 0.0
    seed: int = 0
    long_text: bool = field(default=False)
    shrink: int = 1

    def __len__(self) -> int:
        return SAMPLES

    @property
    def small(self) -> Mix:
        """The same mix with short samples, for small models."""
        return replace(self, shrink=SHRINK)

    def content(self, i: int) -> Content:
        """What sample i holds."""
        r = random.Random(f"{self.seed} {i}")
        if self.long_text:
            return distillation(r).shrunk(self.shrink)
        return multimodal(
            r, self.images is not None and r.random() < self.p_image, r.random() < self.p_audio
        ).shrunk(self.shrink)

    def __getitem__(self, i: int) -> Sample:
        content = self.content(i)
        counts, tensors = (
            self.images(content.images) if self.images is not None and content.images else ([], {})
        )
        places = [torch.full((n,), IMAGE) for n in counts]
        if content.frames:
            heard = content.frames // 2
            tensors |= {"input_features": _clip(), "audio_mask": (torch.arange(AUDIO_TOKENS) < heard)[None]}
            places.append(torch.full((heard,), AUDIO))
        words = torch.randint(
            FIRST_WORD, WORDS, (content.text + 1,), generator=torch.Generator().manual_seed(i)
        )
        before = sum(map(len, places))
        # The token after each one is its label; where no word comes next there is none.
        labels = torch.cat([torch.full((max(before - 1, 0),), IGNORED), words[: min(before, 1)], words[1:]])
        return {"input_ids": torch.cat([*places, words[:-1]]), "labels": labels} | tensors

    def sizes(self, i: int) -> dict[str, int]:
        """The lengths of sample i's tensors by key, without making them."""
        content = self.content(i)
        counts, tensors = (
            self.images(content.images) if self.images is not None and content.images else ([], {})
        )
        tokens = content.text + sum(counts) + content.frames // 2
        audio = {"input_features": 1, "audio_mask": 1} if content.frames else {}
        return {"input_ids": tokens, "labels": tokens} | {k: len(v) for k, v in tensors.items()} | audio


@cache
def _drawn(*shape: int) -> torch.Tensor:
    """The row that is repeated; it is drawn once, because sizes are asked of thousands of samples."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _clip() -> torch.Tensor:
    """A clip, filled up to 30 s as Whisper's encoder wants it; two spectral frames make one of the
    encoder's."""
    return _drawn(MELS, 1).expand(MELS, 2 * FRAMES_PER_SECOND * CLIP_SECONDS)[None]


def qwen_images(tokens: tuple[int, ...]) -> tuple[list[int], Sample]:
    """Images of Qwen's towers: a grid that is nearly square, four patches of 2 x 3 x 14 x 14 values next to
    each other a token."""
    grids = [(h, max(1, round(n / h))) for n in tokens for h in [max(1, math.isqrt(n))]]
    counts = [h * w for h, w in grids]
    thw = torch.tensor([[1, 2 * h, 2 * w] for h, w in grids])
    return counts, {
        "pixel_values": _drawn(1, 4, 2 * 3 * 14 * 14).expand(sum(counts), -1, -1),
        "image_grid_thw": thw,
    }


def tiled_images(
    tokens: tuple[int, ...], size: int = 448, tile: int = 256, most: int = 12
) -> tuple[list[int], Sample]:
    """Images cut into 1 to `most` square tiles of `size` pixels with `tile` tokens each."""
    tiles = [min(most, max(1, round(n / tile))) for n in tokens]
    return [tile * n for n in tiles], {
        "pixel_values": _drawn(1, 3, size, size).expand(sum(tiles), -1, -1, -1)
    }


def clip_images(tokens: tuple[int, ...]) -> tuple[list[int], Sample]:
    """Images of 336 x 336 pixels with 576 tokens each, whatever is asked for."""
    return tiled_images(tokens, 336, 576, 1)
