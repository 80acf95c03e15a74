"""How many micro-batches a pipeline forms at least, because a rank holds what they keep for their backward.

A plan bound is about micro-batches of any size. Large ones take less time for what is done once in each, such
as to issue operations or to write all gradients of experts. But a stage holds what a micro-batch keeps from
the start of its forward to the end of its backward, at least as long as both take on this stage and on all
behind it (of a split backward there, the first part). So large ones hold much for a long time, while the
stage needs others to work on.

Let a micro-batch take at least f + (sum of a(x) over its samples x) from one to the other, and keep at least
the sum of b(x) bytes (`secc/bounds/additive.py`). With D replicas, M micro-batches in all, R bytes of room on
a rank and a step of time T, the bytes over time that are held add up to at most R T D. With B the sum of all
b, those of the fixed times are f B. Those of the others are the sum over micro-batches of (sum of b) (sum of
a); by Cauchy's inequality each is at least (sum of sqrt(a b)) squared, and M squares of numbers with the sum
G are at least G squared / M. So

    M >= G^2 / (R T D - f B),      G = sum of sqrt(a(x) b(x)) over all samples,

and no step is that short if R T D < f B. What a stage does takes at least the additive parts of all samples
and M times what does not add up. Each stage of the pipeline gives a bound on M; they have the same
micro-batches, so the largest holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import isqrt

from secc.bounds.work import BatchWork, PassParts
from secc.runtime.plan.schema import Section, rank_position
from secc.runtime.plan.step_program import owes_backward


@dataclass(frozen=True)
class StageHold:
    """What a stage holds: f B, G and R of the module, in ns bytes, square roots of ns bytes, and bytes."""

    fixed: int
    root: int
    room: int

    def least_count(self, time: int) -> int | None:
        """The least number of micro-batches if all replicas together have `time` ns; None if that is too
        short for any number."""
        left = self.room * time - self.fixed
        if not self.root and left >= 0:
            return 0
        return -(-(self.root**2) // left) if left > 0 else None


@dataclass(frozen=True)
class PipelineHolds:
    """A pipeline with what its stages hold. `least`: micro-batches that it forms in any case. `places`: for
    each rank of a replica, additive ns of all samples and ns that each micro-batch takes once. `width`: ranks
    that work on one stage together."""

    holds: tuple[StageHold, ...]
    places: tuple[tuple[int, int], ...]
    width: int
    least: int

    def least_work(self, time: int) -> tuple[int, int] | None:
        """(ns of all ranks together, ns of the busiest place of all replicas together) that the step's work
        takes at least if the replicas together have `time` ns; None if that is too short for any work."""
        counts = [hold.least_count(time) for hold in self.holds]
        if None in counts:
            return None
        count = max([self.least, *(n for n in counts if n is not None)])
        work = [added + count * once for added, once in self.places]
        return self.width * sum(work), max(work)


def pipeline_holds(work: BatchWork, stages: Sequence[Section], own_sizes: bool) -> PipelineHolds | None:
    """What the stages of a section hold, None where that says nothing: one stage, stages without a backward,
    micro-batches that subgroups of ranks share, or unknown room. `own_sizes`: micro-batches have at most as
    many samples as in the plan."""
    active = work.active_samples[stages[0].name]
    if len(stages) == 1 or not active or not all(map(_holds_what_it_keeps, stages)):
        return None
    if not all(s.room_bytes for s in work.sections if owes_backward(s)):
        return None  # orders are not held against the memory of such ranks
    if any(work.active_samples[s.name] != active for s in stages):
        return None
    forward = [work.pass_parts(s, s.cost.forward_ns) for s in stages]
    backward = [work.pass_parts(s, s.cost.backward_ns) for s in stages]
    if any(ns < 0 for parts in (*forward, *backward) for ns in parts.added.values()):
        return None
    # Of a split backward only the first part delays the stages before.
    behind = [
        (f, b.scale_time(1000 - s.weight_permille)) for s, f, b in zip(stages, forward, backward, strict=True)
    ]
    count = len(stages) // stages[0].chunks
    places = [(0, 0)] * count
    for s, f, b in zip(stages, forward, backward, strict=True):
        place = rank_position(s.stage, count, s.placement)
        added, once = places[place]
        added += sum(f.added.values()) + sum(b.added.values())
        places[place] = added, once + f.once + b.once
    holds = [
        hold
        for i, s in enumerate(stages)
        if (hold := _stage_hold(work, s, [forward[i], backward[i], *chain(*behind[i + 1 :])])) is not None
    ]
    least = -(-len(active) // stages[0].most_samples) if own_sizes else 1
    return PipelineHolds(tuple(holds), tuple(places), stages[0].mesh.replica_size, least)


def _holds_what_it_keeps(s: Section) -> bool:
    return owes_backward(s) and not s.whole_batch and not s.may_deal and bool(s.cost.saved)


def _stage_hold(work: BatchWork, stage: Section, passes: Sequence[PassParts]) -> StageHold | None:
    """What a stage holds while the passes take place, those of the stage and of all behind it."""
    room = work.room_of_one(stage)
    if not room:
        return None
    # A sample that alone keeps more than the room may be computed all the same.
    kept = {p: n for p, n in work.kept_bytes(stage).items() if 0 < n <= room}
    once = sum(parts.once for parts in passes)
    root = sum(isqrt(n * sum(parts.added[p] for parts in passes)) for p, n in kept.items())
    return StageHold(once * sum(kept.values()), root, room)
