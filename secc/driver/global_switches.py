"""Explains a plan that is not exact because forward switches a class attribute or a global of a Python module
while it runs, as code does that turns adapters off for a reference. Ranks follow attributes of modules
(`secc.runtime.sections.module_settings`); what all modules share, they keep as the import left it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from secc.runtime.model.source_lines import forward_source_line
from secc.runtime.training.eager_watch import run_forward

_PLAIN_TYPES = (bool, int, float, str, type(None))
_LIBRARIES = ("torch", "transformers")  # their globals are no switches of the user's


@dataclass(frozen=True)
class GlobalSwitch:
    """A name that has two values during one forward, with the line of the forward that reads another one
    than the first call of a module did."""

    name: str
    first: object
    other: object
    where: str


def find_global_switch(model: nn.Module, batch: Mapping[str, Any]) -> GlobalSwitch | None:
    """Runs forward once. Returns the first plain class attribute or global, of the files of the model's
    modules, that is not the same in all calls of a module; None if there is none."""
    found: list[GlobalSwitch] = []
    first = dict[str, dict[str, object]]()

    def compare_values(module: nn.Module, _args: Any) -> None:
        values = _read_shared_values(type(module))
        before = first.setdefault(str(type(module)), values)
        # Texts, since not-a-number differs from itself.
        for name in (n for n in values if n in before and repr(values[n]) != repr(before[n])):
            found.append(GlobalSwitch(name, before[name], values[name], forward_source_line(type(module))))

    hooks = [m.register_forward_pre_hook(compare_values) for path, m in model.named_modules() if path]
    try:
        run_forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(found), None)


def _read_shared_values(module_class: type) -> dict[str, object]:
    """Returns the plain attributes of a class, inherited ones too, and the plain globals of its file."""
    values = dict[str, object]()
    for cls in (c for c in module_class.__mro__ if not c.__module__.startswith(_LIBRARIES)):
        values |= {f"{cls.__qualname__}.{name}": value for name, value in vars(cls).items()}
        values |= vars(sys.modules.get(cls.__module__, sys))
    return {name: v for name, v in values.items() if isinstance(v, _PLAIN_TYPES) and "__" not in name}
