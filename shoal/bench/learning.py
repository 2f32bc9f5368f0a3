"""Learning held to published scores: tasks over seeds, and a page with what was reached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shoal.bench.measuring import Row
from shoal.core.errors import SettingsError, nearest
from shoal.core.tree import flat
from shoal.runs.launching import Job, carry_out

SCORE = "score.json"  # beside the files of a run: what its newest policy was evaluated to
EPISODES = 100


@dataclass(frozen=True)
class Task:
    """A config with changes to it, and the published figure that it is held to."""

    config: str
    reference: str
    source: str
    changes: tuple[str, ...] = ()


def atari(config: str, game: str, reference: str, source: str) -> Task:
    """Another game by the config of one: what suits a single game is not what a table of games should show."""
    return Task(config, reference, source, (f"environment.id=ALE/{game}-v5", "steps=10000000"))


def mujoco(config: str, name: str, reference: str, source: str, *changes: str) -> Task:
    """Another of MuJoCo's tasks by the config of HalfCheetah, as the papers have one for all."""
    return Task(f"{config}_halfcheetah", f"{reference}, 1 M steps", source, (f"environment.id={name}-v5", *changes))


CLEANRL = "[CleanRL](https://docs.cleanrl.dev)"
SLM = "[SLM Lab](https://github.com/kengz/SLM-Lab/blob/master/docs/BENCHMARKS.md)"
ZOO = "[SB3 zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md), one run"
GYMNASIUM = "[Gymnasium](https://gymnasium.farama.org/environments/classic_control/cart_pole/), the reward threshold"
GYMNAX = "[gymnax](https://github.com/RobertTLange/gymnax), one run"
RLLIB = "[RLlib](https://github.com/ray-project/rl-experiments)"
TIANSHOU = "[Tianshou](https://github.com/thu-ml/tianshou/tree/master/examples/mujoco), v3, 10 seeds"
RL_GAMES = "[rl_games](https://github.com/Denys88/rl_games/blob/master/docs/SAC_BENCHMARKS.md), training returns"
JAXRL = (
    "[JAXRL](https://github.com/ikostrikov/jaxrl/tree/main/learning_curves/logs), v2, 10 seeds, entropy per number -0.5"
)
TD_MPC2 = (
    "[TD-MPC2](https://github.com/nicklashansen/tdmpc2/blob/main/results/sac/cartpole-swingup.csv), 3 seeds, "
    "each action for 2 steps"
)
TQC = ("algorithm.quantiles=25", "algorithm.drop=2")
TASKS: dict[str, Task] = {
    "cartpole-ppo": Task("ppo_cartpole", "475", GYMNASIUM),
    "cartpole-impala": Task("impala_cartpole", "475", GYMNASIUM),
    "cartpole-dqn": Task("dqn_cartpole", "475", GYMNASIUM),
    "doorkey-ppo": Task("ppo_doorkey", "0.964, PPO, 100 k steps", ZOO),
    "minatar-ppo": Task("ppo_minatar", "28, PPO, 10 M steps", GYMNAX),
    "minatar-impala": Task("impala_minatar", "28, PPO, 10 M steps", GYMNAX),
    "lunarlander-ppo": Task("ppo_lunarlander", "265.9, double DQN with priorities, 300 k steps", SLM),
    "lunarlander-apex": Task("apex_dqn_lunarlander", "265.9, double DQN with priorities, 300 k steps", SLM),
    "pendulum-sac": Task("sac_pendulum", "-151, SAC, 20 k steps", ZOO),
    "pendulum-td3": Task("td3_pendulum", "-151, TD3, 20 k steps", ZOO),
    "pendulum-fasttd3": Task("fasttd3_pendulum", "-151, TD3, 20 k steps", ZOO),
    "pendulum-d4pg": Task("d4pg_pendulum", "-151, TD3, 20 k steps", ZOO),
    "pendulum-apex": Task("apex_dpg_pendulum", "-151, TD3, 20 k steps", ZOO),
    "swingup-sac": Task("sac_swingup", "835 ± 10, SAC, 100 k steps", TD_MPC2),
    "pybullet-reacher-sac": Task("sac_pybullet_reacher", "18.06, SAC, 300 k steps", ZOO),
    "halfcheetah-sac": Task(
        "sac_halfcheetah", "5794 ± 461, SAC, 100 k steps; 11140 ± 665, SAC, 1 M steps", f"{JAXRL}; {RL_GAMES}"
    ),
    "halfcheetah-td3": mujoco("td3", "HalfCheetah", "10201 ± 773, TD3", TIANSHOU),
    "halfcheetah-tqc": mujoco("sac", "HalfCheetah", "12090, TQC", ZOO, *TQC),
    "halfcheetah-ppo": mujoco("ppo", "HalfCheetah", "5784 ± 1244, PPO", TIANSHOU),
    "hopper-sac": mujoco("sac", "Hopper", "3542 ± 52, SAC", TIANSHOU),
    "hopper-td3": mujoco("td3", "Hopper", "3472 ± 117, TD3", TIANSHOU),
    "hopper-tqc": mujoco("sac", "Hopper", "3754, TQC", ZOO, *TQC),
    "hopper-ppo": mujoco("ppo", "Hopper", "2609 ± 701, PPO", TIANSHOU),
    "walker2d-sac": mujoco("sac", "Walker2d", "5007 ± 252, SAC", TIANSHOU),
    "walker2d-td3": mujoco("td3", "Walker2d", "3982 ± 275, TD3", TIANSHOU),
    "walker2d-tqc": mujoco("sac", "Walker2d", "4381, TQC", ZOO, *TQC),
    "walker2d-ppo": mujoco("ppo", "Walker2d", "3589 ± 757, PPO", TIANSHOU),
    "ant-sac": mujoco("sac", "Ant", "5850 ± 476, SAC", TIANSHOU),
    "ant-td3": mujoco("td3", "Ant", "5116 ± 800, TD3", TIANSHOU),
    "ant-tqc": mujoco("sac", "Ant", "3339, TQC", ZOO, *TQC),
    "ant-ppo": mujoco("ppo", "Ant", "3258 ± 1079, PPO", TIANSHOU),
    "pong-ppo": Task("ppo_pong", "20.36 ± 0.20, PPO, 10 M steps", CLEANRL),
    "pong-impala": Task("impala_pong", "20.36 ± 0.20, PPO, 10 M steps", CLEANRL),
    "pong-dqn": Task("dqn_pong", "20.25 ± 0.41, DQN, 10 M steps", CLEANRL),
    "pong-apex": Task("apex_dqn_pong", "20.25 ± 0.41, DQN, 10 M steps", CLEANRL),
    "breakout-ppo": atari("ppo_pong", "Breakout", "414.7 ± 28.1, PPO, 10 M steps", CLEANRL),
    "breakout-impala": atari("impala_pong", "Breakout", "385, IMPALA with 32 workers, 10 M steps", RLLIB),
    "qbert-impala": atari("impala_pong", "Qbert", "4068, IMPALA with 32 workers, 10 M steps", RLLIB),
    "beamrider-impala": atari("impala_pong", "BeamRider", "2071, IMPALA with 32 workers, 10 M steps", RLLIB),
    "spaceinvaders-impala": atari("impala_pong", "SpaceInvaders", "719, IMPALA with 32 workers, 10 M steps", RLLIB),
    "qbert-apex": atari("apex_dqn_pong", "Qbert", "15302, Ape-X with 8 workers, 10 M steps", RLLIB),
    "beamrider-apex": atari("apex_dqn_pong", "BeamRider", "6134, Ape-X with 8 workers, 10 M steps", RLLIB),
    "spaceinvaders-apex": atari("apex_dqn_pong", "SpaceInvaders", "686, Ape-X with 8 workers, 10 M steps", RLLIB),
}


def chosen(names: Sequence[str]) -> list[str]:
    """The tasks with these names, or all."""
    for name in names:
        if name not in TASKS:
            raise SettingsError(f"unknown task {name!r}: choose from {', '.join(TASKS)}{nearest(name, TASKS)}")
    return [*names] or [*TASKS]


def learn(
    names: Sequence[str], seeds: Sequence[int], folder: Path, overrides: Sequence[str], at_once: int, episodes: int
) -> Iterator[Row]:
    """Train every task with every seed, as many at once as wanted; runs that are there are continued, or left alone."""
    jobs = {_job(name, seed, folder, overrides): (name, seed) for seed in seeds for name in names}
    with closing(carry_out(jobs, at_once)) as finished:
        for job, _ in finished:
            name, seed = jobs[job]
            yield {"task": name, "seed": seed, **score(job.folder, episodes)}


def run_folder(folder: Path, name: str, seed: int) -> Path:
    """Where a run lies."""
    return folder / name / f"seed-{seed}"


def _job(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> Job:
    # To the last step, since the policy that is scored is the last: not the one that once reached a target.
    settings = (f"seed={seed}", "evaluation.target=null", *TASKS[name].changes)
    return Job(run_folder(folder, name, seed), TASKS[name].config, settings, tuple(overrides))


def score(run: Path, episodes: int) -> Row:
    """What the newest policy of a run reaches; it is evaluated once for each number of steps."""
    from shoal.run import Run

    found = Run(run)
    summary = found.summary
    if not summary:
        return {"steps": None, "seconds": None, "score": None, "problem": f"see {run.parent / f'{run.name}.log'}"}
    path = run / SCORE
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if (known.get("steps"), known.get("episodes")) != (summary["steps"], episodes):
        result = found.evaluate(episodes, "newest")
        known = {"steps": summary["steps"], "episodes": episodes, "mean": result.statistics["mean"],
                 "low": result.statistics["low"], "high": result.statistics["high"]}  # fmt: skip
        path.write_text(json.dumps(known) + "\n")
    return {"steps": summary["steps"], "seconds": summary["seconds"], "score": known["mean"]}


def scored(folder: Path, name: str) -> list[Path]:
    """The runs of a task whose policy was evaluated."""
    return [run for run in sorted((folder / name).glob("seed-*")) if (run / SCORE).exists()]


def results(folder: Path, before: Mapping[str, Row]) -> list[Row]:
    """A row for each task, of all its runs in a folder; else as it was before, or saying that it was not run."""
    from shoal.display.statistics import interval

    rows: list[Row] = []
    for name, task in TASKS.items():
        runs = scored(folder, name)
        row: Row = {"task": name, "config": task.config, "reference": task.reference, "source": task.source}
        if not runs:
            rows.append({**before.get(name, {"runs": 0}), **row})
            continue
        found = [json.loads((run / SCORE).read_text()) for run in runs]
        scores = [one["mean"] for one in found]
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
        start = json.loads((runs[0] / "provenance.json").read_text())[-1]
        low, high = interval(scores)
        rows.append(
            {
                **row,
                "runs": len(runs),
                "score": sum(scores) / len(scores),
                "low": low,
                "high": high,
                "scores": scores,
                "episodes": sorted({one["episodes"] for one in found}),
                "sticky": summaries[0].get("sticky"),
                "steps": median(summary["steps"] for summary in summaries),
                "seconds": median(summary["seconds"] for summary in summaries),
                "machine": ", ".join([f"{start['usable_cores']:g} cores", *start["devices"]]),
                "changes": differences(task, runs[0]),
                "hash": settings_hash(runs[0]),
            }
        )
    return rows


def differences(task: Task, run: Path) -> list[str]:
    """The settings of a run that are not those of the config: how it was run."""
    from shoal.experiment import load

    shipped, own = (dict(flat(load(file).model_dump(mode="json"))) for file in (task.config, run / "config.yaml"))
    left_out = {"seed", "evaluation.target"}
    return [f"{key}={value}" for key, value in own.items() if key not in left_out and shipped.get(key) != value]


def settings_hash(run: Path) -> str:
    """Eight letters that stand for a run's settings, whatever its seed."""
    lines = [line for line in (run / "config.yaml").read_text().splitlines() if not line.startswith("seed:")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def write_page(folder: Path, page: Path) -> None:
    """Write a table of all tasks, and a picture of the curves of each that was run."""
    from shoal.display.console import duration
    from shoal.display.plots import comparison
    from shoal.run import Run

    data = page.with_suffix(".json")  # so that rows stay whose runs are on another machine, or gone
    before = json.loads(data.read_text()) if data.exists() else []
    rows = results(folder, {row["task"]: row for row in before})
    episodes = " or ".join(str(one) for one in sorted({one for row in rows for one in row.get("episodes", [])}))
    lines = [
        "# Results",
        "",
        "What the shipped configs reach, beside published figures. This page is written by",
        "[`shoal bench learn`](commands/bench.md#learn). A score is the mean over runs of the mean return of "
        f"{episodes or EPISODES} episodes",
        "of the last policy, without exploration, with its 95 % bootstrap interval over runs; then that of each run.",
        "An Atari step is one action, repeated for 4 frames; scores of Atari games say how sticky actions were.",
        "",
        "| task | score | runs | steps | time | machine | settings | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pictures: list[str] = []
    for row in rows:
        published = f"{row['reference']} ({row['source']})"
        if not row["runs"]:
            lines.append(f"| `{row['task']}` | not run | | | | | `{row['config']}` | {published} |")
            continue
        each = ", ".join(f"{one:.4g}" for one in row["scores"])
        sticky = "" if row["sticky"] is None else f"; sticky {row['sticky']:g}"
        lines.append(
            f"| `{row['task']}` | **{row['score']:.4g}** ({row['low']:.4g} to {row['high']:.4g}){sticky} | {each} | "
            f"{row['steps']:,.0f} | {duration(row['seconds'])} | {row['machine']} | "
            f"{' '.join([f'`{word}`' for word in (row['config'], *row['changes'])])}, {row['hash']} | {published} |"
        )
        path = page.parent / "pictures" / f"learn_{row['task']}.png"
        if runs := [Run(run) for run in scored(folder, row["task"])]:
            comparison({row["task"]: [(run.directory.name, run.rows()) for run in runs]}, path, row["task"])
        pictures += ["", f"![Evaluation returns of {row['task']}](pictures/{path.name})"]
    page.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps([row for row in rows if row["runs"]], indent=1) + "\n")
    page.write_text("\n".join([*lines, *pictures]) + "\n")
