"""Finds code of blocks that may do something else for many samples than for few (`if len(x) >= 64`).

A comparison has fewer samples than a global batch. Between modules, recordings of both show whether another
path is taken; blocks run as they are. So where their code looks at sizes and compares, or takes a part of
fixed length, as many samples as a global batch has are compared, too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import FunctionType

from torch import nn

from secc.driver.start_state import user_classes
from secc.runtime.model.function_blocks import FunctionBlock

_SIZES = {"shape", "size", "numel"}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def find_size_branch(model: nn.Module, blocks: Sequence[str]) -> str:
    """Returns file:line of the first function of the user's in one of the blocks that compares and looks at
    sizes, or takes a part of fixed length; "" if there is none."""
    return next(filter(None, map(_find_branch, _functions_of_blocks(model, blocks))), "")


def _functions_of_blocks(model: nn.Module, blocks: Sequence[str]) -> Iterator[FunctionType]:
    """Yields the functions of the user's that may run in blocks: methods of their modules' classes, and what
    these name in their files."""
    waiting, seen = list[FunctionType](), set[int]()
    for block in (model.get_submodule(path) for path in blocks):
        if isinstance(block, FunctionBlock):
            waiting += block.intercepted
        for cls in user_classes(block):
            waiting += (f for n, f in vars(cls).items() if isinstance(f, FunctionType) and n != "__init__")
    while waiting:
        function = waiting.pop()
        if id(function) not in seen:
            seen.add(id(function))
            yield function
            own = function.__globals__
            named = (own.get(name) for name in function.__code__.co_names)
            waiting += (f for f in named if isinstance(f, FunctionType) and f.__globals__ is own)


def _find_branch(function: FunctionType) -> str:
    names = {*function.__code__.co_names}
    try:
        source, line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, SyntaxError, TypeError):
        return ""
    looks = bool(names & _SIZES) or "len" in names
    for node in ast.walk(tree):
        compares = isinstance(node, ast.Compare) and any(isinstance(op, _ORDERS) for op in node.ops)
        if isinstance(node, ast.expr) and ((compares and looks) or _is_long_slice(node)):
            return f"{function.__code__.co_filename}:{line + node.lineno - 1}"
    return ""


def _is_long_slice(node: ast.expr) -> bool:
    """Whether an expression is a slice with a constant end above two: a batch may have more samples."""
    if not isinstance(node, ast.Slice) or not isinstance(node.upper, ast.Constant):
        return False
    return isinstance(node.upper.value, int) and node.upper.value > 2
