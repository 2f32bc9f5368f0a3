"""The newest policy of a run, playing: a program that sends a frame for every byte it receives."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from shoal.core.errors import ShoalError
from shoal.core.machine import give_way
from shoal.core.randomness import derive, seed_everything
from shoal.core.types import Array

RATE = 12.0  # frames per second at most, each of as many steps as pass in its time
RELOAD = 3.0  # seconds between looks for newer weights
SIZES = struct.Struct(">II")  # of the facts about a frame, and of the frame


def main() -> None:
    """Play the policy named by the second argument of the run in the first, as long as somebody asks."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an environment prints must not get between frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when whoever asks is gone
    try:
        serve(Path(sys.argv[1]), sys.argv[2], sys.stdin.buffer, sink)
    except BrokenPipeError:
        pass
    except ShoalError as error:
        send(sink, {"error": str(error)})
    except Exception as error:  # an environment may raise anything
        send(sink, {"error": f"{type(error).__name__}: {error}"})


def serve(run: Path, which: str, source: BinaryIO, sink: BinaryIO) -> None:
    """Send a frame for every byte, until there are no more; in between nothing moves."""
    from shoal.display.png import png

    for number, (facts, frame) in enumerate(frames(run, which)):
        began = time.monotonic()
        if not source.read(1):
            return
        send(sink, facts, png(frame))
        if not number:  # not before: loading takes seconds, but minutes of what training leaves
            idle()
        time.sleep(max(facts["seconds"] - (time.monotonic() - began), 0.0))


def idle() -> None:
    """Take only what training leaves of the processor from now on."""
    give_way(19)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def send(sink: BinaryIO, facts: Mapping[str, Any], frame: bytes = b"") -> None:
    """Write the facts and the frame, with their sizes before them."""
    told = json.dumps(facts).encode()
    sink.write(SIZES.pack(len(told), len(frame)) + told + frame)
    sink.flush()


def frames(run: Path, which: str) -> Iterator[tuple[dict[str, Any], Array]]:
    """Frames of one episode after the other, with facts about each; newer weights are taken as they appear."""
    from shoal.display.page.reading import number
    from shoal.run import Run
    from shoal.workers.evaluator import play

    policy = Run(run).policy(which)
    seen = stamp(policy.path)
    envs = Run(run).filmed(seed=derive(0, "watch", time.time_ns()))
    each = max(round(envs.fps / RATE), 1)
    seed_everything(derive(0, "watch", time.time_ns()))
    looked, episode = time.monotonic(), 0
    try:
        while True:
            episode, score = episode + 1, 0.0
            playing = play(policy.experiment.algorithm, policy.follower, envs, 1, pulls=policy.pulls)
            for step, ended in enumerate(playing):
                score += float(envs.points[0]) if step else 0.0
                if step % each and not ended:
                    continue
                if time.monotonic() - looked >= RELOAD:
                    looked = time.monotonic()
                    seen = reload(policy, run, which, seen)
                facts = {"trained": policy.steps, "checkpoint": policy.path.name, "episode": episode, "step": step,
                         "score": number(round(score, 4)), "seconds": each / envs.fps}  # fmt: skip
                yield facts, envs.render()
    finally:
        envs.close()


def stamp(path: Path) -> tuple[str, int]:
    """What tells a checkpoint from another under the same name."""
    return path.name, (path / "state.json").stat().st_mtime_ns


def reload(policy: Any, run: Path, which: str, seen: tuple[str, int]) -> tuple[str, int]:
    """Load the weights of a newer checkpoint, if there is one that can be read; returns which they are."""
    from shoal.runs import checkpoint
    from shoal.workers.saving import load_weights

    try:
        path = checkpoint.find(run, which)
        if (found := stamp(path)) == seen:
            return seen
        saved = checkpoint.read(path, ("weights",))
        load_weights(policy.follower.net, saved["weights"])
    except (ShoalError, OSError, KeyError):  # it was just replaced by a newer one: the next look finds that
        return seen
    policy.path, policy.state = path, saved["state"]
    return found
