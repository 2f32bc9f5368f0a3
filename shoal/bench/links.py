"""Calls between two machines: our session over each link beside the bare library with the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.bench.measuring import ORDER, Effort, Row, Tables, contest, payloads
from shoal.core.errors import ServiceLost
from shoal.core.tree import size_of
from shoal.transport.certificates import initialise
from shoal.transport.session import Gate, Session, meet
from shoal.transport.trust import Terms, Trust, client_context, server_context, split

LOOPBACK = "127.0.0.1:0"
SECONDS = 30.0  # that one call may take
PLAIN: dict[str, Any] = {"compression": None, "max_size": None, "ping_interval": None}  # as our link has them


class Echo:
    """The other machine's answers: it keeps what came last."""

    kept: Any = None

    def answer(self, session: Session, kind: str, args: list[Any]) -> Any:
        """Give back a number, keep a tree, or give it back."""
        if kind == "same":
            return args[0]
        if kind == "put":
            self.kept = args[0]
            return True
        return self.kept

    def echo(self, message: Any) -> Any:
        """The same with bytes: an order is answered by itself or by what is kept, anything else is kept."""
        order = len(message) == ORDER.size
        if not order:
            self.kept = message
        fetched = order and ORDER.unpack(bytes(message))[0].startswith(b"get")
        return self.kept if fetched else bytes(ORDER.size)


BARE = Echo()  # in the other process, for libraries that call functions


def bare_call(message: torch.Tensor) -> torch.Tensor:
    """What torch RPC calls."""
    answer = BARE.echo(message.numpy().data)
    return torch.frombuffer(answer, dtype=torch.uint8)


def serve(pipe: Any, link: str, folder: str) -> None:
    """Be the other machine: listen with our link and with the bare library, until the pipe closes."""
    echo = Echo()
    address = LOOPBACK
    if link == "torchrpc":
        with socket.create_server(split(LOOPBACK)) as free:
            address = "{}:{}".format(*free.getsockname())
    terms = Terms("listener", folder, link=link, rank=0, world=2)
    gate = Gate(address, terms, lambda _: echo.answer, lambda _, session: stay(session), print, certificates=True)
    pipe.send((gate.address, START[link](folder)))
    pipe.recv()


def websockets_bare(folder: str) -> str:
    """A server of the bare websockets library."""
    import websockets.sync.server

    context = server_context(Trust.inside(Path(folder))) if folder else None

    def answer(connection: Any) -> None:
        for message in connection:
            connection.send(BARE.echo(message))

    server = websockets.sync.server.serve(answer, *split(LOOPBACK), ssl=context, **PLAIN)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return "{}:{}".format(*server.socket.getsockname())


def grpc_bare(folder: str) -> str:
    """A server of bare gRPC: one stream, messages as they come."""
    import grpc

    handler = grpc.stream_stream_rpc_method_handler(lambda messages, _: (BARE.echo(each) for each in messages))
    server = grpc.server(ThreadPoolExecutor(4), options=WIDE)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Call": handler}),))
    KEEP.append(server)
    if folder:
        trust = Trust.inside(Path(folder))
        pair = trust.key.read_bytes(), trust.certificate.read_bytes()
        port = server.add_secure_port(LOOPBACK, grpc.ssl_server_credentials([pair], trust.ca.read_bytes(), True))
    else:
        port = server.add_insecure_port(LOOPBACK)
    server.start()
    return f"127.0.0.1:{port}"


KEEP: list[Any] = []
WIDE = [("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", 1 << 30)]
START: dict[str, Any] = {"websocket": websockets_bare, "grpc": grpc_bare, "torchrpc": lambda folder: ""}


def stay(session: Session) -> None:
    """Keep a connection until it ends."""
    session.closed.wait()


class BareWebsocket:
    """The bare library's end of a connection."""

    def __init__(self, address: str, folder: str) -> None:
        """Connect."""
        import websockets.sync.client

        context = client_context(Trust.inside(Path(folder))) if folder else None
        url = f"{'wss' if context else 'ws'}://{address}"
        self.connection = websockets.sync.client.connect(url, ssl=context, proxy=None, **PLAIN)

    def call(self, message: bytes) -> None:
        """Send a message and wait for one."""
        self.connection.send(message)
        self.connection.recv()


class BareStream:
    """Bare gRPC's end of a stream."""

    def __init__(self, address: str, folder: str) -> None:
        """Connect."""
        import grpc

        if folder:
            trust = Trust.inside(Path(folder))
            parts = (each.read_bytes() for each in (trust.ca, trust.key, trust.certificate))
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*parts), WIDE)
        else:
            channel = grpc.insecure_channel(address, WIDE)
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.answers = channel.stream_stream("/bare/Call")(iter(self.messages.get, None))

    def call(self, message: bytes) -> None:
        """Send a message and wait for one."""
        self.messages.put(message)
        next(self.answers)


class BareRPC:
    """Bare torch RPC, by the membership that our link has made."""

    def __init__(self, address: str, folder: str) -> None:
        """Nothing is needed."""

    def call(self, message: bytes) -> None:
        """Call with a tensor and wait for one."""
        from torch.distributed import rpc

        rpc.rpc_sync("head", bare_call, (torch.frombuffer(bytearray(message), dtype=torch.uint8),))


CONTESTS: dict[str, Any] = {"websocket": BareWebsocket, "grpc": BareStream, "torchrpc": BareRPC}


def links(effort: Effort) -> Tables:
    """Time of small and large calls, and as multiples of what the bare library needs, without and with TLS."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        made = str(initialise(Path(place) / "trust").folder)
        for link, folder in [("websocket", ""), ("websocket", made), ("grpc", ""), ("grpc", made), ("torchrpc", "")]:
            name = f"{link}{', TLS' if folder else ''}"
            rows += [{"link": name, **row} for row in measure(link, folder, effort.seconds / 5)]
    return {"links": rows}


def connect(address: str, terms: Terms) -> Session:
    """Meet the other machine, which may not listen yet."""
    limit = time.monotonic() + SECONDS
    while True:
        try:
            return meet(address, terms, lambda *_: None)[1]
        except ServiceLost:
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


def measure(link: str, folder: str, seconds: float) -> list[Row]:
    """All contests over one kind of link."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=serve, args=(end, link, folder), daemon=True)
    process.start()
    try:
        ours_at, bare_at = pipe.recv()
        session = connect(ours_at, Terms("joiner", folder, link=link, rank=1, world=2))
        bare = CONTESTS[link](bare_at, folder)
        ask = partial(session.call, seconds=SECONDS)
        order = {verb: ORDER.pack(verb.encode(), 0) for verb in ("same", "get")}
        contests = [("small", partial(ask, "same", 7), order["same"], ORDER.size)]
        for name, tree in payloads().items():
            size = size_of(tree)
            contests += [(f"{name} put", partial(ask, "put", tree), os.urandom(size), size)]
            contests += [(f"{name} fetched", partial(ask, "get"), order["get"], size)]
        rows = []
        for name, call, message, size in contests:
            rows += contest({name: call, "bare": partial(bare.call, message)}, size, seconds / 5, ("bare",))
        session.close()
    finally:
        process.kill()
    return rows
