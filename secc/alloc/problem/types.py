"""What the solver chooses from and what it answers, as plain data that knows nothing of models or solvers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STRATEGIES = ("auto", "apart", "colocate", "uniform")


@dataclass(frozen=True)
class Candidate:
    """One way to run a section: replicas (dp) of `tp x pp` ranks, micro-batches of `micro_batch` samples.

    time_ns: work of the busiest rank in one step, gradient reduction and optimizer included. fill_ns,
    drain_ns: forward and backward of one micro-batch. micro_batches: how many a replica runs. memory: bytes
    on a rank when backward follows forward; memory_ahead: with `in_flight` micro-batches between forward and
    backward, as a section holds whose consumers run on other ranks. Their places are taken `rounds` times in
    a step: once where all forwards come first.
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
    recompute: str = "none"
    sharding: str = "none"
    kind: int = 0

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def work(self) -> int:
        """ns of all ranks together."""
        return self.time_ns * self.ranks

    @property
    def width(self) -> int:
        """How often the ranks of a replica were doubled."""
        return (self.tp - 1).bit_length() + (self.pp - 1).bit_length()

    @property
    def extras(self) -> int:
        """0 for the plainest candidate, more for each thing that could be left out."""
        return 8 * self.width + 2 * (self.recompute != "none") + (self.sharding != "none")


@dataclass(frozen=True)
class AllocEdge:
    """Section `src` feeds `dst`; times and bytes count only where the two run on different ranks.

    `sent` and `returned` are the bytes of messages that a rank of `src` and of `dst` holds until they are
    received, for each candidate. For each candidate of `src`: `latency`, what its first micro-batch delays
    `dst` by and its last backward adds after it; `slack`, other work of `src` beside which the last round
    trip through `dst` hides. For each candidate of `dst`: `free`, work that needs nothing of `src` and hides
    the latency; `messages`, what receiving costs; `round`, forward and backward of one micro-batch.
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

    @property
    def gradient_return_ns(self) -> tuple[int, ...]:
        """How long a sample in flight is gone, for each candidate of `dst`: its round, and half of one for
        which it waits."""
        return tuple(r * 3 // 2 for r in self.round_trip_ns)


ALL_KINDS = -1  # as a candidate's kind: it runs on all ranks of all kinds, as fast as the slowest


@dataclass(frozen=True)
class DevicePool:
    """`ranks` devices of one kind, of `capacity` bytes each."""

    ranks: int
    capacity: int


@dataclass(frozen=True)
class Problem:
    """Sections in an order in which edges go forward, with their candidates; `ranks` devices of `capacity`
    bytes each.

    `together` holds pairs of sections that must share devices. Nodes hold `per_node` ranks; more ranks than
    that are used by whole nodes, as launchers start them. With a `deadline` (ns) the fewest ranks are wanted
    on which a step takes no longer, of up to `ranks`.

    Where kinds of devices are mixed, `pools` has those of each; a group's ranks are then of one kind, or all
    ranks there are.
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

    def usable_bytes(self, c: Candidate) -> int:
        """Bytes that a rank of a candidate has."""
        return min(
            (pool.capacity for k, pool in enumerate(self.pools) if self.ranks_in_pool(c, k)),
            default=self.capacity,
        )

    def ranks_in_pool(self, c: Candidate, pool: int) -> int:
        """How many ranks of a pool a candidate takes."""
        return self.pools[pool].ranks if c.kind == ALL_KINDS else c.ranks if c.kind == pool else 0


@dataclass(frozen=True)
class Assignment:
    """A candidate's index for each section, and each section's group: the name of the group's first
    section."""

    choice: Mapping[str, int]
    group: Mapping[str, str]


@dataclass(frozen=True)
class Solution:
    """What the solver found: `status` is "OPTIMAL" or "FEASIBLE", `gap` the proven distance of `time_ns` to
    the optimum, relative; with a deadline that of `ranks`.

    ranks: how many of the problem's ranks are used.
    """

    assignment: Assignment
    time_ns: int
    status: str
    gap: float
    ranks: int
