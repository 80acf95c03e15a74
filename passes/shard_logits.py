"""`shard-logits`: under tensor parallelism losses are computed on parts of the vocabulary, so that no rank
has whole logits.

A head that is called in the glue gives each rank the logits of its tokens, and so does a product with a
weight that `shard-tensors` cut. `secc.ir.analysis.vocab_sharding` says what becomes of the ops behind: most
work on parts as they are, those that run along the vocabulary become `parts.…` glue
(`secc.runtime.tensor_parallel.vocab_parallel_ops`). What needs whole tensors gets them gathered; the section's `whole`
says for what.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue, Use
from xdsl.passes import ModulePass

from secc.ir.analysis.dataflow import number_of, producer, texts_of, users
from secc.ir.analysis.vocab_sharding import PREFIX, SIZE, Part, Spread, Step
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
    texts,
)
from secc.ir.dialect.python_attributes import integer
from secc.ir.dialect.tensor_type import tensor
from secc.ir.text_io.verifier import where
from secc.passes.loss.pending_ops import carry_grad

Named = dict[SSAValue, str]


@dataclass(frozen=True)
class ShardLogits(ModulePass):
    name = "shard-logits"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for section in graph.sections:
            if (number_of(section, "tp") or 1) > 1:
                _shard(section, graph.cases)


def _shard(section: SectionOp, cases: list[CaseOp]) -> None:
    name = section.sym.data
    gathering = {
        path for path, kind in (s.rsplit(" ", 1) for s in texts_of(section, "styles")) if kind == "gather"
    }
    cut = {
        n
        for n, dim, parts in (s.split(" ") for s in texts_of(section, "shards"))
        if dim == "0" and "," not in parts
    }
    notes: list[str] = []
    called: set[str] = set()
    for case in cases:
        heads: Named = {
            op.results[0]: op.target.data
            for op in case.ops
            if isinstance(op, CallOp) and op.target.data in gathering
        }
        read: Named = {
            op.result: op.path.data for op in case.ops if isinstance(op, ParamOp) and op.path.data in cut
        }
        called |= set(heads.values())
        notes += _Rewriter(name, case, heads, read).run()
    styles = [
        f"{p} colwise" if p in called else f"{p} {kind}"
        for p, kind in (s.rsplit(" ", 1) for s in texts_of(section, "styles"))
    ]
    section.attributes |= {
        "styles": texts(styles),
        "whole": texts(dict.fromkeys([*texts_of(section, "whole"), *notes])),
    }


class _Rewriter:
    """Rewrites one section's ops in one case."""

    def __init__(self, section: str, case: CaseOp, heads: Named, read: Named) -> None:
        self.section, self.names = section, {**heads, **read}
        sources = {v: Part(len(tensor(v).dims) - 1, int(tensor(v).shape[-1])) for v in heads}
        sources |= {v: Part(0, int(tensor(v).shape[0])) for v in read}
        self.spread = Spread([op for op in case.ops if section_of(op) == section], sources)
        self.made: dict[tuple[str, SSAValue, int, int, bool], SSAValue] = {}

    def run(self) -> list[str]:
        """Rewrite; what is gathered, and for what."""
        for op, step in self.spread.steps.items():
            self._rewrite(op, step)
        return [note for value, part in self.spread.parts.items() for note in self._gather(value, part)]

    def _rewrite(self, op: Operation, step: Step) -> None:
        size = self.spread.size(op)
        for i in step.enter:
            op.operands[i] = self._before(op, "enter", op.operands[i], size)
        for i, axis in step.cut.items():
            op.operands[i] = self._before(op, "take", op.operands[i], size, axis)
        op.properties |= {"target": StringAttr(step.target), "args": StringAttr(step.args)}
        op.attributes[SIZE] = integer(size)
        if step.summed:
            total = self._glue(op, "leave", op.results[0], size)
            op.results[0].replace_uses_with_if(total.results[0], lambda use: use.operation is not total)
            _block(op).insert_op_after(total, op)

    def _before(self, op: Operation, name: str, value: SSAValue, size: int, axis: int = -1) -> SSAValue:
        """A whole value as ops on parts take it, made once before the first of them."""
        key = name, value, size, axis, "no_grad" in op.properties
        if key not in self.made:
            made = self._glue(op, name, value, size, axis)
            _block(op).insert_op_before(made, op)
            self.made[key] = made.results[0]
        return self.made[key]

    def _gather(self, value: SSAValue, part: Part) -> list[str]:
        """Give the whole of a value to the ops that need it."""
        owner = producer(value)
        wanting = [op for op in users(owner) if value in op.operands and op not in self.spread.steps]
        if not wanting:
            return []
        whole = self._glue(owner, "whole", value, part.size, part.axis)
        value.replace_uses_with_if(whole.results[0], lambda use: self._wants(use, whole))
        _block(owner).insert_op_after(whole, owner)
        return [f"{self._head(value)}: its logits are gathered for {self._what(op)}" for op in wanting]

    def _wants(self, use: Use, whole: Operation) -> bool:
        return use.operation is not whole and use.operation not in self.spread.steps

    def _glue(self, like: Operation, name: str, value: SSAValue, size: int, axis: int = -1) -> Operation:
        inherited: dict[str, Attribute] = {
            k: v for k, v in like.properties.items() if k in {"no_grad", "where"}
        }
        type = carry_grad(tensor(value), [value], "no_grad" in inherited)
        op = GlueOp.of(f"{PREFIX}{name}", [value], "$0" if axis < 0 else f"$0, {axis}", [type], **inherited)
        op.attributes[SIZE] = integer(size)
        set_section(op, self.section)
        return op

    def _head(self, value: SSAValue) -> str:
        """The head whose logits a value is made of."""
        while value not in self.names:
            value = next(o for o in producer(value).operands if o in self.spread.parts)
        return self.names[value].removesuffix(".weight")

    def _what(self, op: Operation) -> str:
        if section_of(op) not in (self.section, None):
            return f"section {section_of(op)}"
        name = op.callee if isinstance(op, Computation) else op.name
        return f"{name} ({where(op)})" if where(op) else name


def _block(op: Operation):
    block = op.parent_block()
    assert block is not None
    return block
