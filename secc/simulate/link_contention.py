"""Messages on links that they share: each device has a way out and a way in, inside its node and between
nodes.

A message occupies the sender's way out and the receiver's way in together, for its bytes at the link's
bandwidth; its latency passes besides and occupies nothing. Messages take a way in the order in which both of
their ends were ready for them, so a busy way delays those behind it: contention costs at least what it costs
on a link that shares its bandwidth, and never less than the message alone.
"""

from __future__ import annotations

from collections import defaultdict

from secc.bounds.traffic import Traffic


class Network:
    """The ways of all ranks and until when they are taken. Times in ns."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._out: dict[tuple[int, bool], int] = defaultdict(
            int
        )  # (rank, whether between nodes) -> free from
        self._in: dict[tuple[int, bool], int] = defaultdict(int)

    def send_message(self, source: int, target: int, size: int, ready: int) -> tuple[int, int]:
        """(start, arrival) of a message of `size` bytes that both ends are ready for at `ready`. Calls must
        not go back in time."""
        link = self._traffic.link_between(source, target)
        cluster = self._traffic.cluster
        between = cluster is not None and link is cluster.between
        start = max(ready, self._out[source, between], self._in[target, between])
        occupied = link.message_ns(size) - link.latency_ns
        self._out[source, between] = self._in[target, between] = start + occupied
        return start, start + occupied + link.latency_ns
