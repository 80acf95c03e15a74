"""Lets the layers of this rank's sections work on rows of sequences (`secc.runtime.context_parallel`)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from secc.runtime.context_parallel.row_mode import gather_inputs, run_on_own_rows, split_first_input
from secc.runtime.plan.schema import Plan
from secc.runtime.sections.recompute import recompute_units


def install_row_modules(plan: Plan, model: nn.Module, rank: int) -> None:
    """Wraps the modules of this rank's sections that work row by row. Call it before recomputation is
    installed, which wraps whole layers."""
    for section in plan.sections:
        if section.mesh.cp > 1 and rank in section.mesh.ranks:
            wrap_row_modules(model, section.row_modules)


def wrap_row_modules(root: nn.Module, paths: Iterable[str]) -> None:
    """Wraps modules at these paths, relative to `root`, that work row by row."""
    for path in paths:
        module = root.get_submodule(path)
        module.forward = run_on_own_rows(module.forward)


def install_row_layers(plan: Plan, model: nn.Module, rank: int) -> None:
    """Wraps the layers of this rank's sections with cp: those that the plan lists get rows of their first
    input, the others whole inputs."""
    paths = {m: n for n, m in model.named_modules(remove_duplicate=False)}
    for section in plan.sections:
        if section.mesh.cp == 1 or rank not in section.mesh.ranks:
            continue
        listed = set(section.row_layers)
        for block in section.blocks:
            for layer in recompute_units(model.get_submodule(block)):
                wrap = split_first_input if paths[layer] in listed else gather_inputs
                layer.forward = wrap(layer.forward)
