"""What a Hugging Face model says itself of how its layers are cut: `base_model_tp_plan` of its configuration,
patterns of module names.

Its authors' choice is tried first; it is shown exact like any other, and where it is not, the layers' own
code is asked.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn


def hf_column_parallel(model: nn.Module, path: str) -> list[str]:
    """The modules inside the one at `path` that the model's plan cuts by outputs, their paths counted from
    it; [] for no plan."""
    names = path.split(".")
    for depth in range(len(names), -1, -1):
        owner = model.get_submodule(".".join(names[:depth]))
        plan = getattr(getattr(owner, "config", None), "base_model_tp_plan", None)
        if isinstance(plan, dict):
            inner = ".".join(names[depth:])
            cut = [
                pattern for pattern, style in plan.items() if isinstance(style, str) and "colwise" in style
            ]
            found = [
                n
                for n, _ in model.get_submodule(path).named_modules()
                if any(fnmatchcase(f"{inner}.{n}".strip("."), p) for p in cut)
            ]
            if found:
                return found
    return []
