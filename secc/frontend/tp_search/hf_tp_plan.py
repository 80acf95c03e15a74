"""Reads a Hugging Face model's own tensor-parallel plan: `base_model_tp_plan` of its configuration,
patterns of module names.

Its authors' choice is tried first and verified like any other; if it is not exact, a mapping is searched.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn


def hf_column_parallel(model: nn.Module, path: str) -> list[str]:
    """Returns the modules inside the one at `path` that the model's plan splits by outputs, with paths
    relative to it; [] without a plan."""
    names = path.split(".")
    for depth in range(len(names), -1, -1):
        owner = model.get_submodule(".".join(names[:depth]))
        plan = getattr(getattr(owner, "config", None), "base_model_tp_plan", None)
        if isinstance(plan, dict):
            inner = ".".join(names[depth:])
            patterns = [
                pattern for pattern, style in plan.items() if isinstance(style, str) and "colwise" in style
            ]
            paths = [
                n
                for n, _ in model.get_submodule(path).named_modules()
                if any(fnmatchcase(f"{inner}.{n}".strip("."), p) for p in patterns)
            ]
            if paths:
                return paths
    return []
