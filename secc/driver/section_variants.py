"""Decides whether small towers become sections of their own, by the step times of both plans.

A tower that does little work can still be worth ranks of its own: fewer replicas sum its gradients, and its
work overlaps with that of others. Its share of the work does not tell, so the sections are formed with and
without it, both variants are allocated, and the one with the shorter step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import make_context
from secc.pass_pipeline import PipelineRun, run_passes
from secc.passes.allocate import Allocate, SolvedAllocation
from secc.passes.coarsen import KEEP, MERGE, Coarsen
from secc.passes.sink_boundaries import SinkBoundaries

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


def choose_sections(module: ModuleOp, passes: Sequence[ModulePass]) -> tuple[ModulePass, ...]:
    """Returns `passes` with the better variant in the options of `coarsen`.

    `module` is the IR that `coarsen` will be applied to; it is not changed. The passes come back unchanged if
    both variants give the same sections or neither can be allocated, and if `coarsen` has no cluster.
    """
    coarsen = _find_pass(passes, Coarsen)
    if not coarsen.cluster or coarsen.by != "component":
        return tuple(passes)
    merged, kept = replace(coarsen, small_stacks=MERGE), replace(coarsen, small_stacks=KEEP)
    context = make_context()
    if merged.partition_blocks(context, module) == kept.partition_blocks(context, module):
        return tuple(passes)
    allocate = _find_pass(passes, Allocate)
    times = _compare_variants(module, merged, kept, _find_pass(passes, SinkBoundaries), allocate)
    if times.best is None:
        return tuple(passes)
    chosen = merged if times.best == MERGE else kept
    if inf not in (times.merged, times.kept):
        ordered = (times.merged, times.kept) if times.best == MERGE else (times.kept, times.merged)
        chosen = replace(chosen, step_ns=tuple(map(int, ordered)), simulated=times.simulated)
    return tuple(chosen if step is coarsen else step for step in passes)


def passes_before(name: str, passes: Sequence[ModulePass]) -> tuple[ModulePass, ...]:
    """The passes before the first one called `name`."""
    return tuple(passes[: [step.name for step in passes].index(name)])


def _compare_variants(
    module: ModuleOp, merged: Coarsen, kept: Coarsen, sink: SinkBoundaries, allocate: Allocate
) -> VariantTimes:
    # The variants are compared without the user's pins, which may name sections that only one of them has.
    free = Allocate(cluster=allocate.cluster, global_batch=allocate.global_batch)
    solved = [_solve_variant(module, variant, sink, free) for variant in (merged, kept)]
    closed_form = [inf if s is None else s.solution.time_ns for s in solved]
    if max(closed_form) > (1 + _CLOSED_FORM_DECIDES) * min(closed_form) or None in solved:
        return VariantTimes(*closed_form, simulated=False)
    refined = [free.refine_solution(s).evaluation for s in solved if s is not None]
    return VariantTimes(*(r.time_ns if r.fits else inf for r in refined), simulated=True)


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
