"""Names that all cases share: a term or leaf that two captures have in common has one id, derived from the
ops that compute it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations

from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.random_ops import RANDOM_OP_ATTRIBUTE
from secc.ir.dialect.digraph import find_components
from secc.ir.dialect.ops import CallOp, Computation, InputOp, ParamOp
from secc.ir.text_io.verifier import source_line
from secc.passes.loss.batch_statistics import reads_statistics
from secc.passes.loss.coefficient import (
    AppliedFactor,
    Coefficient,
    CoefficientFactor,
    GivenFactor,
    LeafFactor,
    TotalFactor,
)
from secc.passes.loss.loss_walk import ops_behind
from secc.passes.loss.op_tables import TERM_LABELS
from secc.passes.loss.value_states import SumPart

CONSTANT_TERM = "constant"


class StructureDigests:
    """Digests of how values are computed: equal for values that equal ops compute from equal sources, in any
    case."""

    def __init__(self) -> None:
        self.known: dict[SSAValue, str] = {}

    def digest_value(self, value: SSAValue) -> str:
        """The digest of a value."""
        pending = [value]
        while pending:
            current = pending[-1]
            missing = [o for o in _operands_of(current) if o not in self.known]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            self.known[current] = self._digest(current)
        return self.known[value]

    def _digest(self, value: SSAValue) -> str:
        owner = value.owner
        assert isinstance(owner, Operation)
        kept = sorted(f"{k}={v}" for k, v in owner.properties.items() if k not in {"where", "section"})
        if (draw := owner.attributes.get(RANDOM_OP_ATTRIBUTE)) is not None:
            kept.append(str(draw))
        index = next(i for i, r in enumerate(owner.results) if r is value)
        text = "|".join([owner.name, str(index), *kept, *(self.known[o] for o in owner.operands)])
        return hashlib.sha256(text.encode()).hexdigest()

    def describe_coefficient(self, coefficient: Coefficient) -> str:
        """A text that is equal for equal coefficients of two cases."""
        factors = sorted(f"{self._describe_factor(f)}^{p}" for f, p in coefficient.factors)
        return " ".join([repr(coefficient.number), str(coefficient.size), *factors])

    def _describe_factor(self, factor: CoefficientFactor) -> str:
        match factor:
            case LeafFactor(value) | GivenFactor(value):
                return self.digest_value(value)
            case AppliedFactor(op, operands, _):
                described = ", ".join(self.describe_coefficient(operand) for operand in operands)
                return f"{op.target.data}({op.args.data})[{described}]"
            case TotalFactor(parts):
                return f"({' + '.join(sorted(self.describe_coefficient(p) for p in parts))})"


def _operands_of(value: SSAValue) -> list[SSAValue]:
    return list(value.owner.operands) if isinstance(value.owner, Operation) else []


class TermNames:
    """Assigns ids to terms and leaves in the order of their first occurrence."""

    def __init__(self) -> None:
        self.terms: dict[Hashable, str] = {}
        self.labels: dict[str, int] = {}
        self.leaves: dict[str, str] = {}

    def name_term(self, key: Hashable, label: str) -> str:
        """The id of the term with identity `key`; the first term with a label is named by the label alone."""
        if key not in self.terms:
            number = self.labels.get(label, 0)
            self.labels[label] = number + 1
            self.terms[key] = f"{label}_{number}" if number else label
        return self.terms[key]

    def name_leaf(self, structure: str, term: str) -> str:
        """The name of the leaf with a structure, after the first term that needs it."""
        if structure not in self.leaves:
            number = sum(name.startswith(f"{term}.count") for name in self.leaves.values())
            self.leaves[structure] = f"{term}.count_{number}" if number else f"{term}.count"
        return self.leaves[structure]


@dataclass(frozen=True)
class PartIdentity:
    """What tells the parts of a case's loss apart, equal in all cases: where a part is summed, by which op,
    the blocks behind it, how it is computed (for parts that depend on parameters alone: a line may give one
    of them in this case and another in that), and its number among parts with the same of these. of_sums: it
    is computed from sums of the global batch, which are matched by themselves."""

    summed: bool = False
    place: str = ""  # file:line
    op: str = CONSTANT_TERM
    blocks: tuple[str, ...] = ()
    digest: str = ""
    number: int = 0
    of_sums: bool = False

    def is_within(self, other: PartIdentity) -> bool:
        """Whether `other` differs in having more blocks behind it, and in nothing else."""
        return (
            replace(self, blocks=other.blocks) == other
            and (self.summed or self.of_sums)
            and set(self.blocks) < set(other.blocks)
        )


def part_identities(parts: list[SumPart], structure: StructureDigests | None = None) -> list[PartIdentity]:
    """The identities of the parts of one case; without `structure`, how they are computed is left out."""
    seen: dict[PartIdentity, int] = {}
    found: list[PartIdentity] = []
    for part in parts:
        source = part.origin or (part.atom.owner if part.atom is not None else None)
        key = PartIdentity()
        if isinstance(source, Computation):
            atom = part.atom if depends_on_parameters_alone(part) else None
            digest = structure.digest_value(atom) if structure is not None and atom is not None else ""
            of_sums = not part.summed and part.atom is not None and reads_statistics(part.atom)
            where, blocks = source_line(source), nearest_blocks(source)
            key = PartIdentity(part.summed, where, source.base_name, blocks, digest, of_sums=of_sums)
        seen[key] = seen.get(key, -1) + 1
        found.append(replace(key, number=seen[key]))
    return found


@dataclass(frozen=True)
class CaseParts:
    """The parts of a case's loss: its optional keys, the blocks that it calls, identities of its parts."""

    keys: frozenset[str]
    called_blocks: frozenset[str]
    parts: list[PartIdentity]

    def find_same(self, part: PartIdentity, wider: CaseParts) -> list[PartIdentity]:
        """The parts of a case with more keys that may be a part of this one, with blocks behind that this
        case does not call."""
        mine = set(self.parts)
        return [
            p
            for p in wider.parts
            if p not in mine
            and part.is_within(p)
            and self.called_blocks.isdisjoint({*p.blocks} - {*part.blocks})
        ]


def match_identities(cases: Sequence[CaseParts]) -> list[list[PartIdentity]]:
    """Gives a part of the loss one identity, where some cases have more blocks behind it than others: a
    picture, if there is one, adds to the scores that a loss takes.

    A batch with pictures computes the loss of all its samples with these blocks. Where a case has more
    optional keys than another, a part that only one of them has is the same in both if the other's differs in
    having blocks behind it that the first case does not call. A part that could be one of several stays
    apart."""
    same: list[tuple[PartIdentity, PartIdentity]] = []
    for fewer, more in permutations(cases, 2):
        if not fewer.keys < more.keys:
            continue
        theirs = set(more.parts)
        found = {part: fewer.find_same(part, more) for part in fewer.parts if part not in theirs}
        taken = Counter(chain.from_iterable(found.values()))
        same += [(part, p[0]) for part, p in found.items() if len(p) == 1 and taken[p[0]] == 1]
    named = {key: min(group, key=lambda k: k.blocks) for group in find_components(same) for key in group}
    matched = [[named.get(part, part) for part in case.parts] for case in cases]
    if any(len(set(parts)) < len(parts) for parts in matched):
        return [case.parts for case in cases]
    return matched


def depends_on_parameters_alone(part: SumPart) -> bool:
    """Whether a part counts once for the batch, with a value that no input decides."""
    if part.summed or part.atom is None:
        return False
    behind = ops_behind(part.atom)
    return any(isinstance(op, ParamOp) for op in behind) and not any(
        isinstance(op, CallOp | InputOp) for op in behind
    )


def nearest_blocks(op: Operation) -> tuple[str, ...]:
    """The blocks with results that reach an op through glue alone."""
    found: set[str] = set()
    seen: set[Operation] = set()
    stack = [op]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if isinstance(current, CallOp):
            found.add(current.target.data)
        else:
            stack.extend(o.owner for o in current.operands if isinstance(o.owner, Operation))
    return tuple(sorted(found))


def term_label(part: SumPart) -> str:
    """The label of a term: the loss that it sums, or "constant"."""
    if not part.summed or part.origin is None:
        return CONSTANT_TERM
    name = part.origin.base_name
    if name in TERM_LABELS:
        return TERM_LABELS[name]
    return "kl" if _is_kl(part.origin) else "loss"


def _is_kl(op: Operation) -> bool:
    """Whether a sum is a Kullback-Leibler divergence, recognised by the ops that torch uses for it."""
    near: set[str] = set()
    stack, depth = [(op, 0)], 6
    while stack:
        current, level = stack.pop()
        if level > depth or not isinstance(current, Computation) or isinstance(current, CallOp):
            continue
        near.add(current.base_name)
        stack.extend((o.owner, level + 1) for o in current.operands if isinstance(o.owner, Operation))
    return {"xlogy", "mul", "sub"} <= near or {"exp", "mul", "sub", "_log_softmax"} <= near
