"""Runs a case of the IR with torch, op by op, and computes a normalised loss from micro-batches: the
reference for passes on the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from xdsl.ir import SSAValue

from secc.errors import UserError
from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    ConstOp,
    GlueOp,
    InputOp,
    LeafOp,
    ParamOp,
    PlacedRowsOp,
    ReturnOp,
    SizeOp,
    TermOp,
    strings_of,
)
from secc.runtime import kernels
from secc.runtime.plan import expr_eval

Tensors = Mapping[str, torch.Tensor]
Env = dict[SSAValue, Any]


@dataclass
class Source:
    """What a case reads: a micro-batch, the model, constants, and the micro-batch's sizes."""

    batch: Tensors
    model: nn.Module
    constants: Tensors
    sizes: Mapping[str, int]


def forward(case: CaseOp, source: Source) -> Env:
    """The values of every op that needs neither leaves nor sizes of the whole batch."""
    env: Env = {}
    named = dict(source.model.named_parameters()) | dict(source.model.named_buffers())
    for op in case.ops:
        match op:
            case InputOp():
                env[op.result] = source.batch[op.key.data]
            case ParamOp():
                env[op.result] = named[op.path.data]
            case ConstOp():
                env[op.result] = source.constants[op.key.data]
            case CallOp() | GlueOp() if all(o in env for o in op.operands):
                env.update(zip(op.results, _run(op, env, source), strict=False))
            case _:
                pass
    return env


def _run(op: CallOp | GlueOp, env: Env, source: Source) -> Sequence[Any]:
    args, kwargs = _arguments(op, env, source.sizes)
    with torch.set_grad_enabled("no_grad" not in op.properties):
        if isinstance(op, CallOp):
            value = source.model.get_submodule(op.target.data)(*args, **kwargs)
            return [eval(f"value{path}", {"value": value}) for path in strings_of(op.outs)]
        value = function(op.target.data)(*args, **kwargs)
    return value if isinstance(value, tuple | list) else [value]


def function(target: str) -> Callable[..., Any]:
    """The operator of an op's target."""
    namespace, _, name = target.partition(".")
    if namespace == "secc":
        return getattr(kernels, name)
    found: Any = torch.ops
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _arguments(op: CallOp | GlueOp, env: Env, sizes: Mapping[str, int]) -> tuple[list[Any], dict[str, Any]]:
    text = argument_template.format_arguments(op.arguments, lambda ref: f"_values[{ref.index}]")
    known = {"torch": torch, "device": torch.device("cpu"), "float": float, "slice": slice}
    return eval(
        f"(lambda *args, **kwargs: (list(args), kwargs))({text})",
        {"_values": [env[o] for o in op.operands], **known, **sizes},
    )


def distributed_loss(
    case: CaseOp, micro_batches: Sequence[Source], samples: Sequence[Source], whole: Mapping[str, int]
) -> torch.Tensor:
    """The loss as a plan computes it: numerators by micro-batch, leaves by sample, coefficients once. Raises
    UserError where a rank would for a sample's numbers of places and rows."""
    runs = [forward(case, m) for m in micro_batches]
    known: Env = {}
    each = [forward(case, s) for s in samples]
    for sample, env in zip(samples, each, strict=True):
        _check_placed_rows(case, sample, env)
    for op in case.ops:
        match op:
            case LeafOp():
                known[op.result] = sum(e[op.value].double() for e in each)
            case SizeOp():
                known[op.result] = torch.tensor(
                    float(expr_eval.evaluate_expr(op.value.data, whole)), dtype=torch.float64
                )
            case GlueOp() if op.results[0] not in runs[0] or not op.operands:
                known.setdefault(op.results[0], None)
                if all(o in known or o in runs[0] for o in op.operands):
                    empty = Source({}, nn.Module(), {}, whole)
                    known[op.results[0]] = _run(
                        op, {o: known.get(o, runs[0].get(o)) for o in op.operands}, empty
                    )[0]
            case _:
                pass
    loss: Any = 0.0
    for op in case.ops:
        if isinstance(op, TermOp):
            numerator = sum(r[op.numerator] for r in runs)
            loss = loss + numerator * (1.0 if op.coefficient is None else float(known[op.coefficient]))
        elif isinstance(op, ReturnOp):
            assert op.constant is not None
            loss = loss + float(op.constant.data)
    return loss


def _check_placed_rows(case: CaseOp, sample: Source, env: Env) -> None:
    for op in case.ops:
        if isinstance(op, PlacedRowsOp):
            places, *counts = (float(env[o]) for o in op.operands)
            rows = float(expr_eval.evaluate_expr(op.rows.data, sample.sizes)) * (counts[0] if counts else 1)
            if places != rows:
                raise UserError(f"not separable: a sample has {places:g} places for {rows:g} rows")
