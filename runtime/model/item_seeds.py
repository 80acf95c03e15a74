"""Which random numbers a sample is made with: `dataset()[i]` is a function of (seed, epoch, i), wherever it
is loaded.

Two sections that load the same sample on different ranks must see the same augmentation, and the compiler
must see what the ranks will see. So the generators of torch, NumPy and Python are seeded before an item is
drawn and put back after it, which keeps the loading of data out of the model's random stream. Putting them
back takes longer than drawing a small item (NumPy's alone 0.1 ms), so who draws many in a row borrows them
for all of these.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def derive_item_seed(seed: int, epoch: int, i: int) -> int:
    """A 63-bit seed for sample `i`, the same on every machine, well mixed for neighbouring arguments."""
    digest = hashlib.blake2b(f"{seed},{epoch},{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def preserve_rng_states() -> Iterator[None]:
    """torch's CPU generator, NumPy's global one (if NumPy is loaded) and Python's are afterwards as they
    were."""
    numpy = sys.modules.get("numpy")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def seed_rngs(seed: int) -> None:
    """Seed the three generators."""
    numpy = sys.modules.get("numpy")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)


@contextmanager
def seeded_rngs(seed: int) -> Iterator[None]:
    """The generators start from `seed` inside, and are put back afterwards."""
    with preserve_rng_states():
        seed_rngs(seed)
        yield


class _DeferredRestore:
    """Items that put the generators back together, at the end, if there are any."""

    def __init__(self) -> None:
        self.stack, self.states_saved = ExitStack(), False

    def save_states(self) -> None:
        if not self.states_saved:
            self.states_saved = True
            self.stack.enter_context(preserve_rng_states())


_open_restores: list[_DeferredRestore] = []


@contextmanager
def shared_rng_restore() -> Iterator[None]:
    """Inside, where nothing but items is drawn, they leave the generators as they are; these are put back at
    the end."""
    loan = _DeferredRestore()
    _open_restores.append(loan)
    try:
        with loan.stack:
            yield
    finally:
        _open_restores.pop()


def load_seeded_item(dataset: Any, i: int, seed: int = 0, epoch: int = 0) -> Any:
    """`dataset[i]` with torch, NumPy and Python seeded by (seed, epoch, i)."""
    own = derive_item_seed(seed, epoch, i)
    if not _open_restores:
        with seeded_rngs(own):
            return dataset[i]
    _open_restores[-1].save_states()
    seed_rngs(own)
    return dataset[i]


def choose_survey_indices(length: int, count: int = 64, seed: int = 0) -> list[int]:
    """The samples that stand for a dataset of `length`: its first ones and as many random others, in order,
    at most `count`."""
    first = list(range(min(length, (count + 1) // 2)))
    rest = range(len(first), length)
    others = random.Random(seed).sample(rest, min(count - len(first), len(rest)))
    return first + sorted(others)
