"""Other people's libraries on the same tasks, each by a driver in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

# Our config → peers on the same task: name, virtual environment, driver and its arguments.
TRAINING = {
    "impala_pong": [
        ("Stable-Baselines3 A2C", "sb3", ["sb3_train.py", "--algo=a2c"]),
        ("Sample Factory APPO", "sf", ["sf_train.py", "--workers=2", "--envs=4", "--num_epochs=1"]),
    ],
    "ppo_pong": [("Stable-Baselines3 PPO", "sb3", ["sb3_train.py", "--algo=ppo"])],
    "dqn_pong": [("Stable-Baselines3 DQN", "sb3", ["sb3_train.py", "--algo=dqn"])],
}
SOLVING = "Stable-Baselines3 PPO"


def drive(folder: Path, virtual: str, words: list[str]) -> dict[str, Any]:
    """Run a driver, and read the JSON line that it prints last."""
    python = str(folder.absolute() / virtual / "bin" / "python")
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, *words, *([f"--dir={scratch}"] if virtual == "sf" else [])]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{words[0]} printed no result:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def train(folder: Path, virtual: str, words: list[str], seconds: float) -> dict[str, Any]:
    """Steps per second and memory of a peer; drivers count memory in MiB."""
    found = drive(folder, virtual, [*words, "--env=ALE/Pong-v5", f"--seconds={seconds:g}"])
    memory = {key: found[key] * 2**20 / 1e6 for key in ("rss_mb", "pss_mb")}
    first = found["launch_to_first_train_s"]
    return {
        "steps_per_s": found["steps_per_s"],
        "first_update_s": first,
        **memory,
        "processes": found["processes"],
    }


def solve(folder: Path, seed: int) -> dict[str, Any]:
    """Seconds from launch to a solved CartPole."""
    found = drive(folder, "sb3", ["solve_sb3.py", "--algo=ppo", f"--seed={seed}"])
    seconds = found["launch_to_goal_s"]
    return {
        "who": SOLVING,
        "seed": seed,
        "seconds": seconds,
        **{key: found[key] for key in ("steps", "solved")},
    }
