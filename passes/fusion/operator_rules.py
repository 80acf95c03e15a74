"""The rules of `fuse-linear-loss`: which formula each operator computes, and what of a loss remains when it
is taken out.

A divergence is a table of products, each with its number, over a student `s` and a teacher `t`; a loss that
has all of them, times one number, contains the divergence, however it was written. Cross entropy has one
product for the label and, where labels are smoothed, one for the mean over the tokens. A loss with products
that no rule takes out is not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import GlueOp
from secc.passes.fusion.formula import (
    FormulaFactor,
    HeadLogits,
    LogMixture,
    LogProbability,
    LogSumExp,
    PickedEntry,
    PlainLogit,
    Probability,
    ProductKey,
    RowSource,
    TokenSum,
    drop_last_reshape,
    read_source,
    sort_factors,
)

CROSS_ENTROPY_RULE, KL_RULE, KL_CE_RULE = "linear-cross-entropy", "linear-kl", "linear-kl-ce"
ProductTable = Mapping[tuple[FormulaFactor, ...], float]
_TOLERANCE = 1e-9

# The products of each divergence of a student `s` from a teacher `t`; `m` is the mixture
# share * teacher + (1 - share) * student.
DIVERGENCES: dict[str, Callable[[HeadLogits, HeadLogits, LogMixture], ProductTable]] = {
    "forward": lambda s, t, m: {
        _token_sum(Probability(t), LogProbability(t)): 1,
        _token_sum(Probability(t), LogProbability(s)): -1,
    },
    "reverse": lambda s, t, m: {
        _token_sum(Probability(s), LogProbability(s)): 1,
        _token_sum(Probability(s), LogProbability(t)): -1,
    },
    "js": lambda s, t, m: {
        _token_sum(Probability(t), m): -m.share,
        _token_sum(Probability(t), LogProbability(t)): m.share,
        _token_sum(Probability(s), LogProbability(s)): 1 - m.share,
        _token_sum(Probability(s), m): m.share - 1,
    },
}


def _token_sum(*entries: Probability | LogProbability | LogMixture) -> tuple[FormulaFactor, ...]:
    return (TokenSum(sort_factors(entries)),)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class LossPiece:
    """`number` times what one operator computes, over the rows that all of `masks` keep, times the weights
    among them."""

    rule: str
    number: float
    student: HeadLogits
    masks: frozenset[RowSource]
    label: RowSource | None = None
    ignore: int | None = None
    smoothing: float = 0.0
    teacher: HeadLogits | None = None
    kind: str = ""
    share: float = 0.5

    @property
    def kept_rows(self) -> list[RowSource]:
        """The masks that are no weights."""
        return [m for m in self.masks if not m.is_weight]

    @property
    def weights(self) -> list[RowSource]:
        """The weights of rows."""
        return [m for m in self.masks if m.is_weight]

    @property
    def logits(self) -> list[HeadLogits]:
        return [self.student] if self.teacher is None else [self.student, self.teacher]


def split_into_pieces(terms: Mapping[ProductKey, float]) -> list[LossPiece] | None:
    """The pieces that a loss consists of, None if something remains."""
    left, found = dict(terms), list[LossPiece]()
    while left:
        piece = next((p for p, rest in _iter_candidates(left) if _remove_products(left, rest)), None)
        if piece is None:
            return None
        found.append(piece)
    return found


def _remove_products(left: dict[ProductKey, float], rest: Mapping[ProductKey, float]) -> bool:
    """Remove products from a loss if it has them all."""
    if not all(abs(left.get(key, 0.0) - number) <= _TOLERANCE * abs(number) for key, number in rest.items()):
        return False
    for key in rest:
        del left[key]
    return True


def _iter_candidates(
    terms: Mapping[ProductKey, float],
) -> Iterator[tuple[LossPiece, Mapping[ProductKey, float]]]:
    """Pieces that the loss may hold, with the products that each would take."""
    yield from _iter_cross_entropies(terms)
    yield from _iter_divergences(terms)


def _iter_divergences(
    terms: Mapping[ProductKey, float],
) -> Iterator[tuple[LossPiece, Mapping[ProductKey, float]]]:
    logits = dict.fromkeys(
        each
        for _, fs in terms
        for f in fs
        if isinstance(f, TokenSum)
        for e in f.entries
        for each in _logits_of(e)
    )
    mixes = dict.fromkeys(
        e
        for _, fs in terms
        for f in fs
        if isinstance(f, TokenSum)
        for e in f.entries
        if isinstance(e, LogMixture)
    )
    for masks in dict.fromkeys(masks for masks, _ in terms):
        for student, teacher in permutations(logits, 2):
            if teacher.fixed and not student.fixed:
                for kind, mix in [("js", m) for m in mixes] + [("forward", None), ("reverse", None)]:
                    mixed = _mixture_or_default(mix, teacher)
                    products = DIVERGENCES[kind](student, teacher, mixed)
                    number = terms.get((masks, next(iter(products))), 0.0) / next(iter(products.values()))
                    piece = LossPiece(
                        KL_RULE, number, student, masks, teacher=teacher, kind=kind, share=mixed.share
                    )
                    if number:
                        yield piece, {(masks, factors): number * n for factors, n in products.items()}


def _mixture_or_default(mix: LogMixture | None, teacher: HeadLogits) -> LogMixture:
    """A mixture as it stands in the loss, with the teacher's share."""
    return LogMixture(0.5, teacher, teacher) if mix is None else mix


def _logits_of(entry: Probability | LogProbability | LogMixture | PlainLogit) -> list[HeadLogits]:
    return [entry.one, entry.other] if isinstance(entry, LogMixture) else [entry.of]


def _iter_cross_entropies(
    terms: Mapping[ProductKey, float],
) -> Iterator[tuple[LossPiece, Mapping[ProductKey, float]]]:
    """-log p of a label, also as logsumexp minus a logit; smoothed, a share of it is the mean over the
    tokens."""
    for (masks, factors), number in terms.items():
        picked = factors[0] if len(factors) == 1 else None
        if not isinstance(picked, PickedEntry):
            continue
        kept = frozenset(m for m in masks if not is_redundant_mask(m, picked))
        logits = _logits_of(picked.entry)[0]
        taken: dict[ProductKey, float] = {(masks, factors): number}
        if isinstance(picked.entry, PlainLogit):
            taken[kept, (LogSumExp(logits),)] = -number
            yield LossPiece(CROSS_ENTROPY_RULE, -number, logits, kept, picked.label, picked.ignore), taken
            continue
        yield from _iter_smoothed(terms, picked, kept, taken, number)
        yield LossPiece(CROSS_ENTROPY_RULE, -number, logits, kept, picked.label, picked.ignore), taken


def _iter_smoothed(
    terms: Mapping[ProductKey, float],
    picked: PickedEntry,
    kept: frozenset[RowSource],
    taken: dict[ProductKey, float],
    number: float,
) -> Iterator[tuple[LossPiece, Mapping[ProductKey, float]]]:
    logits = _logits_of(picked.entry)[0]
    for (masks, factors), other in terms.items():
        same = frozenset(m for m in masks if not is_redundant_mask(m, picked)) == kept and (
            picked.ignore is None or masks != kept
        )
        if same and factors == (TokenSum((LogProbability(logits),)),) and other * number > 0:
            whole = number + other * logits.tokens
            piece = LossPiece(
                CROSS_ENTROPY_RULE,
                -whole,
                logits,
                kept,
                picked.label,
                picked.ignore,
                other * logits.tokens / whole,
            )
            yield piece, taken | {(masks, factors): other}


def is_redundant_mask(mask: RowSource, picked: PickedEntry) -> bool:
    """Whether a mask keeps exactly the rows with a label that is not ignored, which a picked entry leaves out
    anyway."""
    owner = mask.value.owner
    if (
        mask.is_weight
        or not isinstance(owner, GlueOp)
        or owner.base_name not in {"ne", "eq"}
        or picked.ignore is None
    ):
        return False
    compared = owner.arguments.args
    labels = read_source(owner.operands[0])
    for view in mask.views:
        labels = labels.with_view(view)
    same = (
        compared == [argument_template.OperandRef(0), picked.ignore]
        and drop_last_reshape(labels) == picked.label
    )
    return same and mask.negated == (owner.base_name == "eq")


def can_be_joint(cross_entropy: LossPiece, divergence: LossPiece) -> bool:
    """Whether one pass over a student's logits can compute both: temperatures may differ, caps may not."""
    a, b = cross_entropy.student, divergence.student
    same_cap = abs(a.softcap * b.scale - b.softcap * a.scale) <= _TOLERANCE * abs(a.softcap * b.scale)
    return (
        a.head == b.head
        and a.views == b.views
        and a.tokens == b.tokens
        and a.scale > 0
        and same_cap
        and not cross_entropy.weights
        and (cross_entropy.rule, divergence.rule) == (CROSS_ENTROPY_RULE, KL_RULE)
    )


def find_objection(piece: LossPiece) -> str:
    """Why an operator does not compute a piece though the formula matches, "" if it does."""
    student, teacher = piece.student, piece.teacher
    if student.tokens <= student.head.width:
        return (
            f"its {student.tokens} logits a row take no more memory than the {student.head.width} "
            "hidden states that they come from"
        )
    if teacher is None:
        return ""
    if student.tokens != teacher.tokens:
        return f"the student has {student.tokens} tokens and the teacher {teacher.tokens}"
    return "" if student.scale > 0 else "the temperature is negative"
