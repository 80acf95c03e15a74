"""Puts an operator in the place of pieces of a loss: hidden states, weights, labels and masks as the operator
takes them.

Ops are made before one op of the case, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Operation, SSAValue

from secc.errors import UserError
from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import CaseOp, GlueOp, GraphOp, ParamOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.fusion.formula import Logits, Parameter, Source, View
from secc.passes.fusion.logit_heads import BIAS, WEIGHT
from secc.passes.fusion.operator_rules import Piece
from secc.passes.loss.arithmetic import shape_text
from secc.passes.loss.pending_ops import carry_grad

Made = tuple[str, str, tuple[SSAValue, ...]]
IGNORE = -100


class Emitter:
    """Makes ops before `anchor`."""

    def __init__(self, graph: GraphOp, case: CaseOp, anchor: Operation) -> None:
        self.graph, self.case, self.anchor = graph, case, anchor
        self.inherited: dict[str, Attribute | None] = {}
        self.made: dict[Made, list[SSAValue]] = {}

    def at(self, place: str) -> None:
        """Give the user's file:line to what is made from now on."""
        self.inherited = {"where": StringAttr(place)} if place else {}

    def op(
        self,
        target: str,
        operands: Sequence[SSAValue],
        args: str,
        *types: TensorType,
        **more: Attribute | None,
    ) -> list[SSAValue]:
        """The results of an op, which is made if it is not there yet."""
        key = (target, args, tuple(operands))
        if key not in self.made:
            made = GlueOp.of(target, operands, args, types, **self.inherited, **more)
            self._insert(made)
            self.made[key] = list(made.results)
        return self.made[key]

    def _insert(self, op: Operation) -> None:
        block = self.case.body.block
        block.insert_op_before(op, self.anchor)

    def glue(
        self,
        target: str,
        operands: Sequence[SSAValue],
        args: str,
        shape: Sequence[Expr | int],
        dtype: str = "",
    ) -> SSAValue:
        """An op with one result, in the dtype of its first operand unless another is given."""
        type = carry_grad(
            TensorType.of(shape, dtype or tensor(operands[0]).dtype.data), list(operands), "detach" in target
        )
        return self.op(target, operands, args, type)[0]

    def viewed(self, value: SSAValue, views: Sequence[View], tail: tuple[int, ...] = ()) -> SSAValue:
        """A tensor [rows..., *tail] with views of its rows."""
        for view in views:
            shape = (*view.lead, *tail)
            if tensor(value).shape != shape or view.op in {"permute", "index"}:
                target, args = _call(view, shape, len(tail))
                value = self.glue(target, [value, *view.operands], args, shape)
        return value

    def hidden(self, logits: Logits, factor: float) -> SSAValue:
        """The hidden states of the rows, times a factor: scaled hidden states give scaled logits."""
        value = logits.head.hidden
        width = (logits.head.width,)
        if logits.fixed and tensor(value).requires_grad:
            value = self.glue("aten.detach.default", [value], "$0", tensor(value).shape)
        value = self.viewed(value, logits.views, width)
        return (
            value
            if factor == 1
            else self.glue("aten.mul.Tensor", [value], f"$0, {factor!r}", tensor(value).shape)
        )

    def weight(self, logits: Logits) -> SSAValue:
        """[tokens, H] of the head's weight."""
        head = logits.head
        value = self.parameter(head.weight)
        shape = [head.tokens, head.width]
        if logits.fixed and tensor(value).requires_grad:
            value = self.glue("aten.detach.default", [value], "$0", tensor(value).shape)
        if head.transposed:
            value = self.glue("aten.t.default", [value], "$0", shape)
        return self.cut(value, logits, shape)

    def bias(self, logits: Logits) -> SSAValue | None:
        """[tokens] of the head's bias."""
        bias = logits.head.bias
        return None if bias is None else self.cut(self.parameter(bias), logits, [logits.head.tokens])

    def cut(self, value: SSAValue, logits: Logits, shape: list[int]) -> SSAValue:
        """The part of a parameter for the first tokens."""
        if logits.tokens == shape[0]:
            return value
        return self.glue(
            "aten.slice.Tensor", [value], f"$0, 0, 0, {logits.tokens}", [logits.tokens, *shape[1:]]
        )

    def parameter(self, value: SSAValue | Parameter) -> SSAValue:
        """A parameter as the case reads it."""
        if isinstance(value, SSAValue):
            return value
        for op in self.case.ops:
            if isinstance(op, ParamOp) and op.path.data == value.path:
                if op.parent_block() is self.anchor.parent_block() and not _before(op, self.anchor):
                    op.detach()
                    self._insert(op)
                return op.result
        block, _, name = value.path.rpartition(".")
        type = self.graph.blocks[block].attributes[BIAS if name == BIAS else WEIGHT]
        assert isinstance(type, TensorType)
        made = ParamOp.of(value.path, type)
        self._insert(made)
        return made.results[0]

    def mask(self, masks: Sequence[Source], lead: tuple[Expr, ...]) -> SSAValue | None:
        """The rows that all masks keep, in the rows' shape; None for all rows."""
        total: SSAValue | None = None
        order: dict[SSAValue, int] = {
            value: i for i, op in enumerate(self.case.ops) for value in op.results
        }  # sets have none
        for source in sorted(masks, key=lambda m: (order[m.value], m.negated, str(m.views))):
            value = self.viewed(source.value, source.views)
            if source.negated:
                value = self.glue("aten.logical_not.default", [value], "$0", tensor(value).shape)
            value = self.viewed(value, [View("reshape", lead)])
            total = (
                value
                if total is None
                else self.glue("aten.logical_and.default", [total, value], "$0, $1", lead)
            )
        return total

    def label(self, piece: Piece, lead: tuple[Expr, ...]) -> tuple[SSAValue, int]:
        """Labels in the rows' shape, and the one that is left out; masks become labels that are left out."""
        assert piece.label is not None
        value = self.viewed(self.viewed(piece.label.value, piece.label.views), [View("reshape", lead)])
        ignore = IGNORE if piece.ignore is None else piece.ignore
        keep = self.mask(list(piece.masks), lead)
        if keep is not None:
            value = self.op("aten.where.ScalarOther", [keep, value], f"$0, $1, {ignore}", tensor(value))[0]
        return value, ignore

    def cross_entropy(self, piece: Piece) -> SSAValue:
        """The sum that `linear_cross_entropy` gives for a piece."""
        logits = piece.student
        hidden = self.hidden(logits, logits.scale)
        label, ignore = self.label(piece, tensor(hidden).shape[:-1])
        operands = [hidden, self.weight(logits), label]
        options: dict[str, object] = {
            "ignore_index": ignore,
            "label_smoothing": piece.smoothing,
            "softcap": logits.softcap,
        }
        if (bias := self.bias(logits)) is not None:
            operands.append(bias)
            options = {"bias": argument_template.Ref(3)} | options
        return self._operator("linear_cross_entropy", operands, _given(options), logits)[0]

    def divergence(self, piece: Piece) -> SSAValue:
        """The sum that `linear_kl` gives for a piece."""
        operands, options = self._heads(piece, 1.0)
        mask = self.mask(list(piece.masks), tensor(operands[0]).shape[:-1])
        return self._operator(
            "linear_kl", [*operands, *([] if mask is None else [mask])], _given(options), piece.student
        )[0]

    def both(self, cross_entropy: Piece, divergence: Piece) -> tuple[SSAValue, SSAValue]:
        """The sums that `linear_kl_ce` gives: (cross entropy, divergence)."""
        operands, options = self._heads(divergence, cross_entropy.student.scale)
        lead = tensor(operands[0]).shape[:-1]
        label, ignore = self.label(cross_entropy, lead)
        mask = self.mask(list(divergence.masks), lead)
        options |= {"ignore_index": ignore, "label_smoothing": cross_entropy.smoothing}
        found = self._operator(
            "linear_kl_ce",
            [*operands, label, *([] if mask is None else [mask])],
            _given(options),
            divergence.student,
        )
        return found[2], found[0]

    def _heads(self, piece: Piece, scale: float) -> tuple[list[SSAValue], dict[str, object]]:
        """Both models' hidden states and weights, and the divergence's options, where the student's hidden
        states are scaled by `scale`."""
        student, teacher = piece.student, piece.teacher
        assert teacher is not None
        temperature = scale / student.scale
        hidden = self.hidden(student, scale)
        other = self.viewed(
            self.hidden(teacher, teacher.scale * temperature),
            [View("reshape", tensor(hidden).shape[:-1])],
            (teacher.head.width,),
        )
        operands = [hidden, self.weight(student), other, self.weight(teacher)]
        return operands, {"temperature": temperature, "kind": piece.kind, "beta": piece.share}

    def _operator(self, name: str, operands: list[SSAValue], options: str, logits: Logits) -> list[SSAValue]:
        """A fused operator: sums in float32 (float64 for float64) and counts."""
        dtype = "f64" if tensor(operands[0]).dtype.data == "f64" else "f32"
        loss = carry_grad(TensorType.of([], dtype), operands, False)
        pair = [loss, TensorType.of([], "i64")]
        owner = logits.head.logits.owner
        autocast = owner.properties.get("autocast") if isinstance(owner, Operation) else None
        args = ", ".join(
            [f"${i}" for i in range(len(operands) - ("bias" in options))] + ([options] if options else [])
        )
        found = self.op(
            f"secc.{name}", operands, args, *(pair * (2 if name == "linear_kl_ce" else 1)), autocast=autocast
        )
        for value, hint in zip(found, _NAMES[name], strict=True):
            value.name_hint = hint
        return found

    def total(self, parts: Sequence[tuple[float, SSAValue]]) -> SSAValue:
        """The sum of multiples of scalars."""
        total: SSAValue | None = None
        for number, value in parts:
            if number != 1:
                value = self.glue("aten.mul.Tensor", [value], f"$0, {number!r}", [])
            total = value if total is None else self.glue("aten.add.Tensor", [total, value], "$0, $1", [])
        assert total is not None
        return total


_NAMES = {
    "linear_cross_entropy": ("cross_entropy", "labels"),
    "linear_kl": ("divergence", "rows"),
    "linear_kl_ce": ("divergence", "rows", "cross_entropy", "labels"),
}
_DEFAULTS = {
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "softcap": 0.0,
    "temperature": 1.0,
    "kind": "forward",
    "beta": 0.5,
}


def _given(options: dict[str, object]) -> str:
    """The options that are not the operators' defaults, as keyword arguments."""
    return argument_template.format(
        argument_template.Arguments(
            [], {k: v for k, v in options.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
        )
    )


def _before(op: Operation, other: Operation) -> bool:
    return op.is_before_in_block(other)


def _call(view: View, shape: Sequence[Expr | int], tail: int) -> tuple[str, str]:
    """The ATen op and arguments of a view on a tensor with `tail` dims behind its rows."""
    kind = TensorType.of(shape, "f32")
    match view.op:
        case "reshape":
            return "aten.reshape.default", f"$0, {shape_text(kind)}"
        case "expand":
            return "aten.expand.default", f"$0, {shape_text(kind)}"
        case "permute":
            return (
                "aten.permute.default",
                f"$0, {[*view.args, *range(len(view.args), len(view.args) + tail)]}",
            )
        case "index":
            return "aten.index.Tensor", f"$0, [{', '.join(f'${i + 1}' for i in range(len(view.operands)))}]"
        case "slice" | "select":
            target = "aten.slice.Tensor" if view.op == "slice" else "aten.select.int"
            return target, argument_template.format(
                argument_template.Arguments([argument_template.Ref(0), *view.args])
            )
        case _:
            raise UserError(f"there is no view {view.op}")
