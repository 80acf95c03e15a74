"""Data that the solver chooses from and that it answers with. It knows neither models nor solvers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from secc.runtime.plan.schema import rank_position

STRATEGIES = ("auto", "apart", "colocate", "uniform")


class ReplicaShape(NamedTuple):
    """How many ranks share a replica: its parameters (tp), layers (pp) and rows of sequences (cp). Experts
    form `ep` parts on these ranks. A backward of two `backward_parts` is split: gradients of inputs, later
    those of parameters. `offload` says what lives in host memory. Each rank of a pipeline holds `chunks`
    pieces of layers, which lie as `placement` says (`secc.runtime.plan.schema.rank_position`). `norms` work
    on "whole" sequences or on the positions of a rank of tp ("sequence"). `overlap` says which sums over tp
    travel behind products, "" where the shortest way counts."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    backward_parts: int = 1
    offload: str = "none"
    chunks: int = 1
    placement: str = "loop"
    norms: str = "whole"
    overlap: str = ""

    @property
    def stages(self) -> int:
        """Number of stages: pieces of layers that a micro-batch passes one after the other."""
        return self.pp * self.chunks

    @property
    def ranks(self) -> int:
        """Number of ranks of a replica."""
        return self.tp * self.pp * self.cp

    def stages_on_rank(self, stage: int) -> list[int]:
        """The stages on the ranks that have `stage`, first to last."""
        place = rank_position(stage, self.pp, self.placement)
        return [s for s in range(self.stages) if rank_position(s, self.pp, self.placement) == place]


WHOLE = ReplicaShape()


@dataclass(frozen=True)
class Candidate:
    """One way to run a section: `dp` replicas of `tp * pp * cp` ranks, with micro-batches of `micro_batch`
    samples.

      time_ns: work of the busiest rank in a step, gradient reduction and optimizer included.
      idle_ns: the part of it in which stages stand idle unless they run ahead of the step.
      runs_ahead: whether the section computes forwards of the next step, if all on its ranks do.
      fill_ns, drain_ns: forward and backward of one micro-batch through all stages.
      micro_batches: number of micro-batches that a replica runs.
      memory: bytes on a rank where backward follows forward (1F1B).
      memory_ahead: bytes on a rank with `in_flight` micro-batches between forward and backward, as a section
          with consumers on other ranks has them.
      rounds: how often in a step the in-flight budget is used; 1 where all forwards come first.
      ep: number of parts that experts form, on the ranks that hold copies of the section.
      micro_batch_tokens: the most tokens of a micro-batch of several samples, 0 for any number; `micro_batch`
          are then the mean samples that they hold, and `sample_limit` is the most samples.
      sample_limit: the most samples of a micro-batch, where these are short; 0 for `micro_batch`.
      cp_per: "section" divides every sample over the ranks of cp; "micro_batch" decides for each micro-batch
          whether its ranks divide each sample or subgroups of them compute samples side by side. `time_ns`
          is then that of samples in the cheapest subgroup that has memory for them.
      cp_degrees: the sizes of such subgroups: "any" divisor of cp, or one rank ("one_or_all").
      backward_parts: 2 where stages compute gradients of parameters apart, in idle time, else 1.
      offload: what lives in host memory: "none", "optimizer" states, frozen "weights" or "activations".
      host_memory: bytes of host memory for a rank.
      chunks, placement: pieces of layers on a rank of a pipeline, and how they lie on the ranks.
      norms: whether norms work on "whole" sequences, or on the positions of a rank of tp ("sequence").
      kind: index of the device kind, or `ALL_KINDS`.
      excluded: the candidate must not be chosen (`exclude_candidates`).
    """

    dp: int
    micro_batch: int
    time_ns: int
    fill_ns: int = 0
    drain_ns: int = 0
    micro_batches: int = 1
    memory: int = 0
    memory_ahead: int = 0
    in_flight: int = 0
    rounds: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    recompute: str = "none"
    sharding: str = "none"
    kind: int = 0
    excluded: bool = False
    cp: int = 1
    cp_per: str = "section"
    cp_degrees: str = "any"
    backward_parts: int = 1
    micro_batch_tokens: int = 0
    sample_limit: int = 0
    idle_ns: int = 0
    runs_ahead: bool = False
    offload: str = "none"
    host_memory: int = 0
    chunks: int = 1
    placement: str = "loop"
    norms: str = "whole"

    def with_fields(self, **fields: int | bool | str) -> Candidate:
        """Copy with other values of some fields. There are many candidates, and `dataclasses.replace` takes
        several times as long: it sets each field of a frozen class by a call."""
        copy = object.__new__(Candidate)
        vars(copy).update(vars(self), **fields)
        return copy

    @property
    def most_samples(self) -> int:
        """The most samples of a micro-batch."""
        return self.sample_limit or self.micro_batch

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one stage of a replica."""
        return self.tp * self.cp

    @property
    def subgroup_sizes(self) -> tuple[int, ...]:
        """How many ranks of cp may compute samples without the others, ascending; () if all share each
        sample."""
        if self.cp_per == "section":
            return ()
        most = self.cp if self.cp_degrees == "any" else min(self.cp, 2)
        return tuple(n for n in range(1, most) if self.cp % n == 0)

    @property
    def shape(self) -> ReplicaShape:
        """The shape of a replica."""
        return ReplicaShape(
            self.tp,
            self.pp,
            self.cp,
            self.ep,
            self.backward_parts,
            self.offload,
            self.chunks,
            self.placement,
            self.norms,
        )

    @property
    def backward(self) -> str:
        """How stages run backward: whole or split."""
        return "whole" if self.backward_parts == 1 else "split"

    @property
    def runs_in_lockstep(self) -> bool:
        """Whether replicas wait for each other in every micro-batch: under ZeRO-3, or to exchange tokens."""
        return self.sharding == "zero3" or self.ep > self.tp

    @property
    def busy_ns(self) -> int:
        """Work of the busiest rank in a step, without idle time."""
        return self.time_ns - self.idle_ns

    @property
    def least_work(self) -> int:
        """Ns of all ranks together, without idle time."""
        return self.busy_ns * self.ranks

    @property
    def width(self) -> int:
        """How often the ranks of a replica were doubled: log2(tp) + log2(pp) + log2(cp)."""
        return sum((degree - 1).bit_length() for degree in (self.tp, self.pp, self.cp))

    @property
    def extras(self) -> int:
        """0 for the plainest candidate; more for each feature that could be left out. Breaks ties."""
        plain = 8 * self.width + 2 * (self.recompute != "none") + (self.sharding != "none")
        split = self.backward_parts > 1
        return plain + 4 * (self.ep > 1) + split + (self.offload != "none") + 2 * (self.chunks > 1)


@dataclass(frozen=True)
class AllocEdge:
    """Section `src` feeds `dst`. Times and bytes count only where the two run on different ranks.

    Columns by candidate of `src`:

      sent_bytes: messages that a rank of `src` holds until they are received.
      latency_ns: delay of `dst` by the first micro-batch, plus the last backward of `src` that follows it.
      slack_ns: other work of `src` that hides the last round trip through `dst`.

    Columns by candidate of `dst`:

      returned_bytes: gradients that a rank of `dst` holds until they are received.
      independent_ns: work of `dst` that needs nothing from `src` and so hides the latency.
      message_ns: cost of receiving.
      round_trip_ns: forward and backward of one micro-batch.
    """

    src: str
    dst: str
    sent_bytes: tuple[int, ...]
    returned_bytes: tuple[int, ...]
    latency_ns: tuple[int, ...]
    slack_ns: tuple[int, ...]
    independent_ns: tuple[int, ...]
    message_ns: tuple[int, ...]
    round_trip_ns: tuple[int, ...]

    @cached_property
    def gradient_return_ns(self) -> tuple[int, ...]:
        """By candidate of `dst`: time until the gradient of a sent micro-batch returns. It is a round
        trip, plus half of one as mean wait."""
        return tuple(r * 3 // 2 for r in self.round_trip_ns)


ALL_KINDS = -1  # a candidate of this kind runs on all ranks of all device kinds, as fast as the slowest


@dataclass(frozen=True)
class DevicePool:
    """`ranks` devices of one kind, of `capacity` bytes each."""

    ranks: int
    capacity: int


@dataclass(frozen=True)
class Problem:
    """Sections in topological order with their candidates, and `ranks` devices of `capacity` bytes each.

    strategy: one of `STRATEGIES`.
    together: pairs of sections that must share devices.
    per_node: ranks of a node. More ranks than that are used by whole nodes, as launchers start them.
    deadline: ns. With a deadline the objective is the fewest ranks, up to `ranks`, on which a step is no
        longer.
    host_capacity: bytes of host memory for the offloaded tensors of a rank.
    pools: devices of each kind where kinds are mixed. A group's ranks are then of one kind, or all ranks.
    """

    sections: Mapping[str, tuple[Candidate, ...]]
    edges: tuple[AllocEdge, ...]
    ranks: int
    capacity: int
    strategy: str = "auto"
    together: tuple[tuple[str, str], ...] = ()
    per_node: int = 1
    deadline: int | None = None
    pools: tuple[DevicePool, ...] = ()
    host_capacity: int = 0

    def usable_bytes(self, c: Candidate) -> int:
        """Usable bytes on a rank of candidate `c`."""
        return min(
            (pool.capacity for k, pool in enumerate(self.pools) if self.ranks_in_pool(c, k)),
            default=self.capacity,
        )

    def ranks_in_pool(self, c: Candidate, pool: int) -> int:
        """Number of ranks of `pool` that candidate `c` takes."""
        return self.pools[pool].ranks if c.kind == ALL_KINDS else c.ranks if c.kind == pool else 0


def exclude_candidates(
    problem: Problem, predicate: Callable[[Candidate], bool], among: Collection[str] = ()
) -> Problem:
    """Copy of `problem` in which candidates with `predicate(c)` are excluded.

    `among` limits this to some sections (default: all). Excluded candidates keep their indices, so
    assignments of the copy are assignments of `problem`.
    """
    sections = dict(problem.sections)
    for s in among or problem.sections:
        sections[s] = tuple(
            c.with_fields(excluded=True) if not c.excluded and predicate(c) else c for c in sections[s]
        )
    return replace(problem, sections=sections)


@dataclass(frozen=True)
class Assignment:
    """Index of each section's candidate, and each section's group, which is named after its first section."""

    choice: Mapping[str, int]
    group: Mapping[str, str]

    def with_choice(self, section: str, index: int) -> Assignment:
        """Copy with another candidate of a section."""
        return Assignment({**self.choice, section: index}, self.group)


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    time_ns: step time of `assignment` by the closed forms.
    status: "OPTIMAL" or "FEASIBLE".
    gap: proven relative distance to the optimal step time; with a deadline to the fewest ranks.
    ranks: number of ranks used.
    """

    assignment: Assignment
    time_ns: int
    status: str
    gap: float
    ranks: int
