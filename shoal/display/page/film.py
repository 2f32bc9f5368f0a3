"""A policy that plays in a process of its own while somebody looks."""

from __future__ import annotations

import json
import logging
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from shoal.display.page.reading import mapping, text

log = logging.getLogger("shoal")
PAUSE = 2.0  # seconds without a look after which it stands still
LEAVE = 60.0  # and after which its process ends
AGAIN = 10.0  # seconds before another try, where it failed
ENDING = 5.0  # seconds in which its process may end
SIZES = struct.Struct(">II")
FACTS, FRAME = 1 << 16, 32 << 20  # bytes at most
WIDTH = 600  # letters of an error


@dataclass(frozen=True)
class Frame:
    """An image, its number, and what it shows."""

    number: int
    facts: Mapping[str, Any]
    image: bytes


class Film:
    """The frames of one policy; all who look see the same, and the process goes on only as they ask for more."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        """Start nothing yet."""
        self._start = start
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._frame: Frame | None = None
        self._looked = self._failed = -LEAVE
        self._problem, self._closed = "", False

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._thread is not None and self._thread.is_alive()

    def look(self, after: int, seconds: float) -> Frame | str:
        """The newest frame, one with another number than `after` if it comes in time; else why there is none."""
        with self._news:
            self._looked = time.monotonic()
            self._news.notify_all()
            waits = self._problem and self._looked - self._failed < AGAIN
            if not self.running and not waits and not self._closed:
                self._thread = threading.Thread(target=self._run, name="film", daemon=True)
                self._thread.start()
            self._news.wait_for(lambda: self._frame is not None and self._frame.number != after, seconds)
            return self._frame or self._problem or "the policy is being loaded"

    def close(self) -> None:
        """End the process."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join(ENDING)

    def _run(self) -> None:
        """Ask for frames while somebody looks, and end the process when nobody has for long."""
        problem, number, process = "", 0, None
        try:
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            with self._news:
                self._process = process
            while self._wanted():
                process.stdin.write(b".")
                process.stdin.flush()
                facts, image = receive(process.stdout)
                if "error" in facts:
                    problem = text(facts["error"], WIDTH) or "the policy cannot be played"
                    break
                number += 1
                with self._news:
                    self._problem, self._frame = "", Frame(number, facts, image)
                    self._news.notify_all()
        except (OSError, ValueError) as error:
            problem = "" if self._closed else f"the program that plays the policy ended: {error}"
        finally:
            if process is not None:
                end(process)
            with self._news:
                self._process = self._frame = None
                self._problem, self._failed = problem, time.monotonic()

    def _wanted(self) -> bool:
        """Wait for somebody to look; False: end."""
        with self._news:
            recent = self._news.wait_for(lambda: self._closed or time.monotonic() - self._looked < PAUSE, LEAVE)
            return recent and not self._closed


def receive(source: Any) -> tuple[Mapping[str, Any], bytes]:
    """Read the facts and the image of a frame."""
    facts, image = SIZES.unpack(_exactly(source, SIZES.size))
    if facts > FACTS or image > FRAME:
        raise ValueError(f"a frame of {image:,} bytes with {facts:,} bytes of facts is too large")
    return mapping(json.loads(_exactly(source, facts))), _exactly(source, image)


def _exactly(source: BinaryIO, size: int) -> bytes:
    content = source.read(size)
    if len(content) < size:
        raise ValueError("it sent no whole frame")
    return content


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process by leaving, or by force, and wait for it."""
    with suppress(OSError):
        process.stdin and process.stdin.close()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
