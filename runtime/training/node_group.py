"""The launchers of a run on several nodes: that of node 0 listens at the endpoint, starts every attempt, and
keeps the ranks' store; the others do what it says with the ranks of their node.

Whoever connects is asked for the secret (`runtime.host.signed_channel`). Node 0 listens on the address of the
endpoint only. A node that says nothing for `_LOST_S` is lost, and its ranks with it; its launcher, or a new
one with the same command, may join again. A launcher that hears nothing from node 0 ends its ranks and tries
to join again.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.host.signed_channel import (
    ForeignPeer,
    SignedChannel,
    SignedListener,
    connect_to_peer,
    read_secret,
)
from secc.runtime.parameters.checkpoint_copies import Address, CopyKeeper
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.node_store import (
    ENDPOINT_VARIABLE,
    RUN_VARIABLE,
    SECRET_VARIABLE,
    KeyValueTable,
    parse_endpoint,
    serve_rank,
)
from secc.runtime.training.options import RunOptions
from secc.runtime.training.rank_group import POLL_S, LocalRanks, Loss, StopRequests

_PING_S, _LOST_S = 1.0, 15.0
_OWN_OPTIONS = ("node_rank", "rdzv_endpoint", "init")
_JOIN_S = 600.0  # for all nodes to join
_KILL_S = 10.0  # for a node to end its ranks
_SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface


@dataclass(frozen=True)
class NodePlace:
    """This node of a run on several. `address`: where node 0 listens."""

    nodes: int
    node: int
    address: tuple[str, int]
    secret_file: Path

    def rank_variables(self, own_address: str, run: str) -> dict[str, str]:
        """Returns the variables that tell ranks how to meet. `run`: random text of node 0's launcher."""
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or find_interface(own_address)
        return {
            ENDPOINT_VARIABLE: f"{self.address[0]}:{self.address[1]}",
            SECRET_VARIABLE: str(self.secret_file.resolve()),
            RUN_VARIABLE: run,
            "GLOO_SOCKET_IFNAME": interface,
        }


def make_node_place(nodes: int, node: int | None, endpoint: str | None, secret: Path | None) -> NodePlace:
    """Returns this node's place from options. Raises UserError for options that do not fit together."""
    remedy = "give --nnodes, --node-rank, --rdzv-endpoint HOST:PORT of node 0, and --rdzv-secret FILE"
    if node is None or endpoint is None or secret is None:
        missing = (
            "--node-rank" if node is None else "--rdzv-endpoint" if endpoint is None else "--rdzv-secret"
        )
        raise UserError(f"--nnodes {nodes} needs {missing}", remedy=remedy)
    if not 0 <= node < nodes:
        raise UserError(f"--node-rank must be from 0 to {nodes - 1}, got {node}", remedy=remedy)
    try:
        address = parse_endpoint(endpoint)
    except ValueError as error:
        raise UserError(f"--rdzv-endpoint: {error}, got {endpoint!r}", remedy=remedy) from None
    read_secret(secret)
    return NodePlace(nodes, node, address, secret)


def shared_options(options: RunOptions) -> dict[str, str]:
    """Returns what must be the same on all nodes: all options but those of the node itself; of paths, which
    nodes may see in other places, only that they are given."""
    return {
        name: "PATH" if isinstance(value, Path) else repr(value)
        for name, value in asdict(options).items()
        if name not in _OWN_OPTIONS
    }


def _find_difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Returns the first option that differs and its values; "" if there is none."""
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            return f"--{name.replace('_', '-')} {found.get(name)}, not {expected.get(name)}"
    return ""


def find_interface(address: str) -> str:
    """Returns the name of the network interface with an IPv4 address. Raises UserError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address or (name == "lo" and address.startswith("127.")):
                    return name
    remedy = "set GLOO_SOCKET_IFNAME to the interface that the nodes reach each other over"
    raise UserError(f"no network interface has the address {address}", remedy=remedy)


@dataclass
class _Member:
    """A joined node: what its launcher has said about the present attempt. `copies`: where its launcher
    serves copies of checkpoints, if it keeps any."""

    channel: SignedChannel
    copies: Address | None = None
    codes: dict[int, int] = field(default_factory=dict[int, int])
    losses: list[Loss] = field(default_factory=list[Loss])
    ended_attempt: int = -1
    refusal: str = ""


class NodeServer:
    """What listens at the endpoint, on node 0: ranks use its store, launchers of other nodes join. A context
    manager that ends all connections."""

    def __init__(
        self, place: NodePlace, plan_hash: str, options: RunOptions, keeper: CopyKeeper | None = None
    ) -> None:
        self.place, self._hash, self._options = place, plan_hash, shared_options(options)
        self._keeper = keeper
        secret, self.table = read_secret(place.secret_file), KeyValueTable()
        self.members: dict[int, _Member] = {}
        try:
            self._listener = SignedListener(place.address, secret, self._serve)
        except OSError as error:
            where, remedy = "{}:{}".format(*place.address), "give an address of this machine and a free port"
            raise UserError(f"cannot listen: {error.strerror}", where, remedy) from None
        self.own_address = self._listener.address[0]

    def __enter__(self) -> NodeServer:
        self._listener.start()
        threading.Thread(target=self._ping, name="secc-nodes", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for member in list(self.members.values()):
            member.channel.close()

    def find_keepers(self, nodes: Iterable[int]) -> dict[int, Address]:
        """Returns where the launchers of node 0 and of these nodes serve copies of checkpoints, and tells
        the one of node 0."""
        if self._keeper is None:
            return {}
        secret = read_secret(self.place.secret_file)
        keepers = {0: self._keeper.listen(self.own_address, secret)}
        for node in nodes:
            member = self.members.get(node)
            if member is not None and member.copies is not None:
                keepers[node] = member.copies
        self._keeper.set_peers(0, keepers)
        return keepers

    def tell(self, node: int, message: Mapping[str, Any]) -> None:
        """Sends a message to a node, if it is there."""
        member = self.members.get(node)
        if member is not None:
            try:
                member.channel.send(message)
            except OSError:
                self._forget(node, member)

    def end_run(self, code: int) -> None:
        """Tells all nodes the exit code of the run, and waits until they have gone."""
        for node in list(self.members):
            self.tell(node, {"kind": "exit", "code": code})
        deadline = time.monotonic() + _KILL_S
        while self.members and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def wait_for_nodes(self, nodes: Sequence[int], requests: StopRequests) -> None:
        """Waits until these nodes have joined, or a request to stop. Raises UserError if they do not."""
        began, said = time.monotonic(), False
        while missing := [n for n in nodes if n not in self.members]:
            if requests.count:
                return
            if not said and time.monotonic() - began > 2:
                said = True
                sys.stderr.write(f"waiting for node {', '.join(map(str, missing))} to join\n")
            if time.monotonic() - began > _JOIN_S:
                remedy = "start the same command with its --node-rank on each node, with the same secret"
                raise UserError(f"node {missing[0]} did not join in {_JOIN_S:.0f} s", remedy=remedy)
            time.sleep(POLL_S)

    def _ping(self) -> None:
        while self._listener.is_open:
            for node in list(self.members):
                self.tell(node, {"kind": "ping"})
            time.sleep(_PING_S)

    def _serve(self, channel: SignedChannel) -> None:
        about = channel.receive(_LOST_S)
        if about["role"] == "rank":
            serve_rank(channel, self.table)
        else:
            self._serve_node(channel, about)

    def _serve_node(self, channel: SignedChannel, about: Mapping[str, Any]) -> None:
        node = int(about["node"])
        refusal = ""
        if not 0 < node < self.place.nodes:
            refusal = f"the run has nodes 0 to {self.place.nodes - 1}"
        elif about["plan"] != self._hash:
            refusal = "its plan is another one than node 0's"
        elif different := _find_difference(about["options"], self._options):
            refusal = f"its options are others than node 0's: {different}"
        channel.send({"kind": "welcome", "refusal": refusal})
        if refusal:
            return
        copies = about["copies"]
        member = _Member(channel, None if copies is None else (copies[0], copies[1]))
        before, self.members[node] = self.members.get(node), member
        if before is not None:
            before.channel.close()
        try:
            while True:
                message = channel.receive(_LOST_S)
                match message["kind"]:
                    case "codes":
                        member.codes = {int(rank): code for rank, code in message["codes"].items()}
                        member.losses = [Loss(tuple(r), cause) for r, cause in message["losses"]]
                    case "ended":
                        member.ended_attempt = message["attempt"]
                    case "refused":
                        member.refusal = message["text"]
                    case _:
                        pass  # pong
        finally:
            self._forget(node, member)

    def _forget(self, node: int, member: _Member) -> None:
        member.channel.close()
        if self.members.get(node) is member:
            del self.members[node]


class NodesRanks:
    """The ranks of an attempt on several nodes, seen from node 0. `ranks_of_node`: present ranks by node;
    `local`: those of node 0."""

    def __init__(
        self,
        server: NodeServer,
        local: LocalRanks | None,
        ranks_of_node: Mapping[int, range],
        message: Mapping[str, Any],
        lost_of_node: Mapping[int, Sequence[int]],
    ) -> None:
        self._server, self._local, self._attempt = server, local, message["attempt"]
        self._ranks_of_node = {node: ranks for node, ranks in ranks_of_node.items() if node and ranks}
        self.count = sum(map(len, ranks_of_node.values()))
        self._members = {node: server.members.get(node) for node in self._ranks_of_node}
        keepers = server.find_keepers(self._ranks_of_node)
        for node, member in self._members.items():
            if member is not None:
                member.codes, member.losses = {}, []
            ranks = self._ranks_of_node[node]
            place: dict[str, Any] = {"copies": [[n, *address] for n, address in keepers.items()]}
            place |= {"first": ranks.start, "count": len(ranks), "lost": list(lost_of_node[node])}
            server.tell(node, {**message, "kind": "start", **place})

    def __enter__(self) -> NodesRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> dict[int, int]:
        """Returns the exit codes of the ranks that have ended by themselves."""
        codes = self._local.poll() if self._local is not None else {}
        for member in self._members.values():
            codes |= member.codes if member is not None else {}
        return codes

    def find_losses(self) -> list[Loss]:
        """Returns the ranks of nodes that are gone, and what other nodes have lost."""
        found = self._local.find_losses() if self._local is not None else []
        for node, member in self._members.items():
            ranks = self._ranks_of_node[node]
            if member is None or self._server.members.get(node) is not member:
                text = f"{ranks.start}-{ranks[-1]}" if len(ranks) > 1 else str(ranks.start)
                found.append(Loss(tuple(ranks), f"node {node} with rank {text} is lost"))
            elif member.refusal:
                raise UserError(f"node {node}: {member.refusal}")
            else:
                found += member.losses
        return found

    def ask_to_finish(self) -> None:
        """Asks all ranks to finish their step, save and end."""
        if self._local is not None:
            self._local.ask_to_finish()
        for node in self._members:
            self._server.tell(node, {"kind": "finish"})

    def kill(self) -> None:
        """Ends all processes of all nodes, and waits for them where the node answers."""
        for node in self._members:
            self._server.tell(node, {"kind": "kill"})
        if self._local is not None:
            self._local.kill()
        deadline = time.monotonic() + _KILL_S
        for node, member in self._members.items():
            while (
                member is not None
                and self._server.members.get(node) is member
                and member.ended_attempt < self._attempt
                and time.monotonic() < deadline
            ):
                time.sleep(POLL_S)

    def name_process(self, rank: int) -> str:
        """Returns where a rank runs."""
        node = next((n for n, ranks in self._ranks_of_node.items() if rank in ranks), 0)
        if not node and self._local is not None:
            return self._local.name_process(rank)
        return f"node {node}"


def serve_node(
    directory: Path,
    arguments: Sequence[str],
    place: NodePlace,
    options: RunOptions,
    requests: StopRequests,
    find_devices: Callable[[int, Sequence[int]], str | None],
    keeper: CopyKeeper | None,
) -> int:
    """Runs the ranks of this node as node 0 says. Returns the exit code of the run; 1 if node 0 is gone.
    `keeper`: of copies of checkpoints."""
    plan_hash, secret = load_plan(directory).hash, read_secret(place.secret_file)
    began, said = time.monotonic(), False
    while time.monotonic() - began < _JOIN_S and not requests.count:
        try:
            channel = connect_to_peer(place.address, secret)
            copies = None if keeper is None else keeper.listen(channel.own_address(), secret)
            about = {"node": place.node, "plan": plan_hash, "options": shared_options(options)}
            channel.send({"role": "node", "copies": copies, **about})
            refusal = channel.receive(_LOST_S)["refusal"]
        except ForeignPeer as error:
            where, remedy = "{}:{}".format(*place.address), "give every node the same --rdzv-secret"
            raise UserError(f"node 0 refuses this node: {error}", where, remedy) from None
        except OSError:
            if not said:
                said = True
                sys.stderr.write("waiting for node 0 at {}:{}\n".format(*place.address))
            time.sleep(1.0)
            continue
        if refusal:
            raise UserError(f"node 0 refuses node {place.node}: {refusal}", str(directory))
        limit = options.hang_timeout
        code = _Node(channel, directory, arguments, place, limit, requests, find_devices, keeper).run()
        if code is not None:
            return code
        sys.stderr.write("node 0 does not answer; trying to join it again\n")
        began, said = time.monotonic(), True
    if requests.count:
        return 128 + requests.last
    sys.stderr.write(
        "error: node 0 does not answer\n  what to do: start its launcher again, then this one, with --resume"
        " auto; if its machine is gone, on another one with another --rdzv-endpoint on all nodes\n"
    )
    return 1


class _Node:
    """This node's ranks for as long as the connection to node 0 holds."""

    def __init__(
        self,
        channel: SignedChannel,
        directory: Path,
        arguments: Sequence[str],
        place: NodePlace,
        hang_timeout: float | None,
        requests: StopRequests,
        find_devices: Callable[[int, Sequence[int]], str | None],
        keeper: CopyKeeper | None,
    ) -> None:
        self._keeper = keeper
        self._channel, self._directory, self._arguments, self._place = channel, directory, arguments, place
        self._hang_timeout, self._requests, self._find_devices = hang_timeout, requests, find_devices
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ranks: LocalRanks | None = None
        self._attempt, self._exit_code, self._asked = -1, 0, requests.count

    def run(self) -> int | None:
        """Does what node 0 says; returns the exit code of the run, None if node 0 is gone."""
        threading.Thread(target=self._listen, name="secc-node-0", daemon=True).start()
        told: object = None
        try:
            while True:
                with suppress(queue.Empty):
                    message = self._messages.get(timeout=POLL_S)
                    if message is None:
                        return None
                    if message["kind"] == "exit":
                        return message["code"]
                    self._obey(message)
                if self._ranks is None:
                    continue
                codes = self._ranks.poll()
                losses = [(list(loss.ranks), loss.cause) for loss in self._ranks.find_losses()]
                if told != (self._attempt, codes, losses):
                    told = (self._attempt, codes, losses)
                    self._channel.send({"kind": "codes", "codes": codes, "losses": losses})
                if self._requests.count > self._asked:  # all ranks agree on it
                    self._asked = self._requests.count
                    self._ranks.ask_to_finish()
        except OSError:
            return None
        finally:
            if self._ranks is not None:
                self._ranks.kill()
            self._channel.close()

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive(_LOST_S)
                if message["kind"] == "ping":
                    self._channel.send({"kind": "pong"})
                else:
                    self._messages.put(message)
        except (OSError, ValueError):
            self._messages.put(None)

    def _obey(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "start":
                self._start(message)
            case "finish" if self._ranks is not None:
                self._ranks.ask_to_finish()
            case "kill":
                if self._ranks is not None:
                    self._ranks.kill()
                    self._ranks = None
                self._channel.send({"kind": "ended", "attempt": self._attempt})
            case _:
                pass

    def _start(self, message: Mapping[str, Any]) -> None:
        directory = self._directory.with_name(message["plan"])
        self._attempt = message["attempt"]
        if not (directory / "plan.json").exists():
            text = f"{directory}: not there; the plan directory must be shared by all nodes"
            self._channel.send({"kind": "refused", "text": text})
            return
        if self._keeper is not None:
            keepers = {node: (host, port) for node, host, port in message["copies"]}
            self._keeper.set_peers(self._place.node, keepers)
        devices = self._find_devices(message["count"] + len(message["lost"]), message["lost"])
        self._ranks = LocalRanks(
            directory,
            self._arguments,
            message["first"],
            message["count"],
            message["world_size"],
            self._place.rank_variables(self._channel.own_address(), message["run"]),
            self._attempt,
            devices,
            self._hang_timeout,
        )
