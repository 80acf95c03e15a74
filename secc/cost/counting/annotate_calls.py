"""Writes on every call of a block what it costs, as exact polynomials over input sizes.

The user's block runs on meta tensors at a few small sizes (`secc.cost.counting.meta_run`), and polynomials
are fitted to the counts (`secc.cost.counting.polynomial_fit`). Equal calls, such as the layers of a stack,
are measured once. A block that needs values is measured on samples of the dataset. One that does not run on
the meta device either, or without a small polynomial through its counts, keeps the default estimate and the
label `default`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd, prod
from typing import Any

import sympy
import torch
from torch import nn
from xdsl.dialects.builtin import IntegerAttr, IntegerType, ModuleOp, StringAttr
from xdsl.ir import SSAValue

from secc.cost.counting.example_arguments import (
    NO_SAMPLES,
    NO_VALUES,
    CallExamples,
    CollatedSamples,
    OperandValues,
)
from secc.cost.counting.meta_run import BlockCounts, ValuelessTensors, run_on_meta
from secc.cost.counting.polynomial_fit import GRIDS, SizeGrid, fit_mean_cost, fit_polynomials
from secc.cost.model.default_estimate import ZERO, CallCost, default_call_cost
from secc.cost.model.glue_memory import op_has_backward
from secc.ir.analysis.run_glue import fill_arguments
from secc.ir.analysis.sample_sizes import read_all_samples
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import BlockOp, CallOp, CaseOp, GraphOp, TieOp, graph_of, strings_of
from secc.ir.dialect.python_attributes import int_attr
from secc.ir.dialect.readable_names import OUT_OF_TURN_ATTRIBUTE
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.runtime.model.nested_batch import listed
from secc.runtime.sections.recompute import recompute_units

CallKey = tuple[object, ...]
KnownCallCosts = dict[CallKey, CallCost | None]
FITTED_FIELDS = (
    "flops",
    "attention",
    "work",
    "attention_work",
    "moved",
    "saved",
    "kept",
    "working",
    "again",
    "again_moved",
    "unneeded",
    "routed",
    "routed_work",
    "exchanged",
    "queries",
    "pieces",
    "parts",
    "entries",
    "unshared",
)
WORK_FIELDS = frozenset({"work", "attention_work", "again", "unneeded", "routed_work"})


def annotate_calls(
    module: ModuleOp,
    model: nn.Module,
    samples: CollatedSamples = NO_SAMPLES,
    prefix: str = "",
    known: KnownCallCosts | None = None,
) -> None:
    """Write costs on every `sec.call`, and parameter bytes on blocks and ties.

    Calls get `flops`, `saved` and the other fields of `secc.cost.model.default_estimate.CallCost` as
    attributes; those about recomputation only if a submodule can run again.

    module: the IR. model: the user's model on any device; it is neither run with values nor changed.
    samples: dataset samples for blocks that read values of integer arguments.
    prefix: prepended to the attributes of calls, for a model with rewritten modules that is measured in
        addition to the original.
    known: costs of calls measured before, by key; new ones are added.
    """
    graph = graph_of(module)
    for path, block in graph.blocks.items():
        _annotate_parameter_bytes(block, list(model.get_submodule(path).parameters()))
    for op in graph.body.block.ops:
        if isinstance(op, TieOp):
            _annotate_parameter_bytes(op, [model.get_parameter(strings_of(op.names)[0])])
    measurer = _CallMeasurer(graph, model, samples, {} if known is None else known)
    for case, call in _cases_and_calls(graph):
        _annotate_call(call, measurer.call_cost(case, call), prefix)


def measure_unknown_calls(
    module: ModuleOp, model: nn.Module, samples: CollatedSamples, known: KnownCallCosts
) -> list[CallCost | None]:
    """Measure one call of each kind that is not in `known`, in the order of the calls; None where the
    estimate applies.

    Call keys cannot be pickled. A child process therefore runs this function, and the parent
    `store_call_costs`.
    """
    measurer = _CallMeasurer(graph_of(module), model, samples, known)
    return [measurer.measure_call(case, call) for case, call in measurer.unknown_calls()]


def store_call_costs(
    module: ModuleOp, model: nn.Module, costs: Sequence[CallCost | None], known: KnownCallCosts
) -> None:
    """Add the result of `measure_unknown_calls` on the same module to `known`."""
    measurer = _CallMeasurer(graph_of(module), model, NO_SAMPLES, known)
    known |= {
        measurer.call_key(call): cost for (_, call), cost in zip(measurer.unknown_calls(), costs, strict=True)
    }


def _cases_and_calls(graph: GraphOp) -> Iterator[tuple[CaseOp, CallOp]]:
    return ((case, op) for case in graph.cases for op in case.ops if isinstance(op, CallOp))


def _annotate_parameter_bytes(op: BlockOp | TieOp, parameters: list[nn.Parameter]) -> None:
    trainable = [p for p in parameters if p.requires_grad]
    op.attributes["bytes"] = int_attr(sum(p.numel() * p.element_size() for p in parameters))
    op.attributes["trainable_bytes"] = int_attr(sum(p.numel() * p.element_size() for p in trainable))
    if isinstance(op, BlockOp):
        op.attributes["tensors"] = int_attr(len(trainable))
    else:
        op.attributes["params"] = int_attr(sum(p.numel() for p in parameters))


def _annotate_call(call: CallOp, cost: CallCost, prefix: str) -> None:
    attributes: dict[str, StringAttr | IntegerAttr[IntegerType]] = {
        key: StringAttr(size_expr.format_expr(getattr(cost, key)))
        for key in ("flops", "work", "saved", "attention", "attention_work", "moved")
    }
    if cost.routed != 0:
        routed = {key: getattr(cost, key) for key in ("routed", "routed_work")}
        attributes |= {key: StringAttr(size_expr.format_expr(value)) for key, value in routed.items()}
    if cost.exchanged != 0:
        attributes["exchanged"] = StringAttr(size_expr.format_expr(cost.exchanged))
    if cost.pieces != 0 or cost.entries != 0:
        shared = {key: getattr(cost, key) for key in ("pieces", "parts", "entries", "unshared")}
        attributes |= {k: StringAttr(size_expr.format_expr(v)) for k, v in shared.items() if v != 0}
    if cost.queries != 0 and cost.key_heads > 1:
        attributes["queries"] = StringAttr(size_expr.format_expr(cost.queries))
        attributes["key_heads"] = int_attr(cost.key_heads)
    attributes |= {"peak": StringAttr(size_expr.format_expr(cost.peak))} if cost.peak != 0 else {}
    attributes |= {
        "ops": int_attr(cost.ops),
        "cost": StringAttr(cost.label),
        "narrow": int_attr(cost.narrowest_dim),
    }
    if cost.units:
        attributes["layers"] = int_attr(cost.units)
    if not cost.units_in_order:
        attributes[OUT_OF_TURN_ATTRIBUTE] = StringAttr("noted")
    if cost.units and cost.saved != 0:
        attributes["units"] = int_attr(cost.units)
        attributes |= {
            key: StringAttr(size_expr.format_expr(getattr(cost, key)))
            for key in ("kept", "working", "again", "again_moved")
        }
        if cost.unneeded != 0:
            attributes["unneeded"] = StringAttr(size_expr.format_expr(cost.unneeded))
    call.attributes |= {prefix + key: value for key, value in attributes.items()}


class _CallMeasurer:
    """Measures calls, equal ones once."""

    def __init__(
        self, graph: GraphOp, model: nn.Module, samples: CollatedSamples, known: KnownCallCosts
    ) -> None:
        self._graph, self._model, self._known = graph, model, known
        self._examples = CallExamples(graph, samples)

    def call_key(self, call: CallOp) -> CallKey:
        """What determines the cost of a call: class and parameters of the block, arguments and their
        types."""
        block = self._model.get_submodule(call.target.data)
        shapes = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
        return (
            type(block),
            shapes,
            call.args.data,
            tuple(str(o.type) for o in call.operands),
            call.no_grad is None,
        )

    def unknown_calls(self) -> list[tuple[CaseOp, CallOp]]:
        """The first call of each kind without a known cost."""
        first: dict[CallKey, tuple[CaseOp, CallOp]] = {}
        for case, call in _cases_and_calls(self._graph):
            first.setdefault(self.call_key(call), (case, call))
        return [first_call for key, first_call in first.items() if key not in self._known]

    def call_cost(self, case: CaseOp, call: CallOp) -> CallCost:
        """The cost of a call: counted on the meta device, else measured on samples, else the default
        estimate."""
        key = self.call_key(call)
        if key not in self._known:
            self._known[key] = self.measure_call(case, call)
        return self._known[key] or self._default_cost(call)

    def _default_cost(self, call: CallOp) -> CallCost:
        """The estimate for a block that could not be run: nothing shows that its layers run in order, or that
        no other code takes their weights."""
        block = self._model.get_submodule(call.target.data)
        cost = default_call_cost(call, self._graph.blocks[call.target.data])
        has_layers = any(unit is not block for unit in recompute_units(block))
        return replace(cost, units_in_order=False) if has_layers else cost

    def measure_call(self, case: CaseOp, call: CallOp) -> CallCost | None:
        """The cost of a call, or None where only the default estimate is left."""
        block = self._model.get_submodule(call.target.data)
        return (
            self._count_on_meta(call, block)
            or self._count_on_meta(call, block, values_inside=True)
            or self._measure_on_samples(case, call, block)
        )

    def _count_on_meta(self, call: CallOp, block: nn.Module, values_inside: bool = False) -> CallCost | None:
        """Fit exact polynomials to counts on the meta device.

        Returns None if the block needs values or no small polynomial fits. With `values_inside`, tensors that
        the block itself creates have values.
        """
        tensors = ValuelessTensors(values_inside=values_inside)
        kinds = {name: self._graph.symbols[name].kind.data for name in _call_symbols(call)}
        runs: dict[tuple[int, ...], BlockCounts] = {}

        def run(sizes: dict[str, int]) -> BlockCounts:
            key = tuple(sizes.values())
            if key not in runs:
                runs[key] = run_on_meta(
                    block,
                    lambda tensors: meta_arguments(call, sizes, tensors),
                    call.no_grad is None,
                    recompute_units(block),
                    tensors,
                    has_backward=op_has_backward(call),
                )
            return runs[key]

        def counts_at(sizes: dict[str, int]) -> tuple[int, ...]:
            return tuple(getattr(run(sizes), key) for key in FITTED_FIELDS)

        for grid in GRIDS:
            runs.clear()
            try:
                if (fitted := fit_polynomials(counts_at, kinds, grid)) is None:
                    return None
                peak = _fit_peak(run, [*runs.values()], kinds, grid)
            except Exception:  # the user's code may raise anything on tensors without values
                if runs or self._has_small_widths(kinds, grid):
                    continue  # smaller sizes may be within a limit of the code
                return None
            units = len(recompute_units(block))
            return _call_cost_from_runs([*runs.values()], fitted, "counted", units, peak)
        return None

    def _has_small_widths(self, kinds: Mapping[str, str], grid: SizeGrid) -> bool:
        """Whether some width is below the sizes of a grid in all samples."""
        samples = [sizes for _, sizes in read_all_samples(self._graph)]
        widths = [name for name, kind in kinds.items() if kind == "width"]
        return bool(samples) and any(max(s.get(w, 0) for s in samples) < grid.first for w in widths)

    def _measure_on_samples(self, case: CaseOp, call: CallOp, block: nn.Module) -> CallCost | None:
        """Fit the mean cost over dataset samples, for blocks that depend on values of inputs (such as
        boundaries of packed samples or image grids)."""
        terms = self._mean_cost_terms(call)
        runs, points, tensors = list[BlockCounts](), list[list[int]](), ValuelessTensors(fake=True)
        try:
            for example in self._examples.examples_of_call(case, call):
                arguments = partial(meta_arguments, call, example.sizes, values=example.values)
                runs.append(
                    run_on_meta(
                        block,
                        arguments,
                        call.no_grad is None,
                        recompute_units(block),
                        tensors,
                        has_backward=op_has_backward(call),
                    )
                )
                points.append([int(size_expr.evaluate_size(term, example.sizes)) for term in terms])
        except Exception:  # as above
            return None
        if not runs or not terms:
            return None
        fitted = [fit_mean_cost(terms, points, [getattr(t, key) for t in runs]) for key in FITTED_FIELDS]
        peak = fit_mean_cost(terms, points, [t.peak for t in runs])
        return _call_cost_from_runs(runs, fitted, "sampled", len(recompute_units(block)), peak)

    def _mean_cost_terms(self, call: CallOp) -> list[Expr]:
        """The terms of a mean cost: rows of floating operands, and rows times widths for operands that
        have both."""
        rows, widths, products = set[str](), set[str](), set[tuple[str, str]]()
        for operand in filter(_is_floating, call.operands):
            names = set[str]().union(*(size_expr.symbol_names(d) for d in tensor_type(operand).shape))
            wide = {name for name in names if self._graph.symbols[name].kind.data == "width"}
            rows |= names - wide
            widths |= wide
            products |= {*product(names - wide, wide)}
        lone_widths = widths - {width for _, width in products}
        return [size_expr.size_symbol(n) for n in sorted(rows | lone_widths)] + [
            size_expr.size_symbol(r) * size_expr.size_symbol(w) for r, w in sorted(products)
        ]


def _fit_peak(
    run: Callable[[dict[str, int]], BlockCounts],
    runs: Sequence[BlockCounts],
    kinds: Mapping[str, str],
    grid: SizeGrid,
) -> Expr:
    """Fit the peak of live bytes: the maximum of one polynomial for each operation at which some run peaked.

    0 if runs issue different operations: their positions do not correspond then.
    """
    positions = sorted({t.live_bytes.index(t.peak) for t in runs if t.live_bytes})
    if not positions or len({len(t.live_bytes) for t in runs}) > 1:
        return ZERO
    return sympy.Max(
        *fit_polynomials(lambda sizes: [run(sizes).live_bytes[i] for i in positions], kinds, grid) or (ZERO,)
    )


def _call_cost_from_runs(
    runs: Sequence[BlockCounts], fitted: Sequence[Expr], label: str, layers: int, peak: Expr
) -> CallCost:
    fields = {
        key: _hundredths_to_flops(value) if key in WORK_FIELDS else value
        for key, value in zip(FITTED_FIELDS, fitted, strict=True)
    }

    return CallCost(
        ops=max(t.ops for t in runs),
        label=label,
        units=layers,
        narrowest_dim=runs[-1].narrowest_dim,
        key_heads=gcd(*(run.key_heads for run in runs)),
        units_in_order=all(run.units_in_order for run in runs),
        peak=peak,
        **fields,
    )


def _hundredths_to_flops(work: Expr) -> Expr:
    """Work in FLOPs instead of hundredths, rounded for each monomial."""
    terms = sympy.expand(work).as_coefficients_dict()
    return sympy.Add(*(round(c / 100) * monomial for monomial, c in terms.items()))


def _call_symbols(call: CallOp) -> set[str]:
    """The symbols in the operand shapes and arguments of a call."""
    sizes = [d for o in call.operands for d in tensor_type(o).shape]
    sizes += [leaf for leaf in call.arguments.leaves() if isinstance(leaf, sympy.Expr)]
    return set[str]().union(*(size_expr.symbol_names(s) for s in sizes))


def _is_floating(value: SSAValue) -> bool:
    return getattr(torch, tensor_type(value).torch_dtype).is_floating_point


def meta_arguments(
    call: CallOp, sizes: Mapping[str, int], tensors: ValuelessTensors, values: OperandValues = NO_VALUES
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call at given sizes: tensors without values from `tensors`, known values of
    integer operands."""
    operands = [
        values[o] if o in values else _meta_operand(tensor_type(o), sizes, tensors) for o in call.operands
    ]
    arguments = fill_arguments(call, operands, sizes, tensors.device)
    return listed(arguments.args), listed(arguments.kwargs)


def _meta_operand(type_: TensorType, sizes: Mapping[str, int], tensors: ValuelessTensors) -> torch.Tensor:
    dims = [int(size_expr.evaluate_size(d, sizes)) for d in type_.shape]
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    return tensors(dims, strides, getattr(torch, type_.torch_dtype), type_.requires_grad)
