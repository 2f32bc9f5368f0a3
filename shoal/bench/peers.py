"""Other people's libraries on the same tasks, each by a driver in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from shoal.bench.measuring import Row
from shoal.core.errors import ShoalError

Peer = tuple[str, str, list[str]]  # name, virtual environment, driver and its arguments
# Our config → peers on the same task.
TRAINING: dict[str, list[Peer]] = {
    "impala_pong": [
        ("Stable-Baselines3 A2C", "sb3", ["sb3_train.py", "--algo=a2c"]),
        ("Sample Factory APPO", "sf", ["sf_train.py", "--workers=2", "--envs=4", "--num_epochs=1"]),
    ],
    "ppo_pong": [("Stable-Baselines3 PPO", "sb3", ["sb3_train.py", "--algo=ppo"])],
    "dqn_pong": [("Stable-Baselines3 DQN", "sb3", ["sb3_train.py", "--algo=dqn"])],
    "sac_halfcheetah": [("Stable-Baselines3 SAC", "sb3", ["sb3_train.py", "--algo=sac", "--env=HalfCheetah-v5"])],
    "td3_halfcheetah": [("Stable-Baselines3 TD3", "sb3", ["sb3_train.py", "--algo=td3", "--env=HalfCheetah-v5"])],
}
STILL: dict[str, list[Peer]] = {
    "ppo_cartpole": [
        ("Stable-Baselines3 PPO", "sb3", ["sb3_train.py", "--algo=ppo", "--env=still:Still-v0", "--envs=8"])
    ],
}
# `Still` without Shoal, in a module that drivers find.
MODULE = """
import gymnasium, numpy

class Still(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seen = numpy.zeros(4, numpy.float32)

    def reset(self, *, seed=None, options=None):
        return self.seen, {}

    def step(self, action):
        return self.seen, 0.0, False, False, {}

gymnasium.register("Still-v0", Still, max_episode_steps=1000)
"""
SOLVING = "Stable-Baselines3 PPO"


def drive(folder: Path, virtual: str, words: list[str]) -> Row:
    """Run a driver, and read the JSON line that it prints last."""
    python = folder.absolute() / virtual / "bin" / "python"
    if not python.exists():
        raise ShoalError(f"{words[0]} needs {python}, which does not exist")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "still.py").write_text(MODULE)
        command = [str(python), *words, *([f"--dir={scratch}"] if virtual == "sf" else [])]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": scratch}, capture_output=True, text=True, timeout=600
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise ShoalError(f"{words[0]} printed no result:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def train(folder: Path, virtual: str, words: list[str], seconds: float) -> Row:
    """Steps per second and memory of a peer; drivers count memory in MiB."""
    game = [] if any(word.startswith("--env=") for word in words) else ["--env=ALE/Pong-v5"]
    found = drive(folder, virtual, [*words, *game, f"--seconds={seconds:g}"])
    return {
        "steps_per_s": found["steps_per_s"],
        "first_update_s": found["launch_to_first_train_s"],
        **{key: found[key] * 2**20 / 1e6 for key in ("rss_mb", "pss_mb")},
        "processes": found["processes"],
    }


def solve(folder: Path, seed: int) -> Row:
    """Seconds from launch to a solved CartPole."""
    found = drive(folder, "sb3", ["solve_sb3.py", "--algo=ppo", f"--seed={seed}"])
    result = {"seconds": found["launch_to_goal_s"], "steps": found["steps"], "solved": found["solved"]}
    return {"who": SOLVING, "seed": seed, **result}
