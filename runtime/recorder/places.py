"""Which line of the user's code (or of a library that the user calls) caused an op: `file:line`, for nodes and for messages.

Random ops are named by the module that runs them and the line of its own code that asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType

import torch
from torch import nn

_CALL = nn.Module._call_impl.__code__  # pyright: ignore[reportFunctionMemberAccess]
_INTERNAL = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2], Path(__file__).resolve().parents[1]))


@cache
def is_internal(filename: str) -> bool:
    return filename.startswith(_INTERNAL) or filename.startswith("<")


def place() -> str:
    """`file:line` of the innermost frame that belongs neither to torch nor to secc, "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_internal(frame.f_code.co_filename):
            return short_place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def paths_of(model: nn.Module) -> dict[int, str]:
    """The path of each module by its id; valid as long as the model lives."""
    return {id(module): path for path, module in model.named_modules()}


def drawer(paths: Mapping[int, str]) -> str:
    """`path@file:line` of the random op that runs now: the innermost module with one of these paths, and the line of its own code.

    Of a module like nn.Dropout, which may be called from several places, it is the line that calls it; there is none where torch's own
    code draws. Nothing further outside counts, so that the name does not depend on how a plan calls the user's modules.
    """
    frame, place, path = sys._getframe(1), "", None
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            known = paths.get(id(module))
            if known is not None and (place or path is not None or not _is_bare(module)):
                return _joined(known if path is None else path, place)
            path = known if path is None else path
        elif not place and not is_internal(frame.f_code.co_filename):
            place = short_place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return _joined(path or "", place)


def _is_bare(module: nn.Module) -> bool:
    """Whether a module is torch's and has neither weights nor parts."""
    return type(module).__module__.startswith("torch.nn.") and not module._parameters and not module._modules


def _joined(path: str, place: str) -> str:
    return f"{path}@{place}" if place else path


def class_place(cls: type) -> str:
    """`file:line` of the forward method of a module's class, "" if it has no source."""
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    wrapped = getattr(cls, "forward", None)
    while (inner := getattr(wrapped, "__wrapped__", None)) is not None:
        wrapped = inner
        code = getattr(inner, "__code__", code)
    return short_place(code, code.co_firstlineno) if isinstance(code, CodeType) else ""


def short_place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
