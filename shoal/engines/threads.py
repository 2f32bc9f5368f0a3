"""The engine of one process: every worker has a thread, services are plain objects behind a lock."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.randomness import Randomness, derive, seed_everything
from shoal.core.types import Array
from shoal.engines.host import Host, stacks
from shoal.engines.memory import private
from shoal.engines.options import Options
from shoal.engines.supervisor import Launcher, Worker

log = logging.getLogger("shoal")
GRACE = 10.0  # seconds in which threads have to end


class Threads(Launcher):
    """A thread for each worker; under lockstep they take turns."""

    shared = True

    def __init__(self, options: Options) -> None:
        """Begin with nothing running."""
        self.lockstep = options.lockstep
        self.threads: dict[str, threading.Thread] = {}
        self.left: list[str] = []  # threads that did not end
        self._turns: dict[str, queue.SimpleQueue[bool]] = {}  # False: end
        self._news: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        if not options.lockstep:  # side by side, the process-wide generators serve everyone
            seed_everything(derive(options.seed))

    def open(self, head: Host) -> None:
        """Take the head, where all services live."""
        self.head = head

    def share(self, name: str, tree: Mapping[str, Array]) -> Mapping[str, Array]:
        """Copy arrays into memory that every worker sees."""
        return private(tree)

    def start(self, worker: Worker, start: Mapping[str, Any]) -> None:
        """Start a worker in a thread of its own."""
        host = self.head.member(worker.name, worker.work, worker.args, start["rights"], start["spans"])
        self._turns[worker.name] = queue.SimpleQueue()
        args = (worker.name, host, Randomness(start["seed"]) if self.lockstep else None)
        worker.host, worker.seat = host, threading.Thread(target=self._run, args=args, name=worker.name, daemon=True)
        self.threads[worker.name] = worker.seat
        worker.seat.start()

    def _run(self, name: str, host: Host, randomness: Randomness | None) -> None:
        assert host.work is not None
        try:
            if randomness is None:
                host.drive()
            while randomness is not None and not host.activity.ended and self._turns[name].get():
                with randomness.active():
                    moved = host.advance()
                if moved is not None:
                    self._news.put((name, {"turned": moved}))
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            with suppress(ShoalError):
                host.work.close()
            self._news.put((name, {"ended": host.activity.ended}))

    def poll(self, seconds: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Wait for news of a thread, and raise what any of them raised."""
        with suppress(queue.Empty):
            yield self._news.get(timeout=seconds)
            while True:
                yield self._news.get_nowait()
        if self._failure is not None:
            raise self._failure

    def turn(self, worker: Worker) -> None:
        """Let a thread advance its worker once."""
        self._turns[worker.name].put(True)

    def call(self, service: str, method: str, args: Sequence[Any]) -> Any:
        """Every service is in the head."""
        raise ShoalError(f"there is no service {service!r}")

    def stop(self, worker: Worker) -> None:
        """Ask a thread to end after its unit of work."""
        self._turns[worker.name].put(False)

    def end(self, worker: Worker, seconds: float) -> str:
        """Wait for a thread, which nothing can end by force."""
        thread, worker.seat = worker.seat, None
        if thread is not None:
            thread.join(timeout=max(seconds, GRACE if not self.left else 0.01))
            self.left += [worker.name] if thread.is_alive() else []
        return "did not end" if worker.name in self.left else "ended"

    def stacks(self, worker: Worker) -> str:
        """Where the threads of this process are."""
        return stacks({thread.ident or 0: name for name, thread in self.threads.items()})

    def close(self) -> None:
        """Say which threads are left."""
        if self.left:
            log.warning("threads that do not end: %s\n%s", ", ".join(self.left), stacks({}))
