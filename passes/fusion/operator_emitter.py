"""Emits fused operators in place of pieces of a loss, with hidden states, weights, labels and masks in the
form that the operators take.

Ops are inserted before one op of the case, equal ops once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Operation, SSAValue

from secc.errors import UserError
from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import CaseOp, GlueOp, GraphOp, ParamOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.fusion.formula import BlockParameter, HeadLogits, RowSource, RowView
from secc.passes.fusion.logit_heads import BIAS_ATTRIBUTE, WEIGHT_ATTRIBUTE
from secc.passes.fusion.operator_rules import LossPiece
from secc.passes.loss.arithmetic import format_shape
from secc.passes.loss.pending_ops import with_gradient_of

EmittedOpKey = tuple[str, str, tuple[SSAValue, ...]]
IGNORED_LABEL = -100


class OperatorEmitter:
    """Inserts ops before `anchor`."""

    def __init__(self, graph: GraphOp, case: CaseOp, anchor: Operation) -> None:
        self.graph, self.case, self.anchor = graph, case, anchor
        self.inherited: dict[str, Attribute | None] = {}
        self.made: dict[EmittedOpKey, list[SSAValue]] = {}

    def set_source_line(self, place: str) -> None:
        """Sets the user's file:line of the ops that are emitted from now on."""
        self.inherited = {"where": StringAttr(place)} if place else {}

    def emit_op(
        self,
        target: str,
        operands: Sequence[SSAValue],
        args: str,
        *types: TensorType,
        **more: Attribute | None,
    ) -> list[SSAValue]:
        """The results of an op, which is inserted unless an equal one was."""
        key = (target, args, tuple(operands))
        if key not in self.made:
            made = GlueOp.create_call(target, operands, args, types, **self.inherited, **more)
            self._insert_op(made)
            self.made[key] = list(made.results)
        return self.made[key]

    def _insert_op(self, op: Operation) -> None:
        block = self.case.body.block
        block.insert_op_before(op, self.anchor)

    def emit_glue(
        self,
        target: str,
        operands: Sequence[SSAValue],
        args: str,
        shape: Sequence[Expr | int],
        dtype: str = "",
    ) -> SSAValue:
        """The result of an op, in the dtype of its first operand unless `dtype` is given."""
        type = with_gradient_of(
            TensorType.from_dims(shape, dtype or tensor_type(operands[0]).dtype.data),
            list(operands),
            "detach" in target,
        )
        return self.emit_op(target, operands, args, type)[0]

    def apply_views(self, value: SSAValue, views: Sequence[RowView], tail: tuple[int, ...] = ()) -> SSAValue:
        """A tensor [rows..., *tail] with views applied to its rows."""
        for view in views:
            shape = (*view.lead, *tail)
            if tensor_type(value).shape != shape or view.op in {"permute", "index"}:
                target, args = _view_call(view, shape, len(tail))
                value = self.emit_glue(target, [value, *view.operands], args, shape)
        return value

    def emit_hidden(self, logits: HeadLogits, factor: float) -> SSAValue:
        """The hidden states of the rows times `factor`: scaled hidden states give scaled logits."""
        value = logits.head.hidden
        width = (logits.head.width,)
        if logits.fixed and tensor_type(value).requires_grad:
            value = self.emit_glue("aten.detach.default", [value], "$0", tensor_type(value).shape)
        value = self.apply_views(value, logits.views, width)
        return (
            value
            if factor == 1
            else self.emit_glue("aten.mul.Tensor", [value], f"$0, {factor!r}", tensor_type(value).shape)
        )

    def emit_weight(self, logits: HeadLogits) -> SSAValue:
        """The head's weight, [tokens, width]."""
        head = logits.head
        value = self.emit_parameter(head.weight)
        shape = [head.tokens, head.width]
        if logits.fixed and tensor_type(value).requires_grad:
            value = self.emit_glue("aten.detach.default", [value], "$0", tensor_type(value).shape)
        if head.transposed:
            value = self.emit_glue("aten.t.default", [value], "$0", shape)
        return self.slice_tokens(value, logits, shape)

    def emit_bias(self, logits: HeadLogits, factor: float) -> SSAValue | None:
        """The head's bias times `factor`, [tokens]; None for a head without one."""
        if logits.head.bias is None:
            return None
        value = self.emit_parameter(logits.head.bias)
        if logits.fixed and tensor_type(value).requires_grad:
            value = self.emit_glue("aten.detach.default", [value], "$0", tensor_type(value).shape)
        value = self.slice_tokens(value, logits, [logits.head.tokens])
        if factor == 1:
            return value
        return self.emit_glue("aten.mul.Tensor", [value], f"$0, {factor!r}", tensor_type(value).shape)

    def slice_tokens(self, value: SSAValue, logits: HeadLogits, shape: list[int]) -> SSAValue:
        """The first `logits.tokens` rows of a parameter of shape `shape`."""
        if logits.tokens == shape[0]:
            return value
        return self.emit_glue(
            "aten.slice.Tensor", [value], f"$0, 0, 0, {logits.tokens}", [logits.tokens, *shape[1:]]
        )

    def emit_parameter(self, value: SSAValue | BlockParameter) -> SSAValue:
        """The value of a parameter, read before `anchor`."""
        if isinstance(value, SSAValue):
            return value
        for op in self.case.ops:
            if isinstance(op, ParamOp) and op.path.data == value.path:
                if op.parent_block() is self.anchor.parent_block() and not _is_before(op, self.anchor):
                    op.detach()
                    self._insert_op(op)
                return op.result
        block, _, name = value.path.rpartition(".")
        type = self.graph.blocks[block].attributes[
            BIAS_ATTRIBUTE if name == BIAS_ATTRIBUTE else WEIGHT_ATTRIBUTE
        ]
        assert isinstance(type, TensorType)
        made = ParamOp.create_source(value.path, type)
        self._insert_op(made)
        return made.results[0]

    def emit_mask(self, masks: Sequence[RowSource], lead: tuple[Expr, ...]) -> SSAValue | None:
        """The conjunction of masks in the rows' shape `lead`; None for all rows."""
        total: SSAValue | None = None
        for source in self._in_order(masks):
            value = self.apply_views(source.value, source.views)
            if source.negated:
                value = self.emit_glue("aten.logical_not.default", [value], "$0", tensor_type(value).shape)
            value = self.apply_views(value, [RowView("reshape", lead)])
            total = (
                value
                if total is None
                else self.emit_glue("aten.logical_and.default", [total, value], "$0, $1", lead)
            )
        return total

    def emit_weights(self, piece: LossPiece, like: SSAValue, dtype: str) -> SSAValue | None:
        """The product of a piece's weights in `dtype`, for the rows of hidden states `like`, with 0 for rows
        that its masks leave out; the conjunction of the masks alone where there are no weights, None for all
        rows."""
        lead = tensor_type(like).shape[:-1]
        kept = self.emit_mask(piece.kept_rows, lead)
        total = self._multiply_weights(piece, lead, dtype)
        if total is None or kept is None:
            return kept if total is None else total
        return self.emit_op(
            "aten.where.ScalarOther", [kept, total], "$0, $1, 0", TensorType.from_dims(lead, dtype)
        )[0]

    def _multiply_weights(self, piece: LossPiece, lead: tuple[Expr, ...], dtype: str) -> SSAValue | None:
        """The product of a piece's weights in the rows' shape `lead`; None where it has none."""
        total: SSAValue | None = None
        for source in self._in_order(piece.weights):
            value = self.apply_views(self.apply_views(source.value, source.views), [RowView("reshape", lead)])
            value = self._cast(value, dtype)
            total = (
                value if total is None else self.emit_glue("aten.mul.Tensor", [total, value], "$0, $1", lead)
            )
        return total

    def _in_order(self, sources: Iterable[RowSource]) -> list[RowSource]:
        """Sources by where their values are computed: sets have no order."""
        order: dict[SSAValue, int] = {v: i for i, op in enumerate(self.case.ops) for v in op.results}
        return sorted(sources, key=lambda m: (order[m.value], m.negated, str(m.views)))

    def emit_labels(self, piece: LossPiece, lead: tuple[Expr, ...]) -> tuple[SSAValue, int]:
        """Labels in the rows' shape, and the ignored label; masked rows get the ignored label."""
        assert piece.label is not None
        value = self.apply_views(
            self.apply_views(piece.label.value, piece.label.views), [RowView("reshape", lead)]
        )
        ignore = IGNORED_LABEL if piece.ignore is None else piece.ignore
        keep = self.emit_mask(piece.kept_rows, lead)
        if keep is not None:
            value = self.emit_op(
                "aten.where.ScalarOther", [keep, value], f"$0, $1, {ignore}", tensor_type(value)
            )[0]
        return value, ignore

    def emit_cross_entropy(self, piece: LossPiece) -> SSAValue:
        """The sum of a piece by `linear_cross_entropy`, or by the sum of its rows where they are weighted."""
        if not piece.weights:
            return self._emit_cross_entropy("linear_cross_entropy", piece)
        return self.emit_glue("aten.sum.default", [self._emit_row_losses(piece)], "$0", [])

    def _emit_row_losses(self, piece: LossPiece) -> SSAValue:
        """Each row's cross entropy of a piece times the row's weights, by `linear_cross_entropy_rows`."""
        losses = self._emit_cross_entropy("linear_cross_entropy_rows", piece)
        shape, dtype = tensor_type(losses).shape, tensor_type(losses).dtype.data
        weights = self._multiply_weights(piece, shape, dtype)
        if weights is None:
            return losses
        return self.emit_glue("aten.mul.Tensor", [losses, weights], "$0, $1", shape)

    def emit_rows(self, pieces: Sequence[LossPiece], like: SSAValue) -> SSAValue:
        """The sum over pieces of each row's weighted cross entropy times a number, in the type of `like`."""
        shape, dtype = tensor_type(like).shape, tensor_type(like).dtype.data
        total: SSAValue | None = None
        for piece in pieces:
            value = self.apply_views(self._emit_row_losses(piece), [RowView("reshape", shape)])
            if piece.number != 1:
                value = self.emit_glue("aten.mul.Tensor", [value], f"$0, {piece.number!r}", shape)
            total = (
                value if total is None else self.emit_glue("aten.add.Tensor", [total, value], "$0, $1", shape)
            )
        assert total is not None
        return self._cast(total, dtype)

    def _cast(self, value: SSAValue, dtype: str) -> SSAValue:
        if tensor_type(value).dtype.data == dtype:
            return value
        name = TensorType.from_dims([], dtype).torch_dtype
        shape = tensor_type(value).shape
        return self.emit_glue("aten._to_copy.default", [value], f"$0, dtype=torch.{name}", shape, dtype)

    def _emit_cross_entropy(self, name: str, piece: LossPiece) -> SSAValue:
        logits = piece.student
        hidden = self.emit_hidden(logits, logits.scale)
        label, ignore = self.emit_labels(piece, tensor_type(hidden).shape[:-1])
        operands = [hidden, self.emit_weight(logits), label]
        options: dict[str, object] = {
            "ignore_index": ignore,
            "label_smoothing": piece.smoothing,
            "softcap": logits.softcap,
        }
        self._append_named(operands, options, bias=self.emit_bias(logits, logits.scale))
        return self._emit_operator(name, operands, options, logits)[0]

    @staticmethod
    def _append_named(operands: list[SSAValue], options: dict[str, object], **given: SSAValue | None) -> None:
        """Add operands that are passed by name, those that there are."""
        for name, value in given.items():
            if value is not None:
                options[name] = argument_template.OperandRef(len(operands))
                operands.append(value)

    def emit_divergence(self, piece: LossPiece) -> SSAValue:
        """The sum of a piece by `linear_kl`."""
        operands, options = self._divergence_operands(piece, 1.0)
        self._append_divergence_options(piece, 1.0, operands, options)
        return self._emit_operator("linear_kl", operands, options, piece.student)[0]

    def emit_joint(self, cross_entropy: LossPiece, divergence: LossPiece) -> tuple[SSAValue, SSAValue]:
        """Both sums by `linear_kl_ce`: (cross entropy, divergence)."""
        operands, options = self._divergence_operands(divergence, cross_entropy.student.scale)
        lead = tensor_type(operands[0]).shape[:-1]
        label, ignore = self.emit_labels(cross_entropy, lead)
        operands.append(label)
        options |= {"ignore_index": ignore, "label_smoothing": cross_entropy.smoothing}
        self._append_divergence_options(divergence, cross_entropy.student.scale, operands, options)
        found = self._emit_operator("linear_kl_ce", operands, options, divergence.student)
        return found[2], found[0]

    def _append_divergence_options(
        self, piece: LossPiece, scale: float, operands: list[SSAValue], options: dict[str, object]
    ) -> None:
        """Add the operands of a divergence that are passed by name: which rows count, and biases."""
        student, teacher = piece.student, piece.teacher
        assert teacher is not None
        self._append_named(
            operands,
            options,
            mask=self.emit_weights(piece, operands[0], _sum_dtype(operands[0])),
            student_bias=self.emit_bias(student, scale),
            teacher_bias=self.emit_bias(teacher, teacher.scale * scale / student.scale),
        )

    def _divergence_operands(
        self, piece: LossPiece, scale: float
    ) -> tuple[list[SSAValue], dict[str, object]]:
        """Both models' hidden states and weights, and the divergence's options, where the student's hidden
        states are scaled by `scale`."""
        student, teacher = piece.student, piece.teacher
        assert teacher is not None
        temperature = scale / student.scale
        hidden = self.emit_hidden(student, scale)
        other = self.apply_views(
            self.emit_hidden(teacher, teacher.scale * temperature),
            [RowView("reshape", tensor_type(hidden).shape[:-1])],
            (teacher.head.width,),
        )
        operands = [hidden, self.emit_weight(student), other, self.emit_weight(teacher)]
        return operands, {
            "temperature": temperature,
            "kind": piece.kind,
            "beta": piece.share,
            "student_softcap": student.softcap * temperature,
            "teacher_softcap": teacher.softcap * temperature,
        }

    def _emit_operator(
        self, name: str, operands: list[SSAValue], options: dict[str, object], logits: HeadLogits
    ) -> list[SSAValue]:
        """A fused operator: rows, or sums and counts, in float32 (float64 for float64)."""
        rows = tensor_type(operands[0]).shape[:-1] if name == "linear_cross_entropy_rows" else []
        loss = with_gradient_of(TensorType.from_dims(rows, _sum_dtype(operands[0])), operands, False)
        types = [loss, TensorType.from_dims([], "i64")] * 2
        named = sum(isinstance(v, argument_template.OperandRef) for v in options.values())
        owner = logits.head.logits.owner
        autocast = owner.properties.get("autocast") if isinstance(owner, Operation) else None
        text = _format_options(options)
        args = ", ".join([f"${i}" for i in range(len(operands) - named)] + ([text] if text else []))
        found = self.emit_op(
            f"secc.{name}", operands, args, *types[: len(_RESULT_NAMES[name])], autocast=autocast
        )
        for value, hint in zip(found, _RESULT_NAMES[name], strict=True):
            value.name_hint = hint
        return found

    def emit_total(self, parts: Sequence[tuple[float, SSAValue]]) -> SSAValue:
        """The sum of (number, scalar) products."""
        total: SSAValue | None = None
        for number, value in parts:
            if number != 1:
                value = self.emit_glue("aten.mul.Tensor", [value], f"$0, {number!r}", [])
            total = (
                value if total is None else self.emit_glue("aten.add.Tensor", [total, value], "$0, $1", [])
            )
        assert total is not None
        return total


_RESULT_NAMES = {
    "linear_cross_entropy": ("cross_entropy", "labels"),
    "linear_cross_entropy_rows": ("cross_entropy",),
    "linear_kl": ("divergence", "rows"),
    "linear_kl_ce": ("divergence", "rows", "cross_entropy", "labels"),
}
_OPERATOR_DEFAULTS = {
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "softcap": 0.0,
    "temperature": 1.0,
    "kind": "forward",
    "beta": 0.5,
    "student_softcap": 0.0,
    "teacher_softcap": 0.0,
}


def _sum_dtype(hidden: SSAValue) -> str:
    """The dtype of operators' sums."""
    return "f64" if tensor_type(hidden).dtype.data == "f64" else "f32"


def _format_options(options: dict[str, object]) -> str:
    """The options that are not the operators' defaults, as keyword arguments."""
    return argument_template.format_arguments(
        argument_template.CallArguments(
            [],
            {k: v for k, v in options.items() if k not in _OPERATOR_DEFAULTS or v != _OPERATOR_DEFAULTS[k]},
        )
    )


def _is_before(op: Operation, other: Operation) -> bool:
    return op.is_before_in_block(other)


def _view_call(view: RowView, shape: Sequence[Expr | int], tail: int) -> tuple[str, str]:
    """The ATen op and arguments of a view on a tensor with `tail` dims behind its rows."""
    kind = TensorType.from_dims(shape, "f32")
    match view.op:
        case "reshape":
            return "aten.reshape.default", f"$0, {format_shape(kind)}"
        case "expand":
            return "aten.expand.default", f"$0, {format_shape(kind)}"
        case "permute":
            return (
                "aten.permute.default",
                f"$0, {[*view.args, *range(len(view.args), len(view.args) + tail)]}",
            )
        case "index":
            return "aten.index.Tensor", f"$0, [{', '.join(f'${i + 1}' for i in range(len(view.operands)))}]"
        case "slice" | "select":
            target = "aten.slice.Tensor" if view.op == "slice" else "aten.select.int"
            return target, argument_template.format_arguments(
                argument_template.CallArguments([argument_template.OperandRef(0), *view.args])
            )
        case _:
            raise UserError(f"unknown view {view.op!r} of rows")
