"""Installs the functions of a plan's `sections/fused.py` in place of methods, or of functions that methods
call by a global name.

A function keeps the user's file and line numbers: tracebacks point there, and random ops inside it keep the
names that they were captured with. It is used only for arguments like those of the trace; for anything else
(a DTensor, a tensor marked as a part, an argument left at its default) the user's own code runs.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.fusion import operators
from secc.runtime.plan.schema import CodeRewrite
from secc.runtime.recorder.block_results import is_fake
from secc.runtime.tensor_parallel.rules.mark import mark_of

FUSED_FILE = "sections/fused.py"
_PLAIN_TENSOR_TYPES = (torch.Tensor, nn.Parameter)
RESERVED_NAMES: dict[str, Any] = {  # of every function of fused.py, before those of the user's module
    "torch": torch,
    "fused": operators,
    "device": torch.device,
    "inf": float("inf"),
    "nan": float("nan"),
    "NoneType": type(None),
}

UserCallable = Callable[..., Any]
_REWRITES_ATTRIBUTE = "_secc_rewrites"  # of a replacement: names of the functions of fused.py in it


def install_fused(model: nn.Module, rewrites: Iterable[CodeRewrite], source: str) -> None:
    """Makes the modules named by `rewrites` compute with fused operators; `source` is the text of fused.py.

    Raises UserError if a module differs from the one that the plan was made with.
    """
    for module, method, replacement in _replacements(model, tuple(rewrites), source):
        setattr(module, method, replacement)


@contextmanager
def installed_temporarily(model: nn.Module, rewrites: Iterable[CodeRewrite], source: str) -> Iterator[None]:
    """Context manager: `install_fused` inside, the user's own code afterwards."""
    replacements = _replacements(model, tuple(rewrites), source)
    try:
        for module, method, replacement in replacements:
            setattr(module, method, replacement)
        yield
    finally:
        for module, method, _ in replacements:
            delattr(module, method)


def rewrites_installed_in(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the methods of this module (not of its submodules) that have a replacement installed, with the
    names of the functions of fused.py in it. Modules of one class with equal names run equal code."""
    found = {method: getattr(value, _REWRITES_ATTRIBUTE, None) for method, value in vars(module).items()}
    return {method: names for method, names in found.items() if names is not None}


def read_fused_source(directory: Path) -> str:
    """Returns the text of a plan's fused.py, "" if it has none."""
    path = directory / FUSED_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _replacements(
    model: nn.Module, rewrites: tuple[CodeRewrite, ...], source: str
) -> list[tuple[nn.Module, str, UserCallable]]:
    """Returns (module, method, its replacement) for all rewrites."""
    trees = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    codes: dict[tuple[str, tuple[int, ...], str], CodeType] = {}  # by function of fused.py and its place

    def compile_once(rewrite: CodeRewrite, own: UserCallable) -> FunctionType:
        inner = inspect.unwrap(getattr(own, "__func__", own))
        key = rewrite.name, rewrite.lines, inner.__code__.co_filename
        if key not in codes:
            codes[key] = _compile_code(trees[rewrite.name], rewrite, inner.__code__.co_filename)
        return _make_function(codes[key], rewrite.name, inner)

    functions_by_method: dict[tuple[str, str], tuple[nn.Module, dict[str, tuple[str, UserCallable]]]] = {}
    replacements: list[tuple[nn.Module, str, UserCallable]] = []
    for rewrite in rewrites:
        for path in rewrite.modules:
            module = _find_module(model, path, rewrite)
            original = getattr(module, rewrite.method)
            if rewrite.method in vars(module):
                raise UserError(
                    f"{path} has its own {rewrite.method}, which it had not when the plan was made",
                    remedy="compile the model again",
                )
            if rewrite.function:
                called = inspect.unwrap(original.__func__).__globals__.get(rewrite.function)
                if called is None:
                    raise UserError(
                        f"{rewrite.cls}.{rewrite.method} no longer calls {rewrite.function}, as it did when"
                        " the plan was made",
                        remedy="compile the model again",
                    )
                names = functions_by_method.setdefault((path, rewrite.method), (module, {}))[1]
                fused = compile_once(rewrite, called)
                names[rewrite.function] = rewrite.name, _dispatch_plain(called, fused, None)
            else:
                made = compile_once(rewrite, original)
                fused = MethodType(_replace_wrapped(original.__func__, lambda _, made=made: made), module)
                replacement = _dispatch_plain(original, fused, module)
                setattr(replacement, _REWRITES_ATTRIBUTE, (rewrite.name,))
                replacements.append((module, rewrite.method, replacement))
    for (_, method), (module, functions) in functions_by_method.items():
        names = {name: replacement for name, (_, replacement) in functions.items()}
        rebound = rebind_globals(getattr(module, method).__func__, names)
        setattr(rebound, _REWRITES_ATTRIBUTE, tuple(sorted(name for name, _ in functions.values())))
        replacements.append((module, method, MethodType(rebound, module)))
    return replacements


def _find_module(model: nn.Module, path: str, rewrite: CodeRewrite) -> nn.Module:
    module = model.get_submodule(path)
    if type(module).__name__ != rewrite.cls:
        message = f"{path} is of class {type(module).__name__}, but the plan was made with {rewrite.cls}"
        raise UserError(message, remedy="compile the model again")
    return module


def _compile_code(tree: ast.FunctionDef, rewrite: CodeRewrite, file: str) -> CodeType:
    """Compiles a function of fused.py with the user's file and line numbers; the code defines it."""
    tree = copy.deepcopy(tree)
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    first = statements[0].lineno
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            line = rewrite.lines[max(0, node.lineno - first + 1)]  # pyright: ignore[reportAttributeAccessIssue]
            node.lineno = node.end_lineno = line  # pyright: ignore[reportAttributeAccessIssue]
    return compile(ast.Module([tree], []), file, "exec")


def _make_function(code: CodeType, name: str, own: FunctionType) -> FunctionType:
    """Runs code that defines function `name`, with the global names and defaults of the user's function."""
    names = own.__globals__ | RESERVED_NAMES
    exec(code, names)
    made = names[name]
    if made.__defaults__ or made.__kwdefaults__:
        made.__defaults__, made.__kwdefaults__ = own.__defaults__, own.__kwdefaults__
    return made


def _dispatch_plain(own: UserCallable, fused: UserCallable, module: nn.Module | None) -> UserCallable:
    """Returns a function that calls `fused` for plain tensors and arguments that it takes, else `own`."""
    code = inspect.unwrap(getattr(fused, "__func__", fused)).__code__
    names = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    most = code.co_argcount - (module is not None)
    any_names = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    weights = module._parameters.values() if module is not None else ()

    def run(*args: Any, **kwargs: Any) -> Any:
        plain = all(
            (type(a) in _PLAIN_TENSOR_TYPES and mark_of(a) is None) or is_fake(a)
            for a in (*args, *kwargs.values(), *weights)
            if isinstance(a, torch.Tensor)
        )
        if plain and len(args) <= most and (any_names or names.issuperset(kwargs)):
            return fused(*args, **kwargs)
        return own(*args, **kwargs)

    run.__wrapped__ = own  # signatures stay readable
    return run


def rebind_globals(function: FunctionType, names: dict[str, UserCallable]) -> FunctionType:
    """Returns a copy of a function that finds `names` where it looks up globals, also inside the closures of
    its decorators.

    Raises ValueError for a decorator that hides the function that it wraps.
    """
    return _replace_wrapped(
        function, lambda inner: _copy_function(inner, inner.__globals__ | names, inner.__closure__)
    )


def _replace_wrapped(function: FunctionType, replace: Callable[[FunctionType], FunctionType]) -> FunctionType:
    """Returns a function with the same decorators around what `replace` gives for the innermost function.

    Raises ValueError for a decorator that hides the function that it wraps.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return replace(function)
    cells = function.__closure__ or ()
    if not isinstance(wrapped, FunctionType) or not any(_cell_content(c) is wrapped for c in cells):
        raise ValueError(f"{function.__qualname__} is wrapped in a way that hides its code")
    replaced = _replace_wrapped(wrapped, replace)
    copied = _copy_function(
        function,
        function.__globals__,
        tuple(CellType(replaced) if _cell_content(c) is wrapped else c for c in cells),
    )
    copied.__wrapped__ = replaced  # pyright: ignore[reportFunctionMemberAccess]
    return copied


def _cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _copy_function(
    function: FunctionType, scope: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__, made.__doc__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__doc__,
    )
    made.__dict__.update(function.__dict__)
    return made
