"""Decides what is in which section, by the step times of plans with both choices.

A tower that does little work can still be worth ranks of its own: fewer replicas sum its gradients, and its
work overlaps with that of others. Its share of the work does not tell, so the sections are formed with and
without it, both variants are allocated, and the one with the shorter step is taken.

`sink-boundaries` proposes to compute blocks of one section in another, where that sends fewer bytes. Such
blocks add to the work of another section, which may be the one that all wait for. So each proposal is kept
only if the plan with it has the shorter step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from typing import TypeVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.dialect.ops import graph_of, strings_of
from secc.ir.text_io.module_text import make_context, print_module
from secc.pass_pipeline import PipelineRun, format_pass, run_passes
from secc.passes.allocate import Allocate, SolvedAllocation
from secc.passes.coarsen import KEEP, MERGE, Coarsen
from secc.passes.sink_boundaries import CutOutcome, SinkBoundaries

# If the closed-form step times of the variants differ by more than this share, no plan is simulated.
_CLOSED_FORM_DECIDES = 1 / 8
# Small towers stay sections only if that makes the step shorter by more than this share.
_SEPARATION_GAIN = 1 / 128

PassT = TypeVar("PassT", bound=ModulePass)


@dataclass(frozen=True)
class VariantTimes:
    """Step times in ns of the plans with small towers merged and kept; infinite if no such plan fits."""

    merged: float
    kept: float
    simulated: bool

    @property
    def best(self) -> str | None:
        """The variant with the shorter step; None if neither fits."""
        if self.merged == inf and self.kept == inf:
            return None
        return KEEP if self.kept * (1 + _SEPARATION_GAIN) < self.merged else MERGE


def run_to_lowered(module: ModuleOp, passes: Sequence[ModulePass]) -> PipelineRun:
    """Applies `passes` to `module` and decides about small towers where `coarsen` is reached."""
    before = passes_before(Coarsen.name, passes)
    first = run_passes(module, before)
    rest = run_passes(module, choose_sections(module, passes)[len(before) :])
    return PipelineRun(first.dumps + rest.dumps, first.seconds + rest.seconds)


KnownVariants = dict[tuple[str, ...], VariantTimes]  # by the text of a module and of the passes on it


def choose_sections(
    module: ModuleOp, passes: Sequence[ModulePass], known: KnownVariants | None = None
) -> tuple[ModulePass, ...]:
    """Returns `passes` with the better variants in the options of `coarsen` and `sink-boundaries`.

    `module` is the IR that `coarsen` will be applied to; it is not changed. A pass comes back unchanged if
    its variants give the same sections or none can be allocated, and if `coarsen` has no cluster. `known`:
    what was found for other plans of the same model; what is found now is added.
    """
    return _choose_boundaries(module, _choose_small_towers(module, passes, {} if known is None else known))


def _choose_small_towers(
    module: ModuleOp, passes: Sequence[ModulePass], known: KnownVariants
) -> tuple[ModulePass, ...]:
    coarsen = _find_pass(passes, Coarsen)
    if not coarsen.cluster or coarsen.by != "component":
        return tuple(passes)
    merged, kept = replace(coarsen, small_stacks=MERGE), replace(coarsen, small_stacks=KEEP)
    context = make_context()
    if merged.partition_blocks(context, module) == kept.partition_blocks(context, module):
        return tuple(passes)
    allocate, sink = _find_pass(passes, Allocate), _find_pass(passes, SinkBoundaries)
    # The variants are compared without the user's pins, which may name sections that only one of them has.
    free = Allocate(cluster=allocate.cluster, global_batch=allocate.global_batch)
    key = print_module(module), *map(format_pass, (merged, kept, sink, free))
    if key not in known:
        known[key] = _compare_variants(module, merged, kept, sink, free)
    times = known[key]
    if times.best is None:
        return tuple(passes)
    chosen = merged if times.best == MERGE else kept
    if inf not in (times.merged, times.kept):
        ordered = (times.merged, times.kept) if times.best == MERGE else (times.kept, times.merged)
        chosen = replace(chosen, step_ns=tuple(map(int, ordered)), simulated=times.simulated)
    return tuple(chosen if step is coarsen else step for step in passes)


def _choose_boundaries(module: ModuleOp, passes: tuple[ModulePass, ...]) -> tuple[ModulePass, ...]:
    """Takes back each proposed move of blocks between two sections that makes the step no shorter. Both plans
    have the same sections, so they are compared with the user's pins."""
    coarsen, sink = _find_pass(passes, Coarsen), _find_pass(passes, SinkBoundaries)
    if not coarsen.cluster or coarsen.by != "component":
        return passes
    grouped = module.clone()
    coarsen.apply(make_context(), grouped)
    moves = _find_moves(grouped, sink)
    allocate = replace(_find_pass(passes, Allocate), known=(), proven=())
    solved = _solve_cut(grouped, sink, allocate) if moves else None
    for move in moves:
        trial = replace(sink, fixed=(*sink.fixed, move))
        without = _solve_cut(grouped, trial, allocate)
        (moved, kept), simulated = _compare_solutions(allocate, (solved, without))
        if min(moved, kept) == inf:
            continue
        step_ns = [None if ns == inf else int(ns) for ns in sorted((moved, kept))]
        if moved >= kept:
            sink, solved = trial, without
        outcome = CutOutcome(move, moved < kept, step_ns[0] or 0, step_ns[1], simulated)
        sink = replace(sink, outcomes=(*sink.outcomes, outcome.to_text()))
    return tuple(sink if isinstance(step, SinkBoundaries) else step for step in passes)


def _find_moves(grouped: ModuleOp, sink: SinkBoundaries) -> list[str]:
    """Returns the pairs of sections, "SRC>DST", where `sink` would compute blocks of the first in the
    second, without those that it holds an outcome of."""
    cut = grouped.clone()
    sink.apply(make_context(), cut)
    known = {CutOutcome.from_text(text).pair for text in sink.outcomes}
    before, after = (
        {s.sym.data: set(strings_of(s.blocks)) for s in graph_of(m).sections} for m in (grouped, cut)
    )
    return [
        f"{src}>{dst}"
        for src, dst in permutations(before, 2)
        if f"{src}>{dst}" not in known
        if src in after and dst in after and before[src] & (after[dst] - before[dst])
    ]


def _solve_cut(grouped: ModuleOp, sink: SinkBoundaries, allocate: Allocate) -> SolvedAllocation | None:
    """The best plan by closed forms with the boundaries of `sink`; None if there is none."""
    cut = grouped.clone()
    try:
        sink.apply(make_context(), cut)
        return allocate.solve_closed_form(graph_of(cut))
    except UserError:
        return None


def passes_before(name: str, passes: Sequence[ModulePass]) -> tuple[ModulePass, ...]:
    """The passes before the first one called `name`."""
    return tuple(passes[: [step.name for step in passes].index(name)])


def _compare_variants(
    module: ModuleOp, merged: Coarsen, kept: Coarsen, sink: SinkBoundaries, allocate: Allocate
) -> VariantTimes:
    """The step times of the plans with small towers merged and kept."""
    solved = [_solve_variant(module, variant, sink, allocate) for variant in (merged, kept)]
    (of_merged, of_kept), simulated = _compare_solutions(allocate, solved)
    return VariantTimes(of_merged, of_kept, simulated)


def _compare_solutions(
    allocate: Allocate, solved: Sequence[SolvedAllocation | None]
) -> tuple[list[float], bool]:
    """Returns step times in ns, infinite where nothing fits, and whether they were simulated: closed forms
    decide alone where they differ clearly."""
    closed_form = [inf if s is None else s.solution.time_ns for s in solved]
    if max(closed_form) > (1 + _CLOSED_FORM_DECIDES) * min(closed_form) or None in solved:
        return closed_form, False
    refined = [allocate.refine_solution(s).evaluation for s in solved if s is not None]
    return [r.time_ns if r.fits else inf for r in refined], True


def _solve_variant(
    module: ModuleOp, variant: Coarsen, sink: SinkBoundaries, allocate: Allocate
) -> SolvedAllocation | None:
    """The best plan by closed forms for the sections of a variant; None if there is none."""
    clone, context = module.clone(), make_context()
    try:
        variant.apply(context, clone)
        sink.apply(context, clone)
        return allocate.solve_closed_form(graph_of(clone))
    except UserError:
        return None


def _find_pass(passes: Sequence[ModulePass], kind: type[PassT]) -> PassT:
    return next(step for step in passes if isinstance(step, kind))
