"""Counts how many rows the routers of a model send to each expert, by running it on drawn samples.

The busiest part of n parts of the experts decides how long a mixture takes, so that is what is kept: its rows
over those of the mean part. Parts on n replicas get the rows of at least n samples, so rows are added over n
samples first; then mixtures and groups of samples are averaged by their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from xdsl.dialects.builtin import ModuleOp

from secc.cost.model.section_cost import EXPERT_PARTS_ATTRIBUTE
from secc.frontend.tp_search.expert_cuts import count_of_experts, expert_sizes
from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.python_attributes import int_list_attr
from secc.runtime.errors import NotEnoughMemory
from secc.runtime.training.eager_watch import run_forward

COUNTED_SAMPLES = 16
PERMILLE = 1000

# Path of a mixture -> rows of each expert [E], by sample.
RoutingCounts = Mapping[str, Sequence[torch.Tensor]]


def count_routing(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> RoutingCounts:
    """Returns the rows that each expert of the model's mixtures gets from each of the first batches.

    Mixtures that are called without indices of experts, or not by every batch, are left out, and all are if
    the model's code raises. The model keeps its buffers, and random numbers are drawn as if it had not run.
    """
    mixtures = {path: m for path, m in model.named_modules() if expert_sizes(m)}
    counts: dict[str, list[torch.Tensor]] = {path: [] for path in mixtures}
    some = batches[:COUNTED_SAMPLES]
    if not mixtures or not some:
        return {}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with ExitStack() as stack:
            for path, mixture in mixtures.items():
                hook = _make_hook(counts[path], count_of_experts(expert_sizes(mixture)))
                stack.enter_context(mixture.register_forward_pre_hook(hook, with_kwargs=True))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.no_grad())
            for batch in some:
                with suppress(NotEnoughMemory):  # of scores for words, often: mixtures have run then
                    run_forward(model, batch)
    except Exception:  # code that cannot run without gradients: loads are assumed, as for large models
        return {}
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return {path: found for path, found in counts.items() if len(found) == len(some)}


def _make_hook(counts: list[torch.Tensor], experts: int):
    """A hook that counts the rows of each expert from the indices that a mixture is called with."""

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        indices = [
            t
            for t in tree_leaves((args, dict(kwargs)))
            if isinstance(t, torch.Tensor) and t.dtype in (torch.int64, torch.int32) and t.dim() > 1
        ]
        if len(indices) == 1:
            counts.append(torch.bincount(indices[0].flatten().cpu(), minlength=experts)[:experts])

    return count


def annotate_routing(module: ModuleOp, counts: RoutingCounts) -> None:
    """Writes on each block with counted mixtures the load of the busiest of n parts over the mean one, in
    permille, for each n that divides their experts: [n, load, n, load, ...]."""
    for path, block in graph_of(module).blocks.items():
        inside = [rows for mixture, rows in counts.items() if f"{mixture}.".startswith(f"{path}.")]
        if inside and len({len(rows[0]) for rows in inside}) == 1:
            loads = busiest_parts(inside)
            block.attributes[EXPERT_PARTS_ATTRIBUTE] = int_list_attr([n for pair in loads for n in pair])


def busiest_parts(mixtures: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, int]]:
    """(number of parts, load of the busiest one over the mean one in permille) of mixtures with equally many
    experts, each with rows [E] by sample."""
    experts, samples = len(mixtures[0][0]), len(mixtures[0])
    loads: list[tuple[int, int]] = []
    for parts in (n for n in range(2, experts + 1) if experts % n == 0):
        busiest, total = 0, 0
        for rows in mixtures:
            for first in range(0, samples, parts):
                of_part = torch.stack(list(rows[first : first + parts])).sum(0).view(parts, -1).sum(1)
                busiest, total = busiest + int(of_part.max()), total + int(of_part.sum())
        loads.append((parts, max(PERMILLE, PERMILLE * parts * busiest // max(1, total))))
    return loads
