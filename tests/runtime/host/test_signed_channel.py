"""A connection is refused without the secret, and a message that was changed on its way is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from secc.runtime.errors import UserError
from secc.runtime.host.signed_channel import (
    ForeignPeer,
    SignedChannel,
    accept_peer,
    connect_to_peer,
    read_secret,
)

SECRET = b"s" * 32


def serve(secret: bytes, then: Callable[[SignedChannel], None]) -> tuple[tuple[str, int], threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with listener, connection, suppress(OSError):
            then(accept_peer(connection, secret))

    thread = threading.Thread(target=run)
    thread.start()
    return listener.getsockname(), thread


def test_messages_travel_both_ways() -> None:
    address, thread = serve(SECRET, lambda channel: channel.send([channel.receive(5), "world"]))
    channel = connect_to_peer(address, SECRET)
    channel.send({"hello": 1})
    assert channel.receive(5) == [{"hello": 1}, "world"] and channel.own_address() == "127.0.0.1"
    channel.close()
    thread.join()


def test_other_secrets_are_refused() -> None:
    joined: list[SignedChannel] = []
    address, thread = serve(SECRET, joined.append)
    with pytest.raises(ForeignPeer, match="does not accept this secret"):
        connect_to_peer(address, b"another secret, also of 32 bytes")
    thread.join()
    assert not joined


def test_a_server_without_the_secret_is_refused() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.sendall(b"n" * 32)
            connection.recv(64)
            connection.sendall(b"p" * 32)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ForeignPeer, match="does not know the secret"):
        connect_to_peer(listener.getsockname(), SECRET)
    thread.join()


@pytest.mark.parametrize("change", ["flip", "repeat"])
def test_changed_and_repeated_messages_are_refused(change: str) -> None:
    here, there = socket.socketpair()
    sender, receiver = SignedChannel(here, b"k" * 32, True), SignedChannel(there, b"k" * 32, False)
    tap, tap_end = socket.socketpair()
    sender._connection = tap
    sender.send({"steps": 100})
    message = tap_end.recv(1000)
    if change == "flip":
        here.sendall(message.replace(b"100", b"900"))
    else:
        here.sendall(message * 2)
        assert receiver.receive(5) == {"steps": 100}
    with pytest.raises(ForeignPeer, match="not signed"):
        receiver.receive(5)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0, "cannot read the secret"),
        (b"short", 0o600, "at least 16 bytes"),
        (SECRET, 0o644, "can read"),
    ],
)
def test_bad_secrets_are_refused(tmp_path: Path, content: bytes | None, mode: int, message: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(UserError, match=message):
        read_secret(file)
