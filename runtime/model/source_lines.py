"""Which line of the user's code (or of a library that the user calls) caused an op: `file:line`, for nodes
and for messages.

Random ops are named by the module that runs them and the lines that led to them, from the op up to the user's
forward.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType

import torch
from torch import nn

SourceLines = tuple[str, ...]  # `file:line` of calls, innermost first

_MODULE_CALL_CODE = nn.Module._call_impl.__code__  # pyright: ignore[reportFunctionMemberAccess]
_INTERNAL_FOLDERS = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],
        Path(__file__).resolve().parents[1],
    )
)


@cache
def is_internal_file(filename: str) -> bool:
    return filename.startswith(_INTERNAL_FOLDERS) or filename.startswith("<")


def current_source_line() -> str:
    """`file:line` of the innermost frame that belongs neither to torch nor to secc, "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_internal_file(frame.f_code.co_filename):
            return format_source_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def module_paths_by_id(model: nn.Module) -> dict[int, str]:
    """The path of each module by its id; valid as long as the model lives."""
    return {id(module): path for path, module in model.named_modules()}


def running_module_and_lines(paths: Mapping[int, str]) -> tuple[str, SourceLines]:
    """The innermost module with one of these paths that runs now, and the user's lines on the way to here
    from the outermost of them.

    What calls that outermost module does not count: under a plan it is a section, which knows the lines that
    the user has there.
    """
    frame, path, lines, inside = sys._getframe(1), None, list[str](), 1
    while frame is not None:
        if frame.f_code is _MODULE_CALL_CODE:
            known = paths.get(id(frame.f_locals["self"]))
            if known is not None:
                path, inside = known if path is None else path, len(lines)
            if known == "":
                break  # the whole model
        elif not is_internal_file(frame.f_code.co_filename):
            lines.append(format_source_line(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return path or "", tuple(lines[:inside])


def random_call_name(path: str, lines: SourceLines) -> str:
    """The name of the random ops that a module draws at these lines: `path@file:line<file:line`, without
    lines in torch's own modules."""
    return f"{path}@{'<'.join(lines)}" if lines else path


def forward_source_line(cls: type) -> str:
    """`file:line` of the forward method of a module's class, "" if it has no source."""
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    wrapped = getattr(cls, "forward", None)
    while (inner := getattr(wrapped, "__wrapped__", None)) is not None:
        wrapped = inner
        code = getattr(inner, "__code__", code)
    return format_source_line(code, code.co_firstlineno) if isinstance(code, CodeType) else ""


def error_source_line(error: BaseException) -> str:
    """`file:line` of the innermost frame of the user's or a library's code in a traceback."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not is_internal_file(frame.f_code.co_filename):
            return format_source_line(frame.f_code, line)
    return ""


def format_source_line(code: CodeType, line: int) -> str:
    return f"{_file_name(code.co_filename)}:{line}"


@cache
def _file_name(file: str) -> str:
    return Path(file).name
