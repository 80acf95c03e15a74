"""`normalize-loss`: rewrites the loss of every case into terms, coefficient times numerator, plus a constant.

A mean over a micro-batch is not a share of the mean over the whole batch, so a distributed loss needs sums:
the numerator of a term adds up over samples, its coefficient comes from inputs and sizes of the whole global
batch. `secc.passes.loss` follows each case from inputs to loss and decides for every value whether it is
rows, a sum, or mixes samples; a loss that mixes them is refused here with the op and the user's line. `dce`
removes the old end of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context as XdslContext
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.analysis.whole_batch import mark_whole_batch
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    Computation,
    InputOp,
    LeafOp,
    OutputOp,
    ReturnOp,
    TermOp,
    graph_of,
    strings_attr,
    strings_of,
)
from secc.ir.dialect.python_attributes import int_attr
from secc.ir.dialect.readable_names import ACCEPTED_ATTRIBUTE, FIRST_PASS_ATTRIBUTE, LOGGED_ATTRIBUTE
from secc.ir.dialect.tensor_type import tensor_type
from secc.ir.text_io.verifier import source_line
from secc.passes.loss.approximations import check_approximations, describe_accepted
from secc.passes.loss.batch_statistics import count_passes_before, name_statistic
from secc.passes.loss.buffer_constants import copy_for_leaf
from secc.passes.loss.coefficient import (
    SCALAR_TYPE,
    UNIT_COEFFICIENT,
    Coefficient,
    CoefficientEmitter,
    LeafFactor,
)
from secc.passes.loss.gathered_rows import check_gathered, check_names, declare_all_samples
from secc.passes.loss.logged_scalars import LOGGED_PREFIX, find_logged, find_outputs
from secc.passes.loss.loss_context import LossContext
from secc.passes.loss.loss_walk import ops_behind, walk_loss
from secc.passes.loss.numerators import Share, as_scalar, make_numerator
from secc.passes.loss.placed_rows import find_placed_rows
from secc.passes.loss.term_names import (
    CONSTANT_TERM,
    CaseParts,
    PartIdentity,
    StructureDigests,
    TermNames,
    depends_on_parameters_alone,
    match_identities,
    part_identities,
    term_label,
)
from secc.passes.loss.value_states import BadState, StackState, StatisticUse, SumPart, ValueState
from secc.runtime.plan.schema import GATHERED_PREFIX, SAMPLE_COUNT_SYMBOL, STATISTIC_PREFIX, is_gathered

_BALANCE_TERM, _FUNCTION_TERM, _COMPARING_TERM = "balance_loss", "function_of_sums", "compared_samples"


@dataclass
class CaseTerms:
    """The loss of one case: `parts` add up over samples, `constant` counts once."""

    case: CaseOp
    context: LossContext
    parts: list[SumPart]
    constant: float
    logged: dict[str, list[SumPart]]

    @property
    def pattern(self) -> frozenset[str]:
        """The optional keys of the case."""
        return frozenset(strings_of(self.case.when))

    @property
    def called_blocks(self) -> frozenset[str]:
        """The blocks that the case calls."""
        return frozenset(op.target.data for op in self.case.ops if isinstance(op, CallOp))


@dataclass(frozen=True)
class NormalizeLoss(ModulePass):
    """Options. accept: approximations that the user accepts where a loss is not separable
    (`secc.passes.loss.approximations`). balance_loss: "global" for balance losses from statistics of the
    global batch; global_sums: for all functions of them (`secc.passes.loss.batch_statistics`). gather: blocks
    with rows that the loss may compare with those of other samples (`secc.passes.loss.gathered_rows`) of the
    `global_batch` samples. whole_batch: blocks that take all samples of a step at once
    (`secc.ir.analysis.whole_batch`), besides those without weights that compute the loss."""

    name = "normalize-loss"
    accept: tuple[str, ...] = ()
    balance_loss: str = ""
    global_sums: bool = False
    gather: tuple[str, ...] = ()
    whole_batch: tuple[str, ...] = ()
    global_batch: int = 1

    def apply(self, ctx: XdslContext, op: ModuleOp) -> None:
        check_approximations(self.accept)
        graph = graph_of(op)
        check_names(graph, "--gather", self.gather)
        check_names(graph, "--whole-batch", self.whole_batch)
        open_cases = [c for c in graph.cases if c.ops[-1].operands]
        several = StatisticUse.SEVERAL_NUMBERS if self.balance_loss == "global" else StatisticUse.NONE
        use = StatisticUse.ALL if self.global_sums else several
        found = [
            _find_case_terms(case, *walk_loss(graph, case, self.accept, use, self.gather, self.whole_batch))
            for case in open_cases
        ]
        if use is StatisticUse.NONE and (
            accepted := dict.fromkeys(
                describe_accepted(o) for f in found for o in f.case.ops if o in f.context.accepted
            )
        ):
            graph.attributes[ACCEPTED_ATTRIBUTE] = strings_attr(accepted)
        if len({f.constant for f in found}) > 1:
            # A plan has one constant, so constants that differ between patterns become a term that every
            # sample has a share of.
            for f in found:
                f.parts.append(SumPart(Coefficient(number=f.constant)))
                f.constant = 0.0
        notes = self._find_logged_parts(found)
        contexts = [f.context for f in found]
        check_gathered(self.gather, contexts)
        reducing = dict.fromkeys(sorted({path for c in contexts for path in c.reducing}))
        notes += [
            f"{path} computes all samples of a step at once on one rank, since it reduces them to one value"
            for path in reducing
        ]
        if notes:
            graph.attributes[LOGGED_ATTRIBUTE] = strings_attr(notes)
        mark_whole_batch(graph, (*self.whole_batch, *reducing), reducing)
        if any(c.gathers for c in contexts):
            declare_all_samples(graph, self.global_batch)
        names, structure = TermNames(), StructureDigests()
        keys = match_identities(
            [CaseParts(f.pattern, f.called_blocks, part_identities(f.parts, structure)) for f in found]
        )
        statistics = match_identities(
            [
                CaseParts(f.pattern, f.called_blocks, part_identities([s.part for s in f.context.statistics]))
                for f in found
            ]
        )
        _require_statistics_of_all_cases(found, statistics)
        one = len({key for known in keys for key in known}) == 1
        shares = _find_shares(found, keys, structure)
        coefficients = [
            _rewrite_case(f, known, read, own, names, structure, "loss" if one else None)
            for f, known, read, own in zip(found, keys, statistics, shares, strict=True)
        ]
        _require_equal_coefficients(found, coefficients)
        _require_rows_of_all_samples(found)

    def _find_logged_parts(self, found: list[CaseTerms]) -> list[str]:
        """Find the parts of what is logged; what is to be said of it."""
        notes: dict[str, None] = {}
        for f in found:
            f.logged, said = find_logged(f.context)
            notes |= dict.fromkeys(said)
        return list(notes)


def _find_case_terms(case: CaseOp, context: LossContext, state: ValueState) -> CaseTerms:
    """The parts of a case's loss. Raises UserError if it is not separable."""
    if isinstance(state, BadState):
        raise UserError(state.message, source_line(state.op), state.remedy)
    loss = case.ops[-1].operands[0]
    parts = None if isinstance(state, StackState) or context.carries_samples(loss) else context.parts_of(loss)
    if parts is None:
        raise UserError("the loss is not a scalar", _source_line_of(loss), "let forward return one number")
    constants = [c for p in parts if p.atom is None and (c := p.coefficient.constant) is not None]
    kept = [p for p in parts if p.atom is not None or p.coefficient.constant is None]
    return CaseTerms(case, context, kept, float(sum(constants)), {})


def _require_statistics_of_all_cases(found: list[CaseTerms], keys: list[list[PartIdentity]]) -> None:
    """Raises UserError for a statistic of the global batch that a loss is computed from and that some cases
    lack: what is computed of statistics counts in a micro-batch by its share of all samples, and these have
    none of it. keys: identities of each case's statistics."""
    for f, known in zip(found, keys, strict=True):
        once = [p.atom for p in f.parts if not p.summed and p.atom is not None]
        ops = set[Operation]().union(*map(ops_behind, once))
        for key, statistic in zip(known, f.context.statistics, strict=True):
            lacking = [other for other, others in zip(found, keys, strict=True) if key not in others]
            if not lacking or statistic.op not in ops:
                continue
            only = sorted(f.pattern - lacking[0].pattern)
            batches = f"batches with {' and '.join(only)}" if only else "some batches"
            raise UserError(
                f"a function of sums over the batch is part of the loss of {batches} only, and counts once "
                "for a batch: micro-batches without it have no share of it",
                _where_of(statistic.part),
                "compute it in every batch (without such samples from sums of zero), or for each sample, or "
                "leave it out of the loss",
            )


def _find_shares(
    found: list[CaseTerms], keys: list[list[PartIdentity]], structure: StructureDigests
) -> list[dict[PartIdentity, Share]]:
    """Finds what gives micro-batches of each case their shares of parts that count once for the batch if some
    sample has an optional input: parts that parameters alone decide (the weight of a task), or that a block
    computes from all samples. It is the number of rows of such an input, which has none of samples without
    it. If every input has rows of all samples of a micro-batch, it is a divisor of the same cases that adds
    up over samples."""
    shares: list[dict[PartIdentity, Share]] = [{} for _ in found]
    for i, (f, known) in enumerate(zip(found, keys, strict=True)):
        for key, part in zip(known, f.parts, strict=True):
            if not (depends_on_parameters_alone(part) or _is_of_whole_batch(f.context, part)):
                continue
            having = {j for j, other in enumerate(keys) if key in other}
            rows = (
                _rows_symbol(f.context, optional)
                for optional in sorted(f.pattern)
                if having == {j for j, other in enumerate(found) if optional in other.pattern}
            )
            symbol = next((r for r in rows if r not in ("", SAMPLE_COUNT_SYMBOL)), SAMPLE_COUNT_SYMBOL)
            shares[i][key] = symbol
            if symbol == SAMPLE_COUNT_SYMBOL and len(having) < len(found):
                shares[i][key] = _divisor_of_cases(found, having, i, structure) or symbol
    return shares


def _divisor_of_cases(
    found: list[CaseTerms], having: set[int], case: int, structure: StructureDigests
) -> LeafFactor | None:
    """The first divisor of the parts of a case that adds up over samples, and that the cases `having` have
    and no others."""
    divisors = [
        {
            structure.digest_value(factor.value): factor
            for part in f.parts
            for factor, power in part.coefficient.factors
            if isinstance(factor, LeafFactor) and power < 0
        }
        for f in found
    ]
    return next(
        (
            factor
            for digest, factor in divisors[case].items()
            if having == {j for j, other in enumerate(divisors) if digest in other}
        ),
        None,
    )


def _is_of_whole_batch(context: LossContext, part: SumPart) -> bool:
    """Whether a part counts once for the batch, computed by a block that takes all samples at once."""
    if part.summed or part.atom is None or not context.reducing:
        return False
    calls = (op for op in ops_behind(part.atom) if isinstance(op, CallOp))
    return any(op.target.data in context.reducing for op in calls)


def _rows_symbol(context: LossContext, key: str) -> str:
    """The symbol of the number of rows of an optional input, "" if its first dim is none."""
    for op in context.case.ops:
        if isinstance(op, InputOp) and op.key.data == key:
            shape = tensor_type(op.results[0]).shape
            symbols = context.sample_symbols - context.data_symbols
            return str(shape[0]) if shape and str(shape[0]) in symbols else ""
    return ""


def _source_line_of(value: SSAValue) -> str:
    return source_line(value.owner) if isinstance(value.owner, Operation) else ""


def _rewrite_case(
    found: CaseTerms,
    keys: list[PartIdentity],
    statistic_keys: list[PartIdentity],
    shares: dict[PartIdentity, Share],
    names: TermNames,
    structure: StructureDigests,
    only: str | None,
) -> dict[str, str]:
    """Put sec.term ops in the place of the loss; the coefficient of each term as a text. keys: identities of
    the case's parts, statistic_keys: of its statistics. shares: of parts that count once, what they are
    divided by."""
    shop, written = found.context.pending, dict[str, str]()
    terms: list[Operation] = [*find_placed_rows(found.context)]
    leaves: dict[str, SSAValue] = {}
    current = ""

    def emit_leaf(value: SSAValue) -> SSAValue:
        key = structure.digest_value(value)
        if key not in leaves:
            name = StringAttr(names.name_leaf(key, current))
            scalar = copy_for_leaf(shop, as_scalar(found.context, value))
            leaves[key] = shop.add_op(
                LeafOp.create(operands=[scalar], result_types=[SCALAR_TYPE], properties={"sym": name})
            ).results[0]
        return leaves[key]

    emitter = CoefficientEmitter(shop, emit_leaf)
    for key, statistic in zip(statistic_keys, found.context.statistics, strict=True):
        origin = statistic.part.origin
        label = f"{STATISTIC_PREFIX}{origin.base_name if origin is not None else CONSTANT_TERM}"
        current = names.name_term((STATISTIC_PREFIX, key), label)
        name_statistic(statistic, current)
        values = [statistic.numerator, emitter.emit_coefficient(statistic.coefficient)]
        properties = {"sym": StringAttr(current)} | _where_property(statistic.part)
        terms.append(shop.add_op(TermOp.create(operands=values, properties=properties)))
        written[current] = structure.describe_coefficient(statistic.coefficient)
    gathers = found.context.gathers
    origins = [SumPart(UNIT_COEFFICIENT, g.rows, True, _computation_of(g.rows)) for g in gathers]
    for key, part, gathered in zip(part_identities(origins), origins, gathers, strict=True):
        label = f"{GATHERED_PREFIX}{gathered.blocks[0] if gathered.blocks else term_label(part)}"
        current = names.name_term((GATHERED_PREFIX, key), label)
        gathered.op.properties["args"] = StringAttr(f'$0, "{current}"')
        properties = {"sym": StringAttr(current)} | _where_property(part)
        terms.append(shop.add_op(TermOp.create(operands=[gathered.rows], properties=properties)))
    passes = dict[Operation, int]()
    for term in (t for t in terms if isinstance(t, TermOp)):
        if behind := count_passes_before(term.numerator, passes):
            term.attributes[FIRST_PASS_ATTRIBUTE] = int_attr(behind + 1)
    for key, part in zip(keys, found.parts, strict=True):
        current = names.name_term(key, only or _name_of_whole(found.context, part) or term_label(part))
        numerator, coefficient = _scalar_numerator(found.context, part, shares.get(key, SAMPLE_COUNT_SYMBOL))
        values = (
            [numerator]
            if coefficient == UNIT_COEFFICIENT
            else [numerator, emitter.emit_coefficient(coefficient)]
        )
        properties = {"sym": StringAttr(current)} | _where_property(part)
        terms.append(shop.add_op(TermOp.create(operands=values, properties=properties)))
        written[current] = structure.describe_coefficient(coefficient)
    for name, parts in found.logged.items():
        for key, part in zip(part_identities(parts), parts, strict=True):
            current = names.name_term((LOGGED_PREFIX, name, key), f"{LOGGED_PREFIX}{name}:")
            numerator, coefficient = _scalar_numerator(found.context, part)
            values = (
                [numerator]
                if coefficient == UNIT_COEFFICIENT
                else [numerator, emitter.emit_coefficient(coefficient)]
            )
            terms.append(
                shop.add_op(
                    TermOp.create(
                        operands=values, properties={"sym": StringAttr(current)} | _where_property(part)
                    )
                )
            )
    for name, value in find_outputs(found.context).items():
        source = value.owner
        place = source_line(source) if isinstance(source, Operation) else ""
        properties = {"sym": StringAttr(name)} | ({"where": StringAttr(place)} if place else {})
        terms.append(shop.add_op(OutputOp.create(operands=[value], properties=properties)))
    _commit_terms(found, terms)
    return written


def _computation_of(value: SSAValue) -> Computation | None:
    return value.owner if isinstance(value.owner, Computation) else None


def _name_of_whole(context: LossContext, part: SumPart) -> str:
    """The name of a term that counts once for the batch, "" for other terms."""
    if _is_balance_loss(context, part):
        return _FUNCTION_TERM if context.statistic_use is StatisticUse.ALL else _BALANCE_TERM
    return _COMPARING_TERM if part.atom in context.whole else ""


def _is_balance_loss(context: LossContext, part: SumPart) -> bool:
    """Whether an approximation was accepted for what a part is made of."""
    return (
        part.atom is not None
        and not part.summed
        and bool(context.accepted)
        and not context.accepted.isdisjoint(ops_behind(part.atom))
    )


def _where_property(part: SumPart) -> dict[str, StringAttr]:
    place = _where_of(part)
    return {"where": StringAttr(place)} if place else {}


def _where_of(part: SumPart) -> str:
    source = part.origin or (part.atom.owner if part.atom is not None else None)
    return source_line(source) if isinstance(source, Operation) else ""


def _scalar_numerator(
    context: LossContext, part: SumPart, shared_by: Share = SAMPLE_COUNT_SYMBOL
) -> tuple[SSAValue, Coefficient]:
    """The number that adds up over samples, and its coefficient."""
    value, coefficient = make_numerator(context, part, shared_by)
    return as_scalar(context, value), coefficient


def _commit_terms(found: CaseTerms, terms: list[Operation]) -> None:
    found.context.pending.commit_needed(found.case, terms)
    block = found.case.body.block
    end = block.last_op
    assert end is not None
    block.erase_op(end)
    block.add_op(ReturnOp.create(properties={"constant": StringAttr(repr(found.constant))}))


def _require_equal_coefficients(found: list[CaseTerms], coefficients: list[dict[str, str]]) -> None:
    """Captures of one pattern differ in what Python read, which a rank knows for a micro-batch only:
    coefficients may not depend on it."""
    first: dict[frozenset[str], dict[str, str]] = {}
    for f, written in zip(found, coefficients, strict=True):
        pattern = frozenset(strings_of(f.case.when))
        known = first.setdefault(pattern, written)
        for name in known.keys() & written.keys():
            if known[name] != written[name]:
                place = next(
                    (source_line(op) for op in f.case.ops if isinstance(op, TermOp) and op.sym.data == name),
                    "",
                )
                message = (
                    f"the divisor of loss term {name} depends on what Python reads from a micro-batch "
                    f"(case {f.case.sym.data})"
                )
                raise UserError(
                    message, place, "compute the divisor with tensor operations instead of Python branches"
                )


def _require_rows_of_all_samples(found: list[CaseTerms]) -> None:
    """Raises UserError where samples of some cases have no rows of what is gathered over the batch."""
    terms = [[op.sym.data for op in f.case.ops if isinstance(op, TermOp)] for f in found]
    gathered = [set(filter(is_gathered, names)) for names in terms]
    for f, names in zip(found, gathered, strict=True):
        if missing := sorted(set[str]().union(*gathered) - names):
            pattern = " and ".join(strings_of(f.case.when)) or "no optional inputs"
            blocks = " and ".join(n.removeprefix(GATHERED_PREFIX) for n in missing)
            raise UserError(
                f"--gather: samples with {pattern} have no rows of {blocks}, but the loss compares all",
                remedy="let every sample have the inputs that the compared rows are made of",
            )
