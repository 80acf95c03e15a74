"""The sample mixes: how many tokens, images and audio frames a sample has.

No joint distribution of images, tokens and text in training data is published, so these are assumptions: a
sample has images with a given probability, one and a geometric number more (2.5 on average); tokens of an
image are lognormal (mean 800, coefficient of variation 1, 64 to 4,096); text that accompanies images is
lognormal with mean 500, text alone with mean 1,500 and at most 8,192 tokens, and with mean 3,000 in
distillation; audio lasts 5 to 30 s, 50 encoder frames and 25 tokens a second.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

FRAMES_PER_SECOND = 50


@dataclass(frozen=True)
class Content:
    """What one sample holds: tokens of text, tokens of each image, audio frames (0: no audio)."""

    text: int
    images: tuple[int, ...] = ()
    frames: int = 0

    def shrunk(self, by: int) -> Content:
        """So many times shorter texts, and images of fewer tokens."""
        return replace(self, text=max(2, self.text // by), images=tuple(max(4, n // by) for n in self.images))


def lognormal(r: random.Random, mean: float, least: int = 1, most: int = 10**6) -> int:
    """A number with this mean and a coefficient of variation of 1, cut to a range."""
    sigma = math.sqrt(math.log(2))
    return min(most, max(least, round(r.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def multimodal(r: random.Random, image: bool, audio: bool = False) -> Content:
    """A sample of text, with images and with audio if asked for."""
    number = 1 + int(math.log(1 - r.random()) / math.log(0.6)) if image else 0
    images = tuple(lognormal(r, 800, 64, 4096) for _ in range(number))
    frames = round(FRAMES_PER_SECOND * r.uniform(5, 30)) if audio else 0
    return Content(lognormal(r, 500) if image else lognormal(r, 1500, 1, 8192), images, frames)


def distillation(r: random.Random) -> Content:
    """A sample of text for a teacher and a student."""
    return Content(lognormal(r, 3000, 1, 8192))
