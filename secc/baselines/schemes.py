"""The published schemes: for each its layouts, the best first by closed form, and the order in which samples pass.

| name | devices | order |
| --- | --- | --- |
| uniform (Megatron-LM) | every section on all, one (tp, pp, dp); encoders in the first stage | dataset, 1F1B |
| colocate (FSDP2) | every section on every device, data parallel | dataset |
| mimo (Megatron-Core MIMO) | apart, replicas in powers of two | dataset |
| disttrain | apart | largest first to the least loaded, small micro-batches first |
| entrain | apart, from mean loads | equal encoder load in each micro-batch, the rest deferred |
| spindle | level by level on all devices, shared within a level so that all end together | dataset, wave by wave |
| bubble (Optimus) | every device has encoders and the anchor, whose pipeline's bubbles encoders fill | dataset |

docs/baselines.md says what of each is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from secc.alloc.candidates import candidate, room
from secc.alloc.pins import WORDS
from secc.baselines.layout import Layout, Part
from secc.baselines.packing import Order, in_turn, largest_first, stratified
from secc.baselines.space import SIMULATED, SIZES, Chosen, Space


@dataclass(frozen=True)
class Scheme:
    """A baseline: its layouts for the section that is its anchor, and its order of samples."""

    layouts: Callable[[Space, str], list[Layout]]
    order: Order


def _best(found: Iterator[tuple[int, Layout]]) -> list[Layout]:
    return [layout for _, layout in sorted(found, key=lambda pair: pair[0])[:SIMULATED]]


# -- sections apart --------------------------------------------------------------------------------------------------------------------


def _mimo(space: Space, anchor: str) -> list[Layout]:
    return _apart(space, space.apart(lambda most: [1 << i for i in range(most.bit_length())]), anchor)


def _any_replicas(space: Space, anchor: str) -> list[Layout]:
    return _apart(space, space.apart(lambda most: range(1, most + 1)), anchor)


def _apart(space: Space, ways: Sequence[Chosen], anchor: str) -> list[Layout]:
    found: list[Layout] = []
    for chosen in ways:
        parts, start = dict[str, Part](), 0
        for name in sorted(chosen, key=lambda n: n != anchor):
            c = chosen[name]
            held = space.in_flight(name, c) if c.pp == 1 else 0
            parts[name] = Part(c, tuple(range(start, start + c.ranks)), held)
            start += c.ranks
        found.append(Layout({n: parts[n] for n in chosen}, chosen[anchor].micro_batch))
    return found


# -- sections together -----------------------------------------------------------------------------------------------------------------


def _uniform(space: Space, anchor: str) -> list[Layout]:
    return _best(_meshes(space, anchor, space.widths(), space.depths(anchor)))


def _meshes(space: Space, anchor: str, widths: Sequence[int], depths: Sequence[int]) -> Iterator[tuple[int, Layout]]:
    """One mesh on all devices; the other sections whole in the first stage, or cut into as many stages as the anchor."""
    for tp, pp, size, deep in product(widths, depths, SIZES, (False, True)):
        dp = space.ranks // (tp * pp)
        if not dp or dp * tp * pp != space.ranks or (deep and pp == 1) or size not in space.sizes(anchor, dp):
            continue
        stages = {n: pp if n == anchor or (deep and pp in space.depths(n)) else 1 for n in space.names}
        chosen = {n: c for n in space.names if (c := space.at(n, tp, stages[n], dp, size)) is not None}
        if len(chosen) == len(space.names) and _fits(space, chosen):
            first = tuple(r for r in range(space.ranks) if r // tp % pp == 0)
            parts = {n: Part(c, tuple(range(space.ranks)) if c.pp == pp else first, pp if c.pp < pp else 0) for n, c in chosen.items()}
            yield sum(c.time_ns for c in chosen.values()), Layout(parts, size)


def _fits(space: Space, chosen: Chosen) -> bool:
    return sum(c.memory for c in chosen.values()) <= space.capacity


def _colocate(space: Space, anchor: str) -> list[Layout]:
    """Parameters, gradients and optimizer states lie sharded over all devices; gathering them again is taken to cost nothing."""
    return _best(_sharded(space, anchor))


def _sharded(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    everywhere, work = tuple(range(space.ranks)), space.base.work
    for size, recompute in product(space.sizes(anchor, space.ranks), WORDS["recompute"]):
        loads = {n: (work.loads[n], recompute if work.loads[n].mode != "forward" else "none") for n in space.names}
        chosen = {n: candidate(work, load, space.ranks, size, recompute=way) for n, (load, way) in loads.items()}
        held = [room(work, load, space.ranks, size, "none", way, 1) for load, way in loads.values()]
        states = sum(m.parameters + m.gradients + m.optimizer for m in held) // space.ranks
        if states + sum(m.sums.window + m.activation + m.working for m in held) <= space.capacity:
            yield sum(c.time_ns for c in chosen.values()), Layout({n: Part(c, everywhere) for n, c in chosen.items()}, size)


def _bubble(space: Space, anchor: str) -> list[Layout]:
    """The anchor as in `uniform`; every device has a whole encoder (over tp), and runs it whenever its stage waits."""
    return _best(_filling(space, anchor))


def _filling(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    others = frozenset(n for n in space.names if n != anchor)
    for tp, pp, size in product(space.widths(), space.depths(anchor), SIZES):
        dp = space.ranks // (tp * pp)
        if not dp or dp * tp * pp != space.ranks or size not in space.sizes(anchor, dp):
            continue
        meshes = {n: (pp, dp) if n == anchor else (1, dp * pp) for n in space.names}
        chosen = {n: c for n, (p, d) in meshes.items() if (c := space.at(n, tp, p, d, size)) is not None}
        if len(chosen) == len(space.names) and _fits(space, chosen):
            parts = {n: Part(c, tuple(range(space.ranks)), None if n != anchor else 0) for n, c in chosen.items()}
            for ahead in (frozenset[str](), others):
                yield sum(c.time_ns for c in chosen.values()), Layout(parts, size, ahead)


# -- level by level --------------------------------------------------------------------------------------------------------------------


def _spindle(space: Space, anchor: str) -> list[Layout]:
    return _best(_waves(space, anchor))


def _waves(space: Space, anchor: str) -> Iterator[tuple[int, Layout]]:
    levels = _levels(space)
    ahead = frozenset(n for level in levels[:-1] for n in level)
    for tp, size in product(space.widths(), SIZES):
        parts: dict[str, Part] = {}
        time = 0
        for level in levels:
            counts = _counts([max(1, _alone(space, n, tp)) for n in level], space.ranks // tp)
            start = 0
            for name, dp in zip(level, counts, strict=True):
                if (c := space.at(name, tp, 1, dp, size) if dp else None) is not None:
                    parts[name] = Part(c, tuple(range(start, start + c.ranks)), None)
                start += dp * tp
            time += max((parts[n].chosen.time_ns for n in level if n in parts), default=0)
        if len(parts) == len(space.names) and _fits(space, {n: p.chosen for n, p in parts.items()}):
            yield time, Layout({n: parts[n] for n in space.names}, size, ahead)


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
    found = space.at(section, tp, 1, 1, 1, 0)
    return found.time_ns if found is not None else 1


def _counts(work: Sequence[int], replicas: int) -> list[int]:
    """How many of `replicas` each gets so that all end together: in proportion to their work, rounded down, the rest to the slowest."""
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
