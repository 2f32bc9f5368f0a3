"""The websocket link: binary frames over one connection, with or without TLS.

The library speaks the protocol, and the sockets are ours: a thread waits for the other side on the socket itself, and
what it reads wakes nobody in between.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.core.errors import DeadlineExceeded, Refused, ServiceLost, ShoalError, WireError
from shoal.core.wire import Buffer
from shoal.transport import tls
from shoal.transport.certificates import check_peer, cluster_extra
from shoal.transport.pieces import GREATEST, PIECE, STRANGER
from shoal.transport.strangers import CROWDED, PUT_OUT, THREADLESS, Place, Room
from shoal.transport.stream import Stream
from shoal.transport.terms import Terms, line, split
from shoal.transport.tls import OPENING

PARTING = 1.0  # seconds in which the other side may read why it was refused
READING = 256 << 10  # bytes that are taken in at once
RECORD = b"\x16"  # the first byte of TLS (RFC 8446, section 5.1)
PLAIN, SECURE = "TLS is on at this machine, and the other side sends plain text", "TLS is off at this machine"
SILENT = "it did not say in time what it wants"
AGAIN = 0.05  # seconds before one more is taken where that failed
REFUSED = 1008  # the code of a policy that was violated (RFC 6455, section 7.4.1)
QUIET = logging.getLogger("shoal.link")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False  # whoever knocks and goes away is no news


def library() -> Any:
    """The websockets library."""
    with cluster_extra():
        import websockets.client
        import websockets.protocol
        import websockets.server
        import websockets.uri
    return websockets


class Wire:
    """One connection that carries whole frames; one thread receives while others send."""

    guarded = True

    def __init__(self, stream: Stream, protocol: Any, binding: str = "", place: Place | None = None) -> None:
        """Take over a connection; `binding` names the server's certificate, empty without TLS."""
        self.stream, self.protocol, self.binding, self._place = stream, protocol, binding, place
        self._library = library()
        self.peer = stream.peer
        self._sending = threading.Lock()  # frames leave one after the other
        self._turn = threading.Lock()  # of the protocol, which both directions use
        self._events: deque[Any] = deque()
        self._parts: list[bytes] = []
        self._left = STRANGER
        self._trusted = False

    @property
    def connection(self) -> Any:
        """The socket under it."""
        return self.stream.connection

    def trust(self) -> None:
        """Take as much as comes from now on: this is no stranger."""
        self._trusted = True
        if self._place is not None:
            self._place.leave()

    def flush(self) -> None:
        """Send what the protocol has to say by itself."""
        with self._turn:
            writes = self.protocol.data_to_send()
        for data in filter(None, writes):
            self.stream.write(data)

    def send(self, frame: Buffer) -> None:
        """Send a frame, a long one in pieces: the other side takes one in while the next is made."""
        view = memoryview(frame)
        with self._sending:
            try:
                for start in range(0, max(len(view), 1), PIECE):
                    piece, last = view[start : start + PIECE], start + PIECE >= len(view)
                    with self._turn:
                        if start:
                            self.protocol.send_continuation(piece, fin=last)
                        else:
                            self.protocol.send_binary(piece, fin=last)
                    self.flush()
            except self._library.exceptions.WebSocketException as error:
                raise ServiceLost("the link is closed") from error
            except OSError as error:
                raise ServiceLost(f"the link is broken: {error}") from error

    def receive(self, seconds: float | None = None) -> bytes | bytearray:
        """Wait for a frame."""
        limit = None if seconds is None else time.monotonic() + seconds
        while (frame := self._next()) is None:
            try:
                self.take(None if limit is None else limit - time.monotonic())
            except TimeoutError as error:
                raise DeadlineExceeded("nothing came in time") from error
            except OSError as error:
                raise ServiceLost(f"the link is broken: {error}") from error
        return frame

    def take(self, seconds: float | None) -> None:
        """Take in what has arrived on the socket."""
        data = self.stream.read(READING, seconds)
        self._left -= len(data)
        if self._left < 0 and not self._trusted:
            raise WireError(f"more than {STRANGER} B before anything is known of the other side")
        with self._turn:
            if data:
                self.protocol.receive_data(data)
            else:
                self.protocol.receive_eof()
            self._events.extend(self.protocol.events_received())

    def event(self) -> Any:
        """What came first of that which nobody has looked at."""
        return self._events.popleft() if self._events else None

    def _next(self) -> bytes | bytearray | None:
        """A whole frame, if one is there."""
        kinds, states = self._library.frames.Opcode, self._library.protocol.State
        while (event := self.event()) is not None:
            if event.opcode is kinds.TEXT:
                raise WireError("text came where frames are binary")
            if event.opcode is not kinds.BINARY and event.opcode is not kinds.CONT:
                continue
            if event.fin and not self._parts:
                return event.data  # type: ignore[no-any-return]
            self._parts.append(event.data)
            if event.fin:
                parts, self._parts = self._parts, []
                return bytearray().join(parts)
        if self.protocol.state is not states.OPEN:
            raise ServiceLost(f"the link was closed{self._reason()}")
        return None

    def _reason(self) -> str:
        """Why a connection was closed, by the other side or by this one."""
        closes = (self.protocol.close_rcvd, self.protocol.close_sent)
        told = next((close.reason for close in closes if close and close.reason), "")
        return f": {line(told)}" if told else ""

    def refuse(self, reason: str) -> None:
        """Close the connection, and say why."""
        with suppress(self._library.exceptions.WebSocketException), self._turn:  # which may have closed it already
            self.protocol.send_close(REFUSED, reason.encode()[:120].decode(errors="ignore"))
        with suppress(OSError):
            self.flush()
        self.stream.part(PARTING)

    def close(self) -> None:
        """Cut the connection at once, also under a thread that waits for it."""
        self.stream.close()


def dial(address: str, terms: Terms) -> Wire:
    """Connect to a listener."""
    host, port = split(address)
    connection: socket.socket | None = None
    try:
        secure = terms.secure
        connection = tls.connect(address, terms) if secure else socket.create_connection((host, port), OPENING)
        name = f"[{host}]" if ":" in host else host
        uri = library().uri.parse_uri(f"ws://{name}:{port}")
        protocol = library().client.ClientProtocol(uri, max_size=GREATEST, logger=QUIET)
        wire = Wire(Stream(connection), protocol, tls.peer_fingerprint(connection) if secure else "")
        _knock(wire)
        return wire
    except (ShoalError, OSError) as error:
        if connection is not None:
            connection.close()
        raise _told(address, terms, error) from error


def _told(address: str, terms: Terms, error: Exception) -> ShoalError:
    """What to say of a connection that did not come about."""
    lost = isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError)
    if terms.secure and lost:  # what it said is lost where this side was still writing
        return ServiceLost(f"{address} ended the connection, as for a certificate it refuses: its log says why")
    if isinstance(error, ssl.SSLError):  # from the first answer, which tells whether this side's certificate was taken
        return Refused(f"{address}: {tls.explain(error)}")
    if isinstance(error, Refused):
        return error
    if isinstance(error, ShoalError):
        return type(error)(f"{address} {error}")
    return ServiceLost(f"{address} does not answer: {line(str(error)) or type(error).__name__}")


def _knock(wire: Wire) -> None:
    """Ask for a websocket (RFC 6455, section 4.1)."""
    protocol, limit = wire.protocol, time.monotonic() + OPENING
    protocol.send_request(protocol.connect())
    with suppress(OSError):  # then what it said is still to be read
        wire.flush()
    while wire.event() is None and protocol.handshake_exc is None:
        wire.take(limit - time.monotonic())
    if (failure := protocol.handshake_exc) is not None:
        response = getattr(failure, "response", None)
        if response is not None:
            raise ServiceLost(f"refused: {line((response.body or b'').decode(errors='replace'))}")
        raise ServiceLost(f"does not answer: {line(str(failure))}")


def _say(stream: Stream, told: str) -> None:
    """Tell who asks for a websocket why there will be none."""
    stream.write(f"HTTP/1.1 400 Refused\r\nContent-Length: {len(told)}\r\n\r\n{told}".encode())


class Listener:
    """Takes connections and hands each, in a thread of its own, to a handler."""

    def __init__(
        self,
        address: str,
        terms: Terms,
        certificates: bool,
        handle: Callable[[Wire], None],
        refused: Callable[[str, str], None],
    ) -> None:
        """Begin to listen, on a free port for 0; `refused` hears who did not get as far as a handler, and why.

        With `certificates`, those who come must show one of the authority.
        """
        library()
        self._trust = trust = None if terms.insecure else terms.certificates()
        self._context = tls.server_context(trust, certificates) if trust else None
        self._other = terms.other
        self._handle, self._refused, self._room = handle, refused, Room()
        host, port = split(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ShoalError(f"cannot listen on {address}: {error}") from error
        self._socket.settimeout(0.2)  # closing it wakes nobody on some systems
        name, number = self._socket.getsockname()[:2]
        self.address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, (host, port, *_) = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # such as one that went away again, or too many open files
                self._closed.wait(AGAIN)
                continue
            peer, stream = f"{host}:{port}", Stream(connection)
            if (place := self._room.enter(host, stream.cut)) is None:
                self._refused(peer, CROWDED)
                stream.close()
                continue
            try:
                threading.Thread(target=self._take, args=(stream, peer, place), name="connection", daemon=True).start()
            except RuntimeError:
                self._refused(peer, THREADLESS)
                stream.close()
                place.leave()
                self._closed.wait(AGAIN)

    def _take(self, stream: Stream, peer: str, place: Place) -> None:
        """See what becomes of a new connection, and that whatever fails is told."""
        try:
            wire = self._begin(stream, place)
        except (OSError, ShoalError) as error:
            told = SILENT if isinstance(error, TimeoutError) else tls.explain(error)
            self._refused(peer, PUT_OUT if place.wanted else told)
            stream.part(PARTING)
        else:
            if wire is not None:
                self._handle(wire)
            else:
                stream.part(PARTING)
        finally:
            place.leave()

    def _begin(self, stream: Stream, place: Place) -> Wire | None:
        """Put TLS on a new connection where it is due, and open a websocket on it."""
        limit = time.monotonic() + OPENING
        first = stream.peek(limit)
        if first and (first == RECORD) != (self._context is not None):
            _say(stream, PLAIN if self._context else SECURE)
            raise Refused(f"the other side {'does not speak' if self._context else 'speaks'} TLS")
        if first and self._context:
            stream.secure(self._context, limit)
            self._check(stream)
        protocol = library().server.ServerProtocol(max_size=GREATEST, logger=QUIET)
        wire = Wire(stream, protocol, place=place)
        return wire if self._open(wire, limit) else None

    def _check(self, stream: Stream) -> None:
        """Refuse a certificate that was revoked, or is not of what should come here; who may show none is let on."""
        assert isinstance(stream.connection, ssl.SSLSocket)
        shown = stream.connection.getpeercert(binary_form=True)
        if shown and self._trust:
            try:
                check_peer(shown, self._trust, self._other)
            except ShoalError as error:
                _say(stream, str(error))
                raise

    def _open(self, wire: Wire, limit: float) -> bool:
        """Open the websocket (RFC 6455, section 4.2); who goes away without a word is no news."""
        protocol = wire.protocol
        while (request := wire.event()) is None and protocol.handshake_exc is None:
            wire.take(limit - time.monotonic())
        if request is not None:
            protocol.send_response(protocol.accept(request))
        wire.flush()
        error = protocol.handshake_exc
        if error is not None and not isinstance(error.__cause__, EOFError):
            raise Refused(f"no websocket: {line(str(error))}")
        return error is None

    def close(self) -> None:
        """Take no more connections; those that stand are their handlers' to close."""
        self._closed.set()
        self._thread.join()
        self._socket.close()
