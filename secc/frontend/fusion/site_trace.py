"""Symbolic traces of sites: a method of a module with submodules as calls, or a function of tensors.

Whatever a trace cannot follow (a branch on a tensor, a loop over one, an in-place change, state that is
written) is refused with the reason. Dtype and shape of a parameter are known while tracing, those of other
tensors are not. Activations without parameters are traced through.
"""

from __future__ import annotations

import copy
import dis
import inspect
import re
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from secc.runtime.model.source_lines import format_source_line, is_internal_file

_RANDOM_CLASSES = ("Dropout", "RReLU")


class SiteRefused(Exception):
    """Raised for a site that cannot be traced or rewritten, with the reason."""


class _ParameterProxy(fx.Proxy):
    """A parameter, with its dtype and shape."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return self._tensor.ndim


class _SiteTracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, code: CodeType, method: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._file, self._first_line_number, self.traced_func_name = (
            code.co_filename,
            code.co_firstlineno,
            method,
        )
        self._tensors = tensors

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _is_activation(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if node.op == "get_attr":
            return _ParameterProxy(node, self, self._tensors[str(node.target)])
        return super().proxy(node)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a node with the line of the site's own file that asks for it."""
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = self._current_line()
        return node

    def _current_line(self) -> int:
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return frame.f_lineno
            frame = frame.f_back
        return self._first_line_number


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by every name that they have."""
    return dict(
        [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    )


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is a function of its input: nothing inside it, no hooks, nothing random."""
    if type(module).__name__.startswith(_RANDOM_CLASSES) or has_hooks(module):
        return False
    return not (module._parameters or module._buffers or module._modules)  # pyright: ignore[reportPrivateUsage]


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs around the module's forward."""
    return any(
        getattr(module, n)
        for n in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def plain_code(function: Any) -> CodeType | None:
    """Returns the code of a plain Python function; None for anything else, also for a decorated one."""
    function = getattr(function, "__func__", function)
    return (
        function.__code__
        if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")
        else None
    )


def trace_method(module: nn.Module, method: str, reads: set[str]) -> fx.Graph:
    """Returns the graph of a method called with tensors only and other arguments at their defaults.

    The names of the module's attributes that it reads are added to `reads`. Raises SiteRefused.
    """
    function = getattr(type(module), method)
    code = plain_code(function)
    reads.add(method)
    if code is None or method in vars(module):
        raise SiteRefused(f"its {method} is wrapped or replaced, so its own code does not show what runs")
    _check_code(code)
    twin = _watch_reads(module, reads)
    before = dict(vars(twin))
    graph = _trace_with_defaults(function, twin, _SiteTracer(code, method, named_tensors(module)))
    if any(vars(twin).get(k) is not v for k, v in before.items()) or len(before) != len(vars(twin)):
        raise SiteRefused(f"its {method} writes attributes of the module")
    return graph


def _watch_reads(module: nn.Module, reads: set[str]) -> nn.Module:
    """Returns a copy that shares everything, notes which attributes are read, and refuses reads of
    `training`, which may change after the trace."""

    def training(self: nn.Module) -> bool:
        raise SiteRefused("it reads self.training, which may change")

    def looked_up(self: nn.Module, name: str) -> Any:
        if name != "__dict__" or not _asked_by_torch():  # torch.fx goes through it for tensors
            reads.add(name)
        return own.__getattribute__(self, name)

    twin, own = copy.copy(module), type(module)
    twin.__class__ = type(
        own.__name__, (own,), {"training": property(training), "__getattribute__": looked_up}
    )
    return twin


def _asked_by_torch() -> bool:
    """Whether torch reads the attribute that the caller looks up."""
    frame = inspect.currentframe()
    asking = frame and frame.f_back and frame.f_back.f_back
    return asking is not None and is_internal_file(asking.f_code.co_filename)


def trace_function(function: FunctionType) -> fx.Graph:
    """Returns the graph of a function of tensors. Raises SiteRefused."""
    code = plain_code(function)
    if code is None:
        raise SiteRefused("it is wrapped")
    _check_code(code)
    return _trace_with_defaults(function, function, _SiteTracer(code, "forward", {}))


def _trace_with_defaults(function: Any, root: nn.Module | FunctionType, tracer: _SiteTracer) -> fx.Graph:
    """Traces with flags (None, bool, text) at their defaults; if that fails, with numbers at theirs too."""
    parameters = list(inspect.signature(function).parameters.values())[isinstance(root, nn.Module) :]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        raise SiteRefused("it takes any number of arguments")
    flags = {k: v for k, v in defaults.items() if v is None or isinstance(v, bool | str)}
    error: Exception | None = None
    for fixed in (flags, defaults) if flags != defaults else (flags,):
        try:
            graph = tracer.trace(root, dict(fixed))
        except Exception as raised:  # whatever the user's code does with values that are not there
            error = error or raised
            continue
        _drop_fixed_arguments(graph, fixed)
        _check_graph(graph)
        return graph
    raise SiteRefused(f"it cannot be traced: {_first_error_line(error)}")


def _drop_fixed_arguments(graph: fx.Graph, fixed: Mapping[str, Any]) -> None:
    """Removes arguments left at their defaults, torch.fx's checks of them, and unused variable arguments."""
    for node in reversed(list(graph.nodes)):
        checks = node.op == "call_function" and getattr(node.target, "__name__", "") in (
            "_assert_is_none",
            "_assert",
        )
        given = node.op == "placeholder" and (
            re.sub(r"_\d+$", "", str(node.target)) in fixed or str(node.target).startswith("**")
        )
        if (
            checks or given or (checks is False and getattr(node.target, "__name__", "") == "eq")
        ) and not node.users:
            graph.erase_node(node)


def _check_graph(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__"):
            raise SiteRefused(f"it changes a tensor in place ({name})")
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            raise SiteRefused("it uses a tensor that is neither a parameter nor a buffer")
        if node.op == "placeholder" and str(node.target).startswith("*"):
            raise SiteRefused("it takes any number of arguments")


def _check_code(code: CodeType) -> None:
    """Refuses in-place changes: a trace would turn `x *= y` into a new tensor, where the user's code
    writes to the old one."""
    for i in dis.get_instructions(code):
        if i.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"):
            raise SiteRefused(f"it writes to {i.argrepr or 'a container'}")
        if i.opname == "BINARY_OP" and i.argrepr.endswith("="):
            raise SiteRefused(f"it changes a tensor in place ({i.argrepr})")


def _first_error_line(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def site_place(code: CodeType, node: fx.Node | None = None) -> str:
    """Returns file:line of a site, or of a node in it."""
    return format_source_line(
        code, node.meta.get("line", code.co_firstlineno) if node is not None else code.co_firstlineno
    )
