"""Sends messages between ranks: one process group per directed edge, sends that never block, receives posted
ahead.

Facts of gloo decide the design. A blocking send waits for its receive at any size, and completion cannot be
polled. So a send has its own buffer, which is kept until the message is known to be received: when the
gradient that answers it arrives, when `send_limit` later sends were posted
(`secc.runtime.validation.send_window` finds a limit that cannot deadlock), or at the end of the step. Two
receives that are posted one at a time cost milliseconds each, so receives are posted a window ahead, in
program order. A receive that is too small aborts the process, and equal shapes in the wrong order corrupt
data silently. So messages are tagged with their pair, and with `debug` a header is sent before each message,
which the receiver checks before it takes the values.

NCCL ignores tags; messages between two ranks follow their order in the program, which the check before the
step has proved equal on both ends.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.comm.edge_messages import EdgeLayout, MicroBatchPair
from secc.runtime.plan.replica_routes import ranks_by_replica, route_message
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import Instruction, Schedule, returns_gradient
from secc.runtime.validation.send_window import DEFAULT_SEND_LIMIT, find_send_limit

RECEIVE_WINDOW = 16  # receives posted ahead of the program


@dataclass(frozen=True)
class Message:
    """The part of an edge's message that passes between this rank and `peer`: part number `part` of `parts`.

    direction "fwd": the rows that a producer's and a consumer's micro-batch (`pair`) share. "bwd": their
    gradient.
    """

    edge: str
    direction: str
    pair: MicroBatchPair
    peer: int
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return f"RECV {self.edge} {self.direction} {self.pair[0]}>{self.pair[1]} from {self.peer}"

    def slice_bounds(self, layout: EdgeLayout) -> tuple[int, int]:
        """Start and end of the part in the flat message."""
        return layout.slice_bounds(self.pair, self.part, self.parts)

    def numel(self, layout: EdgeLayout) -> int:
        """Number of entries sent. A gradient is followed by one more entry, which says whether there is a
        gradient."""
        start, stop = self.slice_bounds(layout)
        return stop - start + (self.direction == "bwd")


def message_of_instruction(i: Instruction) -> Message:
    """Return the message of a SEND or RECV instruction."""
    return Message(i.edge, i.direction, (i.src_micro, i.dst_micro), i.peer, i.part, i.parts)


@dataclass
class _PostedReceive:
    buffer: torch.Tensor
    work: dist.Work | None = None


@dataclass
class _TransportStep:
    """State of one step. posted_count: receives posted so far; passed_count: RECV instructions that the
    program has reached; unreceived: sends not known to be received, oldest first."""

    layouts: Mapping[str, EdgeLayout]
    receives: list[Message]  # in program order
    posted_count: int = 0
    passed_count: int = 0
    arriving: dict[Message, _PostedReceive] = field(default_factory=dict)
    unreceived: dict[Message, list[tuple[dist.Work, torch.Tensor]]] = field(default_factory=dict)
    send_limit: int = DEFAULT_SEND_LIMIT


class Transport:
    """The point-to-point messages of one rank. Made on all ranks in the same order, because creating
    groups is collective."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, debug: bool = False) -> None:
        self.rank, self.device, self.debug = rank, device, debug
        self._edges = {e.name: i for i, e in enumerate(plan.edges)}
        self._sections = plan.sections
        self._groups = self._create_groups(plan)
        self._step = _TransportStep({}, [])

    def _create_groups(self, plan: Plan) -> dict[tuple[str, str, bool], Any]:
        return {key: dist.new_group(ranks) for key, ranks in plan_channels(plan).items()}

    def for_plan(self, plan: Plan) -> Transport:
        """Return a transport for steps of another plan with the same edges and meshes, over the same process
        groups. The two are used in turn, never at once."""
        other = copy.copy(self)
        other._sections, other._step = plan.sections, _TransportStep({}, [])
        return other

    def start_step(self, layouts: Mapping[str, EdgeLayout], schedule: Schedule) -> None:
        """Start a step with this rank's program."""
        self.begin_program(
            layouts, schedule.programs[self.rank], find_send_limit(schedule, sections=self._sections)
        )

    def advance_to(self, index: int) -> None:
        """The program has reached instruction number `index`."""

    def begin_program(
        self,
        layouts: Mapping[str, EdgeLayout],
        program: Iterable[Instruction],
        limit: int = DEFAULT_SEND_LIMIT,
    ) -> None:
        """Post the first receives of a program. At most `limit` sends are left unreceived."""
        self._step = _TransportStep(
            layouts, [message_of_instruction(i) for i in program if i.kind == "RECV"], send_limit=limit
        )
        self._post_receives_ahead()

    def send(self, message: Message, values: torch.Tensor) -> None:
        """Start to send `values`, a 1-D buffer that nothing else uses. An empty one is not sent."""
        if values.numel() == 0:
            return
        peer, group, tag = (
            message.peer,
            self._channel_group(message, self.rank, message.peer),
            self._message_tag(message),
        )
        sent = self._step.unreceived
        while sent and (len(sent) >= self._step.send_limit or _is_completed(next(iter(sent.values())))):
            self._wait_received(next(iter(sent)))
        parts: list[tuple[dist.Work, torch.Tensor]] = []
        if self.debug:
            header = self._make_header(message, values.numel(), values.dtype)
            parts.append((require_work(dist.isend(header, peer, group, tag=tag)), header))
        sent_as = as_sendable(values)
        parts.append((require_work(dist.isend(sent_as, peer, group, tag=tag + 1)), sent_as))
        sent[message] = parts

    def _wait_received(self, message: Message) -> None:
        """Wait until a message has been received, and release its buffer."""
        for work, _ in self._step.unreceived.pop(message, ()):
            work.wait()

    def receive(self, message: Message) -> None:
        """The program has reached this RECV: post further receives. With headers, receive and check this
        message."""
        if self.debug:
            self._step.arriving[message] = self._receive_checked(message)
            return
        self._step.passed_count += 1
        self._post_receives_ahead()

    def take_values(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its values. Each message is taken once."""
        receive = self._step.arriving.pop(message)
        if receive.work is not None:
            receive.work.wait()
        if message.direction == "bwd":
            self._wait_received(replace(message, direction="fwd"))
        return receive.buffer

    def finish_step(self) -> None:
        """Wait until everything that was sent in this step has been received."""
        for message in list(self._step.unreceived):
            self._wait_received(message)

    def _post_receives_ahead(self) -> None:
        step = self._step
        while not self.debug and step.posted_count < min(
            step.passed_count + RECEIVE_WINDOW, len(step.receives)
        ):
            message = step.receives[step.posted_count]
            step.arriving[message] = self._post_receive(message)
            step.posted_count += 1

    def _post_receive(self, message: Message) -> _PostedReceive:
        layout = self._step.layouts[message.edge]
        buffer = torch.empty(message.numel(layout), dtype=layout.dtype, device=self.device)
        if buffer.numel() == 0:
            return _PostedReceive(buffer)
        group = self._channel_group(message, message.peer, self.rank)
        return _PostedReceive(
            buffer,
            require_work(
                dist.irecv(as_sendable(buffer), message.peer, group, tag=self._message_tag(message) + 1)
            ),
        )

    def _receive_checked(self, message: Message) -> _PostedReceive:
        """Receive the header, and the values only if it is the expected one."""
        layout, peer = self._step.layouts[message.edge], message.peer
        numel = message.numel(layout)
        if numel > 0:
            expected = self._make_header(message, numel, layout.dtype)
            header = torch.empty_like(expected)
            require_work(
                dist.irecv(
                    header,
                    peer,
                    self._channel_group(message, peer, self.rank),
                    tag=self._message_tag(message),
                )
            ).wait()
            check_header(message, header, expected)
        receive = self._post_receive(message)
        if receive.work is not None:
            receive.work.wait()
        return _PostedReceive(receive.buffer)

    def _make_header(self, message: Message, numel: int, dtype: torch.dtype) -> torch.Tensor:
        samples = self._step.layouts[message.edge].pairs[message.pair]
        words = (
            2 * self._edges[message.edge] + (message.direction == "bwd"),
            _hash_to_int((samples, message.part)),
            numel,
            _hash_to_int(dtype),
        )
        return torch.tensor(words, dtype=torch.int64, device=self.device)

    def _message_tag(self, message: Message) -> int:
        """Return an even tag for the header; the values have the next one."""
        return 2 * self._step.layouts[message.edge].pair_tag(message.pair)

    def _channel_group(self, message: Message, src: int, dst: int) -> dist.ProcessGroup:
        group = self._groups[message.edge, message.direction, src < dst]
        assert isinstance(group, dist.ProcessGroup)
        return group


def plan_channels(plan: Plan) -> dict[tuple[str, str, bool], list[int]]:
    """Return the process groups of edges: (edge, direction, whether ranks ascend from sender to receiver) ->
    ranks.

    Two ranks that send to each other on one communicator could block each other, so each orientation has its
    own.
    """
    groups: dict[tuple[str, str, bool], list[int]] = {}
    sections = {s.name: s for s in plan.sections}
    for edge in plan.edges:
        ends = list(
            itertools.product(ranks_by_replica(sections[edge.src]), ranks_by_replica(sections[edge.dst]))
        )
        for direction in ("fwd", "bwd") if returns_gradient(edge, sections) else ("fwd",):
            parts = [
                p
                for a, b in ends
                for p in (route_message(a, b) if direction == "fwd" else route_message(b, a))
            ]
            for upward in (True, False):
                ranks = sorted(
                    {r for p in parts if (p.sender < p.receiver) == upward for r in (p.sender, p.receiver)}
                )
                if ranks:
                    groups[edge.name, direction, upward] = ranks
    return groups


def check_header(message: Message, received: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError if the received header differs from the expected one; both are 1-D integers with one
    entry for each field."""
    names = ("edge and direction", "samples and part", "number of entries", "dtype")
    differing = [n for n, a, b in zip(names, received.tolist(), expected.tolist(), strict=True) if a != b]
    if differing:
        raise RuntimeError(
            f"the header of {message} from rank {message.peer} differs in {', '.join(differing)}"
        )


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of any shape in a dtype that every backend can send: bool as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _is_completed(parts: Iterable[tuple[dist.Work, torch.Tensor]]) -> bool:
    """Whether a send is known to be over. Never for gloo, which cannot tell."""
    return all(work.is_completed() for work, _ in parts)


def require_work(work: dist.Work | None) -> dist.Work:
    """Return the handle of a started operation. Raises RuntimeError if this rank is not in the operation's
    group."""
    if work is None:
        raise RuntimeError("this rank is not a member of the process group of the message")
    return work


def _hash_to_int(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=7).digest(), "little")
