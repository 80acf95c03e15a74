"""Step programs: what each rank does for one global batch, as plain data and as a text that prints and
parses.

A `Schedule` describes one step: the micro-batches of every section and one list of instructions for each
rank. The scheduler (`runtime/schedule/scheduler.py`) makes it, the check (`runtime/validation/full_check.py`)
proves it, the engine and the simulator execute it; they share nothing but these types. In the text form each
instruction is one line:

    RECV image_features fwd 3>1 from 0
    F language_model 1
    B language_model 1
    SEND image_features bwd 1>3 to 0
    REDUCE language_model
    STEP

`A>B` are micro-batch indices in the direction in which the data flows; ` replica R` and ` stage S` follow
where they are not 0, and ` part I of N` where a message is split (`secc.runtime.plan.replica_routes`). All
ranks of a replica execute its F and B together; where parameters are sharded over replicas (ZeRO-3), all
replicas do (`gather_rounds`). A pipeline stage is a section with a name of its own (`language_model_1`);
`stage` is its index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from secc.runtime.plan.schema import Edge, Section

COMPUTE_KINDS = ("F", "B", "W")
TRANSFER_KINDS = ("SEND", "RECV")


class Instruction(NamedTuple):
    """One entry of a rank's program.

    F, B, W: forward, backward and weight-gradient computation of micro-batch `micro`, an index into
    `Schedule.micro_batches[section]`.

    SEND, RECV: the tensor of `edge` ("fwd") or its gradient ("bwd"), to or from rank `peer`. `src_micro` and
    `dst_micro` are the micro-batches of the edge's producer and consumer, the same in both directions. A RECV
    may stand earlier than the instruction that consumes its data, because receives follow the order of the
    sends on their channel.

    REDUCE: sum `section`'s gradients over its replicas. STEP: the optimizer step that ends the global batch.
    """

    kind: str
    section: str = ""
    replica: int = 0
    stage: int = 0
    micro: int = -1
    edge: str = ""
    direction: str = ""
    peer: int = -1
    src_micro: int = -1
    dst_micro: int = -1
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return print_instruction(self)


Program = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """What all ranks know about a sample: dataset index, optional keys, and symbol values when collated
    alone.
    """

    id: int
    pattern: frozenset[str]
    sizes: Mapping[str, int]


class MicroBatch(NamedTuple):
    """Samples that pass through one replica of a section together, as ascending positions in the global
    batch.

    An empty micro-batch only takes part in the collectives of its round (`gather_rounds`).
    """

    index: int
    section: str
    replica: int
    samples: tuple[int, ...]


MicroBatchSets = Mapping[str, frozenset[int]]  # section name -> indices of micro-batches


class MemoryExcess(NamedTuple):
    """A rank that holds more between forward and backward than the plan has memory for: `samples` (positions
    in the global batch) keep `held_bytes` in `sections`, `capacity_bytes` is what they may keep together."""

    rank: int
    sections: tuple[str, ...]
    samples: tuple[int, ...]
    held_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of each section and one program per rank, for one global batch.

    With cross-step prefetch (`secc.runtime.schedule.cross_step_prefetch`): the previous step may compute the
    forwards of the micro-batches `prefetchable`; `forward_ns` has the modelled time of each micro-batch of
    prefetching sections. In a step spliced with its neighbours, it did compute the forwards of `prefetched`,
    so they have no F here, and sample positions from `own_samples` on belong to the next global batch.
    `over_memory` has what cannot be ordered within the ranks' memory, `whole_backwards` by section the
    micro-batches that do not split their backward: B computes all of it, and W nothing.
    """

    micro_batches: dict[str, tuple[MicroBatch, ...]]
    programs: Sequence[Program]
    prefetchable: MicroBatchSets = field(default_factory=dict[str, frozenset[int]])
    prefetched: MicroBatchSets = field(default_factory=dict[str, frozenset[int]])
    own_samples: int | None = None
    forward_ns: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    over_memory: tuple[MemoryExcess, ...] = ()
    whole_backwards: MicroBatchSets = field(default_factory=dict[str, frozenset[int]])

    def is_prefetched(self, section: str, micro: int) -> bool:
        """Returns whether the previous step has computed a micro-batch's forward."""
        return micro in self.prefetched.get(section, ())

    def is_of_next_batch(self, micro: MicroBatch) -> bool:
        """Returns whether a micro-batch belongs to the next global batch."""
        return self.own_samples is not None and micro.samples[:1] >= (self.own_samples,)


def owes_backward(section: Section) -> bool:
    """Returns whether every forward of the section is followed by a backward."""
    return section.mode != "forward"


def gathers_parameters(section: Section) -> bool:
    """Returns whether a section's replicas shard its parameters (ZeRO-3) and all-gather them for every
    micro-batch.
    """
    return section.sharding == "zero3" and section.mesh.copies > 1


def exchanges_tokens(section: Section) -> bool:
    """Returns whether replicas of a section have different experts and send each other tokens."""
    return section.mesh.expert_replicas > 1


def synchronizes_norms(section: Section) -> bool:
    """Returns whether replicas of a section sum the statistics of their batch norms."""
    return section.whole_batch and section.mesh.dp > 1


def runs_in_lockstep(section: Section) -> bool:
    """Returns whether replicas communicate in every forward and backward, so that all run them in rounds."""
    return gathers_parameters(section) or exchanges_tokens(section) or synchronizes_norms(section)


def replicas_in_lockstep(section: Section) -> int:
    """Returns how many consecutive replicas wait for each other in every forward and backward: all that
    gather parameters or sum statistics of batch norms, or those that exchange tokens; 1 where each runs
    alone.
    """
    together = gathers_parameters(section) or synchronizes_norms(section)
    return section.mesh.dp if together else section.mesh.expert_replicas


def gather_rounds(
    sections: Iterable[Section], micro_batches: Mapping[str, Sequence[MicroBatch]]
) -> dict[tuple[str, int], tuple[MicroBatch, ...]]:
    """Groups the micro-batches of sections that run in lockstep into rounds. In each round every replica of a
    group (`replicas_in_lockstep`) runs one micro-batch.

    Returns (section, index) -> all micro-batches of the round. A group's round k consists of each replica's
    k-th micro-batch; a replica with fewer samples takes part with empty micro-batches.
    """
    rounds: dict[tuple[str, int], tuple[MicroBatch, ...]] = {}
    for section in filter(runs_in_lockstep, sections):
        name, together = section.name, replicas_in_lockstep(section)
        by_replica: dict[int, list[MicroBatch]] = {}
        for m in micro_batches[name]:
            by_replica.setdefault(m.replica, []).append(m)
        for first in range(0, section.mesh.dp, together):
            of_group = [by_replica[r] for r in range(first, first + together) if r in by_replica]
            for round_members in zip(*of_group, strict=False):
                rounds |= {(name, m.index): round_members for m in round_members}
    return rounds


def compute_kinds(section: Section) -> tuple[str, ...]:
    """Returns the kinds of compute instructions of each micro-batch of a section, in execution order."""
    if not owes_backward(section):
        return ("F",)
    return ("F", "B", "W") if section.weight_permille else ("F", "B")


def weight_backward_ns(section: Section, backward_ns: int, whole: bool = False) -> int:
    """Returns the ns of a backward that its W part takes. whole: B computes all, and W does nothing; it
    counts as a nanosecond, so that every task takes time."""
    part = backward_ns * section.weight_permille // 1000 if owes_backward(section) else 0
    return min(part, 1) if whole else part


def weight_backward_times(
    section: Section, backward: Sequence[int], whole: Collection[int] = ()
) -> list[int]:
    """Returns `weight_backward_ns` of each backward time; those at the indices `whole` are in one part."""
    if not section.weight_permille or not owes_backward(section):
        return [0] * len(backward)
    permille = section.weight_permille
    parts = [ns * permille // 1000 for ns in backward]
    for i in whole:
        parts[i] = min(parts[i], 1)
    return parts


def returns_gradient(edge: Edge, sections: Mapping[str, Section]) -> bool:
    """Returns whether the consumer's backward sends a gradient over the edge that the producer's backward
    needs.
    """
    return edge.grad and owes_backward(sections[edge.src]) and owes_backward(sections[edge.dst])


def replica_first_ranks(section: Section) -> tuple[int, ...]:
    """Returns the first rank of each replica; it represents the replica in scheduling, since all ranks of a
    replica run the same program (`replica_routes.ranks_by_replica`).

    Raises ValueError for a mesh with pipeline stages, which are sections of their own.
    """
    mesh = section.mesh
    if mesh.pp != 1 or len(mesh.ranks) != mesh.dp * mesh.replica_size:
        raise ValueError(
            f"section {section.name}: expected a mesh of one pipeline stage, got pp={mesh.pp} with "
            f"{len(mesh.ranks)} ranks for dp={mesh.dp}, tp={mesh.tp}, cp={mesh.cp}"
        )
    return mesh.ranks[:: mesh.replica_size]


def micro_batch_pairs(edge: Edge, schedule: Schedule) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns the messages of an edge: (producer's, consumer's micro-batch) -> the samples they share,
    ascending.
    """
    owner = {s: m.index for m in schedule.micro_batches[edge.src] for s in m.samples}
    shared: dict[tuple[int, int], list[int]] = {}
    prefetched = schedule.prefetched.get(edge.dst, frozenset())
    for consumer in schedule.micro_batches[edge.dst]:
        for s in consumer.samples if consumer.index not in prefetched else ():
            if s in owner:
                shared.setdefault((owner[s], consumer.index), []).append(s)
    return {pair: tuple(samples) for pair, samples in shared.items()}


def print_instruction(i: Instruction) -> str:
    """Returns the text of an instruction; `parse_instruction` reads it back."""
    words = [i.kind]
    if i.kind in COMPUTE_KINDS:
        words += [i.section, str(i.micro)]
    elif i.kind in TRANSFER_KINDS:
        flow = (i.src_micro, i.dst_micro) if i.direction == "fwd" else (i.dst_micro, i.src_micro)
        words += [
            i.edge,
            i.direction,
            f"{flow[0]}>{flow[1]}",
            "to" if i.kind == "SEND" else "from",
            str(i.peer),
        ]
        words += ["part", str(i.part), "of", str(i.parts)] if i.parts > 1 else []
    elif i.kind == "REDUCE":
        words.append(i.section)
    words += [w for name, n in (("replica", i.replica), ("stage", i.stage)) if n for w in (name, str(n))]
    return " ".join(words)


def parse_instruction(text: str) -> Instruction:
    """Parses the text of an instruction. Raises ValueError for any other text."""
    match text.split():
        case [("F" | "B" | "W") as kind, section, micro, *rest]:
            replica, stage, *_ = _parse_suffix(rest, text)
            return Instruction(kind, section, replica, stage, int(micro))
        case [
            ("SEND" | "RECV") as kind,
            edge,
            ("fwd" | "bwd") as direction,
            flow,
            ("to" | "from") as word,
            peer,
            *rest,
        ]:
            if word != ("to" if kind == "SEND" else "from"):
                raise ValueError(f"a {kind} cannot be `{word}` a rank: {text!r}")
            first, second = (int(n) for n in flow.split(">"))
            src, dst = (first, second) if direction == "fwd" else (second, first)
            replica, stage, part, parts = _parse_suffix(rest, text)
            return Instruction(
                kind, "", replica, stage, -1, edge, direction, int(peer), src, dst, part, parts
            )
        case ["REDUCE", section, *rest]:
            return Instruction("REDUCE", section, *_parse_suffix(rest, text)[:2])
        case ["STEP"]:
            return Instruction("STEP")
    raise ValueError(f"not an instruction: {text!r}")


def _parse_suffix(words: list[str], text: str) -> tuple[int, int, int, int]:
    """Parses trailing `replica R`, `stage S`, `part I of N` into (replica, stage, part, parts)."""
    values = dict(zip(words[::2], words[1::2], strict=False))
    if (
        len(words) % 2
        or len(values) * 2 != len(words)
        or not values.keys() <= {"replica", "stage", "part", "of"}
    ):
        raise ValueError(f"not an instruction: {text!r}")
    replica, stage, part, parts = (
        int(values.get(word, default))
        for word, default in (("replica", 0), ("stage", 0), ("part", 0), ("of", 1))
    )
    return replica, stage, part, parts


def print_schedule(schedule: Schedule) -> str:
    """Returns the text of a schedule: one line per micro-batch, then each rank's program; `parse_schedule`
    reads it back.
    """
    lines: list[str] = [] if schedule.own_samples is None else [f"own {schedule.own_samples}"]
    for section, micros in schedule.micro_batches.items():
        lines.append(f"section {section}")
        lines += [f"  {_print_micro_batch(m, schedule)}" for m in micros]
    for rank, program in enumerate(schedule.programs):
        lines.append(f"rank {rank}")
        lines += [f"  {print_instruction(i)}" for i in program]
    return "".join(f"{line}\n" for line in lines)


def _print_micro_batch(m: MicroBatch, schedule: Schedule) -> str:
    marks = [
        mark
        for mark, micros in (
            ("early", schedule.prefetchable),
            ("computed", schedule.prefetched),
            ("whole", schedule.whole_backwards),
        )
        if m.index in micros.get(m.section, ())
    ]
    return " ".join(
        ["micro", str(m.index), "replica", str(m.replica), *marks, "samples", *map(str, m.samples)]
    )


def parse_schedule(text: str) -> Schedule:
    """Parses the text of a schedule. Raises ValueError, naming the line, for any other text."""
    micros: dict[str, list[MicroBatch]] = {}
    programs: list[list[Instruction]] = []
    marked: dict[str, dict[str, set[int]]] = {"early": {}, "computed": {}, "whole": {}}
    section, own_samples = "", None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            match line.split():
                case ["section", section]:
                    micros[section] = []
                case ["own", count]:
                    own_samples = int(count)
                case ["micro", index, "replica", replica, *rest]:
                    at = rest.index("samples")
                    for mark in rest[:at]:
                        marked[mark].setdefault(section, set()).add(int(index))
                    micros[section].append(
                        MicroBatch(int(index), section, int(replica), tuple(map(int, rest[at + 1 :])))
                    )
                case ["rank", rank] if int(rank) == len(programs):
                    programs.append([])
                case _:
                    programs[-1].append(parse_instruction(line))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"line {number} is not part of a schedule: {line!r} ({error})") from None
    prefetchable, prefetched, whole_backwards = (
        {name: frozenset(indices) for name, indices in by_section.items()} for by_section in marked.values()
    )
    return Schedule(
        {name: tuple(ms) for name, ms in micros.items()},
        tuple(tuple(p) for p in programs),
        prefetchable,
        prefetched,
        own_samples,
        whole_backwards=whole_backwards,
    )
