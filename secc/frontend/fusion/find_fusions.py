"""Goes through a model's blocks and finds what fused operators can compute in them; equal modules are
traced once."""

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
from secc.frontend.fusion.apply_rules import MissedRule, rewrite_graph
from secc.frontend.fusion.residual_norms import RESIDUAL_NORM, depends_through_norm, rewrite_layer
from secc.frontend.fusion.site_source import write_source
from secc.frontend.fusion.site_trace import (
    SiteRefused,
    named_tensors,
    plain_code,
    site_place,
    trace_function,
    trace_method,
)
from secc.runtime.fusion.install import rebind_globals


@dataclass
class FusedForm:
    """Rewritten code, and the modules with the `method` that it replaces, or in which `method` calls it
    instead of `function`.

    code: lines of a function. lines: the user's line for each.
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
class FusionMiss:
    """Code to which no rule applies although one might be expected to: the rule ("" for all of them) and
    the reason."""

    cls: str
    site: str
    rule: str
    reason: str
    where: str


@dataclass
class FoundFusions:
    """All forms and misses found in a model."""

    forms: list[FusedForm]
    misses: list[FusionMiss]


@dataclass(frozen=True)
class _SiteResult:
    """The rewritten code of one site, or nothing. is_norm: it depends on its argument through one norm
    operator alone."""

    rules: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    where: str = ""
    misses: tuple[FusionMiss, ...] = ()
    is_norm: bool = False


@dataclass(frozen=True)
class _TracedMethod:
    """A method's result, the names of the attributes that its trace read (None: it may have read any), and
    their values."""

    site: _SiteResult
    read_names: frozenset[str] | None
    attributes: frozenset[tuple[str, Any]]


@dataclass
class TracedSites:
    """Results of methods and functions, for one choice of rules.

    A method's results are kept with the attributes that its trace read: for another module the result
    holds only if these are equal (a layer's number may differ if the trace did not read it).
    """

    methods: dict[Any, list[_TracedMethod]] = field(default_factory=dict[Any, "list[_TracedMethod]"])
    functions: dict[FunctionType, _SiteResult] = field(default_factory=dict[FunctionType, _SiteResult])


def find_fusions(
    model: nn.Module, blocks: Iterable[str], skip: Collection[str] = (), traced: TracedSites | None = None
) -> FoundFusions:
    """Applies the rules except those in `skip` to the modules of `blocks` (paths). `model` may be on the
    meta device; it is not changed.

    traced: results of an earlier search of the same model; new ones are added.
    """
    search = _FusionSearch(skip, traced or TracedSites())
    for path, module in _unique_modules(model, blocks):
        search.visit_module(path, module)
    return FoundFusions([f for f in search.forms.values()], list(search.misses))


def _unique_modules(model: nn.Module, blocks: Iterable[str]) -> Iterable[tuple[str, nn.Module]]:
    """Yields each module in the blocks once, under its first path."""
    seen = set[int]()
    for block in blocks:
        for path, module in model.get_submodule(block).named_modules(prefix=block):
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module


class _FusionSearch:
    def __init__(self, skip: Collection[str], looked: TracedSites) -> None:
        self._skip, self._traced_sites = skip, looked
        self.forms: dict[Any, FusedForm] = {}
        self.misses: dict[FusionMiss, None] = {}
        self._called_functions: dict[type, dict[tuple[str, str], FunctionType]] = {}

    def visit_module(self, path: str, module: nn.Module) -> None:
        """Finds the module's forms."""
        fused_methods = set[str]()
        for method in candidate_sites.candidate_methods(type(module)):
            if "forward" in fused_methods:
                break  # whatever else the class computes, forward has it inside
            result = self._fuse_method(module, method)
            if result.code:
                fused_methods.add(method)
                self._add_form(path, type(module).__name__, method, "", result)
        cls = type(module)
        if "forward" not in fused_methods and RESIDUAL_NORM not in self._skip:
            layer = self._fuse_residual_norms(module)
            if layer.code:
                fused_methods.add("forward")
                self._add_form(path, cls.__name__, "forward", "", layer)
        if cls not in self._called_functions:
            self._called_functions[cls] = candidate_sites.candidate_functions(cls)
        for (method, name), function in self._called_functions[cls].items():
            result = self._fuse_function(function)
            if (
                result.code
                and method not in fused_methods
                and method not in vars(module)
                and _may_rebind(cls, method)
            ):
                self._add_form(path, cls.__name__, method, name, result)

    def _add_form(self, path: str, cls: str, method: str, function: str, result: _SiteResult) -> None:
        key = cls, method, function, result.code, result.lines, result.where
        if key not in self.forms:
            name = _to_snake_case(function or (cls if method == "forward" else f"{cls}_{method.strip('_')}"))
            name = _unused_name(name, {f.name for f in self.forms.values()})
            code = (result.code[0].replace("FUSED", name, 1), *result.code[1:])
            self.forms[key] = FusedForm(
                name, cls, result.rules, method, function, result.where, code, result.lines
            )
        self.forms[key].modules.append(path)

    def _fuse_method(self, module: nn.Module, method: str) -> _SiteResult:
        function = getattr(type(module), method, None)
        earlier = self._traced_sites.methods.setdefault(
            (function, candidate_sites.module_signature(module)), []
        )
        traced = next(
            (t for t in earlier if t.attributes == candidate_sites.plain_attributes(module, t.read_names)),
            None,
        )
        if traced is None:
            reads = set[str]()
            name = f"{type(module).__name__}.{method}"
            site = self._trace_and_rewrite(
                name, function, lambda: trace_method(module, method, reads), module
            )
            names = None if "__dict__" in reads else frozenset(reads)
            traced = _TracedMethod(site, names, candidate_sites.plain_attributes(module, names))
            earlier.append(traced)
        self.misses |= dict.fromkeys(traced.site.misses)
        return traced.site

    def _fuse_residual_norms(self, module: nn.Module) -> _SiteResult:
        """Rewrites the sums of a layer's own code that its norms follow."""
        layer = rewrite_layer(module, lambda child: self._fuse_method(child, "forward").is_norm)
        if layer is None or not _may_rebind(type(module), "forward"):
            return _SiteResult()
        norms = [self._fuse_method(module.get_submodule(n), "forward") for n in layer.norms]
        rules = dict.fromkeys([RESIDUAL_NORM, *(rule for norm in norms for rule in norm.rules)])
        place = site_place(inspect.unwrap(type(module).forward).__code__)
        return _SiteResult(tuple(rules), layer.code, layer.lines, place)

    def _fuse_function(self, function: FunctionType) -> _SiteResult:
        results = self._traced_sites.functions
        if function not in results:
            results[function] = self._trace_and_rewrite(
                function.__name__, function, lambda: trace_function(function), None
            )
        self.misses |= dict.fromkeys(results[function].misses)
        return results[function]

    def _trace_and_rewrite(
        self, site: str, function: Any, trace: Any, module: nn.Module | None
    ) -> _SiteResult:
        """Traces a site and applies the rules."""
        cls = type(module).__name__ if module is not None else ""
        code = plain_code(function)
        where = site_place(code) if code is not None else ""
        try:
            if module is not None and code is not None:
                _check_dtypes(module, code)
            graph = trace()
            tensors: Mapping[str, torch.Tensor] = named_tensors(module) if module is not None else {}
            applied, missed = rewrite_graph(graph, tensors, self._skip)
            misses = tuple(FusionMiss(cls, site, m.rule, m.reason, _miss_place(code, m)) for m in missed)
            if not applied:
                return _SiteResult(misses=misses)
            assert code is not None
            text, lines = write_source(graph, "FUSED", module is not None, code.co_firstlineno)
            rules = tuple(f.rule for f in applied)
            is_norm = depends_through_norm(graph)
            return _SiteResult(rules, tuple(text), tuple(lines), where, misses, is_norm)
        except SiteRefused as refused:
            inner = inspect.unwrap(function)
            was_candidate = isinstance(inner, FunctionType) and candidate_sites.may_compute_kernel(inner)
            return _SiteResult(
                misses=(FusionMiss(cls, site, "", str(refused), where),) if was_candidate else ()
            )


def _may_rebind(cls: type, method: str) -> bool:
    """Whether a method can be rebuilt to look up a global elsewhere."""
    try:
        rebind_globals(getattr(cls, method), {})
    except ValueError:
        return False
    return True


def _check_dtypes(module: nn.Module, code: CodeType) -> None:
    """Refuses code that reads dtypes if the module's parameters have several: a trace only knows the
    dtypes of parameters."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) > 1 and "dtype" in code.co_names:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise SiteRefused(f"it reads dtypes, and its parameters have several ({found})")


def _miss_place(code: Any, missed: MissedRule) -> str:
    return site_place(code, missed.node) if code is not None else ""


def _to_snake_case(name: str) -> str:
    """`LlamaRMSNorm` as `llama_rms_norm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


def _unused_name(name: str, taken: set[str]) -> str:
    return next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}_{i}") not in taken)
