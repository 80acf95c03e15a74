"""The user's own `torch.autograd.Function`s between modules: how a plan names one, and how a rank finds it
again.

Glue is recorded below autograd, where a Function's own backward would be lost. So its call is recorded as one
op: the plan names the class, and the section applies it, from the user's model file or from the module that
it is imported from.
"""

from __future__ import annotations

import importlib
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from secc.runtime.model.user_file import is_model_file_module, model_file_module
from secc.runtime.plan.schema import FUNCTION_PREFIX


@dataclass(frozen=True)
class UserFunction:
    """The name of a Function in a plan: `module` is "" for the user's model file. Equal for the same class in
    two imports of the file."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{FUNCTION_PREFIX}{self.module}:{self.name}" if self.module else FUNCTION_PREFIX + self.name

    def bind_to_model(self, model: nn.Module) -> UserFunctionCall:
        """Return the callable for a model that was made by the user's file. Raises ImportError or
        AttributeError if the class cannot be found."""
        source = (
            importlib.import_module(self.module) if self.module else sys.modules[model_file_module(model)]
        )
        return UserFunctionCall(self, operator.attrgetter(self.name)(source))

    @staticmethod
    def parse(text: str) -> UserFunction:
        """Parse the target of an op in the IR, with or without the prefix."""
        module, _, name = text.removeprefix(FUNCTION_PREFIX).rpartition(":")
        return UserFunction(module, name)


class UserFunctionCall:
    """Applies a Function and returns only the tensors of its result: one alone, or a tuple. Equal if the
    function's name is equal."""

    def __init__(self, function: UserFunction, cls: Any) -> None:
        self.function, self._cls = function, cls
        self.__name__ = str(function)

    def __call__(self, *args: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        tensors = returned_tensors(self._cls.apply(*args))
        return tensors[0] if len(tensors) == 1 else tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunctionCall) and other.function == self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __str__(self) -> str:
        return str(self.function)


def returned_tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the result of a Function, which is a tensor or a tuple of anything."""
    return tuple(
        t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)
    )


def find_user_function(cls: Any) -> UserFunctionCall | None:
    """Return the callable for a class that a plan can name; None for a class that is made inside a function
    or cannot be imported by its name."""
    name = UserFunction("" if is_model_file_module(cls.__module__) else cls.__module__, cls.__qualname__)
    try:
        imported = operator.attrgetter(cls.__qualname__)(sys.modules[cls.__module__])
    except (KeyError, AttributeError):
        return None
    return UserFunctionCall(name, cls) if imported is cls and cls.__module__ != "__main__" else None
