"""Goes through a model's blocks and finds what fused operators can compute in them; alike modules are looked
at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from secc.frontend.fusion import candidate_sites
from secc.frontend.fusion.apply_rules import Missed, rewrite
from secc.frontend.fusion.site_source import source
from secc.frontend.fusion.site_trace import (
    Refused,
    code_of,
    place_of,
    tensors_of,
    trace_function,
    trace_method,
)
from secc.runtime.fusion.install import rebound


@dataclass
class Form:
    """Rewritten code, and the modules whose `method` it replaces, or whose method calls it where it calls
    `function`.

    `code` are the lines of a function, `lines` the user's line for each.
    """

    name: str
    cls: str
    rules: tuple[str, ...]
    method: str
    function: str
    where: str
    code: tuple[str, ...]
    lines: tuple[int, ...]
    modules: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Miss:
    """Code in which no rule applies although one might be expected to: which rule ("" for all of them), and
    why."""

    cls: str
    site: str
    rule: str
    reason: str
    where: str


@dataclass
class Fusions:
    """All that was found in a model."""

    forms: list[Form]
    misses: list[Miss]


@dataclass(frozen=True)
class _Site:
    """What one site came to: its code, or nothing."""

    rules: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    where: str = ""
    misses: tuple[Miss, ...] = ()


@dataclass(frozen=True)
class _Traced:
    """A site, the names of the attributes that its trace read (None: it may have read any), and what these
    were."""

    site: _Site
    names: frozenset[str] | None
    attributes: frozenset[tuple[str, Any]]


@dataclass
class Looked:
    """What methods and functions came to, for one choice of rules.

    A method's sites are kept with the attributes of the module that its trace read, and what these were:
    those of another module may be others (a layer's number) where the trace read none of them.
    """

    methods: dict[Any, list[_Traced]] = field(default_factory=dict[Any, "list[_Traced]"])
    functions: dict[FunctionType, _Site] = field(default_factory=dict[FunctionType, _Site])


def find(
    model: nn.Module, blocks: Iterable[str], skip: Collection[str] = (), looked: Looked | None = None
) -> Fusions:
    """What the rules but those in `skip` find in the modules of `blocks` (paths). `model` may be on the meta
    device; it is not changed.

    `looked` is what an earlier search of the same model came to, and keeps what this one does.
    """
    search = _Search(skip, looked or Looked())
    for path, module in _modules(model, blocks):
        search.visit(path, module)
    return Fusions([f for f in search.forms.values()], list(search.misses))


def _modules(model: nn.Module, blocks: Iterable[str]) -> Iterable[tuple[str, nn.Module]]:
    """Each module in the blocks once, under its first path."""
    seen = set[int]()
    for block in blocks:
        for path, module in model.get_submodule(block).named_modules(prefix=block):
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module


class _Search:
    def __init__(self, skip: Collection[str], looked: Looked) -> None:
        self._skip, self._looked = skip, looked
        self.forms: dict[Any, Form] = {}
        self.misses: dict[Miss, None] = {}
        self._called: dict[type, dict[tuple[str, str], FunctionType]] = {}

    def visit(self, path: str, module: nn.Module) -> None:
        """Find the module's forms."""
        done = set[str]()
        for method in candidate_sites.methods(type(module)):
            if "forward" in done:
                break  # whatever else the class computes, forward has it inside
            found = self._method(module, method)
            if found.code:
                done.add(method)
                self._note(path, type(module).__name__, method, "", found)
        cls = type(module)
        if cls not in self._called:
            self._called[cls] = candidate_sites.functions(cls)
        for (method, name), function in self._called[cls].items():
            found = self._function(function)
            if found.code and method not in done and method not in vars(module) and _may_rebind(cls, method):
                self._note(path, cls.__name__, method, name, found)

    def _note(self, path: str, cls: str, method: str, function: str, found: _Site) -> None:
        key = cls, method, function, found.code, found.lines, found.where
        if key not in self.forms:
            name = _snake(function or (cls if method == "forward" else f"{cls}_{method.strip('_')}"))
            name = _unused(name, {f.name for f in self.forms.values()})
            code = (found.code[0].replace("FUSED", name, 1), *found.code[1:])
            self.forms[key] = Form(name, cls, found.rules, method, function, found.where, code, found.lines)
        self.forms[key].modules.append(path)

    def _method(self, module: nn.Module, method: str) -> _Site:
        function = getattr(type(module), method, None)
        known = self._looked.methods.setdefault((function, candidate_sites.signature(module)), [])
        found = next((t for t in known if t.attributes == candidate_sites.attributes(module, t.names)), None)
        if found is None:
            reads = set[str]()
            name = f"{type(module).__name__}.{method}"
            site = self._look(name, function, lambda: trace_method(module, method, reads), module)
            names = None if "__dict__" in reads else frozenset(reads)
            found = _Traced(site, names, candidate_sites.attributes(module, names))
            known.append(found)
        self.misses |= dict.fromkeys(found.site.misses)
        return found.site

    def _function(self, function: FunctionType) -> _Site:
        known = self._looked.functions
        if function not in known:
            known[function] = self._look(function.__name__, function, lambda: trace_function(function), None)
        self.misses |= dict.fromkeys(known[function].misses)
        return known[function]

    def _look(self, site: str, function: Any, trace: Any, module: nn.Module | None) -> _Site:
        """Trace a site and apply the rules."""
        cls = type(module).__name__ if module is not None else ""
        code = code_of(function)
        where = place_of(code) if code is not None else ""
        try:
            if module is not None and code is not None:
                _check(module, code)
            graph = trace()
            tensors: Mapping[str, torch.Tensor] = tensors_of(module) if module is not None else {}
            found, missed = rewrite(graph, tensors, self._skip)
            misses = tuple(Miss(cls, site, m.rule, m.reason, _place(code, m)) for m in missed)
            if not found:
                return _Site(misses=misses)
            assert code is not None
            text, lines = source(graph, "FUSED", module is not None, code.co_firstlineno)
            return _Site(tuple(f.rule for f in found), tuple(text), tuple(lines), where, misses)
        except Refused as refused:
            inner = inspect.unwrap(function)
            looked = isinstance(inner, FunctionType) and candidate_sites.promising(inner)
            return _Site(misses=(Miss(cls, site, "", str(refused), where),) if looked else ())


def _may_rebind(cls: type, method: str) -> bool:
    """Whether a method can be told to look up a global elsewhere."""
    try:
        rebound(getattr(cls, method), {})
    except ValueError:
        return False
    return True


def _check(module: nn.Module, code: CodeType) -> None:
    """Refuse what a rewritten module would do differently in ways that no trace shows: it knows the dtypes of
    parameters only."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) > 1 and "dtype" in code.co_names:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise Refused(f"it reads dtypes, and its parameters have several ({found})")


def _place(code: Any, missed: Missed) -> str:
    return place_of(code, missed.node) if code is not None else ""


def _snake(name: str) -> str:
    """`LlamaRMSNorm` as `llama_rms_norm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


def _unused(name: str, taken: set[str]) -> str:
    return next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}_{i}") not in taken)
