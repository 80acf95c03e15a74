"""The published schemes: for each its layouts, the best first by closed form, and the order in which samples
pass.

| name | devices | order |
| --- | --- | --- |
| uniform (Megatron-LM) | every section on all, one (tp, pp, dp); encoders in the first stage | dataset, 1F1B
|
| colocate (FSDP2) | every section on every device, data parallel | dataset |
| mimo (Megatron-Core MIMO) | apart, replicas in powers of two | dataset |
| disttrain | apart | largest first to the least loaded, small micro-batches first |
| entrain | apart, from mean loads | equal encoder load in each micro-batch, the rest deferred |
| spindle | level by level on all devices, shared within a level so that all end together | dataset, wave by
wave |
| bubble (Optimus) | every device has encoders and the anchor, whose pipeline's bubbles encoders fill |
dataset |

docs/baselines.md says what of each is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product

from secc.baselines.layout import Layout, Part
from secc.baselines.packing import Order, in_turn, largest_first, stratified
from secc.baselines.search_space import RANKED, SIZES, Chosen, Space
from secc.cost.model.memory import Sums


@dataclass(frozen=True)
class Scheme:
    """A baseline: its layouts for the section that is its anchor, and its order of samples."""

    layouts: Callable[[Space, str], list[Layout]]
    order: Order


def _best(found: Iterator[tuple[int, Layout]]) -> list[Layout]:
    return [layout for _, layout in sorted(found, key=lambda pair: pair[0])[:RANKED]]


def _summed(chosen: Chosen) -> int:
    """What a step takes where all sections are on all devices."""
    return sum(c.time_ns for c in chosen.values())


# -- sections apart
# --------------------------------------------------------------------------------------------------------------------


def _mimo(space: Space, anchor: str) -> list[Layout]:
    return _apart(space, space.apart(True, anchor), anchor)


def _any_replicas(space: Space, anchor: str) -> list[Layout]:
    return _apart(space, space.apart(False, anchor), anchor)


def _apart(space: Space, ways: Sequence[Chosen], anchor: str) -> list[Layout]:
    """Sections that wait for others' backwards hold as many micro-batches as they have memory for."""
    found: list[Layout] = []
    for chosen in ways:
        parts, start = dict[str, Part](), 0
        for name in sorted(chosen, key=lambda n: n != anchor):
            c = chosen[name]
            held = space.in_flight(name, c)
            more = max(0, held - c.pp) if name in space.awaited else 0
            parts[name] = space.part(name, c, range(start, start + c.ranks), held if c.pp == 1 else more)
            start += c.ranks
        found.append(Layout({n: parts[n] for n in chosen}, chosen[anchor].micro_batch))
    return found


# -- sections together
# -----------------------------------------------------------------------------------------------------------------


def _uniform(space: Space, anchor: str) -> list[Layout]:
    return _best(_meshes(space, anchor))


def _meshes(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    """One mesh on all devices; the other sections whole in the first stage, or cut into as many stages as the
    anchor."""
    for tp, pp, dp, size in _everywhere(space, anchor):
        for deep in (False, True) if pp > 1 else (False,):
            stages = {n: pp if n == anchor or (deep and pp in space.depths(n)) else 1 for n in space.names}
            ways = {n: space.ways(n, (tp, stages[n], dp), size) for n in space.names}
            yield from space.fitting(ways, partial(_meshed, space, pp, size), _summed)


def _meshed(space: Space, pp: int, size: int, chosen: Chosen) -> Layout:
    first = {
        n: tuple(r for r in range(space.ranks) if r // c.tp % pp == 0) for n, c in chosen.items() if c.pp < pp
    }
    return Layout(
        {
            n: space.part(n, c, first.get(n, range(space.ranks)), pp if n in first else 0)
            for n, c in chosen.items()
        },
        size,
    )


def _everywhere(space: Space, anchor: str) -> Iterator[tuple[int, int, int, int]]:
    """(tp, pp, dp, mean samples in a micro-batch) of an anchor that takes all devices, or as many as its
    replicas fill."""
    for tp, pp, size in product(space.widths(), space.depths(anchor), SIZES):
        dp = space.ranks // (tp * pp)
        if dp and dp * tp * pp == space.ranks and size in space.sizes(anchor, dp):
            yield tp, pp, dp, size


def _colocate(space: Space, anchor: str) -> list[Layout]:
    """Parameters, gradients and optimizer states lie sharded over all devices; gathering them again is taken
    to cost nothing."""
    return _best(_sharded(space, anchor))


def _sharded(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    for size in space.sizes(anchor, space.ranks):
        ways = {n: space.ways(n, (1, 1, space.ranks), size) for n in space.names}
        yield from space.fitting(ways, partial(_spread, space, size), _summed)


def _spread(space: Space, size: int, chosen: Chosen) -> Layout:
    return Layout(
        {n: _over_all(space.part(n, c, range(space.ranks)), space.ranks) for n, c in chosen.items()}, size
    )


def _over_all(part: Part, ranks: int) -> Part:
    """With the states of a rank's shards, and gradients only while they are on their way."""
    m, whole = part.memory, ("optimizer",) if part.chosen.sharding == "none" else ()
    shards = {key: getattr(m, key) // ranks for key in ("parameters", "gradients", *whole)}
    return replace(part, memory=m._replace(**shards, buffers=m.sums.window, sums=Sums()))


def _bubble(space: Space, anchor: str) -> list[Layout]:
    """The anchor as in `uniform`; every device has a whole encoder (over tp), and runs it whenever its stage
    waits."""
    return _best(_filling(space, anchor))


def _filling(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    others = frozenset(n for n in space.names if n != anchor)
    for tp, pp, dp, size in _everywhere(space, anchor):
        meshes = {n: (tp, pp, dp) if n == anchor else (tp, 1, dp * pp) for n in space.names}
        ways = {n: space.ways(n, mesh, size) for n, mesh in meshes.items()}
        for time, layout in space.fitting(ways, partial(_filled, space, anchor, size), _summed):
            yield from ((time, replace(layout, ahead=ahead)) for ahead in (frozenset[str](), others))


def _filled(space: Space, anchor: str, size: int, chosen: Chosen) -> Layout:
    return Layout(
        {n: space.part(n, c, range(space.ranks), 0 if n == anchor else None) for n, c in chosen.items()}, size
    )


# -- level by level
# --------------------------------------------------------------------------------------------------------------------


def _spindle(space: Space, anchor: str) -> list[Layout]:
    return _best(_waves(space, anchor))


def _waves(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    levels = _levels(space)

    def time(chosen: Chosen) -> int:
        return sum(max(chosen[n].time_ns for n in level) for level in levels)

    for tp, size in product(space.widths(), SIZES):
        replicas = {n: (start, dp) for level in levels for n, start, dp in _shared(space, level, tp)}
        if all(dp for _, dp in replicas.values()):
            ways = {n: space.ways(n, (tp, 1, replicas[n][1]), size) for n in space.names}
            first = {n: start * tp for n, (start, _) in replicas.items()}
            ahead = frozenset(n for level in levels[:-1] for n in level)
            yield from space.fitting(ways, partial(_in_waves, space, first, size, ahead), time)


def _in_waves(
    space: Space, first: Mapping[str, int], size: int, ahead: frozenset[str], chosen: Chosen
) -> Layout:
    return Layout(
        {n: space.part(n, c, range(first[n], first[n] + c.ranks), None) for n, c in chosen.items()},
        size,
        ahead,
    )


def _shared(space: Space, level: Sequence[str], tp: int) -> Iterator[tuple[str, int, int]]:
    """(section, first replica, replicas) of a level's sections, side by side."""
    counts = _counts([max(1, _alone(space, n, tp)) for n in level], space.ranks // tp)
    yield from zip(level, accumulate(counts, initial=0), counts, strict=False)


def _levels(space: Space) -> list[list[str]]:
    """Sections by how many others come before them."""
    depth = dict.fromkeys(space.names, 0)
    for name in space.names:  # producers first
        for c in space.base.work.crossings:
            if c.dst == name:
                depth[name] = max(depth[name], depth[c.src] + 1)
    return [[n for n in space.names if depth[n] == d] for d in sorted(set(depth.values()))]


def _alone(space: Space, section: str, tp: int) -> int:
    """What a section takes on one replica."""
    return space.ways(section, (tp, 1, 1), 1)[0].time_ns


def _counts(work: Sequence[int], replicas: int) -> list[int]:
    """How many of `replicas` each gets so that all end together: in proportion to their work, rounded down,
    the rest to the slowest."""
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
    "uniform": Scheme(_uniform, in_turn),
    "mimo": Scheme(_mimo, in_turn),
    "disttrain": Scheme(_any_replicas, largest_first),
    "entrain": Scheme(_any_replicas, stratified),
    "spindle": Scheme(_spindle, in_turn),
    "bubble": Scheme(_bubble, in_turn),
    "colocate": Scheme(_colocate, in_turn),
}
