"""`measure`: notes at every call of a block what it costs, as exact polynomials over the inputs' sizes.

The user's block runs on meta tensors at a few small sizes (`secc.cost.trial`) and the numbers are fitted (`secc.cost.fit`); alike calls,
such as the layers of a stack, are measured once. A block that refuses the meta device, or whose numbers no small polynomial gives, keeps
the estimate by its parameters and the label `default`.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import nn
from xdsl.dialects.builtin import IntegerAttr, IntegerType, ModuleOp, StringAttr

from secc.cost.estimate import CallCost, default
from secc.cost.fit import fit
from secc.cost.trial import Trial, run
from secc.ir import expr
from secc.ir.attributes import integer
from secc.ir.dialect import BlockOp, CallOp, GraphOp, TieOp, graph_of, strings
from secc.ir.template import Name, Ref
from secc.ir.types import tensor
from secc.runtime.recompute import units

Key = tuple[object, ...]


def measure(module: ModuleOp, model: nn.Module, prefix: str = "") -> None:
    """Put `flops`, `saved` (texts over symbols), `ops` and `cost` (counted or default) on every `sec.call`, and bytes on blocks and ties.

    The keys on calls get a `prefix`: a model whose modules are rewritten is measured beside the user's own.

    A call with `units` that may run again also gets `kept`, `working` and `again` (see `secc.cost.estimate.CallCost`).

    `model` is the user's, on any device; it is neither run with values nor changed.
    """
    graph = graph_of(module)
    for path, block in graph.blocks.items():
        _note_bytes(block, list(model.get_submodule(path).parameters()))
    for op in graph.body.block.ops:
        if isinstance(op, TieOp):
            _note_bytes(op, [model.get_parameter(strings(op.names)[0])])
    known: dict[Key, CallCost | None] = {}
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                _note_cost(op, _cost(graph, op, model.get_submodule(op.target.data), known), prefix)


def _note_bytes(op: BlockOp | TieOp, parameters: list[nn.Parameter]) -> None:
    trained = [p for p in parameters if p.requires_grad]
    op.attributes["bytes"] = integer(sum(p.numel() * p.element_size() for p in parameters))
    op.attributes["trainable_bytes"] = integer(sum(p.numel() * p.element_size() for p in trained))
    if isinstance(op, TieOp):
        op.attributes["params"] = integer(sum(p.numel() for p in parameters))


def _note_cost(call: CallOp, cost: CallCost, prefix: str) -> None:
    noted: dict[str, StringAttr | IntegerAttr[IntegerType]] = {
        "flops": StringAttr(expr.text(cost.flops)),
        "saved": StringAttr(expr.text(cost.saved)),
        "ops": integer(cost.ops),
        "cost": StringAttr(cost.label),
    }
    if cost.units:
        noted["layers"] = integer(cost.units)
    if cost.units and cost.saved != 0:
        noted["units"] = integer(cost.units)
        noted |= {key: StringAttr(expr.text(getattr(cost, key))) for key in ("kept", "working", "again")}
    call.attributes |= {prefix + key: value for key, value in noted.items()}


def _cost(graph: GraphOp, call: CallOp, block: nn.Module, known: dict[Key, CallCost | None]) -> CallCost:
    shapes = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
    key = (type(block), shapes, call.args.data, tuple(str(o.type) for o in call.operands), call.no_grad is None)
    if key not in known:
        known[key] = _measured(graph, call, block)
    return known[key] or default(call, graph.blocks[call.target.data])


def _measured(graph: GraphOp, call: CallOp, block: nn.Module) -> CallCost | None:
    trials: list[Trial] = []
    again = units(block)

    def at(sizes: dict[str, int]) -> tuple[int, ...]:
        trials.append(run(block, lambda: _arguments(call, sizes), call.no_grad is None, again))
        found = trials[-1]
        return found.flops, found.saved, found.kept, found.working, found.again

    try:
        found = fit(at, {name: graph.symbols[name].kind.data for name in _symbols(call)})
    except Exception:  # whatever the user's code does on tensors without values
        return None
    if found is None:
        return None
    flops, saved, *recomputed = found
    return CallCost(flops, saved, max(t.ops for t in trials), "counted", len(again), *recomputed)


def _symbols(call: CallOp) -> set[str]:
    """The symbols in the operands' shapes and in the arguments."""
    sizes = [d for o in call.operands for d in tensor(o).shape]
    sizes += [leaf for leaf in call.arguments.leaves() if isinstance(leaf, sympy.Expr)]
    return set[str]().union(*(expr.symbols(s) for s in sizes))


def _arguments(call: CallOp, sizes: dict[str, int]) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments at given sizes, on the meta device."""
    operands = [_operand(tensor(o).shape, tensor(o).torch_dtype, tensor(o).requires_grad, sizes) for o in call.operands]

    def value(leaf: Any) -> Any:
        match leaf:
            case Ref(index=index):
                return operands[index]
            case Name(text="device"):
                return torch.device("meta")
            case Name(text=text):
                return getattr(torch, text.removeprefix("torch."))
            case sympy.Expr():
                return expr.evaluate(leaf, sizes)
            case _:
                return leaf

    made = call.arguments.map(value)
    return made.args, made.kwargs


def _operand(shape: tuple[sympy.Expr, ...], dtype: str, grad: bool, sizes: dict[str, int]) -> torch.Tensor:
    dims = [int(expr.evaluate(d, sizes)) for d in shape]
    return torch.empty(dims, dtype=getattr(torch, dtype), device="meta", requires_grad=grad)
