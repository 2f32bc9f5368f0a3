"""The torch RPC link: a fixed number of machines, each with a rank, over TensorPipe.

The head is rank 0 and all meet at its address; nothing begins before everybody has joined. Torch RPC neither encrypts
nor authenticates, and it unpickles what it receives: anyone who reaches the port can run code. So it is for loopback,
and for networks that nobody else uses. The handshake is made all the same, and finds machines that do not fit.
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
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from torch.distributed import PrefixStore, TCPStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from shoal.core.errors import DeadlineExceeded, ServiceLost, SettingsError, ShoalError
from shoal.core.wire import Buffer
from shoal.transport import Handle, Report
from shoal.transport.trust import OPENING, Terms, is_loopback, line, split

HEAD = "head"
AHEAD = 8  # frames that may be under way
THREADS = 16  # of torch RPC; a delivery needs one for a moment
JOINING = 1800.0  # seconds in which all machines must have joined
SENDING = 60.0  # seconds in which a frame must have been taken
AGAIN = 2.0  # seconds before all try again to meet
PARTING = 2.0  # seconds for what is under way at the end
LOOK = 0.2  # seconds between checks whether another run has begun
SCHEME = "shoal"

_stores: dict[str, Any] = {}  # at the head, by address
_runs: list[str] = []  # that a node has taken part in
_wires: dict[str, RpcWire] = {}  # of this process, by the name under which the other side sends
_handlers: list[Handle] = []  # of the listener, where there is one


def deliver(name: str, number: int, frame: torch.Tensor) -> None:
    """Take a frame from the other side; torch RPC calls this in any of its threads, in any order."""
    if (wire := _wires.get(name)) is None:
        raise ServiceLost("the link is closed")
    wire.take(number, frame)


def open_wire(caller: str, theirs: str, ours: str) -> None:
    """Open a wire on this side, for a machine that opened one on its side."""
    if not _handlers:
        raise ServiceLost("nobody listens")
    wire = RpcWire(caller, theirs, ours)
    threading.Thread(target=_handlers[0], args=(wire,), name="connection", daemon=True).start()


class RpcWire:
    """Frames to and from one machine, in the order in which they were sent."""

    binding = ""
    resumable = True

    def __init__(self, peer: str, theirs: str, ours: str) -> None:
        """Send under their name to a machine, and take what comes under ours."""
        self.peer, self._theirs, self._ours = peer, theirs, ours
        self._numbers = itertools.count()
        self._due, self._early = 0, dict[int, torch.Tensor]()  # the next frame, and those that overtook it
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
        """Do nothing: torch RPC has no limits to lift."""

    def send(self, *buffers: Buffer) -> None:
        """Send buffers as one frame; wait where too many are under way."""
        data = torch.frombuffer(bytearray().join(buffers), dtype=torch.uint8)
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
            frame = self._frames.get(timeout=None if seconds is None else max(seconds, 0.0))
        except queue.Empty:
            raise DeadlineExceeded("nothing came in time") from None
        if frame is None:
            self._frames.put(None)  # for whoever asks again
            raise ServiceLost("the link was closed")
        return memoryview(frame.numpy())  # type: ignore[arg-type]

    def idle(self) -> bool:
        """Whether nothing is under way."""
        return all(frame.done() for frame in [*self._under_way])

    def refuse(self, reason: str) -> None:
        """End it; the handshake has said why."""
        self.close()

    def close(self) -> None:
        """End it, also under threads that wait for it, and let the other side know."""
        if self.closed.is_set():
            return
        self.closed.set()
        _wires.pop(self._ours, None)
        self._frames.put(None)
        with suppress(Exception):
            rpc.rpc_async(self.peer, hang_up, (self._theirs,), timeout=SENDING)


def hang_up(name: str) -> None:
    """Close a wire that the other side has closed."""
    if (wire := _wires.get(name)) is not None:
        wire.close()


def _first(error: Exception) -> str:
    return line(str(error).strip().partition("\n")[0])


def _join(address: str, terms: Terms, name: str) -> None:
    """Become one of the machines; torch RPC has one membership per process."""
    host, port = split(address)
    if not (terms.insecure or is_loopback(host)):
        raise SettingsError(
            f"{address} is not on this machine, and torch RPC neither encrypts nor authenticates: choose another link, "
            "or say --insecure (network.insecure=true) if nobody else is on that network"
        )
    if not 0 <= terms.rank < terms.world:
        raise SettingsError(
            f"torch RPC numbers its machines: rank {terms.rank} of {terms.world} is not possible; give network.world "
            "at the head, and --rank and --world on nodes, whose ranks begin with 1"
        )
    _leave()
    if is_loopback(host):  # otherwise other machines could reach it, whatever the address of the head
        os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # whatever they were before
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, rpc_timeout=SENDING, init_method=f"{SCHEME}://{host}:{port}"
    )
    # Torch counts how often a process has joined, and machines whose counts differ would wait for each other forever;
    # here every run has a part of the store to itself.
    vars(rpc)["_init_counter"] = 0
    for counts in ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"):
        getattr(rpc.api, counts, {}).clear()
    try:
        with warnings.catch_warnings():  # torch warns about itself
            warnings.simplefilter("ignore")
            rpc.init_rpc(name, rank=terms.rank, world_size=terms.world, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, ValueError) as error:
        raise ServiceLost(f"{address} does not answer: {_first(error)}") from error


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Where the machines find each other: a store at the head, in which each run has a part of its own.

    Torch's own would listen on every interface, and a second run in one process would find what the first one left.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    counts = {key: int(value) for key, value in parse_qsl(parts.query)}
    rank, world = counts["rank"], counts["world_size"]
    limit = timedelta(seconds=JOINING)
    if rank == 0:
        if url not in _stores:  # torch keeps it open to the end of the process
            with socket.create_server((host, port)) as listening:
                descriptor = os.dup(listening.fileno())
            _stores[url] = TCPStore(host, port, world, True, limit, False, master_listen_fd=descriptor)
        run = secrets.token_hex(8)
        _stores[url].set("run", run)
        store = _stores[url]
    else:
        with socket.create_connection((host, port), OPENING):  # torch would retry without pause, and use up a core
            pass
        store = TCPStore(host, port, world, False, limit)
        while (run := store.get("run").decode()) in _runs:
            time.sleep(LOOK)
        _runs.append(run)
    yield PrefixStore(run, store), rank, world


register_rendezvous_handler(SCHEME, _rendezvous)  # type: ignore[no-untyped-call]


def _leave() -> None:
    """Stop being one of the machines."""
    wires = [*_wires.values()]
    for wire in wires:
        wire.close()
    limit = time.monotonic() + PARTING  # a frame that is cut off would be taken for the start of another
    while time.monotonic() < limit and not all(wire.idle() for wire in wires):
        time.sleep(0.01)
    with suppress(RuntimeError):
        rpc.shutdown(graceful=False)


def dial(address: str, terms: Terms) -> RpcWire:
    """Connect to the head."""
    _join(address, terms, f"node-{terms.rank}")
    ours, theirs = secrets.token_hex(8), secrets.token_hex(8)
    wire = RpcWire(HEAD, theirs, ours)
    try:
        rpc.rpc_sync(HEAD, open_wire, (f"node-{terms.rank}", ours, theirs), timeout=SENDING)
    except (RuntimeError, ShoalError) as error:
        wire.close()
        raise ServiceLost(f"{address} does not answer: {_first(error)}") from None
    return wire


class RpcListener:
    """Waits at rank 0 for the others."""

    def __init__(self, address: str, terms: Terms, certificates: bool, handle: Handle, refused: Report) -> None:
        """Begin to wait, in a thread: torch RPC starts only when all machines have joined."""
        if terms.world < 2:
            raise SettingsError("torch RPC numbers its machines: set network.world to how many they are, with the head")
        self.address, self._refused, self._closed = address, refused, threading.Event()
        _handlers[:] = [handle]
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
        """Accept no more machines."""
        self._closed.set()
        _handlers.clear()
        _leave()


listen = RpcListener
