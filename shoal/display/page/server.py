"""The server of the page: this machine only, nothing without the token, nothing written, one answer for all who ask."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from subprocess import Popen
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shoal.core.errors import SettingsError
from shoal.display.page.film import Film, Frame
from shoal.display.page.watched import Watched

log = logging.getLogger("shoal")
FRESH = 1.0  # seconds for which what was read from the folders is fresh
PLACES = 64  # connections at once
PATIENCE = 20.0  # seconds in which somebody who is connected must ask for something
FRAME = 1.0  # seconds to wait for the next frame
FILMS = 3  # policies that play at once
HERE = ("127.0.0.1", "localhost", "[::1]")  # names of this machine, at which no other page can have us asked
POLICIES = ("newest", "best")
ASSETS = {"": "page.html", "page.css": "page.css", "page.js": "page.js", "chart.js": "chart.js", "flow.js": "flow.js"}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token in it
    "X-Content-Type-Options": "nosniff",
}


class Answer:
    """A body, packed once for all who ask, and a tag by which they know that they have it already."""

    def __init__(self, kind: str, body: bytes) -> None:
        """Pack it."""
        self.kind, self.body, self.packed = kind, body, gzip.compress(body, 3, mtime=0)
        self.tag = hashlib.sha256(body).hexdigest()[:16]

    @classmethod
    def of(cls, value: Any) -> Answer:
        """As JSON."""
        return cls("application/json", json.dumps(value, allow_nan=False, separators=(",", ":")).encode())


class Page:
    """What the page shows: folders are read when somebody asks, at most once a second, however many ask."""

    def __init__(
        self,
        runs: Sequence[Path],
        advise: Callable[[Path], Sequence[str]] = lambda folder: (),
        play: Callable[[Path, str], Popen[bytes]] | None = None,
    ) -> None:
        """Show these runs; `play` starts the program that plays a policy of one, None: nothing is played."""
        self.runs = [Watched(run, advise) for run in runs]
        self.plays, self._turn = play is not None, threading.Lock()
        self._read = -math.inf
        self._state = self._curves = Answer.of({})
        self._serials: list[int] = []
        self.films: dict[tuple[int, str], Film] = {}
        if play is not None:
            self.films = {
                (index, policy): Film(lambda run=run, policy=policy: play(run, policy))  # type: ignore[misc]
                for index, run in enumerate(runs)
                for policy in POLICIES
            }

    def state(self) -> Answer:
        """How every run stands."""
        self._refresh()
        return self._state

    def curves(self) -> Answer:
        """The curves of every run."""
        self._refresh()
        return self._curves

    def frame(self, run: int, policy: str, after: int) -> Frame | str:
        """A frame of a policy that plays, or why there is none."""
        if not self.plays:
            return "policies are not played: --no-play"
        film = self.films.get((run, policy))
        if film is None:
            return "no such policy"
        if not film.running and sum(other.running for other in self.films.values()) >= FILMS:
            return f"{FILMS} policies are playing already"
        return film.look(after, FRAME)

    def close(self) -> None:
        """End whoever plays, and let go of the files."""
        for film in self.films.values():
            film.close()
        for run in self.runs:
            run.close()

    def _refresh(self) -> None:
        with self._turn:
            if time.monotonic() - self._read < FRESH:
                return
            self._state = Answer.of({"runs": [run.refresh() for run in self.runs], "plays": self.plays})
            serials = [run.curves.serial for run in self.runs]
            if serials != self._serials:
                self._curves = Answer.of([run.curves.as_dict() for run in self.runs])
                self._serials = serials
            self._read = time.monotonic()


class Server(ThreadingHTTPServer):
    """Listens on this machine only; a thread for each connection, up to a number of them."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: Page, port: int = 0, token: str = "") -> None:
        """Listen at a port, any where it is 0."""
        self.page, self.token = page, token or secrets.token_urlsafe(24)
        self._places = threading.BoundedSemaphore(PLACES)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"cannot listen at 127.0.0.1:{port}: {error}") from None

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Bind, without asking the network for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection if there is room for it."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that broke."""
        log.debug("a connection to the page broke", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Answers GET below the token; everything else is refused without a word."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server: Server

    def setup(self) -> None:
        """Send small answers at once."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def do_GET(self) -> None:
        """Answer who has the token and asks for this machine by one of its own names."""
        found = urlsplit(self.path)
        _, token, name = [*found.path.split("/", 2), "", ""][:3]
        right = secrets.compare_digest(token.encode(), self.server.token.encode())
        if not right or self._host() not in HERE:
            self.send_error(403)
            return
        asked = {key: values[-1] for key, values in parse_qs(found.query).items()}
        if name in ASSETS and found.path.count("/") == 2:
            self._send(asset(ASSETS[name]))
        elif name in ("state", "curves"):
            answer = self.server.page.state() if name == "state" else self.server.page.curves()
            self._send(answer, asked.get("have", ""))
        elif name == "frame":
            self._send_frame(asked)
        else:
            self._finish(404)

    def _host(self) -> str:
        """The name under which we were asked, without the port: a tunnel may have any."""
        host = self.headers.get("Host", "").strip().lower()
        return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]

    def _send(self, answer: Answer, have: str = "") -> None:
        if have == answer.tag:
            self._finish(204)
            return
        packs = "gzip" in self.headers.get("Accept-Encoding", "")
        told = {"Content-Type": f"{answer.kind}; charset=utf-8", "ETag": answer.tag}
        packed = {"Content-Encoding": "gzip"} if packs else {}
        self._finish(200, answer.packed if packs else answer.body, {**told, **packed})

    def _send_frame(self, asked: dict[str, str]) -> None:
        run, after = (int(text) if (text := asked.get(key, "")).isdecimal() and len(text) < 10 else -1
                      for key in ("run", "after"))  # fmt: skip
        found = self.server.page.frame(run, asked.get("policy", ""), after)
        if isinstance(found, str):
            self._finish(202, found.encode(), {"Content-Type": "text/plain; charset=utf-8"})
        else:
            facts = json.dumps({"number": found.number, **found.facts})  # ASCII in one line
            self._finish(200, found.image, {"Content-Type": "image/png", "X-Frame": facts})

    def _finish(self, code: int, body: bytes = b"", told: dict[str, str] | None = None) -> None:
        self.send_response_only(code)
        for name, value in {**HEADERS, **(told or {}), "Content-Length": str(len(body))}.items():
            if code != 204 or name != "Content-Length":
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse, whatever was wrong: a stranger learns nothing, not even what this is."""
        self.close_connection = True
        self.send_response_only(403)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address has the token in it."""


_assets: dict[str, Answer] = {}


def asset(name: str) -> Answer:
    """A file that comes with the page."""
    if name not in _assets:
        content = resources.files(__package__).joinpath(name).read_bytes()
        _assets[name] = Answer(TYPES[name.rpartition(".")[2]], content)
    return _assets[name]
