"""Prints the ops of a `sec.body` as the lines of a Python method: calls of the user's blocks in order, and
the ops between them.

An op is one line. Lines under `no_grad` or autocast are grouped below one `with`. Every symbol that a line
uses is read from the batch's shapes at the top. A comment gives the user's file:line where it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from xdsl.dialects.builtin import IntegerAttr, StringAttr
from xdsl.ir import Operation, SSAValue

from secc.codegen.python_names import NameScope, to_python_name
from secc.codegen.render import string_literal
from secc.errors import printable_text
from secc.ir.analysis import random_ops, recorded_glue, vocab_sharding
from secc.ir.dialect import argument_template, size_expr
from secc.ir.dialect.argument_template import OperandRef
from secc.ir.dialect.ops import (
    CallOp,
    Computation,
    ConstOp,
    GlueOp,
    GraphOp,
    GuardOp,
    InputOp,
    KeyOp,
    LeafOp,
    OutputOp,
    ParamOp,
    PlacedRowsOp,
    ReceiveOp,
    SendOp,
    SizeOp,
    TermOp,
    strings_of,
)
from secc.ir.dialect.readable_names import SETTINGS_ATTRIBUTE, strip_wrappers
from secc.ir.dialect.tensor_type import tensor_type
from secc.ir.text_io.verifier import source_line
from secc.runtime.plan.schema import ALL_SAMPLES, FUNCTION_PREFIX

_MODULE_NAMESPACES = {
    "aten": "aten",
    "secc": "kernels",
    "batch": "self",
}  # what the section's module calls them


@dataclass(frozen=True)
class CodeLine:
    """A line of code with the context managers it runs under and its source line."""

    text: str
    context: str = ""
    place: str = ""


@dataclass
class BodyPrinter:
    """Prints one method or function. `attributes` maps block paths to the section's attributes.

    In a section, values come from `self`; in terms.py (`terms=True`) the function stands alone, receives are
    leaves and symbols are those of the global batch. With `one_sample`, it is called with each sample alone.
    With `frees`, results of blocks and glue are deleted once nothing needs them, so that only what the
    backward needs stays in memory.
    """

    graph: GraphOp
    attributes: dict[str, str]
    scope: NameScope = field(default_factory=NameScope)
    names: dict[SSAValue, str] = field(default_factory=dict[SSAValue, str])
    terms: bool = False
    whole_batch: bool = False
    one_sample: bool = False
    frees: bool = False
    parts: dict[int, str] = field(
        default_factory=dict[int, str]
    )  # names of vocabularies that ranks have parts of, by their sizes

    def __post_init__(self) -> None:
        for symbol in self.graph.symbols:  # which lines use under their own names
            self.scope.take_name(symbol)

    def print_lines(self, ops: Sequence[Operation]) -> list[str]:
        """The lines of a method without its return, not indented."""
        unneeded = _values_by_last_user(ops) if self.frees else {}
        code: list[CodeLine] = []
        for op in ops:
            code += self._print_op(op)
            if names := [self.names[value] for value in unneeded.get(op, ())]:
                code.append(CodeLine(f"del {', '.join(names)}", code[-1].context))
        symbols = self._used_symbols(ops)
        sizes = [f"{name} = self.vocab_shards({size})" for size, name in self.parts.items()]
        return [f"{name} = {self._symbol_source(name)}" for name in symbols] + sizes + _layout_lines(code)

    def name_of(self, value: SSAValue) -> str:
        """The name of a value that was printed."""
        return self.names[value]

    def _used_symbols(self, ops: Iterable[Operation]) -> list[str]:
        """The symbols that arguments use, in the graph's order."""
        used: set[str] = set()
        for op in ops:
            if isinstance(op, Computation):
                leaves = op.arguments.leaves()
                used |= set[str]().union(
                    *(size_expr.symbol_names(leaf) for leaf in leaves if isinstance(leaf, size_expr.Expr))
                )
            elif isinstance(op, SizeOp):
                used |= size_expr.symbol_names(size_expr.parse_expr(op.value.data))
            elif isinstance(op, PlacedRowsOp):
                used |= size_expr.symbol_names(size_expr.parse_expr(op.rows.data))
        return [name for name in self.graph.symbols if name in used]

    def _symbol_source(self, name: str) -> str:
        declared = self.graph.symbols[name]
        if self.whole_batch:
            return f"size[{string_literal(name)}]"
        if name == ALL_SAMPLES:
            return "self.batch_samples()"
        if declared.key.data:
            return f"batch[{string_literal(declared.key.data)}].shape[{declared.dim.data}]"
        return self._sample_count_source(name)

    def _sample_count_source(self, name: str) -> str:
        """An expression for the samples of a micro-batch, if no input has one row for each of them. It
        comes from an input with a fixed number of rows for each sample and a fixed number more (two texts
        of each pair; the bounds of all samples, one more than there are), or else from the section."""
        symbol = size_expr.size_symbol(name)
        for key in (op for op in self.graph.body.block.ops if isinstance(op, KeyOp) and op.optional is None):
            for dim, size in enumerate(tensor_type(key.result).shape):
                more = size.subs(symbol, 0)
                times = (size - more) / symbol
                if more.is_Integer and times.is_Integer:
                    rows = f"batch[{string_literal(key.key.data)}].shape[{dim}]"
                    return f"({rows} - {more}) // {times}" if more else f"{rows} // {times}"
        return "1" if self.one_sample else "self.sample_count()"

    def _bind_name(self, value: SSAValue, wish: str) -> str:
        self.names[value] = self.scope.claim_name(value.name_hint or wish)
        return self.names[value]

    def _print_op(self, op: Operation) -> list[CodeLine]:
        match op:
            case InputOp():
                return [CodeLine(f"{self._bind_name(op.result, op.key.data)} = {batch_item(op.key.data)}")]
            case ParamOp():
                return [
                    CodeLine(
                        f"{self._bind_name(op.result, op.path.data.split('.')[-1])} = "
                        f"self.value({string_literal(op.path.data)})"
                    )
                ]
            case ConstOp():
                owner = "" if self.terms else "self."
                return [
                    CodeLine(
                        f"{self._bind_name(op.result, op.key.data)} = "
                        f"{owner}constants({string_literal(op.key.data)}, {owner}device)"
                    )
                ]
            case ReceiveOp():
                edge = string_literal(op.edge.data)
                source = f"scalar(leaves[{edge}])" if self.terms else f"edges[{edge}]"
                return [CodeLine(f"{self._bind_name(op.result, op.edge.data)} = {source}")]
            case SizeOp():
                return [CodeLine(f"{self._bind_name(op.result, 'size_of_batch')} = scalar({op.value.data})")]
            case CallOp():
                return self._print_call(op)
            case GlueOp():
                return [self._print_glue(op)]
            case SendOp() | TermOp() | OutputOp() | GuardOp() | LeafOp() | PlacedRowsOp():
                return []
            case _:
                raise ValueError(f"codegen cannot print {op.name}")

    def _print_arguments(self, op: Computation) -> str:
        def name(ref: OperandRef) -> str:
            return self.names[op.operands[ref.index]]

        known = {
            argument_template.DottedName("device"): argument_template.DottedName(
                "device" if self.terms else "self.device"
            )
        }
        if (parts := self._vocabulary_name(op)) is not None:
            known[vocab_sharding.SHARD_LENGTH] = argument_template.DottedName(f"{parts}.length")
        return argument_template.format_arguments(
            op.arguments.map_leaves(
                lambda leaf: known.get(leaf, leaf) if isinstance(leaf, argument_template.DottedName) else leaf
            ),
            name,
        )

    def _vocabulary_name(self, op: Computation) -> str | None:
        """The name of the vocabulary that an op works on parts of."""
        size = op.attributes.get(vocab_sharding.VOCAB_SIZE_ATTRIBUTE)
        if not isinstance(size, IntegerAttr):
            return None
        if size.value.data not in self.parts:
            self.parts[size.value.data] = self.scope.claim_name("vocabulary")
        return self.parts[size.value.data]

    def _print_call(self, op: CallOp) -> list[CodeLine]:
        attribute = self.attributes[op.target.data]
        place, context = (
            source_line(op),
            ", ".join(
                filter(None, (_grad_context(op), self._site_context(op), _settings_context(op, attribute)))
            ),
        )
        called = f"self.{attribute}({self._print_arguments(op)})"
        outs = strings_of(op.outs)
        if outs == ("",):
            return [CodeLine(f"{self._bind_name(op.results[0], attribute)} = {called}", context, place)]
        out = self.scope.claim_name(f"{attribute}_out")
        results = [(self._bind_name(r, attribute), path) for r, path in zip(op.results, outs, strict=True)]
        freed = [CodeLine(f"del {out}", context)] if self.frees else []
        return [
            CodeLine(f"{out} = {called}", context, place),
            *(CodeLine(f"{name} = {out}{path}", context, place) for name, path in results),
            *freed,
        ]

    def _site_context(self, op: CallOp) -> str:
        """The context that tells random ops in a block from where the user calls it."""
        known = random_ops.read_random_ops(self.graph.attributes.get(random_ops.RANDOM_OPS_ATTRIBUTE))
        site, (number, calls) = random_ops.call_site(op), random_ops.site_call(op)
        if not random_ops.draws_in_call(known, op.target.data, site):
            return ""
        which = f", call={number}, calls={calls}" if calls > 1 else ""
        return f"self.at_call_site({string_literal(site)}{which})"

    def _print_glue(self, op: GlueOp) -> CodeLine:
        if (made := recorded_glue.recorded_label(op)) is not None:
            name = self._bind_name(op.results[0], _argument_name(made))
            operands = "".join(f", {self.names[o]}" for o in op.operands)
            return CodeLine(
                f"{name} = self.rerecorded_tensor(batch, {string_literal(made)}{operands})",
                _grad_context(op),
                source_line(op),
            )
        namespace, _, rest = op.target.data.partition(".")
        function = f"{self._function_namespace(op, namespace)}.{rest}"
        wish = rest.split(".")[0].strip("_")
        if op.target.data.startswith(FUNCTION_PREFIX):
            function, wish = (
                f"self.function({string_literal(rest)})",
                to_python_name(rest.replace(":", ".").rpartition(".")[2]),
            )
        names = [self._bind_name(r, wish) for r in op.results]
        called = f"{function}({self._print_arguments(op)})"
        if (name := op.attributes.get(random_ops.RANDOM_OP_ATTRIBUTE)) is not None:
            owner = "" if self.terms else "self."
            called = f"{owner}draw({string_literal(name.data)}, {function}, {self._print_arguments(op)})"  # pyright: ignore[reportAttributeAccessIssue]
        return CodeLine(f"{', '.join(names)} = {called}", _grad_context(op), source_line(op))

    def _function_namespace(self, op: GlueOp, name: str) -> str:
        return (
            self._vocabulary_name(op) or ""
            if f"{name}." == vocab_sharding.VOCAB_OP_PREFIX
            else _MODULE_NAMESPACES.get(name, f"torch.ops.{name}")
        )


def _values_by_last_user(ops: Sequence[Operation]) -> dict[Operation, list[SSAValue]]:
    """The floating-point results of blocks and glue that do not leave the section, by the operation that
    needs them last. Other results are small, such as masks."""
    last: dict[SSAValue, Operation] = {}
    for op in ops:
        if isinstance(op, (CallOp, GlueOp)):
            last |= dict.fromkeys((*op.results, *(o for o in op.operands if o in last)), op)
    found: dict[Operation, list[SSAValue]] = {}
    for value, op in last.items():
        leaves = any(isinstance(use.operation, (SendOp, TermOp, OutputOp)) for use in value.uses)
        if not leaves and tensor_type(value).is_floating:
            found.setdefault(op, []).append(value)
    return found


def _argument_name(label: str) -> str:
    """A name for a tensor that glue makes for a block: the argument's, or the block's where arguments have no
    names."""
    block, _, argument = label.rpartition(":")
    return argument if argument.isidentifier() else f"{strip_wrappers(block).split('.')[-1]}_in"


def batch_item(key: str) -> str:
    """The expression that reads a key of the batch: `images[0]` -> `batch["images"][0]`."""
    name, bracket, rest = key.partition("[")
    return f"batch[{string_literal(name)}]{bracket}{rest}"


def _grad_context(op: Computation) -> str:
    """The context managers of an op as the text behind `with`."""
    parts = ["torch.no_grad()"] if op.no_grad is not None else []
    autocast = op.autocast
    if isinstance(autocast, StringAttr):
        parts.append(f"torch.autocast({autocast.data})")
    return ", ".join(parts)


def _settings_context(op: CallOp, attribute: str) -> str:
    """The context in which a block's modules are set as the user's forward had set them."""
    found = op.attributes.get(SETTINGS_ATTRIBUTE)
    return f"self.with_settings(self.{attribute}, {found.data})" if isinstance(found, StringAttr) else ""


def _layout_lines(code: Sequence[CodeLine]) -> list[str]:
    """Group lines under their contexts and note the place where it changes."""
    out: list[str] = []
    last = ""
    for context, group in groupby(code, key=lambda line: line.context):
        indent = "    " if context else ""
        if context:
            out.append(f"with {context}:")
        for line in group:
            note = f"  # {printable_text(line.place)}" if line.place and line.place != last else ""
            last = line.place or last
            out.append(f"{indent}{line.text}{note}")
    return out
