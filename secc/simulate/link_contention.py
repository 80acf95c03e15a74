"""Messages on shared links: each device has one outgoing and one incoming link inside its node, and one pair
between nodes.

A message occupies the sender's outgoing and the receiver's incoming link together, for its bytes at the
link's bandwidth; its latency passes in addition and occupies nothing. Links serve messages in the order in
which both ends were ready, so a busy link delays later messages: contention costs at least what it costs on a
link that divides its bandwidth, and never less than the message alone.
"""

from __future__ import annotations

from collections import defaultdict

from secc.bounds.traffic import Traffic


class Network:
    """Links of all ranks, and until when they are occupied, in ns."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        # (rank, whether the link is between nodes) -> end of the last message on it
        self._out: dict[tuple[int, bool], int] = defaultdict(int)
        self._in: dict[tuple[int, bool], int] = defaultdict(int)

    def send_message(self, source: int, target: int, size: int, ready: int) -> tuple[int, int]:
        """(start, arrival) of a message of `size` bytes with both ends ready at `ready`. Calls must not go
        back in time."""
        link = self._traffic.link_between(source, target)
        cluster = self._traffic.cluster
        between = cluster is not None and link is cluster.between
        start = max(ready, self._out[source, between], self._in[target, between])
        occupied = link.message_ns(size) - link.latency_ns
        self._out[source, between] = self._in[target, between] = start + occupied
        return start, start + occupied + link.latency_ns
