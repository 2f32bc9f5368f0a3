"""The websocket link: binary frames over one connection, with or without TLS.

The library opens a websocket; frames are read and written here (RFC 6455, section 5): a header, and then buffers as
they are. A message is received into memory of its own size, by the thread that wants it.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from shoal.core.errors import DeadlineExceeded, Refused, ServiceLost, ShoalError, WireError
from shoal.core.wire import Buffer
from shoal.transport import LIMIT, Handle, Report, strangers, trust
from shoal.transport.strangers import CROWDED, DISPLACED, THREADLESS, Lobby, Place
from shoal.transport.trust import OPENING, Terms, joined, line, split

T = TypeVar("T")
SLICE = 256 << 10  # bytes that are written before a reader has its turn
SHORT = 32 << 10  # bytes below which buffers are sent together
LOOK = 1.0  # seconds after which a thread checks whether its socket is still open
PARTING = 1.0  # seconds in which the other side may read why it was refused
AGAIN = 0.05  # seconds before the next attempt where accepting a connection failed
BINARY, TEXT, CLOSE, PING, PONG = 0x2, 0x1, 0x8, 0x9, 0xA
FINAL, RESERVED, MASKED = 0x80, 0x70, 0x80
UNWANTED = 1008  # the status of a connection that is refused (RFC 6455, section 7.4.1)
TLS_RECORD = b"\x16"  # the first byte of TLS (RFC 8446, section 5.1)
PLAIN, SECURE = "TLS is on at this machine, and the other side sends plain text", "TLS is off at this machine"
QUIET = logging.getLogger("shoal.link")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False  # connections that come and go are not worth a line


def library() -> Any:
    """The websockets library."""
    try:
        import websockets.client
        import websockets.server
        import websockets.uri
    except ImportError:
        raise ShoalError(trust.MISSING) from None
    return websockets


class WebsocketWire:
    """One connection that carries whole messages; one thread reads while others write, also under TLS."""

    resumable = True

    def __init__(self, connection: socket.socket, joins: bool, binding: str = "") -> None:
        """Take over a connection, as the side that joins or that listens."""
        self.connection, self.binding, self._joins = connection, binding, joins
        self.peer = "?"
        self.place: Place | None = None
        self._turn = threading.Lock()  # OpenSSL allows one thread at a time; they wait outside of it
        self._sending = threading.Lock()  # frames leave one after the other
        self._allowed: float = strangers.LIMIT  # bytes that the other side may still send
        self._buffer, self._start, self._end = memoryview(bytearray(64 << 10)), 0, 0  # read, and not looked at yet
        self._opcode, self._final, self._key = 0, True, b""  # of the frame that is being read
        self._payload: memoryview | None = None
        self._missing = memoryview(b"")  # the part of it that has not come
        self._parts: list[memoryview] | None = None  # of a message in several frames
        connection.setblocking(False)
        with suppress(OSError):  # it may be gone again
            self.peer = "{}:{}".format(*connection.getpeername()[:2])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def attempt(self, action: Callable[[], T], events: int, limit: float | None, wait: bool = False) -> T:
        """Do something with the socket once it is ready, until a time; without `wait`, try it at once."""
        while True:
            if wait:
                self._wait(events, limit)
            wait = True
            with self._turn:
                try:
                    return action()
                except ssl.SSLWantReadError:
                    events = select.POLLIN
                except ssl.SSLWantWriteError:
                    events = select.POLLOUT
                except BlockingIOError:
                    pass

    def _wait(self, events: int, limit: float | None) -> None:
        if (left := LOOK if limit is None else limit - time.monotonic()) <= 0:
            raise TimeoutError("nothing came in time")
        poll = select.poll()
        try:
            poll.register(self.connection, events)
        except ValueError:
            raise OSError("it is closed") from None
        poll.poll(1000 * min(left, LOOK))

    def read(self, room: memoryview, limit: float | None, wait: bool = False) -> int:
        """Wait until a time for some bytes, and return how many have come; 0: the other side has ended."""
        if wait and isinstance(self.connection, ssl.SSLSocket):
            with self._turn:
                wait = not self.connection.pending()
        count = self.attempt(partial(self.connection.recv_into, room), select.POLLIN, limit, wait)
        self._allow(count)
        return count

    def write(self, *buffers: Buffer) -> None:
        """Send buffers one after the other."""
        for data in _gather(buffers):
            view = memoryview(data)
            while view:
                view = view[self.attempt(partial(self.connection.send, view[:SLICE]), select.POLLOUT, None) :]

    def secure(self, context: ssl.SSLContext, limit: float) -> bytes:
        """Add TLS, as the side that listens, until a time; return the certificate that the other side showed."""
        with self._turn:
            secured = context.wrap_socket(self.connection, server_side=True, do_handshake_on_connect=False)
            self.connection = secured
        self.attempt(secured.do_handshake, select.POLLIN, limit)
        return secured.getpeercert(binary_form=True) or b""

    def trust(self) -> None:
        """Lift the limits for strangers."""
        self._allowed = float("inf")
        if self.place is not None:
            self.place.leave()

    def _allow(self, count: int) -> None:
        """A stranger may not send many bytes."""
        self._allowed -= count
        if self._allowed < 0:
            raise WireError(f"more than {strangers.LIMIT} B before the other side has identified itself")

    def send(self, *buffers: Buffer) -> None:
        """Send buffers as one message."""
        self.send_frame(BINARY, *buffers)

    def send_frame(self, opcode: int, *buffers: Buffer) -> None:
        """Send a frame of any kind."""
        size = sum(map(len, buffers))
        # The key by which a joiner has to mask what it sends is zero, which changes nothing and needs no copy: masks
        # protect proxies from scripts that run in a browser, and there are none here.
        mask, key = (MASKED, bytes(4)) if self._joins else (0, b"")
        if size < 126:
            header = struct.pack(">BB", FINAL | opcode, mask | size)
        elif size < 1 << 16:
            header = struct.pack(">BBH", FINAL | opcode, mask | 126, size)
        else:
            header = struct.pack(">BBQ", FINAL | opcode, mask | 127, size)
        try:
            with self._sending:
                self.write(header + key, *buffers)
        except OSError as error:
            raise ServiceLost(f"the link is broken: {error}") from error

    def receive(self, seconds: float | None = None) -> Buffer:
        """Wait for a message."""
        limit = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                if self._payload is None:
                    self._begin(limit)
                while len(self._missing):
                    self._missing = self._missing[self._read(self._missing, limit) :]
                if (message := self._finish()) is not None:
                    return message
        except TimeoutError as error:
            raise DeadlineExceeded("nothing came in time") from error
        except OSError as error:
            raise ServiceLost(f"the link is broken: {error}") from error

    def _read(self, room: memoryview, limit: float | None, wait: bool = False) -> int:
        if not (count := self.read(room, limit, wait)):
            raise ServiceLost("the link was closed")
        return count

    def _fill(self, count: int, limit: float | None) -> None:
        """Have a number of bytes in the buffer."""
        if self._start == self._end or self._start + count > len(self._buffer):
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        while self._end - self._start < count:
            self._end += self._read(self._buffer[self._end :], limit, wait=True)  # it has rarely come already

    def _begin(self, limit: float | None) -> None:
        """Read the header of a frame, and make room for its payload."""
        self._fill(2, limit)
        first, second = self._buffer[self._start : self._start + 2]
        opcode, final, masked, size = first & 0xF, bool(first & FINAL), bool(second & MASKED), second & 0x7F
        if opcode == TEXT:
            raise WireError("text came where frames are binary")
        if first & RESERVED or masked == self._joins or (opcode >= CLOSE and (size > 125 or not final)):
            raise WireError("not a websocket frame")
        extra = 2 if size == 126 else 8 if size == 127 else 0
        self._fill(2 + extra + 4 * masked, limit)
        begin = self._start + 2 + extra
        size = int.from_bytes(self._buffer[begin - extra : begin]) if extra else size
        if size + sum(map(len, self._parts or ())) > LIMIT:
            raise WireError(f"a message of more than {LIMIT} B")
        self._opcode, self._final, self._key = opcode, final, bytes(self._buffer[begin : begin + 4 * masked])
        self._start = begin + 4 * masked
        there = min(size, self._end - self._start)
        if size - there > self._allowed:
            self._allow(size)
        room: Any = bytearray(size) if size < SHORT else np.empty(size, np.uint8)  # which is not cleared first
        self._payload = memoryview(room)
        self._payload[:there] = self._buffer[self._start : self._start + there]
        self._missing = self._payload[there:]
        self._start += there

    def _finish(self) -> Buffer | None:
        """Take the frame that was read; return the message that it completes."""
        payload, self._payload = self._payload, None
        assert payload is not None
        if any(self._key):
            _unmask(payload, self._key)
        if self._opcode == CLOSE:
            reason = line(bytes(payload[2:]).decode(errors="replace"))
            raise ServiceLost(f"the link was closed{': ' if reason else ''}{reason}")
        if self._opcode == PING:
            self.send_frame(PONG, payload)
        if self._opcode in (PING, PONG):
            return None
        if self._opcode not in (0, BINARY) or (self._opcode == BINARY) != (self._parts is None):
            raise WireError("not a websocket frame")
        if self._final and self._parts is None:
            return payload
        parts, self._parts = [*(self._parts or ()), payload], None
        if self._final:
            return bytearray().join(parts)
        self._parts = parts
        return None

    def refuse(self, reason: str) -> None:
        """Close the connection, and say why."""
        with suppress(ServiceLost):
            self.send_frame(CLOSE, struct.pack(">H", UNWANTED), reason.encode()[:120].decode(errors="ignore").encode())
        self.part()

    def part(self) -> None:
        """Close it after the other side has read what was sent; closing while it still sends would discard that."""
        limit = time.monotonic() + PARTING
        with suppress(OSError):  # below TLS, as in `cut`
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
            while self.attempt(partial(socket.socket.recv, self.connection, SLICE), select.POLLIN, limit):
                pass
        self.close()

    def cut(self) -> None:
        """End it under the thread that reads it, which closes it."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # below TLS, which may be in use

    def close(self) -> None:
        """End the connection at once, also under threads that wait for it."""
        self.cut()
        with self._turn:
            self.connection.close()


def _gather(buffers: tuple[Buffer, ...]) -> Iterable[Buffer]:
    """Short buffers in a row as one, long ones as they are."""
    if len(buffers) == 2 and len(buffers[1]) < SHORT:  # most messages
        return (b"".join(buffers),)
    rows = itertools.groupby(buffers, lambda buffer: len(buffer) < SHORT)
    return itertools.chain.from_iterable((b"".join(row),) if short else row for short, row in rows)


def _unmask(payload: memoryview, key: bytes) -> None:
    """Undo the masking of a payload, in place."""
    data = np.asarray(payload)
    whole = len(data) & ~3
    data[:whole].view(np.uint32)[...] ^= np.frombuffer(key, np.uint32)
    data[whole:] ^= np.frombuffer(key, np.uint8)[: len(data) - whole]


def _exchange(wire: WebsocketWire, protocol: Any, limit: float) -> Any:
    """Send what the library has to say, and wait for the request or the response that answers it; None: it failed."""
    room = memoryview(bytearray(8 << 10))
    with suppress(OSError):  # then what the other side said is still to be read
        wire.write(*protocol.data_to_send())
    while protocol.handshake_exc is None:
        if count := wire.read(room, limit):
            protocol.receive_data(bytes(room[:count]))
        else:
            protocol.receive_eof()
        for event in protocol.events_received():
            return event
    return None


def dial(address: str, terms: Terms) -> WebsocketWire:
    """Connect to a listener."""
    connection: socket.socket | None = None
    try:
        binding = ""
        if terms.secure:
            connection = secure = trust.connect(address, terms)
            binding = trust.fingerprint(trust.shown(secure))
        else:
            connection = socket.create_connection(split(address), OPENING)
        wire = WebsocketWire(connection, True, binding)
        uri = library().uri.parse_uri(f"ws://{joined(*split(address))}")
        protocol = library().client.ClientProtocol(uri, logger=QUIET)
        protocol.send_request(protocol.connect())
        _exchange(wire, protocol, time.monotonic() + OPENING)
        if (failure := protocol.handshake_exc) is not None:
            response = getattr(failure, "response", None)
            if response is not None:
                raise ServiceLost(f"refused: {line((response.body or b'').decode(errors='replace'))}")
            raise ServiceLost(f"does not answer: {line(str(failure))}")
        return wire
    except (ShoalError, OSError) as error:
        if connection is not None:
            connection.close()
        raise _failure(address, terms, error) from error


def _failure(address: str, terms: Terms, error: Exception) -> ShoalError:
    """What to say of a connection that could not be established."""
    if terms.secure and isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        # What it said is lost where this side was still writing.
        return ServiceLost(f"{address} ended the connection, as for a certificate it refuses: its log says why")
    if isinstance(error, ssl.SSLError):  # the first answer shows whether this side's certificate was accepted
        return Refused(f"{address}: {trust.explain(error)}")
    if isinstance(error, Refused):
        return error
    if isinstance(error, ShoalError):
        return type(error)(f"{address} {error}")
    return ServiceLost(f"{address} does not answer: {line(str(error)) or type(error).__name__}")


class WebsocketListener:
    """Accepts connections, and hands each to a handler in a thread of its own."""

    def __init__(self, address: str, terms: Terms, certificates: bool, handle: Handle, refused: Report) -> None:
        """Begin to listen."""
        library()
        self._terms, self._handle, self._refused, self._lobby = terms, handle, refused, Lobby()
        self._trust = terms.certificates()
        self._context = trust.server_context(self._trust, certificates) if self._trust else None
        self._binding = trust.fingerprint(self._trust.certificate) if self._trust else ""
        host, port = split(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ShoalError(f"cannot listen on {address}: {error}") from error
        self._socket.settimeout(0.2)  # on some systems closing it wakes nobody
        self.address = joined(*self._socket.getsockname()[:2])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, (host, port, *_) = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # such as a connection that ended already, or too many open files
                self._closed.wait(AGAIN)
                continue
            wire = WebsocketWire(connection, False, self._binding)
            wire.peer, wire.place = f"{host}:{port}", self._lobby.enter(host, wire.cut)
            if wire.place is None:
                self._refused(wire.peer, CROWDED)
                wire.close()
                continue
            try:
                threading.Thread(target=self._take, args=(wire, wire.place), name="connection", daemon=True).start()
            except RuntimeError:
                self._refused(wire.peer, THREADLESS)
                wire.close()
                wire.place.leave()
                self._closed.wait(AGAIN)

    def _take(self, wire: WebsocketWire, place: Place) -> None:
        """Open a websocket on a new connection, and hand it over; whatever fails is reported."""
        opened = False
        try:
            try:
                opened = self._open(wire, time.monotonic() + OPENING)
            except (OSError, ShoalError) as error:
                reason = "it did not say in time what it wants" if isinstance(error, TimeoutError) else ""
                self._refused(wire.peer, DISPLACED if place.displaced else reason or trust.explain(error))
            if opened:
                self._handle(wire)
            else:
                wire.part()
        finally:
            place.leave()

    def _open(self, wire: WebsocketWire, limit: float) -> bool:
        """Add TLS where it is on, and open a websocket; False: the other side went away without a word."""
        first = wire.attempt(partial(wire.connection.recv, 1, socket.MSG_PEEK), select.POLLIN, limit)
        if first and (first == TLS_RECORD) != (self._context is not None):
            _say(wire, PLAIN if self._context else SECURE)
            raise Refused(f"the other side {'does not speak' if self._context else 'speaks'} TLS")
        if first and self._context:
            self._check(wire, wire.secure(self._context, limit))
        protocol = library().server.ServerProtocol(logger=QUIET)
        if (request := _exchange(wire, protocol, limit)) is not None:
            protocol.send_response(protocol.accept(request))
        wire.write(*protocol.data_to_send())
        error = protocol.handshake_exc
        if error is not None and not isinstance(error.__cause__, EOFError):
            raise Refused(f"no websocket: {line(str(error))}")
        return error is None

    def _check(self, wire: WebsocketWire, certificate: bytes) -> None:
        """Refuse a certificate that was revoked, or is for another role; where none is required, none may be shown."""
        from shoal.transport.certificates import check_peer

        try:
            if certificate and self._trust:
                check_peer(certificate, self._trust, self._terms.other)
        except ShoalError as error:
            _say(wire, str(error))
            raise

    def close(self) -> None:
        """Accept no more connections; those that stand are their handlers' to close."""
        self._closed.set()
        self._thread.join()
        self._socket.close()


listen = WebsocketListener


def _say(wire: WebsocketWire, reason: str) -> None:
    """Tell the one who asks for a websocket why there will be none."""
    wire.write(f"HTTP/1.1 400 Refused\r\nContent-Length: {len(reason)}\r\n\r\n{reason}".encode())
