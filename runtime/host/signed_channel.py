"""Connections between machines of one run, on which both ends have shown that they know a secret.

Both ends prove it by HMAC-SHA256 over random numbers of each other (a challenge and response, RFC 2104), and
each message carries an HMAC with a key of this connection, its direction and its number. So a stranger can
neither connect, nor change, repeat or inject messages. Messages are JSON or bytes and are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError

HANDSHAKE_S = 5.0
_NONCE_BYTES, _MAC_BYTES, _LEAST_SECRET_BYTES = 32, 32, 16
_MOST_BYTES = 1 << 28  # of a message
_MOST_HANDSHAKES = 64  # at a time
_ACCEPT_PAUSE_S = 0.1  # after a connection that could not be accepted


class ForeignPeer(ConnectionError):
    """The other end does not know the secret."""


def read_secret(path: Path) -> bytes:
    """Returns the secret in a file. Raises UserError if it is missing, short, or can be read by others."""
    remedy = f"make one: head -c 32 /dev/urandom | base64 > {path}; chmod 600 {path}"
    try:
        content, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise UserError(f"cannot read the secret: {error.strerror}", str(path), remedy) from None
    if len(content) < _LEAST_SECRET_BYTES:
        message = f"expected a secret of at least {_LEAST_SECRET_BYTES} bytes, got {len(content)}"
        raise UserError(message, str(path), remedy)
    if mode & 0o077:
        raise UserError("other users can read the secret", str(path), f"chmod 600 {path}")
    return content


class SignedChannel:
    """One end of a connection. Several threads may send; one receives."""

    def __init__(self, connection: socket.socket, key: bytes, is_server: bool) -> None:
        self._connection, self._key = connection, key
        self._sends, self._receives = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent, self._received = 0, 0
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends a JSON value. Raises OSError if the connection is gone."""
        self.send_bytes(json.dumps(message).encode())

    def receive(self, timeout: float | None) -> Any:
        """Returns the next message, as `receive_bytes` does, which must be JSON (else raises ValueError)."""
        return json.loads(self.receive_bytes(timeout))

    def send_bytes(self, content: bytes) -> None:
        """Sends a message of up to `_MOST_BYTES`. Raises OSError if the connection is gone."""
        with self._lock:
            mac = self._sign(self._sends, self._sent, content)
            self._sent += 1
            self._connection.sendall(struct.pack(">Q", len(content)) + content + mac)

    def receive_bytes(self, timeout: float | None) -> bytes:
        """Returns the next message. Raises OSError if there is none within `timeout` seconds, if the
        connection is gone, or if the message is not the other end's."""
        self._connection.settimeout(timeout)
        (length,) = struct.unpack(">Q", read_exactly(self._connection, 8))
        if length > _MOST_BYTES:
            raise ForeignPeer("a message is too long")
        content, mac = read_exactly(self._connection, length), read_exactly(self._connection, _MAC_BYTES)
        if not hmac.compare_digest(mac, self._sign(self._receives, self._received, content)):
            raise ForeignPeer("a message is not signed")
        self._received += 1
        return content

    def own_address(self) -> str:
        """Returns this machine's address on the connection."""
        return self._connection.getsockname()[0]

    def close(self) -> None:
        """Ends the connection, also for a thread that waits in it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _sign(self, direction: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, direction + struct.pack(">Q", number) + content, hashlib.sha256)


class SignedListener:
    """Listens at one address of this machine, and serves each process that connects and knows the secret in
    a thread of its own, which ends with `serve`. Raises OSError if it cannot listen there."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, serve: Callable[[SignedChannel], None]
    ) -> None:
        self._secret, self._serve = secret, serve
        self._handshakes = threading.Semaphore(_MOST_HANDSHAKES)
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(found[0], found[1])
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(found[4])
            self._socket.listen(1024)
        except BaseException:
            self._socket.close()
            raise
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._is_open = True

    def start(self) -> None:
        """Begins to accept connections."""
        threading.Thread(target=self._accept, name="secc-listener", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether it still listens."""
        return self._is_open

    def close(self) -> None:
        """Accepts no more connections."""
        listener, self._is_open = self._socket, False
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self.is_open:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # this process has too many descriptors open, say
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve_connection(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, KeyError):
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                channel = accept_peer(connection, self._secret)
            finally:
                self._handshakes.release()
            self._serve(channel)


def accept_peer(connection: socket.socket, secret: bytes) -> SignedChannel:
    """Asks a process that has connected for the secret. Raises OSError if it does not know it."""
    connection.settimeout(HANDSHAKE_S)
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own)
    answer = read_exactly(connection, _NONCE_BYTES + _MAC_BYTES)
    nonces = own + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _prove(secret, b"client", nonces)):
        raise ForeignPeer("the other process does not know the secret")
    connection.sendall(_prove(secret, b"server", nonces))
    return SignedChannel(connection, _prove(secret, b"session", nonces), is_server=True)


def connect_to_peer(address: tuple[str, int], secret: bytes) -> SignedChannel:
    """Connects to a process that listens at an address. Raises OSError if there is none, and ForeignPeer if
    the two have different secrets."""
    connection = socket.create_connection(address, HANDSHAKE_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own, other = secrets.token_bytes(_NONCE_BYTES), read_exactly(connection, _NONCE_BYTES)
        connection.sendall(own + _prove(secret, b"client", other + own))
        try:
            proof = read_exactly(connection, _MAC_BYTES)
        except OSError:
            raise ForeignPeer("it does not accept this secret") from None
        if not hmac.compare_digest(proof, _prove(secret, b"server", other + own)):
            raise ForeignPeer("it does not know the secret")
        return SignedChannel(connection, _prove(secret, b"session", other + own), is_server=False)
    except BaseException:
        connection.close()
        raise


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Reads bytes of a connection. Raises OSError if it ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection has ended")
        parts += part
    return bytes(parts)


def _prove(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, purpose + nonces, hashlib.sha256)
