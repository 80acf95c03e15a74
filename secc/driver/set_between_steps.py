"""Finds values that code between steps sets (`on_step`, hooks of the optimizer, functions of a scheduler) and
that statements between modules read, as a temperature that falls with the steps.

A plan holds such a value as it was when the plan was made; modules and buffers are a rank's own and follow.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import tokenize
from collections.abc import Callable, Iterator

from torch import nn

from secc.driver.kept_state import other_values
from secc.errors import UserError
from secc.runtime.model.kept_values import LIBRARIES, KeptValue, iter_values
from secc.runtime.model.user_file import CALLBACKS, UserModel

_FUNCTIONS = (*CALLBACKS, "optimizer", "scheduler")
_Place = tuple[
    str, str
]  # (attribute of an object that is itself an attribute, or "" for other objects and globals; name)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_MUTATORS = {"update", "append", "extend", "insert", "pop", "clear", "setdefault"}
_MOST_VALUES = 8
_MOST_FUNCTIONS = 32


def refuse_set_values(user: UserModel, model: nn.Module, is_exact: Callable[[], bool]) -> None:
    """Raises UserError if code between steps sets a value with which the plan would not be exact, where
    `is_exact` compares it with plain PyTorch; it is so as things are."""
    places = _places_set_between_steps(user, model)
    if not places:
        return
    buffers = {id(b) for b in model.buffers()}
    found = ((v, places[p]) for v in iter_values(model, user) for p in _places_of(v) if p in places)
    for value, (function, where) in itertools.islice(found, _MOST_VALUES):
        if id(value.read()) not in buffers and not _holds_with_others(value, is_exact):
            raise UserError(
                f"{function}() sets {value.name}, which forward reads between modules: a plan holds the value"
                " that it had when the plan was made",
                where,
                "keep it in a buffer (`self.register_buffer`, then `.fill_()`), or read it in the forward of"
                " a smaller module",
            )


def _holds_with_others(value: KeptValue, is_exact: Callable[[], bool]) -> bool:
    """Whether a plan is exact with other values, but for those with which plain PyTorch fails."""
    content = value.read()
    try:
        for other in other_values(content):
            value.write(other)
            try:
                if not is_exact():
                    return False
            except Exception:  # whatever the user's code does with the value
                continue
    finally:
        value.write(content)
    return True


def _places_of(value: KeptValue) -> list[_Place]:
    """Returns what code may call a value, from the most exact on: an entry of a container has its name."""
    words = re.findall(r"\w+", value.name)
    return [(words[-2], words[-1]), ("", words[-1]), *((w, words[-2]) for w in ("", *words[-3:-2]))]


def _places_set_between_steps(user: UserModel, model: nn.Module) -> dict[_Place, tuple[str, str]]:
    """Returns the attributes, globals and containers that code between steps sets, each with the function of
    the model file and the line."""
    functions = [f for f in _FUNCTIONS if user.defines(f)]
    if not functions:
        return {}
    classes = (type(m) for m in model.modules() if not type(m).__module__.startswith(LIBRARIES))
    files = {str(user.path), *filter(None, map(_source_file, classes))}
    written = dict[str, list[tuple[str, ast.AST]]]()
    for file in sorted(files):
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
        for node in ast.walk(tree):
            if isinstance(node, _Function) and node.name not in ("forward", "model", "dataset"):
                written.setdefault(node.name, []).append((file, node))
    found = dict[_Place, tuple[str, str]]()
    for function in functions:
        waiting, seen = [function], set[str]()
        while waiting and len(seen) < _MOST_FUNCTIONS:
            name = waiting.pop()
            seen.add(name)
            for file, node in written.get(name, ()):
                for target, line in _set_places(node):
                    found.setdefault(target, (function, f"{file}:{line}"))
                waiting += (n for n in _named(node) if n in written and n not in seen)
    return found


def _source_file(cls: type) -> str | None:
    try:
        return inspect.getsourcefile(cls)
    except (TypeError, OSError):
        return None


def _set_places(function: ast.AST) -> Iterator[tuple[_Place, int]]:
    """Yields the places that a function sets, and containers that it changes, with the lines."""
    outer = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(function):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield from ((place, node.lineno) for place in _place(node))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in outer:
            yield ("", node.id), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            yield from ((("", str(name)), node.lineno) for name in names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            places = _place(node.func.value) if node.func.attr in _MUTATORS else []
            yield from ((place, node.lineno) for place in places)


def _place(node: ast.AST) -> list[_Place]:
    """Returns the attribute or variable that a target names; for an entry (`a.b[0]`), its container (`b`)."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return [(node.value.attr if isinstance(node.value, ast.Attribute) else "", node.attr)]
    return [("", node.id)] if isinstance(node, ast.Name) else []


def _named(function: ast.AST) -> Iterator[str]:
    """Yields the names of functions and methods that may be called."""
    for node in ast.walk(function):
        yield from (name for _, name in _place(node)) if isinstance(node, (ast.Attribute, ast.Name)) else ()
