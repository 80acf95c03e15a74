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

from secc.cost.counting.example_arguments import NO_SAMPLES, NO_VALUES, Examples, Samples, Values
from secc.cost.counting.meta_run import Makes, Trial, run
from secc.cost.counting.polynomial_fit import fit, means
from secc.cost.model.default_estimate import ZERO, CallCost, default
from secc.cost.model.section_cost import owes_backward
from secc.ir.dialect import size_expr
from secc.ir.dialect.argument_template import Name, Ref
from secc.ir.dialect.ops import BlockOp, CallOp, CaseOp, GraphOp, TieOp, graph_of, strings
from secc.ir.dialect.python_attributes import integer
from secc.ir.dialect.readable_names import OUT_OF_TURN
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.runtime.model.nested_batch import listed
from secc.runtime.sections.recompute import units

Key = tuple[object, ...]
Costs = dict[Key, CallCost | None]
FITTED = (
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
WORK = frozenset({"work", "attention_work", "again"})


def measure(
    module: ModuleOp,
    model: nn.Module,
    samples: Samples = NO_SAMPLES,
    prefix: str = "",
    known: Costs | None = None,
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
        _note_bytes(block, list(model.get_submodule(path).parameters()))
    for op in graph.body.block.ops:
        if isinstance(op, TieOp):
            _note_bytes(op, [model.get_parameter(strings(op.names)[0])])
    measuring = _Measuring(graph, model, samples, {} if known is None else known)
    for case, call in _calls(graph):
        _note_cost(call, measuring.cost(case, call), prefix)


def learn(module: ModuleOp, model: nn.Module, samples: Samples, known: Costs) -> list[CallCost | None]:
    """What calls cost that are not in `known`, one of each kind in the order of the calls; `keep` puts them
    there.

    So another process can learn them, to which no key of `Costs` travels.
    """
    measuring = _Measuring(graph_of(module), model, samples, known)
    return [measuring.learnt(case, call) for case, call in measuring.unknown()]


def keep(module: ModuleOp, model: nn.Module, found: Sequence[CallCost | None], known: Costs) -> None:
    """Put what was learnt of a module's calls into `known`."""
    measuring = _Measuring(graph_of(module), model, NO_SAMPLES, known)
    known |= {measuring.key(call): cost for (_, call), cost in zip(measuring.unknown(), found, strict=True)}


def _calls(graph: GraphOp) -> Iterator[tuple[CaseOp, CallOp]]:
    return ((case, op) for case in graph.cases for op in case.ops if isinstance(op, CallOp))


def _note_bytes(op: BlockOp | TieOp, parameters: list[nn.Parameter]) -> None:
    trained = [p for p in parameters if p.requires_grad]
    op.attributes["bytes"] = integer(sum(p.numel() * p.element_size() for p in parameters))
    op.attributes["trainable_bytes"] = integer(sum(p.numel() * p.element_size() for p in trained))
    if isinstance(op, BlockOp):
        op.attributes["tensors"] = integer(len(trained))
    else:
        op.attributes["params"] = integer(sum(p.numel() for p in parameters))


def _note_cost(call: CallOp, cost: CallCost, prefix: str) -> None:
    noted: dict[str, StringAttr | IntegerAttr[IntegerType]] = {
        key: StringAttr(size_expr.text(getattr(cost, key)))
        for key in ("flops", "work", "saved", "attention", "attention_work", "moved")
    }
    noted |= {"peak": StringAttr(size_expr.text(cost.peak))} if cost.peak != 0 else {}
    noted |= {"ops": integer(cost.ops), "cost": StringAttr(cost.label), "narrow": integer(cost.narrow)}
    if cost.units:
        noted["layers"] = integer(cost.units)
    if not cost.in_turn:
        noted[OUT_OF_TURN] = StringAttr("noted")
    if cost.units and cost.saved != 0:
        noted["units"] = integer(cost.units)
        noted |= {
            key: StringAttr(size_expr.text(getattr(cost, key)))
            for key in ("kept", "working", "again", "again_moved")
        }
    call.attributes |= {prefix + key: value for key, value in noted.items()}


class _Measuring:
    """Costs of calls, alike ones measured once."""

    def __init__(self, graph: GraphOp, model: nn.Module, samples: Samples, known: Costs) -> None:
        self._graph, self._model, self._examples, self._known = graph, model, Examples(graph, samples), known

    def key(self, call: CallOp) -> Key:
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

    def unknown(self) -> list[tuple[CaseOp, CallOp]]:
        """A call of each kind that is not known."""
        first: dict[Key, tuple[CaseOp, CallOp]] = {}
        for case, call in _calls(self._graph):
            first.setdefault(self.key(call), (case, call))
        return [found for key, found in first.items() if key not in self._known]

    def cost(self, case: CaseOp, call: CallOp) -> CallCost:
        """Counted on the meta device, else from samples, else the estimate."""
        key = self.key(call)
        if key not in self._known:
            self._known[key] = self.learnt(case, call)
        return self._known[key] or default(call, self._graph.blocks[call.target.data])

    def learnt(self, case: CaseOp, call: CallOp) -> CallCost | None:
        """The same, None instead of the estimate."""
        block = self._model.get_submodule(call.target.data)
        return (
            self._counted(call, block)
            or self._counted(call, block, own=True)
            or self._sampled(case, call, block)
        )

    def _counted(self, call: CallOp, block: nn.Module, own: bool = False) -> CallCost | None:
        """Polynomials that hold exactly, or None for a block that needs values (but those of its `own`
        tensors, if they have any) or whose numbers no small polynomial gives."""
        makes, kinds = Makes(own=own), {name: self._graph.symbols[name].kind.data for name in _symbols(call)}
        trials: dict[tuple[int, ...], Trial] = {}

        def trial(sizes: dict[str, int]) -> Trial:
            key = tuple(sizes.values())
            if key not in trials:
                trials[key] = run(
                    block,
                    lambda makes: arguments(call, sizes, makes),
                    call.no_grad is None,
                    units(block),
                    makes,
                    owes=owes_backward(call),
                )
            return trials[key]

        def at(sizes: dict[str, int]) -> tuple[int, ...]:
            return tuple(getattr(trial(sizes), key) for key in FITTED)

        try:
            if (found := fit(at, kinds)) is None:
                return None
            peak = _peak(trial, [*trials.values()], kinds)
        except Exception:  # whatever the user's code does on tensors without values
            return None
        return _call_cost([*trials.values()], found, "counted", len(units(block)), peak)

    def _sampled(self, case: CaseOp, call: CallOp, block: nn.Module) -> CallCost | None:
        """What samples of the dataset cost in the mean, by their rows: values of inputs decide (where samples
        begin, grids of images)."""
        terms = self._terms(call)
        trials, points, makes = list[Trial](), list[list[int]](), Makes(real=True)
        try:
            for example in self._examples.of(case, call):
                at = partial(arguments, call, example.sizes, values=example.values)
                trials.append(
                    run(block, at, call.no_grad is None, units(block), makes, owes=owes_backward(call))
                )
                points.append([int(size_expr.evaluate(term, example.sizes)) for term in terms])
        except Exception:  # as above
            return None
        if not trials or not terms:
            return None
        found = [means(terms, points, [getattr(t, key) for t in trials]) for key in FITTED]
        peak = means(terms, points, [t.peak for t in trials])
        return _call_cost(trials, found, "sampled", len(units(block)), peak)

    def _terms(self, call: CallOp) -> list[Expr]:
        """What the cost of several samples is a sum of multiples of: rows of floating operands, and widths
        for each row that has them."""
        rows, wide, widths = set[str](), set[tuple[str, str]](), set[str]()
        for operand in filter(_is_floating, call.operands):
            names = set[str]().union(*(size_expr.symbols(d) for d in tensor(operand).shape))
            across = {name for name in names if self._graph.symbols[name].kind.data == "width"}
            rows, widths, wide = (
                rows | (names - across),
                widths | across,
                wide | {*product(names - across, across)},
            )
        alone = widths - {width for _, width in wide}
        return [size_expr.symbol(n) for n in sorted(rows | alone)] + [
            size_expr.symbol(r) * size_expr.symbol(w) for r, w in sorted(wide)
        ]


def _peak(
    trial: Callable[[dict[str, int]], Trial], trials: Sequence[Trial], kinds: Mapping[str, str]
) -> Expr:
    """The largest of polynomials: one for each operation after which one of the trials held most. 0 where
    they issue unlike operations."""
    places = sorted({t.live.index(t.peak) for t in trials if t.live})
    if not places or len({len(t.live) for t in trials}) > 1:
        return ZERO
    return sympy.Max(*fit(lambda sizes: [trial(sizes).live[i] for i in places], kinds) or (ZERO,))


def _call_cost(
    trials: Sequence[Trial], found: Sequence[Expr], label: str, layers: int, peak: Expr
) -> CallCost:
    by = {key: _hundredths(value) if key in WORK else value for key, value in zip(FITTED, found, strict=True)}
    in_turn = all(t.in_turn for t in trials)
    return CallCost(
        ops=max(t.ops for t in trials),
        label=label,
        units=layers,
        narrow=trials[-1].narrow,
        in_turn=in_turn,
        peak=peak,
        **by,
    )


def _hundredths(work: Expr) -> Expr:
    """Work as whole FLOPs of each monomial."""
    terms = sympy.expand(work).as_coefficients_dict()
    return sympy.Add(*(round(c / 100) * monomial for monomial, c in terms.items()))


def _symbols(call: CallOp) -> set[str]:
    """The symbols in the operands' shapes and in the arguments."""
    sizes = [d for o in call.operands for d in tensor(o).shape]
    sizes += [leaf for leaf in call.arguments.leaves() if isinstance(leaf, sympy.Expr)]
    return set[str]().union(*(size_expr.symbols(s) for s in sizes))


def _is_floating(value: SSAValue) -> bool:
    return getattr(torch, tensor(value).torch_dtype).is_floating_point


def arguments(
    call: CallOp, sizes: Mapping[str, int], makes: Makes, values: Values = NO_VALUES
) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments at given sizes: tensors that `makes` makes, and the known values of integers."""
    operands = [values[o] if o in values else _operand(tensor(o), sizes, makes) for o in call.operands]

    def value(leaf: Any) -> Any:
        match leaf:
            case Ref(index=index):
                return operands[index]
            case Name(text="device"):
                return makes.device
            case Name(text=text):
                return getattr(torch, text.removeprefix("torch."))
            case sympy.Expr():
                return size_expr.evaluate(leaf, sizes)
            case _:
                return leaf

    made = call.arguments.map(value)
    return listed(made.args), listed(made.kwargs)


def _operand(kind: TensorType, sizes: Mapping[str, int], makes: Makes) -> torch.Tensor:
    dims = [int(size_expr.evaluate(d, sizes)) for d in kind.shape]
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    return makes(dims, strides, getattr(torch, kind.torch_dtype), kind.requires_grad)
