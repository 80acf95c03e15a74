"""The published schemes: for each its layouts, the best first by closed form, and the order of samples.

- uniform (Megatron-LM): every section on all devices with one (tp, pp, cp, dp), experts in parts (ep),
  encoders in the first stage; dataset order, 1F1B.
- colocate (FSDP2): every section on every device, data parallel; dataset order.
- mimo (Megatron-Core MIMO): sections on separate devices, replicas in powers of two; dataset order.
- disttrain: sections on separate devices; largest samples first to the least loaded replica, small
  micro-batches first.
- entrain: sections on separate devices by their mean loads; equal encoder load in each micro-batch, the rest
  deferred.
- spindle: level by level on all devices, shared within a level such that all end together; dataset order,
  wave by wave.
- bubble (Optimus): every device has encoders and the anchor; encoders fill the bubbles of the anchor's
  pipeline; dataset order.

docs/baselines.md says what is not modelled of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product

from secc.baselines.layout import BaselineLayout, SectionLayout
from secc.baselines.packing import PackingOrder, pack_dataset_order, pack_largest_first, pack_stratified
from secc.baselines.search_space import (
    MAX_RANKED_LAYOUTS,
    MICRO_BATCH_SIZES,
    BaselineSpace,
    ChosenCandidates,
    MeshShape,
)
from secc.cost.model.memory import ReducedGradients


@dataclass(frozen=True)
class BaselineScheme:
    """A baseline: its layouts, given the section that is its anchor, and its order of samples."""

    layouts: Callable[[BaselineSpace, str], list[BaselineLayout]]
    order: PackingOrder


def _rank_layouts(timed_layouts: Iterator[tuple[int, BaselineLayout]]) -> list[BaselineLayout]:
    """The `MAX_RANKED_LAYOUTS` best layouts by closed-form time."""
    return [layout for _, layout in sorted(timed_layouts, key=lambda pair: pair[0])[:MAX_RANKED_LAYOUTS]]


def _total_time(chosen: ChosenCandidates) -> int:
    """Closed-form step time where all sections are on all devices."""
    return sum(c.time_ns for c in chosen.values())


# -- sections apart


def _mimo_layouts(space: BaselineSpace, anchor: str) -> list[BaselineLayout]:
    return _layouts_of_separate(space, space.separate_choices(True, anchor), anchor)


def _separate_layouts(space: BaselineSpace, anchor: str) -> list[BaselineLayout]:
    return _layouts_of_separate(space, space.separate_choices(False, anchor), anchor)


def _layouts_of_separate(
    space: BaselineSpace, choices: Sequence[ChosenCandidates], anchor: str
) -> list[BaselineLayout]:
    """Layouts with sections on separate ranks. Sections that wait for others' backwards hold as many
    micro-batches as memory allows."""
    layouts: list[BaselineLayout] = []
    for chosen in choices:
        parts, start = dict[str, SectionLayout](), 0
        for name in sorted(chosen, key=lambda n: n != anchor):
            c = chosen[name]
            in_flight = space.max_in_flight(name, c)
            extra = max(0, in_flight - c.pp) if name in space.awaited else 0
            parts[name] = space.section_layout(
                name, c, range(start, start + c.ranks), in_flight if c.pp == 1 else extra
            )
            start += c.ranks
        layouts.append(BaselineLayout({n: parts[n] for n in chosen}, chosen[anchor].micro_batch))
    return layouts


# -- sections together


def _uniform_layouts(space: BaselineSpace, anchor: str) -> list[BaselineLayout]:
    return _rank_layouts(_uniform_meshes(space, anchor))


def _uniform_meshes(space: BaselineSpace, anchor: str) -> Iterator[tuple[int, BaselineLayout]]:
    """Yields layouts with one mesh on all devices, one for each number of parts of the anchor's experts;
    other sections are whole in the first stage, or cut into as many stages as the anchor. The ranks that
    share the anchor's rows share those of other sections with long samples, too, and else have samples."""
    for (tp, pp, cp, dp), size in _anchor_meshes(space, anchor):
        for deep in (False, True) if pp > 1 else (False,):
            meshes = {
                n: MeshShape(tp, pp if n == anchor or (deep and pp in space.stage_counts(n)) else 1, dp)
                for n in space.names
            }
            meshes = {
                n: mesh._replace(cp=cp)
                if n == anchor or cp in space.row_parts(n, tp, mesh.pp)
                else mesh._replace(dp=dp * cp)
                for n, mesh in meshes.items()
            }
            ways = {n: space.mesh_variants(n, mesh, size) for n, mesh in meshes.items()}
            for ep in space.expert_parts(anchor, tp, dp, cp):
                some = ways | {anchor: [c for c in ways[anchor] if c.ep == ep]}
                yield from space.first_fitting(some, partial(_uniform_layout, space, pp, size), _total_time)


def _uniform_layout(space: BaselineSpace, pp: int, size: int, chosen: ChosenCandidates) -> BaselineLayout:
    stage_ranks = max(c.stage_ranks for c in chosen.values())
    first_stage_ranks = {
        n: tuple(r for r in range(space.ranks) if r // stage_ranks % pp == 0)
        for n, c in chosen.items()
        if c.pp < pp
    }
    return BaselineLayout(
        {
            n: space.section_layout(
                n, c, first_stage_ranks.get(n, range(space.ranks)), pp if n in first_stage_ranks else 0
            )
            for n, c in chosen.items()
        },
        size,
    )


def _anchor_meshes(space: BaselineSpace, anchor: str) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """Yields ((tp, pp, cp, dp), mean samples in a micro-batch) of an anchor that takes all devices."""
    for tp, pp in product(space.tp_degrees(), space.stage_counts(anchor)):
        for cp, size in product(space.row_parts(anchor, tp, pp), MICRO_BATCH_SIZES):
            dp = space.ranks // (tp * pp * cp)
            if dp and dp * tp * pp * cp == space.ranks and size in space.micro_batch_sizes(anchor, dp):
                yield (tp, pp, cp, dp), size


def _colocate_layouts(space: BaselineSpace, anchor: str) -> list[BaselineLayout]:
    """Parameters, gradients and optimizer states are sharded over all devices; gathering them is assumed
    to cost nothing."""
    return _rank_layouts(_sharded_layouts(space, anchor))


def _sharded_layouts(space: BaselineSpace, anchor: str) -> Iterator[tuple[int, BaselineLayout]]:
    for size in space.micro_batch_sizes(anchor, space.ranks):
        mesh = MeshShape(1, 1, space.ranks)
        ways = {n: space.recompute_variants(n, mesh, size) for n in space.names}
        yield from space.first_fitting(ways, partial(_sharded_layout, space, size), _total_time)


def _sharded_layout(space: BaselineSpace, size: int, chosen: ChosenCandidates) -> BaselineLayout:
    return BaselineLayout(
        {
            n: _shard_over_all(space.section_layout(n, c, range(space.ranks)), space.ranks)
            for n, c in chosen.items()
        },
        size,
    )


def _shard_over_all(part: SectionLayout, ranks: int) -> SectionLayout:
    """Layout of a section with the states of one rank's shard, and gradients only until they are reduced."""
    m, whole = part.memory, ("optimizer",) if part.chosen.sharding == "none" else ()
    shards = {key: getattr(m, key) // ranks for key in ("parameters", "gradients", *whole)}
    return replace(
        part, memory=m._replace(**shards, buffers=m.reduced.in_flight_bytes, reduced=ReducedGradients())
    )


def _bubble_layouts(space: BaselineSpace, anchor: str) -> list[BaselineLayout]:
    """The anchor as in `uniform`; every device has a whole encoder (over tp) and runs it whenever its
    stage waits."""
    return _rank_layouts(_bubble_meshes(space, anchor))


def _bubble_meshes(space: BaselineSpace, anchor: str) -> Iterator[tuple[int, BaselineLayout]]:
    others = frozenset(n for n in space.names if n != anchor)
    for (tp, pp, cp, dp), size in _anchor_meshes(space, anchor):
        if cp > 1:
            continue
        meshes = {n: MeshShape(tp, pp, dp) if n == anchor else MeshShape(tp, 1, dp * pp) for n in space.names}
        ways = {n: space.mesh_variants(n, mesh, size) for n, mesh in meshes.items()}
        for time, layout in space.first_fitting(
            ways, partial(_bubble_layout, space, anchor, size), _total_time
        ):
            yield from ((time, replace(layout, forwards_first=ahead)) for ahead in (frozenset[str](), others))


def _bubble_layout(space: BaselineSpace, anchor: str, size: int, chosen: ChosenCandidates) -> BaselineLayout:
    return BaselineLayout(
        {
            n: space.section_layout(n, c, range(space.ranks), 0 if n == anchor else None)
            for n, c in chosen.items()
        },
        size,
    )


# -- level by level


def _spindle_layouts(space: BaselineSpace, anchor: str) -> list[BaselineLayout]:
    return _rank_layouts(_spindle_waves(space, anchor))


def _spindle_waves(space: BaselineSpace, anchor: str) -> Iterator[tuple[int, BaselineLayout]]:
    levels = _section_levels(space)

    def time(chosen: ChosenCandidates) -> int:
        return sum(max(chosen[n].time_ns for n in level) for level in levels)

    for tp, size in product(space.tp_degrees(), MICRO_BATCH_SIZES):
        replicas = {n: (start, dp) for level in levels for n, start, dp in _share_level(space, level, tp)}
        if all(dp for _, dp in replicas.values()):
            ways = {n: space.mesh_variants(n, MeshShape(tp, 1, replicas[n][1]), size) for n in space.names}
            first = {n: start * tp for n, (start, _) in replicas.items()}
            ahead = frozenset(n for level in levels[:-1] for n in level)
            yield from space.first_fitting(ways, partial(_spindle_layout, space, first, size, ahead), time)


def _spindle_layout(
    space: BaselineSpace, first: Mapping[str, int], size: int, ahead: frozenset[str], chosen: ChosenCandidates
) -> BaselineLayout:
    return BaselineLayout(
        {n: space.section_layout(n, c, range(first[n], first[n] + c.ranks), None) for n, c in chosen.items()},
        size,
        ahead,
    )


def _share_level(space: BaselineSpace, level: Sequence[str], tp: int) -> Iterator[tuple[str, int, int]]:
    """Yields (section, first replica, replicas) of a level's sections, next to each other."""
    counts = _proportional_replicas(
        [max(1, _time_on_one_replica(space, n, tp)) for n in level], space.ranks // tp
    )
    yield from zip(level, accumulate(counts, initial=0), counts, strict=False)


def _section_levels(space: BaselineSpace) -> list[list[str]]:
    """Sections by the length of the longest path from a source."""
    depth = dict.fromkeys(space.names, 0)
    for name in space.names:  # producers first
        for c in space.base.work.crossings:
            if c.dst == name:
                depth[name] = max(depth[name], depth[c.src] + 1)
    return [[n for n in space.names if depth[n] == d] for d in sorted(set(depth.values()))]


def _time_on_one_replica(space: BaselineSpace, section: str, tp: int) -> int:
    """Ns of a section's step on one replica."""
    return space.recompute_variants(section, MeshShape(tp, 1, 1), 1)[0].time_ns


def _proportional_replicas(work: Sequence[int], replicas: int) -> list[int]:
    """Replicas of each section such that all end together: in proportion to work, rounded down, the rest
    to the slowest."""
    if replicas < len(work):
        return [0] * len(work)
    counts = [max(1, w * replicas // sum(work)) for w in work]
    while sum(counts) > replicas:
        counts[counts.index(max(counts))] -= 1
    while sum(counts) < replicas:
        slowest = max(range(len(work)), key=lambda i: work[i] / counts[i])
        counts[slowest] += 1
    return counts


SCHEMES = {
    "uniform": BaselineScheme(_uniform_layouts, pack_dataset_order),
    "mimo": BaselineScheme(_mimo_layouts, pack_dataset_order),
    "disttrain": BaselineScheme(_separate_layouts, pack_largest_first),
    "entrain": BaselineScheme(_separate_layouts, pack_stratified),
    "spindle": BaselineScheme(_spindle_layouts, pack_dataset_order),
    "bubble": BaselineScheme(_bubble_layouts, pack_dataset_order),
    "colocate": BaselineScheme(_colocate_layouts, pack_dataset_order),
}
