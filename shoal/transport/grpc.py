"""The gRPC link: one stream in both directions over HTTP/2, with or without TLS.

Frames are bytes to gRPC, which needs no generated code for them; long ones travel in pieces, each with a byte that says
whether more follow. TLS is gRPC's own, for which a client first fetches the certificate of the server by a connection
of ours, and then trusts that one only: gRPC itself neither pins certificates nor tells which it was shown. Nor does it
let a lowest version of TLS be chosen: so it is given ciphers for 1.2 that nobody can use, and a listener tries whether
it would take 1.2 all the same.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

from shoal.core.errors import DeadlineExceeded, ServiceLost, ShoalError
from shoal.core.wire import Buffer
from shoal.transport import tls
from shoal.transport.certificates import Trust, check_peer
from shoal.transport.pieces import PIECE, Pieces, cut
from shoal.transport.strangers import CROWDED, THREADLESS, Place, Room
from shoal.transport.terms import Terms, line, split

SERVICE, METHOD = "shoal.Link", "Carry"
PROOF = "shoal-proof"  # the metadata by which a stream is refused before anything is done about it
AHEAD = 8  # pieces that may wait to be sent
FULL = 0.0005  # seconds before a sender looks again whether there is room
STREAMS = 256  # connections at once
# Those of TLS 1.2 that need a key agreed on beforehand, which there is none of; those of 1.3 are always on.
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
    ("grpc.use_local_subchannel_pool", 1),  # a link that broke is not waited for by the next
    ("grpc.so_reuseport", 0),  # or two nodes could listen at one address
    ("grpc.max_allowed_incoming_connections", STREAMS),
    ("grpc.server_handshake_timeout_ms", int(1000 * tls.OPENING)),
    ("grpc.max_connection_idle_ms", int(1000 * tls.OPENING)),  # for those who open no stream
]


def library() -> Any:
    """The gRPC library, or an error that names the extra."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells of every connection that ends
    os.environ["GRPC_SSL_CIPHER_SUITES"] = CIPHERS  # which is read once, when the library is loaded
    try:
        import grpc
    except ImportError as error:
        raise ShoalError("the link grpc needs: pip install 'shoal[grpc]'") from error
    return grpc


def prove(token: str, nonce: str) -> str:
    """What shows that a stream comes from somebody who knows the token; the handshake that follows proves it."""
    return f"{nonce}.{hmac.digest(token.encode(), f'shoal grpc {nonce}'.encode(), hashlib.sha256).hex()}"


class Wire:
    """One stream that carries whole frames."""

    guarded = True

    def __init__(self, peer: str, binding: str = "") -> None:
        """Begin without a stream; `binding` names the server's certificate, empty without TLS."""
        self.peer, self.binding = peer, binding
        self.place: Place | None = None
        self._incoming: Iterator[bytes] = iter(())
        self._end: Callable[[str], None] = lambda reason: None
        self._pieces = Pieces()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self.closed = threading.Event()

    def begin(self, incoming: Iterator[bytes], end: Callable[[str], None]) -> None:
        """Take over a stream; `end` ends it, with what to tell the other side."""
        self._incoming, self._end = incoming, end

    def trust(self) -> None:
        """Take as much as comes from now on: this is no stranger."""
        self._pieces.trusted = True
        if self.place is not None:
            self.place.leave()

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC sends, in its own thread."""
        while (piece := self._outgoing.get()) is not None:
            yield piece

    def send(self, frame: Buffer) -> None:
        """Send a frame, a long one in pieces."""
        with self._sending:
            for piece in cut(frame):
                while self._outgoing.qsize() >= AHEAD and not self.closed.is_set():
                    time.sleep(FULL)  # the other side takes nothing for the moment
                if self.closed.is_set():
                    raise ServiceLost("the link is closed")
                self._outgoing.put(piece)

    def receive(self, seconds: float | None = None) -> Buffer:
        """Wait for a frame."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.close()

        timer = None if seconds is None else threading.Timer(seconds, give_up)
        if timer:
            timer.daemon = True
            timer.start()
        try:
            while (frame := self._pieces.take(next(self._incoming))) is None:
                pass
            return frame
        except StopIteration:
            told = "the link was closed"
        except library().RpcError as error:
            told = f"the link was closed: {line(_details(error))}"
        finally:
            if timer:
                timer.cancel()
        self.close()
        raise DeadlineExceeded("nothing came in time") if late.is_set() else ServiceLost(told)

    def refuse(self, reason: str) -> None:
        """End the stream, and say why."""
        self._finish(reason)

    def close(self) -> None:
        """Cut the stream at once, also under threads that wait for it."""
        self._finish("")

    def _finish(self, reason: str) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self._outgoing.put(None)
            self._end(reason)


def _details(error: Any) -> str:
    details = getattr(error, "details", None)
    return str(details() if details else error) or "no reason"


def dial(address: str, terms: Terms) -> Wire:
    """Connect to a listener."""
    grpc = library()
    host, port = split(address)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    options, binding = [*OPTIONS], ""
    if terms.secure:
        try:
            with tls.connect(address, terms, ("h2",)) as connection:
                shown = connection.getpeercert(binary_form=True) or b""
                binding = tls.peer_fingerprint(connection)
        except OSError as error:
            raise ServiceLost(f"{address} does not answer: {line(str(error))}") from error
        own = terms.certificates()
        parts = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
        credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(shown).encode(), *parts)
        options.append(("grpc.ssl_target_name_override", tls.name_in(shown)))  # the name was compared, or it is pinned
        channel = grpc.secure_channel(target, credentials, options)
    else:
        channel = grpc.insecure_channel(target, options)
    carry = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    proof = prove(terms.secret(), secrets.token_hex(16))
    wire = Wire(address, binding)
    call = carry(wire.outgoing(), metadata=((PROOF, proof),), wait_for_ready=False)

    def end(reason: str) -> None:
        call.cancel()
        channel.close()

    wire.begin(call, end)
    try:
        grpc.channel_ready_future(channel).result(tls.OPENING)
    except grpc.FutureTimeoutError:
        wire.close()
        raise ServiceLost(f"{address} does not answer: {line(_status(call))}") from None
    return wire


def _status(call: Any) -> str:
    return str(call.details()) if call.done() else "timed out"


class Pool(ThreadPoolExecutor):
    """The threads of a server; where one cannot be started, its call fails and the server goes on."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Have something done, now or when a thread is free."""
        try:
            return super().submit(function, *args, **options)
        except RuntimeError as error:  # which would end gRPC's own thread, and with it all serving
            failed = Future[Any]()
            failed.set_exception(error)
            return failed


def old_tls(address: str, trust: Trust) -> bool:
    """Whether who listens there would speak TLS 1.2."""
    context = tls.client_context(trust, pin="00" * 32)  # whatever it shows: it is this machine itself
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(split(address), tls.OPENING) as plain,
        context.wrap_socket(plain),
    ):
        return True
    return False


class Listener:
    """Takes streams and hands each, in a thread of its own, to a handler."""

    def __init__(
        self,
        address: str,
        terms: Terms,
        certificates: bool,
        handle: Callable[[Wire], None],
        refused: Callable[[str, str], None],
    ) -> None:
        """Begin to listen, on a free port for 0; `refused` hears who did not get as far as a handler, and why.

        With `certificates`, those who come must show one of the authority. gRPC says nothing of those whom TLS refuses.
        """
        grpc = library()
        self._handle, self._refused, self._terms, self._room = handle, refused, terms, Room()
        terms.secret()  # one that is missing is told at once
        self._trust = trust = None if terms.insecure else terms.certificates()
        self._pool = Pool(STREAMS, thread_name_prefix="grpc")
        self._server = grpc.server(self._pool, options=OPTIONS, maximum_concurrent_rpcs=STREAMS)
        handler = grpc.stream_stream_rpc_method_handler(self._carry)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        host, port = split(address)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if trust:
                tls.server_context(trust, certificates)  # what is wrong with them it says better
                pair = trust.key.read_bytes(), trust.certificate.read_bytes()
                authority = trust.ca.read_bytes() if certificates else None
                credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=certificates)
                port = self._server.add_secure_port(target, credentials)
            else:
                port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise ShoalError(f"cannot listen on {address}: {line(str(error))}") from error
        self._server.start()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if trust and old_tls(self.address, trust):
            self.close()
            raise ShoalError(
                "gRPC would take TLS 1.2 here, since it was loaded before Shoal could forbid that: set "
                f"GRPC_SSL_CIPHER_SUITES={CIPHERS} in the environment, or choose the link websocket"
            )

    def _carry(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Carry one stream: what this returns is what is sent on it."""
        grpc = library()
        peer = context.peer().partition(":")[2]
        told = str(dict(context.invocation_metadata()).get(PROOF, ""))
        if reason := self._unwanted(told, context.auth_context().get("x509_pem_cert", [])):
            self._abort(peer, context, reason)

        def end(reason: str) -> None:
            if reason:
                context.set_code(grpc.StatusCode.PERMISSION_DENIED)
                context.set_details(reason[:200])
            else:
                context.cancel()

        wire = Wire(peer)
        wire.begin(incoming, end)
        if (place := self._room.enter(peer.rpartition(":")[0], wire.close)) is None:
            self._abort(peer, context, CROWDED)

        def handle() -> None:
            try:
                self._handle(wire)
            finally:
                place.leave()

        wire.place = place
        if not context.add_callback(wire.close):
            wire.close()
        try:
            threading.Thread(target=handle, name="connection", daemon=True).start()
        except RuntimeError:
            place.leave()
            self._abort(peer, context, THREADLESS)
        return wire.outgoing()

    def _abort(self, peer: str, context: Any, reason: str) -> NoReturn:
        """Refuse a stream."""
        self._refused(peer, reason)
        context.abort(library().StatusCode.UNAUTHENTICATED, reason)
        raise AssertionError("what aborts a stream raises")

    def _unwanted(self, told: str, shown: Sequence[bytes]) -> str:
        """Why a stream is refused, by the proof that was told and the certificate that was shown."""
        if not hmac.compare_digest(told.encode(), prove(self._terms.secret(), told.partition(".")[0]).encode()):
            return "the token is not the same on both sides"
        if (trust := self._trust) is None:
            return ""
        try:
            for certificate in shown:
                check_peer(ssl.PEM_cert_to_DER_cert(bytes(certificate).decode()), trust, self._terms.other)
        except (ShoalError, ValueError) as error:
            return line(str(error))
        return ""

    def close(self) -> None:
        """Take no more streams; those that stand are ended."""
        self._server.stop(None).wait()
        self._pool.shutdown(wait=False)
