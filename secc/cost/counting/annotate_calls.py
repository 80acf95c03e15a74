"""`measure`: notes at every call of a block what it costs, as exact polynomials over the inputs' sizes.

The user's block runs on meta tensors at a few small sizes (`secc.cost.counting.meta_run`) and the numbers are
fitted (`secc.cost.counting.polynomial_fit`); alike calls, such as the layers of a stack, are measured once. A
block that refuses the meta device, or whose numbers no small polynomial gives, keeps the estimate by its
parameters and the label `default`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
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
from secc.cost.counting.polynomial_fit import fit_mean_cost, fit_polynomials
from secc.cost.model.default_estimate import ZERO, CallCost, default_call_cost
from secc.cost.model.section_cost import owes_backward
from secc.ir.dialect import size_expr
from secc.ir.dialect.argument_template import DottedName, OperandRef
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
)
WORK_FIELDS = frozenset({"work", "attention_work", "again"})


def annotate_calls(
    module: ModuleOp,
    model: nn.Module,
    samples: CollatedSamples = NO_SAMPLES,
    prefix: str = "",
    known: KnownCallCosts | None = None,
) -> None:
    """Put `flops`, `saved` (texts over symbols), `ops` and `cost` (counted or default) on every `sec.call`,
    and bytes on blocks and ties.

    The keys on calls get a `prefix`: a model whose modules are rewritten is measured beside the user's own.

    A call with `units` that may run again also gets `kept`, `working` and `again` (see
    `secc.cost.model.default_estimate.CallCost`), one whose units do not run once each, in their order, is
    marked `out_of_turn`.

    `model` is the user's, on any device; it is neither run with values nor changed. `samples` are for blocks
    that read values of their integer arguments. `known` has what calls of the same modules cost, and keeps
    what this one finds.
    """
    graph = graph_of(module)
    for path, block in graph.blocks.items():
        _annotate_parameter_bytes(block, list(model.get_submodule(path).parameters()))
    for op in graph.body.block.ops:
        if isinstance(op, TieOp):
            _annotate_parameter_bytes(op, [model.get_parameter(strings_of(op.names)[0])])
    measuring = _CallMeasurer(graph, model, samples, {} if known is None else known)
    for case, call in _cases_and_calls(graph):
        _annotate_call(call, measuring.call_cost(case, call), prefix)


def measure_unknown_calls(
    module: ModuleOp, model: nn.Module, samples: CollatedSamples, known: KnownCallCosts
) -> list[CallCost | None]:
    """What calls cost that are not in `known`, one of each kind in the order of the calls; `keep` puts them
    there.

    So another process can learn them, to which no key of `Costs` travels.
    """
    measuring = _CallMeasurer(graph_of(module), model, samples, known)
    return [measuring.measure_call(case, call) for case, call in measuring.unknown_calls()]


def store_call_costs(
    module: ModuleOp, model: nn.Module, found: Sequence[CallCost | None], known: KnownCallCosts
) -> None:
    """Put what was learnt of a module's calls into `known`."""
    measuring = _CallMeasurer(graph_of(module), model, NO_SAMPLES, known)
    known |= {
        measuring.call_key(call): cost
        for (_, call), cost in zip(measuring.unknown_calls(), found, strict=True)
    }


def _cases_and_calls(graph: GraphOp) -> Iterator[tuple[CaseOp, CallOp]]:
    return ((case, op) for case in graph.cases for op in case.ops if isinstance(op, CallOp))


def _annotate_parameter_bytes(op: BlockOp | TieOp, parameters: list[nn.Parameter]) -> None:
    trained = [p for p in parameters if p.requires_grad]
    op.attributes["bytes"] = int_attr(sum(p.numel() * p.element_size() for p in parameters))
    op.attributes["trainable_bytes"] = int_attr(sum(p.numel() * p.element_size() for p in trained))
    if isinstance(op, BlockOp):
        op.attributes["tensors"] = int_attr(len(trained))
    else:
        op.attributes["params"] = int_attr(sum(p.numel() for p in parameters))


def _annotate_call(call: CallOp, cost: CallCost, prefix: str) -> None:
    noted: dict[str, StringAttr | IntegerAttr[IntegerType]] = {
        key: StringAttr(size_expr.format_expr(getattr(cost, key)))
        for key in ("flops", "work", "saved", "attention", "attention_work", "moved")
    }
    noted |= {"peak": StringAttr(size_expr.format_expr(cost.peak))} if cost.peak != 0 else {}
    noted |= {
        "ops": int_attr(cost.ops),
        "cost": StringAttr(cost.label),
        "narrow": int_attr(cost.narrowest_dim),
    }
    if cost.units:
        noted["layers"] = int_attr(cost.units)
    if not cost.units_in_order:
        noted[OUT_OF_TURN_ATTRIBUTE] = StringAttr("noted")
    if cost.units and cost.saved != 0:
        noted["units"] = int_attr(cost.units)
        noted |= {
            key: StringAttr(size_expr.format_expr(getattr(cost, key)))
            for key in ("kept", "working", "again", "again_moved")
        }
    call.attributes |= {prefix + key: value for key, value in noted.items()}


class _CallMeasurer:
    """Costs of calls, alike ones measured once."""

    def __init__(
        self, graph: GraphOp, model: nn.Module, samples: CollatedSamples, known: KnownCallCosts
    ) -> None:
        self._graph, self._model, self._examples, self._known = (
            graph,
            model,
            CallExamples(graph, samples),
            known,
        )

    def call_key(self, call: CallOp) -> CallKey:
        """What decides a call's cost."""
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
        """A call of each kind that is not known."""
        first: dict[CallKey, tuple[CaseOp, CallOp]] = {}
        for case, call in _cases_and_calls(self._graph):
            first.setdefault(self.call_key(call), (case, call))
        return [found for key, found in first.items() if key not in self._known]

    def call_cost(self, case: CaseOp, call: CallOp) -> CallCost:
        """Counted on the meta device, else from samples, else the estimate."""
        key = self.call_key(call)
        if key not in self._known:
            self._known[key] = self.measure_call(case, call)
        return self._known[key] or default_call_cost(call, self._graph.blocks[call.target.data])

    def measure_call(self, case: CaseOp, call: CallOp) -> CallCost | None:
        """The same, None instead of the estimate."""
        block = self._model.get_submodule(call.target.data)
        return (
            self._count_on_meta(call, block)
            or self._count_on_meta(call, block, own=True)
            or self._measure_on_samples(case, call, block)
        )

    def _count_on_meta(self, call: CallOp, block: nn.Module, own: bool = False) -> CallCost | None:
        """Polynomials that hold exactly, or None for a block that needs values (but those of its `own`
        tensors, if they have any) or whose numbers no small polynomial gives."""
        makes, kinds = (
            ValuelessTensors(own=own),
            {name: self._graph.symbols[name].kind.data for name in _call_symbols(call)},
        )
        trials: dict[tuple[int, ...], BlockCounts] = {}

        def trial(sizes: dict[str, int]) -> BlockCounts:
            key = tuple(sizes.values())
            if key not in trials:
                trials[key] = run_on_meta(
                    block,
                    lambda makes: meta_arguments(call, sizes, makes),
                    call.no_grad is None,
                    recompute_units(block),
                    makes,
                    owes=owes_backward(call),
                )
            return trials[key]

        def at(sizes: dict[str, int]) -> tuple[int, ...]:
            return tuple(getattr(trial(sizes), key) for key in FITTED_FIELDS)

        try:
            if (found := fit_polynomials(at, kinds)) is None:
                return None
            peak = _fit_peak(trial, [*trials.values()], kinds)
        except Exception:  # whatever the user's code does on tensors without values
            return None
        return _call_cost_from_runs([*trials.values()], found, "counted", len(recompute_units(block)), peak)

    def _measure_on_samples(self, case: CaseOp, call: CallOp, block: nn.Module) -> CallCost | None:
        """What samples of the dataset cost in the mean, by their rows: values of inputs decide (where samples
        begin, grids of images)."""
        terms = self._mean_cost_terms(call)
        trials, points, makes = list[BlockCounts](), list[list[int]](), ValuelessTensors(real=True)
        try:
            for example in self._examples.examples_of_call(case, call):
                at = partial(meta_arguments, call, example.sizes, values=example.values)
                trials.append(
                    run_on_meta(
                        block,
                        at,
                        call.no_grad is None,
                        recompute_units(block),
                        makes,
                        owes=owes_backward(call),
                    )
                )
                points.append([int(size_expr.evaluate_expr(term, example.sizes)) for term in terms])
        except Exception:  # as above
            return None
        if not trials or not terms:
            return None
        found = [fit_mean_cost(terms, points, [getattr(t, key) for t in trials]) for key in FITTED_FIELDS]
        peak = fit_mean_cost(terms, points, [t.peak for t in trials])
        return _call_cost_from_runs(trials, found, "sampled", len(recompute_units(block)), peak)

    def _mean_cost_terms(self, call: CallOp) -> list[Expr]:
        """What the cost of several samples is a sum of multiples of: rows of floating operands, and widths
        for each row that has them."""
        rows, wide, widths = set[str](), set[tuple[str, str]](), set[str]()
        for operand in filter(_is_floating, call.operands):
            names = set[str]().union(*(size_expr.symbol_names(d) for d in tensor_type(operand).shape))
            across = {name for name in names if self._graph.symbols[name].kind.data == "width"}
            rows, widths, wide = (
                rows | (names - across),
                widths | across,
                wide | {*product(names - across, across)},
            )
        alone = widths - {width for _, width in wide}
        return [size_expr.size_symbol(n) for n in sorted(rows | alone)] + [
            size_expr.size_symbol(r) * size_expr.size_symbol(w) for r, w in sorted(wide)
        ]


def _fit_peak(
    trial: Callable[[dict[str, int]], BlockCounts], trials: Sequence[BlockCounts], kinds: Mapping[str, str]
) -> Expr:
    """The largest of polynomials: one for each operation after which one of the trials held most. 0 where
    they issue unlike operations."""
    places = sorted({t.live_bytes.index(t.peak) for t in trials if t.live_bytes})
    if not places or len({len(t.live_bytes) for t in trials}) > 1:
        return ZERO
    return sympy.Max(
        *fit_polynomials(lambda sizes: [trial(sizes).live_bytes[i] for i in places], kinds) or (ZERO,)
    )


def _call_cost_from_runs(
    trials: Sequence[BlockCounts], found: Sequence[Expr], label: str, layers: int, peak: Expr
) -> CallCost:
    by = {
        key: _hundredths_to_flops(value) if key in WORK_FIELDS else value
        for key, value in zip(FITTED_FIELDS, found, strict=True)
    }
    in_turn = all(t.units_in_order for t in trials)
    return CallCost(
        ops=max(t.ops for t in trials),
        label=label,
        units=layers,
        narrowest_dim=trials[-1].narrowest_dim,
        units_in_order=in_turn,
        peak=peak,
        **by,
    )


def _hundredths_to_flops(work: Expr) -> Expr:
    """Work as whole FLOPs of each monomial."""
    terms = sympy.expand(work).as_coefficients_dict()
    return sympy.Add(*(round(c / 100) * monomial for monomial, c in terms.items()))


def _call_symbols(call: CallOp) -> set[str]:
    """The symbols in the operands' shapes and in the arguments."""
    sizes = [d for o in call.operands for d in tensor_type(o).shape]
    sizes += [leaf for leaf in call.arguments.leaves() if isinstance(leaf, sympy.Expr)]
    return set[str]().union(*(size_expr.symbol_names(s) for s in sizes))


def _is_floating(value: SSAValue) -> bool:
    return getattr(torch, tensor_type(value).torch_dtype).is_floating_point


def meta_arguments(
    call: CallOp, sizes: Mapping[str, int], makes: ValuelessTensors, values: OperandValues = NO_VALUES
) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments at given sizes: tensors that `makes` makes, and the known values of integers."""
    operands = [
        values[o] if o in values else _meta_operand(tensor_type(o), sizes, makes) for o in call.operands
    ]

    def value(leaf: Any) -> Any:
        match leaf:
            case OperandRef(index=index):
                return operands[index]
            case DottedName(text="device"):
                return makes.device
            case DottedName(text=text):
                return getattr(torch, text.removeprefix("torch."))
            case sympy.Expr():
                return size_expr.evaluate_expr(leaf, sizes)
            case _:
                return leaf

    made = call.arguments.map_leaves(value)
    return listed(made.args), listed(made.kwargs)


def _meta_operand(kind: TensorType, sizes: Mapping[str, int], makes: ValuelessTensors) -> torch.Tensor:
    dims = [int(size_expr.evaluate_expr(d, sizes)) for d in kind.shape]
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    return makes(dims, strides, getattr(torch, kind.torch_dtype), kind.requires_grad)
