"""The rules of `fuse-linear-loss`: which formula each operator computes, and what of a loss is left when it
is taken out.

A divergence is a table of products, each with its number, over a student `s` and a teacher `t`; a loss that
has all of them, times one number, holds the divergence, however it was written. Cross entropy has one product
for the label and, where labels are smoothed, one for the mean over the tokens. What no rule takes out of a
loss makes the whole loss stay as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import GlueOp
from secc.passes.fusion.formula import (
    Factor,
    Key,
    Logits,
    LogMix,
    LogProb,
    LogSum,
    Picked,
    Plain,
    Prob,
    Source,
    Summed,
    ordered,
    source,
    unshaped,
)

CROSS_ENTROPY, KL, KL_CE = "linear-cross-entropy", "linear-kl", "linear-kl-ce"
Products = Mapping[tuple[Factor, ...], float]
_NEAR = 1e-9

# The products of each divergence of a student from a teacher, of which `m` is the mixture share * teacher +
# (1 - share) * student.
DIVERGENCES: dict[str, Callable[[Logits, Logits, LogMix], Products]] = {
    "forward": lambda s, t, m: {_over_tokens(Prob(t), LogProb(t)): 1, _over_tokens(Prob(t), LogProb(s)): -1},
    "reverse": lambda s, t, m: {_over_tokens(Prob(s), LogProb(s)): 1, _over_tokens(Prob(s), LogProb(t)): -1},
    "js": lambda s, t, m: {
        _over_tokens(Prob(t), m): -m.share,
        _over_tokens(Prob(t), LogProb(t)): m.share,
        _over_tokens(Prob(s), LogProb(s)): 1 - m.share,
        _over_tokens(Prob(s), m): m.share - 1,
    },
}  # fmt: skip


def _over_tokens(*entries: Prob | LogProb | LogMix) -> tuple[Factor, ...]:
    return (Summed(ordered(entries)),)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Piece:
    """`number` times what one operator computes, over the rows that all of `masks` keep."""

    rule: str
    number: float
    student: Logits
    masks: frozenset[Source]
    label: Source | None = None
    ignore: int | None = None
    smoothing: float = 0.0
    teacher: Logits | None = None
    kind: str = ""
    share: float = 0.5

    @property
    def logits(self) -> list[Logits]:
        return [self.student] if self.teacher is None else [self.student, self.teacher]


def pieces(terms: Mapping[Key, float]) -> list[Piece] | None:
    """The pieces that a loss consists of, None if something is left over."""
    left, found = dict(terms), list[Piece]()
    while left:
        piece = next((p for p, rest in _candidates(left) if _take(left, rest)), None)
        if piece is None:
            return None
        found.append(piece)
    return found


def _take(left: dict[Key, float], rest: Mapping[Key, float]) -> bool:
    """Remove products from a loss if it has them all."""
    if not all(abs(left.get(key, 0.0) - number) <= _NEAR * abs(number) for key, number in rest.items()):
        return False
    for key in rest:
        del left[key]
    return True


def _candidates(terms: Mapping[Key, float]) -> Iterator[tuple[Piece, Mapping[Key, float]]]:
    """Pieces that the loss may hold, with the products that each would take."""
    yield from _cross_entropies(terms)
    yield from _divergences(terms)


def _divergences(terms: Mapping[Key, float]) -> Iterator[tuple[Piece, Mapping[Key, float]]]:
    logits = dict.fromkeys(
        each for _, fs in terms for f in fs if isinstance(f, Summed) for e in f.entries for each in _of(e)
    )
    mixes = dict.fromkeys(
        e for _, fs in terms for f in fs if isinstance(f, Summed) for e in f.entries if isinstance(e, LogMix)
    )
    for masks in dict.fromkeys(masks for masks, _ in terms):
        for student, teacher in permutations(logits, 2):
            if teacher.fixed and not student.fixed:
                for kind, mix in [("js", m) for m in mixes] + [("forward", None), ("reverse", None)]:
                    mixed = _turned(mix, teacher)
                    products = DIVERGENCES[kind](student, teacher, mixed)
                    number = terms.get((masks, next(iter(products))), 0.0) / next(iter(products.values()))
                    piece = Piece(KL, number, student, masks, teacher=teacher, kind=kind, share=mixed.share)
                    if number:
                        yield piece, {(masks, factors): number * n for factors, n in products.items()}


def _turned(mix: LogMix | None, teacher: Logits) -> LogMix:
    """A mixture as it stands in the loss, with the teacher's share."""
    return LogMix(0.5, teacher, teacher) if mix is None else mix


def _of(entry: Prob | LogProb | LogMix | Plain) -> list[Logits]:
    return [entry.one, entry.other] if isinstance(entry, LogMix) else [entry.of]


def _cross_entropies(terms: Mapping[Key, float]) -> Iterator[tuple[Piece, Mapping[Key, float]]]:
    """-log p of a label, also as logsumexp minus a logit; smoothed, a share of it is the mean over the
    tokens."""
    for (masks, factors), number in terms.items():
        picked = factors[0] if len(factors) == 1 else None
        if not isinstance(picked, Picked):
            continue
        kept = frozenset(m for m in masks if not redundant(m, picked))
        logits = _of(picked.entry)[0]
        taken: dict[Key, float] = {(masks, factors): number}
        if isinstance(picked.entry, Plain):
            taken[kept, (LogSum(logits),)] = -number
            yield Piece(CROSS_ENTROPY, -number, logits, kept, picked.label, picked.ignore), taken
            continue
        yield from _smoothed(terms, picked, kept, taken, number)
        yield Piece(CROSS_ENTROPY, -number, logits, kept, picked.label, picked.ignore), taken


def _smoothed(
    terms: Mapping[Key, float],
    picked: Picked,
    kept: frozenset[Source],
    taken: dict[Key, float],
    number: float,
) -> Iterator[tuple[Piece, Mapping[Key, float]]]:
    logits = _of(picked.entry)[0]
    for (masks, factors), other in terms.items():
        same = frozenset(m for m in masks if not redundant(m, picked)) == kept and (
            picked.ignore is None or masks != kept
        )
        if same and factors == (Summed((LogProb(logits),)),) and other * number > 0:
            whole = number + other * logits.tokens
            piece = Piece(
                CROSS_ENTROPY,
                -whole,
                logits,
                kept,
                picked.label,
                picked.ignore,
                other * logits.tokens / whole,
            )
            yield piece, taken | {(masks, factors): other}


def redundant(mask: Source, picked: Picked) -> bool:
    """Whether a mask keeps just the rows whose label is not the ignored one, which a picked entry leaves out
    anyway."""
    owner = mask.value.owner
    if not isinstance(owner, GlueOp) or owner.base not in {"ne", "eq"} or picked.ignore is None:
        return False
    compared = owner.arguments.args
    labels = source(owner.operands[0])
    for view in mask.views:
        labels = labels.seen(view)
    same = compared == [argument_template.Ref(0), picked.ignore] and unshaped(labels) == picked.label
    return same and mask.negated == (owner.base == "eq")


def joint(cross_entropy: Piece, divergence: Piece) -> bool:
    """Whether one pass over a student's logits can give both."""
    a, b = cross_entropy.student, divergence.student
    plain = not a.softcap and a.head.bias is None and a.tokens == b.tokens
    return (
        plain
        and a.head == b.head
        and a.views == b.views
        and (cross_entropy.rule, divergence.rule) == (CROSS_ENTROPY, KL)
    )


def objection(piece: Piece) -> str:
    """Why an operator does not compute a piece though the formula fits, "" if it does."""
    student, teacher = piece.student, piece.teacher
    if student.tokens <= student.head.width:
        return f"its {student.tokens} logits a row take no more memory than the {student.head.width} hidden states that they come from"
    if teacher is None:
        return ""
    if student.tokens != teacher.tokens:
        return f"the student has {student.tokens} tokens and the teacher {teacher.tokens}"
    if student.softcap or teacher.softcap:
        return "logits of a divergence are capped"
    if student.head.bias is not None or teacher.head.bias is not None:
        return "a head of a divergence has a bias"
    return "" if student.scale > 0 else "the temperature is negative"
