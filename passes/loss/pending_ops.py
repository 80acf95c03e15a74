"""Ops that a rewrite may need: created detached, and inserted before the end of the case only if something
uses them.

Following the loss creates an op for every way in which it could continue; only ops that a term needs enter
the case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import CaseOp, Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type

AnyOp = TypeVar("AnyOp", bound=Operation)


class PendingOps:
    """Creates ops for one case."""

    def __init__(self) -> None:
        self.ops: list[Operation] = []

    def add_op(self, op: AnyOp) -> AnyOp:
        """Keeps an op that was created elsewhere; returns it."""
        self.ops.append(op)
        return op

    def make_glue(
        self, like: Computation, target: str, operands: list[SSAValue], args: str, type: TensorType
    ) -> SSAValue:
        """A new op with the source line, grad mode and autocast of `like`; returns its result."""
        inherited = {
            k: v for k, v in like.properties.items() if k in {"no_grad", "autocast", "where", "section"}
        }
        op = GlueOp.create_call(
            target, operands, args, [with_gradient_of(type, operands, "no_grad" in inherited)], **inherited
        )
        return self.add_op(op).results[0]

    def rebuild_op(
        self, op: Computation, replaced: Mapping[int, SSAValue], args: str | None = None
    ) -> list[SSAValue]:
        """The results of `op` with other operands (by position) or arguments; its own results if nothing
        differs."""
        operands = [replaced.get(i, operand) for i, operand in enumerate(op.operands)]
        if args is None and all(a is b for a, b in zip(operands, op.operands, strict=True)):
            return list(op.results)
        properties = dict(op.properties)
        if args is not None:
            properties["args"] = StringAttr(args)
        carried = any(tensor_type(o).requires_grad for o in op.operands)
        # A result without a gradient although one flows in (a count, an index) stays so.
        fixed = [carried and not tensor_type(r).requires_grad for r in op.results]
        types = [
            with_gradient_of(tensor_type(r), operands, "no_grad" in properties or f)
            for r, f in zip(op.results, fixed, strict=True)
        ]
        new = type(op).create(
            operands=operands, result_types=types, properties=properties, attributes=dict(op.attributes)
        )
        return list(self.add_op(new).results)

    def commit_before(self, op: Operation, values: Iterable[SSAValue]) -> None:
        """Inserts the ops that `values` need before `op`, which comes after all that these use."""
        block = op.parent_block()
        assert block is not None
        block.insert_ops_before(self._take_needed(values), op)

    def commit_after(self, op: Operation, values: Iterable[SSAValue]) -> None:
        """Inserts the ops that `values` need after `op`, the last of those that these use."""
        block = op.parent_block()
        assert block is not None
        block.insert_ops_after(self._take_needed(values), op)

    def _take_needed(self, values: Iterable[SSAValue]) -> list[Operation]:
        """Removes the ops that `values` need from those that wait, and returns them in order."""
        wanted, stack = set[Operation](), [v.owner for v in values]
        while stack:
            needed = stack.pop()
            if isinstance(needed, Operation) and needed.parent is None and needed not in wanted:
                wanted.add(needed)
                stack.extend(o.owner for o in needed.operands)
        taken = [o for o in self.ops if o in wanted]
        self.ops = [o for o in self.ops if o not in wanted]
        return taken

    def commit_needed(self, case: CaseOp, needed: Iterable[Operation]) -> None:
        """Inserts the needed ops, and the ops that they use, before the case's end; erases the others."""
        wanted = set[Operation]()
        stack = list(needed)
        while stack:
            op = stack.pop()
            if op.parent is None and op not in wanted:
                wanted.add(op)
                stack.extend(o.owner for o in op.operands if isinstance(o.owner, Operation))
        end = case.body.block.last_op
        assert end is not None
        case.body.block.insert_ops_before([op for op in self.ops if op in wanted], end)
        for op in reversed(self.ops):
            if op not in wanted:
                op.erase()
        self.ops.clear()


def with_gradient_of(type: TensorType, operands: list[SSAValue], no_grad: bool) -> TensorType:
    """`type` with a gradient if and only if one of `operands` requires a gradient and grad mode is on."""
    grad = not no_grad and any(tensor_type(o).requires_grad for o in operands)
    return TensorType.from_dims(type.shape, type.dtype.data, grad)


def get_argument(op: Computation, position: int, name: str, default: Any = None) -> Any:
    """An argument of the recorded call, by position or name, `default` where it was not given."""
    return op.arguments.get(position, name, default)


def format_with_argument(op: Computation, position: int, name: str, value: Any) -> str:
    """The argument list with one argument set, as text."""
    arguments = op.arguments
    if position < len(arguments.args):
        arguments.args[position] = value
    else:
        arguments.kwargs[name] = value
    return argument_template.format_arguments(arguments)
