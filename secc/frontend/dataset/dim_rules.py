"""Finds out how the dims of a batch change with its samples: constant, rows that add up over the samples,
widths that are the maximum over the samples, or derived from one of these.

The evidence is a list of observations: the shapes of a collated set of samples, and the shapes of each of
its samples collated alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from secc.errors import UserError
from secc.ir.dialect.readable_names import identifier_characters, make_unique
from secc.runtime.model.default_collate import TEXT_KEY
from secc.runtime.model.nested_batch import KEY_SEPARATOR
from secc.runtime.plan import schema

KeyShapes = Mapping[str, tuple[int, ...]]
ObservedExtents = tuple[int, ...]
KeyDim = tuple[str, int]

COLLATE_REMEDY = (
    "write collate() so that each dim of a key is constant, adds up over the samples, or is the longest of "
    "the samples"
)
_OFFSETS_REMEDY = (
    "return the length of each sample in place of offsets, and let forward add lengths up:"
    " `F.pad(lengths.cumsum(0), (1, 0))`"
)


@dataclass(frozen=True)
class ShapeObservation:
    """Shapes of `collate(samples)`, and of `collate([sample])` for each sample."""

    shapes: KeyShapes
    singles: tuple[KeyShapes, ...]


@dataclass
class DimRules:
    """Symbols of the sizes, and for each (key, dim) its expression and kind: "constant", "rows", "width"
    or "derived"."""

    symbols: list[schema.Symbol] = field(default_factory=list)
    expressions: dict[KeyDim, str] = field(default_factory=dict)
    kinds: dict[KeyDim, str] = field(default_factory=dict)

    def dims_of(self, key: str) -> tuple[str, ...]:
        """Returns the expressions of a key's dims, in order."""
        return tuple(
            text for (k, _), text in sorted(self.expressions.items(), key=lambda item: item[0][1]) if k == key
        )


@dataclass
class _ObservedDims:
    """Values over all observations: of each dim that is not constant, by kind, and of each symbol. 0 where
    a key is missing. `counts` are the numbers of samples."""

    counts: ObservedExtents
    rows: dict[KeyDim, ObservedExtents]
    widths: dict[KeyDim, ObservedExtents]
    others: dict[KeyDim, ObservedExtents]
    values_by_symbol: dict[str, ObservedExtents] = field(default_factory=dict)


def explain_dims(observations: Sequence[ShapeObservation], integral: Iterable[str], where: str) -> DimRules:
    """Finds symbols and expressions for all dims.

    integral: keys of integer tensors, which may be text. where: file:line of collate, for messages. Raises
    UserError, naming key and dim, for a dim that follows no rule and for a key if its number of dims changes.
    """
    extents = DimRules()
    table = _classify_dims(observations, extents, where)
    _name_rows(table, extents)
    _name_widths(table, extents, set(integral))
    for dim, vector in table.others.items():
        having = tuple(sum(dim[0] in single for single in o.singles) for o in observations)
        _explain_derived_dim(dim, vector, having, table, extents, where)
    return extents


def _classify_dims(observations: Sequence[ShapeObservation], extents: DimRules, where: str) -> _ObservedDims:
    table = _ObservedDims(tuple(len(o.singles) for o in observations), {}, {}, {})
    for key, ndim in _check_ranks(observations, where).items():
        for dim in range(ndim):
            vector = tuple(_dim_extent(o.shapes, key, dim) for o in observations)
            present = {v for v, o in zip(vector, observations, strict=True) if key in o.shapes}
            parts = [[_dim_extent(s, key, dim) for s in o.singles if key in s] for o in observations]
            if len(present) == 1:
                extents.expressions[key, dim], extents.kinds[key, dim] = str(present.pop()), "constant"
            elif vector == tuple(sum(p) for p in parts):
                table.rows[key, dim] = vector
            elif vector == tuple(max(p, default=0) for p in parts):
                table.widths[key, dim] = vector
            else:
                table.others[key, dim] = vector
    return table


def _check_ranks(observations: Sequence[ShapeObservation], where: str) -> dict[str, int]:
    """Returns the number of dims of each key. Raises UserError if a key's presence or number of dims
    depends on how samples are batched."""
    ranks: dict[str, int] = {}
    for o in observations:
        present = frozenset[str]().union(*o.singles)
        if present != frozenset(o.shapes):
            key = min(present ^ frozenset(o.shapes))
            steps = key.split(KEY_SEPARATOR)
            if (number := next((i for i, step in enumerate(steps) if step.isdecimal()), 0)) > 0:
                listed = KEY_SEPARATOR.join(steps[:number])
                message = (
                    f"the list {listed!r} has another number of tensors for several samples than for one"
                )
                raise UserError(
                    message,
                    where,
                    "let collate() concatenate or pad the tensors and return their lengths as another tensor",
                )
            raise UserError(
                f"collate() gives {key!r} for a set of samples by another rule than for its samples alone",
                where,
                COLLATE_REMEDY,
            )
        for key, shape in o.shapes.items():
            if ranks.setdefault(key, len(shape)) != len(shape):
                raise UserError(
                    f"{key!r} has {ranks[key]} dims in one batch and {len(shape)} in another",
                    where,
                    COLLATE_REMEDY,
                )
    return ranks


def _dim_extent(shapes: KeyShapes, key: str, dim: int) -> int:
    return shapes[key][dim] if key in shapes else 0


def _name_rows(table: _ObservedDims, extents: DimRules) -> None:
    """Names `B` and the other row counts, the smallest first, so that larger ones become multiples of
    them."""
    additive = [dim for dim, vector in table.rows.items() if vector == table.counts]
    sample_dim = next((dim for dim in additive if dim[0] == TEXT_KEY), additive[0] if additive else ("", 0))
    _add_symbol(schema.Symbol("B", "rows", *sample_dim), table.counts, table, extents)
    for dim, vector in sorted(table.rows.items(), key=lambda item: sum(item[1])):
        text = next(
            (
                t
                for name in table.values_by_symbol
                if (t := _as_multiple(vector, table.values_by_symbol[name], name))
            ),
            "",
        )
        if not text:
            text = _new_symbol_name("n_", dim, table)
            _add_symbol(schema.Symbol(text, "rows", *dim), vector, table, extents)
        extents.expressions[dim], extents.kinds[dim] = text, "rows"


def _name_widths(table: _ObservedDims, extents: DimRules, integral: set[str]) -> None:
    """Names `S` for text, and the other widths; a width that differs from another by a constant is written
    in terms of it."""
    texts = [dim for dim in table.widths if dim[0] in integral]
    leading = next((dim for dim in texts if dim[0] == TEXT_KEY), texts[0] if texts else None)
    for dim in sorted(table.widths, key=lambda d: d != leading):
        vector = table.widths[dim]
        bases = {s.name: table.values_by_symbol[s.name] for s in extents.symbols if s.kind == "width"}
        text = next(
            (
                t
                for name, base in bases.items()
                if _zero_mask(base) == _zero_mask(vector) and (t := _as_affine(vector, base, name))
            ),
            "",
        )
        if not text:
            text = "S" if dim == leading else _new_symbol_name("S_", dim, table)
            _add_symbol(schema.Symbol(text, "width", *dim), vector, table, extents)
        extents.expressions[dim], extents.kinds[dim] = text, "width"


def _explain_derived_dim(
    dim: KeyDim,
    vector: ObservedExtents,
    having: ObservedExtents,
    table: _ObservedDims,
    extents: DimRules,
    where: str,
) -> None:
    """Explains a dim that is computed from rows or a width: `B + 1` offsets, labels padded like the text.
    having: how many samples of each batch have the key."""
    for symbol in sorted(extents.symbols, key=lambda s: s.kind, reverse=True):
        text = _as_affine(vector, table.values_by_symbol[symbol.name], symbol.name)
        if text:
            extents.expressions[dim], extents.kinds[dim] = (
                text,
                symbol.kind if text == symbol.name else "derived",
            )
            return
    key, number = dim
    seen = ", ".join(str(v) for v in sorted(set(vector) - {0})[:6])
    message = (
        f"dim {number} of {key!r} is neither constant nor additive nor a maximum over samples: {seen}, …"
    )
    are_offsets = all(v == h + 1 for v, h in zip(vector, having, strict=True) if h)
    raise UserError(message, where, _OFFSETS_REMEDY if are_offsets else COLLATE_REMEDY)


def _add_symbol(
    symbol: schema.Symbol, vector: ObservedExtents, table: _ObservedDims, extents: DimRules
) -> None:
    extents.symbols.append(symbol)
    table.values_by_symbol[symbol.name] = vector


def _zero_mask(vector: ObservedExtents) -> tuple[bool, ...]:
    return tuple(v == 0 for v in vector)


def _as_multiple(vector: ObservedExtents, base: ObservedExtents, name: str) -> str:
    """Returns `vector` as a multiple of `base`; "" if it is none."""
    factor = next((v // b for v, b in zip(vector, base, strict=True) if b), 0)
    if factor < 1 or any(v != factor * b for v, b in zip(vector, base, strict=True)):
        return ""
    return name if factor == 1 else f"{factor}*{name}"


def _as_affine(vector: ObservedExtents, base: ObservedExtents, name: str) -> str:
    """Returns `vector` as a multiple of `base` plus a constant, ignoring entries that are 0; "" if it is
    not."""
    points = sorted({(b, v) for v, b in zip(vector, base, strict=True) if v})
    if len(points) < 2 or points[0][0] == 0:
        return ""
    (b0, v0), (b1, v1) = points[0], points[-1]
    if b1 == b0 or (v1 - v0) % (b1 - b0):
        return ""
    factor = (v1 - v0) // (b1 - b0)
    offset = v0 - factor * b0
    if factor < 1 or any(v != factor * b + offset for b, v in points):
        return ""
    return _as_multiple((factor,), (1,), name) + (
        f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else ""
    )


def _new_symbol_name(prefix: str, dim: KeyDim, table: _ObservedDims) -> str:
    """Returns a symbol named after a key, with the dim's number if the name is taken."""
    key, number = dim
    name = prefix + identifier_characters(key.partition(f"{KEY_SEPARATOR}{schema.EACH_SUFFIX}")[0])
    taken = table.values_by_symbol
    return name if name not in taken else make_unique(f"{name}_{number}", taken)
