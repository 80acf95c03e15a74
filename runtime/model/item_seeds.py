"""Seeds the random generators for each sample, so that `dataset()[i]` is a function of (seed, epoch, i)
wherever it is loaded.

Sections that load the same sample on different ranks must see the same augmentation, and the compiler must
see what the ranks will see. So the generators of torch, NumPy and Python are seeded before an item is loaded
and restored afterwards, which also keeps data loading out of the model's random stream. Restoring takes
longer than loading a small item (0.1 ms for NumPy alone), so code that loads many items in a row restores
once, with `shared_rng_restore`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def derive_item_seed(seed: int, epoch: int, i: int) -> int:
    """Return a 63-bit seed for sample `i`: the same on every machine, well mixed for neighbouring
    arguments."""
    digest = hashlib.blake2b(f"{seed},{epoch},{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore torch's CPU generator, NumPy's global one (if NumPy is loaded) and Python's at the end."""
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
    """Seed torch's CPU generator, NumPy's global one (if loaded) and Python's."""
    numpy = sys.modules.get("numpy")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)


@contextmanager
def seeded_rngs(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators, that of an accelerator `device`, too, and restore them at the end."""
    with preserve_rng_states(), ExitStack() as stack:
        if device is not None and device.type != "cpu":
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
            torch.get_device_module(device).manual_seed(seed)
        seed_rngs(seed)
        yield


class _DeferredRestore:
    """Saves the generators' states when the first item is loaded, and restores them once at the end."""

    def __init__(self) -> None:
        self.stack, self.states_saved = ExitStack(), False

    def save_states(self) -> None:
        if not self.states_saved:
            self.states_saved = True
            self.stack.enter_context(preserve_rng_states())


_open_restores: list[_DeferredRestore] = []


@contextmanager
def shared_rng_restore() -> Iterator[None]:
    """Restore the generators once at the end instead of after each item. Only items may draw random numbers
    inside."""
    loan = _DeferredRestore()
    _open_restores.append(loan)
    try:
        with loan.stack:
            yield
    finally:
        _open_restores.pop()


def load_seeded_item(dataset: Any, i: int, seed: int = 0, epoch: int = 0, first: int = 0) -> Any:
    """Return `dataset[i - first]`, loaded with torch, NumPy and Python seeded by (seed, epoch, i)."""
    return call_seeded(lambda: dataset[i - first], derive_item_seed(seed, epoch, i))


def call_seeded(call: Callable[[], T], item_seed: int) -> T:
    """Return `call()`, made with the generators seeded, and restore them as `shared_rng_restore` says."""
    if not _open_restores:
        with seeded_rngs(item_seed):
            return call()
    _open_restores[-1].save_states()
    seed_rngs(item_seed)
    return call()


def choose_survey_indices(length: int, count: int = 64, seed: int = 0) -> list[int]:
    """Choose at most `count` indices that represent a dataset of `length` samples: the first ones and as many
    random others, ascending."""
    first = list(range(min(length, (count + 1) // 2)))
    remaining = range(len(first), length)
    others = random.Random(seed).sample(remaining, min(count - len(first), len(remaining)))
    return first + sorted(others)
