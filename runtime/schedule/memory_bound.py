"""Bounds what ranks hold between forward and backward, whatever the samples of a batch are.

The limits of the list scheduler are wishes: one micro-batch may exceed the bytes of its section, and a task
starts without a place if nothing else can run. So the activations that a finished order holds are added up
here on each rank, against the memory that the plan has for them (`Section.room_bytes`, added over the rank's
sections). Where an order holds more, the samples in question are computed alone: each is a micro-batch of its
own in every section, they come before or after all other samples, and a rank begins one only after the
backward of the one before. Ranks that have room for other work meanwhile take it. Then a rank that lacks room
holds one such sample, and only a sample that cannot fit at all is left over (`Schedule.over_memory`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import (
    MemoryExcess,
    MicroBatch,
    SampleMeta,
    owes_backward,
    replicas_in_lockstep,
    runs_in_lockstep,
)
from secc.runtime.schedule.batch_packing import AssignedMicroBatches
from secc.runtime.schedule.micro_batches import MicroBatchTable
from secc.runtime.schedule.task_graph import StepTasks, TaskRanges

EXCESS_REMEDY = (
    "shorten or leave out such samples, or compile the plan again for them: with --set NAME.recompute=full, "
    "a larger tp, cp or pp of the section, or a dataset that lists a sample of this size"
)

NAMED_SAMPLES = 8  # of several that need too much together

RankHolders = tuple[tuple[str, int], ...]  # (section, replica) of each section with a backward on a rank


def find_memory_excesses(
    plan: Plan,
    tables: Mapping[str, MicroBatchTable],
    task_ranges: Mapping[str, TaskRanges],
    task_order: Sequence[int],
) -> tuple[MemoryExcess, ...]:
    """Returns, for ranks that hold more activations than they have memory for, where they hold most; ranks
    with the same sections and replicas count once. A rank with a section without a limit is not checked."""
    ranks = _ranks_with_limits(plan)
    if not ranks:
        return ()
    place = [0] * len(task_order)
    for i, task in enumerate(task_order):
        place[task] = i
    by_replica = {name: _by_replica(tables[name]) for name in {n for holders in ranks for n, _ in holders}}
    rooms = {s.name: s.room_bytes for s in plan.sections}
    found = list[MemoryExcess]()
    for holders, rank in ranks.items():
        capacity = sum(rooms[name] for name, _ in holders)
        held = [(name, i) for name, replica in holders for i in by_replica[name].get(replica, ())]
        if sum(_most_bytes(tables[name], i) for name, i in held) <= capacity:
            continue
        changes = list[tuple[int, int, int, str]]()  # place (odd: an end), bytes, micro-batch, section
        for name, i in held:
            own, table = task_ranges[name], tables[name]
            changes.append((2 * place[own.forward_start + i], table.saved_bytes[i], i, name))
            if table.between_bytes:
                changes.append((2 * place[own.backward_start + i], table.between_bytes[i], i, name))
            changes.append((2 * place[own.release_start + i] + 1, -_most_bytes(table, i), i, name))
        peak, in_flight = _find_peak(sorted(changes))
        if peak > capacity:
            samples = (p for name, i in in_flight for p in tables[name].micro_batches[i].samples)
            names = tuple(dict.fromkeys(name for name, _ in in_flight))
            found.append(MemoryExcess(rank, names, tuple(sorted(set(samples))), peak, capacity))
    return tuple(found)


def _most_bytes(table: MicroBatchTable, i: int) -> int:
    """Returns the most bytes that micro-batch `i` keeps."""
    return table.saved_bytes[i] + (table.between_bytes[i] if table.between_bytes else 0)


def _ranks_with_limits(plan: Plan) -> dict[RankHolders, int]:
    """Returns a rank for each set of sections and replicas that some ranks hold, if all have limits."""
    by_rank: dict[int, list[tuple[str, int]]] = defaultdict(list)
    unlimited = set[int]()
    for s in filter(owes_backward, plan.sections):
        for replica, ranks in enumerate(ranks_by_replica(s)):
            for rank in ranks:
                by_rank[rank].append((s.name, replica))
            unlimited.update(() if s.room_bytes else ranks)
    found: dict[RankHolders, int] = {}
    for rank in sorted(by_rank.keys() - unlimited):
        found.setdefault(tuple(by_rank[rank]), rank)
    return found


def _by_replica(table: MicroBatchTable) -> dict[int, list[int]]:
    """Returns the micro-batches of each replica."""
    found: dict[int, list[int]] = defaultdict(list)
    for m in table.micro_batches:
        found[m.replica].append(m.index)
    return found


def _find_peak(changes: Sequence[tuple[int, int, int, str]]) -> tuple[int, list[tuple[str, int]]]:
    """Returns the most bytes held at once, and the (section, micro-batch) pairs that hold them."""
    total = peak = 0
    held, at_peak = dict[tuple[str, int], None](), list[tuple[str, int]]()
    for place, size, i, name in changes:
        total += size
        if place % 2:
            held.pop((name, i), None)
        else:
            held[name, i] = None
        if total > peak:
            peak, at_peak = total, list(held)
    return peak, at_peak


def choose_samples_alone(
    plan: Plan,
    tables: Mapping[str, MicroBatchTable],
    excesses: Iterable[MemoryExcess],
    alone: Collection[int],
) -> set[int]:
    """Returns the samples to compute alone in the next try: of those in excess the ones that exceed their
    stage's share by themselves, else the largest ones that make up what is too much, at least as many as are
    alone already; in addition to `alone`. No more than `alone` if that cannot help."""
    large = {p for p, size, share in _single_samples(plan, tables) if size > share}
    found = set(alone)
    for excess in excesses:
        others = set(excess.samples).difference(alone)
        found |= others & large or (set() if others & found else _largest_samples(tables, excess, alone))
    return found


def _largest_samples(
    tables: Mapping[str, MicroBatchTable], excess: MemoryExcess, alone: Collection[int]
) -> set[int]:
    """The largest samples in excess that are not `alone`, until they keep what is too much and are as many as
    these. Samples of a micro-batch are counted with equal parts of its bytes."""
    kept: dict[int, int] = dict.fromkeys(set(excess.samples).difference(alone), 0)
    for name in excess.sections:
        for m in tables[name].micro_batches:
            part = _most_bytes(tables[name], m.index) // max(1, len(m.samples))
            kept.update((p, kept[p] + part) for p in m.samples if p in kept)
    too_much, found = excess.held_bytes - excess.capacity_bytes, set[int]()
    for p in sorted(kept, key=lambda p: (-kept[p], p)):
        if too_much <= 0 and len(found) >= len(alone):
            break
        too_much -= kept[p]
        found.add(p)
    return found


def _single_samples(plan: Plan, tables: Mapping[str, MicroBatchTable]) -> Iterator[tuple[int, int, int]]:
    """Yields (sample, bytes, bytes that 1F1B leaves it) of micro-batches of one sample with a limit."""
    stages = {name: len(parts) for name, parts in plan.pipelines.items()}
    for s in (s for s in plan.sections if tables[s.name].saved_bytes):
        share = s.room_bytes // max(1, stages.get(s.user_section_name, 1) - s.stage)
        for m in tables[s.name].micro_batches:
            if len(m.samples) == 1:
                yield m.samples[0], _most_bytes(tables[s.name], m.index), share


def separate_samples(
    section: Section, micro_batches: Sequence[MicroBatch], alone: Collection[int]
) -> tuple[AssignedMicroBatches, list[int]]:
    """Returns a section's micro-batches with each sample of `alone` on its own, on the replica that it had,
    after the others; and for each micro-batch 0, or 1 + the sample that it is for. Replicas in lockstep get
    empty micro-batches in the rounds of such a sample."""
    cut = AssignedMicroBatches()
    single: dict[int, int] = {}
    for m in micro_batches:
        rest = tuple(p for p in m.samples if p not in alone)
        single |= {p: m.replica for p in m.samples if p in alone}
        cut += [(m.replica, rest)] if rest else []
    together = replicas_in_lockstep(section) if runs_in_lockstep(section) else 1
    if together > 1:
        counts: dict[int, int] = defaultdict(int)
        for replica, _ in cut:
            counts[replica] += 1
        for first in range(0, section.mesh.dp, together):
            group = range(first, first + together)
            most = max(counts[r] for r in group)
            cut += [(r, ()) for r in group for _ in range(most - counts[r])]
    turns = [0] * len(cut)
    for p, replica in sorted(single.items()):
        first = replica // together * together
        cut += [(r, (p,) if r == replica else ()) for r in range(first, first + together)]
        turns += [1 + p] * together
    return cut, turns


def holders_of_rank(plan: Plan, rank: int) -> RankHolders:
    """Returns (section, replica) of each section with a backward on a rank."""
    return tuple(
        (s.name, replica)
        for s in filter(owes_backward, plan.sections)
        for replica, ranks in enumerate(ranks_by_replica(s))
        if rank in ranks
    )


def add_turns(
    plan: Plan,
    step: StepTasks,
    tables: Mapping[str, MicroBatchTable],
    turns: Mapping[str, Sequence[int]],
    only: Collection[RankHolders] | None = None,
) -> None:
    """Makes each rank finish all tasks of a turn before it begins the next one. Turn 0 has all micro-batches
    that are not alone; negative turns come before it. Tasks wait for earlier turns only, so they cannot wait
    for each other in a circle. With `only`, ranks with other sections and replicas take tasks in any order.
    """
    first_tasks: dict[tuple[int, int], list[int]] = defaultdict(list)  # by rank and turn
    last_tasks: dict[tuple[int, int], list[int]] = defaultdict(list)
    bound = None if only is None else _ranks_of_holders(plan, only)
    for s in filter(owes_backward, plan.sections):
        own, ranks = step.ranges[s.name], ranks_by_replica(s)
        for m, turn in zip(tables[s.name].micro_batches, turns[s.name], strict=True):
            for rank in ranks[m.replica]:
                if bound is None or rank in bound:
                    first_tasks[rank, turn].append(own.forward_start + m.index)
                    last_tasks[rank, turn].append(own.release_start + m.index)
    added = set[tuple[int, int]]()
    previous: dict[int, int] = {}
    for rank, turn in sorted(first_tasks):
        if rank in previous:
            before = last_tasks[rank, previous[rank]]
            added.update((a, b) for b in first_tasks[rank, turn] for a in before)
        previous[rank] = turn
    for first, then in sorted(added):
        step.graph.add_dependency(first, then)


def _ranks_of_holders(plan: Plan, only: Collection[RankHolders]) -> set[int]:
    """Returns the ranks that have exactly these sections and replicas."""
    by_rank: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for s in filter(owes_backward, plan.sections):
        for replica, ranks in enumerate(ranks_by_replica(s)):
            for rank in ranks:
                by_rank[rank].append((s.name, replica))
    return {rank for rank, holders in by_rank.items() if tuple(holders) in only}


def describe_excess(excess: MemoryExcess, samples: Sequence[SampleMeta]) -> str:
    """Returns which samples of the global batch a rank cannot hold, with their sizes."""
    sections = " and ".join(excess.sections)
    held, capacity = (f"{size / 2**30:.4g} GiB" for size in (excess.held_bytes, excess.capacity_bytes))
    limit = (
        f"of {held} in {sections}; rank {excess.rank} has {capacity} for them besides parameters, gradients "
        "and optimizer states"
    )
    first, *others = excess.samples
    if others:
        named = ", ".join(str(samples[p].id) for p in excess.samples[:NAMED_SAMPLES])
        more = ", …" if len(excess.samples) > NAMED_SAMPLES else ""
        return f"samples {named}{more} need activations {limit}"
    sample = samples[first]
    sizes = ", ".join(f"{name} = {size}" for name, size in sample.sizes.items() if size)
    return f"sample {sample.id} ({sizes}) needs activations {limit}"
