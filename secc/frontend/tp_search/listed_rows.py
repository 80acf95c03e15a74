"""Counts how many rows the experts of a list get for each row that enters their mixture, by running the model
on drawn samples.

Products of modules of their own do not tell that they are experts', so without this count no one would know
what `ep` divides and how many rows travel.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from xdsl.dialects.builtin import ModuleOp

from secc.cost.model.section_cost import LISTED_CHOICES_ATTRIBUTE
from secc.frontend.tp_search.expert_cuts import listed_sizes
from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.python_attributes import int_attr
from secc.runtime.errors import NotEnoughMemory
from secc.runtime.tensor_parallel.expert_lists import find_expert_list
from secc.runtime.training.eager_watch import run_forward

COUNTED_SAMPLES = 16
PERMILLE = 1000


def annotate_listed_rows(module: ModuleOp, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> None:
    """Writes on each block with experts in lists how many rows they get for each row that enters, in
    permille, the sum over the block's mixtures. Blocks stay without it if the model cannot run on the
    samples."""
    choices = count_listed_choices(model, batches)
    for path, block in graph_of(module).blocks.items():
        inside = [n for mixture, n in choices.items() if f"{mixture}.".startswith(f"{path}.")]
        if inside:
            block.attributes[LISTED_CHOICES_ATTRIBUTE] = int_attr(round(PERMILLE * sum(inside)))


def count_listed_choices(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the rows of all experts over the rows of their mixture, by the path of each mixture with
    experts in a list that the samples reach. The model keeps its buffers, and random numbers are drawn as if
    it had not run."""
    mixtures = {path: m for path, m in model.named_modules() if listed_sizes(m)}
    entered, taken = Counter[str](), Counter[str]()
    if not mixtures:
        return {}
    buffers = [(b, b.clone()) for b in model.buffers()]
    with contextlib.ExitStack() as stack:
        for path, mixture in mixtures.items():
            stack.enter_context(_counting(mixture, entered, path))
            for expert in mixture.get_submodule(find_expert_list(mixture)).children():
                stack.enter_context(_counting(expert, taken, path))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(contextlib.suppress(Exception))  # whatever the user's code raises
        for batch in batches[:COUNTED_SAMPLES]:
            with contextlib.suppress(NotEnoughMemory):  # of scores for words, often: mixtures have run then
                run_forward(model, batch)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return {path: taken[path] / rows for path, rows in entered.items() if rows}


def _counting(module: nn.Module, counts: Counter[str], path: str) -> torch.utils.hooks.RemovableHandle:
    """A hook that adds the rows of a module's first tensor of floats to `counts[path]`."""

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = tree_leaves((args, dict(kwargs)))
        first = next((t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()), None)
        counts[path] += 0 if first is None else first.shape[:-1].numel()

    return module.register_forward_pre_hook(count, with_kwargs=True)
