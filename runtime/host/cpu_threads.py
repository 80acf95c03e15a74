"""The number of threads that PyTorch's operators use on the CPU while a model is compared with its plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Operators of a model up to this size take about as long as waking a second thread does. On a busy machine
# they would take several times as long, because threads that wait for each other keep their cores busy.
MOST_BYTES_OF_ONE_THREAD = 8 << 20


@contextmanager
def restore_threads() -> Iterator[None]:
    """Restores the number of threads when the block ends."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def limit_threads(model: nn.Module) -> None:
    """Lets operators use one thread if the model's parameters take at most `MOST_BYTES_OF_ONE_THREAD` in
    float32. The caller is inside `restore_threads`."""
    if sum(p.numel() * 4 for p in model.parameters()) <= MOST_BYTES_OF_ONE_THREAD:
        torch.set_num_threads(1)
