"""Calls between two machines: our session over a websocket beside the bare library with the same bytes."""

from __future__ import annotations

import multiprocessing
import ssl
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.calls import NATURE, ORDER, contest
from shoal.core.tree import size_of
from shoal.engines.links import tls, websocket
from shoal.engines.links.certificates import Trust, initialise
from shoal.engines.links.greeting import Gate, Terms, meet
from shoal.engines.links.session import Session

LOOPBACK = "127.0.0.1:0"
SECONDS = 30.0  # that one call may take
PLAIN: dict[str, Any] = {"compression": None, "max_size": None, "ping_interval": None}  # as our link has them


def library() -> Any:
    """The bare library, with connections of its own."""
    import websockets.sync.client
    import websockets.sync.server

    return websockets


class Shelf:
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

    def echo(self, connection: Any) -> None:
        """The same with bytes: an order is answered by itself or by what is kept, anything else is kept."""
        for message in connection:
            order = len(message) == ORDER.size
            if not order:
                self.kept = message
            fetched = order and ORDER.unpack(message)[0].startswith(b"get")
            connection.send(self.kept if fetched else bytes(ORDER.size))


def serve(pipe: Any, folder: str) -> None:
    """Be the other machine: listen with our link and with the bare library, until the pipe closes."""
    shelf, bare = Shelf(), Shelf()
    terms = Terms("listener", folder)
    gate = Gate(LOOPBACK, terms, lambda _: shelf.answer, lambda _, session: stay(session), print, certificates=True)
    context = tls.server_context(Trust.inside(Path(folder))) if folder else None
    server = library().sync.server.serve(bare.echo, *websocket.split(LOOPBACK), ssl=context, **PLAIN)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send((gate.address, "{}:{}".format(*server.socket.getsockname())))
    pipe.recv()


def stay(session: Session) -> None:
    """Keep a connection until it ends."""
    session.closed.wait()


class Bare:
    """The bare library's end of a connection."""

    def __init__(self, address: str, context: ssl.SSLContext | None) -> None:
        """Connect."""
        url = f"{'wss' if context else 'ws'}://{address}"
        self.connection = library().sync.client.connect(url, ssl=context, proxy=None, **PLAIN)

    def call(self, message: bytes) -> None:
        """Send a message and wait for one."""
        self.connection.send(message)
        self.connection.recv()


def links(seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Time of small and large calls, and as multiples of what the bare library needs, without and with TLS."""
    with tempfile.TemporaryDirectory() as place:
        folder = str(initialise(Path(place) / "trust").folder)
        tables = {"plain": measure("", seconds / 2), "TLS 1.3": measure(folder, seconds / 2)}
    return {"links": [{"link": link, **row} for link, rows in tables.items() for row in rows]}


def measure(folder: str, seconds: float) -> list[dict[str, Any]]:
    """All contests over one kind of link."""
    random = np.random.default_rng(0)
    weights = {str(index): random.standard_normal(shape, np.float32) for index, shape in enumerate(NATURE)}
    rollout = {"observation": random.integers(0, 256, (20, 1, 4, 84, 84), np.uint8)}
    trees = {"rollout": rollout, "weights": weights}
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=serve, args=(end, folder), daemon=True)
    process.start()
    try:
        ours_at, bare_at = pipe.recv()
        _, session = meet(ours_at, Terms("joiner", folder), lambda *_: None)
        bare = Bare(bare_at, tls.client_context(Trust.inside(Path(folder))) if folder else None)
        ask = partial(session.call, seconds=SECONDS)
        order = {verb: ORDER.pack(verb.encode(), 0) for verb in ("same", "get")}
        rows = contest(
            {"small": partial(ask, "same", 7), "bare": partial(bare.call, order["same"])}, ORDER.size, seconds / 5
        )
        for name, tree in trees.items():
            size = size_of(tree)
            calls = {f"{name} put": partial(ask, "put", tree), "bare": partial(bare.call, random.bytes(size))}
            rows += contest(calls, size, seconds / 5)
            calls = {f"{name} fetched": partial(ask, "get"), "bare": partial(bare.call, order["get"])}
            rows += contest(calls, size, seconds / 5)
        session.close()
    finally:
        process.kill()
    return rows
