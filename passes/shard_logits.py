"""`shard-logits`: under tensor parallelism losses are computed on vocabulary shards, so that no rank has
whole logits.

A head that glue uses leaves each rank the logits of its tokens, and so does a product with a weight that
`shard-tensors` split. `secc.ir.analysis.vocab_sharding` says how the ops behind work on shards: most
unchanged; ops that run along the vocabulary become `parts.…` glue
(`secc.runtime.tensor_parallel.vocab_parallel_ops`). Ops that need whole tensors get them gathered, and the
section's `whole` names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue, Use
from xdsl.passes import ModulePass

from secc.ir.analysis.dataflow import get_number, get_values, producer_of, users_of
from secc.ir.analysis.vocab_sharding import (
    VOCAB_OP_PREFIX,
    VOCAB_SIZE_ATTRIBUTE,
    VocabOp,
    VocabPart,
    VocabSpread,
)
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    Computation,
    GlueOp,
    ParamOp,
    SectionOp,
    graph_of,
    section_of,
    set_section,
)
from secc.ir.dialect.python_attributes import int_attr
from secc.ir.dialect.tensor_type import tensor_type
from secc.ir.dialect.typed_attributes import ShardAttr, StyleAttr, UnsplitAttr
from secc.ir.text_io.verifier import source_line
from secc.passes.loss.pending_ops import with_gradient_of
from secc.runtime.plan.schema import ModuleStyle
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason

NamedValues = dict[SSAValue, str]


@dataclass(frozen=True)
class ShardLogits(ModulePass):
    name = "shard-logits"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for section in graph.sections:
            if (get_number(section, "tp") or 1) > 1:
                _shard_section(section, graph.cases)


def _shard_section(section: SectionOp, cases: list[CaseOp]) -> None:
    name = section.sym.data
    styles = get_values(section, "styles", StyleAttr)
    gathering = {style.module.data for style in styles if style.kind.data == "gather"}
    cut = {
        shard.parameter.data
        for shard in get_values(section, "shards", ShardAttr)
        if shard.dim.data == 0 and len(shard.parts.data) == 1
    }
    notes: list[UnsplitAttr] = []
    called: set[str] = set()
    for case in cases:
        heads: NamedValues = {
            op.results[0]: op.target.data
            for op in case.ops
            if isinstance(op, CallOp) and op.target.data in gathering
        }
        read: NamedValues = {
            op.result: op.path.data for op in case.ops if isinstance(op, ParamOp) and op.path.data in cut
        }
        called |= set(heads.values())
        notes += _LogitsRewriter(name, case, heads, read).rewrite_case()
    section.attributes |= {
        "styles": ArrayAttr(
            [
                StyleAttr.of(ModuleStyle(s.module.data, "colwise")) if s.module.data in called else s
                for s in styles
            ]
        ),
        "whole": ArrayAttr(list(dict.fromkeys([*get_values(section, "whole", UnsplitAttr), *notes]))),
    }


class _LogitsRewriter:
    """Rewrites one section's ops in one case."""

    def __init__(self, section: str, case: CaseOp, heads: NamedValues, read: NamedValues) -> None:
        self.section, self.names = section, {**heads, **read}
        sources = {v: VocabPart(len(tensor_type(v).dims) - 1, int(tensor_type(v).shape[-1])) for v in heads}
        sources |= {v: VocabPart(0, int(tensor_type(v).shape[0])) for v in read}
        self.spread = VocabSpread([op for op in case.ops if section_of(op) == section], sources)
        self.made: dict[tuple[str, SSAValue, int, int, bool], SSAValue] = {}

    def rewrite_case(self) -> list[UnsplitAttr]:
        """Rewrite the case; returns which logits are gathered, and for which op or section."""
        for op, step in self.spread.steps.items():
            self._rewrite_op(op, step)
        return [note for value, part in self.spread.parts.items() for note in self._gather_value(value, part)]

    def _rewrite_op(self, op: Operation, step: VocabOp) -> None:
        size = self.spread.vocabulary_size(op)
        for i in step.enter:
            op.operands[i] = self._enter_before(op, "enter", op.operands[i], size)
        for i, axis in step.cut.items():
            op.operands[i] = self._enter_before(op, "take", op.operands[i], size, axis)
        op.properties |= {"target": StringAttr(step.target), "args": StringAttr(step.args)}
        op.attributes[VOCAB_SIZE_ATTRIBUTE] = int_attr(size)
        if step.summed:
            total = self._make_glue(op, "leave", op.results[0], size)
            op.results[0].replace_uses_with_if(total.results[0], lambda use: use.operation is not total)
            _block_of(op).insert_op_after(total, op)

    def _enter_before(self, op: Operation, name: str, value: SSAValue, size: int, axis: int = -1) -> SSAValue:
        """A whole value as ops on parts take it, made once before the first of them."""
        key = name, value, size, axis, "no_grad" in op.properties
        if key not in self.made:
            made = self._make_glue(op, name, value, size, axis)
            _block_of(op).insert_op_before(made, op)
            self.made[key] = made.results[0]
        return self.made[key]

    def _gather_value(self, value: SSAValue, part: VocabPart) -> list[UnsplitAttr]:
        """Give the whole of a value to the ops that need it."""
        owner = producer_of(value)
        wanting = [op for op in users_of(owner) if value in op.operands and op not in self.spread.steps]
        if not wanting:
            return []
        whole = self._make_glue(owner, "whole", value, part.size, part.axis)
        value.replace_uses_with_if(whole.results[0], lambda use: self._needs_whole(use, whole))
        _block_of(owner).insert_op_after(whole, owner)
        return [
            UnsplitAttr.of(
                self._head_name(value), UnsplitReason(UnsplitKind.LOGITS_GATHERED, self._describe_user(op))
            )
            for op in wanting
        ]

    def _needs_whole(self, use: Use, whole: Operation) -> bool:
        return use.operation is not whole and use.operation not in self.spread.steps

    def _make_glue(self, like: Operation, name: str, value: SSAValue, size: int, axis: int = -1) -> Operation:
        inherited: dict[str, Attribute] = {
            k: v for k, v in like.properties.items() if k in {"no_grad", "where"}
        }
        type = with_gradient_of(tensor_type(value), [value], "no_grad" in inherited)
        op = GlueOp.create_call(
            f"{VOCAB_OP_PREFIX}{name}", [value], "$0" if axis < 0 else f"$0, {axis}", [type], **inherited
        )
        op.attributes[VOCAB_SIZE_ATTRIBUTE] = int_attr(size)
        set_section(op, self.section)
        return op

    def _head_name(self, value: SSAValue) -> str:
        """Returns the head that made the logits behind a value."""
        while value not in self.names:
            value = next(o for o in producer_of(value).operands if o in self.spread.parts)
        return self.names[value].removesuffix(".weight")

    def _describe_user(self, op: Operation) -> str:
        if section_of(op) not in (self.section, None):
            return f"section {section_of(op)}"
        name = op.callee if isinstance(op, Computation) else op.name
        return f"{name} ({source_line(op)})" if source_line(op) else name


def _block_of(op: Operation):
    block = op.parent_block()
    assert block is not None
    return block
