"""The user's own `torch.autograd.Function`s between modules: what a plan writes down of one, and how a rank
finds it again.

Glue is recorded below autograd, where a Function's own backward is lost, so that its call is kept whole: the
plan names the class, and the section applies it from the user's model file or from the module that it is
imported from.
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

FUNCTION_PREFIX = "function."  # of the target of such a call in the IR


@dataclass(frozen=True)
class UserFunction:
    """A class as a plan names it: `module` is "" for the user's model file. Equal for the same class of two
    imports of the file."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{FUNCTION_PREFIX}{self.module}:{self.name}" if self.module else FUNCTION_PREFIX + self.name

    def bind_to_model(self, model: nn.Module) -> UserFunctionCall:
        """The function, for a model made by the user's file. Raises ImportError or AttributeError where it is
        not there."""
        source = (
            importlib.import_module(self.module) if self.module else sys.modules[model_file_module(model)]
        )
        return UserFunctionCall(self, operator.attrgetter(self.name)(source))

    @staticmethod
    def parse(text: str) -> UserFunction:
        """The function of a target in the IR, with or without the prefix."""
        module, _, name = text.removeprefix(FUNCTION_PREFIX).rpartition(":")
        return UserFunction(module, name)


class UserFunctionCall:
    """Applies a class; of what that returns only the tensors come back: one alone, or a tuple. Equal where
    the function is."""

    def __init__(self, function: UserFunction, cls: Any) -> None:
        self.function, self._cls = function, cls
        self.__name__ = str(function)

    def __call__(self, *args: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = returned_tensors(self._cls.apply(*args))
        return found[0] if len(found) == 1 else found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunctionCall) and other.function == self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __str__(self) -> str:
        return str(self.function)


def returned_tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in what a Function returns: a tensor, or a tuple of anything."""
    return tuple(
        t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)
    )


def find_user_function(cls: Any) -> UserFunctionCall | None:
    """How a plan can name a class; None for one that is made inside of a function, or whose module does not
    have it."""
    name = UserFunction("" if is_model_file_module(cls.__module__) else cls.__module__, cls.__qualname__)
    try:
        found = operator.attrgetter(cls.__qualname__)(sys.modules[cls.__module__])
    except (KeyError, AttributeError):
        return None
    return UserFunctionCall(name, cls) if found is cls and cls.__module__ != "__main__" else None
