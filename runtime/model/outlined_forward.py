"""Splits a forward in functions: one for each of some ranges of its statements, and one that runs the others
and calls these. So statements that cannot be recorded op by op become a block of their own
(`secc.runtime.model.function_blocks`): a loop over time steps, a gradient that forward takes, a matching
written in place.

The function of a range takes the variables that the range reads, and returns those that later statements
read. A range is named `MODULE:QUALIFIED NAME OF FORWARD#FIRST-LAST@PATH OF THE MODULE`, with the numbers of
its statements; the model file, which is imported under many names, is module "".
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import linecache
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn

from secc.runtime.model.counting_loops import is_counting_loop, take_counts_out
from secc.runtime.model.variable_flow import (
    CHANGING_METHODS,
    GROWING_METHODS,
    base_name,
    names_always_set,
    names_changed_in_place,
    names_read_first,
)

_CLASS_CELL = "__class__"  # the variable of `super()`
_COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
_COLLECTIONS = (ast.List, ast.Tuple, ast.Dict, ast.Set, *_COMPREHENSIONS)
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

    def shares_statements(self, other: StatementRange) -> bool:
        """Whether both have a statement of one function, other than as the same range of two modules."""
        is_other_call = self.path != other.path and (self.first, self.last) == (other.first, other.last)
        apart = self.last < other.first or other.last < self.first
        return self.function == other.function and not apart and not is_other_call

    @staticmethod
    def parse(text: str) -> StatementRange | None:
        """Return the range with this name; None if it is the name of a function."""
        function, mark, rest = text.partition("#")
        numbers, _, path = rest.partition("@")
        first, _, last = numbers.partition("-")
        return StatementRange(function, int(first), int(last), path) if mark else None


class ForwardSource:
    """The source of the forward of a module that is written in Python: its statements, without the docstring.
    Attributes that belong to one call of forward are variables in it, see `_find_own_attributes`.

    Raises NotOutlinable if it has no source, or uses what its copy would not have (variables of an outer
    function, names that Python mangles).
    """

    def __init__(self, function: FunctionType, owner: nn.Module) -> None:
        code = function.__code__
        if set(code.co_freevars) - {_CLASS_CELL}:
            raise NotOutlinable("it uses variables from outside of its function")
        self.definition = copy.deepcopy(_find_definition(code))
        self.own_attributes = _find_own_attributes(self.definition, function, owner)
        if self.own_attributes:
            self.definition = _AttributesAsVariables(self.definition, self.own_attributes).run()
        if any(_is_mangled(name) for name in (*code.co_names, *code.co_varnames)):
            raise NotOutlinable("it uses names that begin with two underscores")
        body = self.definition.body
        begin = int(ast.get_docstring(self.definition, clean=False) is not None)
        arguments = self.definition.args
        if not (named := [*arguments.posonlyargs, *arguments.args]):
            raise NotOutlinable("it has no self")
        self.self_name = named[0].arg
        single = [part for s in body[begin:] for part in _split_assignment(s)]
        counted = take_counts_out(single, self.self_name)
        self.statements = [part for s in counted for part in _take_out_arguments(s)]

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

    def statements_that_read(self, variable: str) -> list[int]:
        """Return the numbers of the statements that read a variable, other than what they count."""
        reading = (i for i, s in enumerate(self.statements) if variable in _names(s, ast.Load))
        return [i for i in reading if not is_counting_loop(self.statements[i])]

    def returns_in(self, first: int, last: int) -> bool:
        """Return whether a range holds a return from forward."""
        return any(
            isinstance(n, ast.Return) for s in self.statements[first : last + 1] for n in _walk_function(s)
        )

    def widen_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the smallest range around first to last that can be outlined. Lists that it changes in place
        begin in it, and so do functions that forward defines, and tensors for which it wants gradients.
        Raises NotOutlinable if there is none."""
        while True:
            chosen = self.statements[first : last + 1]
            changed = {n for s in chosen for n in names_changed_in_place(s)} - {self.self_name}
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
        grown = {
            n for s in self.statements[first : last + 1] for n in names_changed_in_place(s, GROWING_METHODS)
        }
        return len(grown & {n for s in self.statements[last + 1 :] for n in _names(s, ast.Load)})

    def _is_local_function(self, name: str) -> bool:
        """Whether a name is that of a function that forward defines."""
        for statement in self.statements:
            is_lambda = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda)
            if (is_lambda or isinstance(statement, ast.FunctionDef)) and name in _stored(statement):
                return True
        return False


@dataclass(frozen=True)
class OutlinedStatements:
    """A range of the statements of a forward as a function.

    span: the numbers of the first and last statement. run: takes the owner and a dict of the variables that
    the range reads, and returns one of those that it sets; with `returns`, what forward returns. call:
    statements that stand in forward in its place; a constant in them stands for the function that they call.
    lines: the first and last line of the range. children: attributes of `self` that it uses.
    """

    span: tuple[int, int]
    run: FunctionType
    call: Sequence[ast.stmt]
    returns: bool
    lines: tuple[int, int]
    children: frozenset[str]


def outline_statements(function: FunctionType, owner: nn.Module, first: int, last: int) -> OutlinedStatements:
    """Take a range out of the forward of `owner`. Raises NotOutlinable."""
    source = ForwardSource(function, owner)
    if not 0 <= first <= last < len(source.statements) or source.widen_range(first, last) != (first, last):
        raise NotOutlinable("its statements need others")
    earlier, chosen = _move_independent(source.statements[first : last + 1])
    chosen, later = _move_unneeded(chosen, source.self_name)
    before = [*source.statements[:first], *earlier]
    after = [*later, *source.statements[last + 1 :]]
    for node in (n for s in chosen for n in _walk_function(s)):
        if isinstance(node, ast.Global | ast.Nonlocal | ast.Delete | ast.Yield | ast.YieldFrom | ast.Await):
            raise NotOutlinable("it holds a statement that cannot be moved")
    returns = any(isinstance(n, ast.Return) for s in chosen for n in _walk_function(s))
    if returns and after:
        raise NotOutlinable("it returns before forward ends")
    children = _AttributeSearch(owner).find_used(chosen, source.self_name, function)
    local = source.argument_names.union(*(_stored(s) for s in source.statements)) - {source.self_name}
    set_here = {n for s in chosen for n in _stored(s)} & local
    changed = {n for s in chosen for n in names_changed_in_place(s)} & local
    functions = (f for s in before for f in ast.walk(s) if isinstance(f, _Function))
    read_later = names_read_first(after).union(*(_names(f, ast.Load) for f in functions))
    found = (set_here | changed) & read_later
    given = names_read_first(chosen) & local | found - names_always_set(chosen)
    given &= source.argument_names | {n for s in before for n in _stored(s)}
    own = {_variable_of(a): a for a in source.own_attributes if _variable_of(a) in set_here - changed}
    lines = chosen[0].lineno, max(s.end_lineno or s.lineno for s in chosen)
    inner, call = _write_function_and_call(
        source, (first, last), sorted(given), sorted(found | {*own}), returns, lines[0]
    )
    if not returns:
        set_own = [f" if {v!r} in _found: {source.self_name}.{a} = {v}" for v, a in own.items()]
        call += _parse_statements(set_own, lines[0])  # for code outside of forward
    inner.body[-1:] = chosen if returns else [*chosen, inner.body[-1]]
    compiled = FunctionType(
        _compile(inner, function), function.__globals__, function.__name__, None, function.__closure__
    )
    compiled.__qualname__ = f"{function.__qualname__}.statements"
    return OutlinedStatements((first, last), compiled, [*earlier, *call, *later], returns, lines, children)


def compile_forward_with_calls(
    function: FunctionType, owner: nn.Module, outlined: Collection[OutlinedStatements]
) -> CodeType:
    """Return code of the forward of `owner` that calls functions in place of ranges, see
    `call_in_place_of_ranges`. No two ranges have a statement in common."""
    source = ForwardSource(function, owner)
    body, done = list[ast.stmt](), 0
    for part in sorted(outlined, key=lambda part: part.span):
        first, last = part.span
        assert first >= done, "ranges overlap"
        body += [*source.statements[done:first], *part.call]
        done = last + 1
    outer = _parse([f"def {source.definition.name}():", " pass"], source.definition.lineno)
    outer.body, outer.args = [*body, *source.statements[done:]], source.definition.args
    return _compile(outer, function)


def _move_independent(statements: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the assignments of a range that may as well stand before it, and its other statements: what
    inputs alone give (masks, targets) need not come out of a block."""
    moved, kept = list[ast.stmt](), statements[:1]
    for statement in statements[1:]:
        known, own = {n for s in kept for n in _all_names(s)}, _stored(statement)
        set_before = {n for s in kept for n in (*_stored(s), *names_changed_in_place(s))}
        changed = names_changed_in_place(statement)
        depends = bool(_names(statement, ast.Load) & set_before or (own | changed) & known)
        plain = is_counting_loop(statement) or (isinstance(statement, ast.Assign) and not changed)
        (moved if plain and not depends else kept).append(statement)
    return moved, kept


def _move_unneeded(statements: list[ast.stmt], self_name: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return a range without the assignments that its other statements do not need and that use nothing of
    the module, and these, which may as well stand behind it: a mean of what a block has for each sample. What
    reads lists, or what a loop or a condition sets, stays: a block returns tensors of the same kind."""
    unlike = {n for s in statements for n in names_changed_in_place(s)}
    for statement in statements:
        if not isinstance(statement, ast.Assign) or (
            isinstance(statement.value, _COLLECTIONS) and not isinstance(statement.targets[0], ast.Tuple)
        ):
            unlike |= _stored(statement)
    kept, moved = statements[-1:], list[ast.stmt]()
    for statement in reversed(statements[:-1]):
        own, read = _stored(statement), _names(statement, ast.Load)
        needed = {n for s in kept for n in _all_names(s)}
        set_behind = {n for s in kept for n in (*_stored(s), *names_changed_in_place(s))}
        is_free = not own & needed and not read & (set_behind | unlike | {self_name})
        plain = isinstance(statement, ast.Assign) and not names_changed_in_place(statement)
        (moved if plain and is_free and not isinstance(kept[-1], ast.Return) else kept).insert(0, statement)
    return kept, moved


def _write_function_and_call(
    source: ForwardSource,
    span: tuple[int, int],
    given: list[str],
    found: list[str],
    returns: bool,
    line: int,
) -> tuple[ast.FunctionDef, list[ast.stmt]]:
    """Return a function for the statements of a range, still without them: its last statement returns the
    variables `found`. Return also the statements that call it."""
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
    call = [
        f" _handler = {_handler_constant(span)!r}",
        f" _found = _handler({self_name}, {_take_variables(given)})",
        *([" return _found"] if returns else take_results),
    ]
    return inner, _parse_statements(call, line)


def _handler_constant(span: tuple[int, int]) -> str:
    """Return the constant that stands for the function that runs a range."""
    return f"<runs the statements {span[0]} to {span[1]}>"


def _take_variables(names: list[str]) -> str:
    """Return an expression for a dict of those of the variables that are set."""
    return f"{{_k: _v for _k, _v in locals().items() if _k in {names!r}}}"


def call_in_place_of_ranges(
    forward: CodeType, handlers: Mapping[tuple[int, int], Callable[[Any, dict[str, Any]], Any]]
) -> CodeType:
    """Return code of `compile_forward_with_calls` that calls `handlers[span](owner, variables)` in place of
    ranges."""
    by_constant = {_handler_constant(span): handler for span, handler in handlers.items()}
    constants = (by_constant.get(c, c) if isinstance(c, str) else c for c in forward.co_consts)
    return forward.replace(co_consts=tuple(constants))


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
    """Yield the nodes of a statement that belong to its function, not to one that it defines."""
    yield node
    if not isinstance(node, _Function | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
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


def _split_assignment(statement: ast.stmt) -> list[ast.stmt]:
    """Return `losses, counts = [], []` as one assignment for each variable, any other statement as it is."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return [statement]
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return [statement]
    is_plain = all(
        isinstance(v, ast.Constant) or (isinstance(v, ast.List) and not v.elts) for v in value.elts
    )
    if not is_plain or len(target.elts) != len(value.elts):
        return [statement]
    pairs = zip(target.elts, value.elts, strict=True)
    return [ast.copy_location(ast.Assign([name], v), statement) for name, v in pairs]


def _take_out_arguments(statement: ast.stmt) -> list[ast.stmt]:
    """Return a statement that is one call, or one division, as several: each argument that calls something is
    computed before, so that `return self.criterion(self.head(x), y)` can become a block without the head, and
    `return sum(losses) / count` one without the division."""
    if not isinstance(statement, ast.Return | ast.Assign | ast.Expr) or statement.value is None:
        return [statement]
    before, value = list[ast.stmt](), statement.value
    if isinstance(value, ast.Call):
        values = [*value.args, *(k.value for k in value.keywords)]
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        values = [value.left, value.right]
    else:
        return [statement]
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

    if isinstance(value, ast.Call):
        arguments = [take_out(a) for a in value.args]
        keywords = [ast.copy_location(ast.keyword(k.arg, take_out(k.value)), k) for k in value.keywords]
        new: ast.expr = ast.Call(value.func, arguments, keywords)
    else:
        new = ast.BinOp(take_out(value.left), value.op, take_out(value.right))
    changed = copy.copy(statement)
    changed.value = ast.copy_location(new, value)
    return [*before, changed]


def _calls_something(value: ast.expr) -> bool:
    return any(isinstance(n, ast.Call) for n in ast.walk(value))


def _may_be_taken_out(value: ast.expr) -> bool:
    bound = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
    return not isinstance(value, ast.Starred | ast.Lambda) and not any(
        isinstance(n, bound) for n in ast.walk(value)
    )


def _marks_trainable(statement: ast.AST) -> bool:
    """Whether a statement asks for gradients of a tensor."""
    return any(isinstance(n, ast.Attribute) and n.attr == "requires_grad_" for n in ast.walk(statement))


class _AttributeSearch:
    """Finds the attributes of a module that statements use: by themselves, in methods that they call, by
    `super()` too, and in functions that they pass the module to."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner, self._used, self._seen = owner, set[str](), set[tuple[CodeType, str]]()
        self._queue: list[tuple[ast.AST, str, FunctionType]] = []  # code, name of the module in it, function

    def find_used(
        self, statements: Collection[ast.stmt], name: str, function: FunctionType
    ) -> frozenset[str]:
        """Return the attributes. Raises NotOutlinable if the module is changed, or passed on to code that
        cannot be followed."""
        self._queue += [(s, name, function) for s in statements]
        while self._queue:
            self._visit(*self._queue.pop())
        return frozenset(self._used)

    def _visit(self, tree: ast.AST, name: str, function: FunctionType) -> None:
        nodes = list(ast.walk(tree))
        attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
        of_self = [n for n in attributes if isinstance(n.value, ast.Name) and n.value.id == name]
        if changed := [a.attr for a in of_self if isinstance(a.ctx, ast.Store | ast.Del)]:
            raise NotOutlinable(f"it sets {name}.{changed[0]}, which other calls or methods use")
        if name in _changed_attributes(tree):
            raise NotOutlinable(f"it changes an attribute of {name} in place")
        passed = 0
        for call in (n for n in nodes if isinstance(n, ast.Call)):
            passed += self._follow_call(call, name, function)
        if name and sum(isinstance(n, ast.Name) and n.id == name for n in nodes) > len(of_self) + passed:
            raise NotOutlinable(f"it passes {name} on, or keeps it")
        for attribute in of_self:
            self._used.add(attribute.attr)
            found = inspect.getattr_static(self._owner, attribute.attr, None)
            if found is not None and found is vars(nn.Module).get(attribute.attr):
                raise NotOutlinable(f"it uses {name}.{attribute.attr}, which may take all of the module")
            self._follow_method(found)
        for attribute in attributes:
            if _is_super(attribute.value):
                for kind in _own_classes(type(self._owner)):
                    self._follow_method(vars(kind).get(attribute.attr))

    def _follow_method(self, found: Any) -> None:
        """Follow a method or a property of the module's class; other attributes have no code."""
        is_static = isinstance(found, staticmethod)
        method = unwrap_function(
            found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        )
        if method is not None:
            self._follow(method, 0 if not is_static else None)

    def _follow_call(self, call: ast.Call, name: str, function: FunctionType) -> int:
        """Follow a function that is called with the module; return how often it is passed."""
        places = [i for i, a in enumerate(call.args) if isinstance(a, ast.Name) and a.id == name]
        keywords = [k.arg for k in call.keywords if isinstance(k.value, ast.Name) and k.value.id == name]
        if not name or not (places or keywords) or _is_super(call):
            return len(places)
        is_builtin = isinstance(call.func, ast.Name) and call.func.id not in function.__globals__
        if is_builtin and isinstance(call.func, ast.Name):
            if call.func.id in ("isinstance", "type", "id", "callable"):
                return len(places)
            if call.func.id in ("getattr", "hasattr") and isinstance(call.args[1], ast.Constant):
                self._used.add(str(call.args[1].value))
                return len(places)
        called = self._resolve(call.func, name, function)
        if isinstance(called, nn.Module):
            called = called.forward
        bound = int(inspect.ismethod(called))
        target = unwrap_function(getattr(called, "__func__", called))
        if target is None or any(isinstance(a, ast.Starred) for a in call.args):
            raise NotOutlinable(
                f"it passes {name} to {ast.unparse(call.func)}, which is not a function that can be read"
            )
        for place in places:
            self._follow(target, place + bound)
        for keyword in keywords:
            self._follow(target, str(keyword))
        return len(places) + len(keywords)

    def _resolve(self, node: ast.expr, name: str, function: FunctionType) -> Any:
        """Return what an expression of names and attributes stands for; None if only a call knows."""
        if isinstance(node, ast.Attribute):
            return getattr(self._resolve(node.value, name, function), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in function.__code__.co_varnames[1:]:
            return None
        return self._owner if node.id == name else function.__globals__.get(node.id)

    def _follow(self, function: FunctionType, argument: int | str | None) -> None:
        """Follow a function that gets the module as an argument, by position or name; None: not at all."""
        if set(function.__code__.co_freevars) - {_CLASS_CELL}:
            raise NotOutlinable(f"{function.__name__}, which it calls, uses variables of an outer function")
        definition = _find_definition(function.__code__)
        arguments = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
        if isinstance(argument, int):
            if argument >= len(arguments):
                raise NotOutlinable(f"{function.__name__}, which it calls, takes self among *arguments")
            argument = arguments[argument]
        key = (function.__code__, argument or "")
        if key not in self._seen:
            self._seen.add(key)
            self._queue += [(s, argument or "", function) for s in definition.body]


def _own_classes(kind: type) -> list[type]:
    """Return a class of modules and its bases, without torch's and Python's."""
    return [c for c in kind.__mro__ if c not in (nn.Module, object)]


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _find_own_attributes(definition: ast.FunctionDef, function: FunctionType, owner: nn.Module) -> list[str]:
    """Return the attributes of `self` that belong to one call of forward: it sets them before it reads them,
    and no other method knows them. They are as good as variables."""
    arguments = [*definition.args.posonlyargs, *definition.args.args]
    name = arguments[0].arg if arguments else ""
    nodes = [n for s in definition.body for n in ast.walk(s)]
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and base_name(n) == name]
    of_self = [n for n in attributes if isinstance(n.value, ast.Name)]
    if sum(isinstance(n, ast.Name) and n.id == name for n in nodes) > len(of_self):
        return []  # other code may read them
    stored = list(dict.fromkeys(n.attr for n in of_self if isinstance(n.ctx, ast.Store)))
    first_use = {a: min((n.lineno, n.col_offset) for n in of_self if n.attr == a) for a in stored}
    set_first = set[str]()
    for statement in (s for s in definition.body if isinstance(s, ast.Assign)):
        read = {n.attr for n in ast.walk(statement.value) if isinstance(n, ast.Attribute)}
        for target in (t for t in statement.targets if isinstance(t, ast.Attribute) and t in of_self):
            if target.attr not in read and first_use.get(target.attr) == (target.lineno, target.col_offset):
                set_first.add(target.attr)
    others = [
        f
        for kind in _own_classes(type(owner))
        for name, value in vars(kind).items()
        if name != "__init__" and (f := unwrap_function(getattr(value, "__func__", value))) is not None
    ]
    known = {n for f in others if f is not function for n in f.__code__.co_names}
    state = {n for kind in ("_modules", "_parameters", "_buffers") for n in vars(owner)[kind]}
    return [a for a in stored if a in set_first - known - state and not hasattr(type(owner), a)]


def _variable_of(attribute: str) -> str:
    return f"_attribute_{attribute}"


class _AttributesAsVariables(ast.NodeTransformer):
    """Replaces attributes of `self` in a forward by variables."""

    def __init__(self, definition: ast.FunctionDef, attributes: Collection[str]) -> None:
        self._definition, self._attributes = definition, attributes
        self._name = [*definition.args.posonlyargs, *definition.args.args][0].arg

    def run(self) -> ast.FunctionDef:
        """Return the changed definition."""
        return cast(ast.FunctionDef, self.visit(self._definition))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace an attribute."""
        if isinstance(node.value, ast.Name) and node.value.id == self._name and node.attr in self._attributes:
            return ast.copy_location(ast.Name(_variable_of(node.attr), node.ctx), node)
        return self.generic_visit(node)


def _changed_attributes(tree: ast.AST) -> set[str]:
    """Return the variables with an attribute that a statement changes in place (`self.seen.append(x)`)."""
    found = set[str | None]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGING_METHODS and isinstance(node.func.value, ast.Attribute):
                found.add(base_name(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            found |= {base_name(node)} if isinstance(node.ctx, ast.Store) else set()
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


def _parse_statements(lines: Collection[str], line: int) -> list[ast.stmt]:
    """Parse statements, indented by one space, all of them at one line of the user's file."""
    return _parse(["def statements():", *lines], line).body if lines else []


def _compile(definition: ast.FunctionDef, like: FunctionType) -> CodeType:
    """Return the code of a function that stands in the file of another, with the same outer variables."""
    body, outer = [cast(ast.stmt, definition)], like.__code__.co_freevars
    if outer:  # it names them, so that it has all of them, even if it does not use them
        definition.body[:0] = _parse_statements([f" if False: {', '.join(outer)}"], definition.lineno)
        around = _parse([f"def outer({', '.join(outer)}):", " pass"], definition.lineno)
        around.body = body
        body = [cast(ast.stmt, around)]
    code = compile(ast.Module(body, type_ignores=[]), like.__code__.co_filename, "exec", dont_inherit=True)
    for name in (*(["outer"] if outer else ()), definition.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code.replace(co_qualname=like.__code__.co_qualname)
