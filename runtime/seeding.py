"""Which random numbers a sample is made with: `dataset()[i]` is a function of (seed, epoch, i), wherever it is loaded.

Two sections that load the same sample on different ranks must see the same augmentation, and the compiler must see what the
ranks will see. So the generators of torch, NumPy and Python are seeded before an item is drawn and put back after it, which keeps
the loading of data out of the model's random stream.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def item_seed(seed: int, epoch: int, i: int) -> int:
    """A 63-bit seed for sample `i`, the same on every machine, well mixed for neighbouring arguments."""
    digest = hashlib.blake2b(f"{seed},{epoch},{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's CPU generator, NumPy's global one (if NumPy is loaded) and Python's start from `seed`, and are restored afterwards."""
    numpy = sys.modules.get("numpy")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def seeded_item(dataset: Any, i: int, seed: int = 0, epoch: int = 0) -> Any:
    """`dataset[i]` with torch, NumPy and Python seeded by (seed, epoch, i)."""
    with seeded(item_seed(seed, epoch, i)):
        return dataset[i]


def survey_indices(length: int, count: int = 64, seed: int = 0) -> list[int]:
    """The samples that stand for a dataset of `length`: its first ones and as many random others, in order, at most `count`."""
    first = list(range(min(length, (count + 1) // 2)))
    rest = range(len(first), length)
    others = random.Random(seed).sample(rest, min(count - len(first), len(rest)))
    return first + sorted(others)
