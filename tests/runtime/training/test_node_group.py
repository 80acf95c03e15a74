"""Nodes of a run meet at one address, and only with the secret."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from secc.runtime.errors import UserError
from secc.runtime.host.signed_channel import ForeignPeer, connect_to_peer, read_secret
from secc.runtime.training import node_group, supervisor
from secc.runtime.training.node_group import (
    NodePlace,
    NodeServer,
    NodesRanks,
    find_interface,
    make_node_place,
    serve_node,
    shared_options,
)
from secc.runtime.training.node_store import NodeStore
from secc.runtime.training.options import RunOptions, parse_options
from secc.runtime.training.rank_group import StopRequests
from tests.runtime.captioner_plans import UNEVEN, make_plan, write_plan

SECOND = timedelta(seconds=1)
OPTIONS = parse_options(["--nnodes", "2", "--save", "saved", "--save-every", "5"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NodeServer]:
    secret = tmp_path / "secret"
    secret.write_text("a secret that nobody guesses")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    with NodeServer(NodePlace(2, 0, ("127.0.0.2", port), secret), "a plan", OPTIONS) as made:
        yield made


def open_store(server: NodeServer, secret: bytes | None = None) -> NodeStore:
    secret = secret or read_secret(server.place.secret_file)
    return NodeStore(server.place.address, secret, "run/0/", 10 * SECOND)


def test_ranks_meet_in_the_store(server: NodeServer) -> None:
    first, second = open_store(server), open_store(server).clone()
    threading.Timer(0.2, lambda: first.set("key", "value")).start()
    assert not second.check(["key"]) and second.get("key") == b"value"
    assert [first.add("count", 2), second.add("count", 3), int(first.get("count"))] == [2, 5, 5]
    second.wait(["key", "count"], SECOND)
    assert second.delete_key("key") and not first.check(["key"]) and first.num_keys() == 1
    with pytest.raises(RuntimeError, match="wait timeout after 0 s"):
        first.wait(["missing"], timedelta(milliseconds=10))
    server.table.clear()
    assert not second.check(["count"])


def test_a_group_of_gloo_meets_in_the_store(server: NodeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=open_store(server), rank=0, world_size=1)
    found: list[object] = [None]
    dist.all_gather_object(found, "here")
    dist.destroy_process_group()
    assert found == ["here"] and server.table._values


def test_strangers_cannot_join_read_or_write(server: NodeServer) -> None:
    open_store(server).set("weights", "mine")
    before = dict(server.table._values)
    with pytest.raises(ForeignPeer):
        connect_to_peer(server.place.address, b"a secret that is another one")
    with pytest.raises(RuntimeError, match="does not accept this secret"):
        open_store(server, b"a secret that is another one").set("weights", "theirs")
    host, port = server.place.address
    with pytest.raises(RuntimeError):  # torch's own client
        store = dist.TCPStore(host, port, is_master=False, timeout=SECOND, wait_for_workers=False)
        store.set("weights", "theirs")
    for garbage in (b"", b"\0" * 500, b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(garbage)
    assert server.table._values == before and not server.members
    assert open_store(server).get("weights") == b"mine"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine, which no other test uses
        socket.create_connection(("127.0.0.3", port), 1)


def test_nodes_join_are_refused_and_get_lost(server: NodeServer) -> None:
    secret, address = read_secret(server.place.secret_file), server.place.address

    def join(node: int, plan: str, options: RunOptions = OPTIONS) -> tuple[object, str]:
        channel = connect_to_peer(address, secret)
        about = {"role": "node", "node": node, "plan": plan, "copies": None}
        channel.send(about | {"options": shared_options(options)})
        return channel, channel.receive(5)["refusal"]

    assert "nodes 0 to 1" in join(2, "a plan")[1] and "another one than node 0's" in join(1, "other")[1]
    for changed, text in (
        (replace(OPTIONS, save_every=7), "--save-every 7, not 5"),
        (replace(OPTIONS, save=None), "--save None, not PATH"),
    ):
        assert f"its options are others than node 0's: {text}" == join(1, "a plan", changed)[1]
    elsewhere = replace(OPTIONS, save=Path("elsewhere"), node_rank=1, rdzv_endpoint="host:1")
    assert not join(1, "a plan", elsewhere)[1]
    channel, refusal = join(1, "a plan")
    assert not refusal
    with StopRequests() as requests:
        server.wait_for_nodes([1], requests)
    message = {"plan": "plan", "world_size": 4, "attempt": 0, "run": "r"}
    ranks = NodesRanks(server, None, {0: range(0), 1: range(2)}, message, {1: []})
    channel.send({"kind": "codes", "codes": {0: -9}, "losses": [([1], "rank 1 is stopped")]})  # type: ignore
    while not ranks.poll():
        time.sleep(0.01)
    assert ranks.poll() == {0: -9} and ranks.find_losses()[0].cause == "rank 1 is stopped"
    channel.close()  # type: ignore
    while 1 in server.members:
        time.sleep(0.01)
    assert ranks.find_losses()[0].ranks == (0, 1) and "node 1 with rank 0-1" in ranks.find_losses()[0].cause
    ranks.kill()


def test_waiting_for_nodes_ends(
    server: NodeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_group, "_JOIN_S", 0.3)
    with StopRequests() as requests:
        with pytest.raises(UserError, match="node 1 did not join in 0 s") as error:
            server.wait_for_nodes([1], requests)
        assert "start the same command with its --node-rank" in error.value.remedy
        with socket.create_server(("127.0.0.2", 0)) as free:
            port = free.getsockname()[1]
        write_plan(tmp_path / "plan", UNEVEN)
        for host in ("127.0.0.2", "a-name-that-nobody-has.invalid"):
            place = replace(server.place, node=1, address=(host, port))
            arguments = (tmp_path / "plan", [], place, OPTIONS, requests, lambda *_: None, None)
            assert serve_node(*arguments) == 1
            messages = capsys.readouterr().err
            assert f"waiting for node 0 at {host}:{port}\n" in messages
            assert "error: node 0 does not answer\n  what to do: start its launcher again" in messages
            assert "another --rdzv-endpoint" in messages


def test_options_of_nodes_are_checked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 20)
    secret.chmod(0o600)
    for node, endpoint, file, message in (
        (None, "a:1", secret, "--nnodes 2 needs --node-rank"),
        (0, None, secret, "needs --rdzv-endpoint"),
        (0, "a:1", None, "needs --rdzv-secret"),
        (2, "a:1", secret, "must be from 0 to 1, got 2"),
        (0, "a", secret, "expected HOST:PORT, got 'a'"),
    ):
        with pytest.raises(UserError, match=message):
            make_node_place(2, node, endpoint, file)
    with pytest.raises(UserError, match="--emulate runs on one machine"):
        parse_options(["--nnodes", "2", "--emulate", "table.json"])
    assert find_interface("127.0.0.2") == "lo"
    with pytest.raises(UserError, match=r"no network interface has the address 203\.0\.113\.7"):
        find_interface("203.0.113.7")


def test_ranks_are_shared_by_the_nodes_of_the_plan() -> None:
    plan = replace(make_plan(UNEVEN), world_size=11, cluster={"nodes": 2, "per_node": 8})
    assert supervisor._ranks_of_nodes(plan, 2, "plan") == [range(8), range(8, 11)]
    assert supervisor._ranks_of_nodes(replace(plan, cluster={}), 11, "plan")[10] == range(10, 11)
    for nodes, cluster in ((3, plan.cluster), (2, {}), (12, {})):
        with pytest.raises(UserError, match=f"the plan's 11 ranks do not fill {nodes} nodes"):
            supervisor._ranks_of_nodes(replace(plan, cluster=cluster), nodes, "plan")
