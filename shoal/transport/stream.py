"""A socket that one thread reads while others write, also under TLS."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress

from shoal.core.wire import Buffer

SLICE = 256 << 10  # bytes that are written before a reader has its turn
LOOK = 1.0  # seconds after which a thread looks whether its socket is still open
LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stream:
    """Bytes in both directions; waiting is done outside the lock, since OpenSSL bears one thread at a time only."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection, whose TLS handshake is done."""
        self.connection = connection
        self._turn = threading.Lock()
        self.peer = "?"
        connection.setblocking(False)
        with suppress(OSError):  # it may be gone again
            self.peer = "{}:{}".format(*connection.getpeername()[:2])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, size: int, seconds: float | None = None) -> bytes:
        """Wait for up to so many bytes; none at all: the other side has ended."""
        limit = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._turn:
                try:
                    return self.connection.recv(size)
                except LATER as error:
                    events = select.POLLOUT if isinstance(error, ssl.SSLWantWriteError) else select.POLLIN
            self._wait(events, limit)

    def peek(self, limit: float) -> bytes:
        """Wait until a time for the first byte, and leave it there; none: the other side has ended."""
        while True:
            try:
                return self.connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                self._wait(select.POLLIN, limit)

    def secure(self, context: ssl.SSLContext, limit: float) -> None:
        """Put TLS on it, as the side that listens, until a time."""
        with self._turn:
            self.connection = context.wrap_socket(self.connection, server_side=True, do_handshake_on_connect=False)
            secured: ssl.SSLSocket = self.connection
        while True:
            try:
                secured.do_handshake()
                return
            except LATER as error:
                self._wait(select.POLLOUT if isinstance(error, ssl.SSLWantWriteError) else select.POLLIN, limit)

    def write(self, data: Buffer) -> None:
        """Send all of it."""
        view = memoryview(data)
        while view:
            with self._turn:
                try:
                    view = view[self.connection.send(view[:SLICE]) :]
                    continue
                except LATER as error:
                    events = select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT
            self._wait(events, None)

    def _wait(self, events: int, limit: float | None) -> None:
        left = LOOK if limit is None else limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("nothing came in time")
        poll = select.poll()
        try:
            poll.register(self.connection, events)
        except ValueError:
            raise OSError("it is closed") from None
        poll.poll(1000 * min(left, LOOK))

    def part(self, seconds: float) -> None:
        """Close it, but let the other side read first what it was told: what it still sends would cut it off."""
        limit = time.monotonic() + seconds
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_WR)  # past TLS, as below
            self._wait(select.POLLIN, limit)
            while socket.socket.recv(self.connection, SLICE):
                self._wait(select.POLLIN, limit)
        self.close()

    def cut(self) -> None:
        """End it under the thread that reads it, which closes it."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # past TLS, which may be in use

    def close(self) -> None:
        """Cut it at once, also under threads that wait for it."""
        self.cut()
        with self._turn:
            self.connection.close()
