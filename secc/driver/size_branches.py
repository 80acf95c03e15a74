"""Finds code of blocks that may do something else for many samples than for few (`if len(x) >= 64`).

A comparison has fewer samples than a global batch. Between modules, recordings of both show whether another
path is taken, but for one that certain numbers of samples take; blocks run as they are. So where code looks
at sizes and compares, or takes a part of fixed length, as many samples as a global batch has are compared,
too, and the numbers that it names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import nn

from secc.runtime.model.function_blocks import FunctionBlock
from secc.runtime.model.kept_values import user_classes

_SIZES = {"shape", "size", "numel"}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
_CONTAINERS = (dict, set, frozenset, list, tuple)
_MOST_KEYS = 64  # of a container with numbers of samples
_SMALL_NUMBERS = range(2, 8)  # of samples


@dataclass(frozen=True)
class SizeBranch:
    """Code that may depend on how many samples there are. where: file:line of the first. numbers: those that
    may be treated otherwise than others: small ones, and what sizes are compared with."""

    where: str
    numbers: frozenset[int] = frozenset()


def find_size_branch(model: nn.Module, blocks: Sequence[str]) -> SizeBranch | None:
    """Returns what functions of the user's in the blocks decide by sizes: they compare and look at sizes,
    take a part of fixed length, or call `torch.cross` without a dim, which takes the first of three entries;
    None if there is nothing."""
    found = (b for f in _functions_of_blocks(model, blocks) for b in _find_branches(f))
    return _join_branches(found)


def find_equal_sizes(model: nn.Module, blocks: Sequence[str]) -> SizeBranch | None:
    """Returns the numbers that functions of the user's outside of the blocks compare sizes with for equality
    (`if x.shape[0] == 6`): no recording shows them, if no recorded batch has this size; None if there are
    none."""
    inside = set(_functions_of_blocks(model, blocks))
    outside = (f for f in _functions_of_blocks(model, [""]) if f not in inside)
    return _join_branches(b for f in outside for b in _find_branches(f, named_only=True) if b.numbers)


def _join_branches(branches: Iterable[SizeBranch]) -> SizeBranch | None:
    found = list(branches)
    return SizeBranch(found[0].where, frozenset[int]().union(*(b.numbers for b in found))) if found else None


def _functions_of_blocks(model: nn.Module, blocks: Sequence[str]) -> Iterator[FunctionType]:
    """Yields the functions of the user's that may run in blocks: methods of their modules' classes, and
    functions and classes of `autograd.Function` that these name in their files."""
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
            for named in (own.get(name) for name in function.__code__.co_names):
                is_backward = isinstance(named, type) and issubclass(named, torch.autograd.Function)
                codes = [getattr(c, "__func__", c) for c in vars(named).values()] if is_backward else [named]
                waiting += (f for f in codes if isinstance(f, FunctionType) and f.__globals__ is own)


def _find_branches(function: FunctionType, named_only: bool = False) -> Iterator[SizeBranch]:
    """Yields what a function decides by sizes. named_only: of numbers that may be treated otherwise than
    others, only those that the code names."""
    names = {*function.__code__.co_names}
    try:
        source, line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, SyntaxError, TypeError):
        return
    looks = bool(names & _SIZES) or "len" in names
    file, place = function.__globals__, function.__code__.co_filename
    keys = _keys_of_globals(function) if looks else frozenset[int]()
    if keys:
        yield SizeBranch(f"{place}:{line}", keys)
    for node in ast.walk(tree):
        orders = isinstance(node, ast.Compare) and any(isinstance(op, _ORDERS) for op in node.ops)
        chosen = _numbers_of_equality(node, file, named_only) if looks else ()
        if _is_cross_without_dim(node):
            chosen = _SMALL_NUMBERS
        if chosen or (orders and looks) or _is_long_slice(node):
            yield SizeBranch(f"{place}:{line + _line_of(node) - 1}", frozenset(chosen))


def _line_of(node: ast.AST) -> int:
    return getattr(node, "lineno", 1)


def _keys_of_globals(function: FunctionType) -> frozenset[int]:
    """Returns the whole numbers above one in containers that are globals and that a function names, in which
    it may look for a size."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    containers = (c for c in named if isinstance(c, _CONTAINERS) and len(c) <= _MOST_KEYS)
    return frozenset(key for c in containers for key in c if type(key) is int and key > 1)


def _numbers_of_equality(
    node: ast.AST, file: Mapping[str, object], named_only: bool = False
) -> Iterable[int]:
    """Returns the numbers of samples that an expression may treat otherwise than others: it compares whether
    two numbers are equal, or takes a remainder."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        sides = [node.left, node.right]
    elif isinstance(node, ast.MatchValue):
        sides = [node.value]
    elif isinstance(node, ast.Compare) and any(isinstance(op, _EQUALITIES) for op in node.ops):
        sides = [node.left, *node.comparators]
    else:
        return ()
    inner = [n for side in sides for n in (side.elts if isinstance(side, (ast.Tuple, ast.Set)) else [side])]
    constants = [n.value for n in inner if isinstance(n, ast.Constant)]
    numbers = [value for value in constants if type(value) is int]
    if len(numbers) < len(constants) or any(map(_counts_dims, inner)):
        return ()
    numbers += [value for n in inner if isinstance(n, ast.Name) and type(value := file.get(n.id)) is int]
    others = () if named_only and not isinstance(node, ast.BinOp) else _SMALL_NUMBERS
    return {*others, *(number for number in numbers if number > 1)}


def _counts_dims(node: ast.expr) -> bool:
    """Whether an expression is the number of a tensor's dims."""
    named = node.func if isinstance(node, ast.Call) else node
    return isinstance(named, ast.Attribute) and named.attr in ("dim", "ndim")


def _is_cross_without_dim(node: ast.AST) -> bool:
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or node.func.attr != "cross"
    ):
        return False
    owner = node.func.value
    is_function = isinstance(owner, ast.Name) and owner.id == "torch"
    is_linalg = isinstance(owner, ast.Attribute) and owner.attr == "linalg"
    has_dim = len(node.args) > 1 + is_function or any(k.arg in ("dim", "axis") for k in node.keywords)
    return not has_dim and not is_linalg


def _is_long_slice(node: ast.AST) -> bool:
    """Whether an expression is a slice with a constant end above two: a batch may have more samples."""
    if not isinstance(node, ast.Slice) or not isinstance(node.upper, ast.Constant):
        return False
    return isinstance(node.upper.value, int) and node.upper.value > 2
