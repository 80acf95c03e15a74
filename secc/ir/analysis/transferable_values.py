"""Which tensors an edge can carry: rows that add up over samples, in a shape that both ends know from the
samples' sizes alone.

Stages of one pipeline have the same micro-batches, so between two of them a tensor travels whole, whatever
its dims, if sizes determine them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise

import sympy
from xdsl.dialects.builtin import StringAttr

from secc.ir.analysis.dataflow import get_number
from secc.ir.analysis.whole_batch import whole_batch_of_section
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GraphOp, KeyOp, SectionOp, SymbolOp, strings_of
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType
from secc.runtime.plan.sample_predicates import describe_predicate, inputs_of
from secc.runtime.plan.schema import is_tensor_label

_TRIED_WIDTHS = 1024  # at which a size is compared with the positions that it counts


@dataclass(frozen=True)
class TransferLayout:
    """How an edge carries a tensor: the dim that counts samples, the rows of one sample as an expression, and
    (dim, expression, side) for each dim that is cut to the sample's own extent.

    Between stages of one pipeline the tensor travels whole: `dim` is -1 and `rows` is empty.
    """

    dim: int
    rows: str
    extents: tuple[tuple[int, str, str], ...] = ()


WHOLE_TENSOR = TransferLayout(-1, "")


class NotTransferable(Exception):
    """Raised for a tensor that an edge cannot carry; its message says why."""


def pipeline_of(section: SectionOp) -> str:
    """The pipeline that a section is a stage of, "" if it is none."""
    found = section.attributes.get("pipeline")
    return found.data if isinstance(found, StringAttr) else ""


def layout_between(
    graph: GraphOp, kind: TensorType, src: SectionOp, dst: SectionOp, mixed: bool = False
) -> TransferLayout:
    """How an edge carries a tensor of type `kind` from one section to another. `mixed`: its rows are not in
    the order of the samples (`secc.ir.analysis.row_order`). Raises NotTransferable."""
    if pipeline_of(src) and pipeline_of(src) == pipeline_of(dst):
        return whole_layout(graph, kind)
    if mixed:
        raise NotTransferable(f"the rows of {_format_shape(kind)} do not stand sample after sample")
    how = row_layout(graph, kind)
    if whole_batch_of_section(graph, dst):
        require_rows_covered(graph, how, strings_of(src.when), strings_of(dst.when))
    return how


def can_transfer(
    graph: GraphOp,
    kind: TensorType,
    src: SectionOp,
    dst: SectionOp,
    mixed: bool = False,
    every_sample: bool = True,
) -> bool:
    """Whether an edge can carry a tensor of this type from one section to another; with `every_sample`, one
    in which all samples of the consumer that would have rows have them."""
    try:
        how = layout_between(graph, kind, src, dst, mixed)
        if every_sample and how != WHOLE_TENSOR:
            require_rows_covered(graph, how, strings_of(src.when), strings_of(dst.when))
    except NotTransferable:
        return False
    return True


def whole_layout(graph: GraphOp, kind: TensorType) -> TransferLayout:
    """The layout of a tensor that travels whole between stages of a pipeline. Raises NotTransferable where
    sizes do not determine its shape."""
    _require_known_shape(graph, kind)
    return WHOLE_TENSOR


def _require_known_shape(graph: GraphOp, kind: TensorType) -> None:
    """Raises NotTransferable for a shape that sizes do not determine."""
    known = {name for name, s in graph.symbols.items() if s.kind.data != "data"}
    if any(size_expr.symbol_names(d) - known for d in kind.shape):
        raise NotTransferable(f"values of the inputs decide the shape {_format_shape(kind)}")


def row_layout(graph: GraphOp, kind: TensorType) -> TransferLayout:
    """How an edge carries a tensor by rows per sample.

    One dim adds up over samples (`B`, `576*n_pixel_values`). The others are constant or, where micro-batches
    have their own widths (`widths "own"`), single width symbols that can be cut, the maximum of several, or a
    number of windows over one (`S - 1`, `(S + 3)//4`).
    Raises NotTransferable.
    """
    _require_known_shape(graph, kind)
    rows = {name for name, s in graph.symbols.items() if s.kind.data == "rows"}
    shape = kind.shape
    sample_dims = [i for i, d in enumerate(shape) if size_expr.symbol_names(d) & rows]
    if len(sample_dims) != 1:
        raise NotTransferable(
            f"{'no dim' if not sample_dims else 'more than one dim'} of {_format_shape(kind)} counts samples"
        )
    dim, own = sample_dims[0], graph.widths is None or graph.widths.data == "own"
    if not _is_additive(shape[dim], rows, set(graph.symbols) if own else rows):
        raise NotTransferable(
            f"the rows {size_expr.format_expr(shape[dim])} do not add up over "
            f"samples{' of different widths' if own else ''}"
        )
    extents = (
        tuple(
            _read_extent(graph, i, d) for i, d in enumerate(shape) if i != dim and size_expr.symbol_names(d)
        )
        if own
        else ()
    )
    return TransferLayout(dim, size_expr.format_expr(shape[dim]), extents)


def require_rows_covered(
    graph: GraphOp, how: TransferLayout, src_when: Sequence[str], dst_when: Sequence[str]
) -> None:
    """Raises NotTransferable unless every sample that has rows for the consumer is also one of the
    producer's, as it must be where samples of several input patterns are in one micro-batch."""
    covered = bool(dst_when) and set(dst_when) <= set(src_when)
    absent = src_when if set(src_when) == set(inputs_of(src_when)) else ()
    if src_when and not covered and not has_no_rows(graph, how.rows, absent):
        raise NotTransferable(
            f"the first is active for {describe_predicate(src_when)}, and others have rows of it too; they "
            "have none where collate() joins the rows of all samples along dim 0"
        )


def has_no_rows(graph: GraphOp, rows: str, absent: Sequence[str]) -> bool:
    """Whether a sample without the optional keys `absent` has no rows: each symbol in `rows` counts entries
    of one of these keys, or of a key that never occurs without one of them."""
    patterns = [set(strings_of(p.when)) for p in graph.patterns]

    def needs_absent_key(key: str) -> bool:
        having = [p for p in patterns if key in p]
        return bool(having) and all(p & set(absent) for p in having)

    def is_counted_with_absent_key(name: str, symbol: SymbolOp) -> bool:
        """Whether only samples with one of these keys have rows that a recording counts."""
        having = [set(strings_of(p.when)) for p in graph.patterns if get_number(p, name)]
        return is_tensor_label(symbol.key.data) and bool(having) and all(p & set(absent) for p in having)

    gone = [
        (size_expr.size_symbol(name), 0)
        for name, s in graph.symbols.items()
        if s.key.data in absent or needs_absent_key(s.key.data) or is_counted_with_absent_key(name, s)
    ]
    return size_expr.parse_expr(rows).subs(gone) == 0


def _is_additive(size: Expr, rows: set[str], banned: set[str]) -> bool:
    """Whether a size is a sum of rows symbols with factors in which no banned symbol occurs.

    A quotient such as `n//4` counts as one: ranks refuse samples with rows that 4 does not divide
    (`secc.runtime.data.sample_metadata`).
    """
    rest = sympy.expand(size.replace(sympy.floor, _exact_quotient))
    for name in rows:
        factor = rest.coeff(size_expr.size_symbol(name))
        if size_expr.symbol_names(factor) & (banned | rows):
            return False
        rest = sympy.expand(rest - factor * size_expr.size_symbol(name))
    return rest == 0


def _exact_quotient(quotient: Expr) -> Expr:
    """The quotient without floor, where it is a multiple of rows."""
    whole, over = sympy.fraction(sympy.together(quotient))
    return quotient if not over.is_Integer or whole.as_coeff_Add()[0] != 0 else whole / over


def _read_extent(graph: GraphOp, dim: int, size: Expr) -> tuple[int, str, str]:
    """(dim, extent of one sample, padded side) of a dim that is cut to the sample's own width. Raises
    NotTransferable."""
    widths = size.args if isinstance(size, sympy.Max) else (size,)  # the wider of two widths
    are_widths = all(isinstance(w, sympy.Symbol) for w in widths)
    names, text = size_expr.symbol_names(size), size_expr.format_expr(size)
    sides = {_padding_side(graph, graph.symbols[n]) for n in names}
    windows = None if are_widths or len(names) != 1 else _read_windows(size, *names)
    cuts = are_widths or windows is _Windows.DENSE or (windows is _Windows.STRIDED and sides == {"right"})
    if not cuts or len(sides) != 1:
        raise NotTransferable(f"dim {dim}, {text}, cannot be cut to a sample's own width")
    return dim, text if are_widths else f"max({text}, 0)", sides.pop()


class _Windows(Enum):
    """Windows over the positions of a width. Those of a sample are the first of a batch padded at the right,
    and the last of one padded at the left if there is one at each position."""

    DENSE = "one at each position but the last few"  # labels[:, 1:], a convolution without padding
    STRIDED = "at some positions"  # a strided convolution, pooling


@cache
def _read_windows(size: Expr, width: str) -> _Windows | None:
    """What a size counts that grows by at most one with each position of a width, and is never larger; None
    for other sizes, such as those of joined tensors."""
    sizes = [max(0, int(size_expr.evaluate_size(size, {width: n}))) for n in range(_TRIED_WIDTHS)]
    if any(b - a not in (0, 1) for a, b in pairwise(sizes)) or any(s > n for n, s in enumerate(sizes)):
        return None
    lost = {n - s for n, s in enumerate(sizes) if s}
    return _Windows.DENSE if len(lost) == 1 else _Windows.STRIDED


def _padding_side(graph: GraphOp, symbol: SymbolOp) -> str:
    """The side on which `collate` pads a width: that of the key it is read from."""
    keys = [op for op in graph.body.block.ops if isinstance(op, KeyOp) and op.key == symbol.key]
    pads = [p.split(" ") for op in keys for p in strings_of(op.pads)]
    return next((side for dim, side, _ in pads if int(dim) == symbol.dim.data), "right")


def _format_shape(kind: TensorType) -> str:
    return f"[{', '.join(size_expr.format_expr(d) for d in kind.shape)}]"
