"""Makes a model file from functions of a script or a notebook.

Ranks are other processes, and they import a file. Functions of a notebook are in no file, and running a
user's script again would run its calls of secc again. So the top-level statements that the functions need,
and what those need in turn, are copied into a file: imports, functions, classes and assignments, in order.
A name that is bound in another way, or again from its own value, is refused, because its value could not be
made a second time.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from secc.errors import UserError

_REMEDY = "write the functions into a file and use secc.load(FILE)"
_MAIN = "__main__"


@dataclass(frozen=True)
class _Statement:
    """A top-level statement: its text, the names that it binds and those that it reads, and its place."""

    text: str
    binds: frozenset[str]
    reads: frozenset[str]
    where: str
    is_copyable: bool

    @property
    def is_future(self) -> bool:
        """Whether it changes how the file is compiled, and must come first."""
        return self.text.startswith("from __future__")


def write_model_source(functions: Mapping[str, Callable[..., Any]]) -> str:
    """Returns the text of a model file with `functions` under their roles (`model`, `dataset`, ...).

    Functions of importable modules are imported; those of the script or notebook that runs are copied with
    what they need. Raises UserError for a function without a name at the top level of its module, and for
    values that cannot be made again from source.
    """
    folders = _import_folders()
    imported: list[str] = []
    own: list[str] = []
    aliases: list[str] = []
    for role, function in functions.items():
        name, module = _check_function(role, function)
        if module != _MAIN:
            imported.append(f"from {module} import {name} as {role}")
            continue
        own.append(name)
        if name != role:
            aliases.append(f"{role} = {name}")
    statements = _needed_statements(list(_main_statements()), own) if own else []
    taken = {name: s for s in statements for name in s.binds if name in functions}
    for role, function in functions.items():
        if role in taken and function.__name__ != role:
            raise UserError(
                f"the name {role!r} stands for something else than the function given as {role}=",
                taken[role].where,
                "rename it",
            )
    futures = list(dict.fromkeys(s.text for s in statements if s.is_future))
    bodies = [s.text for s in statements if not s.is_future]
    parts = [
        '"""Written by secc.Model from the functions of a script or notebook."""',
        *futures,
        "import sys",
    ]
    parts += [f"sys.path.append({folder!r})" for folder in folders]
    return "\n\n".join([*parts, *imported, *bodies, *aliases]) + "\n"


def _check_function(role: str, function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the function's name and module. Raises UserError if it cannot be found by them."""
    if not isinstance(function, FunctionType | type):
        raise UserError(f"{role}: expected a function, got {type(function).__name__}", remedy=_REMEDY)
    name, module = function.__qualname__, function.__module__
    if not name.isidentifier():
        place = f"{inspect.getsourcefile(function) or '?'}" if module != _MAIN else _MAIN
        raise UserError(
            f"{role} is {name}, which is not defined at the top level of its module",
            place,
            "define it with `def` at the top level",
        )
    return name, module


def _import_folders() -> list[str]:
    """Returns the folders from which this process imports user code: that of the script, and the current one
    in a notebook."""
    main = getattr(sys.modules[_MAIN], "__file__", None)
    return [str(Path(main).resolve().parent if main else Path.cwd())]


def _main_statements() -> Iterator[_Statement]:
    """Yields the top-level statements of the running script, or of the cells that a notebook has run."""
    for text, name in _main_sources():
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a cell that failed, or with magics that were not translated
            continue
        for node in tree.body:
            source = ast.get_source_segment(text, node)
            if source is not None:
                yield _read_statement(node, _with_decorators(text, node, source), f"{name}:{node.lineno}")


def _main_sources() -> Iterator[tuple[str, str]]:
    """Yields (Python text, name) of what has run in `__main__`."""
    main = sys.modules[_MAIN]
    cells = getattr(main, "In", None)
    file = getattr(main, "__file__", None)
    if isinstance(cells, list) and callable(getattr(main, "get_ipython", None)):
        transform = main.get_ipython().transform_cell  # pyright: ignore[reportAttributeAccessIssue]
        for number, cell in enumerate(cells):
            yield transform(str(cell)), f"cell {number}"
    elif file is not None and Path(file).exists():
        yield Path(file).read_text(encoding="utf-8"), str(file)
    else:
        raise UserError("the source of these functions is not available", remedy=_REMEDY)


def _with_decorators(text: str, node: ast.stmt, source: str) -> str:
    """Returns the source of a statement with its decorators, which ast leaves out."""
    decorators = getattr(node, "decorator_list", [])
    if not decorators:
        return source
    lines = text.splitlines()[decorators[0].lineno - 1 : node.end_lineno]
    return "\n".join(lines)


def _read_statement(node: ast.stmt, text: str, where: str) -> _Statement:
    table = symtable.symtable(text, where, "exec")
    binds = {
        s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    definitions = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    return _Statement(
        text, frozenset(binds), frozenset(_global_reads(table)), where, isinstance(node, definitions)
    )


def _global_reads(table: symtable.SymbolTable) -> set[str]:
    """Returns the global names that a scope and those inside it read; local names of functions are not."""
    is_top = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_top or s.is_global())}
    return names.union(*map(_global_reads, table.get_children()))


def _needed_statements(statements: list[_Statement], names: list[str]) -> list[_Statement]:
    """Returns the statements that bind `names` and what these read, in their order: of several that bind a
    name, the last. Raises UserError for a name that no definition binds."""
    last = {name: i for i, s in enumerate(statements) for name in s.binds}
    needed, pending = set[int](), list(names)
    while pending:
        name = pending.pop()
        if name not in last:
            if hasattr(builtins, name) or not hasattr(sys.modules[_MAIN], name):
                continue  # a builtin, or a name of a branch that has not run
            raise UserError(f"{name!r} is used by the model, but no statement defines it", remedy=_REMEDY)
        at = last[name]
        if at in needed:
            continue
        statement = statements[at]
        is_function = statement.text.lstrip().startswith(("def ", "class ", "@", "async "))
        if not statement.is_copyable or (name in statement.reads and not is_function):
            raise UserError(
                f"the value of {name!r}, which the model uses, cannot be made again from its source",
                statement.where,
                f"define it by one assignment at the top level, or {_REMEDY}",
            )
        needed.add(at)
        pending += statement.reads
    futures = {i for i, s in enumerate(statements) if s.is_future}
    return [statements[i] for i in sorted(needed | futures)]
