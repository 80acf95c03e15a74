"""Finds gradients that the user's code computes or changes while a backward runs: by classes of
`autograd.Function`, and by hooks that forward registers on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType

import torch
from torch import nn

from secc.runtime.model.kept_values import user_classes, user_files
from secc.runtime.model.source_lines import format_source_line
from secc.runtime.model.user_file import UserModel


@dataclass(frozen=True)
class UserBackwards:
    """functions: classes with a backward. hooked: methods that register hooks on tensors."""

    functions: tuple[type[torch.autograd.Function], ...]
    hooked: tuple[FunctionType, ...]

    @property
    def qualified_names(self) -> list[str]:
        """What they are called."""
        return [f.__qualname__ for f in (*self.functions, *self.hooked)]

    @property
    def source_line(self) -> str:
        """The file:line of the first one."""
        backwards = (vars(f)["backward"].__func__ for f in self.functions)
        code = next((f.__code__ for f in (*backwards, *self.hooked) if isinstance(f, FunctionType)), None)
        return format_source_line(code, code.co_firstlineno) if code is not None else ""


def user_backwards(model: nn.Module, user: UserModel) -> UserBackwards:
    """Returns the classes and methods of the user's files that may take part in a backward."""
    values = [value for file in user_files(model, user) for value in file.values()]
    classes = (v for v in values if isinstance(v, type) and issubclass(v, torch.autograd.Function))
    functions = (c for c in classes if isinstance(vars(c).get("backward"), staticmethod))
    methods = (f for c in user_classes(model) for f in vars(c).values())
    hooked = (f for f in (*values, *methods) if isinstance(f, FunctionType) and _registers_hooks(f))
    return UserBackwards(tuple(dict.fromkeys(functions)), tuple(dict.fromkeys(hooked)))


def _registers_hooks(function: FunctionType) -> bool:
    return "register_hook" in function.__code__.co_names
