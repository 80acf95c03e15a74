"""What a value means in terms of a head's logits: a sum of products of probabilities, log-probabilities and
picked entries.

A formula has one of three kinds: `entries` (a number for each row and token), `rows` (one for each row) and
`total` (one number, the sum over rows). All spellings of a loss that compute the same lead to the same
formula, which rules match. What the user does to rows of the logits (`RowView`) is done to hidden states,
labels and masks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.fusion.not_a_formula import NotAFormula

KIND_ENTRIES, KIND_ROWS, KIND_TOTAL = "entries", "rows", "total"
SHAPE_OPS = frozenset(
    {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_reshape_alias"}
)
IDENTITY_OPS = frozenset(
    {"clone", "contiguous", "alias", "lift_fresh", "positive", "detach_copy", "lift_fresh_copy"}
)
ROW_PRESERVING_OPS = SHAPE_OPS | IDENTITY_OPS


@dataclass(frozen=True)
class RowView:
    """An op that rearranges or picks rows, `lead` being their dims then. Dims are counted without that of
    tokens or hidden states."""

    op: str  # reshape, expand, permute, slice, select, index
    lead: tuple[Expr, ...]
    args: tuple[Any, ...] = ()  # behind the tensor
    operands: tuple[SSAValue, ...] = ()


def append_view(rows: tuple[Expr, ...], views: tuple[RowView, ...], view: RowView) -> tuple[RowView, ...]:
    """`views` with one more, on rows with dims `rows`. Of successive reshapes only the last is kept, and that
    only if it changes the dims."""
    if view.op != "reshape":
        return (*views, view)
    while views and views[-1].op == "reshape":
        views = views[:-1]
    before = views[-1].lead if views else rows
    return views if before == view.lead else (*views, view)


@dataclass(frozen=True)
class RowSource:
    """A label, a boolean mask, or a weight (`is_weight`: a number that needs no gradient) for each row."""

    value: SSAValue
    views: tuple[RowView, ...] = ()
    negated: bool = False
    is_weight: bool = False

    def with_view(self, view: RowView) -> RowSource:
        return replace(self, views=append_view(tensor_type(self.value).shape, self.views, view))


@dataclass(frozen=True)
class BlockParameter:
    """A block's parameter by its name."""

    path: str


@dataclass(frozen=True)
class LinearHead:
    """Logits as a product: `hidden` [..., H] times the transpose of `weight` [V, H] ([H, V] if `transposed`),
    plus `bias` [V]."""

    logits: SSAValue
    hidden: SSAValue
    weight: SSAValue | BlockParameter
    bias: SSAValue | BlockParameter | None
    tokens: int
    width: int
    transposed: bool = False


@dataclass(frozen=True)
class HeadLogits:
    """Rows of a head's logits: `scale * logits[..., :tokens]`, capped to softcap * tanh(./softcap) where
    `softcap` is not 0.

    `fixed`: no gradient flows into them.
    """

    head: LinearHead
    tokens: int
    views: tuple[RowView, ...] = ()
    scale: float = 1.0
    softcap: float = 0.0
    fixed: bool = False

    def with_view(self, view: RowView) -> HeadLogits:
        return replace(self, views=append_view(tensor_type(self.head.logits).shape[:-1], self.views, view))


@dataclass(frozen=True)
class PlainLogit:
    """A logit."""

    of: HeadLogits


@dataclass(frozen=True)
class Probability:
    """Its softmax."""

    of: HeadLogits


@dataclass(frozen=True)
class LogProbability:
    """Its log-softmax."""

    of: HeadLogits


@dataclass(frozen=True)
class LogMixture:
    """log(share * softmax(one) + (1 - share) * softmax(other))."""

    share: float
    one: HeadLogits
    other: HeadLogits


VocabEntry = PlainLogit | Probability | LogProbability | LogMixture


@dataclass(frozen=True)
class TokenSum:
    """A product of entries, summed over the tokens."""

    entries: tuple[VocabEntry, ...]


@dataclass(frozen=True)
class PickedEntry:
    """The entry of each row's label; 0 where the label is `ignore`."""

    entry: VocabEntry
    label: RowSource
    ignore: int | None = None


@dataclass(frozen=True)
class LogSumExp:
    """The log of the sum of exponentials of a row's logits."""

    of: HeadLogits


FormulaFactor = VocabEntry | TokenSum | PickedEntry | LogSumExp
ProductKey = tuple[
    frozenset[RowSource], tuple[FormulaFactor, ...]
]  # masks and weights that a product is multiplied by, and its factors
FormulaTerms = Mapping[ProductKey, float]


@dataclass(frozen=True)
class Formula:
    """A sum of products with their numbers. `axis` is the tokens' dim (for entries)."""

    kind: str
    terms: FormulaTerms
    axis: int = -1

    @staticmethod
    def from_factor(kind: str, factor: FormulaFactor, number: float = 1.0, axis: int = -1) -> Formula:
        return Formula(kind, {(frozenset(), (factor,)): number}, axis)

    def single_factor(self) -> FormulaFactor | None:
        """The factor that the formula consists of, None if it has more."""
        if len(self.terms) != 1:
            return None
        ((masks, factors), number) = next(iter(self.terms.items()))
        return factors[0] if number == 1 and not masks and len(factors) == 1 else None

    def scale_by(self, number: float) -> Formula:
        return replace(self, terms={k: n * number for k, n in self.terms.items()})

    def plus(self, other: Formula) -> Formula:
        terms = dict(self.terms)
        for key, number in other.terms.items():
            terms[key] = terms.get(key, 0.0) + number
        return replace(self, terms={k: n for k, n in terms.items() if n != 0})

    def times(self, other: Formula) -> Formula:
        """The product, entry by entry."""
        found = Formula(self.kind, {}, self.axis)
        for (masks, factors), number in self.terms.items():
            for (more, others), weight in other.terms.items():
                key = (_join_masks(masks, more), sort_factors((*factors, *others)))
                found = found.plus(Formula(self.kind, {key: number * weight}, self.axis))
        return found

    def mask_rows(self, mask: RowSource) -> Formula:
        return replace(
            self,
            terms={
                (_join_masks(masks, frozenset([mask])), factors): n
                for (masks, factors), n in self.terms.items()
            },
        )

    def map_sources(self, change: Callable[[Any], Any], axis: int | None = None) -> Formula:
        """The formula with `change` applied to all logits and sources of rows in it."""
        terms = {
            (frozenset(change(m) for m in ms), tuple(_map_factor(f, change) for f in fs)): n
            for (ms, fs), n in self.terms.items()
        }
        return replace(self, terms=terms, axis=self.axis if axis is None else axis)

    def reduce_entries(self, kind: str, change: Callable[[tuple[VocabEntry, ...]], FormulaFactor]) -> Formula:
        """Rows from entries: `change` makes one factor of the entries' factors."""
        return Formula(kind, {(masks, (change(factors),)): n for (masks, factors), n in self.terms.items()})  # pyright: ignore[reportArgumentType]

    def sum_rows(self) -> Formula:
        """The sum over all rows, which does not depend on their last shape."""
        return replace(self.map_sources(drop_last_reshape), kind=KIND_TOTAL)

    def all_logits(self) -> list[HeadLogits]:
        """All logits that occur."""
        found: dict[HeadLogits, None] = {}

        def note_logits(value: Any) -> Any:
            if isinstance(value, HeadLogits):
                found[value] = None
            return value

        self.map_sources(note_logits)
        return list(found)


def _join_masks(masks: frozenset[RowSource], more: frozenset[RowSource]) -> frozenset[RowSource]:
    """The masks and weights of a product. A mask twice is the mask; a weight twice is its square, which no
    set shows, so it raises NotAFormula."""
    if any(m.is_weight for m in masks & more):
        raise NotAFormula("rows are multiplied by one weight twice")
    return masks | more


def read_source(value: SSAValue) -> RowSource:
    """A value of the case as a source of rows; ops behind it that only change its shape become views."""
    root = value
    while isinstance(owner := root.owner, GlueOp) and owner.base_name in ROW_PRESERVING_OPS:
        root = owner.operands[0]
    return RowSource(root).with_view(RowView("reshape", tensor_type(value).shape))


def drop_last_reshape(value: Any) -> Any:
    """Rows without the reshape at their end."""
    views = value.views
    return replace(value, views=views[:-1]) if views and views[-1].op == "reshape" else value


def sort_factors(factors: tuple[FormulaFactor, ...]) -> tuple[FormulaFactor, ...]:
    """Factors in an order that does not depend on how they were written."""
    return tuple(sorted(factors, key=lambda f: type(f).__name__))


def _map_factor(factor: FormulaFactor, change: Callable[[Any], Any]) -> FormulaFactor:
    match factor:
        case PlainLogit() | Probability() | LogProbability() | LogSumExp():
            return replace(factor, of=change(factor.of))
        case LogMixture():
            return replace(factor, one=change(factor.one), other=change(factor.other))
        case TokenSum():
            return TokenSum(tuple(_map_factor(e, change) for e in factor.entries))  # pyright: ignore[reportArgumentType]
        case PickedEntry():
            return replace(factor, entry=_map_factor(factor.entry, change), label=change(factor.label))
