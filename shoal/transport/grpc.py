"""The gRPC link: one stream in both directions over HTTP/2, with or without TLS.

Frames are bytes to gRPC, which needs no generated code for them; long ones travel in pieces. TLS is gRPC's own, which
neither pins certificates nor tells which one it was shown: so a client first fetches the server's certificate over a
connection of ours, and then trusts only that one. Nor can a lowest version of TLS be chosen: so gRPC gets ciphers for
1.2 that nobody can use, and a listener checks whether it would accept 1.2 all the same.
"""

from __future__ import annotations

import os
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from shoal.core.errors import DeadlineExceeded, ServiceLost, ShoalError, WireError
from shoal.core.wire import Buffer
from shoal.transport import LIMIT, Handle, Report, strangers, trust
from shoal.transport.strangers import CROWDED, THREADLESS, Lobby, Place
from shoal.transport.trust import OPENING, Terms, Trust, joined, line, split

SERVICE, METHOD = "shoal.Link", "Carry"
PIECE = 1 << 20  # bytes that travel at once: the other side takes one in while the next is sent
LEFT = struct.Struct("<Q")  # bytes of a frame that are still to come
AHEAD = 8  # pieces that may wait to be sent
FULL = 0.0005  # seconds before a sender checks again whether there is room
STREAMS = 256  # connections at once
# Ciphers of TLS 1.2 that need a key agreed on beforehand, which there is none of; those of 1.3 are always on.
CIPHERS = "ECDHE-PSK-AES128-CBC-SHA"
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", PIECE + 1024),
    ("grpc.max_send_message_length", PIECE + 1024),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # the next link does not wait for one that broke
    ("grpc.so_reuseport", 0),  # or two nodes could listen at one address
    ("grpc.max_allowed_incoming_connections", STREAMS),
    ("grpc.server_handshake_timeout_ms", int(1000 * OPENING)),
    ("grpc.max_connection_idle_ms", int(1000 * OPENING)),  # for those who open no stream
]


def library() -> Any:
    """The gRPC library, or an error that names the extra."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it would log every connection that ends
    os.environ["GRPC_SSL_CIPHER_SUITES"] = CIPHERS  # read once, when the library is loaded
    try:
        import grpc
    except ImportError as error:
        raise ShoalError("the link grpc needs: pip install 'shoal[grpc]'") from error
    return grpc


def cut(*buffers: Buffer) -> Iterator[bytes]:
    """The pieces of a frame, each followed by the number of bytes that are still to come: so arrays stay aligned."""
    left, parts, room = sum(map(len, buffers)), list[Buffer](), PIECE
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            part, view = view[:room], view[room:]
            left, room = left - len(part), room - len(part)
            parts.append(part)
            if left and not room:
                yield b"".join((*parts, LEFT.pack(left)))
                parts, room = [], PIECE
    yield b"".join((*parts, LEFT.pack(0)))


class GrpcWire:
    """One stream that carries whole frames."""

    resumable = False  # gRPC waits for as long as it takes

    def __init__(self, peer: str, binding: str = "") -> None:
        """Begin without a stream."""
        self.peer, self.binding = peer, binding
        self.place: Place | None = None
        self.closed = threading.Event()
        self._incoming: Iterator[bytes] = iter(())
        self._end: Callable[[str], None] = lambda reason: None
        self._allowed: float = strangers.LIMIT  # bytes that the other side may still send
        self._frame = self._missing = memoryview(b"")  # what is received, and the part of it that has not come
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def begin(self, incoming: Iterator[bytes], end: Callable[[str], None]) -> None:
        """Take over a stream; `end` ends it, with a reason for the other side."""
        self._incoming, self._end = incoming, end

    def trust(self) -> None:
        """Lift the limits for strangers."""
        self._allowed = float("inf")
        if self.place is not None:
            self.place.leave()

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC sends, in its own thread."""
        while (piece := self._outgoing.get()) is not None:
            yield piece

    def send(self, *buffers: Buffer) -> None:
        """Send buffers as one frame."""
        with self._sending:
            for piece in cut(*buffers):
                while self._outgoing.qsize() >= AHEAD and not self.closed.is_set():
                    time.sleep(FULL)  # the other side takes nothing for the moment
                if self.closed.is_set():
                    raise ServiceLost("the link is closed")
                self._outgoing.put(piece)

    def receive(self, seconds: float | None = None) -> Buffer:
        """Wait for a frame; a stream on which none comes in time is closed."""
        if seconds is None:
            return self._next()
        limit, timer = time.monotonic() + seconds, threading.Timer(seconds, self.close)
        timer.daemon = True
        timer.start()
        try:
            return self._next()
        except ServiceLost:
            if time.monotonic() < limit:
                raise
            raise DeadlineExceeded("nothing came in time") from None
        finally:
            timer.cancel()

    def _next(self) -> Buffer:
        try:
            while (frame := self.take(next(self._incoming))) is None:
                pass
            return frame
        except StopIteration:
            reason = ""
        except library().RpcError as error:
            reason = f": {line(_details(error))}"
        self.close()
        raise ServiceLost(f"the link was closed{reason}")

    def take(self, piece: bytes) -> Buffer | None:
        """Take in a piece; return the frame that it completes."""
        if len(piece) < LEFT.size:
            raise WireError("not a piece of a frame")
        part, (left,) = memoryview(piece)[: -LEFT.size], LEFT.unpack_from(piece, len(piece) - LEFT.size)
        self._allowed -= len(piece)
        if self._allowed < left:
            raise WireError(f"more than {strangers.LIMIT} B before the other side has identified itself")
        if not (left or len(self._missing)):
            return part
        if not len(self._missing):
            if len(part) + left > LIMIT:
                raise WireError(f"a frame of more than {LIMIT} B")
            room: Any = np.empty(len(part) + left, np.uint8)
            self._frame = self._missing = memoryview(room)
        if len(part) + left != len(self._missing) or not len(part):
            raise WireError("not a piece of a frame")
        self._missing[: len(part)] = part
        self._missing = self._missing[len(part) :]
        return None if left else self._frame

    def refuse(self, reason: str) -> None:
        """End the stream, and say why."""
        if not self.closed.is_set():
            self.closed.set()
            self._outgoing.put(None)
            self._end(reason)

    def close(self) -> None:
        """End the stream at once, also under threads that wait for it."""
        self.refuse("")


def _details(error: Any) -> str:
    details = getattr(error, "details", None)
    return str(details() if details else error) or "no reason"


def dial(address: str, terms: Terms) -> GrpcWire:
    """Connect to a listener."""
    grpc, target, wire = library(), joined(*split(address)), GrpcWire(address)
    if terms.secure:
        from shoal.transport.certificates import name_in

        try:
            with trust.connect(address, terms, ("h2",)) as connection:
                certificate = trust.shown(connection)
        except OSError as error:
            raise ServiceLost(f"{address} does not answer: {line(str(error))}") from error
        wire.binding, own = trust.fingerprint(certificate), terms.certificates()
        pair = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
        credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(certificate).encode(), *pair)
        # The name was compared already, or the certificate is pinned.
        name = ("grpc.ssl_target_name_override", name_in(certificate))
        channel = grpc.secure_channel(target, credentials, [*OPTIONS, name])
    else:
        channel = grpc.insecure_channel(target, OPTIONS)
    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(wire.outgoing(), wait_for_ready=False)

    def end(reason: str) -> None:
        call.cancel()
        channel.close()

    wire.begin(call, end)
    try:
        grpc.channel_ready_future(channel).result(OPENING)
    except grpc.FutureTimeoutError:
        reason = str(call.details()) if call.done() else "timed out"
        wire.close()
        raise ServiceLost(f"{address} does not answer: {line(reason)}") from None
    return wire


class Pool(ThreadPoolExecutor):
    """The threads of a server; where one cannot be started, its call fails and the server goes on."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Run a function, now or when a thread is free."""
        try:
            return super().submit(function, *args, **options)
        except RuntimeError as error:  # which would end gRPC's own thread, and with it all serving
            failed = Future[Any]()
            failed.set_exception(error)
            return failed


def accepts_old_tls(address: str, own: Trust) -> bool:
    """Whether the listener at an address of this machine speaks TLS 1.2."""
    context = trust.client_context(own, pin="00" * 32)  # it is this machine itself, whatever it shows
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(split(address), OPENING) as plain,
        context.wrap_socket(plain),
    ):
        return True
    return False


class GrpcListener:
    """Accepts streams, and hands each to a handler in a thread of its own; those whom TLS refuses are not reported."""

    def __init__(self, address: str, terms: Terms, certificates: bool, handle: Handle, refused: Report) -> None:
        """Begin to listen."""
        grpc, (host, port), self._trust = library(), split(address), terms.certificates()
        self._terms, self._handle, self._refused, self._lobby = terms, handle, refused, Lobby()
        self._pool = Pool(STREAMS, thread_name_prefix="grpc")
        self._server = grpc.server(self._pool, options=OPTIONS, maximum_concurrent_rpcs=STREAMS)
        handler = grpc.stream_stream_rpc_method_handler(self._carry)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self._binding = ""
        try:
            if own := self._trust:
                trust.server_context(own, certificates)  # says better than gRPC what is wrong with them
                self._binding = trust.fingerprint(own.certificate)
                pair = own.key.read_bytes(), own.certificate.read_bytes()
                authority = own.ca.read_bytes() if certificates else None
                credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=certificates)
                port = self._server.add_secure_port(joined(host, port), credentials)
            else:
                port = self._server.add_insecure_port(joined(host, port))
        except RuntimeError as error:
            raise ShoalError(f"cannot listen on {address}: {line(str(error))}") from error
        self._server.start()
        self.address = joined(host, port)
        if self._trust and accepts_old_tls(self.address, self._trust):
            self.close()
            raise ShoalError(
                "gRPC would accept TLS 1.2 here, because it was loaded before Shoal could forbid that: set "
                f"GRPC_SSL_CIPHER_SUITES={CIPHERS} in the environment, or choose the link websocket"
            )

    def _carry(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Carry one stream: what this returns is sent on it."""
        wire = GrpcWire(context.peer().partition(":")[2], self._binding)

        def end(reason: str) -> None:
            if reason:
                context.set_code(library().StatusCode.PERMISSION_DENIED)
                context.set_details(reason[:200])
            else:
                context.cancel()

        self._check(wire.peer, context)
        wire.begin(incoming, end)
        if (place := self._lobby.enter(wire.peer.rpartition(":")[0], wire.close)) is None:
            self._abort(wire.peer, context, CROWDED)
        wire.place = place
        if not context.add_callback(wire.close):
            wire.close()
        try:
            threading.Thread(target=self._take, args=(wire, place), name="connection", daemon=True).start()
        except RuntimeError:
            place.leave()
            self._abort(wire.peer, context, THREADLESS)
        return wire.outgoing()

    def _take(self, wire: GrpcWire, place: Place) -> None:
        try:
            self._handle(wire)
        finally:
            place.leave()

    def _check(self, peer: str, context: Any) -> None:
        """Refuse a certificate that was revoked, or is for another role; where none is required, none may be shown."""
        if self._trust is None:
            return
        from shoal.transport.certificates import check_peer

        try:
            for certificate in context.auth_context().get("x509_pem_cert", []):
                check_peer(bytes(certificate), self._trust, self._terms.other)
        except ShoalError as error:
            self._abort(peer, context, line(str(error)))

    def _abort(self, peer: str, context: Any, reason: str) -> NoReturn:
        """Refuse a stream."""
        self._refused(peer, reason)
        context.abort(library().StatusCode.UNAUTHENTICATED, reason)
        raise AssertionError("aborting a stream raises")

    def close(self) -> None:
        """Accept no more streams; those that stand are ended."""
        self._server.stop(None).wait()
        self._pool.shutdown(wait=False)


listen = GrpcListener
