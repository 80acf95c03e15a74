"""secc: a section compiler for compound training models. See README.md and docs/guide/python.md.

Importing this package imports nothing else; a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secc.api.export import export
    from secc.api.model import Model, load
    from secc.api.plan import Plan, check, compile
    from secc.errors import UserError
    from secc.runtime.training.trainer import Trainer

__version__ = "0.2.0"
__all__ = ["Model", "Plan", "Trainer", "UserError", "__version__", "check", "compile", "export", "load"]

_HOMES = {
    "Model": "secc.api.model",
    "load": "secc.api.model",
    "Plan": "secc.api.plan",
    "check": "secc.api.plan",
    "compile": "secc.api.plan",
    "export": "secc.api.export",
    "UserError": "secc.errors",
    "Trainer": "secc.runtime.training.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'secc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
