"""Splits a forward in two functions: one that runs a range of its statements, and one that runs the others
and calls the first. So statements that cannot be recorded op by op become a block of their own
(`secc.runtime.model.function_blocks`): a loop over time steps, a gradient that forward takes, a matching
written in place.

The first function takes the variables that the range reads, and returns those that later statements read. A
range is named `MODULE:QUALIFIED NAME OF FORWARD#FIRST-LAST@PATH OF THE MODULE`, with the numbers of its
statements; the model file, which is imported under many names, is module "".
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import linecache
import operator
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn

_GROWING_METHODS = frozenset({"append", "extend", "insert"})
_CHANGING_METHODS = _GROWING_METHODS | {
    "pop",
    "remove",
    "clear",
    "update",
    "setdefault",
    "add",
    "sort",
    "reverse",
}  # of lists, dicts and sets
_IN_PLACE_METHOD = re.compile(r"(?!requires_grad_)\w*[^_]_")  # of tensors
_HANDLER = "<calls a block>"  # a constant of the outlined code, in place of the function that calls the block
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class NotOutlinable(Exception):
    """Statements that cannot be taken out of their function; the text says why."""


@dataclass(frozen=True)
class StatementRange:
    """Consecutive statements of the forward of the module at `path`, the numbers of the first and the last
    included. function: `MODULE:QUALIFIED NAME` of the forward."""

    function: str
    first: int
    last: int
    path: str

    def __str__(self) -> str:
        return f"{self.function}#{self.first}-{self.last}@{self.path}"

    @staticmethod
    def parse(text: str) -> StatementRange | None:
        """Return the range with this name; None if it is the name of a function."""
        function, mark, rest = text.partition("#")
        numbers, _, path = rest.partition("@")
        first, _, last = numbers.partition("-")
        return StatementRange(function, int(first), int(last), path) if mark else None


class ForwardSource:
    """The source of a forward that is written in Python: its statements, without the docstring.

    Raises NotOutlinable if it has no source, or uses what its copy would not have (`super()`, variables of an
    outer function, names that Python mangles).
    """

    def __init__(self, function: FunctionType) -> None:
        code = function.__code__
        if code.co_freevars:
            raise NotOutlinable("it uses variables from outside of its function")
        self.definition = _find_definition(code)
        if any(_is_mangled(name) for name in (*code.co_names, *code.co_varnames)):
            raise NotOutlinable("it uses names that begin with two underscores")
        body = self.definition.body
        begin = int(ast.get_docstring(self.definition, clean=False) is not None)
        self.statements = [part for s in body[begin:] for part in _take_out_arguments(s)]
        arguments = self.definition.args
        if not (named := [*arguments.posonlyargs, *arguments.args]):
            raise NotOutlinable("it has no self")
        self.self_name = named[0].arg

    @cached_property
    def argument_names(self) -> frozenset[str]:
        """Names of forward's arguments."""
        a = self.definition.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x is not None)]
        return frozenset(x.arg for x in given)

    def statement_at(self, line: int) -> int | None:
        """Return the number of the statement that holds a line; None if none does."""
        spans = ((s.lineno, s.end_lineno or s.lineno) for s in self.statements)
        return next((i for i, (start, end) in enumerate(spans) if start <= line <= end), None)

    def statement_that_calls(self, function: str) -> int | None:
        """Return the number of the first statement that names a function or a method; None if none does."""
        for number, statement in enumerate(self.statements):
            names = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
            if function in names | {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}:
                return number
        return None

    def widen_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the smallest range around first to last that can be outlined. Lists that it changes in place
        begin in it, and so do functions that forward defines, and tensors for which it wants gradients.
        Raises NotOutlinable if there is none."""
        while True:
            chosen = self.statements[first : last + 1]
            changed = {n for s in chosen for n in _changed_in_place(s)} - {self.self_name}
            outside = changed & self.argument_names
            if outside:
                raise NotOutlinable(f"it changes the argument {min(outside)} in place")
            read = {n for s in chosen for n in _names(s, ast.Load)}
            needed = changed | {n for n in read if self._is_local_function(n)}
            earlier = list(enumerate(self.statements[:first]))
            marked = (
                i for i, s in earlier if _marks_trainable(s) and read & (_stored(s) | _names(s, ast.Load))
            )
            start = min([first, *marked, *(i for i, s in earlier if needed & _stored(s))])
            if start == first:
                return first, last
            first = start

    def lists_read_after(self, first: int, last: int) -> int:
        """Return the number of lists that a range makes longer and that later statements read: their lengths
        often differ between batches."""
        grown = {n for s in self.statements[first : last + 1] for n in _changed_in_place(s, _GROWING_METHODS)}
        return len(grown & {n for s in self.statements[last + 1 :] for n in _names(s, ast.Load)})

    def _is_local_function(self, name: str) -> bool:
        """Whether a name is that of a function that forward defines."""
        for statement in self.statements:
            is_lambda = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda)
            if (is_lambda or isinstance(statement, ast.FunctionDef)) and name in _stored(statement):
                return True
        return False


@dataclass(frozen=True)
class OutlinedForward:
    """A forward in two parts.

    statements: takes the owner and a dict of the variables that the range reads, and returns one of those
    that it sets; with `returns`, what forward returns. rest: code of forward in which the call of `_HANDLER`
    stands for the range. lines: the first and last line of the range. children: attributes of `self` that it
    uses.
    """

    statements: FunctionType
    rest: CodeType
    returns: bool
    lines: tuple[int, int]
    children: frozenset[str]


def outline_statements(function: FunctionType, owner: type, first: int, last: int) -> OutlinedForward:
    """Split the forward of a module of class `owner`. Raises NotOutlinable."""
    source = ForwardSource(function)
    if not 0 <= first <= last < len(source.statements) or source.widen_range(first, last) != (first, last):
        raise NotOutlinable("its statements need others")
    moved, chosen = _move_independent(source.statements[first : last + 1])
    before, after = [*source.statements[:first], *moved], source.statements[last + 1 :]
    for node in (n for s in chosen for n in _walk_function(s)):
        if isinstance(node, ast.Global | ast.Nonlocal | ast.Delete | ast.Yield | ast.YieldFrom | ast.Await):
            raise NotOutlinable("it holds a statement that cannot be moved")
    returns = any(isinstance(n, ast.Return) for s in chosen for n in _walk_function(s))
    if returns and after:
        raise NotOutlinable("it returns before forward ends")
    children = _used_attributes(chosen, source.self_name, owner)
    local = source.argument_names.union(*(_stored(s) for s in source.statements)) - {source.self_name}
    set_here = {n for s in chosen for n in _stored(s)} & local
    given = ({n for s in chosen for n in _names(s, ast.Load)} | set_here) & local
    given &= source.argument_names | {n for s in before for n in _stored(s)}
    changed = {n for s in chosen for n in _changed_in_place(s)} & local
    found = (set_here | changed) & {n for s in after for n in _names(s, ast.Load)}
    lines = chosen[0].lineno, max(s.end_lineno or s.lineno for s in chosen)
    inner, outer = _write_functions(source, sorted(given), sorted(found), returns, lines[0])
    inner.body[-1:] = chosen if returns else [*chosen, inner.body[-1]]
    outer.body, outer.args = [*before, *outer.body, *after], source.definition.args
    compiled = FunctionType(_compile(inner, function), function.__globals__, function.__name__)
    compiled.__qualname__ = f"{function.__qualname__}.statements"
    return OutlinedForward(compiled, _compile(outer, function), returns, lines, children)


def _move_independent(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the assignments of a range that may as well stand before it, and its other statements: what
    inputs alone give (masks, targets) need not come out of a block."""
    moved, kept = list[ast.stmt](), statements[:1]
    for statement in statements[1:]:
        known, own = {n for s in kept for n in _all_names(s)}, _stored(statement)
        set_before = {n for s in kept for n in (*_stored(s), *_changed_in_place(s))}
        depends = bool(_names(statement, ast.Load) & set_before or own & known)
        plain = isinstance(statement, ast.Assign) and not _changed_in_place(statement)
        (moved if plain and not depends else kept).append(statement)
    return moved, kept


def _write_functions(
    source: ForwardSource, given: list[str], found: list[str], returns: bool, line: int
) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Return the frames of both functions: the last statement of the first returns the variables `found`."""
    name, self_name = source.definition.name, source.self_name
    inner = _parse(
        [
            f"def {name}({self_name}, _given):",
            *(f" if {n!r} in _given: {n} = _given[{n!r}]" for n in given),
            f" return {_take_variables(found)}",
        ],
        line,
    )
    take_results = (f" if {n!r} in _found: {n} = _found[{n!r}]" for n in found)
    outer = _parse(
        [
            f"def {name}():",
            f" _handler = {_HANDLER!r}",
            f" _found = _handler({self_name}, {_take_variables(given)})",
            *([" return _found"] if returns else take_results),
        ],
        line,
    )
    return inner, outer


def _take_variables(names: list[str]) -> str:
    """Return an expression for a dict of those of the variables that are set."""
    return f"{{_k: _v for _k, _v in locals().items() if _k in {names!r}}}"


def call_in_place_of_range(rest: CodeType, handler: Callable[[Any, dict[str, Any]], Any]) -> CodeType:
    """Return code of forward that calls `handler(owner, variables)` in place of the range."""
    return rest.replace(co_consts=tuple(handler if c == _HANDLER else c for c in rest.co_consts))


def find_function(function: str, model_file: str) -> FunctionType:
    """Return the function `MODULE:QUALIFIED NAME` without its decorators. Raises ImportError, or
    AttributeError if it is not a function written in Python."""
    module, _, name = function.rpartition(":")
    found = unwrap_function(operator.attrgetter(name)(importlib.import_module(module or model_file)))
    if found is None:
        raise AttributeError(f"{name} is not a function written in Python")
    return found


def unwrap_function(value: Any) -> FunctionType | None:
    """Return the function behind decorators that keep it as `__wrapped__`; None for what is not written in
    Python."""
    found = inspect.unwrap(value) if callable(value) else None
    return found if isinstance(found, FunctionType) else None


def name_forward(module: nn.Module, is_model_file: Callable[[str], bool]) -> str | None:
    """Return the name under which a rank finds a module's forward; None if it cannot."""
    found = unwrap_function(type(module).forward)
    if found is None or found.__module__ == "__main__":
        return None
    name = f"{'' if is_model_file(found.__module__) else found.__module__}:{found.__qualname__}"
    try:
        return name if find_function(name, found.__module__) is found else None
    except (ImportError, AttributeError):
        return None


def function_at(filename: str, line: int) -> str | None:
    """Return the name of the innermost function of a file around a line; None if there is none."""
    tree = _parse_file(filename)
    around = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef) and n.lineno <= line <= (n.end_lineno or n.lineno)
    ]
    return max(around, key=lambda n: n.lineno).name if around else None


# -- what statements read and set ----------------------------------------------------------------------------


def _find_definition(code: CodeType) -> ast.FunctionDef:
    for node in ast.walk(_parse_file(code.co_filename)):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno:
            return node
    raise NotOutlinable("its source is not at hand")


@cache
def _parse_file(filename: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one without its source."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])


def _walk_function(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a statement that belong to its function, not to one that it defines."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.ClassDef):
            yield from _walk_function(child)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}
    if context is ast.Load:  # `x += 1` reads x, too
        found |= {
            n.target.id
            for n in ast.walk(node)
            if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
        }
    return found


def _all_names(node: ast.AST) -> set[str]:
    return _names(node, ast.Load) | _stored(node)


def _stored(node: ast.AST) -> set[str]:
    defined = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    imported = {
        (a.asname or a.name).partition(".")[0]
        for n in ast.walk(node)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
    return _names(node, ast.Store) | defined | imported


def _take_out_arguments(statement: ast.stmt) -> list[ast.stmt]:
    """Return a statement that is one call as several: each argument that calls something is computed before,
    so that `return self.criterion(self.head(x), y)` can become a block without the head."""
    if not isinstance(statement, ast.Return | ast.Assign | ast.Expr) or not isinstance(
        statement.value, ast.Call
    ):
        return [statement]
    before, call = list[ast.stmt](), statement.value
    values = [*call.args, *(k.value for k in call.keywords)]
    if not all(map(_may_be_taken_out, filter(_calls_something, values))):
        return [statement]

    def take_out(value: ast.expr) -> ast.expr:
        if not _calls_something(value):
            return value
        name = f"_argument_{len(before)}_of_line_{statement.lineno}"
        before.append(ast.Assign([ast.Name(name, ast.Store())], value))
        ast.copy_location(before[-1], value)
        ast.fix_missing_locations(before[-1])
        return ast.copy_location(ast.Name(name, ast.Load()), value)

    arguments = [take_out(a) for a in call.args]
    keywords = [ast.copy_location(ast.keyword(k.arg, take_out(k.value)), k) for k in call.keywords]
    new = ast.copy_location(ast.Call(call.func, arguments, keywords), call)
    changed = copy.copy(statement)
    changed.value = new
    return [*before, changed]


def _calls_something(value: ast.expr) -> bool:
    return any(isinstance(n, ast.Call) for n in ast.walk(value))


def _may_be_taken_out(value: ast.expr) -> bool:
    bound = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
    return not isinstance(value, ast.Starred | ast.Lambda) and not any(
        isinstance(n, bound) for n in ast.walk(value)
    )


def _base_name(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _changed_in_place(statement: ast.AST, methods: Collection[str] | None = None) -> set[str]:
    """Return the variables that a statement changes without setting them: by an entry, an attribute, or a
    method. methods: only by these."""
    found = set[str | None]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, known = node.func.attr, _CHANGING_METHODS if methods is None else methods
            if name in known or (methods is None and _IN_PLACE_METHOD.fullmatch(name)):
                found.add(_base_name(node.func.value))
        elif methods is None and isinstance(node, ast.Attribute | ast.Subscript):
            found |= {_base_name(node)} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if name is not None}


def _marks_trainable(statement: ast.AST) -> bool:
    """Whether a statement asks for gradients of a tensor."""
    return any(isinstance(n, ast.Attribute) and n.attr == "requires_grad_" for n in ast.walk(statement))


def _used_attributes(statements: Collection[ast.stmt], self_name: str, owner: type) -> frozenset[str]:
    """Return the attributes of `self` that statements use, methods that they call included. Raises
    NotOutlinable if `self` is set or passed on, since its other attributes may then be used."""
    used, queue, seen = set[str](), [(s, self_name) for s in statements], set[str]()
    while queue:
        tree, name = queue.pop()
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        of_self = [n for n in attributes if isinstance(n.value, ast.Name) and n.value.id == name]
        if sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(tree)) > len(of_self):
            raise NotOutlinable("it passes self on")
        if any(isinstance(n.ctx, ast.Store) for n in of_self) or name in _changed_attributes(tree):
            raise NotOutlinable("it sets attributes of self")
        for attribute in of_self:
            used.add(attribute.attr)
            found = inspect.getattr_static(owner, attribute.attr, None)
            is_static = isinstance(found, staticmethod)
            method = unwrap_function(getattr(owner, attribute.attr, None))
            if method is not None and attribute.attr not in seen:
                seen.add(attribute.attr)
                if method.__code__.co_freevars:
                    raise NotOutlinable("a method that it calls uses super()")
                definition = _find_definition(method.__code__)
                arguments = [*definition.args.posonlyargs, *definition.args.args]
                own_name = arguments[0].arg if arguments and not is_static else ""
                queue += [(s, own_name) for s in definition.body]
    return frozenset(used)


def _changed_attributes(tree: ast.AST) -> set[str]:
    """Return the variables with an attribute that a statement changes in place (`self.seen.append(x)`)."""
    found = set[str | None]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _CHANGING_METHODS and isinstance(node.func.value, ast.Attribute):
                found.add(_base_name(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            found |= {_base_name(node)} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if name is not None}


def _is_mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _parse(lines: Collection[str], line: int) -> ast.FunctionDef:
    """Parse a function, all of it at one line of the user's file."""
    (definition,) = ast.parse("\n".join(lines)).body
    for node in ast.walk(definition):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line  # pyright: ignore[reportAttributeAccessIssue]
            node.col_offset = node.end_col_offset = 0  # pyright: ignore[reportAttributeAccessIssue]
    return cast(ast.FunctionDef, definition)


def _compile(definition: ast.FunctionDef, like: FunctionType) -> CodeType:
    """Return the code of a function that stands in the file of another."""
    module = ast.Module([definition], type_ignores=[])
    code = compile(module, like.__code__.co_filename, "exec", dont_inherit=True)
    found = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == definition.name)
    return found.replace(co_qualname=like.__code__.co_qualname)
