"""The torch RPC link: machines that are counted beforehand, each with a rank, over TensorPipe.

The head is rank 0 and its address is where all meet; nobody begins before everybody is there. Torch RPC neither
encrypts nor asks who calls, and it unpickles what comes: whoever reaches the port can run code. So it is for loopback,
and for networks that nobody else uses. Our own handshake travels over it all the same, and finds
machines that do not fit.
"""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from shoal.core.errors import DeadlineExceeded, ServiceLost, SettingsError, ShoalError
from shoal.core.wire import Buffer
from shoal.transport.terms import Terms, is_loopback, line, split
from shoal.transport.tls import OPENING

HEAD = "head"
AHEAD = 8  # frames that may be on their way
THREADS = 16  # of torch RPC; a delivery takes one for a moment
ASKING = 1800.0  # seconds in which all machines must have come
SENDING = 60.0  # seconds in which a frame must have been taken

AGAIN = 2.0  # seconds before all try once more to meet
PARTING = 2.0  # seconds for what is on its way at the end
LOOK = 0.2  # seconds between looks whether another run has begun
SCHEME = "shoal"

_stores: dict[str, Any] = {}  # at the head, by address
_runs: list[str] = []  # that a node has taken part in
_wires: dict[str, Wire] = {}  # of this process, by the name under which the other side sends
_arrivals: list[Callable[[Wire], None]] = []  # the listener, where there is one


def deliver(name: str, number: int, frame: torch.Tensor) -> None:
    """Take a frame of the other side; torch RPC calls this in any of its threads, in any order."""
    if (wire := _wires.get(name)) is None:
        raise ServiceLost("the link is closed")
    wire.take(number, frame)


def knock(caller: str, theirs: str, ours: str) -> None:
    """Open a wire on this side, for a machine that opened one on its side."""
    if not _arrivals:
        raise ServiceLost("nobody listens")
    wire = Wire(caller, theirs, ours)
    threading.Thread(target=_arrivals[0], args=(wire,), name="connection", daemon=True).start()


class Wire:
    """Frames to and from one machine, in the order in which they were sent."""

    binding = ""
    guarded = False  # whoever reaches torch RPC can run code

    def __init__(self, peer: str, theirs: str, ours: str) -> None:
        """Send under their name to a machine, and take what comes under ours."""
        self.peer, self._theirs, self._ours = peer, theirs, ours
        self._numbers = itertools.count()
        self._due = 0
        self._early: dict[int, torch.Tensor] = {}
        self._change, self._sending = threading.Lock(), threading.Lock()
        self._frames: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._under_way: deque[Any] = deque()
        self.closed = threading.Event()
        _wires[ours] = self

    def take(self, number: int, frame: torch.Tensor) -> None:
        """Keep a frame until those before it have come."""
        with self._change:
            self._early[number] = frame
            while self._due in self._early:
                self._frames.put(self._early.pop(self._due))
                self._due += 1

    def trust(self) -> None:
        """Nothing changes: torch RPC takes whatever comes."""

    def send(self, frame: Buffer) -> None:
        """Send a frame; wait where too many are on their way."""
        from torch.distributed import rpc

        data = torch.frombuffer(frame if isinstance(frame, bytearray) else bytearray(frame), dtype=torch.uint8)
        with self._sending:
            if self.closed.is_set():
                raise ServiceLost("the link is closed")
            try:
                args = (self._theirs, next(self._numbers), data)
                self._under_way.append(rpc.rpc_async(self.peer, deliver, args, timeout=SENDING))
                while len(self._under_way) > AHEAD or (self._under_way and self._under_way[0].done()):
                    self._under_way.popleft().wait()
            except (RuntimeError, ShoalError) as error:  # which is all that torch RPC raises
                self.close()
                raise ServiceLost(f"the link is broken: {_first(error)}") from None

    def receive(self, seconds: float | None = None) -> Buffer:
        """Wait for a frame."""
        try:
            frame = self._frames.get(timeout=seconds)
        except queue.Empty:
            raise DeadlineExceeded("nothing came in time") from None
        if frame is None:
            self._frames.put(None)  # for whoever asks again
            raise ServiceLost("the link was closed")
        return memoryview(frame.numpy())  # type: ignore[arg-type]

    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return all(frame.done() for frame in [*self._under_way])

    def refuse(self, reason: str) -> None:
        """End it; why was told by the handshake."""
        self.close()

    def close(self) -> None:
        """End it, also under threads that wait for it, and let the other side know."""
        if self.closed.is_set():
            return
        self.closed.set()
        _wires.pop(self._ours, None)
        self._frames.put(None)
        with suppress(Exception):
            from torch.distributed import rpc

            rpc.rpc_async(self.peer, hang_up, (self._theirs,), timeout=SENDING)


def hang_up(name: str) -> None:
    """Take note that the other side has ended a wire."""
    if (wire := _wires.get(name)) is not None:
        wire.close()


def _first(error: Exception) -> str:
    return line(str(error).strip().partition("\n")[0])


def _join(address: str, terms: Terms, name: str) -> None:
    """Be one of the machines; torch RPC has one membership in a process."""
    from torch.distributed import rpc

    host, port = split(address)
    if not (terms.insecure or is_loopback(host)):
        raise SettingsError(
            f"{address} is not on this machine, and torch RPC neither encrypts nor asks who calls: choose another "
            "link, or say --insecure (network.insecure=true) if nobody else is on that network"
        )
    if not 0 <= terms.rank < terms.world:
        raise SettingsError(
            f"torch RPC counts machines: rank {terms.rank} of {terms.world} makes no sense; give network.world at the "
            "head, and --rank and --world on nodes, whose ranks begin with 1"
        )
    _leave()
    if is_loopback(host):  # otherwise other machines could reach it, whatever the address of the head
        os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # whatever they were before
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, rpc_timeout=SENDING, init_method=f"{SCHEME}://{host}:{port}"
    )
    # Torch counts how often a process began, and machines whose counts differ would wait for each other for ever; here
    # every run has a part of the store to itself.
    vars(rpc)["_init_counter"] = 0
    for counts in ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"):
        getattr(rpc.api, counts, {}).clear()
    try:
        with warnings.catch_warnings():  # of torch about itself
            warnings.simplefilter("ignore")
            rpc.init_rpc(name, rank=terms.rank, world_size=terms.world, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, ValueError) as error:
        raise ServiceLost(f"{address} does not answer: {_first(error)}") from error


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Where the machines learn of each other: a store at the head, in which each run has a part of its own.

    Torch's own would listen on every interface, and a second run in one process would find what the first had left.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    counts = {key: int(value) for key, value in parse_qsl(parts.query)}
    rank, world = counts["rank"], counts["world_size"]
    limit = timedelta(seconds=ASKING)
    if rank == 0:
        if url not in _stores:  # torch keeps it open to the end of the process
            with socket.create_server((host, port)) as listening:
                descriptor = os.dup(listening.fileno())
            _stores[url] = TCPStore(host, port, world, True, limit, False, master_listen_fd=descriptor)
        run = secrets.token_hex(8)
        _stores[url].set("run", run)
        store = _stores[url]
    else:
        with socket.create_connection((host, port), OPENING):  # torch would knock again and again, and use up a core
            pass
        store = TCPStore(host, port, world, False, limit)
        while (run := store.get("run").decode()) in _runs:
            time.sleep(LOOK)
        _runs.append(run)
    yield PrefixStore(run, store), rank, world


register_rendezvous_handler(SCHEME, _rendezvous)  # type: ignore[no-untyped-call]


def _leave() -> None:
    """Be none of the machines any more."""
    from torch.distributed import rpc

    wires = [*_wires.values()]
    for wire in wires:
        wire.close()
    limit = time.monotonic() + PARTING  # what is cut off while it is written arrives in pieces of something else
    while time.monotonic() < limit and not all(wire.idle() for wire in wires):
        time.sleep(0.01)
    with suppress(RuntimeError):
        rpc.shutdown(graceful=False)


def dial(address: str, terms: Terms) -> Wire:
    """Connect to the head."""
    from torch.distributed import rpc

    _join(address, terms, f"node-{terms.rank}")
    ours, theirs = secrets.token_hex(8), secrets.token_hex(8)
    wire = Wire(HEAD, theirs, ours)
    try:
        rpc.rpc_sync(HEAD, knock, (f"node-{terms.rank}", ours, theirs), timeout=SENDING)
    except (RuntimeError, ShoalError) as error:
        wire.close()
        raise ServiceLost(f"{address} does not answer: {_first(error)}") from None
    return wire


class Listener:
    """Waits at rank 0 for the others."""

    def __init__(
        self,
        address: str,
        terms: Terms,
        certificates: bool,
        handle: Callable[[Wire], None],
        refused: Callable[[str, str], None],
    ) -> None:
        """Begin to wait, in a thread: torch RPC wants all machines before any."""
        if terms.world < 2:
            raise SettingsError("torch RPC counts machines: set network.world to their number, the head included")
        self.address, self._refused, self._closed = address, refused, threading.Event()
        _arrivals[:] = [handle]
        self._thread = threading.Thread(target=self._gather, args=(address, terms), name="listener", daemon=True)
        self._thread.start()

    def _gather(self, address: str, terms: Terms) -> None:
        while not self._closed.is_set():
            try:
                _join(address, terms, HEAD)
                return
            except ShoalError as error:
                self._refused(address, str(error))
                self._closed.wait(AGAIN)

    def close(self) -> None:
        """Take no more machines."""
        self._closed.set()
        _arrivals.clear()
        _leave()
