"""Functions of the user's code that are blocks: a function between modules that reads values of a block's
result (a matching by `scipy`, a check that raises) cannot be recorded, but it can be called as it is.

A `FunctionBlock` is a module without weights that calls the function. It is a child of the model in the
compiler and on every rank, under the function's name, so that sections call it as any other block. While
forward is recorded, calls of the function go to the module, wherever the user's code holds the function.

A range of a forward's statements may be such a function, too (`secc.runtime.model.outlined_forward`): a
`StatementBlock`. It has the submodules, parameters and buffers that the range uses by `self.NAME`, under
names of its own in addition to theirs.

A function is named `MODULE:QUALIFIED NAME`; the model file, which is imported under many names, is module "".
An argument that is neither a tensor nor plain data, but a module of the model or an attribute of one
(`self.config`), is passed by its name.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from secc.runtime.model.outlined_forward import (
    OutlinedStatements,
    StatementRange,
    call_in_place_of_ranges,
    compile_forward_with_calls,
    find_function,
    outline_statements,
    unwrap_function,
)
from secc.runtime.model.source_lines import is_internal_file

_REFERENCE_KEY = "*attribute"  # of a dict that stands for an attribute of a module: [module path, name]
_STATE_KINDS = ("_modules", "_parameters", "_buffers")  # of an nn.Module
_PLAIN = (bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, type(None))
CallHandler = Callable[["FunctionBlock", tuple[Any, ...], dict[str, Any]], Any]


class FunctionBlock(nn.Module):
    """Calls a function of the user's code with the arguments that the function takes. Each function has a
    subclass of its own, with the function's name, so that messages and caches tell them apart."""

    def __init__(self, function: FunctionType, root: nn.Module) -> None:
        super().__init__()
        self.function = _copy_function(function)  # calls that are intercepted do not reach this one
        self.intercepted = (function,)
        self._root = (root,)  # no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        modules = dict(self._root[0].named_modules())
        args, kwargs = _resolve_references((args, kwargs), modules)
        return self.function(*args, **kwargs)

    def call_directly(self, args: Any, kwargs: Any) -> Any:
        """Call the function with arguments that are no references."""
        return self.function(*args, **kwargs)

    def name_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with references in place of the model's modules and their attributes."""
        known = dict[int, tuple[str, str]]()
        for path, module in self._root[0].named_modules():
            known.setdefault(id(module), (path, ""))
            for name, value in vars(module).items():
                if not name.startswith("_") and not isinstance(value, (*_PLAIN, list, tuple, dict)):
                    known.setdefault(id(value), (path, name))
        return _replace_leaves(
            (args, kwargs), lambda v: {_REFERENCE_KEY: list(known[id(v)])} if id(v) in known else v
        )


class StatementBlock(FunctionBlock):
    """Runs a range of statements of the forward of `owner`, a module of the model.

    In these statements `self` is an object of the owner's class with the owner's attributes, and with the
    parameters of the block, which a rank may have where it has not those of the owner.
    """

    def __init__(
        self,
        forward: FunctionType,
        root: nn.Module,
        owner: nn.Module,
        outlined: OutlinedStatements,
        name: str,
    ) -> None:
        nn.Module.__init__(self)
        self.function, self.intercepted = outlined.run, (forward,)
        self._root, self._owner, self.outlined, self.name = (root,), (owner,), outlined, name
        self._forwards = dict[tuple[tuple[int, int], ...], CodeType]()  # by ranges that are blocks
        for name in sorted(outlined.children):
            for kind in _STATE_KINDS:
                if name in vars(owner)[kind]:
                    vars(self)[kind][name] = vars(owner)[kind][name]
        self.register_load_state_dict_post_hook(self._forget_missing_names)

    def forward(self, given: dict[str, Any]) -> Any:
        """Run the statements with variables by name; return those that later statements read, by name."""
        owner = self.owning_module
        view = object.__new__(type(owner))
        view.__dict__ |= vars(owner)
        for kind in _STATE_KINDS:
            view.__dict__[kind] = vars(owner)[kind] | vars(self)[kind]
        return self.function(view, given)

    def name_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments as they are."""
        return args, kwargs

    def call_directly(self, args: Any, kwargs: Any) -> Any:
        """Run the statements where they stand."""
        return self.function(self.owning_module, *args, **kwargs)

    @property
    def owning_module(self) -> nn.Module:
        """The module that these statements are taken from."""
        return self._owner[0]

    def forward_with_calls(self, outlined: Collection[OutlinedStatements]) -> CodeType:
        """Return code of the owner's forward with calls in place of these ranges and no others."""
        spans = tuple(part.span for part in outlined)
        if spans not in self._forwards:
            self._forwards[spans] = compile_forward_with_calls(
                self.intercepted[0], self.owning_module, outlined
            )
        return self._forwards[spans]

    def _forget_missing_names(self, _: nn.Module, keys: Any) -> None:
        """The model has what this block holds under the names of its owner."""
        (name,) = (n for n, m in self._root[0].named_children() if m is self)
        keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith(f"{name}.")]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return no entries: the model has them under the names of their owners."""
        return kwargs.get("destination", args[0] if args else {})


def add_function_block(model: nn.Module, function: str, model_file: str) -> str:
    """Add a function, or a range of statements, to the model as a block; a model that has it stays as it is.
    model_file: name of the imported module that "" stands for. Returns the block's path. Raises ImportError,
    AttributeError or NotOutlinable if the function cannot be found."""
    statements = StatementRange.parse(function)
    if statements is not None:
        owner = model.get_submodule(statements.path)
        forward = find_function(statements.function, model_file)
        outlined = outline_statements(forward, owner, statements.first, statements.last)
        first, last = outlined.lines
        children, path = (
            dict(model.named_children()),
            f"line_{first}" if first == last else f"lines_{first}_to_{last}",
        )
        while path in children and getattr(children[path], "name", "") != function:
            path += "_"  # of another module, or file
        if path not in children:
            kind = type(
                f"{type(owner).__name__}Statements", (StatementBlock,), {"__module__": forward.__module__}
            )
            model.add_module(path, kind(forward, model, owner, outlined, function))
        return path
    path, found = block_path(function), find_function(function, model_file)
    if path not in dict(model.named_children()):
        kind = type(found.__name__, (FunctionBlock,), {"__module__": found.__module__})
        model.add_module(path, kind(found, model))
    return path


def block_path(function: str) -> str:
    """Return the path of a function's block."""
    return re.sub(r"\W+", "_", function.rpartition(":")[2])


def function_blocks_of(model: nn.Module) -> dict[str, FunctionBlock]:
    """Return the function blocks of a model by path."""
    return {path: m for path, m in model.named_children() if isinstance(m, FunctionBlock)}


def find_running_functions(forward: CodeType | None, is_model_file: Callable[[str], bool]) -> list[str]:
    """Return the names of the functions that run inside the innermost call of `forward`, outermost first, as
    far as a plan can name them: functions and methods of a file's top level without variables of an outer
    function."""
    frames, frame = list[FrameType](), sys._getframe(1)
    while frame is not None and frame.f_code is not forward:
        frames.append(frame)
        frame = frame.f_back
    if frame is None:
        return []
    names = list[str]()
    for inner in reversed(frames):
        module, code = str(inner.f_globals.get("__name__")), inner.f_code
        if is_internal_file(code.co_filename) or code.co_freevars or module == "__main__":
            continue
        try:
            found = unwrap_function(operator.attrgetter(code.co_qualname)(sys.modules[module]))
        except (KeyError, AttributeError):
            continue
        if found is not None and found.__code__ is code:
            names.append(f"{'' if is_model_file(module) else module}:{code.co_qualname}")
    return list(dict.fromkeys(names))


@contextmanager
def intercepted_functions(model: nn.Module, handle: CallHandler) -> Iterator[None]:
    """Let `handle(block, args, kwargs)` replace every call of the functions of a model's function blocks.

    The code of the function itself is replaced, since the user's code may hold it under any name.
    """
    by_function = dict[FunctionType, list[FunctionBlock]]()
    for block in function_blocks_of(model).values():
        by_function.setdefault(block.intercepted[0], []).append(block)
    with ExitStack() as stack:
        for function, blocks in by_function.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _intercepting_code(function, blocks, handle)
        yield


def _intercepting_code(function: FunctionType, blocks: list[FunctionBlock], handle: CallHandler) -> CodeType:
    """Return code for a function in which `handle` stands for its blocks: all of it, or else ranges."""
    statements = [b for b in blocks if isinstance(b, StatementBlock)]
    if whole := [b for b in blocks if b not in statements]:
        return _code_that_calls(lambda *args, **kwargs: handle(whole[0], args, kwargs), function)
    by_span = dict[tuple[int, int], list[StatementBlock]]()
    for block in statements:
        by_span.setdefault(block.outlined.span, []).append(block)

    def make_handler(alike: list[StatementBlock]) -> Callable[[Any, dict[str, Any]], Any]:
        def run_statements(owner: Any, given: dict[str, Any]) -> Any:
            block = next((b for b in alike if b.owning_module is owner), None)
            return alike[0].function(owner, given) if block is None else handle(block, (given,), {})

        return run_statements

    code = statements[0].forward_with_calls([alike[0].outlined for alike in by_span.values()])
    return call_in_place_of_ranges(code, {span: make_handler(alike) for span, alike in by_span.items()})


def _code_that_calls(handler: Callable[..., Any], function: FunctionType) -> CodeType:
    def call(*args: Any, **kwargs: Any) -> Any:
        handler: Any = "handler"
        return handler(*args, **kwargs)

    constants = tuple(handler if c == "handler" else c for c in call.__code__.co_consts)
    old = function.__code__
    return call.__code__.replace(
        co_consts=constants, co_filename=old.co_filename, co_firstlineno=old.co_firstlineno
    )


def _copy_function(function: FunctionType) -> FunctionType:
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied


def _resolve_references(value: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Return arguments with the model's own objects in place of references."""
    if isinstance(value, dict) and set(value) == {_REFERENCE_KEY}:
        path, name = value[_REFERENCE_KEY]
        return getattr(modules[path], name) if name else modules[path]
    if isinstance(value, dict):
        return {key: _resolve_references(child, modules) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_resolve_references(child, modules) for child in value)
    return value


def _replace_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return lists, tuples and plain dicts with other values replaced; tensors and plain data stay."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {key: _replace_leaves(child, leaf) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace_leaves(child, leaf) for child in value)
    return leaf(value)
