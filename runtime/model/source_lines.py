"""Finds the line of the user's code, or of a library that the user calls, that caused an op: `file:line`, for
graph nodes and for messages.

Random ops are named by the module that runs them and by the lines that led to them, from the op up to the
user's forward.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

SourceLines = tuple[str, ...]  # `file:line` of calls, innermost first

# Frames of torch and of secc do not count; secc.runtime may be reached through a link, hence two folders.
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
    """Whether a file is torch's, secc's, or no file at all (`<string>`)."""
    return filename.startswith(_INTERNAL_FOLDERS) or filename.startswith("<")


def current_source_line() -> str:
    """`file:line` of the innermost running frame that belongs neither to torch nor to secc; "" if there is
    none."""
    frame = current_user_frame()
    return "" if frame is None else format_source_line(frame.f_code, frame.f_lineno)


def current_user_frame() -> FrameType | None:
    """The innermost running frame that belongs neither to torch nor to secc."""
    frame = sys._getframe(1)
    while frame is not None and is_internal_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def module_paths_by_id(model: nn.Module) -> dict[int, str]:
    """Return the path of each module by its id. Valid as long as the model lives."""
    return {id(module): path for path, module in model.named_modules()}


def innermost_running_module() -> nn.Module | None:
    """Return the innermost module with a forward that runs, None outside of all modules."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _MODULE_CALL_CODE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def running_module_and_lines(paths: Mapping[int, str]) -> tuple[str, SourceLines]:
    """Return the path of the innermost running module among `paths`, and the user's lines on the stack from
    here out to the outermost of them.

    Frames outside the outermost module do not count: on a rank they belong to a section, which knows the
    lines of the user's forward that it replaces.
    """
    path, frames = running_module_and_frames(paths)
    return path, tuple(format_source_line(frame.f_code, frame.f_lineno) for frame in frames)


def running_module_and_frames(paths: Mapping[int, str]) -> tuple[str, list[FrameType]]:
    """Return what `running_module_and_lines` does, with frames in place of lines."""
    frame, path, frames, frames_inside = sys._getframe(1), None, list[FrameType](), 1
    while frame is not None:
        if frame.f_code is _MODULE_CALL_CODE:
            module_path = paths.get(id(frame.f_locals["self"]))
            if module_path is not None:
                path, frames_inside = module_path if path is None else path, len(frames)
            if module_path == "":  # the path of the whole model
                break
        elif not is_internal_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return path or "", frames[:frames_inside]


def random_call_name(path: str, lines: SourceLines) -> str:
    """Name the random ops that a module runs at these lines: `path@file:line<file:line`, or the path alone if
    all lines are torch's."""
    return f"{path}@{'<'.join(lines)}" if lines else path


def forward_source_line(cls: type) -> str:
    """`file:line` of the forward method of a module's class, with decorators unwrapped; "" if it has no
    source."""
    code = forward_code(cls)
    return "" if code is None else format_source_line(code, code.co_firstlineno)


def forward_code(cls: type) -> CodeType | None:
    """Return the code of the forward method of a module's class, with decorators unwrapped; None if it has no
    source."""
    wrapped = getattr(cls, "forward", None)
    code = getattr(wrapped, "__code__", None)
    while (inner := getattr(wrapped, "__wrapped__", None)) is not None:
        wrapped = inner
        code = getattr(inner, "__code__", code)
    return code if isinstance(code, CodeType) else None


def error_source_line(error: BaseException) -> str:
    """`file:line` of the innermost traceback frame in the user's or a library's code; "" if there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not is_internal_file(frame.f_code.co_filename):
            return format_source_line(frame.f_code, line)
    return ""


def format_source_line(code: CodeType, line: int) -> str:
    """`file:line` of a code object's file, without its folder."""
    return f"{_file_name(code.co_filename)}:{line}"


@cache
def _file_name(file: str) -> str:
    return Path(file).name
