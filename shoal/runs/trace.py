"""Who did what when: a file in Chrome's trace event format, which Perfetto and chrome://tracing show as a timeline.

It is the format's JSON array, whose closing bracket may be missing: a run that was killed leaves a file that opens.
Every machine is a process of the format and every worker a thread, whatever they really are.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from shoal.core.spans import Chunk
from shoal.runs import files

log = logging.getLogger("shoal")
# Workers are ended after that, and the last that they do is not asked for.
END = "until the learner and the evaluator ended"
EACH, ALL = 100_000, 2_000_000  # spans of a worker, and of all together, of about 90 bytes each
Source: TypeAlias = Callable[[], Iterable[tuple[str, str, Chunk]]]  # worker, machine, spans


def file_of(run: Path, steps: int) -> Path:
    """The file of a run from its beginning, or from the step at which it was resumed."""
    return run / (f"trace_{steps}.json" if steps else "trace.json")


class Trace:
    """Writes the spans of workers as they come, up to a limit of each and of all."""

    def __init__(self, path: Path, source: Source, each: int = EACH, total: int = ALL) -> None:
        """Begin the file, in place of an earlier one."""
        self.path, self._source, self._each, self._room = path, source, each, total
        self._began = time.monotonic()
        self._machines = {"": 0}
        self._workers: dict[str, int] = {}
        self._named: set[tuple[str, str]] = set()
        self._written: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._trouble = ""
        path.unlink(missing_ok=True)
        self._append("[\n" + _event({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "shoal"}}))

    def take(self) -> None:
        """Append what workers did since the last time."""
        lines = [line for worker, machine, chunk in self._source() for line in self._lines(worker, machine, chunk)]
        if lines:
            self._append("".join(lines))

    def close(self) -> None:
        """Take the last spans, say what was left out, and close the file."""
        self.take()
        words = ", ".join(f"{count:,} of {worker}" for worker, count in (+self._left_out).items())
        note = f"spans were left out: {words}" if words else ""
        label = {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": f"{END}; {note}" if note else END}}
        self._append(_next(label) + "\n]\n")
        if note:
            log.info("%s: %s", self.path.name, note)

    def _lines(self, worker: str, machine: str, chunk: Chunk) -> Iterator[str]:
        """The events of some spans; before the first of a worker, what its track is called."""
        process = self._machines.setdefault(machine, len(self._machines))
        thread = self._workers.setdefault(worker, len(self._workers) + 1)
        where = {"ph": "M", "pid": process, "tid": thread}
        if (worker, machine) not in self._named:
            self._named.add((worker, machine))
            yield _next({"name": "process_name", **where, "args": {"name": machine or "shoal"}})
            yield _next({"name": "thread_name", **where, "args": {"name": worker}})
            yield _next({"name": "thread_sort_index", **where, "args": {"sort_index": thread}})
        room = min(self._each - self._written[worker], self._room)
        names = [json.dumps(name) for name in chunk["names"]]
        starts, ends = (((chunk[key] - self._began) * 1e6).clip(0) for key in ("start", "end"))
        spans = [*zip(chunk["which"].tolist(), starts.tolist(), ends.tolist(), strict=True)]
        for which, start, end in spans[:room]:
            yield (
                f',\n{{"name":{names[which]},"ph":"X","ts":{start:.3f},"dur":{end - start:.3f},'
                f'"pid":{process},"tid":{thread}}}'
            )
        written = min(len(spans), room)
        self._room -= written
        self._written[worker] += written
        self._left_out[worker] += len(spans) - written + chunk["left_out"]

    def _append(self, text: str) -> None:
        try:
            files.append(self.path, text.encode())
        except OSError as error:
            if self._trouble != str(error):
                log.error("the trace cannot be written: %s", error)
            self._trouble = str(error)


def _event(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _next(content: dict[str, Any]) -> str:
    return ",\n" + _event(content)
