"""The recipes in deploy/ are what the commands and settings allow, and the Slurm script runs, stops and resumes."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from shoal import experiment
from shoal.configs import parse_overrides
from shoal.runs import checkpoint
from tests.pace import seconds
from tests.test_docs import SHOAL, parse

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BATCH = DEPLOY / "slurm" / "shoal.sbatch"
CLUSTER, RAY = (DEPLOY / "kubernetes" / name for name in ("cluster.yaml", "ray.yaml"))
SCRIPTS = [BATCH, DEPLOY / "containers" / "head.sh", DEPLOY / "kubernetes" / "secrets.sh"]
PLACEHOLDERS = {"${settings[@]}": "seed=1", "$@": "", "$CORES": "4", "$here": "2"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(path.read_text())]


def listed(tree: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every container or volume of a manifest, wherever its pod is described."""
    if isinstance(tree, Mapping):
        yield from tree.get(key, [])
    for value in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else []:
        yield from listed(value, key)


def heads() -> Iterator[tuple[str, list[str]]]:
    """What every recipe gives to `shoal-head`."""
    compose = documents(DEPLOY / "containers" / "compose.yaml")[0]["services"]
    assert compose["head"]["entrypoint"] == ["shoal-head"]
    yield "compose.yaml", compose["head"]["command"]
    for container in listed(documents(CLUSTER), "containers"):
        if container.get("command") == ["shoal-head"]:
            yield "cluster.yaml", container["args"]
    words = shlex.split(documents(RAY)[0]["spec"]["entrypoint"])
    assert words.pop(0) == "shoal-head"
    yield "ray.yaml", words


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every other command of Shoal in the recipes: where, and its words."""
    compose = documents(DEPLOY / "containers" / "compose.yaml")[0]["services"]
    yield "compose.yaml", compose["node"]["command"]
    for line in compose["trust"]["command"][0].splitlines():
        if line.startswith("shoal "):
            yield "compose.yaml", shlex.split(line)[1:]
    for container in listed(documents(CLUSTER), "containers"):
        if "command" not in container:
            yield "cluster.yaml", container["args"]
    for script in SCRIPTS:
        for line in script.read_text().replace("\\\n", "").splitlines():
            if match := re.search(r'"\$SHOAL" ([a-z].*?)(?: > /dev/null| &)?$', line):
                yield script.name, shlex.split(match[1])
            if match := re.match(r"\s*(?:command=\(|set -- )((?:train|resume) .*?)\)?$", line):
                yield script.name, shlex.split(match[1])


def plain(word: str) -> str:
    """A word of a script with something in the place of its variables."""
    return re.sub(r"\$\{?\w+[^}]*\}?", "x", PLACEHOLDERS.get(word, word))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_read_by_their_shell(script: Path) -> None:
    shell = script.read_text().splitlines()[0].removeprefix("#!").rpartition("/")[2]
    done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_in_recipes_can_be_typed() -> None:
    found = [*commands()]
    assert len(found) >= 12
    for where, words in found:
        parse(SHOAL, [plain(word) for word in words if word != "$@"], f"{where}: {words}")


def test_settings_in_recipes_exist_and_make_sense() -> None:
    found = [*heads()]
    assert len(found) == 3
    for where, (config, run, *settings) in found:
        assert run.startswith("/runs/"), where
        chosen = experiment.load(config, parse_overrides(settings))
        assert chosen.engine in ("cluster", "ray"), where
    array = re.search(r"^settings=\((.*) \"\$@\"\)$", BATCH.read_text(), re.MULTILINE)
    assert array
    words = [word.partition("=") for word in shlex.split(array[1])]
    values = {name: value.replace("${address##*:}", "7700").replace("$here", "2") for name, _, value in words}
    chosen = experiment.load("impala_pong", parse_overrides([f"{a}={b}" for a, b in values.items()]))
    assert (chosen.engine, chosen.network.here, chosen.network.listen) == ("cluster", 2, "0.0.0.0:7700")


def test_manifests_fit_together() -> None:
    kinds = {document["kind"]: document for document in documents(CLUSTER)}
    service, head, node = kinds["Service"], kinds["Job"]["spec"]["template"], kinds["StatefulSet"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= node["metadata"]["labels"].items()
    (holder,), (joiner,) = (pod["spec"]["containers"] for pod in (head, node))
    port = service["spec"]["ports"][0]["port"]
    assert f"{service['metadata']['name']}:{port}" in joiner["args"]
    assert f"network.listen=0.0.0.0:{port}" in holder["args"]
    for container in (holder, joiner):
        assert f":{port:X} " in container["readinessProbe"]["exec"]["command"][2]
    assert head["spec"]["terminationGracePeriodSeconds"] >= 2 * 30  # twice what a checkpoint may take
    claims = {kinds["PersistentVolumeClaim"]["metadata"]["name"]}
    for pod in (head, documents(RAY)[0]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]):
        assert {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        } == claims
    ray = documents(RAY)[0]["spec"]
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert ray["rayClusterSpec"]["rayVersion"] == pinned[1]
    assert f"cat {shlex.split(ray['entrypoint'])[2]}/.lock" in RAY.read_text()


def test_the_image_is_built_from_what_is_there() -> None:
    text = (DEPLOY / "containers" / "Dockerfile").read_text()
    ignored = (DEPLOY / "containers" / "Dockerfile.dockerignore").read_text().split()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)
    assert "://" not in text  # nothing but the base image and the package index of whoever builds it
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert extras
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))


def test_manifests_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents(CLUSTER):
        validate.validate(document, "1.31", strict=True)
    cluster = documents(RAY)[0]["spec"]["rayClusterSpec"]  # of which the pods have a schema that is known
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        validate.validate(pod, "1.31", strict=True)


# What follows runs the recipes.


@pytest.fixture
def shoal(tmp_path: Path) -> Path:
    """The command `shoal`, as a script."""
    program = tmp_path / "shoal"
    words = shlex.join([sys.executable, "-c", "from shoal.cli.main import main; main()"])
    program.write_text(f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\nexec {words} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.long
def test_secrets_hold_what_head_and_nodes_need(shoal: Path, tmp_path: Path) -> None:
    from shoal.transport.trust import Terms

    words = ["bash", str(DEPLOY / "kubernetes" / "secrets.sh")]
    environment = {**os.environ, "SHOAL": str(shoal), "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    parts = {secret["metadata"]["name"]: secret["data"] for secret in yaml.safe_load_all(done.stdout)}
    mounted = [volume["secret"]["secretName"] for volume in listed(documents(CLUSTER), "volumes") if "secret" in volume]
    assert sorted(parts) == sorted(mounted)
    for name, data in parts.items():
        assert {*data} == {"ca.pem", "node.key", "node.pem", "token"}  # and no ca.key
        (tmp_path / name).mkdir()
        for file, content in data.items():
            (tmp_path / name / file).write_bytes(base64.b64decode(content))
        Terms("here", str(tmp_path / name)).check("0.0.0.0:7700")
    assert parts["shoal-trust-head"]["token"] == parts["shoal-trust-nodes"]["token"]
    assert not [*tmp_path.glob("tmp.*")]


SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
count = next(int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
while words[0].startswith("--"):
    words.pop(0)
step = len([name for name in os.listdir(os.environ["STEPS"]) if name.startswith("step-")])
children = [subprocess.Popen(words, env={{**os.environ, "SLURM_PROCID": str(rank)}}) for rank in range(count)]
with open(os.path.join(os.environ["STEPS"], f"step-{{step}}"), "x") as file:
    file.write(" ".join(str(child.pid) for child in children))
sys.exit(max(child.wait() for child in children))
"""
SLURM = {
    "srun": SRUN,
    "scontrol": '#!/bin/sh\ncase $1 in show) printf "one\\ntwo\\nthree\\n";; *) echo "$@" >> $STEPS/asked;; esac\n',
    "squeue": '#!/bin/sh\ncase "$*" in *--steps*) ls $STEPS | grep step-0;; *) echo RUNNING;; esac\nexit 0\n',
    "scancel": "#!/bin/sh\nkill -TERM $(cat $STEPS/step-${2##*.})\n",
}


class Slurm:
    """A stand-in for Slurm: steps are processes of this machine, as many as there would be machines."""

    def __init__(self, folder: Path, start: Any, shoal: Path) -> None:
        """Put its commands into a folder."""
        self.folder, self.start, self.shoal = folder, start, shoal
        (folder / "bin").mkdir()
        for name, text in SLURM.items():
            (folder / "bin" / name).write_text(text.format(python=sys.executable) if name == "srun" else text)
            (folder / "bin" / name).chmod(0o755)

    def submit(self, job: int, *settings: str) -> subprocess.Popen[str]:
        """Run the batch script, as Slurm does on the first machine of the job."""
        self.steps = self.folder / f"steps-{job}"
        self.steps.mkdir()
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STEPS": str(self.steps),
            "SHOAL": str(self.shoal),
            "CONFIG": str(ROOT / "configs" / "impala_cartpole.yaml"),
            "RUN": str(self.folder / "run"),
            "HEAD_ADDRESS": "localhost",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "machines",
            "SLURM_CPUS_PER_TASK": "1",
        }
        words = ["bash", BATCH, "actors=2", "envs=2", "threads=1", "evaluation.target=null", *settings]
        return self.start(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # type: ignore[no-any-return]

    def end(self, job: subprocess.Popen[str]) -> str:
        """Wait for a script, and end what is left of its job, as Slurm does; returns the rest of the output."""
        job.wait(seconds(100))
        for pid in (self.steps / "step-1").read_text().split():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                os.kill(int(pid), signal.SIGTERM)
                psutil.Process(int(pid)).wait(seconds(20))
        assert job.stdout is not None
        return job.stdout.read()


@pytest.mark.long
def test_the_slurm_script_trains_stops_in_time_and_resumes(start: Any, shoal: Path, tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, start, shoal)
    job = slurm.submit(os.getpid(), "steps=10_000_000", "log_every=0.5")
    lines: list[str] = []
    for line in job.stdout or ():
        lines.append(line)
        if "lag" in line:
            job.send_signal(signal.SIGUSR1)  # time is nearly up
            break
    told = "".join(lines) + slurm.end(job)
    assert job.returncode == 0, told
    assert "connected with 1 slots" in told
    assert "SIGTERM: saving a checkpoint" in told
    assert (slurm.steps / "asked").read_text().split() == ["requeue", str(os.getpid())]
    assert not [*tmp_path.glob("run.trust*")]
    reached = int(checkpoint.paths(tmp_path / "run")[-1].name.removeprefix(checkpoint.PREFIX))
    job = slurm.submit(os.getpid() + 1, f"steps={reached + 2000}")
    told = slurm.end(job)
    assert job.returncode == 0, told
    assert f"resuming at step {reached:,}" in told
    assert not (slurm.steps / "asked").exists()  # it is done
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "steps"


@pytest.mark.long
def test_the_head_of_a_container_says_whether_to_start_it_again(start: Any, shoal: Path, tmp_path: Path) -> None:
    words = ["sh", DEPLOY / "containers" / "head.sh", ROOT / "configs" / "impala_cartpole.yaml", tmp_path / "run"]
    settings = ["engine=inline", "actors=1", "envs=2", "evaluation.target=null", "log_every=0.5"]
    options = {"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "SHOAL": str(shoal)}}
    head = start([*words, *settings, "steps=10_000_000"], **options)
    for line in head.stderr:
        if "lag" in line:
            head.send_signal(signal.SIGTERM)
            break
    _, told = head.communicate()
    assert head.returncode == 75, told
    reached = int(checkpoint.paths(tmp_path / "run")[-1].name.removeprefix(checkpoint.PREFIX))
    head = start([*words, *settings, f"steps={reached + 2000}"], **options)
    _, told = head.communicate()
    assert head.returncode == 0, told
    assert f"resuming at step {reached:,}" in told


@pytest.mark.long
def test_a_sigterm_to_every_process_saves_the_replay_and_the_run_resumes_with_it(command: Any, tmp_path: Path) -> None:
    settings = ["engine=processes", "actors=2", "steps=10_000_000", "evaluation.target=null", "log_every=0.2"]
    replay = ["algorithm.replay.save=true", "algorithm.replay.capacity=2000"]  # which is full, and overwritten, soon
    process = command(
        "train", ROOT / "configs" / "dqn_cartpole.yaml", "--run-dir", tmp_path / "run", *settings, *replay
    )
    for line in process.stderr:
        if (found := re.search(r"step ([\d,]+) ", line)) and int(found[1].replace(",", "")) > 3000:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    for member in (*family, process):  # as Slurm and systemd do it
        member.send_signal(signal.SIGTERM)
    _, told = process.communicate()
    assert process.returncode == 0, told
    assert "was killed by" not in told
    assert time.monotonic() - began < seconds(30)
    newest = checkpoint.paths(tmp_path / "run")[-1]
    store, steps = checkpoint.read(newest)["store"], checkpoint.read_state(newest)["steps"]
    assert store["counts"][1] == 2000
    assert steps > 3000
    process = command("resume", tmp_path / "run", f"steps={steps + 1000}", "evaluation.target=null")
    _, told = process.communicate()
    assert process.returncode == 0, told
    assert f"resuming at step {steps:,}" in told
