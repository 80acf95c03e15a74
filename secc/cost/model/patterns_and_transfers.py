"""Workload of sections from dataset statistics: input patterns with mean sizes, and tensors sent between
sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import Operation, SSAValue

from secc.cost.model.cost_expressions import max_expr
from secc.cost.model.default_estimate import count_entries
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GraphOp, PatternOp, SectionOp, section_of, strings_of
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.plan.sample_predicates import is_active

MeanSizes = Mapping[str, float]  # by symbol


@dataclass(frozen=True)
class InputPattern:
    """Samples that have exactly the optional inputs `when`: their share of the dataset and their mean
    sizes by symbol."""

    when: frozenset[str]
    share: Fraction
    sizes: MeanSizes


@dataclass(frozen=True)
class SectionTransfer:
    """All tensors that section `src` sends to section `dst`. size: bytes of a micro-batch (an expression).
    grad: gradients are sent back."""

    src: str
    dst: str
    size: str
    grad: bool


def input_patterns(graph: GraphOp) -> list[InputPattern]:
    """The dataset's input patterns, with shares that add up to 1. Without statistics, every captured
    pattern has the same share and sizes of 1."""
    patterns = [
        InputPattern(frozenset(strings_of(op.when)), Fraction(op.share.data), _mean_sizes(graph, op))
        for op in graph.patterns
    ]
    if not patterns:
        whens = sorted({strings_of(case.when) for case in graph.cases})
        patterns = [
            InputPattern(frozenset(w), Fraction(1, len(whens)), _unit_sizes(graph, frozenset(w)))
            for w in whens
        ]
    total = sum(p.share for p in patterns)
    return [InputPattern(p.when, p.share / total, p.sizes) for p in patterns if p.share > 0]


def _mean_sizes(graph: GraphOp, op: PatternOp) -> dict[str, float]:
    return {name: _mean_of_symbol(op, name) for name in graph.symbols}


def _mean_of_symbol(op: PatternOp, name: str) -> float:
    mean = op.attributes.get(name)
    return float(mean.value.data) if isinstance(mean, FloatAttr | IntegerAttr) else 0.0


def _unit_sizes(graph: GraphOp, when: frozenset[str]) -> dict[str, int]:
    optional = set(strings_of(graph.optional))
    return {name: int(op.key.data not in optional - when) for name, op in graph.symbols.items()}


def micro_batch_sizes(graph: GraphOp, sizes: MeanSizes, samples: int) -> dict[str, int]:
    """Symbol values of a micro-batch of `samples` samples with these mean sizes: rows are multiplied, widths
    stay.

    Values are integers, and 0 only where the mean is 0.
    """
    means = {
        name: sizes[name] * (samples if op.kind.data == "rows" else 1) for name, op in graph.symbols.items()
    }
    return {name: max(1, round(mean)) if mean else 0 for name, mean in means.items()}


def most_frequent_sizes(graph: GraphOp, patterns: Sequence[InputPattern]) -> dict[str, int]:
    """Symbol values of a mean sample of the most frequent of these patterns; {} without patterns."""
    frequent = max(patterns, key=lambda p: p.share, default=None)
    return {} if frequent is None else micro_batch_sizes(graph, frequent.sizes, 1)


def section_handles_pattern(section: SectionOp, pattern: InputPattern) -> bool:
    """Whether a section processes samples of a pattern."""
    return is_active(strings_of(section.when), pattern.when)


def section_transfers(graph: GraphOp) -> list[SectionTransfer]:
    """The transfers between sections, for each pair in the order of the IR, with the maximum over cases as
    size."""
    sizes: dict[tuple[str, str], list[str]] = {}
    grads: dict[tuple[str, str], bool] = {}
    for case in graph.cases:
        for pair, values in _values_between_sections(case.ops).items():
            total = sum(
                (count_entries(tensor_type(v)) * tensor_type(v).itemsize for v in values),
                size_expr.parse_expr("0"),
            )
            sizes.setdefault(pair, []).append(size_expr.format_expr(total))
            grads[pair] = grads.get(pair, False) or any(tensor_type(v).requires_grad for v in values)
    return [SectionTransfer(*pair, max_expr(texts), grads[pair]) for pair, texts in sizes.items()]


def _values_between_sections(ops: list[Operation]) -> dict[tuple[str, str], list[SSAValue]]:
    by_pair: dict[tuple[str, str], list[SSAValue]] = {}
    for src, dst, value in _cross_section_uses(ops):
        values = by_pair.setdefault((src, dst), [])
        if not any(value is v for v in values):
            values.append(value)
    return by_pair


def _cross_section_uses(ops: list[Operation]) -> Iterator[tuple[str, str, SSAValue]]:
    for op in ops:
        dst = section_of(op)
        for operand in op.operands:
            src = section_of(operand.owner) if isinstance(operand.owner, Operation) else None
            if src is not None and dst is not None and src != dst:
                yield src, dst, operand
